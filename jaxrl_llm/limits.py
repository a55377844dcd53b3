"""Rules for settings: which sizes fit together, and which texts are allowed.

Owns: these rules and their messages. Does not know: bounds of a single number, which are declared at its setting
(config), the needs of a method's function, which the function declares (algorithms.facts), devices, files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.settings.schema import MOST, chosen_functions, flatten, plain_text, unread

FILE_SOURCES = ("jsonl", "parquet", "code", "text")  # sources of questions that read a file
# Texts that a model reads. Other text settings are names, mostly of files.
TEXTS = ("prompts.system_prompt", "sampling.stop_strings", "sampling.stop_tokens")
# Largest number of questions that a source may generate before a run begins.
MOST_MADE = 10_000_000


def complaint(config: Any, flat: dict[str, Any]) -> str | None:
    """Return a message about the first rule that a config breaks, or None if it breaks none.

    The message names the setting, its value and the allowed values.

    Args:
        config: a ``Config`` whose fields have their declared types.
        flat: the leaves of ``config`` by dotted name.
    """
    for path, value in flatten(config, whole=True).items():  # functions check their own settings
        for item in value if isinstance(value, tuple) else (value,):
            if wrong := _wrong(path, item):
                return f"{path}={value!r:.200} {wrong}"
    for path, one in chosen_functions(config).items():
        if moved := one.moved():
            return f"{path}={one.name!r:.200} {moved}"
    values = flat | {"replay.capacity": config.ring_capacity}
    broken = (message for is_kept, message in _combinations(config, flat) if not is_kept)
    if message := next(broken, ""):
        return re.sub(r"\[([\w.]+)\]", lambda name: f"{name[1]}={values.get(name[1])!r:.200}", message)
    for path, value, default, condition in unread(config):
        said, usual = plain_text(value), plain_text(default)
        return f"{path}={said:.200} must be {usual:.200}, its default, {condition}: nothing reads it then"
    return None


def _wrong(path: str, item: Any) -> str | None:
    """Return the rule that a value, or one entry of a tuple, breaks; None if it breaks none."""
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
    """Yield (is kept, error message) of every rule over several settings.

    A setting's name in square brackets, as in [update.batch_size], is replaced by its name and value.
    """
    asked = c.num_iterations * c.rollout.prompts_per_iteration * (1 + c.rollout.max_resample_rounds)
    rows = c.rows_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size
    for count, *names in (
        (c.num_updates, "num_iterations", "update.updates_per_iteration"),
        (asked, "num_iterations", "rollout.prompts_per_iteration", "rollout.max_resample_rounds"),
        (rows, "rollout.group_size", "rollout.prompts_per_iteration", "rollout.lookahead_prompts"),
    ):
        given = " x ".join(f"[{name}]" for name in names)
        yield count <= MOST, f"{given} make {count} steps, questions or rollouts, and int32 counts to {MOST}"
    u, r, functions = c.update, c.replay, c.rewards.functions
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
        r.delay_iterations == 0 or not (r.fresh_fraction or r.positive_fraction),
        "[replay.delay_iterations] must be 0 with [replay.fresh_fraction] or [replay.positive_fraction]: all rollouts "
        "of a delayed batch have the same age",
    )
    e, s = c.external, c.sampling
    ids = ": the ids that a token is drawn among are kept with it"
    for name, most, is_bound, why in (
        ("replay.delay_iterations", "replay.max_age_steps", r.max_age_steps > 0, ""),
        ("sampling.top_k", "sampling.support_tokens", s.support_tokens > 0, ids),
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
    yield from _rules_of_methods(c, flat)
    yield (
        c.optimizer.learning_rate > 0,
        "[optimizer.learning_rate] must be more than 0: nothing would learn. `python -m jaxrl_llm.evaluate` measures a "
        "model as it is",
    )
    yield (
        c.algorithm.critic.learning_rate > 0 or not c.has_critic,
        "[algorithm.critic.learning_rate] must be more than 0 with a critic: it would learn nothing",
    )
    yield (
        any(c.rewards.weights) or c.learns_without_rewards,
        "[rewards.weights] must not all be 0: no other term of the loss would teach anything. Set a weight, a "
        "teacher (model.reference_path with algorithm.divergence), algorithm.cross_entropies, algorithm.reward_terms "
        "or algorithm.entropy_bonus",
    )
    most_open = c.rollouts_per_iteration + c.rollout.lookahead_prompts * c.rollout.group_size
    yield (
        c.num_slots <= most_open,
        f"[rollout.slots] must be at most the {most_open} rollouts that can be open ((rollout.prompts_per_iteration + "
        "rollout.lookahead_prompts) x rollout.group_size)",
    )
    yield (
        len(functions) == len(c.rewards.weights) > 0,
        "[rewards.weights] must have one weight for each of [rewards.functions]",
    )
    yield len(set(functions)) == len(functions), "[rewards.functions] must not name a function twice"
    makes_all = c.prompts.source in ("letters", "maze", "kolmogorov", "grids")
    yield (
        not makes_all or c.eval.name == "",
        "[eval.name] must be '' for [prompts.source]: what it held out would be trained on",
    )
    yield c.eval.name == "" or c.eval.num_prompts > 0, "[eval.name], but [eval.num_prompts]: set both or none"
    if makes_all:
        yield c.prompts.name == "", "[prompts.name] must be '' for [prompts.source], which makes all of its questions"
    elif c.prompts.source != "arithmetic":
        what = "dataset" if c.prompts.source == "reasoning_gym" else "file"
        yield c.prompts.name != "", f"[prompts.name] must name the {what} for [prompts.source]"
    yield (
        c.prompts.source in FILE_SOURCES or 0 < c.prompts.size <= MOST_MADE,
        f"[prompts.size] must be at least 1 and at most {MOST_MADE} for [prompts.source]",
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
        c.model.param_dtype == "float32" or not c.keeps_average,
        "[model.param_dtype] must be 'float32' with a moving average of the policy: its steps are too small to be kept",
    )
    lora = c.model.lora
    yield len({*lora.targets}) == len(lora.targets) > 0, "[model.lora.targets] must name a matrix, and none twice"
    o = c.optimizer
    yield (
        o.name != "adafactor" or o.moment_dtype != "int8",
        "[optimizer.moment_dtype] is of AdamW's moments, and must be 'float32' or 'bfloat16' with [optimizer.name]",
    )
    limited = (
        ("delay_iterations", r.delay_iterations > 0, 1),
        ("max_age_steps", r.max_age_steps > 0, r.max_age_steps + 1),
    )
    for name, is_on, ages in limited:
        most = ages * c.rows_per_iteration
        words = f"[update.batch_size] must be at most the {most} rollouts that [replay.{name}] leaves to draw"
        yield not is_on or u.batch_size <= most, words
    for name in ("stop_strings", "stop_tokens"):
        yield all(getattr(c.sampling, name)), f"sampling.{name} must not contain the empty string"


def _rules_of_methods(c: Any, flat: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (is kept, error message) of the rules between a method's functions and other settings."""
    a, r = c.algorithm, c.replay
    iterations_held = (c.ring_capacity - round(r.positive_fraction * c.ring_capacity)) // c.rows_per_iteration
    for name, must_be_0, reason in (
        ("replay.positive_fraction", r.unit == "group", "unless replay.unit='rollout': rows are kept one by one"),
        ("replay.positive_fraction", r.capacity_tokens > 0, "with [replay.capacity_tokens]: it has no pages"),
        (
            "replay.positive_fraction",
            0 < r.max_age_steps < iterations_held,
            f"with [replay.max_age_steps] below {iterations_held}",
        ),
        (
            "rollout.max_resample_rounds",
            c.rollout.group_size == 1,
            "for rollout.group_size=1, because a group of one row is always tied",
        ),
        ("rollout.max_resample_rounds", a.tied_teaches, "for [algorithm.advantage]: a tied group teaches it"),
        ("rollout.max_lag_iterations", not c.rollout.lookahead_prompts, "without rollout.lookahead_prompts"),
        ("algorithm.critic.clip", a.critic.bins > 0, "for [algorithm.critic.bins]: a clip needs one number"),
    ):
        yield not must_be_0 or flat[name] == 0, f"[{name}] must be 0 {reason}"
    yield (
        c.rollout.lookahead_prompts > 0 or c.rollout.stale_cache == "recompute",
        "[rollout.stale_cache] must be 'recompute' without rollout.lookahead_prompts: then every completion ends under "
        "the weights that it began with",
    )
    yield from _rules_of_environments(c, flat)
    resets = a.reference_reset_iterations
    yield (
        not resets or (c.keeps_reference and c.model.reference_path == "" and min(resets) > 0),
        "[algorithm.reference_reset_iterations] must be () or numbers from 1 on, with a method that reads the "
        "reference (algorithm.divergence), which must be the run's own ([model.reference_path])",
    )
    yield (
        a.critic.bins != 1 and a.critic.low < a.critic.high,
        "[algorithm.critic.bins] must be 0 or at least 2, and [algorithm.critic.low] below [algorithm.critic.high]",
    )
    decays = set()
    for chosen in a.of_loss:
        if "average_logp" in chosen.facts.columns and "decay" in chosen.settings:
            decays.add(chosen["decay"])
    yield (
        len(decays) < 2,
        "[algorithm.old_policy.decay] and [algorithm.divergence.decay] must be equal: a run keeps one moving average",
    )
    for path, chosen in chosen_functions(c).items():
        yield from chosen.facts.rules(path, chosen, c)


def _rules_of_environments(c: Any, flat: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (is kept, error message) of the rules of environments."""
    n = c.environments
    reason = "with environments.factory: only the policy's own end tokens end its turns"
    for name, empty in (("sampling.stop_strings", ()), ("external.groups_per_iteration", 0)):
        yield n.factory == "" or flat[name] == empty, f"[{name}] must be {empty!r} {reason}"
    yield (
        n.factory == "" or not c.metrics.share_rollouts,
        "[metrics.share_rollouts] must be False with environments.factory: shared rollouts have one turn",
    )
    yield (
        n.factory == "" or n.max_answer_tokens + 2 <= c.sampling.max_completion_tokens,
        "[environments.max_answer_tokens] must leave room in [sampling.max_completion_tokens] for two turns, which "
        "[environments.factory] asks for",
    )
    yield (
        n.factory != "" or "environment" not in c.rewards.functions,
        "[rewards.functions] has 'environment', which needs environments.factory",
    )
