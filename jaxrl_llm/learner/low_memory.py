"""Optimizer state and weights that need less device memory.

    stochastic rounding     bfloat16 weights and moments
    8-bit moments           one byte for each value, one scale for each row
    shared moments          one second moment for many weights: AdamW-Subset-Norm and Adafactor
    offloaded moments       in host memory between steps

An optimizer step is often smaller than the distance between neighbouring bfloat16 values. With rounding to the nearest
value, a weight of 0.02 does not change under steps below 0.00003. Adam's second moment never falls, because a step
removes only a thousandth of its value. With stochastic rounding (up or down by chance), both move on average as in
float32.

Owns: these roundings and moments, and where moments are stored. Does not know: which of them a run uses.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.models.files import layout

# Numbers that make the random keys of the two roundings of a step differ from each other and from the streams of
# ``runtime.rng``.
WEIGHTS = 1000
MOMENTS = 1001

UPPER_HALF = 0xFFFF0000  # bits of a float32 that a bfloat16 has


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 to one of the two neighbouring bfloat16 values. The mean over ``key`` is the float32 value.

    A bfloat16 is the upper 16 bits of a float32. The function adds 16 random bits to the lower half; a carry into the
    upper half rounds up. NaN and infinity stay the same. Source: Gupta et al. 2015, arXiv:1502.02551, eq. of section 3.
    """
    random_lower_half = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded_bits = (bits + random_lower_half) & jnp.uint32(UPPER_HALF)
    rounded = jax.lax.bitcast_convert_type(rounded_bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _keys(number: int, step: jax.Array) -> Iterator[jax.Array]:
    """Yield one key for each rounding at ``step`` [] i32. The keys are the same on every mesh.

    Args:
        number: ``WEIGHTS`` or ``MOMENTS``.
    """
    key_of_rounding = jax.random.fold_in(jax.random.key(0), number)
    key_of_step = jax.random.fold_in(key_of_rounding, step)
    for call in itertools.count():
        yield jax.random.fold_in(key_of_step, call)


def _rounding(number: int, step: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return ``stochastic_round`` with a new key at each call."""
    keys = _keys(number, step)

    def rounded(x: jax.Array) -> jax.Array:
        return stochastic_round(x, next(keys))

    return rounded


def apply_updates(params: Any, updates: Any, step: jax.Array) -> Any:
    """Add float32 ``updates`` to ``params`` and keep the dtype of ``params``. Round bfloat16 stochastically.

    Args:
        step: [] i32 number of this optimizer step.
    """
    if all(x.dtype == jnp.float32 for x in jax.tree.leaves(params)):
        return optax.apply_updates(params, updates)
    rounded = _rounding(WEIGHTS, step)

    def add(param: jax.Array, update: jax.Array) -> jax.Array:
        return rounded(param.astype(jnp.float32) + update)

    return jax.tree.map(add, params, updates)


def rounded_moments(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return an optimizer like ``optimizer`` that stores its moments in bfloat16 and computes in float32."""
    map_moments = functools.partial(optax.tree_utils.tree_map_params, optimizer.init)

    def init(params: optax.Params) -> optax.OptState:
        return map_moments(lambda x: x.astype(jnp.bfloat16), optimizer.init(params))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        exact = map_moments(lambda x: x.astype(jnp.float32), state)
        updates, exact = optimizer.update(updates, exact, params)
        step = optax.tree_utils.tree_get(exact, "count")
        return updates, map_moments(_rounding(MOMENTS, step), exact)

    return optax.GradientTransformation(init, update)


class HasShape(Protocol):
    """An array, or the shape and dtype of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


KeyPath = tuple[Any, ...]  # path of a leaf in a pytree, as jax.tree_util gives it


def own_dims(path: KeyPath, x: HasShape) -> tuple[tuple[int, ...], ...]:
    """Return the dimensions of a parameter or moment that form one tensor in files, without layers and experts.

    A matrix has two groups of dimensions: outputs and inputs. Heads belong to one of the groups. A vector or a
    convolution has one group. A parameter that files do not contain is one tensor. With two dimensions it is a matrix,
    and the last dimension is the inputs.
    """
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    ndim = len(x.shape)
    groups = tuple((dim,) for dim in range(ndim))
    if name in layout.LAYOUT:
        num_own_groups = len(layout.LAYOUT[name])
        groups = layout.stored_dims(name, ndim)[-num_own_groups:]
    if len(groups) == 2:
        return groups
    all_dims = tuple(itertools.chain.from_iterable(groups))
    return (all_dims,)


class ByteMoments(NamedTuple):
    """Adam's state with moments as codes of one byte, and a scale for each row: its largest value, [..., 1] f32.

    Moments of small tensors (``LEAST_BYTES``) stay float32. Their scale is 0 and unused.
    """

    adam: optax.ScaleByAdamState
    mu_scale: Any
    nu_scale: Any


# Largest code and power of each moment, as in ``to_bytes``. The second moment has twice the power, because squares span
# twice as many powers of ten.
FIRST = (127, 2)
SECOND = (255, 4)

LEAST_BYTES = 4096  # smallest number of elements of a tensor with 8-bit moments
LEAST_FACTORED = 64  # smallest number of outputs, and of inputs, of a matrix with factored moments


def to_bytes(
    x: jax.Array,
    key: jax.Array,
    kind: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """Quantise float32 [..., D] to codes of one byte and scales [..., 1], with stochastic rounding.

        x = scale * sign(c) * (|c| / largest) ** power

    Here c is the code, ``(largest, power)`` is ``kind`` and scale is the row's largest absolute value. Neighbouring
    codes differ by 1.6 % at the largest value. They differ by 16 % at 1/100 of the largest value for first moments, and
    at 1/10,000 for second moments. A second moment above 0 stays above 0, because the step divides by its root.

    Source: block-wise quantised Adam, Dettmers et al. 2021, arXiv:2110.02861, section 2. Differences:

        block       a row (last axis of a weight), so that codes are sharded as weights are
        codes       powers; the paper uses a table
        rounding    stochastic; otherwise the second moment would not fall
        embedding   8-bit moments too; the paper's embedding layer keeps 32 bits
    """
    largest, power = kind
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    share = jnp.abs(x) / jnp.where(scale > 0, scale, 1.0)

    def value(code: jax.Array) -> jax.Array:
        return (code / largest) ** power

    exact_code = largest * share ** (1 / power)
    below = jnp.minimum(jnp.floor(exact_code), largest - 1)
    chance = (share - value(below)) / (value(below + 1) - value(below))
    goes_up = jax.random.uniform(key, x.shape) < chance
    code = below + goes_up
    if kind == SECOND:
        positive_code = jnp.where(x > 0, jnp.maximum(code, 1), 0)
        return positive_code.astype(jnp.uint8), scale
    signed_code = jnp.sign(x) * code
    return signed_code.astype(jnp.int8), scale


def from_bytes(code: jax.Array, scale: jax.Array, kind: tuple[int, int]) -> jax.Array:
    """Return the float32 values of the codes and scales that ``to_bytes`` returned."""
    largest, power = kind
    code = code.astype(jnp.float32)
    share = (jnp.abs(code) / largest) ** power
    return scale * jnp.sign(code) * share


def byte_moments(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer like ``adam`` that stores each moment in one byte and computes in float32.

    Moments of small tensors stay float32. Source: bitsandbytes, whose 8-bit optimizers keep tensors of fewer than 4,096
    elements in 32 bits (``min_8bit_size``).
    """

    def init(params: optax.Params) -> ByteMoments:
        # Zeros of the final dtypes. If they were computed by rounding, XLA would compute them while it compiles.
        state = _adam_state(adam.init(params))
        mu_codes = _zero_codes(state.mu, jnp.int8)
        nu_codes = _zero_codes(state.nu, jnp.uint8)
        return ByteMoments(
            adam=state._replace(mu=mu_codes, nu=nu_codes),
            mu_scale=jax.tree.map(_zero_scale, state.mu),
            nu_scale=jax.tree.map(_zero_scale, state.nu),
        )

    def update(
        updates: optax.Updates,
        state: ByteMoments,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ByteMoments]:
        mu = _unpacked(state.adam.mu, state.mu_scale, FIRST)
        nu = _unpacked(state.adam.nu, state.nu_scale, SECOND)
        exact = state.adam._replace(mu=mu, nu=nu)
        updates, new_state = adam.update(updates, exact, params)
        return updates, _packed(_adam_state(new_state))

    return optax.GradientTransformation(init, update)  # pyrefly: ignore[bad-argument-type], its state is ByteMoments


def _adam_state(state: optax.OptState) -> optax.ScaleByAdamState:
    """Return ``state`` with its type, which optax does not declare."""
    assert isinstance(state, optax.ScaleByAdamState)
    return state


def _is_small(path: KeyPath, x: HasShape) -> bool:
    """Return whether the moments of a tensor stay float32."""
    dims = itertools.chain.from_iterable(own_dims(path, x))
    size = math.prod(x.shape[dim] for dim in dims)
    return size < LEAST_BYTES


def _zero_codes(moments: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Return codes of 0 for a tree of moments, float32 for small tensors."""

    def zeros(path: KeyPath, x: jax.Array) -> jax.Array:
        if _is_small(path, x):
            return jnp.zeros(x.shape, jnp.float32)
        return jnp.zeros(x.shape, dtype)

    return jax.tree_util.tree_map_with_path(zeros, moments)


def _zero_scale(x: jax.Array) -> jax.Array:
    """Return scales of 0 for moments [..., D], [..., 1] f32."""
    *row_dims, _ = x.shape
    return jnp.zeros((*row_dims, 1), jnp.float32)


def _unpacked(codes: Any, scales: Any, kind: tuple[int, int]) -> Any:
    """Return the float32 moments of a tree of codes and scales."""

    def value(code: jax.Array, scale: jax.Array) -> jax.Array:
        if code.dtype == jnp.float32:
            return code
        return from_bytes(code, scale, kind)

    return jax.tree.map(value, codes, scales)


def _packed(state: optax.ScaleByAdamState) -> ByteMoments:
    """Return Adam's state after a step with moments of one byte."""
    keys = _keys(MOMENTS, jnp.asarray(state.count))
    mu, mu_scale = _packed_moments(state.mu, FIRST, keys)
    nu, nu_scale = _packed_moments(state.nu, SECOND, keys)
    return ByteMoments(state._replace(mu=mu, nu=nu), mu_scale, nu_scale)


def _packed_moments(
    moments: Any,
    kind: tuple[int, int],
    keys: Iterator[jax.Array],
) -> tuple[Any, Any]:
    """Return the codes and the scales of a tree of moments."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(moments)
    codes = []
    scales = []
    for path, x in leaves:
        if _is_small(path, x):
            codes.append(x)
            scales.append(_zero_scale(x))
            continue
        code, scale = to_bytes(x, next(keys), kind)
        codes.append(code)
        scales.append(scale)
    return structure.unflatten(codes), structure.unflatten(scales)


def scale_by_subset_norm(
    b1: float,
    b2: float,
    eps: float,
) -> optax.GradientTransformation:
    """Return Adam with one second moment for each row of a matrix. A row holds the weights of one output.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) mean_row(g^2)        step = m^ / (sqrt(v^) + eps)

    Vectors, convolutions and the embedding have a second moment for each weight.

    Source: AdamW-Subset-Norm, Nguyen and Nguyen 2024, arXiv:2411.07120, algorithm 1 and appendix on AdamW. The choice
    of weights with subsets follows the released code. Differences: v uses the mean of a subset's squares instead of the
    sum, so that the same learning rate gives steps as long as Adam's. Subsets are rows. In the paper subsets have their
    own size, or are sums along a matrix's shorter side.
    """

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        mu = jax.tree.map(jnp.zeros_like, params)
        nu = jax.tree_util.tree_map_with_path(_row_zeros, params)
        return optax.ScaleByAdamState(jnp.int32(0), mu, nu)

    def update(
        updates: optax.Updates,
        state: optax.ScaleByAdamState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        del params
        gradient = updates
        count = state.count + 1

        mu_bias = 1 - b1**count
        nu_bias = 1 - b2**count

        def first_moment(g: jax.Array, m: jax.Array) -> jax.Array:
            return b1 * m + (1 - b1) * g

        def second_moment(g2: jax.Array, v: jax.Array) -> jax.Array:
            return b2 * v + (1 - b2) * g2

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v / nu_bias)
            return m / mu_bias / (root + eps)

        mu = jax.tree.map(first_moment, gradient, state.mu)
        squares = jax.tree_util.tree_map_with_path(_row_mean_square, gradient)
        nu = jax.tree.map(second_moment, squares, state.nu)
        steps = jax.tree.map(step, mu, nu)
        return steps, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)  # pyrefly: ignore[bad-argument-type], its state is Adam's


def _row_zeros(path: KeyPath, x: jax.Array) -> jax.Array:
    """Return one 0 for each row of a matrix, or for each weight of another parameter."""
    shape = list(x.shape)
    for dim in _input_dims(path, x):
        shape[dim] = 1
    return jnp.zeros(shape, x.dtype)


def _row_mean_square(path: KeyPath, g: jax.Array) -> jax.Array:
    """Return the mean of the squares of each row of a matrix, or the squares of another parameter."""
    return jnp.mean(jnp.square(g), axis=_input_dims(path, g), keepdims=True)


def _input_dims(path: KeyPath, x: HasShape) -> tuple[int, ...]:
    """Return the dimensions of a matrix's inputs; () for the embedding, vectors and convolutions."""
    if jax.tree_util.keystr(path, simple=True) == "embedding":
        return ()
    groups = own_dims(path, x)
    if len(groups) < 2:
        return ()
    _, inputs = groups
    return inputs


def scale_by_factored_rms() -> optax.GradientTransformation:
    """Return Adafactor's update. Each matrix [O,I] and each vector is clipped to a root mean square of 1.

        R = d R + (1 - d) mean_i(g^2 + 1e-30)      C = d C + (1 - d) mean_o(g^2 + 1e-30)      d = 1 - t^-0.8
        u = g / sqrt(R C / mean(R))                step = u / max(1, sqrt(mean(u^2)))

    Source: Adafactor, Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5. Differences: the learning rate
    alone scales a step, not the size of the weights. Matrices with fewer outputs or inputs than ``LEAST_FACTORED`` have
    a second moment for each weight, as vectors have (optax: fewer than 128).
    """

    def init(params: optax.Params) -> optax.FactoredState:
        def zeros(part: str) -> Any:
            def zeros_of(path: KeyPath, x: jax.Array) -> jax.Array:
                shape = getattr(_factored_shapes(path, x), part)
                return jnp.zeros(shape, x.dtype)

            return jax.tree_util.tree_map_with_path(zeros_of, params)

        return optax.FactoredState(jnp.int32(0), zeros("rows"), zeros("columns"), zeros("whole"))

    def update(
        updates: optax.Updates,
        state: optax.FactoredState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.FactoredState]:
        del params
        count = state.count + 1
        decay = 1 - jnp.asarray(count).astype(jnp.float32) ** -0.8
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        rows = structure.flatten_up_to(state.v_row)
        columns = structure.flatten_up_to(state.v_col)
        whole = structure.flatten_up_to(state.v)
        results = []
        for (path, g), R, C, v in zip(leaves, rows, columns, whole, strict=True):
            results.append(_factored_step(path, g, R, C, v, decay=decay))
        by_part = [structure.unflatten(part) for part in zip(*results, strict=True)]
        steps, *moments = by_part
        return steps, optax.FactoredState(count, *moments)

    return optax.GradientTransformation(init, update)  # pyrefly: ignore[bad-argument-type], its state is Adafactor's


class FactoredShapes(NamedTuple):
    """Shapes for a parameter. (1,) marks a moment that the parameter does not have."""

    matrix: tuple[int, ...]  # shape of the parameter as [..., O, I] or [..., n]
    rows: tuple[int, ...]  # shape of R
    columns: tuple[int, ...]  # shape of C
    whole: tuple[int, ...]  # shape of the second moments, if each weight has its own


def _factored_shapes(path: KeyPath, x: HasShape) -> FactoredShapes:
    """Return the shapes of a parameter's moments. Small matrices and vectors have no R and no C."""
    groups = own_dims(path, x)
    sizes = []
    for group in groups:
        sizes.append(math.prod(x.shape[dim] for dim in group))
    num_own_dims = sum(map(len, groups))
    num_stacked_dims = len(x.shape) - num_own_dims
    stacked = x.shape[:num_stacked_dims]
    matrix = (*stacked, *sizes)
    absent = (1,)
    if len(sizes) < 2 or min(sizes) < LEAST_FACTORED:
        return FactoredShapes(matrix, rows=absent, columns=absent, whole=x.shape)
    outputs, inputs = sizes
    return FactoredShapes(matrix, rows=(*stacked, outputs), columns=(*stacked, inputs), whole=absent)


def _factored_step(
    path: KeyPath,
    g: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    whole: jax.Array,
    *,
    decay: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return Adafactor's step of one parameter with gradient ``g``, and the new R, C and second moment."""
    shapes = _factored_shapes(path, g)
    u = g.reshape(shapes.matrix)

    def average(old: jax.Array, new: jax.Array) -> jax.Array:
        return decay * old + (1 - decay) * new

    square = jnp.square(u) + 1e-30
    if shapes.rows == shapes.matrix[:-1]:
        rows = average(rows, jnp.mean(square, axis=-1))
        columns = average(columns, jnp.mean(square, axis=-2))
        share_of_row = rows / jnp.mean(rows, axis=-1, keepdims=True)
        row_factor = jax.lax.rsqrt(share_of_row)[..., None]
        column_factor = jax.lax.rsqrt(columns)[..., None, :]
        u *= row_factor * column_factor
    else:
        whole = average(whole, square.reshape(g.shape))
        u *= jax.lax.rsqrt(whole).reshape(shapes.matrix)
    num_groups = len(own_dims(path, g))
    own_axes = tuple(range(-num_groups, 0))
    mean_square = jnp.mean(jnp.square(u), axis=own_axes, keepdims=True)
    u /= jnp.maximum(1.0, jnp.sqrt(mean_square))
    return u.reshape(g.shape), rows, columns, whole


def offloaded(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer like ``optimizer`` that keeps its moments in host memory between steps.

    Values and tree structure stay the same.
    """
    with_extra_args = optax.with_extra_args_support(optimizer)

    def move(state: optax.OptState, space: jax.memory.Space) -> optax.OptState:
        def put(moment: jax.Array) -> jax.Array:
            return jax.device_put(moment, space)

        return optax.tree_utils.tree_map_params(with_extra_args.init, put, state)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        on_device = move(state, jax.memory.Space.Device)
        updates, new_state = with_extra_args.update(updates, on_device, params, **extra_args)
        return updates, move(new_state, jax.memory.Space.Host)

    return optax.GradientTransformationExtraArgs(with_extra_args.init, update)
