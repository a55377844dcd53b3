"""The source of a model: functions that read its architecture, its tokenizer and its weights on demand.

Owns: the record ``Source``. Does not know: file formats, which paths name which sources (pretrained).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from jax.sharding import Mesh

from jaxrl_llm.config import Config
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.models.transformer import Model, Params


class LoadParams(Protocol):
    """Function that reads weights."""

    def __call__(self, model: Model, mesh: Mesh, *, seed: int) -> Params:
        """Return parameters on their shards. Only random weights use ``seed``."""
        ...


class Resolve(Protocol):
    """Function that returns the source of the model that a path names (``pretrained.resolve``)."""

    def __call__(self, path: str, *, setting: str = "model.path") -> Source:
        """Return the source. ``setting`` is the setting that has the path, for error messages."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """A model's files, read on demand.

    Attributes:
        architecture: () -> architecture of the model, read from headers only.
        tokenizer: () -> its tokenizer.
        check_weights: (model, mesh) -> None. Raises the errors of ``load_params`` about missing tensors and shapes.
        load_params: (model, mesh, *, seed) -> parameters on their shards.
        folder: the Hugging Face folder whose files an export copies; None = the model has no such folder.
        trained_by: settings of the run that trained the model, then of the runs that this run was started from.
        is_merged: adapters are merged into the weights when they are loaded. The last bits then depend on the mesh.
    """

    architecture: Callable[[], Architecture]
    tokenizer: Callable[[], Tokenizer]
    check_weights: Callable[[Model, Mesh], None]
    load_params: LoadParams
    folder: str | None = None
    trained_by: tuple[Config, ...] = ()
    is_merged: bool = False
