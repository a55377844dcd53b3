"""The loss of a micro-batch: a sum of terms.

    surrogate          sum_t w_t c_t s_t            c_t = weight of the correction, 1 without one
    divergence         coefficient * sum_t w_t d_t
    entropy bonus      -coefficient * sum_t w_t H_t
    critic             sum_t w_t v_t
    cross-entropies    coefficient * (-sum_t u_t log p_t), one for each
    expert balance     coefficient * balance cost of the routers

Every term is a function of an ``Objective`` (static) and of ``LossInputs`` (arrays). It returns a ``Term``: its
contributions to the loss, and sums for metrics. A term that the run does not use returns an empty ``Term``. The token
weights w_t and u_t include all denominators. Contributions and sums of micro-batches therefore add up to the
values of the batch.

Owns: the terms and their order, the sums for metrics. Does not know: forward passes, gradients, an algorithm's name.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import corrections
from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.aggregation import cross_entropy
from jaxrl_llm.algorithms.divergences import kl_estimate
from jaxrl_llm.algorithms.inputs import Ratios, Tokens
from jaxrl_llm.algorithms.surrogates import surrogate_terms
from jaxrl_llm.config import AlgorithmConfig, UpdateConfig
from jaxrl_llm.models import moe
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.row_logp import RowValues
from jaxrl_llm.settings.use import Chosen
from jaxrl_llm.types import AGE_BUCKETS, Experience, Sums

HIGH_GAP = 10  # a token's sampler-learner gap is high above this many times the limit of the gap

# Sums of the sampler-learner gap. A skipped update also adds to them, because a large gap shows a fault.
GAP_SUMS = ("own_token_count", "gap_sum", "gap_max", "gap_high_count")


class Weights(NamedTuple):
    """Weight of each token in the parts of the loss, [...,S] f32. All denominators are included."""

    policy: jax.Array  # surrogate, divergence, entropy bonus and critic
    cross_entropies: tuple[jax.Array, ...] = ()  # one for each cross-entropy


class LossInputs(NamedTuple):
    """Arrays that the terms of the loss read, for the B rows of one micro-batch."""

    rows: Experience
    weights: Weights
    tokens: Tokens  # view of the rows for the functions of the algorithm
    outputs: RowValues  # values of the forward pass
    version: jax.Array  # [] i32, version of the current weights
    over_batch: jax.Array | None = None  # [] f32, statistic of the whole batch that the correction needs
    entropy_coefficient: jax.Array | None = None  # [] f32 weight of the entropy bonus, if the weight changes
    expert_counts: jax.Array | None = None  # [layers,E] f32, tokens of the batch per expert, with a load-balance loss

    @property
    def mask(self) -> jax.Array:
        """Trained tokens, [B,S] bool."""
        return self.tokens.mask


class Term(NamedTuple):
    """Result of one term of the loss."""

    contributions: tuple[jax.Array, ...] = ()  # [] f32 each; the loss adds them one after another
    sums: Sums = Sums()


@dataclasses.dataclass(frozen=True)
class Objective:
    """Static description of the loss.

    Attributes:
        compares_mixed: whether the sampler-learner gap includes the new tokens of rows that also have tokens of older
            weights. False if the sampler attended to keys of the older weights.
    """

    algorithm: AlgorithmConfig
    config: UpdateConfig
    arch: Architecture
    compares_mixed: bool = True

    @property
    def old_is_behaviour(self) -> bool:
        """Whether the old policy is the behaviour policy."""
        return self.algorithm.old_policy.facts.is_behaviour

    @property
    def corrected_ratio(self) -> str:
        """Policy whose ratio to the behaviour policy the correction supplies: "old", "policy" or "".

        "" means that the surrogate contains this ratio itself or needs no ratio.
        """
        base = self.algorithm.surrogate.facts.base
        if base == "old" and self.old_is_behaviour:
            return ""
        return base

    @property
    def bins(self) -> values.Bins:
        """Bins that turn a value head's outputs into values."""
        critic = self.algorithm.critic
        return values.Bins(critic.bins, critic.low, critic.high)

    @property
    def reads_prompt_logp(self) -> bool:
        """Whether a cross-entropy reads the log-probs of prompts."""
        return any(_reads_prompts(chosen) for chosen in self.algorithm.cross_entropies)

    def ratios(self, tokens: Tokens) -> Ratios:
        """Return the correction's ratios to the behaviour policy, without gradients.

        ``log_ratio`` is the old policy's if ``corrected_ratio`` is "old", else the current policy's.
        """
        base_logp = tokens.old_logp if self.corrected_ratio == "old" else tokens.policy_logp
        log_ratio = base_logp - tokens.behaviour_logp
        policy_log_ratio = tokens.policy_logp - tokens.behaviour_logp
        return Ratios(
            jax.lax.stop_gradient(log_ratio),
            jax.lax.stop_gradient(policy_log_ratio),
            tokens.mask,
        )


