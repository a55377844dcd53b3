"""Run the command ``generate``: ``python -m jaxrl_llm.generate --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.generate import start

    start()
