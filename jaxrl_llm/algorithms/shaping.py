"""What is added to a reward before credit, and what is done to an advantage after it.

Owns: length terms, gated rewards, positive amplification, entropy terms, weights by duration. Does not know: models,
the ring, who combines them.
Letters: B rows, T row width. Lengths are completion lengths in tokens, the end-of-sequence token counted; entropies
are those of the distributions that tokens were drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxrl_llm.algorithms.advantages import Groups, group_count, group_range, group_sum

NUM_DIFFICULTIES = 3


def overlong_penalty(length: Int[ArrayLike, " B"], *, max_length: int, buffer: int) -> Float[Array, " B"]:
    """Soft punishment of the last ``buffer`` tokens before the limit, [B] f32 in [-1, 0].

        0 where length <= max_length - buffer, else (max_length - buffer - length) / buffer

    A completion cut at the limit gets -1, and so does one that ends exactly there.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    return -jnp.clip((length - (max_length - buffer)).astype(jnp.float32) / buffer, 0.0, 1.0)


def length_reward(length: Int[ArrayLike, " B"], correct: Bool[ArrayLike, " B"], groups: Groups) -> Float[Array, " B"]:
    """Short answers of a group before long ones, [B] f32 in [-1/2, 1/2].

        l = 1/2 - (length - shortest) / (longest - shortest);  l where correct, else min(l, 0)

    0 in a group whose lengths are all equal. Args: ``length`` [B] i32, ``correct`` [B] bool.

    Source: Kimi k1.5, arXiv:2501.12599, section 2.3.3. Differs: not phased in.
    """
    shortest, longest = group_range(length.astype(jnp.float32), groups)
    is_spread = groups.valid & (longest > shortest)
    value = 0.5 - (length - shortest) / jnp.where(is_spread, longest - shortest, 1.0)
    return jnp.where(is_spread, jnp.where(correct, value, jnp.minimum(value, 0.0)), 0.0)


def short_bonus(
    length: Int[ArrayLike, " B"], correct: Bool[ArrayLike, " B"], *, target: Int[ArrayLike, " B"] | int, bonus: float
) -> Float[Array, " B"]:
    """``bonus`` for a correct answer of at most ``target`` tokens (one for all, or [B]), else 0, [B] f32.

    Source: LASER, arXiv:2505.15612, with bonus 0.5; a target of each difficulty is its LASER-D.
    """
    return jnp.where(correct & (length <= target), bonus, 0.0)


def difficulty(correct: Bool[ArrayLike, " B"], groups: Groups) -> Int[Array, " B"]:
    """Class of each row's question by the share of its group that is correct, [B] i32 below ``NUM_DIFFICULTIES``.

        0 easy: at least two thirds, 1: at least one third, 2 hard: less

    Source: the three classes of LASER-D, arXiv:2505.15612; their bounds are ours.
    """
    passed, count = group_sum(correct.astype(jnp.float32), groups), group_count(groups)
    return ((3 * passed < 2 * count).astype(jnp.int32) + (3 * passed < count)).astype(jnp.int32)


def correct_within(
    length: Int[ArrayLike, " B"],
    correct: Bool[ArrayLike, " B"],
    row_class: Int[ArrayLike, " B"],
    groups: Groups,
    *,
    grid: Sequence[int],
) -> Float[Array, "D {len(grid)+1}"]:
    """What a target of each class is chosen by, [NUM_DIFFICULTIES, len(grid) + 1] f32.

        [d, j] = correct rows of class d with length <= grid[j];  [d, -1] = groups of class d

    Args:
        length, row_class: [B] i32.
        correct: [B] bool.
        groups: of the B rows; those that are not valid count nowhere.
        grid: lengths in tokens, rising.
    """
    member_DB = (row_class[None, :] == jnp.arange(NUM_DIFFICULTIES)[:, None]) & groups.valid[None, :]
    is_within_BN = (correct[:, None] & (length[:, None] <= jnp.asarray(grid)[None, :])).astype(jnp.float32)
    # Every row is its share of its group.
    share_B1 = (1.0 / jnp.maximum(group_count(groups), 1.0))[:, None]
    return member_DB.astype(jnp.float32) @ jnp.concatenate([is_within_BN, share_B1], axis=1)


