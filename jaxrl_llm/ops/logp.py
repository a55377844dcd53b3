"""Log-probability and entropy of tokens from hidden states, a few positions at a time.

Only completion positions are projected to the vocabulary, a chunk of them at once, and the backward pass makes each
chunk's logits again: of several chunks no [rows, length, vocabulary] array ever lives. A chunk holds whole vocabulary
rows: a top-p filter needs them, and on a mesh the vocabulary may be split over devices.

Letters: B rows, S row width, C completion width, X positions, D model width, V vocabulary, K ids of a support.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Float32, Int, Shaped

from jaxrl_llm.ops.filters import Filter, filter_logits, keep_support
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.ops.sampling import token_logp

LIVE_CHUNK = "live_chunk"  # by which `plan` knows a chunk that may be left out


def project(hidden_XD: Float[ArrayLike, "X D"], head_VD: Float[ArrayLike, "V D"]) -> Float32[Array, "X V"]:
    """Logits [X,V] in float32."""
    return jnp.einsum("XD,VD->XV", hidden_XD, head_VD.astype(hidden_XD.dtype), preferred_element_type=jnp.float32)


def _filtered_logits(settings: Filter, hidden_XD, cast_VD, target_X, support_XK) -> jax.Array:
    logits_XV = project(hidden_XD, cast_VD)
    # The sampled token stays in: a replayed one may be outside the support the filters leave today, and where there is
    # no token there is no support.
    if support_XK is None:
        return filter_logits(logits_XV, settings, keep_token=target_X)
    return keep_support(logits_XV / settings.temperature, jnp.append(support_XK, target_X[:, None], axis=1))


def _if_live(is_live: jax.Array | None, compute: Callable[..., Any], *operands: Any) -> Any:
    """``compute(*operands)`` where the chunk is live, zeros where it is not; None = it is."""
    if is_live is None:
        return compute(*operands)
    nothing = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, *operands))
    with jax.named_scope(LIVE_CHUNK):
        return jax.lax.cond(is_live, compute, nothing, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected_logp(settings: Filter, head_VD, hidden_XD, cast_VD, target_X, support_XK, is_live):
    """Log-probability of each target, and entropy, [X] f32; 0.0 where the chunk is not live.

    ``head_VD`` takes the gradient, so that chunks add up in float32; ``cast_VD`` is read, cast once for all.
    The gradient is written out: from one more projection and the two results it needs no maximum and no sum over the
    vocabulary, and what autodiff would keep or redo for them is one pass. Whether the chunk is live is asked in here,
    for autodiff of a condition would keep a copy of the head with every chunk.

        dlogp/dlogit_v = [v = target] - p_v,     dentropy/dlogit_v = -p_v (log p_v + entropy)
    """
    return _projected_logp_forward(settings, head_VD, hidden_XD, cast_VD, target_X, support_XK, is_live)[0]


def _projected_logp_forward(settings, head_VD, hidden_XD, cast_VD, target_X, support_XK, is_live):
    def compute(hidden_XD, cast_VD, target_X, support_XK):
        filtered_XV = _filtered_logits(settings, hidden_XD, cast_VD, target_X, support_XK)
        logp, entropy = token_logp(filtered_XV, target_X)
        return logp, entropy, jnp.take_along_axis(filtered_XV, target_X[:, None], axis=-1)[:, 0] - logp

    inputs = (hidden_XD, cast_VD, target_X, support_XK)
    logp, entropy, log_total = _if_live(is_live, compute, *inputs)
    return (logp, entropy), (inputs, is_live, log_total, entropy)


def _projected_logp_backward(settings, kept, gradients):
    inputs, is_live, *of_vocabulary = kept

    def compute(hidden_XD, cast_VD, target_X, support_XK, log_total, entropy, g_logp, g_entropy):
        logp_XV = _filtered_logits(settings, hidden_XD, cast_VD, target_X, support_XK) - log_total[:, None]
        p_XV = jnp.exp(logp_XV)
        finite_XV = jnp.where(logp_XV > -jnp.inf, logp_XV, 0.0)
        is_target = jnp.arange(logp_XV.shape[-1])[None, :] == target_X[:, None]
        g_XV = g_logp[:, None] * (is_target - p_XV) - g_entropy[:, None] * p_XV * (finite_XV + entropy[:, None])
        g_XV = (g_XV / settings.temperature).astype(hidden_XD.dtype)
        g_hidden = jnp.einsum("XV,VD->XD", g_XV, cast_VD, preferred_element_type=jnp.float32)
        g_head = jnp.einsum("XV,XD->VD", g_XV, hidden_XD, preferred_element_type=jnp.float32)
        return g_head, g_hidden.astype(hidden_XD.dtype)

    return *_if_live(is_live, compute, *inputs, *of_vocabulary, *gradients), None, None, None, None


_projected_logp.defvjp(_projected_logp_forward, _projected_logp_backward)


def chunked_logp(
    hidden_BCD: Float[ArrayLike, "B C D"],
    head_VD: Float[ArrayLike, "V D"],
    target_BC: Int[ArrayLike, "B C"],
    *,
    chunk: int,
    settings: Filter,
    support_BCK: Int[ArrayLike, "B C K"] | None = None,
    live: Int[ArrayLike, ""] | None = None,
    cast_VD: Float[ArrayLike, "V D"] | None = None,
) -> tuple[Float32[Array, "B C"], Float32[Array, "B C"]]:
    """Log-probability of each target and entropy of the distribution it was drawn from.

    Args:
        hidden_BCD: final hidden states, each the one that predicts its target.
        head_VD: output projection, as the embedding lies: no transpose of it is made, nor of its gradient.
        target_BC: [B,C] i32 token ids.
        chunk: positions of each row projected at once.
        settings: of the distribution the targets were drawn from.
        support_BCK: [B,C,K] i32 ids that each target was drawn among (``ops.filters.support_of``); the filters are
            then not asked. None = what they leave of today's logits, and the target.
        live: [] i32, positions that hold a target in any row; of several chunks, later ones are left out. None = all.
        cast_VD: the head in the dtype of the hidden states, to be read in its place; None = made here.

    Returns:
        logp and entropy, each [B,C] f32 nats; 0.0 in chunks that are not computed.
    """
    B, C, _ = hidden_BCD.shape
    chunk = min(chunk, C)
    num_chunks = -(-C // chunk)
    spare = num_chunks * chunk - C
    cast_VD = jax.lax.stop_gradient(head_VD.astype(hidden_BCD.dtype) if cast_VD is None else cast_VD)
    head_VD = head_VD.astype(jnp.float32)  # what takes the gradient: chunks add up in float32, whatever the head is

    def one_chunk(first, of_positions):
        hidden, target, support = jax.tree.map(lambda x: x.reshape(B * chunk, *x.shape[2:]), of_positions)
        is_live = None if live is None or num_chunks == 1 else first < live
        logp, entropy = _projected_logp(settings, head_VD, hidden, cast_VD, target, support, is_live)
        return first + chunk, (logp.reshape(B, chunk), entropy.reshape(B, chunk))

    def split(x):  # [B, C, ...] -> [chunks, B, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, spare)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(B, num_chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    of_chunks = (split(hidden_BCD), split(target_BC), None if support_BCK is None else split(support_BCK))
    _, both = jax.lax.scan(one_chunk, jnp.int32(0), of_chunks)
    logp, entropy = (x.swapaxes(0, 1).reshape(B, num_chunks * chunk)[:, :C] for x in both)
    return logp, entropy


def completion_window(
    x_BS: Shaped[ArrayLike, "B S *rest"], first: Int[ArrayLike, " B"], width: int
) -> Shaped[Array, "B {width} *rest"]:
    """``width`` positions of each row [B,S,...] from position ``first`` [B] on, clipped to the row: [B,width,...]."""
    at = jnp.minimum(first[:, None] + jnp.arange(width)[None, :], x_BS.shape[1] - 1)
    return jnp.take_along_axis(x_BS, at.reshape(*at.shape, *(1,) * (x_BS.ndim - 2)), axis=1)


def place_completion(
    x_BC: Float[ArrayLike, "B C"], prompt_length: Int[ArrayLike, " B"], length: Int[ArrayLike, " B"], row_width: int
) -> Float[Array, "B {row_width}"]:
    """Values of completion tokens [B,C] at their places in rows [B,S]; 0.0 off the completion."""
    back = jnp.clip(jnp.arange(row_width)[None, :] - prompt_length[:, None], 0, x_BC.shape[1] - 1)
    mask_BS = completion_mask(prompt_length, length, row_width)
    return jnp.where(mask_BS, jnp.take_along_axis(x_BC, back, axis=1), 0.0)
