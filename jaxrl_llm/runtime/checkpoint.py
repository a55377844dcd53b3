"""Checkpoints: the whole state of a run as one orbax step, written in the background.

    workdir/checkpoints/12/            12 = iterations finished
        state/     every array of the device state, by name ("train/params/policy/embed")
        host/      JSON: where questions, memory and conversations stand, positions in the metric files; no large array
        config/    JSON: the resolved config, the pass rate where one was measured, dtype, shape and checksum of every
                   array, and a digest of all this and of host/

A step is written in a temporary directory and renamed when every file is there, so one that a crash cut short
is never found. One that was damaged later has other checksums, and the one before it is taken. Arrays are stored
under their tree paths and without compression: float weights do not shrink, and the processor has better things to do.

Owns: the layout above, what is kept, who may write into a workdir. Does not know: what a resumed run may change
(``runtime.stored``), what the state means, except that a subtree ``params/policy`` holds the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from jaxrl_llm.config import CheckpointConfig, Config, ConfigError, to_json
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import bucket, hosts, stored

ASIDE = "aside-"  # before the name of a checkpoint while another of the same iteration is written

# Where the weights are among the arrays.
POLICY = "/params/policy/"


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        iteration: iterations finished when it was saved.
        device_state: as saved, with the structure and shardings of the abstract state.
        host_state: the JSON object given to ``save``.
        is_inside: as given to ``save``.
        shapes: of the arrays as saved, by name.
    """

    iteration: int
    device_state: Any
    host_state: dict[str, Any]
    is_inside: bool
    shapes: dict[str, list[int]]


