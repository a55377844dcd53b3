"""Statistics of rows within groups: sums, means, medians, standard deviations, running moments.

Small functions from one value per row to one value per row. A group is a set of rows: the samples of a prompt, or the
whole batch. A row that is not valid is left out of every sum, and its result is 0.

Owns: ``Groups`` and the statistics. Does not know: the meaning of the values.
Letters: B rows, T row width, Q groups. A row's group is given by an index, never by the position of the row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# One number for each row, [B] f32.
PerRow = Float[Array, " B"]

STD_EPSILON = 1e-6
TINY = jnp.finfo(jnp.float32).tiny  # smallest normal float32; avoids a division by 0


class Groups(NamedTuple):
    """Assignment of rows to groups.

    Sums use the membership table instead of a scatter, because the order of a scatter's additions varies on a GPU.
    """

    index: Array  # [B] i32 in [0, Q)
    member: Array  # [Q, B] bool, valid rows of each group

    @property
    def valid(self) -> Bool[Array, " B"]:
        """Valid rows, [B] bool."""
        return jnp.any(self.member, axis=0)


def group_rows(
    index: Int[Array, " B"],
    valid: Bool[Array, " B"],
    num_groups: int,
) -> Groups:
    """Return the ``Groups`` of rows with ``index`` [B] i32 in [0, Q) and ``valid`` [B] bool."""
    group_number = jnp.arange(num_groups)[:, None]
    is_in_group = index[None, :] == group_number
    return Groups(index, is_in_group & valid[None, :])


def whole_batch(groups: Groups) -> Groups:
    """Return one group, Q = 1, of all valid rows. Its ``member`` is [1, B]."""
    index = jnp.zeros_like(groups.index)
    return Groups(index, groups.valid[None, :])


def group_sum(value: PerRow, groups: Groups) -> PerRow:
    """Return the sum of ``value`` [B] f32 over the valid rows of each row's group, [B] f32."""
    value_of_members = jnp.where(groups.member, value[None, :], 0.0)
    total = jnp.sum(value_of_members, axis=1)
    return total[groups.index]


def group_count(groups: Groups) -> PerRow:
    """Return the number of valid rows of each row's group, [B] f32."""
    count = jnp.sum(groups.member, axis=1).astype(jnp.float32)
    return count[groups.index]


def group_mean(value: PerRow, groups: Groups) -> PerRow:
    """Return the mean of ``value`` [B] f32 over the valid rows of each row's group, [B] f32; 0 for an empty group."""
    total = group_sum(value, groups)
    count = group_count(groups)
    return total / jnp.maximum(count, 1.0)


def group_range(
    value: PerRow,
    groups: Groups,
) -> tuple[PerRow, PerRow]:
    """Return the lowest and the highest ``value`` [B] f32 of each row's group, each [B] f32.

    The range of an empty group is (inf, -inf).
    """
    value_or_inf = jnp.where(groups.member, value[None, :], jnp.inf)
    value_or_minus_inf = jnp.where(groups.member, value[None, :], -jnp.inf)
    lowest = jnp.min(value_or_inf, axis=1)
    highest = jnp.max(value_or_minus_inf, axis=1)
    return lowest[groups.index], highest[groups.index]


def is_untied(value: PerRow, groups: Groups) -> Bool[Array, " B"]:
    """Return the valid rows whose group has at least two different values, [B] bool.

    The test compares values. A test of the standard deviation would fail: in float32 the mean of equal values can
    differ from the values, and a tiny standard deviation would amplify the difference.
    """
    lowest, highest = group_range(value, groups)
    return groups.valid & (highest > lowest)


def minus_mean(value: PerRow, groups: Groups) -> PerRow:
    """Return ``value - mean`` of the group, [B] f32; exactly 0 in a tied group.

    Args:
        value: [B] f32, finite for valid rows.
    """
    valid_value = jnp.where(groups.valid, value, 0.0)
    mean = group_mean(valid_value, groups)
    return jnp.where(is_untied(value, groups), value - mean, 0.0)


