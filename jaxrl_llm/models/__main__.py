"""Run the command ``models``: ``python -m jaxrl_llm.models --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.models import start

    start()
