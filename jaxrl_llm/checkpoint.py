"""Checkpoints: the whole state of a run as one orbax step, written in the background, and stop requests.

    workdir/checkpoints/12/            12 = iterations finished
        state/     every array of the device state, by name ("train/params/embed")
        host/      JSON: prompt iterator, RNG root, positions in the metric files
        config/    JSON: the resolved config and its fingerprint
        metrics/   JSON: the pass rate, where one was measured; decides which checkpoints are best

A step is written in a temporary directory and renamed when every file is there, so one that a crash cut short
is never found. Arrays are stored under their tree paths and without compression: float weights do not shrink,
and the processor has better things to do.

Owns: the layout above, what is kept, which settings may differ on resume. Does not know: what the state means,
except that a subtree named ``params`` holds the weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from jaxrl_llm.config import CheckpointConfig, Config, ConfigError, fingerprint, from_json, to_json
from jaxrl_llm.nested import differences

# Settings (or groups) that a resumed run may change freely: they say how long the run is, what it writes down, with
# how many hands and where arrays lie, and no parameter, ring byte or sampled token depends on them.
FREE_SETTINGS = (
    "num_iterations",
    "compilation_cache",
    "checkpoint",
    "metrics",
    "eval.every_iterations",
    "rewards.num_workers",
    "replay.memory",
    "optimizer.offload",
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        iteration: iterations finished when it was saved.
        device_state: as saved, with the structure and shardings of the abstract state.
        host_state: the JSON object given to ``save``.
        config: the config it was saved with.
    """

    iteration: int
    device_state: Any
    host_state: dict[str, Any]
    config: Config


