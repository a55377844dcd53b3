"""The process that environments run in: it answers the policy's turns.

An environment is a class with the interface of TRL's: a constructor without arguments, ``reset(**columns)``, public
methods with a docstring, which are the tools that the policy calls, and ``get_reward()`` if its episodes have a reward
of their own. A turn calls tools as Qwen and Hermes do, ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, or
as other families do (tool_calls). The turn is answered by what the tools return. A turn without a call is the last. Or
an environment is a function ``(prompt, turns, **columns) -> str | None``. It takes the texts of all turns so far and
returns its answer to the newest, None after the last. Or it is an agent (agents), which asks the policy for its turns.

An episode lives here from its first turn on. A process that has it not, for it is new or another began it, plays it
again from what the policy said, and compares its answers; or, of a class with ``state()`` and ``restore(state)``, goes
on from what it was after the turn before: a new instance is given that in place of ``reset``.

Owns: episodes, which tools there are, how a call of one is read. Does not know: deadlines, tokens, jax.
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

from jaxrl_llm.actor import agents, reward_worker, tool_calls
from jaxrl_llm.actor.reward_worker import message
from jaxrl_llm.runtime import json_lines
from jaxrl_llm.runtime.functions import awaited

NO_TOOLS = ("reset", "get_reward")  # public methods that are the environment's own
SAVING = ("state", "restore")  # likewise, where it has both
MAX_ANSWER_CHARS = 2**20

_episodes: dict[str, Episode | agents.Episode] = {}
_failed: set[str] = set()  # tools that have raised


def tools_of(environment: type) -> list[str]:
    """Names of the methods that the policy may call."""
    hidden = (*NO_TOOLS, *(SAVING if is_saved(environment) else ()))
    public = (name for name in dir(environment) if not name.startswith("_") and name not in hidden)
    return [name for name in public if callable(x := getattr(environment, name)) and getattr(x, "__doc__", None)]


def is_saved(environment: type) -> bool:
    """Whether its episodes can be gone on with from a state."""
    return all(callable(getattr(environment, name, None)) for name in SAVING)


@functools.cache
def _kinds_of(environment: type) -> dict[str, tool_calls.Kinds]:
    """Of what its tools take, as far as they say it."""
    found = {}
    for name in tools_of(environment):
        with contextlib.suppress(Exception):  # hints may name what is not there
            found[name] = {x: _kinds(hint) for x, hint in typing.get_type_hints(getattr(environment, name)).items()}
    return found


def _kinds(hint: Any) -> set[str]:
    """Which of a text and null a type hint has."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return set().union(*map(_kinds, typing.get_args(hint)))
    is_text = hint is str or isinstance(hint, str)  # the latter of a Literal
    return {"string"} if is_text else {"null"} if hint in (None, type(None)) else set()


class Episode:
    """An instance of the user's class, and how many turns it has answered; one that has answered some is restored."""

    def __init__(self, environment: type, columns: dict[str, Any], num_turns: int = 0, state: Any = None):
        self.own, self.num_turns = environment(), num_turns
        self.tools = {name: getattr(self.own, name) for name in tools_of(environment)}
        if num_turns:
            awaited(self.own.restore(state))
        else:
            self.opening = _said(awaited(self.own.reset(**columns)), "reset")

    def state(self) -> Any:
        """What ``restore`` takes, as JSON has it; None of a class that cannot be saved."""
        if not is_saved(type(self.own)):
            return None
        try:
            return json.loads(json.dumps(awaited(self.own.state()), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"state returned what JSON has not: {error}") from error

    def answer(self, turn: str) -> list[dict[str, str]] | None:
        """What the tools that a turn calls return, a message each; None where it calls none.

        What a tool raises, and what is wrong with a call, is told to the policy: it may do better.
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
            if error.__traceback__.tb_next and name not in _failed:  # the tool's doing, and not what it was given
                _failed.add(name)
                said = f"warning: the tool {name} raised {message(error)}"
                print(f"{said}; the policy is told so, every time, and you this once", file=sys.stderr)
            return _told(error)
        return _text(result, f"the tool {name}") or ""

    def close(self) -> None:
        """There is nothing to end."""

    def shown(self) -> dict[str, Any]:
        """Public attributes and properties of the instance, as far as JSON has their values."""
        state = {}
        for name in dir(self.own):  # of its class too
            if not name.startswith("_"):
                with contextlib.suppress(Exception):  # a property may raise, and not all is JSON
                    state[name] = json.loads(json.dumps(getattr(self.own, name)))
        return state

    def reward(self) -> float | None:
        """Of the episode so far; None where its class has none."""
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
    """The answer to the newest turn; where it is over, what the instance shows.

    Args:
        over: keys of episodes that have ended.
        key: of the episode.
        turns: what the policy has said, oldest first; without any, the episode begins, and the answer is what ``reset``
            returns.
        answers: to all of them but the newest; where it is over, to that too.
        state: after the turns that have been answered, where the class gives one.
        drawn: token ids and log-probs of the turns, for an agent (agents.Episode). Those of the newest turn suffice if
            this process has the episode.
        sizes: of each turn, for an agent.
        told, system_prompt: an agent's tools that the chat template has been told of, and ``prompts.system_prompt``.

    Returns:
        [messages, token ids or None, reward or None, what went wrong or None, state, an agent's tools where it begins];
        in place of messages attributes where it is over, and where it begins what ``reset`` returns.
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
    except BaseException as error:  # SystemExit too
        _forget(key)
        return [None, None, message(error), None, None]


def _forget(key: str) -> None:
    if episode := _episodes.pop(key, None):
        episode.close()


def _told(error: Exception) -> str:
    return _text(f"error: {type(error).__name__}: {error}"[:300], "an error")  # which may quote the policy


def _said(value: Any, whose: str) -> str | None:
    """``_text`` of what must be one already; what a tool returns may be anything that has one."""
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
    return text.encode("utf-8", "replace").decode()  # no halves of surrogate pairs


main = functools.partial(reward_worker.main, call=act)
