"""Rope in config.json. transformers 5 merges ``rope_theta`` and ``rope_scaling`` into ``rope_parameters``.

Owns: the nesting of rope keys in files. Does not know: the meaning of the numbers (models.rope).
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import rope
from jaxrl_llm.models.architecture import Architecture, positive
from jaxrl_llm.models.files import hybrids


def ropes_of(path: Any, config: dict[str, Any], size: int, *, local: bool, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an ``Architecture`` about rope: the bases and the scaling.

    Args:
        path: the config.json, for error messages.
        config: its contents, with defaults for absent keys.
        size: number of dimensions of a head that rope rotates.
        local: layers with a window have a separate rope.
        keys: the keys of the family.
    """
    given = config["rope_scaling"] or config["rope_parameters"] or {}
    nearby = {"rope_theta": config.get("rope_local_base_freq")}
    if local and isinstance(given, dict) and {"full_attention", "sliding_attention"} & set(given):
        nearby |= _object(path, given.get("sliding_attention") or {})
        given = given.get("full_attention") or {}
    given = {"rope_theta": config["rope_theta"], **_object(path, given)}
    if "partial_rotary_factor" in keys:
        given = {key: value for key, value in given.items() if key not in hybrids.OF_ROPE}
    theta, kind, given = _base(path, given)
    found = {"rope_theta": theta, "rope_scaling": None}
    if local:
        found["local_rope_theta"], local_kind, rest = _base(path, nearby)
        if local_kind != "default" or rest:
            raise ConfigError(f"{path}: rope_type={local_kind!r:.60} of layers with a window must be default")
    if kind == "default":
        return found
    if kind in ("llama3", "yarn", "longrope"):
        given[rope.ORIGINAL] = config[rope.ORIGINAL] or given.get(rope.ORIGINAL, config["max_position_embeddings"])
    if kind == "longrope":  # without a factor in the file, the ratio of the two contexts is the factor
        most = positive(path, "max_position_embeddings", config["max_position_embeddings"])
        given["factor"] = given.get("factor") or most / positive(path, rope.ORIGINAL, given[rope.ORIGINAL])
    return found | {"rope_scaling": rope.scaling(path, kind, given, size)}


def keys_of(arch: Architecture, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json keys about rope and positions.

    transformers 4 and 5 compute the same frequencies from these keys.

    Args:
        keys: the keys of the family.
    """
    scaling, most = arch.rope_scaling, arch.max_positions
    if scaling is None:
        plain = {"max_position_embeddings": most, "rope_theta": arch.rope_theta, "rope_scaling": None}
        said = {"rope_type": "default", "rope_theta": arch.rope_theta}
        return plain | ({"rope_parameters": said} if keys["rope_parameters"] else {})  # else: the family's default
    numbers, beside = dict(scaling.numbers), {}
    if scaling.kind == "longrope":  # transformers 4 reads the original context here; the factor is the ratio
        beside = {rope.ORIGINAL: numbers[rope.ORIGINAL]}
        most = round(numbers["factor"] * numbers[rope.ORIGINAL])
    if scaling.kind == "yarn" and numbers[rope.ORIGINAL] == most:
        del numbers[rope.ORIGINAL]  # this is the default; if stated, it would mean that the factor is 1
    numbers = {"rope_type": scaling.kind, **numbers}
    return {"max_position_embeddings": most, "rope_theta": arch.rope_theta, "rope_scaling": numbers, **beside}


def _object(path: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: rope_parameters={value!r:.60} must be an object or null")
    return value


def _base(path: Any, given: dict[str, Any]) -> tuple[float, Any, dict[str, Any]]:
    """Return the base (theta) of a rope, its kind, and its other numbers."""
    kind = given.get("rope_type", given.get("type", "default"))  # files until 2024 have the key "type"
    rest = {key: value for key, value in given.items() if key not in ("rope_theta", "rope_type", "type")}
    if rest.pop("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ConfigError(f"{path}: partial_rotary_factor={given['partial_rotary_factor']!r:.60} must be 1")
    return positive(path, "rope_theta", given["rope_theta"], whole=False), kind, rest
