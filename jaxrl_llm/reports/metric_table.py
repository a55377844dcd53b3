"""Table of the metrics of a run: their names, units and meanings.

``METRICS`` is the only declaration of a metric. ``MetricsWriter.write`` raises on a name that is not in ``METRICS``.

Owns: the table METRICS, the mapping from the learner's sums to metrics, and the metrics by turn, by reward function, by
column of the rewards and of an evaluation. Does not know: how the other values are computed (metrics).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.inputs import COLUMNS, ROW, Column
from jaxrl_llm.types import AGE_BUCKETS, OUTCOME_SCORE, Rewards

# Labels of the age buckets of rollouts: "0", "1", "2-3", ..., "16+".
_LOWEST = (0, *(highest + 1 for highest in AGE_BUCKETS))
AGE_LABELS = (
    *(f"{low}-{high}" if low < high else f"{high}" for low, high in zip(_LOWEST, AGE_BUCKETS, strict=False)),
    f"{_LOWEST[-1]}+",
)
# The reward function that uses the majority answer to a question as its label (TTRL).
VOTE = "jaxrl_llm.scoring.scores:majority"
# Number of turns that each have a reward metric. The rewards of later turns count only in the total.
TURNS_SHOWN = 4
# Number of reward functions that each have a metric. The scores of later functions count only in the total.
FUNCTIONS_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Metric:
    """Unit and meaning of a metric, which has one value per iteration. The meaning states the denominator."""

    unit: str
    meaning: str


def column_metrics(columns: Mapping[str, Column]) -> dict[str, Metric]:
    """Return the metric of each column that has one number per rollout and is made with the rewards."""
    metrics = {}
    for name, column in columns.items():
        if column.from_rewards == ROW:
            meaning = f"Mean of the column {name} over the scored rollouts, if the method reads it: {column.meaning}."
            metrics[f"rollout/{name}_mean"] = Metric("number", meaning)
    return metrics


# Maps names to metrics. An iteration samples rollouts, scores them, puts them in the ring and takes U optimizer steps.
METRICS: dict[str, Metric] = {
    "rollout/generated_rows": Metric(
        "rollouts",
        "Number of rollouts sampled in the iteration. The rates below are over these rollouts. With "
        "rollout.max_resample_rounds the number can be larger than the number of rollouts that enter the ring.",
    ),
    "rollout/reward_mean": Metric(
        "reward",
        "Mean total reward of the iteration's rollouts with a score.",
    ),
    "rollout/reward_std": Metric(
        "reward",
        "Standard deviation of the total reward over the rollouts with a score.",
    ),
    "rollout/pass_rate": Metric(
        "fraction",
        "Fraction of the scored rollouts whose reward is at least rewards.pass_threshold.",
    ),
    "rollout/completion_length_tokens": Metric(
        "tokens",
        "Mean completion length with EOS of the finished rollouts.",
    ),
    "rollout/truncated_frac": Metric(
        "fraction",
        "Fraction of the finished rollouts that were cut at sampling.max_completion_tokens.",
    ),
    "rollout/masked_tokens": Metric(
        "tokens",
        "Number of tokens that reward functions mask (reshaping=reward_mask). Missing if the number is 0.",
    ),
    "rollout/turns_mean": Metric(
        "turns",
        "Mean number of turns of the policy in a rollout, if environments.factory is set.",
    ),
    **{
        f"rollout/reward_turn_{k}": Metric(
            "reward",
            f"Reward of turn {k} of the policy, mean over the scored rollouts that have this turn.",
        )
        for k in range(1, TURNS_SHOWN + 1)
    },
    **{
        f"rollout/reward_function_{k}": Metric(
            "reward",
            f"Score of function {k} of rewards.functions without its weight, mean over the rollouts that it scored.",
        )
        for k in range(1, FUNCTIONS_SHOWN + 1)
    },
    **column_metrics(COLUMNS),
    "rollout/majority_frac": Metric(
        "fraction",
        "Fraction of the scored rollouts that give the majority answer of their question (scores:majority).",
    ),
    "rollout/label_accuracy": Metric(
        "fraction",
        "Fraction of the questions with a majority answer whose majority answer is right. Another reward function, of "
        "weight 0, decides what is right (rewards.pass_threshold or more).",
    ),
    "rollout/reward_accuracy": Metric(
        "fraction",
        "Fraction of the rollouts on which scores:majority and the function of rollout/label_accuracy agree. It is "
        "over the rollouts that both functions scored. It is at least the label accuracy if wrong answers differ from "
        "each other.",
    ),
    "rollout/stop_string_frac": Metric(
        "fraction",
        "Fraction of the finished rollouts that a stop string ended.",
    ),
    "rollout/degenerate_group_frac": Metric(
        "fraction",
        "Fraction of the groups whose advantages are all 0, so that the group teaches nothing. If algorithm.advantage "
        "compares siblings, these are groups with equal rewards or with fewer than two rewards.",
    ),
    "rollout/sampled_entropy_nats": Metric(
        "nats per token",
        "Mean of -log p over the drawn tokens. p is the probability that the sampler recorded.",
    ),
    "rollout/model_entropy_nats": Metric(
        "nats per token",
        "Mean entropy of the distributions from which the same tokens were drawn. It differs from the sampled entropy "
        "if the sampler draws from another distribution, for example at another temperature.",
    ),
    "rollout/sampled_entropy_error_nats": Metric(
        "nats per token",
        "Standard error of the difference between the sampled and the model entropy. A run warns if the difference "
        "exceeds six standard errors.",
    ),
    "rollout/support_cut_frac": Metric(
        "fraction",
        "Fraction of the drawn tokens whose filter left more ids than sampling.support_tokens keeps. These tokens were "
        "drawn among the most likely ids; evaluations draw among all ids.",
    ),
    "prompts/retired": Metric(
        "questions",
        "Number of questions that prompts.retire_pass_rate excludes from further sampling.",
    ),
    "update/loss": Metric(
        "loss",
        "Loss that the optimizer minimises, mean over the iteration's optimizer steps.",
    ),
    "update/entropy_nats": Metric(
        "nats per token",
        "Entropy of the current policy, mean over the trained completion tokens.",
    ),
    "update/entropy_coefficient": Metric(
        "weight",
        "Weight of the entropy bonus with algorithm.entropy_bonus=adaptive, mean over the optimizer steps.",
    ),
    "update/adapter_module": Metric(
        "number",
        "Number of the part of the adapters' rank that learns with model.lora.modules, from 1; mean over the steps.",
    ),
    "update/kl_behaviour_nats": Metric(
        "nats per token",
        "k3 estimate of KL(behaviour || current policy), mean over the trained completion tokens.",
    ),
    "update/kl_reference_nats": Metric(
        "nats per token",
        "KL estimate of algorithm.divergence, mean over the trained tokens.",
    ),
    "update/old_policy_gap_max_nats": Metric(
        "nats",
        "Largest |log-prob of the old policy (algorithm.old_policy) - log-prob of the behaviour policy| of a trained "
        'token, at most 20. With "generation" it is the gap between sampler and learner, at any age of the rollout.',
    ),
    "update/clip_frac": Metric(
        "fraction",
        "Fraction of the trained completion tokens whose ratio is clipped.",
    ),
    "update/ratio_max": Metric(
        "ratio",
        "Largest current/behaviour probability ratio of a trained token.",
    ),
    "update/ess_frac": Metric(
        "fraction",
        "Effective sample size of the ratios, (sum w)^2 / sum w^2, as a fraction of the trained tokens. 1 = on-policy.",
    ),
    "update/sequence_ess_frac": Metric(
        "fraction",
        "Effective sample size of the ratios of whole completions, as a fraction of the trained rollouts.",
    ),
    **{
        f"update/clip_frac_age_{label}": Metric(
            "fraction",
            f"Fraction of the trained tokens of rollouts of age {label} whose ratio is clipped.",
        )
        for label in AGE_LABELS
    },
    **{
        f"update/ess_frac_age_{label}": Metric(
            "fraction", f"update/ess_frac over the tokens of rollouts of age {label}."
        )
        for label in AGE_LABELS
    },
    "update/correction_weight": Metric(
        "weight",
        "Weight of algorithm.correction, mean over the trained completion tokens. A masked token has weight 0.",
    ),
    "update/environment_nats": Metric(
        "nats per token",
        "Cross-entropy of prompts: mean over the tokens of a prompt, then over the trained rollouts.",
    ),
    "update/answers_nats": Metric(
        "nats per token",
        "Cross-entropy of environments' answers: mean over the answer tokens of a row, then over the rows.",
    ),
    "update/imitation_nats": Metric(
        "nats per token",
        "Cross-entropy of correct external rollouts: mean over their tokens, then over the batches that have any.",
    ),
    "update/value_loss": Metric(
        "loss",
        "Loss of the critic's predictions, mean over the trained completion tokens.",
    ),
    "update/explained_variance": Metric(
        "fraction",
        "1 - variance of (return - critic's value) / variance of the return, over the trained tokens.",
    ),
    "update/expert_load_max": Metric(
        "multiple",
        "Trained tokens of the most used expert of a layer, divided by the mean over the layer's experts. Largest "
        "value of all layers.",
    ),
    "update/expert_load_entropy_frac": Metric(
        "fraction",
        "Entropy of the experts' shares of a layer's trained tokens, divided by the entropy of equal shares. Mean over "
        "the layers.",
    ),
    "update/expert_balance": Metric(
        "cost",
        "Balance cost of update.load_balance, mean over the steps. With equal loads it is the number of experts per "
        "token.",
    ),
    "update/grad_norm": Metric(
        "norm",
        "Global gradient norm before clipping, mean over the optimizer steps.",
    ),
    "update/skipped_steps": Metric(
        "steps",
        "Number of skipped optimizer steps. The metrics above do not count them. A step is skipped if no trainable "
        "rollout could be drawn, or if it counts in update/nonfinite_steps.",
    ),
    "update/nonfinite_steps": Metric(
        "steps",
        "Number of optimizer steps that were skipped because the loss or a gradient norm was infinite or not a number.",
    ),
    "update/sampler_learner_gap_max_nats": Metric(
        "nats",
        "Largest |log-prob of the sampler - log-prob of the learner| of a token under the weights that sampled it. "
        "With rollout.stale_cache='keep', rows with tokens of several versions are left out, because the sampler "
        "attended to keys of older weights. External rollouts add nothing, because they have the learner's own "
        "log-probs.",
    ),
    "update/sampler_learner_gap_mean_nats": Metric(
        "nats",
        "Mean |log-prob of the sampler - log-prob of the learner| over the tokens of "
        "update/sampler_learner_gap_max_nats.",
    ),
    "optimizer/learning_rate": Metric(
        "per step",
        "Learning rate of the iteration's last optimizer step.",
    ),
    "optimizer/rate_scale": Metric(
        "factor",
        "Factor by which algorithm.step_size multiplies the learning rate, mean over the optimizer steps.",
    ),
    "replay/age_mean_steps": Metric(
        "iterations",
        "Iterations since the insertion of a drawn rollout, mean over the drawn rollouts.",
    ),
    "replay/age_max_steps": Metric(
        "iterations",
        "Iterations since the insertion of the oldest drawn rollout.",
    ),
    "replay/uses_mean": Metric(
        "draws",
        "Number of draws of a drawn rollout so far, including this draw; mean over the drawn rollouts.",
    ),
    "replay/replay_ratio": Metric(
        "draws",
        "Number of draws of a rollout during its life in the ring, mean over the rollouts that were replaced.",
    ),
    "replay/first_use_frac": Metric(
        "fraction",
        "Fraction of the draws that were the first draw of their rollout.",
    ),
    "replay/since_last_use_mean_steps": Metric(
        "optimizer steps",
        "Optimizer steps since the previous draw of a drawn rollout, mean over the draws that were not the first.",
    ),
    "replay/unique_prompts_mean": Metric(
        "prompts",
        "Number of different prompts in an update batch, mean over the iteration's batches that are not empty.",
    ),
    "external/groups": Metric(
        "groups",
        "Number of groups of external.paths that entered the ring in the iteration.",
    ),
    "external/reward_mean": Metric(
        "reward",
        "Mean total reward of the external completions that have a reward.",
    ),
    "external/failed_rewards": Metric(
        "rollouts",
        "Number of external completions without a reward. They are never drawn.",
    ),
    "external/skipped_lines": Metric(
        "lines",
        "Number of lines of external.paths so far that gave no group.",
    ),
    "external/failed_calls": Metric(
        "calls",
        "Number of failed calls of functions of external.paths so far.",
    ),
    "time/cost_ratio": Metric(
        "ratio",
        "Seconds to generate a rollout divided by the seconds to train on one; the mu of replay_plan. Generating takes "
        "time/generate_s and time/reward_s for rollout/generated_rows rollouts. Training takes time/update_s for "
        "replay/drawn_rows rollouts.",
    ),
    "time/compute_rollouts": Metric(
        "trained rollouts",
        "Compute of the run so far: the sum of trained rollouts + mu * generated rollouts. mu is replay.cost_ratio, or "
        "time/cost_ratio if that setting is 0.",
    ),
    "replay/filled_frac": Metric(
        "fraction",
        "Fraction of the ring's slots that hold a rollout.",
    ),
    "replay/wasted_share": Metric(
        "fraction",
        "Fraction of the token positions of the ring that hold no token of a rollout: padding and empty positions.",
    ),
    "replay/drawn_rows": Metric(
        "rollouts",
        "Number of rollouts drawn in the iteration, over all its optimizer steps.",
    ),
    "reward/timeout_count": Metric(
        "rollouts",
        "Number of rollouts whose reward exceeded its deadline.",
    ),
    "reward/error_count": Metric(
        "rollouts",
        "Number of rollouts whose reward function raised, returned no number or lost its process.",
    ),
    "time/generate_s": Metric(
        "seconds",
        "Seconds from the first prefill to the last finished completion on the host, without time/reward_s.",
    ),
    "time/environment_s": Metric(
        "seconds",
        "Part of time/generate_s in which the next chunk of decode steps waited for replies of environments.",
    ),
    "time/reward_s": Metric(
        "seconds",
        "Seconds of waiting for rewards after generation has ended, summed over the rounds.",
    ),
    "time/update_s": Metric(
        "seconds",
        "Seconds from scored rollouts to the metrics of the updates on the host. This includes the reference, the old "
        "policy and the critic on fresh rollouts, the insertion into the ring, and all optimizer steps.",
    ),
    "time/checkpoint_s": Metric(
        "seconds",
        "Seconds to write the checkpoint that was completed in the iteration. The loop continues during the write.",
    ),
    "time/iteration_s": Metric(
        "seconds",
        "Seconds since the end of the previous iteration, including the evaluation and the time that the loop waited "
        "for a checkpoint.",
    ),
    "tokens/generated": Metric(
        "tokens",
        "Number of tokens that the policy sampled in the iteration, including tokens of open rollouts.",
    ),
    "tokens/trained": Metric(
        "tokens",
        "Number of completion tokens in the update batches of steps that were not skipped. A token that is drawn twice "
        "counts twice.",
    ),
    "throughput/generate_tokens_per_s": Metric(
        "tokens/s",
        "tokens/generated divided by time/generate_s.",
    ),
    "throughput/update_tokens_per_s": Metric(
        "tokens/s",
        "tokens/trained divided by time/update_s.",
    ),
    "memory/peak_bytes": Metric(
        "bytes",
        "Peak memory so far of the fullest device, or of the process on CPU.",
    ),
    "compile/recompiles_after_warmup": Metric(
        "programs",
        "Number of programs so far that were compiled after the first iteration.",
    ),
    "eval/pass_rate": Metric(
        "fraction",
        "Fraction of the scored held-out completions whose reward is at least rewards.pass_threshold.",
    ),
    "eval/pass_any_rate": Metric(
        "fraction",
        "Fraction of the held-out questions with at least one passing completion among eval.num_samples "
        "(pass@num_samples). It is over the questions whose completions all have a score.",
    ),
    "eval/completion_length_tokens": Metric(
        "tokens",
        "Mean completion length with EOS of the held-out completions.",
    ),
    "eval/timeout_count": Metric(
        "rollouts",
        "Number of held-out completions whose reward exceeded its deadline.",
    ),
    "eval/error_count": Metric(
        "rollouts",
        "Number of held-out completions whose reward failed for another reason (see reward/error_count).",
    ),
}

# Metrics that are ratios of two sums of the learner (learner.update): (numerator, denominator).
RATIOS = {
    "update/loss": ("loss_sum", "update_count"),
    "update/entropy_nats": ("entropy_sum", "token_count"),
    "update/kl_behaviour_nats": ("kl_behaviour_sum", "token_count"),
    "update/kl_reference_nats": ("kl_reference_sum", "token_count"),
    "update/clip_frac": ("clipped_count", "token_count"),
    "update/correction_weight": ("correction_weight_sum", "token_count"),
    "update/value_loss": ("value_loss_sum", "token_count"),
    "update/environment_nats": ("environment_loss_sum", "update_count"),
    "update/answers_nats": ("answers_loss_sum", "update_count"),
    "update/imitation_nats": ("imitation_loss_sum", "imitation_weight_sum"),
    "update/entropy_coefficient": ("entropy_coefficient_sum", "update_count"),
    "update/adapter_module": ("adapter_module_sum", "update_count"),
    "update/grad_norm": ("grad_norm_sum", "update_count"),
    "update/sampler_learner_gap_mean_nats": ("gap_sum", "own_token_count"),
    "optimizer/rate_scale": ("rate_scale_sum", "update_count"),
    "replay/age_mean_steps": ("age_sum", "real_count"),
    "replay/uses_mean": ("uses_sum", "real_count"),
    "replay/replay_ratio": ("ended_uses", "ended_rows"),
    "replay/first_use_frac": ("first_use_count", "real_count"),
    "replay/since_last_use_mean_steps": ("since_last_use_sum", "reused_count"),
    "replay/unique_prompts_mean": ("unique_prompt_count", "batch_count"),
}


@dataclasses.dataclass(frozen=True)
class Copied:
    """A metric that is a value of the learner.

    Attributes:
        name: name of the value in the learner.
        kind: type of the metric.
        count: name of a count; if the count is 0, the metric is NaN. "" = no count.
    """

    name: str
    kind: type[int] | type[float]
    count: str = ""


# Metrics copied from the learner.
COPIED = {
    "update/ratio_max": Copied("ratio_max", float, "update_count"),
    "update/old_policy_gap_max_nats": Copied("old_gap_max", float, "update_count"),
    "update/sampler_learner_gap_max_nats": Copied("gap_max", float, "own_token_count"),
    "update/skipped_steps": Copied("skipped_count", int),
    "update/nonfinite_steps": Copied("nonfinite_count", int),
    "optimizer/learning_rate": Copied("learning_rate", float),
    "replay/age_max_steps": Copied("age_max", int, "real_count"),
    "replay/wasted_share": Copied("wasted_share", float),
    "replay/drawn_rows": Copied("real_count", int),
    "tokens/trained": Copied("token_count", int),
}


def turn_values(turns: Sequence[int], rewards: Rewards) -> dict[str, float]:
    """Return the metrics by turn and the number of masked tokens.

    ``turns`` has the number of turns of each rollout. It is empty without an environment: then there are no metrics by
    turn. The count of masked tokens is left out if it is 0.
    """
    values: dict[str, float] = {}
    masked = int(np.count_nonzero(rewards.columns.get("reward_mask", ())))
    if masked:
        values["rollout/masked_tokens"] = masked
    if not turns:
        return values
    values["rollout/turns_mean"] = sum(turns) / len(turns)
    turn_reward = rewards.columns.get("turn_reward")
    if turn_reward is None:
        return values
    for k in range(min(TURNS_SHOWN, turn_reward.shape[1])):
        has_turn = (np.asarray(turns) > k) & (rewards.outcome == OUTCOME_SCORE)
        if has_turn.any():
            values[f"rollout/reward_turn_{k + 1}"] = float(turn_reward[has_turn, k].mean())
    return values


def function_values(functions: Sequence[str], rewards: Rewards) -> dict[str, float]:
    """Return the mean score of each of the first ``FUNCTIONS_SHOWN`` reward functions.

    Return {} if there is only one function, because its score is the total. Only finite scores count.
    """
    if len(functions) <= 1:
        return {}
    values = {}
    for k, name in enumerate(functions[:FUNCTIONS_SHOWN], start=1):
        part = np.asarray(rewards.parts[name])
        scores = part[np.isfinite(part)]
        if scores.size:
            values[f"rollout/reward_function_{k}"] = float(scores.mean())
    return values


def column_values(rewards: Rewards) -> dict[str, float]:
    """Return the metrics of ``column_metrics``: means over the scored rollouts. A rollout without a value has 0.0."""
    is_scored = rewards.outcome == OUTCOME_SCORE
    values = {}
    for name, column in rewards.columns.items():
        if COLUMNS[name].from_rewards == ROW and is_scored.any():
            values[f"rollout/{name}_mean"] = float(column[is_scored].mean())
    return values


def vote_values(
    functions: Sequence[str],
    weights: Sequence[float],
    threshold: float,
    sizes: Sequence[int],
    rewards: Rewards,
) -> dict[str, float]:
    """Return the quality of the labels that ``scores:majority`` votes for, or {} if it is not among the functions.

    Args:
        threshold: an answer counts as right if its score by the other function, of weight 0, is at least this.
        sizes: number of rollouts of each group, in the order of the rewards.

    Source: TTRL, arXiv:2504.16084, label accuracy, reward accuracy and majority ratio.
    """
    if VOTE not in functions:
        return {}
    votes = np.asarray(rewards.parts[VOTE])
    values = {}
    if np.isfinite(votes).any():
        values["rollout/majority_frac"] = float(votes[np.isfinite(votes)].mean())
    judges = [name for name, weight in zip(functions, weights, strict=True) if weight == 0 and name != VOTE]
    if not judges:
        return values
    scores = np.asarray(rewards.parts[judges[0]])
    is_scored = np.isfinite(votes) & np.isfinite(scores)
    is_label = is_scored & (votes == 1)
    is_right = is_scored & (scores >= threshold)
    group = np.repeat(np.arange(len(sizes)), sizes)
    has_label = np.bincount(group, is_label, len(sizes)) > 0
    label_is_right = np.bincount(group, is_label & is_right, len(sizes)) > 0
    if has_label.any():
        values["rollout/label_accuracy"] = float(label_is_right[has_label].mean())
    if is_scored.any():
        values["rollout/reward_accuracy"] = float((is_label == is_right)[is_scored].mean())
    return values


def evaluation_values(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the rates and lengths of an evaluation as metrics.

    ``result`` comes from ``actor.evaluation.evaluate`` or from its file.
    """
    return {
        "eval/pass_rate": result["pass_rate"],
        "eval/completion_length_tokens": result["completion_length_tokens"],
        "eval/pass_any_rate": result["pass_at_k"][str(result["num_samples"])],
    }
