"""Packing: ragged rows side by side in lines, so that the learner computes few padding positions.

A unit is a set of rows that share a prompt: a group of G rows, or one row. A unit lies in one line: its prompt once,
then its completions one after another. Positions of a completion continue the positions of the prompt. A token sees the
prompt and its own completion:

    line   | prompt a | a's 1st | a's 2nd | prompt b | b's 1st | b's 2nd | empty |

The last token of a completion predicts no token, so it has no place in the line.

Letters: U units, W tokens of a line, n lines, X places for units in a line, K = X*G rows of a line, S row width.
Owns: which units share a line, where their tokens lie. Does not know: models, the meaning of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

# A line has places for this many times the number of full-length units that fill it. Few batches need more places.
DENSEST = 4


class Reading(NamedTuple):
    """One part of every row, completion or prompt, as a list of targets without gaps."""

    source: Array  # [n,W] i32 places in the line that predict the targets, in the rows' order; 0 after the last
    target: Array  # [n,W] i32 predicted tokens; 0 after the last
    count: Array  # [n] i32 number of targets
    index: Array  # [n,K,S] i32 index of each token of a row in the list; W outside the part


class Line(NamedTuple):
    """Content of n lines of K rows. A line has the tokens that predict another token."""

    position: Array  # [n,W] i32 position of each token in its row; 0 at an empty place
    unit: Array  # [n,W] i32 number of the unit, from 1; 0 at an empty place
    row: Array  # [n,W] i32 number of the row, from 1; 0 in a prompt or at an empty place
    tokens: Array  # [n,W] i32; 0 at an empty place
    completions: Reading
    prompts: Reading  # from the second token of each prompt on; the prompt of a group is listed once


def units_per_line(width: int, unit_width: int) -> int:
    """Return X = 4 W / unit_width: places for units of at most ``unit_width`` tokens in a line of W = ``width``."""
    return DENSEST * width // unit_width


def unit_size(
    prompt_length: Int[Array, "*units"],
    own: Int[Array, "*units G"],
) -> Int[Array, "*units"]:
    """Return the number of places that each unit needs in its line.

    The size is the number of tokens, or the number of targets if that is larger (many rows with short prompts).

    Args:
        prompt_length: [...] i32 of each unit's prompt.
        own: [...,G] i32 completion tokens of the unit's rows.

    Returns:
        [...] i32 ``max(prompt + sum(own - 1), sum(own))`` over rows with a completion.
    """
    own_places = jnp.sum(jnp.maximum(own - 1, 0), axis=-1)
    num_places = prompt_length + own_places
    num_targets = jnp.sum(own, axis=-1)
    return jnp.maximum(num_places, num_targets)


def first_fit(
    size: Int[Array, " U"],
    *,
    width: int,
    max_units: int,
) -> tuple[Int[Array, "U {max_units}"], Int[Array, ""]]:
    """Assign units to lines by first-fit decreasing: the largest unit first, each to the first line that has room.

    If no line is limited by ``max_units``, the number of lines is at most 11/9 of the minimum, plus one (Johnson 1973).

    Args:
        size: [U] i32 of each unit (``unit_size``), at most ``width``. A unit of size 0 is left out.
        width: W.
        max_units: X.

    Returns:
        unit_of [U,X] i32, the units of each line, -1 = free; and the number of used lines, [] i32. The used lines come
        before the empty lines.
    """
    U = size.shape[0]

    def put(lines: tuple[Array, Array, Array], unit: Array):
        filled, count, unit_of = lines
        unit_size = size[unit]
        has_room = (filled + unit_size <= width) & (count < max_units)
        # Take the first line with room; an empty line always has room. Index U drops a unit of size 0.
        line = jnp.where(unit_size > 0, jnp.argmax(has_room), U)
        unit_of = unit_of.at[line, count[line]].set(unit, mode="drop")
        filled = filled.at[line].add(unit_size, mode="drop")
        count = count.at[line].add(1, mode="drop")
        return (filled, count, unit_of), None

    empty = jnp.zeros(U, jnp.int32)
    free = jnp.full((U, max_units), -1, jnp.int32)
    largest_first = jnp.argsort(-size, stable=True).astype(jnp.int32)
    lines, _ = jax.lax.scan(put, (empty, empty, free), largest_first)
    _, count, unit_of = lines
    num_used_lines = jnp.sum(count > 0, dtype=jnp.int32)
    return unit_of, num_used_lines


def lay(
    tokens: Int[Array, "n K S"],
    prompt_length: Int[Array, "n K"],
    length: Int[Array, "n K"],
    *,
    width: int,
    group_size: int,
) -> Line:
    """Lay rows in their lines.

    Args:
        tokens: [n,K,S] i32 right-padded rows ``prompt ++ completion``. Every ``group_size`` neighbours share a prompt.
        prompt_length, length: [n,K] i32. Both are 0 at a place without a row.
        width: W, at least the total size of the units of any line.
        group_size: G.

    Returns:
        The lines, whose fields ``Line`` describes.
    """
    n, K, S = tokens.shape
    shape = (n, K, S)
    prompt_start, completion_start = _starts(prompt_length, length, group_size)
    at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), shape)
    in_prompt = at < prompt_length[..., None]
    place_in_prompt = prompt_start[..., None] + at
    place_in_completion = (completion_start - prompt_length)[..., None] + at
    token_place = jnp.where(in_prompt, place_in_prompt, place_in_completion)

    # The last token of the prompt predicts the first token of the completion. Every other token predicts the next one.
    is_first = at == prompt_length[..., None]
    last_of_prompt = (prompt_start + prompt_length)[..., None] - 1
    source = jnp.where(is_first, last_of_prompt, token_place - 1)
    predicts = in_prompt | (at + 1 < length[..., None])
    place = jnp.where(predicts, token_place, width)  # index W is dropped

    own = length - prompt_length
    is_completion = (at < length[..., None]) & ~in_prompt
    first_of_row = (_sum_before(own) - prompt_length)[..., None]
    completion_index = jnp.where(is_completion, first_of_row + at, width)

    unit_prompt = _by_unit(prompt_length, group_size)[..., 0]
    prompt_targets = jnp.maximum(unit_prompt - 1, 0)  # the first token of a prompt is not predicted
    is_prompt_target = in_prompt & (at > 0)
    first_of_prompt = (_by_row(_sum_before(prompt_targets), group_size) - 1)[..., None]
    prompt_index = jnp.where(is_prompt_target, first_of_prompt + at, width)

    row_number = 1 + jnp.arange(K, dtype=jnp.int32)
    row = jnp.broadcast_to(row_number[None, :, None], shape)
    unit = (row - 1) // group_size + 1
    return Line(
        position=_put(at, place, width),
        unit=_put(unit, place, width),
        row=_put(jnp.where(in_prompt, 0, row), place, width),
        tokens=_put(tokens, place, width),
        completions=_reading(source, tokens, completion_index, jnp.sum(own, axis=1), width),
        prompts=_reading(source, tokens, prompt_index, jnp.sum(prompt_targets, axis=1), width),
    )


def _starts(
    prompt_length: Array,
    length: Array,
    group_size: int,
) -> tuple[Array, Array]:
    """Return the place in the line where each row's prompt and each row's completion begins, [n,K] i32 each."""
    own = length - prompt_length
    laid = jnp.maximum(own - 1, 0)  # the last token of a completion has no place
    laid_before = _sum_before(laid)
    unit_laid_before = _by_unit(laid_before, group_size)[..., 0]
    unit_prompt = _by_unit(prompt_length, group_size)[..., 0]
    prompts_before = _sum_before(unit_prompt)
    prompt_start = _by_row(prompts_before + unit_laid_before, group_size)
    completion_start = _by_row(prompts_before + unit_prompt, group_size) + laid_before
    return prompt_start, completion_start


def _by_unit(x: Array, group_size: int) -> Array:
    """Return values of rows [n,K] by unit, [n,X,G]."""
    n, K = x.shape
    return x.reshape(n, K // group_size, group_size)


def _by_row(x: Array, group_size: int) -> Array:
    """Return values of units [n,X] at the rows of each unit, [n,K]."""
    return jnp.repeat(x, group_size, axis=1)


def _put(values: Array, places: Array, width: int) -> Array:
    """Write values [n,K,S] to the lines [n,W]. Rows of a group write the same prompt to the same places."""

    def put_line(values: Array, places: Array) -> Array:
        empty = jnp.zeros(width, jnp.int32)
        return empty.at[places].set(values, mode="drop")

    n = values.shape[0]
    return jax.vmap(put_line)(values.reshape(n, -1), places.reshape(n, -1))


def _reading(
    source: Array,
    tokens: Array,
    index: Array,
    count: Array,
    width: int,
) -> Reading:
    """Return the ``Reading`` of the tokens that have an index below W."""
    return Reading(
        source=_put(source, index, width),
        target=_put(tokens, index, width),
        count=count,
        index=index,
    )


def _sum_before(x: Array) -> Array:
    """Return for each entry of a line the sum of the entries before it, [n,...] i32."""
    return jnp.cumsum(x, axis=1) - x


def visible(line: Line) -> Bool[Array, "n W W"]:
    """Return which places each place attends to: the prompt of its unit and its own row, up to itself.

    Returns:
        [n,W,W] bool.
    """
    W = line.unit.shape[1]
    same_unit = line.unit[:, :, None] == line.unit[:, None, :]
    is_prompt = line.row[:, None, :] == 0
    same_row = line.row[:, :, None] == line.row[:, None, :]
    is_causal = jnp.tril(jnp.ones((W, W), bool))[None]
    return same_unit & (is_prompt | same_row) & is_causal


def of_targets(
    values: Shaped[Array, "n K S *rest"],
    reading: Reading,
) -> Shaped[Array, "n W *rest"]:
    """Return the values [n,K,S,...] of the rows' tokens in the order of the targets. Inverse of ``take_rows``.

    Returns:
        [n,W,...], 0 after the last target.
    """
    n, K, S, *rest = values.shape
    W = reading.target.shape[1]

    def put_line(values: Array, index: Array) -> Array:
        empty = jnp.zeros((W, *rest), values.dtype)
        return empty.at[index].set(values, mode="drop")

    values_of_line = values.reshape(n, K * S, *rest)
    index_of_line = reading.index.reshape(n, K * S)
    return jax.vmap(put_line)(values_of_line, index_of_line)


def take_rows(
    values: Shaped[Array, "n W *rest"],
    reading: Reading,
) -> Shaped[Array, "n K S *rest"]:
    """Return the values of the targets at the tokens of the rows.

    Args:
        values: [n,W,...], one of each target.

    Returns:
        [n,K,S,...], 0 outside the part of the rows that ``reading`` lists.
    """
    W = values.shape[1]

    def take_line(values: Array, index: Array) -> Array:
        return values[index]

    taken = jax.vmap(take_line)(values, jnp.minimum(reading.index, W - 1))
    is_read = reading.index < W
    num_other_dims = taken.ndim - is_read.ndim
    mask = is_read.reshape(*is_read.shape, *[1] * num_other_dims)
    return jnp.where(mask, taken, jnp.zeros((), taken.dtype))
