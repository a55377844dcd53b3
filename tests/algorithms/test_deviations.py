"""The size of each deviation of a recipe from its paper: the sentences after "Differs" in jaxrl_llm/recipes.

Numbers come from the papers' equations, by hand or in float64, or from the package where it differs.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import transformer
from support.building import TINY, algorithm_config, host_params
from support.rows import make_rows

from jaxrl_llm.algorithms import baselines
from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.divergences import reference_share
from jaxrl_llm.algorithms.inputs import Sizes, Tokens
from jaxrl_llm.algorithms.memory import Memory
from jaxrl_llm.algorithms.shaping import overlong_penalty
from jaxrl_llm.algorithms.surrogates import spo, spo_cross_entropy
from jaxrl_llm.config import freeze
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.groups import group_rows
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.types import OUTCOME_SCORE, Rewards

RECIPES = pathlib.Path(__file__).parents[2] / "jaxrl_llm" / "recipes"


def recipe(name):
    return freeze(runpy.run_path(str(RECIPES / f"{name}.py"))["get_config"]())


def header(name):
    """Return the docstring of the recipe's file as one line."""
    return " ".join((RECIPES / f"{name}.py").read_text().split('"""')[1].split())


def estimate(kind, reward, group=None):
    group = np.zeros(len(reward), np.int32) if group is None else np.int32(group)
    advantage = estimator(kind, int(group.max()) + 1)(group, jnp.asarray(reward, jnp.float32))
    return np.asarray(advantage[0] if isinstance(advantage, tuple) else advantage)


@functools.cache
def estimator(kind, num_groups):
    groups = lambda group: group_rows(group, np.ones(len(group), bool), num_groups)
    rows = lambda group, reward: make_rows(groups(group), reward=reward, parts=((reward, 1.0),))
    return jax.jit(lambda group, reward: ADVANTAGES[kind](rows(group, reward)))


def test_every_deviation_stands_where_the_table_of_recipes_finds_it():
    """docs/reference/recipes.md shows the docstring from "Source:" on, so no difference may be stated before it."""
    for path in sorted(RECIPES.glob("[!_]*.py")):
        before, source = re.split(r"^Source:", path.read_text().split('"""')[1], maxsplit=1, flags=re.MULTILINE)
        assert not re.search(r"\b(ours|in the paper|its paper|the source)\b", before), path.name
        assert re.search(r"arXiv:\d{4}\.\d{5}", source), path.name


def test_cispo_scales_by_the_batch_with_its_tied_groups():
    # A mixed group of +-1/2 and a tied one: standard deviation 1/2 of the first alone, sqrt(1/8) of both.
    advantage = estimate("brorl", [0, 1, 1, 1], [0, 0, 1, 1])
    np.testing.assert_allclose(advantage, [-(2**0.5), 2**0.5, 0, 0], rtol=1e-5)


