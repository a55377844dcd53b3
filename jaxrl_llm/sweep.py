"""Run the command ``sweep``: ``python -m jaxrl_llm.sweep --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.sweep import start

    start()
