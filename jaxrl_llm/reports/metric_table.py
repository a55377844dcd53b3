"""Table of the metrics of a run: their names, units and meanings.

``METRICS`` is the only declaration of a metric. ``MetricsWriter.write`` raises on a name that is not in ``METRICS``.

Owns: the table METRICS, the mapping from the learner's sums to metrics, and the metrics by turn, by reward function and
of an evaluation. Does not know: how the other values are computed (metrics).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.types import AGE_BUCKETS, OUTCOME_SCORE, Rewards

# Labels of the age buckets of rollouts: "0", "1", "2-3", ..., "16+".
_LOWEST = (0, *(highest + 1 for highest in AGE_BUCKETS))
AGE_LABELS = (
    *(f"{low}-{high}" if low < high else f"{high}" for low, high in zip(_LOWEST, AGE_BUCKETS, strict=False)),
    f"{_LOWEST[-1]}+",
)
# The reward function that uses the majority answer to a question as its label (TTRL).
VOTE = "jaxrl_llm.scoring.scores:majority"
# Number of turns with a reward metric of their own. The rewards of later turns count only in the total.
TURNS_SHOWN = 4
# Number of reward functions with a metric of their own. The scores of later functions count only in the total.
FUNCTIONS_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Metric:
    """Unit and meaning of a metric, which has one value per iteration. The meaning states the denominator."""

    unit: str
    meaning: str


# Maps names to metrics. An iteration samples rollouts, scores them, puts them in the ring and takes U optimizer steps.
METRICS: dict[str, Metric] = {
    "rollout/generated_rows": Metric(
        "rollouts",
        "Rollouts sampled in the iteration, over which the rates below are; with rollout.max_resample_rounds more than "
        "go into the ring.",
    ),
    "rollout/reward_mean": Metric("reward", "Total reward, mean over the iteration's rollouts that got a score."),
    "rollout/reward_std": Metric("reward", "Standard deviation of the total reward over the same rollouts."),
    "rollout/pass_rate": Metric(
        "fraction", "Scored rollouts with reward at least rewards.pass_threshold, over scored rollouts."
    ),
    "rollout/completion_length_tokens": Metric("tokens", "Completion length with EOS, mean over finished rollouts."),
    "rollout/truncated_frac": Metric(
        "fraction", "Rollouts cut at sampling.max_completion_tokens, over finished rollouts."
    ),
    "rollout/masked_tokens": Metric(
        "tokens", "Tokens that reward functions mask (reshaping=reward_mask), where any are."
    ),
    "rollout/turns_mean": Metric("turns", "Turns of the policy in a rollout, where environments.factory is set."),
    **{
        f"rollout/reward_turn_{k}": Metric(
            "reward", f"What turn {k} of the policy's was given, mean over the scored rollouts that have one."
        )
        for k in range(1, TURNS_SHOWN + 1)
    },
    **{
        f"rollout/reward_function_{k}": Metric(
            "reward",
            f"Score by number {k} of several rewards.functions, without its weight, mean over rollouts that it scored.",
        )
        for k in range(1, FUNCTIONS_SHOWN + 1)
    },
    "rollout/majority_frac": Metric(
        "fraction",
        "Rollouts that give the majority answer of their question (scores:majority), over scored rollouts.",
    ),
    "rollout/label_accuracy": Metric(
        "fraction",
        "Questions whose majority answer is right, over questions with one. Another reward function, of weight 0, says "
        "what is right (rewards.pass_threshold or more).",
    ),
    "rollout/reward_accuracy": Metric(
        "fraction",
        "Rollouts that scores:majority and that function judge alike, over the rollouts that both scored. At least the "
        "label accuracy if wrong answers differ from each other.",
    ),
    "rollout/stop_string_frac": Metric("fraction", "Rollouts ended by a stop string, over finished rollouts."),
    "rollout/degenerate_group_frac": Metric(
        "fraction",
        "Groups whose advantages are all 0, over groups. Such is a group of equal rewards, or of fewer than two, "
        "where algorithm.advantage compares siblings: nothing to learn.",
    ),
    "rollout/sampled_entropy_nats": Metric(
        "nats per token", "Mean of -log p of the tokens that were drawn, p as the sampler recorded it."
    ),
    "rollout/model_entropy_nats": Metric(
        "nats per token",
        "Mean entropy of the distributions that the same tokens were drawn from. A sampler that draws from another "
        "distribution than it says (another temperature) shows here.",
    ),
    "rollout/sampled_entropy_error_nats": Metric(
        "nats per token", "Standard error of the difference of these two: a run warns beyond six of them."
    ),
    "rollout/support_cut_frac": Metric(
        "fraction",
        "Tokens whose filter left more ids than are kept (sampling.support_tokens), over tokens drawn. They were drawn "
        "among the most likely ones; evaluations draw among all.",
    ),
    "prompts/retired": Metric("questions", "Questions that prompts.retire_pass_rate keeps from being asked again."),
    "update/loss": Metric("loss", "What the optimizer descends, mean over the iteration's optimizer steps."),
    "update/entropy_nats": Metric(
        "nats per token", "Entropy of the current policy, mean over trained completion tokens."
    ),
    "update/entropy_coefficient": Metric(
        "weight", "Weight of the entropy bonus with algorithm.entropy_bonus=adaptive, mean over the optimizer steps."
    ),
    "update/adapter_module": Metric(
        "number", "Part of the adapters' rank that learns, from 1 on, with model.lora.modules; mean over the steps."
    ),
    "update/kl_behaviour_nats": Metric(
        "nats per token", "k3 estimate of KL(behaviour || current policy), mean over trained completion tokens."
    ),
    "update/kl_reference_nats": Metric(
        "nats per token", "KL estimate of algorithm.divergence, mean over trained tokens."
    ),
    "update/old_policy_gap_max_nats": Metric(
        "nats",
        "Largest |log-prob of the old policy (algorithm.old_policy) - of the behaviour policy| of a trained token, at "
        'most 20; with "generation" it is of sampler against learner, whatever the rollout\'s age.',
    ),
    "update/clip_frac": Metric(
        "fraction", "Trained completion tokens whose ratio is clipped, over trained completion tokens."
    ),
    "update/ratio_max": Metric("ratio", "Largest current/behaviour probability ratio of a trained token."),
    "update/ess_frac": Metric(
        "fraction", "Effective sample size of the ratios, (sum w)^2 / sum w^2, over the trained tokens; 1 = on-policy."
    ),
    "update/sequence_ess_frac": Metric(
        "fraction", "The same of whole completions: ratios of their probabilities, over the trained rollouts."
    ),
    **{
        f"update/clip_frac_age_{label}": Metric("fraction", f"Clipped tokens of rollouts of age {label}, over theirs.")
        for label in AGE_LABELS
    },
    **{
        f"update/ess_frac_age_{label}": Metric("fraction", f"update/ess_frac over tokens of age {label} alone.")
        for label in AGE_LABELS
    },
    "update/correction_weight": Metric(
        "weight", "Weight of algorithm.correction, 0 where it masks; mean over trained completion tokens."
    ),
    "update/environment_nats": Metric(
        "nats per token", "Cross-entropy of prompts, each a mean over its tokens; mean over the trained rollouts."
    ),
    "update/answers_nats": Metric(
        "nats per token",
        "Cross-entropy of environments' answers, each row's a mean over its tokens; mean over the rows.",
    ),
    "update/imitation_nats": Metric(
        "nats per token",
        "Cross-entropy of the correct rollouts of others, mean over their tokens; mean over the batches with any.",
    ),
    "update/value_loss": Metric("loss", "Loss of the critic's predictions, mean over trained completion tokens."),
    "update/explained_variance": Metric(
        "fraction", "1 - variance of (return - critic's value) / variance of the return, over trained tokens."
    ),
    "update/expert_load_max": Metric(
        "multiple", "Trained tokens of the expert that got the most of its layer, over the mean of the layer's experts."
    ),
    "update/expert_load_entropy_frac": Metric(
        "fraction", "Entropy of experts' shares of a layer's trained tokens, over that of equal ones; mean of layers."
    ),
    "update/expert_balance": Metric(
        "cost", "Balance cost of update.load_balance, experts per token where loads are equal; mean over the steps."
    ),
    "update/grad_norm": Metric("norm", "Global gradient norm before clipping, mean over the optimizer steps."),
    "update/skipped_steps": Metric(
        "steps",
        "Optimizer steps skipped, which no figure above counts: nothing trainable could be drawn, or they are among "
        "update/nonfinite_steps.",
    ),
    "update/nonfinite_steps": Metric(
        "steps", "Optimizer steps skipped because the loss or the norm of a gradient was infinite or not a number."
    ),
    "update/sampler_learner_gap_max_nats": Metric(
        "nats",
        "Largest |log-prob of the sampler - log-prob of the learner| of a token under the weights that sampled it. "
        "With rollout.stale_cache='keep', rows with tokens of several versions are left out: the sampler attended to "
        "keys of older weights there. "
        "External rollouts have no sampler: the learner's own log-probs stand for it, and they add nothing.",
    ),
    "update/sampler_learner_gap_mean_nats": Metric("nats", "Of the same differences, the mean over those tokens."),
    "optimizer/learning_rate": Metric("per step", "Learning rate of the iteration's last optimizer step."),
    "optimizer/rate_scale": Metric(
        "factor", "What algorithm.step_size multiplies the learning rate by, mean over the optimizer steps."
    ),
    "replay/age_mean_steps": Metric("iterations", "Iterations since insertion, mean over rollouts drawn."),
    "replay/age_max_steps": Metric("iterations", "Iterations since insertion of the oldest rollout drawn."),
    "replay/uses_mean": Metric(
        "draws", "Times a drawn rollout has been drawn, this draw counted; mean over rollouts drawn."
    ),
    "replay/replay_ratio": Metric(
        "draws", "Times a rollout was drawn in its whole life, mean over those that new ones have overwritten."
    ),
    "replay/first_use_frac": Metric("fraction", "Draws that were the first of their rollout, over draws."),
    "replay/since_last_use_mean_steps": Metric(
        "optimizer steps", "Since a drawn rollout was last drawn, mean over draws that were not the first."
    ),
    "replay/unique_prompts_mean": Metric(
        "prompts", "Different prompts in an update batch, mean over the iteration's batches that are not empty."
    ),
    "external/groups": Metric("groups", "Groups of external.paths that came into the ring in the iteration."),
    "external/reward_mean": Metric("reward", "Total reward, mean over their completions that have one."),
    "external/failed_rewards": Metric("rollouts", "Their completions without a reward, which are never drawn."),
    "external/skipped_lines": Metric("lines", "Lines of external.paths that no group is made of, so far."),
    "external/failed_calls": Metric("calls", "Calls of functions of external.paths that have failed, so far."),
    "time/cost_ratio": Metric(
        "ratio",
        "Seconds to generate a rollout (time/generate_s and time/reward_s by rollout/generated_rows) over seconds to "
        "train on one (time/update_s by replay/drawn_rows): mu of replay_plan.",
    ),
    "time/compute_rollouts": Metric(
        "trained rollouts",
        "Cost of the run so far, the sum of rollouts trained + mu * rollouts generated; mu is replay.cost_ratio, or "
        "time/cost_ratio where that is 0.",
    ),
    "replay/filled_frac": Metric("fraction", "Filled slots of the ring, over its capacity."),
    "replay/wasted_share": Metric(
        "fraction",
        "Places for tokens in the ring that hold no token of a rollout, over all of them: padding, and what is empty.",
    ),
    "replay/drawn_rows": Metric("rollouts", "Rollouts drawn in the iteration, over all its optimizer steps."),
    "reward/timeout_count": Metric("rollouts", "Rollouts whose reward ran past its deadline."),
    "reward/error_count": Metric("rollouts", "Rollouts whose reward raised, was not a number or lost its process."),
    "time/generate_s": Metric(
        "seconds", "From the first prefill to the last finished completion on the host, without time/reward_s."
    ),
    "time/environment_s": Metric(
        "seconds", "What of time/generate_s the next chunk of decode steps waited for environments to answer."
    ),
    "time/reward_s": Metric("seconds", "Waiting for rewards after generation ended, summed over its rounds."),
    "time/update_s": Metric(
        "seconds",
        "From rewarded rollouts until the metrics of the updates are on the host: what reference, older policy and "
        "critic say of each fresh rollout, the insertion into the ring, and all optimizer steps.",
    ),
    "time/checkpoint_s": Metric(
        "seconds", "Writing the checkpoint that became whole in the iteration; it is written beside the loop."
    ),
    "time/iteration_s": Metric(
        "seconds", "From the end of the iteration before: evaluation, and what of its checkpoint the loop waited for."
    ),
    "tokens/generated": Metric("tokens", "Tokens that the policy sampled in the iteration, of open rollouts too."),
    "tokens/trained": Metric(
        "tokens", "Completion tokens in the update batches of steps that were not skipped; one drawn twice counts 2."
    ),
    "throughput/generate_tokens_per_s": Metric("tokens/s", "tokens/generated over time/generate_s."),
    "throughput/update_tokens_per_s": Metric("tokens/s", "tokens/trained over time/update_s."),
    "memory/peak_bytes": Metric("bytes", "Peak memory so far: of the fullest device, or of the process on CPU."),
    "compile/recompiles_after_warmup": Metric("programs", "Programs compiled after the first iteration, so far."),
    "eval/pass_rate": Metric(
        "fraction", "Held-out completions with reward at least rewards.pass_threshold, over those that got a score."
    ),
    "eval/pass_any_rate": Metric(
        "fraction",
        "Held-out questions with at least one passing completion among eval.num_samples (pass@num_samples), over those "
        "whose completions all got a score.",
    ),
    "eval/completion_length_tokens": Metric("tokens", "Completion length with EOS, mean over held-out completions."),
    "eval/timeout_count": Metric("rollouts", "Held-out completions whose reward ran past its deadline."),
    "eval/error_count": Metric("rollouts", "Held-out completions whose reward failed otherwise (reward/error_count)."),
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

# Metrics copied from the learner: (name in the learner, type, optional count). If the count is 0, the metric is NaN.
TAKEN = {
    "update/ratio_max": ("ratio_max", float, "update_count"),
    "update/old_policy_gap_max_nats": ("old_gap_max", float, "update_count"),
    "update/sampler_learner_gap_max_nats": ("gap_max", float, "own_token_count"),
    "update/skipped_steps": ("skipped_count", int),
    "update/nonfinite_steps": ("nonfinite_count", int),
    "optimizer/learning_rate": ("learning_rate", float),
    "replay/age_max_steps": ("age_max", int, "real_count"),
    "replay/wasted_share": ("wasted_share", float),
    "replay/drawn_rows": ("real_count", int),
    "tokens/trained": ("token_count", int),
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
    num_shown = 0 if turn_reward is None else min(TURNS_SHOWN, turn_reward.shape[1])
    for k in range(num_shown):
        has_turn = (np.asarray(turns) > k) & (rewards.outcome == OUTCOME_SCORE)
        if has_turn.any():
            values[f"rollout/reward_turn_{k + 1}"] = float(turn_reward[has_turn, k].mean())
    return values


def function_values(functions: Sequence[str], rewards: Rewards) -> dict[str, float]:
    """Return the mean score of each of the first ``FUNCTIONS_SHOWN`` reward functions.

    Return {} if there is only one function, because its score is the total. Only finite scores count.
    """
    given = [np.asarray(rewards.parts[name]) for name in functions[:FUNCTIONS_SHOWN] if len(functions) > 1]
    scored = {f"rollout/reward_function_{k}": part[np.isfinite(part)] for k, part in enumerate(given, start=1)}
    return {name: float(part.mean()) for name, part in scored.items() if part.size}


def vote_values(
    functions: Sequence[str], weights: Sequence[float], threshold: float, sizes: Sequence[int], rewards: Rewards
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
    values = {"rollout/majority_frac": float(votes[np.isfinite(votes)].mean())} if np.isfinite(votes).any() else {}
    known = [name for name, weight in zip(functions, weights, strict=True) if weight == 0 and name != VOTE]
    if not known:
        return values
    scores = np.asarray(rewards.parts[known[0]])
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
