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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

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

CALL = "jaxrl_llm.conversations.environment_worker:act"
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
        self._config = config.environments
        self._system_prompt = config.prompts.system_prompt
        factory = _checked_factory(self._config.factory, examples)
        is_class = isinstance(factory, type)
        self.role = "tool" if is_class else "user"
        self.is_agent = agents.is_agent(factory)
        self._wants_prompt = self.is_agent or _takes_prompt(factory)
        self.has_reward = self.is_agent or (is_class and callable(getattr(factory, "get_reward", None)))
        if "environment" in config.rewards.functions and not self.has_reward:
            raise ConfigError(
                "rewards.functions='environment' needs an environment with rewards: "
                f"environments.factory={self._config.factory!r:.200} has no method get_reward"
            )
        self.is_shown = is_class and _has_reader(config.rewards.functions)
        self._closed = False
        self._episodes = itertools.count()
        self._printer = Printer()
        self._workers = [Worker([self._config.factory], self._printer, CALL) for _ in range(self._config.num_workers)]
        self._threads = [ThreadPoolExecutor(1, "environment") for _ in self._workers]
        self._over: list[list[str]] = [[] for _ in self._workers]  # ended episodes that the process may drop
        self._kept: list[set[str]] = [set() for _ in self._workers]  # episodes that the process holds

    def begin(self) -> int:
        """Return the number of a new episode. This environment never returns the same number twice."""
        return next(self._episodes)

    def ask(
        self,
        episode: int,
        example: Example,
        turns: Sequence[str],
        answers: Sequence[Any],
        state: Any = None,
        **keywords: Any,
    ) -> Future[Reply]:
        """Request the reply to the newest turn of an episode, without waiting for the reply.

        Args:
            turns: texts of the policy's turns, oldest first. Without any turn, the episode begins.
            answers: answers to the turns before the newest.
            state: state of the previous reply, if that reply has a state.
            keywords: further keyword arguments of ``environment_worker.act``.
        """
        columns = example.columns
        if self._wants_prompt:
            prompt, template_tools = (example.prompt, []) if example.given is None else example.given
            columns = {**columns, "prompt": prompt}
            if self.is_agent:
                keywords = {
                    **keywords,
                    "template_tools": template_tools,
                    "system_prompt": self._system_prompt,
                }
        index = episode % len(self._workers)
        request = _Request(str(episode), example, columns, list(turns), list(answers), state, keywords)
        return self._threads[index].submit(self._ask, index, request)

    def shown(
        self,
        episode: int,
        example: Example,
        turns: Sequence[str],
        answers: Sequence[Any],
        state: Any = None,
    ) -> Future[Reply]:
        """Request the public attributes of an episode's instance after all turns; they are the reply's ``answer``."""
        return self.ask(episode, example, turns, answers, state, is_over=True)

    def forget(self, episode: int) -> None:
        """Let the process drop an ended episode after the process has answered all earlier requests."""
        index = episode % len(self._workers)

        def append() -> None:
            self._over[index].append(str(episode))  # call it in the worker's thread, because `_ask` replaces the list

        self._threads[index].submit(append)

    def _ask(self, index: int, request: _Request) -> Reply:
        """Return the reply to a request. If the call fails, the reply has the failure's outcome and reason."""
        over = self._over[index]
        self._over[index] = []
        kept = self._kept[index]
        answer = reward = state = tools = None
        seconds = 0.0
        outcome = OUTCOME_SCORE
        try:
            worker = self._ready_worker(index)
            kept.difference_update(over)
            is_kept = request.key in kept
            num_replayed = len(request.answers) if request.state is None and not is_kept else 0
            timeout_s = self._config.timeout_s * (1 + num_replayed)
            call = request.call(self._config.factory, over, is_kept)
            started = time.monotonic()
            answer, reward, wrong, state, tools = worker.ask(call, timeout_s, _is_reply)
            seconds = (time.monotonic() - started) / (1 + num_replayed)
            if wrong is None:
                kept.add(request.key)
            else:
                kept.discard(request.key)
                outcome = OUTCOME_ERROR
        except Exception as error:
            kept.clear()  # the new process holds no episode
            outcome, wrong = failure_of(error)
        reason = f"environment on {request.example.origin or 'a prompt'}: {wrong}" if wrong else ""
        return Reply(answer, reward, outcome, reason, state, tools, seconds)

    def _ready_worker(self, index: int) -> Worker:
        """Return the worker when its process can take a call. A new process holds no episode."""
        if self._closed:
            raise EOFError
        worker = self._workers[index]
        process = worker.process
        worker.ready()
        if worker.process is not process:
            self._kept[index].clear()
        return worker

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        kill_workers(self._workers)
        for thread in self._threads:
            thread.shutdown()
        close_workers(self._workers, self._printer)  # a thread may have started a process after `kill_workers`


