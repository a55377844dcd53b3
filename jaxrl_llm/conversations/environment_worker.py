"""The worker process in which environments answer the policy's turns.

An environment has one of three forms:

    class      Interface of TRL: a constructor without arguments, ``reset(**columns)``, and tools, which are the public
               methods with a docstring. ``get_reward()`` is optional and returns the episode's reward so far. The
               tools' results answer a turn. A turn without a tool call ends the episode.
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
SAVING = ("state", "restore")  # the policy must not call these either, if the class has both
MAX_ANSWER_CHARS = 2**20

_episodes: dict[str, Episode | agents.Episode] = {}
_failed: set[str] = set()  # tools that have raised; each is reported on stderr once


def tools_of(environment: type) -> list[str]:
    """Return the names of the methods that the policy may call."""
    hidden = (*NO_TOOLS, *(SAVING if is_saved(environment) else ()))
    public = (name for name in dir(environment) if not name.startswith("_") and name not in hidden)
    return [name for name in public if callable(x := getattr(environment, name)) and getattr(x, "__doc__", None)]


def is_saved(environment: type) -> bool:
    """Return whether a class can continue an episode from a saved state."""
    return all(callable(getattr(environment, name, None)) for name in SAVING)


@functools.cache
def _kinds_of(environment: type) -> dict[str, tool_calls.Kinds]:
    """Return which parameters of each tool accept a string or null, according to their type hints."""
    found = {}
    for name in tools_of(environment):
        with contextlib.suppress(Exception):  # a hint may be a name that is not defined
            found[name] = {x: _kinds(hint) for x, hint in typing.get_type_hints(getattr(environment, name)).items()}
    return found


def _kinds(hint: Any) -> set[str]:
    """Return the subset of {"string", "null"} that a type hint accepts."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return set().union(*map(_kinds, typing.get_args(hint)))
    is_text = hint is str or isinstance(hint, str)  # an argument of a Literal is a string itself
    return {"string"} if is_text else {"null"} if hint in (None, type(None)) else set()


