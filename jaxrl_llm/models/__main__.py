"""Run the command ``models``: ``python -m jaxrl_llm.models --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.models", run_name="__main__", alter_sys=True)