class Checkpointer:
    """Saves to and restores from ``workdir/checkpoints``. Every process of a multi-host run makes the same calls."""

    def __init__(self, workdir: str | os.PathLike, config: CheckpointConfig):
        self.directory = pathlib.Path(workdir) / "checkpoints"
        keep = [preservation_policy.LatestN(config.keep_last)]
        if config.keep_best:
            best = preservation_policy.BestN(
                get_metric_fn=lambda metrics: metrics["pass_rate"],
                n=config.keep_best,
                keep_checkpoints_without_metrics=False,
            )
            keep.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,  # what a killed run left half-written
        )
        self._manager = _open(self.directory.resolve(), options)
        self._current: int | None = None  # iteration on disk that equals the caller's state

    def save(
        self,
        iteration: int,
        device_state: Any,
        host_state: dict[str, Any],
        config: Config,
        *,
        pass_rate: float | None,
    ) -> None:
        """Start writing a checkpoint and return; the arrays may be donated at once.

        Waits for the write before, if that still runs, and raises what went wrong in it. Saving the iteration just
        saved or restored does nothing. After going back to an older iteration, the newer checkpoints are another
        run's future: they are removed.

        Args:
            iteration: iterations finished; names the checkpoint.
            device_state: pytree of arrays (of a typed PRNG key, its data); None and empty subtrees are allowed.
            host_state: JSON object.
            config: the resolved config.
            pass_rate: fraction in [0, 1] of the last evaluation, None where there was none; without one a
                checkpoint is never among the best.

        Host/device: copies to the host (on CPU: holds the buffers, so that a donated one is copied when overwritten).
        """
        if iteration == self._current:
            return
        for newer in [step for step in self._manager.all_steps() if step >= iteration]:
            self._manager.delete(newer)
        settings = {"config": json.loads(to_json(config)), "fingerprint": fingerprint(config)}
        self._manager.save(
            iteration,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(_by_name(device_state)),
                # Through text now: the caller goes on changing its dictionaries while the write runs.
                host=ocp.args.JsonSave(json.loads(json.dumps(host_state))),
                config=ocp.args.JsonSave(settings),
            ),
            metrics=None if pass_rate is None else {"pass_rate": float(pass_rate)},
            force=True,
        )
        self._current = iteration

    def restore(
        self,
        abstract_state: Any,
        config: Config | None,
        *,
        allow_config_changes: bool,
        iteration: int | None = None,
    ) -> Restored | None:
        """Read a checkpoint onto the shardings of ``abstract_state``, which may be those of another mesh.

        Args:
            abstract_state: pytree of ``ShapeDtypeStruct`` with shardings.
            config: the config of the run that resumes; None: any will do.
            allow_config_changes: accept settings that differ, as long as the arrays fit.
            iteration: which; None = the latest.

        Returns:
            None when no checkpoint was ever finished.

        Raises:
            ConfigError: no such iteration, settings differ, or arrays do not fit.
        """
        latest = self.latest_iteration()
        if iteration is None and latest is None:
            return None
        iteration = latest if iteration is None else iteration
        saved = _read_config(self._manager, self.directory, iteration)
        if config is not None and not allow_config_changes:
            _check_settings(saved, config, self.directory / str(iteration))
        names = _by_name(abstract_state)
        metadata = _metadata(self._manager, iteration)
        _check_arrays(metadata, names, self.directory / str(iteration), same_dtype=True)
        arrays = _restore_arrays(self._manager, iteration, names)
        host = self._manager.restore(iteration, args=ocp.args.Composite(host=ocp.args.JsonRestore())).host
        self._current = iteration
        leaves = [arrays[name] for name in names]
        return Restored(iteration, jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), host, saved)

    def check_config(self, config: Config, *, allow_changes: bool) -> None:
        """Refuse to resume under other settings; reads no array, so it may come before anything is compiled.

        Raises:
            ConfigError: settings differ from those of the latest checkpoint.
        """
        latest = self.latest_iteration()
        if latest is not None and not allow_changes:
            path = self.directory / str(latest)
            _check_settings(_read_config(self._manager, self.directory, latest), config, path)

    def wait(self) -> None:
        """Return when nothing is being written; raises what went wrong in the background."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """``wait``, then end the threads."""
        self._manager.close()

    def latest_iteration(self) -> int | None:
        """Iteration of the newest finished checkpoint, None when there is none."""
        return self._manager.latest_step()


def restore_params(directory: str | os.PathLike, abstract_params: Any = None) -> tuple[Any, Config]:
    """Read the weights alone, for evaluation and export.

    Args:
        directory: a workdir, its ``checkpoints`` directory (the latest is read) or one checkpoint in it.
        abstract_params: pytree of ``ShapeDtypeStruct`` with shardings, cast to its dtypes; None gives nested
            dictionaries of numpy arrays on the host, as they were saved.

    Returns:
        The parameters and the config of the run.

    Raises:
        ConfigError: no finished checkpoint there, or its arrays do not fit.
    """
    path = pathlib.Path(directory).resolve()
    root = path / "checkpoints" if os.path.isdir(path / "checkpoints") else path
    iteration = None
    if path.name.isdigit() and os.path.isdir(path / "state"):
        root, iteration = path.parent, int(path.name)
    if not os.path.isdir(root):
        raise ConfigError(f"no checkpoint in {directory}: no such directory")
    manager = _open(root, ocp.CheckpointManagerOptions(create=False))
    try:
        iteration = manager.latest_step() if iteration is None else iteration
        if iteration is None:
            raise ConfigError(f"no finished checkpoint in {directory}")
        config = _read_config(manager, root, iteration)
        metadata = _metadata(manager, iteration)
        prefix = _params_prefix(metadata)
        if abstract_params is None:
            wanted = {name: None for name in metadata if name.startswith(prefix)}
            return _nested(_restore_arrays(manager, iteration, wanted), prefix), config
        wanted = {prefix + name: leaf for name, leaf in _by_name(abstract_params).items()}
        saved = {name: leaf for name, leaf in metadata.items() if name.startswith(prefix)}
        _check_arrays(saved, wanted, root / str(iteration), same_dtype=False)
        arrays = _restore_arrays(manager, iteration, wanted)
        leaves = [arrays[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves), config
    finally:
        manager.close()


def _open(directory: pathlib.Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    # One replica writes each array whole: splitting the work over replicas compiles a slice per shape, on the devices.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    state = ocp.PyTreeCheckpointHandler(
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        ),
    )
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.PyTreeSave, state)
    registry.add("state", ocp.args.PyTreeRestore, state)
    for item in ("host", "config", "metrics"):
        handler = ocp.JsonCheckpointHandler()
        registry.add(item, ocp.args.JsonSave, handler)
        registry.add(item, ocp.args.JsonRestore, handler)
    return ocp.CheckpointManager(directory, options=options, handler_registry=registry)


def _by_name(tree: Any) -> dict[str, Any]:
    """``{"train/params/embed": leaf}`` in the order of ``jax.tree.leaves``: None and empty subtrees leave no entry."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state share a name"
    return named


