"""The update compared with an independent float64 model and loss.

Also: tokens without gradient, the optimizer's arithmetic.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import corrections, losses, sampling, surrogates, transformer
from reference import values as critics
from support import building
from support.building import COMPLETION_TOKENS, CUBE, ONE, PROMPT_TOKENS, TINY, mesh_of
from support.refusal import refused
from support.tiers import mostly_in

from jaxrl_llm.config import MeshConfig, OptimizerConfig, freeze
from jaxrl_llm.learner import optim
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models.row_logp import chunk_tokens
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.filters import NO_TOKEN
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import Sums, TrainState

# --- the loss and its gradient ---

FILTERS = {"temperature": 1.2, "top_k": 60, "min_p": 0.01}
AMONG = {"temperature": 1.2, "top_k": 9}  # whose support is kept with the rows
CASES = {name: (loss, {}) for name, loss in building.LOSSES.items()} | {
    "no reference, filters": ({}, FILTERS),
    "kept support": ({}, AMONG),
}

LOSS = building.LOSSES["token mean, k3"]


def oracle_logp(params, rollout, arch=TINY, **filters):
    """Return log-probs [B,S] in float64, row by row.

    A sampled token outside the current filters joins the kept tokens.
    """

    def row(i):
        support = rollout.columns.get("support")
        among = None if support is None else [set(x) - {NO_TOKEN} for x in support[i].tolist()]
        columns = (x[i] for x in (rollout.tokens, rollout.prompt_length, rollout.length))
        return transformer.completion_logp(params, arch, *columns, keep_token=True, support=among, **filters)

    return np.stack([row(i) for i in range(len(rollout.length))])


def oracle_loss(policy_logp, rows, algorithm):
    at = np.arange(rows.rollout.tokens.shape[1])[None, :]
    mask = (at >= rows.rollout.prompt_length[:, None]) & (at < rows.rollout.length[:, None])
    bounds = algorithm.surrogate["low"], algorithm.surrogate["high"]
    term = losses.clipped_surrogate(policy_logp, rows.rollout.behaviour_logp, rows.advantage, *bounds)
    if algorithm.divergence:
        d = policy_logp - rows.columns["ref_logp"]
        kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[algorithm.divergence["estimator"]]
        term += algorithm.divergence["coefficient"] * kl
    return losses.aggregate(term, mask, rows.trainable, algorithm.aggregation.name, COMPLETION_TOKENS)


# The terms of building.LOSSES have first losses in test_recipes.py.
@pytest.mark.parametrize(
    "name", mostly_in("slow", ["kept support", "no reference, filters", *building.LOSSES], plain=2)
)
def test_loss_and_gradient_are_those_of_a_float64_model(name):
    settings, filters = CASES[name]
    update = building.make_update(settings, filters)
    support_size = filters["top_k"] if filters is AMONG else 0
    rows = building.random_experience(with_reference="divergence" in settings, support_size=support_size)
    params = building.host_params(update.model)
    gradient, sums = building.gradient(update, rows)
    logp = oracle_logp(params, rows.rollout, **filters)
    np.testing.assert_allclose(sums["loss_sum"], oracle_loss(logp, rows, update.algorithm), rtol=1e-5)

    # Slope of the float64 loss along a random direction by central differences (their own error is below 1e-7).
    # Measured disagreement with the float32 gradient: 1.1e-6 of its norm at most.
    direction = jax.tree.map(lambda x, rng=np.random.default_rng(1): rng.normal(size=x.shape), params)
    values = []
    for step in (1e-7, -1e-7):
        moved = jax.tree.map(lambda x, d, step=step: x + step * d, params, direction)
        values.append(oracle_loss(oracle_logp(moved, rows.rollout, **filters), rows, update.algorithm))
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g.astype(np.float64) * d).sum(), gradient, direction)))
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
    assert norm > 1e-2
    np.testing.assert_allclose((values[0] - values[1]) / 2e-7, slope, rtol=0, atol=1e-5 * norm)


# A teacher of another shape; its table has a row more than the learner's.
TEACHER = dataclasses.replace(TINY, vocab_size=272, width=24, num_layers=1, num_heads=2, tied=False)


@pytest.mark.parametrize(
    ("micro_batch_size", "teacher"), [(2, None), (8, TEACHER)], ids=["rows_apart", "whole_groups_and_a_teacher"]
)
def test_reference_log_probs_are_the_models_in_the_rows_order(micro_batch_size, teacher):
    config = {
        "model": {"path": "random:debug"},
        "prompts": {"max_tokens": PROMPT_TOKENS},
        "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
        "rollout": {"prompts_per_iteration": 8, "group_size": 2},
        "replay": {"capacity": 16},
        "update": {"batch_size": 16, "micro_batch_size": micro_batch_size},
        "algorithm": {"divergence": {"name": "reference", "coefficient": 0.1}},
        "mesh": {"data": 2},
    }
    run = assemble(freeze(config), TINY, (5,), mesh_of(MeshConfig(data=2)), teacher)
    rows = building.random_experience(group_size=2).rollout
    with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
        params = building.learner_params(run.learner.reference_model, run.mesh)
        program = jax.jit(run.programs()["annotate"].fn)
        said = program(
            TrainState({"policy": None}, None, None), params, jax.device_put(rows, sharding.leading(run.mesh, rows))
        )
    expected = oracle_logp(building.host_params(run.learner.reference_model), rows, arch=teacher or TINY)
    assert said.keys() == {"ref_logp"}
    np.testing.assert_allclose(said["ref_logp"], expected, atol=1e-5)  # measured: 2.0e-6


def mask_of(rows):
    at = np.arange(rows.rollout.tokens.shape[1])[None, :]
    inside = (at >= rows.rollout.prompt_length[:, None]) & (at < rows.rollout.length[:, None])
    return inside & rows.trainable[:, None]


def oracle_entropy(params, rollout):
    """Return the entropies [B,S], float64, of the distributions from which the completions' tokens were drawn."""
    result = np.zeros(rollout.tokens.shape)
    for i, (tokens, first, last) in enumerate(zip(rollout.tokens, rollout.prompt_length, rollout.length, strict=True)):
        for t, row in enumerate(transformer.logits(params, TINY, tokens[:last])[first - 1 : last - 1], start=first):
            probability = sampling.softmax(row)
            result[i, t] = -(probability * np.log(probability)).sum()
    return result


