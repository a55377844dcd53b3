"""Run the command ``export``: ``python -m jaxrl_llm.export --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.export", run_name="__main__", alter_sys=True)
