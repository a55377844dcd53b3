"""Aggregations: the weights of the tokens in the sum of their loss terms. Cross-entropies: further terms of the loss.

An aggregation is a function of a mask [B,S] and of ``Batch``. It returns weights w with ``loss = sum(w * term)``. The
weights include the division by a count of the whole batch, so micro-batches and devices only add. Tokens are the tokens
of the mask in trainable rows; rows are the rows with at least one such token. Without any token all weights are 0.

Owns: these functions, the weights of cross-entropies, the tables. Does not know: terms, models.
Letters: B rows, S row width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import AnyArray, Batch
from jaxrl_llm.ops.masks import completion_mask


def token_mean(mask: Bool[AnyArray, "B S"], x: Batch) -> Float[AnyArray, "B S"]:
    """Return w = 1 / tokens of the batch.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8.
    """
    active = _active(mask, x)
    length = jnp.sum(active, axis=1, keepdims=True)
    num_tokens = jnp.sum(length)
    return _divide(active, num_tokens.reshape(1, 1))


@needs(counts_rows_alike=True)
def sequence_mean(mask: Bool[AnyArray, "B S"], x: Batch) -> Float[AnyArray, "B S"]:
    """Return w = 1 / (rows of the batch * tokens of the row).

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3.
    """
    active = _active(mask, x)
    length = jnp.sum(active, axis=1, keepdims=True)
    num_rows = jnp.sum(length > 0)
    return _divide(active, num_rows * length)


@needs(sums_tokens=True)
def constant_length(mask: Bool[AnyArray, "B S"], x: Batch) -> Float[AnyArray, "B S"]:
    """Return w = 1 / (rows of the batch * the longest possible completion).

    Source: Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    active = _active(mask, x)
    length = jnp.sum(active, axis=1, keepdims=True)
    num_rows = jnp.sum(length > 0)
    largest_total = num_rows * x.max_length
    return _divide(active, largest_total.reshape(1, 1))


def prompt_mean(mask: Bool[AnyArray, "B S"], x: Batch) -> Float[AnyArray, "B S"]:
    """Return w = 1 / (prompts of the batch * tokens of the prompt's rows). It computes a [B, B] table.

    Source: ScaleRL, Khatri et al. 2025, arXiv:2510.13786.
    """
    active = _active(mask, x)
    length = jnp.sum(active, axis=1)
    has_token = length > 0
    same_prompt_BB = x.group_id[:, None] == x.group_id[None, :]
    same_BB = same_prompt_BB & has_token[None, :]
    num_tokens = jnp.sum(jnp.where(same_BB, length[None, :], 0), axis=1, keepdims=True)
    first_row = jnp.argmax(same_BB, axis=1)
    is_first = has_token & (first_row == jnp.arange(mask.shape[0]))
    num_prompts = jnp.sum(is_first)
    return _divide(active, num_prompts * num_tokens)


def _active(mask: Bool[AnyArray, "B S"], x: Batch) -> Bool[AnyArray, "B S"]:
    """Return the tokens of the mask in trainable rows."""
    return mask & x.trainable[:, None]


def _divide(
    active: Bool[AnyArray, "B S"],
    denominator: Int[AnyArray, "#B 1"],
) -> Float[AnyArray, "B S"]:
    """Return 1 / denominator at the active tokens, 0 elsewhere."""
    positive = jnp.maximum(denominator, 1).astype(jnp.float32)
    return active.astype(jnp.float32) / positive


# ---- cross-entropies


@needs(reads="prompt_logp")
def environment(x: Batch) -> Float[AnyArray, "B S"]:
    """Return the weights of the prompts' tokens from the second on: the policy learns to model its environment.

        w = 1 / (rows * tokens of the row's prompt without its first)

    The loss of a row's prompt is a mean over its tokens. A prompt that the rows of a group share counts once for each
    row. A row whose prompt has one token has no loss, but counts as a row.

    The cross-entropy uses every drawn rollout, also the rollouts of tied groups.

    Source: ECHO, arXiv:2605.24517, with a coefficient of 0.05. Differs: warnings that the source's harness adds stay in
        the prompt.
    """
    predicted = completion_mask(jnp.ones_like(x.prompt_length), x.prompt_length, x.width)
    return _row_means(predicted, x)


def _row_means(mask: Bool[AnyArray, "B S"], x: Batch) -> Float[AnyArray, "B S"]:
    """Return w = 1 / (rows of the batch * tokens of the row). Rows without a token also count as rows."""
    active = _active(mask, x)
    num_rows = jnp.sum(x.trainable)
    length = jnp.sum(active, axis=1, keepdims=True)
    return _divide(active, num_rows * length)


def _has_unfiltered_answers(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if there is no environment, or if sampling filters tokens."""
    if not config.environments.factory:
        return f"[{path}] needs environments.factory: without an environment there are no answers"
    sampling = config.sampling
    if (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0):
        return ""
    return (
        "[sampling.temperature], [sampling.top_k], [sampling.top_p] and [sampling.min_p] must be 1, 0, 1 and 0 for "
        f"{path}='answers': no filter has drawn the environment's tokens"
    )


@needs(rule=_has_unfiltered_answers)
def answers(x: Batch) -> Float[AnyArray, "B S"]:
    """Return the weights of the environment's answers between the policy's turns: the policy learns to model them.

        w = 1 / (rows * answers' tokens of the row), rows without an answer count too

    Source: ECHO, arXiv:2605.24517 (released code), with a coefficient of 0.05; the source finds 0.1 and more harmful.
        Differs: the harness's warnings stay in the answers.
    """
    assert x.sampled is not None
    completion = completion_mask(x.prompt_length, x.length, x.width)
    is_answer = completion & ~x.sampled
    return _row_means(is_answer, x)


@needs(others=True)
def imitation(x: Batch) -> Float[AnyArray, "B S"]:
    """Return the weights of the correct external rollouts (external.paths). These rollouts keep their other loss terms.

    w = 1 / tokens of the correct external completions, as in ``sft``
    """
    is_demonstration = x.trainable & (x.group_id < 0) & x.correct
    completion = completion_mask(x.prompt_length, x.length, x.width)
    return token_mean(completion, x._replace(trainable=is_demonstration))


def cross_entropy(
    logp: Float[AnyArray, "B T"],
    weight: Float[AnyArray, "B T"],
) -> Float[Array, ""]:
    """Return ``-sum weight logp`` [] f32 nats of tokens [B, T]. ``logp`` may have any value if the weight is 0."""
    finite_logp = jnp.where(weight > 0, logp, 0.0)
    return -jnp.sum(weight * finite_logp)


AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_length": constant_length,
    "prompt_mean": prompt_mean,
}

CROSS_ENTROPIES = {
    "environment": environment,
    "answers": answers,
    "imitation": imitation,
}
