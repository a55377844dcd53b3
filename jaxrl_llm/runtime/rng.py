"""Named streams of random numbers: every key is ``fold_in(fold_in(root, stream), ids...)``.

No draw depends on another draw or on the order of the draws.

Owns: the streams. Does not know: what is drawn.
"""

from __future__ import annotations

import jax

# Runs are reproducible only if a stream keeps its number: append streams, never renumber them.
STREAMS = {"sample": 0, "draw": 1, "init": 2, "eval": 3, "lora": 4}


def stream(seed: int, name: str) -> jax.Array:
    """Return the key of one stream, derived from the run's root seed."""
    return jax.random.fold_in(jax.random.key(seed), STREAMS[name])


def token_uniform(key: jax.Array, group_id: jax.Array, sample_index: jax.Array, token_index: jax.Array) -> jax.Array:
    """Draw one uniform number in [0,1) per row. It depends only on (stream, prompt, sample, token).

    Args:
        key: the key of a stream.
        group_id, sample_index, token_index: [Z] i32.

    Returns:
        [Z] f32.
    """

    def one(prompt, sample, token):
        row = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, prompt), sample), token)
        return jax.random.uniform(row)

    return jax.vmap(one)(group_id, sample_index, token_index)
