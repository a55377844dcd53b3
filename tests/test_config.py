"""Configuration: what freeze accepts and refuses, round trips, and that every setting changes something.

Each setting has a row in ``ALIVE``: another value, where to look, and what else must be set for it to matter. Where to
look is always a product of the code (the text of a program, the questions loaded, the files of a run), never the
config itself; a new setting without a row fails, and so does one that nothing reads.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from support import ghosts
from support.building import ONE, TINY, mesh_of, needs_reasoning_gym

from jaxrl_llm import config as config_module
from jaxrl_llm import limits
from jaxrl_llm import train as train_module
from jaxrl_llm.actor import actor
from jaxrl_llm.actor.evaluation import questions
from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.actor.guests import External
from jaxrl_llm.actor.rewards import RewardPool
from jaxrl_llm.algorithms.memory import Memory
from jaxrl_llm.config import Config, ConfigError, flatten, freeze, from_json, to_json
from jaxrl_llm.learner import learner
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.files.tokenizer import ByteTokenizer
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import PromptStream
from jaxrl_llm.reports.metrics import cost_values, rollout_values
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.nested import differences
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, STOP_EOS, Example, Rewards

ROOT = pathlib.Path(__file__).parents[1]
FUNCTIONS = ROOT / "tests" / "fixtures" / "reward_functions.py"


def with_settings(**paths):
    """Nested settings from ``{"update__batch_size": 4}``-like or dotted names."""
    nested = {}
    for path, value in paths.items():
        *groups, name = path.replace("__", ".").split(".")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return nested


# ---- freeze ----------------------------------------------------------------------------------------------------


def test_every_config_file_loads_and_freezes():
    files = sorted((ROOT / "configs").glob("*.py"))
    assert files
    for path in files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = freeze(module.get_config())
        assert from_json(to_json(config)) == config
        assert f"--config=configs/{path.name}" in module.__doc__


def test_the_defaults_are_a_config():
    assert freeze(config_module.defaults()) == freeze({}) == Config()
    with pytest.raises(AttributeError, match="group_sise"):
        config_module.defaults().rollout.group_sise = 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sede": 1}, "unknown config key sede=1; did you mean seed"),
        ({"objective": {"clip_lo": 0.1}}, "unknown config key objective.clip_lo=0.1; did you mean objective.clip_low"),
        ({"mesh": {"zzzz": 1}}, "unknown config key mesh.zzzz=1; known: data, fsdp, tensor"),
        ({"update": 3}, "update=3 must be a group of settings"),
        ({"seed": 1.0}, "seed=1.0 must be of type int, not float"),
        ({"seed": True}, "seed=True must be of type int, not bool"),
        ({"seed": -1}, "seed=-1 must be at least 0 and at most 2147483647"),
        ({"sampling": {"temperature": "1"}}, "sampling.temperature='1' must be of type float, not str"),
        ({"sampling": {"stop_strings": [1]}}, "sampling.stop_strings[0]=1 must be of type str, not int"),
        ({"sampling": {"stop_strings": ("",)}}, "sampling.stop_strings must not contain the empty string"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p=0.0 must be more than 0.0 and at most 1.0"),
        ({"optimizer": {"learning_rate": float("inf")}}, "optimizer.learning_rate=inf must be at least 0.0"),
        ({"rollout": {"group_size": 0}}, "rollout.group_size=0 must be at least 1"),
        (
            {"rollout": {"group_size": 1}, "update": {"batch_size": 8, "micro_batch_size": 8}},
            "rollout.group_size=1 must be at least 2 for credit.advantage='grpo', which compares siblings; "
            "'reinforce_pp', 'mssr', 'gae' do not",
        ),
        (
            {"credit": {"overlong_buffer_tokens": 17}},
            "credit.overlong_buffer_tokens=17 must be at most sampling.max_completion_tokens=16",
        ),
        (
            {"credit": {"short_answer_iterations": 5}},
            "credit.short_answer_iterations=5 needs credit.short_answer_tokens",
        ),
        ({"credit": {"gate_threshold": 0.5}}, "credit.gate_threshold=0.5 must be 0 but with credit.advantage='gdpo'"),
        ({"credit": {"delta_v": float("nan")}}, "credit.delta_v=nan must be"),
        (
            {"credit": {"advantage": "gae", "entropy_reweighting": 1.0}},
            "credit.entropy_reweighting=1.0 must be 0 for credit.advantage='gae'",
        ),
        ({"objective": {"value_bins": 1}}, "objective.value_bins=1 must be 0 or at least 2"),
        ({"objective": {"value_low": 1}}, "objective.value_low=1.0 below objective.value_high=1.0"),
        ({"objective": {"value_bins": 5, "value_clip": 0.2}}, "objective.value_clip=0.2 must be 0 for"),
        (
            {"model": {"reference_path": "random:debug"}},
            "model.reference_path='random:debug' must be '' where nothing reads the reference: neither objective.kl_",
        ),
        (
            {"objective": {"reference_reset_iterations": (50,)}},
            "reset_iterations=(50,) must be () or numbers from 1 on",
        ),
        (
            {"objective": {"reference_reset_iterations": (0,), "kl_coefficient": 0.1}},
            "objective.reference_reset_iterations=(0,) must be () or numbers from 1 on",
        ),
        ({"model": {"remat": "some"}}, "model.remat='some' is not one of 'none', 'dots', 'full', 'auto'"),
        ({"update": {"micro_batch_size": 24}}, "update.micro_batch_size=24 must divide update.batch_size=64"),
        ({"replay": {"capacity": 32}}, "replay.capacity=32 must be at least update.batch_size=64"),
        ({"replay": {"capacity": 96}}, "replay.capacity=96 must be a multiple of the 64 rollouts"),
        ({"replay": {"positive_fraction": 0.5}}, "replay.positive_fraction=0.5 of replay.capacity=64 must leave room"),
        ({"replay": {"capacity": 128, "positive_fraction": 0.5, "unit": "group"}}, "must be 0 for replay.unit='group'"),
        (
            {"replay": {"capacity": 256, "delay_iterations": 2, "capacity_tokens": 9000}},
            "replay.capacity_tokens=9000 must be 0 or at least 9216: the 192 rollouts",
        ),
        (
            {"replay": {"capacity_tokens": 3000}},
            "replay.capacity_tokens=3000 must be 0 or at least 3072: the 64",
        ),
        (
            {"replay": {"capacity": 128, "capacity_tokens": 6144, "positive_fraction": 0.5}},
            "replay.positive_fraction=0.5 must be 0 with replay.capacity_tokens=6144",
        ),
        ({"external": {"paths": ("a",)}}, "external.groups_per_iteration=0 and external.paths=('a',) need each other"),
        ({"external": {"groups_per_iteration": 1}}, "external.groups_per_iteration=1 and external.paths=() need each"),
        (
            {"external": {"paths": ("a",), "groups_per_iteration": 8}, "sampling": {"top_p": 0.5}},
            "sampling.top_k=0, sampling.top_p=0.5 and sampling.min_p=0.0 must be 0, 1 and 0 with external",
        ),
        (
            {"external": {"paths": ("a",), "groups_per_iteration": 8}, "replay": {"capacity": 192}},
            "replay.capacity=192 must be a multiple of the 128 rollouts",
        ),
        ({"objective": {"imitation_coefficient": 0.1}}, "imitation_coefficient=0.1 must be 0 without external.groups"),
        (
            {"objective": {"environment_coefficient": 0.1}, "prompts": {"max_tokens": 1}},
            "prompts.max_tokens=1 must be at least 2 for objective.environment_coefficient=0.1",
        ),
        ({"replay": {"delay_iterations": 1}}, "replay.delay_iterations=1 must be less than the 1 iterations"),
        (
            {"replay": {"capacity": 256, "delay_iterations": 3, "max_age_steps": 2}},
            "replay.delay_iterations=3 must be at most replay.max_age_steps=2",
        ),
        (
            {"credit": {"advantage": "mssr", "baseline_decay": 0.8, "baseline_decay_moving": 0.9}},
            "credit.baseline_decay_moving=0.9 must be at most credit.baseline_decay=0.8",
        ),
        (
            {"credit": {"advantage": "asymre"}, "rollout": {"max_resample_rounds": 1}},
            "rollout.max_resample_rounds=1 must be 0 for credit.advantage='asymre': a tied group teaches",
        ),
        (
            {
                "credit": {"positive_amplification": 0.5},
                "objective": {"surrogate": "spo"},
                "replay": {"unit": "group"},
            },
            "credit.positive_amplification=0.5 must be 0 for objective.surrogate='spo', which reads rewards",
        ),
        (
            {"rollout": {"max_lag_iterations": 2}},
            "rollout.max_lag_iterations=2 must be 0 without rollout.lookahead_prompts: no prompt stays open",
        ),
        (
            {"sampling": {"top_k": 65, "support_tokens": 64}},
            "sampling.top_k=65 must be at most sampling.support_tokens=64: the ids that a token is drawn among are",
        ),
        (
            {"credit": {"advantage_norm_decay": 0.5}},
            "credit.advantage_norm_decay=0.5 must be 0 for credit.advantage='grpo', which no standard deviation of the",
        ),
        (
            {"replay": {"fresh_batches": True}},
            "replay.fresh_fraction=0.0 must lie between 0 and 1 with replay.fresh_batches",
        ),
        (
            {"replay": {"capacity": 256, "delay_iterations": 3, "fresh_fraction": 0.5}},
            "replay.delay_iterations=3 must be 0 with replay.fresh_fraction=0.5",
        ),
        (
            {
                "rollout": {"group_size": 1, "max_resample_rounds": 1},
                "credit": {"advantage": "mssr"},
                "update": {"batch_size": 8, "micro_batch_size": 8},
            },
            "rollout.max_resample_rounds=1 must be 0 for rollout.group_size=1",
        ),
        ({"rollout": {"slots": 65}}, "rollout.slots=65 must be at most the 64 rollouts that can be open"),
        ({"rewards": {"weights": (1.0, 2.0)}}, "must have one weight for each of rewards.functions=('task',)"),
        ({"rewards": {"functions": ("a:b", "a:b"), "weights": (1, 1)}}, "must not name a function twice"),
        ({"prompts": {"source": "jsonl"}}, "prompts.name='' must name the file"),
        ({"prompts": {"size": 0}}, "prompts.size=0 must be at least 1"),
        ({"checkpoint": {"keep_best": 1}}, "checkpoint.keep_best=1 needs eval.num_prompts"),
        ({"replay": {"unit": "group"}, "update": {"micro_batch_size": 4}}, "multiple of rollout.group_size=8"),
        ({"update": {"pack_width": 4096}}, "update.pack_width=4096 must be 0, or with update.micro_batch_tokens"),
        ({"update": {"pack_width": 9, "micro_batch_tokens": 9}}, "update.micro_batch_tokens at least the 48 tokens"),
        ({"update": {"micro_batch_tokens": 100}}, "update.micro_batch_tokens=100 must be a multiple of the"),
        ({"objective": {"surrogate": "agro"}}, "replay.unit='rollout' must be 'group' for objective.surrogate='agro'"),
        ({"objective": {"dual_clip": 0.5}}, "objective.dual_clip=0.5 must be 0, or above 1 with"),
        ({"objective": {"dual_clip": 3.0, "surrogate": "cispo"}}, "objective.dual_clip=3.0 must be 0"),
        (
            {"objective": {"proximal": "start", "surrogate": "reinforce"}},
            "objective.proximal='start' must be 'behaviour' for objective.surrogate='reinforce'",
        ),
        ({"objective": {"surrogate": "remix_centred"}}, "objective.proximal='behaviour' must be another"),
        (
            {"objective": {"correction": "token_truncated"}},
            "objective.correction='token_truncated' must be 'none' or one that masks for "
            "objective.surrogate='clipped' with objective.proximal='behaviour'",
        ),
    ],
)
def test_freeze_names_the_key_the_value_and_what_is_allowed(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        freeze(settings)


def test_freeze_converts_what_means_the_same():
    config = freeze({"optimizer": {"learning_rate": 1}, "sampling": {"stop_strings": ["a"]}})
    assert isinstance(config.optimizer.learning_rate, float) and config.sampling.stop_strings == ("a",)


def test_a_config_survives_json_and_what_differs_is_named():
    config = freeze({"seed": 3, "prompts": {"arguments": {"a": [1, 2]}}, "sampling": {"stop_strings": ("x", "y")}})
    assert from_json(to_json(config)) == config
    other = dataclasses.replace(config, objective=dataclasses.replace(config.objective, clip_low=0.1))
    assert differences(config, other) == {"objective.clip_low": (0.2, 0.1)}
    assert differences(config, config) == {}


def test_rates_and_averages_are_scaled_from_the_batch_size_that_they_are_meant_for():
    """Four times the rollouts in a step: rates doubled, averages over a quarter of the steps: of as many rollouts."""
    given = {"objective": {"ewma_decay": 0.9}, "credit": {"advantage": "reinforce_pp", "advantage_norm_decay": 0.8}}
    config = freeze(given | {"update": {"scaled_from_batch_size": 16}}).scaled()  # the default is 64
    assert (config.optimizer.learning_rate, config.optimizer.value_learning_rate) == (2e-5, 2e-3)
    # Centres of mass 9 and 4 steps become 9/4 and 1.
    assert config.objective.ewma_decay == pytest.approx(2.25 / 3.25)
    assert config.credit.advantage_norm_decay == pytest.approx(0.5)
    plain = freeze(given)
    assert plain.scaled() == plain and config.scaled() == config


def test_a_smaller_batch_at_a_scaled_rate_goes_as_far_on_as_many_rollouts():
    """Adam where noise dominates: batches of 64 and 16 of the same gradients, of mean 0.02 and standard deviation 1."""

    def distance(batch_size, rate):
        optimizer, steps = optax.adam(rate), 65536 // batch_size
        noise = jax.random.normal(jax.random.key(0), (steps, 256)) / np.sqrt(batch_size)

        def step(carry, noise):
            x, state = carry
            updates, state = optimizer.update(0.02 + noise, state)
            return (x + updates, state), None

        start = jnp.zeros(256)
        return -float(jnp.mean(jax.lax.scan(step, (start, optimizer.init(start)), noise)[0][0]))

    small = freeze({"update": {"batch_size": 16, "micro_batch_size": 16, "scaled_from_batch_size": 64}}).scaled()
    large = distance(64, 1e-5)
    assert small.optimizer.learning_rate == pytest.approx(0.5e-5)
    # Measured: 1.01; with the rate as it was 2.02.
    assert distance(16, small.optimizer.learning_rate) == pytest.approx(large, rel=0.05)
    assert distance(16, 1e-5) > 1.9 * large


def test_every_bound_and_choice_is_of_a_setting():
    assert set(limits.BOUNDS) | set(limits.CHOICES) <= set(flatten(Config()))


# ---- every setting is alive ----------------------------------------------------------------------------------------

# Every number that is counted in rows divides over eight devices.
SETTINGS = {
    "num_iterations": 3,
    "prompts.size": 40,
    "sampling.max_completion_tokens": 8,
    "rollout.prompts_per_iteration": 8,
    "rollout.group_size": 2,
    "rollout.slots": 8,
    "replay.capacity": 32,
    "rewards.num_workers": 1,
    "update.batch_size": 16,
    "update.micro_batch_size": 8,
    "update.updates_per_iteration": 2,
    "update.logp_chunk_tokens": 8,
    "metrics.tensorboard": False,
    "checkpoint.export": False,
}


@functools.cache
def program_text(config_text, name):
    run = assemble(from_json(config_text), TINY, (257,), mesh_of(ONE))
    return run.programs()[name].lower(run.mesh).as_text()


def program(name):
    """Look at the text of one program of the run on one device."""

    def look(config, folder, monkeypatch):
        return program_text(to_json(config), name)

    look.__name__ = name
    return look


def shapes(config, folder, monkeypatch):
    """Every array a run keeps on the device."""
    run = assemble(config, TINY, (257,), mesh_of(ONE))
    kept = (
        run.learner.abstract_ring,
        run.sampler.abstract_state(),
        run.eval_sampler and run.eval_sampler.abstract_state(),
    )
    return [(x.shape, x.dtype) for x in jax.tree.leaves(kept)]


def mesh(config, folder, monkeypatch):
    return dict(sharding.make_mesh(config.mesh).shape)


def model(config, folder, monkeypatch):
    return pretrained.resolve(config.model.path).architecture()


def loaded_models(config, folder, monkeypatch):
    """Shapes of the models whose weights a run loads."""
    shapes, random = [], pretrained._random

    def noted(path, setting):
        source = random(path, setting)
        load = lambda model, mesh, *, seed: shapes.append(model.arch) or source.load_params(model, mesh, seed=seed)
        return dataclasses.replace(source, load_params=load)

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_random", noted)
        ghost_run(config, folder, monkeypatch)
    return shapes


def kernel_of_a_tpu(config, folder, monkeypatch):
    tpu = types.SimpleNamespace(shape=mesh_of(ONE).shape, devices=np.array([types.SimpleNamespace(platform="tpu")]))
    return assemble(config, TINY, (257,), tpu).model.attention


def loaded(config, folder, monkeypatch):
    """Token ids of the questions, held out and in the stream's order, and what was skipped."""
    train, held_out, skipped = questions(config, ByteTokenizer())
    order = PromptStream(train, config.prompts, Ledger(), seed=config.seed).next_batch(8)
    return [[row.tokens.tolist() for row in rows] for rows in (train, held_out)], skipped, order.tokens.tolist()


