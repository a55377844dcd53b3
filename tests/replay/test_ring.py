"""Properties of the ring, through ``replay.init``, ``insert`` and ``draw`` as the loop calls them."""

import functools
import re
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from reference.deque_ring import DequeRing
from support.building import EIGHT, mesh_of, replay_config

from jaxrl_llm.config import ConfigError, ReplayConfig, freeze
from jaxrl_llm.learner import faults
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.replay.choice import is_spent
from jaxrl_llm.runtime import sharding
from jaxrl_llm.settings.use import use
from jaxrl_llm.types import Experience, Rollout, Sums

WIDTH = 4


def make_experience(ids, states=None, width=WIDTH, xp=np):
    """Return rows in which every field contains the row's id, so that a mix-up of fields or rows shows.

    The reward is 1 for right rows, else 0. The default pass threshold is 1.
    """
    ids = xp.asarray(ids, xp.int32)
    states = ["right"] * len(ids) if states is None else states
    wide = ids[:, None] * 10 + xp.arange(width, dtype=xp.int32)[None, :]
    return Experience(
        rollout=Rollout(
            tokens=wide,
            prompt_length=ids % 3,
            length=ids % 5,
            behaviour_logp=-wide.astype(xp.float32),
            group_id=ids // 2,
            policy_version=wide + 1,
            stop_reason=(ids % 4).astype(xp.int8),
        ),
        reward=xp.asarray([float(s == "right") for s in states], xp.float32),
        advantage=wide.astype(xp.float32) / 8,
        trainable=xp.asarray([s != "failed" for s in states]),
        columns={"tied": ids < 0, "question_id": ids // 2, "ref_logp": wide.astype(xp.float32) / 4},
    )


def stored_of(ids, states):
    """Return the same rows in the form that slots store."""
    rows = make_experience(ids, states)
    return rows.replace(columns={"ref_logp": rows.columns["ref_logp"]})


def ids_of(rows):
    """Return the ids of rows from ``make_experience``, in any shape."""
    return rows.rollout.tokens[..., 0] // 10


def shape_of(num_rows, width=WIDTH):
    return jax.eval_shape(lambda: make_experience(jnp.arange(num_rows), width=width, xp=jnp))


# Outside of a compiled function each of their operations would be a program of its own.
INSERT_SETTINGS = ("config", "pass_threshold", "group_size", "imitates")
jit_insert = jax.jit(replay.insert, static_argnames=INSERT_SETTINGS, donate_argnums=0)
jit_draw = jax.jit(replay.draw, static_argnames=("config", "batch_size", "group_size"), donate_argnums=0)


jit_last_drawn = jax.jit(functools.partial(faults.last_drawn, row_tokens=0), static_argnames="batch_size")
jit_usage, jit_sums = jax.jit(replay.usage), jax.jit(replay.sums)
jit_ended = jax.jit(replay.ended, static_argnames="num_new")
jit_spent = jax.jit(is_spent, static_argnames="config")
jit_copy = jax.jit(lambda ring: jax.tree.map(jnp.copy, ring))


@functools.partial(jax.jit, static_argnums=(0, 1))
def jit_init(num_slots, num_shards):
    return replay.init(shape_of(1), capacity=num_slots, num_shards=num_shards)


# --- the ring against deques ---------------------------------------------------------------------------------------

CAPACITY, SHARDS, BATCH = 10, 2, 6  # 5 slots and 3 rows of a batch per shard
CONFIGS = [
    ReplayConfig(),
    ReplayConfig(max_age_steps=1, positive_fraction=0.4),  # 3 slots and 2 for correct ones
    ReplayConfig(max_uses=1, fresh_fraction=0.34, positive_fraction=0.4),  # ceil(0.34 * 3) = 2 of each shard's 3
    ReplayConfig(max_age_steps=2, max_uses=2, fresh_fraction=1.0),
    replay_config(max_age_steps=2, draw=use("fresh_or_older", fresh_share=0.5)),
]
FRESH_WANTED = [0, 0, 2, 3, None]  # None: all of a batch, or none
# Rows per shard 1 and 3 into 5 or 3 slots: the cursor wraps at every offset, and one insert fills a lane.
inserts = st.sampled_from([2, 6]).flatmap(
    lambda n: st.lists(st.sampled_from(["right", "wrong", "failed"]), min_size=n, max_size=n)
)
operations = st.lists(
    st.one_of(st.tuples(st.just("insert"), inserts), st.tuples(st.just("draw"), st.integers(0, 2**31 - 1))), max_size=14
)


def examples(plain, slow):
    """Draw few examples in the plain suite, and more in the tier slow."""
    cases = [plain, pytest.param(slow, marks=pytest.mark.slow)]
    return pytest.mark.parametrize("num_examples", cases)


@examples(6, 60)
def test_ring_equals_its_definition_over_any_insert_evict_draw(num_examples):
    settings = hypothesis.settings(deadline=None, max_examples=num_examples, derandomize=True)
    settings(hypothesis.given(st.integers(0, len(CONFIGS) - 1), operations)(check_ring))()


def check_ring(which, steps):
    config, fresh_wanted = CONFIGS[which], FRESH_WANTED[which]
    ring = jit_init(CAPACITY, SHARDS)
    num_positive = 2 if config.positive_fraction else 0
    model = DequeRing(CAPACITY, SHARDS, num_positive, config.max_age_steps, config.max_uses)
    iteration, next_id = 0, 1
    for name, argument in steps:
        if name == "insert":
            iteration += 1
            ids = list(range(next_id, next_id + len(argument)))
            next_id += len(argument)
            rows = make_experience(ids, argument)
            before, ended = jit_usage(ring), len(model.ended)
            ring = jit_insert(ring, rows, np.int32(iteration), config)
            model.insert(ids, argument, iteration)
            found = jit_ended(before, ring, num_new=len(ids))
            assert found == {"ended_rows": len(model.ended) - ended, "ended_uses": sum(model.ended[ended:])}
        else:
            key = jax.random.key(argument)
            ring, rows, info = jit_draw(ring, key, np.int32(iteration), config, batch_size=BATCH)
            check_draw(model, rows, info, iteration, config, fresh_wanted)
            check_last_drawn(jit_last_drawn(ring, batch_size=BATCH), rows, info)
        check_contents(model, ring)


def test_a_batch_is_wholly_fresh_or_wholly_not_with_the_chance_that_is_said():
    config = replay_config(draw=use("fresh_or_older", fresh_share=0.6))
    ring, kinds = jit_init(24, SHARDS), []

    def ages(ring, seed, iteration):
        ring, _, info = jit_draw(ring, jax.random.key(seed), np.int32(iteration), config, batch_size=BATCH)
        assert info.is_real.all()
        return ring, np.asarray(info.age)

    def insert(ring, first, number, iteration):
        rows = make_experience(list(range(first, first + number)), ["right"] * number)
        return jit_insert(ring, rows, np.int32(iteration), ReplayConfig())

    ring = insert(ring, 1, 6, 1)
    for seed in range(20):  # there are no others yet
        ring, age = ages(ring, seed, 1)
        assert (age == 0).all()
    ring = insert(ring, 7, 6, 2)
    for seed in range(300):
        ring, age = ages(ring, seed, 2)
        assert len(np.unique(age)) == 1  # in all shards
        kinds.append(age[0, 0] == 0)
    assert abs(np.mean(kinds) - 0.6) < 4 * np.sqrt(0.6 * 0.4 / 300)
    ring = insert(ring, 13, 2, 3)  # one in each shard: what is missing comes from the others
    seen = {int((ages(jit_copy(ring), seed, 3)[1] == 0).sum()) for seed in range(20)}
    assert seen == {0, 2}


def check_contents(model, ring):
    """Check that every shard holds exactly the rows of the definition, oldest first in each lane."""
    ring = jax.tree.map(np.asarray, ring)
    for m in range(SHARDS):
        assert sorted(ring.order[m]) == list(range(CAPACITY // SHARDS))
        main, kept = np.split(ring.order[m], [model.sizes[0]])
        order = [lane[len(lane) - len(rows) :] for lane, rows in zip((main, kept), model.lanes(m), strict=True)]
        order = np.concatenate(order).tolist()
        rows = [row for lane in model.lanes(m) for row in lane]
        expected = stored_of([r["id"] for r in rows], [r["state"] for r in rows])
        stored = jax.tree.map(lambda x, m=m, order=order: x[m][order], ring.slots)
        jax.tree.map(np.testing.assert_array_equal, stored, expected)
        assert ring.uses[m][order].tolist() == [r["uses"] for r in rows]
        assert ring.inserted_step[m][order].tolist() == [r["inserted"] for r in rows]
        assert ring.is_retired[m][order].tolist() == [r["state"] == "failed" for r in rows]
        priority = np.where(expected.trainable, np.abs(expected.advantage).max(axis=1), 0)
        np.testing.assert_array_equal(ring.priority[m][order], priority)
        assert (np.delete(ring.inserted_step[m], order) == -1).all()


def check_draw(model, rows, info, iteration, config, fresh_wanted):
    """Check a draw: as many rows as can be drawn, no repeats, only allowed rows, the fresh share.

    Then the model counts uses.
    """
    rows, info = jax.tree.map(np.asarray, (rows, info))
    model.num_draws += 1
    for m in range(SHARDS):
        allowed = model.drawable(m, iteration)
        real = info.is_real[m]
        ids = ids_of(rows)[m][real].tolist()
        assert len(ids) == min(BATCH // SHARDS, len(allowed)) == len(set(ids))
        assert set(ids) <= set(allowed)
        num_fresh = sum(allowed[i]["inserted"] == iteration for i in ids)
        can_be_fresh = sum(r["inserted"] == iteration for r in allowed.values())
        if fresh_wanted:
            wanted = min(fresh_wanted, can_be_fresh)
            lacking = len(ids) - wanted - (len(allowed) - can_be_fresh)  # of older ones
            assert num_fresh == wanted + max(0, lacking)
        np.testing.assert_array_equal(rows.trainable[m], real)
        assert info.age[m][real].tolist() == [iteration - allowed[i]["inserted"] for i in ids]
        assert info.first_use[m][real].tolist() == [allowed[i]["uses"] == 0 for i in ids]
        assert info.uses[m][real].tolist() == [allowed[i]["uses"] + 1 for i in ids]
        assert not (info.age[m][~real].any() or info.uses[m][~real].any() or info.first_use[m][~real].any())
        got = jax.tree.map(lambda x, m=m, real=real: x[m][real], rows)
        expected = stored_of(ids, [allowed[i]["state"] for i in ids])
        assert got.columns.keys() == expected.columns.keys() | {"age_bucket"}
        expected = expected.with_columns(age_bucket=got.columns["age_bucket"])
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        since = [model.num_draws - allowed[i]["last_use"] if allowed[i]["uses"] else 0 for i in ids]
        assert info.since_last_use[m][real].tolist() == since
        for i in ids:
            allowed[i]["uses"] += 1
            allowed[i]["last_use"] = model.num_draws
    questions = set((ids_of(rows) // 2)[info.is_real].tolist())
    assert jit_sums(info)["unique_prompt_count"] == len(questions)


def check_last_drawn(found, rows, info):
    """Check that the last drawn rows are returned, in any order. Each filler row is a row that is not trainable."""
    rows = rows.replace(columns={name: x for name, x in rows.columns.items() if name != "age_bucket"})
    for m in range(SHARDS):
        real = np.asarray(info.is_real[m])
        expected = jax.tree.map(lambda x, m=m, real=real: np.asarray(x[m])[real], rows)
        got = jax.tree.map(lambda x, m=m, n=real.sum(): np.asarray(x[m])[:n], found)
        sort = lambda x: jax.tree.map(lambda leaf: leaf[np.argsort(ids_of(x), kind="stable")], x)
        jax.tree.map(np.testing.assert_array_equal, sort(got), sort(expected))
        assert not np.asarray(found.trainable[m])[real.sum() :].any()


def test_a_ring_of_groups_gives_the_slots_of_tied_superseded_and_used_up_ones_first():
    """Four groups of two rows fit. The oldest group that may still be drawn survives the fifth, and is drawn."""
    config = ReplayConfig(skip_tied=True, latest_visit=True, max_uses=1)
    insert = functools.partial(jit_insert, config=config, group_size=2)

    def ids(ring):
        return ids_of(ring.slots)[0].tolist()

    ring = insert(jit_init(8, 1), rows_of_questions([5, 6], ["right", "wrong"] * 2, 0), iteration=np.int32(0))
    tied = rows_of_questions([7, 8], ["right", "wrong"] * 2, 4, advantage=[1, 1, 0, 0])
    ring = insert(ring, tied, iteration=np.int32(1))
    assert ids(ring) == list(range(8))
    # 6 comes again, so that its first visit (slots 2, 3) goes; then that of 8, which is tied.
    ring = insert(ring, rows_of_questions([6], ["right", "wrong"], 8), iteration=np.int32(2))
    assert ids(ring) == [0, 1, 8, 9, 4, 5, 6, 7]
    ring = insert(ring, rows_of_questions([9], ["right", "wrong"], 10), iteration=np.int32(3))
    assert ids(ring) == [0, 1, 8, 9, 4, 5, 10, 11]
    # The newest group is used up: the next goes there, though the oldest has been in the ring for four iterations.
    fresh = ReplayConfig(**{**vars(config), "fresh_fraction": 1.0})
    ring, batch, _ = jit_draw(ring, jax.random.key(0), np.int32(3), fresh, batch_size=2, group_size=2)
    assert ids_of(batch).tolist() == [[10, 11]] == ids_of(jit_last_drawn(ring, batch_size=2)).tolist()
    ring = insert(ring, rows_of_questions([10], ["right", "wrong"], 12), iteration=np.int32(4))
    assert ids(ring) == [0, 1, 8, 9, 4, 5, 12, 13]
    # Nothing is spent: now the oldest goes.
    ring = insert(ring, rows_of_questions([11], ["right", "wrong"], 14), iteration=np.int32(5))
    assert ids(ring) == [14, 15, 8, 9, 4, 5, 12, 13]


@pytest.mark.parametrize(
    ("config", "gone"),
    [
        # Ages 3, 2, 1 and 0 when the fourth iteration's row comes into four slots, of which the oldest goes otherwise.
        ({}, 0),
        ({"delay_iterations": 3}, 0),
        ({"delay_iterations": 2}, 0),
        # Advantages 2, 0, 1, 2 as priorities: the second can never be drawn.
        ({"draw": "priority"}, 1),
        ({"draw": {"name": "priority", "exponent": 0.0}}, 0),
        # From iteration 9 on only fresh rows are drawn, but not yet.
        ({"draw": use("uniform_then_fresh", fresh_from_iteration=9)}, 0),
    ],
)
def test_which_slot_a_new_row_takes(config, gone):
    config, ring = replay_config(**config), jit_init(4, 1)
    for iteration, advantage in enumerate((2, 0, 1, 2)):
        rows = make_experience([iteration])
        rows = rows.replace(advantage=np.full_like(rows.advantage, advantage))
        ring = jit_insert(ring, rows, np.int32(iteration), config)
    assert ids_of(ring.slots).tolist() == [[0, 1, 2, 3]]
    ring = jit_insert(ring, make_experience([4]), np.int32(4), config)
    assert ids_of(ring.slots).tolist() == [[4 if i == gone else i for i in range(4)]]


@pytest.mark.tier("slow")  # plain: test_ring_equals_its_definition_...
def test_whatever_can_be_drawn_is_not_overwritten_before_what_cannot():
    """Random rings: the slots that ``is_spent`` names are never drawn in this iteration or later."""
    rng = np.random.default_rng(0)
    configs = [
        ReplayConfig(delay_iterations=1),
        replay_config(draw=use("uniform_then_fresh", fresh_from_iteration=4), max_age_steps=2),
        replay_config(draw="priority", max_uses=1),
        ReplayConfig(max_age_steps=1, fresh_fraction=0.5),
    ]
    for config in configs:
        ring = jit_init(8, 1)
        for iteration in range(7):
            rows = make_experience(np.arange(2) + 2 * iteration + 1)
            advantage = rng.integers(0, 2, (2, 1)) * np.ones_like(rows.advantage)
            ring = jit_insert(ring, rows.replace(advantage=advantage), np.int32(iteration), config)
            spent = np.asarray(jit_spent(ring, np.int32(iteration), config))[0]
            names = set(ids_of(ring.slots)[0][spent].tolist()) - {0}  # slots never written
            for later in range(iteration, iteration + 3):
                key = jax.random.key(later)
                _, batch, info = jit_draw(jit_copy(ring), key, np.int32(later), config, batch_size=8)
                assert not names & set(ids_of(batch)[info.is_real].tolist())


# --- statistics of the synchronous FIFO ----------------------------------------------------------------------------


def test_uses_ages_and_first_uses_follow_the_closed_forms():
    # N = 64 slots, R = 8 rows in, B = 24 out per step, two shards (the ratios hold for each): a row lives
    # k = N/R = 8 steps and is in each batch with probability q = B/N = 3/8, independently over steps.
    num_slots, num_in, num_out, steps = 64, 8, 24, 1500
    life, q = 8, 3 / 8

    @jax.jit
    def simulate():
        def step(ring, iteration):
            rows = make_experience(iteration * num_in + jnp.arange(num_in), xp=jnp)
            before = replay.usage(ring)
            ring = replay.insert(ring, rows, iteration, ReplayConfig())
            ended = replay.ended(before, ring, num_new=num_in)
            key = jax.random.fold_in(jax.random.key(0), iteration)
            ring, rows, info = replay.draw(ring, key, iteration, ReplayConfig(), batch_size=num_out)
            return ring, (ids_of(rows), info, replay.sums(info).union(Sums(ended)))

        ring = replay.init(shape_of(1), capacity=num_slots, num_shards=2)
        return jax.lax.scan(step, ring, jnp.arange(steps))[1]

    ids, info, sums = jax.tree.map(np.asarray, simulate())
    assert info.is_real[life:].all()
    # Rows inserted from step `life` on (before, a batch is drawn from fewer slots) that lived to the end.
    cohort = np.arange(num_in * life, num_in * (steps - life))
    uses = np.bincount(ids[info.is_real], minlength=num_in * steps)[cohort]
    # uses ~ Binomial(k, q); rows of one batch exclude each other, so events of different rows are negatively
    # associated and the standard deviation of independent rows is an upper bound. Four bounds of 5 standard
    # deviations: false alarm below 4 * 6e-7.
    n = len(cohort)
    assert abs(uses.mean() - num_out / num_in) < 5 * np.sqrt(life * q * (1 - q) / n)
    # The replay ratio as it is logged, of the rows that left: all lived to the end but those of the first steps.
    gone = sums["ended_rows"][2 * life :]
    assert (gone == num_in).all() and not sums["ended_rows"][:life].any()
    ratio = sums["ended_uses"][2 * life :].sum() / gone.sum()
    assert abs(ratio - num_out / num_in) < 5 * np.sqrt(life * q * (1 - q) / gone.sum())
    never = (1 - q) ** life  # 0.0233
    assert abs((uses == 0).mean() - never) < 5 * np.sqrt(never * (1 - never) / n)
    # First uses counted by the row's cohort: each row has one or none; the share is of the draws per row, B / R.
    first = np.isin(ids[info.first_use], cohort).sum()
    expected = num_in / num_out * (1 - never)
    assert abs(first / (n * num_out / num_in) - expected) < 5 * np.sqrt(never * (1 - never) / n) * num_in / num_out
    # Ages in a full ring are 0..k-1, R slots each; a batch's mean age has variance below (k^2 - 1) / 12 / B.
    full = slice(life, None)
    mean_age = sums["age_sum"][full].sum() / sums["real_count"][full].sum()
    assert abs(mean_age - (life - 1) / 2) < 5 * np.sqrt((life**2 - 1) / 12 / (num_out * (steps - life)))
    assert sums["age_max"][full].max() == life - 1 and sums["age_max"][0] == 0
    # The sums are those of the rows.
    np.testing.assert_array_equal(sums["uses_sum"], info.uses.sum(axis=(1, 2)))
    np.testing.assert_array_equal(sums["first_use_count"], info.first_use.sum(axis=(1, 2)))


def test_a_ring_of_one_iteration_is_on_policy():
    # Capacity = rows in = batch: each step draws exactly the rows just inserted, for the first and only time.
    ring = jit_init(8, 2)
    for iteration in range(3):
        ids = np.arange(8, dtype=np.int32) + 8 * iteration
        ring = jit_insert(ring, make_experience(ids), np.int32(iteration), ReplayConfig())
        key = jax.random.key(iteration)
        ring, rows, info = jit_draw(ring, key, np.int32(iteration), ReplayConfig(), batch_size=8)
        assert sorted(ids_of(rows).ravel().tolist()) == ids.tolist()
        sums = {name: int(value) for name, value in jit_sums(info).named().items()}
        unique = sums.pop("unique_prompt_count")
        assert unique == 4  # two rows of each question
        expected = {"age_sum": 0, "age_max": 0, "uses_sum": 8, "first_use_count": 8, "real_count": 8}
        assert sums == expected | {"since_last_use_sum": 0}


# --- which rows, and how likely -------------------------------------------------------------------------------------


def rows_of_questions(questions, states, first_id, advantage=None):
    """Return rows in groups of two."""
    rows = make_experience(np.arange(first_id, first_id + len(states)), states)
    rows = rows.with_columns(question_id=np.repeat(np.int32(questions), 2))
    if advantage is not None:
        rows = rows.replace(advantage=np.repeat(np.float32(advantage)[:, None], WIDTH, axis=1))
        rows = rows.with_columns(tied=~rows.advantage.any(axis=1))
    return rows


def test_a_solved_group_and_the_earlier_visits_of_a_question_are_retired():
    insert = functools.partial(jit_insert, config=replay_config(latest_visit=True, retirement=use("solved", share=0.5)))
    ring = jit_init(12, 2)  # question 7: 1 of 2 right, 8: none right
    ring = insert(ring, rows_of_questions([7, 8], ["right", "wrong", "wrong", "wrong"], 2), np.int32(0))
    assert ring.is_retired[:, :2].tolist() == [[True, True], [False, False]]
    # 8 again, on the other shard: the earlier visit is retired. 9: all that got a reward are right.
    ring = insert(ring, rows_of_questions([8, 9], ["wrong", "wrong", "failed", "right"], 6), np.int32(1))
    assert ring.is_retired[:, :4].tolist() == [[True, True, False, False], [True, True, True, True]]


def test_a_visit_that_cannot_be_drawn_leaves_the_earlier_one_and_a_solved_one_takes_it_along():
    tied_out = ReplayConfig(latest_visit=True, skip_tied=True)
    ring = jit_insert(jit_init(12, 1), rows_of_questions([7, 8], ["right", "wrong"] * 2, 2), np.int32(0), tied_out)
    # 7 anew, tied; 8 anew, without a reward.
    tied = rows_of_questions([7, 8], ["wrong", "wrong", "failed", "failed"], 6, advantage=[0, 0, 1, 1])
    ring = jit_insert(ring, tied, np.int32(1), tied_out)
    assert ring.is_retired[0, :8].tolist() == [False] * 4 + [True] * 4
    solved_out = replay_config(retirement="solved")
    insert = functools.partial(jit_insert, config=solved_out)
    ring = insert(jit_init(12, 1), rows_of_questions([7, 8], ["right", "wrong"] * 2, 2), np.int32(0))
    ring = insert(ring, rows_of_questions([8, 9], ["right", "right", "wrong", "wrong"], 6), np.int32(1))
    assert ring.is_retired[0, :8].tolist() == [False, False, True, True, True, True, False, False]


def test_the_ring_of_correct_rows_takes_none_that_would_never_be_drawn():
    config = ReplayConfig(positive_fraction=0.5, skip_tied=True)
    insert = functools.partial(jit_insert, config=config)
    rows = make_experience(np.arange(4), ["right"] * 4)
    ring = insert(jit_init(8, 1), rows.with_columns(tied=np.arange(4) % 2 == 0), np.int32(0))
    ring = insert(ring, make_experience(np.arange(4, 8), ["right"] * 4), np.int32(1))
    assert ring.inserted_step[0, 4:].tolist() == [0, 0, -1, -1]
    assert ids_of(ring.slots)[0, 4:6].tolist() == [1, 3]


def test_a_demonstration_stays_where_it_is_imitated_though_its_group_is_tied():
    rows = make_experience(np.arange(4), ["right", "right", "wrong", "right"])
    group = np.array([-1, -1, -1, 7], np.int32)
    rows = rows.replace(rollout=rows.rollout.replace(group_id=group)).with_columns(tied=np.ones(4, bool))
    for imitates, retired in ((False, [True] * 4), (True, [False, False, True, True])):
        ring = jit_insert(jit_init(4, 1), rows, np.int32(0), ReplayConfig(skip_tied=True), imitates=imitates)
        assert ring.is_retired[0].tolist() == retired


def test_from_an_iteration_on_only_fresh_rows_are_drawn():
    for batches in (False, True):
        draw = use("uniform_then_fresh", fresh_from_iteration=2)
        if batches:
            draw = use("fresh_or_older", fresh_share=0.5, fresh_from_iteration=2)
        config = replay_config(draw=draw)
        ring, ages = jit_init(12, 1), []
        for iteration in range(4):
            rows = make_experience(np.arange(4) + 4 * iteration)
            ring = jit_insert(ring, rows, np.int32(iteration), ReplayConfig())
            for seed in range(6):
                key = jax.random.key(seed)
                ring, _, info = jit_draw(ring, key, np.int32(iteration), config, batch_size=4)
                ages.append((iteration, info.age[info.is_real].tolist()))
        assert all(set(age) == {0} and len(age) == 4 for iteration, age in ages if iteration >= 2)
        assert any(1 in age for iteration, age in ages if iteration == 1)


def test_however_old_a_row_is_it_may_be_drawn_by_age():
    config = replay_config(draw={"name": "age", "scale_iterations": 0.5})
    ring = jit_insert(jit_init(4, 1), make_experience(np.arange(4)), np.int32(0), ReplayConfig())
    _, _, info = jit_draw(ring, jax.random.key(0), np.int32(60), config, batch_size=4)
    assert info.is_real.all() and set(info.age.ravel().tolist()) == {60}
    ring = jit_insert(jit_init(8, 1), make_experience(np.arange(4)), np.int32(0), ReplayConfig())
    ring = jit_insert(ring, make_experience(np.arange(4, 8)), np.int32(58), ReplayConfig())
    _, _, info = jit_draw(ring, jax.random.key(0), np.int32(60), config, batch_size=4)
    assert set(info.age.ravel().tolist()) == {2}


def test_a_delayed_batch_has_one_age_and_before_that_there_is_none():
    config = ReplayConfig(delay_iterations=2, max_uses=1)
    ring = jit_init(8, 2)
    for iteration in range(5):
        ids = np.arange(2) + 2 * iteration
        ring = jit_insert(ring, make_experience(ids), np.int32(iteration), ReplayConfig())
        key = jax.random.key(iteration)
        ring, rows, info = jit_draw(ring, key, np.int32(iteration), config, batch_size=2)
        assert info.is_real.tolist() == [[iteration >= 2]] * 2
        if iteration >= 2:
            assert ids_of(rows).ravel().tolist() == (ids - 4).tolist()
            assert info.age.tolist() == [[2], [2]] and rows.columns["age_bucket"].tolist() == [[2], [2]]


@pytest.mark.parametrize(
    ("draw", "group_size", "expected"),
    # One of four rows is drawn, of ages 1, 1, 0, 0 and |advantage| 1, 2, 0, 1.
    [
        ({"name": "priority", "exponent": 2.0}, 1, [1 / 6, 4 / 6, 0, 1 / 6]),
        ({"name": "age", "scale_iterations": 0.5}, 1, np.array([1, 1, np.e**2, np.e**2]) / (2 + 2 * np.e**2)),
        # Of two groups, by the largest of their rows; the first row tells which.
        ({"name": "priority", "exponent": 1.0}, 2, [2 / 3, 0, 1 / 3, 0]),
    ],
)
def test_a_row_is_drawn_in_proportion_to_its_weight(draw, group_size, expected):
    config, ring = replay_config(draw=draw), jit_init(4, 1)
    for iteration, advantage in enumerate(([1, -2], [0, 1])):
        rows = rows_of_questions([5], ["right", "right"], 2 * iteration, advantage)
        ring = jit_insert(ring, rows, np.int32(iteration), ReplayConfig())
    how = {"batch_size": group_size, "group_size": group_size}
    draw_one = jax.jit(jax.vmap(lambda key: ids_of(replay.draw(ring, key, 1, config, **how)[1])[0, 0]))
    share = np.bincount(np.asarray(draw_one(jax.random.split(jax.random.key(0), 4000))), minlength=4) / 4000
    # Binomial: 5 standard deviations, 4 rows: false alarm < 3e-6.
    assert (np.abs(share - expected) <= 5 * np.sqrt(np.array(expected) * (1 - np.array(expected)) / 4000)).all(), share


@pytest.mark.parametrize(
    ("priority", "expected"),
    # Prompts of 1, 2, 0, 1 tokens, rows of 3, 4, 4, 1; log-probs -1, ..., -4 at the four positions.
    [
        ("reward", [0.5, 0, 0, 3]),
        ("length", [2, 2, 4, 0]),
        ("surprise", [2.5, 3.5, 2.5, 0]),
        ("advantage", [1, 2, 0, 3]),
    ],
)
def test_a_rows_priority_is_what_the_setting_says_of_its_completion(priority, expected):
    rows = make_experience(np.arange(4))
    logp = np.tile(-np.arange(1, 5, dtype=np.float32), (4, 1))
    logp[3] = np.nan  # of a completion without tokens
    rollout = rows.rollout.replace(
        prompt_length=np.array([1, 2, 0, 1], np.int32), length=np.array([3, 4, 4, 1], np.int32), behaviour_logp=logp
    )
    reward = np.array([0.5, -1, 0, 3], np.float32)
    advantage = np.array([[0, 1, 0, 0], [0, 0, 0, -2], [0, 0, 0, 0], [3, 0, 0, 0]], np.float32)
    rows = rows.replace(rollout=rollout, reward=reward, advantage=advantage)
    ring = jit_insert(jit_init(4, 1), rows, np.int32(0), replay_config(priority=priority))
    assert ring.priority.tolist() == [expected]


def test_a_priority_that_is_no_number_or_of_a_row_that_is_never_drawn_leaves_the_others_theirs():
    rows = make_experience(np.arange(6), ["right", "failed", "right", "right", "failed", "right"])
    worth = np.array([1, np.nan, np.inf, np.nan, 1e30, 2], np.float32)
    rows = rows.replace(advantage=np.tile(worth[:, None], (1, WIDTH)))
    config = replay_config(draw="priority", priority="advantage")
    ring = jit_insert(jit_init(6, 1), rows, np.int32(0), config)
    assert ring.priority.tolist() == [[1, 0, 0, 0, 0, 2]]
    _, drawn, info = jit_draw(ring, jax.random.key(0), np.int32(0), config, batch_size=3)
    assert sorted(ids_of(drawn)[info.is_real].tolist()) == [0, 5]


def test_rows_of_an_age_that_hardly_counts_are_retired_and_those_that_reach_it_later_are_not():
    config = ReplayConfig(min_ess=0.5)
    ring = jit_init(8, 2)
    for iteration in range(4):
        ring = jit_insert(ring, make_experience(np.arange(2) + 2 * iteration), np.int32(iteration), ReplayConfig())
    # Ages 3 to 0 in buckets 2 (2-3), 2, 1 and 0. Bucket 2 counts by 0.4; of bucket 3 nothing was drawn, which is 1.
    retire = jax.jit(replay.retire_stale, static_argnames="config")
    effective = np.array([1, 0.5, 0.4, 1, 1, 1], np.float32)
    ring = retire(ring, np.int32(3), effective, config)
    assert ring.is_retired.tolist() == [[True, True, False, False]] * 2
    ring, _, info = jit_draw(ring, jax.random.key(0), np.int32(4), config, batch_size=8)
    assert info.is_real.sum() == 4 and sorted(info.age[0].tolist()) == [0, 0, 1, 2]
    # An iteration later the row that has reached the bucket is drawn still; a new row takes a retired one's slot.
    ring = jit_insert(ring, make_experience(np.arange(2) + 8), np.int32(4), ReplayConfig())
    assert ring.is_retired.tolist() == [[False, True, False, False]] * 2


def test_likely_rollouts_are_kept_and_their_ratios_are_more_alike():
    # 400 rows of three tokens, drawn by one policy; then as many by a second one overwrite them.
    rng, size = np.random.default_rng(0), 400
    old = rng.normal(size=8)
    logp_of = lambda logits: logits - np.log(np.exp(logits).sum())
    old_logp, new_logp = logp_of(old), logp_of(old + 0.5 * rng.normal(size=8))
    ring, drawn = jit_init(2 * size, 1), []
    config = replay_config(positive_fraction=0.5, admission="likely")
    for iteration, logp in enumerate((old_logp, new_logp)):
        tokens = rng.choice(8, (size, 3), p=np.exp(logp))
        drawn.append(tokens)
        ids = np.arange(size) + size * iteration
        rows = make_experience(ids, ["failed" if i == 7 else "right" for i in ids])
        rollout = rows.rollout.replace(
            prompt_length=np.ones(size, np.int32),
            length=np.full(size, WIDTH, np.int32),
            behaviour_logp=np.pad(logp[tokens], ((0, 0), (1, 0)), constant_values=np.nan).astype(np.float32),
        )
        ring = jit_insert(ring, rows.replace(rollout=rollout), np.int32(iteration), config)
    bar = new_logp[drawn[1]].mean()
    expected = [i for i in range(size) if old_logp[drawn[0][i]].mean() >= bar and i != 7]
    is_kept = np.asarray(ring.inserted_step)[0, size:] >= 0
    kept = ids_of(ring.slots)[0, size:][is_kept].tolist()
    assert kept == expected and 0 < len(kept) < size
    ratio = np.exp((new_logp - old_logp)[drawn[0]].sum(axis=1))
    effective = lambda w: w.sum() ** 2 / (len(w) * (w**2).sum())
    assert effective(ratio[kept]) > effective(ratio)


def test_likely_is_compared_with_the_trainable_newcomers_of_the_own_shard():
    config = replay_config(positive_fraction=0.5, admission="likely")
    ring = jit_init(8, 2)
    # Nats a token: all have 2; then 3 in the first shard, and 1 in the second beside a 100 that failed.
    for iteration, surprise in enumerate(([2, 2, 2, 2], [3, 3, 1, 100])):
        states = ["failed" if x == 100 else "right" for x in surprise]
        rows = make_experience(np.arange(4) + 4 * iteration, states)
        rollout = rows.rollout.replace(
            prompt_length=np.ones(4, np.int32),
            length=np.full(4, WIDTH, np.int32),
            behaviour_logp=-np.repeat(np.float32(surprise)[:, None], WIDTH, axis=1),
        )
        ring = jit_insert(ring, rows.replace(rollout=rollout), np.int32(iteration), config)
    assert ring.inserted_step.tolist() == [[1, 1, 0, 0], [1, 1, -1, -1]]
    assert ids_of(ring.slots)[0, 2:].tolist() == [0, 1]


# --- placement: 8 devices, no collective, no copy ------------------------------------------------------------------

COLLECTIVES = re.compile(r"all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter|collective-broadcast")
# 160 slots per shard: more than the candidates of a draw, so that its rarer branch is compiled.
NUM_ROWS, NUM_SLOTS, WIDE = 320, 1280, 64
INSERT = {"config": ReplayConfig(max_age_steps=8, fresh_fraction=0.5, positive_fraction=0.1)}
DRAW = INSERT | {"batch_size": 16}


@functools.cache
def placed():
    """On eight data-parallel devices: return shardings, and the compiled insert and draw with a donated ring."""
    mesh = mesh_of(EIGHT)
    rows, scalar = NamedSharding(mesh, PartitionSpec(sharding.BATCH_AXES)), NamedSharding(mesh, PartitionSpec())

    def placed_as(tree, layout):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree)

    init = jax.jit(
        functools.partial(replay.init, shape_of(NUM_ROWS, WIDE), capacity=NUM_SLOTS, num_shards=8), out_shardings=rows
    )
    ring = placed_as(jax.eval_shape(init), rows)
    experience = placed_as(shape_of(NUM_ROWS, WIDE), rows)
    iteration = jax.ShapeDtypeStruct((), jnp.int32, sharding=scalar)
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=scalar)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        insert = jax.jit(functools.partial(replay.insert, **INSERT), donate_argnums=0)
        draw = jax.jit(functools.partial(replay.draw, **DRAW), donate_argnums=0)
        compiled = insert.lower(ring, experience, iteration).compile(), draw.lower(ring, key, iteration).compile()
    return rows, scalar, init, *compiled


def test_insert_and_draw_need_no_collective_and_keep_the_layout():
    _, _, _, insert, draw = placed()
    for compiled in (insert, draw):
        assert not COLLECTIVES.findall(compiled.as_text())
        for layout in jax.tree.leaves(compiled.output_shardings):
            assert layout.spec[0] in (sharding.BATCH_AXES, "data")


def test_donation_aliases_the_whole_ring_and_nothing_of_its_size_is_copied():
    _, _, init, insert, draw = placed()
    ring = init()
    ring_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(ring)) // 8  # per device
    slot_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(ring.slots)) // 8
    for compiled in (insert, draw):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= ring_bytes
        assert memory.temp_size_in_bytes < slot_bytes


def test_draws_and_contents_do_not_depend_on_the_mesh_and_donated_buffers_are_gone():
    rows, scalar, init, insert, draw = placed()
    sharded = init()
    single = replay.init(shape_of(NUM_ROWS, WIDE), capacity=NUM_SLOTS, num_shards=8)
    # Two good rows per shard, soon in the ring of correct ones: 128 candidates among 160 slots find both with
    # probability 0.3, so devices differ in whether they sort.
    for iteration in range(6):
        state = ["right" if iteration == 0 and i % 20 == 1 else "failed" for i in range(NUM_ROWS)]
        experience = make_experience(np.arange(NUM_ROWS) + iteration * NUM_ROWS, state, width=WIDE)
        step, key = jnp.int32(iteration), jax.random.key(iteration)
        before = jax.tree.leaves(sharded)
        sharded = insert(sharded, jax.device_put(experience, rows), jax.device_put(step, scalar))
        assert all(leaf.is_deleted() for leaf in before)
        sharded, sharded_batch, sharded_info = draw(sharded, *jax.device_put((key, step), scalar))
        single = jit_insert(single, experience, step, **INSERT)
        single, batch, info = jit_draw(single, key, step, **DRAW)
        equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
        equal((sharded, sharded_batch, sharded_info), (single, batch, info))
        assert np.asarray(info.is_real).all() and (np.asarray(info.age) == iteration).all()
    assert len(sharded.uses.sharding.device_set) == 8


# --- bad settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, pytest.param(24, marks=pytest.mark.slow)])
def test_sizes_that_a_config_may_have_fit_the_ring(count):
    """Sizes that ``limits`` and ``check_divisible`` accept never break an assertion here.

    Other sizes are refused by name.
    """
    rng, passed = np.random.default_rng(0), 0
    while passed < count:
        pick = lambda *values: values[rng.integers(len(values))]
        shards, prompts, group = pick(1, 2, 4), pick(1, 2, 4), pick(2, 3)
        rows = prompts * group
        ring = {"capacity": rows * pick(1, 2, 3), "unit": pick("group", "rollout"), "shards": shards * pick(1, 2)}
        ring |= pick({"positive_fraction": pick(0.0, 0.2, 0.4, 0.6)}, {"capacity_tokens": pick(1, 24, 72)})
        sizes = {
            "prompts": {"max_tokens": 2},
            "sampling": {"max_completion_tokens": pick(3, 4)},
            "rollout": {"prompts_per_iteration": prompts, "group_size": group},
            "update": {"batch_size": pick(rows, 2 * rows, 12), "micro_batch_size": pick(rows, 12)},
        }
        try:
            config = freeze(sizes | {"replay": ring})
            shape = dict.fromkeys(sharding.MESH_AXES, 1) | {"data": shards}
            sharding.check_divisible(config, types.SimpleNamespace(size=shards, shape=shape))
        except ConfigError:
            continue
        passed += 1

        def one_iteration(config=config):
            experience = make_experience(np.arange(config.rows_per_iteration), width=config.row_tokens, xp=jnp)
            pages = {"capacity_tokens": config.replay.capacity_tokens, "page_tokens": config.page_tokens}
            num_shards = config.replay.shards
            ring = replay.init(experience, capacity=config.ring_capacity, num_shards=num_shards, **pages)
            how = {"group_size": config.rows_per_draw}
            ring = replay.insert(ring, experience, 0, config.replay, **how)
            how |= {"batch_size": config.update.batch_size, "row_tokens": config.row_tokens}
            return replay.draw(ring, jax.random.key(0), 0, config.replay, **how)[1]

        assert jax.eval_shape(one_iteration).reward.size == config.update.batch_size
