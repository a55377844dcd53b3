"""Functions that read stored checkpoints, find the undamaged and the best ones and check that a run can resume.

Owns: how a checkpoint is read, what counts as damage, which settings may differ on resume. Does not know: how a
checkpoint is written (``runtime.checkpoint``), what its arrays mean.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxrl_llm.config import DATE, Config, ConfigError, from_json, recorded, to_json
from jaxrl_llm.runtime import bucket, hosts
from jaxrl_llm.settings.schema import differences

# Settings (or groups of settings) that a resumed run may change freely. They set the length of the run, its output, the
# number of workers and the placement of arrays. No parameter, byte of the ring or sampled token depends on them.
FREE_SETTINGS = (
    "num_iterations",
    "compilation_cache",
    "executables",
    "checkpoint",
    "metrics",
    "eval.every_iterations",
    "eval.slots",
    "rewards.num_workers",
    "replay.memory",
    "optimizer.offload",
)

# Settings that a resumed run must not change even if the arrays fit. They define the meaning of rows: which rows share
# a prompt, how rows are arranged, where a prompt ends.
FIXED_SETTINGS = ("rollout.group_size", "replay.unit", "replay.positive_fraction", "prompts.max_tokens")

# More such settings for the checkpoint of a run that was stopped in a later round of an iteration. The checkpoint has
# scores of earlier rounds, and these settings define where the scores come from.
OF_ROUNDS = ("rewards.functions", "environments.factory", "environments.max_turns")

# Names of arrays whose first axis is the number of shards of the ring and of the sampler.
RING_ROWS, SAMPLER_ROWS = "ring/uses", "sampler/length"
# Name of an array that exists only if the ring is stored in pages.
RING_PAGES = "ring/pages/first"

# Parts of a state that only the checkpoint of a run that was stopped inside a generation must have.
PASSING = ("sampler", "rounds")

# Prefix of the name of a part that holds the memory of a method; the name of the method follows. The checkpoint of an
# earlier version, or of a run with another method, does not have this part.
MEMORY = "memory_"

# MISSING and DAMAGE are errors that describe the content of the disk: it is absent or wrong. UNREAD lists how the
# messages of tensorstore begin if the content could not be read.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
DAMAGE = (*MISSING, ValueError, LookupError, TypeError, AttributeError, NotImplementedError)
UNREAD = ("ABORTED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED")
UNREAD += ("UNAVAILABLE", "UNKNOWN")


class DamagedError(Exception):
    """Error for a part of a checkpoint that differs from the data that was saved."""


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Raise a ``MachineError`` if a disk, a network or a bucket does not answer. Such a failure is not damage."""
    try:
        yield
    except Exception as error:
        is_unread = isinstance(error, ValueError) and str(error).startswith(UNREAD)
        is_bucket = type(error).__module__.startswith(("aiohttp.", "gcsfs."))  # their errors have no common class
        if is_unread or is_bucket or (isinstance(error, OSError) and not isinstance(error, MISSING)):
            said = f"{type(error).__name__}: {str(error).split(' [')[0]}".removesuffix(": ")
            raise hosts.MachineError(f"{what} cannot be read now: {said}; it may be whole: try again") from error
        raise


@contextlib.contextmanager
def _reading(path: pathlib.Path, part: str) -> Iterator[None]:
    """Convert an error of a wrong or missing part of a checkpoint into a ``DamagedError``."""
    try:
        with _asking(f"{part} of checkpoint {path}"):
            yield
    except DAMAGE as error:
        said = str(error).split(" [")[0]  # tensorstore adds locations in its source code
        raise DamagedError(f"{part}: {said}") from error


def step_of(name: str) -> int | None:
    """Return the iteration that a checkpoint folder is named after, or None for a folder of another name."""
    is_number = name.isascii() and name.isdigit()  # for "²", ``isdigit`` is True and ``int`` fails
    return int(name) if is_number and len(name) < 20 else None


def steps_in(directory: pathlib.Path) -> list[int]:
    """Return the iterations whose checkpoints are finished, the newest first."""
    # ``is_dir`` would return False for a bucket that does not answer, and the run would begin anew.
    with contextlib.suppress(*MISSING), _asking(f"the list of checkpoints in {directory}"):
        whole = (step_of(x.name) for x in directory.iterdir() if step_of(x.name) is not None and bucket.is_whole(x))
        return sorted(whole, reverse=True)
    return []


