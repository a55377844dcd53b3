"""Scores of completions, from functions that run in a pool of processes of their own.

    caller              threads, one for each worker              workers (reward_worker.py)
    ------              ----------------------------              --------------------------
    submit --queue-->   hand a call to a worker that is free ---> run the function
                        check what comes back                <--- answer
                        past the deadline, or the socket closed: kill the worker with all that it started, start another
    collect <--------   scores, outcomes, reasons

Workers are plain subprocesses, not multiprocessing's: those would import the caller's main module, and jax
with it. Nothing waits for one without a deadline, whatever the user's code does to its own process.

Owns: which functions score, their deadlines and outcomes, the weighted sum. Does not know: what is scored,
what becomes of a failure (train).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
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
MORE = ("messages", "environments")  # what a function is given if it names it
MARK = "JAXRL_REWARD_WORKER"  # in the environment of a worker and of what it starts, wherever that goes: which it is


class Answer(NamedTuple):
    """Of one call."""

    scores: np.ndarray  # [completions, turns] f64, NaN where there is none
    outcome: np.ndarray  # [completions] ``types.OUTCOME_*``
    reasons: list[str]  # what went wrong
    masked: list[list[int]]  # of each completion the places of its tokens that are masked


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
        self._specs = dict(checked)  # and what of MORE each takes
        self._functions = [(name, spec) for name, (spec, _) in zip(config.functions, checked, strict=True)]
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
        scores, masked = by_turn([None] * len(texts)), [[]] * len(texts)
        failure, worker = OUTCOME_ERROR, self._free.pop()
        try:
            if self._closed:
                raise EOFError
            call = spec, example.prompt, example.columns, texts, more
            given, reasons, spans = worker.ask(call, self._config.timeout_s)
            scores = by_turn(given)
            masked = [tokens_in(i, some) if tokens_in and some else [] for i, some in enumerate(spans)]
        except Exception as error:
            failure, *reasons = failed(error)
        self._free.append(worker)
        outcome = np.where(np.isnan(scores).any(axis=1), failure, OUTCOME_SCORE)
        reasons = [f"{name} on {example.origin or 'a prompt'}: {reason}" for reason in reasons]
        answer = Answer(scores, outcome, reasons, masked)
        return played.failures_in(answer) if played else answer


def failed(error: Exception) -> tuple[int, str]:
    """Outcome and reason of a call that raised."""
    if isinstance(error, TimeoutError):
        return OUTCOME_TIMEOUT, str(error)
    died = (EOFError, ConnectionError, UnicodeDecodeError, json.JSONDecodeError)
    return OUTCOME_ERROR, "its process died" if isinstance(error, died) else reward_worker.message(error)


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
        self._ready, self.mark = False, f"{os.getpid()}.{time.monotonic_ns()}"
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

    def ask(self, call: tuple[Any, ...], timeout_s: float) -> Any:
        """What the process answers to a call. When it raises, there is another process."""
        payload = pickle.dumps(call)
        self._printer.make_room()
        try:
            if self.process.poll() is not None:  # it died while idle, which is not this call's fault
                self._start()
            if not self._ready and (said := self._hear(b"", MAX_START_S)) != reward_worker.READY:
                raise OSError(f"no process starts: {said}")
            self._ready = True
            return self._hear(payload, timeout_s)
        except Exception:
            with contextlib.suppress(OSError):  # the next call says that none starts
                self._start()
            raise

    def _hear(self, payload: bytes, timeout_s: float) -> Any:
        """Send the payload; the line of JSON that comes back."""
        line, deadline = bytearray(), time.monotonic() + timeout_s
        try:
            self.socket.settimeout(timeout_s)
            self.socket.sendall(payload)
            while not line.endswith(b"\n"):
                self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
                received = self.socket.recv(2**20)
                if not received or len(line) > 2**26:
                    raise EOFError
                line += received
        except TimeoutError:
            raise TimeoutError(f"no answer after {timeout_s:g} s") from None
        return json.loads(line)


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


def _checked_spec(name: str, task_scorer: str, examples: Sequence[Example]) -> tuple[str, tuple[str, ...]]:
    """The spec that ``name`` stands for, and which of MORE it takes.

    It imports, is a function, and takes every column that an example has. "environment" is none: it has its own reward.
    """
    if name == "environment":
        return "", ()
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
    return spec, more
