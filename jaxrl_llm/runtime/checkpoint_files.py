"""Functions that read stored checkpoints, find the undamaged and the best ones and check that a run can resume.

Owns: how a checkpoint is read, the definition of damage, which settings may differ on resume. Does not know: how a
checkpoint is written (``runtime.checkpoint``), the meaning of its arrays.
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
RING_ROWS = "ring/uses"
SAMPLER_ROWS = "sampler/length"
# Name of an array that exists only if the ring is stored in pages.
RING_PAGES = "ring/pages/first"

# Parts of a state that only the checkpoint of a run that was stopped inside a generation must have.
PASSING = ("sampler", "rounds")

# Prefix of the name of a part that holds the memory of a method; the name of the method follows. The checkpoint of an
# earlier version, or of a run with another method, does not have this part.
MEMORY = "memory_"

# Errors that mean that a file is absent.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Errors that mean that a file is absent or that its content is wrong.
DAMAGE = (
    *MISSING,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    NotImplementedError,
)
# Beginnings of tensorstore's messages if the disk or the network did not answer.
NO_ANSWER = (
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNKNOWN",
)


class DamagedError(Exception):
    """Error for a part of a checkpoint that differs from the data that was saved."""


@contextlib.contextmanager
def _no_answer_is_no_damage(description: str) -> Iterator[None]:
    """Raise a ``MachineError`` if a disk, a network or a bucket does not answer. Such a failure is not damage.

    Args:
        description: the data that is read, for the error message.
    """
    try:
        yield
    except Exception as error:
        if not _is_no_answer(error):
            raise
        message = f"{type(error).__name__}: {_without_location(error)}".removesuffix(": ")
        raise hosts.MachineError(
            f"{description} cannot be read now: {message}. It may be undamaged: try again"
        ) from error


def _is_no_answer(error: Exception) -> bool:
    """Return whether an error means that a disk, a network or a bucket did not answer."""
    if isinstance(error, OSError):
        return not isinstance(error, MISSING)
    if isinstance(error, ValueError) and str(error).startswith(NO_ANSWER):
        return True
    return type(error).__module__.startswith(("aiohttp.", "gcsfs."))  # the errors of buckets have no common class


def _without_location(error: Exception) -> str:
    """Return the message of an error without the locations in tensorstore's source code."""
    return str(error).split(" [")[0]


@contextlib.contextmanager
def _damage_of(path: pathlib.Path, part: str) -> Iterator[None]:
    """Convert an error of a wrong or missing part of a checkpoint into a ``DamagedError``."""
    try:
        with _no_answer_is_no_damage(f"{part} of checkpoint {path}"):
            yield
    except DAMAGE as error:
        raise DamagedError(f"{part}: {_without_location(error)}") from error


def step_of(name: str) -> int | None:
    """Return the iteration that a checkpoint folder is named after, or None for a folder of another name."""
    is_number = name.isascii() and name.isdigit()  # for "²", ``isdigit`` is True and ``int`` fails
    if not is_number or len(name) >= 20:
        return None
    return int(name)


def steps_in(directory: pathlib.Path) -> list[int]:
    """Return the iterations whose checkpoints are finished, the newest first."""
    # ``is_dir`` would return False for a bucket that does not answer, and the run would begin anew.
    steps = []
    with (
        contextlib.suppress(*MISSING),
        _no_answer_is_no_damage(f"the list of checkpoints in {directory}"),
    ):
        for folder in directory.iterdir():
            step = step_of(folder.name)
            if step is not None and bucket.is_whole(folder):
                steps.append(step)
    return sorted(steps, reverse=True)


