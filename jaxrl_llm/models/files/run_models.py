"""Models that runs have trained. The weights are in a checkpoint; the run's ``model.path`` has the rest.

Owns: the source of a run's model, the check of paths that name checkpoints of other runs.
Does not know: which folders are runs, the form of checkpoints (``runtime.weights``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models import lora
from jaxrl_llm.models.files.source import Resolve, Source
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import bucket, weights


def check(config: Config, workdir: Path) -> None:
    """Check the paths of a run that start from other runs, and the workdir.

    A path must name one fixed checkpoint. A run's newest or best checkpoint could change, or be deleted, before the new
    run is resumed.

    Raises:
        ConfigError: a path names a run instead of one checkpoint, or names a checkpoint of the new run; or the workdir
            has files that do not belong to a run.
    """
    weights.check_workdir(workdir)
    for name in ("path", "reference_path"):
        path = os.path.expanduser(getattr(config.model, name))
        if not weights.is_run(path):
            continue
        with _errors_name(f"model.{name}", path):
            _, checkpoint = weights.config_of_run(path)
            if checkpoint != str(bucket.absolute(bucket.place(path))):
                raise ConfigError(
                    f"the path names a run, whose newest and best checkpoints may change. Name one checkpoint, for "
                    f"example the current one: {checkpoint!r}"
                )
            own_folder = str(bucket.absolute(bucket.place(config.checkpoint.bucket or workdir)))
            if checkpoint.startswith(f"{own_folder}/"):
                raise ConfigError(
                    f"the path names a checkpoint of the new run itself, whose folder is {own_folder!r}. Give the new "
                    "run another --workdir"
                )


@contextlib.contextmanager
def _errors_name(setting: str, path: str) -> Iterator[None]:
    """Put a setting and its value before the message of every ``ConfigError`` in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}={path!r:.200}: {error}") from error


def base_of(run: str, config: Config, resolve: Resolve, over: str = "") -> Source:
    """Return the source of the model that a run was trained from.

    Args:
        over: the path of --model, if the model has moved; "" = the run's ``model.path``.

    Raises:
        ConfigError: the model does not exist.
    """
    if over:
        return resolve(over, setting="--model")
    try:
        return resolve(config.model.path)
    except ConfigError as error:
        raise ConfigError(
            f"{run} was trained from model.path={config.model.path!r}, which cannot be read here: {error}. If the "
            f"model has moved, write a folder of base and weights by `python -m jaxrl_llm.export --checkpoint={run} "
            "--model=PATH`"
        ) from error


def source(path: str, resolve: Resolve, setting: str) -> Source:
    """Return the source of the model in the checkpoint of a run that ``path`` names.

    Adapters are merged into their base when weights are loaded.

    Raises:
        ConfigError: no complete checkpoint exists, or the model that it was trained from does not exist.
    """
    with _errors_name(setting, path):
        config, _ = weights.config_of_run(path)
    base = base_of(path, config, resolve)
    adapters = config.model.lora

    def trained(model: Model) -> Model:
        """Return the model as the run trained it, with the run's adapters and dtype."""
        return dataclasses.replace(model, lora=adapters, param_dtype=config.model.param_dtype)

    def learned_shapes(model: Model, mesh: Mesh) -> Params:
        return lora.split(trained(model).abstract_params(mesh))[0]

    def check(model: Model, mesh: Mesh) -> None:
        if adapters.rank:
            base.check_weights(model, mesh)
        weights.config_of_run(path, learned_shapes(model, mesh))

    def load(model: Model, mesh: Mesh, *, seed: int) -> Params:
        if not adapters.rank:
            return weights.restore_params(path, model.abstract_params(mesh))[0]
        base_params = base.load_params(trained(model).base, mesh, seed=config.seed)  # a random base has the run's seed
        check_base = functools.partial(lora.check_frozen, own=lora.identity(base_params), path=config.model.path)
        learned, _ = weights.restore_params(path, learned_shapes(model, mesh), check_base)
        base_params = jax.tree.map(lambda x: x.astype("float32"), base_params)
        params = lora.merge(learned, base_params, adapters)
        return jax.tree.map(lambda x: x.astype(model.param_dtype), params)

    return Source(
        architecture=base.architecture,
        tokenizer=lambda: base.tokenizer().ending_at(config.sampling.stop_tokens),
        check_weights=check,
        load_params=load,
        folder=base.folder,
        trained_by=(config, *base.trained_by),
        is_merged=bool(adapters.rank),
    )
