"""Credit: rewards of rollouts become advantages of tokens.

Owns: grouping by ``group_id``, spreading a row's advantage over its completion, what a failed reward means
(no part in the group, no training). Does not know: how rewards are scored, the ring, the loss.
Letters: B rows, S row width, Q groups. Device functions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.config import CreditConfig
from jaxrl_llm.ops.advantages import group_advantages
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.types import Experience, Rollout

# Stands in for the group of rows without a reward; sorts after every real group_id.
_NO_GROUP = jnp.iinfo(jnp.int32).max


def assign(
    rollout: Rollout,
    reward: jax.Array,
    trainable: jax.Array,
    ref_logp: jax.Array | None,
    *,
    config: CreditConfig,
    num_groups: int,
) -> tuple[Experience, jax.Array]:
    """Advantages of one iteration's rollouts.

    Rows of a group are those of equal ``group_id``, wherever they stand; equal text does not merge groups. A
    row that is not trainable takes no part in its group's baseline and has advantage 0.

    Args:
        rollout: B rows.
        reward: [B] f32; finite where trainable, ignored elsewhere.
        trainable: [B] bool, False where the reward failed or the row is padding.
        ref_logp: [B, S] f32 nats of the frozen reference, or None.
        config: which advantage.
        num_groups: Q, different group ids among the trainable rows at most; the iteration's prompts.

    Returns:
        The experience, and the number [] i32 of the Q groups that teach nothing (tied, or with fewer than 2
        known rewards).
    """
    group_id = jnp.where(trainable, rollout.group_id, _NO_GROUP)
    _, group_index = jnp.unique(group_id, size=num_groups + 1, fill_value=_NO_GROUP, return_inverse=True)
    reward = jnp.where(trainable, reward, 0.0)
    advantage, has_signal = group_advantages(
        reward, group_index, trainable, num_groups=num_groups + 1, kind=config.advantage
    )
    mask_BS = completion_mask(rollout.prompt_length, rollout.length, rollout.tokens.shape[1])
    experience = Experience(
        rollout=rollout,
        reward=reward,
        advantage=jnp.where(mask_BS, advantage[:, None], 0.0),
        trainable=trainable,
        ref_logp=ref_logp,
    )
    return experience, num_groups - jnp.sum(has_signal, dtype=jnp.int32)
