"""Which values of the settings are allowed: choices, bounds, and what must fit together.

Owns: those rules and their words. Does not know: names' types and defaults (config), devices, files.
"""

from __future__ import annotations

import math
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
    "length_reward",
    "overlong_buffer_tokens",
    "short_answer_tokens",
    "positive_amplification",
    "entropy_reweighting",
    "entropy_bonus",
    "duration_weight",
)
# Those that read the frozen reference, and those that compare the rows of a group.
REFERENCE_SURROGATES = ("agro", "spo", "spo_cross_entropy", "inpo")
GROUP_SURROGATES = (*REFERENCE_SURROGATES, "gvpo", "vcpo")

CHOICES = {
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "dots", "full", "auto"),
    "model.attention": ("auto", "xla"),
    "prompts.source": ("letters", "arithmetic", "reasoning_gym", "jsonl", "parquet"),
    "prompts.bad_row": ("error", "skip"),
    "prompts.long_prompt": ("error", "skip"),
    "replay.admission": ("correct", "likely"),
    "replay.draw": ("uniform", "priority", "age"),
    "replay.priority": ("advantage", "reward", "length", "surprise"),
    "replay.unit": ("rollout", "group"),
    "replay.memory": ("device", "host"),
    "credit.advantage": (
        "grpo",
        "dr_grpo",
        "leave_one_out",
        "reinforce_pp",
        "brorl",
        "asymre",
        "mc_grpo",
        "gdpo",
        "mssr",
        "poise",
        "gae",
    ),
    "objective.surrogate": (*OLD_POLICY_SURROGATES, *PLAIN_SURROGATES, "agro", "spo", "spo_cross_entropy", "vcpo"),
    "objective.proximal": ("behaviour", "generation", "start", "interpolated", "ewma"),
    "objective.correction": (
        "none",
        "importance",
        "token_truncated",
        "policy_truncated",
        "token_masked",
        "sequence_truncated",
        "sequence_masked",
        "second_moment",
    ),
    "objective.aggregation": ("token_mean", "sequence_mean", "constant_length", "prompt_mean"),
    "objective.kl_estimator": ("k1", "k2", "k3"),
    "objective.kl_anchor": ("reference", "convex", "ewma"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
}

# Advantages that compare a rollout with other things than its siblings.
NEED_NO_SIBLINGS = ("reinforce_pp", "mssr", "gae")
# Those that are divided by the batch's standard deviation.
OVER_THE_BATCH = ("reinforce_pp", "mssr", "gae", "brorl", "gdpo")
# And those that a tied group may have all the same.
NEED_NO_MIXED_GROUP = (*NEED_NO_SIBLINGS, "asymre", "poise")

