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

STD_EPSILON = 1e-6


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


def group_rows(index: Int[Array, " B"], valid: Bool[Array, " B"], num_groups: int) -> Groups:
    """Return the ``Groups`` of rows with ``index`` [B] i32 in [0, Q) and ``valid`` [B] bool."""
    return Groups(index, (index[None, :] == jnp.arange(num_groups)[:, None]) & valid[None, :])


def whole_batch(groups: Groups) -> Groups:
    """Return one group, Q = 1, of all valid rows. Its ``member`` is [1, B]."""
    return Groups(jnp.zeros_like(groups.index), groups.valid[None, :])


def group_sum(value: Float[Array, " B"], groups: Groups) -> Float[Array, " B"]:
    """Return the sum of ``value`` [B] f32 over the valid rows of each row's group, [B] f32."""
    return jnp.sum(jnp.where(groups.member, value[None, :], 0.0), axis=1)[groups.index]


def group_count(groups: Groups) -> Float[Array, " B"]:
    """Return the number of valid rows of each row's group, [B] f32."""
    return jnp.sum(groups.member, axis=1).astype(jnp.float32)[groups.index]


def group_mean(value: Float[Array, " B"], groups: Groups) -> Float[Array, " B"]:
    """Return the mean of ``value`` [B] f32 over the valid rows of each row's group, [B] f32; 0 for an empty group."""
    return group_sum(value, groups) / jnp.maximum(group_count(groups), 1.0)


def group_range(value: Float[Array, " B"], groups: Groups) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Return the lowest and the highest ``value`` [B] f32 of each row's group, each [B] f32.

    The range of an empty group is (inf, -inf).
    """
    lowest = jnp.min(jnp.where(groups.member, value[None, :], jnp.inf), axis=1)
    highest = jnp.max(jnp.where(groups.member, value[None, :], -jnp.inf), axis=1)
    return lowest[groups.index], highest[groups.index]


def is_untied(value: Float[Array, " B"], groups: Groups) -> Bool[Array, " B"]:
    """Return the valid rows whose group has at least two different values, [B] bool.

    The test compares values. A test of the standard deviation would fail: in float32 the mean of equal values can
    differ from the values, and a tiny standard deviation would amplify the difference.
    """
    lowest, highest = group_range(value, groups)
    return groups.valid & (highest > lowest)


def minus_mean(value: Float[Array, " B"], groups: Groups) -> Float[Array, " B"]:
    """Return ``value - mean`` of the group, [B] f32; exactly 0 in a tied group.

    Args:
        value: [B] f32, finite for valid rows.
    """
    mean = group_mean(jnp.where(groups.valid, value, 0.0), groups)
    return jnp.where(is_untied(value, groups), value - mean, 0.0)


def minus_median(value: Float[Array, " B"], groups: Groups) -> Float[Array, " B"]:
    """Return ``value - median`` of the group, [B] f32; exactly 0 in a tied group.

    The median of an even number of values is the mean of the middle two.
    """
    # Sort the rows once, by group and value. A sort of the membership table would gather the table over the mesh.
    num_groups = groups.member.shape[0]
    _, ordered = jax.lax.sort((jnp.where(groups.valid, groups.index, num_groups), value), num_keys=2)
    count = jnp.sum(groups.member, axis=1)
    start = jnp.cumsum(count) - count

    def nth_smallest(n: Array) -> Array:
        return ordered[jnp.minimum(start + jnp.maximum(n, 0), value.shape[0] - 1)]

    middle_sum = nth_smallest((count - 1) // 2) + nth_smallest(count // 2)
    median = (0.5 * middle_sum)[groups.index]
    return jnp.where(is_untied(value, groups), value - median, 0.0)


def mean_of_others(value: Float[Array, " B"], groups: Groups) -> Float[Array, " B"]:
    """Return the mean of ``value`` [B] f32 over the other valid rows of the group, [B] f32; 0 if there are none."""
    own = jnp.where(groups.valid, value, 0.0)
    num_others = group_count(groups) - groups.valid.astype(jnp.float32)
    mean = (group_sum(value, groups) - own) / jnp.maximum(num_others, 1.0)
    return jnp.where(num_others > 0, mean, 0.0)


def over_std(value: Float[Array, " B"], groups: Groups) -> Float[Array, " B"]:
    """Return ``value / (std + 1e-6)`` with the population standard deviation of the group's values, [B] f32.

    Subtract the mean first. The standard deviation of equal values is 0, so the division would enlarge any value but 0.
    """
    value = jnp.where(groups.valid, value, 0.0)
    variance = group_mean(jnp.square(minus_mean(value, groups)), groups)
    return value / (jnp.sqrt(variance) + STD_EPSILON)


def whiten(value: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Return ``(value - mean) / (std + 1e-6)`` over all tokens of the mask, [B, T].

    The result is 0 outside the mask, and everywhere if all values are equal.
    """
    valid = mask.reshape(-1)
    tokens = Groups(jnp.zeros(valid.shape, jnp.int32), valid[None, :])
    return over_std(minus_mean(value.reshape(-1), tokens), tokens).reshape(value.shape)


