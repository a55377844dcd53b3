"""The pages: their files are written, their commands are run in one folder, and what they name exists.

The commands of ``bash`` blocks run in the order of ``PAGES``, with these exceptions, which make minutes of hours:
  - ``train`` and ``sweep`` get ``TINY`` instead of the same settings: two iterations of the tiny random model;
  - ``train`` makes no evaluation, and ``sweep`` has one learning rate instead of two;
  - ``sft`` takes two steps;
  - ``--model=smollm2-135m-instruct`` becomes the tiny random model;
  - ``plan`` leaves out the evaluation's programs;
  - ``launch/{setup,local,test}.sh`` are not run: ``test_launch`` runs them, with stand-ins for pip and Python.
Commands of ``shell`` blocks need files, a model or hardware of the reader. Their flags are checked, and the settings of
``train`` and ``sft`` must be a config. Commands of ``MEASURED`` take hours or another machine: their names must exist.
"""

import ast
import dataclasses
import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from support.building import ONE, mesh_of
from support.command_line import run_command

from docs import write_reference
from docs.write_reference import commands as command_modules
from docs.write_reference import flags_of
from jaxrl_llm.config import AlgorithmConfig, Config, ReplayConfig, flatten, freeze
from jaxrl_llm.reports.metrics import METRICS
from jaxrl_llm.runtime import cli, package_files, sharding
from jaxrl_llm.settings.schema import Text, override
from jaxrl_llm.settings.use import keywords
from jaxrl_llm.sweeps import points
from jaxrl_llm.sweeps.table import Run

REPOSITORY = pathlib.Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
GENERATED = tuple(f"docs/reference/{name}.md" for name in ("settings", "metrics", "recipes", "commands"))
# tests/launch/test_tpu_page.py runs the commands, with stand-ins for the programs of clusters.
# The commands of docs/testing.md are the tests themselves.
TYPED_ELSEWHERE = ("docs/how-to/run_on_a_tpu_pod.md", "docs/testing.md")
MEASURED = ("BENCHMARKS.md", "studies/replay_study.md")
# Pages about the past: the names in them may be gone.
DATED = ("studies/log.md", "CHANGELOG.md")


def reading_order():
    """Return the pages whose commands are run, in order: later commands read the files of earlier ones."""
    folders = ("tutorials", "how-to", "reference", "explanation")
    found = [path for folder in folders for path in sorted((REPOSITORY / "docs" / folder).glob("*.md"))]
    names = ["README.md", *(path.relative_to(REPOSITORY).as_posix() for path in found)]
    return tuple(name for name in names if name not in TYPED_ELSEWHERE)


PAGES = (*reading_order(), "docs/index.md", "CONTRIBUTING.md")
TEXTS = {name: (REPOSITORY / name).read_text() for name in (*PAGES, *TYPED_ELSEWHERE, *MEASURED, *DATED)}
TODAY = "\n".join(TEXTS[name] for name in PAGES + TYPED_ELSEWHERE + MEASURED)

GROUPS = "|".join(rf"{field.name}\." for field in dataclasses.fields(Config))

