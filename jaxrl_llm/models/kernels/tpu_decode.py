"""Flash decoding on TPU: attention of a decode step to the rows' caches, with the new tokens written to the caches.

    grid         blocks of rows x steps; each step reads one block of the rows' caches
    first step   start the sums from the prompt's piece and the new token; write the new token
    each step    add the next older block, while the block after it is fetched
    last step    compute the output from the sums

After the last live block of a block of rows, nothing more is fetched.

Library kernels do not fit, for two reasons. The prompt is attended once for all rows of its group, and they do not
return the softmax sums that merge it. They also need the caches copied to another layout. This kernel reads and writes
the caches in place, in their own layout.

Letters as in attention. Owns: one Pallas kernel. Does not know: prompts, meshes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES, LANES = 8, 128
BLOCK = 256  # most tokens per row in one step; a step has up to eight rows, and their matmuls are unrolled
BYTES = 2**20  # most bytes of keys, and of values, in one step


def step_of(rows: int, tokens: int, token_bytes: int) -> tuple[int, int]:
    """Return the number of rows, and of cache tokens per row, that one step reads.

    If eight rows with blocks of 256 tokens fit in a step and fill more than half of it, blocks of 128 tokens are
    preferred. Smaller blocks read fewer tokens that are not live.

    Args:
        rows, tokens: rows of a chip and cache positions per row.
        token_bytes: bytes of the keys of one token.
    """
    fits = lambda rows, tokens: rows * tokens * token_bytes <= BYTES
    sizes = (LANES,) if fits(8, BLOCK) and not fits(16, BLOCK) else (BLOCK, LANES)
    block = next((n for n in sizes if tokens % n == 0 and (fits(1, n) or n == LANES)), tokens)
    return next(n for n in (8, 4, 2, 1) if rows % n == 0 and (fits(n, block) or n == 1)), block


def attend(q_BKRH, k_BK1H, v_BK1H, out_BKRH, total_BKR1, peak_BKR1, keys_BKCH, values_BKCH, length, end):
    """Compute ``learner.decode`` on one device. The prompt's piece is three arguments: out, total and peak."""
    (B, K, R, H), C = q_BKRH.shape, keys_BKCH.shape[2]
    rows, block = step_of(B, C, K * H * keys_BKCH.dtype.itemsize)
    # A TPU layout has one of the last two dimensions innermost: the dimension that needs less padding.
    padded = lambda rows, lanes: -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES
    turned = padded(H, C) < padded(C, H)
    lie = lambda x: x.swapaxes(2, 3) if turned else x  # [., K, C, H] in its memory layout
    axis = 3 if turned else 2  # axis of tokens in the memory layout
    tile = min(block, LANES if turned else 2 * SUBLANES)  # smallest number of tokens that can be written

    older = jnp.max(length.reshape(-1, rows), axis=1) - end % block  # live tokens older than the new token's block
    live = jnp.clip(1 + -(-older // block), 1, C // block)  # number of live blocks
    # After the live blocks, repeat the last one, because a repeated block is not fetched again.
    order = (end // block - jnp.minimum(jnp.arange(C // block)[None], live[:, None] - 1)) % (C // block)

    def kernel(end, live, order, length, q, k, v, *refs):
        prompt, (keys, values, out, *written), (sums, total, peak) = refs[:3], refs[3:8], refs[8:]
        z, step = pl.program_id(0), pl.program_id(1)

        def places(start, size, axis):
            return start + jax.lax.broadcasted_iota(jnp.int32, tuple(size if i == axis else 1 for i in range(4)), axis)

        def add(scores, weigh):
            top = jnp.maximum(peak[...], jnp.max(scores, axis=3, keepdims=True))
            weights, scale = jnp.exp(scores - top), jnp.exp(peak[...] - top)
            sums[...] = sums[...] * scale + weigh(weights)
            total[...] = total[...] * scale + jnp.sum(weights, axis=3, keepdims=True)
            peak[...] = top

        @pl.when(step == 0)
        def _():
            for ref, before in zip((sums, total, peak), prompt, strict=True):
                ref[...] = before[...].astype(jnp.float32)
            new_q, new_k, new_v = (x[...].astype(jnp.float32) for x in (q, k, v))
            add(jnp.sum(new_q * new_k, axis=3, keepdims=True), lambda weights: weights * new_v)
            start = pl.multiple_of(end[0] % block // tile * tile, tile) if tile < block else 0
            at = (slice(None),) * axis + (pl.ds(start, tile),)
            for to, new, old in zip(written, (k, v), (keys, values), strict=True):
                to[...] = jnp.where(places(start, tile, axis) == end[0] % block, lie(new[...]), old[at])

        @pl.when(step < live[z])
        def _():
            def visible(axis):
                age = end[0] - 1 - places(order[z, step] * block, block, axis)
                return jnp.where(age < 0, age + C, age) < length[...]

            def dot(x, y, contracted):  # [rows,K,R,.] and [rows,K,.,.]; ``contracted`` is an axis of y
                x, y = (x.reshape(rows * K, *x.shape[2:]) for x in (x, y))
                how = (((2,), (contracted - 1,)), ((0,), (0,)))
                return jax.lax.dot_general(x, y, how, preferred_element_type=jnp.float32).reshape(rows, K, R, -1)

            shown = jnp.where(visible(axis), values[...], 0)  # 0 * nan is nan
            scores = jnp.where(visible(3), dot(q[...], keys[...], 5 - axis), -jnp.inf)
            add(scores, lambda weights: dot(weights.astype(shown.dtype), shown, axis))

        @pl.when(step == C // block - 1)
        def _():
            out[...] = (sums[...] / total[...]).astype(out.dtype)

    def of_cache(size, at):
        place = lambda *where: (where[0], 0, 0, at(*where)) if turned else (where[0], 0, at(*where), 0)
        return pl.BlockSpec((rows, K, H, size) if turned else (rows, K, size, H), place)

    of_rows = lambda *shape: pl.BlockSpec((rows, *shape), lambda z, *_: (z, 0, 0, 0))
    piece = [(K, R, H), (K, R, 1), (K, R, 1)]
    read = of_cache(block, lambda z, step, end, live, order: order[z, step])
    written = of_cache(tile, lambda z, step, end, live, order: end[0] // tile)
    given = (q_BKRH, k_BK1H, v_BK1H, out_BKRH, total_BKR1, peak_BKR1, lie(keys_BKCH), lie(values_BKCH))
    out, keys, values = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B // rows, C // block),
            in_specs=[*(of_rows(*shape) for shape in ((1, 1, 1), (K, R, H), (K, 1, H), (K, 1, H), *piece)), read, read],
            out_specs=[of_rows(K, R, H), written, written],
            scratch_shapes=[pltpu.VMEM((rows, *shape), jnp.float32) for shape in piece],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BKRH, *given[-2:])],
        input_output_aliases={10: 1, 11: 2},  # the caches
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="decode_attention",
    )(end[None], live, order, length[:, None, None, None], *given)
    return out, lie(keys), lie(values)
