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

    # [B, S] i32 turn of each token, from 0; -1 before the first turn; an answer has its turn's number.
    number: jax.Array
    start: jax.Array  # [B, K] i32, index of the first token
    valid: jax.Array  # [B, K] bool
    last: jax.Array  # [B, K] bool, the row's last turn
    reward: jax.Array  # [B, K] f32; reward terms are part of the last turn's reward
    scored: jax.Array  # [B, K] f32, without reward terms: it decides whether a turn is right or wrong


def turns_of(x: Rows) -> Turns:
    """Return the turns of rows; K is that of their column "turn_reward"."""
    scored = x.columns["turn_reward"]
    is_sampled_before = jnp.pad(x.mask, ((0, 0), (1, 0)))[:, :-1]
    begins = x.mask & ~is_sampled_before
    number = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    num_turns = number[:, -1:] + 1
    turn = jnp.arange(scored.shape[1])
    valid = (turn[None, :] < num_turns) & x.groups.valid[:, None]
    last = valid & (turn[None, :] == num_turns - 1)
    reward = scored
    if x.added is not None:
        reward = reward + jnp.where(last, x.added[:, None], 0.0)

    def num_tokens_before(k: jax.Array) -> jax.Array:
        return jnp.sum(number < k, axis=1, dtype=jnp.int32)

    start = jax.vmap(num_tokens_before, out_axes=1)(turn)
    return Turns(
        number=number,
        start=start,
        valid=valid,
        last=last,
        reward=jnp.where(valid, reward, 0.0),
        scored=jnp.where(valid, scored, 0.0),
    )


def by_token(
    value: Float[AnyArray, "B K"],
    turns: Turns,
    x: Rows,
) -> Float[Array, "B S"]:
    """Return the value of each turn at its tokens, [B,S] f32, 0.0 elsewhere."""
    last_number = value.shape[1] - 1
    number = jnp.clip(turns.number, 0, last_number)
    value_of_turn = jnp.take_along_axis(value, number, axis=1)
    return jnp.where(x.mask, value_of_turn, 0.0)


def returns(
    turns: Turns,
    discount: float,
    at_least: float = -math.inf,
) -> Float[Array, "B K"]:
    """Return G_k = r_k + discount G_{k+1}, [B,K] f32: the discounted rewards of a turn and of the later turns.

    The return of a turn with a score below ``at_least`` is only its own r_k, and adds nothing to earlier turns.
    """

    def step(later_return, turn):
        reward, is_counted = turn
        discounted = reward + discount * later_return
        carried_return = jnp.where(is_counted, discounted, 0.0)
        return carried_return, jnp.where(is_counted, carried_return, reward)

    is_counted = turns.scored >= at_least
    after_last = jnp.zeros_like(turns.reward[:, 0])
    _, returns_KB = jax.lax.scan(step, after_last, (turns.reward.T, is_counted.T), reverse=True)
    return returns_KB.T


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
    runs = _sorted_turns(value, key, turns, x)

    def total(values: jax.Array) -> jax.Array:
        return _over_runs(values, runs.first, jnp.add)

    count = total(jnp.ones_like(runs.value))
    lowest = _over_runs(runs.value, runs.first, jnp.minimum)
    highest = _over_runs(runs.value, runs.first, jnp.maximum)
    rounding = jnp.broadcast_to(_rounding(turns), turns.valid.shape).ravel()[runs.place]
    is_tied = highest - lowest <= _over_runs(rounding, runs.first, jnp.maximum)
    mean = total(runs.value) / count
    gap = jnp.where(is_tied | runs.is_invalid, 0.0, runs.value - mean)
    if std:
        variance = total(jnp.square(gap)) / count
        gap = gap / (jnp.sqrt(variance) + STD_EPSILON)
    return _unsorted(gap, runs, turns)


def _rounding(turns: Turns) -> Float[Array, "B 1"]:
    """Return a bound of the rounding error of sums of each row's rewards."""
    max_terms = turns.valid.shape[1] + 1
    reward_size = jnp.sum(jnp.abs(turns.reward), axis=1, keepdims=True)
    return 2 * max_terms * jnp.finfo(jnp.float32).eps * reward_size


def num_with_key(
    key: Int[AnyArray, "B K"],
    turns: Turns,
    x: Rows,
) -> Float[Array, "B K"]:
    """Return, for each turn, the number of turns of its group with its key, including itself, [B,K] f32."""
    ones = jnp.ones(turns.valid.shape)
    runs = _sorted_turns(ones, key, turns, x)
    count = _over_runs(runs.value, runs.first, jnp.add)
    return _unsorted(count, runs, turns)