class Episode:
    """Episode of an environment class: an instance of the class, its tools and the number of answered turns.

    Args:
        num_turns: answered turns. Above 0, the instance is restored from ``state``; else it is reset with ``columns``.
    """

    def __init__(self, environment: type, columns: dict[str, Any], num_turns: int = 0, state: Any = None):
        self.own, self.num_turns = environment(), num_turns
        self.tools = {name: getattr(self.own, name) for name in tools_of(environment)}
        if num_turns:
            awaited(self.own.restore(state))
        else:
            self.opening = _said(awaited(self.own.reset(**columns)), "reset")

    def state(self) -> Any:
        """Return the argument of ``restore`` as plain JSON, None if the class cannot be saved."""
        if not is_saved(type(self.own)):
            return None
        try:
            return json.loads(json.dumps(awaited(self.own.state()), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"state returned what JSON has not: {error}") from error

    def answer(self, turn: str) -> list[dict[str, str]] | None:
        """Return one message for each tool call of a turn, None if the turn has no call.

        If a call is invalid or its tool raises, the message is the error, so that the policy can correct the call.
        """
        self.num_turns += 1
        results = [result for call in tool_calls.calls_of(turn) for result in self._results(call)]
        return [{"role": "tool", "content": result} for result in results] or None

    def _results(self, call: tool_calls.Call) -> list[str]:
        try:
            functions = tool_calls.read(call, _kinds_of(type(self.own)))
        except Exception as error:
            return [_told(error)]
        return [self._call(*function) for function in functions]

    def _call(self, name: str, arguments: dict[str, Any] | str) -> str:
        try:
            if name not in self.tools:
                raise ValueError(f"there is no tool {name!r:.100}, but {', '.join(self.tools)}")
            given = json_lines.strict(arguments) if isinstance(arguments, str) else arguments
        except Exception as error:
            return _told(error)
        try:
            result = awaited(self.tools[name](**given))
        except Exception as error:
            if error.__traceback__.tb_next and name not in _failed:  # raised inside the tool, not by wrong arguments
                _failed.add(name)
                said = f"warning: the tool {name} raised {message(error)}"
                print(f"{said}; the policy is told so, every time, and you this once", file=sys.stderr)
            return _told(error)
        return _text(result, f"the tool {name}") or ""

    def close(self) -> None:
        """Do nothing. Only an agent's episode has pending requests to close."""

    def shown(self) -> dict[str, Any]:
        """Return the public attributes and properties of the instance whose values are JSON."""
        state = {}
        for name in dir(self.own):  # `dir` also lists attributes of the class
            if not name.startswith("_"):
                with contextlib.suppress(Exception):  # a property may raise, and a value may not be JSON
                    state[name] = json.loads(json.dumps(getattr(self.own, name)))
        return state

    def reward(self) -> float | None:
        """Return the reward of the episode so far, None if the class has no ``get_reward``."""
        if not callable(getattr(self.own, "get_reward", None)):
            return None
        reward, reasons = awaited(self.own.get_reward()), []
        if (score := reward_worker.number(reward, reasons)) is None:
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
    told: Sequence[Any] = (),
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
        told: the agent's tools that the chat template receives.
        system_prompt: ``prompts.system_prompt``, for an agent.

    Returns:
        [answer, reward or None, error message or None, state or None, tools or None].

        The answer is messages, an agent's token ids, or None at the end of the episode. When the episode begins, it is
        the text that ``reset`` returned, or an agent's first request. If ``is_over``, it is the attributes by name.
        The tools are those of an agent's first request.
    """
    for ended in over:
        _forget(ended)
    try:
        is_agent = agents.is_agent(environment)
        if not isinstance(environment, type) and not is_agent:
            reply = _said(awaited(environment(prompt=prompt, turns=list(turns), **columns)), "the environment")
            return [reply if reply is None else [{"role": "user", "content": reply}], None, None, None, None]
        episode, answered = _episodes.get(key), max(0, len(turns) - (not is_over))
        is_new, saved = episode is None or episode.num_turns != answered, ()
        if is_new:
            _forget(key)
            saved = (answered, state) if answered and state is not None else ()
            episode = _episodes[key] = (agents.Episode if is_agent else Episode)(environment, columns, *saved)
        if is_agent:
            episode.drawn = dict(enumerate(drawn, len(turns) - len(drawn)))
            episode.sizes = sizes
        if is_new and not saved:
            how = (episode.tools, told, system_prompt)
            if is_agent and turns and (opening := agents.prompt_of(episode.opening, *how)) != prompt:
                begins = f"the agent begins with {opening!r:.100}"
                raise RuntimeError(f"{begins}, not as before with {prompt!r:.100}")
            for turn, said in zip(turns, answers, strict=False):
                if (again := episode.answer(turn)) != said:
                    raise RuntimeError(f"played again it answers {again!r:.100}, not {said!r:.100}")
        if is_over:
            return [episode.shown(), None, None, None, None]
        reply = episode.answer(turns[-1]) if turns else episode.opening
        tools_of_agent = episode.tools if is_agent and not turns else None
        return [reply, episode.reward(), None, episode.state(), tools_of_agent]
    except BaseException as error:  # SystemExit too: an environment must not end this process
        _forget(key)
        return [None, None, message(error), None, None]


def _forget(key: str) -> None:
    if episode := _episodes.pop(key, None):
        episode.close()


def _told(error: Exception) -> str:
    return _text(f"error: {type(error).__name__}: {error}"[:300], "an error")  # an error may quote the policy's text


def _said(value: Any, whose: str) -> str | None:
    """Return ``_text`` of a value that must be a string or None. (A tool may return any value.)"""
    if not isinstance(value, str | None):
        raise TypeError(f"{whose} returned {type(value).__name__}, not text or None")
    return _text(value, whose)


def _text(value: Any, whose: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, (bytes, bytearray)):
        raise TypeError(f"{whose} returned {type(value).__name__}, not text")
    if len(text := str(value)) > MAX_ANSWER_CHARS:
        raise ValueError(f"{whose} returned {len(text)} characters, more than {MAX_ANSWER_CHARS}")
    return text.encode("utf-8", "replace").decode()  # UTF-8 cannot encode lone surrogates; they become "?"
