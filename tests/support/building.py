"""Parts for tests of whole steps: a tiny model with large weights, ragged prompts, random rows.

Owns: sizes and short forms. Expected values come from elsewhere.
"""

import dataclasses
import functools
import importlib.util
import math
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.actor.external import External
from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import AlgorithmConfig, MeshConfig, ReplayConfig, SamplingConfig, UpdateConfig
from jaxrl_llm.learner import publish
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models.architecture import Architecture, Delta, Layer
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.filters import NO_TOKEN
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.settings import schema
from jaxrl_llm.types import Example, Experience, PromptBatch, Rollout, TrainState

# Two blocks of the inverse-CDF search (264 > 256); heads and vocabulary divide over tensor = 2.
TINY = Architecture(vocab_size=264, width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_size=4, ffn=32)
# Its first layer is a gated delta rule.
TINY_DELTA = dataclasses.replace(
    TINY,
    layers=(Layer(mixer="delta_rule"), Layer()),
    delta=Delta(key_heads=2, value_heads=2, key_size=4, value_size=4, taps=3, is_grouped=False),
)
PROMPT_TOKENS, COMPLETION_TOKENS = 6, 8
ROW_TOKENS = PROMPT_TOKENS + COMPLETION_TOKENS
# A tenth of the vocabulary ends a completion, so that lengths differ.
EOS_IDS = tuple(range(5, 264, 10))
ONE, EIGHT, CUBE = MeshConfig(data=1), MeshConfig(data=8), MeshConfig(data=2, fsdp=2, tensor=2)


def is_missing(module, extra):
    """Return a mark that skips a test if ``module`` is not installed."""
    reason = f"{module} (extra [{extra}]) is not installed"
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)


libtpu_is_missing = is_missing("libtpu", "plan")


def needs_libtpu(test):
    """Put a test that runs the TPU compiler into its tier."""
    return pytest.mark.tier("compiler")(libtpu_is_missing(test))


def needs_cuda_compiler(test):
    """Put a test that runs XLA's compiler for GPUs into the tier of the compilers."""
    return pytest.mark.tier("compiler")(is_missing("jax_cuda13_plugin", "plan-gpu")(test))


def needs_qwix(test):
    """Put a test of quantised weights into the tier of optional packages."""
    return pytest.mark.tier("extras")(is_missing("qwix", "quant")(test))


def needs_reasoning_gym():
    """Skip a test if reasoning_gym is not installed.

    It is not imported, because tests replace some of its packages by stand-ins.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning_gym is not installed")


@functools.cache
def mesh_of(config):
    """Return a mesh over as many of the simulated devices as the config's axes need."""
    return sharding.make_mesh(config, jax.devices()[: math.prod(getattr(config, axis) for axis in sharding.MESH_AXES)])


def make_mesh(**axes):
    """Return the mesh of these axes; data is 1 if it is not among them."""
    return mesh_of(MeshConfig(**{"data": 1} | axes))


