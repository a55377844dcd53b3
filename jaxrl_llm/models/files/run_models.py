"""Models that a run has trained: weights from a checkpoint; architecture and tokenizer from the run's ``model.path``.

Owns: how such a model is put together. Does not know: which folders are runs, the form of checkpoints (``weights``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import bucket, weights

if TYPE_CHECKING:
    from jaxrl_llm.models.files.pretrained import Source


def check(config: Config, workdir: Path) -> None:
    """Check the paths of a run that start from other runs, and the workdir.

    A path must name one fixed checkpoint. A run's newest or best checkpoint could change, or be deleted, before the new
    run is resumed.

    Raises:
        ConfigError: a path names a run and not one checkpoint, or a checkpoint of the new run; or the workdir has files
            that are not of a run.
    """
    weights.check_workdir(workdir)
    for name in ("path", "reference_path"):
        if not weights.is_run(given := os.path.expanduser(getattr(config.model, name))):
            continue
        with _told_of(f"model.{name}", given):
            _, found = weights.config_of_run(given)
            if found != str(bucket.absolute(bucket.place(given))):
                raise ConfigError(f"a run's newest and best checkpoints may change; name one of them: {found!r}")
            own = str(bucket.absolute(bucket.place(config.checkpoint.bucket or workdir)))
            if found.startswith(f"{own}/"):
                raise ConfigError(f"is of this run itself, whose folder is {own!r}; give the run another --workdir")


@contextlib.contextmanager
def _told_of(setting: str, path: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}={path!r:.200}: {error}") from error


def base_of(run: str, config: Config, resolve: Callable[..., Source], over: str = "") -> Source:
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
            f"{run} was trained from model.path={config.model.path!r}, which is not to be had here now; `python -m "
            f"jaxrl_llm.export` makes a folder of both, with --checkpoint={run} and --model=PATH where it is ({error})"
        ) from error


def source(path: str, resolve: Callable[..., Source], setting: str) -> tuple[Any, ...]:
    """Return the fields of a ``Source`` for the checkpoint of a run that ``path`` names (``weights.restore_params``).

    Adapters are merged into their base when weights are loaded.

    Raises:
        ConfigError: no complete checkpoint exists, or the model that it was trained from does not exist.
    """
    with _told_of(setting, path):
        config, _ = weights.config_of_run(path)
    base, adapters = base_of(path, config, resolve), config.model.lora
    of = lambda model: dataclasses.replace(model, lora=adapters, param_dtype=config.model.param_dtype)
    learned = lambda model, mesh: lora.split(of(model).abstract_params(mesh))[0]

    def check(model: Model, mesh: Mesh) -> None:
        if adapters.rank:
            base.check_weights(model, mesh)
        weights.config_of_run(path, learned(model, mesh))

    def load(model: Model, mesh: Mesh, *, seed: int) -> Params:
        if not adapters.rank:
            return weights.restore_params(path, model.abstract_params(mesh))[0]
        under = base.load_params(of(model).base, mesh, seed=config.seed)  # a random base has the run's seed
        is_base = functools.partial(lora.check_frozen, own=lora.identity(under), path=config.model.path)
        found, _ = weights.restore_params(path, learned(model, mesh), is_base)
        whole = lora.merge(found, jax.tree.map(lambda x: x.astype("float32"), under), adapters)
        return jax.tree.map(lambda x: x.astype(model.param_dtype), whole)

    tokenizer = lambda: base.tokenizer().ending_at(config.sampling.stop_tokens)
    trained_by = (config, *base.trained_by)
    return base.architecture, tokenizer, check, load, base.folder, trained_by, bool(adapters.rank)