def three_policies(anchor, rows, **settings):
    """Return an update with a separate old policy and a KL penalty to a third policy.

    The old policy is the policy before the iteration's updates. Also return a state with these weights, and the three
    policies' float64 log-probs of the rows.
    """
    settings |= {"old_policy": "start", "divergence": building.penalty("k2", anchor), "micro_batch_size": 8}
    update = building.make_update(settings)
    policies = [building.host_params(update.model, seed) for seed in range(3)]
    compiled = jax.jit(update.apply_batch)

    def step(iteration=0, **fields):
        state = building.train_state(update).replace(**fields)
        with jax.sharding.use_abstract_mesh(mesh_of(ONE).abstract_mesh):
            start = state.replace(params={"policy": policies[1]})
            return compiled(state, building.on_mesh(update, rows), iteration, start)

    return step, policies, [oracle_logp(params, rows.rollout) for params in policies]


def test_policies_before_and_averaged_corrected_weights_and_the_scaled_step_are_those_of_a_float64_model():
    rows = building.random_experience(with_reference=False)
    mask, behaviour = mask_of(rows), rows.rollout.behaviour_logp
    step, (params, _, average), (policy, old, averaged) = three_policies(
        "ewma",
        rows,
        correction="token_masked",
        entropy_bonus={"name": "adaptive", "coefficient": 0.05, "target": 9.0, "rate": 0.01},
        step_size="effective_sample_size",
    )
    after, sums = step(others={"average": average})
    weight = np.array(corrections.weights(old - behaviour, mask, "token_masked", 0.5, 2.0, None))
    assert 0 < np.sum(weight == 0, where=mask) < mask.sum()
    term = weight * losses.clipped_surrogate(policy, old, rows.advantage, 0.2, 0.2)
    # What is masked out is held to the anchor all the same.
    term += 0.3 * (policy - averaged) ** 2 / 2 - 0.05 * oracle_entropy(params, rows.rollout)
    expected = losses.aggregate(term, mask, rows.trainable, "token_mean", COMPLETION_TOKENS)
    np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)
    np.testing.assert_allclose(sums["correction_weight_sum"], np.sum(weight), rtol=1e-5)
    # 264 tokens have less entropy than 9 nats: the bonus of the next step is larger by the rate.
    np.testing.assert_allclose(sums["entropy_coefficient_sum"], 0.05, rtol=1e-6)
    np.testing.assert_allclose(after.scalars["entropy_coefficient"], 0.06, rtol=1e-6)

    # The recorder's step is the gradient; averages of versions 0 and 1 weigh 0.9 and 1.
    ratio = np.array(
        [np.exp(row[keep].sum()) for row, keep in zip(policy - behaviour, mask, strict=True) if keep.any()]
    )
    scale = np.sqrt(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    np.testing.assert_allclose(sums["rate_scale_sum"], scale, rtol=1e-4)
    moved = jax.tree.map(lambda x, g: x + scale * np.asarray(g), params, after.opt_state["policy"])
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(near, after.params["policy"], moved)
    jax.tree.map(lambda new, a, p: near(new, (0.9 * a + p) / 1.9), after.others["average"], average, moved)


@pytest.mark.tier("slow")  # plain: first loss of remix in test_recipes.py
def test_remix_clips_about_the_iterations_policy_and_is_held_to_the_start_and_to_the_policy_before():
    """By the paper's equations with three policies: r within c -+ 0.2, + 0.3 (l KL(base) + (1 - l) KL(pi_(k-1)))."""
    rows = building.random_experience()
    mask, behaviour = mask_of(rows), rows.rollout.behaviour_logp
    step, (_, _, previous), (policy, current, before) = three_policies("convex", rows, surrogate="remix_centred")
    ratio, centre = np.exp(policy - behaviour), np.exp(current - behaviour)
    # Of 50 iterations and fewer all of the penalty is to the start; then a tenth less every ten, down to a half.
    for iteration, share in ((50, 1.0), (51, 0.9), (65, 0.8), (500, 0.5)):
        after, sums = step(np.int32(iteration), others={"previous": previous})
        window = np.minimum(np.maximum(ratio, centre - 0.2), centre + 0.2)
        term = -np.minimum(ratio * rows.advantage, window * rows.advantage)
        term += 0.3 * (share * (policy - rows.columns["ref_logp"]) ** 2 + (1 - share) * (policy - before) ** 2) / 2
        expected = losses.aggregate(term, mask, rows.trainable, "token_mean", COMPLETION_TOKENS)
        np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, after.others["previous"], previous)


