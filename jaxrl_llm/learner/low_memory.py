"""Optimizer state and weights that need less device memory.

    stochastic rounding     bfloat16 weights and moments
    8-bit moments           one byte for each value, one scale for each row
    shared moments          one second moment for many weights: AdamW-Subset-Norm and Adafactor
    offloaded moments       in host memory between steps

An optimizer step is often smaller than the distance between neighbouring bfloat16 values. With rounding to the nearest
value, a weight of 0.02 does not change under steps below 0.00003. Adam's second moment never falls, because a step
forgets only a thousandth of it. With stochastic rounding (up or down by chance), both move on average as in float32.

Owns: these roundings, moments and memory places. Does not know: which of them a run uses.
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

# Key numbers of the two roundings of a step. They differ from each other and from the streams of ``runtime.rng``.
WEIGHTS, MOMENTS = 1000, 1001


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 to one of the two neighbouring bfloat16 values. The mean over ``key`` is the float32 value.

    A bfloat16 is the upper half of a float32. A random lower half is added, and its carry rounds up. NaN and infinity
    stay the same. Source: Gupta et al. 2015, arXiv:1502.02551, eq. of section 3.
    """
    chance = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    moved = jax.lax.bitcast_convert_type((bits + chance) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)


def _keys(which: int, step: jax.Array) -> Iterator[jax.Array]:
    """Yield one key for each rounding at ``step`` [] i32. The keys are the same on every mesh."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), which), step)
    return (jax.random.fold_in(key, call) for call in itertools.count())


def _rounding(which: int, step: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return ``stochastic_round`` with a new key at each call."""
    keys = _keys(which, step)
    return lambda x: stochastic_round(x, next(keys))


def apply_updates(params: Any, updates: Any, step: jax.Array) -> Any:
    """Add float32 ``updates`` to ``params`` and keep the dtype of ``params``. Round bfloat16 stochastically.

    Args:
        step: [] i32 number of this optimizer step.
    """
    if all(x.dtype == jnp.float32 for x in jax.tree.leaves(params)):
        return optax.apply_updates(params, updates)
    rounded = _rounding(WEIGHTS, step)
    return jax.tree.map(lambda p, u: rounded(p.astype(jnp.float32) + u), params, updates)


