"""Run the command ``sweep``: ``python -m jaxrl_llm.sweep --help``.

Sweep files of earlier versions import ``jaxrl_llm.sweep.points``. With the empty path the import system searches for
it, and ``settings.moved`` finds it.
"""

__path__: list[str] = []

if __name__ == "__main__":
    from jaxrl_llm.commands.sweep import start

    start()
