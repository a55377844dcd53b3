"""Run the command ``replay_plan``: ``python -m jaxrl_llm.replay_plan --help``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.commands.replay_plan", run_name="__main__", alter_sys=True)
