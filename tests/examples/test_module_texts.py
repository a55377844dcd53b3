"""The command in each example's docstring gives a valid config."""

import ast
import pathlib
import runpy
import shlex

import pytest

from jaxrl_llm import examples
from jaxrl_llm.config import freeze
from jaxrl_llm.runtime import cli, package_files
from jaxrl_llm.settings.schema import Text, override

FOLDER = pathlib.Path(examples.__file__).parent
REPOSITORY = FOLDER.parents[1]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("[!_]*.py")))
def test_the_command_of_an_example_is_a_config(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())).replace("\\\n", " ")
    commands = [line.strip() for line in text.splitlines() if line.strip().startswith("python -m jaxrl_llm.train")]
    assert commands and "This example shows" in text
    assert f"    {name} " in examples.__doc__
    for command in commands:
        words, overrides = cli.apart(shlex.split(command))
        path = next(word.removeprefix("--config=") for word in words if word.startswith("--config="))
        settings = runpy.run_path(package_files.config_file(path))["get_config"]().to_dict()
        for field, value in sorted(overrides, key=lambda pair: pair[0].count(".")):
            settings = override(settings, field, Text(value.replace("mine.py:", "jaxrl_llm.examples.maze:")))
        freeze(settings)
