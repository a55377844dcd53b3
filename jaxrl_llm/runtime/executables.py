"""Executables: compiled programs that ``plan --save`` wrote, for ``train`` to load in place of compiling.

Owns: where they lie, by which name, what is said where they are of other devices, settings or code. Does not know: how
they are compiled and written (planning).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
from collections.abc import Mapping

import jax
from jax.experimental.serialize_executable import deserialize_and_load
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.runtime.programs import Program


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
