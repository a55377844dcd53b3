"""Which tokens may be drawn: temperature, top-k, top-p and min-p, and what they leave of the vocabulary.

Sampler and learner pass their logits through the same ``filter_logits``, or where a filter leaves tokens out the
learner takes what the sampler kept (``support_of``), so that a log-probability is always of the distribution that was
sampled. Letters, and what ``axis`` is: ``ops.sampling``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Float32, Int

# Among the ids of a support: nothing, in a vocabulary of any size.
NO_TOKEN = jnp.iinfo(jnp.int32).max


class Filter(NamedTuple):
    """Settings of the distribution that tokens are drawn from."""

    temperature: float  # above 0
    top_k: int  # 0 = all
    top_p: float  # in (0, 1]; 1.0 = all
    min_p: float  # in [0, 1]; 0.0 = all

    @classmethod
    def of(cls, sampling: Any) -> Filter:
        """Those of a config that calls them so."""
        return cls(*(getattr(sampling, name) for name in cls._fields))

    def leaves_out(self, vocab_size: int) -> bool:
        """Whether any token may be impossible."""
        return 0 < self.top_k < vocab_size or self.top_p < 1 or self.min_p > 0


def filter_logits(
    logits: Float[ArrayLike, "*rows V"], settings: Filter, *, keep_token: Int[ArrayLike, "*rows"] | None = None
) -> Float32[ArrayLike, "*rows V"]:
    """Tempered logits with the tokens that may not be sampled at ``-inf``.

    In this order: divide by the temperature; keep the ``top_k`` largest; of what is left, renormalised, keep the
    smallest set with mass of at least ``top_p``; keep ``p >= min_p * max p``. Tokens equal to the last one kept are
    kept too (here: ``support_of`` cuts them), so the result does not depend on the order of the vocabulary. The most
    likely token always stays. The settings are Python numbers: one that is off (0, 1.0, 0.0) adds nothing to the
    program. Which tokens stay is a constant to differentiation.

    Args:
        logits: [..., V]; computed in float32.
        keep_token: [...] i32, a token of each row that stays whatever the filters say. For the learner: as the policy
            moves, or by rounding at the threshold, a token sampled earlier can leave the support, and its
            log-probability would be -inf. (Of a run's rollouts the support itself is kept: ``support_of``.)

    Returns:
        [..., V] f32.

    Source: top-p, Holtzman et al. 2020, arXiv:1904.09751, section 3.1; min-p, Nguyen et al. 2024,
        arXiv:2407.01082, section 3. Differs: ties at a threshold are kept.
    """
    temperature, top_k, top_p, min_p = settings
    assert temperature > 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1
    tempered = logits.astype(jnp.float32)
    if temperature != 1:
        tempered = tempered / temperature
    constant = jax.lax.stop_gradient(tempered)
    kept = constant
    if 0 < top_k < logits.shape[-1]:
        kept = _keep_largest(kept, jnp.ones_like(kept), top_k)
    if top_p < 1:
        kept = _keep_largest(kept, jax.nn.softmax(kept, axis=-1), top_p)
    if min_p > 0:
        threshold = jnp.max(kept, axis=-1, keepdims=True) + math.log(min_p)
        kept = jnp.where(kept >= threshold, kept, -jnp.inf)
    if kept is constant:
        return tempered
    is_kept = kept > -jnp.inf
    if keep_token is not None:
        token_ids = jnp.arange(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
        is_kept = is_kept | (token_ids == keep_token[..., None])
    return jnp.where(is_kept, tempered, -jnp.inf)


def support_of(logits: Float[ArrayLike, "S V"], size: int, axis: tuple[str, ...] = ()) -> Int[Array, "S {size}"]:
    """The tokens that may be sampled, ``size`` of them at most: of more that are tied at the end, the first ones.

    Args:
        logits: [S, V], already filtered; -inf = impossible.

    Returns:
        [S, size] i32 ascending ids, ``NO_TOKEN`` past the last.
    """
    value, token = jax.lax.top_k(logits, min(size, logits.shape[-1]))
    if axis:  # of each device's candidates; equal ones stay in the order of the vocabulary
        token += jax.lax.axis_index(axis) * logits.shape[-1]
        value, token = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (value, token))
        value, place = jax.lax.top_k(value, size)
        token = jnp.take_along_axis(token, place, axis=1)
    return jnp.sort(jnp.where(value > -jnp.inf, token, NO_TOKEN).astype(jnp.int32), axis=-1)


def keep_support(
    logits: Float[ArrayLike, "S V"], support: Int[ArrayLike, "S K"], axis: tuple[str, ...] = ()
) -> Float[Array, "S V"]:
    """``logits`` [S, V] at the ids ``support`` [S, K] i32, -inf elsewhere."""
    if axis:  # ids of this device's part; a negative one would count from its end
        support = support - jax.lax.axis_index(axis) * logits.shape[1]
        support = jnp.where(support < 0, NO_TOKEN, support)
    # Row by row: with the rows in the index, a mesh would gather it.
    is_kept = jax.vmap(lambda ids: jnp.zeros(logits.shape[1], bool).at[ids].set(True, mode="drop"))(support)
    return jnp.where(is_kept, logits, -jnp.inf)


def _keep_largest(
    values: Float[ArrayLike, "*rows V"], weight: Float[ArrayLike, "*rows V"], target: float
) -> Float[Array, "*rows V"]:
    """``values`` [..., V] down to the largest t with ``sum(weight where values >= t) >= target``, -inf below it.

    t is built bit by bit, on integers in the order of the floats: 32 sums over the vocabulary. Exact, and on a CPU
    several times faster than sorting it.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)  # -0.0 equals 0.0
    # Floats compare as their bits when positive and in reverse when negative.
    rank = jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))), jnp.uint32)

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(2**31) >> i.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(rank >= candidate, weight, 0.0), axis=-1, keepdims=True)
        return jnp.where(mass >= target, candidate, threshold)

    lowest = jnp.zeros((*values.shape[:-1], 1), jnp.uint32)
    return jnp.where(rank >= jax.lax.fori_loop(0, 32, set_bit, lowest), values, -jnp.inf)
