"""The worker process in which environments answer the policy's turns.

An environment has one of three forms:

    class      Interface of TRL: a constructor without arguments, ``reset(**columns)``, and tools, which are the public
               methods with a docstring. ``get_reward()`` is optional and returns the episode's reward so far. The
               results of the called tools are the answer to a turn. A turn without a tool call ends the episode.
    function   ``(prompt, turns, **columns) -> str | None``. It receives the texts of all turns so far, and returns the
               answer to the newest turn. None ends the episode.
    agent      A program that requests the policy's turns (``agents``).

A turn calls tools in the form of Qwen and Hermes, ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, or in
another form of ``tool_calls``.

The process keeps an episode from its first turn on. A process without the episode, because the process is new or
another process began the episode, rebuilds the episode in one of two ways:

    replay     A new instance answers the policy's earlier turns. It must give the same answers.
    restore    A class with ``state()`` and ``restore(state)``: a new instance receives the state after the previous
               turn, and ``reset`` is not called.

Owns: episodes, the tools of a class, their execution. Does not know: deadlines, tokens, jax.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.conversations import agents, tool_calls
from jaxrl_llm.runtime import json_lines
from jaxrl_llm.scoring import reward_worker
from jaxrl_llm.scoring.worker_program import message
from jaxrl_llm.settings.functions import awaited

NO_TOOLS = ("reset", "get_reward")  # public methods that the policy must not call
SAVING = ("state", "restore")  # if a class has both methods, the policy must not call these two either
MAX_ANSWER_CHARS = 2**20

_episodes: dict[str, Episode | agents.Episode] = {}
_failed: set[str] = set()  # tools that have raised; each is reported on stderr once


def tools_of(environment: type) -> list[str]:
    """Return the names of the methods that the policy may call."""
    hidden = [*NO_TOOLS]
    if is_saved(environment):
        hidden += SAVING
    names = []
    for name in dir(environment):
        if name.startswith("_") or name in hidden:
            continue
        method = getattr(environment, name)
        if callable(method) and getattr(method, "__doc__", None):
            names.append(name)
    return names


def is_saved(environment: type) -> bool:
    """Return whether a class can continue an episode from a saved state."""
    return all(callable(getattr(environment, name, None)) for name in SAVING)


@functools.cache
def _kinds_of(environment: type) -> dict[str, tool_calls.Kinds]:
    """Return which parameters of each tool accept a string or null, according to their type hints."""
    kinds: dict[str, tool_calls.Kinds] = {}
    for name in tools_of(environment):
        with contextlib.suppress(Exception):  # a type hint may be a name that is not defined
            hints = typing.get_type_hints(getattr(environment, name))
            kinds[name] = {parameter: _kinds(hint) for parameter, hint in hints.items()}
    return kinds


def _kinds(hint: Any) -> set[str]:
    """Return the subset of {"string", "null"} that a type hint accepts."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return {kind for part in typing.get_args(hint) for kind in _kinds(part)}
    if hint is str or isinstance(hint, str):  # an argument of a Literal is a string itself
        return {"string"}
    if hint is None or hint is type(None):
        return {"null"}
    return set()