class Checkpointer:
    """Saves to and restores from ``workdir/checkpoints``. Every process of a multi-host run makes the same calls."""

    def __init__(self, workdir: str | os.PathLike, config: CheckpointConfig):
        self.directory = bucket.place(config.bucket or pathlib.Path(workdir) / "checkpoints")
        if hosts.is_first():
            bucket.check(pathlib.Path(workdir), config.bucket)
            _tidy(self.directory)
        hosts.exchange("tidy")
        self._config = config
        self._pass_rates = stored.pass_rates(self.directory)
        self._manager = _open(bucket.absolute(self.directory), self)
        # Iteration on disk that equals the caller's state, and whether it is that of the next one's middle.
        self._current: tuple[int, bool] | None = None
        self._is_new = False  # saved, and not yet known to be whole
        self._saved_at = time.monotonic()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For orbax: the last ones of this run are kept, and the best of those whose pass rate is known."""
        steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step in self._pass_rates]
        kept = stored.best_of(steps, self._pass_rates, self._config.keep_best) + steps[-self._config.keep_last :]
        return [checkpoint.step in kept for checkpoint in checkpoints]

    def save(
        self,
        iteration: int,
        device_state: Any,
        host_state: dict[str, Any],
        config: Config,
        *,
        pass_rate: float | None,
        is_inside: bool = False,
        checksums: Callable[[str, Any], jax.Array] = lambda _, state: checksums(state),
    ) -> None:
        """Start writing a checkpoint and return; the arrays may be donated at once.

        Waits for the write before, if that still runs, and raises what went wrong in it. Saving the iteration just
        saved or restored does nothing. After going back to an older iteration, the newer checkpoints are another
        run's future, or damaged: they are removed once this one is whole, as is one that it takes the place of.

        Args:
            iteration: iterations finished; names the checkpoint.
            device_state: pytrees of arrays (of a typed PRNG key, its data) by part; None and empty subtrees are
                allowed.
            host_state: JSON object.
            config: the resolved config.
            pass_rate: fraction in [0, 1] of the last evaluation, None where there was none; without one a
                checkpoint is never among the best.
            is_inside: the state is of the middle of an iteration, or that one was evaluated since: saved in any case.
            checksums: of the leaves of a part of such a state, given with its name, in their order.

        Host/device: copies to the host (on CPU: holds the buffers, so that a donated one is copied when overwritten).
        """
        if self._current == (iteration, False) and not is_inside:
            return
        arrays = stored.by_name(device_state)
        sums = zip(arrays.items(), _sums(device_state, checksums), strict=True)
        self._pass_rates[iteration] = self._pass_rates.get(iteration) if pass_rate is None else float(pass_rate)
        text = {
            "config": json.loads(to_json(config)),
            "files": config.files,
            "pass_rate": self._pass_rates[iteration],
            "is_inside": is_inside,
            "arrays": {name: [str(x.dtype), list(x.shape), value] for (name, x), value in sums},
        }
        # Through text now: the caller goes on changing its dictionaries while the write runs.
        host = json.loads(json.dumps(host_state))
        self.wait()
        if iteration in stored.steps_in(self.directory) and hosts.is_first():
            bucket.move(self.directory / str(iteration), self.directory / f"{ASIDE}{iteration}")
        hosts.exchange("set aside")
        self._manager.reload()
        self._manager.save(
            iteration,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays),
                host=ocp.args.JsonSave(host),
                config=ocp.args.JsonSave(text | {"digest": stored.digest(host, text)}),
            ),
            force=True,
        )
        self._current, self._is_new, self._saved_at = (iteration, is_inside), True, time.monotonic()

    def restore(
        self,
        abstract_state: Any,
        config: Config,
        *,
        allow_config_changes: bool,
        iteration: int | None = None,
        checksums: Callable[[str, Any], jax.Array] = lambda _, state: checksums(state),
    ) -> Restored | None:
        """Read a checkpoint onto the shardings of ``abstract_state``, which may be those of another mesh.

        Args:
            abstract_state: pytrees of ``ShapeDtypeStruct`` with shardings, by part. The checkpoint need not have the
                parts of ``PASSING`` and of ``MEMORY``: the result has None for a part that it lacks.
            config: the config of the run that resumes.
            allow_config_changes: accept settings that differ, as long as the arrays fit.
            iteration: which; None = the latest that is whole.
            checksums: as for ``save``.

        Returns:
            None when no checkpoint was ever finished.

        Raises:
            ConfigError: no such iteration, none that is whole, settings differ, or arrays do not fit.
        """
        self.wait()

        def read(path: pathlib.Path) -> tuple[Any, ...]:
            host, text, wanted = stored.read_fitting(path, abstract_state, config, allow_config_changes)
            arrays = stored.read_arrays(path, stored.by_name(wanted))
            return int(path.name), host, text, jax.tree.structure(wanted), arrays

        def check(found: tuple[Any, ...]) -> Restored:
            step, host, text, structure, arrays = found
            state = jax.tree.unflatten(structure, arrays.values())
            stored.compare(text["arrays"], arrays, _sums(state, checksums))
            state, shapes = dict.fromkeys(abstract_state) | state, {name: x[1] for name, x in text["arrays"].items()}
            return Restored(step, state, host, text["is_inside"], shapes)

        if restored := stored.read_whole(self.directory, iteration, read, check):
            self._current = restored.iteration, restored.is_inside
            self._pass_rates = {step: x for step, x in self._pass_rates.items() if step <= restored.iteration}
        return restored

    def is_due(self, iteration: int, pass_rate: float | None = None) -> bool:
        """Whether iterations or minutes between two have passed, or it is one of the best; the first host says."""
        every, rates = self._config.every_iterations, self._pass_rates | {iteration: pass_rate}
        steps = {step for step in self._manager.all_steps() if step < iteration} | {iteration}
        is_best = iteration in stored.best_of(steps, rates, self._config.keep_best)
        waited, is_best = hosts.exchange((time.monotonic() - self._saved_at, is_best))[0]
        return is_best or (every > 0 and iteration % every == 0) or 0 < self._config.every_minutes * 60 <= waited

    def check_config(
        self,
        config: Config,
        abstract_state: Any,
        check: Callable[[dict[str, Any]], None] = lambda host: None,
        *,
        allow_changes: bool,
    ) -> None:
        """Refuse to resume what does not fit; reads no array, so it may come before anything is compiled.

        Args:
            abstract_state: as for ``restore``.
            check: raises where the host's state, as given to ``save``, does not fit.

        Raises:
            ConfigError: settings differ from those of the latest checkpoint, its arrays do not fit, or none is whole.
        """
        read = lambda path: stored.read_fitting(path, abstract_state, config, allow_changes)[0]
        stored.read_whole(self.directory, None, read, check, say=False)

    def check(self) -> dict[str, float]:
        """Raise what has gone wrong in the background by now; metrics of the checkpoint that has become whole."""
        if not self._is_new or self._manager.is_saving_in_progress():  # nothing to list a bucket for
            return {}
        self.wait()
        self._is_new = False
        if (seconds := self._last_write_s()) is None:
            return {}
        if seconds > self._config.grace_s and hosts.is_first():
            print(f"warning: checkpoint {self.latest_iteration()}{self.last_write()}", file=sys.stderr)
        return {"time/checkpoint_s": seconds}

    def last_write(self) -> str:
        """What to say of how long the newest checkpoint took to write, checksums apart; "" where that is not known."""
        if (seconds := self._last_write_s()) is None:
            return ""
        fits = "within" if seconds <= (grace := self._config.grace_s) else "too long for a preemption:"
        return f"; the last was written in {seconds:.1f} s, {fits} checkpoint.grace_s={grace:g}"

    def _last_write_s(self) -> float | None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, hosts.MachineError):  # a figure alone
            file = self.directory / str(self.latest_iteration()) / "_CHECKPOINT_METADATA"  # orbax's
            said = json.loads(file.read_bytes())
            return (said["commit_timestamp_nsecs"] - said["init_timestamp_nsecs"]) / 1e9
        return None

    def wait(self) -> None:
        """Return when nothing is being written; raises what went wrong in the background."""
        self._manager.wait_until_finished()
        if hosts.is_first():
            _tidy(self.directory)

    def close(self) -> None:
        """``wait``, then end the threads."""
        self.wait()
        self._manager.close()

    def best(self) -> str:
        """What to say of the best checkpoint; "" where none is kept for its pass rate."""
        found = stored.best_of(stored.steps_in(self.directory), self._pass_rates, self._config.keep_best)[:1]
        return "".join(f"; the best is {self.directory / str(x)}, pass rate {self._pass_rates[x]:.3f}" for x in found)

    def latest_iteration(self) -> int | None:
        """Iteration of the newest finished checkpoint, None when there is none."""
        return max(stored.steps_in(self.directory), default=None)


def _open(directory: pathlib.Path, kept: Any) -> ocp.CheckpointManager:
    logging.set_verbosity(logging.FATAL)  # orbax tells every step of its work, and what it raises as well
    # One replica writes each array whole: splitting the work over replicas compiles a slice per shape, on the devices.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    kinds = (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    registry = ocp.type_handlers.create_type_handler_registry(*kinds)
    state = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    handlers = {"state": state, "host": ocp.JsonCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    # Of orbax alone a host whose write fails is not heard of before the others have waited for 20 minutes.
    waits = ocp.AsyncOptions(barrier_sync_fn=hosts.meet)
    # Temporary directories are what a killed run left half-written.
    options = ocp.CheckpointManagerOptions(preservation_policy=kept, cleanup_tmp_directories=True, async_options=waits)
    manager = ocp.CheckpointManager(directory, options=options, item_names=tuple(handlers), item_handlers=handlers)
    # It would ask jax by the iteration: the stop that hosts agree on between two checks would never be reached.
    manager.reached_preemption = lambda step: False
    return manager


def _tidy(directory: pathlib.Path) -> None:
    """What was set aside comes back where what was to replace it is not whole."""
    for aside in [path for path in (directory.iterdir() if directory.is_dir() else ()) if path.name.startswith(ASIDE)]:
        whole = directory / aside.name.removeprefix(ASIDE)
        if bucket.is_whole(aside) and not bucket.is_whole(whole):
            bucket.remove(whole)
            bucket.move(aside, whole)
        bucket.remove(aside)


def _sums(state: dict[str, Any], checksums: Callable[[str, Any], jax.Array]) -> list[int]:
    """Checksums of all leaves in the order of ``stored.by_name``, part by part."""
    parts = [jax.device_get(checksums(part, state[part])) for part in sorted(state) if jax.tree.leaves(state[part])]
    return np.concatenate(parts).tolist()


@contextlib.contextmanager
def claim(workdir: pathlib.Path, of_bucket: str = "") -> Iterator[None]:
    """Make the folder and hold it for one run while entered, or until the process ends, however it ends.

    The first of several hosts does, and the others look whether it is the same folder. Where the checkpoints are in a
    bucket they may have others, and the folder of the bucket is held too.

    Raises:
        ConfigError: no file can be written there, or another run of this machine holds it.
        MachineError: the disk fails or is full, a run of another machine holds it, or a host does not see it.
    """
    if not hosts.is_first():
        if not of_bucket:
            hosts.find(workdir, None)
        yield
        return
    where, path = str(workdir.resolve()), workdir / "lock"
    if "[" in where or not where.isprintable():  # orbax would take the one for a pattern, tensorstore wants UTF-8
        raise ConfigError(f"--workdir={where!r} must be without '[' and characters that cannot be printed")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(path, "a")  # noqa: SIM115, closed below
    except OSError as error:
        is_fault = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
        kind = hosts.MachineError if is_fault else ConfigError
        raise kind(f"--workdir={workdir} cannot be written: {error.strerror}") from error
    who = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    text = f"{who}\n{bucket.machine()}"
    with contextlib.ExitStack() as held:
        held.enter_context(lock)
        shown = bucket.alive(path, text)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.enter_context(bucket.wait_for(path, f"--workdir={workdir}"))
        except OSError as error:
            print(f"warning: {path}: {error.strerror}; nothing keeps another run out", file=sys.stderr)
            shown = contextlib.nullcontext()
        path.write_text(text)
        held.enter_context(shown)
        if not of_bucket:
            hosts.find(workdir, text)
        with bucket.held(of_bucket, f"{who}, --workdir={where}"):
            yield
