"""Run the command ``sft``: ``python -m jaxrl_llm.sft --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.sft", run_name="__main__", alter_sys=True)
