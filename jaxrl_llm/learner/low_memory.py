"""Weights and moments that take less of the device: in bfloat16 or a byte, one for many weights, or in host memory.

A step moves a bfloat16 by less than its neighbours lie apart. To the nearest, a weight of 0.02 stays where it is under
steps of less than 0.00003, and Adam's second moment, of which a step forgets a thousandth, never falls. Rounded up or
down by chance, they move as in float32 on average.

Owns: stochastic rounding, moments kept rounded or elsewhere, one for many weights. Does not know: which a run has.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.models.files import layout

# Of the two roundings of a step, so that neither repeats the other's chances, nor those of a stream (``runtime.rng``).
WEIGHTS, MOMENTS = 1000, 1001


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Float32 to bfloat16: one of the two neighbours of each value, whose mean over ``key`` is the value.

    A bfloat16 is the upper half of a float32: a random lower half is added, and what is carried is the rounding. Not a
    number or infinite stays so. Source: Gupta et al. 2015, arXiv:1502.02551, eq. of section 3.
    """
    chance = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    moved = jax.lax.bitcast_convert_type((bits + chance) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)


def _keys(which: int, step: jax.Array) -> Iterator[jax.Array]:
    """Of the roundings at ``step`` [] i32, one after the other, the same on every mesh."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), which), step)
    return (jax.random.fold_in(key, call) for call in itertools.count())


def _rounding(which: int, step: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """``stochastic_round`` with other chances at each call."""
    keys = _keys(which, step)
    return lambda x: stochastic_round(x, next(keys))


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


def own_dims(path: tuple[Any, ...], x: Any) -> tuple[tuple[int, ...], ...]:
    """A parameter's, or its moment's, dimensions without those that number layers and experts: of one tensor in files.

    Two groups are a matrix's, outputs and inputs, with heads folded into one of them; one is a vector's, or a
    convolution's. Parameters that no file has are one tensor, its last dimension the inputs.
    """
    name, ndim = jax.tree_util.keystr(path, simple=True, separator="."), len(x.shape)
    groups = tuple((dim,) for dim in range(ndim))
    if name in layout.LAYOUT:
        groups = layout.stored_dims(name, ndim)[-len(layout.LAYOUT[name]) :]
    return groups if len(groups) == 2 else (tuple(itertools.chain.from_iterable(groups)),)


class ByteMoments(NamedTuple):
    """Adam's state with codes of a byte for moments, and the largest value of each code's row: [..., 1] f32.

    Moments of small tensors (``LEAST_BYTES``) are float32, and nothing is the largest.
    """

    adam: optax.ScaleByAdamState
    mu_scale: Any
    nu_scale: Any


# The largest code of a moment, and the power of a code's share of it that is the value's share of its row's largest. A
# moment of squares spans twice as many powers of ten.
FIRST, SECOND = (127, 2), (255, 4)
# Of a tensor of fewer elements moments are not rounded; a matrix of fewer outputs or inputs is not factored.
LEAST_BYTES, LEAST_FACTORED = 4096, 64


def to_bytes(x: jax.Array, key: jax.Array, kind: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Float32 [..., D] to codes of a byte and their rows' largest values [..., 1], rounded up or down by chance.

        x = scale * sign(c) * (|c| / most) ** power

    Codes lie 1.6 % apart at a row's largest value and 16 % at a hundredth of it, of second moments at a ten-thousandth.
    A second moment above 0 stays above 0, because it divides.

    Source: block-wise quantised Adam, Dettmers et al. 2021, arXiv:2110.02861, section 2. Differs: a block is a row (the
    last axis of a weight), so that codes are split over devices as weights are; codes are powers, where the paper has a
    table; rounding is stochastic, without which the second moment would not fall; and moments of the embedding, which
    the paper's embedding layer keeps in 32 bits, are bytes too.
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
    """The same Adam with its moments in a byte each between steps, those of small tensors as they are.

    It computes in float32. Source: bitsandbytes, whose 8-bit optimizers leave tensors of fewer than 4,096 elements in
    32 bits (``min_8bit_size``).
    """

    def is_small(path: tuple[Any, ...], x: Any) -> bool:
        return math.prod(x.shape[dim] for group in own_dims(path, x) for dim in group) < LEAST_BYTES

    def pack(state: optax.ScaleByAdamState, step: jax.Array) -> ByteMoments:
        keys = _keys(MOMENTS, step)
        no_scale = lambda x: jnp.zeros((*x.shape[:-1], 1), jnp.float32)
        rounded = lambda x, kind: to_bytes(x, next(keys), kind)
        packed = []
        for tree, kind in ((state.mu, FIRST), (state.nu, SECOND)):
            leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
            both = [(x, no_scale(x)) if is_small(path, x) else rounded(x, kind) for path, x in leaves]
            packed += [structure.unflatten(pair[part] for pair in both) for part in (0, 1)]
        codes, scale, nu_codes, nu_scale = packed
        return ByteMoments(state._replace(mu=codes, nu=nu_codes), scale, nu_scale)

    def init(params: Any) -> ByteMoments:  # not packed: XLA would work out, while it compiles, how 0 is rounded
        state = adam.init(params)
        code = lambda path, x, dtype: jnp.zeros(x.shape, jnp.float32 if is_small(path, x) else dtype)
        codes = lambda tree, dtype: jax.tree_util.tree_map_with_path(functools.partial(code, dtype=dtype), tree)
        scales = lambda tree: jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], 1), jnp.float32), tree)
        packed = state._replace(mu=codes(state.mu, jnp.int8), nu=codes(state.nu, jnp.uint8))
        return ByteMoments(packed, scales(state.mu), scales(state.nu))

    def update(gradient: Any, state: ByteMoments, params: Any = None) -> tuple[Any, ByteMoments]:
        value = lambda kind: lambda x, scale: x if x.dtype == jnp.float32 else from_bytes(x, scale, kind)
        unpack = lambda codes, scale, kind: jax.tree.map(value(kind), codes, scale)
        mu = unpack(state.adam.mu, state.mu_scale, FIRST)
        nu = unpack(state.adam.nu, state.nu_scale, SECOND)
        updates, after = adam.update(gradient, state.adam._replace(mu=mu, nu=nu), params)
        return updates, pack(after, after.count)

    return optax.GradientTransformation(init, update)


def scale_by_subset_norm(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with one second moment for each row of a matrix, the weights of an output.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) mean_row(g^2)        step = m^ / (sqrt(v^) + eps)

    Vectors, convolutions and the embedding have one for each weight.

    Source: AdamW-Subset-Norm, Nguyen and Nguyen 2024, arXiv:2411.07120, algorithm 1 and appendix on AdamW; which
    weights have subsets, its released code. Differs: the mean of a subset's squares in place of their sum, so that the
    rate is as long as Adam's; subsets are rows, where there they have a size of their own or are sums along a matrix's
    shorter side.
    """

    def inputs(path: tuple[Any, ...], x: Any) -> tuple[int, ...]:
        is_embedding = jax.tree_util.keystr(path, simple=True) == "embedding"
        return () if is_embedding or len(own := own_dims(path, x)) < 2 else own[1]

    def init(params: Any) -> optax.ScaleByAdamState:
        def rows(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            one = inputs(path, x)
            return jnp.zeros([1 if dim in one else size for dim, size in enumerate(x.shape)], x.dtype)

        nu = jax.tree_util.tree_map_with_path(rows, params)
        return optax.ScaleByAdamState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), nu)

    def update(gradient: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, gradient, state.mu)
        square = lambda path, g: jnp.mean(jnp.square(g), axis=inputs(path, g), keepdims=True)
        squares = jax.tree_util.tree_map_with_path(square, gradient)
        nu = jax.tree.map(lambda g2, v: b2 * v + (1 - b2) * g2, squares, state.nu)
        first, second = 1 - b1**count, 1 - b2**count
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_factored_rms() -> optax.GradientTransformation:
    """Adafactor's update of each matrix [O,I] and each vector by itself, clipped to a root mean square of 1.

        R = d R + (1 - d) mean_i(g^2 + 1e-30)      C = d C + (1 - d) mean_o(g^2 + 1e-30)      d = 1 - t^-0.8
        u = g / sqrt(R C / mean(R))                step = u / max(1, sqrt(mean(u^2)))

    Source: Adafactor, Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5. Differs: steps are the rate long,
    not as long as weights are large; matrices of fewer outputs or inputs than ``LEAST_FACTORED`` have a second moment
    for each weight, as vectors have (optax: than 128).
    """

    def shapes(path: tuple[Any, ...], x: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """As [..., O, I] or [..., n], and its R, C and whole second moment: (1,) is what it has not."""
        own, none = own_dims(path, x), (1,)
        sizes = [math.prod(x.shape[dim] for dim in group) for group in own]
        stacked = x.shape[: x.ndim - sum(map(len, own))]
        if len(own) == 2 and min(sizes) >= LEAST_FACTORED:
            return (*stacked, *sizes), ((*stacked, sizes[0]), (*stacked, sizes[1]), none)
        return (*stacked, *sizes), (none, none, x.shape)

    def init(params: Any) -> optax.FactoredState:
        kept = lambda part: lambda path, x: jnp.zeros(shapes(path, x)[1][part], x.dtype)
        trees = (jax.tree_util.tree_map_with_path(kept(part), params) for part in range(3))
        return optax.FactoredState(jnp.int32(0), *trees)

    def update(gradient: Any, state: optax.FactoredState, params: Any = None) -> tuple[Any, optax.FactoredState]:
        count = state.count + 1
        decay = 1 - count.astype(jnp.float32) ** -0.8

        def one(path: tuple[Any, ...], g: jax.Array, *kept: jax.Array) -> tuple[jax.Array, ...]:
            shape, (of_rows, *_) = shapes(path, g)
            u, moved = g.reshape(shape), lambda old, new: decay * old + (1 - decay) * new
            rows, columns, whole = kept
            square = jnp.square(u) + 1e-30
            if of_rows == shape[:-1]:
                rows, columns = moved(rows, jnp.mean(square, axis=-1)), moved(columns, jnp.mean(square, axis=-2))
                share = rows / jnp.mean(rows, axis=-1, keepdims=True)
                u *= jax.lax.rsqrt(share)[..., None] * jax.lax.rsqrt(columns)[..., None, :]
            else:
                whole = moved(whole, square.reshape(g.shape))
                u *= jax.lax.rsqrt(whole).reshape(shape)
            own = tuple(range(-len(own_dims(path, g)), 0))
            u /= jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(u), axis=own, keepdims=True)))
            return u.reshape(g.shape), rows, columns, whole

        leaves, structure = jax.tree_util.tree_flatten_with_path(gradient)
        trees = [structure.flatten_up_to(tree) for tree in state[1:]]
        made = [one(path, g, *kept) for (path, g), *kept in zip(leaves, *trees, strict=True)]
        updates, *moments = (structure.unflatten(part) for part in zip(*made, strict=True))
        return updates, optax.FactoredState(count, *moments)

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
