"""Recipes by name: each is found in the package, also under its old path, and unknown names are refused with a hint."""

import pathlib
import tomllib

import pytest
import setuptools
from support.command_line import run_command
from support.refusal import check_refusal, refused

from jaxrl_llm.config import freeze
from jaxrl_llm.questions import tasks
from jaxrl_llm.recipes import dapo, step_coder
from jaxrl_llm.runtime.package_files import PACKAGE, config_file, data_file, recipe_file, recipe_names

REPOSITORY = pathlib.Path(__file__).parents[2]


def test_a_recipe_is_found_by_its_name():
    assert "dapo" in recipe_names() and "__init__" not in recipe_names()
    assert config_file("recipe:dapo") == str(recipe_file("dapo")) == dapo.__file__
    assert config_file("mine.py") == "mine.py"


@pytest.mark.parametrize("text", ["recipe:dapoo", "configs/recipes/dapoo.py"])
def test_an_unknown_recipe_is_refused_and_similar_names_are_shown(text):
    with refused("--config", "recipe:dapoo", "recipe:dapo,"):
        config_file(text)


@pytest.mark.parametrize("text", ["recipe:", "recipe:../dapo", "recipe:__init__"])
def test_what_is_no_name_of_a_recipe_is_refused(text):
    with refused("--config", text):
        config_file(text)


def test_the_old_path_of_a_recipe_is_accepted_with_a_note(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_file("configs/recipes/dapo.py") == dapo.__file__
    note = capsys.readouterr().err
    assert note.count("\n") == 1 and "--config=recipe:dapo" in note
    own = tmp_path / "configs" / "recipes" / "dapo.py"
    own.parent.mkdir(parents=True)
    own.touch()
    assert config_file("configs/recipes/dapo.py") == "configs/recipes/dapo.py"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("words", [["--config=recipe:dapo"], ["--config", "recipe:dapo"], ["-config=recipe:dapo"]])
def test_train_takes_a_recipe_by_name(words, tmp_path, monkeypatch, capfd):
    given = []
    monkeypatch.setattr("jaxrl_llm.commands.train.train", lambda config, *_, **__: given.append(config) or 0)
    overrides = ["--config.seed=3", f"--workdir={tmp_path}"]
    done = run_command("train", *words, *overrides, monkeypatch=monkeypatch, capfd=capfd)
    expected = dapo.get_config()
    expected.seed = 3
    assert done.status == 0 and given == [freeze(expected)]


@pytest.mark.parametrize("command", ["train", "evaluate", "sft", "plan", "sweep"])
def test_every_command_refuses_an_unknown_recipe(command, tmp_path, monkeypatch, capfd):
    others = {"evaluate": [], "sft": ["--out=x"], "plan": ["--topology=v5e:2x4"]}.get(command, ["--workdir=x"])
    monkeypatch.chdir(tmp_path)
    done = run_command(command, "--config=recipe:grppo", *others, monkeypatch=monkeypatch, capfd=capfd)
    assert done.status == 2
    check_refusal(done.err, "--config", "recipe:grppo", "recipe:grpo")


def test_data_of_a_recipe_is_found_from_any_folder_and_under_its_old_name(tmp_path, monkeypatch):
    config = freeze(step_coder.get_config()).prompts
    there = [example.prompt for example in tasks.load(config, seed=0).examples]
    monkeypatch.chdir(tmp_path)
    assert [example.prompt for example in tasks.load(config, seed=0).examples] == there
    assert data_file("mine.jsonl") == pathlib.Path("mine.jsonl")
    assert freeze({"prompts": {"name": "configs/programs.jsonl", "source": "code"}}).prompts.name == config.name
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "programs.jsonl").touch()
    own = freeze({"prompts": {"name": "configs/programs.jsonl", "source": "code"}}).prompts.name
    assert data_file(own) == pathlib.Path("configs/programs.jsonl")


def test_a_wheel_has_the_recipes_and_their_data():
    """This tests the two tables in pyproject.toml that decide the content of a wheel. Building one needs a network."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = setuptools.find_packages(str(REPOSITORY), include=settings["packages"]["find"]["include"])
    assert {"jaxrl_llm.recipes", "jaxrl_llm.examples", "jaxrl_llm.commands", "jaxrl_llm.settings"} < {*packages}
    patterns = settings["package-data"]["jaxrl_llm"]
    data = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert data >= others >= {PACKAGE / "recipes" / "programs.jsonl"}
