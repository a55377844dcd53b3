"""Rows of mixed lengths without padding: a circular log of pages beside the slots of a ring.

A row of l tokens takes ceil(l / T) consecutive pages of its shard's log, over the oldest. Pages are numbered by the
order of writing, page i lies at i mod N, and the log holds the last N: a row is there as long as its first page is.
Rows are as old as their pages, so those that are gone are always the oldest ones.
Letters: M data shards, N pages of a shard, T tokens of a page, n rows, W width of a row with padding, k = ceil(W / T).
Owns: where tokens lie in the log. Does not know: what they mean, which rows are drawn, the mesh.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree, Shaped

from jaxrl_llm.ops import ring_buffer


def next_pages(
    oldest: Int[ArrayLike, " M"], length: Int[ArrayLike, "M n"], *, num_pages: int, page: int
) -> tuple[Int[Array, "M n"], Int[Array, " M"]]:
    """The pages that the next rows begin at, [M, n] i32, and then the oldest one that the log holds, [M] i32.

    Args:
        oldest: [M] i32, number of the oldest page now; an empty log is one of pages that nobody has.
        length: [M, n] i32, tokens of each row.
        num_pages: N.
        page: T.
    """
    pages = -(-length // page)
    end = jnp.cumsum(pages, axis=1)
    return oldest[:, None] + num_pages + end - pages, oldest + end[:, -1]


def is_held(first: Int[ArrayLike, "M n"], oldest: Int[ArrayLike, " M"]) -> Bool[ArrayLike, "M n"]:
    """Whether rows that begin at pages ``first`` [M, n] are there as a whole, [M, n] bool."""
    return first - oldest[:, None] >= 0


def write(
    log: PyTree[Shaped[ArrayLike, "M N T ..."], " L"],
    first: Int[ArrayLike, "M n"],
    length: Int[ArrayLike, "M n"],
    rows: PyTree[Shaped[ArrayLike, "M n W ..."], " L"],
) -> PyTree[Shaped[Array, "M N T ..."], " L"]:
    """The log with these rows in their pages.

    Args:
        log: pytree of [M, N, T, ...]. Donate it: the cost is then that of the rows.
        first: [M, n] i32, as ``next_pages`` gave them.
        length: [M, n] i32; a row's tokens from there on are not kept.
        rows: pytree of [M, n, W, ...], same structure and dtypes, n * k <= N: else one would overwrite another.
    """
    num_pages, page = jax.tree.leaves(log)[0].shape[1:3]
    width = jax.tree.leaves(rows)[0].shape[2]
    index, is_used = _pages(first, length, num_pages=num_pages, page=page, width=width)
    index = jnp.where(is_used, index, num_pages)  # that page is nowhere

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -width % page)) + ((0, 0),) * (x.ndim - 3))
        return x.reshape(x.shape[0], -1, page, *x.shape[3:])

    return ring_buffer.put(log, index, jax.tree.map(cut, rows))


def take(
    log: PyTree[Shaped[ArrayLike, "M N T ..."], " L"],
    first: Int[ArrayLike, "M n"],
    length: Int[ArrayLike, "M n"],
    *,
    width: int,
    padding: PyTree[Shaped[ArrayLike, ""], " L"],
) -> PyTree[Shaped[Array, "M n {width} ..."], " L"]:
    """Rows of the log, padded: a pytree of [M, n, W, ...], on the device.

    Args:
        log: pytree of [M, N, T, ...].
        first: [M, n] i32; of a row that is not held comes what has been written over it.
        length: [M, n] i32.
        width: W.
        padding: same structure, what stands in a row from its length on.
    """
    num_pages, page = jax.tree.leaves(log)[0].shape[1:3]
    index, _ = _pages(first, length, num_pages=num_pages, page=page, width=width)
    is_token = jnp.arange(width)[None, None, :] < length[:, :, None]

    def join(x: jax.Array, fill: Any) -> jax.Array:
        x = x.reshape(*length.shape, -1, *x.shape[3:])[:, :, :width]
        return jnp.where(is_token.reshape(*is_token.shape, *(1,) * (x.ndim - 3)), x, jnp.asarray(fill, x.dtype))

    return jax.tree.map(join, ring_buffer.take(log, index), padding)


def _pages(
    first: jax.Array, length: jax.Array, *, num_pages: int, page: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Where k pages of each row lie, [M, n * k] i32, and whether a row of its length has them."""
    ahead = jnp.arange(-(-width // page), dtype=jnp.int32)[None, None, :]
    index = (first[:, :, None] + ahead) % num_pages
    is_used = ahead * page < length[:, :, None]
    return index.reshape(first.shape[0], -1), is_used.reshape(first.shape[0], -1)
