"""Weights and moments that take less of the device: in bfloat16 or a byte, one for many weights, or in host memory.

A step moves a bfloat16 by less than its neighbours lie apart. To the nearest, a weight of 0.02 stays where it is under
steps of less than 0.00003, and Adam's second moment, of which a step forgets a thousandth, never falls. Rounded up or
down by chance, they move as in float32 on average.

Owns: stochastic rounding, moments kept rounded or elsewhere. Does not know: which optimizer, what is learned.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class ByteMoments(NamedTuple):
    """Adam's state with codes of a byte for moments, and the largest value of each code's row: [..., 1] f32."""

    adam: optax.ScaleByAdamState
    mu_scale: Any
    nu_scale: Any


# The largest code of a moment, and the power of a code's share of it that is the value's share of its row's largest. A
# moment of squares spans twice as many powers of ten.
FIRST, SECOND = (127, 2), (255, 4)


def to_bytes(x: jax.Array, key: jax.Array, kind: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Float32 [..., D] to codes of a byte and their rows' largest values [..., 1], rounded up or down by chance.

        x = scale * sign(c) * (|c| / most) ** power

    Codes lie 1.6 % apart at a row's largest value and 16 % at a hundredth of it, of second moments at a ten-thousandth.
    A second moment above 0 stays above 0, because it divides.

    Source: block-wise quantised Adam, Dettmers et al. 2021, arXiv:2110.02861, section 2. Differs: a block is a row (the
    last axis of a weight), so that codes are split over devices as weights are; codes are powers, where the paper has a
    table; and rounding is stochastic, without which the second moment would not fall.
    """
    most, power = kind
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    share = jnp.abs(x) / jnp.where(scale > 0, scale, 1.0)
    value = lambda code: (code / most) ** power
    below = jnp.minimum(jnp.floor(most * share ** (1 / power)), most - 1)
    chance = (share - value(below)) / (value(below + 1) - value(below))
    code = below + (jax.random.uniform(key, x.shape) < chance)
    if kind == SECOND:
        return jnp.where(x > 0, jnp.maximum(code, 1), 0).astype(jnp.uint8), scale
    return (jnp.sign(x) * code).astype(jnp.int8), scale


def from_bytes(code: jax.Array, scale: jax.Array, kind: tuple[int, int]) -> jax.Array:
    """What ``to_bytes`` has written, in float32."""
    most, power = kind
    code = code.astype(jnp.float32)
    return scale * jnp.sign(code) * (jnp.abs(code) / most) ** power


def byte_moments(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same Adam with its moments in a byte each between steps; it computes in float32."""

    def pack(state: optax.ScaleByAdamState, step: jax.Array) -> ByteMoments:
        key, calls = jax.random.fold_in(jax.random.key(MOMENTS), step), itertools.count()
        packed = []
        for tree, kind in ((state.mu, FIRST), (state.nu, SECOND)):
            leaves, structure = jax.tree.flatten(tree)
            both = [to_bytes(x, jax.random.fold_in(key, next(calls)), kind) for x in leaves]
            packed += [structure.unflatten(pair[part] for pair in both) for part in (0, 1)]
        codes, scale, nu_codes, nu_scale = packed
        return ByteMoments(state._replace(mu=codes, nu=nu_codes), scale, nu_scale)

    def init(params: Any) -> ByteMoments:  # not packed: XLA would work out, while it compiles, how 0 is rounded
        state = adam.init(params)
        codes = lambda tree, dtype: jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), tree)
        scales = lambda tree: jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], 1), jnp.float32), tree)
        packed = state._replace(mu=codes(state.mu, jnp.int8), nu=codes(state.nu, jnp.uint8))
        return ByteMoments(packed, scales(state.mu), scales(state.nu))

    def update(gradient: Any, state: ByteMoments, params: Any = None) -> tuple[Any, ByteMoments]:
        unpack = lambda codes, scale, kind: jax.tree.map(functools.partial(from_bytes, kind=kind), codes, scale)
        mu = unpack(state.adam.mu, state.mu_scale, FIRST)
        nu = unpack(state.adam.nu, state.nu_scale, SECOND)
        updates, after = adam.update(gradient, state.adam._replace(mu=mu, nu=nu), params)
        return updates, pack(after, after.count)

    return optax.GradientTransformation(init, update)


def scale_by_subset_norm(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with one second moment for each row of a weight (its last axis).

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) mean_row(g^2)        step = m^ / (sqrt(v^) + eps)

    Source: AdamW-Subset-Norm, Nguyen and Nguyen 2024, arXiv:2411.07120, algorithm 1 and appendix on AdamW. Differs: the
    mean of a subset's squares in place of their sum, so that the rate is as long as Adam's; subsets are rows.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        rows = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], 1), x.dtype), params)
        return optax.ScaleByAdamState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), rows)

    def update(gradient: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, gradient, state.mu)
        square = lambda g: jnp.mean(jnp.square(g), axis=-1, keepdims=True)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * square(g), gradient, state.nu)
        first, second = 1 - b1**count, 1 - b2**count
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def offloaded(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same with its moments in host memory but for the time of a step; numbers and structure stay the same."""

    optimizer = optax.with_extra_args_support(optimizer)

    def update(gradient: Any, state: Any, params: Any = None, **beside: Any) -> tuple[Any, Any]:
        move = lambda state, space: optax.tree_utils.tree_map_params(
            optimizer, lambda moment: jax.device_put(moment, space), state
        )
        updates, state = optimizer.update(gradient, move(state, jax.memory.Space.Device), params, **beside)
        return updates, move(state, jax.memory.Space.Host)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
