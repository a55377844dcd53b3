"""Which values of the settings of methods are allowed: choices, and which settings a method hears.

Owns: those rules and their words. Does not know: bounds, sizes (limits), names' types and defaults (method_config).
"""

from __future__ import annotations

from typing import Any

# Surrogates that clip their ratio on the loss, all whose ratio is against the old policy, and all that read it.
CLIP_SURROGATES = ("clipped", "sequence_clipped", "gspo")
RATIO_SURROGATES = (*CLIP_SURROGATES, "cispo")
OLD_POLICY_SURROGATES = (*RATIO_SURROGATES, "remix_centred", "gvpo", "kimi_k15", "inpo")
# Those without a ratio: the policy gradient of tokens drawn by the current policy.
PLAIN_SURROGATES = ("reinforce", "opmd")
# Those that read the reward itself, and no advantage.
REWARD_SURROGATES = ("spo", "spo_cross_entropy", "inpo", "vcpo")
# Settings that are heard in the advantage alone.
ADVANTAGE_SETTINGS = (
    *("length_reward", "overlong_buffer_tokens", "short_answer_tokens", "positive_amplification"),
    *("entropy_reweighting", "entropy_bonus", "duration_weight"),
)
# Those that read the frozen reference, and those that compare the rows of a group.
REFERENCE_SURROGATES = ("agro", "spo", "spo_cross_entropy", "inpo")
GROUP_SURROGATES = (*REFERENCE_SURROGATES, "gvpo", "vcpo")

CHOICES = {
    "replay.admission": ("correct", "likely"),
    "replay.draw": ("uniform", "priority", "age"),
    "replay.priority": ("advantage", "reward", "length", "surprise"),
    "replay.unit": ("rollout", "group"),
    "replay.memory": ("device", "host"),
    "credit.advantage": (
        *("grpo", "dr_grpo", "leave_one_out", "reinforce_pp", "brorl", "asymre"),
        *("mc_grpo", "gdpo", "mssr", "poise", "gae"),
    ),
    "objective.surrogate": (*OLD_POLICY_SURROGATES, *PLAIN_SURROGATES, "agro", "spo", "spo_cross_entropy", "vcpo"),
    "objective.proximal": ("behaviour", "generation", "start", "interpolated", "ewma"),
    "objective.correction": (
        *("none", "importance", "token_truncated", "policy_truncated", "token_masked"),
        *("sequence_truncated", "sequence_masked", "second_moment"),
    ),
    "objective.aggregation": ("token_mean", "sequence_mean", "constant_length", "prompt_mean"),
    "objective.kl_estimator": ("k1", "k2", "k3"),
    "objective.kl_anchor": ("reference", "convex", "ewma"),
}

# Advantages that compare a rollout with other things than its siblings.
NEED_NO_SIBLINGS = ("reinforce_pp", "mssr", "gae")
# Those that are divided by the batch's standard deviation.
OVER_THE_BATCH = ("reinforce_pp", "mssr", "gae", "brorl", "gdpo")
# And those that a tied group may have all the same.
NEED_NO_MIXED_GROUP = (*NEED_NO_SIBLINGS, "asymre", "poise")


