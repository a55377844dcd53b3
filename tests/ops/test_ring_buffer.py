"""The slots of a shard that rows take, and the order of the rows."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.ring_buffer import Lane, put, renew, take, write_some

NONE_SPENT = jnp.zeros((2, 5), bool)


def test_the_oldest_slots_are_renewed_and_then_the_newest():
    # Slots 3, 4, 0, 1, 2 of shard 0 from the oldest row on; of shard 1 as they lie.
    lane = Lane(jnp.array([[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]]), jnp.array([5, 5]))
    order = renew(lane, NONE_SPENT, 3)
    assert order.tolist() == [[1, 2, 3, 4, 0], [3, 4, 0, 1, 2]]
    lane = lane._replace(order=order)
    assert lane.newest_first(jnp.array([[0, 1], [0, 4]])).tolist() == [[0, 4], [2, 3]]
    for count in (0, 5):
        assert renew(lane, NONE_SPENT, count).tolist() == order.tolist()


def test_spent_slots_are_renewed_before_the_oldest_and_those_that_stay_keep_their_order():
    lane = Lane(jnp.array([[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]]), jnp.array([5, 5]))
    spent = jnp.array([[False, True, True, False, False], [False, False, False, True, False]])
    # Shard 0: 1 and 2 are spent; shard 1: 3 is, and then the oldest goes.
    assert renew(lane, spent, 2).tolist() == [[3, 4, 0, 1, 2], [1, 2, 4, 0, 3]]
    # Of more spent ones than are wanted the oldest.
    assert renew(lane, spent, 1).tolist() == [[3, 4, 0, 2, 1], [0, 1, 2, 4, 3]]
    # A number of its own for each shard.
    assert renew(lane, spent, jnp.array([[3], [0]])).tolist() == [[4, 0, 3, 1, 2], [0, 1, 2, 3, 4]]


def test_a_group_is_renewed_as_a_whole_and_is_spent_when_all_of_it_is():
    lane = Lane(jnp.array([[2, 3, 4, 5, 0, 1]]), jnp.array([6]))
    spent = jnp.array([[True, True, True, False, False, False]])
    assert renew(lane, spent, 2, group_size=2).tolist() == [[2, 3, 4, 5, 0, 1]]
    assert renew(lane, spent, 4, group_size=2).tolist() == [[4, 5, 2, 3, 0, 1]]


def test_of_rows_kept_the_last_that_fit_are_written_behind_the_first_lane():
    # Slots 0-1 are another lane's; this one has 3, at 2-4, and a row at 2: the next go to 3, 4, 2.
    lane = Lane(jnp.array([[3, 4, 2], [3, 4, 2]]), jnp.array([1, 1]))
    rows = jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    kept = jnp.array([[True, False, True, False, False], [True, True, True, False, True]])
    slots, order = write_some(jnp.zeros((2, 5), jnp.int32), lane, NONE_SPENT, rows, kept)
    # Four are kept of shard 1, for which there is room for three: the first, 6, is not written.
    np.testing.assert_array_equal(slots, [[0, 0, 0, 1, 3], [0, 0, 10, 7, 8]])
    assert order.tolist() == [[2, 3, 4], [3, 4, 2]]


def test_take_and_put_use_each_shards_own_slots_and_the_slot_behind_the_last_is_nowhere():
    values = jnp.arange(12).reshape(2, 3, 2)
    index = jnp.array([[2, 0], [1, 1]])
    np.testing.assert_array_equal(take(values, index), [[[4, 5], [0, 1]], [[8, 9], [8, 9]]])
    np.testing.assert_array_equal(
        put(jnp.zeros((2, 3), jnp.int32), jnp.array([[2, 0], [3, 1]]), jnp.array([[1, 2], [3, 4]])),
        [[2, 0, 1], [0, 4, 0]],
    )


def test_an_age_limit_is_found_by_halving_whatever_the_fill_and_the_order():
    # Rows 0, 1, ... in a lane of 5 of 6 slots, in any order; row r is "in" when r >= bound. A shard for every number
    # of rows and every bound.
    size, rng = 5, np.random.default_rng(0)
    filled, bound = (x.ravel() for x in np.meshgrid(np.arange(6), np.arange(7)))
    order = np.stack([rng.permutation(size) + 1 for _ in bound])
    slots = np.full((len(bound), size + 1), -1)
    for shard, number in enumerate(filled):
        for r in range(number):
            slots[shard, order[shard, size - number + r]] = r
    lane = Lane(jnp.asarray(order), jnp.asarray(filled))
    got = jax.jit(lambda: lane.count_newest(lambda slot: take(jnp.asarray(slots), slot) >= bound[:, None]))()
    np.testing.assert_array_equal(got, ((slots >= bound[:, None]) & (slots >= 0)).sum(axis=1))
