"""Scores of completions, from functions that run in a pool of processes of their own.

    caller              threads, one for each worker              workers (reward_worker.py)
    ------              ----------------------------              --------------------------
    submit --queue-->   hand a call to a worker that is free ---> run the function
                        check what comes back                <--- answer
                        past the deadline, or the socket closed: kill the worker with all that it started, start another
    collect <--------   scores, outcomes, reasons

Workers are plain subprocesses, not multiprocessing's: those would import the caller's main module, and jax
with it. Nothing waits for one without a deadline, whatever the user's code does to its own process.

Each call carries a mark that cannot be guessed, and its answer must carry the same mark. A line that anything else
writes to the socket fails one call at most, and never passes for the answer to another.

Owns: which functions score, their deadlines and outcomes, the weighted sum. Does not know: what is scored,
what becomes of a failure (train).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import psutil

from jaxrl_llm.actor import reward_worker
from jaxrl_llm.actor.printing import Printer, say
from jaxrl_llm.config import ConfigError, RewardsConfig
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.functions import named
from jaxrl_llm.runtime.nested import visible
from jaxrl_llm.types import MAX_ERRORS_KEPT, OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example, Rewards

MATH_SCORER = "jaxrl_llm.questions.tasks.math_answers:reward"
CHECK_S = 1.0  # between two looks at whether the run is to stop
MAX_START_S = 300.0
MAX_ANSWER_BYTES = 2**26
MORE = ("messages", "environments")  # what a function is given if it names it
MARK = "JAXRL_REWARD_WORKER"  # in the environment of a worker and of what it starts, wherever that goes: which it is


class StrayLine(Exception):
    """A worker wrote something else than the answer to its call."""


class NoWorker(OSError):
    """No process that can answer calls starts."""


class Answer(NamedTuple):
    """Of one call."""

    scores: np.ndarray  # [completions, turns] f64, NaN where there is none
    outcome: np.ndarray  # [completions] ``types.OUTCOME_*``
    reasons: list[str]  # what went wrong
    masked: list[list[int]]  # of each completion the places of its tokens that are masked
    seconds: np.ndarray | None = (
        None  # [completions, turns] f32 that an environment took to answer; None = there is none
    )


Ticket = list[Future[Answer]]  # of the completions of one prompt, for each function. Opaque to callers.


class RewardPool(contextlib.AbstractContextManager):
    """Runs reward functions ``reward(prompts, completions, **columns) -> list[float]`` on groups of completions.

    One that names ``messages`` gets those too: of each completion all after the prompt, ``{"role", "content"}``, and
    may return a list for it, a score for each turn of the policy's, which add up; a number is the last turn's. Where an
    environment answers, completions are the policy's last turns; one that names ``environments`` gets what the public
    attributes of each completion's instance were in the end (``None`` where there is none).

    One call scores the completions of one prompt with one function: ``prompts`` and every column of the
    example come repeated to the length of ``completions``. A completion's outcome is the worst of its functions':

        score    every function gave a number of at most 1e12 in size
        timeout  a function took longer than ``timeout_s`` (all completions of that call)
        error    a function raised or returned the wrong number of scores, or its process died (all completions
                 of that call), or it returned no such number (that completion)

    A function with the attribute ``one_by_one = True`` scores each completion without looking at the others. It has one
    call for each completion, and a completion that fails fails alone. All completions of a prompt have ``timeout_s``
    together (see ``_one_by_one``).

    A failed completion has total NaN, never 0. What functions print goes to stderr, the first 64 KiB of a call.

    Args:
        task_scorer: the spec that "task" stands for; "" when the task has none.
        examples: what is known of what will be scored.

    Raises:
        ConfigError: a function that cannot be found or does not take the examples' columns, before any process starts.
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
        checked = [_checked_spec(name, task_scorer, examples) for name in config.functions]
        self._specs = {spec: more for spec, more, _ in checked}
        self._one_by_one_specs = {spec for spec, _, is_one_by_one in checked if is_one_by_one}
        self._functions = [(name, spec) for name, (spec, *_) in zip(config.functions, checked, strict=True)]
        self._closed, self._printer, self._said = False, Printer(), 0
        self._workers = [Worker([*filter(None, self._specs)], self._printer) for _ in range(config.num_workers)]
        self._free = list(self._workers)
        self._threads = ThreadPoolExecutor(config.num_workers, "rewards")

    def submit(self, example: Example, completions: Sequence[str], played: Any = None, tokens_in: Any = None) -> Ticket:
        """Queue the completions of one prompt, and what an environment made of them; returns at once.

        Args:
            tokens_in: (number of a completion, spans of its text) -> places of its tokens there; None = nobody asks.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        given = example, list(completions), played, tokens_in
        return [self._threads.submit(self._score, *names, *given) for names in self._functions]

    def collect(self, tickets: Sequence[Ticket | None]) -> Rewards:
        """Wait for the tickets; their scores one after the other, in the order given.

        A ticket is None where another host has it: all hosts come to the same scores.

        Raises:
            Stopped: (``check``) the run is to stop before they are there.
        """
        own = [call for ticket in tickets if ticket for call in ticket]
        while True:
            with contextlib.suppress(CancelledError):
                waiting = wait(own, CHECK_S).not_done
                answers = None if waiting else [ticket and [call.result() for call in ticket] for ticket in tickets]
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if all(hosts.exchange(answers is not None)):
                break
            self.check()
        answers = hosts.complete(answers)
        by_turn = np.concatenate([[x.scores for x in of] for of in answers], axis=1)  # [functions, completions, turns]
        outcome = np.concatenate([[x.outcome for x in of] for of in answers], axis=1)
        seconds = [of[0].seconds for of in answers]  # any function's: an episode has been played once
        parts, weights = by_turn.sum(axis=2), np.array(self._config.weights)
        errors = dict.fromkeys(reason for calls in answers for answer in calls for reason in answer.reasons)
        self._say(list(errors))
        return Rewards(
            total=(weights @ parts).astype(np.float32),  # NaN where any part is
            parts=dict(zip(self._config.functions, parts.astype(np.float32), strict=True)),
            outcome=outcome.max(axis=0).astype(np.int8),
            errors=tuple(errors)[:MAX_ERRORS_KEPT],
            by_turn=np.tensordot(weights, by_turn, 1).astype(np.float32) if by_turn.shape[2] > 1 else None,
            masked=[sorted(set().union(*row)) for of in answers for row in zip(*(x.masked for x in of), strict=True)],
            turn_seconds=None if any(one is None for one in seconds) else np.concatenate(seconds),
        )

    def _say(self, errors: list[str]) -> None:
        """The first failures of a run in words, on stderr; all of them are counted."""
        new, self._said = errors[: MAX_ERRORS_KEPT - self._said], min(MAX_ERRORS_KEPT, self._said + len(errors))
        if new and hosts.is_first():
            say("".join(f"warning: a reward failed: {visible(reason)}\n" for reason in new))

    def close(self) -> None:
        """End every worker, whatever it is doing, and all that it started."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while len(self._free) < len(self._workers):  # a thread waits for an answer, or starts another process
            end(self._workers)
        self._threads.shutdown()
        put_away(self._workers, self._printer)

    def __exit__(self, *_) -> None:
        self.close()

    # Below: in other threads.

    def _score(self, name: str, spec: str, example: Example, texts: list[str], played: Any, tokens_in: Any) -> Answer:
        if name == "environment":
            return played.failures_in(played.own_scores())
        messages = played.messages if played else [[{"role": "assistant", "content": text}] for text in texts]
        texts = played.last_turns() if played else texts
        by_turn = played.by_turn if played else lambda given: np.array(given, np.float64).reshape(len(texts), 1)
        shown = played.shown if played else lambda: [None] * len(texts)
        more = {name: messages if name == "messages" else shown() for name in self._specs[spec]}
        ask = self._one_by_one if spec in self._one_by_one_specs else self._together
        worker = self._free.pop()
        try:
            scored = ask(worker, (spec, example.prompt, example.columns), texts, more)
            scores = by_turn(scored.values)
            masked = [tokens_in(i, some) if tokens_in and some else [] for i, some in enumerate(scored.spans)]
        except Exception as error:
            scored = _Scored.without(len(texts))
            scored.reasons[0] = [reward_worker.message(error)]
            scores, masked = by_turn(scored.values), scored.spans
        self._free.append(worker)
        outcome = np.where(np.isnan(scores).any(axis=1), scored.failures, OUTCOME_SCORE)
        said = itertools.chain.from_iterable(scored.reasons.values())
        reasons = [f"{name} on {example.origin or 'a prompt'}: {reason}" for reason in said]
        answer = Answer(scores, outcome, reasons, masked)
        return played.failures_in(answer) if played else answer

    def _together(self, worker: Worker, of: tuple[Any, ...], texts: list[str], more: dict[str, list]) -> _Scored:
        """Score all completions of a prompt in one call, which they fail together."""
        scored = _Scored.without(len(texts))
        self._try(worker, of, texts, more, [*range(len(texts))], self._config.timeout_s, scored)
        return scored

    def _one_by_one(self, worker: Worker, of: tuple[Any, ...], texts: list[str], more: dict[str, list]) -> _Scored:
        """Score the completions of a prompt in a call each. They have ``timeout_s`` together.

        Each of the n completions that are left may take 1/n of the time that is left. So one that hangs leaves time
        for all others. Those that took too long are tried once more, if they can have more time than before.
        """
        scored = _Scored.without(len(texts))
        left_s, tried_s = self._config.timeout_s, [0.0] * len(texts)
        waiting = [*range(len(texts))]
        for _ in range(2):
            for num_before, i in enumerate(waiting):
                share_s = left_s / (len(waiting) - num_before)
                if share_s > tried_s[i]:
                    tried_s[i] = share_s
                    try:
                        left_s -= self._try(worker, of, texts, more, [i], share_s, scored)
                    except NoWorker as error:
                        scored.reasons[i] = [reward_worker.message(error)]
                        return scored
            waiting = [i for i in waiting if scored.failures[i] == OUTCOME_TIMEOUT]
        return scored

    def _try(
        self,
        worker: Worker,
        of: tuple[Any, ...],
        texts: list[str],
        more: dict[str, list],
        places: list[int],
        timeout_s: float,
        scored: _Scored,
    ) -> float:
        """Write what a call for the completions at ``places`` answers into ``scored``; return the seconds it took.

        The start of a process is not part of these seconds.
        """
        own = {name: [values[i] for i in places] for name, values in more.items()}
        if self._closed:
            raise NoWorker("the reward pool is closed")
        worker.ready()
        began = time.monotonic()
        failure = OUTCOME_ERROR
        try:
            call = (*of, [texts[i] for i in places], own)
            values, reasons, spans = worker.ask(call, timeout_s, functools.partial(_are_scores, num=len(places)))
        except Exception as error:
            failure, reason = failed(error)
            values, reasons, spans = [None] * len(places), [reason], [[]] * len(places)
        for i, value, some in zip(places, values, spans, strict=True):
            scored.values[i], scored.spans[i], scored.failures[i] = value, some, failure
        scored.reasons[places[0]] = reasons
        return min(timeout_s, time.monotonic() - began)


