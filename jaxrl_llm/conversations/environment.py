"""Worker processes in which environments answer the policy's turns, with a deadline for each call.

Each episode is assigned to one worker process, which keeps the episode's state. If the process dies, its successor
replays the episode (``environment_worker``).

Owns: the processes, deadlines, the form of a reply. Does not know: tokens, rows, when a turn ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxrl_llm.config import Config, ConfigError, PromptsConfig
from jaxrl_llm.conversations import agents, environment_worker
from jaxrl_llm.scoring.worker_processes import (
    Printer,
    Worker,
    close_workers,
    failure_of,
    import_function,
    is_number,
    kill_workers,
)
from jaxrl_llm.settings.functions import named
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, Example

BEGUN_AT_ONCE = 64  # questions whose episodes are begun concurrently before a run


@dataclasses.dataclass(frozen=True)
class Reply:
    """The environment's reply to one turn, or to the request that begins an episode.

    Attributes:
        answer: messages with role "tool" or "user", or token ids if an agent sends token ids. None ends the episode.
            When the episode begins: an agent's first request, or the text that follows the prompt.
        reward: reward of the episode so far; None if the environment has no reward.
        outcome: OUTCOME_*.
        reason: error message, "" without an error.
        state: state of the instance after this turn, in plain JSON, if the class can be saved; else None.
        tools: tools of an agent's first request, when the episode begins.
        seconds: time that the environment took. If the episode was replayed, the mean over the replayed turns.
    """

    answer: Any
    reward: float | None = None
    outcome: int = OUTCOME_SCORE
    reason: str = ""
    state: Any = None
    tools: Any = None
    seconds: float = 0.0


class Environment(contextlib.AbstractContextManager):
    """Client of the worker processes that answer the turns of episodes.

    Attributes:
        role: role of the answers' messages: "tool" for a class, "user" for a function. Agents answer with both roles.
        is_agent: the environment is a program that requests turns over the OpenAI API (``agents``).
        has_reward: its episodes have a reward.
        is_shown: a reward function has the parameter ``environments``.

    Raises:
        ConfigError: the environment cannot be imported, or does not take the examples' columns. No process is started.
    """

    def __init__(self, config: Config, examples: Sequence[Example] = ()):
        self._config, self._system_prompt = config.environments, config.prompts.system_prompt
        found = _checked(self._config.factory, examples)
        self.role = "tool" if isinstance(found, type) else "user"
        self.is_agent = agents.is_agent(found)
        self._wants_prompt = self.is_agent or _takes_prompt(found)
        self.has_reward = self.is_agent or (self.role == "tool" and callable(getattr(found, "get_reward", None)))
        if "environment" in config.rewards.functions and not self.has_reward:
            said = f"environments.factory={self._config.factory!r:.200} has no method get_reward"
            raise ConfigError(f"rewards.functions='environment' needs rewards of the environment: {said}")
        own = [import_function(name, f"rewards.functions={name!r}") for name in config.rewards.functions if ":" in name]
        self.is_shown = self.role == "tool" and any(named(function, ("environments",)) for function in own)
        self._printer, self._closed, self._episodes = Printer(), False, itertools.count()
        how = [self._config.factory], self._printer, "jaxrl_llm.conversations.environment_worker:act"
        self._workers = [Worker(*how) for _ in range(self._config.num_workers)]
        self._threads = [ThreadPoolExecutor(1, "environment") for _ in self._workers]
        self._over: list[list[str]] = [[] for _ in self._workers]  # ended episodes that the process may drop
        self._kept: list[set[str]] = [set() for _ in self._workers]  # episodes that the process holds

    def begin(self) -> int:
        """Return the number of a new episode. This environment never returns the same number twice."""
        return next(self._episodes)

    def ask(
        self, episode: int, example: Example, turns: Sequence[str], answers: Sequence[Any], state: Any = None, **how
    ) -> Future[Reply]:
        """Request the reply to the newest turn of an episode, without waiting for the reply.

        Args:
            turns: texts of the policy's turns, oldest first. Without any turn, the episode begins.
            answers: answers to the turns before the newest.
            state: state of the previous reply, if that reply has a state.
            how: further keyword arguments of ``environment_worker.act``.
        """
        place = episode % len(self._workers)
        columns = example.columns
        if self._wants_prompt:
            own, told = (example.prompt, []) if example.given is None else example.given
            columns = {**columns, "prompt": own}
            how |= {"told": told, "system_prompt": self._system_prompt} if self.is_agent else {}
        given = str(episode), example.prompt, columns, list(turns), list(answers), state
        return self._threads[place].submit(self._ask, place, example, given, **how)

    def shown(self, *given: Any) -> Future[Reply]:
        """Request the public attributes of an episode's instance after all turns; they are the reply's ``answer``."""
        return self.ask(*given, is_over=True)

    def forget(self, episode: int) -> None:
        """Let the process drop an ended episode after the process has answered all earlier requests."""
        place = episode % len(self._workers)
        self._threads[place].submit(lambda: self._over[place].append(str(episode)))  # `_ask` replaces the list

    def _ask(self, place: int, example: Example, given: tuple[Any, ...], **how: bool) -> Reply:
        over, self._over[place] = self._over[place], []
        (key, *_, answers, state_before), kept = given, self._kept[place]
        try:
            if self._closed:
                raise EOFError
            worker = self._workers[place]
            process = worker.process
            worker.ready()
            if worker.process is not process:
                kept.clear()
            kept.difference_update(over)
            played_again = len(answers) if state_before is None and key not in kept else 0
            timeout_s = self._config.timeout_s * (1 + played_again)
            if key in kept and "drawn" in how:  # the process already has the tokens of the earlier turns
                how["drawn"] = how["drawn"][-1:]
            call = self._config.factory, over, *given, how
            started = time.monotonic()
            answer, reward, wrong, state, tools = worker.ask(call, timeout_s, _is_reply)
            seconds = (time.monotonic() - started) / (1 + played_again)
            outcome = OUTCOME_SCORE if wrong is None else OUTCOME_ERROR
            if wrong is None:
                kept.add(key)
            else:
                kept.discard(key)
        except Exception as error:
            kept.clear()  # the new process holds no episode
            (outcome, wrong), answer, reward, state, tools, seconds = failure_of(error), None, None, None, None, 0.0
        reason = f"environment on {example.origin or 'a prompt'}: {wrong}" if wrong else ""
        return Reply(answer, reward, outcome, reason, state, tools, seconds)

    def __exit__(self, *_) -> None:
        self._closed = True
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        kill_workers(self._workers)
        for thread in self._threads:
            thread.shutdown()
        close_workers(self._workers, self._printer)  # a thread may have started a process after `kill_workers`


def _is_reply(answer: Any) -> bool:
    """Return whether an answer has the form that ``environment_worker.act`` returns."""
    match answer:
        case [_, reward, wrong, _, _]:
            return (reward is None or is_number(reward)) and (wrong is None or isinstance(wrong, str))
    return False


@contextlib.contextmanager
def opened(config: Config, examples: Sequence[Example], tokenizer: Any) -> Iterator[Environment | None]:
    """Open the environment of a config as a context manager, which yields None if the config has no environment.

    Raises:
        ConfigError: see ``Environment``. Or the chat template cannot encode messages of the environment's role, or the
            tokens that the template puts around an answer exceed ``environments.max_answer_tokens``.
    """
    if not config.environments.factory:
        yield None
        return
    with Environment(config, examples) as environment:
        said, how = [{"role": environment.role, "content": ""}], config.prompts.encoding
        frame = max(len(tokenizer.encode_answer(said, last, **how)) for last in (None, *tokenizer.eos_ids))
        if frame >= (most := config.environments.max_answer_tokens):
            said = f"environments.max_answer_tokens={most} must be at least {frame + 1}"
            raise ConfigError(f"{said}: the chat template puts {frame} tokens around an answer")
        yield environment


def shown(
    config: Config, tokenizer: Any, *sets: Sequence[Example]
) -> tuple[PromptsConfig, list[list[Example]], list[str]]:
    """Begin an episode of every question, and return the questions with the prompts that the policy will see.

    A class: the text that ``reset`` returns is appended to the prompt, as in TRL. The chat template receives the
    class's tools, if the template supports tools and ``prompts.chat_template_kwargs`` does not set "tools".

    An agent: its first request is the prompt. The chat template receives the agent's tools under the same conditions,
    if the agent requests with the same tools at every question.

    A function: the questions are returned unchanged.

    Args:
        sets: sets of questions, such as training and held-out questions.

    Returns:
        (section ``prompts``, the sets, one message per question whose episode failed to begin).

    Raises:
        ConfigError: a tool's parameter has no type or no docstring. Or an episode failed to begin and
            ``prompts.bad_row`` is "error".
    """
    prompts, bad, told = config.prompts, [], []
    kept: list[list[tuple[Example, Reply]]] = []
    examples = [example for questions in sets for example in questions]
    found = _checked(config.environments.factory, examples)
    if not isinstance(found, type) and not agents.is_agent(found):
        return prompts, [list(questions) for questions in sets], bad
    if isinstance(found, type) and prompts.chat_template and "tools" not in prompts.chat_template_kwargs:
        prompts = dataclasses.replace(prompts, chat_template_kwargs=_told(config, found, tokenizer))
    with Environment(config, examples) as environment:
        ask = lambda example, episode: (example, episode, environment.ask(episode, example, (), ()))
        for questions in sets:
            kept.append([])
            # In batches, because every open episode holds an instance or a thread.
            parts = (questions[i : i + BEGUN_AT_ONCE] for i in range(0, len(questions), BEGUN_AT_ONCE))
            begun = ([ask(example, environment.begin()) for example in part] for part in parts)
            for example, episode, reply in itertools.chain.from_iterable(begun):
                said = reply.result()
                environment.forget(episode)
                if said.outcome == OUTCOME_SCORE:
                    if agents.are_tokens(said.answer):
                        ids_of(said.answer, tokenizer.vocab_size)
                    kept[-1].append((example, said))
                    continue
                bad.append(said.reason)
                if prompts.bad_row == "error":
                    raise ConfigError(said.reason)
    asked = [said.tools for questions in kept for _, said in questions if said.tools]
    are_one = bool(asked) and all(one == asked[0] for one in asked) and len(asked) == sum(map(len, kept))
    if are_one and "tools" not in prompts.chat_template_kwargs and has_place_for_tools(tokenizer, prompts.encoding):
        told = asked[0]
        prompts = dataclasses.replace(prompts, chat_template_kwargs={**prompts.chat_template_kwargs, "tools": told})
    return prompts, [[_begun(*one, told, prompts.system_prompt) for one in questions] for questions in kept], bad


def has_place_for_tools(tokenizer: Any, encoding: dict[str, Any]) -> bool:
    """Return whether the chat template accepts tools in addition to the arguments in ``encoding``."""
    told = {**encoding["chat_template_kwargs"], "tools": []}
    try:
        tokenizer.encode_prompt([{"role": "user", "content": "a"}], **encoding | {"chat_template_kwargs": told})
    except ConfigError:
        return False
    return True


def ids_of(ids: list[int], vocab_size: int) -> list[int]:
    """Return an agent's token ids. Raise ConfigError if an id is outside the model's vocabulary."""
    if not all(0 <= x < vocab_size for x in ids):
        raise ConfigError(f"an agent's token_ids must be from 0 to {vocab_size - 1}, and are {min(ids)} to {max(ids)}")
    return ids


def _begun(example: Example, reply: Reply, told: list[Any], system_prompt: str) -> Example:
    """Return the question with the prompt that the episode began with.

    The text that ``reset`` returned is appended to the last message. An agent's first request replaces the prompt.

    Args:
        told, system_prompt: see ``agents.prompt_of``.
    """
    text, prompt = reply.answer, example.prompt
    if text is None:
        return example
    if not isinstance(text, str):
        begun = agents.prompt_of(text, reply.tools, told, system_prompt)
    elif isinstance(prompt, str):
        begun = prompt + text
    else:
        begun = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]
    return dataclasses.replace(example, prompt=begun, given=(prompt, told))


def _takes_prompt(found: Any) -> bool:
    """Return whether ``found`` is a class whose ``reset`` has a parameter ``prompt`` or ``**kwargs``, as in TRL."""
    if not isinstance(found, type):
        return False
    takes = inspect.signature(found.reset).parameters
    return "prompt" in takes or any(x.kind is x.VAR_KEYWORD for x in takes.values())


def _told(config: Config, environment: type, tokenizer: Any) -> dict[str, Any]:
    """Return ``prompts.chat_template_kwargs`` with the JSON schemas of the environment's tools under "tools".

    The schemas come from the methods' type hints and docstrings. If the chat template does not support tools, the
    arguments are returned unchanged.
    """
    from transformers.utils import get_json_schema  # here, because the import is slow

    told = config.prompts.chat_template_kwargs
    if not has_place_for_tools(tokenizer, config.prompts.encoding):
        return told
    own = object.__new__(environment)  # bound methods, because a schema must not have the parameter `self`
    try:
        schemas = [get_json_schema(getattr(own, name)) for name in environment_worker.tools_of(environment)]
    except Exception as error:
        said = f"environments.factory={config.environments.factory!r:.200} has a tool that a template cannot be told of"
        raise ConfigError(f"{said}: {error}") from error
    return {**told, "tools": schemas}


def _checked(spec: str, examples: Sequence[Example]) -> Any:
    """Return the class or function of ``environments.factory`` after checking its interface.

    Raises:
        ConfigError: it cannot be imported, lacks a required method or tool, or does not take every example's columns.
    """
    said = f"environments.factory={spec!r:.200}"
    found = import_function(spec, said)
    is_class = isinstance(found, type)
    if is_class:
        if not callable(getattr(found, "reset", None)):
            raise ConfigError(f"{said} must have a method reset(**columns)")
        if not environment_worker.tools_of(found):
            raise ConfigError(f"{said} must have a public method with a docstring: the tools that the policy calls")
        given = {"prompt": 0} if _takes_prompt(found) else {}
    else:
        given = {"prompt": 0, "base_url" if agents.is_agent(found) else "turns": 0}
    for columns, origin in {tuple(example.columns): example.origin for example in reversed(examples)}.items():
        try:
            if is_class:
                inspect.signature(found).bind()
                inspect.signature(found.reset).bind(None, **given, **dict.fromkeys(columns))
            else:
                inspect.signature(found).bind(**given, **dict.fromkeys(columns))
        except TypeError as error:
            takes = ", ".join((*given, *columns))
            raise ConfigError(f"{said} cannot play {origin}: {error}; given: {takes or 'nothing'}") from error
    return found
