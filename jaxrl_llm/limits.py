"""Which values of the settings are allowed: choices, bounds, and what must fit together.

Owns: those rules and their words. Does not know: names' types and defaults (config), devices, files.
"""

from __future__ import annotations

import math
import re
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
    "optimizer.schedule": ("constant", "linear", "cosine"),
}

# Advantages that compare a rollout with other things than its siblings.
NEED_NO_SIBLINGS = ("reinforce_pp", "mssr", "gae")
# Those that are divided by the batch's standard deviation.
OVER_THE_BATCH = ("reinforce_pp", "mssr", "gae", "brorl", "gdpo")
# And those that a tied group may have all the same.
NEED_NO_MIXED_GROUP = (*NEED_NO_SIBLINGS, "asymre", "poise")

# Counts are int32 on the devices. What is not 0 keeps a size that float32 can multiply and divide by.
MOST = 2**31 - 1
SMALLEST, LARGEST = 1e-20, 1e12

AT_LEAST_ONE = (
    *("num_iterations", "prompts.max_tokens", "sampling.max_completion_tokens"),
    *("rollout.prompts_per_iteration", "rollout.group_size", "rollout.chunk_steps", "update.batch_size"),
    *("update.micro_batch_size", "update.updates_per_iteration", "mesh.fsdp", "mesh.tensor"),
    *("checkpoint.keep_last", "eval.num_samples"),
)
SHARES = (
    *("prompts.retire_pass_rate", "sampling.min_p", "rewards.max_failure_frac", "credit.baseline_decay"),
    *("credit.baseline_decay_moving", "credit.gae_lambda", "credit.discount", "replay.positive_fraction"),
    *("replay.fresh_fraction", "replay.min_ess", "replay.solved_fraction", "objective.clip_low"),
    "objective.correction_low",
)
POSITIVE = (
    *("credit.entropy_bonus_limit", "replay.age_scale_iterations", "update.max_sampler_learner_gap_nats"),
    *("objective.regression_beta", "objective.entropy_rate"),
)
OF_ANY_SIGN = (
    *("rewards.weights", "rewards.pass_threshold", "credit.delta_v", "credit.gate_threshold"),
    *("objective.value_low", "objective.value_high"),
)
# field -> (lowest, highest, whether the lowest itself is allowed); of a field that is not there, by its type.
BY_TYPE = {int: (0, MOST, True), float: (0.0, LARGEST, True)}
BOUNDS = {
    **dict.fromkeys(AT_LEAST_ONE, (1, MOST, True)),
    **dict.fromkeys(SHARES, (0.0, 1.0, True)),
    **dict.fromkeys(POSITIVE, (0.0, LARGEST, False)),
    **dict.fromkeys(OF_ANY_SIGN, (-LARGEST, LARGEST, True)),
    "sampling.temperature": (0.01, 100.0, True),
    "sampling.top_p": (0.0, 1.0, False),
    "rollout.max_resample_rounds": (0, 1000, True),
    "rewards.num_workers": (1, 1024, True),
    "rewards.timeout_s": (0.01, 86400.0, True),
    "credit.advantage_norm_decay": (0.0, 0.9999, True),
    "credit.duration_weight": (0.0, 100.0, True),
    "replay.priority_exponent": (0.0, 100.0, True),
    "objective.ewma_decay": (0.0, 0.9999, True),
    "objective.correction_high": (1.0, LARGEST, True),
    "objective.value_bins": (0, 10_000, True),
    # Adam moves a weight by up to the rate in a step, and divides by what its averages forget.
    "optimizer.learning_rate": (0.0, 10.0, True),
    "optimizer.value_learning_rate": (0.0, 10.0, True),
    "optimizer.b1": (0.0, 0.9999, True),
    "optimizer.b2": (0.0, 0.999999, True),
    "optimizer.eps": (0.0, 1.0, False),
    "optimizer.weight_decay": (0.0, 100.0, True),
    "eval.temperature": (0.0, 100.0, True),
}
# Texts that a model reads; the others are names, of files mostly.
TEXTS = ("prompts.system_prompt", "sampling.stop_strings")
# Questions that a source makes before a run begins.
MOST_MADE = 10_000_000