def test_the_policy_before_is_what_the_iteration_before_began_with():
    update = building.make_update({"divergence": building.penalty("k3", "convex"), "updates_per_iteration": 2})
    update = dataclasses.replace(update, optimizer=optax.sgd(1e-3))
    rows = building.on_mesh(update, building.random_experience())
    draw = lambda ring, key: (ring, rows, Sums())
    step = jax.jit(lambda state: update.step(state, None, jnp.int32(0), jax.random.key(0), draw)[0])
    first = building.train_state(update)
    params = first.params["policy"]
    opt_state = {"policy": update.optimizer.init(params)}
    states = [first.replace(others={"previous": params}, opt_state=opt_state)]
    with jax.sharding.use_abstract_mesh(mesh_of(ONE).abstract_mesh):
        for _ in range(2):
            states.append(step(states[-1]))
    for before, after in itertools.pairwise(states):
        jax.tree.map(np.testing.assert_array_equal, after.others["previous"], before.params["policy"])
        assert optax.tree.norm(jax.tree.map(np.subtract, after.params, before.params)) > 0


def test_each_update_has_a_draw_of_its_own_and_the_start_is_before_the_first():
    update = building.make_update({"old_policy": "start", "updates_per_iteration": 3})
    update = dataclasses.replace(update, optimizer=optax.sgd(0.3))
    rows = building.random_experience(with_reference=False)
    own = oracle_logp(building.host_params(update.model), rows.rollout).astype(np.float32)
    batch = building.on_mesh(update, rows.replace(rollout=rows.rollout.replace(behaviour_logp=own)))

    def draw(ring, key):
        count, keys = ring
        return (count + 1, keys.at[count].set(jax.random.key_data(key))), batch, Sums()

    first = building.train_state(update)
    first = first.replace(opt_state={"policy": update.optimizer.init(first.params["policy"])})
    keys, key = jnp.zeros((3, 2), jnp.uint32), jax.random.key(0)
    step = jax.jit(lambda state: update.step(state, (0, keys), jnp.int32(0), key, draw))
    with jax.sharding.use_abstract_mesh(mesh_of(ONE).abstract_mesh):
        _, (_, keys), sums = step(first)
    assert len(np.unique(keys, axis=0)) == 3
    # The weights moved, the old policy did not: it is the one that drew the tokens, of all three batches.
    assert sums["ratio_max"] > 1.02 and sums["old_gap_max"] < 1e-4


def test_each_iteration_has_draws_of_its_own(monkeypatch):
    learner = assemble(freeze({}), TINY, (5,), mesh_of(ONE)).learner
    monkeypatch.setattr(Update, "step", lambda self, state, ring, iteration, key, *_: (state, ring, Sums({"key": key})))
    state, ring = types.SimpleNamespace(step=jnp.int32(1)), learner._init_ring()
    keys = [learner._update(state, ring, jnp.int32(i), jax.random.key(0))[2]["key"] for i in range(3)]
    assert len(np.unique(jax.random.key_data(jnp.stack(keys)), axis=0)) == 3


def test_what_sampler_and_learner_differ_by_and_what_was_learned_since_are_two_ratios():
    """The surrogate clips staleness, current / old. The correction uses the discrepancy, old / behaviour."""
    rows = building.random_experience(with_reference=False)
    noise = np.random.default_rng(3).normal(0, 0.5, (2, *rows.advantage.shape)).astype(np.float32)
    mask, behaviour = mask_of(rows), rows.rollout.behaviour_logp
    old = [np.where(mask, behaviour + some, np.nan).astype(np.float32) for some in noise]
    settings = {"old_policy": "generation", "correction": {"name": "token_truncated", "high": 1.3}}
    update = building.make_update(settings)
    policy = oracle_logp(building.host_params(update.model), rows.rollout)
    _, sums = building.gradient(update, rows.with_columns(generation_logp=old[0]))
    weight = np.array(corrections.weights(np.where(mask, noise[0], 0), mask, "token_truncated", 0.5, 1.3, None))
    kept = np.where(mask, old[0], 0)
    term = weight * losses.clipped_surrogate(policy, kept, rows.advantage, 0.2, 0.2)
    expected = losses.aggregate(term, mask, rows.trainable, "token_mean", COMPLETION_TOKENS)
    np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)
    np.testing.assert_allclose(sums["old_gap_max"], np.abs((old[0] - behaviour)[mask]).max(), rtol=1e-5)
    for away in (30, -30):  # cut to 20 nats
        _, sums = building.gradient(update, rows.with_columns(generation_logp=behaviour + np.float32(away)))
        np.testing.assert_allclose(sums["old_gap_max"], 20, rtol=1e-6)

    # Neither truncated nor clipped, their product is the ratio to the behaviour policy, whatever lies between.
    wide = {"name": "clipped", "low": 1.0, "high": 1e9}
    update = building.make_update({"old_policy": "generation", "correction": "importance", "surrogate": wide})
    seen = [building.gradient(update, rows.with_columns(generation_logp=x)) for x in old]
    term = -np.exp(policy - behaviour) * rows.advantage
    expected = losses.aggregate(term, mask, rows.trainable, "token_mean", COMPLETION_TOKENS)
    for gradient, sums in seen:
        np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)
        apart = optax.tree.norm(jax.tree.map(np.subtract, gradient, seen[0][0]))
        assert apart < 1e-5 * optax.tree.norm(gradient)


