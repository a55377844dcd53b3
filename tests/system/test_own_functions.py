"""A method in the user's own file:

it trains, its keywords are settings, and it is checked like the package's functions.
"""

import json
import shlex

import grain  # noqa: F401, whose flags outlive a command
import pytest
from support import ghosts
from support.building import ONE, mesh_of
from support.command_line import DEBUG_CONFIG, run_command
from support.refusal import refused
from test_readme import commands, files

from jaxrl_llm.algorithms.inputs import COLUMNS, ROW, TOKEN, Column
from jaxrl_llm.config import defaults, freeze, from_json, to_json
from jaxrl_llm.reports.metric_table import METRICS, column_metrics
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import sharding
from jaxrl_llm.settings.use import use

METHODS = """
import jax.numpy as jnp

from jaxrl_llm.algorithms.use import needs
from jaxrl_llm.ops.groups import minus_mean
from jaxrl_llm.settings.schema import Share


@needs(siblings=True)
def centred(x, *, scale: float = 1.0):
    return scale * minus_mean(x.reward, x.groups)


@needs("entropy")
def damped(advantage, x, *, share: Share = 0.5):
    return advantage * (1 - share * (x.columns["entropy"] > 1e9))


@needs(base="policy")
def plain(x):
    return -x.advantage * x.policy_logp


@needs("ref_logp")
def pulled(x, *, beta: float = 0.1):
    return -x.advantage * x.policy_logp + beta * (x.policy_logp - x.ref_logp) ** 2


def young(x, *, scale: float = 4.0):
    return jnp.exp(-jnp.minimum(x.age / scale, 80.0))


def silent(x):
    return None


@needs("average_logp")
def averaged(x):
    return x.average_logp


@needs("average_logp")
def averaged_by_text(x, *, decay: str = "0.9"):
    return x.average_logp


@needs("previous_logp")
def looking_back(x):
    return x.reward


@needs("entropy")
def unsure(x):
    return -x.advantage * x.policy_logp * x.entropy


@needs("group_mean", base="policy")
def anew(x, *, delta_v: float = -0.1):
    return -(x.reward - x.group_mean - delta_v)[:, None] * x.policy_logp


@needs("group_mean")
def of_groups(x):
    return x.reward - x.columns["group_mean"]
"""


@pytest.fixture
def methods(tmp_path):
    path = tmp_path / "methods.py"
    path.write_text(METHODS)
    return path


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    mesh = mesh_of(ONE)
    monkeypatch.setattr(sharding, "make_mesh", lambda *_: mesh)


@pytest.fixture
def run(monkeypatch, capfd):
    """Run two iterations with these settings. Return metrics.jsonl without times, or the message of a refused run."""

    def call(workdir, *settings):
        done = run_command(
            "train",
            f"--config={DEBUG_CONFIG}",
            f"--workdir={workdir}",
            *("--config.num_iterations=2", "--config.eval.num_prompts=0", "--config.checkpoint.export=False"),
            *("--config.metrics.tensorboard=False", "--config.replay.capacity=128"),
            *(f"--config.{setting}" for setting in settings),
            monkeypatch=monkeypatch,
            capfd=capfd,
        )
        if done.status:
            return done.err.strip().splitlines()[-1]
        timed = ("time/", "throughput/", "memory/")
        return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_metrics(workdir)]

    return call


