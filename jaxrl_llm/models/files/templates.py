"""Chat templates: rendering with a time limit, their arguments, and the date that they print.

A chat template is a program from the model's authors. Some templates print today's date by ``strftime_now`` (Llama 3.2,
SmolLM3, GPT-OSS). In a run, this date is always the day on which the run began.

Owns: the template's arguments from the settings, the time limit, the date. Does not know: token ids, which texts stay
plain text.
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
from jaxrl_llm.runtime.checkpoint_files import read_text, read_whole

DATE_CALL = re.compile(rf"\b{DATE}\(\s*(['\"])(.*?)\1\s*\)")
TEMPLATE_SECONDS = 10.0  # time limit per prompt
TURN = "(a turn of the assistant's)"
CALL_ID = "call{:05}"  # id of a call and its answer; Mistral's templates require exactly nine letters or digits
# Arguments of transformers' apply_chat_template that templates do not receive, or that every prompt sets.
OWN_KWARGS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "conversation",
    "chat_template",
    "max_length",
    "return_tensors",
    "return_dict",
    "tokenizer_kwargs",
)


def checked_kwargs(kwargs: Mapping[str, Any], template: Any, hide: Callable[[str], str]) -> dict[str, Any]:
    """Return ``prompts.chat_template_kwargs`` for a template, with ``hide`` applied to every text.

    Raises:
        ConfigError: the template does not use a key, so the key would have no effect; or the date is not valid.
    """
    for key, value in kwargs.items():
        is_read = re.search(rf"\b{re.escape(key)}\b", str(template))
        if key in OWN_KWARGS or not is_read:
            named = f"prompts.chat_template_kwargs.{key}={value!r:.200}"
            raise ConfigError(f"{named} must be left out: the model's chat template does not read it")
    if DATE in kwargs:
        try:
            datetime.date.fromisoformat(kwargs[DATE])
        except (TypeError, ValueError):
            raise ConfigError(
                f"prompts.chat_template_kwargs.{DATE}={kwargs[DATE]!r:.100} must be the day that the template prints, "
                "as '2026-11-26'"
            ) from None
    return map_texts(hide, kwargs)


def dated(config: Config, tokenizer: Any, workdir: pathlib.Path) -> Config:
    """Return the config of a run with the day on which the run began, if its chat template prints a date.

    If the date changed, the prompts of a resumed run would differ from the saved prompts.
    """
    kwargs = config.prompts.chat_template_kwargs
    own_day = hosts.is_first() and _day(config, workdir)
    day = hosts.exchange(own_day)[0]
    if DATE in kwargs or day is None:
        return config
    prompts = dataclasses.replace(config.prompts, chat_template_kwargs={**kwargs, DATE: day})
    try:
        tokenizer.encode_prompt("a", **prompts.encoding)
    except ConfigError:  # the template prints no date
        return config
    return dataclasses.replace(config, prompts=prompts)


def _day(config: Config, workdir: pathlib.Path) -> str | None:
    """Return the day on which the run of a workdir began, or today for a new run.

    None: the run's template prints no date. The day is read from the workdir's config.json. If that file is missing or
    incomplete, as on a new machine, the day is read from the checkpoints.
    """
    try:
        settings = json.loads((workdir / "config.json").read_bytes())
    except (OSError, ValueError):
        checkpoints = bucket.place(config.checkpoint.bucket or workdir / "checkpoints")
        saved = read_whole(checkpoints, None, read_text, say=False, is_alone=True)
        if saved is None:
            return datetime.date.today().isoformat()
        settings = saved[1]["config"]
    with contextlib.suppress(LookupError, TypeError):  # settings without a day: the run has no day
        return settings["prompts"]["chat_template_kwargs"][DATE]
    return None


def between_turns(
    fast: Any,
    messages: list[dict[str, str]],
    kwargs: dict[str, Any],
    ends: list[str],
    other: str | None = None,
) -> str:
    """Return the text between two assistant turns: from the end of one turn to the beginning of the next.

    The ``messages`` are between the two turns. Templates may change the first turn, for example leave out its
    thoughts. Changes of the first turn by the template are ignored: the sampled turn stays unchanged.

    Args:
        ends: texts of the tokens that end a turn. The policy has sampled one of these tokens, unless ``other`` is set.
        other: text of a different last token. The template's end of the turn is then part of the result.

    Raises:
        ConfigError: the template raises an error.
    """
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": TURN}]
    try:
        after = rendered(fast, [*turn, *messages], kwargs).partition(TURN)[2]
    except Exception as error:  # jinja's errors, from a package that is not imported here
        roles = " and a ".join(message["role"] for message in messages)
        raise ConfigError(f"the chat template cannot encode an answer of role {roles}: {error}") from error
    if other is not None:
        return after.removeprefix(other)  # a template may end its turns with any text
    stops = [after.find(end) + len(end) for end in ends if end in after]
    return after[min(stops, default=0) :]


def map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Apply ``change`` to every text in nested lists and dicts, including keys."""
    if isinstance(value, dict):
        return {map_texts(change, key): map_texts(change, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(change, x) for x in value]
    return change(value) if isinstance(value, str) else value


def rendered(fast: Any, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
    """Render ``messages`` up to the beginning of the assistant's turn, with a time limit.

    Jinja's sandbox limits what a template can access; this function limits its time. If the template has no role
    "tool", results of tools become messages of the user in Qwen's form.

    Raises:
        ValueError: the template leaves out some of the ``tool_calls``.
        TimeoutError: the template runs for more than ``TEMPLATE_SECONDS``. Only the main thread has this limit.
    """
    template = fast.get_chat_template(tools=kwargs.get("tools"))  # transformers selects one if there are several

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the template runs for more than {TEMPLATE_SECONDS:g} s")

    if not re.search(r"\btool\b", template):
        messages = _with_user_results(messages)
    messages = _with_call_ids(messages)
    kwargs = dict(kwargs)
    if DATE in kwargs:  # transformers does not pass functions on to a template
        kwargs["chat_template"] = _on_day(template, kwargs.pop(DATE))
    apply = functools.partial(fast.apply_chat_template, **kwargs, add_generation_prompt=True, tokenize=False)

    def render() -> str:
        marked, marks = _marked(messages)
        if marks:
            text = apply(marked)
            if not all(mark in text for mark in marks):
                raise ValueError("the template leaves out some of these tool_calls")
        return apply(messages)

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        return render()
    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
    try:
        return render()
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which every tool call has an id, and every tool message has the id of its call.

    Tool messages are matched to calls by their ids, or else in order. Ids begin again in every turn, because a run
    renders tool results without the earlier turns.
    """
    result = []
    new_ids: dict[Any, str] = {}  # the new id of each call of the last turn, by its old id
    place = 0  # number of the tool message after its calls
    for message in messages:
        place = place + 1 if message["role"] == "tool" else -1
        calls = message.get("tool_calls")
        if calls:
            new_calls = []
            new_ids = {}
            for i, call in enumerate(calls):
                call_id = CALL_ID.format(i)
                if "id" in call:
                    new_ids[call["id"]] = call_id
                new_calls.append({**call, "id": call_id})
            message = {**message, "tool_calls": new_calls}
        elif message["role"] == "tool":
            old_id = message.get("tool_call_id")
            is_valid = re.fullmatch(r"[A-Za-z0-9]{9}", str(old_id)) is not None
            default_id = old_id if is_valid else CALL_ID.format(place)
            message = {**message, "tool_call_id": new_ids.get(old_id, default_id)}
        result.append(message)
    return result


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages with a unique mark in place of each called function's name, and the list of marks."""
    marks = []
    marked = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            mark = f"name_of_call_{len(marks):05}"
            marks.append(mark)
            function = {**call["function"], "name": mark}
            calls.append({**call, "function": function})
        marked.append({**message, "tool_calls": calls} if calls else message)
    return marked, marks


def _with_user_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which tool messages are messages of the user. Consecutive tool messages become one."""
    result: list[dict[str, Any]] = []

    def is_result(message: dict[str, Any]) -> bool:
        return message["role"] == "tool"

    for is_tool, group in itertools.groupby(messages, key=is_result):
        if is_tool:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            result.append({"role": "user", "content": "\n".join(texts)})
        else:
            result += group
    return result


@functools.lru_cache
def _on_day(template: str, day: str) -> str:
    """Return the template with ``day`` in place of its calls for today's date."""
    date = datetime.date.fromisoformat(day)

    def printed(call: re.Match[str]) -> str:
        return json.dumps(date.strftime(call[2]), ensure_ascii=False)

    return DATE_CALL.sub(printed, template)