class _Request(NamedTuple):
    """A request for the reply to the newest turn of an episode.

    Attributes:
        key: name of the episode in the worker process.
        columns: the example's columns, and "prompt" if the environment takes it.
        turns, answers, state, keywords: see ``Environment.ask``.
    """

    key: str
    example: Example
    columns: dict[str, Any]
    turns: list[str]
    answers: list[Any]
    state: Any
    keywords: dict[str, Any]

    def call(self, factory: str, over: list[str], is_kept: bool) -> tuple[Any, ...]:
        """Return the arguments of the call of ``environment_worker.act``.

        Args:
            over: ended episodes that the process may drop.
            is_kept: the process still holds the episode and the tokens of its earlier turns.
        """
        keywords = dict(self.keywords)
        if is_kept and "drawn" in keywords:
            keywords["drawn"] = keywords["drawn"][-1:]
        arguments = (over, self.key, self.example.prompt, self.columns, self.turns, self.answers, self.state)
        return (factory, *arguments, keywords)


def _has_reader(reward_functions: Sequence[str]) -> bool:
    """Return whether one of the reward functions has the parameter ``environments``."""
    for name in reward_functions:
        if ":" in name and named(import_function(name, f"rewards.functions={name!r}"), ("environments",)):
            return True
    return False


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
        ConfigError: see ``Environment``. Also raised if the chat template cannot encode messages of the environment's
            role, or if the tokens that the template puts around an answer exceed ``environments.max_answer_tokens``.
    """
    if not config.environments.factory:
        yield None
        return
    with Environment(config, examples) as environment:
        empty = [{"role": environment.role, "content": ""}]
        frames = [tokenizer.encode_answer(empty, None, **config.prompts.encoding)]
        for end_id in tokenizer.eos_ids:
            frames.append(tokenizer.encode_answer(empty, end_id, **config.prompts.encoding))
        num_tokens = max(len(frame) for frame in frames)
        max_tokens = config.environments.max_answer_tokens
        if num_tokens >= max_tokens:
            raise ConfigError(
                f"environments.max_answer_tokens={max_tokens} must be at least {num_tokens + 1}: the chat template "
                f"puts {num_tokens} tokens around an answer"
            )
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
        ConfigError: a tool's parameter has no type or no docstring. Also raised if an episode failed to begin and
            ``prompts.bad_row`` is "error".
    """
    prompts = config.prompts
    examples = [example for questions in sets for example in questions]
    factory = _checked_factory(config.environments.factory, examples)
    is_class = isinstance(factory, type)
    if not is_class and not agents.is_agent(factory):
        return prompts, [list(questions) for questions in sets], []
    if is_class and prompts.chat_template and "tools" not in prompts.chat_template_kwargs:
        prompts = dataclasses.replace(prompts, chat_template_kwargs=_with_tools(config, factory, tokenizer))
    bad: list[str] = []
    with Environment(config, examples) as environment:
        begun = [_begin_all(environment, questions, config, tokenizer, bad) for questions in sets]
    template_tools = _shared_tools([reply for questions in begun for _, reply in questions])
    if template_tools and "tools" not in prompts.chat_template_kwargs:
        if has_place_for_tools(tokenizer, prompts.encoding):
            arguments = {**prompts.chat_template_kwargs, "tools": template_tools}
            prompts = dataclasses.replace(prompts, chat_template_kwargs=arguments)
        else:
            template_tools = []
    else:
        template_tools = []
    shown_sets = []
    for questions in begun:
        shown_sets.append(
            [_begun(example, reply, template_tools, prompts.system_prompt) for example, reply in questions]
        )
    return prompts, shown_sets, bad


def _begin_all(
    environment: Environment,
    questions: Sequence[Example],
    config: Config,
    tokenizer: Any,
    bad: list[str],
) -> list[tuple[Example, Reply]]:
    """Begin and end an episode of each question. Return the questions whose episode began, with the replies.

    Args:
        bad: receives a message for each of the other questions.
    """
    begun = []
    # Begin the episodes in batches, because every open episode holds an instance or a thread.
    for first in range(0, len(questions), BEGUN_AT_ONCE):
        batch = []
        for example in questions[first : first + BEGUN_AT_ONCE]:
            episode = environment.begin()
            batch.append((example, episode, environment.ask(episode, example, (), ())))
        for example, episode, pending in batch:
            reply = pending.result()
            environment.forget(episode)
            if reply.outcome == OUTCOME_SCORE:
                if agents.are_tokens(reply.answer):
                    ids_of(reply.answer, tokenizer.vocab_size)
                begun.append((example, reply))
                continue
            bad.append(reply.reason)
            if config.prompts.bad_row == "error":
                raise ConfigError(reply.reason)
    return begun


