"""Run the command ``score``: ``python -m jaxrl_llm.score --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.score", run_name="__main__", alter_sys=True)