class _Runs(NamedTuple):
    """All turns, flat, sorted so that the turns of a group with the same key are a run of neighbours; [B * K]."""

    is_invalid: jax.Array  # bool; these turns come last
    value: jax.Array  # f32
    place: jax.Array  # i32, the turn's index before the sort
    first: jax.Array  # bool, the first turn of a run


def _sorted_turns(value: AnyArray, key: AnyArray, turns: Turns, x: Rows) -> _Runs:
    """Sort all turns by (not valid, group, key)."""
    shape = turns.valid.shape
    value = jnp.where(turns.valid, value, 0.0).ravel()
    group = jnp.broadcast_to(x.groups.index[:, None], shape).ravel()
    is_invalid = (~turns.valid).ravel()
    place = jnp.arange(value.size)
    columns = (is_invalid, group, jnp.ravel(key), value, place)
    is_invalid, group, key, value, place = jax.lax.sort(columns, num_keys=3)
    begins = []
    for sorted_key in (is_invalid, group, key):
        differs = sorted_key[1:] != sorted_key[:-1]
        begins.append(jnp.concatenate([jnp.ones(1, bool), differs]))
    first = jnp.any(jnp.stack(begins), axis=0)
    return _Runs(is_invalid, value, place, first)


def _unsorted(values: jax.Array, runs: _Runs, turns: Turns) -> jax.Array:
    """Return the values of sorted turns at the places that the turns had before the sort, [B,K]."""
    _, unsorted = jax.lax.sort((runs.place, values), num_keys=1)
    return unsorted.reshape(turns.valid.shape)


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
        has_first_before, value_before = before
        is_first, value = here
        combined = combine(value_before, value)
        return has_first_before | is_first, jnp.where(is_first, value, combined)

    def back(after, here):
        has_last_after, value_after = after
        is_last, value = here
        return has_last_after | is_last, jnp.where(is_last, value, value_after)

    _, so_far = jax.lax.associative_scan(onward, (first, value))
    is_last = jnp.concatenate([first[1:], jnp.ones(1, bool)])
    _, whole_run = jax.lax.associative_scan(back, (is_last, so_far), reverse=True)
    return whole_run


def states(turns: Turns, x: Rows) -> UInt32[Array, "B K"]:
    """Return a number for the state that each turn answers: the prompt, or the environment's last answer.

    The number is the sum over the state's tokens of a hash of (token, index in the state), modulo 2^32. Two different
    texts have the same number with probability 1 in 4e9.
    """
    position = jnp.arange(x.mask.shape[1])[None, :]
    state_start = jax.lax.cummax(jnp.where(x.mask, position + 1, 0), axis=1)
    hashes = _hash(x.tokens, position - state_start)
    hashes_of_states = jnp.where(x.mask, jnp.uint32(0), hashes)
    sums = _sum_before(turns, hashes_of_states)
    earlier_sums = jnp.pad(sums, ((0, 0), (1, 0)))[:, :-1]
    return sums - earlier_sums


def histories(turns: Turns, x: Rows) -> UInt32[Array, "B K"]:
    """Return a number for all tokens before each turn, including the policy's own turns; see ``states``."""
    position = jnp.arange(x.mask.shape[1])[None, :]
    hashes = _hash(x.tokens, position)
    return _sum_before(turns, hashes)


