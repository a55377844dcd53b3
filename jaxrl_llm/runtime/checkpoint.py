"""Checkpoints of a run: its whole state is one orbax step, which orbax writes in the background.

    workdir/checkpoints/12/            12 = iterations finished
        state/     every array of the device state, by name ("train/params/policy/embed")
        host/      JSON: state of the questions, memory and conversations, positions in the metric files; no large array
        config/    JSON: the resolved config, the pass rate if it was measured, dtype, shape and checksum of every
                   array, and a digest of config/ and host/

A step is written into a temporary directory, which is renamed when every file is complete. A checkpoint that a crash
interrupts is therefore never found. A checkpoint that is damaged later fails its checksums, and the run resumes from
the one before. Arrays are stored under their tree paths. They are not compressed, because compression costs processor
time and hardly shrinks float weights.

Owns: the layout above, which checkpoints are kept, which run may write into a workdir. Does not know: which settings a
resumed run may change (``runtime.checkpoint_files``), the meaning of the state, except that the subtree
``params/policy`` holds the weights.
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
from typing import IO, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from jaxrl_llm.config import CheckpointConfig, Config, ConfigError, to_json
from jaxrl_llm.ops.checksum import checksums
from jaxrl_llm.runtime import bucket, checkpoint_files, hosts

ASIDE = "aside-"  # prefix of a checkpoint's name while another checkpoint of the same iteration is written

# This path in the name of an array marks the weights of the policy.
POLICY = "/params/policy/"


@dataclasses.dataclass(frozen=True)
class Restored:
    """Contents of a checkpoint that was restored.

    Attributes:
        iteration: number of iterations finished when the checkpoint was saved.
        device_state: the saved arrays, with the structure and shardings of the abstract state.
        host_state: the JSON object that was passed to ``save``.
        is_inside: the flag that was passed to ``save``.
        shapes: shapes of the saved arrays, by name.
    """

    iteration: int
    device_state: Any
    host_state: dict[str, Any]
    is_inside: bool
    shapes: dict[str, list[int]]


class Checkpointer:
    """Writer and reader of the checkpoints of one run. Every process of a multi-host run makes the same calls.

    The checkpoints are in ``workdir/checkpoints``, or in the folder ``checkpoint.bucket`` of a bucket.
    """

    def __init__(self, workdir: str | os.PathLike, config: CheckpointConfig):
        folder = config.bucket or pathlib.Path(workdir) / "checkpoints"
        self.directory = bucket.place(folder, "checkpoint.bucket")
        if hosts.is_first():
            bucket.check(pathlib.Path(workdir), config.bucket)
            _tidy(self.directory)
        hosts.exchange("tidy")
        self._config = config
        self._pass_rates = checkpoint_files.pass_rates(self.directory)
        self._manager = _open(bucket.absolute(self.directory), self)
        # Iteration of the checkpoint that equals the caller's state, and ``is_inside`` of that checkpoint.
        self._current: tuple[int, bool] | None = None
        self._is_new = False  # a save was started and is not yet known to be complete
        self._saved_at = time.monotonic()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for orbax which checkpoints to keep: the last ones of this run, and the best by pass rate."""
        steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.step in self._pass_rates]
        best = checkpoint_files.best_of(steps, self._pass_rates, self._config.keep_best)
        last = steps[-self._config.keep_last :]
        return [checkpoint.step in best or checkpoint.step in last for checkpoint in checkpoints]

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
        """Start to write a checkpoint and return. The caller may donate the arrays at once.

        The call first waits until the previous write has ended, and raises the error of that write. If this iteration
        was just saved or restored, the call does nothing.

        When the new checkpoint is complete, the checkpoint of the same iteration that it replaces is removed. After a
        restore of an older iteration, the newer checkpoints are removed too: they are damaged, or they continue
        another state.

        Args:
            iteration: number of finished iterations; the name of the checkpoint.
            device_state: pytrees of arrays by part; None and empty subtrees are allowed. A typed PRNG key is given as
                its data.
            host_state: JSON object.
            config: the resolved config.
            pass_rate: pass rate in [0, 1] of the last evaluation, None if there was none. A checkpoint without a pass
                rate is never among the best.
            is_inside: the iteration is unfinished, or was saved unfinished before and has finished since then. Such a
                state is always saved.
            checksums: ``checksums(name, part)`` returns the checksums of the leaves of a part of the state, in order.

        Host/device: copies the arrays to the host. On CPU it keeps the buffers instead, and XLA copies a donated buffer
        when it is overwritten.
        """
        if self._current == (iteration, False) and not is_inside:
            return
        arrays = checkpoint_files.by_name(device_state)
        sums = _sums(device_state, checksums)
        if pass_rate is not None:
            self._pass_rates[iteration] = float(pass_rate)
        text = {
            "config": json.loads(to_json(config)),
            "files": config.files,
            "pass_rate": self._pass_rates.setdefault(iteration),
            "is_inside": is_inside,
            "arrays": _descriptions(arrays, sums),
        }
        # Copy through JSON text, because the caller changes its dictionaries while the write runs.
        host = json.loads(json.dumps(host_state))
        self._start_write(iteration, arrays, host, text | {"digest": checkpoint_files.digest(host, text)})
        self._current = (iteration, is_inside)
        self._is_new = True
        self._saved_at = time.monotonic()

    def _start_write(self, iteration: int, arrays: dict[str, Any], host: Any, text: dict[str, Any]) -> None:
        """Start to write a checkpoint after the previous write has ended, and return.

        Args:
            arrays: arrays of state/ by name.
            host, text: JSON objects of host/ and config/.
        """
        self.wait()
        if iteration in checkpoint_files.steps_in(self.directory) and hosts.is_first():
            bucket.move(self.directory / str(iteration), self.directory / f"{ASIDE}{iteration}")
        hosts.exchange("set aside")
        self._manager.reload()
        self._manager.save(
            iteration,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays),
                host=ocp.args.JsonSave(host),
                config=ocp.args.JsonSave(text),
            ),
            force=True,
        )

    def restore(
        self,
        abstract_state: Any,
        config: Config,
        *,
        allow_config_changes: bool,
        iteration: int | None = None,
        checksums: Callable[[str, Any], jax.Array] = lambda _, state: checksums(state),
    ) -> Restored | None:
        """Read a checkpoint onto the shardings of ``abstract_state``. The mesh may differ from the saved run's mesh.

        Args:
            abstract_state: pytrees of ``ShapeDtypeStruct`` with shardings, by part. A checkpoint may lack the parts of
                ``PASSING`` and of ``MEMORY``; the result has None for a missing part.
            config: the config of the run that resumes.
            allow_config_changes: accept different settings if the arrays fit.
            iteration: iteration to read; None = the latest undamaged checkpoint.
            checksums: as for ``save``.

        Returns:
            The contents of the checkpoint, or None if there is no finished checkpoint.

        Raises:
            ConfigError: there is no checkpoint of ``iteration``, all are damaged, settings differ or arrays do not fit.
        """
        self.wait()

        def read(path: pathlib.Path) -> tuple[Any, ...]:
            host, text, wanted = checkpoint_files.read_fitting(path, abstract_state, config, allow_config_changes)
            arrays = checkpoint_files.read_arrays(path, checkpoint_files.by_name(wanted))
            return int(path.name), host, text, jax.tree.structure(wanted), arrays

        def check(found: tuple[Any, ...]) -> Restored:
            step, host, text, structure, arrays = found
            state = jax.tree.unflatten(structure, arrays.values())
            checkpoint_files.compare(text["arrays"], arrays, _sums(state, checksums))
            state = dict.fromkeys(abstract_state) | state
            shapes = {name: shape for name, (_, shape, _) in text["arrays"].items()}
            return Restored(step, state, host, text["is_inside"], shapes)

        restored = checkpoint_files.read_whole(self.directory, iteration, read, check)
        if restored:
            self._current = restored.iteration, restored.is_inside
            newer = [step for step in self._pass_rates if step > restored.iteration]
            for step in newer:
                del self._pass_rates[step]
        return restored

    def is_due(self, iteration: int, pass_rate: float | None = None) -> bool:
        """Return whether to save now: enough iterations or minutes have passed, or the pass rate is among the best.

        The first host decides on the time and on the pass rate for all hosts.
        """
        every = self._config.every_iterations
        rates = self._pass_rates | {iteration: pass_rate}
        steps = {step for step in self._manager.all_steps() if step < iteration} | {iteration}
        is_best = iteration in checkpoint_files.best_of(steps, rates, self._config.keep_best)
        waited_s, is_best = hosts.exchange((time.monotonic() - self._saved_at, is_best))[0]
        if is_best:
            return True
        if every > 0 and iteration % every == 0:
            return True
        return 0 < self._config.every_minutes * 60 <= waited_s

    def check_config(
        self,
        config: Config,
        abstract_state: Any,
        check: Callable[[dict[str, Any]], None] = lambda host: None,
        *,
        allow_changes: bool,
    ) -> None:
        """Check that the run can resume from the latest checkpoint. No array is read, so call this before compiling.

        Args:
            abstract_state: as for ``restore``.
            check: receives the host state that was passed to ``save``, and raises an error if this state does not fit.

        Raises:
            ConfigError: settings differ from the latest checkpoint, its arrays do not fit, or all are damaged.
        """

        def read(path: pathlib.Path) -> dict[str, Any]:
            host, _, _ = checkpoint_files.read_fitting(path, abstract_state, config, allow_changes)
            return host

        checkpoint_files.read_whole(self.directory, None, read, check, say=False)

    def check(self) -> dict[str, float]:
        """Return metrics of the last checkpoint once, after its write has ended. Raise the error of a failed write."""
        if not self._is_new or self._manager.is_saving_in_progress():  # return early, because listing a bucket is slow
            return {}
        self.wait()
        self._is_new = False
        seconds = self._last_write_s()
        if seconds is None:
            return {}
        if seconds > self._config.grace_s and hosts.is_first():
            print(
                f"warning: checkpoint {self.latest_iteration()}{self.last_write()}",
                file=sys.stderr,
            )
        return {"time/checkpoint_s": seconds}

    def last_write(self) -> str:
        """Return text on the write time of the newest checkpoint, without its checksums; "" if the time is unknown."""
        seconds = self._last_write_s()
        if seconds is None:
            return ""
        grace_s = self._config.grace_s
        relation = "within" if seconds <= grace_s else "too long for a preemption:"
        return f"; the last was written in {seconds:.1f} s, {relation} checkpoint.grace_s={grace_s:g}"

    def _last_write_s(self) -> float | None:
        """Return the seconds that orbax took to write the newest checkpoint, or None if unknown."""
        # An unknown time is not an error.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, hosts.MachineError):
            file = self.directory / str(self.latest_iteration()) / "_CHECKPOINT_METADATA"  # a file of orbax
            times = json.loads(file.read_bytes())
            return (times["commit_timestamp_nsecs"] - times["init_timestamp_nsecs"]) / 1e9
        return None

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raise the error of a failed write."""
        self._manager.wait_until_finished()
        if hosts.is_first():
            _tidy(self.directory)

    def close(self) -> None:
        """Wait for the write in progress, then end the threads of orbax."""
        self.wait()
        self._manager.close()

    def best(self) -> str:
        """Return text that names the best checkpoint and its pass rate; "" if none is kept for its pass rate."""
        steps = checkpoint_files.steps_in(self.directory)
        best = checkpoint_files.best_of(steps, self._pass_rates, self._config.keep_best)
        if not best:
            return ""
        return f"; the best is {self.directory / str(best[0])}, pass rate {self._pass_rates[best[0]]:.3f}"

    def latest_iteration(self) -> int | None:
        """Return the iteration of the newest finished checkpoint, or None if there is none."""
        return max(checkpoint_files.steps_in(self.directory), default=None)


def _open(directory: pathlib.Path, kept: Any) -> ocp.CheckpointManager:
    """Return the orbax manager of a folder. ``kept`` is the policy that decides which checkpoints to keep."""
    logging.set_verbosity(logging.FATAL)  # orbax logs every step of its work, and every error that it also raises
    # One replica writes each array whole. Splitting the write over replicas would compile a slice program per shape.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    kinds = (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    registry = ocp.type_handlers.create_type_handler_registry(*kinds)
    state = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    handlers = {
        "state": state,
        "host": ocp.JsonCheckpointHandler(),
        "config": ocp.JsonCheckpointHandler(),
    }
    # With orbax's own barrier, the other hosts would wait for 20 minutes for a host whose write failed.
    waits = ocp.AsyncOptions(barrier_sync_fn=hosts.meet)
    # A temporary directory is an unfinished checkpoint of a run that was killed.
    options = ocp.CheckpointManagerOptions(preservation_policy=kept, cleanup_tmp_directories=True, async_options=waits)
    manager = ocp.CheckpointManager(directory, options=options, item_names=tuple(handlers), item_handlers=handlers)
    # orbax would ask jax with the number of the iteration. Hosts agree on the number of a check instead (``stop``), and
    # a stop between two checks would never be reached.
    manager.reached_preemption = _never
    return manager


def _never(step: int) -> bool:
    """Return False, because ``stop.StopRequest`` decides when a run stops."""
    del step
    return False


def _tidy(directory: pathlib.Path) -> None:
    """Restore each checkpoint that was set aside if its replacement is unfinished. Otherwise remove it."""
    if not directory.is_dir():
        return
    set_aside = [path for path in directory.iterdir() if path.name.startswith(ASIDE)]
    for aside in set_aside:
        whole = directory / aside.name.removeprefix(ASIDE)
        if bucket.is_whole(aside) and not bucket.is_whole(whole):
            bucket.remove(whole)
            bucket.move(aside, whole)
        bucket.remove(aside)


def _sums(state: dict[str, Any], checksums: Callable[[str, Any], jax.Array]) -> list[int]:
    """Return the checksums of all leaves in the order of ``checkpoint_files.by_name``."""
    sums = []
    for part in sorted(state):
        if jax.tree.leaves(state[part]):
            sums.append(jax.device_get(checksums(part, state[part])))
    return np.concatenate(sums).tolist()


def _descriptions(arrays: dict[str, Any], sums: list[int]) -> dict[str, list[Any]]:
    """Return dtype, shape and checksum of every array by name."""
    descriptions = {}
    for (name, array), checksum in zip(arrays.items(), sums, strict=True):
        descriptions[name] = [str(array.dtype), list(array.shape), checksum]
    return descriptions


@contextlib.contextmanager
def claim(workdir: pathlib.Path, of_bucket: str = "") -> Iterator[None]:
    """Create the workdir and lock it for this run until the context is left or the process ends.

    The first host locks the workdir, and the other hosts check that they share it. If the checkpoints are in a bucket,
    the first host also locks the folder in the bucket, and the other hosts may have other workdirs.

    Args:
        of_bucket: the setting ``checkpoint.bucket``; "" = the checkpoints are in the workdir.

    Raises:
        ConfigError: the workdir or the folder cannot be used, for one of four reasons:

            - No file can be written in the workdir.
            - The path of the workdir has a forbidden character.
            - Another run on this machine holds the workdir.
            - Another run holds the folder in the bucket.
        MachineError: a machine or a disk fails, for one of three reasons:

            - The disk fails or is full, or the bucket does not answer.
            - A run on another machine holds the workdir.
            - A host does not share the workdir.
    """
    if not hosts.is_first():
        if not of_bucket:
            hosts.find(workdir, None)
        yield
        return
    path = workdir / "lock"
    lock = _open_lock(workdir, path)
    who = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    text = f"{who}\n{bucket.machine()}"
    with contextlib.ExitStack() as held:
        held.enter_context(lock)
        heartbeat = bucket.alive(path, text)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.enter_context(bucket.wait_for(path, f"--workdir={workdir}"))
        except OSError as error:
            print(
                f"warning: {path}: {error.strerror}; nothing keeps another run out",
                file=sys.stderr,
            )
            heartbeat = contextlib.nullcontext()
        path.write_text(text)
        held.enter_context(heartbeat)
        if not of_bucket:
            hosts.find(workdir, text)
        with bucket.held(of_bucket, f"{who}, --workdir={workdir.resolve()}"):
            yield


def _open_lock(workdir: pathlib.Path, path: pathlib.Path) -> IO[str]:
    """Create the workdir, and open its lock file ``path`` for writing.

    Raises:
        ConfigError: the workdir cannot be created or written, or its path has a forbidden character.
        MachineError: the disk fails or is full.
    """
    place = str(workdir.resolve())
    if "[" in place or not place.isprintable():  # orbax reads '[' as a pattern; tensorstore requires UTF-8
        raise ConfigError(f"--workdir={place!r} must be without '[' and characters that cannot be printed")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        return open(path, "a")
    except OSError as error:
        is_fault = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
        kind = hosts.MachineError if is_fault else ConfigError
        raise kind(f"--workdir={workdir} cannot be written: {error.strerror}") from error
