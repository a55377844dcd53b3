"""``prompts.arguments`` of tasks that make their questions: whole numbers in bounds, and switches.

Owns: what is allowed and how it is said. Does not know: what an argument is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.runtime.nested import ConfigError


def checked(given: Mapping[str, Any], allowed: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Every argument, in the order of ``allowed``; those that are not given have their defaults.

    Args:
        allowed: argument -> (default, least, most); a switch where the default is a bool.

    Raises:
        ConfigError: an argument that is none of these, or its value.
    """
    for name, value in given.items():
        if name not in allowed:
            known = f"is not one of {', '.join(allowed)}" if allowed else "is set, but prompts.source takes none"
            raise ConfigError(f"prompts.arguments.{name}={value!r} {known}")
        default, least, most = allowed[name]
        is_switch = isinstance(default, bool)
        if not isinstance(value, int) or isinstance(value, bool) != is_switch or not least <= value <= most:
            wanted = "True or False" if is_switch else f"a whole number of at least {least} and at most {most}"
            raise ConfigError(f"prompts.arguments.{name}={value!r} must be {wanted}")
    return {name: default for name, (default, *_) in allowed.items()} | dict(given)
