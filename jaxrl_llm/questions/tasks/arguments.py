"""Checks of ``prompts.arguments`` for tasks that generate their questions: bounded whole numbers and switches.

Owns: the allowed values, the error messages. Does not know: the meaning of an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.settings.schema import ConfigError


def checked(arguments: Mapping[str, Any], allowed: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Return every argument in the order of ``allowed``. Missing arguments have their default.

    Args:
        allowed: argument -> (default, least, most). An argument with a bool as default is a switch.

    Raises:
        ConfigError: an unknown argument, or a value that is not allowed.
    """
    for name, value in arguments.items():
        if name not in allowed:
            names = f"is not one of {', '.join(allowed)}" if allowed else "is set, but prompts.source takes none"
            raise ConfigError(f"prompts.arguments.{name}={value!r} {names}")
        default, least, most = allowed[name]
        is_switch = isinstance(default, bool)
        has_type = isinstance(value, int) and isinstance(value, bool) == is_switch
        if not has_type or not least <= value <= most:
            form = "True or False" if is_switch else f"a whole number of at least {least} and at most {most}"
            raise ConfigError(f"prompts.arguments.{name}={value!r} must be {form}")
    defaults = {name: default for name, (default, _, _) in allowed.items()}
    return defaults | dict(arguments)