def loss(objective: Objective, inputs: LossInputs) -> tuple[jax.Array, Sums]:
    """Return the loss [] f32 of a micro-batch, and its sums for metrics in float32 and without gradients."""
    contributions: list[jax.Array] = []
    sums = Sums()
    for term in TERMS:
        result = term(objective, inputs)
        contributions += result.contributions
        sums = sums.union(result.sums)
    total = functools.reduce(operator.add, contributions)
    sums = sums.union(Sums({"loss_sum": total}))
    return total, jax.lax.stop_gradient(jax.tree.map(lambda x: x.astype(jnp.float32), sums))


def surrogate(objective: Objective, inputs: LossInputs) -> Term:
    """Return the algorithm's surrogate, weighted by the correction if there is one."""
    algorithm = objective.algorithm
    weight_BS = inputs.weights.policy
    if not algorithm.correction:
        value, is_clipped = surrogate_terms(algorithm.surrogate, inputs.tokens)
        return Term((jnp.sum(weight_BS * value),), _clip_sums(inputs, is_clipped))
    ratios = objective.ratios(inputs.tokens)._replace(over_batch=inputs.over_batch)
    log_weight, is_kept = algorithm.correction(ratios)
    correction = corrections.weight(log_weight, is_kept, is_carried=not objective.corrected_ratio)
    # Tokens that the correction drops are also left out of a row's sums in the surrogate.
    value, is_clipped = surrogate_terms(algorithm.surrogate, inputs.tokens.only(is_kept))
    correction_sums = Sums({"correction_weight_sum": _total(inputs, correction)})
    sums = _clip_sums(inputs, is_clipped).union(correction_sums)
    return Term((jnp.sum(weight_BS * (correction * value)),), sums)


def divergence(objective: Objective, inputs: LossInputs) -> Term:
    """Return the penalty on the divergence from the reference."""
    chosen = objective.algorithm.divergence
    if not chosen:
        return Term()
    kl = chosen(inputs.tokens)
    penalty = chosen["coefficient"] * jnp.sum(inputs.weights.policy * kl)
    return Term((penalty,), Sums({"kl_reference_sum": jnp.sum(kl)}))


def entropy_bonus(objective: Objective, inputs: LossInputs) -> Term:
    """Return the negated entropy bonus. The entropy is a metric also without a bonus."""
    entropy = inputs.outputs.entropy
    sums = Sums({"entropy_sum": _total(inputs, entropy)})
    chosen = objective.algorithm.entropy_bonus
    if not chosen:
        return Term((), sums)
    coefficient = inputs.entropy_coefficient
    if coefficient is None:
        coefficient = chosen["coefficient"]
    bonus = coefficient * jnp.sum(inputs.weights.policy * jnp.where(inputs.mask, entropy, 0.0))
    return Term((-bonus,), sums)


def critic(objective: Objective, inputs: LossInputs) -> Term:
    """Return the loss of the value head, if the forward pass had a value head."""
    outputs = inputs.outputs.readout
    if outputs is None:
        return Term()
    value_loss, sums = values.value_terms(
        outputs,
        inputs.rows.columns["returns"],
        inputs.rows.columns.get("value"),
        inputs.mask,
        objective.bins,
        clip=objective.algorithm.critic.clip,
    )
    return Term((jnp.sum(inputs.weights.policy * value_loss),), Sums(sums))


def cross_entropies(objective: Objective, inputs: LossInputs) -> Term:
    """Return the cross-entropies of prompts and of external rows."""
    contributions = []
    totals = {}
    for chosen, weight in zip(objective.algorithm.cross_entropies, inputs.weights.cross_entropies, strict=True):
        logp = inputs.outputs.prompt_logp if _reads_prompts(chosen) else inputs.outputs.logp
        assert logp is not None  # exists, because the forward pass returns the log-probs that the objective reads
        value = cross_entropy(logp, weight)
        contributions.append(chosen["coefficient"] * value)
        totals[f"{chosen.name}_loss_sum"] = value
        totals[f"{chosen.name}_weight_sum"] = jnp.sum(weight)
    return Term(tuple(contributions), Sums(totals))


def expert_balance(objective: Objective, inputs: LossInputs) -> Term:
    """Return the balance cost of the experts' routers. The loads of the experts are metrics also without a cost."""
    totals = moe.sums(inputs.outputs.routed, inputs.mask, inputs.expert_counts, objective.arch)
    coefficient = objective.config.load_balance
    if not coefficient:
        return Term((), Sums(totals))
    return Term((coefficient * totals["balance_sum"],), Sums(totals))


