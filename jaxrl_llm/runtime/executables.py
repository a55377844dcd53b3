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
    packages = {x.name: x.version for x in importlib.metadata.distributions()}
    versions = [f"{name} {packages[name]}" for name in ("jax", "jaxlib", "libtpu") if name in packages]
    return pathlib.Path(
        folder,
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {', '.join(versions)}",
    )


def saved_as(lowered: jax.stages.Lowered, mesh: Mesh) -> str:
    """Return the file name of a saved program: the digest of its device ids and its text."""
    text = f"{[device.id for device in mesh.devices.flat]} {lowered.as_text()}"
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
    where = saved_in(folder, mesh)
    for name, lowered in ((name, program.lower(mesh)) for name, program in programs.items()):
        if not (file := where / saved_as(lowered, mesh)).is_file():
            there = sorted(x.name for x in pathlib.Path(folder).glob("*/"))
            here = where.name
            differ = "of these settings and code" if here in there else f"but for {there}"
            raise ConfigError(f"executables={folder!r} has no {name!r} for {here!r} {differ}; run plan --save again")
        trees = jax.tree.structure(lowered.args_info), lowered.out_tree
        loaded[name] = deserialize_and_load(file.read_bytes(), *trees, devices[0].client, execution_devices=devices)
    return loaded


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
    memories = {name: memory(program) for name, program in compiled.items()} | {"update": memory(update)}
    in_use = in_use_bytes(memories, **run.beside)
    return compiled | {"update": update} if in_use["update"] <= limit else compiled
