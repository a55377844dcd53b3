"""Functions that read only the weights of a checkpoint, for evaluation and export.

Owns: which checkpoint a folder name refers to. Does not know: the other contents of a checkpoint (``checkpoint``).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import flax.traverse_util
import jax

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.ops.checksum import checksum
from jaxrl_llm.runtime import bucket, hosts
from jaxrl_llm.runtime.checkpoint import POLICY
from jaxrl_llm.runtime.checkpoint_files import (
    DamagedError,
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
ENDED = ("report.html", "after.json")  # files that exist after the end of a run and of a point of a sweep
WRITTEN = ("metrics.jsonl", "samples.jsonl", "shared_rollouts.jsonl", *ENDED)  # a new run overwrites these files


def is_run(path: str) -> bool:
    """Return whether the path names a run: its workdir, its ``checkpoints`` folder, one checkpoint or the best one.

    Every path in a bucket counts as a run.
    """
    path = os.path.expanduser(path)
    if bucket.is_bucket(path):
        return True
    if not os.path.isdir(path):  # also False for a name that is not valid
        head, name = os.path.split(path.rstrip("/"))
        return name == BEST and is_run(head or ".")
    folder = os.path.realpath(path)
    name = os.path.basename(folder)

    def has(name: str) -> bool:
        return os.path.exists(os.path.join(folder, name))

    if step_of(name) is not None and has("state"):
        return True
    is_one = name == "checkpoints" or has("checkpoints") or has("metrics.jsonl")
    return is_one and not any(pathlib.Path(folder).glob("*.safetensors"))  # otherwise a model's folder


def check_workdir(folder: pathlib.Path) -> None:
    """Check that a run in this folder would not overwrite files that no run has written.

    A run writes config.json before its other files. The file may be incomplete if the run was killed.

    Raises:
        ConfigError: the folder has the files of a model, or files with the names of a run's files but not from a run.
    """
    names = []
    settings = {"made_with": ""}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        names = sorted(os.listdir(folder))
        settings = json.loads((folder / "config.json").read_bytes())
    foreign = [name for name in names if name.endswith(".safetensors") or name == "adapter_config.json"]
    if not {"config.json", "checkpoints"} & {*names}:
        foreign += [name for name in WRITTEN if name in names and os.path.getsize(folder / name)]
    if not isinstance(settings, dict) or "made_with" not in settings:
        foreign.append("config.json")
    if foreign:
        raise ConfigError(
            f"--workdir={str(folder)!r:.200} must be a folder without other files: it has {foreign[0]}, which no run "
            "has written there, and a run would overwrite this file. Use a new folder."
        )


def begin(workdir: pathlib.Path, settings: str) -> None:
    """Write the settings of a run that begins or resumes, and remove the files that mark its end."""
    bucket.write_whole(workdir / "config.json", settings)
    for name in ENDED:
        (workdir / name).unlink(missing_ok=True)


def _meant(directory: str | os.PathLike) -> tuple[pathlib.Path, int | None]:
    """Return the folder of checkpoints and the iteration that ``directory`` refers to; None = the newest.

    Raises:
        ConfigError: there is no finished checkpoint, or none with a pass rate for ``/best``.
    """
    path = bucket.absolute(bucket.place(os.path.expanduser(directory)))
    is_best = path.name == BEST and not path.is_dir()
    if is_best:
        path = path.parent
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    step = step_of(path.name)
    if not is_best and step is not None and (path / "state").is_dir():
        return path.parent, step
    steps = steps_in(root)
    if not steps:
        raise ConfigError(f"no finished checkpoint in {path}")
    if not is_best:
        return root, None
    rated = best_of(steps, pass_rates(root), 1)
    if not rated:
        raise ConfigError(f"no best checkpoint in {root}: no checkpoint was saved after an evaluation")
    return root, rated[0]


def config_of_run(directory: str | os.PathLike, abstract_params: Any = None) -> tuple[Config, str]:
    """Return the config and the folder of the checkpoint that ``restore_params`` would read.

    Only the text of the checkpoint is checked; its weights are not read. The host does not ask the other hosts.

    Raises:
        ConfigError: as in ``restore_params``.
    """

    def read(path: pathlib.Path) -> tuple[Config, str]:
        config, _, _, _ = _about(path, abstract_params)
        return config, os.fspath(path)

    return read_whole(*_meant(directory), read, say=False, is_alone=True)


def restore_params(
    directory: str | os.PathLike,
    abstract_params: Any = None,
    check: Callable[[dict[str, Any]], None] = lambda host: None,
) -> tuple[Any, Config]:
    """Read only the weights of a checkpoint, for evaluation and export.

    Args:
        directory: which checkpoint to read:

            - the path of a checkpoint
            - a workdir or its ``checkpoints`` folder: the newest checkpoint
            - a workdir or its ``checkpoints`` folder, followed by ``/best``: the highest held-out pass rate
        abstract_params: pytree of ``ShapeDtypeStruct`` with shardings. The weights are cast to its dtypes. If it is
            None, the result is nested dictionaries of numpy arrays on the host, with the saved dtypes.
        check: receives the saved host state, and raises an error if this state does not fit.

    Returns:
        The parameters and the config of the run.

    Raises:
        ConfigError: there is no finished undamaged checkpoint, or its arrays do not fit. The checksum of an array that
            is cast is not checked.
    """

    def read(path: pathlib.Path) -> tuple[Any, ...]:
        config, prefix, saved, wanted = _about(path, abstract_params, check)
        return config, prefix, saved, read_arrays(path, wanted)

    def compared(found: tuple[Any, ...]) -> tuple[Any, Config]:
        config, prefix, saved, arrays = found
        as_saved = {name: x for name, x in arrays.items() if str(x.dtype) == saved[name][0]}
        # Checksums one at a time, so that a numpy array needs device memory only for itself.
        compare(saved, as_saved, [checksum(x).item() for x in as_saved.values()])
        if abstract_params is None:
            arrays = {name.removeprefix(prefix): x for name, x in arrays.items()}
            return flax.traverse_util.unflatten_dict(arrays, sep="/"), config
        return jax.tree.unflatten(jax.tree.structure(abstract_params), arrays.values()), config

    root, iteration = _meant(directory)
    return read_whole(root, hosts.exchange(iteration)[0], read, compared)


def _prefix_of_policy(names: Iterable[str]) -> str:
    """Return the beginning of the names of the policy's weights, up to ``POLICY`` with it."""
    for name in names:
        head, policy, _ = f"/{name}".partition(POLICY)
        if policy:
            return f"{head}{policy}".removeprefix("/")
    raise DamagedError(f"no array has {POLICY} in its name")


def _about(
    path: pathlib.Path,
    abstract_params: Any = None,
    check: Callable[[dict[str, Any]], None] = lambda host: None,
) -> tuple[Config, str, dict[str, Any], dict[str, Any]]:
    """Return the config of a checkpoint and a description of its weights.

    Returns:
        The config; the common prefix of the names of the weights; ``{name: (dtype, shape, checksum)}`` of the saved
        weights; ``{name: abstract array or None}`` of the wanted weights.
    """
    host, text = read_text(path)
    config = config_of(text, path)
    check(host)
    prefix = _prefix_of_policy(text["arrays"])
    saved = {name: description for name, description in text["arrays"].items() if name.startswith(prefix)}
    if abstract_params is None:
        return config, prefix, saved, dict.fromkeys(saved)
    wanted = {prefix + name: leaf for name, leaf in by_name(abstract_params).items()}
    check_arrays(saved, wanted, path, same_dtype=False)
    return config, prefix, saved, wanted
