"""Advantages of rollouts: rewards less a baseline, over a scale.

Small functions from a value per row to a value per row, each over a set of rows (the samples of a prompt, or
the whole batch as one group), and ``estimate``, where the named estimators are written as what they are made of.

Owns: baselines and scales over groups. Does not know: tokens, masks, where rewards come from.
Letters: B rows, Q groups, K reward parts. Groups are named by an index per row, never by position. A row that is
not valid takes no part in any sum and comes out 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

STD_EPSILON = 1e-6


class Groups(NamedTuple):
    """Which rows belong together.

    Sums run over the membership table rather than a scatter, whose order of addition varies on a GPU.
    """

    index: jax.Array  # [B] i32 in [0, Q)
    member: jax.Array  # [Q, B] bool, valid rows of each group

    @property
    def valid(self) -> Bool[Array, " B"]:
        """[B] bool."""
        return jnp.any(self.member, axis=0)


def group_rows(index: Int[ArrayLike, " B"], valid: Bool[ArrayLike, " B"], num_groups: int) -> Groups:
    """``Groups`` of rows with ``index`` [B] i32 in [0, Q) and ``valid`` [B] bool."""
    return Groups(index, (index[None, :] == jnp.arange(num_groups)[:, None]) & valid[None, :])


def whole_batch(groups: Groups) -> Groups:
    """All valid rows of the groups as one group, Q = 1; its ``member`` is [B] valid rows with a leading axis."""
    return Groups(jnp.zeros_like(groups.index), groups.valid[None, :])


def group_sum(value: Float[ArrayLike, " B"], groups: Groups) -> Float[Array, " B"]:
    """Sum of ``value`` [B] f32 over the valid rows of each row's group, [B] f32."""
    return jnp.sum(jnp.where(groups.member, value[None, :], 0.0), axis=1)[groups.index]


def group_count(groups: Groups) -> Float[Array, " B"]:
    """Valid rows of each row's group, [B] f32."""
    return jnp.sum(groups.member, axis=1).astype(jnp.float32)[groups.index]


def group_range(value: Float[ArrayLike, " B"], groups: Groups) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Lowest and highest ``value`` [B] f32 of each row's group, each [B] f32; inf and -inf for an empty group."""
    lowest = jnp.min(jnp.where(groups.member, value[None, :], jnp.inf), axis=1)
    highest = jnp.max(jnp.where(groups.member, value[None, :], -jnp.inf), axis=1)
    return lowest[groups.index], highest[groups.index]


def is_untied(value: Float[ArrayLike, " B"], groups: Groups) -> Bool[Array, " B"]:
    """[B] bool, valid rows in whose group not all values are equal (so there are at least two).

    Tested by comparison: in float32 the mean of equal values need not equal them, and a tiny standard deviation
    would amplify what is left.
    """
    lowest, highest = group_range(value, groups)
    return groups.valid & (highest > lowest)


def minus_mean(value: Float[ArrayLike, " B"], groups: Groups) -> Float[Array, " B"]:
    """``value - mean`` over the group, [B] f32; exactly 0 in a tied group. ``value`` [B] f32 is finite where valid."""
    mean = group_sum(jnp.where(groups.valid, value, 0.0), groups) / jnp.maximum(group_count(groups), 1.0)
    return jnp.where(is_untied(value, groups), value - mean, 0.0)