def oracle_value_loss(params, head, rows, critic):
    """Return the token mean of the critic's loss in float64, and its values [B,S]."""
    rollout, mask = rows.rollout, mask_of(rows)
    support = critic.bins, critic.low, critic.high
    kernel, bias = (np.asarray(head[name], np.float64) for name in ("kernel", "bias"))
    loss, value = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, (tokens, first, last) in enumerate(zip(rollout.tokens, rollout.prompt_length, rollout.length, strict=True)):
        outputs = transformer.hidden(params, TINY, tokens[:last]) @ kernel + bias
        for t in range(first, last):
            value[i, t] = critics.value(outputs[t - 1], *support)
            given = float(rows.columns["returns"][i, t]), *support, float(rows.columns["value"][i, t]), critic.clip
            loss[i, t] = critics.loss(outputs[t - 1], *given)
    return losses.aggregate(loss, mask, rows.trainable, "token_mean", COMPLETION_TOKENS), value


@pytest.mark.parametrize(("name", "group_size"), mostly_in("slow", [("critic, clipped value", 1), ("critic, bins", 2)]))
def test_the_critics_loss_and_its_gradients_are_those_of_a_float64_model(name, group_size):
    # Without advantages the critic's loss is all there is.
    settings = building.CRITICS[name] | {"micro_batch_size": 8, "step_size": "effective_sample_size"}
    update = building.make_update(settings, group_size=group_size)
    rows = building.random_experience(with_reference=False, with_critic=True, group_size=group_size)
    rows = rows.replace(advantage=np.zeros_like(rows.advantage))
    params, head = building.host_params(update.model), building.host_head(update)
    (of_params, of_head), sums = building.gradient(update, rows)
    expected, value = oracle_value_loss(params, head, rows, update.algorithm.critic)
    np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)
    mask = mask_of(rows)
    error = (rows.columns["returns"] - value)[mask]
    for sum_name, terms in {"return": rows.columns["returns"][mask], "value_error": error}.items():
        # Measured: 7e-7, of 16.
        np.testing.assert_allclose(sums[f"{sum_name}_sum"], terms.sum(), rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(sums[f"{sum_name}_square_sum"], np.square(terms).sum(), rtol=1e-5)

    # Slope along a random direction of both by central differences; the trunk has its share of the gradient.
    whole = jax.tree.map(lambda g: g / update.algorithm.critic.gradient_share, of_params), of_head
    direction = jax.tree.map(lambda x, rng=np.random.default_rng(1): rng.normal(size=x.shape), (params, head))
    ends = []
    for step in (1e-6, -1e-6):
        moved = jax.tree.map(lambda x, d, step=step: x + step * d, (params, head), direction)
        ends.append(oracle_value_loss(*moved, rows, update.algorithm.critic)[0])
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g.astype(np.float64) * d).sum(), whole, direction)))
    norms = [np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in jax.tree.leaves(tree))) for tree in whole]
    assert min(norms) > 0.1 * max(norms) > 1e-3
    # Measured: 2.3e-6 of the smaller norm.
    np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, slope, rtol=0, atol=1e-5 * min(norms))

    # The recorder's step is the gradient; the share of a batch that counts makes that of the policy alone smaller.
    after, sums = building.compile_update(update)(building.train_state(update), building.on_mesh(update, rows))
    assert sums["rate_scale_sum"] < 0.9
    np.testing.assert_array_equal(after.params["critic"]["kernel"], head["kernel"] + of_head["kernel"])


def test_values_of_rollouts_are_those_of_a_float64_model_in_the_rows_order():
    config = {
        "model": {"path": "random:debug"},
        "prompts": {"max_tokens": PROMPT_TOKENS},
        "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
        "rollout": {"prompts_per_iteration": 8, "group_size": 2},
        "replay": {"capacity": 16},
        "update": {"batch_size": 16, "micro_batch_size": 8},
        "algorithm": building.CRITICS["critic, bins"] | {"advantage": "gae"},
        "mesh": {"data": 2},
    }
    run = assemble(freeze(config), TINY, (5,), mesh_of(MeshConfig(data=2)))
    rows = building.random_experience(group_size=2, with_critic=True)
    head = building.host_head(run.learner.update)
    with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
        params = {"policy": building.learner_params(run.model, run.mesh), "critic": head}
        state = TrainState(params, None, None)
        program = jax.jit(run.programs()["annotate"].fn)
        said = program(state, None, jax.device_put(rows.rollout, sharding.leading(run.mesh, rows.rollout)))
    _, expected = oracle_value_loss(building.host_params(run.model), head, rows, run.learner.update.algorithm.critic)
    assert said.keys() == {"value"}
    np.testing.assert_allclose(said["value"], expected, atol=1e-5)


OWN_SURROGATES = """
def weighed(tokens, *, scale: float = 1.0):
    return -tokens.advantage * tokens.policy_logp * scale


def of_rows(tokens):
    return (tokens.advantage * tokens.policy_logp).sum(axis=1)


def with_flags_of_rows(tokens):
    return -tokens.advantage * tokens.policy_logp, tokens.mask.any(axis=1)
"""


