"""Run the command ``score``: ``python -m jaxrl_llm.score --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.score import start

    start()
