"""What is added to a reward before credit, and what is done to an advantage after it.

A reward term is a function of ``Rows`` and of its settings to what is added to each reward, [B] f32; where it has a
memory, what that learns from comes after it. A reshaping is one of (advantage [B,S], Rows) to the advantage.

Owns: length terms, positive amplification, entropy terms. Does not know: models, the ring.
Letters: B rows, S row width. Lengths are completion lengths in tokens, the end-of-sequence token counted; entropies are
those of the distributions that tokens were drawn from, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxrl_llm.algorithms import memory
from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import NUM_DIFFICULTIES, Rows
from jaxrl_llm.ops.groups import Groups, group_count, group_mean, group_range, group_sum
from jaxrl_llm.settings.schema import Count, CountOrZero, NotNegative, Positive

# ---- reward terms


def _fits(path: str, settings: Any, config: Any) -> str:
    if config.environments.factory:
        return f"[environments.factory] must be '' with {path}, which counts what the policy says and not the answers"
    most = "" if settings["buffer"] <= config.sampling.max_completion_tokens else "[sampling.max_completion_tokens]"
    return most and f"[{path}.buffer] must be at most {most}"


@needs(rule=_fits)
def overlong_penalty(x: Rows, *, buffer: Count = 4) -> Float[Array, " B"]:
    """Soft punishment of the last ``buffer`` tokens before the longest completion, [B] f32 in [-1, 0].

        0 where length <= longest - buffer, else (longest - buffer - length) / buffer

    A completion cut at the limit gets -1, and so does one that ends exactly there.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    return -jnp.clip((x.length - (x.max_length - buffer)).astype(jnp.float32) / buffer, 0.0, 1.0)


def length_reward(x: Rows, *, weight: NotNegative = 0.1) -> Float[Array, " B"]:
    """Short answers of a group before long ones, [B] f32 in [-weight / 2, weight / 2].

        l = 1/2 - (length - shortest) / (longest - shortest);  weight l where correct, else weight min(l, 0)

    0 in a group whose lengths are all equal.

    Source: Kimi k1.5, arXiv:2501.12599, section 2.3.3. Differs: not phased in.
    """
    shortest, longest = group_range(x.length.astype(jnp.float32), x.groups)
    is_spread = x.groups.valid & (longest > shortest)
    value = 0.5 - (x.length - shortest) / jnp.where(is_spread, longest - shortest, 1.0)
    return weight * jnp.where(is_spread, jnp.where(x.correct, value, jnp.minimum(value, 0.0)), 0.0)


@needs(memory=memory.ShortAnswers)
def short_answer(
    x: Rows, *, tokens: Count = 4, bonus: NotNegative = 0.5, every_iterations: CountOrZero = 0
) -> tuple[Float[Array, " B"], dict[str, Float[Array, "D N"]]]:
    """``bonus`` for a correct answer of at most ``tokens`` tokens, else 0, [B] f32.

    With ``every_iterations`` above 0 how long is chosen every so many iterations anew, for easy, middling and hard
    questions apart, among the multiples of ``tokens``:

        the least L with floor(P C) >= 1, else any length;   C = floor(2 n / 3) easy, floor(n / 3) middling, 1 hard

    P is the share of the class's answers, right or wrong, that have at most L tokens, n the answers to a question
    (``rollout.group_size``), of which at least C are right where it is not hard. Where C is 0, as for middling ones in
    groups of two, any length is short.

    Source: LASER, arXiv:2505.15612, with bonus 0.5; a target of each difficulty is its LASER-D (released code).
        Differs: the reward that the bonus is added to is the run's, often 0 or 1, where theirs is 1, -0.5 where it is
        wrong, and -1 without an answer in form.
    """
    if not every_iterations:
        return jnp.where(x.correct & (x.length <= tokens), bonus, 0.0), {}
    row_class = difficulty(x.correct, x.groups)
    target = x.memory["short_answer"][row_class]
    grid = memory.length_grid(tokens, x.max_length)
    learned = {"answers_within": answers_within(x.length, row_class, x.groups, grid=grid)}
    return jnp.where(x.correct & (x.length <= target), bonus, 0.0), learned


def difficulty(correct: Bool[ArrayLike, " B"], groups: Groups) -> Int[Array, " B"]:
    """Class of each row's question by the share of its group that is correct, [B] i32 below ``NUM_DIFFICULTIES``.

        0 easy: at least two thirds, 1: at least one third, 2 hard: less

    Source: the three classes of LASER-D, arXiv:2505.15612. Differs: where released code counts lengths, a share of just
        two thirds, or one, is of the harder class; here it is of the same one there as where the bonus is given.
    """
    passed, count = group_sum(correct.astype(jnp.float32), groups), group_count(groups)
    return ((3 * passed < 2 * count).astype(jnp.int32) + (3 * passed < count)).astype(jnp.int32)