def running_moments(
    value: Float[Array, "*any"],
    valid: Bool[Array, "*any"],
    moments: Float[Array, "3"],
    *,
    decay: float,
) -> Float[Array, "3"]:
    """Return count, mean and sum of squared deviations of the valid values of this batch and earlier batches, [3] f32.

        n = d n0 + n1,   mean = m0 + (m1 - m0) n1 / n,   sum = d s0 + s1 + (m1 - m0)^2 d n0 n1 / n

    Here n0, m0, s0 are the ``moments`` of earlier batches and n1, m1, s1 those of this batch. Every new batch
    multiplies the weight of the earlier batches by d = ``decay``. If all values are equal, the mean is exact and the
    sum is exactly 0.

    Source: Hilton et al. 2021, arXiv:2110.00641 (released code, ``EwmaMoments``). Merged as in Chan et al. 1979,
    because
        a float32 sum of squares loses the deviations of values far from 0.
    """
    valid = valid.ravel()
    value = value.ravel()
    count = jnp.sum(valid, dtype=jnp.float32)
    lowest = jnp.min(jnp.where(valid, value, jnp.inf))
    highest = jnp.max(jnp.where(valid, value, -jnp.inf))
    mean = jnp.where(
        lowest == highest,
        highest,
        jnp.sum(jnp.where(valid, value, 0.0)) / jnp.maximum(count, 1.0),
    )
    squares = jnp.sum(jnp.where(valid, jnp.square(value - mean), 0.0))
    old_count = decay * moments[0]
    old_mean = moments[1]
    total = jnp.maximum(old_count + count, jnp.finfo(jnp.float32).tiny)
    gap = jnp.where(old_count > 0, mean - old_mean, 0.0)
    merged = [
        old_count + count,
        jnp.where(old_count > 0, old_mean + gap * (count / total), mean),
        decay * moments[2] + squares + jnp.square(gap) * (old_count * (count / total)),
    ]
    unchanged = [old_count, old_mean, decay * moments[2]]
    return jnp.where(count > 0, jnp.stack(merged), jnp.stack(unchanged))


def over_moments(value: Float[Array, "*any"], moments: Float[Array, "3"], *, centre: bool) -> Float[Array, "*any"]:
    """Return the values, divided by the standard deviation of ``running_moments`` [n, mean, sum].

        out = (value - mean) / (sqrt(sum / n) + 1e-6)

    Args:
        value: f32 of any shape.
        centre: subtract the mean; otherwise the numerator is ``value``.
    """
    std = jnp.sqrt(moments[2] / jnp.maximum(moments[0], jnp.finfo(jnp.float32).tiny))
    numerator = value - moments[1] if centre else value
    return numerator / (std + STD_EPSILON)
