"""Commands: bad input is one line on stderr and exit status 2. Errors in the package keep their traceback."""

import os
import subprocess
import sys

import pytest
from support.command_line import run_command
from support.parsing import config_of
from support.refusal import check_refusal, check_words

COMMAND = """
import os, sys
from absl import flags
from ml_collections import config_flags
from jaxrl_llm.runtime import cli
from jaxrl_llm.config import ConfigError
config_flags.DEFINE_config_file("config")
NUMBER = flags.DEFINE_integer("number", 1, "A number.")

def main():
    if NUMBER.value == 2:
        raise ConfigError("a.b=2 is not\\nallowed")
    if NUMBER.value == 3:
        raise ValueError("ours")
    if NUMBER.value == 4:
        raise OSError(28, "No space left on device", "/disk/file")
    if NUMBER.value == 5:
        with cli.writing("/disk"):
            raise RuntimeError("RESOURCE_EXHAUSTED: No space left on device [places in its source]")
    if NUMBER.value == 6:
        raise ConfigError("/disk: No space left on device")
    print(NUMBER.value, os.environ["JAX_PLATFORMS"])

cli.run(main)
"""


def run(*arguments, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, env=environment)


@pytest.fixture
def run_here(tmp_path, monkeypatch, capfd):
    """Run the command in this process and return its status and both streams."""
    path = tmp_path / "command.py"
    path.write_text(COMMAND)

    def run(*arguments):
        done = run_command(str(path), *arguments, monkeypatch=monkeypatch, capfd=capfd)
        return done.status, done.out, done.err

    return run


ENDS = """
import atexit, sys
from jaxrl_llm.runtime import cli
class Held:
    def __del__(self):
        print("freed")
held = Held()
def main():
    atexit.register(print, "registered")
    sys.exit(3)
cli.run(main)
"""


def test_a_command_ends_when_all_that_is_registered_is_done_and_frees_nothing():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "registered\n", "")


