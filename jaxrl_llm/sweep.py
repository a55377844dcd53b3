"""Run the command ``sweep``: ``python -m jaxrl_llm.sweep --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.sweep", run_name="__main__", alter_sys=True)