def token_sums(objective: Objective, inputs: LossInputs) -> Term:
    """Return the counts of tokens and rows, and the sums of the ratios of current to behaviour policy."""
    del objective
    mask = inputs.mask
    tokens = inputs.tokens
    log_ratio = tokens.policy_logp - tokens.behaviour_logp
    ratio = jnp.where(mask, jnp.exp(log_ratio), 0.0)
    sequence_ratio = corrections.sequence_ratio(log_ratio, mask)
    # The behaviour policy is the first argument of k3, because it drew the samples.
    kl_behaviour = kl_estimate(tokens.behaviour_logp, tokens.policy_logp, kind="k3")
    totals = {
        "token_count": _total(inputs, mask),
        "row_count": jnp.sum(jnp.any(mask, axis=1).astype(jnp.float32)),
        "kl_behaviour_sum": _total(inputs, kl_behaviour),
        "ratio_sum": jnp.sum(ratio),
        "ratio_square_sum": jnp.sum(jnp.square(ratio)),
        "sequence_ratio_sum": jnp.sum(sequence_ratio),
        "sequence_ratio_square_sum": jnp.sum(jnp.square(sequence_ratio)),
    }
    by_age = _by_age(
        inputs.rows,
        token_count=mask,
        ratio_sum=ratio,
        ratio_square_sum=jnp.square(ratio),
    )
    return Term((), Sums(totals, {"ratio_max": jnp.max(ratio)}, by_age))


def gap_sums(objective: Objective, inputs: LossInputs) -> Term:
    """Return the gap between the log-probs of sampler and learner, on tokens that the current weights sampled."""
    rollout = inputs.rows.rollout
    tokens = inputs.tokens
    # External rows have the learner's own log-probs, so they cannot measure the gap to the sampler.
    is_new = rollout.policy_version == inputs.version
    is_compared = inputs.mask & is_new & (rollout.group_id >= 0)[:, None]
    if not objective.compares_mixed:
        is_compared &= jnp.all(is_new | (rollout.policy_version < 0), axis=1)[:, None]
    gap = jnp.where(is_compared, jnp.abs(tokens.policy_logp - tokens.behaviour_logp), 0.0)
    is_high = gap > HIGH_GAP * objective.config.max_sampler_learner_gap_nats
    totals = {
        "own_token_count": jnp.sum(is_compared.astype(jnp.float32)),
        "gap_sum": jnp.sum(gap),
        "gap_high_count": jnp.sum(is_high.astype(jnp.float32)),
    }
    maxima = {"gap_max": jnp.max(gap)}
    if not objective.old_is_behaviour:
        maxima["old_gap_max"] = jnp.max(jnp.abs(tokens.old_logp - tokens.behaviour_logp))
    return Term((), Sums(totals, maxima))


# The loss adds the contributions in this order.
TERMS: tuple[Callable[[Objective, LossInputs], Term], ...] = (
    surrogate,
    divergence,
    entropy_bonus,
    critic,
    cross_entropies,
    expert_balance,
    token_sums,
    gap_sums,
)


def _reads_prompts(chosen: Chosen) -> bool:
    """Whether a cross-entropy reads the log-probs of prompts, not of completions."""
    return chosen.facts.reads == "prompt_logp"


def _total(inputs: LossInputs, value: jax.Array) -> jax.Array:
    """Return the sum of ``value`` [B,S] over the trained tokens, [] f32."""
    return jnp.sum(jnp.where(inputs.mask, value, 0).astype(jnp.float32))


def _clip_sums(inputs: LossInputs, is_clipped: jax.Array) -> Sums:
    """Return the number of trained tokens that a bound of the surrogate leaves without a gradient."""
    by_age = _by_age(inputs.rows, clipped_count=inputs.mask & is_clipped)
    return Sums({"clipped_count": _total(inputs, is_clipped)}, {}, by_age)


def _by_age(rows: Experience, **values: jax.Array) -> dict[str, jax.Array]:
    """Return the sums of each of the values [B,S] over the rows of every age bucket, [len(AGE_BUCKETS) + 1].

    The result is empty if the rows have no column ``age_bucket``, which a draw from the ring adds.
    """
    if "age_bucket" not in rows.columns:
        return {}
    num_buckets = len(AGE_BUCKETS) + 1
    bucket_number = jnp.arange(num_buckets)[:, None]
    is_in_bucket = rows.columns["age_bucket"][None, :] == bucket_number

    def by_bucket(value: jax.Array) -> jax.Array:
        of_row = jnp.sum(value, axis=1)
        of_rows_in_bucket = jnp.where(is_in_bucket, of_row[None, :], 0)
        return jnp.sum(of_rows_in_bucket, axis=1)

    return {name: by_bucket(value) for name, value in values.items()}