def test_a_good_command_runs():
    done = run("--number=7", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7 cpu\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--number=2"], "error: a.b=2 is not allowed\n"),
        (["--nmber=2"], "error: Unknown command line flag 'nmber'. Did you mean: number ?\n"),
        (["--number=x"], "error: flag --number=x: invalid literal for int() with base 10: 'x'\n"),
        (["stray"], "error: unexpected argument 'stray'; settings are given as --name=value\n"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, run_here):
    assert run_here(*arguments) == (2, "", message)


def test_so_it_is_in_a_process_of_its_own():
    done = run("--number=2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: a.b=2 is not allowed\n")


def test_a_config_file_or_key_that_is_not_there_is_one_line_and_status_2(tmp_path, run_here):
    config = tmp_path / "config.py"
    config.write_text("from jaxrl_llm.config import defaults\n\n\ndef get_config():\n    return defaults()\n")
    assert run_here(f"--config={config}", "--config.seed=5")[0] == 0
    for arguments, words in [
        ([f"--config={tmp_path}/none.py"], [f"'{tmp_path}/none.py'"]),
        ([f"--config={tmp_path}"], [f"{tmp_path}/config.json"]),
        ([f"--config={config}", "--config.sead=5"], ["sead='5'", "seed"]),
        (["--config.seed=5"], ["--config.seed", "--config=FILE"]),
    ]:
        status, out, err = run_here(*arguments)
        assert status == 2 and out == "", (status, out)
        assert err.startswith("error: ") and err.count("\n") == 1, err
        check_words(err, *words)


def test_a_config_file_that_raises_is_one_line_however_it_is_named(tmp_path, run_here):
    config = tmp_path / "config.py"
    config.write_text("def get_config():\n    raise KeyError('no such thing')\n")
    for words in ([f"--config={config}"], ["--config", str(config)], ["-config", str(config)]):
        assert run_here(*words) == (2, "", f"error: {config}:2: KeyError: 'no such thing'\n")


def test_a_config_file_with_a_setting_of_earlier_versions_is_one_line(tmp_path, run_here):
    config = tmp_path / "config.py"
    config.write_text(
        "from jaxrl_llm.config import defaults\n\n\n"
        "def get_config():\n    config = defaults()\n    config.replay.fresh_batches = True\n    return config\n"
    )
    status, out, err = run_here(f"--config={config}")
    assert status == 2 and out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {config}:6: replay.fresh_batches=True ")
    check_refusal(err, "replay.fresh_batches", True, "replay.draw=fresh_or_older")


# ---- settings of the command line

PLAIN = "from jaxrl_llm.config import defaults as get_config\n"
METHOD = """
from jaxrl_llm.settings.use import use
from jaxrl_llm.config import defaults

def get_config():
    config = defaults()
    config.algorithm.surrogate = use("cispo", high=4.0)
    config.algorithm.reward_terms = [use("length_reward", weight=0.3), use("overlong_penalty", buffer=2)]
    config.algorithm.divergence = use("reference", coefficient=0.2)
    config.prompts.arguments = {"terms": 2}
    return config
"""
OWN = """
def tempered(x, *, power: float = 0.5):
    return -power * x.advantage * x.policy_logp

def halved(x, *, weight: float = 0.5):
    return weight * x.reward
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Return the config that a command makes from a config file and overrides."""

    def config(text, *settings):
        (tmp_path / "config.py").write_text(text)
        words = (f"--config.{setting}" for setting in settings)
        return config_of(f"--config={tmp_path / 'config.py'}", *words, monkeypatch=monkeypatch)

    return config


CLIPPED = {"low": 0.2, "high": 0.2, "dual": 0.0}


@pytest.mark.parametrize(
    ("text", "settings", "name", "expected"),
    [
        (PLAIN, ["surrogate.high=0.3"], "clipped", CLIPPED | {"high": 0.3}),
        (PLAIN, ["surrogate=cispo"], "cispo", {"low": 0.0, "high": 5.0}),
        (PLAIN, ["surrogate=cispo", "surrogate.high=3"], "cispo", {"low": 0.0, "high": 3.0}),
        (PLAIN, ["surrogate.high=3", "surrogate=cispo"], "cispo", {"low": 0.0, "high": 3.0}),
        (PLAIN, ["surrogate=agro", "surrogate.high=3", "surrogate=cispo"], "cispo", {"low": 0.0, "high": 3.0}),
        (PLAIN, ["surrogate.high=3", "surrogate.high=4", "surrogate=cispo"], "cispo", {"low": 0.0, "high": 4.0}),
        (METHOD, [], "cispo", {"low": 0.0, "high": 4.0}),
        (METHOD, ["surrogate.low=0.5"], "cispo", {"low": 0.5, "high": 4.0}),
        (METHOD, ["surrogate=clipped"], "clipped", CLIPPED),
        (METHOD, ["surrogate=cispo"], "cispo", {"low": 0.0, "high": 5.0}),  # named anew, with its defaults
        (METHOD, ["surrogate.low=0.1", "surrogate=clipped"], "clipped", CLIPPED | {"low": 0.1}),
    ],
)
def test_a_function_and_its_settings_are_given_in_any_order(text, settings, name, expected, given):
    surrogate = given(text, *(f"algorithm.{setting}" for setting in settings)).algorithm.surrogate
    assert (surrogate.name, dict(surrogate.settings)) == (name, expected)


def test_a_key_is_put_into_the_mapping_that_is_given_beside_it(given):
    whole = "prompts.chat_template_kwargs={'enable_thinking': False, 'a': 1}"
    config = given(PLAIN, whole, "prompts.chat_template_kwargs.a=2")
    assert config.prompts.chat_template_kwargs == {"enable_thinking": False, "a": 2}


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (
            PLAIN,
            ["=overlong_penalty,length_reward"],
            {"overlong_penalty": {"buffer": 4}, "length_reward": {"weight": 0.1}},
        ),
        (PLAIN, ["=('length_reward',)"], {"length_reward": {"weight": 0.1}}),
        (
            PLAIN,
            ["=['length_reward', 'overlong_penalty']", ".overlong_penalty.buffer=1"],
            {"length_reward": {"weight": 0.1}, "overlong_penalty": {"buffer": 1}},
        ),
        (
            PLAIN,
            ["=overlong_penalty,length_reward", ".length_reward.weight=0.2"],
            {"overlong_penalty": {"buffer": 4}, "length_reward": {"weight": 0.2}},
        ),
        (
            PLAIN,
            [".length_reward.weight=0.2", "=overlong_penalty,length_reward"],
            {"overlong_penalty": {"buffer": 4}, "length_reward": {"weight": 0.2}},
        ),
        (PLAIN, [".length_reward.weight=0.2"], {"length_reward": {"weight": 0.2}}),
        (METHOD, [".length_reward.weight=0.2"], {"length_reward": {"weight": 0.2}, "overlong_penalty": {"buffer": 2}}),
        (
            METHOD,
            [".short_answer.tokens=3"],
            {
                "length_reward": {"weight": 0.3},
                "overlong_penalty": {"buffer": 2},
                "short_answer": {"tokens": 3, "bonus": 0.5, "every_iterations": 0},
            },
        ),
        (METHOD, ["=overlong_penalty"], {"overlong_penalty": {"buffer": 4}}),
        (METHOD, ["=()"], {}),
        (METHOD, ["="], {}),
    ],
)
def test_a_list_of_functions_and_their_settings(text, settings, expected, given):
    terms = given(text, *(f"algorithm.reward_terms{setting}" for setting in settings)).algorithm.reward_terms
    assert {term.name: dict(term.settings) for term in terms} == expected
    assert [term.name for term in terms] == list(expected)