# field -> (lowest, highest, whether the lowest itself is allowed)
BOUNDS = {
    "seed": (0, 2**31 - 1, True),
    "num_iterations": (1, math.inf, True),
    "prompts.size": (0, math.inf, True),
    "prompts.max_tokens": (1, math.inf, True),
    "prompts.retire_pass_rate": (0.0, 1.0, True),
    "sampling.temperature": (0.0, math.inf, False),
    "sampling.top_k": (0, math.inf, True),
    "sampling.top_p": (0.0, 1.0, False),
    "sampling.min_p": (0.0, 1.0, True),
    "sampling.support_tokens": (0, math.inf, True),
    "sampling.max_completion_tokens": (1, math.inf, True),
    "rollout.prompts_per_iteration": (1, math.inf, True),
    "rollout.group_size": (1, math.inf, True),
    "rollout.slots": (0, math.inf, True),
    "rollout.chunk_steps": (1, math.inf, True),
    "rollout.lookahead_prompts": (0, math.inf, True),
    "rollout.max_lag_iterations": (0, math.inf, True),
    "rollout.max_resample_rounds": (0, math.inf, True),
    "rewards.num_workers": (1, math.inf, True),
    "rewards.timeout_s": (0.0, math.inf, False),
    "rewards.max_failure_frac": (0.0, 1.0, True),
    "credit.delta_v": (-math.inf, math.inf, True),
    "credit.baseline_decay": (0.0, 1.0, True),
    "credit.baseline_decay_moving": (0.0, 1.0, True),
    "credit.advantage_norm_decay": (0.0, 0.9999, True),
    "credit.gate_threshold": (-math.inf, math.inf, True),
    "credit.gae_lambda": (0.0, 1.0, True),
    "credit.discount": (0.0, 1.0, True),
    "credit.overlong_buffer_tokens": (0, math.inf, True),
    "credit.length_reward": (0.0, math.inf, True),
    "credit.short_answer_tokens": (0, math.inf, True),
    "credit.short_answer_bonus": (0.0, math.inf, True),
    "credit.short_answer_iterations": (0, math.inf, True),
    "credit.positive_amplification": (0.0, math.inf, True),
    "credit.entropy_reweighting": (0.0, math.inf, True),
    "credit.duration_weight": (0.0, math.inf, True),
    "credit.entropy_bonus": (0.0, math.inf, True),
    "credit.entropy_bonus_limit": (0.0, math.inf, False),
    "replay.capacity": (0, math.inf, True),
    "replay.capacity_tokens": (0, math.inf, True),
    "replay.positive_fraction": (0.0, 1.0, True),
    "replay.fresh_from_iteration": (0, math.inf, True),
    "replay.priority_exponent": (0.0, math.inf, True),
    "replay.age_scale_iterations": (0.0, math.inf, False),
    "replay.max_age_steps": (0, math.inf, True),
    "replay.delay_iterations": (0, math.inf, True),
    "replay.max_uses": (0, math.inf, True),
    "replay.fresh_fraction": (0.0, 1.0, True),
    "replay.min_ess": (0.0, 1.0, True),
    "replay.solved_fraction": (0.0, 1.0, True),
    "replay.cost_ratio": (0.0, math.inf, True),
    "replay.shards": (0, math.inf, True),
    "external.groups_per_iteration": (0, math.inf, True),
    "update.batch_size": (1, math.inf, True),
    "update.micro_batch_size": (1, math.inf, True),
    "update.pack_width": (0, math.inf, True),
    "update.micro_batch_tokens": (0, math.inf, True),
    "update.updates_per_iteration": (1, math.inf, True),
    "update.logp_chunk_tokens": (0, math.inf, True),
    "update.scaled_from_batch_size": (0, math.inf, True),
    "update.max_sampler_learner_gap_nats": (0.0, math.inf, False),
    "objective.clip_low": (0.0, 1.0, True),
    "objective.clip_high": (0.0, math.inf, True),
    "objective.dual_clip": (0.0, math.inf, True),
    "objective.regression_beta": (0.0, math.inf, False),
    "objective.ewma_decay": (0.0, 0.9999, True),
    "objective.correction_low": (0.0, 1.0, True),
    "objective.correction_high": (1.0, math.inf, True),
    "objective.correction_second_moment": (0.0, math.inf, True),
    "objective.kl_coefficient": (0.0, math.inf, True),
    "objective.entropy_coefficient": (0.0, math.inf, True),
    "objective.entropy_target": (0.0, math.inf, True),
    "objective.entropy_rate": (0.0, math.inf, False),
    "objective.environment_coefficient": (0.0, math.inf, True),
    "objective.imitation_coefficient": (0.0, math.inf, True),
    "objective.value_coefficient": (0.0, math.inf, True),
    "objective.value_clip": (0.0, math.inf, True),
    "objective.value_bins": (0, math.inf, True),
    "objective.value_low": (-math.inf, math.inf, True),
    "objective.value_high": (-math.inf, math.inf, True),
    "optimizer.learning_rate": (0.0, math.inf, True),
    "optimizer.value_learning_rate": (0.0, math.inf, True),
    "optimizer.warmup_steps": (0, math.inf, True),
    "optimizer.b1": (0.0, 1.0, True),
    "optimizer.b2": (0.0, 1.0, True),
    "optimizer.eps": (0.0, math.inf, False),
    "optimizer.weight_decay": (0.0, math.inf, True),
    "optimizer.max_grad_norm": (0.0, math.inf, True),
    "optimizer.reset_every_steps": (0, math.inf, True),
    "mesh.data": (0, math.inf, True),
    "mesh.fsdp": (1, math.inf, True),
    "mesh.tensor": (1, math.inf, True),
    "checkpoint.every_iterations": (0, math.inf, True),
    "checkpoint.keep_last": (1, math.inf, True),
    "checkpoint.keep_best": (0, math.inf, True),
    "eval.every_iterations": (0, math.inf, True),
    "eval.num_prompts": (0, math.inf, True),
    "eval.num_samples": (1, math.inf, True),
    "eval.temperature": (0.0, math.inf, True),
    "metrics.samples_per_iteration": (0, math.inf, True),
}


