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
from jaxrl_llm.models.blocks import Routing
from jaxrl_llm.models.kernels.learner import Units
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.ops import packing
from jaxrl_llm.ops.filters import Filter
from jaxrl_llm.ops.logp import chunked_logp, completion_window, place_completion
from jaxrl_llm.runtime import sharding

# The model's distribution without temperature and filters. It applies to prompts, which the model did not sample.
PLAIN = SamplingConfig()
PLAIN_CHUNK_POSITIONS = 16  # positions of each row whose logits ``plain_logp`` has in memory at once


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
    if setting:
        return setting
    if device.platform != "cpu":
        return 1024
    if most * vocab <= 2**26:
        return most
    return 128 if packed else 256


class Part(NamedTuple):
    """The hidden states that predict some of the rows' tokens, and the function that writes results at these tokens."""

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
    routing: Routing | None = None,
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
    rows = (tokens, prompt_length, length, support, routing)
    if line_width:
        completions, prompts = _in_lines(
            model,
            params,
            *rows,
            width=line_width,
            chunk=chunk_positions,
            group_size=group_size,
            remat=remat,
        )
    else:
        completions, prompts = _padded(
            model,
            params,
            *rows,
            completion_width=completion_width,
            chunk=chunk_positions,
            group_size=group_size,
            remat=remat,
        )
    return _row_values(model, params, completions, prompts if with_prompts else None, sampling, readout)


def _row_values(
    model: Model,
    params: Params,
    completions: Part,
    prompts: Part | None,
    sampling: SamplingConfig,
    readout: Callable[[jax.Array], jax.Array] | None,
) -> RowValues:
    """Return the values of rows.

    Args:
        prompts: None = the prompts' log-probs are not needed.
    """
    head_VD = model.head(params)
    routed = tuple(completions.place(x.astype(jnp.float32)) for x in completions.routed)
    logp, entropy = _part_logp(model, head_VD, completions, sampling)
    values = RowValues(logp, entropy, routed=routed)
    if readout is not None:
        values = values._replace(readout=completions.place(readout(completions.hidden)))
    if prompts is not None:
        prompt_logp, _ = _part_logp(model, head_VD, prompts, PLAIN)
        values = values._replace(prompt_logp=prompt_logp)
    return values


def plain_logp(
    model: Model,
    params: Params,
    tokens: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
) -> jax.Array:
    """Return the log-prob of every completion token at temperature 1 without filters, [B,S] f32 nats, else 0.0.

    Args:
        tokens, prompt_length, length: padded rows, as in ``row_logp``.
    """
    return row_logp(
        model,
        params,
        tokens,
        prompt_length,
        length,
        sampling=PLAIN,
        completion_width=tokens.shape[1],
        chunk_positions=PLAIN_CHUNK_POSITIONS,
    ).logp


