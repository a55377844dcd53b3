"""Checks of ``prompts.arguments`` for tasks that generate their questions: bounded whole numbers and switches.

Owns: the allowed values, the error messages. Does not know: the meaning of an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.settings.schema import ConfigError

Allowed = Mapping[str, tuple[int, int, int]]  # argument -> (default, least, most)


def checked(arguments: Mapping[str, Any], allowed: Allowed) -> dict[str, Any]:
    """Return every argument in the order of ``allowed``. Missing arguments have their default.

    Args:
        allowed: the arguments of the task. An argument with a bool as default is a switch.

    Raises:
        ConfigError: an unknown argument, or a value that is not allowed.
    """
    for name, value in arguments.items():
        rule = _violated_rule(name, value, allowed)
        if rule:
            raise ConfigError(f"prompts.arguments.{name}={value!r} {rule}")
    values = {}
    for name, (default, _, _) in allowed.items():
        values[name] = arguments.get(name, default)
    return values


def _violated_rule(name: str, value: Any, allowed: Allowed) -> str:
    """Return the rule that an argument violates, or "" if it is allowed."""
    if not allowed:
        return "is set, but prompts.source takes none"
    if name not in allowed:
        return f"is not one of {', '.join(allowed)}"
    default, least, most = allowed[name]
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "must be True or False"
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        return f"must be a whole number of at least {least} and at most {most}"
    return ""
