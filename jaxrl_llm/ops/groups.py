"""Values of rows compared within groups: sums, means, medians, standard deviations, moments of batches.

Small functions from a value per row to a value per row, each over a set of rows (the samples of a prompt, or the whole
batch as one group). A row that is not valid takes no part in any sum and comes out 0.

Owns: ``Groups`` and what is computed over them. Does not know: what the values are.
Letters: B rows, T row width, Q groups. Groups are named by an index per row, never by position.
"""

from __future__ import annotations

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


def group_mean(value: Float[ArrayLike, " B"], groups: Groups) -> Float[Array, " B"]:
    """Mean of ``value`` [B] f32 over the valid rows of each row's group, [B] f32; 0 for an empty group."""
    return group_sum(value, groups) / jnp.maximum(group_count(groups), 1.0)


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
    mean = group_mean(jnp.where(groups.valid, value, 0.0), groups)
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
    variance = group_mean(jnp.square(minus_mean(value, groups)), groups)
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
