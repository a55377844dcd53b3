"""The process that a function of hindsight runs in: answers go in, lines come out.

Owns: its call. Does not know: deadlines, what is in a line, jax.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from jaxrl_llm.actor import reward_worker
from jaxrl_llm.runtime.functions import awaited


def call(function: Callable, prompt: Any, columns: dict[str, Any], completions: list[str]) -> tuple[list[str], str]:
    """Lines as JSON, and what went wrong, "" where nothing did."""
    try:
        given = {name: [deepcopy(value) for _ in completions] for name, value in columns.items()}
        made = function([deepcopy(prompt) for _ in completions], completions, **given)
        return [json.dumps(line) for line in awaited(made)], ""
    except BaseException as error:  # SystemExit too
        return [], reward_worker.message(error)


main = functools.partial(reward_worker.main, call=call)
