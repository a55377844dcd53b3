"""Reward terms, which are added to a reward before credit, and reshapings of an advantage.

A reward term is a function of ``Rows`` and its settings. It returns the number to add to each reward, [B] f32; a term
with a memory returns a pair; the second element holds the values that the memory learns from. A reshaping is a function
of (advantage [B,S], Rows). It returns the new advantage.

Owns: length terms, positive amplification, entropy terms, reward masks. Does not know: models, the ring.
Letters: B rows, S row width. Lengths are completion lengths in tokens, with the end-of-sequence token; entropies are
those of the distributions that tokens were drawn from, in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms import memory
from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import NUM_DIFFICULTIES, AnyArray, Rows
from jaxrl_llm.ops.groups import Groups, group_count, group_mean, group_range, group_sum
from jaxrl_llm.settings.schema import Count, CountOrZero, NotNegative, Positive

# ---- reward terms


def _has_one_turn_and_room(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if completions have several turns, or if the buffer is longer than a completion."""
    if config.environments.factory:
        return (
            f"[environments.factory] must be '' with {path}: this term counts the policy's tokens and not an "
            "environment's answers"
        )
    if settings["buffer"] > config.sampling.max_completion_tokens:
        return f"[{path}.buffer] must be at most [sampling.max_completion_tokens]"
    return ""


@needs(rule=_has_one_turn_and_room)
def overlong_penalty(x: Rows, *, buffer: Count = 4) -> Float[Array, " B"]:
    """Return a penalty for the last ``buffer`` tokens before the longest completion, [B] f32 in [-1, 0].

        0 if length <= longest - buffer, else (longest - buffer - length) / buffer

    A completion that is cut at the limit gets -1, and so does a completion that ends exactly at the limit.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    num_over = x.length - (x.max_length - buffer)
    share_of_buffer = num_over.astype(jnp.float32) / buffer
    return -jnp.clip(share_of_buffer, 0.0, 1.0)


def length_reward(x: Rows, *, weight: NotNegative = 0.1) -> Float[Array, " B"]:
    """Return a bonus for the short answers of a group, [B] f32 in [-weight / 2, weight / 2].

        l = 1/2 - (length - shortest) / (longest - shortest);  weight l if correct, else weight min(l, 0)

    It is 0 in a group whose lengths are all equal.

    Source: Kimi k1.5, arXiv:2501.12599, section 2.3.3. Differs: the bonus applies from the first iteration.
    """
    shortest, longest = group_range(x.length.astype(jnp.float32), x.groups)
    is_spread = x.groups.valid & (longest > shortest)
    length_range = jnp.where(is_spread, longest - shortest, 1.0)
    value = 0.5 - (x.length - shortest) / length_range
    by_correctness = jnp.where(x.correct, value, jnp.minimum(value, 0.0))
    return weight * jnp.where(is_spread, by_correctness, 0.0)


@needs(memory=memory.ShortAnswers)
def short_answer(
    x: Rows,
    *,
    tokens: Count = 4,
    bonus: NotNegative = 0.5,
    every_iterations: CountOrZero = 0,
) -> tuple[Float[Array, " B"], dict[str, Float[Array, "D N"]]]:
    """Return ``bonus`` for a correct answer of at most ``tokens`` tokens, else 0, [B] f32.

    With ``every_iterations`` above 0 the length limit is chosen anew at this interval, separately for easy, medium and
    hard questions, among the multiples of ``tokens``:

        the least L with floor(P C) >= 1, else any length;   C = floor(2 n / 3) easy, floor(n / 3) medium, 1 hard

    P is the share of the class's answers, right or wrong, that have at most L tokens. n is the number of answers to a
    question (``rollout.group_size``). At least C of the n answers to a question of the class are correct, except in the
    hard class. If C is 0, as for medium questions in groups of two, every length is short.

    Source: LASER, arXiv:2505.15612, with bonus 0.5; a target for each difficulty is its LASER-D (released code).
        Differs: the bonus is added to the run's reward, often 0 or 1. The source's reward is 1, or -0.5 if wrong, or
        -1 for an answer in the wrong format.
    """
    if not every_iterations:
        is_short = x.length <= tokens
        return jnp.where(x.correct & is_short, bonus, 0.0), {}
    row_class = difficulty(x.correct, x.groups)
    limit = x.memory["short_answer"][row_class]
    is_short = x.length <= limit
    grid = memory.length_grid(tokens, x.max_length)
    learned = {"answers_within": answers_within(x.length, row_class, x.groups, grid=grid)}
    return jnp.where(x.correct & is_short, bonus, 0.0), learned


def difficulty(correct: Bool[AnyArray, " B"], groups: Groups) -> Int[Array, " B"]:
    """Return the class of each row's question by the share of its group that is correct, [B] i32.

        0 easy: at least two thirds, 1 medium: at least one third, 2 hard: less

    Source: the three classes of LASER-D, arXiv:2505.15612. Differs: when the released code counts lengths, a share of
        exactly two thirds, or one third, belongs to the harder class. Here counts and bonus use the same classes.
    """
    passed = group_sum(correct.astype(jnp.float32), groups)
    count = group_count(groups)
    is_not_easy = (3 * passed < 2 * count).astype(jnp.int32)
    is_hard = 3 * passed < count
    return (is_not_easy + is_hard).astype(jnp.int32)


def answers_within(
    length: Int[AnyArray, " B"],
    row_class: Int[AnyArray, " B"],
    groups: Groups,
    *,
    grid: Sequence[int],
) -> Float[Array, "D {len(grid)+1}"]:
    """Return the counts from which a length limit of each class is chosen, [NUM_DIFFICULTIES, len(grid) + 1] f32.

        [d, j] = rows of class d with length <= grid[j], correct or not;  [d, -1] = rows of class d

    Args:
        length, row_class: [B] i32.
        groups: of the B rows; rows that are not valid do not count.
        grid: lengths in tokens, rising.
    """
    class_number = jnp.arange(NUM_DIFFICULTIES)[:, None]
    is_in_class_DB = row_class[None, :] == class_number
    member_DB = is_in_class_DB & groups.valid[None, :]
    is_within_BN = length[:, None] <= jnp.asarray(grid)[None, :]
    counted_BN = jnp.pad(is_within_BN, ((0, 0), (0, 1)), constant_values=True)  # the last column counts every row
    return member_DB.astype(jnp.float32) @ counted_BN.astype(jnp.float32)


# ---- reshapings


def _before_masks(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if a masking reshaping comes before: amplify_positive sets masked tokens to 1."""
    names = [chosen.name for chosen in config.algorithm.reshaping]
    earlier_names = names[: names.index("amplify_positive")]
    masks = sorted({"reward_mask", "without_wrong_turns"} & {*earlier_names})
    if masks:
        return f"[algorithm.reshaping] must have 'amplify_positive' before {masks[0]!r}: swap the two"
    return ""


