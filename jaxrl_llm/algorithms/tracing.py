"""Which of its inputs a method's function reads, found by tracing it, so that no function has to declare it.

Owns: the trace of surrogates and of draws. Does not know: which settings depend on what is read (config).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jaxrl_llm.algorithms.inputs import COLUMNS, Stored, Tokens
from jaxrl_llm.settings.use import Chosen

# Rows, tokens of a row, rows of a group.
SHAPE, GROUP_SIZE = (2, 3), 2


def reads_of_surrogate(surrogate: Chosen) -> frozenset[str]:
    """Return the names of the arrays of ``Tokens`` that the terms of a surrogate depend on."""
    number, whole = jax.ShapeDtypeStruct(SHAPE, jnp.float32), jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    of_rows = jax.ShapeDtypeStruct(SHAPE[:1], jnp.float32)
    arrays = {name: number for name in ("policy_logp", "old_logp", "behaviour_logp", "advantage")}
    arrays |= {
        "reward": of_rows,
        "mask": jax.ShapeDtypeStruct(SHAPE, jnp.bool_),
        "age": whole,
        "iteration": jax.ShapeDtypeStruct((), jnp.int32),
    }
    is_of_rows = lambda name: name in COLUMNS and not COLUMNS[name].per_token
    columns = {name: of_rows if is_of_rows(name) else number for name in sorted(surrogate.facts.columns)}

    def call(arrays: Mapping[str, jax.Array]) -> Any:
        fields = {name: value for name, value in arrays.items() if name not in columns}
        own = {name: arrays[name] for name in columns}
        return surrogate(Tokens(**fields, group_size=GROUP_SIZE, columns=own))

    return _read(surrogate.function, str(surrogate), call, arrays | columns)


def reads_of_draw(draw: Chosen) -> frozenset[str]:
    """Return the names of the arrays of ``Stored`` that the weights of a draw depend on."""
    whole = jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    arrays = {"priority": jax.ShapeDtypeStruct(SHAPE, jnp.float32), "age": whole, "uses": whole}
    return _read(draw.function, str(draw), lambda arrays: draw(Stored(**arrays)), arrays)


_KNOWN: dict[Any, frozenset[str]] = {}


def _read(
    function: Callable | None, settings: str, call: Callable[[dict[str, Any]], Any], arrays: dict[str, Any]
) -> frozenset[str]:
    """Return the names of the arrays that ``call`` depends on; all names if it cannot be traced.

    A function that cannot be traced is refused when the run is assembled, with a message of its own.
    """
    key = function, settings
    if key not in _KNOWN:
        _KNOWN[key] = _traced(call, arrays)
    return _KNOWN[key]


def _traced(call: Callable[[dict[str, Any]], Any], arrays: dict[str, Any]) -> frozenset[str]:
    names = sorted(arrays)  # the order in which jax flattens a dictionary
    try:
        jaxpr = jax.make_jaxpr(call)(arrays).jaxpr
    except Exception:
        return frozenset(names)
    _, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return frozenset(name for name, used in zip(names, is_used, strict=True) if used)
