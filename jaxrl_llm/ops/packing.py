"""Packing: ragged rows laid side by side in lines, so that the learner computes few positions that hold no token.

A unit is what shares a prompt: a group of G rows, or one row. It lies in its line whole: its prompt once, then its
completions one after the other. Each position counts on from its prompt, and sees the prompt and its own completion:

    line   | prompt a | a's 1st | a's 2nd | prompt b | b's 1st | b's 2nd | empty |

A completion's last token predicts nothing, and so it has no place.

Letters: U units, W tokens of a line, n lines, X units that a line has place for, K = X*G rows of a line, S row width.
Does not know: models, what rows mean.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, Shaped

# A line has place for this many times the units that fill it at full length: few batches are raggeder.
DENSEST = 4


class Reading(NamedTuple):
    """A part of every row, completion or prompt, as a list of what predicts its tokens: chunks of it are full."""

    source: jax.Array  # [n,W] i32 places that predict the part's tokens, in the rows' order; 0 after the last
    target: jax.Array  # [n,W] i32 the tokens they predict; 0 after the last
    count: jax.Array  # [n] i32 how many there are
    index: jax.Array  # [n,K,S] i32 which of them is each token of a row; W off the part


class Line(NamedTuple):
    """What lies at each place of n lines of K rows: the tokens that predict another."""

    position: jax.Array  # [n,W] i32 of each token in its row, 0 where a line is empty
    unit: jax.Array  # [n,W] i32 1.. by unit, 0 where empty
    row: jax.Array  # [n,W] i32 1.. by row, 0 of a prompt or where empty
    tokens: jax.Array  # [n,W] i32, 0 where empty
    completions: Reading
    prompts: Reading  # from their second token on; a group's prompt is there once


def units_per_line(width: int, unit_width: int) -> int:
    """X = 4 W / unit_width: places for units of at most ``unit_width`` tokens in a line of W = ``width``."""
    return DENSEST * width // unit_width


def unit_size(prompt_length: Int[ArrayLike, "*units"], own: Int[ArrayLike, "*units G"]) -> Int[Array, "*units"]:
    """What units take of their lines: places, or targets where those are more (short prompts of many rows).

    Args:
        prompt_length: [...] i32 of each unit's prompt.
        own: [...,G] i32 completion tokens of its rows.

    Returns:
        [...] i32 ``max(prompt + sum(own - 1), sum(own))`` over rows with a completion.
    """
    places = prompt_length + jnp.sum(jnp.maximum(own - 1, 0), axis=-1)
    return jnp.maximum(places, jnp.sum(own, axis=-1))


def first_fit(
    size: Int[ArrayLike, " U"], *, width: int, max_units: int
) -> tuple[Int[Array, "U {max_units}"], Int[Array, ""]]:
    """First-fit decreasing: units, the longest first, each to the first line that has room.

    At most 11/9 as many lines as there must be, and one (Johnson 1973), where no line has ``max_units`` of them.

    Args:
        size: [U] i32 of each unit (``unit_size``), at most ``width``; a unit of 0 is left out.
        width: W.
        max_units: X.

    Returns:
        unit_of [U,X] i32, the units of each line, -1 = none; and how many lines are used, [] i32: the first ones.
    """
    U = size.shape[0]

    def put(lines, unit):
        filled, count, unit_of = lines
        fits = (filled + size[unit] <= width) & (count < max_units)
        line = jnp.where(size[unit] > 0, jnp.argmax(fits), U)  # one does, at the worst the last; line U is nowhere
        unit_of = unit_of.at[line, count[line]].set(unit, mode="drop")
        return (filled.at[line].add(size[unit], mode="drop"), count.at[line].add(1, mode="drop"), unit_of), None

    nothing = jnp.zeros(U, jnp.int32)
    order = jnp.argsort(-size, stable=True).astype(jnp.int32)
    (_, count, unit_of), _ = jax.lax.scan(put, (nothing, nothing, jnp.full((U, max_units), -1, jnp.int32)), order)
    return unit_of, jnp.sum(count > 0, dtype=jnp.int32)


def lay(
    tokens: Int[ArrayLike, "n K S"],
    prompt_length: Int[ArrayLike, "n K"],
    length: Int[ArrayLike, "n K"],
    *,
    width: int,
    group_size: int,
) -> Line:
    """Lay rows in their lines.

    Args:
        tokens: [n,K,S] i32 right-padded rows ``prompt ++ completion``; each run of ``group_size`` has one prompt.
        prompt_length, length: [n,K] i32; both 0 where there is no row.
        width: W, at least what the units of every line take.
        group_size: G.

    Returns:
        The lines, whose fields ``Line`` describes.
    """
    n, K, S = tokens.shape
    own = length - prompt_length
    laid = jnp.maximum(own - 1, 0)
    before, laid_before = (jnp.cumsum(x, axis=1) - x for x in (own, laid))  # of the rows before, in the line
    of_unit = lambda x: x.reshape(n, K // group_size, group_size)
    prompt_once = of_unit(prompt_length)[..., 0]
    prompts_before = jnp.cumsum(prompt_once, axis=1) - prompt_once
    prompt_at = jnp.repeat(prompts_before + of_unit(laid_before)[..., 0], group_size, axis=1)  # [n,K]
    completion_at = jnp.repeat(prompts_before + prompt_once, group_size, axis=1) + laid_before

    at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (n, K, S))
    in_prompt = at < prompt_length[..., None]
    place = jnp.where(in_prompt, prompt_at[..., None] + at, (completion_at - prompt_length)[..., None] + at)
    # The prompt's last token predicts the first completion token, and each other token the next.
    is_first = at == prompt_length[..., None]
    source = jnp.where(is_first, (prompt_at + prompt_length)[..., None] - 1, place - 1)
    place = jnp.where(in_prompt | (at + 1 < length[..., None]), place, width)  # W is nowhere
    predicted_once = jnp.maximum(prompt_once - 1, 0)  # of a prompt, all but its first token
    prompts_read_before = jnp.repeat(jnp.cumsum(predicted_once, axis=1) - predicted_once, group_size, axis=1)
    number = jnp.broadcast_to(1 + jnp.arange(K, dtype=jnp.int32)[None, :, None], (n, K, S))

    def put(values: jax.Array, places: jax.Array) -> jax.Array:  # [n,K,S] to [n,W]; siblings write one prompt alike
        one = lambda value, place: jnp.zeros(width, jnp.int32).at[place].set(value, mode="drop")
        return jax.vmap(one)(values.reshape(n, -1), places.reshape(n, -1))

    def read(part: jax.Array, first: jax.Array | int, read_before: jax.Array, count: jax.Array) -> Reading:
        index = jnp.where(part, (read_before - first)[..., None] + at, width)
        return Reading(put(source, index), put(tokens, index), count, index)

    return Line(
        position=put(at, place),
        unit=put((number - 1) // group_size + 1, place),
        row=put(jnp.where(in_prompt, 0, number), place),
        tokens=put(tokens, place),
        completions=read((at < length[..., None]) & ~in_prompt, prompt_length, before, jnp.sum(own, axis=1)),
        prompts=read(in_prompt & (at > 0), 1, prompts_read_before, jnp.sum(predicted_once, axis=1)),
    )


def visible(line: Line) -> Bool[Array, "n W W"]:
    """Which places each place sees: of its unit the prompt, and its own row, up to itself.

    Returns:
        [n,W,W] bool.
    """
    W = line.unit.shape[1]
    same_unit = line.unit[:, :, None] == line.unit[:, None, :]
    own = (line.row[:, None, :] == 0) | (line.row[:, :, None] == line.row[:, None, :])
    return same_unit & own & jnp.tril(jnp.ones((W, W), bool))[None]


def of_targets(values: Shaped[ArrayLike, "n K S *rest"], reading: Reading) -> Shaped[Array, "n W *rest"]:
    """What the rows' tokens [n,K,S,...] have, by target: the inverse of ``take_rows``.

    Returns:
        [n,W,...], 0 after the last target.
    """
    n, K, S, *rest = values.shape
    W = reading.target.shape[1]
    one = lambda value, index: jnp.zeros((W, *rest), value.dtype).at[index].set(value, mode="drop")
    return jax.vmap(one)(values.reshape(n, K * S, *rest), reading.index.reshape(n, K * S))


def take_rows(values: Shaped[ArrayLike, "n W *rest"], reading: Reading) -> Shaped[Array, "n K S *rest"]:
    """Put what is of the targets back to the tokens of the rows.

    Args:
        values: [n,W,...], one of each target.

    Returns:
        [n,K,S,...], 0 off the part that was read.
    """
    W = values.shape[1]
    taken = jax.vmap(lambda x, i: x[i])(values, jnp.minimum(reading.index, W - 1))
    is_read = (reading.index < W).reshape(*reading.index.shape, *(1,) * (taken.ndim - 3))
    return jnp.where(is_read, taken, jnp.zeros((), taken.dtype))
