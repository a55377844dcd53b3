"""Aggregation: the weights that per-token loss terms are added up by.

An aggregation is a function of a mask [B,S] and of ``Batch`` to weights w with ``loss = sum(w * term)``: the division
has happened, once for the whole batch, so micro-batches and devices only add. Tokens are those of the mask in trainable
rows; rows are those with at least one. Without any, all weights are 0.

Owns: those functions, what else is trained on (cross-entropies), the tables. Does not know: terms, models.
Letters: B rows, S row width.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Batch
from jaxrl_llm.ops.masks import completion_mask


def token_mean(mask: Bool[ArrayLike, "B S"], x: Batch) -> Float[Array, "B S"]:
    """w = 1 / tokens of the batch.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8.
    """
    active = mask & x.trainable[:, None]
    return _over(active, jnp.sum(jnp.sum(active, axis=1, keepdims=True)).reshape(1, 1))


@needs(counts_rows_alike=True)
def sequence_mean(mask: Bool[ArrayLike, "B S"], x: Batch) -> Float[Array, "B S"]:
    """w = 1 / (rows of the batch * tokens of the row).

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3.
    """
    active = mask & x.trainable[:, None]
    length = jnp.sum(active, axis=1, keepdims=True)
    return _over(active, jnp.sum(length > 0) * length)


@needs(sums_tokens=True)
def constant_length(mask: Bool[ArrayLike, "B S"], x: Batch) -> Float[Array, "B S"]:
    """w = 1 / (rows of the batch * the longest completion there may be).

    Source: Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    active = mask & x.trainable[:, None]
    num_rows = jnp.sum(jnp.sum(active, axis=1, keepdims=True) > 0)
    return _over(active, (num_rows * x.max_length).reshape(1, 1))


def prompt_mean(mask: Bool[ArrayLike, "B S"], x: Batch) -> Float[Array, "B S"]:
    """w = 1 / (prompts of the batch * tokens of the prompt's rows); makes a [B, B] table.

    Source: ScaleRL, Khatri et al. 2025, arXiv:2510.13786.
    """
    active = mask & x.trainable[:, None]
    length = jnp.sum(active, axis=1)
    same_BB = (x.group_id[:, None] == x.group_id[None, :]) & (length > 0)[None, :]
    num_tokens = jnp.sum(jnp.where(same_BB, length[None, :], 0), axis=1, keepdims=True)
    is_first = (length > 0) & (jnp.argmax(same_BB, axis=1) == jnp.arange(mask.shape[0]))
    return _over(active, jnp.sum(is_first) * num_tokens)


def _over(active: Bool[ArrayLike, "B S"], denominator: Int[ArrayLike, "#B 1"]) -> Float[Array, "B S"]:
    return active.astype(jnp.float32) / jnp.maximum(denominator, 1).astype(jnp.float32)


# ---- what else is trained on


@needs(reads="prompt_logp")
def environment(x: Batch) -> Float[Array, "B S"]:
    """The prompts' tokens, which an environment wrote first, from the second on: a model of it.

        w = 1 / (rows * tokens of the row's prompt but its first): each row's prompt is a mean, in which one that
        siblings share counts as often as it has siblings; rows of one token, which predict nothing, are rows too

    It learns from every rollout that is drawn, of a tied group too.

    Source: ECHO, arXiv:2605.24517, with a coefficient of 0.05. Differs: nothing is left out of a prompt as a warning of
        the harness.
    """
    predicted = completion_mask(jnp.ones_like(x.prompt_length), x.prompt_length, x.width)
    return _row_means(predicted, x)


def _row_means(mask: Bool[ArrayLike, "B S"], x: Batch) -> Float[Array, "B S"]:
    """w = 1 / (rows of the batch * tokens of the row), rows without a token too."""
    active = mask & x.trainable[:, None]
    return _over(active, jnp.sum(x.trainable) * jnp.sum(active, axis=1, keepdims=True))


def _as_drawn(path: str, settings: Any, config: Any) -> str:
    if not config.environments.factory:
        return f"[{path}] needs environments.factory: without one nobody answers"
    s = config.sampling
    plain = (s.temperature, s.top_k, s.top_p, s.min_p) == (1.0, 0, 1.0, 0.0)
    names = "[sampling.temperature], [sampling.top_k], [sampling.top_p] and [sampling.min_p]"
    return "" if plain else f"{names} must be 1, 0, 1 and 0 for {path}='answers', which no filter has drawn"


@needs(rule=_as_drawn)
def answers(x: Batch) -> Float[Array, "B S"]:
    """What an environment answered between the policy's turns: a model of it.

        w = 1 / (rows * answers' tokens of the row), rows without an answer too

    Source: ECHO, arXiv:2605.24517 (released code), with a coefficient of 0.05; 0.1 and more hurt. Differs: nothing is
        left out as a warning of the harness.
    """
    return _row_means(completion_mask(x.prompt_length, x.length, x.width) & ~x.sampled, x)


@needs(others=True)
def imitation(x: Batch) -> Float[Array, "B S"]:
    """The correct rollouts among those of others (external.paths), beside what they get as rollouts.

    w = 1 / tokens of the correct completions which others wrote, as in ``sft``
    """
    shown = x.trainable & (x.group_id < 0) & x.correct
    return token_mean(completion_mask(x.prompt_length, x.length, x.width), x._replace(trainable=shown))


def cross_entropy(logp: Float[ArrayLike, "B T"], weight: Float[ArrayLike, "B T"]) -> Float[Array, ""]:
    """``-sum weight logp`` [] f32 nats of tokens [B, T]; where the weight is 0, ``logp`` may be anything."""
    return -jnp.sum(weight * jnp.where(weight > 0, logp, 0.0))


AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_length": constant_length,
    "prompt_mean": prompt_mean,
}

CROSS_ENTROPIES = {"environment": environment, "answers": answers, "imitation": imitation}