def host_params(model, seed=0):
    """Return random float32 weights in numpy.

    Norms scale, and logits have a standard deviation of 1; larger weights would amplify rounding.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if "norm" in path[-1].key:
            return (1 + 0.2 * rng.normal(size=leaf.shape)).astype(np.float32)
        return (rng.normal(size=leaf.shape) / np.sqrt(model.arch.width)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_params(mesh_of(ONE)))


def learner_params(model, mesh, seed=0):
    return jax.device_put(host_params(model, seed), jax.tree.map(lambda x: x.sharding, model.abstract_params(mesh)))


# --- sampling ---


def make_sampler(mesh=ONE, arch=TINY, *, sampling=None, **settings):
    """Return a sampler of 8 prompts x 3 samples. ``settings`` are fields of the sampler."""
    defaults = dict(num_prompts=8, group_size=3, max_prompt_tokens=PROMPT_TOKENS, num_slots=24, chunk_steps=16)
    return Sampler(
        model=Model(arch),
        mesh=mesh_of(mesh),
        sampling=dataclasses.replace(SamplingConfig(max_completion_tokens=COMPLETION_TOKENS), **sampling or {}),
        eos_ids=EOS_IDS,
        **defaults | settings,
    )


def abstract_sampler_params(sampler):
    return publish.abstract_params(sampler.model, sampler.mesh)


@functools.cache
def compile_sampler(sampler):
    """Compile the programs of a sampler, or reuse those of an earlier sampler with the same shapes."""
    programs = sampler.programs(abstract_sampler_params(sampler))
    N = sampler.support_tokens
    plain = SamplingConfig(max_completion_tokens=COMPLETION_TOKENS, min_p=1e-9 if N else 0.0, support_tokens=N or 64)
    plain = dataclasses.replace(sampler, sampling=plain)
    stops = dataclasses.replace(sampler, sampling=dataclasses.replace(sampler.sampling, stop_strings=()))
    if sampler == plain:
        return compile_all(programs, sampler.mesh)
    if sampler == stops:
        return compile_sampler(plain) | compile_all({"decode": programs["decode"]}, sampler.mesh)
    return compile_sampler(stops) | compile_all({"stop_rows": programs["stop_rows"]}, sampler.mesh)


def compile_once(compiled):
    """Call ``compile_all`` for the first run, and reuse its programs, kept in the dict ``compiled``, for equal runs."""

    def call(programs, mesh):
        if not compiled:
            compiled.update(compile_all(programs, mesh))
        return compiled

    return call


def letters(ids):
    """Return the text of token ids: one letter each, without end tokens."""
    return "".join(chr(ord("a") + i % 26) for i in ids if i not in EOS_IDS)


class Sampling:
    """A generator with weights and a key. ``__call__`` generates once and returns numpy rows."""

    def __init__(self, sampler, *, seed=0, compiled=None, conversations=None, params=None):
        self.sampler = sampler
        self.generator = Generator(sampler, compiled or compile_sampler(sampler), letters, conversations=conversations)
        if params is None:
            params = publish.sampler_form(host_params(sampler.model), sampler.model.arch)
        self.params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, abstract_sampler_params(sampler)))
        self.key = self.put(jax.random.key(seed))

    def put(self, x):
        return jax.device_put(x, sharding.replicated(self.sampler.mesh, 0))

    def __call__(self, prompts, *, version=0, on_finished=lambda group: None):
        groups = self.generator.generate(
            self.params, prompts, version=self.put(np.int32(version)), key=self.key, on_finished=on_finished
        )
        return jax.tree.map(np.asarray, self.generator.take()), groups


class Interrupted(Exception):
    pass


def interrupt(sampling, prompts, *, after, version=0):
    """Stop a generation at a check of the host, after ``after`` earlier checks."""
    checks = iter(range(after))

    def check():
        if next(checks, None) is None:
            raise Interrupted

    sampling.generator.check = check
    with pytest.raises(Interrupted):
        sampling(prompts, version=version)


def settings_of(path, changes):
    """Return the mapping of a config file, with settings changed by path."""
    mapping = runpy.run_path(str(path))["get_config"]().to_dict()
    for name, value in changes.items():
        *groups, last = name.split(".")
        functools.reduce(dict.__getitem__, groups, mapping)[last] = value
    return mapping


def make_prompts(ids, *, width=PROMPT_TOKENS, arch=TINY):
    """Return prompts of 1 to 6 tokens. Each is a function of its id alone."""
    tokens, length = np.zeros((len(ids), width), np.int32), np.zeros(len(ids), np.int32)
    for row, name in enumerate(ids):
        rng = np.random.default_rng([7, name])
        length[row] = 1 + name % PROMPT_TOKENS
        tokens[row, : length[row]] = rng.integers(0, arch.vocab_size, length[row])
    examples = tuple(Example(f"prompt {name}", {}) for name in ids)
    return PromptBatch(tokens, length, np.asarray(ids, np.int32), examples)


def completions(rollout):
    """Return {(group_id, sample index): token ids of the completion}."""
    seen, result = {}, {}
    for row, name in enumerate(rollout.group_id.tolist()):
        sample = seen[name] = seen.get(name, -1) + 1
        result[name, sample] = tuple(rollout.tokens[row, rollout.prompt_length[row] : rollout.length[row]].tolist())
    return result


# --- rows for the update ---


NUM_ROWS = 16


def penalty(estimator, name="reference", **settings):
    """Return a KL penalty of weight 0.3."""
    return {"name": name, "coefficient": 0.3, "estimator": estimator, **settings}


# Settings of the loss; every aggregation and every estimator once.
LOSSES = {
    "token mean, k3": {"aggregation": "token_mean", "divergence": penalty("k3")},
    "sequence mean, k1": {"aggregation": "sequence_mean", "divergence": penalty("k1")},
    "constant length, k2": {"aggregation": "constant_length", "divergence": penalty("k2")},
}

# Settings of a critic; where they are given, the state has a head and the rows have returns.
CRITICS = {
    "critic, clipped value": {"critic": {"gradient_share": 0.3, "clip": 0.2}},
    "critic, bins": {"critic": {"gradient_share": 0.5, "bins": 9, "low": -1.0, "high": 1.0}},
}

# Settings of what is learned of tokens beside their credit; the rows are then in part of others.
CROSS_ENTROPIES = {
    "cross-entropies": {
        "cross_entropies": [{"name": "environment", "coefficient": 0.3}, {"name": "imitation", "coefficient": 0.5}]
    }
}


def random_experience(
    num_rows=NUM_ROWS,
    *,
    seed=0,
    arch=TINY,
    with_reference=True,
    with_critic=False,
    with_others=False,
    group_size=1,
    support_size=0,
):
    """Return ragged rows in numpy, each ``group_size`` neighbours with one prompt.

    A quarter of the rows is not trainable, one has a single completion token, and one has full length. If asked for,
    the first half is external, and every other row of it is correct. With ``support_size`` each token was drawn among
    at most so many ids.
    """
    rng = np.random.default_rng(seed)
    B, S = num_rows, ROW_TOKENS
    first = np.arange(B) // group_size * group_size
    prompt_length = rng.integers(1, PROMPT_TOKENS + 1, B).astype(np.int32)[first]
    completion = rng.integers(1, COMPLETION_TOKENS + 1, B)
    completion[0], completion[1] = 1, COMPLETION_TOKENS
    length = (prompt_length + completion).astype(np.int32)
    at = np.arange(S)[None, :]
    mask = (at >= prompt_length[:, None]) & (at < length[:, None])
    # Near the log-probs such a model gives, so that ratios lie on both sides of both bounds.
    behaviour_logp = rng.normal(-5.5, 1.0, (B, S))
    trainable = np.arange(B) % 4 != 3
    tokens = rng.integers(0, arch.vocab_size, (B, S))
    tokens = np.where(at < prompt_length[:, None], tokens[first], tokens)
    rollout = Rollout(
        tokens=np.where(at < length[:, None], tokens, 0).astype(np.int32),
        prompt_length=prompt_length,
        length=length,
        behaviour_logp=np.where(mask, behaviour_logp, 0.0).astype(np.float32),
        group_id=np.arange(B, dtype=np.int32) // 2,
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        stop_reason=np.ones(B, np.int8),
    )
    if support_size:
        others = rng.integers(0, arch.vocab_size, (B, S, support_size - 1))
        others = np.where(rng.random(others.shape) < 0.2, NO_TOKEN, others)
        support = np.sort(np.concatenate([rollout.tokens[..., None], others], axis=-1), axis=-1)
        rollout = rollout.with_columns(support=np.where(mask[..., None], support, 0).astype(np.int32))
    ref_logp = np.where(mask, rng.normal(-5.5, 0.5, (B, S)), 0.0).astype(np.float32)
    reward, advantage = rng.normal(size=B), rng.normal(size=(B, 1))
    if with_others:
        others = np.arange(B) < B // 2
        rollout = rollout.replace(group_id=np.where(others, -1 - rollout.group_id, rollout.group_id))
        reward = np.arange(B) % 2
    returns, value = (np.where(mask, rng.normal(0, 0.5, (B, S)), 0.0).astype(np.float32) for _ in range(2))
    columns = {"ref_logp": ref_logp} if with_reference else {}
    columns |= {"returns": returns, "value": value} if with_critic else {}
    return Experience(
        rollout=rollout,
        reward=reward.astype(np.float32),
        advantage=np.where(mask, advantage, 0.0).astype(np.float32),
        trainable=trainable,
        columns=columns,
    )


# The optimizer's "state" is the last gradient, as the real update handed it over.
RECORDER = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda gradient, state, params: (gradient, gradient),
)


def algorithm_config(**settings):
    """Return a method whose functions are given as in a config: by name, or as a mapping of name and settings."""
    return schema.build(AlgorithmConfig, settings)


def replay_config(**settings):
    """Return replay settings whose functions are given in the same way."""
    return schema.build(ReplayConfig, settings)


def make_update(config=None, sampling=None, *, num_devices=1, remat="none", group_size=1):
    """Return an update. ``config`` has fields of the update's and of the algorithm's settings."""
    config = config or {}
    algorithm = {k: v for k, v in config.items() if k in AlgorithmConfig.__dataclass_fields__}
    sizes = {k: v for k, v in config.items() if k not in algorithm}
    return Update(
        config=dataclasses.replace(
            UpdateConfig(batch_size=NUM_ROWS, micro_batch_size=NUM_ROWS, logp_chunk_tokens=32), **sizes
        ),
        sampling=SamplingConfig(max_completion_tokens=COMPLETION_TOKENS, **sampling or {}),
        model=Model(TINY, remat=remat),
        optimizer=RECORDER,
        num_devices=num_devices,
        group_size=group_size,
        line_tokens=sizes.get("pack_width", 0),
        algorithm=algorithm_config(**algorithm),
        critic_optimizer=RECORDER if "critic" in algorithm else None,
    )


def train_state(update, mesh=ONE):
    params = learner_params(update.model, mesh_of(mesh))
    step = jax.device_put(np.int32(0), sharding.replicated(mesh_of(mesh), 0))
    others = {}
    if "average_logp" in update.algorithm.columns:
        others["average"] = jax.tree.map(jnp.copy, params)
    learned = {"policy": params}
    if update.critic_optimizer:
        learned["critic"] = jax.device_put(host_head(update), sharding.replicated(mesh_of(mesh), 0))
    scalars = {}
    bonus = update.algorithm.entropy_bonus
    if bonus and bonus.facts.moves:
        scalars["entropy_coefficient"] = jax.device_put(np.float32(bonus["coefficient"]), step.sharding)
    return TrainState(learned, jax.tree.map(jnp.zeros_like, learned), step, others, scalars)


def host_head(update, seed=0):
    """Return random float32 weights in numpy of a value head with spread outputs."""
    rng, outputs = np.random.default_rng(seed), max(update.algorithm.critic.bins, 1)
    draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)
    return {"kernel": draw(update.model.arch.width, outputs), "bias": draw(outputs)}


def on_mesh(update, rows, mesh=ONE):
    """Return rows [B, ...] as a batch [M, b, ...] on the mesh's data axes."""
    M = sharding.num_data_shards(mesh_of(mesh))
    batch = jax.tree.map(lambda x: x.reshape(M, -1, *x.shape[1:]), rows)
    return jax.device_put(batch, sharding.leading(mesh_of(mesh), batch))


@functools.cache
def compile_update(update, mesh=ONE):
    """Compile ``apply_batch``, traced in the mesh as the run's programs are."""
    jitted = jax.jit(update.apply_batch)

    def call(state, batch):
        with jax.sharding.use_abstract_mesh(mesh_of(mesh).abstract_mesh):
            return jitted(state, batch, 0)

    return call


def gradient(update, rows, mesh=ONE):
    """Return gradient and sums of the real update in numpy; with a critic, the gradients of policy and head."""
    state, sums = compile_update(update, mesh)(train_state(update, mesh), on_mesh(update, rows, mesh))
    of = tuple(state.opt_state[name] for name in update.optimizers)
    return jax.tree.map(np.asarray, (of if len(of) > 1 else of[0], sums))


def external_of(run, train=(), held_out=()):
    """Return the external sources of a run, as ``train`` makes them, with a tokenizer of bytes."""
    return External(
        run.config,
        make_byte_tokenizer(),
        train,
        held_out,
        vocab_size=run.model.arch.vocab_size,
        layout=sharding.of(run.learner.abstract_external),
        num_parts=run.learner.annotation.num_parts,
    )
