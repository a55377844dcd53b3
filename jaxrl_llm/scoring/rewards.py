"""Scores of completions by reward functions, which run in a pool of worker processes.

    caller              threads, one for each worker                workers (worker_program.py, reward_worker.py)
    ------              ----------------------------                ---------------------------------------------
    submit --queue-->   send a call to a free worker         --->   run the function
                        check the answer                     <---   answer
    collect <--------   scores, outcomes, reasons, columns

Owns: which functions score, their deadlines and outcomes, the weighted sum. Does not know: the completions' meaning,
how training handles a failure (train).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.config import ConfigError, RewardsConfig
from jaxrl_llm.runtime import hosts
from jaxrl_llm.scoring.reward_columns import NO_COLUMNS, ColumnRequest, Columns, joined_columns, write_values
from jaxrl_llm.scoring.worker_processes import (
    NoWorker,
    Printer,
    Worker,
    close_workers,
    failure_of,
    import_function,
    is_number,
    kill_workers,
    print_to_stderr,
)
from jaxrl_llm.scoring.worker_program import message
from jaxrl_llm.settings.functions import named
from jaxrl_llm.settings.schema import visible
from jaxrl_llm.types import MAX_ERRORS_KEPT, OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example, Rewards

MATH_SCORER = "jaxrl_llm.scoring.math_answers:reward"
CALL = "jaxrl_llm.scoring.reward_worker:call"
CHECK_S = 1.0  # seconds between two checks whether the run must stop
OPTIONAL_PARAMETERS = ("messages", "environments")
ENVIRONMENT = "environment"  # the function of this name is the environment's own reward


class Answer(NamedTuple):
    """Scores that one reward function gave the completions of one prompt."""

    scores: np.ndarray  # [completions, turns] f64, NaN = no score
    outcome: np.ndarray  # [completions] ``types.OUTCOME_*``
    reasons: list[str]  # error messages
    columns: Mapping[str, np.ndarray] = MappingProxyType({})  # ``reward_columns.Columns``


Ticket = list[Future[Answer]]  # pending answers for one prompt, one per function; opaque to callers


class Conversation(Protocol):
    """The completions of one prompt with the environment's replies (``actor.episodes.Played``)."""

    @property
    def messages(self) -> list[list[dict[str, str]]]: ...

    def last_turns(self) -> list[str]: ...

    def by_turn(self, values: list[Any]) -> np.ndarray: ...

    def shown(self) -> list[Any]: ...

    def columns(self, names: Collection[str]) -> Columns: ...

    def own_scores(self) -> Answer: ...

    def failures_in(self, answer: Answer) -> Answer: ...


class RewardFunction(NamedTuple):
    """A reward function of a run.

    Attributes:
        name: its name in ``rewards.functions``.
        spec: "package.module:function" or "file.py:function"; "" for the environment's own reward, because no function
            is called.
        optional: the parameters among ``OPTIONAL_PARAMETERS`` that the function has.
        is_one_by_one: the function scores each completion independently.
    """

    name: str
    spec: str
    optional: tuple[str, ...] = ()
    is_one_by_one: bool = False