def read_whole(
    root: pathlib.Path,
    iteration: int | None,
    read: Callable[[pathlib.Path], Any],
    check: Callable[[Any], Any] = lambda result: result,
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
        is_alone: read without communication with the other hosts.

    Returns:
        The result of ``check``, or None if there is no finished checkpoint.

    Raises:
        ConfigError: there is no checkpoint of ``iteration``, or all are damaged.
        MachineError: a checkpoint cannot be read now and may be undamaged.
    """
    exchange: Callable[[Any], list[Any]] = _only_own if is_alone else hosts.exchange
    steps = exchange(steps_in(root))[0]
    if iteration is not None and iteration not in steps:
        raise ConfigError(f"no checkpoint of iteration {iteration} in {root}; there are {sorted(steps)}")
    damaged = None
    for step in steps if iteration is None else [iteration]:
        path = root / str(step)
        result: Any = path  # this also frees the arrays of the checkpoint that was tried before
        for stage in (read, check):
            message = None
            try:
                result = stage(result)
            except DamagedError as error:
                message = " ".join(f"checkpoint {path} is damaged: {error}".split())
            damaged = next(filter(None, exchange(message)), None)
            if damaged:
                break
        else:
            return result
        if say and iteration is None and step != steps[-1] and hosts.is_first():
            print(f"warning: {damaged}; taking the one before", file=sys.stderr)
    if damaged:
        raise ConfigError(damaged)
    return None


def _only_own(value: Any) -> list[Any]:
    """Return the value of this host as the only value, in place of ``hosts.exchange``."""
    return [value]


def digest(host: Any, text: dict[str, Any]) -> str:
    """Return the digest of the JSON objects in host/ and config/."""
    data = json.dumps([host, text], sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def read_text(path: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """Return the JSON objects that ``Checkpointer.save`` wrote into host/ and config/. Check their digest."""
    with _damage_of(path, "host/ or config/"):
        host = json.loads((path / "host" / "metadata").read_bytes())
        text = json.loads((path / "config" / "metadata").read_bytes())
        if text.pop("digest") != digest(host, text):
            raise ValueError("the digest differs from the saved digest")
    return host, text


def by_name(tree: Any) -> dict[str, Any]:
    """Return ``{"train/step": leaf}`` in the order of ``jax.tree.leaves``. None and empty subtrees have no entry."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        named[name] = leaf
    assert len(named) == len(leaves), "two leaves of the state share a name"
    return named


def read_fitting(
    path: pathlib.Path,
    abstract_state: dict[str, Any],
    config: Config,
    allow_changes: bool,
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
            f"num_iterations={config.num_iterations} must be at least {path.name}, the iterations that are finished in "
            f"checkpoint {path}. Raise num_iterations, or use another workdir"
        )
    saved_parts = {_part_of(name) for name in text["arrays"]}
    wanted = {}
    for part, arrays_of_part in abstract_state.items():
        if part in saved_parts or not _is_optional(part):
            wanted[part] = arrays_of_part
    saved = {}
    for name, description in text["arrays"].items():
        part = _part_of(name)
        if part in wanted or not part.startswith(MEMORY):
            saved[name] = description
    arrays = by_name(wanted)
    check_arrays(saved, arrays, path, same_dtype=True)
    if config.rollout.max_lag_iterations and SAMPLER_ROWS in arrays:
        _check_shards(_first_axis(saved[SAMPLER_ROWS]), arrays[SAMPLER_ROWS].shape[0], config)
    return host, text, wanted


def _check_shards(saved_shards: int, shards: int, config: Config) -> None:
    """Raise a ``ConfigError`` if unfinished rollouts of limited age cannot move to this number of data shards."""
    if saved_shards % shards:
        # Prompts that are due at the same time may then be in one shard, which could not return them in time.
        raise ConfigError(
            f"the checkpoint has unfinished rollouts on {saved_shards} data-parallel devices, and "
            f"rollout.max_lag_iterations={config.rollout.max_lag_iterations} limits their age. Continue on "
            f"{saved_shards} devices or on a divisor of that number, not on {shards}"
        )


def _first_axis(description: list[Any]) -> int:
    """Return the size of the first axis of a saved array, from its dtype, shape and checksum."""
    _, shape, _ = description
    return shape[0]


def _part_of(name: str) -> str:
    """Return the part of the state that an array belongs to: "train" of "train/step"."""
    return name.partition("/")[0]


def _is_optional(part: str) -> bool:
    """Return whether a checkpoint may lack a part of the state."""
    return part in PASSING or part.startswith(MEMORY)


def pass_rates(directory: pathlib.Path) -> dict[int, float | None]:
    """Return the pass rate of each finished checkpoint by iteration, None if it was not measured.

    A checkpoint whose text is damaged has no entry.
    """
    rates = {}
    for step in steps_in(directory):
        with contextlib.suppress(DamagedError):
            _, text = read_text(directory / str(step))
            rates[step] = text["pass_rate"]
    return rates


def best_of(steps: Iterable[int], rates: dict[int, float | None], count: int) -> list[int]:
    """Return at most ``count`` iterations with the highest pass rates, best first. The earlier wins a tie."""
    measured = {}
    for step in sorted(steps):
        rate = rates.get(step)
        if rate is not None:
            measured[step] = rate
    best_first = sorted(measured, key=measured.__getitem__, reverse=True)
    return best_first[:count]


def config_of(text: dict[str, Any], path: pathlib.Path) -> Config:
    """Return the config from the text that ``read_text`` returned.

    Raises:
        ConfigError: this version does not have these settings.
    """
    try:
        return recorded(text["config"])
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint {path} was made by another version of jaxrl_llm. Only that version can read it: {error}"
        ) from error