def complaint(config: Any, flat: dict[str, Any]) -> str | None:
    """The first rule a config breaks, naming the setting, its value and what is allowed; None where it keeps all.

    Args:
        config: a ``Config`` whose fields have their declared types.
        flat: its leaves by dotted name.
    """
    for path, allowed in CHOICES.items():
        if flat[path] not in allowed:
            return f"{path}={flat[path]!r:.200} is not one of {', '.join(map(repr, allowed))}"
    for path, value in flat.items():
        for item in value if isinstance(value, tuple) else (value,):
            if wrong := _wrong(path, item):
                return f"{path}={value!r:.200} {wrong}"
    values = flat | {"replay.capacity": config.ring_capacity}
    broken = (message for is_kept, message in _combinations(config, flat) if not is_kept)
    return re.sub(r"\[([a-z_.]+)\]", lambda name: f"{name[1]}={values[name[1]]!r:.200}", next(broken, "")) or None


def _wrong(path: str, item: Any) -> str | None:
    """What a value, or one of several, must be and is not."""
    if type(item) in BY_TYPE:
        low, high, closed = BOUNDS.get(path, BY_TYPE[type(item)])
        if not low <= item <= high or (item == low and not closed):
            return f"must be {'at least' if closed else 'more than'} {low} and at most {high}"
        return f"must be 0 or of a size of at least {SMALLEST}" if 0 < abs(item) < SMALLEST else None
    if isinstance(item, str):
        is_text = path in TEXTS and not re.search("[\ud800-\udfff]", item)
        return None if is_text or (item.isprintable() and len(item) < 4096) else "must be printable text, and not long"
    if isinstance(item, dict) and not (_is_json(item) and all(map(str.isidentifier, item))):
        return "has keys that are no names, or is not JSON serializable"
    return None


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(x) for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return math.isfinite(value) if isinstance(value, float) else value is None or isinstance(value, (bool, int, str))


