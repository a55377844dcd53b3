"""Run the command ``serve``: ``python -m jaxrl_llm.serve --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.serve", run_name="__main__", alter_sys=True)
