"""Flash decoding on TPU: a decode step's attention to its rows' caches, which keeps the new tokens in them.

    grid         blocks of rows x steps, each of one block of the rows' caches
    first step   what attention to the prompt gave and the new token begin the sums; that token is written
    each step    the next older block is added, while the one after it is fetched
    last step    the sums become the output

From the last live block of a block of rows on nothing is fetched. Ours, for the kernels that libraries keep do not
return the sums that a prompt is merged by, which is attended once for all rows of its group, and want caches copied to
a layout of theirs. These are read and written where and as they lie.

Letters as in attention. Owns: one Pallas kernel. Does not know: prompts, meshes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES, LANES = 8, 128
BLOCK = 256  # tokens of a cache in one step, at most; of up to eight rows, whose matmuls are unrolled
BYTES = 2**20  # of keys, and of values, in one step


def step_of(rows: int, tokens: int, token_bytes: int) -> tuple[int, int]:
    """Rows, and tokens of the cache of each, that one step reads, of so many on a chip.

    Where blocks of a lane's tokens fill half a step, of eight rows, they are taken: less is read in vain.
    """
    fits = lambda rows, tokens: rows * tokens * token_bytes <= BYTES
    sizes = (LANES,) if fits(8, BLOCK) and not fits(16, BLOCK) else (BLOCK, LANES)
    block = next((n for n in sizes if tokens % n == 0 and (fits(1, n) or n == LANES)), tokens)
    return next(n for n in (8, 4, 2, 1) if rows % n == 0 and (fits(n, block) or n == 1)), block


def attend(q_BKRH, k_BK1H, v_BK1H, out_BKRH, total_BKR1, peak_BKR1, keys_BKCH, values_BKCH, length, end):
    """See ``kernels.decode``; the prompt's piece is apart here."""
    (B, K, R, H), C = q_BKRH.shape, keys_BKCH.shape[2]
    rows, block = step_of(B, C, K * H * keys_BKCH.dtype.itemsize)
    # A TPU lays an array out with that one of its last two dimensions innermost which pads it least.
    padded = lambda rows, lanes: -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES
    turned = padded(H, C) < padded(C, H)
    lie = lambda x: x.swapaxes(2, 3) if turned else x  # [., K, C, H] as it lies
    axis = 3 if turned else 2  # of tokens, there
    tile = min(block, LANES if turned else 2 * SUBLANES)  # of tokens, the least that is written

    older = jnp.max(length.reshape(-1, rows), axis=1) - end % block  # tokens, than the new token's block
    live = jnp.clip(1 + -(-older // block), 1, C // block)  # blocks
    # Past the live blocks comes the last of them again, which is there already.
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

            def dot(x, y, contracted):  # [rows,K,R,.] and [rows,K,.,.], of whose axes one is contracted
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
