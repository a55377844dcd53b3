"""Prints the README's table of recipes: what each sets that is not a default, and where it comes from.

    python launch/recipes.py

Owns: the table's form. Does not know: what the settings mean.
"""

import importlib.util
import pathlib
import re

from jaxrl_llm.config import Config, freeze
from jaxrl_llm.runtime.nested import differences

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs" / "recipes"


def row(path: pathlib.Path) -> str:
    """The table's line of one recipe; its docstring has the method's name first and ends with "Source: ..."."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = re.search(r"^Source: (.*?)\.?\Z", module.__doc__.strip(), re.DOTALL | re.MULTILINE)
    changed = differences(Config(), freeze(module.get_config()))
    settings = ", ".join(f"`{name}={value}`" for name, (_, value) in changed.items())
    return f"| `{path.stem}` | {settings} | {' '.join(source[1].split())} |"


def table() -> str:
    rows = [row(path) for path in sorted(FOLDER.glob("*.py"))]
    return "\n".join(["| recipe | composition: what is not a default | source |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
