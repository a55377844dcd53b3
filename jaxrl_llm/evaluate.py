"""Run the command ``evaluate``: ``python -m jaxrl_llm.evaluate --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.evaluate", run_name="__main__", alter_sys=True)
