"""Weights of a checkpoint alone, for evaluation and export.

Owns: which checkpoint a folder means. Does not know: what else is in it (``checkpoint``).
"""

from __future__ import annotations

import contextlib
import json
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
    step_of,
    steps_in,
)

BEST = "best"
ENDED = ("report.html", "after.json")  # which say that a run, and a sweep's point, came to its end
WRITTEN = ("metrics.jsonl", "samples.jsonl", "shared_rollouts.jsonl", *ENDED)  # anew, where a run begins


def is_run(path: str) -> bool:
    """Whether it names the workdir of a run, its ``checkpoints``, one of these or the best; all of buckets does."""
    if bucket.is_bucket(path := os.path.expanduser(path)):
        return True
    if not os.path.isdir(path):  # False too for a name that no file can have
        head, name = os.path.split(path.rstrip("/"))
        return name == BEST and is_run(head or ".")
    folder = os.path.realpath(path)
    name = os.path.basename(folder)
    has = lambda name: os.path.exists(os.path.join(folder, name))
    if step_of(name) is not None and has("state"):
        return True
    is_one = name == "checkpoints" or has("checkpoints") or has("metrics.jsonl")
    return is_one and not any(pathlib.Path(folder).glob("*.safetensors"))  # else a model's


def check_workdir(folder: pathlib.Path) -> None:
    """``ConfigError`` where a run would take the place of a model's settings, or of files that only have its names.

    A run writes config.json before all others; one that was killed may have left it cut short.
    """
    names, settings = [], {"made_with": ""}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        names = sorted(os.listdir(folder))
        settings = json.loads((folder / "config.json").read_bytes())
    others = [name for name in names if name.endswith(".safetensors") or name == "adapter_config.json"]
    if not {"config.json", "checkpoints"} & {*names}:
        others += [name for name in WRITTEN if name in names and os.path.getsize(folder / name)]
    if not isinstance(settings, dict) or "made_with" not in settings:
        others.append("config.json")
    if others:
        said = f"--workdir={str(folder)!r:.200} has {others[0]}, which no run has written there"
        raise ConfigError(f"{said}, and a run would write over such files: give it a folder of its own")


def begin(workdir: pathlib.Path, settings: str) -> None:
    """Write a run's settings where it begins, or goes on, and remove what says that it has ended."""
    bucket.write_whole(workdir / "config.json", settings)
    for name in ENDED:
        (workdir / name).unlink(missing_ok=True)


def _meant(directory: str | os.PathLike) -> tuple[pathlib.Path, int | None]:
    """The folder of checkpoints, and the iteration of the one that is meant; None = of the newest."""
    path = bucket.absolute(bucket.place(os.path.expanduser(directory)))
    if is_best := path.name == BEST and not path.is_dir():
        path = path.parent
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    step = step_of(path.name)
    if not is_best and step is not None and (path / "state").is_dir():
        return path.parent, step
    if not (steps := steps_in(root)):
        raise ConfigError(f"no finished checkpoint in {path}")
    if not is_best:
        return root, None
    if not (rated := best_of(steps, pass_rates(root), 1)):
        raise ConfigError(f"no best one in {root}: none was written when held-out questions had been answered")
    return root, rated[0]


def config_of_run(directory: str | os.PathLike, abstract_params: Any = None) -> tuple[Config, str]:
    """Config and folder of the checkpoint that ``restore_params`` reads, as far as its text tells.

    Of a host's own, with no word to others: the weights are not read.

    Raises:
        ConfigError: as there.
    """
    read = lambda path: (_about(path, abstract_params)[0], os.fspath(path))
    return read_whole(*_meant(directory), read, say=False, is_alone=True)


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

    root, iteration = _meant(directory)
    return read_whole(root, hosts.exchange(iteration)[0], read, compared)


def _about(
    path: pathlib.Path, abstract_params: Any = None, check: Callable[[dict[str, Any]], None] = lambda host: None
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
