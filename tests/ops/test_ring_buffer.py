import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ops.ring_buffer import draw_uniform, insert, take

draw = jax.jit(draw_uniform, static_argnums=(3, 4))


def test_rows_are_written_at_the_cursor_and_wrap_round_the_end():
    # C = 5, two shards with cursors 3 and 0, n = 3: shard 0 writes slots 3, 4, 0.
    slots = {"x": jnp.zeros((2, 5), jnp.int32), "y": jnp.zeros((2, 5, 2), jnp.int8)}
    rows = {"x": jnp.array([[1, 2, 3], [4, 5, 6]]), "y": jnp.arange(12, dtype=jnp.int8).reshape(2, 3, 2)}
    slots, write_index = jax.jit(insert)(slots, jnp.array([3, 0]), rows)
    np.testing.assert_array_equal(slots["x"], [[3, 0, 0, 1, 2], [4, 5, 6, 0, 0]])
    np.testing.assert_array_equal(slots["y"][0], [[4, 5], [0, 0], [0, 0], [0, 1], [2, 3]])
    assert write_index.tolist() == [1, 3]


def test_take_reads_each_shard_at_its_own_slots():
    values = jnp.arange(12).reshape(2, 3, 2)
    index = jnp.array([[2, 0], [1, 1]])
    np.testing.assert_array_equal(jax.jit(take)(values, index), [[[4, 5], [0, 1]], [[8, 9], [8, 9]]])


def test_what_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="6 rows per shard do not fit the 5 slots"):
        insert(jnp.zeros((1, 5)), jnp.zeros(1, jnp.int32), jnp.zeros((1, 6)))
    with pytest.raises(ValueError, match="6 different slots"):
        draw_uniform(jax.random.key(0), jnp.ones((1, 5), bool), jnp.ones((1, 5), bool), 6, 0)


def test_draws_do_not_repeat_and_the_surplus_is_not_real():
    drawable = np.zeros((3, 10), bool)
    drawable[0, [1, 4, 7]] = drawable[1, :] = True
    index, is_real = jax.tree.map(np.asarray, draw(jax.random.key(1), drawable, np.zeros((3, 10), bool), 6, 0))
    assert all(len(set(row)) == 6 for row in index.tolist())
    assert is_real.sum(axis=1).tolist() == [3, 6, 0]
    assert set(index[0][is_real[0]].tolist()) == {1, 4, 7}


def test_fresh_slots_come_first_and_others_fill_in():
    # Shard 0: fresh slots 0-3, of which 0 is not drawable: 2 wanted, 2 found. Shard 1: one fresh, 2 wanted.
    drawable = np.ones((2, 8), bool)
    drawable[0, 0] = False
    fresh = np.zeros((2, 8), bool)
    fresh[0, :4] = fresh[1, 5] = True
    for seed in range(20):
        index, is_real = jax.tree.map(np.asarray, draw(jax.random.key(seed), drawable, fresh, 4, 2))
        assert is_real.all()
        assert set(index[0, :2].tolist()) <= {1, 2, 3} and 0 not in index[0].tolist()
        assert index[1, 0] == 5
        assert all(len(set(row)) == 4 for row in index.tolist())


def test_a_shard_draws_the_same_whatever_the_other_shards_hold_and_differs_from_them():
    ones, none = np.ones((4, 30), bool), np.zeros((4, 30), bool)
    index, _ = draw(jax.random.key(2), ones, none, 10, 0)
    fewer, _ = draw(jax.random.key(2), ones[:2], none[:2], 10, 0)
    index = np.asarray(index)
    np.testing.assert_array_equal(index[:2], fewer)
    assert len({tuple(row) for row in index.tolist()}) == 4


@pytest.mark.parametrize(
    ("num_fresh", "share_fresh", "share_other"),
    # 12 slots, 4 fresh, 1 not drawable and not fresh, 5 drawn. Without a quota each of 11 drawable slots: 5/11. With
    # 2 fresh first: fresh 2/4 + 2/4 * 3/9 = 2/3, others 3/9: the fresh that lost compete as equals in the rest.
    [(0, 5 / 11, 5 / 11), (2, 2 / 3, 1 / 3)],
)
def test_draws_are_uniform(num_fresh, share_fresh, share_other):
    drawable, fresh = np.ones((1, 12), bool), np.zeros((1, 12), bool)
    fresh[0, :4], drawable[0, 11] = True, False
    keys = jax.random.split(jax.random.key(3), 4000)

    def draw_one(key):
        return draw_uniform(key, jnp.asarray(drawable), jnp.asarray(fresh), 5, num_fresh)

    index, is_real = jax.jit(jax.vmap(draw_one))(keys)
    assert is_real.all()
    share = np.bincount(np.asarray(index).ravel(), minlength=12) / 4000
    expected = np.array([share_fresh] * 4 + [share_other] * 7 + [0])
    # Each count is binomial over independent keys: 5 standard deviations, 11 slots: false alarm < 11 * 6e-7 = 7e-6.
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000)).all(), share
