"""Prints the part of docs/methods.md that is of the recipes: what each sets that is not a default, and its source.

    python launch/recipes.py                  prints it
    python launch/recipes.py --write          puts it into docs/methods.md

Owns: the table's form. Does not know: what the settings mean.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
from typing import Any

from jaxrl_llm.config import Config, freeze
from jaxrl_llm.runtime.nested import differences

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "configs" / "recipes"
PAGE = REPOSITORY / "docs" / "methods.md"
BEGIN, END = "<!-- printed by python launch/recipes.py -->\n", "<!-- end -->"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A file of configs/recipes; its docstring has the method's name first and ends with "Source: ... Differs: ..."."""

    file: str
    method: str
    about: str
    settings: str
    source: str
    differs: str


def read(path: pathlib.Path) -> Recipe:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Joined lines of each paragraph; the second one shows the command.
    head, _, tail = module.__doc__.strip().partition("\n\n")
    tail = " ".join(line.strip() for line in tail.splitlines() if not line.startswith("    "))
    about, _, source = tail.partition("Source: ")
    source, _, differs = source.partition("Differs: ")
    changed = differences(Config(), freeze(module.get_config()), whole=True)
    settings = ", ".join(f"`{name}={shown(value)}`" for name, (_, value) in changed.items())
    return Recipe(
        path.stem, head.rstrip("."), about.strip(), settings, source.strip().rstrip("."), differs.strip().rstrip(".")
    )


def shown(value: Any) -> str:
    """A setting's value; of functions their names and what of their settings is not the default."""
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def page() -> str:
    recipes = [read(path) for path in sorted(FOLDER.glob("*.py"))]
    lines = ["| recipe | method | settings that are not the default | source |", "|---|---|---|---|"]
    lines += [f"| `{r.file}` | {r.method} | {r.settings} | {r.source} |" for r in recipes]
    lines += ["", "### What each does, and where it differs from its paper", ""]
    for recipe in recipes:
        lines.append(f"- **{recipe.method}** (`{recipe.file}`). {recipe.about}")
        lines.append(f"  - Differs: {recipe.differs}." if recipe.differs else "  - Differs: its recipe names nothing.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.relative_to(REPOSITORY)} instead")
    if not parser.parse_args().write:
        print(page(), end="")
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + page() + END + after)


if __name__ == "__main__":
    main()
