"""Advantages by turn compared with float64 loops on rows with unequal turns, and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import turns as oracle
from support.building import algorithm_config
from support.refusal import refused
from support.rows import make_rows
from support.tiers import mostly_in

from jaxrl_llm.algorithms import turns
from jaxrl_llm.algorithms.turns import ADVANTAGES
from jaxrl_llm.config import freeze
from jaxrl_llm.ops.groups import group_rows
from jaxrl_llm.settings.use import keywords

ROWS, WIDTH, TURNS = 24, 16, 4
# The advantages by turn with an oracle and without branches. New ones are tested without a change of this file.
KINDS = [kind for kind in ADVANTAGES if hasattr(oracle, kind) and "branch_rows" not in keywords(ADVANTAGES[kind])]


@functools.cache
def table(seed=0, shares=0.0):
    """Rows of 1 to 4 turns of 1 to 3 tokens, answers of 1 or 2 tokens of three kinds between them, in 5 groups.

    Args:
        shares: some rows begin with the turns and rewards of an earlier row of their group.

    Returns:
        (arrays for ``compute``, rows in the form of the oracle, the turn of each token [B,S], -1 elsewhere).
    """
    rng = np.random.default_rng(seed)
    tokens, number = rng.integers(1, 9, (ROWS, WIDTH)), np.full((ROWS, WIDTH), -1)
    answers, prompts = [(9,), (9, 9), (10, 9)], [(int(i),) * 2 for i in range(11, 16)]
    group, valid = rng.permutation(np.arange(ROWS) % 5), rng.random(ROWS) < 0.85
    given, rows, starts, said = np.zeros((ROWS, TURNS)), [], {}, {}
    for b in range(ROWS):
        starts[b], said[b] = [2], [prompts[group[b]]]
        tokens[b, :2] = prompts[group[b]]
        count = int(rng.integers(1, TURNS + 1))
        given[b, :count] = rng.choice([0.0, 0.25, 1.0, -0.5], count)
        before = [a for a in range(b) if group[a] == group[b] and len(starts[a]) > 1]
        if shares and before and rng.random() < shares:
            like = before[rng.integers(len(before))]
            shared = int(rng.integers(1, len(starts[like])))  # turns
            count = max(count, shared + 1)
            place = starts[like][shared]
            tokens[b, :place], number[b, :place] = tokens[like, :place], number[like, :place]
            given[b, :shared] = given[like, :shared]
            starts[b], said[b] = starts[like][: shared + 1], said[like][: shared + 1]
        for k in range(len(starts[b]) - 1, count):
            place, size = starts[b][k], int(rng.integers(1, 4)) if k < 2 else 1
            number[b, place : place + size] = k
            place += size
            if k < count - 1:
                said[b] = [*said[b], answers[rng.integers(3)]]
                tokens[b, place : place + len(said[b][-1])] = said[b][-1]
                starts[b] = [*starts[b], place + len(said[b][-1])]
        if valid[b]:
            own, histories = given[b, :count].tolist(), [tuple(tokens[b, :place].tolist()) for place in starts[b]]
            of_row = {"group": group[b], "reward": sum(own), "turns": own, "states": said[b], "histories": histories}
            rows.append(of_row)
    arrays = {"group": group, "valid": valid, "given": given.astype(np.float32), "mask": number >= 0, "tokens": tokens}
    return arrays, rows, number


def chosen(kind, **settings):
    return algorithm_config(advantage={"name": kind, **settings}).advantage


@functools.partial(jax.jit, static_argnames=("kind", "settings"))
def compute(arrays, kind, settings=()):
    given = jnp.where(arrays["valid"][:, None], arrays["given"], 0.0)
    rows = make_rows(
        group_rows(arrays["group"], arrays["valid"], 5),
        reward=arrays.get("reward", jnp.sum(given, axis=1)),
        mask=arrays["mask"],
        tokens=arrays["tokens"].astype(jnp.int32),
        columns={"turn_reward": given, "value": arrays.get("value")},
    )
    value = chosen(kind, **dict(settings))(rows)
    return value if isinstance(value, tuple) else (value, {})


def by_turn(advantage, arrays, number):
    """Return the advantages of valid rows by turn. Check that all tokens of a turn have the same value."""
    advantage = np.asarray(advantage)
    assert not advantage[(number < 0) | ~arrays["valid"][:, None]].any()
    lists = []
    for b in np.flatnonzero(arrays["valid"]):
        of_turn = [advantage[b][number[b] == k] for k in range(number[b].max() + 1)]
        assert all(len(set(x.tolist())) == 1 for x in of_turn)
        lists.append([float(x[0]) for x in of_turn])
    return lists


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in KINDS),
        ("mt_grpo", {"coefficient": 0.7}),
        ("gigpo", {"weight": 0.8}),
        pytest.param("turn_returns", {"discount": 0.0, "std": False}, marks=pytest.mark.tier("slow")),
        pytest.param("gigpo", {"discount": 0.5, "std": False}, marks=pytest.mark.tier("slow")),
        pytest.param("ui_s1", {"min_std": 0.0, "matched": 0.5, "std": False}, marks=pytest.mark.tier("slow")),
    ],
)
@pytest.mark.parametrize("seed", mostly_in("slow", [0, 1]))
def test_matches_float64_loops_on_rows_of_unequal_turns(kind, settings, seed):
    arrays, rows, number = table(seed)
    advantage, _ = compute(arrays, kind, tuple(settings.items()))
    expected = getattr(oracle, kind)(rows, **settings)
    got = by_turn(advantage, arrays, number)
    assert [len(x) for x in got] == [len(x) for x in expected]
    np.testing.assert_allclose(np.concatenate(got), np.concatenate(expected), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("logo", {"weight": 0.7}),
        pytest.param("logo", {"std": False}, marks=pytest.mark.tier("slow")),
        ("step_values", {}),
        pytest.param("step_values", {"std": True}, marks=pytest.mark.tier("slow")),
    ],
)
@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.tier("slow")), 2])
def test_rows_that_share_their_first_turns_match_float64_loops(kind, settings, most):
    arrays, rows, number = table(4, shares=0.7)
    settings = settings | {"branch_turns": most}
    parted = [oracle.parted(rows, row, most)[0] for row in rows]
    assert set(range(most + 1)) == set(parted)
    advantage, _ = compute(arrays, kind, tuple(settings.items()))
    expected = getattr(oracle, kind)(rows, **settings)
    got = by_turn(advantage, arrays, number)
    np.testing.assert_allclose(np.concatenate(got), np.concatenate(expected), rtol=1e-5, atol=2e-6)


def test_a_state_is_worth_what_becomes_of_it_and_both_parts_add_up_to_the_row_less_its_group():
    """Four rows: two pairs share a turn, and also its answer. One row wins."""
    tokens, number = np.zeros((ROWS, WIDTH), int), np.full((ROWS, WIDTH), -1)
    tokens[:4, :4] = [[1, 5, 9, 3], [1, 5, 9, 4], [1, 6, 9, 3], [1, 6, 9, 4]]
    number[:4, 1], number[:4, 3] = 0, 1
    given = np.zeros((ROWS, TURNS), np.float32)
    given[0, 1] = 1
    arrays = {"group": np.zeros(ROWS, int), "valid": np.arange(ROWS) < 4, "given": given, "tokens": tokens}
    arrays["mask"] = number >= 0
    got = np.array(by_turn(compute(arrays, "step_values")[0], arrays, number))
    np.testing.assert_allclose(got, [[0.25, 0.5], [0.25, -0.5], [-0.25, 0], [-0.25, 0]])
    np.testing.assert_allclose(got.sum(axis=1), [0.75, -0.25, -0.25, -0.25])
    local = by_turn(compute(arrays, "logo", (("std", False), ("weight", 2.0)))[0], arrays, number)
    np.testing.assert_allclose(local, [[0.75, 1.75], [-0.25, -1.25], [-0.25, -0.25], [-0.25, -0.25]])


def test_rows_that_draw_the_same_turn_by_chance_have_parted_all_the_same():
    """Four rows share turn 0.

    Then three draw the same good turn and one another turn: rows are compared at turn 1, where they separate.
    """
    tokens, number = np.zeros((ROWS, WIDTH), int), np.full((ROWS, WIDTH), -1)
    tokens[:4, :6] = [[1, 5, 9, 3, 9, 2], [1, 5, 9, 3, 9, 6], [1, 5, 9, 3, 9, 7], [1, 5, 9, 4, 9, 2]]
    number[:4, [1, 3, 5]] = range(3)
    given = np.zeros((ROWS, TURNS), np.float32)
    given[:3, 2] = 1
    arrays = {"group": np.zeros(ROWS, int), "valid": np.arange(ROWS) < 4, "given": given, "tokens": tokens}
    arrays["mask"] = number >= 0
    got = by_turn(compute(arrays, "step_values")[0], arrays, number)
    np.testing.assert_allclose(got, [[0, 0.25, 0.25]] * 3 + [[0, -0.75, -0.75]])
    local = by_turn(compute(arrays, "logo", (("std", False),))[0], arrays, number)
    np.testing.assert_allclose(local, [[0.25, 0.5, 0.5]] * 3 + [[-0.75, -1.5, -1.5]])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("turn_returns", {}), ("gigpo", {"discount": 1.0}), ("logo", {}), ("step_values", {"std": True})],
)
@pytest.mark.parametrize("step", mostly_in("slow", [0.1, 0.01, 1 / 3]))
def test_rows_that_come_to_the_same_by_other_steps_are_tied(kind, settings, step):
    """Their float32 sums differ by rounding. Dividing this difference by the standard deviation would amplify it."""
    rng = np.random.default_rng(0)
    arrays, _, number = table(1)
    worth = np.concatenate([step * rng.integers(-900, 900, (ROWS, TURNS - 1)), np.full((ROWS, 1), 1000 * step)], axis=1)
    number = np.where(np.arange(WIDTH) % 2, -1, np.arange(WIDTH) // 2)  # four turns of a token
    number = np.broadcast_to(np.where(number < TURNS, number, -1), (ROWS, WIDTH))
    given = np.diff(worth, axis=1, prepend=0.0).astype(np.float32)
    assert len({np.cumsum(row[::-1])[-1] for row in given}) > 1  # in float32
    # All begin alike, so that for every function turn 0 compares all that a row was given.
    arrays |= {"given": given, "mask": number >= 0, "tokens": np.where(number > 0, arrays["tokens"], 1)}
    arrays["reward"] = np.float32(worth[:, -1])  # rounded once, as rewards are
    got = by_turn(compute(arrays, kind, tuple(settings.items()))[0], arrays, number)
    assert not np.array([row[0] for row in got]).any()


@pytest.mark.parametrize(
    ("factory", "max_turns", "group_size", "named"),
    [
        ("", 4, 8, ("algorithm.advantage", "logo", "environments.factory")),
        ("a:b", 1, 8, ("algorithm.advantage.branch_turns", 1, "environments.max_turns=1")),
        ("a:b", 4, 6, ("algorithm.advantage.branch_rows", 4, "rollout.group_size=6")),
    ],
)
def test_branches_that_cannot_be_are_refused_before_anything_is_made(factory, max_turns, group_size, named):
    settings = {"algorithm": {"advantage": {"name": "logo"}}, "rollout": {"prompts_per_iteration": 16}}
    settings["environments"] = {"factory": factory, "max_turns": max_turns, "max_answer_tokens": 4}
    settings["rollout"]["group_size"] = group_size
    with refused(*named):
        freeze(settings)


@pytest.mark.parametrize("kind", ["turn_gae", "step_gae"])
def test_a_critic_of_turns_and_one_of_tokens_match_float64_loops(kind):
    arrays, rows, number = table(2)
    value = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
    how = {"discount": 0.9, "gae_lambda": 0.6}
    advantage, learned = compute(arrays | {"value": value}, kind, tuple(how.items()))
    returns = np.zeros((ROWS, WIDTH))
    gain = np.zeros((ROWS, WIDTH))
    for b, row in zip(np.flatnonzero(arrays["valid"]), rows, strict=True):
        at = [np.flatnonzero(number[b] == k) for k in range(len(row["turns"]))]
        if kind == "turn_gae":
            values = [float(value[b, places[0]]) for places in at]
            for places, v, g in zip(at, values, oracle.lambda_returns(row["turns"], values, **how), strict=True):
                returns[b, places], gain[b, places] = g, g - v
        else:
            places, rewards = np.concatenate(at), []
            for own, reward in zip(at, row["turns"], strict=True):
                rewards += [0.0] * (len(own) - 1) + [reward]
            values = value[b, places].astype(float).tolist()
            returns[b, places] = oracle.lambda_returns(rewards, values, **how)
            gain[b, places] = returns[b, places] - values
    np.testing.assert_allclose(learned["returns"], returns, rtol=1e-5, atol=1e-6)
    active = (number >= 0) & arrays["valid"][:, None]
    expected = (gain - gain[active].mean()) / (gain[active].std() + 1e-6)
    np.testing.assert_allclose(advantage, np.where(active, expected, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["turn_returns", "mt_grpo", "gigpo", "ui_s1", "step_values"])
def test_rows_in_any_order_and_whatever_the_invalid_say(kind):
    arrays, _, _ = table(0)
    expected, _ = compute(arrays, kind)
    order = np.random.default_rng(1).permutation(ROWS)
    moved, _ = compute({name: x[order] for name, x in arrays.items()}, kind)
    np.testing.assert_allclose(moved, np.asarray(expected)[order], rtol=1e-5, atol=1e-6)
    spoilt = arrays | {"given": np.where(arrays["valid"][:, None], arrays["given"], 7e7)}
    np.testing.assert_array_equal(compute(spoilt, kind)[0], expected)


def two_rows(first, second, answers=((9,), (9,))):
    """Return the advantages by turn of two rows of one group with two turns each, for these rewards and answers."""
    tokens, number = np.zeros((ROWS, WIDTH), int), np.full((ROWS, WIDTH), -1)
    given = np.zeros((ROWS, TURNS), np.float32)
    for b, (rewards, answer) in enumerate(zip((first, second), answers, strict=True)):
        tokens[b, :8] = [1, 5, 6, *answer, 7, 0, 0, 0][:8]
        number[b, 1:3], number[b, 3 + len(answer)] = 0, 1
        given[b, :2] = rewards
    valid, group = np.arange(ROWS) < 2, np.zeros(ROWS, int)
    return {"group": group, "valid": valid, "given": given, "mask": number >= 0, "tokens": tokens}, number


def test_a_turn_is_told_apart_where_the_rows_are_worth_the_same():
    """One row is right first and then wrong, the other the other way round: the rows' rewards are equal for GRPO."""
    arrays, number = two_rows((1, 0), (0, 1))
    for kind, settings, expected in (
        # Given by itself: +-1/2 and -+1/2 about the mean.
        ("turn_returns", {"discount": 0.0, "std": False}, [[0.5, -0.5], [-0.5, 0.5]]),
        # What is still to come: 1 and 1, then 0 and 1.
        ("turn_returns", {"std": False}, [[0.0, -0.5], [0.0, 0.5]]),
        # The last turn's outcome, -1 and 1 over the std; the first turn's own is the opposite.
        ("mt_grpo", {}, [[0.0, -1.0], [0.0, 1.0]]),
        # Up to the first that is no match: 1 and 0, then 0 and 1. What comes after a wrong turn is not to its credit.
        ("ui_s1", {"std": False}, [[0.5, -0.5], [-0.5, 0.5]]),
    ):
        advantage, _ = compute(arrays, kind, tuple(settings.items()))
        np.testing.assert_allclose(by_turn(advantage, arrays, number), expected, atol=1e-5)


