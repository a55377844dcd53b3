"""Named randomness: every key is ``fold_in(fold_in(root, stream), ids...)``, so no draw depends on another.

Owns: the streams. Does not know: what is drawn.
"""

from __future__ import annotations

import jax

# A stream's number is part of what makes a run reproducible: append, never renumber.
STREAMS = {"sample": 0, "draw": 1, "init": 2, "eval": 3, "lora": 4}


def stream(seed: int, name: str) -> jax.Array:
    """Key of one stream of the run's root seed."""
    return jax.random.fold_in(jax.random.key(seed), STREAMS[name])


def token_uniform(key: jax.Array, group_id: jax.Array, sample_index: jax.Array, token_index: jax.Array) -> jax.Array:
    """One uniform in [0,1) per row, of (stream, prompt, sample, token) alone.

    Args:
        key: a stream's key.
        group_id, sample_index, token_index: [Z] i32.

    Returns:
        [Z] f32.
    """

    def one(prompt, sample, token):
        row = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, prompt), sample), token)
        return jax.random.uniform(row)

    return jax.vmap(one)(group_id, sample_index, token_index)