def test_cispos_advantages_of_rewards_of_0_and_1_are_those_of_scalerls():
    right = np.float32([0, 1, 1, 1, 0, 0])
    ours, theirs = (estimate("brorl", rewards, [0, 0, 1, 1, 2, 2]) for rewards in (right, 2 * right - 1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_dapos_length_penalty_weighs_twice_as_much_on_rewards_of_0_and_1():
    group = group_rows(np.zeros(4, np.int32), np.ones(4, bool), 1)
    rows = make_rows(group, length=jnp.array([8, 6, 5, 7]), max_length=8)
    penalty = np.asarray(overlong_penalty(rows, buffer=4))
    wrong_or_right = np.float32([0, 1, 0, 1])
    ours, papers = (estimate("grpo", r) for r in (wrong_or_right + penalty, 2 * wrong_or_right - 1 + penalty))
    np.testing.assert_allclose(estimate("grpo", wrong_or_right + 0.5 * penalty), papers, rtol=1e-4)
    assert np.abs(ours - papers).max() > 0.2


def test_gdpos_smaller_epsilon_is_a_part_in_a_thousand_where_rewards_hardly_differ():
    # Of a standard deviation of 0.1, 1e-4 is a thousandth; of 1/2, as rewards of 0 and 1 have, a fifth of that. So much
    # less the one group weighs beside the other.
    ours, papers = estimate("gdpo", [-0.1, 0.1, -0.5, 0.5], [0, 0, 1, 1]), [x / (x + 1e-4) for x in (0.1, 0.5)]
    np.testing.assert_allclose(1 - papers[0] / papers[1] / (ours[1] / ours[3]), 1e-3 - 2e-4, rtol=0.02)


@pytest.mark.parametrize("size", range(2, 9))
def test_loops_filter_and_tied_groups_are_the_same_for_rewards_of_0_and_1(size):
    for right in range(size + 1):
        advantage = np.abs(estimate("leave_one_out", [1] * right + [0] * (size - right)))
        assert (advantage < 0.01).all() == (right in (0, size))
        assert (advantage >= 0.01).all() == (right not in (0, size))


def test_mc_grpos_median_answer_adds_a_row_without_an_advantage():
    # Five answers of which one is the median's own: the mean over their tokens is over 5/4 as many as without it.
    reward = np.array([0, 0.2, 0.5, 0.9, 1])
    advantage = estimate("mc_grpo", reward)
    np.testing.assert_allclose(advantage, reward - 0.5, atol=1e-6)
    assert np.sum(advantage == 0) == 1
    # Divided by the median absolute deviation (0.5, 0.3, 0, 0.4, 0.5: 0.4) it would be 2.5 times as large; rewards of
    # 0 and 1 have none: 1000 times.
    assert np.median(np.abs(reward - 0.5)) == pytest.approx(0.4)
    for right in range(6):
        two_valued = np.array([1.0] * right + [0.0] * (5 - right))
        assert np.median(np.abs(two_valued - np.median(two_valued))) == 0


def test_mssrs_decay_moves_with_several_updates_alone():
    """The KL is measured on the rows when they are trained on: at the first update of fresh rows it is 0."""
    algorithm = algorithm_config(advantage={"name": "mssr", "decay": 0.96, "decay_moving": 0.875})
    memory = Memory(algorithm.of_credit, (), Sizes(width=0, max_length=16), Ledger())
    question, reward = [7], Rewards(np.float32([1]), {}, np.int8([OUTCOME_SCORE]))
    a = b = 1.0
    # The mean over the iterations so far: 0, and then 0.02 nats a token, at which it has moved wholly.
    for drift, decay in ((0.0, 0.96), (0.04, 0.875)):
        memory.observe(reward, question, {"kl_behaviour_sum": 10 * drift, "token_count": 10})
        a, b = decay * a + 1, decay * b
        np.testing.assert_allclose(memory.scores(reward, question).columns["question_mean"], a / (a + b), rtol=1e-6)


def test_poises_regression_on_states_predicts_what_one_on_their_principal_components_does():
    """Hidden states have decreasing variances, and the reward depends on their first components.

    The correlation is over new rows.
    """
    rng, scale = np.random.default_rng(0), 2.0 ** -np.arange(16)
    draw = lambda n: rng.normal(size=(n, 16)) * scale
    states, fresh, truth = draw(200), draw(200), np.zeros(16)
    truth[:3] = (1.0, -2.0, 2.0)
    target = states @ truth + 0.5 * rng.normal(size=200)
    sums = np.concatenate([states.T @ states, (states.T @ target)[:, None]], axis=1).astype(np.float32)
    ours = np.asarray(baselines.ridge_predict(fresh.astype(np.float32), sums))
    axes = np.linalg.svd(states, full_matrices=False)[2][:4]
    reduced = states @ axes.T
    papers = fresh @ axes.T @ np.linalg.solve(reduced.T @ reduced + np.eye(4), reduced.T @ target)
    assert np.corrcoef(ours, papers)[0, 1] > 0.98
    assert abs(np.corrcoef(ours, fresh @ truth)[0, 1] - np.corrcoef(papers, fresh @ truth)[0, 1]) < 0.02


def test_reinforce_pps_pull_in_the_loss_leaves_out_what_follows_a_token():
    """Three tokens have divergences of 0.2, 0.1 and 0.3 nats.

    In the paper's reward, each divergence also counts for earlier tokens.
    """
    d = np.array([0.2, 0.1, 0.3])
    in_the_loss, in_the_reward = d, d[::-1].cumsum()[::-1]
    np.testing.assert_allclose(in_the_reward, [0.6, 0.4, 0.3])
    # The gradient of d^2 / 2 by a token's log-prob is its d.
    pull, zero, mask = recipe("reinforce_pp").algorithm.divergence, jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    x = lambda p: Tokens(p, zero, zero, zero, jnp.zeros(1), mask, columns={"ref_logp": zero})
    slope = jax.grad(lambda p: jnp.sum(pull(x(p))))(jnp.float32(d)[None])
    np.testing.assert_allclose(slope[0], in_the_loss, rtol=1e-6)


def sampled_groups(size, chance):
    """Return the rewards [size] and the probability of every group, by its number of correct answers."""
    for right in range(size + 1):
        likely = math.comb(size, right) * chance**right * (1 - chance) ** (size - right)
        yield np.float32([1] * right + [0] * (size - right)), likely


REFERENCE = 0.25  # of two answers the reference gives the right one so often


@functools.cache
def slope_of_spo(size, beta, surrogate=spo, shift=0.0):
    """Return a function that computes the gradient of the log-odds.

    Its arguments are the log-odds of a right answer, the rewards [size], and the rate of right answers in the data.
    ``shift`` is added to rewards of 0 and 1.
    """

    def loss(log_odds, reward, sampled):
        of = lambda rate: jnp.log(jnp.where(reward > 0, rate, 1 - rate))[:, None]
        zero, mask = jnp.zeros((size, 1)), jnp.ones((size, 1), bool)
        logp, columns = of(jax.nn.sigmoid(log_odds)), {"ref_logp": of(REFERENCE)}
        x = Tokens(logp, logp, of(sampled), zero, reward + shift, mask, group_size=size, columns=columns)
        return jnp.mean(surrogate(x, beta=beta))

    return jax.jit(jax.grad(loss))


def expected_slope(size, beta, rate, sampled, **which):
    """Return the expected gradient over all groups of this size, in which the share ``sampled`` is right on average."""
    slope, log_odds = slope_of_spo(size, beta, **which), math.log(rate / (1 - rate))
    return sum(likely * float(slope(log_odds, reward, sampled)) for reward, likely in sampled_groups(size, sampled))


def settles_at(size, beta, sampled=None, **which):
    """Return the rate of right answers at which the gradient over sampled groups is 0.

    None = the policy's own samples.
    """
    low, high = 0.05, 0.9999999
    for _ in range(40):
        rate = (low + high) / 2
        rises = expected_slope(size, beta, rate, rate if sampled is None else sampled, **which) < 0
        low, high = (rate, high) if rises else (low, rate)
    return low


@pytest.mark.parametrize("size", [2, 4, 8])
def test_spo_settles_at_its_optimum_on_sampled_groups_of_the_policys_own(size):
    """Rewards of 0 and 1 at a beta of 1: the optimum has e times the reference's odds.

    If a row counted in its own estimate, groups of 8 would settle at 0.447.
    """
    odds = REFERENCE / (1 - REFERENCE) * math.e
    assert odds / (1 + odds) == pytest.approx(0.4754, abs=1e-4)
    assert settles_at(size, 1.0) == pytest.approx(odds / (1 + odds), abs=1e-4)


def biased_optimum(size, sampled):
    """Return the rate at which SPO settles on samples of another policy at a beta of 1, computed by hand.

    Q0 is the mean over the other size - 1 rows. With l the log-ratio of each answer and q the policy's rate, the
    gradient of the log-odds is 2 [s (V + l_1 - 1) (1 - q) - (1 - s) (V + l_0) q], where V is the mean of log(sum w e^r
    / sum w) over these samples.
    """
    weight = {1: REFERENCE / sampled, 0: (1 - REFERENCE) / (1 - sampled)}
    expected = 0.0
    for reward, likely in sampled_groups(size - 1, sampled):
        w = [weight[int(r)] for r in reward]
        total = math.fsum(x * math.exp(r) for x, r in zip(w, reward, strict=True))
        expected += likely * math.log(total / math.fsum(w))
    low, high = 0.05, 0.95
    for _ in range(60):
        q = (low + high) / 2
        right, wrong = math.log(q / REFERENCE), math.log((1 - q) / (1 - REFERENCE))
        slope = sampled * (expected + right - 1) * (1 - q) - (1 - sampled) * (expected + wrong) * q
        low, high = (q, high) if slope < 0 else (low, q)
    return low


@pytest.mark.parametrize(("size", "said"), [(4, 0.465), (8, 0.471)])
def test_spo_settles_a_little_below_its_optimum_on_groups_of_the_reference(size, said):
    assert settles_at(size, 1.0, REFERENCE) == pytest.approx(biased_optimum(size, REFERENCE), abs=1e-4)
    assert biased_optimum(size, REFERENCE) == pytest.approx(said, abs=5e-4)


def test_spos_cross_entropy_settles_near_its_optimum_the_nearer_the_larger_the_groups():
    """Rewards of -2 and -1 at a beta of 1: the optimum has e times the reference's odds, a rate of 0.475.

    The loss is not quadratic, so an error of Q0 is a bias.
    """
    odds = REFERENCE / (1 - REFERENCE) * math.e
    settled = [settles_at(size, 1.0, surrogate=spo_cross_entropy, shift=-2.0) for size in (4, 8, 32)]
    assert settled[1] == pytest.approx(0.459, abs=1e-3)
    assert settled == sorted(settled) and settled[2] == pytest.approx(odds / (1 + odds), abs=5e-3)


def test_spos_optimum_is_nearly_always_right_at_the_recipes_beta():
    """The optimum has e^(1 / beta) times the reference's odds."""
    its_own = recipe("spo").algorithm.surrogate["beta"]
    odds = REFERENCE / (1 - REFERENCE) * math.exp(1 / its_own)
    assert odds / (1 + odds) == pytest.approx(0.9999, abs=1e-4)
    assert settles_at(8, its_own) == pytest.approx(odds / (1 + odds), abs=1e-4)


def test_spo_has_no_loss_of_an_answer_without_others():
    reward, zero, mask = jnp.float32([1, 0]), jnp.zeros((2, 1)), jnp.array([[True], [False]])
    x = Tokens(zero - 1, zero, zero - 1, zero, reward, mask, group_size=2, columns={"ref_logp": zero - 2})
    assert not np.any(spo(x, beta=1.0))
    slope = jax.grad(lambda logp: jnp.sum(spo(dataclasses.replace(x, policy_logp=logp), beta=1.0)))(zero - 1)
    assert not np.any(slope)


def test_vcpos_stand_in_for_gradient_norms_orders_rows_but_does_not_measure_them():
    """The exact squared norms of the gradients of rows' log-probs come from finite differences of a float64 model."""
    model, rng = Model(TINY), np.random.default_rng(0)
    params = host_params(model)
    leaves, form = jax.tree.flatten(jax.tree.map(lambda x: x.astype(np.float64), params))
    prompt, lengths = rng.integers(0, 264, 3), (1, 2, 4, 8)
    exact, ours = [], []
    for length in lengths:
        tokens = np.concatenate([prompt, rng.integers(0, 264, length)])

        def logp(flat, tokens=tokens):
            weights = jax.tree.unflatten(form, flat)
            return transformer.completion_logp(weights, TINY, tokens, 3, len(tokens))[3:]

        # The mean square of slopes along random directions is the squared norm.
        slopes = []
        for _ in range(24):
            direction = [rng.normal(size=leaf.shape) for leaf in leaves]
            ends = [logp([x + s * d for x, d in zip(leaves, direction, strict=True)]).sum() for s in (1e-6, -1e-6)]
            slopes.append((ends[0] - ends[1]) / 2e-6)
        exact.append(np.mean(np.square(slopes)))
        mask = np.ones((1, length), bool)
        ours.append(float(baselines.gradient_square(logp(leaves).astype(np.float32)[None], mask)[0]))
    factor = np.array(exact) / np.array(ours)
    # Not one scale for all rows, which would leave the baseline as it is. Measured: 3.8 (3.3 to 10 with other seeds).
    assert 1.5 < factor.max() / factor.min() < 5
    assert all(a < b for a, b in itertools.pairwise(ours))

    # The paper's baseline, b = sum W^2 |g|^2 r / sum W^2 |g|^2, at weights of 1 over all mixed groups. Ours is at most
    # .27 away and leaves at most 1.45 times the least variance; the group's mean leaves up to 3.3 times. Measured: .263
    # and 1.431.
    exact, ours = np.array(exact), np.array(ours)
    variance = lambda reward, b: np.sum(exact * np.square(reward - b))
    excess = {"ours": [], "mean": []}
    for right in range(1, 15):
        reward = np.array([right >> row & 1 for row in range(4)], float)
        best, own = (np.sum(norm * reward) / np.sum(norm) for norm in (exact, ours))
        assert abs(own - best) < 0.27
        excess["ours"].append(variance(reward, own) / variance(reward, best))
        excess["mean"].append(variance(reward, reward.mean()) / variance(reward, best))
    assert min(excess["ours"]) >= 1 and max(excess["ours"]) < 1.45
    assert max(excess["mean"]) > 2 * max(excess["ours"])


# Updates of an iteration in the papers, or in released code where these say nothing: how many minibatches, or passes
# over the whole batch. 1: a paper that takes one (DeepSeekMath, section 4.2: "a single update following each
# exploration stage"), or that trains by imitation or preferences and has no ratio, or whose number was not found.
UPDATES = {
    "grpo": 1,
    "mc_grpo": 2,  # num_iterations: 2
    "mt_grpo": 2,  # num_iterations 2
    "step_search": 2,  # 16 prompts in steps of 8
    "gdpo": 4,  # 512 prompts in steps of 128
    "rlef": 4,  # quarters
    "ui_s1": 4,  # fixed_num_mini_batches
    "dr_grpo": 8,  # 1,024 rollouts in steps of 128
    "reinforce_pp": 8,  # OpenRLHF's train_reinforce_llama_ray.sh: rollout_batch_size 1024, train_batch_size 128
    "dapo": 16,
    "mssr": 16,  # 2,048 rollouts in steps of 128
}
PASSES = ("mc_grpo", "mt_grpo")
MINIBATCHES = (
    *("dapo", "decoupled_ppo", "dr_grpo", "gdpo", "gigpo", "gspo", "mssr", "ppo", "reinforce_pp", "rlef"),
    *("step_coder", "step_search", "ui_s1"),
)


def test_rollouts_of_recipes_with_minibatches_and_of_cispo_are_trained_on_once():
    """The ring of such a recipe has no more rows than an iteration, and each row is drawn once."""
    for name in (*MINIBATCHES, "cispo"):
        config = recipe(name)
        assert config.ring_capacity == config.rows_per_iteration, name
        drawn = config.update.batch_size * config.update.updates_per_iteration
        assert drawn == config.rows_per_iteration, name
        assert config.update.updates_per_iteration == 1 or config.replay.max_uses == 1, name


def test_recipes_with_several_passes_take_the_whole_batch_each_time():
    for name in PASSES:
        config = recipe(name)
        assert config.ring_capacity == config.rows_per_iteration == config.update.batch_size
        assert config.replay.max_uses == 0 and config.update.updates_per_iteration == UPDATES[name]


def test_ttrl_trains_on_half_of_its_votes_in_a_minibatch_for_each_question():
    config = recipe("ttrl")
    assert config.update.updates_per_iteration == config.rollout.prompts_per_iteration
    assert config.update.batch_size == config.rollout.group_size // 2 and config.replay.max_uses == 1


def test_updates_of_an_iteration_are_the_papers_or_the_header_says_how_many_these_are():
    words = {8: "eight", 16: "16"}
    for name, updates in UPDATES.items():
        own = recipe(name).update.updates_per_iteration
        if own != updates:
            differs = header(name).partition("Differs:")[2]
            assert "four minibatches" in differs and words[updates] in differs and own == 4, name


def ratios_move(config, iterations=12):
    """Return whether an update meets a rollout whose old policy differs from the weights, from policy versions alone.

    An iteration begins with the weights of its first version; each update makes the next version.
    """
    version, ring = 0, []
    kept = config.ring_capacity // config.rows_per_iteration
    for iteration in range(iterations):
        start = version
        drawn_by = {start}
        if config.rollout.lookahead_prompts and iteration:
            drawn_by.add(start - config.update.updates_per_iteration)  # begun before the last updates
        ring = [*ring, drawn_by][-kept:]
        usable = ring[-1:] if config.replay.fresh_fraction == 1 else ring
        for _ in range(config.update.updates_per_iteration):
            for sampler in set().union(*usable):
                old = {"behaviour": sampler, "generation": sampler, "start": start, "interpolated": sampler}
                if old.get(config.algorithm.old_policy.name, "an average") != version:
                    return True
            version += 1
    return False


def test_the_page_says_that_a_clip_cannot_act_exactly_where_it_cannot():
    page = (RECIPES.parents[1] / "docs" / "reference" / "recipes.md").read_text()
    shown = dict(re.findall(r"^- \*\*[^*]+\*\* \(`(\w+)`\)(.*?)(?=^- |^<!-- end)", page, re.MULTILINE | re.DOTALL))
    clipped = ("clipped", "sequence_clipped", "gspo", "cispo", "remix_centred", "vcpo")  # their equations have a bound
    names = {path.stem for path in RECIPES.glob("[!_]*.py")}
    assert shown.keys() == names
    for name in sorted(names):
        config = recipe(name)
        has_clip = config.algorithm.surrogate.name in clipped or config.algorithm.critic.clip > 0
        assert ("clip cannot act" in shown[name]) == (has_clip and not ratios_move(config)), name


@pytest.mark.parametrize(
    ("changes", "acts"),
    [
        ({}, False),
        ({"update.micro_batch_size": 8}, False),
        ({"update.updates_per_iteration": 2}, True),
        ({"replay.capacity": 128}, True),
        ({"replay.capacity": 128, "replay.fresh_fraction": 1.0}, False),
        ({"rollout.lookahead_prompts": 8}, True),
        ({"algorithm.old_policy": {"name": "start"}}, False),
        ({"algorithm.old_policy": {"name": "start"}, "replay.capacity": 128}, False),
        ({"algorithm.old_policy": {"name": "start"}, "update.updates_per_iteration": 2}, True),
        ({"algorithm.old_policy": {"name": "interpolated"}}, False),
        ({"algorithm.old_policy": {"name": "interpolated"}, "replay.capacity": 128}, True),
        ({"algorithm.old_policy": {"name": "ewma"}}, True),
        ({"model.compute_dtype": "bfloat16"}, True),  # by the rounding between sampler and learner
        ({"model.compute_dtype": "bfloat16", "algorithm.old_policy": {"name": "generation"}}, False),
        ({"rollout.weights": "int8"}, True),
    ],
    ids=str,
)
def test_when_a_clip_can_act_follows_from_a_configs_numbers(changes, acts):
    spec = importlib.util.spec_from_file_location("launch_recipes", RECIPES.parents[1] / "launch" / "recipes.py")
    launch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launch)
    nested = {}
    for path, value in changes.items():
        section, name = path.split(".")
        nested.setdefault(section, {})[name] = value
    config = freeze(nested)
    assert launch.has_clip(config) and launch.clip_can_act(config) == acts
    is_rounded = config.model.compute_dtype != "float32" or config.rollout.weights != "compute"
    assert is_rounded or ratios_move(config) == acts


def test_gspos_ratio_is_not_the_rounding_between_sampler_and_learner():
    """The old log-probs are the learner's own.

    In bfloat16 the sampler's mean per row would differ by more than the clip's width.
    """
    assert recipe("gspo").algorithm.old_policy.name == "generation"


def test_half_of_the_rollouts_of_rollout_replay_are_fresh_in_two_steps():
    """A step draws 16 of an iteration's 32 rollouts.

    On average each is drawn once; by chance a quarter is drawn twice and a quarter never. tests/replay/test_ring.py
    tests that the other half of a batch is older.
    """
    config = recipe("rr")
    fresh = config.replay.fresh_fraction * config.update.batch_size
    assert config.replay.unit == "rollout" and config.replay.max_uses == 0
    assert fresh * config.update.updates_per_iteration == config.rows_per_iteration == config.update.batch_size


def test_codeit_imitates_every_right_program_and_draws_no_other():
    """Expert iteration: the cross-entropy of programs that solve a question, also if all programs of a group do."""
    config = freeze(runpy.run_path(str(RECIPES.parents[1] / "configs" / "codeit.py"))["get_config"]())
    algorithm, group = config.algorithm, np.array([0, 0, 1, 1, 2, 2])
    reward = np.float32([1, 1, 1, 0, 0, 0])
    rows = make_rows(
        group_rows(group, np.ones(6, bool), 3), reward=jnp.asarray(reward), correct=jnp.asarray(reward > 0),
        mask=jnp.ones((6, 2), bool),
    )  # fmt: skip
    advantage = jnp.broadcast_to(algorithm.advantage(rows)[:, None], (6, 2))
    for reshape in algorithm.reshaping:
        advantage = reshape(advantage, rows)
    assert config.replay.draw.name == "priority" and config.replay.priority.name == "reward"
    is_drawn = reward > 0  # what is worth nothing is never drawn
    np.testing.assert_array_equal(np.asarray(advantage)[is_drawn], 1.0)
    # -log p of each drawn token: the paper's loss.
    logp = jnp.full((6, 2), -0.7)
    terms = algorithm.surrogate(Tokens(logp, logp, logp, advantage, jnp.asarray(reward), jnp.ones((6, 2), bool)))
    np.testing.assert_allclose(np.asarray(terms)[is_drawn], 0.7, rtol=1e-6)


def test_headers_say_when_what_a_method_does_later_begins():
    """Iterations count from 1. A run has fewer iterations by default."""
    config = recipe("replay_positive_bias")
    unbiased = config.ring_capacity - round(config.replay.positive_fraction * config.ring_capacity)
    begins = {"replay_positive_bias": unbiased // config.rows_per_iteration + 1}
    config = recipe("mssr")
    begins["mssr"] = config.prompts.size // config.rollout.prompts_per_iteration + 1
    for name, iteration in begins.items():
        assert config.num_iterations < iteration and f"iteration {iteration};" in header(name)
    config = recipe("remix")
    resets = config.algorithm.reference_reset_iterations
    assert resets == (config.replay.draw["fresh_from_iteration"],) == (50,)
    assert reference_share(50) == 1 > reference_share(51)
    assert "after 50 iterations" in header("remix") and config.num_iterations < 50