def test_an_anchor_state_is_what_was_answered_and_not_when():
    """If the second turns answer the same state, they are compared. After different answers they are not."""
    how = tuple({"std": False, "discount": 1.0}.items())
    same, number = two_rows((0, 1), (0, 0))
    other, other_number = two_rows((0, 1), (0, 0), answers=((9,), (10,)))
    # The rows' +-1/2; the first turns have one state, the prompt, and the same gap to come.
    np.testing.assert_allclose(by_turn(compute(same, "gigpo", how)[0], same, number), [[1, 1], [-1, -1]])
    np.testing.assert_allclose(by_turn(compute(other, "gigpo", how)[0], other, other_number), [[1, 0.5], [-1, -0.5]])
    # The same tokens in another order are another state; a state may come again in one row.
    swapped, number = two_rows((0, 1), (0, 0), answers=((9, 10), (10, 9)))
    np.testing.assert_allclose(by_turn(compute(swapped, "gigpo", how)[0], swapped, number), [[1, 0.5], [-1, -0.5]])


def test_step_advantage_has_the_right_sign_at_a_state_that_comes_again_where_the_rows_has_not():
    """A maze: both rows are in the hall twice, and go on or back. The row that wins went back first."""
    tokens, number = np.zeros((ROWS, WIDTH), int), np.full((ROWS, WIDTH), -1)
    tokens[:2, :7] = [1, 5, 9, 5, 9, 5, 8]  # prompt, turn, hall, turn, hall, turn
    number[:2, 1], number[:2, 3], number[:2, 5] = 0, 1, 2
    given = np.zeros((ROWS, TURNS), np.float32)
    given[0, :3], given[1, :3] = (0, -0.5, 1), (0, 0, 0)
    arrays = {"group": np.zeros(ROWS, int), "valid": np.arange(ROWS) < 2, "given": given, "tokens": tokens}
    arrays["mask"] = number >= 0
    how = {"discount": 0.0, "std": False, "weight": 1.0}
    got = by_turn(compute(arrays, "gigpo", tuple(how.items()))[0], arrays, number)
    # In the hall -1/2, 1, 0 and 0 were given: mean 1/8. The whole rows are +-1/4 about theirs.
    np.testing.assert_allclose(got, [[0.25, 0.25 - 0.625, 0.25 + 0.875], [-0.25, -0.375, -0.375]])


