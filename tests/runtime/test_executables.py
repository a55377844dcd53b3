"""Executables: saved programs are loaded unchanged, and only for the same devices, settings and code."""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.building import EIGHT, ONE, mesh_of
from support.refusal import refused

from jaxrl_llm.planning.compiled import Row, save_all
from jaxrl_llm.runtime import executables, programs, sharding


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """Compile without the cache, as ``plan`` does: a program from the cache cannot be saved completely."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def program(mesh, factor=3.0):
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding.named(mesh, (8, 4), ("batch", None)))
    return programs.Program(lambda tree: {"y": factor * tree["x"]}, ({"x": x},), {"y": x.sharding}, donate=(0,))


def save(folder, mesh):
    lowered = program(mesh).lower(mesh)
    save_all([Row("f", None, "", executable=lowered.compile(), lowered=lowered)], mesh, str(folder))


def test_a_saved_program_computes_the_same_and_nothing_is_compiled(tmp_path, monkeypatch):
    mesh = mesh_of(EIGHT)
    save(tmp_path, mesh)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: pytest.fail("compiled"))
    taken = executables.load_all({"f": program(mesh)}, mesh, str(tmp_path))["f"]
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    placed = jax.device_put(x, program(mesh).args[0]["x"].sharding)
    result = taken({"x": placed})
    np.testing.assert_array_equal(result["y"], 3 * x)
    assert placed.is_deleted()  # as donated
    assert result["y"].sharding == program(mesh).args[0]["x"].sharding


def test_another_program_other_devices_and_other_versions_are_refused(tmp_path, monkeypatch):
    mesh = mesh_of(EIGHT)
    save(tmp_path, mesh)
    with refused("executables", str(tmp_path), "'f'", "'8 x cpu, jax ", "plan --save"):
        executables.load_all({"f": program(mesh, factor=4.0)}, mesh, str(tmp_path))
    with refused("executables", str(tmp_path), "'f'", "'1 x cpu, jax ", "['8 x cpu, jax "):
        executables.load_all({"f": program(mesh_of(ONE))}, mesh_of(ONE), str(tmp_path))
    with refused("executables", str(tmp_path / "elsewhere"), "'f'", "'8 x cpu, jax ", "[]"):
        executables.load_all({"f": program(mesh)}, mesh, str(tmp_path / "elsewhere"))
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    with refused("executables", str(tmp_path), "'f'", "'8 x cpu, '"):
        executables.load_all({"f": program(mesh)}, mesh, str(tmp_path))
