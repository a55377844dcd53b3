"""Chat templates: programs of a model's maker, run for so long and no longer, and what they are told besides messages.

Some print today's date (Llama 3.2, SmolLM3, GPT-OSS): by calls of ``strftime_now``. In a run that is the day it began.

Owns: what a setting may tell one, the time it has, which day it is. Does not know: token ids, what stays text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import pathlib
import re
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config import DATE, Config, ConfigError
from jaxrl_llm.runtime import bucket, hosts
from jaxrl_llm.runtime.stored import read_text, read_whole

DATE_CALL = re.compile(rf"\b{DATE}\(\s*(['\"])(.*?)\1\s*\)")
TEMPLATE_SECONDS = 10.0  # that a prompt may take
TURN = "(a turn of the assistant's)"
CALL_ID = "call{:05}"  # of calls and their answers: Mistral's templates refuse one without nine letters or digits
# What transformers' apply_chat_template takes for itself and no template sees, or what every prompt tells it.
OWN_KWARGS = ("messages", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation")
OWN_KWARGS += ("conversation", "chat_template", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")


def told(given: Mapping[str, Any], template: Any, hide: Callable[[str], str]) -> dict[str, Any]:
    """``prompts.chat_template_kwargs`` for a template; ``hide`` is done to every text in them.

    Raises:
        ConfigError: one that the template does not name: it would change nothing; a date that is none.
    """
    for key in given:
        if key in OWN_KWARGS or not re.search(rf"\b{re.escape(key)}\b", str(template)):
            raise ConfigError(f"prompts.chat_template_kwargs has {key!r}, which the model's chat template does not")
    if DATE in given:
        try:
            datetime.date.fromisoformat(given[DATE])
        except (TypeError, ValueError):
            said = f"prompts.chat_template_kwargs.{DATE}={given[DATE]!r:.100}"
            raise ConfigError(f"{said} must be the day that the template prints, as '2026-11-26'") from None
    return deep(hide, given)


def dated(config: Config, tokenizer: Any, workdir: pathlib.Path) -> Config:
    """The config of a run, whose chat template prints the day on which the run began, where it prints one at all.

    Of another day a resumed run would not find its questions again.
    """
    given, day = config.prompts.chat_template_kwargs, hosts.exchange(hosts.is_first() and _day(config, workdir))[0]
    if DATE in given or day is None:
        return config
    prompts = dataclasses.replace(config.prompts, chat_template_kwargs={**given, DATE: day})
    try:
        tokenizer.encode_prompt("a", **prompts.encoding)
    except ConfigError:  # the template prints none
        return config
    return dataclasses.replace(config, prompts=prompts)


def _day(config: Config, workdir: pathlib.Path) -> str | None:
    """On which the run of a workdir began; today where there is none. None: its template prints none.

    It stands in config.json, and where a new machine has none, or one cut short, in the checkpoints.
    """
    try:
        settings = json.loads((workdir / "config.json").read_bytes())
    except (OSError, ValueError):
        checkpoints = bucket.place(config.checkpoint.bucket or workdir / "checkpoints")
        if (saved := read_whole(checkpoints, None, read_text, say=False, is_alone=True)) is None:
            return datetime.date.today().isoformat()
        settings = saved[1]["config"]
    with contextlib.suppress(LookupError, TypeError):  # one without a day is of a run without one
        return settings["prompts"]["chat_template_kwargs"][DATE]
    return None


def between_turns(
    fast: Any, said: list[dict[str, str]], told: dict[str, Any], ends: list[str], other: str | None = None
) -> str:
    """The text from the end of an assistant's turn to the beginning of the next, messages ``said`` between them.

    What templates do to the turn itself, such as to leave out what it thought, is not looked at: it stays as it is.

    Args:
        ends: texts of the tokens that end a turn, one of which the policy has drawn.
        other: that of the token which it has drawn in their place: the template's end of the turn is still to come.

    Raises:
        ConfigError: the template refuses.
    """
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": TURN}]
    try:
        after = rendered(fast, [*turn, *said], told).partition(TURN)[2]
    except Exception as error:  # jinja's, of a package we need not know
        who = " and a ".join(message["role"] for message in said)
        raise ConfigError(f"the chat template refuses an answer by a {who}: {error}") from error
    if other is not None:
        return after.removeprefix(other)  # a template may end its turns with any text
    stops = [place + len(end) for end in ends if (place := after.find(end)) >= 0]
    return after[min(stops, default=0) :]


def deep(change: Callable[[str], str], value: Any) -> Any:
    """``change`` done to every text in nested lists and dicts, keys too."""
    if isinstance(value, dict):
        return {deep(change, key): deep(change, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [deep(change, x) for x in value]
    return change(value) if isinstance(value, str) else value


def rendered(fast: Any, messages: list[dict[str, Any]], told: dict[str, Any]) -> str:
    """The text of ``messages`` up to the assistant's turn. A sandbox bounds what a template reaches, this its time.

    What tools return a template that knows no such role has from the user, in Qwen's form. One that leaves out any of
    the ``tool_calls`` is refused: ValueError.
    """
    template = fast.get_chat_template(tools=told.get("tools"))  # of several, the one that is taken

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it runs for more than {TEMPLATE_SECONDS:g} s")

    if not re.search(r"\btool\b", template):
        messages = _told_by_user(messages)
    messages = _identified(messages)
    how = {"add_generation_prompt": True, "tokenize": False}
    if DATE in told:  # transformers hands no function on to a template
        told = dict(told)
        how["chat_template"] = _on_day(template, told.pop(DATE))
    say = functools.partial(fast.apply_chat_template, **told, **how)

    def render() -> str:
        marked, marks = _marked(messages)
        if marks and not all(map(say(marked).__contains__, marks)):
            raise ValueError("it has no place for these tool_calls")
        return say(messages)

    if threading.current_thread() is not threading.main_thread():  # which alone has signals
        return render()
    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
    try:
        return render()
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _identified(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with an id of each call, and of the call that a tool's message answers: by the ids given, or in order.

    Each turn's begin anew: what a run's tools return is rendered without the turns before.
    """
    said, known, place = [], {}, 0
    for message in messages:
        place = place + 1 if message["role"] == "tool" else -1
        if calls := message.get("tool_calls"):
            ids = [CALL_ID.format(i) for i in range(len(calls))]
            known = {call["id"]: own for call, own in zip(calls, ids, strict=True) if "id" in call}
            message = {**message, "tool_calls": [{**call, "id": own} for call, own in zip(calls, ids, strict=True)]}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            own = given if re.fullmatch(r"[A-Za-z0-9]{9}", str(given)) else CALL_ID.format(place)
            message = {**message, "tool_call_id": known.get(given, own)}
        said.append(message)
    return said


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages with a mark in place of the name of each function that is called, and the marks."""
    marks, marked = [], []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            marks.append(f"name_of_call_{len(marks):05}")
            calls.append({**call, "function": {**call["function"], "name": marks[-1]}})
        marked.append({**message, "tool_calls": calls} if calls else message)
    return marked, marks


def _told_by_user(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Messages of tools as the user's, those that follow each other as one."""
    told = []
    for is_tool, run in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_tool:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in run]
            run = [{"role": "user", "content": "\n".join(texts)}]
        told += run
    return told


@functools.lru_cache
def _on_day(template: str, day: str) -> str:
    """The template with the date where it asks for today's."""
    on = datetime.date.fromisoformat(day)
    return DATE_CALL.sub(lambda call: json.dumps(on.strftime(call[2]), ensure_ascii=False), template)