class RewardPool(contextlib.AbstractContextManager):
    """Pool of worker processes that run reward functions on groups of completions.

    A reward function has the signature ``reward(prompts, completions, **columns) -> list[float]``. One call scores all
    completions of one prompt with one function. ``prompts`` and every column of the example are repeated to the length
    of ``completions``. If an environment answers the policy, ``completions`` are the policy's last turns.

    Instead of a score, a function may return ``{"reward": score, NAME: value, ...}`` for a completion, with columns
    that the loss or the credit reads (``scoring.reward_columns``). If several functions return a column, the largest
    value counts. Columns that the method does not read are dropped.

    Optional parameters of a reward function:

        messages      The messages ``{"role", "content"}`` after the prompt, for each completion. The function may then
                      return a list for a completion: one score for each turn of the policy. The scores are summed. A
                      single number is the score of the last turn.
        environments  The final public attributes of each completion's environment instance, ``None`` without one.

    The outcome of a completion is the worst outcome over its functions:

        score    Every function returned a number of magnitude at most 1e12.
        timeout  A function took longer than ``timeout_s``. All completions of the call time out.
        error    All completions of a call have this outcome if the function raised, returned the wrong number of
                 scores, or its process died. A single completion has this outcome if its score or column is invalid.

    A function with the attribute ``one_by_one = True`` scores each completion independently. It has one call per
    completion, so that a failure affects one completion only. All completions of a prompt share ``timeout_s`` (see
    ``_score_one_by_one``).

    The total of a failed completion is NaN, never 0. The output of a function goes to stderr, up to 64 KiB per call.

    Args:
        task_scorer: the spec that "task" stands for; "" if the task has no scorer.
        examples: questions whose columns the functions must take.
        check: called while ``collect`` waits; raises ``Stopped`` if the run must stop.

    Raises:
        ConfigError: a function cannot be imported or does not take the examples' columns. No process is started.
    """

    def __init__(
        self,
        config: RewardsConfig,
        *,
        task_scorer: str,
        examples: Sequence[Example] = (),
        check: Callable[[], None] = lambda: None,
    ):
        self.check = check
        self._config = config
        self._functions = [_checked_function(name, task_scorer, examples) for name in config.functions]
        self._closed = False
        self._num_printed = 0
        self._printer = Printer()
        specs = list(dict.fromkeys(function.spec for function in self._functions if function.spec))
        self._workers = [Worker(specs, self._printer, CALL) for _ in range(config.num_workers)]
        self._free = list(self._workers)
        self._threads = ThreadPoolExecutor(config.num_workers, "rewards")

    def submit(
        self,
        example: Example,
        completions: Sequence[str],
        played: Conversation | None = None,
        columns: ColumnRequest = NO_COLUMNS,
    ) -> Ticket:
        """Queue the completions of one prompt for scoring, without waiting for the scores.

        Args:
            played: the group's ``episodes.Played`` if an environment answered; else None.
            columns: columns that the method reads.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        conversation = played or _SingleTurns(list(completions))
        return [
            self._threads.submit(self._score, function, example, conversation, columns) for function in self._functions
        ]

    def collect(self, tickets: Sequence[Ticket | None]) -> Rewards:
        """Wait for the tickets, and return their scores concatenated in the order of the tickets.

        A ticket that belongs to another host is None here. All hosts return the same scores.

        Raises:
            Stopped: ``check`` found that the run must stop.
        """
        while True:
            own_answers = _finished(tickets)
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if all(hosts.exchange(own_answers is not None)):
                break
            self.check()
        answers = []
        for functions in hosts.complete(own_answers or []):
            if functions is None:
                raise RuntimeError("no host has the answers to a ticket")
            answers.append(functions)
        return self._rewards(answers)

    def _rewards(self, answers: Sequence[Sequence[Answer]]) -> Rewards:
        """Return the rewards of all completions.

        Args:
            answers: for each prompt, the answer of each function.
        """
        weights = np.array(self._config.weights)
        # [functions, completions, turns] and [functions, completions]
        turn_scores = np.concatenate([[answer.scores for answer in functions] for functions in answers], axis=1)
        outcome = np.concatenate([[answer.outcome for answer in functions] for functions in answers], axis=1)
        parts = turn_scores.sum(axis=2)
        columns = joined_columns([[answer.columns for answer in functions] for functions in answers])
        if turn_scores.shape[2] > 1:
            columns["turn_reward"] = np.tensordot(weights, turn_scores, 1).astype(np.float32)
        reasons = [reason for functions in answers for answer in functions for reason in answer.reasons]
        errors = list(dict.fromkeys(reasons))
        self._print_errors(errors)
        return Rewards(
            total=(weights @ parts).astype(np.float32),  # NaN if any part is NaN
            parts=dict(zip(self._config.functions, parts.astype(np.float32), strict=True)),
            outcome=outcome.max(axis=0).astype(np.int8),
            errors=tuple(errors[:MAX_ERRORS_KEPT]),
            columns=columns,
        )

    def _print_errors(self, errors: list[str]) -> None:
        """Print the first failures of a run on stderr, at most ``MAX_ERRORS_KEPT`` over the whole run."""
        new = errors[: MAX_ERRORS_KEPT - self._num_printed]
        self._num_printed += len(new)
        if new and hosts.is_first():
            print_to_stderr("".join(f"warning: a reward failed: {visible(reason)}\n" for reason in new))

    def close(self) -> None:
        """Kill every worker, busy or not, and its child processes."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        # Kill again, because a busy thread may start another process after `kill_workers`.
        while len(self._free) < len(self._workers):
            kill_workers(self._workers)
        self._threads.shutdown()
        close_workers(self._workers, self._printer)

    def __exit__(self, *_: object) -> None:
        self.close()

    # The methods below run in the threads of the pool.

    def _score(
        self,
        function: RewardFunction,
        example: Example,
        conversation: Conversation,
        request: ColumnRequest,
    ) -> Answer:
        """Return the answer of one function for the completions of one prompt."""
        num = len(conversation.messages)
        columns = request.empty(num) | conversation.columns(request.shapes.keys())
        if function.name == ENVIRONMENT:
            return conversation.failures_in(conversation.own_scores()._replace(columns=columns))
        worker = self._free.pop()
        try:
            results = self._run(worker, _Job.of(function, example, conversation), function.is_one_by_one)
            for i, returned in enumerate(results.columns):
                wrong = write_values(columns, returned, i, request)
                if wrong:
                    results.values[i] = None
                    results.reasons.setdefault(i, []).extend(wrong)
            scores = conversation.by_turn(results.values)
        except Exception as error:
            results = _Results.failed(num)
            results.reasons[0] = [message(error)]
            scores = conversation.by_turn(results.values)
        self._free.append(worker)
        outcome = np.where(np.isnan(scores).any(axis=1), results.failures, OUTCOME_SCORE)
        place = f"{function.name} on {example.origin or 'a prompt'}"
        reasons = [f"{place}: {reason}" for call_reasons in results.reasons.values() for reason in call_reasons]
        return conversation.failures_in(Answer(scores, outcome, reasons, columns))

    def _run(self, worker: Worker, job: _Job, is_one_by_one: bool) -> _Results:
        results = _Results.failed(len(job.texts))
        if is_one_by_one:
            self._score_one_by_one(worker, job, results)
        else:
            self._call(
                worker,
                job,
                list(range(len(job.texts))),
                self._config.timeout_s,
                results,
            )
        return results

    def _score_one_by_one(self, worker: Worker, job: _Job, results: _Results) -> None:
        """Score the completions of a prompt in one call per completion. All calls together may take ``timeout_s``.

        If n completions remain, the next may take 1/n of the remaining time. A completion that hangs therefore leaves
        time for all others. Completions that timed out are tried once more, if they can get more time than before.
        """
        left_s = self._config.timeout_s
        longest_s = [0.0] * len(job.texts)
        remaining = list(range(len(job.texts)))
        for _ in range(2):
            for num_before, i in enumerate(remaining):
                share_s = left_s / (len(remaining) - num_before)
                if share_s <= longest_s[i]:
                    continue
                longest_s[i] = share_s
                try:
                    left_s -= self._call(worker, job, [i], share_s, results)
                except NoWorker as error:
                    results.reasons[i] = [message(error)]
                    return
            remaining = [i for i in remaining if results.failures[i] == OUTCOME_TIMEOUT]

    def _call(
        self,
        worker: Worker,
        job: _Job,
        indices: list[int],
        timeout_s: float,
        results: _Results,
    ) -> float:
        """Score the completions at ``indices`` in one call, and write them into ``results``.

        Returns:
            Seconds that the call took, without the start of a process, at most ``timeout_s``.
        """
        if self._closed:
            raise NoWorker("the reward pool is closed")
        worker.ready()
        started = time.monotonic()
        failure = OUTCOME_ERROR
        try:
            is_answer = functools.partial(_are_scores, num=len(indices))
            values, reasons, columns = worker.ask(job.arguments(indices), timeout_s, is_answer)
        except Exception as error:
            failure, reason = failure_of(error)
            values = [None] * len(indices)
            reasons = [reason]
            columns = [{}] * len(indices)
        for i, value, returned_columns in zip(indices, values, columns, strict=True):
            results.values[i] = value
            results.columns[i] = returned_columns
            results.failures[i] = failure
        results.reasons[indices[0]] = reasons
        return min(timeout_s, time.monotonic() - started)


