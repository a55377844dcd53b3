"""The policy as the learner sees it: log-probabilities of the completions of whole rows.

The one function behind the update, the reference's log-probs and the ``score`` command.

Rows of a group have one prompt. Where a batch comes in whole groups, the prompt runs once per group, and the
completions attend to its keys and values as a decode step attends to its cache:

    prompts [B/G, L]      -> hidden states, keys and values        one forward and backward per group
    completions [B, C]    -> attend to their prompt and themselves

Packed, both lie in lines of W tokens instead, without the padding between them (ops.packing).

Letters: B rows, G rows of a group, S row width, L = S - C prompt width, C completion width, n lines of K rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.config import SamplingConfig
from jaxrl_llm.models.attention import Prompt
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.ops import packing
from jaxrl_llm.ops.logp import chunked_logp, completion_window, place_completion


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
    group_size: int = 1,
    remat: bool = False,
    readout: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Log-probability of every completion token, and entropy, under the sampling distribution of ``params``.

    Args:
        tokens_BS: [B,S] i32 right-padded rows ``prompt ++ completion``.
        prompt_length, length: [B] i32, prompt_length at least 1.
        sampling: temperature and filters; its temperature must be positive.
        completion_width: the longest completion; with groups, prompts are at most S minus this.
        chunk_positions: positions of each row whose logits are live at once.
        group_size: each run of this many rows has one prompt, which is then computed once; 1 = each its own.
        remat: this is the forward of a backward pass.
        readout: [B,C,D] -> [B,C,m] f32, something else to read off the hidden state that predicts each token.

    Returns:
        logp, entropy: [B,S] f32 nats, 0.0 off the completion; then with ``readout`` its outputs [B,S,m], likewise.
    """
    B, S = tokens_BS.shape
    target_BC = completion_window(tokens_BS, prompt_length, completion_width)
    if group_size == 1:
        positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        hidden_BSD, _ = model.forward(params, tokens_BS, positions, remat=remat)
        hidden_BCD = completion_window(hidden_BSD, prompt_length - 1, completion_width)
    else:
        hidden_BCD = _hidden_of_groups(model, params, tokens_BS, prompt_length, target_BC, group_size, remat)
    both = chunked_logp(
        hidden_BCD,
        model.head(params),
        target_BC,
        chunk=chunk_positions,
        **_distribution(sampling),
    )
    logp, entropy = (place_completion(x, prompt_length, length, S) for x in both)
    if readout is None:
        return logp, entropy
    place = jax.vmap(place_completion, in_axes=(2, None, None, None), out_axes=2)
    return logp, entropy, place(readout(hidden_BCD), prompt_length, length, S)


def packed_logp(
    model: Model,
    params: Params,
    tokens_nKS: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    *,
    sampling: SamplingConfig,
    width: int,
    chunk_positions: int,
    group_size: int = 1,
    remat: bool = False,
    readout: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """The same as ``row_logp`` of rows that lie side by side in lines.

    Args:
        tokens_nKS: [n,K,S] i32 rows of each line.
        prompt_length, length: [n,K] i32, both 0 where there is no row.
        width: W, which holds the units of every line.
        chunk_positions: places of each line whose logits are live at once.

    Returns:
        As ``row_logp``, each [n*K,S,...].
    """
    line = packing.lay(tokens_nKS, prompt_length, length, width=width, group_size=group_size)
    hidden_nWD, _ = model.forward(params, line.tokens, line.position, visible=packing.visible(line), remat=remat)
    hidden_nWD = jnp.take_along_axis(
        hidden_nWD, line.source[:, :, None], axis=1
    )  # one after the other: chunks are full
    seen = chunked_logp(
        hidden_nWD,
        model.head(params),
        line.target,
        chunk=chunk_positions,
        live=jnp.max(line.count),
        **_distribution(sampling),
    )
    if readout is not None:
        seen = (*seen, readout(hidden_nWD))
    rows = (packing.take_rows(x, line, prompt_length, length) for x in seen)
    return tuple(x.reshape(-1, *x.shape[2:]) for x in rows)


def _distribution(sampling: SamplingConfig) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def _hidden_of_groups(model, params, tokens_BS, prompt_length, completion_BC, group_size, remat) -> jax.Array:
    """Hidden states that predict the completion tokens, [B,C,D], with each group's prompt computed once."""
    B, S = tokens_BS.shape
    C = completion_BC.shape[1]
    L, P = S - C, B // group_size
    # Past its prompt a group's row goes on with a completion; nothing that is used attends to it.
    prompts_PL = tokens_BS.reshape(P, group_size, S)[:, 0, :L]
    positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (P, L))
    hidden_PLD, kv = model.forward(params, prompts_PL, positions, remat=remat)
    last_P1D = completion_window(hidden_PLD, prompt_length[::group_size] - 1, 1)

    prompt = Prompt(*kv, visible=jnp.arange(L)[None, :] < prompt_length[::group_size, None])
    positions_BC = prompt_length[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]
    hidden_BCD, _ = model.forward(params, completion_BC, positions_BC, prompt=prompt, remat=remat)
    # The prompt's last token predicts the first completion token, and each completion token the next.
    return jnp.concatenate([jnp.repeat(last_P1D, group_size, axis=0), hidden_BCD[:, :-1]], axis=1)
