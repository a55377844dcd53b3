"""Further terms of the loss: cross-entropies of prompts and of external completions."""

import jax
import numpy as np
import optax
import pytest
from reference import losses, transformer
from support import building
from support.building import COMPLETION_TOKENS, NUM_ROWS, ONE, TINY, mesh_of

from jaxrl_llm.commands.sft import Supervised

# What is sampled from is not what prompts are judged by.
FILTERS = {"temperature": 1.2, "top_k": 60}
(BOTH,) = building.CROSS_ENTROPIES.values()


def without_credit(rows):
    """Return rows of the run's own prompts with rewards of 0, so that the policy loss has no gradient."""
    rollout = rows.rollout.replace(group_id=np.abs(rows.rollout.group_id))
    return rows.replace(rollout=rollout, reward=0 * rows.reward, advantage=0 * rows.advantage)


def oracle(params, rows, algorithm):
    """Return the loss of the whole batch, computed by rows in float64, and its two cross-entropies."""
    logp, environment, imitation = [], [], []
    columns = rows.rollout.tokens, rows.rollout.prompt_length, rows.rollout.length
    for i, (tokens, first, last) in enumerate(zip(*columns, strict=True)):
        logp.append(transformer.completion_logp(params, TINY, tokens, first, last, keep_token=True, **FILTERS))
        if not rows.trainable[i]:
            continue
        of_prompt = transformer.completion_logp(params, TINY, tokens, 1, first)[1:first]
        if len(of_prompt):
            environment.append(-sum(of_prompt) / len(of_prompt))
        if rows.rollout.group_id[i] < 0 and rows.reward[i] >= 1:
            imitation += (-logp[-1][first:last]).tolist()
    at = np.arange(rows.rollout.tokens.shape[1])[None, :]
    mask = (at >= rows.rollout.prompt_length[:, None]) & (at < rows.rollout.length[:, None])
    term = losses.clipped_surrogate(np.array(logp), rows.rollout.behaviour_logp, rows.advantage, 0.2, 0.2)
    environment = sum(environment) / rows.trainable.sum()  # a prompt of one token adds nothing, and counts
    imitation = sum(imitation) / len(imitation) if imitation else 0.0
    loss = losses.aggregate(term, mask, rows.trainable, "token_mean", COMPLETION_TOKENS)
    of_prompts, of_others = (one["coefficient"] for one in algorithm.cross_entropies)
    loss += of_prompts * environment + of_others * imitation
    return loss, environment, imitation


def test_both_are_those_of_a_float64_model_and_prompts_teach_where_no_reward_does():
    update = building.make_update(BOTH, FILTERS)
    params = building.host_params(update.model)
    rows = building.random_experience(with_reference=False, with_others=True)
    _, sums = building.gradient(update, rows)
    loss, environment, imitation = oracle(params, rows, update.algorithm)
    assert min(environment, imitation) > 1
    np.testing.assert_allclose(sums["environment_loss_sum"], environment, rtol=1e-5)
    np.testing.assert_allclose(sums["imitation_loss_sum"], imitation, rtol=1e-5)
    np.testing.assert_allclose(sums["imitation_weight_sum"], 1.0, rtol=1e-6)  # a batch that has such rows
    np.testing.assert_allclose(sums["loss_sum"], loss, rtol=1e-5)

    # Slope along a random direction by central differences, where prompts are all there is.
    rows = without_credit(rows)
    gradient, sums = building.gradient(update, rows)
    assert sums["imitation_loss_sum"] == sums["imitation_weight_sum"] == 0
    direction = jax.tree.map(lambda x, rng=np.random.default_rng(1): rng.normal(size=x.shape), params)
    ends = []
    for step in (1e-6, -1e-6):
        moved = jax.tree.map(lambda x, d, step=step: x + step * d, params, direction)
        ends.append(oracle(moved, rows, update.algorithm)[0])
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g.astype(np.float64) * d).sum(), gradient, direction)))
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
    assert norm > 1e-2
    np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, slope, rtol=0, atol=1e-5 * norm)


@pytest.mark.tier("slow")  # plain: test_both_are_those_of_a_float64_model_...
def test_imitation_alone_has_the_gradient_of_supervised_fine_tuning_on_the_correct_rows_of_others():
    alone = {"cross_entropies": [{"name": "imitation", "coefficient": 1.0}]}
    update = building.make_update(alone | {"micro_batch_size": 8})
    rows = building.random_experience(with_reference=False, with_others=True)
    rows = rows.replace(advantage=0 * rows.advantage)
    gradient, sums = building.gradient(update, rows)
    shown = rows.trainable & (rows.rollout.group_id < 0) & (rows.reward >= 1)
    assert 1 < shown.sum() < NUM_ROWS // 2
    task = Supervised(update.model, optax.sgd(1.0), width=COMPLETION_TOKENS, chunk=2)
    answers = tuple(x[shown] for x in (rows.rollout.tokens, rows.rollout.prompt_length, rows.rollout.length))
    params = building.learner_params(update.model, mesh_of(ONE))
    loss, expected = jax.jit(jax.value_and_grad(task.loss))(params, answers)
    np.testing.assert_allclose(sums["loss_sum"], loss, rtol=1e-5)
    apart = float(optax.tree.norm(jax.tree.map(np.subtract, gradient, expected)))
    assert apart < 1e-5 * float(optax.tree.norm(expected))