def test_without_an_environment_a_row_is_one_turn_and_grpo_is_what_it_was():
    rng = np.random.default_rng(0)
    group, reward = rng.integers(0, 5, ROWS), rng.choice([0.0, 0.5, 1.0], ROWS).astype(np.float32)
    groups = group_rows(jnp.asarray(group), jnp.ones(ROWS, bool), 5)
    rows = make_rows(
        groups,
        reward=jnp.asarray(reward),
        mask=jnp.ones((ROWS, 3), bool),
        tokens=jnp.ones((ROWS, 3), jnp.int32),
        columns={"turn_reward": jnp.asarray(reward)[:, None]},
    )
    expected = np.repeat(np.asarray(chosen("grpo")(rows))[:, None], 3, axis=1)
    for kind in ("turn_returns", "mt_grpo"):
        got = jax.jit(lambda columns, kind=kind: chosen(kind)(rows._replace(columns=columns)))(rows.columns)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_reward_terms_add_is_the_last_turns():
    arrays, _ = two_rows((0, 0), (0, 0))
    rows = make_rows(
        group_rows(arrays["group"], arrays["valid"], 5),
        reward=jnp.where(arrays["valid"], jnp.arange(ROWS), 0.0),
        added=jnp.where(arrays["valid"], jnp.arange(ROWS), 0.0),
        mask=jnp.asarray(arrays["mask"]),
        columns={"turn_reward": jnp.asarray(arrays["given"])},
    )
    seen = turns.turns_of(rows)
    np.testing.assert_array_equal(np.asarray(seen.reward)[:2], [[0, 0, 0, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(np.asarray(seen.start)[0, :2], [1, 4])
    assert not np.asarray(seen.valid)[:, 2:].any()


@pytest.mark.parametrize(("second", "min_std", "is_kept"), [(0.5, 0.3, False), (0.5, 0.0, True), (0.2, 0.3, True)])
def test_ui_s1_leaves_out_groups_whose_returns_hardly_differ(second, min_std, is_kept):
    """The returns of the first turns are 1 and 0.5 or 0.2: a standard deviation of 0.25 or 0.4."""
    arrays, number = two_rows((1, 0), (second, 0))
    advantage, _ = compute(arrays, "ui_s1", (("min_std", min_std),))
    assert np.any(by_turn(advantage, arrays, number)) == is_kept


def test_a_slow_turn_weighs_as_many_times_more_as_its_environment_took_longer():
    """Turns of 3 s and 1 s, and of 2 s and one without an answer: the mean is 2 s."""
    arrays, number = two_rows((1, 1), (0, 0))
    seconds = np.zeros_like(arrays["given"], np.float32)
    seconds[:2, :2] = [[3, 1], [2, 0]]
    rows = make_rows(
        group_rows(arrays["group"], arrays["valid"], 5),
        mask=jnp.asarray(arrays["mask"]),
        length=jnp.asarray(arrays["mask"].sum(axis=1)),
        columns={"turn_reward": jnp.asarray(arrays["given"]), "turn_seconds": jnp.asarray(seconds)},
    )
    for exponent, expected in ((1.0, [[1.5, 0.5], [1, 1]]), (2.0, [[2.25, 0.25], [1, 1]]), (0.0, [[1, 1], [1, 1]])):
        weigh = algorithm_config(reshaping=[{"name": "duration_factor", "exponent": exponent}]).reshaping[0]
        weighed = weigh(jnp.asarray(arrays["mask"], jnp.float32), rows)
        np.testing.assert_allclose(by_turn(weighed, arrays, number), expected, rtol=1e-6)


def test_reward_terms_make_no_turn_a_match_and_none_wrong():
    """A reward term of -0.05 at the last turn of a row that matched its expert twice, and of a row that never did."""
    arrays, number = two_rows((1, 1), (0, 0))
    added = jnp.where(arrays["valid"], -0.05, 0.0)
    rows = make_rows(
        group_rows(arrays["group"], arrays["valid"], 5),
        reward=jnp.sum(arrays["given"], axis=1) + added,
        added=added,
        mask=jnp.asarray(arrays["mask"]),
        tokens=jnp.asarray(arrays["tokens"]),
        columns={"turn_reward": jnp.asarray(arrays["given"])},
    )
    # Rows: +-1 about their mean. First turns: 1 + 0.95 / 2 and 0, second turns: 0.95 and -0.05.
    seen = jax.jit(lambda columns: chosen("ui_s1", std=False)(rows._replace(columns=columns)))
    advantage = seen(rows.columns)
    expected = [[1 + 1.475 / 2, 1 + 0.5], [-1 - 1.475 / 2, -1 - 0.5]]
    np.testing.assert_allclose(by_turn(advantage, arrays, number), expected, rtol=1e-6)
    reshaping = algorithm_config(reshaping=["without_wrong_turns"]).reshaping[0]
    np.testing.assert_array_equal(reshaping(advantage, rows), advantage)


def test_a_wrong_turn_is_seen_and_not_learned():
    arrays, number = two_rows((-0.5, 1), (0, 0.2))
    rows = make_rows(
        group_rows(arrays["group"], arrays["valid"], 5),
        mask=jnp.asarray(arrays["mask"]),
        columns={"turn_reward": jnp.asarray(arrays["given"])},
    )
    advantage = jnp.where(arrays["mask"], 2.0, 0.0)
    reshaping = algorithm_config(reshaping=["without_wrong_turns"]).reshaping[0]
    got = by_turn(reshaping(advantage, rows), arrays, number)
    assert got == [[0.0, 2.0], [2.0, 2.0]]


def test_many_states_have_many_numbers():
    """20,000 different texts of one to five tokens have different numbers. By chance two would be equal with 5 %."""
    rng = np.random.default_rng(0)
    texts = list({tuple(rng.integers(0, 50_000, rng.integers(1, 6)).tolist()) for _ in range(20_000)})
    tokens, mask = np.zeros((len(texts), 7), np.int32), np.zeros((len(texts), 7), bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        mask[row, len(text)] = True
    columns = {"turn_reward": jnp.zeros((len(texts), 1))}
    groups = make_rows(group_rows(np.zeros(len(texts), int), np.ones(len(texts), bool), 1))
    rows = groups._replace(mask=jnp.asarray(mask), tokens=jnp.asarray(tokens), columns=columns)
    assert len(np.unique(np.asarray(turns.states(turns.turns_of(rows), rows)))) == len(texts)
