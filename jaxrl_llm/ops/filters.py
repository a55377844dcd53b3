"""Filters of the sampling distribution: temperature, top-k, top-p and min-p.

Sampler and learner pass their logits through the same ``filter_logits``. If a filter makes tokens impossible, the
learner uses the support that the sampler kept (``support_of``). A log-probability is therefore always one of the
distribution that was sampled.

Letters and the argument ``axis``: see ``ops.sampling``.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

# Id in the unused places of a support. No vocabulary has this id.
NO_TOKEN = jnp.iinfo(jnp.int32).max


@runtime_checkable
class SamplingSettings(Protocol):
    """Settings that have the fields of a ``Filter``, under the same names."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def min_p(self) -> float: ...


class Filter(NamedTuple):
    """Settings of the distribution that tokens are sampled from."""

    temperature: float  # above 0
    top_k: int  # 0 = all
    top_p: float  # in (0, 1]; 1.0 = all
    min_p: float  # in [0, 1]; 0.0 = all

    @classmethod
    def of(cls, sampling: SamplingSettings) -> Filter:
        """Return the filter with the settings of a config."""
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    def leaves_out(self, vocab_size: int) -> bool:
        """Return whether the filters can give a token probability 0."""
        return 0 < self.top_k < vocab_size or self.top_p < 1 or self.min_p > 0


def filter_logits(
    logits: Float[Array, "*rows V"],
    settings: Filter,
    *,
    keep_token: Int[Array, "*rows"] | None = None,
) -> Float32[Array, "*rows V"]:
    """Return the logits divided by the temperature, with ``-inf`` for every token that must not be sampled.

    The filters apply in this order:

    - temperature: divide by it.
    - top-k: keep the ``top_k`` largest logits.
    - top-p: renormalise, and keep the smallest set with a mass of at least ``top_p``.
    - min-p: keep ``p >= min_p * max p``.

    Tokens that are equal to the last kept token are kept too (``support_of`` cuts them). The result therefore does not
    depend on the order of the vocabulary. The most likely token always stays. Settings are Python numbers, and a filter
    that is off (0, 1.0, 0.0) adds nothing to the program. The set of kept tokens is constant for differentiation.

    Args:
        logits: [..., V]; computed in float32.
        keep_token: [...] i32, a token of each row that always stays. The learner passes the sampled token. When the
            policy changes, or because of rounding at the threshold, a sampled token can leave the set of kept tokens,
            and its log-probability would be -inf. (The rollouts of a run store the support itself: ``support_of``.)

    Returns:
        [..., V] f32.

    Source: top-p, Holtzman et al. 2020, arXiv:1904.09751, section 3.1; min-p, Nguyen et al. 2024,
        arXiv:2407.01082, section 3. Differs: ties at a threshold are kept.
    """
    temperature, top_k, top_p, min_p = settings
    assert temperature > 0
    assert top_k >= 0
    assert 0 < top_p <= 1
    assert 0 <= min_p <= 1
    vocab_size = logits.shape[-1]
    tempered = logits.astype(jnp.float32)
    if temperature != 1:
        tempered = tempered / temperature
    constant = jax.lax.stop_gradient(tempered)
    kept = constant
    if 0 < top_k < vocab_size:
        kept = _keep_largest(kept, jnp.ones_like(kept), top_k)
    if top_p < 1:
        probability = jax.nn.softmax(kept, axis=-1)
        kept = _keep_largest(kept, probability, top_p)
    if min_p > 0:
        maximum = jnp.max(kept, axis=-1, keepdims=True)
        threshold = maximum + math.log(min_p)
        kept = jnp.where(kept >= threshold, kept, -jnp.inf)
    if kept is constant:
        return tempered
    is_kept = kept > -jnp.inf
    if keep_token is not None:
        token_ids = jnp.arange(vocab_size).reshape((1,) * (logits.ndim - 1) + (-1,))
        is_kept = is_kept | (token_ids == keep_token[..., None])
    return jnp.where(is_kept, tempered, -jnp.inf)


def support_of(
    logits: Float[Array, "S V"],
    size: int,
    axis: tuple[str, ...] = (),
) -> Int[Array, "S {size}"]:
    """Return the ids of the possible tokens, at most ``size``. In a tie, the lowest ids are kept.

    Args:
        logits: [S, V], already filtered; -inf = impossible.

    Returns:
        [S, size] i32 ascending ids; ``NO_TOKEN`` after the last id.
    """
    num_tokens = logits.shape[-1]
    value, token = jax.lax.top_k(logits, min(size, num_tokens))
    if axis:
        # Choose among the candidates of all devices. Equal candidates stay in the order of the vocabulary.
        token += jax.lax.axis_index(axis) * num_tokens
        value = jax.lax.all_gather(value, axis, axis=1, tiled=True)
        token = jax.lax.all_gather(token, axis, axis=1, tiled=True)
        value, place = jax.lax.top_k(value, size)
        token = jnp.take_along_axis(token, place, axis=1)
    is_possible = value > -jnp.inf
    ids = jnp.where(is_possible, token, NO_TOKEN).astype(jnp.int32)
    return jnp.sort(ids, axis=-1)


def keep_support(
    logits: Float[Array, "S V"],
    support: Int[Array, "S K"],
    axis: tuple[str, ...] = (),
) -> Float[Array, "S V"]:
    """Return ``logits`` [S, V] with -inf at every id that is not in ``support`` [S, K] i32."""
    num_tokens = logits.shape[1]
    if axis:
        # Make ids relative to the part of this device. A negative id would count from the end of the part.
        first_id = jax.lax.axis_index(axis) * num_tokens
        support = support - first_id
        support = jnp.where(support < 0, NO_TOKEN, support)

    def mark(ids: Array) -> Array:
        unmarked = jnp.zeros(num_tokens, bool)
        return unmarked.at[ids].set(True, mode="drop")

    # Work row by row. If the index contained the rows, a mesh would gather the array.
    is_kept = jax.vmap(mark)(support)
    return jnp.where(is_kept, logits, -jnp.inf)


def _keep_largest(
    values: Float[Array, "*rows V"],
    weight: Float[Array, "*rows V"],
    target: float,
) -> Float[Array, "*rows V"]:
    """Return ``values`` [..., V] with -inf below a threshold t.

    t is the largest number with ``sum(weight where values >= t) >= target``. It is built bit by bit, on integers in the
    order of the floats, with 32 sums over the vocabulary. This is exact, and on a CPU several times faster than a sort.
    """
    unsigned_zero = jnp.where(values == 0, 0.0, values)  # -0.0 equals 0.0
    bits = jax.lax.bitcast_convert_type(unsigned_zero, jnp.int32)
    # The bits of positive floats sort like the floats. The bits of negative floats sort in reverse order.
    ordered_bits = jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31)))
    rank = jax.lax.bitcast_convert_type(ordered_bits, jnp.uint32)

    def set_bit(i: Array, threshold: Array) -> Array:
        bit = jnp.uint32(2**31) >> i.astype(jnp.uint32)
        candidate = threshold | bit
        kept_weight = jnp.where(rank >= candidate, weight, 0.0)
        mass = jnp.sum(kept_weight, axis=-1, keepdims=True)
        return jnp.where(mass >= target, candidate, threshold)

    lowest = jnp.zeros((*values.shape[:-1], 1), jnp.uint32)
    threshold = jax.lax.fori_loop(0, 32, set_bit, lowest)
    return jnp.where(rank >= threshold, values, -jnp.inf)
