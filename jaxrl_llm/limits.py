"""Rules for settings: which sizes fit together, and which texts are allowed.

Owns: rules over settings and their messages. Does not know: bounds of a single number, which are declared at its
setting (config), the needs of a method's function, which the function declares (algorithms.facts), devices, files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.settings.schema import MOST, chosen_functions, flatten, plain_text, unread

FILE_SOURCES = ("jsonl", "parquet", "code", "text")  # values of prompts.source that read a file
# Settings whose text a model reads. Other text settings are names, mostly of files.
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
    # Skip the settings of functions, which are checked with the function.
    for path, value in flatten(config, whole=True).items():
        for item in value if isinstance(value, tuple) else (value,):
            broken_rule = _rule_of_value(path, item)
            if broken_rule is not None:
                return f"{path}={value!r:.200} {broken_rule}"
    for path, chosen in chosen_functions(config).items():
        changed = chosen.moved()
        if changed:
            return f"{path}={chosen.name!r:.200} {changed}"
    values = flat | {"replay.capacity": config.ring_capacity}
    for is_kept, message in _rules(config, flat):
        if not is_kept:
            return _with_values(message, values)
    for path, value, default, condition in unread(config):
        return (
            f"{path}={plain_text(value):.200} must be {plain_text(default):.200}, its default, {condition}: nothing "
            "reads it then"
        )
    return None


def _with_values(message: str, values: dict[str, Any]) -> str:
    """Return a message in which every setting's name in square brackets is replaced by its name and value."""

    def name_and_value(match: re.Match[str]) -> str:
        return f"{match[1]}={values.get(match[1])!r:.200}"

    return re.sub(r"\[([\w.]+)\]", name_and_value, message)


# Whether a rule is kept, and the error message if it is broken. A setting's name in square brackets, as in
# [update.batch_size], stands for its name and value.
Rule = tuple[bool, str]


def _rule_of_value(path: str, item: Any) -> str | None:
    """Return the rule that a value, or one entry of a tuple, breaks; None if it breaks none."""
    if isinstance(item, str):
        is_text = path in TEXTS and not re.search("[\ud800-\udfff]", item)
        is_name = item.isprintable() and len(item) < 4096
        return None if is_text or is_name else "must be printable text, and not long"
    if isinstance(item, dict) and not (_is_json(item) and all(map(str.isidentifier, item))):
        return "has keys that are no names, or is not JSON serializable"
    return None