def spelled(config, folder, monkeypatch):
    """Token ids of the questions by a tokenizer that has special tokens in its vocabulary."""
    return [row.tokens.tolist() for row in questions(config, make_byte_tokenizer(ByteTokenizer.special))[0]]


def scores(config, folder, monkeypatch):
    """What the reward pool makes of two completions, one of them slow, and with how many processes."""
    with RewardPool(config.rewards, task_scorer=tasks.scorer(config.prompts)) as pool:
        processes = len(psutil.Process().children())
        columns = {"allowed": "slow", "answer": "a"}
        rewards = pool.collect([pool.submit(Example("p", columns), ["slow", "low!"])])
    return processes, rewards.total.tolist(), rewards.outcome.tolist()


def stops(config, folder, monkeypatch):
    """What a stop string does to a row that a chunk of decoding has left at "a;b"."""
    sampler = assemble(config, TINY, (257,), mesh_of(ONE)).sampler
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(sampler._empty))
    state.tokens[0, 0, 0, 1:4] = list(b"a;b")
    state.length[0, 0] = 4
    generator = Generator(sampler, {"stop_rows": lambda s, _: s}, ByteTokenizer().decode)
    generator.state = state
    generator.adopt(0, 0, 0, 0, None, [0])
    return generator._apply_stop_strings(state.stop_reason, np.zeros(state.stop_reason.shape, np.int64)).tolist()


