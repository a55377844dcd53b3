"""Log-probability and entropy of completion tokens from hidden states, without a [rows, length, vocab] array.

Only completion positions are projected to the vocabulary, a chunk of positions at a time, and the
backward pass recomputes each chunk's logits. A chunk holds whole vocabulary rows: a top-p filter needs
them, and on a mesh the vocabulary may be split over devices.

Letters: B rows, S row width, C completion width, X positions, D model width, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.ops.sampling import filter_logits, token_logp


def project(hidden_XD: jax.Array, head_DV: jax.Array) -> jax.Array:
    """Logits [X,V] in float32; the one projection of sampler and learner."""
    return jnp.einsum("XD,DV->XV", hidden_XD, head_DV.astype(hidden_XD.dtype), preferred_element_type=jnp.float32)


def completion_logp(
    hidden_BSD: jax.Array,
    head_DV: jax.Array,
    tokens_BS: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    *,
    completion_width: int,
    chunk: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each completion token and entropy of the distribution it was drawn from.

    Args:
        hidden_BSD: final hidden states; position t predicts token t+1.
        head_DV: output projection.
        tokens_BS: [B,S] i32 rows ``prompt ++ completion``.
        prompt_length, length: [B] i32, prompt_length at least 1.
        completion_width: C, the longest completion.
        chunk: positions of each row projected at once.
        temperature, top_k, top_p, min_p: settings of the distribution (see ops.sampling.filter_logits).

    Returns:
        logp and entropy, each [B,S] f32 nats, ``logp[t]`` of ``tokens[t]``, 0.0 off the completion.
    """
    B, S, D = hidden_BSD.shape
    chunk = min(chunk, completion_width)
    num_chunks = -(-completion_width // chunk)
    # Position of the hidden state that predicts completion token c.
    at_BC = prompt_length[:, None] - 1 + jnp.arange(num_chunks * chunk)[None, :]
    hidden_BCD = jnp.take_along_axis(hidden_BSD, jnp.minimum(at_BC, S - 1)[:, :, None], axis=1)
    target_BC = jnp.take_along_axis(tokens_BS, jnp.minimum(at_BC + 1, S - 1), axis=1)

    @jax.checkpoint
    def one_chunk(carry, xs):
        hidden_Bcd, target_Bc = xs
        logits = project(hidden_Bcd.reshape(B * chunk, D), head_DV)
        target = target_Bc.reshape(-1)
        # The sampled token stays in: a replayed one may be outside the support the filters leave today.
        settings = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        logp, entropy = token_logp(filter_logits(logits, **settings, keep_token=target), target)
        return carry, (logp.reshape(B, chunk), entropy.reshape(B, chunk))

    split = lambda x: x.reshape(B, num_chunks, chunk, *x.shape[2:]).swapaxes(0, 1)  # noqa: E731
    _, (logp, entropy) = jax.lax.scan(one_chunk, None, (split(hidden_BCD), split(target_BC)))
    join = lambda x: x.swapaxes(0, 1).reshape(B, num_chunks * chunk)  # noqa: E731

    mask_BS = completion_mask(prompt_length, length, S)
    back_BS = jnp.clip(jnp.arange(S)[None, :] - prompt_length[:, None], 0, num_chunks * chunk - 1)
    place = lambda x: jnp.where(mask_BS, jnp.take_along_axis(join(x), back_BS, axis=1), 0.0)  # noqa: E731
    return place(logp), place(entropy)
