"""Advantages by turn: what each turn of the policy's is compared with, where a completion has several.

A row's turns are the runs of tokens that the policy drew; between them stands what an environment answered. What a
turn was given is the column "turn_reward" (scoring.rewards), which adds up to the row's reward: by how much the episode
is worth more to its environment, what a reward function gives turn by turn, and at the last turn what is given to the
whole. Every token of a turn has the turn's advantage.

Owns: those functions, which turns are compared. Does not know: environments, losses.
Letters: B rows, S row width, K turns a row may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, UInt32

from jaxrl_llm.algorithms import memory
from jaxrl_llm.algorithms.advantages import Sums, over_batch
from jaxrl_llm.algorithms.critic import lambda_returns
from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Rows
from jaxrl_llm.ops.groups import STD_EPSILON, group_mean, minus_mean, over_std
from jaxrl_llm.settings.schema import Bounds, Count, Decay, Exponent, NotNegative, Number, Share

# Turns of a group differ where its rows' rewards do not.
of_turns = {"siblings": True, "tied_teaches": lambda settings: True}


class Turns(NamedTuple):
    """Turns of rows; 0 where a row has no such turn, or is not valid."""

    number: jax.Array  # [B, S] i32 of each token, from 0; before the first turn -1, and after a turn its own
    start: jax.Array  # [B, K] i32, place of the first token
    valid: jax.Array  # [B, K] bool
    last: jax.Array  # [B, K] bool, the row's last
    reward: jax.Array  # [B, K] f32; what reward terms have added is the last turn's
    scored: jax.Array  # [B, K] f32, without what they have added: what a turn is judged right or wrong by


def turns_of(x: Rows) -> Turns:
    """Of rows; K is that of their column "turn_reward"."""
    scored = reward = x.columns["turn_reward"]
    before = jnp.pad(x.mask, ((0, 0), (1, 0)))[:, :-1]
    number = jnp.cumsum(x.mask & ~before, axis=1, dtype=jnp.int32) - 1
    at = jnp.arange(reward.shape[1])
    count = number[:, -1:] + 1
    valid = (at[None, :] < count) & x.groups.valid[:, None]
    last = valid & (at[None, :] == count - 1)
    if x.added is not None:
        reward = reward + jnp.where(last, x.added[:, None], 0.0)
    start = jax.vmap(lambda k: jnp.sum(number < k, axis=1, dtype=jnp.int32), out_axes=1)(at)
    reward, scored = (jnp.where(valid, r, 0.0) for r in (reward, scored))
    return Turns(number, start, valid, last, reward, scored)


def by_token(value: Float[ArrayLike, "B K"], turns: Turns, x: Rows) -> Float[Array, "B S"]:
    """Of each turn at its tokens, [B,S] f32, 0.0 elsewhere."""
    taken = jnp.take_along_axis(value, jnp.clip(turns.number, 0, value.shape[1] - 1), axis=1)
    return jnp.where(x.mask, taken, 0.0)


def returns(turns: Turns, discount: float, at_least: float = -math.inf) -> Float[Array, "B K"]:
    """G_k = r_k + discount G_{k+1}, [B,K] f32: what a turn and those after it were given.

    A turn that was scored less than ``at_least`` has its r_k alone, and adds nothing to those before it.
    """

    def step(later, turn):
        reward, goes_on = turn
        ahead = jnp.where(goes_on, reward + discount * later, 0.0)
        return ahead, jnp.where(goes_on, ahead, reward)

    each = turns.reward.T, (turns.scored >= at_least).T
    _, ahead = jax.lax.scan(step, jnp.zeros_like(turns.reward[:, 0]), each, reverse=True)
    return ahead.T


def compared(
    value: Float[ArrayLike, "B K"], key: Int[ArrayLike, "B K"], turns: Turns, x: Rows, *, std: bool
) -> Float[Array, "B K"]:
    """(value - mean) / (std + 1e-6) among the turns of a group that have one key, [B,K] f32.

    0 where all that are compared are equal, and so where there is but one; not ``std``: nothing divides. Sums of what a
    row's turns were given are equal where no more than their rounding sets them apart: 0.1 + 0.2 is not 0.3, and the
    least gap is as good as any once the deviation divides it. Sums here run over turns in the order of a sort, for a
    scatter's order of addition varies on a GPU.
    """
    (is_out, *_), value, place, first = _ordered(value, key, turns, x)
    total = lambda v: _over_runs(v, first, jnp.add)
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


def how_many(key: Int[ArrayLike, "B K"], turns: Turns, x: Rows) -> Float[Array, "B K"]:
    """Of each turn the turns of its group that have its key, itself too, [B,K] f32."""
    _, one, place, first = _ordered(jnp.ones(turns.valid.shape), key, turns, x)
    return jax.lax.sort((place, _over_runs(one, first, jnp.add)), num_keys=1)[1].reshape(turns.valid.shape)


def _ordered(value: jax.Array, key: jax.Array, turns: Turns, x: Rows) -> tuple[Any, ...]:
    """Turns, flat, sorted by (whether they are not valid, group, key): these, values, places, where a run begins."""
    value, shape = jnp.where(turns.valid, value, 0.0).ravel(), turns.valid.shape
    group = jnp.broadcast_to(x.groups.index[:, None], shape).ravel()
    place = jnp.arange(value.size)
    names = (~turns.valid).ravel(), group, key.ravel()
    *ordered, value, place = jax.lax.sort((*names, value, place), num_keys=3)
    same = jnp.stack([jnp.concatenate([jnp.ones(1, bool), name[1:] != name[:-1]]) for name in ordered])
    return ordered, value, place, jnp.any(same, axis=0)


def _over_runs(value: jax.Array, first: jax.Array, combine: Callable) -> jax.Array:
    """Of each run of values, which begins where ``first`` is true, what they come to; [N], the same all over a run."""

    def onward(before, here):
        return before[0] | here[0], jnp.where(here[0], here[1], combine(before[1], here[1]))

    def back(after, here):
        return after[0] | here[0], jnp.where(here[0], here[1], after[1])

    _, so_far = jax.lax.associative_scan(onward, (first, value))
    is_last = jnp.concatenate([first[1:], jnp.ones(1, bool)])
    return jax.lax.associative_scan(back, (is_last, so_far), reverse=True)[1]


def states(turns: Turns, x: Rows) -> UInt32[Array, "B K"]:
    """A number for what each turn was answering: the prompt, or what the environment had said last.

    The sum over its tokens of a hash of (token, place in it), modulo 2^32: other texts have another one, but for one
    pair in 4e9.
    """
    place = jnp.arange(x.mask.shape[1])[None, :]
    begin = jax.lax.cummax(jnp.where(x.mask, place + 1, 0), axis=1)
    up_to = _up_to(turns, jnp.where(x.mask, jnp.uint32(0), _mixed(x.tokens, place - begin)))
    return up_to - jnp.pad(up_to, ((0, 0), (1, 0)))[:, :-1]


def histories(turns: Turns, x: Rows) -> UInt32[Array, "B K"]:
    """The same of all that stands before a turn, the policy's own turns with it."""
    return _up_to(turns, _mixed(x.tokens, jnp.arange(x.mask.shape[1])[None, :]))


