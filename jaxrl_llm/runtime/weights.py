"""Weights of a checkpoint alone, for evaluation and export.

Owns: which checkpoint a folder means. Does not know: what else is in it (``checkpoint``).
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.ops.checksum import checksum
from jaxrl_llm.runtime import bucket, hosts
from jaxrl_llm.runtime.checkpoint import POLICY
from jaxrl_llm.runtime.stored import (
    best_of,
    by_name,
    check_arrays,
    compare,
    config_of,
    pass_rates,
    read_arrays,
    read_text,
    read_whole,
    steps_in,
)

BEST = "best"


def config_of_run(directory: str | os.PathLike, abstract_params: Any = None) -> Config:
    """The config of the checkpoint that ``restore_params`` reads; ConfigError as there, before an array is read."""
    return _found(directory, lambda path: _about(path, abstract_params)[0])


def folder_of(directory: str | os.PathLike) -> str:
    """The folder of the checkpoint that ``restore_params`` reads, as far as its text tells."""
    return os.fspath(_found(directory, lambda path: read_text(path) and path))


def restore_params(
    directory: str | os.PathLike,
    abstract_params: Any = None,
    check: Callable[[dict[str, Any]], None] = lambda host: None,
) -> tuple[Any, Config]:
    """Read the weights alone, for evaluation and export.

    Args:
        directory: a workdir or its ``checkpoints`` directory, of which the newest is read, with ``/best`` behind it the
            one of those kept whose held-out pass rate was the highest, or one checkpoint in it.
        abstract_params: pytree of ``ShapeDtypeStruct`` with shardings, cast to its dtypes; None gives nested
            dictionaries of numpy arrays on the host, as they were saved.
        check: raises where what the host had saved beside them does not fit.

    Returns:
        The parameters and the config of the run.

    Raises:
        ConfigError: no finished checkpoint there that is whole, or its arrays do not fit. An array that is cast is not
            compared with its checksum.
    """

    def read(path: pathlib.Path) -> tuple[Any, ...]:
        config, prefix, saved, wanted = _about(path, abstract_params, check)
        return config, prefix, saved, read_arrays(path, wanted)

    def compared(found: tuple[Any, ...]) -> tuple[Any, Config]:
        config, prefix, saved, arrays = found
        as_saved = {name: x for name, x in arrays.items() if str(x.dtype) == saved[name][0]}
        # One at a time on the device.
        compare(saved, as_saved, [checksum(x).item() for x in as_saved.values()])
        if abstract_params is None:
            arrays = {name.removeprefix(prefix): x for name, x in arrays.items()}
            return flax.traverse_util.unflatten_dict(arrays, sep="/"), config
        return jax.tree.unflatten(jax.tree.structure(abstract_params), arrays.values()), config

    return _found(directory, read, compared)


def _found(directory: str | os.PathLike, *stages: Callable[[Any], Any]) -> Any:
    """What the stages of ``read_whole`` make of the checkpoint that a directory is, or means."""
    path = bucket.absolute(bucket.place(directory))
    if is_best := path.name == BEST and not path.is_dir():
        path = path.parent
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    iteration = None
    if path.name.isdigit() and (path / "state").is_dir():
        root, iteration = path.parent, int(path.name)
    if is_best:
        rated = hosts.exchange(best_of(steps_in(root), pass_rates(root), 1))[0]
        if not rated:
            raise ConfigError(f"no best one in {root}: none was written when held-out questions had been answered")
        iteration = rated[0]
    if (found := read_whole(root, iteration, *stages)) is None:
        raise ConfigError(f"no finished checkpoint in {directory}")
    return found


def _about(
    path: pathlib.Path, abstract_params: Any, check: Callable[[dict[str, Any]], None] = lambda host: None
) -> tuple[Config, str, dict[str, Any], dict[str, Any]]:
    """Config of a checkpoint; what the names of its weights begin with, what is saved of them, what is wanted."""
    host, text = read_text(path)
    config = config_of(text, path)
    check(host)
    heads = [f"/{name}".partition(POLICY) for name in text["arrays"]]
    prefix = next(f"{head}{POLICY}"[1:] for head, found, _ in heads if found)
    saved = {name: about for name, about in text["arrays"].items() if name.startswith(prefix)}
    if abstract_params is None:
        return config, prefix, saved, dict.fromkeys(saved)
    wanted = {prefix + name: leaf for name, leaf in by_name(abstract_params).items()}
    check_arrays(saved, wanted, path, same_dtype=False)
    return config, prefix, saved, wanted