def minus_median(value: Float[ArrayLike, " B"], groups: Groups) -> Float[Array, " B"]:
    """``value - median`` of the group (of an even number, the mean of the middle two), [B] f32; 0 in a tied group."""
    # One sort of the rows by group and value; a sort of the table would gather it over the mesh.
    num_groups = groups.member.shape[0]
    _, ordered = jax.lax.sort((jnp.where(groups.valid, groups.index, num_groups), value), num_keys=2)
    count = jnp.sum(groups.member, axis=1)
    start = jnp.cumsum(count) - count
    at = lambda i: ordered[jnp.minimum(start + jnp.maximum(i, 0), value.shape[0] - 1)]
    median = (0.5 * (at((count - 1) // 2) + at(count // 2)))[groups.index]
    return jnp.where(is_untied(value, groups), value - median, 0.0)


def mean_of_others(value: Float[ArrayLike, " B"], groups: Groups) -> Float[Array, " B"]:
    """Mean of ``value`` [B] f32 over the other valid rows of the group, [B] f32; 0 where there is none."""
    own = jnp.where(groups.valid, value, 0.0)
    others = group_count(groups) - groups.valid.astype(jnp.float32)
    return jnp.where(others > 0, (group_sum(value, groups) - own) / jnp.maximum(others, 1.0), 0.0)


def over_std(value: Float[ArrayLike, " B"], groups: Groups) -> Float[Array, " B"]:
    """``value / (std + 1e-6)`` with the population standard deviation of the group's values, [B] f32.

    Take the mean away first: where all values are equal, only zeros stay what they are.
    """
    value = jnp.where(groups.valid, value, 0.0)
    variance = group_sum(jnp.square(minus_mean(value, groups)), groups) / jnp.maximum(group_count(groups), 1.0)
    return value / (jnp.sqrt(variance) + STD_EPSILON)


def whiten(value: Float[ArrayLike, "B T"], mask: Bool[ArrayLike, "B T"]) -> Float[Array, "B T"]:
    """``(value - mean) / (std + 1e-6)`` over all tokens of the mask, each [B, T]; 0 off it, and where all are equal."""
    valid = mask.reshape(-1)
    tokens = Groups(jnp.zeros(valid.shape, jnp.int32), valid[None, :])
    return over_std(minus_mean(value.reshape(-1), tokens), tokens).reshape(value.shape)


def running_moments(
    value: Float[ArrayLike, "*any"], valid: Bool[ArrayLike, "*any"], moments: Float[ArrayLike, "3"], *, decay: float
) -> Float[Array, "3"]:
    """Count, mean and sum of squared deviations of the valid values [...] of this and earlier batches, [3] f32.

        n = d n0 + n1,   mean = m0 + (m1 - m0) n1 / n,   sum = d s0 + s1 + (m1 - m0)^2 d n0 n1 / n

    where d n0 values of mean m0 came before, each batch counting ``decay`` times as much with every one that follows,
    and n1 of mean m1 come now. Of values that were all equal the mean is exactly theirs and the sum exactly 0.

    Source: Hilton et al. 2021, arXiv:2110.00641 (released code, ``EwmaMoments``); merged as Chan et al. 1979 do, for a
        float32 sum of squares loses the deviations of values far from 0.
    """
    valid, value = valid.ravel(), value.ravel()
    count = jnp.sum(valid, dtype=jnp.float32)
    lowest = jnp.min(jnp.where(valid, value, jnp.inf))
    highest = jnp.max(jnp.where(valid, value, -jnp.inf))
    mean = jnp.where(lowest == highest, highest, jnp.sum(jnp.where(valid, value, 0.0)) / jnp.maximum(count, 1.0))
    squares = jnp.sum(jnp.where(valid, jnp.square(value - mean), 0.0))
    before = decay * moments[0]
    total = jnp.maximum(before + count, jnp.finfo(jnp.float32).tiny)
    gap = jnp.where(before > 0, mean - moments[1], 0.0)
    both = [
        before + count,
        jnp.where(before > 0, moments[1] + gap * (count / total), mean),
        decay * moments[2] + squares + jnp.square(gap) * (before * (count / total)),
    ]
    return jnp.where(count > 0, jnp.stack(both), jnp.stack([before, moments[1], decay * moments[2]]))


def over_moments(
    value: Float[ArrayLike, "*any"], moments: Float[ArrayLike, "3"], *, centre: bool
) -> Float[Array, "*any"]:
    """Values over the mean and standard deviation of ``running_moments`` [n, mean, sum], f32 of their shape.

    out = (value - mean) / (sqrt(sum / n) + 1e-6);   not ``centre``: nothing is taken away
    """
    std = jnp.sqrt(moments[2] / jnp.maximum(moments[0], jnp.finfo(jnp.float32).tiny))
    return (value - moments[1] if centre else value) / (std + STD_EPSILON)


def estimate(
    reward: Float[ArrayLike, " B"],
    groups: Groups,
    *,
    kind: str,
    delta_v: float = 0.0,
    parts: Float[ArrayLike, "B K"] | None = None,
    part_weights: Sequence[float] = (),
    baseline: Float[ArrayLike, " B"] | None = None,
    over_batch: Callable[[Float[Array, " B"], bool], Float[Array, " B"]] | None = None,
) -> Float[Array, " B"]:
    """Advantage of each row; mean, std and n are over the valid rows of the group, or of the batch where it says so.

        "grpo"           (r - mean) / std                                                              [1]
        "dr_grpo"        r - mean                                                                      [2]
        "leave_one_out"  r - mean of the others = n / (n - 1) (r - mean)                               [3]
        "reinforce_pp"   (r - mean of the batch) / std of the batch                                    [4]
        "brorl"          a / std of the batch, a = r - mean                                            [5]
        "asymre"         r - (mean + delta_v)                                                          [6]
        "mc_grpo"        r - median                                                                    [7]
        "gdpo"           a / std of the batch, a = sum_k weight_k (r_k - mean) / std of part k         [8]
        "mssr"           a whitened over the batch, a = r - v, v = ``baseline`` of the row             [9]
        "poise"          r - mean of the others' g, g = ``baseline``                                   [10]
        "gae"            r: what it is compared with differs by token (see ``ops.values``)

    In a tied group (max == min) all but five are exactly 0, and so they are with fewer than 2 valid rows. The
    five: "reinforce_pp" and "mssr" compare with the batch or with earlier answers and are 0 where the batch is
    tied; "poise" compares with a prediction; "asymre" gives every row of a tied group -delta_v, for at
    delta_v < 0 it imitates what it cannot tell apart; these two are 0 with fewer than 2 valid rows. "gae" is r.

    Args:
        reward: [B] f32, unitless; finite where valid, ignored elsewhere.
        groups: of the B rows.
        kind: one of the above.
        delta_v: for "asymre", below 0: successes weigh more than failures.
        parts: [B, K] f32 for "gdpo", the rewards that were added up; finite where valid.
        part_weights: K of them.
        baseline: [B] f32; for "mssr" the reward expected of the row's question before it was answered, for
            "poise" the reward that the row's own features predict of its siblings.
        over_batch: (value [B], whether the mean goes first) to the value over the batch's standard deviation, for those
            that are; None = the mean and standard deviation of this batch.

    Returns:
        [B] f32, 0.0 where not valid; in units of reward or, where divided by one, of a standard deviation.

    Source: [1] Shao et al. 2024, arXiv:2402.03300, section 4.1.2; [2] Liu et al. 2025, arXiv:2503.20783;
        [3] Ahmadian et al. 2024, arXiv:2402.14740; [4] Hu 2025, arXiv:2501.03262, global normalisation;
        [5] arXiv:2510.01180; [6] Arnal et al. 2025, arXiv:2506.20520; [7] arXiv:2601.22582;
        [8] arXiv:2601.05242; [9] arXiv:2512.18215; [10] arXiv:2605.07579.
    Differs: the explicit tie, the valid rows, 1e-6 in every divisor ([8] has 1e-4). [7] divides by the median
        absolute deviation + 1e-3, which is 0 for two-valued rewards in an odd group, and would give 1000; here the
        scale is 1. It samples one rollout more and drops the median one; here that row is in the loss with
        advantage 0, for of several that are equal none is the one. [10] has two rollouts a prompt; the mean over the
        others for more is ours.
    """
    if over_batch is None:
        batch = whole_batch(groups)
        over_batch = lambda value, centre: over_std(minus_mean(value, batch) if centre else value, batch)
    has_others = groups.valid & (group_count(groups) > 1)
    reward = jnp.where(groups.valid, reward, 0.0)

    def parts_over_their_std() -> Float[Array, " B"]:
        columns = zip(part_weights, jnp.moveaxis(jnp.where(groups.valid[:, None], parts, 0.0), 1, 0), strict=True)
        return sum(w * over_std(minus_mean(part, groups), groups) for w, part in columns)

    kinds = {
        "grpo": lambda: over_std(minus_mean(reward, groups), groups),
        "dr_grpo": lambda: minus_mean(reward, groups),
        "leave_one_out": lambda: minus_mean(reward, groups) * _over_others(group_count(groups)),
        "reinforce_pp": lambda: over_batch(reward, True),
        "brorl": lambda: over_batch(minus_mean(reward, groups), False),
        "asymre": lambda: jnp.where(has_others, minus_mean(reward, groups) - delta_v, 0.0),
        "mc_grpo": lambda: minus_median(reward, groups),
        "gdpo": lambda: over_batch(parts_over_their_std(), False),
        "mssr": lambda: over_batch(reward - baseline, True),
        "poise": lambda: jnp.where(has_others, reward - mean_of_others(baseline, groups), 0.0),
        "gae": lambda: reward,
    }
    if kind not in kinds:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(map(repr, kinds))}")
    return kinds[kind]()


def _over_others(count: Float[Array, " B"]) -> Float[Array, " B"]:
    return count / jnp.maximum(count - 1.0, 1.0)
