"""A ring in pages (``replay.capacity_tokens``) equals the padded ring without the rows that do not fit in its pages."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference.paged_ring import PagedRing
from support.building import EIGHT, mesh_of, replay_config
from support.comparing import assert_same
from test_ring import COLLECTIVES

from jaxrl_llm.config import Config, PromptsConfig, ReplayConfig, SamplingConfig
from jaxrl_llm.learner import faults
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import Experience, Rollout

WIDTH, PAGE = 11, 4  # 3 pages of a row at full length
SHARDS, SLOTS = 2, 5  # of a shard


def make_rows(ids, length, width=WIDTH, xp=np):
    """Return rows in which every field contains the row's id, with arbitrary values past its length."""
    ids, length = xp.asarray(ids, xp.int32), xp.asarray(length, xp.int32)
    at = xp.arange(width, dtype=xp.int32)[None, :]
    is_token = at < length[:, None]
    wide = ids[:, None] * width + at + 1
    number = xp.where(is_token, wide, 0).astype(xp.float32)
    support = wide[..., None] + xp.arange(3, dtype=xp.int32)[None, None, :]
    return Experience(
        rollout=Rollout(
            tokens=xp.where(is_token, wide, 0),
            prompt_length=length // 2,
            length=length,
            behaviour_logp=0 - number / 8,
            group_id=ids // 2,
            policy_version=xp.where(is_token & (at >= length[:, None] // 2), wide, -1),
            stop_reason=(ids % 4).astype(xp.int8),
            columns={"support": xp.where(is_token[..., None], support, 0)},
        ),
        reward=ids.astype(xp.float32),
        advantage=number,
        trainable=ids >= 0,
        columns={"returns": number / 4, "question_id": ids},
    )


def shapes(width=WIDTH):
    return jax.eval_shape(lambda: make_rows(jnp.arange(1), jnp.arange(1), width, jnp))


@functools.partial(jax.jit, static_argnums=(0, 1))
def new_ring(num_pages, slots=SLOTS):
    """Return an empty ring with ``num_pages`` and ``slots`` per shard; 0 pages = padded."""
    tokens = num_pages * PAGE * SHARDS
    return replay.init(shapes(), capacity=slots * SHARDS, num_shards=SHARDS, capacity_tokens=tokens, page_tokens=PAGE)


insert = jax.jit(functools.partial(replay.insert, config=ReplayConfig()), donate_argnums=0)
draw = jax.jit(
    functools.partial(replay.draw, row_tokens=WIDTH),
    static_argnames=("config", "batch_size", "group_size"),
    donate_argnums=0,
)


last_drawn = jax.jit(functools.partial(faults.last_drawn, batch_size=6, row_tokens=WIDTH))


def per_shard(x):
    return np.asarray(x).reshape(SHARDS, -1).tolist()


lengths = st.lists(st.integers(0, WIDTH), min_size=2 * SHARDS, max_size=2 * SHARDS)
CONFIGS = [ReplayConfig(), replay_config(max_age_steps=1, fresh_fraction=0.5, draw="priority")]


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(st.sampled_from(CONFIGS), st.lists(lengths, min_size=1, max_size=6))
def test_with_pages_for_all_its_slots_it_is_the_padded_ring_bit_by_bit(config, batches):
    # 16 pages, more than 5 rows of 3: rows begin at every page, and wrap round the end.
    padded, paged = new_ring(0), new_ring(16)
    for iteration, length in enumerate(batches):
        rows = make_rows(np.arange(4) + 4 * iteration, length)
        padded, paged = (insert(ring, rows, np.int32(iteration)) for ring in (padded, paged))
        key, now = jax.random.key(iteration), np.int32(iteration)
        padded, *expected = draw(padded, key, now, config, batch_size=6)
        paged, *drawn = draw(paged, key, now, config, batch_size=6)
        (batch, info), (batch_expected, info_expected) = jax.device_get((drawn, expected))
        assert_same(info, info_expected)
        # What is drawn where there is nothing to draw is no row.
        real = lambda tree, is_real=info.is_real: jax.tree.map(lambda x: x[is_real], tree)
        assert_same(real(batch), real(batch_expected))
        last, last_expected = (jax.device_get(last_drawn(ring)) for ring in (paged, padded))
        assert_same(*(jax.tree.map(lambda x, rows=last: x[rows.trainable], rows) for rows in (last, last_expected)))
        assert_same(paged.replace(slots=None, pages={}), padded.replace(slots=None))


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(st.lists(lengths, min_size=1, max_size=8))
def test_it_holds_the_newest_rows_that_fit_slots_and_pages_and_draws_no_others(batches):
    # 7 pages: one insert of 2 rows fills at most 6.
    ring, models = new_ring(7), [PagedRing(SLOTS, 7, PAGE) for _ in range(SHARDS)]
    for iteration, length in enumerate(batches):
        ids = np.arange(4) + 4 * iteration
        ring = insert(ring, make_rows(ids, length), np.int32(iteration))
        for model, names, sizes in zip(models, per_shard(ids), per_shard(length), strict=True):
            for name, size in zip(names, sizes, strict=True):
                model.insert(name, size)
        # As many draws as slots: all that can be drawn is.
        ring, batch, info = draw(ring, jax.random.key(0), np.int32(iteration), ReplayConfig(), batch_size=10)
        for m, model in enumerate(models):
            real = np.asarray(info.is_real[m])
            got = jax.tree.map(lambda x, m=m, real=real: np.asarray(x[m])[real], batch)
            got = got.replace(columns={"returns": got.columns["returns"]})
            order = np.argsort(got.reward.astype(int))
            expected = make_rows(model.ids(), [size for _, size in model.rows])
            expected = expected.replace(columns={"returns": expected.columns["returns"]})
            assert_same(jax.tree.map(lambda x, order=order: x[order], got), expected)
        assert int(replay.num_filled(ring)) == sum(len(model.rows) for model in models)
        held = sum(model.tokens() for model in models)
        np.testing.assert_allclose(replay.wasted_share(ring), 1 - held / (7 * PAGE * SHARDS), rtol=1e-6)


def test_a_group_whose_first_row_is_gone_is_not_drawn():
    # Rows of 2, 2, then 1, 1, 1, 1 pages into 7: of the first group the second row alone is left.
    ring = new_ring(7, 6)
    for iteration, length in enumerate(([8, 8], [4, 4], [4, 4])):
        ids = np.tile(np.arange(2) + 2 * iteration, SHARDS)
        ring = insert(ring, make_rows(ids, length * SHARDS), np.int32(iteration))
    assert int(replay.num_filled(ring)) == SHARDS * 5
    _, batch, info = draw(ring, jax.random.key(0), np.int32(2), ReplayConfig(), batch_size=12, group_size=2)
    for ids, real in zip(np.asarray(batch.reward, int), np.asarray(info.is_real), strict=True):
        assert sorted(ids[real].tolist()) == [2, 3, 4, 5]


def test_a_delay_that_the_pages_do_not_hold_draws_nothing():
    # Shard 0 writes 6 pages, shard 1 ten: more than 7.
    config, ring = ReplayConfig(delay_iterations=2), new_ring(7, 6)
    for iteration, length in enumerate(([4, 4, 4, 4], [4, 4, 8, 8], [4, 4, 8, 8])):
        ring = insert(ring, make_rows(np.arange(4) + 4 * iteration, length), np.int32(iteration))
    _, batch, info = draw(ring, jax.random.key(0), np.int32(2), config, batch_size=4)
    assert info.is_real.tolist() == [[True, True], [False, False]]
    assert sorted(batch.reward.astype(int)[0].tolist()) == [0, 1]


def test_a_row_of_full_width_has_17_to_32_pages_where_it_has_as_many_tokens():
    for width in (*range(2, 300), 4095, 4096, 4097):
        config = Config(prompts=PromptsConfig(max_tokens=1), sampling=SamplingConfig(max_completion_tokens=width - 1))
        assert 17 <= -(-width // config.page_tokens) <= 32 or config.page_tokens == 1


def test_at_most_a_quarter_of_the_bytes_is_wasted_on_mixed_lengths():
    # Prompts of 5 to 16 tokens, completions of 30 on average where 144 are allowed, four times as many as fit.
    width, capacity, tokens, num_rows = 160, 1024, 1024 * 34, 128
    config = Config(prompts=PromptsConfig(max_tokens=16), sampling=SamplingConfig(max_completion_tokens=144))
    page, rng = config.page_tokens, np.random.default_rng(0)
    models = [PagedRing(capacity // 8, tokens // 8 // page, page) for _ in range(8)]
    make = functools.partial(replay.init, shapes(width), capacity=capacity, num_shards=8, page_tokens=page)
    paged, padded = make(capacity_tokens=tokens), make()
    for iteration in range(16):
        ids = np.arange(num_rows) + num_rows * iteration
        length = rng.integers(5, 17, num_rows) + np.minimum(rng.geometric(1 / 30, num_rows), 144)
        paged, padded = (insert(ring, make_rows(ids, length, width), np.int32(0)) for ring in (paged, padded))
        for i, row in enumerate(zip(ids.tolist(), length.tolist(), strict=True)):
            models[i * 8 // num_rows].insert(*row)
    held = sum(model.tokens() for model in models)
    np.testing.assert_allclose(replay.wasted_share(paged), 1 - held / tokens, rtol=1e-5)
    # What those rows need: all that is kept for each of their tokens, and all that is kept of each row.
    per_token = sum(x.dtype.itemsize * math.prod(x.shape[3:]) for x in jax.tree.leaves(paged.slots) if x.ndim > 2)
    per_row = sum(x.dtype.itemsize for x in jax.tree.leaves(paged) if x.ndim == 2)
    needed = held * per_token + sum(len(model.rows) for model in models) * per_row
    assert 1 - needed / sum(x.nbytes for x in jax.tree.leaves(paged)) < 0.25
    assert float(replay.wasted_share(padded)) > 0.6  # of such rows


# --- placement -------------------------------------------------------------------------------------------------------


@pytest.mark.tier("slow")  # plain: test_ring.test_insert_and_draw_need_no_collective_...
def test_on_eight_devices_it_needs_no_collective_copies_nothing_and_holds_and_draws_the_same():
    width, capacity, tokens, num_rows = 64, 512, 16384, 64
    config, mesh = ReplayConfig(max_age_steps=6), mesh_of(EIGHT)
    sizes = {"capacity": capacity, "num_shards": 8, "capacity_tokens": tokens, "page_tokens": 2}
    init = jax.jit(functools.partial(replay.init, shapes(width), **sizes))
    write = functools.partial(replay.insert, config=config)
    read = functools.partial(replay.draw, config=config, batch_size=16, row_tokens=width)
    sharded, single = jax.device_put(init(), sharding.leading(mesh, jax.eval_shape(init))), init()
    whole = lambda x: jax.device_put(x, sharding.replicated(mesh, 0))
    split = lambda x: jax.device_put(x, sharding.leading(mesh, x))
    rows, now, key = make_rows(np.arange(num_rows), np.arange(num_rows) + 1, width), np.int32(0), jax.random.key(0)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        sharded_write = jax.jit(write, donate_argnums=0).lower(sharded, split(rows), whole(now)).compile()
        sharded_read = jax.jit(read, donate_argnums=0).lower(sharded, whole(key), whole(now)).compile()
    ring_bytes, log_bytes = (sum(x.nbytes for x in jax.tree.leaves(tree)) // 8 for tree in (sharded, sharded.slots))
    for compiled in (sharded_write, sharded_read):
        assert not COLLECTIVES.findall(compiled.as_text())
        assert compiled.memory_analysis().alias_size_in_bytes >= ring_bytes
        assert compiled.memory_analysis().temp_size_in_bytes < log_bytes
    write, read = jax.jit(write, donate_argnums=0), jax.jit(read, donate_argnums=0)
    for iteration in range(12):  # the log wraps round after 8
        length = (np.arange(num_rows) * 7 + iteration) % width + 1
        rows = make_rows(np.arange(num_rows) + num_rows * iteration, length, width)
        now, key = np.int32(iteration), jax.random.key(iteration)
        sharded, single = sharded_write(sharded, split(rows), whole(now)), write(single, rows, now)
        sharded, *drawn = sharded_read(sharded, whole(key), whole(now))
        single, *expected = read(single, key, now)
        assert_same((sharded, drawn), (single, expected))
    assert int(replay.num_filled(single)) < num_rows * 12