@pytest.mark.slow
def test_a_run_of_own_functions_is_the_run_of_ours_that_say_the_same(run, methods, tmp_path):
    of = lambda place, name: f"{place}={methods}:{name}"
    own = run(
        tmp_path / "own",
        *(of("algorithm.advantage", "centred"), of("algorithm.surrogate", "plain"), of("replay.draw", "young")),
        *(of("algorithm.reshaping", "damped"), "replay.draw.scale=2"),
    )
    same = run(
        tmp_path / "ours",
        *("algorithm.advantage=dr_grpo", "algorithm.surrogate=reinforce", "replay.draw=age"),
        "replay.draw.scale_iterations=2",
    )
    assert own == same
    # A keyword is a setting, and a setting that is changed changes the run.
    other = run(tmp_path / "scaled", of("algorithm.advantage", "centred"), "algorithm.advantage.scale=3")
    assert other[0]["update/loss"] != own[0]["update/loss"]
    # What it is of is part of the run: a changed file is another method.
    methods.write_text(METHODS.replace("scale * ", "2 * scale * "))
    refused = run(tmp_path / "scaled", of("algorithm.advantage", "centred"), "algorithm.advantage.scale=3")
    assert "algorithm.advantage.source" in refused


REWARDS = """
def score(prompts, completions, **columns):
    rewards = [len(text) / 8 for text in completions]
    spans = [[[0, len(text), 2.0]] for text in completions]
    return [{"reward": x, "row_copy": x, "token_two": y} for x, y in zip(rewards, spans, strict=True)]
"""
READERS = """
import jax.numpy as jnp
from jaxrl_llm.algorithms.use import needs

def from_reward(x):
    return -x.reward[:, None] * x.policy_logp

@needs("row_copy")
def from_row(x):
    return -x.row_copy[:, None] * x.policy_logp

@needs("token_two", "row_copy")
def from_tokens(x, *, scale: float = 1.0):
    text = scale * x.token_two
    return -x.row_copy[:, None] * text * x.policy_logp
"""


@pytest.mark.tier("slow")  # plain: test_a_loss_gets_the_columns_of_rewards_that_it_needs
def test_a_loss_reads_a_declared_column_of_the_rewards_without_any_other_change(run, tmp_path, monkeypatch):
    """A new column costs only its declaration and the reward function."""
    monkeypatch.setitem(COLUMNS, "row_copy", Column(False, True, "f32, the reward once more", ROW))
    monkeypatch.setitem(COLUMNS, "token_two", Column(True, True, "f32, 2.0 at tokens with text", TOKEN))
    for name, metric in column_metrics({"row_copy": COLUMNS["row_copy"]}).items():  # as at the import of the table
        monkeypatch.setitem(METRICS, name, metric)
    (tmp_path / "scores.py").write_text(REWARDS)
    readers = tmp_path / "readers.py"
    readers.write_text(READERS)
    reward = f"rewards.functions=('{tmp_path}/scores.py:score',)"
    losses = {}
    for name, settings in {
        "from_reward": (),
        "from_row": (),
        "from_tokens": (),
        "half": ("algorithm.surrogate.scale=0.5",),
    }.items():
        surrogate = f"algorithm.surrogate={readers}:{'from_tokens' if name == 'half' else name}"
        losses[name] = [row["update/loss"] for row in run(tmp_path / name, reward, surrogate, *settings)]
    assert losses["from_row"] == losses["from_reward"]
    assert losses["from_tokens"][0] == pytest.approx(2 * losses["half"][0], rel=1e-6)
    # The end token has no text, so that it has no value.
    assert abs(losses["half"][0]) < abs(losses["from_row"][0])


@pytest.mark.tier("slow")  # plain: test_reward_terms_and_columns_of_own_functions
@pytest.mark.parametrize("width", ["update.micro_batch_tokens=0", "update.micro_batch_tokens=192"])
def test_an_advantage_can_be_taken_anew_at_replay_from_the_stored_mean_of_the_group(run, methods, tmp_path, width):
    """AsymRE's advantage.

    Its delta_v is then a setting of the loss: changed in a later run, it also applies to old rollouts.
    """
    shift = f"algorithm.surrogate={methods}:anew"
    stored = run(tmp_path / "stored", "algorithm.advantage=asymre", "algorithm.surrogate=reinforce", width)
    anew = run(tmp_path / "anew", shift, width)
    assert len(stored) == len(anew) == 2 and stored[1]["update/loss"] != 0
    for one, other in zip(stored, anew, strict=True):
        assert one["update/loss"] == pytest.approx(other["update/loss"], rel=1e-5)
        assert one["update/grad_norm"] == pytest.approx(other["update/grad_norm"], rel=1e-5)
    other = run(tmp_path / "other", shift, "algorithm.surrogate.delta_v=-0.4", width)
    assert other[0]["update/loss"] != pytest.approx(anew[0]["update/loss"], rel=1e-2)


