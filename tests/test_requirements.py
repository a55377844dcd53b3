"""The packages that the two commands install: only wheels, for every Python in the README; no compiler is needed."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

REPOSITORY = pathlib.Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
SETUP, TEST = ((REPOSITORY / "launch" / name).read_text() for name in ("setup.sh", "test.sh"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

WHEELS = re.findall(r'"([^"]+)"', re.search(r"^wheels=\((.*)\)$", SETUP, re.MULTILINE)[1])
EXTRAS = re.search(r'^extras="(.*)"$', SETUP, re.MULTILINE)[1].split()
# Of the plain suite and of every tier.
OF_TESTS = [name for names in re.findall(r"extras\+?=\((.*)\)", TEST) for name in names.split()]
PYTHONS = re.search(r"On a Linux machine with Python ((?:3\.\d+(?:, | or )?)+)", README)[1]
PYTHONS = re.findall(r"3\.\d+", PYTHONS)


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_the_readme_names_the_pythons_that_are_supported():
    assert PYTHONS == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line[-1].isdigit() and "3." in line]
    assert named == PYTHONS
    assert all(f"python{version}" in SETUP for version in PYTHONS)


def test_every_package_of_reasoning_gym_has_a_wheel_or_says_which_games_want_it():
    gym = pytest.importorskip("jaxrl_llm.questions.tasks.reasoning_gym_task")
    wanted = {name_of(line) for line in importlib.metadata.requires("reasoning-gym") if "extra ==" not in line}
    installed = {name_of(line) for line in PROJECT["optional-dependencies"]["reasoning-wheels"]}
    assert wanted == installed | set(gym.SOURCE_PACKAGES) and not installed & set(gym.SOURCE_PACKAGES)
    assert "reasoning-gym" in map(name_of, WHEELS) and "reasoning" not in EXTRAS + OF_TESTS


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_a_wheel(python, tmp_path):
    extras = PROJECT["optional-dependencies"]
    requirements = PROJECT["dependencies"] + [line for name in EXTRAS + OF_TESTS for line in extras[name]]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    pip += [f"--python-version={python}", f"--target={tmp_path}"]
    for more in (requirements, ["--no-deps", *WHEELS]):
        done = subprocess.run([*pip, *more], capture_output=True, text=True, check=False)
        if "NewConnectionError" in done.stderr or "ConnectTimeoutError" in done.stderr:
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, done.stderr