def _finished(tickets: Sequence[Ticket | None]) -> list[list[Answer] | None] | None:
    """Return the answers of this host's tickets, or None if one of them is still missing after ``CHECK_S``."""
    own_calls = [call for ticket in tickets if ticket for call in ticket]
    with contextlib.suppress(CancelledError):
        if wait(own_calls, CHECK_S).not_done:
            return None
        return [None if ticket is None else [call.result() for call in ticket] for ticket in tickets]
    return None


class _SingleTurns:
    """``Conversation`` of completions that have one turn, without an environment."""

    def __init__(self, texts: list[str]):
        self._texts = texts
        self.messages = [[{"role": "assistant", "content": text}] for text in texts]

    def last_turns(self) -> list[str]:
        return self._texts

    def by_turn(self, values: list[Any]) -> np.ndarray:
        return np.array(values, np.float64).reshape(len(self._texts), 1)

    def shown(self) -> list[Any]:
        return [None] * len(self._texts)

    def columns(self, names: Collection[str]) -> Columns:
        return {}

    def own_scores(self) -> Answer:
        raise RuntimeError("there is no environment that could score")

    def failures_in(self, answer: Answer) -> Answer:
        return answer


class _Job(NamedTuple):
    """The completions of one prompt that one function scores.

    Attributes:
        optional: values of the function's optional parameters, one per completion.
    """

    spec: str
    example: Example
    texts: list[str]
    optional: dict[str, list[Any]]

    @classmethod
    def of(cls, function: RewardFunction, example: Example, conversation: Conversation) -> _Job:
        optional: dict[str, list[Any]] = {}
        if "messages" in function.optional:
            optional["messages"] = conversation.messages
        if "environments" in function.optional:
            optional["environments"] = conversation.shown()
        return cls(function.spec, example, conversation.last_turns(), optional)

    def arguments(self, indices: list[int]) -> tuple[Any, ...]:
        """Return the call of ``worker_program.main`` for the completions at ``indices``."""
        texts = [self.texts[i] for i in indices]
        optional = {name: [values[i] for i in indices] for name, values in self.optional.items()}
        return (self.spec, self.example.prompt, self.example.columns, texts, optional)


