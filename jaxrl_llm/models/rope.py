"""Rotary embeddings: the frequencies of plain and of stretched ones, and their tables of cosines and sines.

Each kind of stretching is a row of ``KINDS``: what its numbers are called in config.json, and a function of them.

Owns: those formulas and what their numbers may be. Does not know: how files nest them, who rotates what.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.architecture import Architecture, RopeScaling, positive
from jaxrl_llm.runtime.nested import ConfigError

Stretched = tuple[np.ndarray, float]  # frequencies [H/2], and the factor of cosines and sines


def _linear(freq: np.ndarray, theta: float, *, factor: float) -> Stretched:
    """Positions divided by ``factor``."""
    return freq / factor, 1.0


def _dynamic(freq: np.ndarray, theta: float, *, factor: float) -> Stretched:
    """Stretched from ``max_position_embeddings`` on alone, and no row of ours is longer."""
    return freq, 1.0


def _llama3(
    freq: np.ndarray,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Stretched:
    """Wavelengths above ``original/low`` are divided by ``factor``, those below ``original/high`` kept, and between
    them interpolated linearly in original/wavelength. Source: Llama 3.1's reference code.
    """
    turns = original_max_position_embeddings * freq / (2 * np.pi)  # rotations over the original context
    keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return freq * (keep + (1 - keep) / factor), 1.0


def _yarn(
    freq: np.ndarray,
    theta: float,
    *,
    factor: float,
    original_max_position_embeddings: int,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Stretched:
    """NTK by parts: pairs that turn more than ``beta_fast`` times over the original context are kept, those that turn
    less than ``beta_slow`` times divided by ``factor``, and between them interpolated linearly in the pair's number.
    Source: YaRN (Peng et al. 2023), sections 3.2 and 3.4; its whole numbers (``truncate``) as transformers has them.
    """
    size = 2 * len(freq)
    pair = lambda turns: size * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / 2 / math.log(theta)
    first, last = pair(beta_fast), pair(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = (np.arange(len(freq)) - first) / (last - first if last != first else 0.001)
    stretched = np.clip(ramp, 0.0, 1.0)
    temperature = lambda scale: 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
    if attention_factor is None:
        both = mscale and mscale_all_dim
        attention_factor = temperature(mscale) / temperature(mscale_all_dim) if both else temperature(1.0)
    return freq * (1 - stretched) + freq / factor * stretched, attention_factor


def _longrope(
    freq: np.ndarray,
    theta: float,
    *,
    short_factor: tuple[float, ...],
    long_factor: tuple[float, ...],
    original_max_position_embeddings: int,
    factor: float,
    attention_factor: float | None = None,
) -> Stretched:
    """Each pair by a factor of its own, found by search: ``short_factor``, for no row is longer than the original
    context (``most_positions``). Source: LongRoPE (Ding et al. 2024), with the temperature of Phi-3.
    """
    if attention_factor is None:
        stretch = math.log(max(factor, 1.0)) / math.log(original_max_position_embeddings)
        attention_factor = math.sqrt(1 + stretch)
    return freq / np.asarray(short_factor), attention_factor


class Kind(NamedTuple):
    """A kind of stretching."""

    needs: tuple[str, ...]
    may: tuple[str, ...]
    stretch: Callable[..., Stretched]


ORIGINAL = "original_max_position_embeddings"
KINDS = {
    "linear": Kind(("factor",), (), _linear),
    "dynamic": Kind(("factor",), (), _dynamic),
    "llama3": Kind(("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), (), _llama3),
    "yarn": Kind(
        ("factor", ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        _yarn,
    ),
    "longrope": Kind(("short_factor", "long_factor", ORIGINAL, "factor"), ("attention_factor",), _longrope),
}


def scaling(path: Any, kind: str, given: dict[str, Any], head_size: int) -> RopeScaling:
    """What the file ``path`` says of rope, checked.

    Raises:
        ConfigError: no such kind, a number that it has not or that is missing, or one out of its range.
    """
    if kind not in list(KINDS):
        raise ConfigError(f"{path}: rope_type={kind!r:.60} is not supported; supported: default, {', '.join(KINDS)}")
    needs, may, _ = KINDS[kind]
    for key in needs:
        if key not in given:
            raise ConfigError(f"{path}: {key} is missing, which rope_type={kind!r} needs")
    if unknown := [key for key in given if key not in needs + may and given[key] is not None]:
        raise ConfigError(f"{path}: {unknown[0]}={given[unknown[0]]!r:.60} is not known of rope_type={kind!r}")

    def checked(key: str, value: Any) -> Any:
        if key == "truncate":
            if type(value) is not bool:
                raise ConfigError(f"{path}: truncate={value!r:.60} must be true or false")
            return value
        if key in ("short_factor", "long_factor"):
            if not isinstance(value, list) or len(value) != head_size // 2:
                raise ConfigError(f"{path}: {key}={value!r:.60} must be a list of {head_size // 2} numbers")
            return tuple(positive(path, key, x, whole=False) for x in value)
        return positive(path, key, value, whole=key == ORIGINAL)

    numbers = {key: checked(key, given[key]) for key in needs + may if key in needs or given.get(key) is not None}
    if kind == "llama3":
        gap = numbers["high_freq_factor"] - numbers["low_freq_factor"]
        positive(path, "high_freq_factor - low_freq_factor", gap, whole=False)
    return RopeScaling(kind, tuple(numbers.items()))


def most_positions(scaling: RopeScaling | None, stated: int) -> int:
    """Of a row: what the file states, or less where longer rows would have other frequencies from their start."""
    return min(stated, dict(scaling.numbers)[ORIGINAL]) if scaling and scaling.kind == "longrope" else stated


def frequencies(arch: Architecture, rope: int = 0) -> Stretched:
    """Angular frequency of each rotated pair, [R/2] float64 radians per position, and the factor of both tables.

    Plain: theta^(-2i/R) and 1, R the dimensions of a head that are rotated. The second rope is always plain.
    """
    theta = (arch.rope_theta, arch.local_rope_theta)[rope]
    size = arch.rotary_size or arch.head_size
    freq = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if arch.rope_scaling is None or rope:
        return freq, 1.0
    return KINDS[arch.rope_scaling.kind].stretch(freq, theta, **dict(arch.rope_scaling.numbers))


Tables = tuple[tuple[jax.Array, jax.Array], ...]


def tables(arch: Architecture, positions: jax.Array, every: Tables | None = None) -> Tables:
    """cos and sin of each position's angles, two [...,H/2] float32 of positions [...], for each rope there is.

    Args:
        every: those of positions 0, 1, ... where they are made already.
    """
    if every is not None:
        return jax.tree.map(lambda x: x[positions], every)

    def of(rope: int) -> tuple[jax.Array, jax.Array]:
        freq, factor = frequencies(arch, rope)
        angle = jnp.multiply.outer(positions.astype(jnp.float32), jnp.asarray(freq, jnp.float32))
        both = jnp.cos(angle), jnp.sin(angle)
        return both if factor == 1.0 else tuple(factor * x for x in both)

    return tuple(of(rope) for rope in range(1 + max(0, *(layer.rope for layer in arch.by_layer))))
