"""Run the command ``report``: ``python -m jaxrl_llm.report --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.report", run_name="__main__", alter_sys=True)
