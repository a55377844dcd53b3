"""Evaluate: sample completions of held-out questions and score them.

    python -m jaxrl_llm.evaluate --model=PATH [--adapter=FOLDER] | --checkpoint=DIR  --config=FILE [--num_samples=K]

The command prints one JSON object: pass@1, pass@k for k up to K, maj@K, the mean length, and the number of messages
about skipped rows of the source. The first messages are also printed on stderr. The default of K is the config's
``eval.num_samples``. The questions are the questions that training with the same config holds out.

Owns: this command. Does not know: the estimators (evaluation), training.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from jaxrl_llm.actor.evaluation import Evaluation, questions, report_skipped
from jaxrl_llm.config import Config, ConfigError, LoraConfig, freeze
from jaxrl_llm.conversations import environment as environments
from jaxrl_llm.learner import publish
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.questions import tasks
from jaxrl_llm.run import Run, assemble, check_room
from jaxrl_llm.runtime import cli, hosts, json_lines, row_files, sharding
from jaxrl_llm.runtime.checkpoint_files import changed_settings, listed
from jaxrl_llm.runtime.programs import compile_all, use_cache
from jaxrl_llm.runtime.weights import restore_params
from jaxrl_llm.scoring.rewards import RewardPool

FLAGS = flags.FLAGS

# Settings that determine which questions of a source are held out.
HELD_OUT_BY = ("seed", "prompts.size", "prompts.arguments", "prompts.bad_row", "eval.num_prompts", "eval.name")


def trained_on(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the differences because of which a run may have trained on held-out questions of ``config``.

    Args:
        saved: the config of the run.

    Returns:
        {setting: (the run's value, the value in config)}; {} if the run was not trained on these questions.
    """
    if (saved.prompts.source, saved.prompts.name) != (config.prompts.source, config.prompts.name):
        return {}
    if config.eval.name not in ("", saved.prompts.name):
        return {}
    changed = {name: pair for name, pair in changed_settings(saved, config).items() if name in HELD_OUT_BY}
    if changed.keys() == {"eval.num_prompts"} and config.eval.num_prompts < saved.eval.num_prompts:
        return {}  # the questions are a part of the run's own held-out questions
    return changed


def _warn(run: str, saved: Config, config: Config) -> None:
    """Print a warning if the run may have been trained on held-out questions of ``config``."""
    changed = trained_on(saved, config)
    if changed and hosts.is_first():
        message = f"warning: {run} may have been trained on some of these questions: it held out others"
        print(f"{message} ({listed(changed)})", file=sys.stderr)


def evaluate(
    config: Config,
    model: str = "",
    checkpoint: str = "",
    num_samples: int | None = None,
    adapter: str = "",
) -> dict[str, Any]:
    """Sample completions of the held-out questions of ``config``, score them and return the figures.

    Args:
        model: a model, as ``model.path`` names it. Give either a model or a checkpoint.
        checkpoint: the workdir of a run, its folder of checkpoints, or one checkpoint.
        num_samples: completions per question; None = ``config.eval.num_samples``.
        adapter: folder of adapters (PEFT) for ``model``; "" = none.

    Returns:
        The figures that the command prints, and "samples" with every completion.

    Raises:
        ConfigError: bad input, before anything is compiled.
    """
    config = _checked(config, model, checkpoint, num_samples, adapter)
    use_cache(config.compilation_cache)
    mesh = sharding.make_mesh(config.mesh)
    source = pretrained.resolve(config.model.path, adapter=adapter)
    for saved in source.trained_by:
        _warn(config.model.path, saved, config)
    tokenizer = source.tokenizer().ending_at(config.sampling.stop_tokens)
    _, held_out, skipped = questions(config, tokenizer)
    report_skipped(skipped)
    examples = [row.example for row in held_out]
    with (
        RewardPool(config.rewards, task_scorer=tasks.scorer(config.prompts), examples=examples) as pool,
        environments.opened(config, examples, tokenizer) as environment,
    ):
        run = assemble(config, source.architecture(), tokenizer.eos_ids, mesh)
        params, base = _weights(run, source, checkpoint)
        compiled = _compile(run)
        if base is None:
            params = compiled["publish"](params)
        else:
            params = lora.join(compiled["publish"](params, base), compiled["publish_base"](base))
        version = sharding.put(np.int32(0), sharding.replicated(mesh, 0))
        result = Evaluation(run, compiled, tokenizer, held_out, pool, environment).result(params, version)
        return result | {"skipped_count": len(skipped)}