def _nested(named: dict[str, Any], prefix: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.removeprefix(prefix).split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _metadata(manager: ocp.CheckpointManager, iteration: int) -> dict[str, Any]:
    """Name -> object with ``shape`` and ``dtype``, of every saved array."""
    return dict(manager.item_metadata(iteration).state.tree)


def _params_prefix(names: dict[str, Any]) -> str:
    """The shallowest subtree called ``params``: the optimizer may have its own further down."""
    found = [name.split("/") for name in names if "params" in name.split("/")[:-1]]
    parts = min(found, key=lambda parts: parts.index("params"))
    return "/".join(parts[: parts.index("params") + 1]) + "/"


def _restore_arrays(manager: ocp.CheckpointManager, iteration: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Arrays by name: where ``wanted`` gives a ``ShapeDtypeStruct``, on its sharding; where None, numpy."""

    def restore_args(leaf: Any) -> ocp.RestoreArgs:
        if leaf is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    item = {name: 0 if leaf is None else leaf for name, leaf in wanted.items()}
    args = ocp.args.PyTreeRestore(
        item, restore_args={name: restore_args(leaf) for name, leaf in wanted.items()}, partial_restore=True
    )
    return manager.restore(iteration, args=ocp.args.Composite(state=args)).state


def _read_config(manager: ocp.CheckpointManager, directory: pathlib.Path, iteration: int) -> Config:
    steps = manager.all_steps()
    if iteration not in steps:
        raise ConfigError(f"no checkpoint of iteration {iteration} in {directory}; there are {sorted(steps)}")
    settings = manager.restore(iteration, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
    return from_json(json.dumps(settings["config"]))


def changed_settings(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """``{setting: (saved, now)}`` of the settings that differ and may not where a run is resumed."""
    free = FREE_SETTINGS
    if config.optimizer.schedule != "constant":
        free = tuple(name for name in free if name != "num_iterations")  # a decay ends at the last iteration
    # Through JSON as the saved one went: a tuple in a dictionary of arguments comes back as a list.
    return {
        name: values
        for name, values in differences(saved, from_json(to_json(config))).items()
        if name not in free and name.split(".")[0] not in free
    }


def _check_settings(saved: Config, config: Config, path: pathlib.Path) -> None:
    if changed := changed_settings(saved, config):
        listed = "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        raise ConfigError(
            f"checkpoint {path} was made with other settings: {listed}. "
            "Set them back, use another workdir, or pass --allow_config_changes"
        )


def _check_arrays(saved: dict[str, Any], wanted: dict[str, Any], path: pathlib.Path, *, same_dtype: bool) -> None:
    wrong = [f"{name} is missing" for name in wanted if name not in saved]
    wrong += [f"{name} is not expected" for name in saved if name not in wanted]
    for name in wanted:
        if name in saved:
            old, new = saved[name], wanted[name]
            if tuple(old.shape) != tuple(new.shape) or (same_dtype and np.dtype(old.dtype) != np.dtype(new.dtype)):
                wrong.append(f"{name} is {old.dtype}{list(old.shape)}, not {new.dtype}{list(new.shape)}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ConfigError(f"checkpoint {path} does not fit: {'; '.join(wrong[:3])}{more}")


class StopRequest:
    """While entered, SIGTERM and SIGINT only set ``requested`` to the signal's name; the loop stops where it can save.

    A SIGINT after a request raises KeyboardInterrupt at once: for a user who does not want to wait.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        # Not print: a handler may interrupt one. Says that Ctrl-C was heard while an iteration runs on.
        note = f"\n{self.requested}: finishing this iteration, then saving (Ctrl-C again stops at once)\n"
        os.write(2, note.encode())  # standard error; in a notebook sys.stderr is no file