def _hash(tokens: jax.Array, place: jax.Array) -> jax.Array:
    """Return a hash of each token and its index, u32."""
    mixed = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + place.astype(jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return mixed


def _sum_before(turns: Turns, hashes: jax.Array) -> UInt32[Array, "B K"]:
    """Return the sum of hashes [B, S] of the tokens before each turn, modulo 2^32."""
    total = jnp.cumsum(hashes, axis=1, dtype=jnp.uint32)
    last_position = total.shape[1] - 1
    position_before = jnp.clip(turns.start - 1, 0, last_position)
    return jnp.take_along_axis(total, position_before, axis=1)


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
def turn_returns(
    x: Rows,
    *,
    discount: Share = 1.0,
    std: bool = True,
) -> Float[Array, "B S"]:
    """Return (G - mean) / (std + 1e-6) among the group's turns with the same number, where G is a turn's return.

        G_k = r_k + discount G_{k+1}

    With discount 0 only the turn's own reward counts. A turn that only one row of the group has gets advantage 0.

    Source: REINFORCE with reward-to-go and a baseline for each time step, in GRPO's form. This package compares the
        turns with the same number. With ``discount`` 0 the return is the single-step reward of muCode,
        arXiv:2502.20380.
    """
    turns = turns_of(x)
    by_turn = compared(returns(turns, discount), _numbers(turns), turns, x, std=std)
    return by_token(by_turn, turns, x)


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
    last_reward = jnp.sum(jnp.where(turns.last, turns.reward, 0.0), axis=1)
    outcome = over_std(minus_mean(last_reward, x.groups), x.groups)
    earlier_turns = turns._replace(valid=turns.valid & ~turns.last)
    by_turn = compared(turns.reward, _numbers(turns), earlier_turns, x, std=True)
    advantage = outcome[:, None] + coefficient * by_turn
    return by_token(advantage, turns, x)


@needs("turn_reward", siblings=True, tied_teaches=_always)
def gigpo(
    x: Rows,
    *,
    discount: Share = 0.95,
    weight: NotNegative = 1.0,
    std: bool = True,
) -> Float[Array, "B S"]:
    """Return the row's advantage plus ``weight`` times the turn's advantage among turns with the same state.

        A = A^E + weight A^S,   A^S of G_k = r_k + discount G_{k+1} among the turns of an anchor state

    The state of a turn is the text before it: the prompt, or the environment's answer, token by token. A state that a
    group reaches only once has A^S = 0.

    Source: Feng et al. 2025, arXiv:2505.10978; discount 0.95 and weight 1. Differs: states are equal if the
        environment's last answers are equal, without a fuzzy match; the standard deviation is the population's.
    """
    turns = turns_of(x)
    key = jax.lax.bitcast_convert_type(states(turns, x), jnp.int32)
    by_row = _row_advantage(x, std)
    by_turn = compared(returns(turns, discount), key, turns, x, std=std)
    advantage = by_row + weight * by_turn
    return by_token(advantage, turns, x)


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
    turn_return = returns(turns, discount, matched)
    row_reward = jnp.broadcast_to(x.reward[:, None], turns.valid.shape)
    same_key = jnp.zeros_like(_numbers(turns))
    episode = compared(row_reward, same_key, turns, x, std=std)
    step = compared(turn_return, _numbers(turns), turns, x, std=std)
    deviation = minus_mean(turn_return[:, 0], x.groups)
    std_of_group = jnp.sqrt(group_mean(jnp.square(deviation), x.groups))
    is_kept = (std_of_group > min_std) | (min_std == 0)
    advantage = jnp.where(is_kept[:, None], episode + weight * step, 0.0)
    return by_token(advantage, turns, x)


@needs("turn_reward", "value", memory=memory.Moments)
def turn_gae(
    x: Rows,
    *,
    gae_lambda: Share = 1.0,
    discount: Share = 1.0,
    norm_decay: Decay = 0.0,
) -> tuple[Float[Array, "B S"], Sums]:
    """Return the return of each turn minus the critic's value before it, whitened over the batch's tokens.

        A_k = G_k - V_k,   G_k = r_k + discount ((1 - lambda) V_{k+1} + lambda G_{k+1})

    A turn is one action. V_k is the value at the turn's first token, before any of its tokens is known.

    Source: RLEF, Gehring et al. 2024, arXiv:2410.02089: a value for each turn, one advantage for its tokens. Differs:
        the critic learns a turn's return at all of its tokens. Advantages are whitened, because the source's
        normalisation was not found. The KL is not part of the reward.
    """
    turns = turns_of(x)
    last_position = x.mask.shape[1] - 1
    start = jnp.minimum(turns.start, last_position)
    value = jnp.take_along_axis(x.columns["value"], start, axis=1)
    turn_return = lambda_returns(value, turns.reward, turns.valid, discount=discount, gae_lambda=gae_lambda)
    gain = jnp.where(turns.valid, turn_return - value, 0.0)
    active = x.mask & x.groups.valid[:, None]
    advantage, learned = over_batch(by_token(gain, turns, x), active, x, centre=True, decay=norm_decay)
    return advantage, learned | {"returns": by_token(turn_return, turns, x)}


@needs("turn_reward", "value", memory=memory.Moments)
def step_gae(
    x: Rows,
    *,
    gae_lambda: Share = 1.0,
    discount: Share = 1.0,
    norm_decay: Decay = 0.0,
) -> tuple[Float[Array, "B S"], Sums]:
    """Return the return of each token minus the critic's value. A turn's reward counts at its last token.

    See ``critic.lambda_returns``; whitened over the batch's tokens.

    Source: StepSearch, Wang et al. 2025, arXiv:2505.15107: PPO with a reward for the results at the end of each search.
        The environment or a reward function gives this reward.
    """
    turns = turns_of(x)
    active = x.mask & x.groups.valid[:, None]
    is_sampled_after = jnp.pad(x.mask, ((0, 0), (0, 1)))[:, 1:]
    is_last_of_turn = x.mask & ~is_sampled_after
    reward_of_turn = by_token(turns.reward, turns, x)
    reward = jnp.where(is_last_of_turn, reward_of_turn, 0.0)
    value = x.columns["value"]
    token_return = lambda_returns(value, reward, active, discount=discount, gae_lambda=gae_lambda)
    gain = token_return - jnp.where(active, value, 0.0)
    advantage, learned = over_batch(gain, active, x, centre=True, decay=norm_decay)
    return advantage, learned | {"returns": token_return}


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


def branches(
    turns: Turns,
    x: Rows,
    branch_turns: int,
) -> tuple[Int[Array, "B 1"], Int[Array, "B K"]]:
    """Return the turn at which each row stops sharing its history with its group, and a key of each turn's history.

    A row parts at its last turn whose history another row of the group shares. The sampler gives rows the same first
    turns (actor.turns.sample_of), up to turn 1 + group_id modulo ``branch_turns``; later turns do not count. Rows may
    part earlier, for example if the environment's answers differ. Such rows are compared up to the last history that
    they share. If rows draw the same tokens by chance after the planned turn, they still count as parted.
    """
    key = jax.lax.bitcast_convert_type(histories(turns, x), jnp.int32)
    number = _numbers(turns)
    planned_turn = 1 + x.group_id[:, None] % branch_turns
    has_same_history = num_with_key(key, turns, x) > 1
    is_shared = turns.valid & has_same_history & (number <= planned_turn)
    shared_number = jnp.where(is_shared, number, 0)
    parting_turn = jnp.max(shared_number, axis=1, keepdims=True)
    return parting_turn, key


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
    by_row = _row_advantage(x, std)
    local = jnp.take_along_axis(by_turn, parting_turn, axis=1)
    is_after = (parting_turn > 0) & (_numbers(turns) >= parting_turn)
    advantage = by_row + weight * jnp.where(is_after, local, 0.0)
    return by_token(advantage, turns, x)


@needs("turn_reward", siblings=True, tied_teaches=_always, rule=_branches_fit)
def step_values(
    x: Rows,
    *,
    branch_rows: BranchRows = 4,
    branch_turns: Count = 1,
    std: bool = False,
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
        value_of_turns = jnp.broadcast_to(value, turns.valid.shape)
        return compared(value_of_turns, key, turns, x, std=std)

    gap = jnp.take_along_axis(compared_rows(reward, key, False), parting_turn, axis=1)
    scaled_gap = jnp.take_along_axis(compared_rows(reward, key, std), parting_turn, axis=1)
    state_value = reward - gap
    before_parting = compared_rows(state_value, _numbers(turns), std)[:, :1]  # every row has a first turn
    advantage = jnp.where(_numbers(turns) < parting_turn, before_parting, scaled_gap)
    return by_token(advantage, turns, x)


# ---- reshapings


@needs("turn_reward")
def without_wrong_turns(
    advantage: Float[AnyArray, "B S"],
    x: Rows,
    *,
    below: Number = 0.0,
) -> Float[Array, "B S"]:
    """Return an advantage with 0 at the turns with a score below ``below``, [B,S]: the policy does not learn them.

    Scores decide whether a turn is wrong; reward terms do not. The policy still learns from the length penalty of a
    turn that is too long.

    Source: STeP, partial masking: the loss leaves out the wrong step of a trajectory that reflects on it. Differs: in
        the source a teacher marks the wrong step, here the reward marks it. The source's equation was not found.
    """
    turns = turns_of(x)
    is_wrong_turn = (turns.scored < below).astype(jnp.float32)
    is_wrong_token = by_token(is_wrong_turn, turns, x) > 0
    return jnp.where(is_wrong_token, 0.0, advantage)


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
def duration_factor(
    advantage: Float[AnyArray, "B S"],
    x: Rows,
    *,
    exponent: Exponent = 1.0,
) -> Float[AnyArray, "B S"]:
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
    weight_of_turn = jnp.where(is_timed, _over_mean(seconds, is_timed, exponent), 1.0)
    by_turn = by_token(weight_of_turn, turns, x)
    num_tokens = x.length.astype(jnp.float32)
    by_row = _over_mean(num_tokens, x.groups.valid, exponent)[:, None]
    return advantage * jnp.where(jnp.any(is_timed), by_turn, by_row)


def _over_mean(
    duration: Float[AnyArray, "*any"],
    counts: Bool[AnyArray, "*any"],
    exponent: float,
) -> jax.Array:
    """Return (duration / mean of the durations that count) ** exponent; 1 if none counts."""
    total = jnp.sum(jnp.where(counts, duration, 0.0))
    mean = total / jnp.maximum(jnp.sum(counts), 1)
    relative = duration / jnp.where(mean > 0, mean, 1.0)
    return jnp.where(mean > 0, relative**exponent, 1.0)


RESHAPINGS = {
    "without_wrong_turns": without_wrong_turns,
    "duration_factor": duration_factor,
}
