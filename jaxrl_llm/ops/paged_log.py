"""Rows of mixed lengths without padding: a circular log of pages next to the slots of a ring.

A row of l tokens takes ceil(l / T) consecutive pages of its shard's log and overwrites the oldest pages. Pages are
numbered in the order of writing. Page i lies at index i mod N, and the log holds the last N pages. A row is complete as
long as the log holds its first page. A row is as old as its pages, so the rows that are lost are always the oldest.

Letters: M data shards, N pages of a shard, T tokens of a page, n rows, W width of a row with padding, k = ceil(W / T).
Owns: the position of tokens in the log. Does not know: the meaning of tokens, which rows are drawn, the mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree, Shaped

from jaxrl_llm.ops import ring_buffer


def next_pages(
    oldest: Int[Array, " M"],
    length: Int[Array, "M n"],
    *,
    num_pages: int,
    page: int,
) -> tuple[Int[Array, "M n"], Int[Array, " M"]]:
    """Return the first page of each new row, [M, n] i32, and the oldest page that the log then holds, [M] i32.

    Args:
        oldest: [M] i32, number of the oldest page before the write. The pages of an empty log do not belong to a row.
        length: [M, n] i32, tokens of each row.
        num_pages: N.
        page: T.
    """
    pages_of_row = _num_pages(length, page)
    pages_so_far = jnp.cumsum(pages_of_row, axis=1)
    next_page = oldest[:, None] + num_pages
    first = next_page + pages_so_far - pages_of_row
    new_oldest = oldest + pages_so_far[:, -1]
    return first, new_oldest


def is_held(first: Int[Array, "M n"], oldest: Int[Array, " M"]) -> Bool[Array, "M n"]:
    """Return whether the log holds all of each row, [M, n] bool. ``first`` [M, n] are the rows' first pages."""
    return first - oldest[:, None] >= 0


def write(
    log: PyTree[Shaped[Array, "M N T ..."], " L"],
    first: Int[Array, "M n"],
    length: Int[Array, "M n"],
    rows: PyTree[Shaped[Array, "M n W ..."], " L"],
) -> PyTree[Shaped[Array, "M N T ..."], " L"]:
    """Return the log with these rows in their pages.

    Args:
        log: pytree of [M, N, T, ...]. Donate the log, so that only the rows are written and the log is not copied.
        first: [M, n] i32, the result of ``next_pages``.
        length: [M, n] i32. Tokens of a row from this position on are not stored.
        rows: pytree of [M, n, W, ...], same structure and dtypes. n * k must be at most N, so that no row overwrites
            another.
    """
    num_pages, page = jax.tree.leaves(log)[0].shape[1:3]
    width = jax.tree.leaves(rows)[0].shape[2]
    index, is_used = _pages(first, length, num_pages=num_pages, page=page, width=width)
    target = jnp.where(is_used, index, num_pages)  # a write to page number N is dropped

    def cut(x: Array) -> Array:
        """Cut rows [M, n, W, ...] into pages [M, n * k, T, ...]."""
        pad_width = [(0, 0)] * x.ndim
        pad_width[2] = (0, -width % page)
        padded = jnp.pad(x, pad_width)
        return padded.reshape(x.shape[0], -1, page, *x.shape[3:])

    pages = jax.tree.map(cut, rows)
    return ring_buffer.put(log, target, pages)


def take(
    log: PyTree[Shaped[Array, "M N T ..."], " L"],
    first: Int[Array, "M n"],
    length: Int[Array, "M n"],
    *,
    width: int,
    padding: PyTree[Shaped[ArrayLike, ""], " L"],
) -> PyTree[Shaped[Array, "M n {width} ..."], " L"]:
    """Return padded rows of the log: a pytree of [M, n, W, ...], on the device.

    Args:
        log: pytree of [M, N, T, ...].
        first: [M, n] i32. If a row was overwritten, the result is the newer data.
        length: [M, n] i32.
        width: W.
        padding: same structure, value of a row's positions from its length on.
    """
    num_pages, page = jax.tree.leaves(log)[0].shape[1:3]
    index, _ = _pages(first, length, num_pages=num_pages, page=page, width=width)
    position = jnp.arange(width)[None, None, :]
    is_token = position < length[:, :, None]

    def join(pages: Array, padding_value: jax.typing.ArrayLike) -> Array:
        """Join pages [M, n * k, T, ...] to rows [M, n, W, ...]."""
        with_surplus = pages.reshape(*length.shape, -1, *pages.shape[3:])
        tokens = with_surplus[:, :, :width]
        num_other_dims = tokens.ndim - is_token.ndim
        mask = is_token.reshape(*is_token.shape, *[1] * num_other_dims)
        return jnp.where(mask, tokens, jnp.asarray(padding_value, tokens.dtype))

    pages = ring_buffer.take(log, index)
    return jax.tree.map(join, pages, padding)


def _num_pages(length: Array, page: int) -> Array:
    """Return the number of pages of rows, ceil(length / T)."""
    return -(-length // page)


def _pages(
    first: Array,
    length: Array,
    *,
    num_pages: int,
    page: int,
    width: int,
) -> tuple[Array, Array]:
    """Return the indices of k pages of each row, [M, n * k] i32, and whether the row's length needs each page."""
    num_shards = first.shape[0]
    pages_per_row = -(-width // page)
    page_of_row = jnp.arange(pages_per_row, dtype=jnp.int32)[None, None, :]
    index = (first[:, :, None] + page_of_row) % num_pages
    is_used = page_of_row * page < length[:, :, None]
    return index.reshape(num_shards, -1), is_used.reshape(num_shards, -1)
