"""Advantages by turn, for completions with several turns.

A row's turns are the runs of tokens that the policy drew. The environment's answers lie between them. The reward of a
turn is the column "turn_reward" (scoring.rewards). The rewards of all turns add up to the row's reward: the
environment's rewards, the scores that a reward function gives to turns and, at the last turn, the scores of the whole
row. Every token of a turn has the turn's advantage.

Owns: these functions, which turns are compared. Does not know: environments, losses.
Letters: B rows, S row width, K turns that a row may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl_llm.algorithms import memory
from jaxrl_llm.algorithms.advantages import Sums, over_batch
from jaxrl_llm.algorithms.critic import lambda_returns
from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import AnyArray, Rows
from jaxrl_llm.ops.groups import STD_EPSILON, group_mean, minus_mean, over_std
from jaxrl_llm.settings.schema import Bounds, Count, Decay, Exponent, NotNegative, Number, Share


def _always(settings: Mapping[str, Any]) -> bool:
    """The turns of a group can differ even if the rewards of its rows are equal."""
    return True


class Turns(NamedTuple):
    """The turns of rows. Values are 0 if a row does not have the turn, or is not valid."""

    number: (
        jax.Array
    )  # [B, S] i32 turn of each token, from 0; -1 before the first turn; an answer has its turn's number
    start: jax.Array  # [B, K] i32, index of the first token
    valid: jax.Array  # [B, K] bool
    last: jax.Array  # [B, K] bool, the row's last turn
    reward: jax.Array  # [B, K] f32; reward terms are part of the last turn's reward
    scored: jax.Array  # [B, K] f32, without reward terms: it decides whether a turn is right or wrong


def turns_of(x: Rows) -> Turns:
    """Return the turns of rows; K is that of their column "turn_reward"."""
    scored = x.columns["turn_reward"]
    reward = scored
    before = jnp.pad(x.mask, ((0, 0), (1, 0)))[:, :-1]
    number = jnp.cumsum(x.mask & ~before, axis=1, dtype=jnp.int32) - 1
    at = jnp.arange(reward.shape[1])
    count = number[:, -1:] + 1
    valid = (at[None, :] < count) & x.groups.valid[:, None]
    last = valid & (at[None, :] == count - 1)
    if x.added is not None:
        reward = reward + jnp.where(last, x.added[:, None], 0.0)
    start = jax.vmap(lambda k: jnp.sum(number < k, axis=1, dtype=jnp.int32), out_axes=1)(at)
    return Turns(
        number=number,
        start=start,
        valid=valid,
        last=last,
        reward=jnp.where(valid, reward, 0.0),
        scored=jnp.where(valid, scored, 0.0),
    )


def by_token(value: Float[AnyArray, "B K"], turns: Turns, x: Rows) -> Float[Array, "B S"]:
    """Return the value of each turn at its tokens, [B,S] f32, 0.0 elsewhere."""
    taken = jnp.take_along_axis(value, jnp.clip(turns.number, 0, value.shape[1] - 1), axis=1)
    return jnp.where(x.mask, taken, 0.0)


def returns(turns: Turns, discount: float, at_least: float = -math.inf) -> Float[Array, "B K"]:
    """Return G_k = r_k + discount G_{k+1}, [B,K] f32: the discounted rewards of a turn and of the later turns.

    The return of a turn with a score below ``at_least`` is only its own r_k, and adds nothing to earlier turns.
    """

    def step(later, turn):
        reward, goes_on = turn
        ahead = jnp.where(goes_on, reward + discount * later, 0.0)
        return ahead, jnp.where(goes_on, ahead, reward)

    by_turn = (turns.reward.T, (turns.scored >= at_least).T)
    _, ahead = jax.lax.scan(step, jnp.zeros_like(turns.reward[:, 0]), by_turn, reverse=True)
    return ahead.T


def compared(
    value: Float[AnyArray, "B K"],
    key: Int[AnyArray, "B K"],
    turns: Turns,
    x: Rows,
    *,
    std: bool,
) -> Float[Array, "B K"]:
    """Return (value - mean) / (std + 1e-6) among the turns of a group with the same key, [B,K] f32.

    The result is 0 if all compared turns are equal, or if there is no other turn. Without ``std`` there is no division.

    Sums of rewards count as equal if they differ by no more than rounding: 0.1 + 0.2 is not 0.3, and the division by
    the deviation would turn a tiny difference into a large one. Sums run over turns in the order of a sort, because the
    order of a scatter's additions varies on a GPU.
    """
    (is_out, *_), value, place, first = _sorted_turns(value, key, turns, x)

    def total(values: jax.Array) -> jax.Array:
        return _over_runs(values, first, jnp.add)

    count = total(jnp.ones_like(value))
    of_rows = jnp.sum(jnp.abs(turns.reward), axis=1, keepdims=True)
    rounding = 2 * (turns.valid.shape[1] + 1) * jnp.finfo(jnp.float32).eps * of_rows
    rounding = jnp.broadcast_to(rounding, turns.valid.shape).ravel()[place]
    span = _over_runs(value, first, jnp.maximum) - _over_runs(value, first, jnp.minimum)
    is_tied = span <= _over_runs(rounding, first, jnp.maximum)
    gap = jnp.where(is_tied | is_out, 0.0, value - total(value) / count)
    if std:
        gap = gap / (jnp.sqrt(total(jnp.square(gap)) / count) + STD_EPSILON)
    return jax.lax.sort((place, gap), num_keys=1)[1].reshape(turns.valid.shape)


def num_with_key(key: Int[AnyArray, "B K"], turns: Turns, x: Rows) -> Float[Array, "B K"]:
    """Return, for each turn, the number of turns of its group with its key, including itself, [B,K] f32."""
    _, ones, place, first = _sorted_turns(jnp.ones(turns.valid.shape), key, turns, x)
    return jax.lax.sort((place, _over_runs(ones, first, jnp.add)), num_keys=1)[1].reshape(turns.valid.shape)


def _sorted_turns(
    value: AnyArray, key: AnyArray, turns: Turns, x: Rows
) -> tuple[list[jax.Array], jax.Array, jax.Array, jax.Array]:
    """Sort all turns, flat, by (not valid, group, key).

    Returns:
        The three sorted keys, the values, the original places of the turns, and a mask of the first element of each run
        of equal keys.
    """
    shape = turns.valid.shape
    value = jnp.where(turns.valid, value, 0.0).ravel()
    group = jnp.broadcast_to(x.groups.index[:, None], shape).ravel()
    place = jnp.arange(value.size)
    keys = (~turns.valid).ravel(), group, jnp.ravel(key)
    *sorted_keys, value, place = jax.lax.sort((*keys, value, place), num_keys=3)
    begins = []
    for sorted_key in sorted_keys:
        differs = sorted_key[1:] != sorted_key[:-1]
        begins.append(jnp.concatenate([jnp.ones(1, bool), differs]))
    return sorted_keys, value, place, jnp.any(jnp.stack(begins), axis=0)


def _over_runs(
    value: jax.Array,
    first: jax.Array,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Combine the values of each run, and return the result at every element of the run, [N].

    Args:
        value: [N].
        first: [N] bool, True at the first element of a run.
        combine: an associative function of two arrays.
    """

    def onward(before, here):
        is_first, value = here
        return before[0] | is_first, jnp.where(is_first, value, combine(before[1], value))

    def back(after, here):
        is_last, value = here
        return after[0] | is_last, jnp.where(is_last, value, after[1])

    _, so_far = jax.lax.associative_scan(onward, (first, value))
    is_last = jnp.concatenate([first[1:], jnp.ones(1, bool)])
    return jax.lax.associative_scan(back, (is_last, so_far), reverse=True)[1]