def rules(c: Any, flat: dict[str, Any]):
    """(is kept, what to say otherwise) of every rule over settings of methods, as in ``limits``."""
    r, e, credit = c.replay, c.external, c.credit
    teaches = credit.advantage in NEED_NO_MIXED_GROUP and not (credit.advantage == "asymre" and credit.delta_v == 0)
    of_rows = "for credit.advantage='gae': it is of a row's advantage, not of a token's"
    of_batch = "for [credit.advantage], which no standard deviation of the batch divides; " + ", ".join(OVER_THE_BATCH)
    of_advantages = "for [objective.surrogate], which reads rewards and no advantages"
    ahead, reads_rewards = c.rollout.lookahead_prompts, c.objective.surrogate in REWARD_SURROGATES
    gated = credit.advantage == "gdpo" and len(c.rewards.functions) > 1
    for name, must, why in (
        ("replay.positive_fraction", r.unit == "group", "for replay.unit='group': correct rows are kept one by one"),
        ("replay.positive_fraction", r.capacity_tokens > 0, "with [replay.capacity_tokens]: that part has no pages"),
        ("objective.imitation_coefficient", not e.paths, "without external.groups_per_iteration to imitate"),
        ("rollout.max_resample_rounds", c.rollout.group_size == 1, "for rollout.group_size=1, which is always tied"),
        ("rollout.max_resample_rounds", teaches, "for [credit.advantage]: a tied group teaches it something"),
        ("rollout.max_lag_iterations", ahead == 0, "without rollout.lookahead_prompts: no prompt stays open"),
        ("credit.positive_amplification", credit.advantage == "gae", of_rows),
        ("credit.entropy_reweighting", credit.advantage == "gae", of_rows),
        ("objective.value_clip", c.objective.value_bins > 0, "for [objective.value_bins]: a clip is of a number"),
        ("credit.gate_threshold", not gated, "but with credit.advantage='gdpo' and several rewards.functions"),
        ("credit.advantage_norm_decay", credit.advantage not in OVER_THE_BATCH, of_batch + " are"),
        *((f"credit.{name}", reads_rewards, of_advantages) for name in ADVANTAGE_SETTINGS),
    ):
        yield not must or flat[name] == 0, f"[{name}] must be 0 {why}"
    yield (
        c.objective.environment_coefficient == 0 or c.prompts.max_tokens > 1,
        "[prompts.max_tokens] must be at least 2 for [objective.environment_coefficient]: of a prompt's first token "
        "nothing is predicted",
    )
    yield (
        c.rollout.group_size > 1 or credit.advantage in NEED_NO_SIBLINGS,
        "[rollout.group_size] must be at least 2 for [credit.advantage], which compares siblings; "
        f"{', '.join(map(repr, NEED_NO_SIBLINGS))} do not",
    )
    yield (
        credit.short_answer_iterations == 0 or credit.short_answer_tokens > 0,
        "[credit.short_answer_iterations] needs credit.short_answer_tokens of at least 1, the step of the lengths to "
        "choose from",
    )
    yield (
        c.model.reference_path == "" or c.keeps_reference,
        "[model.reference_path] must be '' where nothing reads the reference: neither [objective.kl_coefficient] to "
        "[objective.kl_anchor] nor [objective.surrogate]",
    )
    resets = c.objective.reference_reset_iterations
    yield (
        not resets or (c.keeps_reference and c.model.reference_path == "" and min(resets) > 0),
        "[objective.reference_reset_iterations] must be () or numbers from 1 on with a reference that is read "
        "(objective.kl_coefficient) and is the run's own ([model.reference_path])",
    )
    yield from _objective(c.objective, c.replay.unit)


def _objective(o: Any, unit: str):
    """Likewise, of the objective: no setting that its surrogate cannot hear."""
    surrogate = f"objective.surrogate={o.surrogate!r}"
    yield (
        o.surrogate not in GROUP_SURROGATES or unit == "group",
        f"[replay.unit] must be 'group' for {surrogate}, which compares the rows of a group",
    )
    yield (
        o.dual_clip == 0 or (o.dual_clip > 1 and o.surrogate in CLIP_SURROGATES),
        f"[objective.dual_clip] must be 0, or above 1 with objective.surrogate one of {CLIP_SURROGATES!r}",
    )
    yield (
        o.proximal == "behaviour" or o.surrogate in OLD_POLICY_SURROGATES,
        f"[objective.proximal] must be 'behaviour' for {surrogate}, which has no old policy",
    )
    yield (
        o.proximal != "behaviour" or o.surrogate != "remix_centred",
        f"objective.proximal='behaviour' must be another for {surrogate}: the window would lie about 1",
    )
    yield (
        o.value_bins != 1 and o.value_low < o.value_high,
        "[objective.value_bins] must be 0 or at least 2, and [objective.value_low] below [objective.value_high]",
    )
    has_weight = o.surrogate in PLAIN_SURROGATES or (o.surrogate in RATIO_SURROGATES and o.proximal != "behaviour")
    yield (
        has_weight or o.correction in ("none", "token_masked", "sequence_masked", "second_moment"),
        f"[objective.correction] must be 'none' or one that masks for {surrogate} with [objective.proximal], which "
        "leaves no importance weight over",
    )
    yield (
        o.correction != "policy_truncated" or o.surrogate in ("clipped", "cispo"),
        f"objective.correction='policy_truncated' must be another for {surrogate}: it bounds the ratio of a token",
    )
