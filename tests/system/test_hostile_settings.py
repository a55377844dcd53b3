"""Settings from anybody: each is carried out, or refused in one line by name, before anything is compiled.

One setting of configs/debug.py is changed at a time, in the file and on the command line, to values that its type
allows and to others. Accepted means that ``train`` reaches its compilation.
"""

import importlib.util
import math
import os
import random
import resource

import pytest
from support import command_line
from support.command_line import DEBUG_CONFIG

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import Config, ConfigError, flatten, freeze
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import programs
from jaxrl_llm.scoring import rewards
from jaxrl_llm.settings.schema import LARGEST, MOST, SMALLEST
from jaxrl_llm.settings.use import Chosen

INTEGERS = [0, 1, -1, 7, 64, 10**9, MOST, MOST + 1, 2**63, 10**30, True, 1.5, "4", None, math.nan, {}, [1], ()]
NUMBERS = [0, -0.0, 1, -1.0, 0.5, 1e-30, 1e-320, 1e6, 1e30, 1e39, 1e308, 10**400, math.nan, math.inf, -math.inf, True]
NUMBERS += ["0.5", None, {}, (1.0,)]
TEXTS = ["", "x", "a\nb", "\"<b>&'", "\u202eabc", "\x1b[31mred", "nul\0x", "../../x", "/etc/passwd", "x" * 5000]
TEXTS += ["é日本", "\ud800", None, 3, True, {}, ("a",)]
SWITCHES = [True, False, 0, 1, "true", None, 1.0, {}]
TUPLES = [(), ("",), (None,), (1,), (0,), (-1,), (math.nan,), (math.inf,), (1e308,), ("a", "b"), (1.0, 2.0), "abc", 3]
TUPLES += [
    None,
    {},
    (("a",),),
    ("nul\0:f",),
    ("\ud800",),
    (MOST + 1,),
    (True,),
    tuple(range(1, 10**5)),
    ("x" * 10_000,),
]
GROUPS = [{}, {"a": 1}, {"a": {"b": {"c": 1}}}, {1: 2}, {"": None}, {"x\ny": "<b>"}, {"a": math.nan}, {"a": {1, 2}}]
GROUPS += [{"a": object()}, [("a", 1)], None, 3, "{}", {None: 1}, {"a": (1, 2)}, {"a.b": 1}, {"\ud800": 1}]
# Of a place for a function.
FUNCTIONS = [*TEXTS, *GROUPS, "none", "os:path", "math:sqrt", ":", "nul\0:f", "x.py:f", ("gspo",), ["gspo"], b"gspo"]
FUNCTIONS += [{"name": name} for name in (None, "", "gspo", "none", 3, ("gspo",), "x" * 5000, "\ud800", "nul\0.py:f")]
FUNCTIONS += [{"low": value} for value in (None, {}, math.nan, -1, 1e39, 10**400, "0.1", True, (0.1,))]
VALUES = {bool: SWITCHES, int: INTEGERS, float: NUMBERS, str: TEXTS, tuple: TUPLES, dict: GROUPS}
# What is typed after --config.name=.
TYPED = [
    "",
    "0",
    "-1",
    "1e9",
    "1e400",
    "nan",
    "inf",
    "True",
    "None",
    "()",
    "(1,)",
    "('a',)",
    "{}",
    "abc",
    "a\nb",
    "(nan,)",
]
TYPED += [
    "\x1b[31m",
    "\u202eé日本",
    "9" * 400,
    "9" * 5000,
    "x" * 5000,
    "1.5",
    "1_000",
    "('a'",
    "=",
    "1=2",
    "((),)",
    " 4 ",
]
TYPED += ["2", "0.5", "true"]
TYPED += ["__import__('os').system('touch pwned')", "lambda: 0", "b'x'"]
# Where another setting is named: what a longer system prompt is too long for.
NAMED_BY = {"prompts.system_prompt": "prompts.max_tokens"}


class CompilesError(Exception):
    """Raised when ``train`` has done everything before compilation."""


class Pool:
    """A pool that looks up the reward functions like the real one, and starts no process."""

    def __init__(self, config, *, task_scorer, examples, check):
        self.check = check
        for name in config.functions:
            rewards._checked_function(name, task_scorer, examples)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def compiles(*_):
    raise CompilesError


