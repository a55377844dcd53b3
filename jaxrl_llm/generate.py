"""Run the command ``generate``: ``python -m jaxrl_llm.generate --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.generate", run_name="__main__", alter_sys=True)
