"""Tokens that an environment wrote between the policy's turns:

later tokens attend to them, and they have no other effect.
"""

import jax
import numpy as np
import pytest
from reference import transformer
from support import building

from jaxrl_llm.algorithms import critic
from jaxrl_llm.algorithms.draw_weights import surprise

LOSS = building.LOSSES["token mean, k3"]


def with_answers(rows):
    """Return rows [B, ...] with an environment's tokens inside completions, and the mask [B,S] of these tokens."""
    rollout = rows.rollout
    at = np.arange(rollout.tokens.shape[1])[None, :] - rollout.prompt_length[:, None]
    size = (rollout.length - rollout.prompt_length)[:, None]
    is_answer = ((at == 2) | (at == 3) | (at == 5)) & (at < size - 1)
    hide = lambda x, value: np.where(is_answer, value, x).astype(x.dtype)
    rollout = rollout.replace(
        policy_version=hide(rollout.policy_version, -1), behaviour_logp=hide(rollout.behaviour_logp, 0)
    )
    return rows.replace(rollout=rollout, advantage=hide(rows.advantage, 0)), is_answer


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_are_of_drawn_tokens_alone(aggregation):
    rows, is_answer = with_answers(building.random_experience())
    update = building.make_update({"aggregation": aggregation})
    weight = np.asarray(update._weights(rows).policy)
    at = np.arange(weight.shape[1])[None, :]
    rollout = rows.rollout
    mask = (at >= rollout.prompt_length[:, None]) & (at < rollout.length[:, None]) & rows.trainable[:, None]
    assert (is_answer & mask).sum() > 8
    mask &= ~is_answer
    by_row = mask / np.maximum(mask.sum(axis=1, keepdims=True), 1) / mask.any(axis=1).sum()
    np.testing.assert_allclose(weight, by_row if aggregation == "sequence_mean" else mask / mask.sum(), rtol=1e-6)


def test_their_gradient_is_exactly_zero_whatever_stands_there():
    rows, is_answer = with_answers(building.random_experience())
    update = building.make_update(LOSS)
    expected = building.gradient(update, rows)
    spoil = lambda x: np.where(is_answer, np.float32(1e9), x)
    spoilt = rows.replace(
        rollout=rows.rollout.replace(behaviour_logp=spoil(rows.rollout.behaviour_logp)),
        advantage=spoil(rows.advantage),
        columns={name: spoil(x) for name, x in rows.columns.items()},
    )
    jax.tree.map(np.testing.assert_array_equal, building.gradient(update, spoilt), expected)
    np.testing.assert_array_equal(surprise(spoilt.rollout), surprise(rows.rollout))
    # And they are seen: other answers change what the policy says after them.
    other = rows.replace(rollout=rows.rollout.replace(tokens=np.where(is_answer, 7, rows.rollout.tokens)))
    changed = jax.tree.map(lambda x, y: np.any(x != y), building.gradient(update, other), expected)
    assert any(jax.tree.leaves(changed))


def test_where_asked_they_are_learned_as_a_float64_model_has_them_and_the_policys_own_are_not():
    rows, is_answer = with_answers(building.random_experience(with_reference=False))
    rows = rows.replace(advantage=0 * rows.advantage, reward=0 * rows.reward)
    asked = {"cross_entropies": [{"name": "answers", "coefficient": 0.05}]}
    update = building.make_update(asked)
    params, gradient = building.host_params(update.model), building.gradient(update, rows)
    of_rows = []
    for i in np.flatnonzero(rows.trainable & is_answer.any(axis=1)):
        row = rows.rollout.tokens[i], rows.rollout.prompt_length[i], rows.rollout.length[i]
        logp = transformer.completion_logp(params, update.model.arch, *row)
        of_rows.append(-logp[is_answer[i]].mean())
    expected = np.sum(of_rows) / rows.trainable.sum()  # rows that were answered nothing count
    assert 3 < len(of_rows) < rows.trainable.sum() and any(jax.tree.leaves(jax.tree.map(np.any, gradient[0])))
    np.testing.assert_allclose(gradient[1]["answers_loss_sum"], expected, rtol=1e-5)
    np.testing.assert_allclose(gradient[1]["loss_sum"], 0.05 * expected, rtol=1e-5)
    # Not asked for, nothing is left.
    nothing = building.gradient(building.make_update({}), rows)[0]
    assert not any(jax.tree.leaves(jax.tree.map(np.any, nothing)))


@pytest.mark.tier("slow")  # plain: test_invariance.py, without turns
def test_packing_and_micro_batches_change_nothing():
    rows, _ = with_answers(building.random_experience())
    expected = building.gradient(building.make_update(LOSS), rows)
    sizes = {"micro_batch_tokens": 2 * building.ROW_TOKENS, "pack_width": 2 * building.ROW_TOKENS}
    for more in (sizes, {"micro_batch_size": 4}):
        got = building.gradient(building.make_update(LOSS | more), rows)
        # Sums in another order. Measured: 4e-7, of entries up to 0.7.
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-6), got[0], expected[0])
        assert float(got[1]["token_count"]) == float(expected[1]["token_count"])


def test_returns_go_over_an_answer_as_if_it_were_not_there():
    rng = np.random.default_rng(0)
    mask = np.array(
        [[0, 1, 1, 0, 0, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]], bool
    )
    value, reward = rng.normal(size=mask.shape).astype(np.float32), rng.normal(size=3).astype(np.float32)
    how = {"discount": 0.9, "gae_lambda": 0.7}
    got = np.asarray(critic.lambda_returns(value, reward, mask, **how))
    for row in range(3):
        expected, ahead = [], None
        for v in value[row][mask[row]][::-1]:  # from the last token on
            g = reward[row] if ahead is None else 0.9 * (0.3 * ahead[0] + 0.7 * ahead[1])
            expected.insert(0, g)
            ahead = v, g
        np.testing.assert_allclose(got[row][mask[row]], expected, rtol=1e-5)
    assert not got[~mask].any()