@pytest.mark.tier("slow")  # plain: test_own_functions.test_reward_terms_...
def test_a_surrogate_of_the_users_own_has_the_gradient_of_ours_that_says_the_same(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_SURROGATES)
    rows = building.random_experience()
    gradient = lambda surrogate: building.gradient(building.make_update(LOSS | {"surrogate": surrogate}), rows)
    ours, own = gradient("reinforce"), gradient(f"{path}:weighed")
    jax.tree.map(np.testing.assert_array_equal, own, ours)
    assert optax.tree.norm(ours[0]) > 1e-2
    scaled, _ = gradient({"name": f"{path}:weighed", "scale": 2.0})
    assert optax.tree.norm(jax.tree.map(np.subtract, scaled, ours[0])) > 1e-2
    for name in ("of_rows", "with_flags_of_rows"):
        with refused("algorithm.surrogate", f"{path}:{name}"):
            gradient(f"{path}:{name}")


def test_a_term_without_a_ratio_is_weighed_by_the_current_policys_which_is_a_constant():
    update = building.make_update({"surrogate": "reinforce", "correction": {"name": "token_truncated", "high": 1.3}})
    rows = building.random_experience(with_reference=False)
    policy, mask = oracle_logp(building.host_params(update.model), rows.rollout), mask_of(rows)
    ratio = np.exp(policy - rows.rollout.behaviour_logp)
    assert 0 < np.sum(ratio < 1.3, where=mask) < mask.sum()
    gradient, sums = building.gradient(update, rows)
    weighed = np.minimum(ratio, 1.3) * rows.advantage
    expected = losses.aggregate(-weighed * policy, mask, rows.trainable, "token_mean", COMPLETION_TOKENS)
    np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)
    # The gradient is that of tokens which the current policy drew, with these as advantages.
    fresh = rows.replace(
        advantage=weighed.astype(np.float32), rollout=rows.rollout.replace(behaviour_logp=policy.astype(np.float32))
    )
    expected, _ = building.gradient(update, fresh)
    apart = optax.tree.norm(jax.tree.map(np.subtract, gradient, expected))
    assert apart < 1e-5 * optax.tree.norm(expected)


def test_groups_are_compared_and_the_second_moment_is_of_the_whole_batch():
    # Two rows of a group share a prompt; a micro-batch holds two groups.
    settings = {"surrogate": {"name": "agro", "beta": 0.3}, "aggregation": "sequence_mean"}
    settings |= {"correction": {"name": "second_moment", "limit": 0.5}, "micro_batch_size": 4}
    update = building.make_update(settings, group_size=2)
    rows = building.random_experience(group_size=2)
    gradient, sums = building.gradient(update, rows)

    mask = mask_of(rows)
    policy = oracle_logp(building.host_params(update.model), rows.rollout)
    kept = corrections.second_moment_kept(policy - rows.rollout.behaviour_logp, mask, 0.5)
    assert 0 < len(kept) < mask.sum()
    keep = np.zeros_like(mask)
    keep[tuple(np.array(sorted(kept)).T)] = True
    row = lambda i: {
        "policy": policy[i][keep[i]].tolist(),
        "ref": rows.columns["ref_logp"][i][keep[i]].tolist(),
        "advantage": rows.advantage[i][keep[i]].tolist(),
    }
    terms = surrogates.agro([row(i) for i in range(len(mask))], {"beta": 0.3, "group_size": 2})
    whole = np.zeros(mask.shape)
    for i, values in enumerate(terms):
        whole[i][keep[i]] = values
    expected = losses.aggregate(whole, mask, rows.trainable, "sequence_mean", COMPLETION_TOKENS)
    np.testing.assert_allclose(sums["loss_sum"], expected, rtol=1e-5)
    assert sums["correction_weight_sum"] == len(kept)
    assert np.isfinite(jax.tree.leaves(jax.tree.map(np.sum, gradient))).all()


def test_metrics_are_sums_over_the_trained_tokens():
    update = building.make_update(LOSS)
    rows = building.random_experience(with_others=True)
    bucket = np.arange(len(rows.reward), dtype=np.int32) % 3
    rows = rows.with_columns(age_bucket=bucket)
    _, sums = building.gradient(update, rows)
    size = (rows.rollout.length - rows.rollout.prompt_length)[rows.trainable].sum()
    at = np.arange(rows.rollout.tokens.shape[1])[None, :]
    mask = (at >= rows.rollout.prompt_length[:, None]) & (at < rows.rollout.length[:, None]) & rows.trainable[:, None]
    policy = oracle_logp(building.host_params(update.model), rows.rollout)
    d, from_reference = ((policy - other)[mask] for other in (rows.rollout.behaviour_logp, rows.columns["ref_logp"]))
    ratio, advantage = np.exp(d), rows.advantage[mask]
    gap = np.abs(d)[np.broadcast_to(rows.rollout.group_id[:, None] >= 0, mask.shape)[mask]]  # not of others' rows
    clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
    expected = {
        "token_count": size,
        "own_token_count": gap.size,
        "clipped_count": clipped.sum(),
        "ratio_sum": ratio.sum(),
        "ratio_square_sum": (ratio**2).sum(),
        "ratio_max": ratio.max(),
        "row_count": rows.trainable.sum(),
        "kl_behaviour_sum": (np.exp(d) - 1 - d).sum(),
        "kl_reference_sum": (np.exp(-from_reference) - 1 + from_reference).sum(),
        "gap_max": gap.max(),
        "gap_sum": gap.sum(),
        "gap_high_count": (gap > 10 * update.config.max_sampler_learner_gap_nats).sum(),
    }
    assert 0 < expected["gap_high_count"] < gap.size < size
    assert 0 < clipped.sum() < size
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    bucket = np.broadcast_to(bucket[:, None], mask.shape)[mask]
    by_token = {"clipped_count": clipped, "ratio_sum": ratio, "ratio_square_sum": ratio**2}
    for name, value in (by_token | {"token_count": np.ones(size)}).items():
        by_age = [value[bucket == k].sum() for k in range(6)]
        np.testing.assert_allclose(sums.by_age[name], by_age, rtol=1e-5, err_msg=name)


