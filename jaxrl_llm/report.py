"""Run the command ``report``: ``python -m jaxrl_llm.report --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.report import start

    start()