def minus_median(value: PerRow, groups: Groups) -> PerRow:
    """Return ``value - median`` of the group, [B] f32; exactly 0 in a tied group.

    The median of an even number of values is the mean of the middle two.
    """
    # Sort the rows once, by group and value. A sort of the membership table would gather the table over the mesh.
    num_groups = groups.member.shape[0]
    last_place = value.shape[0] - 1
    group_or_last = jnp.where(groups.valid, groups.index, num_groups)
    _, ordered = jax.lax.sort((group_or_last, value), num_keys=2)
    count = jnp.sum(groups.member, axis=1)
    start = jnp.cumsum(count) - count

    def nth_smallest(n: Array) -> Array:
        """Return the n-th smallest value of each group, [Q], from n [Q] i32."""
        place = start + jnp.maximum(n, 0)
        return ordered[jnp.minimum(place, last_place)]

    lower_middle = nth_smallest((count - 1) // 2)
    upper_middle = nth_smallest(count // 2)
    median = 0.5 * (lower_middle + upper_middle)
    median_of_row = median[groups.index]
    return jnp.where(is_untied(value, groups), value - median_of_row, 0.0)


def mean_of_others(value: PerRow, groups: Groups) -> PerRow:
    """Return the mean of ``value`` [B] f32 over the other valid rows of the group, [B] f32; 0 if there are none."""
    own_value = jnp.where(groups.valid, value, 0.0)
    own_count = groups.valid.astype(jnp.float32)
    num_others = group_count(groups) - own_count
    sum_of_others = group_sum(value, groups) - own_value
    mean = sum_of_others / jnp.maximum(num_others, 1.0)
    return jnp.where(num_others > 0, mean, 0.0)


def over_std(value: PerRow, groups: Groups) -> PerRow:
    """Return ``value / (std + 1e-6)`` with the population standard deviation of the group's values, [B] f32.

    Subtract the mean first. The standard deviation of equal values is 0, so the division would enlarge any value but 0.
    """
    valid_value = jnp.where(groups.valid, value, 0.0)
    deviation = minus_mean(valid_value, groups)
    variance = group_mean(jnp.square(deviation), groups)
    std = jnp.sqrt(variance)
    return valid_value / (std + STD_EPSILON)


def whiten(value: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Return ``(value - mean) / (std + 1e-6)`` over all tokens of the mask, [B, T].

    The result is 0 outside the mask, and everywhere if all values are equal.
    """
    valid = mask.reshape(-1)
    index = jnp.zeros(valid.shape, jnp.int32)
    tokens = Groups(index, valid[None, :])
    deviation = minus_mean(value.reshape(-1), tokens)
    whitened = over_std(deviation, tokens)
    return whitened.reshape(value.shape)


def running_moments(
    value: Float[Array, "*any"],
    valid: Bool[Array, "*any"],
    moments: Float[Array, "3"],
    *,
    decay: float,
) -> Float[Array, "3"]:
    """Return count, mean and sum of squared deviations of the valid values of this batch and earlier batches, [3] f32.

        n = d n0 + n1,   mean = m0 + (m1 - m0) n1 / n,   sum = d s0 + s1 + (m1 - m0)^2 d n0 n1 / n

    Here n0, m0, s0 are the ``moments`` of earlier batches and n1, m1, s1 the moments of this batch. Every new batch
    multiplies the weight of the earlier batches by d = ``decay``. If all values are equal, the mean is exact and the
    sum is exactly 0.

    Source: Hilton et al. 2021, arXiv:2110.00641 (released code, ``EwmaMoments``). Merged as in Chan et al. 1979,
        because a float32 sum of squares loses the deviations of values far from 0.
    """
    count, mean, squares = _moments(value.ravel(), valid.ravel())
    old_count = decay * moments[0]
    old_mean = moments[1]
    old_squares = decay * moments[2]
    merged_count = old_count + count
    share = count / jnp.maximum(merged_count, TINY)
    gap = jnp.where(old_count > 0, mean - old_mean, 0.0)
    moved_mean = old_mean + gap * share
    merged_mean = jnp.where(old_count > 0, moved_mean, mean)
    squares_of_gap = jnp.square(gap) * (old_count * share)
    merged_squares = old_squares + squares + squares_of_gap
    merged = jnp.stack([merged_count, merged_mean, merged_squares])
    unchanged = jnp.stack([old_count, old_mean, old_squares])
    return jnp.where(count > 0, merged, unchanged)


def _moments(value: Array, valid: Array) -> tuple[Array, Array, Array]:
    """Return count, mean and sum of squared deviations of the valid values [N], each [] f32.

    The mean of equal values is exact: a sum divided by a count may differ from the values by a rounding error.
    """
    count = jnp.sum(valid, dtype=jnp.float32)
    lowest = jnp.min(jnp.where(valid, value, jnp.inf))
    highest = jnp.max(jnp.where(valid, value, -jnp.inf))
    total = jnp.sum(jnp.where(valid, value, 0.0))
    rounded_mean = total / jnp.maximum(count, 1.0)
    mean = jnp.where(lowest == highest, highest, rounded_mean)
    square = jnp.square(value - mean)
    squares = jnp.sum(jnp.where(valid, square, 0.0))
    return count, mean, squares


def over_moments(
    value: Float[Array, "*any"],
    moments: Float[Array, "3"],
    *,
    centre: bool,
) -> Float[Array, "*any"]:
    """Return the values, divided by the standard deviation of ``running_moments`` [n, mean, sum].

        out = (value - mean) / (sqrt(sum / n) + 1e-6)

    Args:
        value: f32 of any shape.
        centre: subtract the mean; otherwise the numerator is ``value``.
    """
    count = moments[0]
    squares = moments[2]
    variance = squares / jnp.maximum(count, TINY)
    std = jnp.sqrt(variance)
    numerator = value
    if centre:
        numerator = value - moments[1]
    return numerator / (std + STD_EPSILON)
