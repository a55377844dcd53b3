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

    prefers_small = fits(8, BLOCK) and not fits(16, BLOCK)
    sizes = (LANES,) if prefers_small else (BLOCK, LANES)
    block = next((n for n in sizes if tokens % n == 0 and (fits(1, n) or n == LANES)), tokens)
    num_rows = next(n for n in (8, 4, 2, 1) if rows % n == 0 and (fits(n, block) or n == 1))
    return num_rows, block


def _padded_size(rows: int, lanes: int) -> int:
    """Return the number of elements of a [rows, lanes] array in a TPU's tiles."""
    return -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES


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
    rows, block = step_of(B, C, K * H * keys_BKCH.dtype.itemsize)
    num_steps = C // block
    # A TPU layout has one of the last two dimensions innermost: the dimension that needs less padding.
    is_transposed = _padded_size(H, C) < _padded_size(C, H)
    token_axis = 3 if is_transposed else 2  # axis of tokens in the memory layout
    tile = min(block, LANES if is_transposed else 2 * SUBLANES)  # smallest number of tokens that can be written

    def in_memory(x: jax.Array) -> jax.Array:
        """Return [., K, C, H] in its memory layout."""
        return x.swapaxes(2, 3) if is_transposed else x

    older = jnp.max(length.reshape(-1, rows), axis=1) - end % block  # live tokens older than the new token's block
    num_live = jnp.clip(1 + -(-older // block), 1, num_steps)  # number of live blocks
    # After the live blocks, repeat the last one, because a repeated block is not fetched again.
    order = (end // block - jnp.minimum(jnp.arange(num_steps)[None], num_live[:, None] - 1)) % num_steps

    def kernel(end, num_live, order, length, q, k, v, *refs):
        prompt_piece = refs[:3]
        keys, values, out, *new_caches = refs[3:8]
        sums, total, peak = refs[8:]
        row_block = pl.program_id(0)
        step = pl.program_id(1)

        def places(start, size, axis):
            shape = tuple(size if i == axis else 1 for i in range(4))
            return start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

        def add(scores, weigh):
            new_peak = jnp.maximum(peak[...], jnp.max(scores, axis=3, keepdims=True))
            weights = jnp.exp(scores - new_peak)
            scale = jnp.exp(peak[...] - new_peak)
            sums[...] = sums[...] * scale + weigh(weights)
            total[...] = total[...] * scale + jnp.sum(weights, axis=3, keepdims=True)
            peak[...] = new_peak

        @pl.when(step == 0)
        def begin():
            for ref, start in zip((sums, total, peak), prompt_piece, strict=True):
                ref[...] = start[...].astype(jnp.float32)
            new_q, new_k, new_v = (x[...].astype(jnp.float32) for x in (q, k, v))
            add(
                jnp.sum(new_q * new_k, axis=3, keepdims=True),
                lambda weights: weights * new_v,
            )
            tile_start = pl.multiple_of(end[0] % block // tile * tile, tile) if tile < block else 0
            tile_index = (slice(None),) * token_axis + (pl.ds(tile_start, tile),)
            for new_cache, token, cache in zip(new_caches, (k, v), (keys, values), strict=True):
                is_new = places(tile_start, tile, token_axis) == end[0] % block
                new_cache[...] = jnp.where(is_new, in_memory(token[...]), cache[tile_index])

        @pl.when(step < num_live[row_block])
        def add_block():
            def is_visible(axis):
                age = end[0] - 1 - places(order[row_block, step] * block, block, axis)
                return jnp.where(age < 0, age + C, age) < length[...]

            def dot(x, y, contracted):  # [rows,K,R,.] and [rows,K,.,.]; ``contracted`` is an axis of y
                x, y = (x.reshape(rows * K, *x.shape[2:]) for x in (x, y))
                dimensions = (((2,), (contracted - 1,)), ((0,), (0,)))
                out = jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
                return out.reshape(rows, K, R, -1)

            visible_values = jnp.where(is_visible(token_axis), values[...], 0)  # zeros, because 0 * nan is nan
            scores = jnp.where(is_visible(3), dot(q[...], keys[...], 5 - token_axis), -jnp.inf)
            add(
                scores,
                lambda weights: dot(weights.astype(visible_values.dtype), visible_values, token_axis),
            )

        @pl.when(step == num_steps - 1)
        def finish():
            out[...] = (sums[...] / total[...]).astype(out.dtype)

    def cache_spec(size, place):
        """Return the block of ``size`` tokens at the result of ``place``."""
        if is_transposed:
            return pl.BlockSpec((rows, K, H, size), lambda *index: (index[0], 0, 0, place(*index)))
        return pl.BlockSpec((rows, K, size, H), lambda *index: (index[0], 0, place(*index), 0))

    def row_spec(*shape):
        return pl.BlockSpec((rows, *shape), lambda row_block, *_: (row_block, 0, 0, 0))

    piece_shapes = [(K, R, H), (K, R, 1), (K, R, 1)]
    row_shapes = [(1, 1, 1), (K, R, H), (K, 1, H), (K, 1, H), *piece_shapes]
    block_spec = cache_spec(block, lambda row_block, step, end, num_live, order: order[row_block, step])
    tile_spec = cache_spec(tile, lambda row_block, step, end, num_live, order: end[0] // tile)
    caches = (in_memory(keys_BKCH), in_memory(values_BKCH))
    inputs = (q_BKRH, k_BK1H, v_BK1H, out_BKRH, total_BKR1, peak_BKR1, *caches)
    out, keys, values = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B // rows, num_steps),
            in_specs=[
                *(row_spec(*shape) for shape in row_shapes),
                block_spec,
                block_spec,
            ],
            out_specs=[row_spec(K, R, H), tile_spec, tile_spec],
            scratch_shapes=[pltpu.VMEM((rows, *shape), jnp.float32) for shape in piece_shapes],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BKRH, *caches)],
        input_output_aliases={10: 1, 11: 2},  # the caches
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="decode_attention",
    )(end[None], num_live, order, length[:, None, None, None], *inputs)
    return out, in_memory(keys), in_memory(values)