def test_a_place_that_may_be_empty_is_filled_and_emptied(given):
    filled = given(PLAIN, "algorithm.divergence.estimator=k1", "algorithm.divergence=convex").algorithm.divergence
    assert filled.mapping() == {"name": "convex", "coefficient": 0.04, "estimator": "k1"}
    assert not given(METHOD, "algorithm.divergence=none").algorithm.divergence
    assert given(METHOD, "algorithm.divergence.coefficient=1").algorithm.divergence["coefficient"] == 1.0


def test_functions_of_ones_own(given, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path}/own.py"
    settings = [f"algorithm.surrogate={own}:tempered", "algorithm.surrogate.power=0.25"]
    assert given(METHOD, *settings).algorithm.surrogate.settings == {"power": 0.25}
    settings = [f"algorithm.reward_terms=length_reward,{own}:halved", f"algorithm.reward_terms.{own}:halved.weight=0.2"]
    (first, second) = given(METHOD, *settings).algorithm.reward_terms
    assert (first["weight"], second.name, second["weight"]) == (0.1, f"{own}:halved", 0.2)


def test_values_are_of_the_type_of_their_setting(given):
    config = given(
        METHOD,
        "seed=7",
        "seed=5",
        "optimizer.learning_rate=1",
        "metrics.tensorboard=false",
        "checkpoint.export=True",
        "prompts.system_prompt=5",
        "prompts.source=jsonl",
        "prompts.name=a=b,'c'",
        "sampling.stop_strings=('5', '\\n')",
        "rewards.weights=[1, 2]",
        "rewards.functions=('task', 'math')",
        "algorithm.advantage=gae",
        "algorithm.critic.bins=8",
        "algorithm.reference_reset_iterations=(50, 100)",
        "prompts.arguments.terms=(2, 3)",
        "prompts.arguments.name=sums",
        "prompts.arguments.text='4'",
        "prompts.arguments.deep.er=4",
    )
    assert config.seed == 5 and config.optimizer.learning_rate == 1.0
    assert config.metrics.tensorboard is False and config.checkpoint.export is True
    assert (config.prompts.system_prompt, config.prompts.name) == ("5", "a=b,'c'")
    assert config.sampling.stop_strings == ("5", "\n")
    assert config.rewards.weights == (1.0, 2.0) and config.rewards.functions == ("task", "math")
    assert config.algorithm.critic.bins == 8 and config.algorithm.reference_reset_iterations == (50, 100)
    assert config.prompts.arguments == {"terms": (2, 3), "name": "sums", "text": "4", "deep": {"er": 4}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["=" + '{"a": false, "b": [null, {"c": true}]}'], {"a": False, "b": [None, {"c": True}]}),
        ([".a=false", ".b=true", ".c=null"], {"a": False, "b": True, "c": None}),
        ([".a=False", ".b=None", ".c='false'"], {"a": False, "b": None, "c": "false"}),  # as Python has them
        ([".a=NaN", ".b=-Infinity", ".c=no", ".d=TRUE"], {"a": "NaN", "b": "-Infinity", "c": "no", "d": "TRUE"}),
        (["=" + '{"a": true, "b": 1}', ".b=null"], {"a": True, "b": None}),
    ],
)
def test_a_free_group_is_read_as_json_or_as_python_writes_it(settings, expected, given):
    config = given(PLAIN, *(f"prompts.chat_template_kwargs{setting}" for setting in settings))
    assert config.prompts.chat_template_kwargs == expected