def answers_within(
    length: Int[ArrayLike, " B"], row_class: Int[ArrayLike, " B"], groups: Groups, *, grid: Sequence[int]
) -> Float[Array, "D {len(grid)+1}"]:
    """What a target of each class is chosen by, [NUM_DIFFICULTIES, len(grid) + 1] f32.

        [d, j] = rows of class d with length <= grid[j], correct or not;  [d, -1] = rows of class d

    Args:
        length, row_class: [B] i32.
        groups: of the B rows; those that are not valid count nowhere.
        grid: lengths in tokens, rising.
    """
    member_DB = (row_class[None, :] == jnp.arange(NUM_DIFFICULTIES)[:, None]) & groups.valid[None, :]
    is_within_BN = length[:, None] <= jnp.asarray(grid)[None, :]
    counted_BN = jnp.pad(is_within_BN, ((0, 0), (0, 1)), constant_values=True)  # and every row
    return member_DB.astype(jnp.float32) @ counted_BN.astype(jnp.float32)


# ---- reshapings


def _before_masks(path: str, settings: Any, config: Any) -> str:
    """It gives a correct row's tokens an advantage of 1, those too that had been masked."""
    names = [x.name for x in config.algorithm.reshaping]
    masks = {"reward_mask", "without_wrong_turns"} & {*names[: names.index("amplify_positive")]}
    return f"[algorithm.reshaping] must have 'amplify_positive' before {sorted(masks)[0]!r}" if masks else ""


@needs(of_row=True, rule=_before_masks)
def amplify_positive(advantage: Float[ArrayLike, "B S"], x: Rows, *, factor: Positive = 3.0) -> Float[Array, "B S"]:
    """1 for a correct row, ``factor`` times a positive advantage, and a negative one as it is; [B,S] f32.

    A group that is correct throughout is then imitated (advantage 1), although it is tied.

    Source: released code of R3L, arXiv:2601.03715, with factor 3 ("if r >= 1: 1, else if score >= 0: 3 score").
    """
    amplified = jnp.where(advantage > 0, factor * advantage, advantage)
    return jnp.where(x.mask, jnp.where(x.correct[:, None], 1.0, amplified), 0.0)


@needs("entropy", of_row=True)
def entropy_factor(advantage: Float[ArrayLike, "B S"], x: Rows, *, strength: NotNegative = 1.0) -> Float[Array, "B S"]:
    """An advantage times what makes confident answers weigh more, [B,S] f32.

        Y = max(0, 1 + strength (mean H - H) / mean H),   H of a row = mean entropy of its tokens, mean over the group

    Source: ETTRL, arXiv:2508.11356, entropy-based advantage reshaping, strength 1. Differs: never below 0, where it
        would turn the advantage round; the group as the set of the mean is ours; 1 where the mean is 0.
    """
    entropy = jnp.sum(jnp.where(x.mask, x.columns["entropy"], 0.0), axis=1) / jnp.maximum(x.length, 1)
    mean = group_mean(entropy, x.groups)
    is_known = x.groups.valid & (mean > 0)
    relative = (mean - entropy) / jnp.where(is_known, mean, 1.0)
    return advantage * jnp.where(is_known, jnp.maximum(1.0 + strength * relative, 0.0), 1.0)[:, None]


@needs("entropy")
def entropy_bonus(
    advantage: Float[ArrayLike, "B S"], x: Rows, *, coefficient: NotNegative = 0.4, limit: Positive = 2.0
) -> Float[Array, "B S"]:
    """An advantage and a bonus for the token's entropy, which is 0 where the advantage is 0; [B,S] f32.

        A + min(|A| / limit, coefficient H)

    With a limit above 1 no sign is turned.

    Source: Cheng et al. 2025, arXiv:2506.14758, with a coefficient of 0.4 and a limit of 2; so in MSSR,
        arXiv:2512.18215 (released code, which has -p log p of the token that was drawn for its entropy H).
    """
    entropy = jnp.where(x.mask, x.columns["entropy"], 0.0)
    return advantage + jnp.minimum(jnp.abs(advantage) / limit, coefficient * entropy)


def _of_one_turn(path: str, settings: Any, config: Any) -> str:
    return (
        f"[environments.factory] must be '' with {path}: what is masked is text of one turn"
        if config.environments.factory
        else ""
    )


@needs("reward_mask", rule=_of_one_turn)
def reward_mask(advantage: Float[ArrayLike, "B S"], x: Rows) -> Float[Array, "B S"]:
    """An advantage, 0 at the tokens that a reward function has masked, [B,S] f32.

    Such a function returns ``{"reward": score, "masked": [[start, stop], ...]}`` for a completion, in characters of it;
    a token that has others too is not masked.

    Source: fine-grained optimisation of StepCoder, Dou et al. 2024, arXiv:2402.01391: the loss leaves out the tokens of
        lines that no test has run (environments.code_tests:covered). Differs: it is the advantage that is 0, so that
        an entropy bonus and a penalty to a reference still act there.
    """
    return jnp.where(x.columns["reward_mask"] > 0, 0.0, advantage)


REWARD_TERMS = {
    "overlong_penalty": overlong_penalty,
    "length_reward": length_reward,
    "short_answer": short_answer,
}

RESHAPINGS = {
    "amplify_positive": amplify_positive,
    "entropy_factor": entropy_factor,
    "entropy_bonus": entropy_bonus,
    "reward_mask": reward_mask,
}
