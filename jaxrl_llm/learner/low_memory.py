"""Weights and moments that take less of the device: in bfloat16, or in the host's memory.

A step moves a bfloat16 by less than its neighbours lie apart. To the nearest, a weight of 0.02 stays where it is under
steps of less than 0.00003, and Adam's second moment, of which a step forgets a thousandth, never falls. Rounded up or
down by chance, they move as in float32 on average.

Owns: stochastic rounding, moments kept rounded or elsewhere. Does not know: which optimizer, what is learned.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Of the two roundings of a step, so that neither repeats the other's chances.
WEIGHTS, MOMENTS = 0, 1


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Float32 to bfloat16: one of the two neighbours of each value, whose mean over ``key`` is the value.

    A bfloat16 is the upper half of a float32: a random lower half is added, and what is carried is the rounding. Not a
    number or infinite stays so. Source: Gupta et al. 2015, arXiv:1502.02551, eq. of section 3.
    """
    chance = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    moved = jax.lax.bitcast_convert_type((bits + chance) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)


def _rounding(which: int, step: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """``stochastic_round`` with other chances at each call and ``step`` [] i32, the same on every mesh."""
    key, calls = jax.random.fold_in(jax.random.key(which), step), itertools.count()
    return lambda x: stochastic_round(x, jax.random.fold_in(key, next(calls)))


def apply_updates(params: Any, updates: Any, step: jax.Array) -> Any:
    """``params`` plus float32 ``updates``, in the dtype of ``params``: bfloat16 by stochastic rounding.

    Args:
        step: [] i32 number of this optimizer step.
    """
    if all(x.dtype == jnp.float32 for x in jax.tree.leaves(params)):
        return optax.apply_updates(params, updates)
    rounded = _rounding(WEIGHTS, step)
    return jax.tree.map(lambda p, u: rounded(p.astype(jnp.float32) + u), params, updates)


def rounded_moments(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer with its moments in bfloat16 between steps; it computes in float32."""
    moments = functools.partial(optax.tree_utils.tree_map_params, optimizer)

    def init(params: Any) -> Any:
        return moments(lambda x: x.astype(jnp.bfloat16), optimizer.init(params))

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, moments(lambda x: x.astype(jnp.float32), state), params)
        return updates, moments(_rounding(MOMENTS, optax.tree_utils.tree_get(state, "count")), state)

    return optax.GradientTransformation(init, update)


def offloaded(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same with its moments in host memory but for the time of a step; numbers and structure stay the same."""

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        move = lambda state, space: optax.tree_utils.tree_map_params(
            optimizer, lambda moment: jax.device_put(moment, space), state
        )
        updates, state = optimizer.update(gradient, move(state, jax.memory.Space.Device), params)
        return updates, move(state, jax.memory.Space.Host)

    return optax.GradientTransformation(optimizer.init, update)
