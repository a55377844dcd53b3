"""Executables: which compiled programs a run takes.

Those that ``plan --save`` wrote, in place of compiling; and of two updates the faster one, where it fits the device.

Owns: where they lie, by which name, what is said where they are of other devices, settings or code; what fits. Does not
know: how they are compiled and written (planning).
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
    """Where ``plan --save`` writes programs: in a folder of their versions and devices."""
    packages = {x.name: x.version for x in importlib.metadata.distributions()}
    versions = [f"{name} {packages[name]}" for name in ("jax", "jaxlib", "libtpu") if name in packages]
    return pathlib.Path(folder, f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {', '.join(versions)}")


def saved_as(lowered: jax.stages.Lowered, mesh: Mesh) -> str:
    """The file's name there: a program's is its text's digest."""
    text = f"{[device.id for device in mesh.devices.flat]} {lowered.as_text()}"
    return hashlib.sha256(text.encode()).hexdigest()


def load_all(programs: Mapping[str, Program], mesh: Mesh, folder: str) -> dict[str, jax.stages.Compiled]:
    """Programs that were saved, as trusted as code; none where ``folder`` is "". ConfigError where one is of others."""
    if not folder:
        return {}
    loaded, devices, where = {}, mesh.devices.flatten().tolist(), saved_in(folder, mesh)
    for name, lowered in ((name, program.lower(mesh)) for name, program in programs.items()):
        if not (file := where / saved_as(lowered, mesh)).is_file():
            there, here = sorted(x.name for x in pathlib.Path(folder).glob("*/")), where.name
            differ = "of these settings and code" if here in there else f"but for {there}"
            raise ConfigError(f"executables={folder!r} has no {name!r} for {here!r} {differ}; run plan --save again")
        trees = jax.tree.structure(lowered.args_info), lowered.out_tree
        loaded[name] = deserialize_and_load(file.read_bytes(), *trees, devices[0].client, execution_devices=devices)
    return loaded


def keeping_update(run: Any) -> Program:
    """The run's update that keeps the MLPs for the backward pass."""
    # What "none" keeps beside takes longer to write and read than to compute (BENCHMARKS).
    update = dataclasses.replace(run.learner.update, model=dataclasses.replace(run.model, remat="dots"))
    return dataclasses.replace(run.learner, update=update).programs()["update"]


def keep_what_fits(
    run: Any, compiled: dict[str, jax.stages.Compiled], limit: int | None
) -> dict[str, jax.stages.Compiled]:
    """For ``model.remat="auto"``: the run's compiled programs, with the update that keeps the MLPs if it fits.

    Args:
        compiled: every program of the run, its update recomputing all.
        limit: bytes of a device; None = not known, and then all is recomputed.
    """
    if run.config.model.remat != "auto" or limit is None:
        return compiled
    try:
        update = keeping_update(run).lower(run.mesh).compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        return compiled  # the TPU compiler refuses what a chip cannot hold
    memories = {name: memory(program) for name, program in compiled.items()} | {"update": memory(update)}
    in_use = in_use_bytes(memories, **run.beside)
    return compiled | {"update": update} if in_use["update"] <= limit else compiled
