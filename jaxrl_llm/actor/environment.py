"""Environments that answer the policy's turns, in processes of their own with deadlines, as rewards have them.

An episode stays with one process, which has its state; where that dies, the next plays it again (environment_worker).

Owns: the processes, deadlines, what a reply is. Does not know: tokens, rows, when a turn ends.
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

from jaxrl_llm.actor import agents, environment_worker
from jaxrl_llm.actor.printing import Printer
from jaxrl_llm.actor.rewards import Worker, end, failed, imported, is_number, put_away
from jaxrl_llm.config import Config, ConfigError, PromptsConfig
from jaxrl_llm.runtime.functions import named
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, Example

BEGUN_AT_ONCE = 64  # of the questions before a run


@dataclasses.dataclass(frozen=True)
class Reply:
    """To a turn.

    Attributes:
        answer: messages, of tools or the user, or token ids where an agent speaks so; None ends the episode. Where it
            begins, an agent's messages, or the text that follows the prompt.
        reward: of the episode so far; None where the environment has none.
        outcome: OUTCOME_*.
        reason: what went wrong, "" where nothing did.
        state: of a class that can be saved, after this turn; plain JSON.
        tools: of an agent that begins.
        seconds: that the environment took; the mean over its turns if the episode had to be played again.
    """

    answer: Any
    reward: float | None = None
    outcome: int = OUTCOME_SCORE
    reason: str = ""
    state: Any = None
    tools: Any = None
    seconds: float = 0.0


class Environment(contextlib.AbstractContextManager):
    """Answers turns of episodes.

    Attributes:
        role: whose messages its answers are, a "tool"'s or the "user"'s; an agent's may be either's.
        is_agent: it is a program that asks for turns over the OpenAI API (agents).
        has_reward: its episodes have a reward.
        is_shown: a reward function names ``environments``.

    Raises:
        ConfigError: it cannot be found, or does not take the examples' columns, before any process starts.
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
            raise ConfigError(f"rewards.functions: 'environment' means nothing here: {said}")
        own = [imported(name, f"rewards.functions: {name!r}") for name in config.rewards.functions if ":" in name]
        self.is_shown = self.role == "tool" and any(named(function, ("environments",)) for function in own)
        self._printer, self._closed, self._episodes = Printer(), False, itertools.count()
        how = [self._config.factory], self._printer, "environment_worker"
        self._workers = [Worker(*how) for _ in range(self._config.num_workers)]
        self._threads = [ThreadPoolExecutor(1, "environment") for _ in self._workers]
        self._over: list[list[str]] = [[] for _ in self._workers]  # episodes that its process need not keep
        self._kept: list[set[str]] = [set() for _ in self._workers]  # episodes that it has

    def begin(self) -> int:
        """A new episode's name; of all who ask this environment none has it twice."""
        return next(self._episodes)

    def ask(
        self, episode: int, example: Example, turns: Sequence[str], answers: Sequence[Any], state: Any = None, **how
    ) -> Future[Reply]:
        """The reply to the newest of an episode's turns; without any, how it begins. Returns at once.

        Args:
            answers: to the turns before.
            state: that of the reply before, where it has one.
            how: what else ``environment_worker.act`` takes.
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
        """As for ``ask``, after all of the turns: its reply's ``answer`` is what the instance's attributes are."""
        return self.ask(*given, is_over=True)

    def forget(self, episode: int) -> None:
        """The episode has ended: its process need not keep it once it has answered what was asked before."""
        place = episode % len(self._workers)
        self._threads[place].submit(lambda: self._over[place].append(str(episode)))  # to the list of then

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
            if key in kept and "drawn" in how:  # the process has the tokens of the turns before
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
            kept.clear()  # its process is another one now
            (outcome, wrong), answer, reward, state, tools, seconds = failed(error), None, None, None, None, 0.0
        reason = f"environment on {example.origin or 'a prompt'}: {wrong}" if wrong else ""
        return Reply(answer, reward, outcome, reason, state, tools, seconds)

    def __exit__(self, *_) -> None:
        self._closed = True
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        end(self._workers)
        for thread in self._threads:
            thread.shutdown()
        put_away(self._workers, self._printer)  # with what a thread has started meanwhile


def _is_reply(answer: Any) -> bool:
    """Whether an answer has the form of ``environment_worker.act``."""
    match answer:
        case [_, reward, wrong, _, _]:
            return (reward is None or is_number(reward)) and (wrong is None or isinstance(wrong, str))
    return False


@contextlib.contextmanager
def opened(config: Config, examples: Sequence[Example], tokenizer: Any) -> Iterator[Environment | None]:
    """The environment of a config, until the end of its context; None where there is none.

    ConfigError also where the model's template has no place for its answers, or needs more room than they may take.
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
    """Sets of questions as the policy is to see them where ``environments.factory`` is a class or an agent.

    The chat template is told a class's tools, where it has a place for them and ``prompts.chat_template_kwargs`` tells
    it no others, and those of an agent that asks with the same ones at every question; and what ``reset`` returns
    follows the prompt, as TRL has it. What an agent asks for first is the prompt.

    Returns:
        (the section ``prompts``, the sets, one message per question that cannot be begun).

    Raises:
        ConfigError: a tool has no type or docstring for what it takes; with ``prompts.bad_row="error"`` a question that
            cannot be begun.
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
            # So many are alive at once, and no more.
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
    """Whether the chat template, which is told what ``encoding`` has, takes tools besides."""
    told = {**encoding["chat_template_kwargs"], "tools": []}
    try:
        tokenizer.encode_prompt([{"role": "user", "content": "a"}], **encoding | {"chat_template_kwargs": told})
    except ConfigError:
        return False
    return True


def ids_of(ids: list[int], vocab_size: int) -> list[int]:
    """An agent's token ids; ConfigError where one is none of the model's."""
    if not all(0 <= x < vocab_size for x in ids):
        raise ConfigError(f"an agent's token_ids must be from 0 to {vocab_size - 1}, and are {min(ids)} to {max(ids)}")
    return ids


def _begun(example: Example, reply: Reply, told: list[Any], system_prompt: str) -> Example:
    """The question with what ``reset`` returned after its last message; of an agent what it has asked with.

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
    """Whether it is a class whose ``reset`` takes the prompt too, by name or as one of any, as TRL gives it."""
    if not isinstance(found, type):
        return False
    takes = inspect.signature(found.reset).parameters
    return "prompt" in takes or any(x.kind is x.VAR_KEYWORD for x in takes.values())


def _told(config: Config, environment: type, tokenizer: Any) -> dict[str, Any]:
    """``prompts.chat_template_kwargs`` with the JSON schemas of its tools, by their types and docstrings."""
    from transformers.utils import get_json_schema  # here, for it is slow to import

    told = config.prompts.chat_template_kwargs
    if not has_place_for_tools(tokenizer, config.prompts.encoding):
        return told
    own = object.__new__(environment)  # its methods are bound: no `self` among what they take
    try:
        schemas = [get_json_schema(getattr(own, name)) for name in environment_worker.tools_of(environment)]
    except Exception as error:
        said = f"environments.factory={config.environments.factory!r:.200} has a tool that a template cannot be told of"
        raise ConfigError(f"{said}: {error}") from error
    return {**told, "tools": schemas}


def _checked(spec: str, examples: Sequence[Example]) -> Any:
    """The class or function of ``environments.factory``: it imports, and takes every column that an example has."""
    said = f"environments.factory={spec!r:.200}"
    found = imported(spec, said)
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
