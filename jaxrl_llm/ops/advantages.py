"""Advantages of rollouts from the rewards of their group.

Owns: baselines and scales over groups. Does not know: tokens, masks, where rewards come from.
Letters: B rows, Q groups. Groups are named by an index per row, never by position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

STD_EPSILON = 1e-6


def group_advantages(
    reward: jax.Array, group_index: jax.Array, valid: jax.Array, *, num_groups: int, kind: str
) -> tuple[jax.Array, jax.Array]:
    """Reward against the other rewards of its group; mean, std and n are over the group's valid members.

        "grpo"           A_i = (r_i - mean) / (std + 1e-6)        population std (ddof = 0)
        "dr_grpo"        A_i = r_i - mean
        "leave_one_out"  A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean)

    A tied group (max == min) gives exactly 0, and so do a group with fewer than 2 valid members and a row
    that is not valid. The tie is tested explicitly: in float32 the mean of equal rewards need not equal
    them, and a tiny std would amplify what is left.

    Sums run over a [Q, B] membership table rather than a scatter, whose order of addition varies on a GPU.

    Args:
        reward: [B] f32, unitless; finite where valid, ignored elsewhere.
        group_index: [B] i32 in [0, Q).
        valid: [B] bool, rows whose reward is known.
        num_groups: Q.
        kind: one of the three above.

    Returns:
        advantage: [B] f32, in units of reward ("grpo": of the group's std).
        has_signal: [Q] bool, groups with an advantage other than 0.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; mean alone, Liu et al. 2025, arXiv:2503.20783;
        leave-one-out, Ahmadian et al. 2024, arXiv:2402.14740. Differs: the explicit tie, the valid members.
    """
    member_QB = (group_index[None, :] == jnp.arange(num_groups)[:, None]) & valid[None, :]
    reward = jnp.where(valid, reward, 0.0)
    count_Q = jnp.sum(member_QB, axis=1)
    highest_Q = jnp.max(jnp.where(member_QB, reward[None, :], -jnp.inf), axis=1)
    lowest_Q = jnp.min(jnp.where(member_QB, reward[None, :], jnp.inf), axis=1)
    has_signal_Q = (count_Q >= 2) & (highest_Q > lowest_Q)

    divisor_Q = jnp.maximum(count_Q, 1).astype(jnp.float32)
    mean_Q = jnp.sum(jnp.where(member_QB, reward[None, :], 0.0), axis=1) / divisor_Q
    centred = reward - mean_Q[group_index]
    if kind == "grpo":
        variance_Q = jnp.sum(jnp.where(member_QB, jnp.square(centred)[None, :], 0.0), axis=1) / divisor_Q
        scale_Q = 1.0 / (jnp.sqrt(variance_Q) + STD_EPSILON)
    elif kind == "dr_grpo":
        scale_Q = jnp.ones_like(mean_Q)
    elif kind == "leave_one_out":
        scale_Q = divisor_Q / jnp.maximum(divisor_Q - 1.0, 1.0)
    else:
        raise ValueError(f"kind={kind!r} is not one of 'grpo', 'dr_grpo', 'leave_one_out'")
    advantage = jnp.where(valid & has_signal_Q[group_index], centred * scale_Q[group_index], 0.0)
    return advantage, has_signal_Q