def _is_json(value: Any) -> bool:
    """Return whether JSON can represent a value exactly."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _rules(config: Any, flat: dict[str, Any]) -> Iterator[Rule]:
    """Yield every rule over several settings.

    Args:
        config: a ``jaxrl_llm.config.Config``, whose module imports this one.
        flat: the leaves of ``config`` by dotted name.
    """
    yield from _rules_of_counts(config)
    yield from _rules_of_ring(config)
    yield from _rules_of_sampling(config)
    yield from _rules_of_methods(config, flat)
    yield from _rules_of_learning(config)
    yield from _rules_of_rewards(config)
    yield from _rules_of_questions(config)
    yield from _rules_of_batches(config)
    for name in ("stop_strings", "stop_tokens"):
        yield (
            all(getattr(config.sampling, name)),
            f"[sampling.{name}] must not contain the empty string",
        )


def _rules_of_counts(config: Any) -> Iterator[Rule]:
    """Yield the rules that numbers of steps, questions and rollouts fit in int32."""
    rollout = config.rollout
    num_questions = config.num_iterations * rollout.prompts_per_iteration * (1 + rollout.max_resample_rounds)
    num_rows = config.rows_per_iteration + rollout.lookahead_prompts * rollout.group_size
    for count, names in (
        (config.num_updates, ("num_iterations", "update.updates_per_iteration")),
        (num_questions, ("num_iterations", "rollout.prompts_per_iteration", "rollout.max_resample_rounds")),
        (num_rows, ("rollout.group_size", "rollout.prompts_per_iteration", "rollout.lookahead_prompts")),
    ):
        product = " x ".join(f"[{name}]" for name in names)
        yield (
            count <= MOST,
            f"{product} make {count} steps, questions or rollouts, and int32 counts to {MOST}",
        )


def _rules_of_ring(config: Any) -> Iterator[Rule]:
    """Yield the rules of the sizes of the ring."""
    update = config.update
    replay = config.replay
    capacity = config.ring_capacity
    rows_per_iteration = config.rows_per_iteration
    yield (
        update.batch_size % update.micro_batch_size == 0,
        "[update.micro_batch_size] must divide [update.batch_size]",
    )
    yield (
        capacity >= update.batch_size,
        "[replay.capacity] must be at least [update.batch_size]: a batch does not repeat a rollout",
    )
    yield (
        capacity % rows_per_iteration == 0,
        f"[replay.capacity] must be a multiple of the {rows_per_iteration} rollouts of an iteration "
        "((rollout.prompts_per_iteration + external.groups_per_iteration) x rollout.group_size)",
    )
    second_ring = round(replay.positive_fraction * capacity)
    yield (
        capacity - second_ring >= rows_per_iteration,
        f"[replay.positive_fraction] of [replay.capacity] must leave room for the {rows_per_iteration} rollouts of "
        "an iteration",
    )
    min_rows = max((replay.delay_iterations + 1) * rows_per_iteration, update.batch_size)
    pages_per_row = -(-config.row_tokens // config.page_tokens)
    min_tokens = min_rows * pages_per_row * config.page_tokens
    yield (
        replay.capacity_tokens == 0 or replay.capacity_tokens >= min_tokens,
        f"[replay.capacity_tokens] must be 0 or at least {min_tokens}: the {min_rows} rollouts of an update or of the "
        f"iterations that wait, at their full length in pages of {config.page_tokens} tokens",
    )
    yield (
        replay.delay_iterations == 0 or capacity - second_ring > replay.delay_iterations * rows_per_iteration,
        f"[replay.delay_iterations] must be less than the {capacity // rows_per_iteration} iterations that "
        "[replay.capacity] holds",
    )
    yield (
        replay.delay_iterations == 0 or not (replay.fresh_fraction or replay.positive_fraction),
        "[replay.delay_iterations] must be 0 with [replay.fresh_fraction] or [replay.positive_fraction]: all rollouts "
        "of a delayed batch have the same age",
    )
    yield (
        replay.max_age_steps == 0 or replay.delay_iterations <= replay.max_age_steps,
        "[replay.delay_iterations] must be at most [replay.max_age_steps]",
    )


def _rules_of_sampling(config: Any) -> Iterator[Rule]:
    """Yield the rules of filters and of external rollouts."""
    sampling = config.sampling
    external = config.external
    yield (
        sampling.support_tokens == 0 or sampling.top_k <= sampling.support_tokens,
        "[sampling.top_k] must be at most [sampling.support_tokens]: the ids that a token is drawn among are stored "
        "with it",
    )
    yield (
        (external.groups_per_iteration > 0) == bool(external.paths),
        "[external.groups_per_iteration] and [external.paths] must be set both or neither",
    )
    is_unfiltered = (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
    yield (
        external.groups_per_iteration == 0 or is_unfiltered,
        "[sampling.top_k], [sampling.top_p] and [sampling.min_p] must be 0, 1 and 0 with "
        "external.groups_per_iteration above 0: a filter can make tokens of external rollouts impossible",
    )


def _rules_of_learning(config: Any) -> Iterator[Rule]:
    """Yield the rules without which a run would not learn."""
    yield (
        config.optimizer.learning_rate > 0,
        "[optimizer.learning_rate] must be more than 0: nothing would learn. `python -m jaxrl_llm.evaluate` measures a "
        "model as it is",
    )
    yield (
        config.algorithm.critic.learning_rate > 0 or not config.has_critic,
        "[algorithm.critic.learning_rate] must be more than 0 with a critic, because the critic would not learn",
    )
    yield (
        any(config.rewards.weights) or config.learns_without_rewards,
        "[rewards.weights] must not all be 0: the loss has no other term. Set a weight, a "
        "teacher (model.reference_path with algorithm.divergence), algorithm.cross_entropies, algorithm.reward_terms "
        "or algorithm.entropy_bonus",
    )
    yield (
        config.model.param_dtype == "float32" or not config.keeps_average,
        "[model.param_dtype] must be 'float32' with a moving average of the policy: its steps are too small for other "
        "types",
    )
    targets = config.model.lora.targets
    yield (
        len({*targets}) == len(targets) > 0,
        "[model.lora.targets] must name at least one matrix, and no matrix twice",
    )
    yield (
        config.optimizer.name != "adafactor" or config.optimizer.moment_dtype != "int8",
        "[optimizer.moment_dtype] must be 'float32' or 'bfloat16' with [optimizer.name]: int8 needs AdamW's moments",
    )


def _rules_of_rewards(config: Any) -> Iterator[Rule]:
    """Yield the rules of decode slots and of reward functions."""
    rollout = config.rollout
    most_open = config.rollouts_per_iteration + rollout.lookahead_prompts * rollout.group_size
    yield (
        config.num_slots <= most_open,
        f"[rollout.slots] must be at most the {most_open} rollouts that can be open ((rollout.prompts_per_iteration + "
        "rollout.lookahead_prompts) x rollout.group_size)",
    )
    functions = config.rewards.functions
    yield (
        len(functions) == len(config.rewards.weights) > 0,
        "[rewards.weights] must have one weight for each of [rewards.functions]",
    )
    yield (
        len(set(functions)) == len(functions),
        "[rewards.functions] must not name a function twice",
    )


def _rules_of_questions(config: Any) -> Iterator[Rule]:
    """Yield the rules of the sources of questions."""
    prompts = config.prompts
    makes_all = prompts.source in ("letters", "maze", "kolmogorov", "grids")
    yield (
        not makes_all or config.eval.name == "",
        "[eval.name] must be '' for [prompts.source]: the run would train on the held-out questions",
    )
    yield (
        config.eval.name == "" or config.eval.num_prompts > 0,
        "[eval.name], but [eval.num_prompts]: set both or none",
    )
    if makes_all:
        yield (
            prompts.name == "",
            "[prompts.name] must be '' for [prompts.source], which makes all of its questions",
        )
    elif prompts.source != "arithmetic":
        kind = "dataset" if prompts.source == "reasoning_gym" else "file"
        yield (
            prompts.name != "",
            f"[prompts.name] must name the {kind} for [prompts.source]",
        )
    yield (
        prompts.source in FILE_SOURCES or 0 < prompts.size <= MOST_MADE,
        f"[prompts.size] must be at least 1 and at most {MOST_MADE} for [prompts.source]",
    )


def _rules_of_batches(config: Any) -> Iterator[Rule]:
    """Yield the rules of packed update batches, and of the rollouts that a batch may have."""
    update = config.update
    replay = config.replay
    num_draws = update.batch_size // config.rows_per_draw
    is_width_allowed = config.draw_tokens <= update.pack_width <= num_draws * config.draw_tokens
    yield (
        update.pack_width == 0 or (update.micro_batch_tokens > 0 and is_width_allowed),
        f"[update.pack_width] must be 0, or with update.micro_batch_tokens at least the {config.draw_tokens} tokens "
        f"that one draw of [replay.unit] takes at full length, and at most those of the {num_draws} draws of a batch",
    )
    line_tokens = config.line_tokens
    yield (
        update.micro_batch_tokens in range(0, num_draws * line_tokens + 1, max(line_tokens, 1)),
        f"[update.micro_batch_tokens] must be a multiple of the {line_tokens} tokens of a line (update.pack_width), "
        f"and of no more lines than the {num_draws} draws of a batch",
    )
    for name, is_on, num_ages in (
        ("delay_iterations", replay.delay_iterations > 0, 1),
        ("max_age_steps", replay.max_age_steps > 0, replay.max_age_steps + 1),
    ):
        most = num_ages * config.rows_per_iteration
        yield (
            not is_on or update.batch_size <= most,
            f"[update.batch_size] must be at most the {most} rollouts that [replay.{name}] leaves to draw",
        )


def _rules_of_zeros(config: Any, flat: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules that a number must be 0, because another setting excludes it."""
    algorithm = config.algorithm
    replay = config.replay
    main_ring = config.ring_capacity - round(replay.positive_fraction * config.ring_capacity)
    iterations_held = main_ring // config.rows_per_iteration
    for name, must_be_0, reason in (
        (
            "replay.positive_fraction",
            replay.unit == "group",
            "unless replay.unit='rollout': rows are kept one by one",
        ),
        (
            "replay.positive_fraction",
            replay.capacity_tokens > 0,
            "with [replay.capacity_tokens]: it has no pages",
        ),
        (
            "replay.positive_fraction",
            0 < replay.max_age_steps < iterations_held,
            f"with [replay.max_age_steps] below {iterations_held}",
        ),
        (
            "rollout.max_resample_rounds",
            config.rollout.group_size == 1,
            "for rollout.group_size=1, because a group of one row is always tied",
        ),
        ("rollout.max_resample_rounds", algorithm.tied_teaches, "for [algorithm.advantage]: it uses tied groups"),
        ("rollout.max_lag_iterations", not config.rollout.lookahead_prompts, "without rollout.lookahead_prompts"),
        (
            "algorithm.critic.clip",
            algorithm.critic.bins > 0,
            "for [algorithm.critic.bins]: with bins, values are not clipped",
        ),
    ):
        yield not must_be_0 or flat[name] == 0, f"[{name}] must be 0 {reason}"