def rounded_moments(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer like ``optimizer`` that stores its moments in bfloat16 and computes in float32."""
    moments = functools.partial(optax.tree_utils.tree_map_params, optimizer)

    def init(params: Any) -> Any:
        return moments(lambda x: x.astype(jnp.bfloat16), optimizer.init(params))

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, moments(lambda x: x.astype(jnp.float32), state), params)
        return updates, moments(_rounding(MOMENTS, optax.tree_utils.tree_get(state, "count")), state)

    return optax.GradientTransformation(init, update)


def own_dims(path: tuple[Any, ...], x: Any) -> tuple[tuple[int, ...], ...]:
    """Return the dimensions of a parameter or moment that form one tensor in files, without layers and experts.

    A matrix has two groups of dimensions: outputs and inputs. Heads belong to one of the groups. A vector or a
    convolution has one group. A parameter that no file has is one tensor: with two dimensions it is a matrix, whose
    last dimension is the inputs.
    """
    name, ndim = jax.tree_util.keystr(path, simple=True, separator="."), len(x.shape)
    groups = tuple((dim,) for dim in range(ndim))
    if name in layout.LAYOUT:
        groups = layout.stored_dims(name, ndim)[-len(layout.LAYOUT[name]) :]
    return groups if len(groups) == 2 else (tuple(itertools.chain.from_iterable(groups)),)


class ByteMoments(NamedTuple):
    """Adam's state with moments as codes of one byte, and a scale for each row: its largest value, [..., 1] f32.

    Moments of small tensors (``LEAST_BYTES``) stay float32. Their scale is 0 and unused.
    """

    adam: optax.ScaleByAdamState
    mu_scale: Any
    nu_scale: Any


# Largest code and power of each moment, as in ``to_bytes``. The second moment has twice the power, because squares span
# twice as many powers of ten.
FIRST, SECOND = (127, 2), (255, 4)
# Smallest number of elements for 8-bit moments; smallest number of outputs and of inputs for factored moments.
LEAST_BYTES, LEAST_FACTORED = 4096, 64


def to_bytes(x: jax.Array, key: jax.Array, kind: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Quantise float32 [..., D] to codes of one byte and scales [..., 1], with stochastic rounding.

        x = scale * sign(c) * (|c| / most) ** power

    Here c is the code, ``(most, power)`` is ``kind`` and scale is the row's largest absolute value. Neighbouring codes
    differ by 1.6 % at the largest value. They differ by 16 % at 1/100 of the largest value for first moments, and at
    1/10,000 for second moments. A second moment above 0 stays above 0, because the step divides by its root.

    Source: block-wise quantised Adam, Dettmers et al. 2021, arXiv:2110.02861, section 2. Differences:

        block       a row (last axis of a weight), so that codes are sharded as weights are
        codes       powers; the paper uses a table
        rounding    stochastic; otherwise the second moment would not fall
        embedding   8-bit moments too; the paper's embedding layer keeps 32 bits
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
    """Return the float32 values of the codes and scales that ``to_bytes`` returned."""
    most, power = kind
    code = code.astype(jnp.float32)
    return scale * jnp.sign(code) * (jnp.abs(code) / most) ** power


def byte_moments(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer like ``adam`` that stores each moment in one byte and computes in float32.

    Moments of small tensors stay float32. Source: bitsandbytes, whose 8-bit optimizers keep tensors of fewer than 4,096
    elements in 32 bits (``min_8bit_size``).
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

    def init(params: Any) -> ByteMoments:  # not packed: XLA would round the zeros while it compiles
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
    """Return Adam with one second moment for each row of a matrix. A row holds the weights of one output.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) mean_row(g^2)        step = m^ / (sqrt(v^) + eps)

    Vectors, convolutions and the embedding have a second moment for each weight.

    Source: AdamW-Subset-Norm, Nguyen and Nguyen 2024, arXiv:2411.07120, algorithm 1 and appendix on AdamW. The choice
    of weights with subsets follows the released code. Differences: v uses the mean of a subset's squares instead of the
    sum, so that the same learning rate gives steps as long as Adam's. Subsets are rows. In the paper subsets have their
    own size, or are sums along a matrix's shorter side.
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
    """Return Adafactor's update. Each matrix [O,I] and each vector is clipped to a root mean square of 1.

        R = d R + (1 - d) mean_i(g^2 + 1e-30)      C = d C + (1 - d) mean_o(g^2 + 1e-30)      d = 1 - t^-0.8
        u = g / sqrt(R C / mean(R))                step = u / max(1, sqrt(mean(u^2)))

    Source: Adafactor, Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5. Differences: the learning rate
    alone scales a step, not the size of the weights. Matrices with fewer outputs or inputs than ``LEAST_FACTORED`` have
    a second moment for each weight, as vectors have (optax: fewer than 128).
    """

    def shapes(path: tuple[Any, ...], x: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return the shape as [..., O, I] or [..., n], and the shapes of R, C and the whole second moment.

        (1,) marks a moment that the parameter does not have.
        """
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
    """Return an optimizer like ``optimizer`` that keeps its moments in host memory between steps.

    Values and tree structure stay the same.
    """

    optimizer = optax.with_extra_args_support(optimizer)

    def update(gradient: Any, state: Any, params: Any = None, **beside: Any) -> tuple[Any, Any]:
        move = lambda state, space: optax.tree_utils.tree_map_params(
            optimizer, lambda moment: jax.device_put(moment, space), state
        )
        updates, state = optimizer.update(gradient, move(state, jax.memory.Space.Device), params, **beside)
        return updates, move(state, jax.memory.Space.Host)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