@pytest.fixture
def up_to_compiling(monkeypatch):
    """Make ``train`` stop at its compilation, on a host of 16 GiB with 8 GiB more than are in use."""
    for module in (programs, train_module):
        monkeypatch.setattr(module, "compile_all", compiles)
    for module in (rewards, train_module):
        monkeypatch.setattr(module, "RewardPool", Pool)
    real = os.sysconf
    memory = {"SC_PHYS_PAGES": 2**34 // resource.getpagesize(), "SC_PAGE_SIZE": resource.getpagesize()}
    monkeypatch.setattr(os, "sysconf", lambda name: memory.get(name) or real(name))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**33, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def debug_settings():
    spec = importlib.util.spec_from_file_location("debug", DEBUG_CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config().to_dict()


def changed(path, value):
    settings = debug_settings()
    *groups, name = path.split(".")
    node = settings
    for group in groups:
        node = node[group]
    node[name] = value
    return settings


def line_of(settings, workdir):
    """Return the line with which a run of these settings is refused; "" if it would compile."""
    try:
        config = freeze(settings)
        workdir.mkdir(exist_ok=True)
        train_module.train(config, workdir)
    except ConfigError as error:
        return str(error)
    except CompilesError:
        return ""
    raise AssertionError("neither refused nor compiled")


def values_of(path):
    """Return the values to try for a setting, by its type."""
    is_place = isinstance(flatten(Config(), whole=True).get(path), Chosen)
    return FUNCTIONS if is_place else VALUES[type(flatten(Config())[path])]


def is_sound(value):
    """Assert that no accepted number is outside the devices' types."""
    if isinstance(value, tuple):
        return all(map(is_sound, value))
    if isinstance(value, int):
        return abs(value) <= max(MOST, LARGEST)
    return not isinstance(value, float) or value == 0 or SMALLEST <= abs(value) <= LARGEST


@pytest.mark.slow
def test_three_hundred_changes_of_one_setting_are_accepted_or_refused_by_name(up_to_compiling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a relative path in a setting is looked for here
    chance, defaults, accepted = random.Random(1), flatten(Config()), 0
    for number in range(300):
        path = chance.choice(list(defaults))
        value = chance.choice(values_of(path))
        line = line_of(changed(path, value), tmp_path / str(number))
        shown = f"{path}={value!r:.80}"
        assert len(line.splitlines()) <= 1 and len(line) < 5000, shown
        assert not line or path in line or NAMED_BY.get(path, path) in line, (shown, line)
        assert line or is_sound(value), shown
        accepted += not line
    assert 30 <= accepted <= 150  # 46: the choice moves with every setting that is added


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_overrides_of_the_command_line_are_accepted_or_refused_by_name(
    count, up_to_compiling, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    chance, defaults, accepted = random.Random(2), flatten(Config()), 0
    for number in range(count):
        path, value = chance.choice(list(defaults)), chance.choice(TYPED)
        words = [f"--config={DEBUG_CONFIG}", f"--workdir={tmp_path / str(number)}", f"--config.{path}={value}"]
        try:
            done = command_line.run_command("train", *words, monkeypatch=monkeypatch, capfd=capfd)
        except CompilesError:
            accepted += 1
            continue
        assert done.status == 2 and done.out == "" and done.err.startswith("error: "), (words[2], done)
        assert done.err.count("\n") == 1 and done.err[:-1].isprintable() and len(done.err) < 2100, (words[2], done)
        assert path in done.err or NAMED_BY.get(path, path) in done.err, (words[2], done)
    assert not (tmp_path / "pwned").exists()
    # 1 and 18: the choice moves with every setting that is added.
    assert accepted <= count / 2 and (accepted or count < 100)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("num_iterations", value) for value in (0, -1, MOST, 10**30)),
        *(("seed", value) for value in (-1, 2**31, 1.0)),
        *(("sampling.temperature", value) for value in (0, 1e-30, 1e30, -1)),
        *(("optimizer.learning_rate", value) for value in (1e30, -1e-5, 1e-30, math.nan)),
        *(("algorithm.critic.learning_rate", value) for value in (1e30, math.inf)),
        ("optimizer.b1", 1.0),  # Adam divides by 1 - b1
        ("optimizer.b2", 1.0),
        ("optimizer.eps", 1e12),
        ("optimizer.weight_decay", 1e9),
        ("optimizer.max_grad_norm", 1e-30),
        *(("rollout.group_size", value) for value in (0, -8, 10**6, 10**9)),
        *(("rollout.prompts_per_iteration", value) for value in (0, 8 * 10**6)),
        *(("rollout.lookahead_prompts", value) for value in (8 * 10**7, 10**9, -8)),
        *(("rollout.chunk_steps", value) for value in (0, -1, 2**31)),
        ("rollout.max_resample_rounds", 10**9),
        *(("rewards.timeout_s", value) for value in (0, 1e-30, 1e308, -1)),
        *(("rewards.num_workers", value) for value in (0, 10**6)),
        *(("rewards.weights", (value,)) for value in (math.nan, math.inf, 1e30)),
        ("rewards.pass_threshold", math.nan),
        *(("replay.capacity", value) for value in (64 * 10**8, 64 * 10**6, 2**63, -64)),
        *(("replay.capacity_tokens", value) for value in (2**31 - 1, 10**15, -1)),
        ("replay.max_age_steps", -1),
        *(("prompts.size", value) for value in (0, 10**9)),
        *(("prompts.max_tokens", value) for value in (10**6, 2**31 - 1)),
        *(("sampling.max_completion_tokens", value) for value in (10**6, 2**31 - 1)),
        *(("eval.num_prompts", value) for value in (26, 10**9)),
        ("eval.num_samples", 10**9),
        ("eval.name", "x"),  # the built-in questions are trained on, whatever the name
        *(("update.batch_size", value) for value in (0, 10**9)),
        ("update.updates_per_iteration", 10**9),
        *(("update.micro_batch_tokens", value) for value in (80 * 10**7, -80)),
        ("algorithm.critic.bins", 10**9),
        ("algorithm.surrogate.high", 1e30),
        *((name, "nul\0x") for name in ("model.path", "prompts.name", "eval.name", "compilation_cache")),
        *((name, ("nul\0x:f",)) for name in ("rewards.functions", "external.paths")),
        ("sampling.stop_strings", ("\ud800",)),
        ("model.path", "x" * 300),
    ],
)
def test_nonsense_is_refused_by_name_and_asks_for_no_memory(path, value, up_to_compiling, tmp_path):
    line = line_of(changed(path, value), tmp_path / "run")
    assert path in line and len(line.splitlines()) == 1, line


@pytest.mark.parametrize(
    ("place", "function", "named"),
    [
        ("replay.draw", {"name": "priority", "exponent": 1e6}, "replay.draw.exponent=1000000.0 must be at least 0.0"),
        (
            "replay.draw",
            {"name": "age", "scale_iterations": 0},
            "replay.draw.scale_iterations=0.0 must be more than 0.0",
        ),
        *(
            ("algorithm.surrogate", {"name": "cispo", "high": value}, "algorithm.surrogate.high=")
            for value in (0, -1, 1e30, math.nan, None)
        ),
        ("algorithm.old_policy", {"name": "ewma", "decay": 1.0}, "algorithm.old_policy.decay=1.0 must be at least 0.0"),
        ("algorithm.correction", {"name": "second_moment", "limit": 0}, "algorithm.correction.limit=0.0 must be more"),
        (
            "algorithm.correction",
            {"name": "token_masked", "high": 0.5},
            "algorithm.correction.high=0.5 must be at least",
        ),
        *(
            ("algorithm.divergence", {"name": "reference", "coefficient": value}, "algorithm.divergence.coefficient=")
            for value in (-1e-3, math.inf, 1e39)
        ),
        (
            "algorithm.entropy_bonus",
            {"name": "adaptive", "target": 0},
            "algorithm.entropy_bonus.target=0.0 must be more",
        ),
        (
            "algorithm.reward_terms",
            [{"name": "overlong_penalty", "buffer": MOST}],
            "algorithm.reward_terms.overlong_penalty.buffer=2147483647 must be at most sampling.max_completion_tokens",
        ),
        (
            "algorithm.reward_terms",
            [{"name": "short_answer", "tokens": MOST + 1}],
            "algorithm.reward_terms[0].tokens=2147483648 must be at least 1 and at most 2147483647",
        ),
        (
            "algorithm.reshaping",
            ["duration_factor"] * 1000,
            "algorithm.reshaping=('duration_factor', ",
        ),
    ],
)
def test_nonsense_of_a_function_is_refused_by_name(place, function, named, up_to_compiling, tmp_path):
    line = line_of(changed(place, function), tmp_path / "run")
    assert line.startswith(named) and len(line.splitlines()) == 1, line


def test_what_no_memory_holds_is_refused_with_the_bytes(up_to_compiling, tmp_path):
    line = line_of(changed("replay.capacity", 64 * 10**8), tmp_path / "run")
    assert line.startswith("replay.capacity=6400000000 must be at least 0 and at most 2147483647")
    line = line_of(changed("replay.capacity", 64 * 10**7), tmp_path / "run")
    # 640e6 rows over 8 devices, of 40 tokens with 4 numbers each and some more: 16 bytes x 40 x 80e6 and more.
    assert line.startswith("replay.capacity=640000000, replay.capacity_tokens=0 need ")
    assert line.endswith("GiB per device, which has 2.00 GiB")
    assert float(line.split(" need ")[1].split(" GiB")[0]) > 16 * 40 * 80e6 / 2**30


def test_rows_in_the_hosts_memory_are_not_counted_as_the_devices(up_to_compiling, tmp_path):
    settings = changed("replay.capacity", 64 * 10**6)
    assert line_of(settings, tmp_path / "run").startswith("replay.capacity=64000000, ")
    settings["replay"]["memory"] = "host"
    assert line_of(settings, tmp_path / "run") == ""


def test_a_cache_of_programs_that_is_a_file_is_refused(up_to_compiling, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    line = line_of(changed("compilation_cache", str(tmp_path / "file")), tmp_path / "run")
    assert line == f"compilation_cache={str(tmp_path / 'file')!r} is not a folder. Set a folder, or '' for no cache"


def test_names_of_files_are_printable_and_texts_for_the_model_may_be_anything():
    texts = {"prompts": {"system_prompt": "a\n\t\x1b\u202e"}, "sampling": {"stop_strings": ("\n\n", "\x00", "\u202e")}}
    assert freeze(texts).sampling.stop_strings == ("\n\n", "\x00", "\u202e")
    for name in ("é 日本/x y.jsonl", '~/it\'s <mine> & "yours"'):
        assert freeze({"prompts": {"source": "jsonl", "name": name}}).prompts.name == name


# ---- real iterations -------------------------------------------------------------------------------------------------

FAR = {
    "cold": {"sampling.temperature": 0.01},
    "hot, and greedy evaluation": {"sampling.temperature": 100, "eval.temperature": 0},
    "large steps": {"optimizer.learning_rate": 10.0, "optimizer.weight_decay": 0.1},
    "no moments": {"optimizer.b1": 0, "optimizer.b2": 0, "optimizer.eps": SMALLEST},
    "long memory": {"optimizer.b1": 0.9999, "optimizer.b2": 0.999999, "optimizer.max_grad_norm": SMALLEST},
    "large coefficients": {
        "algorithm.divergence": {"name": "reference", "coefficient": LARGEST},
        "algorithm.entropy_bonus": {"name": "constant", "coefficient": LARGEST},
    },
    "large rewards": {"rewards.weights": (LARGEST,), "rewards.pass_threshold": -LARGEST},
    "large shaping": {
        "algorithm.reward_terms": [{"name": "length_reward", "weight": LARGEST}],
        "algorithm.reshaping": [{"name": "amplify_positive", "factor": LARGEST}],
    },
    "large bonus": {
        "algorithm.reshaping": [{"name": "entropy_bonus", "coefficient": LARGEST, "limit": SMALLEST}],
    },
    "wide clip": {
        "algorithm.surrogate.high": LARGEST,
        "algorithm.surrogate.low": 1,
        "algorithm.reshaping": [{"name": "duration_factor", "exponent": 100}],
    },
    "sharp priorities": {"replay.draw": {"name": "priority", "exponent": 100}},
    "sharp ages": {"replay.draw": {"name": "age", "scale_iterations": SMALLEST}},
    "one token each": {"sampling.max_completion_tokens": 1, "sampling.top_k": 1},
    "largest counts": {
        "seed": MOST,
        "rollout.chunk_steps": MOST,
        "replay.max_age_steps": MOST,
        "replay.max_uses": MOST,
        "replay.draw": {"name": "uniform_then_fresh", "fresh_from_iteration": MOST},
        "optimizer.warmup_steps": MOST,
        "optimizer.reset_every_steps": MOST,
        "metrics.samples_per_iteration": MOST,
        "checkpoint.keep_last": MOST,
        "checkpoint.keep_best": MOST,
        "update.logp_chunk_tokens": MOST,
        "update.scaled_from_batch_size": MOST,
    },
    "wide critic": {
        "algorithm.advantage": "gae",
        "algorithm.critic.bins": 8,
        "algorithm.critic.low": -LARGEST,
        "algorithm.critic.high": LARGEST,
    },
    "odd texts": {
        "prompts.system_prompt": "\x1b\u202e<",
        "sampling.stop_strings": ("\x00",),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAR)
def test_settings_at_their_ends_train_and_every_figure_is_a_number(name, tmp_path):
    settings = debug_settings() | {"num_iterations": 2}
    settings["mesh"] = settings["mesh"] | {"data": 0}
    for path, value in FAR[name].items():
        *groups, field = path.split(".")
        node = settings
        for group in groups:
            node = node[group]
        node[field] = value
    assert train_module.train(freeze(settings), tmp_path) == 0
    rows = read_metrics(tmp_path)
    assert len(rows) == 2
    for row in rows:
        for key in ("update/loss", "update/grad_norm", "update/entropy_nats", "rollout/reward_mean", "eval/pass_rate"):
            assert key not in row or math.isfinite(row[key]), (key, row[key])
    assert (tmp_path / "report.html").exists() and (tmp_path / "hf" / "config.json").exists()