def test_the_gap_is_of_rows_of_one_version_where_the_sampler_kept_keys_of_older_weights():
    """Only rows whose tokens all have the current version are compared. Other rows used keys of older weights."""
    update, rows = building.make_update(LOSS), building.random_experience()
    version = rows.rollout.policy_version
    first = np.arange(version.shape[1])[None, :] == rows.rollout.prompt_length[:, None]
    is_mixed = (np.arange(len(version)) % 2 == 0) & (rows.rollout.length - rows.rollout.prompt_length > 1)
    older = first & is_mixed[:, None]
    rows = rows.replace(rollout=rows.rollout.replace(policy_version=np.where(older, 7, version)))  # not the current 0
    is_new = (version == 0) & ~older & rows.trainable[:, None]
    policy = oracle_logp(building.host_params(update.model), rows.rollout)
    gap = np.abs(policy - rows.rollout.behaviour_logp)
    for compares_mixed, counted in ((True, is_new), (False, is_new & ~is_mixed[:, None])):
        _, sums = building.gradient(dataclasses.replace(update, compares_mixed=compares_mixed), rows)
        assert sums["own_token_count"] == counted.sum() > 0
        np.testing.assert_allclose([sums["gap_sum"], sums["gap_max"]], [gap[counted].sum(), gap[counted].max()], 1e-5)


def test_rows_that_are_not_trainable_give_nothing_whatever_they_hold():
    update = building.make_update(LOSS)
    rows = building.random_experience()
    gradient, sums = building.gradient(update, rows)
    out = ~rows.trainable
    rng = np.random.default_rng(2)
    spoilt = rows.replace(
        advantage=np.where(out[:, None], np.nan, rows.advantage).astype(np.float32),
        columns={"ref_logp": np.where(out[:, None], -np.inf, rows.columns["ref_logp"]).astype(np.float32)},
        reward=np.where(out, np.nan, rows.reward).astype(np.float32),
        rollout=rows.rollout.replace(
            behaviour_logp=np.where(out[:, None], np.inf, rows.rollout.behaviour_logp).astype(np.float32),
            tokens=np.where(out[:, None], rng.integers(0, 264, rows.rollout.tokens.shape), rows.rollout.tokens).astype(
                np.int32
            ),
        ),
    )
    again, sums_again = building.gradient(update, spoilt)
    jax.tree.map(np.testing.assert_array_equal, (gradient, sums), (again, sums_again))


def test_the_decision_to_stop_is_trained():
    # Advantage at one token alone, the last of a row: the end of sequence.
    update, rows = building.make_update(LOSS), building.random_experience()
    last = np.arange(rows.rollout.tokens.shape[1])[None, :] == rows.rollout.length[:, None] - 1
    advantage = np.where(last & (np.arange(building.NUM_ROWS) == 2)[:, None], 1.0, 0.0).astype(np.float32)
    with_eos, _ = building.gradient(update, rows.replace(advantage=advantage))
    without, _ = building.gradient(update, rows.replace(advantage=0 * advantage))
    token = rows.rollout.tokens[2, rows.rollout.length[2] - 1]
    change = np.abs(with_eos["embedding"] - without["embedding"]).max(axis=1)
    # The tied embedding of the token itself moves the most.
    assert change.argmax() == token and change[token] > 1e-3


def with_advantage(rows, value):
    return rows.replace(advantage=np.where(rows.advantage != 0, value, 0.0).astype(np.float32))


def never_trains(x):
    """A surrogate with gradient 0 and an infinite loss."""
    return jnp.full_like(x.policy_logp, jnp.inf)


@pytest.mark.parametrize("reason", ["no trainable row", "gradient not finite", "loss not finite"])
def test_a_batch_that_teaches_nothing_skips_the_step(reason):
    update = building.make_update(LOSS)
    rows = building.random_experience()
    if reason == "no trainable row":
        rows = rows.replace(trainable=np.zeros(building.NUM_ROWS, bool))
    elif reason == "gradient not finite":
        rows = with_advantage(rows, np.inf)
    else:
        update = building.make_update({"surrogate": f"{__file__}:never_trains"})
    before = building.train_state(update)
    kept = jax.tree.map(np.asarray, before)
    state, sums = building.compile_update(update)(before, building.on_mesh(update, rows))
    jax.tree.map(np.testing.assert_array_equal, state, kept)
    assert (sums["skipped_count"], sums["update_count"]) == (1, 0)
    assert sums["nonfinite_count"] == sums["batch_count"] == (reason != "no trainable row")
    assert (sums["own_token_count"] > 0) == (reason != "no trainable row")  # the gap to the sampler is looked at
    for name in ("loss_sum", "grad_norm_sum", "token_count", "entropy_sum", "ratio_max"):
        assert sums[name] == 0, name
    if reason == "loss not finite":
        return
    state, sums = building.compile_update(update)(before, building.on_mesh(update, building.random_experience()))
    assert (int(state.step), sums["skipped_count"], sums["nonfinite_count"]) == (1, 0, 0)


@functools.cache
def step_of_batches(update):
    """Return the update's compiled step. Its draws return the given batches in order."""

    def step(state, batches, iteration=0):
        draw = lambda i, key: (i + 1, jax.tree.map(lambda x: x[i], batches), Sums())
        return update.step(state, jnp.int32(0), iteration, jax.random.key(0), draw)

    return jax.jit(step)


