"""Settings of methods: how rewards become advantages, what the ring keeps and gives, what the loss is made of.

Owns: names, types, defaults. Does not know: which values are allowed (limits), the rest of a run (config).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxrl_llm import method_limits


@dataclasses.dataclass(frozen=True)
class CreditConfig:
    # What a reward is compared with, and over which scale: "grpo" (mean and std of the group), "dr_grpo" (its mean),
    # "leave_one_out", "reinforce_pp" (mean and std of the batch), "brorl" (mean of the group, std of the batch),
    # "asymre" (mean of the group + delta_v), "mc_grpo" (median), "gdpo" (each reward function by itself), "mssr"
    # (running mean of the question), "poise" (prediction from sibling rollouts), "gae" (what a critic expects at each
    # token; mean and std of the batch's tokens).
    advantage: str = "grpo"
    # For "asymre", added to the baseline: below 0 successes weigh more than failures.
    delta_v: float = -0.1
    # For "mssr" and "poise", what earlier evidence keeps of its weight per answer ("mssr") or iteration ("poise").
    baseline_decay: float = 0.9
    # For "mssr": what that sinks to while the policy moves, wholly at a KL of 0.02 nats a token from what drew the rows
    # (mean of 20 iterations); 0 = it stays.
    baseline_decay_moving: float = 0.0
    # Of the advantages that are divided by a standard deviation of the batch ("reinforce_pp", "mssr", "gae", "brorl",
    # "gdpo"): take it, and the mean where that goes first, over this and earlier iterations, whose weight fades by this
    # factor an iteration; 0 = over this one.
    advantage_norm_decay: float = 0.0
    # For "gdpo": further reward functions count only where the first gives at least this; 0 = always.
    gate_threshold: float = 0.0
    # For "gae": 1 judges each token by the row's reward, below it more by what the critic says soon after.
    gae_lambda: float = 1.0
    # For "gae", what a reward keeps of its worth per token that it is away.
    discount: float = 1.0
    # Leave truncated completions out of the loss and out of their group's baseline.
    overlong_filter: bool = False
    # Reward falls by up to 1 over this many last tokens before sampling.max_completion_tokens; 0 = not.
    overlong_buffer_tokens: int = 0
    # Weight of a reward for short answers among those of the group; 0 = none.
    length_reward: float = 0.0
    # Correct answers of at most this many tokens get short_answer_bonus more; 0 = none.
    short_answer_tokens: int = 0
    short_answer_bonus: float = 0.5
    # Choose how long every so many iterations anew, for easy, middling and hard questions apart: the least multiple of
    # short_answer_tokens within which a group has a correct answer on average. 0 = it stays.
    short_answer_iterations: int = 0
    # Advantages above 0 are multiplied by this, those of correct answers set to 1; 0 = not.
    positive_amplification: float = 0.0
    # How much less an unsure answer weighs than a sure one of its group; 0 = equal, 1 = ETTRL's.
    entropy_reweighting: float = 0.0
    # A row's advantage is multiplied by its completion's length over the iteration's mean, to this power; 0 = not. 1
    # makes up for slow answers being fewer where rollouts come as they finish.
    duration_weight: float = 0.0
    # Tokens get this many times their entropy more advantage, at most |advantage| / entropy_bonus_limit; 0 = none.
    entropy_bonus: float = 0.0
    entropy_bonus_limit: float = 0.4


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    # Rollouts the device ring holds; 0 = one iteration's worth (on-policy).
    capacity: int = 0
    # Tokens it holds of them, without padding: the oldest go where there are more; 0 = every rollout at full length.
    capacity_tokens: int = 0
    # Share of the capacity for the freshest correct rollouts (rewards.pass_threshold) that the rest has evicted.
    positive_fraction: float = 0.0
    # Which it is for: "correct" ones, or "likely" ones, in mean log-prob a token no less than those that follow them.
    admission: str = "correct"
    # How likely a rollout is drawn: "uniform", "priority" (priority ** priority_exponent) or "age"
    # (exp(-age / age_scale_iterations)).
    draw: str = "uniform"
    # What "priority" looks at: "advantage" (its absolute value), "reward" (0 where negative), "length" (tokens of the
    # completion) or "surprise" (minus the mean log-prob of its tokens when they were drawn).
    priority: str = "advantage"
    priority_exponent: float = 1.0
    age_scale_iterations: float = 4.0
    # Oldest rollout that may be drawn, in iterations since insertion; 0 = no limit.
    max_age_steps: int = 0
    # Draw only rollouts exactly this old, in iterations: staleness without reuse; 0 = no delay.
    delay_iterations: int = 0
    # Times a rollout may be drawn; 0 = no limit.
    max_uses: int = 0
    # Share of each update batch taken from the rollouts inserted in this iteration; with fresh_batches the share of
    # batches that are taken wholly from those, the others having none of them while there are older ones.
    fresh_fraction: float = 0.0
    fresh_batches: bool = False
    # From this iteration on (the first is 0) draw the rollouts of the same iteration alone; 0 = never.
    fresh_from_iteration: int = 0
    # What is drawn: "rollout", or "group" (all samples of a prompt, whose prompt the learner then computes once).
    unit: str = "rollout"
    # Draw no rollouts of tied groups: where siblings are compared, those whose rewards as scored are all equal (but for
    # those that positive_amplification gives an advantage), elsewhere those without an advantage.
    skip_tied: bool = False
    # Draw of each question only the rollouts of its latest visit that left any to draw.
    latest_visit: bool = False
    # Give up rollouts of an age whose effective sample size (update/ess_frac_age_...) fell below this; 0 = draw all.
    min_ess: float = 0.0
    # Never draw a group of which at least this share is correct, nor earlier ones of its prompt; 0 = draw all.
    solved_fraction: float = 0.0
    # Seconds to generate a rollout over seconds to train on one, for the compute axis of the curves; 0 = as measured.
    cost_ratio: float = 0.0
    # Shards of the ring; 0 = the mesh's data-parallel size. Fix it to get the same draws on another mesh.
    shards: int = 0
    # Where the rows lie: "device", or for a large capacity "host" (pinned memory; only rows inserted or drawn move).
    memory: str = "device"


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    # A name of algorithms.surrogates.SURROGATES: "clipped", "sequence_clipped", "gspo", "cispo", "reinforce", "opmd",
    # "remix_centred", "agro", "gvpo", "kimi_k15", "spo", "spo_cross_entropy", "inpo" or "vcpo".
    surrogate: str = "clipped"
    # The policy ratio is clipped to [1 - clip_low, 1 + clip_high]; "vcpo" has the upper bound alone.
    clip_low: float = 0.2
    clip_high: float = 0.2
    # Bound of the ratio where the advantage is negative, above 1; 0 = none.
    dual_clip: float = 0.0
    # Weight of the log-ratio against the reward in "agro", "gvpo", "kimi_k15", "opmd" (tau), "spo" and "inpo" (eta).
    regression_beta: float = 0.1
    # The old policy, which ratios are against: "behaviour" (drew the token), "generation" (the same weights as the
    # learner computes them, when the rollout goes into the ring), "start" (weights before the iteration's updates),
    # "interpolated" (the same between behaviour and current, without a forward) or "ewma" (averaged weights).
    proximal: str = "behaviour"
    # Decay per optimizer step of the moving average of the weights.
    ewma_decay: float = 0.9
    # What becomes of tokens that the behaviour policy drew and the old one (without a ratio in the surrogate: the
    # current one) did not: "none", "importance" (weighed by that ratio), "token_truncated", "policy_truncated" (the
    # same, but the bound is on the current policy's ratio to the behaviour policy), "token_masked",
    # "sequence_truncated", "sequence_masked" or "second_moment". Where the surrogate's own ratio is to the behaviour
    # policy, or it needs none, a correction can but mask, by the current policy's ratio.
    correction: str = "none"
    # Bounds of that ratio: what is outside is masked, or truncated at the upper one.
    correction_low: float = 0.5
    correction_high: float = 2.0
    # "second_moment" masks the largest until the mean squared log-ratio of the batch is at most this, nats^2.
    correction_second_moment: float = 0.04
    # Scale the step by the square root of the effective sample size of the batch's sequence ratios.
    ess_learning_rate: bool = False
    # "token_mean", "sequence_mean", "constant_length" or "prompt_mean".
    aggregation: str = "token_mean"
    # Weight of the KL penalty; 0 = none.
    kl_coefficient: float = 0.0
    # "k1", "k2" or "k3".
    kl_estimator: str = "k3"
    # What the penalty is to: "reference" (model.reference_path, frozen), "convex" (it and, by schedule, the weights
    # that the iteration before began with) or "ewma" (the moving average of the weights).
    kl_anchor: str = "reference"
    # After these iterations the reference becomes the policy of then, and the ring is emptied (ReMix: 50 and 100).
    reference_reset_iterations: tuple[int, ...] = ()
    # Weight of the policy's entropy as a bonus; with entropy_target where it starts.
    entropy_coefficient: float = 0.0
    # Nats per token below which the weight rises, above which it falls, by entropy_rate a step; 0 = the weight stays.
    entropy_target: float = 0.0
    entropy_rate: float = 1e-4
    # Weight of the cross-entropy of the prompts' tokens, which the environment wrote: a model of it (ECHO: 0.05). It
    # learns from every rollout that is drawn, of a tied group too.
    environment_coefficient: float = 0.0
    # Weight of the cross-entropy of the correct rollouts among those of others (external.paths), beside what they get
    # as rollouts.
    imitation_coefficient: float = 0.0
    # With credit.advantage "gae", what of the value loss's gradient the critic's head passes on into the policy's
    # hidden states, which it reads; 0 = none. The head itself always has all of it.
    value_coefficient: float = 0.1
    # How far from its value at rollout time a prediction gains from moving, in units of reward; 0 = any distance.
    value_clip: float = 0.0
    # Values are the mean of a distribution over this many equal bins (HL-Gauss); 0 = one number, squared error.
    value_bins: int = 0
    # The bins' range, which should hold all returns.
    value_low: float = 0.0
    value_high: float = 1.0


class MethodFacts:
    """What the methods of a config ask for, as its properties."""

    credit: CreditConfig
    objective: ObjectiveConfig

    def scaled(self) -> Any:
        """The same with ``update.scaled_from_batch_size`` carried out.

        Source: Hilton et al. 2021, arXiv:2110.00641, batch size-invariance with Adam: its step times sqrt(c), the
        centre of mass d / (1 - d) of averages over c. Differs: Adam's own decays stay.
        """
        if not self.update.scaled_from_batch_size:
            return self
        c = self.update.batch_size / self.update.scaled_from_batch_size
        decay = lambda d: d / (c * (1 - d) + d)
        o, replace = self.optimizer, dataclasses.replace
        rates = {name: math.sqrt(c) * getattr(o, name) for name in ("learning_rate", "value_learning_rate")}
        return replace(
            self,
            update=replace(self.update, scaled_from_batch_size=0),
            optimizer=replace(o, **rates),
            objective=replace(self.objective, ewma_decay=decay(self.objective.ewma_decay)),
            credit=replace(self.credit, advantage_norm_decay=decay(self.credit.advantage_norm_decay)),
        )

    @property
    def short_answer_grid(self) -> tuple[int, ...]:
        """Lengths among which credit.short_answer_iterations chooses; the last is any length."""
        step, longest = self.credit.short_answer_tokens, self.sampling.max_completion_tokens
        return (*range(step, longest, step), longest)

    @property
    def keeps_reference(self) -> bool:
        """Whether rollouts carry their log-probs under the frozen starting model."""
        to_reference = self.objective.kl_coefficient > 0 and self.objective.kl_anchor != "ewma"
        return to_reference or self.objective.surrogate in method_limits.REFERENCE_SURROGATES

    @property
    def keeps_old_logp(self) -> bool:
        """Whether rollouts carry the learner's log-probs under the weights that drew each token."""
        return self.objective.proximal == "generation"

    @property
    def keeps_hidden(self) -> bool:
        """Whether credit reads the mean hidden state of completions."""
        return self.credit.advantage == "poise"

    @property
    def keeps_entropy(self) -> bool:
        """Whether rollouts carry the entropy of what each token was drawn from, for credit."""
        credit = self.credit
        return credit.advantage == "poise" or credit.entropy_bonus > 0 or credit.entropy_reweighting > 0

    @property
    def has_critic(self) -> bool:
        """Whether the learner has a value head beside the policy."""
        return self.credit.advantage == "gae"

    @property
    def keeps_average(self) -> bool:
        """Whether the learner keeps a moving average of its weights."""
        to_average = self.objective.kl_coefficient > 0 and self.objective.kl_anchor == "ewma"
        return to_average or self.objective.proximal == "ewma"

    @property
    def keeps_previous(self) -> bool:
        """Whether the learner keeps the weights from before the last iteration's updates."""
        return self.objective.kl_coefficient > 0 and self.objective.kl_anchor == "convex"