class _Scored(NamedTuple):
    """What a function gave the completions of a prompt so far."""

    values: list[Any]  # a number, a number for each turn, or None
    spans: list[list[list[int]]]  # of characters that the function masks
    failures: list[int]  # the outcome of a completion without a number
    reasons: dict[int, list[str]]  # by the first completion of a call

    @classmethod
    def without(cls, num: int) -> _Scored:
        return cls([None] * num, [[]] * num, [OUTCOME_ERROR] * num, {})


def _are_scores(answer: Any, num: int) -> bool:
    """Whether an answer has the form of ``reward_worker.call``: numbers within the limits, messages and spans."""
    match answer:
        case [list(values), list(reasons), list(spans)] if len(values) == len(spans) == num:
            numbers = [x for value in values for x in (value if isinstance(value, list) else [value])]
            pairs = [pair for some in spans if isinstance(some, list) for pair in some]
            return (
                all(x is None or is_number(x) for x in numbers)
                and all(isinstance(reason, str) for reason in reasons)
                and all(isinstance(some, list) for some in spans)
                and all(isinstance(x, list) and len(x) == 2 and set(map(type, x)) == {int} for x in pairs)
            )
    return False


def is_number(value: Any) -> bool:
    """Whether a value of an answer can be a score."""
    return type(value) in (int, float) and abs(value) <= reward_worker.MAX_SCORE  # false for NaN