def _mixed(tokens: jax.Array, place: jax.Array) -> jax.Array:
    """A hash of each token and its place, u32."""
    mixed = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + place.astype(jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return mixed


def _up_to(turns: Turns, of_token: jax.Array) -> UInt32[Array, "B K"]:
    """Its sum over the tokens before each turn, modulo 2^32."""
    total = jnp.cumsum(of_token, axis=1, dtype=jnp.uint32)
    return jnp.take_along_axis(total, jnp.clip(turns.start - 1, 0, total.shape[1] - 1), axis=1)


def _numbers(turns: Turns) -> Int[Array, "B K"]:
    return jnp.broadcast_to(jnp.arange(turns.valid.shape[1]), turns.valid.shape)


def _of_rows(x: Rows, std: bool) -> Float[Array, "B 1"]:
    """GRPO's advantage of the whole row."""
    gap = minus_mean(x.reward, x.groups)
    return (over_std(gap, x.groups) if std else gap)[:, None]


# ---- advantages


@needs("turn_reward", **of_turns)
def turn_returns(x: Rows, *, discount: Share = 1.0, std: bool = True) -> Float[Array, "B S"]:
    """(G - mean) / (std + 1e-6) of what a turn and those after it were given, among the group's turns of its number.

        G_k = r_k + discount G_{k+1}

    With discount 0 a turn is judged by itself. Turns that one row alone has have no advantage.

    Source: REINFORCE with reward-to-go and a baseline for each time step, in GRPO's form. The baseline's group of turns
        of one number is ours; with ``discount`` 0 it is the single-step reward of muCode, arXiv:2502.20380.
    """
    turns = turns_of(x)
    return by_token(compared(returns(turns, discount), _numbers(turns), turns, x, std=std), turns, x)


@needs("turn_reward", **of_turns)
def mt_grpo(x: Rows, *, coefficient: NotNegative = 1.0) -> Float[Array, "B S"]:
    """The outcome's advantage, and before the last turn ``coefficient`` times that of the turn's own reward.

        A_k = A^O + coefficient A^T_k   k < last;   A_last = A^O

    A^O: of what the last turn was given, in the group as GRPO has it. A^T_k: of what turn k was given, among the
    group's turns of its number but the last ones.

    Source: Zeng et al. 2025, arXiv:2505.11821, for two turns, coefficient 1 (released code). Differs: for more turns
        this form is ours.
    """
    turns = turns_of(x)
    outcome = jnp.sum(jnp.where(turns.last, turns.reward, 0.0), axis=1)
    outcome = over_std(minus_mean(outcome, x.groups), x.groups)[:, None]
    earlier = turns._replace(valid=turns.valid & ~turns.last)
    own = compared(turns.reward, _numbers(turns), earlier, x, std=True)
    return by_token(outcome + coefficient * own, turns, x)


@needs("turn_reward", **of_turns)
def gigpo(x: Rows, *, discount: Share = 0.95, weight: NotNegative = 1.0, std: bool = True) -> Float[Array, "B S"]:
    """The row's advantage and ``weight`` times the turn's, among the turns of the group that answer the same.

        A = A^E + weight A^S,   A^S of G_k = r_k + discount G_{k+1} among the turns of an anchor state

    A state is what stands before a turn: the prompt, or the environment's answer, token by token. One that a group
    comes to once has A^S = 0.

    Source: Feng et al. 2025, arXiv:2505.10978; discount 0.95 and weight 1. Differs: a state is seen through
        the environment's last answer; no fuzzy match; the population standard deviation.
    """
    turns = turns_of(x)
    key = jax.lax.bitcast_convert_type(states(turns, x), jnp.int32)
    own = compared(returns(turns, discount), key, turns, x, std=std)
    return by_token(_of_rows(x, std) + weight * own, turns, x)


@needs("turn_reward", **of_turns)
def ui_s1(
    x: Rows,
    *,
    discount: Share = 0.5,
    weight: NotNegative = 1.0,
    std: bool = True,
    matched: Number = 1.0,
    min_std: NotNegative = 0.3,
) -> Float[Array, "B S"]:
    """The row's advantage and ``weight`` times the turn's, among the group's turns of its number.

        A = A^E + weight A^S,   A^S of G_k = r_k + discount G_{k+1} where r_k >= matched, else r_k and 0 to those before

    A^E: of the row's reward, its mean and standard deviation over the turns of the group, so that a row counts as often
    as it has turns. A group has no advantage unless the standard deviation of its rows' G_0 is above ``min_std``; 0 =
    every group has one. What comes after a turn that left the expert's way, and was patched, is not to its credit.
    Whether a turn is matched is told by what was scored: reward terms make no match, and take none away.

    Source: UI-S1, Lu et al. 2025, arXiv:2509.11543 (released code): discount 0.5, min_std 0.3. Differs: the population
        standard deviation where it divides.
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
    """A turn is one action: its return less what the critic expected before it, whitened over the batch's tokens.

        A_k = G_k - V_k,   G_k = r_k + discount ((1 - lambda) V_{k+1} + lambda G_{k+1})

    V_k is the value at the turn's first token, which nothing of the turn has been seen for.

    Source: RLEF, Gehring et al. 2024, arXiv:2410.02089: a value for each turn, one advantage for its tokens. Differs:
        the critic learns a turn's return at all of its tokens; how advantages are normalised there was not found,
        whitening is ours; the KL is no part of the reward.
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
    """Each token's return less what the critic expected there, where a turn's reward comes at its last token.

    See ``critic.lambda_returns``; whitened over the batch's tokens.

    Source: StepSearch, Wang et al. 2025, arXiv:2505.15107: PPO whose reward at the end of a search is what it found.
        What a search is worth is the environment's to say, or a reward function's.
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


# ---- where rows of a group share their first turns

BranchRows = Annotated[int, Bounds(2, 1 << 20)]


def _fits(path: str, settings: Any, config: Any) -> str:
    rows, turns = settings["branch_rows"], settings["branch_turns"]
    if config.environments.factory == "":
        return f"[{path}] needs environments.factory: rows part after turns"
    if config.rollout.group_size % rows:
        return f"[{path}.branch_rows] must divide [rollout.group_size]"
    most = config.environments.max_turns
    return "" if turns < most else f"[{path}.branch_turns] must be less than [environments.max_turns]"


def branches(turns: Turns, x: Rows, most: int) -> tuple[Int[Array, "B 1"], Int[Array, "B K"]]:
    """The last turn of each row, from 0 to where it was to part, that another of its group comes to by the same tokens,
    and what names these.

    The sampler makes rows begin alike (actor.turns.sample_of), up to turn 1 + group_id modulo ``most``; what became of
    it is seen here, so that rows which parted earlier, as where an environment has not said the same, are compared as
    far as they went together. Those that draw alike from there on by chance have parted: it is their own doing.
    """
    key = jax.lax.bitcast_convert_type(histories(turns, x), jnp.int32)
    is_shared = turns.valid & (how_many(key, turns, x) > 1) & (_numbers(turns) <= 1 + x.group_id[:, None] % most)
    return jnp.max(jnp.where(is_shared, _numbers(turns), 0), axis=1, keepdims=True), key


@needs("turn_reward", **of_turns, rule=_fits)
def logo(
    x: Rows, *, branch_rows: BranchRows = 4, branch_turns: Count = 1, weight: NotNegative = 1.0, std: bool = True
) -> Float[Array, "B S"]:
    """The row's advantage in the group, and after the turns that rows share ``weight`` times that among these rows.

        A_k = A^G + weight A^L   k >= b;   A_k = A^G   k < b

    A^L: of what was given from turn b on, where ``branch_rows`` rows part, among those that come to it by the same
    tokens; 0 where b = 0, for that is the whole group. b is 1 to ``branch_turns``, by turns of the groups.

    Source: LoGo-GRPO of Memory-R2, Yan et al. 2026, arXiv:2605.21768: rollouts of a whole trajectory, and such as begin
        again from one state of it, each compared among themselves. Its equations were not found: this form is ours, as
        is that rows of one group are both.
    """
    turns = turns_of(x)
    at, key = branches(turns, x, branch_turns)
    local = jnp.take_along_axis(compared(returns(turns, 1.0), key, turns, x, std=std), at, axis=1)
    return by_token(_of_rows(x, std) + weight * jnp.where((at > 0) & (_numbers(turns) >= at), local, 0.0), turns, x)


@needs("turn_reward", **of_turns, rule=_fits)
def step_values(
    x: Rows, *, branch_rows: BranchRows = 4, branch_turns: Count = 1, std: bool = False
) -> Float[Array, "B S"]:
    """Turns that rows share have what the state after them is worth, those that follow what they add to it.

        A_k = M - mean M   k < b;   A_k = r - M   k >= b

    M: the mean reward r of the rows that come to turn b by the same tokens, an estimate of that state's value by
    ``branch_rows`` ways on from it; mean M is the group's. With ``std`` each is divided by its standard deviation, the
    first among the group, the second among those rows.

    Source: the step values of IPR, Xiong et al. 2024, arXiv:2406.11176, which estimates them by rolling out from each
        step. Differs: it imitates and prefers steps of an expert by these values; here they are an advantage.
    """
    turns = turns_of(x)
    at, key = branches(turns, x, branch_turns)
    by_turns = lambda value: jnp.broadcast_to(value, turns.valid.shape)
    reward = x.reward[:, None]
    of_key = lambda std: jnp.take_along_axis(compared(by_turns(reward), key, turns, x, std=std), at, axis=1)
    gap, scaled = of_key(False), of_key(std)
    before = compared(by_turns(reward - gap), _numbers(turns), turns, x, std=std)[:, :1]  # every row has a first turn
    return by_token(jnp.where(_numbers(turns) < at, before, scaled), turns, x)


# ---- reshapings


@needs("turn_reward")
def without_wrong_turns(advantage: Float[ArrayLike, "B S"], x: Rows, *, below: Number = 0.0) -> Float[Array, "B S"]:
    """An advantage, 0 at the turns scored less than ``below``: what went wrong is seen and not learned; [B,S].

    Reward terms make no turn wrong: one that is long still learns from what its length has cost.

    Source: STeP, partial masking: of a trajectory in which a wrong step is reflected on, the loss leaves the wrong step
        out. Differs: there a teacher marks the step, here its reward does; the equation was not found.
    """
    turns = turns_of(x)
    return jnp.where(by_token((turns.scored < below).astype(jnp.float32), turns, x) > 0, 0.0, advantage)


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
def duration_factor(advantage: Float[ArrayLike, "B S"], x: Rows, *, exponent: Exponent = 1.0) -> Float[Array, "B S"]:
    """Multiply an advantage by what makes slow turns weigh as much as they are rare, [B,S] f32.

        w = (seconds / mean seconds of the batch's turns) ** exponent

    Seconds are those that the environment took to answer the turn, as they were measured when it did; they are kept
    with the turn, so that a resumed run has the same. A turn that no environment answered has the weight 1. Without an
    environment a row is one turn, and its tokens stand for its seconds.

    Where turns come as they are finished, an action that takes d times as long comes 1/d as often: with exponent 1 the
    weighted turns are in the proportion in which the policy chose them, and the mean weight is 1.

    Source: after "RL for MLE agents", which weighs by an action's duration; its weight was not found, this form is
        ours.
    """
    turns, seconds = turns_of(x), x.columns["turn_seconds"]
    is_timed = turns.valid & (seconds > 0)
    by_turn = by_token(jnp.where(is_timed, _over_mean(seconds, is_timed, exponent), 1.0), turns, x)
    by_row = _over_mean(x.length.astype(jnp.float32), x.groups.valid, exponent)[:, None]
    return advantage * jnp.where(jnp.any(is_timed), by_turn, by_row)


def _over_mean(duration: Float[ArrayLike, "*any"], counts: Bool[ArrayLike, "*any"], exponent: float) -> jax.Array:
    """Return (duration / mean of those that count) ** exponent; 1 if none counts."""
    mean = jnp.sum(jnp.where(counts, duration, 0.0)) / jnp.maximum(jnp.sum(counts), 1)
    return jnp.where(mean > 0, (duration / jnp.where(mean > 0, mean, 1.0)) ** exponent, 1.0)


RESHAPINGS = {"without_wrong_turns": without_wrong_turns, "duration_factor": duration_factor}
