"""Log-probability and entropy of tokens from hidden states, a few positions at a time.

Only completion positions are projected to the vocabulary, one chunk of positions at a time. The backward pass computes
the logits of each chunk again. With several chunks, no array [rows, length, vocabulary] ever exists. A chunk has whole
rows of the vocabulary, because a top-p filter needs them. On a mesh, devices may split the vocabulary.

Letters: B rows, S row width, C completion width, X positions, D model width, V vocabulary, K ids of a support.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from jaxrl_llm.ops.filters import Filter, filter_logits, keep_support
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.ops.sampling import token_logp

LIVE_CHUNK = "live_chunk"  # name scope by which `plan` recognises a chunk that may be skipped

Arrays = TypeVar("Arrays")  # pytree of arrays


def project(
    hidden_XD: Float[Array, "X D"],
    head_VD: Float[Array, "V D"],
) -> Float32[Array, "X V"]:
    """Return the logits [X,V] in float32."""
    return jnp.einsum(
        "XD,VD->XV",
        hidden_XD,
        head_VD.astype(hidden_XD.dtype),
        preferred_element_type=jnp.float32,
    )


def _filtered_logits(
    settings: Filter,
    hidden_XD: Array,
    cast_VD: Array,
    target_X: Array,
    support_XK: Array | None,
) -> Array:
    """Return the filtered logits [X,V]. The target always stays possible.

    A replayed target may be outside the tokens that the filters keep under the current policy. A position without a
    token has no support.
    """
    logits_XV = project(hidden_XD, cast_VD)
    if support_XK is None:
        return filter_logits(logits_XV, settings, keep_token=target_X)
    tempered_XV = logits_XV / settings.temperature
    support_and_target = jnp.append(support_XK, target_X[:, None], axis=1)
    return keep_support(tempered_XV, support_and_target)


def _if_live(
    is_live: Array | None,
    compute: Callable[..., Arrays],
    *operands: Array | None,
) -> Arrays:
    """Return ``compute(*operands)`` if the chunk is live, else zeros. None = the chunk is live."""
    if is_live is None:
        return compute(*operands)

    def zeros(*operands: Array | None) -> Arrays:
        shapes = jax.eval_shape(compute, *operands)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    with jax.named_scope(LIVE_CHUNK):
        return jax.lax.cond(is_live, compute, zeros, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected_logp(
    settings: Filter,
    head_VD: Array,
    hidden_XD: Array,
    cast_VD: Array,
    target_X: Array,
    support_XK: Array | None,
    is_live: Array | None,
) -> tuple[Array, Array]:
    """Return the log-probability of each target and the entropy, [X] f32; 0.0 if the chunk is not live.

    ``head_VD`` receives the gradient in float32, so that chunks add up in float32. The forward pass reads ``cast_VD``,
    the head cast once for all chunks. The gradient is written by hand. It uses one more projection and two results of
    the forward pass, and needs no maximum and no sum over the vocabulary. Autodiff would store or recompute more. The
    condition on ``is_live`` is in this function, because autodiff of a condition would keep a copy of the head with
    every chunk.

        dlogp/dlogit_v = [v = target] - p_v,     dentropy/dlogit_v = -p_v (log p_v + entropy)
    """
    values, _ = _projected_logp_forward(settings, head_VD, hidden_XD, cast_VD, target_X, support_XK, is_live)
    return values


def _projected_logp_forward(
    settings: Filter,
    head_VD: Array,
    hidden_XD: Array,
    cast_VD: Array,
    target_X: Array,
    support_XK: Array | None,
    is_live: Array | None,
):
    del head_VD

    def compute(
        hidden_XD: Array,
        cast_VD: Array,
        target_X: Array,
        support_XK: Array | None,
    ) -> tuple[Array, Array, Array]:
        filtered_XV = _filtered_logits(settings, hidden_XD, cast_VD, target_X, support_XK)
        logp, entropy = token_logp(filtered_XV, target_X)
        target_logit_X1 = jnp.take_along_axis(filtered_XV, target_X[:, None], axis=-1)
        log_total = target_logit_X1[:, 0] - logp
        return logp, entropy, log_total

    inputs = (hidden_XD, cast_VD, target_X, support_XK)
    logp, entropy, log_total = _if_live(is_live, compute, *inputs)
    return (logp, entropy), (inputs, is_live, log_total, entropy)


def _projected_logp_backward(settings: Filter, residuals, gradients):
    inputs, is_live, log_total, entropy = residuals

    def compute(hidden_XD, cast_VD, target_X, support_XK, log_total, entropy, g_logp, g_entropy):
        filtered_XV = _filtered_logits(settings, hidden_XD, cast_VD, target_X, support_XK)
        logp_XV = filtered_XV - log_total[:, None]
        p_XV = jnp.exp(logp_XV)
        finite_logp_XV = jnp.where(logp_XV > -jnp.inf, logp_XV, 0.0)
        vocabulary = jnp.arange(logp_XV.shape[-1])[None, :]
        is_target_XV = vocabulary == target_X[:, None]
        of_logp_XV = g_logp[:, None] * (is_target_XV - p_XV)
        of_entropy_XV = g_entropy[:, None] * p_XV * (finite_logp_XV + entropy[:, None])
        g_tempered_XV = of_logp_XV - of_entropy_XV
        g_XV = (g_tempered_XV / settings.temperature).astype(hidden_XD.dtype)
        g_hidden = jnp.einsum("XV,VD->XD", g_XV, cast_VD, preferred_element_type=jnp.float32)
        g_head = jnp.einsum("XV,XD->VD", g_XV, hidden_XD, preferred_element_type=jnp.float32)
        return g_head, g_hidden.astype(hidden_XD.dtype)

    g_head, g_hidden = _if_live(is_live, compute, *inputs, log_total, entropy, *gradients)
    return g_head, g_hidden, None, None, None, None


_projected_logp.defvjp(_projected_logp_forward, _projected_logp_backward)


def chunked_logp(
    hidden_BCD: Float[Array, "B C D"],
    head_VD: Float[Array, "V D"],
    target_BC: Int[Array, "B C"],
    *,
    chunk: int,
    settings: Filter,
    support_BCK: Int[Array, "B C K"] | None = None,
    live: Int[Array, ""] | None = None,
    cast_VD: Float[Array, "V D"] | None = None,
) -> tuple[Float32[Array, "B C"], Float32[Array, "B C"]]:
    """Return the log-probability of each target and the entropy of the target's distribution.

    Args:
        hidden_BCD: final hidden states. Each state predicts its target.
        head_VD: output projection in the layout of the embedding. The head and its gradient are never transposed.
        target_BC: [B,C] i32 token ids.
        chunk: positions of each row that are projected at a time.
        settings: settings of the distribution that the targets were drawn from.
        support_BCK: [B,C,K] i32 ids that each target was drawn among (``ops.filters.support_of``). They replace the
            filters. None = filter the current logits, and keep the target.
        live: [] i32, number of leading positions that hold a target in some row. Later chunks are skipped. None = all.
        cast_VD: the head in the dtype of the hidden states; None = cast it here.

    Returns:
        logp and entropy, each [B,C] f32 nats; 0.0 in chunks that are skipped.
    """
    B, C, _ = hidden_BCD.shape
    chunk = min(chunk, C)
    num_chunks = -(-C // chunk)
    may_skip = live is not None and num_chunks > 1
    if cast_VD is None:
        cast_VD = head_VD.astype(hidden_BCD.dtype)
    cast_VD = jax.lax.stop_gradient(cast_VD)
    # This copy receives the gradient, so chunks add up in float32 for any dtype of the head.
    head_VD = head_VD.astype(jnp.float32)

    def flat(x: Array) -> Array:  # [B, chunk, ...] -> [X, ...]
        return x.reshape(B * chunk, *x.shape[2:])

    def next_chunk(first: Array, inputs):
        hidden, target, support = jax.tree.map(flat, inputs)
        is_live = first < live if may_skip else None
        logp, entropy = _projected_logp(settings, head_VD, hidden, cast_VD, target, support, is_live)
        return first + chunk, (logp.reshape(B, chunk), entropy.reshape(B, chunk))

    def join(x: Array) -> Array:  # [chunks, B, chunk] -> [B, C]
        with_spare = x.swapaxes(0, 1).reshape(B, num_chunks * chunk)
        return with_spare[:, :C]

    support = None
    if support_BCK is not None:
        support = _split(support_BCK, chunk)
    inputs = (_split(hidden_BCD, chunk), _split(target_BC, chunk), support)
    _, (logp, entropy) = jax.lax.scan(next_chunk, jnp.int32(0), inputs)
    return join(logp), join(entropy)


def _split(x: Array, chunk: int) -> Array:
    """Return values of positions [B, C, ...] in chunks, [chunks, B, chunk, ...]. The end of the last chunk is 0."""
    B, C, *rest = x.shape
    num_chunks = -(-C // chunk)
    pad_width = [(0, 0)] * x.ndim
    pad_width[1] = (0, num_chunks * chunk - C)
    chunks = jnp.pad(x, pad_width).reshape(B, num_chunks, chunk, *rest)
    return chunks.swapaxes(0, 1)


def completion_window(
    x_BS: Shaped[Array, "B S *rest"],
    first: Int[Array, " B"],
    width: int,
) -> Shaped[Array, "B {width} *rest"]:
    """Return ``width`` positions of each row [B,S,...] from ``first`` [B] on, clipped to the row: [B,width,...]."""
    last_position = x_BS.shape[1] - 1
    position = first[:, None] + jnp.arange(width)[None, :]
    clipped = jnp.minimum(position, last_position)
    num_other_dims = x_BS.ndim - clipped.ndim
    index = clipped.reshape(*clipped.shape, *[1] * num_other_dims)
    return jnp.take_along_axis(x_BS, index, axis=1)


def place_completion(
    x_BC: Float[Array, "B C"],
    prompt_length: Int[Array, " B"],
    length: Int[Array, " B"],
    row_width: int,
) -> Float[Array, "B {row_width}"]:
    """Return the values of completion tokens [B,C] at the tokens' positions in rows [B,S]; 0.0 off the completion."""
    last_place = x_BC.shape[1] - 1
    place_in_completion = jnp.arange(row_width)[None, :] - prompt_length[:, None]
    clipped = jnp.clip(place_in_completion, 0, last_place)
    value_BS = jnp.take_along_axis(x_BC, clipped, axis=1)
    mask_BS = completion_mask(prompt_length, length, row_width)
    return jnp.where(mask_BS, value_BS, 0.0)