def read_arrays(path: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the wanted arrays by name.

    If ``wanted`` has a ``ShapeDtypeStruct`` for a name, the array is placed on its sharding. If it has None, the result
    is a numpy array.
    """
    base = bucket.store(path / "state")

    def read(name: str) -> Any:
        with _damage_of(path, f"array {name}"):
            kvstore = {"driver": "ocdbt", "base": base, "path": name}
            stored = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
            leaf = wanted[name]
            if leaf is None:
                return stored.read().result()
            layout = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            read_part = _part_reader(stored, leaf)

            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # only arrays without a shape have None here
                return read_part(index).astype(leaf.dtype, copy=False)

            return jax.make_array_from_callback(leaf.shape, layout, part)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(read, wanted), strict=True))


def _part_reader(stored: Any, leaf: jax.ShapeDtypeStruct) -> Callable[[tuple[slice, ...]], Any]:
    """Return a function that reads a part of a stored array. The number of shards may differ from the stored number.

    An array [M, E, ...] has M shards of E rows, and the rows keep their order. An array [M] has one sum per shard: the
    total becomes the sum of the first shard, and the other sums become 0.
    """

    def same_part(index: tuple[slice, ...]) -> Any:
        return stored[index].read().result()

    if stored.shape == leaf.shape:
        return same_part
    if stored.ndim == 1:
        sums = np.zeros(leaf.shape, leaf.dtype)
        sums[0] = stored.read().result().sum()
        return sums.__getitem__

    def moved_part(index: tuple[slice, ...]) -> Any:
        first, last, _ = index[0].indices(leaf.shape[0])
        _, num_rows, *sizes = leaf.shape
        start = first * num_rows
        stop = last * num_rows
        rows_per_shard = stored.shape[1]
        first_shard = start // rows_per_shard
        end_shard = -(-stop // rows_per_shard)
        rows = stored[first_shard:end_shard].read().result().reshape(-1, *sizes)
        begin = start % rows_per_shard
        rows = rows[begin : begin + stop - start]
        return rows.reshape(-1, num_rows, *sizes)[:, *index[1:]]

    return moved_part


def compare(saved: dict[str, Any], arrays: dict[str, Any], sums: list[int]) -> None:
    """Raise a ``DamagedError`` if an array does not have the checksum that was saved with it.

    An array whose size has changed is not compared: it has one sum per shard, and the number of shards differs.
    """
    wrong = []
    for name, checksum in zip(arrays, sums, strict=True):
        _, saved_shape, saved_checksum = saved[name]
        if checksum != saved_checksum and math.prod(saved_shape) == arrays[name].size:
            wrong.append(name)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise DamagedError(f"array {wrong[0]}{more} has another checksum than when it was saved")


def changed_settings(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return ``{setting: (saved, new)}`` of the settings that differ and that a resumed run may not change freely."""
    free = FREE_SETTINGS
    if config.optimizer.schedule != "constant":
        # With a decay the number of iterations changes the schedule, which ends at the last iteration.
        free = tuple(name for name in free if name != "num_iterations")
    # The saved config went through JSON, which turns a tuple in a dictionary of arguments into a list. Do so here too.
    config = from_json(to_json(config))
    day = saved.prompts.chat_template_kwargs.get(DATE)
    if day is not None:  # ignore the date, because a run sets it by itself
        arguments = {DATE: day, **config.prompts.chat_template_kwargs}
        prompts = dataclasses.replace(config.prompts, chat_template_kwargs=arguments)
        config = dataclasses.replace(config, prompts=prompts)
    changed = {}
    for name, values in differences(saved, config).items():
        group, _, _ = name.partition(".")
        if name not in free and group not in free:
            changed[name] = values
    return changed


def changed_files(saved: dict[str, str], config: Config) -> dict[str, tuple[str, str]]:
    """Return ``{"the file of SPEC": (saved, new)}`` with the digests of the function files that have changed.

    A file without a saved digest, or without a digest in ``config``, counts as unchanged.
    """
    changed = {}
    for spec, old in saved.items():
        new = config.files.get(spec, old)
        if new != old:
            changed[f"the file of {spec}"] = (old, new)
    return changed


def listed(changed: dict[str, tuple[Any, Any]]) -> str:
    """Format the changes from ``changed_settings`` for an error message."""
    return "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())


def check_settings(
    host: dict[str, Any],
    text: dict[str, Any],
    config: Config,
    path: pathlib.Path,
    allow_changes: bool,
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
    fixed = set(FIXED_SETTINGS)
    if host.get("rounds"):
        fixed |= set(OF_ROUNDS)
    has_shorter_rows = config.sampling.max_completion_tokens < saved.sampling.max_completion_tokens
    if RING_PAGES in text["arrays"] and has_shorter_rows:
        # Check the length, because pages fit rows of any length and a longer row would be cut.
        fixed.add("sampling.max_completion_tokens")
    changed = changed_settings(saved, config) | changed_files(text.get("files", {}), config)
    changed = {name: pair for name, pair in changed.items() if name in fixed or not allow_changes}
    if changed:
        more = "" if fixed & changed.keys() else ", or pass --allow_config_changes"
        raise ConfigError(
            f"checkpoint {path} was made with other settings: {listed(changed)}. "
            f"Set them back, or use another workdir{more}"
        )


def check_arrays(
    saved: dict[str, Any],
    wanted: dict[str, Any],
    path: pathlib.Path,
    *,
    same_dtype: bool,
) -> None:
    """Check that the saved arrays have the wanted names and shapes. The sampler's arrays may have other shards.

    Raises:
        ConfigError: an array is missing, not expected, or has another shape; or another dtype, with ``same_dtype``.
    """

    wrong = [f"{name} is missing" for name in wanted if name not in saved]
    wrong += [f"{name} is not expected" for name in saved if name not in wanted]
    for name, array in wanted.items():
        if name not in saved:
            continue
        dtype, shape, _ = saved[name]
        has_wrong_dtype = same_dtype and dtype != str(array.dtype)
        if has_wrong_dtype or not _fits(name, shape, list(array.shape)):
            wrong.append(f"{name} is {dtype}{shape}, not {array.dtype}{list(array.shape)}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        if RING_ROWS in saved and RING_ROWS in wanted:
            shards = _first_axis(saved[RING_ROWS])
            if shards != wanted[RING_ROWS].shape[0]:
                more += (
                    f". Its ring has replay.shards={shards}: with that and --allow_config_changes it fits, on as many "
                    "data-parallel devices or a divisor of them"
                )
        raise ConfigError(f"checkpoint {path} does not fit: {'; '.join(wrong[:3])}{more}")


def _fits(name: str, saved: list[int], wanted: list[int]) -> bool:
    """Return whether a saved shape can be read as the wanted shape. Arrays of the sampler may have other shards."""
    if saved == wanted:
        return True
    if not name.startswith("sampler/") or len(saved) != len(wanted):
        return False
    if len(wanted) == 1:  # one sum for each shard
        return True
    return math.prod(saved[:2]) == math.prod(wanted[:2]) and saved[2:] == wanted[2:]