def read_whole(
    root: pathlib.Path,
    iteration: int | None,
    read: Callable[[pathlib.Path], Any],
    check: Callable[[Any], Any] = lambda found: found,
    *,
    say: bool = True,
    is_alone: bool = False,
) -> Any:
    """Return ``check(read(path))`` for the path of a checkpoint.

    If the newest checkpoint is damaged, the next older checkpoint is tried, and so on. All hosts use the same
    checkpoint: if one host finds damage, all hosts skip that checkpoint.

    Args:
        root: folder of the checkpoints.
        iteration: iteration of the checkpoint; None = the newest undamaged checkpoint.
        read: reads this host's part. It must not run programs on devices, because hosts could then run these programs
            for different checkpoints.
        check: receives the result of ``read`` after every host has read its part. It may run programs on devices.
        say: print a warning for a damaged checkpoint that is skipped.
        is_alone: read without asking the other hosts.

    Returns:
        The result of ``check``, or None if there is no finished checkpoint.

    Raises:
        ConfigError: there is no checkpoint of ``iteration``, or all are damaged.
        MachineError: a checkpoint cannot be read now and may be undamaged.
    """
    exchange = (lambda own: [own]) if is_alone else hosts.exchange
    steps = exchange(steps_in(root))[0]
    if iteration is not None and iteration not in steps:
        raise ConfigError(f"no checkpoint of iteration {iteration} in {root}; there are {sorted(steps)}")
    damaged = None
    for step in steps if iteration is None else [iteration]:
        found = path = root / str(step)  # also frees the arrays of the checkpoint tried before
        for stage in (read, check):
            said = None
            try:
                found = stage(found)
            except DamagedError as error:
                said = " ".join(f"checkpoint {path} is damaged: {error}".split())
            if damaged := next(filter(None, exchange(said)), None):
                break
        else:
            return found
        if say and iteration is None and step != steps[-1] and hosts.is_first():
            print(f"warning: {damaged}; taking the one before", file=sys.stderr)
    if damaged:
        raise ConfigError(damaged)
    return None


def digest(host: Any, text: dict[str, Any]) -> str:
    """Return the digest of the JSON objects in host/ and config/."""
    return hashlib.sha256(json.dumps([host, text], sort_keys=True).encode()).hexdigest()