def cache(config, folder, monkeypatch):
    """Where a run would keep its compiled programs."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    try:
        ghost_run(config, folder, monkeypatch)
        return jax.config.jax_compilation_cache_dir
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def guests(config, folder, monkeypatch):
    """Token ids of others that an iteration would begin with."""
    source = External(assemble(config, TINY, (257,), mesh_of(ONE)), ByteTokenizer())
    return np.asarray(source.next_groups(0, lambda group: None).rows.tokens).tolist()


def remembered(config, folder, monkeypatch):
    """What a question that was answered right once, while the policy moved, is expected to give."""
    rewards, memory = Rewards(np.ones(1, np.float32), {}, np.zeros(1, np.int8)), Memory(config, 0, Ledger())
    memory.observe(rewards, [0], {"kl_behaviour_sum": 1.0, "token_count": 10})
    return memory.scores(rewards, [0]).baseline.tolist()


def retires(config, folder, monkeypatch):
    """What is asked after one question has been answered right."""
    stream = PromptStream(questions(config, ByteTokenizer())[0], config.prompts, Ledger(), seed=config.seed)
    stream.ledger.observe([stream.question_id(0)], np.ones(1, bool), np.ones(1, bool))
    return stream.next_batch(4).group_id.tolist()


def failures(config, folder, monkeypatch):
    """Whether a run stops when half its rewards failed."""
    outcome = np.array([OUTCOME_SCORE, OUTCOME_ERROR], np.int8)
    return actor.too_many_failures(config, Rewards(np.array([1.0, np.nan]), {}, outcome))


def gap(config, folder, monkeypatch):
    """Whether a run stops when sampler and learner differ by 0.01 nats."""
    try:
        learner.check_gap(config, {"own_token_count": 1, "gap_max": 0.01})
    except learner.SamplerLearnerGapError as error:
        return str(error)
    return None


def passes(config, folder, monkeypatch):
    rewards = Rewards(np.array([0.25, 0.75]), {}, np.zeros(2, np.int8))
    group = FinishedGroup(0, None, [[1], [1]], [STOP_EOS, STOP_EOS])
    return rollout_values(config, [group], rewards, 0)["rollout/pass_rate"]


def costs(config, folder, monkeypatch):
    seconds = {"time/generate_s": 1.0, "time/reward_s": 0.0, "time/update_s": 1.0}
    return cost_values(config, seconds | {"replay/drawn_rows": 16, "rollout/generated_rows": 16}, 0.0)


def ghost_run(config, folder, monkeypatch):
    """What a run leaves behind whose programs return zeros."""
    ghosts.haunt(monkeypatch)
    workdir = folder / f"run{time.monotonic_ns()}"
    workdir.mkdir()
    assert train_module.train(config, workdir) == 0
    lines = {name: len((workdir / name).read_text().splitlines()) for name in ("metrics.jsonl", "samples.jsonl")}
    evaluations = sum('"eval/pass_rate"' in line for line in (workdir / "metrics.jsonl").read_text().splitlines())
    checkpoints = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    return sorted(path.name for path in workdir.iterdir()), checkpoints, lines, evaluations


def opened(config, folder, monkeypatch):
    """How many questions a ghost takes from the stream in each iteration."""
    taken, take = [], PromptStream.next_batch
    with monkeypatch.context() as patch:
        patch.setattr(PromptStream, "next_batch", lambda self, n: taken.append(n) or take(self, n))
        ghost_run(config, folder, monkeypatch)
    return taken


def asked(config, folder, monkeypatch):
    """How many rollouts each iteration samples of a ghost, whose answers are all alike."""
    ghost_run(config, folder, monkeypatch)
    lines = (max(folder.glob("run*")) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["rollout/generated_rows"] for line in lines]


def rows(*prompts):
    return "".join(json.dumps(p if isinstance(p, dict) else {"prompt": p}) + "\n" for p in prompts)


FILES = {
    "four.jsonl": rows("a", "b", "c", "d"),
    "five.jsonl": rows("a", "b", "c", "d", "e"),
    "messages.jsonl": rows({"messages": [{"role": "user", "content": "hi"}]}),
    "bad.jsonl": rows("a") + "{\n",
    "long.jsonl": rows("a", "b" * 40),
    "special.jsonl": rows("a<|eos|>"),
    "shown.jsonl": rows({"prompt": "a", "completions": ["b", "c"]}),
    "told.jsonl": rows({"prompt": "a", "completions": ["d", "e"]}),
}
FOUR = {"prompts.source": "jsonl", "prompts.name": "four.jsonl"}
GYM = {"prompts.source": "reasoning_gym", "prompts.name": "chain_sum", "prompts.max_tokens": 128}
EVALUATED = {"eval.num_prompts": 8}
CHECKPOINTED = {"checkpoint.every_iterations": 1, "checkpoint.keep_last": 1}
WITH_KL = {"objective.kl_coefficient": 0.1}
PLAIN = {"objective.surrogate": "reinforce"}
SHOWN = {"external.paths": ("shown.jsonl",), "external.groups_per_iteration": 8, "replay.capacity": 64}
GDPO = {"credit.advantage": "gdpo", "rewards.functions": ("a:b", "c:d"), "rewards.weights": (1.0, 1.0)}
CRITIC = {"credit.advantage": "gae"}
BINS = CRITIC | {"objective.value_bins": 8}

# setting -> (another value, where to look, what else must be set)
ALIVE = {
    "seed": (1, loaded, {}),
    "num_iterations": (4, ghost_run, {}),
    "compilation_cache": ("/tmp/other", cache, {}),
    "model.path": ("random:debug_wide", model, {}),
    "model.reference_path": ("random:debug_wide", loaded_models, WITH_KL),
    "model.compute_dtype": ("bfloat16", program("decode"), {}),
    "model.remat": ("none", program("update"), {}),
    "model.attention": ("xla", kernel_of_a_tpu, {}),
    "prompts.source": ("letters", loaded, FOUR),
    "prompts.name": ("five.jsonl", loaded, FOUR),
    "prompts.arguments": ({"min_terms": 6, "max_terms": 6}, loaded, GYM),
    "prompts.size": (30, loaded, {}),
    "prompts.max_tokens": (40, shapes, {}),
    "prompts.system_prompt": ("Be kind.", loaded, {}),
    "prompts.chat_template": (False, loaded, {"prompts.source": "jsonl", "prompts.name": "messages.jsonl"}),
    "prompts.special_tokens": (True, spelled, {"prompts.source": "jsonl", "prompts.name": "special.jsonl"}),
    "prompts.bad_row": ("skip", loaded, {"prompts.source": "jsonl", "prompts.name": "bad.jsonl"}),
    "prompts.long_prompt": ("skip", loaded, {"prompts.source": "jsonl", "prompts.name": "long.jsonl"}),
    "prompts.shuffle": (False, loaded, {}),
    "prompts.retire_pass_rate": (0.9, retires, {}),
    "sampling.temperature": (0.5, program("decode"), {}),
    "sampling.top_k": (3, program("decode"), {}),
    "sampling.top_p": (0.9, program("update"), {}),
    "sampling.min_p": (0.1, program("decode"), {}),
    "sampling.support_tokens": (8, shapes, {"sampling.top_p": 0.9}),
    "sampling.max_completion_tokens": (6, shapes, {}),
    "sampling.stop_strings": ((";",), stops, {}),
    "rollout.prompts_per_iteration": (16, shapes, {}),
    "rollout.group_size": (4, shapes, {}),
    "rollout.slots": (16, shapes, {}),
    "rollout.chunk_steps": (3, program("decode"), {}),
    "rollout.lookahead_prompts": (8, shapes, {}),
    "rollout.max_lag_iterations": (1, opened, {"rollout.lookahead_prompts": 16}),
    "rollout.max_resample_rounds": (2, asked, {}),
    "rewards.functions": ((f"{FUNCTIONS}:length",), scores, {}),
    "rewards.weights": ((0.5,), scores, {}),
    "rewards.num_workers": (2, scores, {}),
    "rewards.timeout_s": (0.05, scores, {"rewards.functions": (f"{FUNCTIONS}:score",)}),
    "rewards.max_failure_frac": (0.4, failures, {}),
    "rewards.pass_threshold": (0.5, passes, {}),
    "credit.advantage": ("leave_one_out", program("insert"), {}),
    "credit.delta_v": (-0.2, program("insert"), {"credit.advantage": "asymre"}),
    "credit.baseline_decay": (0.5, remembered, {"credit.advantage": "mssr"}),
    "credit.baseline_decay_moving": (0.5, remembered, {"credit.advantage": "mssr"}),
    "credit.advantage_norm_decay": (0.9, program("insert"), {"credit.advantage": "reinforce_pp"}),
    "credit.gate_threshold": (0.5, program("insert"), GDPO),
    "credit.gae_lambda": (0.9, program("insert"), CRITIC),
    "credit.discount": (0.9, program("insert"), CRITIC),
    "credit.overlong_filter": (True, program("insert"), {}),
    "credit.overlong_buffer_tokens": (4, program("insert"), {}),
    "credit.length_reward": (0.5, program("insert"), {}),
    "credit.short_answer_tokens": (4, program("insert"), {}),
    "credit.short_answer_bonus": (1.0, program("insert"), {"credit.short_answer_tokens": 4}),
    "credit.short_answer_iterations": (1, program("insert"), {"credit.short_answer_tokens": 4}),
    "credit.positive_amplification": (3.0, program("insert"), {}),
    "credit.entropy_reweighting": (1.0, program("insert"), {}),
    "credit.duration_weight": (1.0, program("insert"), {}),
    "credit.entropy_bonus": (2.0, program("insert"), {}),
    "credit.entropy_bonus_limit": (2.0, program("insert"), {"credit.entropy_bonus": 2.0}),
    "replay.capacity": (64, shapes, {}),
    "replay.capacity_tokens": (1280, shapes, {}),
    "replay.positive_fraction": (0.5, program("insert"), {}),
    "replay.admission": ("likely", program("insert"), {"replay.positive_fraction": 0.5}),
    "replay.draw": ("age", program("update"), {}),
    "replay.priority": ("surprise", program("insert"), {}),
    "replay.priority_exponent": (2.0, program("update"), {"replay.draw": "priority"}),
    "replay.age_scale_iterations": (2.0, program("update"), {"replay.draw": "age"}),
    "replay.delay_iterations": (1, program("update"), {}),
    "replay.latest_visit": (True, program("insert"), {}),
    "replay.min_ess": (0.5, program("update"), {}),
    "replay.solved_fraction": (0.5, program("insert"), {}),
    "replay.max_age_steps": (2, program("update"), {}),
    "replay.max_uses": (2, program("update"), {}),
    "replay.fresh_fraction": (0.5, program("update"), {}),
    "replay.fresh_batches": (True, program("update"), {"replay.fresh_fraction": 0.5}),
    "replay.fresh_from_iteration": (3, program("update"), {}),
    "replay.unit": ("group", program("update"), {}),
    "replay.skip_tied": (True, program("insert"), {}),
    "replay.cost_ratio": (5.28, costs, {}),
    "replay.shards": (2, shapes, {}),
    "external.paths": (("told.jsonl",), guests, SHOWN),
    "external.groups_per_iteration": (24, program("insert"), SHOWN),
    "replay.memory": ("host", program("update"), {}),
    "update.batch_size": (8, program("update"), {}),
    "update.micro_batch_size": (4, program("update"), {}),
    "update.pack_width": (96, program("update"), {"update.micro_batch_tokens": 480}),
    "update.micro_batch_tokens": (480, program("update"), {}),
    "update.updates_per_iteration": (3, program("update"), {}),
    "update.logp_chunk_tokens": (64, program("update"), {}),
    "update.scaled_from_batch_size": (4, program("update"), {}),
    "update.max_sampler_learner_gap_nats": (0.001, gap, {}),
    "objective.surrogate": ("cispo", program("update"), {}),
    "objective.clip_low": (0.1, program("update"), {}),
    "objective.clip_high": (0.3, program("update"), {}),
    "objective.dual_clip": (3.0, program("update"), {}),
    "objective.regression_beta": (0.2, program("update"), {"objective.surrogate": "opmd"}),
    "objective.proximal": ("interpolated", program("update"), {}),
    "objective.ewma_decay": (0.5, program("update"), {"objective.proximal": "ewma"}),
    "objective.correction": ("token_masked", program("update"), PLAIN),
    "objective.correction_low": (0.1, program("update"), PLAIN | {"objective.correction": "token_masked"}),
    "objective.correction_high": (3.0, program("update"), PLAIN | {"objective.correction": "token_masked"}),
    "objective.correction_second_moment": (0.1, program("update"), PLAIN | {"objective.correction": "second_moment"}),
    "objective.ess_learning_rate": (True, program("update"), {}),
    "objective.entropy_target": (0.5, program("update"), {}),
    "objective.entropy_rate": (1e-3, program("update"), {"objective.entropy_target": 0.5}),
    "objective.aggregation": ("constant_length", program("update"), {}),
    "objective.kl_coefficient": (0.2, program("update"), WITH_KL),
    "objective.kl_estimator": ("k1", program("update"), WITH_KL),
    "objective.kl_anchor": ("convex", program("update"), WITH_KL),
    "objective.reference_reset_iterations": ((1,), program("update"), WITH_KL),
    "objective.entropy_coefficient": (0.01, program("update"), {}),
    "objective.environment_coefficient": (0.05, program("update"), {}),
    "objective.imitation_coefficient": (0.5, program("update"), SHOWN),
    "objective.value_coefficient": (0.2, program("update"), CRITIC),
    "objective.value_clip": (0.2, program("update"), CRITIC),
    "objective.value_bins": (8, program("values"), CRITIC),
    "objective.value_low": (-1.0, program("values"), BINS),
    "objective.value_high": (2.0, program("values"), BINS),
    "optimizer.value_learning_rate": (1e-2, program("update"), CRITIC),
    "optimizer.learning_rate": (1e-3, program("update"), {}),
    "optimizer.schedule": ("cosine", program("update"), {}),
    "optimizer.warmup_steps": (2, program("update"), {}),
    "optimizer.b1": (0.8, program("update"), {}),
    "optimizer.b2": (0.9, program("update"), {}),
    "optimizer.eps": (1e-6, program("update"), {}),
    "optimizer.weight_decay": (0.1, program("update"), {}),
    "optimizer.max_grad_norm": (0.5, program("update"), {}),
    "optimizer.reset_every_steps": (2, program("update"), {}),
    "optimizer.offload": (True, program("update"), {}),
    "mesh.data": (4, mesh, {"mesh.fsdp": 2, "mesh.data": 2, "mesh.tensor": 2}),
    "mesh.fsdp": (2, mesh, {}),
    "mesh.tensor": (2, mesh, {}),
    "checkpoint.every_iterations": (1, ghost_run, {"checkpoint.keep_last": 5}),
    "checkpoint.keep_last": (2, ghost_run, CHECKPOINTED),
    "checkpoint.keep_best": (3, ghost_run, CHECKPOINTED | EVALUATED | {"eval.every_iterations": 1}),
    "checkpoint.export": (True, ghost_run, {}),
    "eval.every_iterations": (1, ghost_run, EVALUATED),
    "eval.num_prompts": (8, shapes, {}),
    "eval.num_samples": (2, shapes, EVALUATED),
    "eval.temperature": (0.5, program("eval_decode"), EVALUATED),
    "eval.name": ("five.jsonl", loaded, FOUR | {"eval.num_prompts": 2}),
    "metrics.tensorboard": (True, ghost_run, {}),
    "metrics.samples_per_iteration": (2, ghost_run, {}),
    "metrics.share_rollouts": (True, ghost_run, {}),
}


def seen(look, settings, folder, monkeypatch):
    """What there is to see under these settings; a refusal is something to see too."""
    settings = dict(settings)
    for name in ("prompts.name", "eval.name"):
        if settings.get(name) in FILES:
            (folder / settings[name]).write_text(FILES[settings[name]])
            settings[name] = str(folder / settings[name])
    for name in settings.get("external.paths", ()):
        (folder / name).write_text(FILES[name])
    settings["external.paths"] = tuple(str(folder / name) for name in settings.get("external.paths", ()))
    try:
        return look(freeze(with_settings(**settings)), folder, monkeypatch)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("path", sorted(flatten(Config())))
def test_every_setting_changes_something(path, tmp_path, monkeypatch):
    assert path in ALIVE, f"{path} is a new setting: say in ALIVE where it can be seen"
    other, look, given = ALIVE[path]
    if given.get("prompts.source") == "reasoning_gym":
        needs_reasoning_gym()
    settings = SETTINGS | given
    assert flatten(freeze(with_settings(**settings)))[path] != other
    before = seen(look, settings, tmp_path, monkeypatch)
    assert seen(look, settings | {path: other}, tmp_path, monkeypatch) != before


@pytest.mark.parametrize("look", [ghost_run, scores, loaded], ids=lambda look: look.__name__)
def test_what_is_seen_changes_with_settings_alone(look, tmp_path, monkeypatch):
    assert seen(look, SETTINGS, tmp_path, monkeypatch) == seen(look, SETTINGS, tmp_path, monkeypatch)


def test_the_text_of_a_program_changes_with_settings_alone():
    config = to_json(freeze(with_settings(**SETTINGS)))
    for name in ("update", "decode", "insert"):
        assert program_text.__wrapped__(config, name) == program_text(config, name)


def test_no_row_is_of_a_setting_that_is_gone():
    assert set(ALIVE) <= set(flatten(Config()))
