"""Runs with the real loop and ghost programs, which return zeros of the right shapes and are never compiled.

They test the code around the programs: files, signals, settings of the loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
from support.building import ONE, mesh_of

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.reports import page
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_LENGTH


def haunt(monkeypatch):
    """Replace every program that ``train`` compiles from now on by a ghost, on one device."""
    one = mesh_of(ONE)
    compiled = lambda programs, mesh: {name: ghost(name, program) for name, program in programs.items()}
    monkeypatch.setattr(train_module, "compile_all", compiled)
    monkeypatch.setattr(train_module, "check_memory", lambda *_, **__: None)
    monkeypatch.setattr(train_module, "memory_table", lambda *_: "")
    monkeypatch.setattr(train_module.sharding, "make_mesh", lambda *_: one)
    monkeypatch.setattr(page, "picture", lambda *_, **__: "<svg></svg>")  # a second for each report
    monkeypatch.setattr(Model, "init", lambda self, key, mesh: zeros(self.abstract_params(mesh)))


GHOSTS = {}  # what they give: tracing the update takes a second, and to put a thousand arrays a tenth of one


def zeros(abstract):
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)


def ghost(name, program):
    """A stand-in for a compiled program: zeros of the right shapes; every completion stops at once."""
    results = jax.tree.structure(program.out_shardings)  # which of them there are, its arguments need not tell
    key = name, str(jax.tree.map(lambda x: (x.shape, x.dtype), program.args)), results

    def call(*_):
        if key not in GHOSTS:
            mesh = mesh_of(ONE)
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                out = jax.eval_shape(program.fn, *program.args)
            whole = sharding.replicated(mesh, 0)
            GHOSTS[key] = zeros(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), out))
        out = GHOSTS[key]
        if name.endswith("decode"):
            state, (reasons, lengths) = out
            return state, (jnp.full_like(reasons, STOP_LENGTH), lengths)
        return out

    return call
