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
    parameters = config["rope_scaling"] or config["rope_parameters"] or {}
    local_parameters = {"rope_theta": config.get("rope_local_base_freq")}
    if local and isinstance(parameters, dict) and {"full_attention", "sliding_attention"} & set(parameters):
        local_parameters |= _object(path, parameters.get("sliding_attention") or {})
        parameters = parameters.get("full_attention") or {}
    parameters = {"rope_theta": config["rope_theta"], **_object(path, parameters)}
    if "partial_rotary_factor" in keys:
        parameters = {key: value for key, value in parameters.items() if key not in hybrids.OF_ROPE}
    theta, kind, numbers = _base(path, parameters)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    if local:
        fields["local_rope_theta"], local_kind, local_numbers = _base(path, local_parameters)
        if local_kind != "default" or local_numbers:
            raise ConfigError(f"{path}: rope_type={local_kind!r:.60} of layers with a window must be default")
    if kind == "default":
        return fields
    if kind in ("llama3", "yarn", "longrope"):
        default_context = numbers.get(rope.ORIGINAL, config["max_position_embeddings"])
        numbers[rope.ORIGINAL] = config[rope.ORIGINAL] or default_context
    if kind == "longrope":  # without a factor in the file, the ratio of the two contexts is the factor
        max_positions = positive(path, "max_position_embeddings", config["max_position_embeddings"])
        original = positive(path, rope.ORIGINAL, numbers[rope.ORIGINAL])
        numbers["factor"] = numbers.get("factor") or max_positions / original
    fields["rope_scaling"] = rope.scaling(path, kind, numbers, size)
    return fields


def keys_of(arch: Architecture, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json keys about rope and positions.

    transformers 4 and 5 compute the same frequencies from these keys.

    Args:
        keys: the keys of the family.
    """
    scaling = arch.rope_scaling
    max_positions = arch.max_positions
    if scaling is None:
        plain: dict[str, Any] = {
            "max_position_embeddings": max_positions,
            "rope_theta": arch.rope_theta,
            "rope_scaling": None,
        }
        if keys["rope_parameters"]:  # replaces the family's default
            plain["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": arch.rope_theta,
            }
        return plain
    numbers = dict(scaling.numbers)
    top_level = {}
    if scaling.kind == "longrope":  # transformers 4 reads the original context here; the factor is the ratio
        top_level[rope.ORIGINAL] = numbers[rope.ORIGINAL]
        max_positions = round(numbers["factor"] * numbers[rope.ORIGINAL])
    if scaling.kind == "yarn" and numbers[rope.ORIGINAL] == max_positions:
        # Do not write the key at its default, because transformers would then take the factor 1.
        del numbers[rope.ORIGINAL]
    return {
        "max_position_embeddings": max_positions,
        "rope_theta": arch.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, **numbers},
        **top_level,
    }


def _object(path: Any, value: Any) -> dict[str, Any]:
    """Return ``rope_parameters`` after a check."""
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: rope_parameters={value!r:.60} must be an object or null")
    return value


def _base(path: Any, parameters: dict[str, Any]) -> tuple[float, Any, dict[str, Any]]:
    """Return the base (theta) of a rope, its kind, and its other numbers."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))  # files until 2024 have the key "type"
    numbers = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type", "type")}
    rotary_factor = numbers.pop("partial_rotary_factor", 1.0)
    if rotary_factor not in (1.0, None):
        raise ConfigError(f"{path}: partial_rotary_factor={rotary_factor!r:.60} must be 1")
    return (
        positive(path, "rope_theta", parameters["rope_theta"], whole=False),
        kind,
        numbers,
    )
