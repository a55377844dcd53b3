"""Run the command ``serve``: ``python -m jaxrl_llm.serve --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.serve import start

    start()
