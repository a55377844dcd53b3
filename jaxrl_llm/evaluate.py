"""Run the command ``evaluate``: ``python -m jaxrl_llm.evaluate --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.evaluate import start

    start()
