"""Which positions of a row count.

Masks come from lengths and policy versions, never from the value of a token. Owns: which positions are of the
completion, which of them the policy drew. Does not know: tokens, end-of-sequence ids, who reads the mask. Letters: B
rows, T row width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int


def completion_mask(
    prompt_length: Int[ArrayLike, " B"], length: Int[ArrayLike, " B"], width: int
) -> Bool[Array, "B {width}"]:
    """True at ``prompt_length <= t < length``: all after the prompt, the end-of-sequence token among them.

    Args:
        prompt_length: [B] i32, tokens of the prompt.
        length: [B] i32, prompt + completion; the end-of-sequence token is counted.
        width: T, positions in a row.

    Returns:
        [B, T] bool.

    Example:
        >>> completion_mask(jnp.array([1]), jnp.array([3]), 4)
        Array([[False,  True,  True, False]], dtype=bool)
    """
    position_1T = jnp.arange(width)[None, :]
    return (position_1T >= prompt_length[:, None]) & (position_1T < length[:, None])


def sampled_mask(
    prompt_length: Int[ArrayLike, " B"], length: Int[ArrayLike, " B"], policy_version: Int[ArrayLike, "B T"]
) -> Bool[Array, "B T"]:
    """[B, T] bool of the completion's tokens: those that a policy drew, whose ``policy_version`` is 0 or more.

    An environment wrote the others, between the policy's turns.

    Example:
        >>> sampled_mask(jnp.array([1]), jnp.array([4]), jnp.array([[-1, 0, -1, 2, -1]]))
        Array([[False,  True, False,  True, False]], dtype=bool)
    """
    policy_version = jnp.asarray(policy_version)
    return completion_mask(prompt_length, length, policy_version.shape[1]) & (policy_version >= 0)
