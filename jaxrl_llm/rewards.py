"""Scores of completions, from functions that run in a pool of processes of their own.

    caller              dispatcher thread                          workers (reward_worker.py)
    ------              -----------------                          --------------------------
    submit --pending--> hands one call to each idle worker  ---->  run the function
                        notes the score                     <----  answer
                        past the deadline, or the pipe closed: kills the worker by its pid, starts another
    collect <--------   a ticket is whole

Workers are plain subprocesses, not multiprocessing's: those would import the caller's main module, and jax
with it. The thread alone touches the workers; what it shares with callers is under one condition.

Owns: which functions score, their deadlines and outcomes, the weighted sum. Does not know: what is scored,
what becomes of a failure (train).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any

import numpy as np

from jaxrl_llm import reward_worker
from jaxrl_llm.config import ConfigError, RewardsConfig
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example, Rewards

MATH_SCORER = "jaxrl_llm.tasks.math_answers:reward"
MAX_ERRORS_KEPT = 5
MAX_FAILED_STARTS = 3  # in a row; then there is no point in starting another
MAX_START_S = 300.0


@dataclasses.dataclass(eq=False)
class Ticket:
    """The completions of one prompt on their way through every function. Opaque to callers."""

    parts: np.ndarray  # [functions, completions] f64, NaN until scored
    outcome: np.ndarray  # [completions] i8
    open_calls: int
    errors: list[str]


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    ticket: Ticket
    function: int
    where: str
    payload: bytes


class RewardPool:
    """Runs reward functions ``reward(prompts, completions, **columns) -> list[float]`` on groups of completions.

    One call scores the completions of one prompt with one function: ``prompts`` and every column of the
    example come repeated to the length of ``completions``. A completion's outcome is the worst of its functions':

        score    every function gave a finite number
        timeout  a function took longer than ``timeout_s`` (all completions of that call)
        error    a function raised or returned the wrong number of scores, or its process died (all completions
                 of that call), or it returned no finite number (that completion)

    A failed completion has total NaN, never 0. What functions print goes to stderr.

    Args:
        task_scorer: the spec that "task" stands for; "" when the task has none.

    Raises:
        ConfigError: a function that cannot be found, before any process starts.
    """

    def __init__(self, config: RewardsConfig, *, task_scorer: str):
        self._config = config
        self._specs = [_checked_spec(name, task_scorer) for name in config.functions]
        self._pending: collections.deque[_Call] = collections.deque()
        self._condition = threading.Condition()
        self._closing = False
        self._crash: BaseException | None = None
        self._failed_starts = 0
        self._no_workers = ""  # why, once no worker starts any more
        self._bell, self._ring = Pipe(duplex=False)
        self._workers = [_Worker(self._specs) for _ in range(config.num_workers)]
        self._thread = threading.Thread(target=self._dispatch, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, example: Example, completions: Sequence[str]) -> Ticket:
        """Queue the completions of one prompt; returns at once."""
        if self._closing:
            raise RuntimeError("the reward pool is closed")
        num_functions, num = len(self._specs), len(completions)
        ticket = Ticket(np.full((num_functions, num), np.nan), np.full(num, OUTCOME_SCORE, np.int8), num_functions, [])
        for i, spec in enumerate(self._specs):
            payload = pickle.dumps((spec, example.prompt, example.columns, list(completions)))
            where = f"{self._config.functions[i]} on {example.origin or 'a prompt'}"
            self._pending.append(_Call(ticket, i, where, payload))
        self._ring.send_bytes(b".")
        return ticket

    def collect(self, tickets: Sequence[Ticket]) -> Rewards:
        """Wait for the tickets; their scores one after the other, in the order given."""
        with self._condition:
            while any(ticket.open_calls for ticket in tickets):
                if self._crash is not None:
                    raise RuntimeError("the reward pool broke") from self._crash
                if self._closing:
                    raise RuntimeError("the reward pool is closed")
                self._condition.wait()
        parts = np.concatenate([np.empty((len(self._specs), 0)), *(ticket.parts for ticket in tickets)], axis=1)
        errors = dict.fromkeys(message for ticket in tickets for message in ticket.errors)
        return Rewards(
            total=(np.array(self._config.weights) @ parts).astype(np.float32),  # NaN where any part is
            parts=dict(zip(self._config.functions, parts.astype(np.float32), strict=True)),
            outcome=np.concatenate([np.empty(0, np.int8), *(ticket.outcome for ticket in tickets)]),
            errors=tuple(errors)[:MAX_ERRORS_KEPT],
        )

    def close(self) -> None:
        """End every worker, whatever it is doing."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._ring.send_bytes(b".")
            self._thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # Below: the dispatcher thread.

    def _dispatch(self) -> None:
        try:
            while not self._closing:
                self._hand_out()
                self._listen()
        except BaseException as error:  # told to whoever waits in collect
            with self._condition:
                self._crash = error
                self._condition.notify_all()
        finally:
            for worker in self._workers:
                worker.kill()

    def _hand_out(self) -> None:
        while self._no_workers and self._pending:
            self._finish(self._pending.popleft(), None, OUTCOME_ERROR, [self._no_workers])
        for worker in list(self._workers):
            if worker.ready and worker.call is None and self._pending:
                worker.call = self._pending.popleft()
                worker.deadline = time.monotonic() + self._config.timeout_s
                try:
                    worker.connection.send_bytes(worker.call.payload)
                except OSError:
                    self._replace(worker, OUTCOME_ERROR, "its process died")

    def _listen(self) -> None:
        """Wait for an answer, a death, a deadline or the bell, and deal with it."""
        deadline = min((worker.deadline for worker in self._workers), default=math.inf)
        patience = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        spoken = wait([self._bell, *(worker.connection for worker in self._workers)], patience)
        if self._bell in spoken:
            while self._bell.poll():
                self._bell.recv_bytes()
        for worker in list(self._workers):
            if worker.connection in spoken:
                self._hear(worker)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline <= now:
                limit = self._config.timeout_s if worker.ready else MAX_START_S
                self._replace(worker, OUTCOME_TIMEOUT, f"no answer after {limit:g} s")

    def _hear(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker, OUTCOME_ERROR, "its process died")
            return
        if worker.ready:
            call, worker.call, worker.deadline = worker.call, None, math.inf
            self._finish(call, message[0], OUTCOME_ERROR, message[1])
        elif message == reward_worker.READY:
            worker.ready, worker.deadline = True, math.inf
            self._failed_starts = 0
        else:
            self._replace(worker, OUTCOME_ERROR, message)

    def _replace(self, worker: _Worker, outcome: int, reason: str) -> None:
        worker.kill()
        self._workers.remove(worker)
        if worker.call is not None:
            self._finish(worker.call, None, outcome, [reason])
        if not worker.ready:
            self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._no_workers = f"no process starts: {reason}"
        if not self._no_workers:
            self._workers.append(_Worker(self._specs))

    def _finish(self, call: _Call, scores: list[float] | None, failure: int, reasons: list[str]) -> None:
        """Note the scores; those that are NaN (all of them for ``None``) have the outcome ``failure``."""
        ticket = call.ticket
        with self._condition:
            row = ticket.parts[call.function]
            row[:] = np.nan if scores is None else scores
            failed = np.isnan(row)
            ticket.outcome[failed] = np.maximum(ticket.outcome[failed], failure)
            ticket.errors += [f"{call.where}: {reason}" for reason in reasons]
            ticket.open_calls -= 1
            self._condition.notify_all()


class _Worker:
    """One process, the connection to it, and what it is doing."""

    def __init__(self, specs: list[str]):
        self.connection, theirs = Pipe()
        self.ready = False
        self.call: _Call | None = None
        self.deadline = time.monotonic() + MAX_START_S
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-c"),
                    f"import sys; sys.path[:] = {sys.path!r}\n"
                    f"from jaxrl_llm.reward_worker import main; main({theirs.fileno()}, {specs!r})",
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout is the run's own; what functions print is for stderr
                pass_fds=[theirs.fileno()],
                # A group of its own: Ctrl-C does not reach it, and its own children die with it.
                start_new_session=True,
                # A function that uses jax must not take the accelerator from the run.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )

    def kill(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _checked_spec(name: str, task_scorer: str) -> str:
    """The spec that ``name`` stands for; it imports, and is a function."""
    if name == "task" and not task_scorer:
        raise ConfigError("rewards.functions: 'task' means nothing here: this prompts.source has no scorer of its own")
    spec: Any = {"task": task_scorer, "math": MATH_SCORER}.get(name, name)
    try:
        reward_worker.resolve(spec)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"rewards.functions: {name!r} cannot be used: {type(error).__name__}: {error}") from error
    return spec
