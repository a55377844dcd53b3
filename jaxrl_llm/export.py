"""Run the command ``export``: ``python -m jaxrl_llm.export --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.export import start

    start()
