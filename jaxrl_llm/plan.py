"""Run the command ``plan``: ``python -m jaxrl_llm.plan --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.plan", run_name="__main__", alter_sys=True)