def _compile(run: Run) -> dict[str, jax.stages.Compiled]:
    """Compile the programs of an evaluation, after a check that its arrays fit."""
    sampler = run.eval_sampler
    assert sampler is not None  # eval.num_prompts is at least 1
    weights = (run.learner.params, run.learner.base, run.sampler_params)
    check_room(
        run,
        (weights, "model.path"),
        (sampler.abstract_state(), "eval.num_samples", "eval.slots"),
    )
    programs = publish.programs(run.model, run.mesh, sampler.mesh)
    for name, program in sampler.programs(run.sampler_params).items():
        programs[f"eval_{name}"] = program
    return compile_all(programs, run.mesh)


def _checked(config: Config, model: str, checkpoint: str, num_samples: int | None, adapter: str) -> Config:
    """Return the config with the model and the number of samples of ``evaluate``.

    Raises:
        ConfigError: the arguments do not go together, or a value is not allowed.
    """
    if bool(model) == bool(checkpoint):
        raise ConfigError("give one of --model=PATH and --checkpoint=DIR")
    if adapter and not model:
        raise ConfigError(f"--adapter={adapter!r:.200} needs --model=BASE: a checkpoint already has its own adapters")
    if num_samples is None:
        num_samples = config.eval.num_samples
    if not 1 <= num_samples <= 1_000_000:
        raise ConfigError(f"--num_samples={num_samples} must be at least 1 and at most 1000000")
    if config.eval.num_prompts == 0:
        raise ConfigError("eval.num_prompts=0 must be at least 1 to evaluate")
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, num_samples=num_samples))
    if model:  # the adapters of the config belong to a checkpoint
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=model, lora=LoraConfig()),
        )
    return config


def _weights(run: Run, source: Source, checkpoint: str) -> tuple[Any, Any]:
    """Return the trainable weights and the base of adapters; the base is None without adapters.

    Args:
        checkpoint: the checkpoint to read; "" = the weights of ``source``.

    Raises:
        ConfigError: the checkpoint has other adapters or another base.
    """
    config = run.config
    has_adapters = bool(run.learner.base)
    loaded = None
    if has_adapters or not checkpoint:
        loaded = source.load_params(run.model.base, run.mesh, seed=config.seed)
    base = loaded if has_adapters else None
    if not checkpoint:
        return loaded, base
    check = functools.partial(lora.check_frozen, own=lora.identity(base), path=config.model.path)
    params, saved = restore_params(checkpoint, run.learner.params, check)
    if config.model.lora != saved.model.lora:
        raise ConfigError(f"model.lora={config.model.lora!r} must be as in {checkpoint!r:.200}: {saved.model.lora!r}")
    _warn(checkpoint, saved, config)
    return params, base


def main() -> None:
    """Run the command with the values of its flags."""
    if FLAGS.output:
        row_files.check_output(FLAGS.output)
    result = evaluate(
        freeze(FLAGS.config),
        FLAGS.model,
        FLAGS.checkpoint,
        FLAGS.num_samples,
        FLAGS.adapter,
    )
    text = json_lines.written(result, indent=1)
    if FLAGS.output and hosts.is_first():
        pathlib.Path(FLAGS.output).write_text(text)
    print(json_lines.written({k: v for k, v in result.items() if k != "samples"}, indent=1))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("model", "", pretrained.SOME)
    flags.DEFINE_string("adapter", "", "Folder of adapters (PEFT) for --model.")
    flags.DEFINE_string("checkpoint", "", "Working directory of a run, instead of --model.")
    config_flags.DEFINE_config_file("config", None, "Config whose held-out questions are asked.")
    flags.DEFINE_integer("num_samples", None, "K: completions per question; default: eval.num_samples.")
    flags.DEFINE_string("output", "", "JSON file for the result with every completion.")
    flags.mark_flag_as_required("config")


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