class Episode:
    """Episode of an environment class: an instance of the class, its tools and the number of answered turns.

    Args:
        num_turns: answered turns. Above 0, the instance is restored from ``state``; else it is reset with ``columns``.

    Attributes:
        opening: the text that ``reset`` returned; None after a restore.
    """

    def __init__(
        self,
        environment: type,
        columns: dict[str, Any],
        num_turns: int = 0,
        state: Any = None,
    ):
        self.instance = environment()
        self.num_turns = num_turns
        self.tools = {name: getattr(self.instance, name) for name in tools_of(environment)}
        self.opening: str | None = None
        if num_turns:
            awaited(self.instance.restore(state))
        else:
            self.opening = _text_or_none(awaited(self.instance.reset(**columns)), "reset")

    def state(self) -> Any:
        """Return the argument of ``restore`` as plain JSON, None if the class cannot be saved."""
        if not is_saved(type(self.instance)):
            return None
        try:
            return json.loads(json.dumps(awaited(self.instance.state()), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"state must return plain JSON: {error}") from error

    def answer(self, turn: str) -> list[dict[str, str]] | None:
        """Return one message for each tool call of a turn, None if the turn has no call.

        If a call is invalid or its tool raises, the message is the error, so that the policy can correct the call.
        """
        self.num_turns += 1
        messages = []
        for call in tool_calls.calls_of(turn):
            messages += [{"role": "tool", "content": result} for result in self._results(call)]
        return messages or None

    def _results(self, call: tool_calls.Call) -> list[str]:
        try:
            functions = tool_calls.read(call, _kinds_of(type(self.instance)))
        except Exception as error:
            return [_error_text(error)]
        return [self._call(name, arguments) for name, arguments in functions]

    def _call(self, name: str, arguments: dict[str, Any] | str) -> str:
        """Return the text of a tool's result, or of its error."""
        try:
            if name not in self.tools:
                raise ValueError(f"there is no tool {name!r:.100}, but {', '.join(self.tools)}")
            keywords = json_lines.strict(arguments) if isinstance(arguments, str) else arguments
        except Exception as error:
            return _error_text(error)
        try:
            result = awaited(self.tools[name](**keywords))
        except Exception as error:
            is_inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if is_inside and name not in _failed:  # the tool itself raised the error; the arguments were right
                _failed.add(name)
                print(
                    f"warning: the tool {name} raised {message(error)}; the policy receives the error every time, and "
                    "this warning is printed once",
                    file=sys.stderr,
                )
            return _error_text(error)
        return _text(result, f"the tool {name}") or ""

    def close(self) -> None:
        """Do nothing. Only an agent's episode has pending requests to close."""

    def shown(self) -> dict[str, Any]:
        """Return the public attributes and properties of the instance whose values are JSON."""
        state = {}
        for name in dir(self.instance):  # `dir` also lists attributes of the class
            if not name.startswith("_"):
                with contextlib.suppress(Exception):  # a property may raise, and a value may not be JSON
                    state[name] = json.loads(json.dumps(getattr(self.instance, name)))
        return state

    def reward(self) -> float | None:
        """Return the reward of the episode so far, None if the class has no ``get_reward``."""
        if not callable(getattr(self.instance, "get_reward", None)):
            return None
        reasons: list[str] = []
        score = reward_worker.number(awaited(self.instance.get_reward()), reasons)
        if score is None:
            raise ValueError(f"get_reward {reasons[0]}")
        return score


def act(
    environment: Callable,
    over: list[str],
    key: str,
    prompt: Any,
    columns: dict[str, Any],
    turns: list[str],
    answers: list[Any],
    state: Any = None,
    *,
    is_over: bool = False,
    drawn: Sequence[Any] = (),
    sizes: Sequence[tuple[int, int]] = (),
    template_tools: Sequence[Any] = (),
    system_prompt: str = "",
) -> list[Any]:
    """Answer the newest turn of an episode. If ``is_over``, return the public attributes of its instance instead.

    Args:
        environment: class, function or agent.
        over: keys of ended episodes, which this process drops.
        key: key of the episode.
        turns: texts of the policy's turns, oldest first. Without any turn, the episode begins.
        answers: answers to all turns but the newest. If ``is_over``, to all turns.
        state: state after the answered turns, if the class can be saved.
        drawn: token ids and log-probs of the turns, for an agent (``agents.Episode``). If this process has the episode,
            the newest turn suffices.
        sizes: (tokens before the turn, tokens of the turn) of each turn, for an agent.
        template_tools: the agent's tools that the chat template receives.
        system_prompt: ``prompts.system_prompt``, for an agent.

    Returns:
        [answer, reward or None, error message or None, state or None, tools of an agent's first request or None].
        The answer is messages, an agent's token ids, or None at the end of the episode. When the episode begins, it is
        the text that ``reset`` returned, or an agent's first request. If ``is_over``, the answer is the instance's
        attributes by name.
    """
    for ended in over:
        _forget(ended)
    try:
        is_agent = agents.is_agent(environment)
        if not isinstance(environment, type) and not is_agent:
            answer = _answer_of_function(environment, prompt, turns, columns)
            return [answer, None, None, None, None]
        num_answered = len(turns) if is_over else max(0, len(turns) - 1)
        episode, is_replayed = _episode_after(num_answered, environment, key, columns, state)
        if isinstance(episode, agents.Episode):
            episode.drawn = dict(enumerate(drawn, len(turns) - len(drawn)))
            episode.sizes = sizes
        if is_replayed and turns:
            _check_opening(episode, prompt, template_tools, system_prompt)
            _replay(episode, turns, answers)
        if is_over:
            return [episode.shown(), None, None, None, None]
        answer = episode.answer(turns[-1]) if turns else episode.opening
        agent_tools = episode.tools if is_agent and not turns else None
        return [answer, episode.reward(), None, episode.state(), agent_tools]
    except BaseException as error:  # also catch SystemExit, because an environment must not end this process
        _forget(key)
        return [None, None, message(error), None, None]


def _answer_of_function(
    environment: Callable,
    prompt: Any,
    turns: list[str],
    columns: dict[str, Any],
) -> list[dict[str, str]] | None:
    """Return the messages with which a function answers the turns, or None at the end of the episode."""
    value = awaited(environment(prompt=prompt, turns=list(turns), **columns))
    text = _text_or_none(value, "the environment")
    if text is None:
        return None
    return [{"role": "user", "content": text}]


def _episode_after(
    num_answered: int,
    environment: Callable,
    key: str,
    columns: dict[str, Any],
    state: Any,
) -> tuple[Episode | agents.Episode, bool]:
    """Return the episode ``key`` after ``num_answered`` turns, and whether its earlier turns must be replayed.

    If this process does not have the episode, a new one continues from ``state``. Without a state it begins anew.
    """
    episode = _episodes.get(key)
    if episode is not None and episode.num_turns == num_answered:
        return episode, False
    _forget(key)
    is_replayed = num_answered == 0 or state is None
    num_turns = 0 if is_replayed else num_answered
    episode = _new_episode(environment, columns, num_turns, state)
    _episodes[key] = episode
    return episode, is_replayed


def _new_episode(
    environment: Callable, columns: dict[str, Any], num_turns: int, state: Any
) -> Episode | agents.Episode:
    """Return a new episode. An instance of a class continues from ``state`` if ``num_turns`` is above 0."""
    if isinstance(environment, type):
        return Episode(environment, columns, num_turns, state)
    return agents.Episode(environment, columns)


def _check_opening(
    episode: Episode | agents.Episode,
    prompt: Any,
    template_tools: Sequence[Any],
    system_prompt: str,
) -> None:
    """Raise RuntimeError if a new agent's first request gives another prompt than the question has.

    An environment that is a class does not make the prompt.
    """
    if not isinstance(episode, agents.Episode):
        return
    opening = agents.prompt_of(episode.opening, episode.tools, list(template_tools), system_prompt)
    if opening != prompt:
        raise RuntimeError(f"the agent's prompt is {opening!r:.100}, but it was {prompt!r:.100} before")


def _replay(episode: Episode | agents.Episode, turns: Sequence[str], answers: Sequence[Any]) -> None:
    """Answer the earlier turns again. Raise RuntimeError if an answer differs from the first time."""
    for turn, answer in zip(turns, answers, strict=False):
        repeated = episode.answer(turn)
        if repeated != answer:
            raise RuntimeError(f"in the replay the answer is {repeated!r:.100}, not {answer!r:.100}")


def _forget(key: str) -> None:
    episode = _episodes.pop(key, None)
    if episode is not None:
        episode.close()


def _error_text(error: Exception) -> str:
    text = f"error: {type(error).__name__}: {error}"
    return _text(text[:300], "an error") or ""  # clean the message, because an error may quote the policy's text


def _text_or_none(value: Any, source: str) -> str | None:
    """Return ``_text`` of a value that must be a string or None. (A tool may return any value.)"""
    if not isinstance(value, str | None):
        raise TypeError(f"{source} returned {type(value).__name__}, not text or None")
    return _text(value, source)


def _text(value: Any, source: str) -> str | None:
    """Return a value as text that UTF-8 can encode; None for None."""
    if value is None:
        return None
    if isinstance(value, (bytes, bytearray)):
        raise TypeError(f"{source} returned {type(value).__name__}, not text")
    text = str(value)
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueError(f"{source} returned {len(text)} characters, more than {MAX_ANSWER_CHARS}")
    return text.encode("utf-8", "replace").decode()  # UTF-8 cannot encode lone surrogates; they become "?"
