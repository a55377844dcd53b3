"""Random keys by name: every key is ``fold_in(fold_in(root, stream), ids...)``.

Each use of random numbers has its own stream, and each row has an id. Therefore a random number does not depend on
other random numbers or on the order of the draws.

Owns: the numbers of the streams, the noise of a token. Does not know: distributions, the use of the random numbers.
"""

from __future__ import annotations

import jax

# Runs are reproducible only if a stream keeps its number: append streams, never renumber them.
STREAMS = {"sample": 0, "draw": 1, "init": 2, "eval": 3, "lora": 4}


def stream(seed: int, name: str) -> jax.Array:
    """Return the key of one stream, derived from the run's root seed."""
    return jax.random.fold_in(jax.random.key(seed), STREAMS[name])


def token_uniform(
    key: jax.Array,
    group_id: jax.Array,
    sample_index: jax.Array,
    token_index: jax.Array,
) -> jax.Array:
    """Draw one uniform number in [0,1) per row. The number depends only on (stream, prompt, sample, token).

    Args:
        key: the key of a stream.
        group_id, sample_index, token_index: [Z] i32.

    Returns:
        [Z] f32.
    """

    def of_row(group_id: jax.Array, sample_index: jax.Array, token_index: jax.Array) -> jax.Array:
        prompt_key = jax.random.fold_in(key, group_id)
        sample_key = jax.random.fold_in(prompt_key, sample_index)
        token_key = jax.random.fold_in(sample_key, token_index)
        return jax.random.uniform(token_key)

    return jax.vmap(of_row)(group_id, sample_index, token_index)
