"""Computing a group's prompt once gives the same values, gradients and draws as computing it for every row.

The loss also has a term of the prompts' own tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.building import ONE, algorithm_config, mesh_of

from jaxrl_llm.config import ReplayConfig, SamplingConfig, UpdateConfig
from jaxrl_llm.learner.update import Moment, Update
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.types import Experience, Rollout

ARCH = Architecture(vocab_size=61, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, ffn=48)
P, G, L, C = 3, 4, 7, 6
S = L + C


def experience(seed: int) -> Experience:
    """Return P groups of G ragged rows: real prompts, random completions, random values past every length."""
    rng = np.random.default_rng(seed)
    prompt_length = np.repeat(rng.integers(1, L + 1, P), G)
    length = prompt_length + rng.integers(1, C + 1, P * G)
    tokens = rng.integers(0, ARCH.vocab_size, (P * G, S))
    prompts = np.repeat(rng.integers(0, ARCH.vocab_size, (P, L)), G, axis=0)
    at = np.arange(S)[None, :]
    tokens[:, :L] = np.where(at[:, :L] < prompt_length[:, None], prompts, tokens[:, :L])
    mask = (at >= prompt_length[:, None]) & (at < length[:, None])
    advantage = np.where(mask, rng.normal(size=(P * G, 1)), np.nan)
    rollout = Rollout(
        tokens=tokens.astype(np.int32),
        prompt_length=prompt_length.astype(np.int32),
        length=length.astype(np.int32),
        behaviour_logp=np.where(mask, rng.normal(-4, 0.3, (P * G, S)), np.nan).astype(np.float32),
        group_id=np.repeat(np.arange(P), G).astype(np.int32),
        policy_version=np.zeros((P * G, S), np.int32),
        stop_reason=np.ones(P * G, np.int8),
    )
    trainable = np.arange(P * G) % 5 != 3
    rows = Experience(rollout, np.zeros(P * G, np.float32), advantage.astype(np.float32), trainable)
    rows = rows.with_columns(question_id=rollout.group_id)
    return jax.tree.map(lambda x: jnp.asarray(x)[None], rows)


def packing(update: Update, width: int) -> Update:
    config = dataclasses.replace(update.config, micro_batch_tokens=2 * width)
    return dataclasses.replace(update, config=config, line_tokens=width)


def test_gradient_is_that_of_unshared_prompts_padded_or_packed():
    model = Model(ARCH)
    params = model.init(jax.random.key(0), mesh_of(ONE))
    config = UpdateConfig(batch_size=P * G, micro_batch_size=G, logp_chunk_tokens=2 * G)
    sampling = SamplingConfig(max_completion_tokens=C, top_k=40)
    algorithm = algorithm_config(cross_entropies=[{"name": "environment", "coefficient": 1.0}])
    apart = Update(config, sampling, model, optax.sgd(1.0), num_devices=1, algorithm=algorithm)
    shared = dataclasses.replace(apart, group_size=G)
    # Two lines at a time, of two groups at full length. Rows apart in lines: test_adapters.
    packed = packing(shared, 2 * (L + G * C))
    programs = [jax.jit(update.gradient) for update in (apart, shared, packed)]
    for seed in range(2):
        rows = experience(seed)
        moment = Moment(*[jnp.int32(0)] * 3)
        (one, sums_one), *others = (program({"policy": params}, rows, moment) for program in programs)
        norm = float(optax.tree.norm(one))
        for other, sums_other in others:
            # Measured: 3e-7 of the norm.
            assert float(optax.tree.norm(jax.tree.map(jnp.subtract, one, other))) < 2e-6 * norm
            for name, value in sums_one.named().items():
                np.testing.assert_allclose(value, sums_other[name], rtol=2e-6, atol=2e-5, err_msg=name)


def test_completions_that_are_not_trained_take_no_room_in_a_line():
    # Groups at full length fill a line of 31 each; with one completion of four, 7 + 6 tokens, two share one.
    config = UpdateConfig(batch_size=P * G, micro_batch_size=G)
    update = Update(config, SamplingConfig(max_completion_tokens=C), Model(ARCH), optax.sgd(1.0), num_devices=1)
    update = packing(dataclasses.replace(update, group_size=G), L + G * C)
    rows = experience(0)
    full = jnp.full((1, P * G), L)
    rows = rows.replace(rollout=rows.rollout.replace(prompt_length=full, length=full + C))

    def num_pieces(trainable):  # of two lines each
        return update.micro_batches(rows.replace(trainable=trainable), jnp.ones((1, P * G, S))).count

    assert num_pieces(jnp.ones((1, P * G), bool)) == 2
    assert num_pieces(jnp.arange(P * G)[None, :] % G == 1) == 1


def test_groups_are_drawn_whole_and_without_repeats():
    rows = jax.tree.map(lambda x: jnp.concatenate([x[0]] * 4), experience(0))  # 12 groups
    group = jnp.repeat(jnp.arange(12), G)
    rows = rows.replace(rollout=rows.rollout.replace(group_id=group), trainable=jnp.ones(12 * G, bool))
    insert = jax.jit(lambda ring, rows: replay.insert(ring, rows, jnp.int32(0), ReplayConfig()))
    ring = insert(replay.init(rows, capacity=12 * G, num_shards=2), rows)
    draw = jax.jit(lambda r, k: replay.draw(r, k, jnp.int32(0), ReplayConfig(), batch_size=8 * G, group_size=G))
    seen = set()
    for key in jax.random.split(jax.random.key(1), 20):
        _, batch, info = draw(ring, key)
        ids = np.asarray(batch.rollout.group_id).reshape(8, G)
        assert (ids == ids[:, :1]).all()
        assert len(set(ids[:, 0])) == 8
        assert np.asarray(info.is_real).all()
        seen |= set(ids[:, 0].tolist())
    assert seen == set(range(12))  # a group is missed in one draw of 4 out of 6 with 1/3: 12 * 3^-20 false alarms


def test_tied_groups_are_not_drawn():
    rows = jax.tree.map(lambda x: x[0], experience(0))
    rows = rows.replace(trainable=jnp.ones(P * G, bool)).with_columns(tied=jnp.arange(P * G) < 2 * G)
    config = ReplayConfig(skip_tied=True)
    ring = replay.init(rows, capacity=P * G, num_shards=1)

    @jax.jit
    def insert_and_draw(ring, rows, key):
        ring = replay.insert(ring, rows, jnp.int32(0), config)
        return replay.draw(ring, key, jnp.int32(0), config, batch_size=2 * G, group_size=G)

    _, batch, info = insert_and_draw(ring, rows, jax.random.key(0))
    real = np.asarray(info.is_real)[0]
    assert real.sum() == G  # the third group alone teaches
    assert (np.asarray(batch.rollout.group_id)[0][real] == 2).all()
    assert not np.asarray(batch.trainable)[0][~real].any()