def read_text(path: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """Return the JSON objects that ``Checkpointer.save`` wrote into host/ and config/. Check their digest."""
    with _reading(path, "host/ or config/"):
        host, text = [json.loads((path / item / "metadata").read_bytes()) for item in ("host", "config")]
        if text.pop("digest") != digest(host, text):
            raise ValueError("another digest than they were saved with")
    return host, text


def by_name(tree: Any) -> dict[str, Any]:
    """Return ``{"train/step": leaf}`` in the order of ``jax.tree.leaves``. None and empty subtrees have no entry."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state share a name"
    return named


def read_fitting(
    path: pathlib.Path, abstract_state: dict[str, Any], config: Config, allow_changes: bool
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the result of ``read_text`` and the parts of the abstract state that the checkpoint contains.

    Args:
        abstract_state: abstract arrays by part. The checkpoint may lack the parts of ``PASSING`` and of ``MEMORY``.
            A part of ``MEMORY`` that only the checkpoint has is ignored.

    Raises:
        ConfigError: settings or arrays do not fit.
    """
    host, text = read_text(path)
    check_settings(host, text, config, path, allow_changes)
    if int(path.name) > config.num_iterations:
        raise ConfigError(
            f"num_iterations={config.num_iterations} must be at least the {path.name} of checkpoint {path}, which a "
            "run does not go back from: raise it, or use another workdir"
        )
    part_of = lambda name: name.partition("/")[0]
    has = {part_of(name) for name in text["arrays"]}
    may_lack = lambda part: part in PASSING or part.startswith(MEMORY)
    wanted = {part: x for part, x in abstract_state.items() if part in has or not may_lack(part)}
    is_read = lambda part: part in wanted or not part.startswith(MEMORY)
    saved = {name: about for name, about in text["arrays"].items() if is_read(part_of(name))}
    check_arrays(saved, arrays := by_name(wanted), path, same_dtype=True)
    if config.rollout.max_lag_iterations and SAMPLER_ROWS in arrays:
        before, now = text["arrays"][SAMPLER_ROWS][1][0], arrays[SAMPLER_ROWS].shape[0]
        if before % now:  # prompts due at the same time may be in one shard, which could not return them in time
            raise ConfigError(
                f"rollouts in flight on {before} data-parallel devices with rollout.max_lag_iterations="
                f"{config.rollout.max_lag_iterations}: go on on as many, or on a divisor of them, not on {now}"
            )
    return host, text, wanted


def pass_rates(directory: pathlib.Path) -> dict[int, float | None]:
    """Return the pass rate of each finished checkpoint by iteration, None if it was not measured.

    A checkpoint whose text is damaged has no entry.
    """
    rates = {}
    for step in steps_in(directory):
        with contextlib.suppress(DamagedError):
            rates[step] = read_text(directory / str(step))[1]["pass_rate"]
    return rates


def best_of(steps: Iterable[int], rates: dict[int, float | None], count: int) -> list[int]:
    """Return at most ``count`` iterations with the highest pass rates, best first. The earlier wins a tie."""
    rated = sorted(step for step in steps if rates.get(step) is not None)
    return sorted(rated, key=rates.get, reverse=True)[:count]


def config_of(text: dict[str, Any], path: pathlib.Path) -> Config:
    """Return the config from the text that ``read_text`` returned.

    Raises:
        ConfigError: this version does not have these settings.
    """
    try:
        return recorded(text["config"])
    except ConfigError as error:
        said = f"checkpoint {path} was made by another version of jaxrl_llm, which alone can read it: {error}"
        raise ConfigError(said) from error


def read_arrays(path: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the wanted arrays by name.

    If ``wanted`` has a ``ShapeDtypeStruct`` for a name, the array is placed on its sharding. If it has None, the result
    is a numpy array.
    """
    base = bucket.store(path / "state")

    def read(name: str) -> Any:
        with _reading(path, f"array {name}"):
            kvstore = {"driver": "ocdbt", "base": base, "path": name}
            stored = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
            if (leaf := wanted[name]) is None:
                return stored.read().result()
            sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            read = (lambda index: stored[index].read().result()) if stored.shape == leaf.shape else _dealt(stored, leaf)
            part = lambda index: read(index).astype(leaf.dtype, copy=False)
            return jax.make_array_from_callback(leaf.shape, sharding, part)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(read, wanted), strict=True))


def _dealt(stored: Any, leaf: jax.ShapeDtypeStruct) -> Callable[[tuple[slice, ...]], Any]:
    """Return a function that reads a part of a sharded array for another number of shards.

    An array [M, E, ...] has M shards of E rows, and the rows keep their order. An array [M] has one sum per shard: the
    total becomes the sum of the first shard, and the other sums become 0.
    """
    if stored.ndim == 1:
        sums = np.zeros(leaf.shape, leaf.dtype)
        sums[0] = stored.read().result().sum()
        return sums.__getitem__

    def part(index: tuple[slice, ...]) -> Any:
        first, last, _ = index[0].indices(leaf.shape[0])
        start, stop, each = first * leaf.shape[1], last * leaf.shape[1], stored.shape[1]
        rows = stored[start // each : -(-stop // each)].read().result().reshape(-1, *leaf.shape[2:])
        rows = rows[start % each :][: stop - start].reshape(-1, *leaf.shape[1:])
        return rows[:, *index[1:]]

    return part


def compare(saved: dict[str, Any], arrays: dict[str, Any], sums: list[int]) -> None:
    """Raise a ``DamagedError`` if an array does not have the checksum that was saved with it.

    An array whose size has changed is not compared: it has one sum per shard, and the number of shards differs.
    """
    now = zip(arrays, sums, strict=True)
    same_size = lambda name: math.prod(saved[name][1]) == arrays[name].size
    if wrong := [name for name, value in now if value != saved[name][2] and same_size(name)]:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise DamagedError(f"array {wrong[0]}{more} has another checksum than when it was saved")


def changed_settings(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return ``{setting: (saved, new)}`` of the settings that differ and that a resumed run may not change freely."""
    free = FREE_SETTINGS
    if config.optimizer.schedule != "constant":
        free = tuple(name for name in free if name != "num_iterations")  # a decay ends at the last iteration
    # The saved config went through JSON, which turns a tuple in a dictionary of arguments into a list. Do so here too.
    config = from_json(to_json(config))
    if (day := saved.prompts.chat_template_kwargs.get(DATE)) is not None:  # a run sets its date itself
        told = {DATE: day, **config.prompts.chat_template_kwargs}
        config = dataclasses.replace(config, prompts=dataclasses.replace(config.prompts, chat_template_kwargs=told))
    return {
        name: values
        for name, values in differences(saved, config).items()
        if name not in free and name.split(".")[0] not in free
    }


def changed_files(saved: dict[str, str], config: Config) -> dict[str, tuple[str, str]]:
    """Return ``{"the file of SPEC": (saved, new)}`` with the digests of the function files that have changed.

    A file without a saved digest, or without a digest in ``config``, counts as unchanged.
    """
    pairs = {spec: (old, config.files.get(spec, old)) for spec, old in saved.items()}
    return {f"the file of {spec}": (old, new) for spec, (old, new) in pairs.items() if old != new}


def listed(changed: dict[str, tuple[Any, Any]]) -> str:
    """Format the changes from ``changed_settings`` for an error message."""
    return "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())


def check_settings(
    host: dict[str, Any], text: dict[str, Any], config: Config, path: pathlib.Path, allow_changes: bool
) -> None:
    """Check that the settings and the function files are the same as in the checkpoint.

    Args:
        host, text: the result of ``read_text``.
        config: the settings of the run that resumes.
        allow_changes: accept changes, except of settings that a resumed run must never change.

    Raises:
        ConfigError: a setting or a file differs.
    """
    saved = config_of(text, path)
    fixed = {*FIXED_SETTINGS, *(OF_ROUNDS if host.get("rounds") else ())}
    if RING_PAGES in text["arrays"] and config.sampling.max_completion_tokens < saved.sampling.max_completion_tokens:
        fixed.add("sampling.max_completion_tokens")  # pages fit rows of any length: a longer row would be cut
    changed = changed_settings(saved, config) | changed_files(text.get("files", {}), config)
    changed = {name: pair for name, pair in changed.items() if name in fixed or not allow_changes}
    if changed:
        more = "" if fixed & {*changed} else ", or pass --allow_config_changes"
        raise ConfigError(
            f"checkpoint {path} was made with other settings: {listed(changed)}. "
            f"Set them back, or use another workdir{more}"
        )


def check_arrays(saved: dict[str, Any], wanted: dict[str, Any], path: pathlib.Path, *, same_dtype: bool) -> None:
    """Check that the saved arrays have the wanted names and shapes. The sampler's arrays may have other shards.

    Raises:
        ConfigError: an array is missing, not expected, or has another shape; or another dtype, with ``same_dtype``.
    """

    def fits(name: str, old: list[int], new: list[int]) -> bool:
        same_rows = len(new) == 1 or (math.prod(old[:2]) == math.prod(new[:2]) and old[2:] == new[2:])
        return old == new or (name.startswith("sampler/") and len(old) == len(new) and same_rows)

    wrong = [f"{name} is missing" for name in wanted if name not in saved]
    wrong += [f"{name} is not expected" for name in saved if name not in wanted]
    for name in wanted:
        if name in saved:
            (dtype, shape, _), new = saved[name], wanted[name]
            if not fits(name, shape, list(new.shape)) or (same_dtype and dtype != str(new.dtype)):
                wrong.append(f"{name} is {dtype}{shape}, not {new.dtype}{list(new.shape)}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        if RING_ROWS in saved and RING_ROWS in wanted and saved[RING_ROWS][1][0] != wanted[RING_ROWS].shape[0]:
            shards = saved[RING_ROWS][1][0]
            more += f". Its ring has replay.shards={shards}: with that and --allow_config_changes it fits, on as many "
            more += "data-parallel devices or a divisor of them"
        raise ConfigError(f"checkpoint {path} does not fit: {'; '.join(wrong[:3])}{more}")
