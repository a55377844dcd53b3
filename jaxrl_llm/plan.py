"""Run the command ``plan``: ``python -m jaxrl_llm.plan --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.plan import start

    start()
