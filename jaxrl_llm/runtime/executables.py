"""Executables: the compiled programs that a run uses.

A run can load the programs that ``plan --save`` wrote instead of compiling them. Of two variants of the update, a run
uses the faster one if it fits into the device.

Owns: folder and file names of saved programs, the error for other devices, settings or code, the choice of the update.
Does not know: how programs are compiled and written (``planning``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime.programs import Program, in_use_bytes, memory


def saved_in(folder: str, mesh: Mesh) -> pathlib.Path:
    """Return the folder for the programs of ``plan --save``. Its name has the devices and the package versions."""
    packages = {package.name: package.version for package in importlib.metadata.distributions()}
    versions = [f"{name} {packages[name]}" for name in ("jax", "jaxlib", "libtpu") if name in packages]
    device_kind = mesh.devices.flat[0].device_kind
    return pathlib.Path(folder, f"{mesh.size} x {device_kind}, {', '.join(versions)}")


def saved_as(lowered: jax.stages.Lowered, mesh: Mesh) -> str:
    """Return the file name of a saved program: the digest of its device ids and its text."""
    device_ids = [device.id for device in mesh.devices.flat]
    text = f"{device_ids} {lowered.as_text()}"
    return hashlib.sha256(text.encode()).hexdigest()


def load_all(programs: Mapping[str, Program], mesh: Mesh, folder: str) -> dict[str, jax.stages.Compiled]:
    """Load the saved programs. Trust the folder as you trust code, because loading can run code from it.

    Returns:
        The programs by name; none if ``folder`` is "".

    Raises:
        ConfigError: the folder has no program for these devices, settings and code.
    """
    if not folder:
        return {}
    loaded = {}
    devices = mesh.devices.flatten().tolist()
    saved_folder = saved_in(folder, mesh)
    for name, program in programs.items():
        lowered = program.lower(mesh)
        file = saved_folder / saved_as(lowered, mesh)
        if not file.is_file():
            raise ConfigError(_not_saved(folder, saved_folder.name, name))
        loaded[name] = deserialize_and_load(
            file.read_bytes(),
            jax.tree.structure(lowered.args_info),
            lowered.out_tree,
            devices[0].client,
            execution_devices=devices,
        )
    return loaded


def _not_saved(folder: str, devices: str, program: str) -> str:
    """Return the error for a program that the folder does not have for these devices, settings and code."""
    saved_devices = sorted(path.name for path in pathlib.Path(folder).glob("*/"))
    reason = "of these settings and code" if devices in saved_devices else f"but for {saved_devices}"
    return f"executables={folder!r} has no {program!r} for {devices!r} {reason}; run plan --save again"


def keeping_update(run: Any) -> Program:
    """Return the run's update program that keeps the MLP activations for the backward pass."""
    # Not remat="none": storing and reading all activations takes longer than recomputing most of them (BENCHMARKS.md).
    update = dataclasses.replace(run.learner.update, model=dataclasses.replace(run.model, remat="dots"))
    return dataclasses.replace(run.learner, update=update).programs()["update"]


def keep_what_fits(
    run: Any, compiled: dict[str, jax.stages.Compiled], limit: int | None
) -> dict[str, jax.stages.Compiled]:
    """Choose the update for ``model.remat="auto"``: the update that keeps the MLP activations, if it fits.

    Args:
        compiled: every program of the run; its update recomputes all activations.
        limit: memory of a device in bytes; None = unknown, and ``compiled`` is returned unchanged.

    Returns:
        The compiled programs with the chosen update.
    """
    if run.config.model.remat != "auto" or limit is None:
        return compiled
    try:
        update = keeping_update(run).lower(run.mesh).compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        return compiled  # the TPU compiler rejects a program that does not fit into a chip
    candidates = compiled | {"update": update}
    memories = {name: memory(program) for name, program in candidates.items()}
    in_use = in_use_bytes(memories, **run.beside)
    return candidates if in_use["update"] <= limit else compiled