def _shared_tools(replies: Sequence[Reply]) -> list[Any]:
    """Return the tools of the agent's first requests if all requests have the same tools; else []."""
    if not replies or not replies[0].tools:
        return []
    tools = replies[0].tools
    return tools if all(reply.tools == tools for reply in replies) else []


def has_place_for_tools(tokenizer: Any, encoding: dict[str, Any]) -> bool:
    """Return whether the chat template accepts tools in addition to the arguments in ``encoding``."""
    arguments = {**encoding["chat_template_kwargs"], "tools": []}
    messages = [{"role": "user", "content": "a"}]
    try:
        tokenizer.encode_prompt(messages, **{**encoding, "chat_template_kwargs": arguments})
    except ConfigError:
        return False
    return True


def ids_of(ids: list[int], vocab_size: int) -> list[int]:
    """Return an agent's token ids. Raise ConfigError if an id is outside the model's vocabulary."""
    if not all(0 <= x < vocab_size for x in ids):
        raise ConfigError(f"an agent's token_ids must be from 0 to {vocab_size - 1}, and are {min(ids)} to {max(ids)}")
    return ids


def _begun(example: Example, reply: Reply, template_tools: list[Any], system_prompt: str) -> Example:
    """Return the question with the prompt that the episode began with.

    The text that ``reset`` returned is appended to the last message. An agent's first request replaces the prompt.

    Args:
        template_tools, system_prompt: see ``agents.prompt_of``.
    """
    text = reply.answer
    prompt = example.prompt
    if text is None:
        return example
    if not isinstance(text, str):
        begun = agents.prompt_of(text, reply.tools, template_tools, system_prompt)
    elif isinstance(prompt, str):
        begun = prompt + text
    else:
        begun = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]
    return dataclasses.replace(example, prompt=begun, given=(prompt, template_tools))


def _takes_prompt(factory: Any) -> bool:
    """Return whether ``factory`` is a class whose ``reset`` has a parameter ``prompt`` or ``**kwargs``, as in TRL."""
    if not isinstance(factory, type):
        return False
    parameters = inspect.signature(getattr(factory, "reset")).parameters  # noqa: B009, because `type` has no reset
    return "prompt" in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def _with_tools(config: Config, environment: type, tokenizer: Any) -> dict[str, Any]:
    """Return ``prompts.chat_template_kwargs`` with the JSON schemas of the environment's tools under "tools".

    The schemas come from the methods' type hints and docstrings. If the chat template does not support tools, the
    arguments are returned unchanged.
    """
    from transformers.utils import get_json_schema  # imported here because the import is slow

    arguments = config.prompts.chat_template_kwargs
    if not has_place_for_tools(tokenizer, config.prompts.encoding):
        return arguments
    instance = object.__new__(environment)  # use bound methods, because a schema must not have the parameter `self`
    try:
        schemas = [get_json_schema(getattr(instance, name)) for name in environment_worker.tools_of(environment)]
    except Exception as error:
        raise ConfigError(
            f"environments.factory={config.environments.factory!r:.200} has a tool without a schema: {error}"
        ) from error
    return {**arguments, "tools": schemas}


def _checked_factory(spec: str, examples: Sequence[Example]) -> Callable[..., Any]:
    """Return the class or function of ``environments.factory`` after checking its interface.

    Raises:
        ConfigError: it cannot be imported, lacks a required method or tool, or does not take every example's columns.
    """
    setting = f"environments.factory={spec!r:.200}"
    factory = import_function(spec, setting)
    parameters: dict[str, Any] = {"prompt": None}
    if isinstance(factory, type):
        if not callable(getattr(factory, "reset", None)):
            raise ConfigError(f"{setting} must have a method reset(**columns)")
        if not environment_worker.tools_of(factory):
            raise ConfigError(f"{setting} must have a public method with a docstring: the tools that the policy calls")
        if not _takes_prompt(factory):
            parameters = {}
    elif agents.is_agent(factory):
        parameters["base_url"] = None
    else:
        parameters["turns"] = None
    for columns, origin in {tuple(example.columns): example.origin for example in reversed(examples)}.items():
        try:
            _bind(factory, dict(**parameters, **dict.fromkeys(columns)))
        except TypeError as error:
            names = ", ".join((*parameters, *columns))
            raise ConfigError(
                f"{setting} cannot play {origin}: {error}. It must take these parameters: {names or 'none'}"
            ) from error
    return factory


def _bind(factory: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise TypeError if a class, or a function, does not take the arguments of an episode."""
    if isinstance(factory, type):
        inspect.signature(factory).bind()
        inspect.signature(getattr(factory, "reset")).bind(None, **arguments)  # noqa: B009
    else:
        inspect.signature(factory).bind(**arguments)
