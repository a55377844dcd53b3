"""Log-probabilities of whole rows under the policy: of completions, and optionally of prompts.

The update, the reference's log-probs and the ``score`` command all use ``row_logp``.

The rows of a group share one prompt. There are three layouts of the forward pass:

    rows            each row by itself: prompt ++ completion
    whole groups    one row per group, with one copy of the prompt: prompt [L] ++ completions [G*C]. Each completion
                    attends to the prompt and to itself.
    packed lines    lines of W tokens, which hold rows or groups without padding between them (ops.packing)

Letters: B rows, G rows of a group, S row width, L = S - C prompt width, C completion width, n lines of K rows, N ids
of a support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config import SamplingConfig
from jaxrl_llm.models import moe
from jaxrl_llm.models.attention import Groups
from jaxrl_llm.models.kernels.learner import Units
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.ops import packing
from jaxrl_llm.ops.filters import Filter
from jaxrl_llm.ops.logp import chunked_logp, completion_window, place_completion
from jaxrl_llm.runtime import sharding

# The model's distribution without temperature and filters. It applies to prompts, which the model did not sample.
PLAIN = SamplingConfig()


class RowValues(NamedTuple):
    """Values of each token of rows, [B,S] f32: 0.0 outside the completion (``prompt_logp``: outside the prompt)."""

    logp: jax.Array  # nats, under the sampling distribution
    entropy: jax.Array  # nats, under the sampling distribution
    readout: jax.Array | None = None  # [B,S,m]
    prompt_logp: jax.Array | None = None  # nats, from the prompt's second token on, without temperature and filters
    routed: tuple[jax.Array, ...] = ()  # [B,S,...] results of moe.by_token for the previous token


def chunk_tokens(setting: int, device: Any, *, most: int, vocab: int, packed: bool) -> int:
    """Return the number of positions to project to the vocabulary at once.

    This is ``update.logp_chunk_tokens``, or if that is 0, a default for the device:

    - Accelerators: 1024. Every chunk reads and writes the head's gradient, and small matmuls do not hide this traffic.
    - CPU, if all logits take at most 256 MiB: one chunk of ``most`` positions. XLA then keeps the logits for the
      gradient and does not compute them again.
    - CPU otherwise: 256, or 128 for packed lines. Chunks after a line's last target are skipped.

    Args:
        setting: ``update.logp_chunk_tokens``.
        most: number of positions of a micro-batch on one device.
        packed: rows are packed in lines.
    """
    by_cpu = most if most * vocab <= 2**26 else 128 if packed else 256
    return setting or (by_cpu if device.platform == "cpu" else 1024)


class Part(NamedTuple):
    """Hidden states that predict some tokens of rows, and the function that places results in the rows."""

    hidden: jax.Array  # [...,D]
    target: jax.Array  # [...] i32, the predicted tokens
    support: jax.Array | None  # [...,N] i32, ids that each token was drawn among
    chunk: int  # positions whose logits are in memory at once
    live: jax.Array | None  # [] i32, number of a line's positions with a target; None = all positions may have one
    place: Callable[[jax.Array], jax.Array]  # values [...] or [...,m] to rows [B,S] or [B,S,m], 0.0 elsewhere
    routed: tuple[jax.Array, ...] = ()  # [...,m] routing results of the same positions


def row_logp(
    model: Model,
    params: Params,
    tokens: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    support: jax.Array | None = None,
    *,
    routing: moe.Routing | None = None,
    sampling: SamplingConfig,
    completion_width: int,
    chunk_positions: int,
    line_width: int = 0,
    group_size: int = 1,
    remat: bool = False,
    readout: Callable[[jax.Array], jax.Array] | None = None,
    with_prompts: bool = False,
) -> RowValues:
    """Return log-probability and entropy of every completion token under the sampling distribution of ``params``.

    Args:
        tokens: [B,S] i32 right-padded rows ``prompt ++ completion``. With lines [n,K,S]: K rows per line.
        prompt_length, length: [B] i32, prompt_length at least 1. With lines [n,K]: both are 0 if there is no row.
        support: [B,S,N] or [n,K,S,N] i32 ids that each token was drawn among, if the rollout has this column.
        routing: experts that the rows' tokens chose earlier, [B,S,m] or [n,K,S,m].
        sampling: temperature and filters. The temperature must be positive.
        completion_width: C, length of the longest completion. With groups or ``with_prompts``, prompts must have at
            most S - C tokens.
        chunk_positions: positions of each row, or of each line, whose logits are in memory at once.
        line_width: W of packed lines, at least the total length of the units of any line; 0 = no lines.
        group_size: number of consecutive rows that share a prompt, which is computed once; 1 = no shared prompts.
        remat: this forward pass is part of a backward pass.
        readout: [...,D] -> [...,m] f32, another function of the hidden state that predicts each token.
        with_prompts: also return the prompts' log-probs, from the same forward pass. Requires S - C of at least 2.

    Returns:
        Values of B rows; B = n*K with lines.
    """
    rows, head_VD = (tokens, prompt_length, length, support, routing), model.head(params)
    how = {"chunk": chunk_positions, "group_size": group_size, "remat": remat}
    if line_width:
        completions, prompts = _in_lines(model, params, *rows, width=line_width, **how)
    else:
        completions, prompts = _padded(model, params, *rows, completion_width=completion_width, **how)

    def logp(part: Part, sampling: SamplingConfig) -> tuple[jax.Array, jax.Array]:
        def of_rows(hidden, target, support, live, head_1VD, cast_1VD):
            how = {"chunk": part.chunk, "settings": Filter.of(sampling), "support_BCK": support}
            how["live"] = None if live is None else live[0]
            return chunked_logp(hidden, head_1VD[0], target, cast_VD=cast_1VD[0], **how)

        # The head is gathered once for all chunks, in the dtype of the matmuls. Its gradient is scattered once.
        head = (sharding.gather_copies(x, model.table_spec) for x in (head_VD, head_VD.astype(part.hidden.dtype)))
        C, live = part.hidden.shape[1], part.live
        if live is not None:  # number of live positions in each device's part of a line
            live = live - C // (n := sharding.parts(C, "length")) * jnp.arange(n)
        args, of_part = (part.hidden, part.target, part.support, live, *head), ("batch", "length")
        axes = (*(of_part,) * 3, of_part[1:], *(jax.P(sharding.TOKEN_AXES),) * 2)
        both = sharding.by_device(of_rows, *args, axes=axes, shared=2, over=sharding.TOKEN_AXES)
        return tuple(part.place(x) for x in both)

    routed = tuple(completions.place(x.astype(jnp.float32)) for x in completions.routed)
    seen = RowValues(*logp(completions, sampling), routed=routed)
    if readout is not None:
        seen = seen._replace(readout=completions.place(readout(completions.hidden)))
    if with_prompts:
        seen = seen._replace(prompt_logp=logp(prompts, PLAIN)[0])
    return seen


def _padded(
    model, params, tokens_BS, prompt_length, length, support_BSN, routing, *, completion_width, chunk, group_size, remat
):
    """Return two parts of padded rows [B,S]: completions and prompts."""
    B, S = tokens_BS.shape
    target_BC = completion_window(tokens_BS, prompt_length, completion_width)
    if group_size == 1:
        positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        seen = moe.by_token(*model.forward(params, tokens_BS, positions, remat=remat, routing=routing))
        hidden_BCD, *routed = (completion_window(x, prompt_length - 1, completion_width) for x in seen)
        hidden_PLD = seen[0][:, : S - completion_width]
    else:
        (hidden_BCD, *routed), hidden_PLD = _hidden_of_groups(
            model, params, tokens_BS, prompt_length, target_BC, routing, group_size, remat
        )

    def place(values: jax.Array) -> jax.Array:
        put = place_completion
        if values.ndim == 3:
            put = jax.vmap(place_completion, in_axes=(2, None, None, None), out_axes=2)
        return put(values, prompt_length, length, S)

    support = None if support_BSN is None else completion_window(support_BSN, prompt_length, completion_width)
    completions = Part(hidden_BCD, target_BC, support, chunk, None, place, (*routed,))
    target_PL = tokens_BS.reshape(-1, group_size, S)[:, 0, 1 : S - completion_width]

    def place_prompts(values_PL: jax.Array) -> jax.Array:
        values_BL = jnp.repeat(values_PL, group_size, axis=0)  # rows of a group share a prompt
        return place_completion(values_BL, jnp.ones_like(length), prompt_length, S)

    return completions, Part(hidden_PLD[:, :-1], target_PL, None, chunk * group_size, None, place_prompts)


def _in_lines(model, params, tokens_nKS, prompt_length, length, support, routing, *, width, chunk, group_size, remat):
    """Return two parts of rows [n,K,S] that are packed in lines [n,W]: completions and prompts."""
    line = packing.lay(tokens_nKS, prompt_length, length, width=width, group_size=group_size)
    rule = line if group_size > 1 else Units(line.unit)
    routing = moe.in_lines(routing, prompt_length, length, width=width, group_size=group_size)
    how = {"visible": rule, "remat": remat, "routing": routing}
    seen = moe.by_token(*model.forward(params, line.tokens, line.position, **how))

    def part(reading: packing.Reading, support: jax.Array | None = None) -> Part:
        def place(values: jax.Array) -> jax.Array:  # [n,W,...] to [n*K,S,...]
            taken = packing.take_rows(values, reading)
            return taken.reshape(-1, *taken.shape[2:])

        hidden, *routed = (jnp.take_along_axis(x, reading.source[:, :, None], axis=1) for x in seen)
        return Part(hidden, reading.target, support, chunk, jnp.max(reading.count), place, (*routed,))

    support = None if support is None else packing.of_targets(support, line.completions)
    return part(line.completions, support), part(line.prompts)


def _hidden_of_groups(model, params, tokens_BS, prompt_length, completion_BC, routing, group_size, remat):
    """Return hidden states of whole groups.

    Returns:
        The hidden states that predict completion tokens, [B,C,D], with routing results of the same positions. Then the
        hidden states of each prompt, [P,L,D].
    """
    B, S = tokens_BS.shape
    C = completion_BC.shape[1]
    L, P = S - C, B // group_size
    # After a short prompt, the first L tokens include tokens of a completion. No used token attends to these tokens.
    prompts_PL = tokens_BS.reshape(P, group_size, S)[:, 0, :L]
    own_length = prompt_length[::group_size]
    position_PL = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (P, L))
    position_PC = own_length[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]
    made = model.forward(
        params,
        jnp.concatenate([prompts_PL, completion_BC.reshape(P, -1)], axis=1),
        jnp.concatenate([position_PL, jnp.tile(position_PC, group_size)], axis=1),
        visible=Groups(own_length, prompt_width=L, size=group_size),
        remat=remat,
        routing=moe.of_groups(routing, prompt_length, completion_width=C, group_size=group_size),
    )

    def predicting(x_PW):
        x_PL, x_BC = x_PW[:, :L], x_PW[:, L:].reshape(B, C, -1)
        last_P1 = completion_window(x_PL, own_length - 1, 1)
        # The prompt's last token predicts the first completion token, and each completion token the next.
        return jnp.concatenate([jnp.repeat(last_P1, group_size, axis=0), x_BC[:, :-1]], axis=1)

    return tuple(map(predicting, moe.by_token(*made))), made[0][:, :L]
