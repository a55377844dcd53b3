"""The worker process in which a hindsight function makes lines of external rollouts from the run's own completions.

Owns: the call of the function. Does not know: deadlines, the content of a line, jax.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from jaxrl_llm.scoring import reward_worker
from jaxrl_llm.settings.functions import awaited


def call(function: Callable, prompt: Any, columns: dict[str, Any], completions: list[str]) -> tuple[list[str], str]:
    """Call ``function`` on the completions of one prompt. Return its lines as JSON, and an error message or ""."""
    try:
        given = {name: [deepcopy(value) for _ in completions] for name, value in columns.items()}
        made = function([deepcopy(prompt) for _ in completions], completions, **given)
        return [json.dumps(line) for line in awaited(made)], ""
    except BaseException as error:  # SystemExit too: a user's function must not end this process
        return [], reward_worker.message(error)


main = functools.partial(reward_worker.main, call=call)