def _combinations(c: Any, flat: dict[str, Any]):
    """(is kept, what to say otherwise) of every rule over several settings, each [by.name] where its value is said."""
    asked = c.num_iterations * c.rollout.prompts_per_iteration * (1 + c.rollout.max_resample_rounds)
    rows = c.rows_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size
    for count, *names in (
        (c.num_updates, "num_iterations", "update.updates_per_iteration"),
        (asked, "num_iterations", "rollout.prompts_per_iteration", "rollout.max_resample_rounds"),
        (rows, "rollout.group_size", "rollout.prompts_per_iteration", "rollout.lookahead_prompts"),
    ):
        given = " x ".join(f"[{name}]" for name in names)
        yield count <= MOST, f"{given} make {count} steps, questions or rollouts, and int32 counts to {MOST}"
    u, r, credit = c.update, c.replay, c.credit
    yield u.batch_size % u.micro_batch_size == 0, "[update.micro_batch_size] must divide [update.batch_size]"
    yield (
        c.ring_capacity >= u.batch_size,
        "[replay.capacity] must be at least [update.batch_size]: a batch does not repeat a rollout",
    )
    yield (
        c.ring_capacity % c.rows_per_iteration == 0,
        f"[replay.capacity] must be a multiple of the {c.rows_per_iteration} rollouts of an iteration "
        "((rollout.prompts_per_iteration + external.groups_per_iteration) x rollout.group_size)",
    )
    kept = round(r.positive_fraction * c.ring_capacity)
    yield (
        c.ring_capacity - kept >= c.rows_per_iteration,
        f"[replay.positive_fraction] of [replay.capacity] must leave room for the {c.rows_per_iteration} rollouts of "
        "an iteration",
    )
    rows = max((r.delay_iterations + 1) * c.rows_per_iteration, u.batch_size)
    full = -(-c.row_tokens // c.page_tokens) * c.page_tokens
    yield (
        r.capacity_tokens == 0 or r.capacity_tokens >= rows * full,
        f"[replay.capacity_tokens] must be 0 or at least {rows * full}: the {rows} rollouts of an update or of the "
        f"iterations that wait, at their full length in pages of {c.page_tokens} tokens",
    )
    yield (
        r.delay_iterations == 0 or c.ring_capacity - kept > r.delay_iterations * c.rows_per_iteration,
        f"[replay.delay_iterations] must be less than the {c.ring_capacity // c.rows_per_iteration} iterations that "
        "[replay.capacity] holds",
    )
    yield (
        r.delay_iterations == 0 or not (r.fresh_fraction or r.fresh_from_iteration or r.positive_fraction),
        "[replay.delay_iterations] must be 0 with [replay.fresh_fraction] or [replay.fresh_from_iteration] or "
        "[replay.positive_fraction]: a delayed batch has one age",
    )
    yield (
        not r.fresh_batches or 0 < r.fresh_fraction < 1,
        "[replay.fresh_fraction] must lie between 0 and 1 with replay.fresh_batches",
    )
    e, s = c.external, c.sampling
    ids = ": the ids that a token is drawn among are kept with it"
    for name, most, is_bound, why in (
        ("replay.delay_iterations", "replay.max_age_steps", r.max_age_steps > 0, ""),
        ("sampling.top_k", "sampling.support_tokens", s.support_tokens > 0, ids),
        ("credit.baseline_decay_moving", "credit.baseline_decay", True, ""),
        ("credit.overlong_buffer_tokens", "sampling.max_completion_tokens", True, ""),
    ):
        yield not is_bound or flat[name] <= flat[most], f"[{name}] must be at most [{most}]{why}"
    yield (
        (e.groups_per_iteration > 0) == bool(e.paths),
        "[external.groups_per_iteration] and [external.paths] need each other: both or neither",
    )
    yield (
        e.groups_per_iteration == 0 or (s.top_k, s.top_p, s.min_p) == (0, 1.0, 0.0),
        "[sampling.top_k], [sampling.top_p] and [sampling.min_p] must be 0, 1 and 0 with "
        "external.groups_per_iteration above 0: what others wrote may be what a filter never draws",
    )
    teaches = credit.advantage in NEED_NO_MIXED_GROUP and not (credit.advantage == "asymre" and credit.delta_v == 0)
    of_rows = "for credit.advantage='gae': it is of a row's advantage, not of a token's"
    of_batch = "for [credit.advantage], which no standard deviation of the batch divides; " + ", ".join(OVER_THE_BATCH)
    of_advantages = "for [objective.surrogate], which reads rewards and no advantages"
    ahead, reads_rewards = c.rollout.lookahead_prompts, c.objective.surrogate in REWARD_SURROGATES
    gated, functions = credit.advantage == "gdpo" and len(c.rewards.functions) > 1, c.rewards.functions
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
    most_open = c.rollouts_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size
    yield (
        c.num_slots <= most_open,
        f"[rollout.slots] must be at most the {most_open} rollouts that can be open ((rollout.prompts_per_iteration + "
        "rollout.lookahead_prompts) x rollout.group_size)",
    )
    yield (
        credit.short_answer_iterations == 0 or credit.short_answer_tokens > 0,
        "[credit.short_answer_iterations] needs credit.short_answer_tokens of at least 1, the step of the lengths to "
        "choose from",
    )
    yield (
        len(functions) == len(c.rewards.weights) > 0,
        "[rewards.weights] must have one weight for each of [rewards.functions]",
    )
    yield len(set(functions)) == len(functions), "[rewards.functions] must not name a function twice"
    yield (
        c.prompts.source != "letters" or c.eval.name == "",
        "[eval.name] must be '' for prompts.source='letters': what it held out would be trained on",
    )
    yield (
        c.prompts.source in ("letters", "arithmetic") or c.prompts.name != "",
        f"[prompts.name] must name the {'dataset' if c.prompts.source == 'reasoning_gym' else 'file'} for "
        "[prompts.source]",
    )
    yield (
        c.prompts.source in ("jsonl", "parquet") or 0 < c.prompts.size <= MOST_MADE,
        f"[prompts.size] must be at least 1 and at most {MOST_MADE} for [prompts.source]",
    )
    yield (
        c.replay.unit == "rollout" or u.micro_batch_size % c.rollout.group_size == 0,
        "[update.micro_batch_size] must be a multiple of [rollout.group_size] for replay.unit='group'",
    )
    num_draws = u.batch_size // c.rows_per_draw
    yield (
        u.pack_width == 0 or (u.micro_batch_tokens > 0 and c.draw_tokens <= u.pack_width <= num_draws * c.draw_tokens),
        f"[update.pack_width] must be 0, or with update.micro_batch_tokens at least the {c.draw_tokens} tokens that "
        f"one draw of [replay.unit] takes at full length, and at most those of the {num_draws} draws of a batch",
    )
    yield (
        u.micro_batch_tokens in range(0, num_draws * c.line_tokens + 1, max(c.line_tokens, 1)),
        f"[update.micro_batch_tokens] must be a multiple of the {c.line_tokens} tokens of a line (update.pack_width), "
        f"and of no more lines than the {num_draws} draws of a batch",
    )
    yield (
        c.checkpoint.keep_best == 0 or c.eval.num_prompts > 0,
        "[checkpoint.keep_best] needs eval.num_prompts of at least 1 to know the best",
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
    yield all(s for s in c.sampling.stop_strings), "sampling.stop_strings must not contain the empty string"
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
