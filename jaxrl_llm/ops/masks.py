"""Masks of the positions of a row: the completion, and the tokens that the policy sampled.

Masks come from lengths and policy versions, never from the value of a token.

Letters: B rows, T row width.
Owns: the rules for both masks. Does not know: tokens, end-of-sequence ids, the readers of the mask.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def completion_mask(
    prompt_length: Int[Array, " B"],
    length: Int[Array, " B"],
    width: int,
) -> Bool[Array, "B {width}"]:
    """Return the mask ``prompt_length <= t < length``: all tokens after the prompt, with the end-of-sequence token.

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
    is_after_prompt = position_1T >= prompt_length[:, None]
    is_in_row = position_1T < length[:, None]
    return is_after_prompt & is_in_row


def sampled_mask(
    prompt_length: Int[Array, " B"],
    length: Int[Array, " B"],
    policy_version: Int[Array, "B T"],
) -> Bool[Array, "B T"]:
    """Return the mask [B, T] of the completion tokens that a policy sampled: their ``policy_version`` is 0 or more.

    An environment wrote the other tokens of the completion, between the policy's turns.

    Example:
        >>> sampled_mask(jnp.array([1]), jnp.array([4]), jnp.array([[-1, 0, -1, 2, -1]]))
        Array([[False,  True, False,  True, False]], dtype=bool)
    """
    width = policy_version.shape[1]
    is_completion = completion_mask(prompt_length, length, width)
    is_of_policy = policy_version >= 0
    return is_completion & is_of_policy
