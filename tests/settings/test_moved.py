"""Old names of modules: they can be imported and named in configs, and count as equal to the new names."""

import importlib
import importlib.util
import json
import runpy
import subprocess
import sys

import pytest

from jaxrl_llm.config import freeze, from_json, to_json
from jaxrl_llm.examples import maze
from jaxrl_llm.runtime.checkpoint_files import changed_settings
from jaxrl_llm.settings import moved
from jaxrl_llm.settings.functions import resolve
from jaxrl_llm.settings.schema import Text
from jaxrl_llm.sweeps.points import Sweep


@pytest.mark.parametrize("old", moved.MODULES)
def test_every_old_module_is_found(old):
    new = moved.MODULES[old]
    assert importlib.util.find_spec(moved.PACKAGE + new), f"{new} has moved: change the row of {old}"
    is_gone = old not in moved.MODULES.values()
    assert is_gone, f"{old} is a new name too"


@pytest.mark.parametrize("old", ["environments.maze", "questions.tasks.scores", "algorithms.views", "sweep.points"])
def test_an_old_module_is_the_new_one(old):
    new = importlib.import_module(moved.PACKAGE + moved.MODULES[old])
    name = new.__spec__.name
    assert importlib.import_module(moved.PACKAGE + old) is new
    assert new.__name__ == new.__spec__.name == name == moved.PACKAGE + moved.MODULES[old]


def test_a_config_file_may_import_old_modules(tmp_path):
    file = tmp_path / "old.py"
    file.write_text(
        "from jaxrl_llm.environments import maze\n"
        "from jaxrl_llm.algorithms.use import use\n"
        "from jaxrl_llm.questions.tasks import scores\n"
        "from jaxrl_llm.sweep.points import Sweep, grid\n"
        "from jaxrl_llm.environments.sandbox import Limits, Sandbox\n"
        "import jaxrl_llm.questions.tasks.judges\n"
        "def get_sweep():\n"
        "    return Sweep(grid({'seed': [0, 1]}))\n"
    )
    found = runpy.run_path(str(file))
    assert found["maze"] is maze and isinstance(found["get_sweep"](), Sweep)


def test_the_note_is_printed_once_for_a_module():
    code = (
        "from jaxrl_llm.questions.tasks import scores\n"
        "import jaxrl_llm.questions.tasks.scores\n"
        "from jaxrl_llm.questions.tasks.scores import format\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1
    assert "jaxrl_llm.questions.tasks.scores" in done.stderr and "jaxrl_llm.scoring.scores" in done.stderr


def test_a_module_that_was_never_there_is_not_found():
    for name in ("jaxrl_llm.environments.nothing", "jaxrl_llm.sweep.nothing", "jaxrl_llm.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_functions_are_found_by_their_old_names():
    assert resolve("jaxrl_llm.environments.maze:steps") is maze.steps


OLD = {
    "environments": {"factory": "jaxrl_llm.environments.maze:plain", "max_answer_tokens": 4},
    "rewards": {
        "functions": ["jaxrl_llm.environments.maze:steps", "jaxrl_llm.questions.tasks.scores:format"],
        "weights": [1.0, 0.5],
    },
}
NEW = {
    "environments": {"factory": "jaxrl_llm.examples.maze:plain", "max_answer_tokens": 4},
    "rewards": {
        "functions": ["jaxrl_llm.examples.maze:steps", "jaxrl_llm.scoring.scores:format"],
        "weights": [1.0, 0.5],
    },
}


def test_a_config_with_old_names_is_the_config_with_new_names():
    assert freeze(OLD) == freeze(NEW)


def test_a_text_of_the_command_line_may_have_old_names():
    text = Text('("jaxrl_llm.environments.maze:steps",)')
    settings = {**OLD, "rewards": {"functions": text}}
    assert freeze(settings).rewards.functions == ("jaxrl_llm.examples.maze:steps",)


def test_a_run_that_was_recorded_with_old_names_has_no_changed_setting():
    record = json.loads(to_json(freeze(NEW)))
    record["environments"]["factory"] = OLD["environments"]["factory"]
    record["rewards"]["functions"] = OLD["rewards"]["functions"]
    assert changed_settings(from_json(json.dumps(record)), freeze(NEW)) == {}
    record["rewards"]["functions"] = ["jaxrl_llm.environments.maze:matched"]
    assert changed_settings(from_json(json.dumps(record)), freeze(NEW)).keys() == {"rewards.functions"}


def test_other_texts_are_left_as_they_are():
    text = "Say jaxrl_llm.environments.maze, my_jaxrl_llm.environments.maze:steps or jaxrl_llm.mine:steps"
    assert moved.with_new_names({"a": [text, 1, None]}) == {"a": [text, 1, None]}