@needs(of_row=True, rule=_before_masks)
def amplify_positive(
    advantage: Float[AnyArray, "B S"],
    x: Rows,
    *,
    factor: Positive = 3.0,
) -> Float[Array, "B S"]:
    """Return 1 for a correct row, ``factor`` times a positive advantage, and negative advantages unchanged; [B,S] f32.

    The policy then imitates a group that is correct throughout (advantage 1), although it is tied.

    Source: released code of R3L, arXiv:2601.03715, with factor 3 ("if r >= 1: 1, else if score >= 0: 3 score").
    """
    amplified = jnp.where(advantage > 0, factor * advantage, advantage)
    by_correctness = jnp.where(x.correct[:, None], 1.0, amplified)
    return jnp.where(x.mask, by_correctness, 0.0)


@needs("entropy", of_row=True)
def entropy_factor(
    advantage: Float[AnyArray, "B S"],
    x: Rows,
    *,
    strength: NotNegative = 1.0,
) -> Float[AnyArray, "B S"]:
    """Return an advantage times a factor that is larger for confident answers, [B,S] f32.

        Y = max(0, 1 + strength (mean H - H) / mean H),   H of a row = mean entropy of its tokens, mean over the group

    Source: ETTRL, arXiv:2508.11356, entropy-based advantage reshaping, strength 1. Differs: the factor is never below
        0, which would reverse the advantage. The mean is over the group, and the factor is 1 if the mean is 0.
    """
    total = jnp.sum(jnp.where(x.mask, x.columns["entropy"], 0.0), axis=1)
    entropy = total / jnp.maximum(x.length, 1)
    mean = group_mean(entropy, x.groups)
    is_known = x.groups.valid & (mean > 0)
    relative = (mean - entropy) / jnp.where(is_known, mean, 1.0)
    factor = jnp.where(is_known, jnp.maximum(1.0 + strength * relative, 0.0), 1.0)
    return advantage * factor[:, None]


@needs("entropy")
def entropy_bonus(
    advantage: Float[AnyArray, "B S"],
    x: Rows,
    *,
    coefficient: NotNegative = 0.4,
    limit: Positive = 2.0,
) -> Float[AnyArray, "B S"]:
    """Return an advantage plus a bonus for the token's entropy. The bonus is 0 if the advantage is 0; [B,S] f32.

        A + min(|A| / limit, coefficient H)

    With a limit above 1 the bonus never changes the sign of an advantage.

    Source: Cheng et al. 2025, arXiv:2506.14758, with a coefficient of 0.4 and a limit of 2; also in MSSR,
        arXiv:2512.18215 (released code, which uses -p log p of the drawn token as its entropy H).
    """
    entropy = jnp.where(x.mask, x.columns["entropy"], 0.0)
    largest_bonus = jnp.abs(advantage) / limit
    bonus = jnp.minimum(largest_bonus, coefficient * entropy)
    return advantage + bonus


def _has_one_turn(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if completions have several turns."""
    if config.environments.factory:
        return f"[environments.factory] must be '' with {path}: reward functions mask the text of one turn"
    return ""


@needs("reward_mask", rule=_has_one_turn)
def reward_mask(advantage: Float[AnyArray, "B S"], x: Rows) -> Float[Array, "B S"]:
    """Return an advantage with 0 at the tokens that a reward function has masked, [B,S] f32.

    Such a reward function returns ``{"reward": score, "masked": [[start, stop], ...]}`` for a completion, in
    characters. A token that also contains characters outside the mask is not masked.

    Source: fine-grained optimisation of StepCoder, Dou et al. 2024, arXiv:2402.01391: the loss leaves out the tokens of
        lines that no test has run (environments.code_tests:covered). Differs: only the advantage is 0, so an entropy
        bonus and a penalty to a reference still act on these tokens.
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
