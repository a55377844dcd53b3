"""Run the command ``train``: ``python -m jaxrl_llm.train --help``."""

if __name__ == "__main__":
    from jaxrl_llm.commands.train import start

    start()