def failed(error: Exception) -> tuple[int, str]:
    """Return the outcome and the reason of a call that raised."""
    if isinstance(error, TimeoutError):
        return OUTCOME_TIMEOUT, str(error)
    if isinstance(error, StrayLine):
        return OUTCOME_ERROR, str(error)
    died = isinstance(error, (EOFError, ConnectionError))
    return OUTCOME_ERROR, "its process died" if died else reward_worker.message(error)


class Worker:
    """A process and the socket to it, and the next one when it fails. Used by one thread at a time.

    ``serves``: module of this package whose ``main`` it runs.
    """

    def __init__(self, specs: list[str], printer: Printer, serves: str = "reward_worker"):
        self._specs, self._printer, self._serves, self.process = specs, printer, serves, None
        self._start()

    def _start(self) -> None:
        if self.process:
            end([self])
            self.socket.close()
        self.socket, theirs = socket.socketpair()
        self._is_ready, self.mark = False, f"{os.getpid()}.{time.monotonic_ns()}"
        program = f"from jaxrl_llm.actor.{self._serves} import main; main({theirs.fileno()}, {self._specs!r})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
                stdin=subprocess.DEVNULL,
                stdout=self._printer.descriptor,  # not the run's own
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it
                # A function that uses jax must not take the accelerator from the run.
                env={**os.environ, "JAX_PLATFORMS": "cpu", MARK: self.mark},
            )

    def ready(self) -> None:
        """Wait for a process that can take a call; replace one that died, or wrote a line unasked, since the last call.

        Raises:
            NoWorker: no such process starts.
        """
        try:
            if self.process.poll() is not None or (self._is_ready and self._has_written()):
                self._start()
            if not self._is_ready and (line := self._line(MAX_START_S)) != reward_worker.READY:
                raise NoWorker(f"no process starts: {line!s:.300}")
            self._is_ready = True
        except NoWorker:
            self._replace()
            raise
        except Exception as error:
            self._replace()
            raise NoWorker(f"no process starts: {failed(error)[1]}") from error

    def _has_written(self) -> bool:
        """Whether the process has written something, or closed the connection."""
        self.socket.setblocking(False)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def ask(self, call: tuple[Any, ...], timeout_s: float, is_answer: Callable[[Any], bool]) -> Any:
        """Return what the process answers to a call. When the call fails, another process is started.

        Raises:
            TimeoutError: no answer in time.
            StrayLine: a line without the call's mark came, or its answer is not what ``is_answer`` accepts.
        """
        mark = secrets.token_hex(16)
        payload = pickle.dumps((mark, call))
        self._printer.make_room()
        self.ready()
        try:
            line = self._line(timeout_s, payload)
            if not (isinstance(line, list) and len(line) == 2 and line[0] == mark and is_answer(line[1])):
                raise StrayLine("its process wrote a line that does not answer the call")
            return line[1]
        except Exception:
            self._replace()
            raise

    def _replace(self) -> None:
        with contextlib.suppress(OSError):  # the next call says that none starts
            self._start()

    def _line(self, timeout_s: float, payload: bytes = b"") -> Any:
        """Send the payload; return the line of JSON that comes back."""
        line, deadline = bytearray(), time.monotonic() + timeout_s
        try:
            self.socket.settimeout(timeout_s)
            self.socket.sendall(payload)
            while not line.endswith(b"\n"):
                self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
                received = self.socket.recv(2**20)
                if not received:
                    raise EOFError
                line += received
                if len(line) > MAX_ANSWER_BYTES:
                    raise StrayLine(f"its process wrote more than {MAX_ANSWER_BYTES} bytes")
        except TimeoutError:
            raise TimeoutError(f"no answer after {timeout_s:.3g} s") from None
        try:
            return json.loads(line)
        except (ValueError, RecursionError):  # not JSON, two lines, or brackets without end
            raise StrayLine("its process wrote a line that is not one line of JSON") from None