@pytest.mark.parametrize(
    ("advantages", "count", "run"),
    [((0, np.inf, 1e-6, np.nan, -np.inf), 3, 2), ((np.inf, np.inf, 0, 1e-6, 1e-6), 2, 0), ((np.nan,) * 5, 5, 5)],
)
def test_updates_that_are_not_finite_are_counted_and_those_at_the_end(advantages, count, run):
    update = building.make_update({"updates_per_iteration": 5})
    before, rows = building.train_state(update), building.random_experience()
    batches = [building.on_mesh(update, with_advantage(rows, value)) for value in advantages]
    batches = jax.tree.map(lambda *x: np.stack(x), *batches)
    with jax.sharding.use_abstract_mesh(mesh_of(ONE).abstract_mesh):
        state, _, sums = step_of_batches(update)(before, batches)
    assert (sums["nonfinite_count"], sums["nonfinite_run"], sums["update_count"]) == (count, run, 5 - count)
    # Means are over the others, each of which has the same tokens; gradients of no and of tiny advantages are tiny.
    size = (rows.rollout.length - rows.rollout.prompt_length)[rows.trainable].sum()
    assert (sums["token_count"], sums["batch_count"]) == ((5 - count) * size, 5)
    assert abs(sums["loss_sum"]) < 1e-4 and sums["grad_norm_sum"] < 1e-3
    assert int(state.step) == 5 - count
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def iteration_and_age(x):
    """A surrogate that returns 100 times the iteration plus the age of each token."""
    return 100.0 * x.iteration + x.age + 0 * x.policy_logp


@pytest.mark.parametrize(("drawn_by", "age"), [(3, 0), (2, 1), (0, 2)])
def test_an_iteration_and_ages_are_what_they_are_after_an_update_was_skipped(drawn_by, age):
    """In iteration 2 of two updates each, one earlier update was skipped.

    The iteration begins with version 3, the previous one with 2.
    """
    update = building.make_update({"surrogate": f"{__file__}:iteration_and_age", "updates_per_iteration": 2})
    rows = building.random_experience()
    version = np.where(rows.rollout.policy_version < 0, -1, drawn_by).astype(np.int32)
    rows = building.on_mesh(update, rows.replace(rollout=rows.rollout.replace(policy_version=version)))
    batches = jax.tree.map(lambda x: np.stack([x, x]), rows)
    with jax.sharding.use_abstract_mesh(mesh_of(ONE).abstract_mesh):
        state = building.train_state(update)
        after, _, sums = step_of_batches(update)(state.replace(step=state.step + 3), batches, np.int32(2))
    assert int(after.step) == 5
    np.testing.assert_allclose(sums["loss_sum"], 2 * (200 + age), rtol=1e-6)


# --- the optimizer ---


def rate(kind, warmup, step, num_steps=12):
    config = OptimizerConfig(learning_rate=0.5, schedule=kind, warmup_steps=warmup)
    return float(optim.schedule(config, num_steps)(step))


def test_schedules_by_hand():
    # Warm-up of 4 steps to 0.5: 0, 1/8, 1/4, 3/8, then the peak; 8 steps are left of 12.
    assert [rate("constant", 4, s) for s in (0, 1, 2, 3, 4, 11)] == [0, 0.125, 0.25, 0.375, 0.5, 0.5]
    assert [rate("linear", 4, s) for s in (4, 6, 8, 12)] == [0.5, 0.375, 0.25, 0]
    # 0.5 * (1 + cos(pi * x)) / 2 at x = 0, 1/3, 1/2, 1.
    np.testing.assert_allclose([rate("cosine", 0, s) for s in (0, 4, 6, 12)], [0.5, 0.375, 0.25, 0], atol=1e-7)
    assert [rate("linear", 0, s) for s in (0, 3, 12)] == [0.5, 0.375, 0]


def test_a_runs_rate_falls_over_all_updates_of_all_its_iterations(monkeypatch):
    # Two iterations of three updates, down from 0.6: of weights, of a critic, and as it is told.
    config = {
        "num_iterations": 2,
        "update": {"updates_per_iteration": 3},
        "optimizer": {"learning_rate": 0.6, "schedule": "linear", "max_grad_norm": 0.0},
        "algorithm": {"advantage": "gae", "critic": {"learning_rate": 0.6}},
    }
    learner, rates = assemble(freeze(config), TINY, (5,), mesh_of(ONE)).learner, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    for made in (learner.update.optimizer, learner.update.critic_optimizer):
        # Adam's steps of a gradient that stays are the rate.
        step, state, moved = jax.jit(made.update), made.init(jnp.zeros(1)), []
        for _ in rates:
            updates, state = step(jnp.ones(1), state, jnp.zeros(1))
            moved.append(-updates[0])
        np.testing.assert_allclose(moved, rates, rtol=1e-4)
    monkeypatch.setattr(Update, "step", lambda self, state, ring, *_: (state, ring, Sums()))
    ring, now = learner._init_ring(), (jnp.int32(0), jax.random.key(0))
    told = jax.jit(lambda step: learner._update(types.SimpleNamespace(step=step), ring, *now)[2]["learning_rate"])
    np.testing.assert_allclose([told(step) for step in range(7)], [0.6, *rates], rtol=1e-5)  # 0: none was usable


