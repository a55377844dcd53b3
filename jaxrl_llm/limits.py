"""Which values of the settings are allowed: choices, bounds, and what must fit together.

Owns: those rules and their words. Does not know: names' types and defaults (config), devices, files.
"""

from __future__ import annotations

import math
from typing import Any

CHOICES = {
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "dots", "full"),
    "prompts.source": ("letters", "arithmetic", "reasoning_gym", "jsonl", "parquet"),
    "prompts.bad_row": ("error", "skip"),
    "prompts.long_prompt": ("error", "skip"),
    "replay.unit": ("rollout", "group"),
    "credit.advantage": ("grpo", "dr_grpo", "leave_one_out"),
    "update.aggregation": ("token_mean", "sequence_mean", "constant_length"),
    "update.kl_estimator": ("k1", "k2", "k3"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
}

# field -> (lowest, highest, whether the lowest itself is allowed)
BOUNDS = {
    "seed": (0, 2**31 - 1, True),
    "num_iterations": (1, math.inf, True),
    "prompts.size": (0, math.inf, True),
    "prompts.max_tokens": (1, math.inf, True),
    "sampling.temperature": (0.0, math.inf, False),
    "sampling.top_k": (0, math.inf, True),
    "sampling.top_p": (0.0, 1.0, False),
    "sampling.min_p": (0.0, 1.0, True),
    "sampling.max_completion_tokens": (1, math.inf, True),
    "rollout.prompts_per_iteration": (1, math.inf, True),
    "rollout.group_size": (2, math.inf, True),
    "rollout.slots": (0, math.inf, True),
    "rollout.chunk_steps": (1, math.inf, True),
    "rollout.lookahead_prompts": (0, math.inf, True),
    "rewards.num_workers": (1, math.inf, True),
    "rewards.timeout_s": (0.0, math.inf, False),
    "rewards.max_failure_frac": (0.0, 1.0, True),
    "replay.capacity": (0, math.inf, True),
    "replay.max_age_steps": (0, math.inf, True),
    "replay.max_uses": (0, math.inf, True),
    "replay.fresh_fraction": (0.0, 1.0, True),
    "replay.shards": (0, math.inf, True),
    "update.batch_size": (1, math.inf, True),
    "update.micro_batch_size": (1, math.inf, True),
    "update.updates_per_iteration": (1, math.inf, True),
    "update.clip_low": (0.0, 1.0, True),
    "update.clip_high": (0.0, math.inf, True),
    "update.kl_coefficient": (0.0, math.inf, True),
    "update.logp_chunk_tokens": (1, math.inf, True),
    "update.max_sampler_learner_gap_nats": (0.0, math.inf, False),
    "optimizer.learning_rate": (0.0, math.inf, True),
    "optimizer.warmup_steps": (0, math.inf, True),
    "optimizer.b1": (0.0, 1.0, True),
    "optimizer.b2": (0.0, 1.0, True),
    "optimizer.eps": (0.0, math.inf, False),
    "optimizer.weight_decay": (0.0, math.inf, True),
    "optimizer.max_grad_norm": (0.0, math.inf, True),
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
        c.ring_capacity % c.rollouts_per_iteration == 0,
        f"replay.capacity={c.ring_capacity} must be a multiple of the {c.rollouts_per_iteration} rollouts of an "
        "iteration (rollout.prompts_per_iteration x rollout.group_size)",
    )
    yield (
        c.num_slots <= c.rollouts_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size,
        f"rollout.slots={c.rollout.slots} must be at most the "
        f"{c.rollouts_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size} rollouts that can be open",
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
        c.checkpoint.keep_best == 0 or c.eval.num_prompts > 0,
        f"checkpoint.keep_best={c.checkpoint.keep_best} needs eval.num_prompts of at least 1 to know the best",
    )
    yield (all(s for s in c.sampling.stop_strings), "sampling.stop_strings must not contain the empty string")