def end(workers: Sequence[Worker]) -> None:
    """Kill processes with all that they started."""
    processes, marks = [worker.process for worker in workers], {worker.mark for worker in workers}
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for _ in range(100):  # for what has left its group, until there is none: it may start others meanwhile
        left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) in marks]
        if not left:
            break
        for other in left:
            with contextlib.suppress(psutil.Error):
                other.kill()
        time.sleep(0.01)
    for process in processes:
        process.wait()


def put_away(workers: Sequence[Worker], printer: Printer) -> None:
    """Kill processes for good, and with them what they print to."""
    end(workers)
    for worker in workers:
        worker.socket.close()
    printer.close()


def imported(spec: str, said: str) -> Any:
    """What a user's spec names; ConfigError, which begins as ``said``, where it cannot be had."""
    try:
        return reward_worker.resolve(spec)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"{said} cannot be used: {reward_worker.message(error)}") from error


def _checked_spec(name: str, task_scorer: str, examples: Sequence[Example]) -> tuple[str, tuple[str, ...], bool]:
    """Return the spec that ``name`` stands for, which of MORE it takes, and whether it scores completions one by one.

    The spec can be imported and names a function that takes every column of the examples. "environment" has no spec.
    """
    if name == "environment":
        return "", (), False
    if name == "task" and not task_scorer:
        raise ConfigError("rewards.functions: 'task' means nothing here: this prompts.source has no scorer of its own")
    spec: Any = {"task": task_scorer, "math": MATH_SCORER}.get(name, name)
    function = imported(spec, f"rewards.functions: {name!r}")
    more = named(function, MORE)
    for columns, origin in {tuple(example.columns): example.origin for example in reversed(examples)}.items():
        try:
            given = "prompts", "completions", *columns, *more
            signature = inspect.signature(function, follow_wrapped=False)
            signature.bind(prompts=0, completions=0, **dict.fromkeys(columns), **dict.fromkeys(more))
        except ValueError:
            break
        except TypeError as error:
            said = f"rewards.functions: {name!r} cannot score {origin}: {error}"
            raise ConfigError(f"{said}; given: {', '.join(given)}") from error
    return spec, more, getattr(function, "one_by_one", False) is True