class _Results(NamedTuple):
    """Results of one function for the completions of a prompt, filled in call by call."""

    values: list[Any]  # a number, a number for each turn, or None
    columns: list[dict[str, Any]]  # name -> value as the function returned it
    failures: list[int]  # the outcome of the completion if it has no number
    reasons: dict[int, list[str]]  # error messages, by the first completion of a call

    @classmethod
    def failed(cls, num: int) -> _Results:
        return cls([None] * num, [{}] * num, [OUTCOME_ERROR] * num, {})


def _are_scores(answer: Any, num: int) -> bool:
    """Return whether an answer has the form that ``reward_worker.call`` returns, with scores within the limits."""
    match answer:
        case [list(values), list(reasons), list(columns)] if len(values) == len(columns) == num:
            numbers = [x for value in values for x in (value if isinstance(value, list) else [value])]
            return (
                all(x is None or is_number(x) for x in numbers)
                and all(isinstance(reason, str) for reason in reasons)
                and all(isinstance(returned, dict) for returned in columns)
            )
    return False


def _checked_function(name: str, task_scorer: str, examples: Sequence[Example]) -> RewardFunction:
    """Return the reward function with this name in ``rewards.functions``.

    Raises:
        ConfigError: the function cannot be imported, or does not take every column of the examples.
    """
    if name == ENVIRONMENT:
        return RewardFunction(name, "")
    if name == "task" and not task_scorer:
        raise ConfigError(
            "rewards.functions='task' needs a prompts.source with a scorer of its own, and this source has none: name "
            "a function of your own"
        )
    spec = {"task": task_scorer, "math": MATH_SCORER}.get(name, name)
    function = import_function(spec, f"rewards.functions={name!r}")
    optional = named(function, OPTIONAL_PARAMETERS)
    for columns, origin in {tuple(example.columns): example.origin for example in reversed(examples)}.items():
        parameters = ("prompts", "completions", *columns, *optional)
        try:
            signature = inspect.signature(function, follow_wrapped=False)
        except ValueError:  # a C function may have no signature
            break
        try:
            # `dict` refuses a column with the name of another parameter.
            arguments = dict(
                prompts=0,
                completions=0,
                **dict.fromkeys(columns),
                **dict.fromkeys(optional),
            )
            signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"rewards.functions={name!r} cannot score {origin}: {error}. It must take these parameters: "
                f"{', '.join(parameters)}"
            ) from error
    return RewardFunction(name, spec, optional, getattr(function, "one_by_one", False) is True)