TINY = [
    "--config.num_iterations=2",
    "--config.model.path=random:debug",
    "--config.prompts.size=16",
    "--config.prompts.max_tokens=96",
    "--config.sampling.max_completion_tokens=4",
    "--config.rollout.prompts_per_iteration=2",
    "--config.rollout.group_size=2",
    "--config.rollout.slots=4",
    "--config.rollout.chunk_steps=4",
    "--config.replay.capacity=4",
    "--config.update.batch_size=4",
    "--config.update.micro_batch_size=4",
    "--config.update.micro_batch_tokens=0",
    "--config.update.pack_width=0",
    "--config.eval.num_prompts=2",
    # From here on so that all the runs have the same programs, which are then compiled once.
    "--config.eval.num_samples=1",
    "--config.replay.unit=rollout",
    "--config.replay.skip_tied=False",
    "--config.replay.max_age_steps=0",
    "--config.update.updates_per_iteration=1",
    "--config.algorithm.surrogate.high=0.2",
    "--config.optimizer.learning_rate=1e-3",
]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def lines(block):
    """Return the lines of a text. A backslash at the end continues a line."""
    return [line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def in_blocks(language):
    """Return every different line of the blocks of a language in ``PAGES``."""
    found = [line for name in PAGES for block in blocks(TEXTS[name], language) for line in lines(block)]
    return list(dict.fromkeys(found))


def commands():
    """Return the commands that are run."""
    return in_blocks("bash")


def measured():
    """Return the commands of the other pages, in blocks or indented, and of all pages in backquotes."""
    found = [line for name in MEASURED for block in blocks(TEXTS[name], "") for line in lines(block)]
    indented = [re.findall(r"(?:^    .*\n)+", TEXTS[name], re.MULTILINE) for name in PAGES + MEASURED]
    found += [line for texts in indented for block in texts for line in lines(block)]
    found += re.findall(r"`((?:python -m|bash) [^`]+)`", TODAY)
    return [command for command in found if re.match(r"(python|bash) ", command)]


def files():
    """Return {name: text} of the blocks after a file name in backquotes and a colon."""
    pattern = r"`([\w.]+)`:\n\n```\w+\n(.*?)^```$"
    found = [file for name in PAGES for file in re.findall(pattern, TEXTS[name], re.DOTALL | re.MULTILINE)]
    for name, text in found:
        assert text == dict(found)[name], f"two pages show {name} differently"
    return dict(found)


def shortened(command):
    """Return the command that is run for a command of a page; "" for none."""
    if re.match(r"source |bash launch/(setup|local|test)\.sh", command):
        return ""
    command = command.replace("=smollm2-135m-instruct", "=random:debug")
    given = shlex.split(command)
    if given[:3] in (["python", "-m", "jaxrl_llm.train"], ["python", "-m", "jaxrl_llm.sweep"]):
        given = [word.replace("configs/sweeps/debug.py", "short_sweep.py") for word in given]
        # ml_collections takes no setting twice.
        own = "algorithm.surrogate=" in command  # another loss has other settings
        tiny = [word for word in TINY if not (own and "surrogate" in word)]
        if given[2] == "jaxrl_llm.train":
            tiny = [word.replace("eval.num_prompts=2", "eval.num_prompts=0") for word in tiny]
        else:  # whose points set it
            tiny = [word for word in tiny if "learning_rate" not in word]
        names = {word.partition("=")[0] for word in tiny}
        return shlex.join([*(word for word in given if word.partition("=")[0] not in names), *tiny])
    more = {"jaxrl_llm.plan": " --config.eval.num_prompts=0", "jaxrl_llm.sft": " --config.num_iterations=2"}
    return command + more.get(given[2], "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return an empty folder for the commands of the pages.

    It has the repository's configs and scripts, the README's files, and this Python as ``python``.
    """
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "launch", "docs"):
        (folder / name).symlink_to(REPOSITORY / name)
    for name, text in files().items():
        (folder / name).write_text(text)
    sweep = (REPOSITORY / "configs/sweeps/debug.py").read_text()
    (folder / "short_sweep.py").write_text(sweep.replace("[3e-3, 1e-2]", "[1e-3]"))
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin/python").chmod(0o755)
    return folder


def run(command, folder):
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_pages_show_files_and_commands():
    shown = {
        "questions.jsonl",
        "rewards.py",
        "methods.py",
        "mine.py",
        "penalties.py",
        "scores.py",
        "game.py",
        "agent.py",
    }
    assert set(files()) == shown | {"tasks.jsonl"}
    assert len([line for block in blocks(README, "bash") for line in lines(block)]) >= 4
    assert len(commands()) >= 18 and len(in_blocks("shell")) >= 10 and len(measured()) >= 20


def test_every_page_is_one_of_these():
    found = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("studies/*.md")]
    assert {path.relative_to(REPOSITORY).as_posix() for path in found} == set(TEXTS)


@pytest.mark.parametrize("name", PAGES)
def test_python_that_is_shown_is_python(name):
    for block in blocks(TEXTS[name], "python"):
        ast.parse(block)


def anchors(text):
    """Return the anchors of the headings, as web pages name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", TEXTS[name])
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (REPOSITORY / name).parent / path if path else REPOSITORY / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_scripts_that_are_named_exist():
    pattern = r"launch/\w+\.(?:sh|py)|jaxrl_llm/[\w/]+\.py|configs/[\w/]+\.py|studies/data/[\w.]+"
    for path in re.findall(pattern, TODAY):
        assert (REPOSITORY / path).exists(), path


def test_programs_that_are_named_exist():
    for command in measured() + commands():
        words = shlex.split(command)
        if words[0] == "bash":
            assert (REPOSITORY / words[1]).exists(), command
        if words[:2] == ["python", "-m"] and "NAME" not in words[2]:
            assert importlib.util.find_spec(words[2]), command


def test_modules_of_the_reference_exist():
    """The site needs their docstrings. Here it is enough that the modules exist."""
    names = re.findall(r"^::: (\S+)$", TEXTS["docs/reference/api.md"], re.MULTILINE)
    assert len(names) >= 8
    for name in names:
        assert importlib.util.find_spec(name), name


def test_flags_that_are_shown_exist():
    """Shown flags are flags of a command module, settings of its config, or flags of every absl program."""
    known = {name: {flag.name for flag in flags_of(module)} for name, module in command_modules().items()}
    for command in commands() + in_blocks("shell") + measured():
        words = shlex.split(command, comments=True)
        if "-m" not in words or not words[words.index("-m") + 1].startswith("jaxrl_llm."):
            continue
        name = words[words.index("-m") + 1].removeprefix("jaxrl_llm.")
        for word in words:
            flag = word.partition("=")[0].removeprefix("--")
            if word.startswith("--") and not flag.startswith("config."):
                assert flag.removeprefix("no") in known[name] or flag in known[name], command


def test_results_that_are_named_exist():
    """Only the names of the result files are checked, with the commands that write them."""
    for name in re.findall(r"(\d{4}-\d\d-\d\d_[\w.]+\.json)\b", TODAY):
        assert (REPOSITORY / "benchmarks" / "baselines" / name).exists(), name


def test_settings_that_are_named_exist():
    known = {*flatten(Config()), "algorithm.critic"}
    for group, settings in (("algorithm", AlgorithmConfig), ("replay", ReplayConfig)):
        for field in dataclasses.fields(settings):
            slot = field.metadata.get("slot")
            for name, function in slot.table.items() if slot else ():
                place = f"{group}.{field.name}.{name}" if slot.several else f"{group}.{field.name}"
                known |= {f"{place}.{keyword}" for keyword in keywords(function)}
    own = [keyword for text in files().values() for keyword in re.findall(r"\*, (\w+): ", text)]
    known |= {f"algorithm.surrogate.{keyword}" for keyword in own}
    named = {word[9:].partition("=")[0] for word in re.findall(r"--config\.[\w.]+=", TODAY)}
    quoted = [name for name in re.findall(r"`(\w+\.\w+)(?:=\w+)?`", TODAY) if re.match(GROUPS, name)]
    named |= {name for name in quoted if not name.endswith((".py", ".jsonl"))}
    assert len(named) >= 15 and named <= known, named - known


def test_defaults_that_are_named_are_those():
    defaults = flatten(Config())
    named = [found for name in PAGES for found in re.findall(r"`(\w+(?:\.\w+)+)` \(([\d.]+)\b", TEXTS[name])]
    wrong = [(name, value) for name, value in named if name in defaults and defaults[name] != float(value)]
    assert len(named) >= 12 and not wrong


def frozen(command):
    """Return the config of a command, from its file and its overrides."""
    rest, overrides = cli.apart(shlex.split(command, comments=True))
    path = next(word.removeprefix("--config=") for word in rest if word.startswith("--config="))
    settings = runpy.run_path(package_files.config_file(path))["get_config"]().to_dict()
    for name, value in sorted(overrides, key=lambda given: given[0].count(".")):
        settings = override(settings, name, Text(value))
    return freeze(settings)


def test_settings_that_are_shown_are_a_config(folder, monkeypatch):
    monkeypatch.chdir(folder)
    pages = in_blocks("shell")
    shown = [command for command in pages + commands() if re.search(r"jaxrl_llm\.(train|sft) ", command)]
    configs = [frozen(command) for command in shown]
    # SmolLM2 says little in the 16 tokens of the default.
    lengths = [c.sampling.max_completion_tokens for c in configs if c.model.path == "smollm2-135m-instruct"]
    assert len(pages) >= 3 and len(lengths) >= 7 and min(lengths) > 16


def test_commands_of_methods_by_turn_keep_nothing_of_the_maze(folder, monkeypatch):
    monkeypatch.chdir(folder)
    maze, defaults = flatten(frozen("--config=configs/maze.py")), flatten(Config())
    of_maze = {name for name in maze if maze[name] != defaults[name]}
    pages = ("docs/how-to/write_an_environment.md", "docs/how-to/train_on_programs.md")
    shown = [flatten(frozen(line)) for name in pages for block in blocks(TEXTS[name], "shell") for line in lines(block)]
    assert len(shown) == 2 and {"sampling.stop_tokens", "prompts.arguments"} < of_maze
    for settings in shown:
        assert not {name for name in of_maze if settings[name] == maze[name]}
    shown_recipes = re.findall(r"^\| `(\w+)` .*prompts\.source=maze", TEXTS["docs/reference/recipes.md"], re.MULTILINE)
    recipes = {path.stem: path.read_text() for path in REPOSITORY.glob("jaxrl_llm/recipes/[!_]*.py")}
    assert {*shown_recipes} == {name for name, text in recipes.items() if "maze.get_config()" in text}


def test_metrics_that_are_named_exist():
    stages = "rollout|update|replay|reward|time|tokens|throughput|memory|compile|eval"
    named = set(re.findall(rf"`((?:{stages})/\w+)`", TODAY))
    assert len(named) >= 10 and named <= set(METRICS)


def test_generated_pages_are_current():
    """``python -m docs.write_reference`` writes these pages."""
    pages = write_reference.pages()
    assert {f"docs/reference/{name}" for name in pages} == set(GENERATED)
    stale = [name for name, text in pages.items() if text != TEXTS[f"docs/reference/{name}"]]
    assert not stale, f"run python -m docs.write_reference: {stale}"
    assert pages["recipes.md"].count("\n") > 100


@pytest.mark.tier("extras")
def test_the_site_builds_without_a_broken_link(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs (extra [docs]) is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path / 'site'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What other tests run as well (test_plan, test_sweep, system) is slow here; nothing later reads what it writes.
SLOW = ("jaxrl_llm.plan ", "jaxrl_llm.sweep ", "jaxrl_llm.sft ", "--config=mine.py ", "runs/capitals", "runs/loop")
SLOW += ("jaxrl_llm.replay_plan --mu", "runs/adapters", "jaxrl_llm.generate ", "jaxrl_llm.score ")
SLOW += ("runs/own ",)  # the last as it stands, by test_own_functions


def marked(index, command):
    return pytest.param(index, id=command, marks=[pytest.mark.slow] if any(name in command for name in SLOW) else [])


@pytest.fixture
def run_here(folder, monkeypatch, capfd):
    """Run a command of the package in this process on one device: a Python of its own takes longer to start."""

    def call(command):
        monkeypatch.chdir(folder)
        one = mesh_of(ONE)
        monkeypatch.setattr(sharding, "make_mesh", lambda *_: one)
        words = shlex.split(command, comments=True)
        name = words[2].removeprefix("jaxrl_llm.")
        return run_command(name, *words[3:], monkeypatch=monkeypatch, capfd=capfd)

    return call


@pytest.mark.parametrize("index", [marked(i, command) for i, command in enumerate(commands())])
def test_command_runs(index, folder, run_here, request):
    """In the order of the pages: later commands read the files of earlier ones."""
    command = shortened(commands()[index])
    if not command:
        return
    if command.startswith("python -m jaxrl_llm.") and not request.node.get_closest_marker("slow"):
        done = run_here(command)
        assert done.status == 0, f"{command}\n{done.out}\n{done.err}"
        assert str(folder) not in done.out  # paths are shown as they were given
        return
    if "jaxrl_llm.plan" in command and importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler libtpu (extra [plan]) is not installed")
    if "reasoning_gym" in command and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning_gym (extra [reasoning]) is not installed")
    done = run(command, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert str(folder) not in done.stdout  # paths are shown as they were given


def test_the_page_of_commands_has_every_command():
    runners = [path for path in REPOSITORY.glob("jaxrl_llm/*.py") if "import start" in path.read_text()]
    runners += [
        path.parent for path in REPOSITORY.glob("jaxrl_llm/*/__main__.py") if "import start" in path.read_text()
    ]
    headings = set(re.findall(r"^## (\w+)$", TEXTS["docs/reference/commands.md"], re.MULTILINE))
    assert len(runners) >= 12 and {path.stem for path in runners} == headings


def test_the_readme_counts_the_recipes():
    count = len(list(REPOSITORY.glob("jaxrl_llm/recipes/[!_]*.py")))
    said = " ".join(README.split())
    assert f"has {count} published methods" in said and f"GRPO and {count - 1} other methods" in said


def test_the_sweep_that_is_shown_is_the_shipped_one():
    shown, tuned = blocks(TEXTS["docs/how-to/run_a_sweep.md"], "python")
    assert shown in (REPOSITORY / "configs/sweeps/debug.py").read_text()
    names = vars(points) | {"ARMS": [{"replay.capacity": 64}, {"replay.capacity": 128}]}
    exec(tuned, names)
    sweep = names["get_sweep"]()
    runs = [Run("", p, "finished", [{"iteration": 1, "eval/pass_rate": p[names["RATE"]]}]) for p in sweep.points]
    assert len(runs) == 12 and {p[names["RATE"]] for p in sweep.then(runs)} == {8e-4} and len(sweep.then(runs)) == 8


def test_the_reward_of_the_readme_scores_as_it_says(folder):
    spec = importlib.util.spec_from_file_location("readme_rewards", folder / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = ["Paris.", "It is Paris", "Rome"]
    assert module.reward([""] * 3, texts, ["Paris"] * 3) == [1.0, 0.5, 0.0]
