"""Which positions of a row count.

Masks come from lengths, never from the value of a token. Owns: the completion mask. Does not know:
tokens, end-of-sequence ids, who reads the mask. Letters: B rows, T row width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int


def completion_mask(
    prompt_length: Int[ArrayLike, " B"], length: Int[ArrayLike, " B"], width: int
) -> Bool[Array, "B {width}"]:
    """True at ``prompt_length <= t < length``: the sampled tokens, the end-of-sequence token among them.

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
