"""Run the command ``train``: ``python -m jaxrl_llm.train --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.train", run_name="__main__", alter_sys=True)