def states(turns: Turns, x: Rows) -> UInt32[Array, "B K"]:
    """Return a number for the state that each turn answers: the prompt, or the environment's last answer.

    The number is the sum over the state's tokens of a hash of (token, index in the state), modulo 2^32. Two different
    texts have the same number with probability 1 in 4e9.
    """
    place = jnp.arange(x.mask.shape[1])[None, :]
    begin = jax.lax.cummax(jnp.where(x.mask, place + 1, 0), axis=1)
    sums = _sum_before(turns, jnp.where(x.mask, jnp.uint32(0), _hash(x.tokens, place - begin)))
    return sums - jnp.pad(sums, ((0, 0), (1, 0)))[:, :-1]


def histories(turns: Turns, x: Rows) -> UInt32[Array, "B K"]:
    """Return a number for all tokens before each turn, including the policy's own turns; see ``states``."""
    return _sum_before(turns, _hash(x.tokens, jnp.arange(x.mask.shape[1])[None, :]))


def _hash(tokens: jax.Array, place: jax.Array) -> jax.Array:
    """Return a hash of each token and its index, u32."""
    mixed = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + place.astype(jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return mixed


def _sum_before(turns: Turns, hashes: jax.Array) -> UInt32[Array, "B K"]:
    """Return the sum of hashes [B, S] of the tokens before each turn, modulo 2^32."""
    total = jnp.cumsum(hashes, axis=1, dtype=jnp.uint32)
    return jnp.take_along_axis(total, jnp.clip(turns.start - 1, 0, total.shape[1] - 1), axis=1)


def _numbers(turns: Turns) -> Int[Array, "B K"]:
    """Return the number of each turn in its row, from 0."""
    return jnp.broadcast_to(jnp.arange(turns.valid.shape[1]), turns.valid.shape)


def _row_advantage(x: Rows, std: bool) -> Float[Array, "B 1"]:
    """Return GRPO's advantage of the whole row."""
    advantage = minus_mean(x.reward, x.groups)
    if std:
        advantage = over_std(advantage, x.groups)
    return advantage[:, None]


# ---- advantages


@needs("turn_reward", siblings=True, tied_teaches=_always)
def turn_returns(x: Rows, *, discount: Share = 1.0, std: bool = True) -> Float[Array, "B S"]:
    """Return (G - mean) / (std + 1e-6) among the group's turns with the same number, where G is a turn's return.

        G_k = r_k + discount G_{k+1}

    With discount 0 only the turn's own reward counts. A turn that only one row of the group has gets advantage 0.

    Source: REINFORCE with reward-to-go and a baseline for each time step, in GRPO's form. This package compares the
        turns with the same number. With ``discount`` 0 the return is the single-step reward of muCode,
        arXiv:2502.20380.
    """
    turns = turns_of(x)
    return by_token(compared(returns(turns, discount), _numbers(turns), turns, x, std=std), turns, x)


@needs("turn_reward", siblings=True, tied_teaches=_always)
def mt_grpo(x: Rows, *, coefficient: NotNegative = 1.0) -> Float[Array, "B S"]:
    """Return the outcome's advantage; earlier turns add ``coefficient`` times the advantage of their own reward.

        A_k = A^O + coefficient A^T_k   k < last;   A_last = A^O

    A^O is GRPO's advantage of the last turn's reward. A^T_k is the advantage of turn k's reward among the group's
    turns with the same number that are not the last turn of their row.

    Source: Zeng et al. 2025, arXiv:2505.11821, for two turns, coefficient 1 (released code). Differs: the source does
        not define the advantage for more than two turns.
    """
    turns = turns_of(x)
    outcome = jnp.sum(jnp.where(turns.last, turns.reward, 0.0), axis=1)
    outcome = over_std(minus_mean(outcome, x.groups), x.groups)[:, None]
    earlier = turns._replace(valid=turns.valid & ~turns.last)
    by_turn = compared(turns.reward, _numbers(turns), earlier, x, std=True)
    return by_token(outcome + coefficient * by_turn, turns, x)


@needs("turn_reward", siblings=True, tied_teaches=_always)
def gigpo(x: Rows, *, discount: Share = 0.95, weight: NotNegative = 1.0, std: bool = True) -> Float[Array, "B S"]:
    """Return the row's advantage plus ``weight`` times the turn's advantage among turns with the same state.

        A = A^E + weight A^S,   A^S of G_k = r_k + discount G_{k+1} among the turns of an anchor state

    The state of a turn is the text before it: the prompt, or the environment's answer, token by token. A state that a
    group reaches only once has A^S = 0.

    Source: Feng et al. 2025, arXiv:2505.10978; discount 0.95 and weight 1. Differs: states are equal if the
        environment's last answers are equal, without a fuzzy match; the standard deviation is the population's.
    """
    turns = turns_of(x)
    key = jax.lax.bitcast_convert_type(states(turns, x), jnp.int32)
    by_turn = compared(returns(turns, discount), key, turns, x, std=std)
    return by_token(_row_advantage(x, std) + weight * by_turn, turns, x)


@needs("turn_reward", siblings=True, tied_teaches=_always)
def ui_s1(
    x: Rows,
    *,
    discount: Share = 0.5,
    weight: NotNegative = 1.0,
    std: bool = True,
    matched: Number = 1.0,
    min_std: NotNegative = 0.3,
) -> Float[Array, "B S"]:
    """Return the row's advantage plus ``weight`` times the turn's advantage among turns with the same number.

        A = A^E + weight A^S,   A^S of G_k = r_k + discount G_{k+1} if r_k >= matched, else r_k and 0 to earlier turns

    A^E is the advantage of the row's reward. Its mean and standard deviation are over the turns of the group, so a row
    counts once for each of its turns. A group has advantage 0 unless the standard deviation of its rows' G_0 is above
    ``min_std``; with 0 every group has an advantage. A turn that left the expert's trajectory, and was replaced by the
    expert's action, gets no credit for later turns. The scores decide whether a turn is matched; reward terms do not.

    Source: UI-S1, Lu et al. 2025, arXiv:2509.11543 (released code): discount 0.5, min_std 0.3. Differs: the divisor is
        the population's standard deviation.
    """
    turns = turns_of(x)
    ahead = returns(turns, discount, matched)
    of_rows = jnp.broadcast_to(x.reward[:, None], turns.valid.shape)
    episode = compared(of_rows, jnp.zeros_like(_numbers(turns)), turns, x, std=std)
    step = compared(ahead, _numbers(turns), turns, x, std=std)
    spread = jnp.sqrt(group_mean(jnp.square(minus_mean(ahead[:, 0], x.groups)), x.groups))
    is_kept = (spread > min_std) | (min_std == 0)
    return by_token(jnp.where(is_kept[:, None], episode + weight * step, 0.0), turns, x)


@needs("turn_reward", "value", memory=memory.Moments)
def turn_gae(
    x: Rows, *, gae_lambda: Share = 1.0, discount: Share = 1.0, norm_decay: Decay = 0.0
) -> tuple[Float[Array, "B S"], Sums]:
    """Return the return of each turn minus the critic's value before it, whitened over the batch's tokens.

        A_k = G_k - V_k,   G_k = r_k + discount ((1 - lambda) V_{k+1} + lambda G_{k+1})

    A turn is one action. V_k is the value at the turn's first token, before any of its tokens is known.

    Source: RLEF, Gehring et al. 2024, arXiv:2410.02089: a value for each turn, one advantage for its tokens. Differs:
        the critic learns a turn's return at all of its tokens. Advantages are whitened, because the source's
        normalisation was not found. The KL is not part of the reward.
    """
    turns = turns_of(x)
    value = jnp.take_along_axis(x.columns["value"], jnp.minimum(turns.start, x.mask.shape[1] - 1), axis=1)
    expected = lambda_returns(value, turns.reward, turns.valid, discount=discount, gae_lambda=gae_lambda)
    gain = jnp.where(turns.valid, expected - value, 0.0)
    active = x.mask & x.groups.valid[:, None]
    advantage, learned = over_batch(by_token(gain, turns, x), active, x, centre=True, decay=norm_decay)
    return advantage, learned | {"returns": by_token(expected, turns, x)}


@needs("turn_reward", "value", memory=memory.Moments)
def step_gae(
    x: Rows, *, gae_lambda: Share = 1.0, discount: Share = 1.0, norm_decay: Decay = 0.0
) -> tuple[Float[Array, "B S"], Sums]:
    """Return the return of each token minus the critic's value. A turn's reward counts at its last token.

    See ``critic.lambda_returns``; whitened over the batch's tokens.

    Source: StepSearch, Wang et al. 2025, arXiv:2505.15107: PPO with a reward for the results at the end of each search.
        The environment or a reward function gives this reward.
    """
    turns = turns_of(x)
    active = x.mask & x.groups.valid[:, None]
    ends = x.mask & ~jnp.pad(x.mask, ((0, 0), (0, 1)))[:, 1:]
    reward = jnp.where(ends, by_token(turns.reward, turns, x), 0.0)
    value = x.columns["value"]
    expected = lambda_returns(value, reward, active, discount=discount, gae_lambda=gae_lambda)
    gain = expected - jnp.where(active, value, 0.0)
    advantage, learned = over_batch(gain, active, x, centre=True, decay=norm_decay)
    return advantage, learned | {"returns": expected}


# ---- rows of a group that share their first turns

BranchRows = Annotated[int, Bounds(2, 1 << 20)]


def _branches_fit(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if rows have no turns, or if branches do not fit in groups and turns."""
    if config.environments.factory == "":
        return f"[{path}] needs environments.factory: rows part after turns"
    if config.rollout.group_size % settings["branch_rows"]:
        return f"[{path}.branch_rows] must divide [rollout.group_size]"
    if settings["branch_turns"] >= config.environments.max_turns:
        return f"[{path}.branch_turns] must be less than [environments.max_turns]"
    return ""


def branches(turns: Turns, x: Rows, branch_turns: int) -> tuple[Int[Array, "B 1"], Int[Array, "B K"]]:
    """Return the turn at which each row stops sharing its history with its group, and a key of each turn's history.

    A row parts at its last turn whose history another row of the group shares. The sampler gives rows the same first
    turns (actor.turns.sample_of), up to turn 1 + group_id modulo ``branch_turns``; later turns do not count. Rows may
    part earlier, for example if the environment's answers differ. Such rows are compared up to the last history that
    they share. If rows draw the same tokens by chance after the planned turn, they still count as parted.
    """
    key = jax.lax.bitcast_convert_type(histories(turns, x), jnp.int32)
    is_planned = _numbers(turns) <= 1 + x.group_id[:, None] % branch_turns
    is_shared = turns.valid & (num_with_key(key, turns, x) > 1) & is_planned
    return jnp.max(jnp.where(is_shared, _numbers(turns), 0), axis=1, keepdims=True), key


@needs("turn_reward", siblings=True, tied_teaches=_always, rule=_branches_fit)
def logo(
    x: Rows,
    *,
    branch_rows: BranchRows = 4,
    branch_turns: Count = 1,
    weight: NotNegative = 1.0,
    std: bool = True,
) -> Float[Array, "B S"]:
    """Return the row's advantage in the group; after the shared turns add ``weight`` times that among sharing rows.

        A_k = A^G + weight A^L   k >= b;   A_k = A^G   k < b

    A^L is the advantage of the rewards from turn b on, where ``branch_rows`` rows part, among the rows with the same
    tokens before turn b. A^L is 0 if b = 0, because all rows of the group then have the same tokens before turn b. b
    runs through 1 to ``branch_turns``, group by group.

    Source: LoGo-GRPO of Memory-R2, Yan et al. 2026, arXiv:2605.21768: whole trajectories are compared among themselves,
        and so are rollouts that begin again from one state. Its equations were not found: this package chose the form,
        and the use of one group for both comparisons.
    """
    turns = turns_of(x)
    parting_turn, key = branches(turns, x, branch_turns)
    by_turn = compared(returns(turns, 1.0), key, turns, x, std=std)
    local = jnp.take_along_axis(by_turn, parting_turn, axis=1)
    is_after = (parting_turn > 0) & (_numbers(turns) >= parting_turn)
    return by_token(_row_advantage(x, std) + weight * jnp.where(is_after, local, 0.0), turns, x)


@needs("turn_reward", siblings=True, tied_teaches=_always, rule=_branches_fit)
def step_values(
    x: Rows, *, branch_rows: BranchRows = 4, branch_turns: Count = 1, std: bool = False
) -> Float[Array, "B S"]:
    """Return the value of the state after the shared turns, and for later turns the reward minus this value.

        A_k = M - mean M   k < b;   A_k = r - M   k >= b

    M is the mean reward r of the rows with the same tokens before turn b. M estimates the value of that state from
    ``branch_rows`` continuations. mean M is the mean of M over the group. With ``std`` each difference is divided by a
    standard deviation: the first by that of the group, the second by that of the rows with the same tokens.

    Source: the step values of IPR, Xiong et al. 2024, arXiv:2406.11176, which estimates them by rolling out from each
        step. Differs: the source uses the values to choose steps of an expert for imitation and preference learning;
        here the values form an advantage.
    """
    turns = turns_of(x)
    parting_turn, key = branches(turns, x, branch_turns)
    reward = x.reward[:, None]

    def compared_rows(value: jax.Array, key: jax.Array, std: bool) -> jax.Array:
        return compared(jnp.broadcast_to(value, turns.valid.shape), key, turns, x, std=std)

    gap = jnp.take_along_axis(compared_rows(reward, key, False), parting_turn, axis=1)
    scaled_gap = jnp.take_along_axis(compared_rows(reward, key, std), parting_turn, axis=1)
    before = compared_rows(reward - gap, _numbers(turns), std)[:, :1]  # every row has a first turn
    return by_token(jnp.where(_numbers(turns) < parting_turn, before, scaled_gap), turns, x)


# ---- reshapings


@needs("turn_reward")
def without_wrong_turns(advantage: Float[AnyArray, "B S"], x: Rows, *, below: Number = 0.0) -> Float[Array, "B S"]:
    """Return an advantage with 0 at the turns with a score below ``below``, [B,S]: the policy does not learn them.

    Scores decide whether a turn is wrong; reward terms do not. The policy still learns from the length penalty of a
    turn that is too long.

    Source: STeP, partial masking: the loss leaves out the wrong step of a trajectory that reflects on it. Differs: in
        the source a teacher marks the wrong step, here the reward marks it. The source's equation was not found.
    """
    turns = turns_of(x)
    is_wrong = by_token((turns.scored < below).astype(jnp.float32), turns, x) > 0
    return jnp.where(is_wrong, 0.0, advantage)


ADVANTAGES = {
    "turn_returns": turn_returns,
    "mt_grpo": mt_grpo,
    "gigpo": gigpo,
    "ui_s1": ui_s1,
    "logo": logo,
    "step_values": step_values,
    "turn_gae": turn_gae,
    "step_gae": step_gae,
}


@needs("turn_reward", "turn_seconds")
def duration_factor(advantage: Float[AnyArray, "B S"], x: Rows, *, exponent: Exponent = 1.0) -> Float[AnyArray, "B S"]:
    """Return an advantage times a weight that grows with the duration of the turn, [B,S] f32.

        w = (seconds / mean seconds of the batch's turns) ** exponent

    The seconds are the measured time that the environment took to answer the turn. They are stored with the turn, so a
    resumed run uses the same numbers. A turn without an answer has weight 1. Without an environment a row is one turn,
    and its tokens stand for its seconds.

    If a learner receives turns when they finish, an action that takes d times as long arrives 1/d times as often. With
    exponent 1 the weighted turns have the proportions in which the policy chose them, and the mean weight is 1.

    Source: "RL for MLE agents", which weighs by an action's duration. Its formula was not found; this package chose
        the formula.
    """
    turns = turns_of(x)
    seconds = x.columns["turn_seconds"]
    is_timed = turns.valid & (seconds > 0)
    by_turn = by_token(jnp.where(is_timed, _over_mean(seconds, is_timed, exponent), 1.0), turns, x)
    by_row = _over_mean(x.length.astype(jnp.float32), x.groups.valid, exponent)[:, None]
    return advantage * jnp.where(jnp.any(is_timed), by_turn, by_row)


def _over_mean(duration: Float[AnyArray, "*any"], counts: Bool[AnyArray, "*any"], exponent: float) -> jax.Array:
    """Return (duration / mean of the durations that count) ** exponent; 1 if none counts."""
    mean = jnp.sum(jnp.where(counts, duration, 0.0)) / jnp.maximum(jnp.sum(counts), 1)
    return jnp.where(mean > 0, (duration / jnp.where(mean > 0, mean, 1.0)) ** exponent, 1.0)


RESHAPINGS = {
    "without_wrong_turns": without_wrong_turns,
    "duration_factor": duration_factor,
}