def test_an_update_keeps_one_gradient():
    # Of weights that outweigh all activations. A micro-batch's own gradient would be a second, a clipped one too.
    model = Model(dataclasses.replace(TINY, width=64, num_layers=64, ffn=256), remat="full")
    optimizer = optim.make(OptimizerConfig(max_grad_norm=1.0), 10)
    update = dataclasses.replace(building.make_update({"micro_batch_size": 2}), model=model, optimizer=optimizer)
    params = model.abstract_params(mesh_of(ONE))
    opt_state = {"policy": optim.abstract_state(optimizer, params, mesh_of(ONE))}
    state = TrainState({"policy": params}, opt_state, jax.ShapeDtypeStruct((), "int32"))
    batch = building.on_mesh(update, building.random_experience())
    compiled = jax.jit(update.apply_batch, donate_argnums=0).lower(state, batch, 0).compile()
    size = 4 * model.arch.num_params
    assert size <= compiled.memory_analysis().temp_size_in_bytes < 1.5 * size


def test_first_adamw_step_by_hand_and_the_clip_is_of_the_global_norm():
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([-3.0])}
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}  # norm 5

    def step(**settings):
        optimizer = optim.make(OptimizerConfig(learning_rate=0.1, **settings), 10)
        updates, _ = optimizer.update(gradient, optimizer.init(params), params)
        return jax.tree.map(np.asarray, updates)

    # Bias-corrected, the first step is g / (|g| + eps) whatever the betas; weight decay adds rate * decay * w.
    plain = step(max_grad_norm=0.0, eps=1e-8, weight_decay=0.5)
    np.testing.assert_allclose(plain["a"], [-0.1 - 0.05, -0.1], rtol=1e-5)
    np.testing.assert_allclose(plain["b"], [-0.1 + 0.15], atol=1e-6)
    # Clipped to norm 1 the gradient is (0.6, 0), 0.8; with eps = 1 a step is 0.1 * g / (g + 1).
    clipped = step(max_grad_norm=1.0, eps=1.0)
    np.testing.assert_allclose(clipped["a"], [-0.1 * 0.6 / 1.6, 0], rtol=1e-5)
    np.testing.assert_allclose(clipped["b"], [-0.1 * 0.8 / 1.8], rtol=1e-5)
    # A bound above the norm changes nothing: 0.1 * 3 / 4.
    np.testing.assert_allclose(step(max_grad_norm=6.0, eps=1.0)["a"], [-0.1 * 3 / 4, 0], rtol=1e-5)


def test_moments_that_start_anew_make_a_first_step_at_the_schedules_place():
    # A first Adam step is the rate times the gradient's sign; the second, of a gradient a tenth as large and the other
    # way, still follows the first. The rate falls by 0.01 a step.
    config = OptimizerConfig(learning_rate=0.1, schedule="linear", reset_every_steps=2, max_grad_norm=0.0)
    optimizer = optim.make(config, 10)
    params = jnp.zeros(2)
    state, steps = optimizer.init(params), []
    for size in (1.0, -0.1, -0.1, 1.0, -1.0):
        updates, state = optimizer.update(size * jnp.array([1.0, -2.0]), state, params)
        steps.append(updates)
    anew = np.array([-0.1, 0.08, 0.06])[:, None] * [1, -1]
    np.testing.assert_allclose(np.array(steps)[[0, 2, 4]], anew, rtol=1e-5)
    assert (np.sign(steps[1]) == [-1, 1]).all()


def test_moments_lie_where_their_parameters_lie():
    mesh = mesh_of(CUBE)
    params = Model(TINY).abstract_params(mesh)
    optimizer = optim.make(OptimizerConfig(), 10)
    state = optim.abstract_state(optimizer, params, mesh)
    adam = [s for s in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu")]
    assert len(adam) == 1
    for moments in (adam[0].mu, adam[0].nu):
        jax.tree.map(
            lambda m, p: (m.shape, m.dtype, m.sharding) == (p.shape, p.dtype, p.sharding) or 1 / 0, moments, params
        )
    assert adam[0].count.sharding.is_fully_replicated
    assert not adam[0].mu["blocks"]["q"].sharding.is_fully_replicated
    # The shapes are those of a real state.
    real = jax.eval_shape(optimizer.init, Model(TINY).abstract_params(mesh_of(ONE)))
    assert jax.tree.map(lambda x: x.shape, real) == jax.tree.map(lambda x: x.shape, state)


def test_positions_projected_at_once_are_by_device_where_nobody_sets_them():
    cpu, tpu = (types.SimpleNamespace(platform=name) for name in ("cpu", "tpu"))
    cases = [(setting, packed) for setting in (0, 7) for packed in (False, True)]
    for most, of_cpu in ((1365, [1365, 1365, 7, 7]), (1366, [256, 128, 7, 7])):  # 2**26 / 49152 = 1365.3
        for device, expected in ((cpu, of_cpu), (tpu, [1024, 1024, 7, 7])):
            assert [chunk_tokens(n, device, most=most, vocab=49152, packed=p) for n, p in cases] == expected
    # A micro-batch of the default config is 16 completions of 16 tokens.
    for given, micro_batch_tokens, taken in ((0, 0, 256), (0, 960, 960), (7, 960, 7)):
        update = {"logp_chunk_tokens": given, "micro_batch_tokens": micro_batch_tokens}
        run = assemble(freeze({"update": update}), TINY, (5,), mesh_of(ONE))
        assert run.learner.update.config.logp_chunk_tokens == taken