def _rules_of_methods(config: Any, flat: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules between a method's functions and other settings."""
    algorithm = config.algorithm
    yield from _rules_of_zeros(config, flat)
    yield (
        config.rollout.lookahead_prompts > 0 or config.rollout.stale_cache == "recompute",
        "[rollout.stale_cache] must be 'recompute' without rollout.lookahead_prompts: every completion then ends under "
        "the weights that it began with",
    )
    yield from _rules_of_environments(config, flat)
    resets = algorithm.reference_reset_iterations
    yield (
        not resets or (config.keeps_reference and config.model.reference_path == "" and min(resets) > 0),
        "[algorithm.reference_reset_iterations] must be () or numbers from 1 on, with a method that reads the "
        "reference (algorithm.divergence), which must be the run's own ([model.reference_path])",
    )
    yield (
        algorithm.critic.bins != 1 and algorithm.critic.low < algorithm.critic.high,
        "[algorithm.critic.bins] must be 0 or at least 2, and [algorithm.critic.low] below [algorithm.critic.high]",
    )
    decays = set()
    for chosen in algorithm.of_loss:
        if "average_logp" in chosen.facts.columns and "decay" in chosen.settings:
            decays.add(chosen["decay"])
    yield (
        len(decays) < 2,
        "[algorithm.old_policy.decay] and [algorithm.divergence.decay] must be equal: a run keeps one moving average",
    )
    for path, chosen in chosen_functions(config).items():
        for message in chosen.facts.broken_rules(path, chosen, config):
            yield False, message


def _rules_of_environments(config: Any, flat: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules of environments."""
    environments = config.environments
    reason = "with environments.factory: only the policy's own end tokens end its turns"
    for name, empty in (("sampling.stop_strings", ()), ("external.groups_per_iteration", 0)):
        yield (
            environments.factory == "" or flat[name] == empty,
            f"[{name}] must be {empty!r} {reason}",
        )
    yield (
        environments.factory == "" or not config.metrics.share_rollouts,
        "[metrics.share_rollouts] must be False with environments.factory: shared rollouts have one turn",
    )
    yield (
        environments.factory == "" or environments.max_answer_tokens + 2 <= config.sampling.max_completion_tokens,
        "[environments.max_answer_tokens] must leave room in [sampling.max_completion_tokens] for two turns, which "
        "[environments.factory] asks for",
    )
    yield (
        environments.factory != "" or "environment" not in config.rewards.functions,
        "[rewards.functions] has 'environment', which needs environments.factory",
    )