def _part_logp(model: Model, head_VD: jax.Array, part: Part, sampling: SamplingConfig) -> tuple[jax.Array, jax.Array]:
    """Return log-probability and entropy of one part of the rows, placed in the rows."""

    def chunks(
        hidden: jax.Array,
        target: jax.Array,
        support: jax.Array | None,
        live: jax.Array | None,
        head_1VD: jax.Array,
        cast_1VD: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        return chunked_logp(
            hidden,
            head_1VD[0],
            target,
            cast_VD=cast_1VD[0],
            chunk=part.chunk,
            settings=Filter.of(sampling),
            support_BCK=support,
            live=None if live is None else live[0],
        )

    live = part.live
    if live is not None:  # number of live positions in each device's part of a line
        num_positions = part.hidden.shape[1]
        num_parts = sharding.parts(num_positions, "length")
        live = live - num_positions // num_parts * jnp.arange(num_parts)
    # Gather the head once for all chunks, in the dtype of the matmuls. Scatter its gradient once.
    head = sharding.gather_copies(head_VD, model.table_spec)
    cast_head = sharding.gather_copies(head_VD.astype(part.hidden.dtype), model.table_spec)
    part_axes = ("batch", "length")
    head_spec = jax.P(sharding.TOKEN_AXES)
    logp, entropy = sharding.by_device(
        chunks,
        part.hidden,
        part.target,
        part.support,
        live,
        head,
        cast_head,
        axes=(part_axes, part_axes, part_axes, part_axes[1:], head_spec, head_spec),
        shared=2,
        over=sharding.TOKEN_AXES,
    )
    return part.place(logp), part.place(entropy)


def _padded(
    model: Model,
    params: Params,
    tokens_BS: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    support_BSN: jax.Array | None,
    routing: Routing | None,
    *,
    completion_width: int,
    chunk: int,
    group_size: int,
    remat: bool,
) -> tuple[Part, Part]:
    """Return two parts of padded rows [B,S]: completions and prompts."""
    B, S = tokens_BS.shape
    target_BC = completion_window(tokens_BS, prompt_length, completion_width)
    if group_size == 1:
        positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        results = moe.by_token(*model.forward(params, tokens_BS, positions, remat=remat, routing=routing))
        hidden_BCD, *routed = (completion_window(x, prompt_length - 1, completion_width) for x in results)
        hidden_PLD = results[0][:, : S - completion_width]
    else:
        (hidden_BCD, *routed), hidden_PLD = _hidden_of_groups(
            model,
            params,
            tokens_BS,
            prompt_length,
            target_BC,
            routing,
            group_size,
            remat,
        )

    def place(values: jax.Array) -> jax.Array:
        if values.ndim < 3:
            return place_completion(values, prompt_length, length, S)
        place_each = jax.vmap(place_completion, in_axes=(2, None, None, None), out_axes=2)
        return place_each(values, prompt_length, length, S)

    support = None if support_BSN is None else completion_window(support_BSN, prompt_length, completion_width)
    completions = Part(hidden_BCD, target_BC, support, chunk, None, place, tuple(routed))
    target_PL = tokens_BS.reshape(-1, group_size, S)[:, 0, 1 : S - completion_width]

    def place_prompts(values_PL: jax.Array) -> jax.Array:
        values_BL = jnp.repeat(values_PL, group_size, axis=0)  # rows of a group share a prompt
        return place_completion(values_BL, jnp.ones_like(length), prompt_length, S)

    prompts = Part(hidden_PLD[:, :-1], target_PL, None, chunk * group_size, None, place_prompts)
    return completions, prompts


def _in_lines(
    model: Model,
    params: Params,
    tokens_nKS: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    support: jax.Array | None,
    routing: Routing | None,
    *,
    width: int,
    chunk: int,
    group_size: int,
    remat: bool,
) -> tuple[Part, Part]:
    """Return two parts of rows [n,K,S] that are packed in lines [n,W]: completions and prompts."""
    line = packing.lay(tokens_nKS, prompt_length, length, width=width, group_size=group_size)
    rule = line if group_size > 1 else Units(line.unit)
    routing = moe.in_lines(routing, prompt_length, length, width=width, group_size=group_size)
    forward = model.forward(params, line.tokens, line.position, visible=rule, remat=remat, routing=routing)
    results = moe.by_token(*forward)

    def part(reading: packing.Reading, support: jax.Array | None = None) -> Part:
        def place(values: jax.Array) -> jax.Array:  # [n,W,...] to [n*K,S,...]
            rows = packing.take_rows(values, reading)
            return rows.reshape(-1, *rows.shape[2:])

        hidden, *routed = (jnp.take_along_axis(x, reading.source[:, :, None], axis=1) for x in results)
        return Part(
            hidden,
            reading.target,
            support,
            chunk,
            jnp.max(reading.count),
            place,
            tuple(routed),
        )

    target_support = None if support is None else packing.of_targets(support, line.completions)
    return part(line.completions, target_support), part(line.prompts)


def _hidden_of_groups(
    model: Model,
    params: Params,
    tokens_BS: jax.Array,
    prompt_length: jax.Array,
    completion_BC: jax.Array,
    routing: Routing | None,
    group_size: int,
    remat: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return hidden states of whole groups.

    Returns:
        The hidden states that predict completion tokens, [B,C,D], with routing results of the same positions. Then the
        hidden states of each prompt, [P,L,D].
    """
    B, S = tokens_BS.shape
    C = completion_BC.shape[1]
    L = S - C
    P = B // group_size
    # If a prompt is shorter than L, the first L tokens include completion tokens. No token whose result is used attends
    # to them.
    prompts_PL = tokens_BS.reshape(P, group_size, S)[:, 0, :L]
    group_prompt_length = prompt_length[::group_size]
    position_PL = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (P, L))
    position_PC = group_prompt_length[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]
    hidden, mlp_results = model.forward(
        params,
        jnp.concatenate([prompts_PL, completion_BC.reshape(P, -1)], axis=1),
        jnp.concatenate([position_PL, jnp.tile(position_PC, group_size)], axis=1),
        visible=Groups(group_prompt_length, prompt_width=L, size=group_size),
        remat=remat,
        routing=moe.of_groups(routing, prompt_length, completion_width=C, group_size=group_size),
    )

    def predicting(x_PW: jax.Array) -> jax.Array:
        """Return the values of the positions that predict completion tokens.

        The prompt's last token predicts the first completion token, and each completion token the next.
        """
        x_PL = x_PW[:, :L]
        x_BC = x_PW[:, L:].reshape(B, C, -1)
        last_P1 = completion_window(x_PL, group_prompt_length - 1, 1)
        return jnp.concatenate([jnp.repeat(last_P1, group_size, axis=0), x_BC[:, :-1]], axis=1)

    results = tuple(predicting(x) for x in moe.by_token(hidden, mlp_results))
    return results, hidden[:, :L]
