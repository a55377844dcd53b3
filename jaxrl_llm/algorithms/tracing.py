"""Inputs that a method's function reads, found by tracing the function. No function has to declare them.

Owns: the trace of surrogates and of draws. Does not know: which settings depend on the inputs that are read (config).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jaxrl_llm.algorithms.inputs import COLUMNS, Stored, Tokens
from jaxrl_llm.settings.use import Chosen

# Sizes of the traced arrays: rows, tokens per row, and rows per group.
SHAPE = (2, 3)
GROUP_SIZE = 2

_SHAPE_OF_FLOATS = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
_SHAPE_OF_INTEGERS = jax.ShapeDtypeStruct(SHAPE, jnp.int32)
_SHAPE_OF_ROWS = jax.ShapeDtypeStruct(SHAPE[:1], jnp.float32)


def reads_of_surrogate(surrogate: Chosen[Any]) -> frozenset[str]:
    """Return the names of the arrays of ``Tokens`` that the terms of a surrogate depend on."""
    fields = {
        "policy_logp": _SHAPE_OF_FLOATS,
        "old_logp": _SHAPE_OF_FLOATS,
        "behaviour_logp": _SHAPE_OF_FLOATS,
        "advantage": _SHAPE_OF_FLOATS,
        "reward": _SHAPE_OF_ROWS,
        "mask": jax.ShapeDtypeStruct(SHAPE, jnp.bool_),
        "age": _SHAPE_OF_INTEGERS,
        "iteration": jax.ShapeDtypeStruct((), jnp.int32),
    }
    columns = {}
    for name in sorted(surrogate.facts.columns):
        is_of_rows = name in COLUMNS and not COLUMNS[name].per_token
        columns[name] = _SHAPE_OF_ROWS if is_of_rows else _SHAPE_OF_FLOATS

    def call(arrays: Mapping[str, jax.Array]) -> Any:
        of_fields = {name: arrays[name] for name in fields}
        of_columns = {name: arrays[name] for name in columns}
        return surrogate(Tokens(**of_fields, group_size=GROUP_SIZE, columns=of_columns))

    return _read(surrogate, call, fields | columns)


def reads_of_draw(draw: Chosen[Any]) -> frozenset[str]:
    """Return the names of the arrays of ``Stored`` that the weights of a draw depend on."""
    arrays = {
        "priority": _SHAPE_OF_FLOATS,
        "age": _SHAPE_OF_INTEGERS,
        "uses": _SHAPE_OF_INTEGERS,
    }

    def call(arrays: Mapping[str, jax.Array]) -> Any:
        return draw(Stored(**arrays))

    return _read(draw, call, arrays)


_READ_BY_FUNCTION: dict[tuple[Callable[..., Any] | None, str], frozenset[str]] = {}


def _read(
    chosen: Chosen[Any],
    call: Callable[[Mapping[str, jax.Array]], Any],
    arrays: dict[str, jax.ShapeDtypeStruct],
) -> frozenset[str]:
    """Return the names of the arrays that ``call`` depends on; all names if it cannot be traced.

    A function that cannot be traced is refused later, when the run is assembled.
    """
    key = chosen.function, str(chosen)
    if key not in _READ_BY_FUNCTION:
        _READ_BY_FUNCTION[key] = _trace(call, arrays)
    return _READ_BY_FUNCTION[key]


def _trace(
    call: Callable[[Mapping[str, jax.Array]], Any],
    arrays: dict[str, jax.ShapeDtypeStruct],
) -> frozenset[str]:
    """Return the names of the arrays that the traced ``call`` depends on."""
    names = sorted(arrays)  # the order in which jax flattens a dictionary
    try:
        jaxpr = jax.make_jaxpr(call)(arrays).jaxpr
    except Exception:
        return frozenset(names)
    _, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return frozenset(name for name, used in zip(names, is_used, strict=True) if used)