def test_reward_terms_and_columns_of_own_functions(run, monkeypatch, tmp_path):
    """The functions of docs/how-to/write_a_method.md, by its command, with a reward term of the package.

    They are traced, not trained.
    """
    ghosts.haunt(monkeypatch)
    methods = tmp_path / "penalties.py"
    methods.write_text(files()["penalties.py"])
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in commands() if "--workdir=runs/own " in command]
    settings = [word.removeprefix("--config.") for word in shlex.split(command) if word.startswith("--config.")]
    shaped = run(tmp_path / "a", *settings, "algorithm.reward_terms.overlong_penalty.buffer=2")
    assert len(shaped) == 2
    config = json.loads((tmp_path / "a" / "config.json").read_text())["algorithm"]
    assert [term["name"] for term in config["reward_terms"]] == ["penalties.py:brevity", "overlong_penalty"]
    assert config["reward_terms"][0]["weight"] == 0.2 and config["surrogate"]["beta"] == 0.05
    # Its config can be read where the file is no more, and says what it was.
    methods.unlink()
    text = (tmp_path / "a" / "config.json").read_text()
    read = from_json(text).algorithm.surrogate
    assert read.name == "penalties.py:pulled"
    assert read["beta"] == 0.05
    assert from_json(to_json(from_json(text))) == from_json(text)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (["algorithm.surrogate={}:missing"], ["algorithm.surrogate", "missing"]),
        (["algorithm.surrogate={}:plain", "algorithm.surrogate.power=2"], ["algorithm.surrogate.power", "plain"]),
        (["algorithm.reshaping={}:damped", "algorithm.reshaping.{}:damped.share=2"], ["share=2", "at most 1"]),
        (["algorithm.surrogate={}:silent"], ["algorithm.surrogate", "number for each token"]),
        (["algorithm.old_policy={}:averaged"], ["algorithm.old_policy", ":averaged' needs", "`decay`, a float"]),
        (["algorithm.old_policy={}:averaged_by_text"], ["algorithm.old_policy", "`decay`, a float"]),
        (["algorithm.advantage={}:looking_back"], ["algorithm.advantage", "'previous_logp'"]),
        (["algorithm.advantage={}:of_groups"], ["algorithm.advantage", "'group_mean'"]),
        (["algorithm.surrogate={}:unsure"], ["algorithm.surrogate", "must not need 'entropy'"]),
        (["algorithm.advantage={}:centred", "rollout.group_size=1"], ["rollout.group_size=1", "centred"]),
        pytest.param(
            ["algorithm.surrogate={}:centred", "replay.unit=group"],
            ["centred, line 11", "AttributeError"],
            marks=pytest.mark.tier("slow"),
        ),
    ],
)
def test_bad_own_functions_are_refused_in_one_line(run, methods, tmp_path, settings, names):
    said = run(tmp_path / "run", *(setting.replace("{}", str(methods)) for setting in settings))
    assert isinstance(said, str)
    assert said.startswith("error: ")
    assert not [name for name in names if name not in said], said


def test_a_config_file_names_one_too(methods):
    config = defaults()
    config.algorithm.surrogate = use(f"{methods}:pulled", beta=0.2)
    frozen = freeze(config)
    assert frozen.keeps_reference
    assert str(frozen.algorithm.surrogate) == f"{methods}:pulled(beta=0.2)"
    with refused("algorithm.surrogate.beta", "x"):
        freeze({"algorithm": {"surrogate": {"name": f"{methods}:pulled", "beta": "x"}}})
