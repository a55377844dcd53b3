"""Flash decoding on TPU: attention of a decode step to the rows' caches, with the new tokens written to the caches.

    grid         blocks of rows x steps. Each step reads one block of the rows' caches.
    first step   start the sums from the prompt's piece and the new token. Write the new token.
    each step    add the next older block, while the block after it is fetched.
    last step    compute the output from the sums.

After the last live block of a block of rows, nothing more is fetched.

Library kernels do not fit, for two reasons. The attention to a prompt is computed once for all rows of its group, but
library kernels do not return the softmax sums that are needed to add it. They also need the caches copied to another
layout. This kernel reads and writes the caches in place, in their own layout.

Shape letters: as in ``attention``. Owns: one Pallas kernel. Does not know: prompts, meshes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES = 8
LANES = 128
BLOCK = 256  # most tokens per row in one step; a step has up to eight rows, and their matmuls are unrolled
BYTES = 2**20  # most bytes of keys, and of values, in one step


def step_of(rows: int, tokens: int, token_bytes: int) -> tuple[int, int]:
    """Return the number of rows, and of cache tokens per row, that one step reads.

    If eight rows with blocks of 256 tokens fit in a step and fill more than half of it, blocks of 128 tokens are
    preferred. Smaller blocks read fewer dead cache positions.

    Args:
        rows, tokens: rows of a chip and cache positions per row.
        token_bytes: bytes of the keys of one token.
    """

    def fits(rows: int, tokens: int) -> bool:
        return rows * tokens * token_bytes <= BYTES

    block = tokens
    prefers_small = fits(8, BLOCK) and not fits(16, BLOCK)
    for size in (LANES,) if prefers_small else (BLOCK, LANES):
        if tokens % size == 0 and (size == LANES or fits(1, size)):
            block = size
            break
    for num_rows in (8, 4, 2):
        if rows % num_rows == 0 and fits(num_rows, block):
            return num_rows, block
    return 1, block


def _padded_size(rows: int, lanes: int) -> int:
    """Return the number of elements of a [rows, lanes] array in a TPU's tiles."""
    num_sublanes = -(-rows // SUBLANES) * SUBLANES
    num_lanes = -(-lanes // LANES) * LANES
    return num_sublanes * num_lanes


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Sizes of the kernel's blocks, and the memory layout of the caches.

    Attributes:
        rows: rows of one block of rows.
        block: cache tokens per row in one step.
        tile: smallest number of tokens that can be written.
        num_steps: blocks of a row's cache.
        cache_length: C.
        is_transposed: the tokens are the last dimension in memory.
    """

    rows: int
    block: int
    tile: int
    num_steps: int
    cache_length: int
    is_transposed: bool

    @property
    def token_axis(self) -> int:
        """Return the axis of tokens in the memory layout."""
        return 3 if self.is_transposed else 2

    def in_memory(self, x: jax.Array) -> jax.Array:
        """Return [., K, C, H] in its memory layout, or an array of the memory layout as [., K, C, H]."""
        return x.swapaxes(2, 3) if self.is_transposed else x

    def row_spec(self, *shape: int) -> pl.BlockSpec:
        """Return the block of an array [B, *shape] that has the step's rows."""

        def index(row_block: Any, *_: Any) -> tuple[Any, ...]:
            return row_block, 0, 0, 0

        return pl.BlockSpec((self.rows, *shape), index)

    def cache_spec(self, K: int, H: int, size: int, place: Callable[..., Any]) -> pl.BlockSpec:
        """Return the block of a cache that has ``size`` tokens of the step's rows.

        Args:
            place: (indices of the grid, scalars) -> the index of the block along the tokens.
        """

        def index(*arguments: Any) -> tuple[Any, ...]:
            row_block = arguments[0]
            if self.is_transposed:
                return row_block, 0, 0, place(*arguments)
            return row_block, 0, place(*arguments), 0

        shape = (H, size) if self.is_transposed else (size, H)
        return pl.BlockSpec((self.rows, K, *shape), index)


def _layout_of(B: int, K: int, C: int, H: int, itemsize: int) -> _Layout:
    """Return the layout of caches [B,K,C,H] on one chip."""
    rows, block = step_of(B, C, K * H * itemsize)
    # A TPU layout has one of the last two dimensions innermost: the dimension that needs less padding.
    is_transposed = _padded_size(H, C) < _padded_size(C, H)
    smallest_write = LANES if is_transposed else 2 * SUBLANES
    return _Layout(
        rows,
        block,
        tile=min(block, smallest_write),
        num_steps=C // block,
        cache_length=C,
        is_transposed=is_transposed,
    )


def _live_blocks(length: jax.Array, end: jax.Array, layout: _Layout) -> tuple[jax.Array, jax.Array]:
    """Return the number of live blocks of each block of rows, and the order in which the steps read the blocks."""
    block = layout.block
    longest = jnp.max(length.reshape(-1, layout.rows), axis=1)
    older = longest - end % block  # live tokens older than the new token's block
    num_live = jnp.clip(1 + -(-older // block), 1, layout.num_steps)
    # After the live blocks, repeat the last one, because a repeated block is not fetched again.
    age = jnp.minimum(jnp.arange(layout.num_steps)[None], num_live[:, None] - 1)
    order = (end // block - age) % layout.num_steps
    return num_live, order


Ref = Any  # a Pallas reference to a block in the chip's memory


class _Sums(NamedTuple):
    """Softmax sums of a block of rows, which stay in the chip's memory from step to step."""

    values: Ref  # [rows,K,R,H] weighted sum of the values
    total: Ref  # [rows,K,R,1] sum of the weights
    peak: Ref  # [rows,K,R,1] largest score

    def add(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> None:
        """Add keys with these scores.

        Args:
            weigh: weights of the keys -> the weighted sum of their values.
        """
        new_peak = jnp.maximum(self.peak[...], jnp.max(scores, axis=3, keepdims=True))
        weights = jnp.exp(scores - new_peak)
        scale = jnp.exp(self.peak[...] - new_peak)
        self.values[...] = self.values[...] * scale + weigh(weights)
        self.total[...] = self.total[...] * scale + jnp.sum(weights, axis=3, keepdims=True)
        self.peak[...] = new_peak


def _kernel(
    end: Ref,
    num_live: Ref,
    order: Ref,
    length: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    prompt_out: Ref,
    prompt_total: Ref,
    prompt_peak: Ref,
    keys: Ref,
    values: Ref,
    out: Ref,
    new_keys: Ref,
    new_values: Ref,
    *sums: Ref,
    layout: _Layout,
) -> None:
    """Run one step for one block of rows: the kernel's body."""
    row_block = pl.program_id(0)
    step = pl.program_id(1)
    running = _Sums(*sums)

    @pl.when(step == 0)
    def begin() -> None:
        for ref, start in zip(running, (prompt_out, prompt_total, prompt_peak), strict=True):
            ref[...] = start[...].astype(jnp.float32)
        _add_new_token(q, k, v, running)
        _write_new_token(end[0], (k, v), (keys, values), (new_keys, new_values), layout)

    @pl.when(step < num_live[row_block])
    def add_block() -> None:
        first_token = order[row_block, step] * layout.block
        _add_block(first_token, end[0], length, q, keys, values, running, layout)

    @pl.when(step == layout.num_steps - 1)
    def finish() -> None:
        out[...] = (running.values[...] / running.total[...]).astype(out.dtype)


def _places(start: Any, size: int, axis: int) -> jax.Array:
    """Return the cache positions start, start + 1, ... along one of four axes."""
    shape = tuple(size if i == axis else 1 for i in range(4))
    return start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _add_new_token(q: Ref, k: Ref, v: Ref, running: _Sums) -> None:
    """Add the attention of each row's new token to itself."""
    new_q, new_k, new_v = (x[...].astype(jnp.float32) for x in (q, k, v))

    def weigh(weights: jax.Array) -> jax.Array:
        return weights * new_v

    running.add(jnp.sum(new_q * new_k, axis=3, keepdims=True), weigh)


def _write_new_token(
    end: jax.Array,
    tokens: tuple[Ref, Ref],
    caches: tuple[Ref, Ref],
    new_caches: tuple[Ref, Ref],
    layout: _Layout,
) -> None:
    """Write the tile of each cache that has the new token's position.

    Args:
        end: [] i32, position of the new token.
        tokens: key and value of the new token.
        caches: the blocks of keys and values that have this position.
        new_caches: the tiles to write.
    """
    tile = layout.tile
    token_axis = layout.token_axis
    place = end % layout.block
    tile_start: Any = 0
    if tile < layout.block:
        tile_start = pl.multiple_of(place // tile * tile, tile)
    whole_axes = (slice(None),) * token_axis
    tile_index = (*whole_axes, pl.ds(tile_start, tile))
    for new_cache, token, cache in zip(new_caches, tokens, caches, strict=True):
        is_new = _places(tile_start, tile, token_axis) == place
        new_cache[...] = jnp.where(is_new, layout.in_memory(token[...]), cache[tile_index])


def _add_block(
    first_token: jax.Array,
    end: jax.Array,
    length: Ref,
    q: Ref,
    keys: Ref,
    values: Ref,
    running: _Sums,
    layout: _Layout,
) -> None:
    """Add the attention to one block of the rows' caches.

    Args:
        first_token: cache position of the block's first token.
        end: [] i32, position of the new token.
        length: number of each row's live tokens.
    """
    token_axis = layout.token_axis

    def is_visible(axis: int) -> jax.Array:
        age = end - 1 - _places(first_token, layout.block, axis)
        age = jnp.where(age < 0, age + layout.cache_length, age)
        return age < length[...]

    # Hidden values are zeros, because 0 * nan is nan.
    visible_values = jnp.where(is_visible(token_axis), values[...], 0)
    head_axis = 5 - token_axis
    is_visible_score = is_visible(3)
    scores = jnp.where(is_visible_score, _dot(q[...], keys[...], head_axis), -jnp.inf)

    def weigh(weights: jax.Array) -> jax.Array:
        return _dot(weights.astype(visible_values.dtype), visible_values, token_axis)

    running.add(scores, weigh)


def _dot(x: jax.Array, y: jax.Array, contracted: int) -> jax.Array:
    """Return the products [rows,K,R,.] of x [rows,K,R,.] and y [rows,K,.,.].

    Args:
        contracted: axis of y that is summed over. The last axis of x is summed over.
    """
    rows, K, R, _ = x.shape
    flat_x = x.reshape(rows * K, *x.shape[2:])
    flat_y = y.reshape(rows * K, *y.shape[2:])
    contracted_axes = ((2,), (contracted - 1,))
    batch_axes = ((0,), (0,))
    out = jax.lax.dot_general(
        flat_x,
        flat_y,
        (contracted_axes, batch_axes),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(rows, K, R, -1)


def attend(
    q_BKRH: jax.Array,
    k_BK1H: jax.Array,
    v_BK1H: jax.Array,
    out_BKRH: jax.Array,
    total_BKR1: jax.Array,
    peak_BKR1: jax.Array,
    keys_BKCH: jax.Array,
    values_BKCH: jax.Array,
    length: jax.Array,
    end: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute ``learner.decode`` on one device. The prompt's piece is three arguments: out, total and peak."""
    B, K, R, H = q_BKRH.shape
    C = keys_BKCH.shape[2]
    layout = _layout_of(B, K, C, H, keys_BKCH.dtype.itemsize)
    num_live, order = _live_blocks(length, end, layout)

    def block_index(row_block: Any, step: Any, end: Ref, num_live: Ref, order: Ref) -> Any:
        return order[row_block, step]

    def tile_index(row_block: Any, step: Any, end: Ref, num_live: Ref, order: Ref) -> Any:
        return end[0] // layout.tile

    block_spec = layout.cache_spec(K, H, layout.block, block_index)
    tile_spec = layout.cache_spec(K, H, layout.tile, tile_index)
    sum_shapes = [(K, R, H), (K, R, 1), (K, R, 1)]
    row_shapes = [(1, 1, 1), (K, R, H), (K, 1, H), (K, 1, H), *sum_shapes]
    row_specs = [layout.row_spec(*shape) for shape in row_shapes]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(B // layout.rows, layout.num_steps),
        in_specs=[*row_specs, block_spec, block_spec],
        out_specs=[layout.row_spec(K, R, H), tile_spec, tile_spec],
        scratch_shapes=[pltpu.VMEM((layout.rows, *shape), jnp.float32) for shape in sum_shapes],
    )
    caches = (layout.in_memory(keys_BKCH), layout.in_memory(values_BKCH))
    decode_attention = pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BKRH, *caches)],
        input_output_aliases={10: 1, 11: 2},  # the caches
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="decode_attention",
    )
    out, keys, values = decode_attention(
        end[None],
        num_live,
        order,
        length[:, None, None, None],
        q_BKRH,
        k_BK1H,
        v_BK1H,
        out_BKRH,
        total_BKR1,
        peak_BKR1,
        *caches,
    )
    return out, layout.in_memory(keys), layout.in_memory(values)