def gated(parts: Float[ArrayLike, "B K"], *, threshold: float) -> Float[Array, "B K"]:
    """Rewards that count only where the first is there already: r_k 1[r_0 >= threshold] for k > 0, [B, K] f32.

    Args:
        parts: [B, K] f32, one column per reward function.

    Source: GDPO, arXiv:2601.05242.
    """
    return jnp.where((parts[:, :1] >= threshold) | (jnp.arange(parts.shape[1]) == 0)[None, :], parts, 0.0)


def amplify_positive(
    advantage: Float[ArrayLike, " B"], correct: Bool[ArrayLike, " B"], *, factor: float
) -> Float[Array, " B"]:
    """1 for a correct row, ``factor`` times a positive advantage, and a negative one as it is; [B] f32.

    A group that is correct throughout is then imitated (advantage 1), although it is tied.

    Source: released code of R3L, arXiv:2601.03715, with factor 3 ("if r >= 1: 1, else if score >= 0: 3 score").
    """
    return jnp.where(correct, 1.0, jnp.where(advantage > 0, factor * advantage, advantage))


def entropy_factor(
    row_entropy: Float[ArrayLike, " B"], groups: Groups, *, strength: Float[ArrayLike, ""]
) -> Float[Array, " B"]:
    """What multiplies a row's advantage so that confident answers weigh more, [B] f32.

        Y = max(0, 1 + strength (mean H - H) / mean H),   mean over the valid rows of the group

    Args:
        row_entropy: [B] f32 nats, mean over the row's completion.
        groups: of the B rows.
        strength: 1 is the source's.

    Source: ETTRL, arXiv:2508.11356, entropy-based advantage reshaping. Differs: never below 0, where it would turn
        the advantage round; the group as the set of the mean is ours; 1 where the mean is 0.
    """
    mean = group_sum(row_entropy, groups) / jnp.maximum(group_count(groups), 1.0)
    is_known = groups.valid & (mean > 0)
    relative = (mean - row_entropy) / jnp.where(is_known, mean, 1.0)
    return jnp.where(is_known, jnp.maximum(1.0 + strength * relative, 0.0), 1.0)


def entropy_bonus(
    advantage: Float[ArrayLike, "B T"], entropy: Float[ArrayLike, "B T"], *, coefficient: float, limit: float
) -> Float[Array, "B T"]:
    """What is added to a token's advantage for its entropy, [B, T] f32, not negative, 0 where the advantage is 0.

        psi = min(|A| / limit, coefficient H)

    Args:
        advantage: [B, T] f32.
        entropy: [B, T] f32 nats, not negative; it carries no gradient.
        coefficient, limit: lambda and gamma of the source, 2 and 0.4. With a limit above 1 no sign is turned.

    Source: arXiv:2512.18215.
    """
    return jnp.minimum(jnp.abs(advantage) / limit, coefficient * entropy)


def duration_factor(
    length: Int[ArrayLike, " B"], valid: Bool[ArrayLike, " B"], *, exponent: float
) -> Float[Array, " B"]:
    """What multiplies a row's advantage so that slow rows weigh as much as they are rare, [B] f32.

        w = (length / mean length of the valid rows) ** exponent

    Where rows come as they are finished, an action that takes d times as long comes 1/d as often: with exponent 1 the
    weighted rows are in the proportion in which the policy chose them, and the mean weight is 1. 1 where no row is
    valid.

    Args:
        length: [B] i32, the time a row has taken, in tokens.
        valid: [B] bool, rows that are trained on.

    Source: after "RL for MLE agents", which weighs by an action's duration; its weight was not found, this form is
        ours.
    """
    length, count = length.astype(jnp.float32), jnp.sum(valid)
    mean = jnp.sum(jnp.where(valid, length, 0.0)) / jnp.maximum(count, 1)
    return jnp.where(mean > 0, (length / jnp.where(mean > 0, mean, 1.0)) ** exponent, 1.0)
