"""A model that a run has trained: the weights of its checkpoint, of the shape and tokenizer of its ``model.path``.

Owns: which folders are runs'. Does not know: how a checkpoint lies in its folder (``runtime.weights``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import bucket, hosts, weights

if TYPE_CHECKING:
    from jaxrl_llm.models.files.pretrained import Source


def is_run(path: str) -> bool:
    """Whether it names the workdir of a run, its ``checkpoints`` or one of these; all folders of buckets are such."""
    if bucket.is_bucket(path):
        return True
    has = lambda name: os.path.exists(os.path.join(path, name))  # False too for a name that no file can have
    is_workdir = (has("checkpoints") or has("metrics.jsonl")) and not any(Path(path).glob("*.safetensors"))
    name = os.path.basename(os.path.abspath(path)) if os.path.isdir(path) else ""
    return is_workdir or name == "checkpoints" or (name.isdigit() and has("state"))


def pinned(config: Config, workdir: Path) -> Config:
    """The config of a run with the newest checkpoint in place of each run that it begins with, or is held to.

    Resumed when that one has newer checkpoints it would have another reference. What it began with stands in the
    workdir's config.json.
    """
    began: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        began = json.loads((workdir / "config.json").read_text(encoding="utf-8"))["model"]
    paths = {}
    for name in ("path", "reference_path"):
        given = os.path.expanduser(getattr(config.model, name))
        if is_run(given):
            with _told_of(f"model.{name}", given):
                found, was = weights.newest(given), str(began.get(name))
            is_one = found == str(bucket.absolute(bucket.place(given)))
            paths[name] = was if not is_one and os.path.dirname(was) == os.path.dirname(found) else found
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **hosts.exchange(paths)[0]))


@contextlib.contextmanager
def _told_of(setting: str, path: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}={path!r:.200}: {error}") from error


def base_of(run: str, config: Config, resolve: Callable[..., Source], over: str = "") -> Source:
    """What a run was trained from: by its ``model.path``, or by ``over``, the place where --model says that it is now.

    Raises:
        ConfigError: it is not there.
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
    """The fields of a ``Source`` of a run's newest checkpoint, or of the one that ``path`` is.

    Adapters come merged into their base, as that is loaded.

    Raises:
        ConfigError: no whole checkpoint there, or what it was trained from is not there.
    """
    with _told_of(setting, path):
        config = weights.config_of_run(path)
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
        under = base.load_params(of(model).base, mesh, seed=config.seed)  # random ones were of the run's own seed
        is_base = functools.partial(lora.check_base, own=lora.identity(under), path=config.model.path)
        found, _ = weights.restore_params(path, learned(model, mesh), is_base)
        whole = lora.merge(found, jax.tree.map(lambda x: x.astype("float32"), under), adapters)
        return jax.tree.map(lambda x: x.astype(model.param_dtype), whole)

    tokenizer = lambda: base.tokenizer().ending_at(config.sampling.stop_tokens)
    return base.architecture, tokenizer, check, load, base.folder, config
