"""Data files in the package: recipes, which ``--config=recipe:NAME`` names, and the data of recipes.

Owns: where these files are, and their names before they moved into the package. Does not know: their content.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

from jaxrl_llm.settings.schema import ConfigError, near

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
RECIPES = PACKAGE / "recipes"
RECIPE = "recipe:"  # prefix of a recipe's name on the command line


def recipe_names() -> list[str]:
    """Return the names of the recipes in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("[!_]*.py"))


def recipe_file(name: str) -> pathlib.Path:
    """Return the file of the recipe ``name``.

    Raises:
        ConfigError: there is no recipe of this name.
    """
    names = recipe_names()
    if name not in names:
        raise ConfigError(f"--config={RECIPE + name!r} must be the name of a recipe: {near(name, names, RECIPE)}")
    return RECIPES / f"{name}.py"


def config_file(text: str) -> str:
    """Return the path of the file that ``--config=text`` names.

    ``recipe:NAME`` is a file of the package. ``configs/recipes/NAME.py`` was the place of a recipe in earlier versions.
    It is also replaced by the file of the package, unless the user has a file of this name. Any other text is returned
    unchanged.

    Raises:
        ConfigError: there is no recipe of this name.
    """
    if text.startswith(RECIPE):
        return str(recipe_file(text.removeprefix(RECIPE)))
    old = re.fullmatch(r"(?:.*/)?configs/recipes/(\w+)\.py", text)
    if old is None or pathlib.Path(text).exists():
        return text
    path = recipe_file(old[1])
    print(f"note: --config={text} is now --config={RECIPE}{old[1]}", file=sys.stderr)
    return str(path)


def data_file(name: str) -> pathlib.Path:
    """Return the path of a data file: the user's file of this name if there is one, else the package's.

    A name of the package's file begins with ``jaxrl_llm/``, so that it is the same in every installation.
    """
    path = pathlib.Path(os.path.expanduser(name))  # ``Path.expanduser`` raises for the home of an unknown user
    shipped = PACKAGE.parent / name
    if not path.exists() and name.startswith(f"{PACKAGE.name}/") and shipped.is_file():
        return shipped
    return path
