"""Padding, row order, micro-batches and devices do not change the loss and gradient of the real update."""

import jax
import numpy as np
import pytest
from support import building
from support.building import CUBE, EIGHT, TINY

from jaxrl_llm.config import MeshConfig


def garbage(rows, seed=0):
    """Return the same rows with random values past every length."""
    rng = np.random.default_rng(seed)
    rollout = rows.rollout
    at = np.arange(rollout.tokens.shape[1])[None, :]
    past = at >= rollout.length[:, None]
    off = past | (at < rollout.prompt_length[:, None])
    random_ids = rng.integers(0, TINY.vocab_size, rollout.tokens.shape).astype(np.int32)
    spoil = lambda x, value: np.where(off, value, x).astype(x.dtype)
    return rows.replace(
        advantage=spoil(rows.advantage, np.nan),
        columns={name: spoil(x, np.nan) for name, x in rows.columns.items()},
        rollout=rollout.replace(
            tokens=np.where(past, random_ids, rollout.tokens),
            behaviour_logp=spoil(rollout.behaviour_logp, np.nan),
            policy_version=spoil(rollout.policy_version, 0),
            columns={name: np.where(past[..., None], 3, x) for name, x in rollout.columns.items()},
        ),
    )


def wider(rows, extra):
    """Return the same rows with ``extra`` more positions of padding."""
    pad = lambda x: np.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)) if x.ndim > 1 else x
    return jax.tree.map(pad, rows)


def assert_same(actual, expected):
    """Assert that sums agree to 1e-5, and gradients to 1e-5 of the gradient's norm."""
    (gradient, sums), (gradient_expected, sums_expected) = actual, expected
    assert sums.named().keys() == sums_expected.named().keys()
    for name, value in sums_expected.named().items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    flat = lambda tree: np.concatenate([x.astype(np.float64).ravel() for x in jax.tree.leaves(tree)])
    difference = np.linalg.norm(flat(gradient) - flat(gradient_expected))
    assert difference <= 1e-5 * np.linalg.norm(flat(gradient_expected))


# Measured over all tests here: sums agree to 7e-7, gradients to 9e-7 of the norm.
@pytest.mark.parametrize(
    "parts",
    [
        # The other tests here are of token means; a constant length is aggregated by rows as a sequence mean is.
        ("sequence mean, k1", "critic, clipped value", "cross-entropies"),
        *(
            pytest.param([part], marks=pytest.mark.slow)
            for part in (*building.LOSSES, "critic, clipped value", "cross-entropies")
        ),
    ],
    ids="; ".join,
)
def test_padding_order_microbatches_and_devices_do_not_change_loss_and_gradient(parts):
    of = building.LOSSES | building.CRITICS | building.CROSS_ENTROPIES
    settings = {name: value for part in parts for name, value in of[part].items()}
    whole = building.make_update(settings)
    given = {"with_critic": "critic" in settings, "with_others": "cross_entropies" in settings}
    rows = building.random_experience(**given)
    expected = building.gradient(whole, rows)
    assert sum(np.abs(x).sum() for x in jax.tree.leaves(expected[0])) > 1

    order = np.random.default_rng(1).permutation(building.NUM_ROWS)
    shuffled = jax.tree.map(lambda x: x[order], rows)
    assert_same(building.gradient(whole, garbage(shuffled)), expected)
    # Eight devices, two micro-batches with rows of every device, wider rows, logits two positions at a time.
    eight = building.make_update(settings | {"micro_batch_size": 8, "logp_chunk_tokens": 2}, num_devices=8)
    assert_same(building.gradient(eight, garbage(wider(shuffled, 5)), mesh=EIGHT), expected)


@pytest.mark.slow
def test_microbatches_and_rematerialisation_do_not_change_loss_and_gradient():
    settings = building.LOSSES["token mean, k3"]
    rows = building.random_experience()
    expected = building.gradient(building.make_update(settings), rows)
    micro = building.make_update(settings | {"micro_batch_size": 4, "logp_chunk_tokens": 12}, remat="full")
    assert_same(building.gradient(micro, rows), expected)


@pytest.mark.parametrize("support_size", [0, pytest.param(9, marks=pytest.mark.slow)])
def test_packing_does_not_change_loss_and_gradient_on_one_device_or_eight(support_size):
    settings = building.LOSSES["token mean, k3"]
    rows = building.random_experience(support_size=support_size)
    expected = building.gradient(building.make_update(settings), rows)
    width = 2 * rows.rollout.tokens.shape[1]
    packed = settings | {"pack_width": width, "micro_batch_tokens": 2 * width, "logp_chunk_tokens": 8}
    assert_same(building.gradient(building.make_update(packed, remat="full"), garbage(wider(rows, 5))), expected)
    eight = building.make_update(packed | {"micro_batch_tokens": 8 * width}, num_devices=8)
    assert_same(building.gradient(eight, garbage(rows), mesh=EIGHT), expected)


@pytest.mark.tier("slow")  # plain: test_collectives.test_gradients_are_one_devices_on_any_mesh
def test_sharded_parameters_do_not_change_loss_and_gradient():
    settings = building.LOSSES["token mean, k3"]
    rows = building.random_experience()
    expected = building.gradient(building.make_update(settings), rows)
    cube = building.make_update(settings | {"micro_batch_size": 8}, num_devices=4)
    assert not building.train_state(cube, CUBE).params["policy"]["blocks"]["q"].sharding.is_fully_replicated
    assert_same(building.gradient(cube, garbage(rows), mesh=CUBE), expected)
    # Nothing but layers is split: the compiler took no program whose devices all have the same rows.
    halves = building.make_update(settings | {"micro_batch_size": 8})
    assert_same(building.gradient(halves, garbage(rows), mesh=MeshConfig(data=1, tensor=2)), expected)


def test_random_rows_hold_every_case():
    # What the invariances above are about must be there: ragged, clipped, not trainable.
    rows = building.random_experience()
    size = rows.rollout.length - rows.rollout.prompt_length
    assert set(size.tolist()) >= {1, building.COMPLETION_TOKENS} and len(set(size.tolist())) > 3
    assert len(set(rows.rollout.prompt_length.tolist())) > 3 and 0 < (~rows.trainable).sum() < building.NUM_ROWS
    _, sums = building.gradient(building.make_update(building.LOSSES["token mean, k3"]), rows)
    assert 0 < sums["clipped_count"] < sums["token_count"]
