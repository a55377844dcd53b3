import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ops.ring_buffer import Lane, next_slots, put, take, write, write_some


def test_rows_are_written_at_the_cursor_and_wrap_round_the_end():
    # C = 5, two shards that have had 3 and 0 rows, n = 3: shard 0 writes slots 3, 4, 0.
    slots = {"x": jnp.zeros((2, 5), jnp.int32), "y": jnp.zeros((2, 5, 2), jnp.int8)}
    rows = {"x": jnp.array([[1, 2, 3], [4, 5, 6]]), "y": jnp.arange(12, dtype=jnp.int8).reshape(2, 3, 2)}
    lane = Lane(0, 5, jnp.array([3, 0]))
    assert next_slots(lane, 3).tolist() == [[3, 4, 0], [0, 1, 2]]
    slots, lane = write(slots, lane, rows)
    np.testing.assert_array_equal(slots["x"], [[3, 0, 0, 1, 2], [4, 5, 6, 0, 0]])
    np.testing.assert_array_equal(slots["y"][0], [[4, 5], [0, 0], [0, 0], [0, 1], [2, 3]])
    assert lane.num_written.tolist() == [6, 3] and lane.filled.tolist() == [5, 3]
    assert lane.newest_first(jnp.array([[0, 1], [0, 1]])).tolist() == [[0, 4], [2, 1]]


def test_of_rows_kept_the_last_that_fit_are_written_behind_the_first_lane():
    # Slots 0-1 are another lane's; this one has 3, at 2-4, and has had 1 row: the next go to 3, 4, 2.
    lane = Lane(2, 3, jnp.array([1, 1]))
    rows = jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    kept = jnp.array([[True, False, True, False, False], [True, True, True, False, True]])
    slots, lane = write_some(jnp.zeros((2, 5), jnp.int32), lane, rows, kept)
    # Four are kept of shard 1: the first, 6, is at once overwritten by the fourth, 10.
    np.testing.assert_array_equal(slots, [[0, 0, 0, 1, 3], [0, 0, 8, 10, 7]])
    assert lane.num_written.tolist() == [3, 5]


def test_take_and_put_use_each_shards_own_slots_and_the_slot_behind_the_last_is_nowhere():
    values = jnp.arange(12).reshape(2, 3, 2)
    index = jnp.array([[2, 0], [1, 1]])
    np.testing.assert_array_equal(take(values, index), [[[4, 5], [0, 1]], [[8, 9], [8, 9]]])
    np.testing.assert_array_equal(
        put(jnp.zeros((2, 3), jnp.int32), jnp.array([[2, 0], [3, 1]]), jnp.array([[1, 2], [3, 4]])),
        [[2, 0, 1], [0, 4, 0]],
    )


def test_an_age_limit_is_found_by_halving_whatever_the_fill_and_the_cursor():
    # Rows 0, 1, ... written one by one into a lane of 5 slots from slot 1 on; row r is "in" when r >= bound. A shard
    # for every number of rows and every bound.
    size = 5
    num_written, bound = (x.ravel() for x in np.meshgrid(np.arange(12), np.arange(13)))
    slots = np.full((len(bound), size + 1), -1)
    for shard, number in enumerate(num_written):
        for r in range(number):
            slots[shard, 1 + r % size] = r
    lane = Lane(1, size, jnp.asarray(num_written))
    got = jax.jit(lambda: lane.count_newest(lambda slot: take(jnp.asarray(slots), slot) >= bound[:, None]))()
    np.testing.assert_array_equal(got, ((slots >= bound[:, None]) & (slots >= 0)).sum(axis=1))


def test_what_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="6 rows per shard do not fit the 5 slots"):
        write(jnp.zeros((1, 5)), Lane(0, 5, jnp.zeros(1, jnp.int32)), jnp.zeros((1, 6)))
