"""The policy as the learner sees it: log-probabilities of the completions of whole rows.

The one function behind the update, the reference's log-probs and the ``score`` command.
Letters: B rows, S row width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.config import SamplingConfig
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.ops.logp import completion_logp


def row_logp(
    model: Model,
    params: Params,
    tokens_BS: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    *,
    sampling: SamplingConfig,
    completion_width: int,
    chunk_positions: int,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every completion token, and entropy, under the sampling distribution of ``params``.

    Args:
        tokens_BS: [B,S] i32 right-padded rows ``prompt ++ completion``.
        prompt_length, length: [B] i32.
        sampling: temperature and filters; its temperature must be positive.
        completion_width: the longest completion.
        chunk_positions: positions of each row whose logits are live at once.
        remat: this is the forward of a backward pass.

    Returns:
        logp, entropy: [B,S] f32 nats, 0.0 off the completion.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1], dtype=jnp.int32), tokens_BS.shape)
    hidden_BSD, _ = model.forward(params, tokens_BS, positions, remat=remat)
    return completion_logp(
        hidden_BSD,
        model.head(params),
        tokens_BS,
        prompt_length,
        length,
        completion_width=completion_width,
        chunk=chunk_positions,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
