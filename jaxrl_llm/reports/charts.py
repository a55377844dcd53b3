"""Table of the charts in a report, in the order of the report, with the metrics that each chart shows.

Owns: the table CHARTS. Does not know: how a chart is drawn (html).
"""

from __future__ import annotations

import dataclasses

from jaxrl_llm.reports.metric_table import AGE_LABELS, FUNCTIONS_SHOWN, TURNS_SHOWN


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart of a report.

    ``lines`` maps labels to metric names. ``band`` names the metric whose value is the half-width of a band around the
    first line.
    """

    title: str
    unit: str
    lines: dict[str, str]
    band: str = ""
    dots: tuple[str, str] | None = None  # (label, metric), drawn with markers: evaluations are sparse
    stacked: bool = False
    limits: tuple[float | None, float | None] = (0, None)


ANY = (None, None)
SHARE = (0, 1)


def _by_age(metric: str) -> dict[str, str]:
    return {f"{label} iterations": f"{metric}_age_{label}" for label in AGE_LABELS}


CHARTS = (
    Chart(
        "Reward",
        "mean, and one standard deviation around it",
        {"mean": "rollout/reward_mean"},
        band="rollout/reward_std",
        limits=ANY,
    ),
    Chart(
        "Pass rate",
        "fraction",
        {"training rollouts": "rollout/pass_rate"},
        dots=("held-out", "eval/pass_rate"),
        limits=SHARE,
    ),
    Chart(
        "Entropy",
        "nats per token",
        {
            "of trained tokens": "update/entropy_nats",
            "of tokens as drawn": "rollout/sampled_entropy_nats",
            "of what they were drawn from": "rollout/model_entropy_nats",
        },
    ),
    Chart("Completion length", "tokens", {"mean": "rollout/completion_length_tokens"}),
    Chart("Turns", "of the policy in a rollout", {"mean": "rollout/turns_mean"}),
    Chart(
        "Reward by turn",
        "mean over rollouts that have the turn",
        {f"turn {k}": f"rollout/reward_turn_{k}" for k in range(1, TURNS_SHOWN + 1)},
        limits=ANY,
    ),
    Chart(
        "Reward by function",
        "mean without its weight, in the order of rewards.functions",
        {f"function {k}": f"rollout/reward_function_{k}" for k in range(1, FUNCTIONS_SHOWN + 1)},
        limits=ANY,
    ),
    Chart(
        "Votes (scores:majority)",
        "fraction",
        {
            "rollouts with the majority answer": "rollout/majority_frac",
            "questions whose majority answer is right": "rollout/label_accuracy",
            "rollouts that are judged right": "rollout/reward_accuracy",
        },
        limits=SHARE,
    ),
    Chart(
        "Failed rewards",
        "rollouts",
        {"too late": "reward/timeout_count", "error": "reward/error_count"},
    ),
    Chart("Adapters", "part of the rank", {"that learns": "update/adapter_module"}),
    Chart(
        "Truncated and degenerate",
        "fraction",
        {
            "truncated rollouts": "rollout/truncated_frac",
            "tied groups": "rollout/degenerate_group_frac",
        },
        limits=SHARE,
    ),
    Chart(
        "Staleness of drawn rollouts",
        "iterations",
        {"mean age": "replay/age_mean_steps", "oldest": "replay/age_max_steps"},
    ),
    Chart(
        "Uses of a rollout",
        "draws",
        {
            "of those drawn, so far": "replay/uses_mean",
            "of those that left, in all": "replay/replay_ratio",
        },
    ),
    Chart(
        "First uses",
        "fraction of draws",
        {"first use": "replay/first_use_frac"},
        limits=SHARE,
    ),
    Chart(
        "Since last use",
        "optimizer steps",
        {"mean": "replay/since_last_use_mean_steps"},
    ),
    Chart("Different prompts", "per update batch", {"mean": "replay/unique_prompts_mean"}),
    Chart(
        "Places of the ring without a token",
        "fraction",
        {"wasted": "replay/wasted_share"},
        limits=SHARE,
    ),
    Chart(
        "Cost of generating",
        "over that of training, per rollout",
        {"mu": "time/cost_ratio"},
    ),
    Chart(
        "Time of an iteration",
        "seconds",
        {
            "generate": "time/generate_s",
            "reward": "time/reward_s",
            "update": "time/update_s",
        },
        stacked=True,
    ),
    Chart(
        "Throughput",
        "tokens per second",
        {
            "generate": "throughput/generate_tokens_per_s",
            "update": "throughput/update_tokens_per_s",
        },
    ),
    Chart(
        "KL divergence",
        "nats per token",
        {
            "to the sampler": "update/kl_behaviour_nats",
            "to the anchor": "update/kl_reference_nats",
        },
        limits=ANY,
    ),
    Chart("Clipped tokens", "fraction", {"clipped": "update/clip_frac"}),
    Chart(
        "Effective sample size",
        "fraction",
        {
            "of trained tokens": "update/ess_frac",
            "of completions": "update/sequence_ess_frac",
        },
        limits=SHARE,
    ),
    Chart("Clipped tokens by age", "fraction", _by_age("update/clip_frac")),
    Chart(
        "Effective sample size by age",
        "fraction of tokens",
        _by_age("update/ess_frac"),
        limits=SHARE,
    ),
    Chart("Gradient norm", "before clipping", {"mean": "update/grad_norm"}),
    Chart(
        "Sampler-learner gap",
        "nats, largest",
        {"largest": "update/sampler_learner_gap_max_nats"},
    ),
)
