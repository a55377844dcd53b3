"""Grouped-query attention of new tokens to a cached prefix and, causally, to themselves.

One function serves the learner (no prefix), the prefill (no prefix) and the decode step (one new token
and a prefix): the same arithmetic, so that sampler and learner agree. Rows are right-padded, so a real
query never sees padding among the new tokens: padding comes after it.

Letters: B rows, T new tokens, S cached keys, N query heads, K key heads, R = N/K, H head size.
Does not know: parameters, rotary positions, where the cache comes from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.presets import Architecture


def attend(
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    *,
    prefix: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Softmax attention, scores and softmax in float32.

    Args:
        q_BTNH: queries, rotated.
        k_BKTH, v_BKTH: keys (rotated) and values of the same T new tokens.
        prefix: keys [B,K,S,H] and values [B,K,S,H] of the cache, and which of them to see, [B,S] bool.

    Returns:
        [B,T,N,H] in the dtype of the queries.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BKTH.shape[1]
    q = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5)
    causal = jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.einsum("BTKRH,BKSH->BKRTS", q, k_BKTH, preferred_element_type=jnp.float32)
    scores = jnp.where(causal[None, None, None], scores, -jnp.inf)
    if prefix is None:
        probs = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        out = jnp.einsum("BKRTS,BKSH->BTKRH", probs, v_BKTH)
    else:
        k_BKSH, v_BKSH, visible_BS = prefix
        S = k_BKSH.shape[2]
        old = jnp.einsum("BTKRH,BKSH->BKRTS", q, k_BKSH, preferred_element_type=jnp.float32)
        old = jnp.where(visible_BS[:, None, None, None, :], old, -jnp.inf)
        probs = jax.nn.softmax(jnp.concatenate([old, scores], axis=-1), axis=-1).astype(q.dtype)
        out = jnp.einsum("BKRTS,BKSH->BTKRH", probs[..., :S], v_BKSH)
        out += jnp.einsum("BKRTS,BKSH->BTKRH", probs[..., S:], v_BKTH)
    return out.reshape(B, T, N, H)


def rope_frequencies(arch: Architecture) -> np.ndarray:
    """Angular frequency of each rotated pair, [H/2] float64 radians per position.

    Plain: theta^(-2i/H). With Llama 3 scaling, wavelengths above ``original/low`` are divided by
    ``factor``, those below ``original/high`` kept, and between them interpolated linearly in
    original/wavelength. Source: Llama 3.1 reference code; same as transformers' ``llama3`` rope type.
    """
    freq = arch.rope_theta ** (-np.arange(0, arch.head_size, 2, dtype=np.float64) / arch.head_size)
    scaling = arch.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_max_positions * freq / (2 * np.pi)  # rotations over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return freq * (keep + (1 - keep) / scaling.factor)


def rope_tables(arch: Architecture, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, two [B,T,H/2] float32."""
    freq = jnp.asarray(rope_frequencies(arch), jnp.float32)
    angle = positions[..., None].astype(jnp.float32) * freq[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding on the two halves of the head, as Hugging Face lays Llama's weights out."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
