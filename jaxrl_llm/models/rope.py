"""Rotary embeddings: frequencies with and without scaling to longer contexts, and tables of cosines and sines.

Each kind of scaling is a row of ``KINDS``: the names of its numbers in config.json, and the function of these numbers.

Owns: the formulas and the allowed numbers. Does not know: how files nest the numbers, how attention rotates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.architecture import Architecture, RopeScaling, positive
from jaxrl_llm.settings.schema import ConfigError

ScaledFrequencies = tuple[np.ndarray, float]  # frequencies [H/2], and a factor of cosines and sines


def _linear(freq: np.ndarray, theta: float, *, factor: float) -> ScaledFrequencies:
    """Divide positions by ``factor``."""
    return freq / factor, 1.0


def _dynamic(freq: np.ndarray, theta: float, *, factor: float) -> ScaledFrequencies:
    """Leave frequencies unchanged: this kind scales only rows longer than ``max_position_embeddings``.

    No row of this package is longer.
    """
    return freq, 1.0


def _llama3(
    freq: np.ndarray,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> ScaledFrequencies:
    """Scale frequencies by wavelength, as Llama 3.1's reference code does.

    - Wavelengths above ``original/low``: frequencies are divided by ``factor``.
    - Wavelengths below ``original/high``: frequencies are kept.
    - Between them: linear interpolation in original/wavelength.
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
) -> ScaledFrequencies:
    """Scale frequencies by "NTK by parts".

    - Pairs of dimensions that rotate more than ``beta_fast`` times over the original context: frequencies are kept.
    - Pairs that rotate less than ``beta_slow`` times: frequencies are divided by ``factor``.
    - Between them: linear interpolation in the pair's index.

    ``truncate`` rounds the two limits outward to whole indices, as transformers does.

    Source: YaRN (Peng et al. 2023), sections 3.2 and 3.4.
    """
    size = 2 * len(freq)

    def pair(turns: float) -> float:
        """Return the index of the pair of dimensions that makes this many rotations over the original context."""
        return size * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / 2 / math.log(theta)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    first = pair(beta_fast)
    last = pair(beta_slow)
    if truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, size - 1)
    width = last - first if last != first else 0.001
    scaled_share = np.clip((np.arange(len(freq)) - first) / width, 0.0, 1.0)
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = temperature(mscale) / temperature(mscale_all_dim)
        else:
            attention_factor = temperature(1.0)
    return freq * (1 - scaled_share) + freq / factor * scaled_share, attention_factor


def _longrope(
    freq: np.ndarray,
    theta: float,
    *,
    short_factor: tuple[float, ...],
    long_factor: tuple[float, ...],
    original_max_position_embeddings: int,
    factor: float,
    attention_factor: float | None = None,
) -> ScaledFrequencies:
    """Divide the frequency of each pair by its own ``short_factor``, which the model's authors found by search.

    ``long_factor`` is not used, because no row is longer than the original context (``most_positions``).
    Source: LongRoPE (Ding et al. 2024), with the temperature of Phi-3.
    """
    if attention_factor is None:
        stretch = math.log(max(factor, 1.0)) / math.log(original_max_position_embeddings)
        attention_factor = math.sqrt(1 + stretch)
    return freq / np.asarray(short_factor), attention_factor


class Kind(NamedTuple):
    """A kind of rope scaling: names of required numbers, names of optional numbers, and the function."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    scale: Callable[..., ScaledFrequencies]


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
    "longrope": Kind(
        ("short_factor", "long_factor", ORIGINAL, "factor"),
        ("attention_factor",),
        _longrope,
    ),
}


def scaling(path: Any, kind: str, settings: dict[str, Any], head_size: int) -> RopeScaling:
    """Return the checked rope scaling of the file ``path``.

    Args:
        path: the config.json, for error messages.
        kind: ``rope_type``, a key of ``KINDS``.
        settings: the numbers by their names in the file.

    Raises:
        ConfigError: an unknown kind, an unknown or missing number, or a number out of its range.
    """
    if kind not in list(KINDS):
        raise ConfigError(f"{path}: rope_type={kind!r:.60} is not supported; supported: default, {', '.join(KINDS)}")
    required, optional, _ = KINDS[kind]
    for key in required:
        if key not in settings:
            raise ConfigError(f"{path}: {key} is missing; rope_type={kind!r} requires it")
    for key, value in settings.items():
        if key not in required + optional and value is not None:
            raise ConfigError(
                f"{path}: {key}={value!r:.60} is not supported with rope_type={kind!r}; supported: "
                f"{', '.join(required + optional)}"
            )

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

    numbers = {}
    for key in required + optional:
        if key in required or settings.get(key) is not None:
            numbers[key] = checked(key, settings[key])
    if kind == "llama3":
        gap = numbers["high_freq_factor"] - numbers["low_freq_factor"]
        positive(path, "high_freq_factor - low_freq_factor", gap, whole=False)
    return RopeScaling(kind, tuple(numbers.items()))


def most_positions(scaling: RopeScaling | None, stated: int) -> int:
    """Return the largest number of positions of a row.

    This is ``stated``, the number in the file. With longrope it is at most the original context, because longer rows
    would have other frequencies for all their positions.
    """
    if scaling is None or scaling.kind != "longrope":
        return stated
    return min(stated, dict(scaling.numbers)[ORIGINAL])


def frequencies(arch: Architecture, rope: int = 0) -> ScaledFrequencies:
    """Return the angular frequency of each rotated pair and the factor of both tables.

    Frequencies are [R/2] float64, in radians per position. R is the number of rotated dimensions of a head. Without
    scaling, the frequency is theta^(-2i/R) and the factor is 1. The second rope (``rope=1``) is never scaled.
    """
    theta = (arch.rope_theta, arch.local_rope_theta)[rope]
    size = arch.rotary_size or arch.head_size
    freq = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if arch.rope_scaling is None or rope:
        return freq, 1.0
    return KINDS[arch.rope_scaling.kind].scale(freq, theta, **dict(arch.rope_scaling.numbers))


Tables = tuple[tuple[jax.Array, jax.Array], ...]


def tables(arch: Architecture, positions: jax.Array, all_tables: Tables | None = None) -> Tables:
    """Return cosines and sines of each position's angles for each rope: two [...,H/2] float32 of positions [...].

    Args:
        all_tables: tables of the positions 0, 1, ... from an earlier call; None = compute the tables.
    """
    if all_tables is not None:
        return jax.tree.map(lambda x: x[positions], all_tables)
    indices = [layer.rope for layer in arch.by_layer]
    num_ropes = 1 + max([0, *indices])
    return tuple(_table(arch, rope, positions) for rope in range(num_ropes))


def _table(arch: Architecture, rope: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of one rope."""
    freq, factor = frequencies(arch, rope)
    angle = jnp.multiply.outer(positions.astype(jnp.float32), jnp.asarray(freq, jnp.float32))
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    if factor == 1.0:
        return cos, sin
    return factor * cos, factor * sin
