"""Run the command ``replay_plan``: ``python -m jaxrl_llm.replay_plan --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.replay_plan import start

    start()
