"""Chat templates: programs of a model's maker, run for so long and no longer, and what they are told besides messages.

Owns: what a setting may tell one, the time it has. Does not know: token ids, what stays text.
"""

from __future__ import annotations

import functools
import re
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config import ConfigError

TEMPLATE_SECONDS = 10.0  # that a prompt may take
TURN = "(a turn of the assistant's)"
# What transformers' apply_chat_template takes for itself and no template sees, or what every prompt tells it.
OWN_KWARGS = ("messages", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation")
OWN_KWARGS += ("conversation", "chat_template", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")


def told(given: Mapping[str, Any], template: Any, hide: Callable[[str], str]) -> dict[str, Any]:
    """``prompts.chat_template_kwargs`` for a template; ``hide`` is done to every text in them but the keys.

    Raises:
        ConfigError: one that the template does not name: it would change nothing.
    """
    for key in given:
        if key in OWN_KWARGS or not re.search(rf"\b{re.escape(key)}\b", str(template)):
            raise ConfigError(f"prompts.chat_template_kwargs has {key!r}, which the model's chat template does not")
    return {key: _deep(hide, value) for key, value in given.items()}


def between_turns(fast: Any, message: dict[str, str], told: dict[str, Any], ends: list[str]) -> str:
    """The text from the end of an assistant's turn to the beginning of the next, ``message`` between them.

    What templates do to the turn itself, such as to leave out what it thought, is not looked at: it stays as it is.

    Args:
        ends: texts of the tokens that end a turn, which the policy has drawn.

    Raises:
        ConfigError: the template refuses.
    """
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": TURN}]
    if message["role"] == "tool" and not re.search(r"\btool\b", str(fast.chat_template)):
        text = message["content"]
        message = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    try:
        after = rendered(fast, [*turn, message], told).partition(TURN)[2]
    except Exception as error:  # jinja's, of a package we need not know
        raise ConfigError(f"the chat template refuses an answer by a {message['role']}: {error}") from error
    stops = [place + len(end) for end in ends if (place := after.find(end)) >= 0]
    return after[min(stops, default=0) :]


def _deep(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep(change, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_deep(change, x) for x in value]
    return change(value) if isinstance(value, str) else value


def rendered(fast: Any, messages: list[dict[str, str]], told: dict[str, Any]) -> str:
    """The text of ``messages`` up to the assistant's turn. A sandbox bounds what a template reaches, this its time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it runs for more than {TEMPLATE_SECONDS:g} s")

    how = {"add_generation_prompt": True, "tokenize": False}
    render = functools.partial(fast.apply_chat_template, messages, **told, **how)
    if threading.current_thread() is not threading.main_thread():  # which alone has signals
        return render()
    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
    try:
        return render()
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
