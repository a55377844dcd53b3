"""Checksums of arrays by their values.

The checksum depends on the bits of the array only. It does not depend on the device, the sharding or the memory space.

Owns: the sum. Does not know: files, devices, which arrays are compared.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped, UInt32

from jaxrl_llm.ops.ring_buffer import where_it_lies

MULTIPLIER = 2654435769  # 2^32 divided by the golden ratio, rounded to an odd number
TERMS_PER_STEP = 32  # terms that a CPU adds before it writes a partial sum


@jax.jit
def checksum(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Return the sum of the elements' bits b_i, each weighted by an odd number of its index i in row-major order.

        sum_i w_i m(b_i),  m(b) = b xor (b >> 16),  w_i = h_i xor (h_i >> 16) or 1,  h_i = 2654435769 i   (all mod 2^32)

    A change of one element always changes the checksum, because m is one to one and w_i is odd. A change of several
    elements is missed about once in 2^31 times. Without m, exchanging x and -x would never be noticed. The checksum of
    an empty array and of zeros is 0.

    Args:
        x: any shape, elements of at most 32 bits.

    Returns:
        [] u32.
    """
    offsets = []
    for dim, size in enumerate(x.shape):
        stride = np.uint32(math.prod(x.shape[dim + 1 :]) % 2**32)
        offsets.append(stride * jnp.arange(size, dtype=jnp.uint32))

    def on_device(x: Array, *offsets: Array) -> Array:
        # On a CPU, the program of a long sum would write all terms to one more array. On a TPU, the program of short
        # sums would do so.
        return jax.lax.platform_dependent(
            x,
            *offsets,
            cpu=partial(_weighted_sum, True),
            default=partial(_weighted_sum, False),
        )

    result = where_it_lies(on_device, x, *offsets)
    return jax.device_put(result, jax.memory.Space.Device)


def _weighted_sum(in_steps: bool, x: Array, *offsets: Array) -> Array:
    """Return the sum of the weighted bits of ``x``.

    Args:
        in_steps: add short runs of terms first.
        offsets: for each dimension, the offset of every index in row-major order.
    """
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    index = np.uint32(0)
    for dim, offset in enumerate(offsets):
        other_dims = [*range(dim), *range(dim + 1, x.ndim)]
        index = index + jnp.expand_dims(offset, other_dims)
    hashed_index = index * np.uint32(MULTIPLIER)
    mixed = bits ^ (bits >> 16)
    weight = (hashed_index ^ (hashed_index >> 16)) | 1
    terms = mixed * weight
    if in_steps:
        size = x.shape[-1] if x.ndim else 1
        run = math.gcd(size, TERMS_PER_STEP)
        runs = terms.reshape(*x.shape[:-1], -1, run)
        sums = jnp.sum(runs, axis=-1, dtype=jnp.uint32)
        terms = jax.lax.optimization_barrier(sums)
    return jnp.sum(terms, dtype=jnp.uint32)


@jax.jit
def checksums(tree: PyTree[Shaped[Array, "..."]]) -> UInt32[Array, " K"]:
    """Return ``checksum`` of each of the K leaves in the order of ``jax.tree.leaves``, [K] u32."""
    sums = [checksum(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.array(sums, jnp.uint32)
