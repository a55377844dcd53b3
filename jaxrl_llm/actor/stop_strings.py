"""Stop strings: a completion ends with the first token whose text completes a stop string.

After each chunk of decode steps, each host decodes the new tokens of its own rows and searches the text for stop
strings. The device then cuts the rows after the token that completes a stop string.

Owns: which texts can be stop strings, the position of a cut, the cut. Does not know: when the search runs
(``generator.py``), how a token is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.actor import tables
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import decoding
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.types import STOP_LENGTH, STOP_NONE, STOP_STRING


def has_special(text: str, tokenizer: Any) -> bool:
    """Return whether the text contains a special token. Decoded completions never contain special tokens."""
    return tokenizer.encode(text, special_tokens=True) != tokenizer.encode(text)


def check(
    stops: Sequence[str],
    tokenizer: Any,
    name: str = "sampling.stop_strings",
    instead: str = "sampling.stop_tokens",
) -> None:
    """Check that no stop string contains a special token, because such a stop string would never match.

    Args:
        name: the setting that contains the stop strings.
        instead: the setting that the error message recommends.

    Raises:
        ConfigError: a stop string contains a special token.
    """
    for text in stops:
        if has_special(text, tokenizer):
            raise ConfigError(
                f"{name}={text!r:.200} must not contain a special token: decoded completions have no special tokens, "
                f"so the text would never match. Set {instead} to end completions at special tokens."
            )


def stop(generator: Any, reasons: np.ndarray, lengths: np.ndarray, scanned: np.ndarray) -> Any:
    """Cut the rows that contain a stop string, and return the new stop reasons and lengths [M,E,G].

    Each host searches its own rows. All hosts then cut the same rows.

    Args:
        generator: a ``generator.Generator``.
        reasons: [M,E,G] stop reasons of the rows.
        lengths: [M,E,G] tokens of the rows, including the prompts.
        scanned: [M,E,G] number of tokens of each completion that earlier calls searched; changed in place.
    """
    tokens = sharding.own_rows(generator.state.tokens)
    prompt_lengths = {}
    for place, prompt in generator.open_prompts.items():
        if place[0] in tokens:
            prompt_lengths[place] = len(prompt.tokens)
    stop_strings = generator.sampler.sampling.stop_strings
    own_lengths = find(
        stop_strings,
        generator.decode_text,
        tokens,
        prompt_lengths,
        reasons,
        lengths,
        scanned,
    )
    # All hosts need all cuts, because only one host searches a row that is copied to several hosts.
    all_lengths = hosts.exchange(own_lengths if own_lengths.any() else None)
    cuts = [host_lengths for host_lengths in all_lengths if host_lengths is not None]
    if not cuts:
        return reasons, lengths
    new_length = np.max(cuts, axis=0)
    placed = sharding.put(new_length, sharding.leading(generator.sampler.mesh, new_length))
    generator.state, flags = generator.programs["stop_rows"](generator.state, placed)
    return jax.device_get(flags)


def find(
    stops: Sequence[str],
    decode_text: decoding.Decode,
    tokens: Mapping[int, np.ndarray],
    prompt_lengths: Mapping[tuple[int, int], int],
    reasons: np.ndarray,
    lengths: np.ndarray,
    scanned: np.ndarray,
) -> np.ndarray:
    """Return the new length [M,E,G] i32 of each row that must be cut, and 0 for the other rows.

    Args:
        stops: the stop strings.
        tokens: rows [E,G,S] of this host by shard.
        prompt_lengths: lengths of this host's open prompts by (shard, entry).
        reasons: [M,E,G] stop reasons of the rows.
        lengths: [M,E,G] tokens of the rows, including the prompts.
        scanned: [M,E,G] number of tokens of each completion that earlier calls searched; changed in place.
    """
    new_length = np.zeros(lengths.shape, np.int32)

    def decode(ids: Any) -> str:
        # Only the searched part of a row becomes a list, because whole rows are long.
        return decode_text(ids.tolist())

    for (shard, entry), start in prompt_lengths.items():
        for g in range(lengths.shape[2]):
            row = shard, entry, g
            size = int(lengths[row]) - start
            if size <= scanned[row]:
                continue  # no new tokens: the row has stopped or waits
            completion: Any = tokens[shard][entry, g, start : lengths[row]]
            stop_size = completed_at(stops, decode, completion, int(scanned[row]))
            # If the last allowed token completes a stop string, the row ends by the stop string, not by truncation.
            if stop_size and (stop_size < size or reasons[row] in (STOP_NONE, STOP_LENGTH)):
                new_length[row] = start + stop_size
            scanned[row] = size
    return new_length


def completed_at(
    stops: Sequence[str],
    decode_text: decoding.Decode,
    ids: list[int],
    num_searched: int,
) -> int | None:
    """Return the smallest number of tokens that contains a stop string, or None without a stop string.

    Only numbers of tokens above ``num_searched`` are tried. The function decodes the new tokens and a window before
    them. The window is at least as long as the longest stop string.

    Args:
        num_searched: the number of tokens that earlier calls searched.
    """
    if not stops:
        return None

    def is_complete(text: str) -> bool:
        return any(stop in text for stop in stops)

    begin = decoding.window_before(decode_text, ids, num_searched, max(map(len, stops)))
    text = decode_text(ids[begin:])
    # An incomplete character at the end decodes to a replacement character, which can hide a stop string just before
    # it.
    if not is_complete(text) and decoding.REPLACEMENT not in text[:-1]:
        return None
    for size in range(num_searched + 1, len(ids) + 1):
        if not is_complete(decode_text(ids[begin:size])):
            continue
        if begin == 0 or is_complete(decode_text(ids[:size])):
            return size
    return None


def cut(state: Any, new_length: Any) -> tuple[Any, Any]:
    """Cut the rows of a ``SamplerState`` to ``new_length`` [M,E,G] if it is positive, and free their slots.

    Returns:
        The new state, and its stop reasons and lengths [M,E,G].
    """
    S = state.tokens.shape[3]
    is_cut = new_length > 0
    length = jnp.where(is_cut, new_length, state.length)
    keep = jnp.arange(S)[None, None, None, :] < length[..., None]
    row = jnp.maximum(state.slot_row, 0)
    slot_cut = jnp.take_along_axis(tables.by_row(is_cut), row, axis=1)
    columns = {}
    for name, column in state.columns.items():
        keep_values = keep.reshape(*keep.shape, *(1,) * (column.ndim - 4))
        columns[name] = jnp.where(keep_values, column, 0)
    state = state.replace(
        length=length,
        tokens=jnp.where(keep, state.tokens, 0),
        behaviour_logp=jnp.where(keep, state.behaviour_logp, 0.0),
        policy_version=jnp.where(keep, state.policy_version, -1),
        stop_reason=jnp.where(is_cut, STOP_STRING, state.stop_reason).astype(jnp.int8),
        slot_row=jnp.where(slot_cut, -1, state.slot_row),
        columns=columns,
    )
    return state, (state.stop_reason, state.length)
