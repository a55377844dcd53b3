"""Run the command ``sft``: ``python -m jaxrl_llm.sft --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.sft import start

    start()