def complaint(config: Any, flat: dict[str, Any]) -> str | None:
    """The first rule a config breaks, naming the setting, its value and what is allowed; None where it keeps all.

    Args:
        config: a ``Config`` whose fields have their declared types.
        flat: its leaves by dotted name.
    """
    for path, allowed in CHOICES.items():
        if flat[path] not in allowed:
            return f"{path}={flat[path]!r} is not one of {', '.join(map(repr, allowed))}"
    for path, (low, high, closed) in BOUNDS.items():
        value = flat[path]
        if not (low <= value <= high) or (value == low and not closed) or not math.isfinite(value):
            left = "at least" if closed else "more than"
            upper = "" if high == math.inf else f" and at most {high}"
            return f"{path}={value!r} must be {left} {low}{upper}"
    return next((message for is_kept, message in _combinations(config) if not is_kept), None)


def _combinations(c: Any):
    """(is kept, what to say otherwise) of every rule over several settings."""
    yield (
        c.update.batch_size % c.update.micro_batch_size == 0,
        f"update.micro_batch_size={c.update.micro_batch_size} must divide update.batch_size={c.update.batch_size}",
    )
    yield (
        c.ring_capacity >= c.update.batch_size,
        f"replay.capacity={c.ring_capacity} must be at least update.batch_size={c.update.batch_size}: "
        "a batch does not repeat a rollout",
    )
    yield (
        c.ring_capacity % c.rows_per_iteration == 0,
        f"replay.capacity={c.ring_capacity} must be a multiple of the {c.rows_per_iteration} rollouts of an iteration "
        "((rollout.prompts_per_iteration + external.groups_per_iteration) x rollout.group_size)",
    )
    r = c.replay
    kept = round(r.positive_fraction * c.ring_capacity)
    yield (
        c.ring_capacity - kept >= c.rows_per_iteration,
        f"replay.positive_fraction={r.positive_fraction} of replay.capacity={c.ring_capacity} must leave room for the "
        f"{c.rows_per_iteration} rollouts of an iteration",
    )
    yield (
        r.positive_fraction == 0 or r.unit == "rollout",
        f"replay.positive_fraction={r.positive_fraction} must be 0 for replay.unit='group': "
        "correct rollouts are kept one by one",
    )
    rows = max((r.delay_iterations + 1) * c.rows_per_iteration, c.update.batch_size)
    full = -(-c.row_tokens // c.page_tokens) * c.page_tokens
    yield (
        r.capacity_tokens == 0 or r.capacity_tokens >= rows * full,
        f"replay.capacity_tokens={r.capacity_tokens} must be 0 or at least {rows * full}: the {rows} rollouts of an "
        f"update or of the iterations that wait, at their full length in pages of {c.page_tokens} tokens",
    )
    yield (
        r.capacity_tokens == 0 or r.positive_fraction == 0,
        f"replay.positive_fraction={r.positive_fraction} must be 0 with replay.capacity_tokens={r.capacity_tokens}: "
        "the ring for correct rollouts has no pages",
    )
    yield (
        r.delay_iterations == 0 or c.ring_capacity - kept > r.delay_iterations * c.rows_per_iteration,
        f"replay.delay_iterations={r.delay_iterations} must be less than the "
        f"{c.ring_capacity // c.rows_per_iteration} iterations that replay.capacity={c.ring_capacity} holds",
    )
    yield (
        r.delay_iterations == 0 or r.delay_iterations <= r.max_age_steps or r.max_age_steps == 0,
        f"replay.delay_iterations={r.delay_iterations} must be at most replay.max_age_steps={r.max_age_steps}",
    )
    others = ("fresh_fraction", "fresh_from_iteration", "positive_fraction")
    yield (
        r.delay_iterations == 0 or not any(getattr(r, name) for name in others),
        f"replay.delay_iterations={r.delay_iterations} must be 0 with "
        + " or ".join(f"replay.{name}={getattr(r, name)}" for name in others)
        + ": a delayed batch has one age",
    )
    credit = c.credit
    yield (
        credit.baseline_decay_moving <= credit.baseline_decay,
        f"credit.baseline_decay_moving={credit.baseline_decay_moving} must be at most "
        f"credit.baseline_decay={credit.baseline_decay}",
    )
    yield (
        not r.fresh_batches or 0 < r.fresh_fraction < 1,
        f"replay.fresh_fraction={r.fresh_fraction} must lie between 0 and 1 with replay.fresh_batches",
    )
    e, s = c.external, c.sampling
    yield (
        s.support_tokens == 0 or s.top_k <= s.support_tokens,
        f"sampling.top_k={s.top_k} must be at most sampling.support_tokens={s.support_tokens}: the ids that a token is "
        "drawn among are kept with it",
    )
    yield (
        (e.groups_per_iteration > 0) == bool(e.paths),
        f"external.groups_per_iteration={e.groups_per_iteration} and external.paths={e.paths!r} need each other: "
        "both or neither",
    )
    yield (
        e.groups_per_iteration == 0 or (s.top_k, s.top_p, s.min_p) == (0, 1.0, 0.0),
        f"sampling.top_k={s.top_k}, sampling.top_p={s.top_p} and sampling.min_p={s.min_p} must be 0, 1 and 0 with "
        "external.groups_per_iteration above 0: what others wrote may be what a filter never draws",
    )
    yield (
        c.objective.imitation_coefficient == 0 or e.groups_per_iteration > 0,
        f"objective.imitation_coefficient={c.objective.imitation_coefficient} must be 0 without "
        "external.groups_per_iteration: what is imitated is what others wrote",
    )
    yield (
        c.objective.environment_coefficient == 0 or c.prompts.max_tokens > 1,
        f"prompts.max_tokens={c.prompts.max_tokens} must be at least 2 for objective.environment_coefficient="
        f"{c.objective.environment_coefficient}: of a prompt's first token nothing is predicted",
    )
    yield (
        c.rollout.group_size > 1 or c.credit.advantage in NEED_NO_SIBLINGS,
        f"rollout.group_size={c.rollout.group_size} must be at least 2 for credit.advantage={c.credit.advantage!r}, "
        f"which compares siblings; {', '.join(map(repr, NEED_NO_SIBLINGS))} do not",
    )
    yield (
        c.rollout.group_size > 1 or c.rollout.max_resample_rounds == 0,
        f"rollout.max_resample_rounds={c.rollout.max_resample_rounds} must be 0 for rollout.group_size=1: "
        "a single completion is always tied",
    )
    yield (
        c.rollout.max_resample_rounds == 0
        or c.credit.advantage not in NEED_NO_MIXED_GROUP
        or (c.credit.advantage == "asymre" and c.credit.delta_v == 0),
        f"rollout.max_resample_rounds={c.rollout.max_resample_rounds} must be 0 for credit.advantage="
        f"{c.credit.advantage!r}: a tied group teaches it something",
    )
    for name in ADVANTAGE_SETTINGS:
        value = getattr(c.credit, name)
        yield (
            value == 0 or c.objective.surrogate not in REWARD_SURROGATES,
            f"credit.{name}={value} must be 0 for objective.surrogate={c.objective.surrogate!r}, which reads rewards "
            "and no advantages",
        )
    yield (
        c.rollout.max_lag_iterations == 0 or c.rollout.lookahead_prompts > 0,
        f"rollout.max_lag_iterations={c.rollout.max_lag_iterations} must be 0 without rollout.lookahead_prompts: no "
        "prompt stays open",
    )
    yield (
        c.num_slots <= c.rollouts_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size,
        f"rollout.slots={c.rollout.slots} must be at most the "
        f"{c.rollouts_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size} rollouts that can be open",
    )
    for name in ("positive_amplification", "entropy_reweighting"):
        value = getattr(c.credit, name)
        yield (
            c.credit.advantage != "gae" or value == 0,
            f"credit.{name}={value} must be 0 for credit.advantage='gae': it is of a row's advantage, not of a token's",
        )
    yield (
        c.credit.gate_threshold == 0 or (c.credit.advantage == "gdpo" and len(c.rewards.functions) > 1),
        f"credit.gate_threshold={c.credit.gate_threshold} must be 0 but with credit.advantage='gdpo' and more than one "
        "of rewards.functions, of which the first is the gate",
    )
    yield (
        c.credit.advantage_norm_decay == 0 or c.credit.advantage in OVER_THE_BATCH,
        f"credit.advantage_norm_decay={c.credit.advantage_norm_decay} must be 0 for credit.advantage="
        f"{c.credit.advantage!r}, which no standard deviation of the batch divides; {', '.join(OVER_THE_BATCH)} are",
    )
    yield (
        c.credit.overlong_buffer_tokens <= c.sampling.max_completion_tokens,
        f"credit.overlong_buffer_tokens={c.credit.overlong_buffer_tokens} must be at most "
        f"sampling.max_completion_tokens={c.sampling.max_completion_tokens}",
    )
    yield (
        c.credit.short_answer_iterations == 0 or c.credit.short_answer_tokens > 0,
        f"credit.short_answer_iterations={c.credit.short_answer_iterations} needs credit.short_answer_tokens of at "
        "least 1, the step of the lengths to choose from",
    )
    yield (
        len(c.rewards.functions) == len(c.rewards.weights) and len(c.rewards.functions) > 0,
        f"rewards.weights={c.rewards.weights!r} must have one weight for each of "
        f"rewards.functions={c.rewards.functions!r}",
    )
    yield (
        len(set(c.rewards.functions)) == len(c.rewards.functions),
        f"rewards.functions={c.rewards.functions!r} must not name a function twice",
    )
    yield (
        c.prompts.source in ("letters", "arithmetic") or c.prompts.name != "",
        f"prompts.name='' must name the {'dataset' if c.prompts.source == 'reasoning_gym' else 'file'} "
        f"for prompts.source={c.prompts.source!r}",
    )
    yield (
        c.prompts.source in ("jsonl", "parquet") or c.prompts.size > 0,
        f"prompts.size={c.prompts.size} must be at least 1 for prompts.source={c.prompts.source!r}",
    )
    yield (
        c.replay.unit == "rollout" or c.update.micro_batch_size % c.rollout.group_size == 0,
        f"update.micro_batch_size={c.update.micro_batch_size} must be a multiple of rollout.group_size="
        f"{c.rollout.group_size} for replay.unit='group'",
    )
    yield (
        c.update.pack_width == 0 or (c.update.micro_batch_tokens > 0 and c.update.pack_width >= c.draw_tokens),
        f"update.pack_width={c.update.pack_width} must be 0, or with update.micro_batch_tokens at least the "
        f"{c.draw_tokens} tokens that one draw of replay.unit={c.replay.unit!r} takes at full length",
    )
    yield (
        c.update.micro_batch_tokens % max(c.line_tokens, 1) == 0,
        f"update.micro_batch_tokens={c.update.micro_batch_tokens} must be a multiple of the {c.line_tokens} tokens of "
        f"a line (update.pack_width)",
    )
    yield (
        c.checkpoint.keep_best == 0 or c.eval.num_prompts > 0,
        f"checkpoint.keep_best={c.checkpoint.keep_best} needs eval.num_prompts of at least 1 to know the best",
    )
    yield (
        c.model.reference_path == "" or c.keeps_reference,
        f"model.reference_path={c.model.reference_path!r} must be '' where nothing reads the reference: neither "
        f"objective.kl_coefficient={c.objective.kl_coefficient} to objective.kl_anchor={c.objective.kl_anchor!r} nor "
        f"objective.surrogate={c.objective.surrogate!r}",
    )
    resets = c.objective.reference_reset_iterations
    yield (
        not resets or (c.keeps_reference and c.model.reference_path == "" and min(resets) > 0),
        f"objective.reference_reset_iterations={resets} must be () or numbers from 1 on with a reference that is read "
        f"(objective.kl_coefficient) and is the run's own (model.reference_path={c.model.reference_path!r})",
    )
    yield (all(s for s in c.sampling.stop_strings), "sampling.stop_strings must not contain the empty string")
    yield from _objective(c.objective, c.replay.unit)


def _objective(o: Any, unit: str):
    """Likewise, of the objective: no setting that its surrogate cannot hear."""
    surrogate = f"objective.surrogate={o.surrogate!r}"
    yield (
        o.surrogate not in GROUP_SURROGATES or unit == "group",
        f"replay.unit={unit!r} must be 'group' for {surrogate}, which compares the rows of a group",
    )
    yield (
        o.dual_clip == 0 or (o.dual_clip > 1 and o.surrogate in CLIP_SURROGATES),
        f"objective.dual_clip={o.dual_clip} must be 0, or above 1 with objective.surrogate one of {CLIP_SURROGATES!r}",
    )
    yield (
        o.proximal == "behaviour" or o.surrogate in OLD_POLICY_SURROGATES,
        f"objective.proximal={o.proximal!r} must be 'behaviour' for {surrogate}, which has no old policy",
    )
    yield (
        o.proximal != "behaviour" or o.surrogate != "remix_centred",
        f"objective.proximal='behaviour' must be another for {surrogate}: the window would lie about 1",
    )
    yield (
        o.value_bins != 1 and o.value_low < o.value_high,
        f"objective.value_bins={o.value_bins} must be 0 or at least 2, and objective.value_low={o.value_low} below "
        f"objective.value_high={o.value_high}",
    )
    yield (
        o.value_clip == 0 or o.value_bins == 0,
        f"objective.value_clip={o.value_clip} must be 0 for objective.value_bins={o.value_bins}: a clip is of a number",
    )
    has_weight = o.surrogate in PLAIN_SURROGATES or (o.surrogate in RATIO_SURROGATES and o.proximal != "behaviour")
    yield (
        has_weight or o.correction in ("none", "token_masked", "sequence_masked", "second_moment"),
        f"objective.correction={o.correction!r} must be 'none' or one that masks for {surrogate} with "
        f"objective.proximal={o.proximal!r}, which leaves no importance weight over",
    )
    yield (
        o.correction != "policy_truncated" or o.surrogate in ("clipped", "cispo"),
        f"objective.correction='policy_truncated' must be another for {surrogate}: it bounds the ratio of a token",
    )