@pytest.mark.parametrize("text", ["true", "null", "5", "NaN", '{"a": true}'])
def test_a_text_stays_the_text_that_it_is(text, given):
    assert given(PLAIN, f"prompts.system_prompt={text}").prompts.system_prompt == text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["rewards.weights=1.0"], ("rewards.weights", 1.0)),
        (["rewards.functions=task"], ("rewards.functions", "task")),
        (["algorithm.reference_reset_iterations=50"], ("algorithm.reference_reset_iterations", 50)),
        (["model.lora.targets=q"], ("model.lora.targets", "q")),
        (["seed=true"], ("seed", True)),
        (["update.bach_size=5"], ("update.bach_size", "5", "update.batch_size")),
        (["seed=x"], ("seed", "x")),
        (["seed"], ("--config.seed",)),
        (["prompts.arguments=5"], ("prompts.arguments", 5)),
        (["rewards.weights.x=5"], ("rewards.weights",)),
        (["algorithm.surrogate=clip"], ("algorithm.surrogate", "clip")),
        (["algorithm.surrogate="], ("algorithm.surrogate", "")),
        (["algorithm.surrogate.dul=3"], ("algorithm.surrogate.dul", "3", "dual")),
        (["algorithm.surrogate=cispo", "algorithm.surrogate.dual=3"], ("algorithm.surrogate.dual", "3", "'cispo'")),
        (["algorithm.surrogate.low=abc"], ("algorithm.surrogate.low", "abc")),
        (["algorithm.surrogate.low=-1"], ("algorithm.surrogate.low", -1.0)),
        (["algorithm.surrogate.low.x=1"], ("algorithm.surrogate.low", {"x": "1"})),
        (["algorithm.reward_terms=length"], ("algorithm.reward_terms[0]", "length")),
        (
            ["algorithm.reward_terms=length_reward,length_reward"],
            ("algorithm.reward_terms", ("length_reward", "length_reward")),
        ),
        (["algorithm.reward_terms.length.weight=1"], ("algorithm.reward_terms[0]", "length")),
        (["algorithm.reward_terms.length_reward.wight=1"], ("algorithm.reward_terms[0].wight", "1", "mean weight")),
        (["algorithm.reward_terms.short_answer.tokens=1.5"], ("algorithm.reward_terms[0].tokens", 1.5)),
        (
            ["algorithm.divergence=reference", "algorithm.divergence.estimator=k9"],
            ("algorithm.divergence.estimator", "k9"),
        ),
        (["algorithm.divergence.coefficient=0.1"], ("algorithm.divergence.coefficient", "0.1")),
        (["algorithm.surrogate=none.py:f"], ("algorithm.surrogate", "none.py:f", "FileNotFoundError")),
        (["algorithm.surogate=cispo"], ("algorithm.surogate", "cispo", "algorithm.surrogate")),
    ],
)
def test_settings_and_functions_that_are_not_there_are_refused_with_what_is(settings, named, given, capsys):
    with pytest.raises(SystemExit) as ended:
        given(PLAIN, *settings)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    check_refusal(err, *named)


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (4, 1, "error: /disk/file: No space left on device\n"),
        (5, 1, "error: /disk: No space left on device\n"),
        (6, 2, "error: /disk: No space left on device\n"),
    ],
)
def test_a_full_disk_is_one_line_and_status_1(number, status, message, run_here):
    assert run_here(f"--number={number}") == (status, "", message)


def test_home_is_found_where_the_shell_leaves_the_tilde(tmp_path, monkeypatch, run_here):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "it's.py").write_text("from jaxrl_llm.config import defaults as get_config\n")
    assert run_here("--config=~/it's.py")[0] == 0
    assert "'~no/config.py'" in run_here("--config=~no/config.py")[2]


def test_our_own_errors_keep_their_traceback():
    done = run("--number=3")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ValueError: ours" in done.stderr
