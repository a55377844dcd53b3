"""Scores of completions by reward functions, which run in a pool of worker processes.

    caller              threads, one for each worker              workers (reward_worker.py)
    ------              ----------------------------              --------------------------
    submit --queue-->   send a call to a free worker         ---> run the function
                        check the answer                     <--- answer
                        deadline passed or socket closed: kill the worker and its child processes, start another
    collect <--------   scores, outcomes, reasons

Workers are plain subprocesses. Workers of multiprocessing would import the caller's main module, and jax with it.
Every wait for a worker has a deadline, so that a user's function cannot block the run.

Each call carries a random mark, and its answer must carry the same mark. If other code writes a line to the socket, at
most one call fails. The line is never taken for the answer to another call.

Owns: which functions score, their deadlines and outcomes, the weighted sum. Does not know: the completions' meaning,
how training handles a failure (train).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import operator
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import psutil

from jaxrl_llm.algorithms.inputs import COLUMNS, ROW, TURN
from jaxrl_llm.config import ConfigError, RewardsConfig
from jaxrl_llm.runtime import hosts
from jaxrl_llm.scoring import reward_worker
from jaxrl_llm.scoring.printing import Printer, say
from jaxrl_llm.settings.functions import named
from jaxrl_llm.settings.schema import visible
from jaxrl_llm.types import MAX_ERRORS_KEPT, OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example, Rewards

MATH_SCORER = "jaxrl_llm.scoring.math_answers:reward"
CHECK_S = 1.0  # seconds between two checks whether the run must stop
MAX_START_S = 300.0
MAX_ANSWER_BYTES = 2**26
COLUMN_ALIASES = {"masked": "reward_mask"}  # other names of columns in what a reward function returns
MORE = ("messages", "environments")  # optional parameters of a reward function
MARK = "JAXRL_REWARD_WORKER"  # environment variable that identifies a worker; its child processes inherit it


class StrayLine(Exception):
    """A worker wrote a line that is not the answer to its call."""


class NoWorker(OSError):
    """No worker process could be started."""


class Answer(NamedTuple):
    """Scores that one reward function gave the completions of one prompt."""

    scores: np.ndarray  # [completions, turns] f64, NaN = no score
    outcome: np.ndarray  # [completions] ``types.OUTCOME_*``
    reasons: list[str]  # error messages
    columns: Mapping[str, np.ndarray] = {}  # name -> [completions, ...] f32 (``Rewards.columns``), NaN = no value


class ColumnRequest(NamedTuple):
    """Columns that the method reads of the completions of one prompt (``algorithms.inputs.COLUMNS``).

    Attributes:
        shapes: shapes per completion by name (``Config.reward_columns``).
        positions: (index of a completion, spans of its text) -> positions of the tokens within the spans.
    """

    shapes: Mapping[str, tuple[int, ...]]
    positions: Callable[[int, list[list[int]]], list[int]]


NO_COLUMNS = ColumnRequest({}, lambda i, spans: [])


Ticket = list[Future[Answer]]  # pending answers for one prompt, one per function; opaque to callers


class RewardPool(contextlib.AbstractContextManager):
    """Pool of worker processes that run reward functions on groups of completions.

    A reward function has the signature ``reward(prompts, completions, **columns) -> list[float]``. One call scores all
    completions of one prompt with one function. ``prompts`` and every column of the example are repeated to the length
    of ``completions``. If an environment answers the policy, ``completions`` are the policy's last turns.

    Instead of a score, a function may return ``{"reward": score, NAME: value, ...}`` for a completion. Each NAME is a
    column of ``algorithms.inputs.COLUMNS`` with ``from_rewards``:

        ROW    The value is a number.
        TURN   The value is a list of numbers, the first for the policy's first turn.
        TOKEN  The value is a list of spans ``[start, stop]`` or ``[start, stop, number]``, in characters of the
               completion, without ``stop``. Tokens within the spans have the number, or 1.0.

    "masked" is another name for "reward_mask". If several functions return a column, the largest value counts. Columns
    that the method does not read are dropped.

    Optional parameters of a reward function:

        messages      The messages ``{"role", "content"}`` after the prompt, for each completion. The function may then
                      return a list for a completion: one score for each turn of the policy. The scores are summed. A
                      single number is the score of the last turn.
        environments  The final public attributes of each completion's environment instance, ``None`` without one.

    The outcome of a completion is the worst outcome over its functions:

        score    Every function returned a number of magnitude at most 1e12.
        timeout  A function took longer than ``timeout_s``. All completions of the call time out.
        error    A function raised, returned the wrong number of scores, or its process died: all completions of the
                 call. Or a function returned an invalid score: that completion.

    A function with the attribute ``one_by_one = True`` scores each completion independently. It has one call per
    completion, so that a failure affects one completion only. All completions of a prompt share ``timeout_s`` (see
    ``_one_by_one``).

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
        checked = [_checked_spec(name, task_scorer, examples) for name in config.functions]
        self._specs = {spec: more for spec, more, _ in checked}
        self._one_by_one_specs = {spec for spec, _, is_one_by_one in checked if is_one_by_one}
        self._functions = [(name, spec) for name, (spec, *_) in zip(config.functions, checked, strict=True)]
        self._closed, self._printer, self._said = False, Printer(), 0
        self._workers = [Worker([*filter(None, self._specs)], self._printer) for _ in range(config.num_workers)]
        self._free = list(self._workers)
        self._threads = ThreadPoolExecutor(config.num_workers, "rewards")

    def submit(
        self,
        example: Example,
        completions: Sequence[str],
        played: Any = None,
        columns: ColumnRequest = NO_COLUMNS,
    ) -> Ticket:
        """Queue the completions of one prompt for scoring, without waiting for the scores.

        Args:
            played: the group's ``conversation.Played`` if an environment answered; else None.
            columns: columns that the method reads.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        given = example, list(completions), played, columns
        return [self._threads.submit(self._score, *names, *given) for names in self._functions]

    def collect(self, tickets: Sequence[Ticket | None]) -> Rewards:
        """Wait for the tickets, and return their scores concatenated in the order of the tickets.

        A ticket that belongs to another host is None here. All hosts return the same scores.

        Raises:
            Stopped: ``check`` found that the run must stop.
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
        columns = _joined_columns(answers)
        if by_turn.shape[2] > 1:
            columns["turn_reward"] = np.tensordot(weights, by_turn, 1).astype(np.float32)
        errors = dict.fromkeys(reason for calls in answers for answer in calls for reason in answer.reasons)
        self._say(list(errors))
        return Rewards(
            total=(weights @ parts).astype(np.float32),  # NaN if any part is NaN
            parts=dict(zip(self._config.functions, parts.astype(np.float32), strict=True)),
            outcome=outcome.max(axis=0).astype(np.int8),
            errors=tuple(errors)[:MAX_ERRORS_KEPT],
            columns=columns,
        )

    def _say(self, errors: list[str]) -> None:
        """Print the first failures of a run on stderr, at most ``MAX_ERRORS_KEPT`` over the whole run."""
        new, self._said = errors[: MAX_ERRORS_KEPT - self._said], min(MAX_ERRORS_KEPT, self._said + len(errors))
        if new and hosts.is_first():
            say("".join(f"warning: a reward failed: {visible(reason)}\n" for reason in new))

    def close(self) -> None:
        """Kill every worker, busy or not, and its child processes."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while len(self._free) < len(self._workers):  # a busy thread may start another process after `end`
            end(self._workers)
        self._threads.shutdown()
        put_away(self._workers, self._printer)

    def __exit__(self, *_) -> None:
        self.close()

    # The methods below run in the threads of the pool.

    def _score(
        self, name: str, spec: str, example: Example, texts: list[str], played: Any, request: ColumnRequest
    ) -> Answer:
        columns = {key: np.full((len(texts), *shape), np.nan, np.float32) for key, shape in request.shapes.items()}
        if played:
            columns |= played.columns(request.shapes.keys())
        if name == "environment":
            return played.failures_in(played.own_scores()._replace(columns=columns))
        messages = played.messages if played else [[{"role": "assistant", "content": text}] for text in texts]
        texts = played.last_turns() if played else texts
        by_turn = played.by_turn if played else lambda given: np.array(given, np.float64).reshape(len(texts), 1)
        shown = played.shown if played else lambda: [None] * len(texts)
        more = {name: messages if name == "messages" else shown() for name in self._specs[spec]}
        ask = self._one_by_one if spec in self._one_by_one_specs else self._together
        worker = self._free.pop()
        try:
            scored = ask(worker, (spec, example.prompt, example.columns), texts, more)
            _fill_columns(columns, scored, request)
            scores = by_turn(scored.values)
        except Exception as error:
            scored = _Scored.without(len(texts))
            scored.reasons[0] = [reward_worker.message(error)]
            scores = by_turn(scored.values)
        self._free.append(worker)
        outcome = np.where(np.isnan(scores).any(axis=1), scored.failures, OUTCOME_SCORE)
        said = itertools.chain.from_iterable(scored.reasons.values())
        reasons = [f"{name} on {example.origin or 'a prompt'}: {reason}" for reason in said]
        answer = Answer(scores, outcome, reasons, columns)
        return played.failures_in(answer) if played else answer

    def _together(self, worker: Worker, of: tuple[Any, ...], texts: list[str], more: dict[str, list]) -> _Scored:
        """Score all completions of a prompt in one call. If the call fails, all completions fail."""
        scored = _Scored.without(len(texts))
        self._try(worker, of, texts, more, [*range(len(texts))], self._config.timeout_s, scored)
        return scored

    def _one_by_one(self, worker: Worker, of: tuple[Any, ...], texts: list[str], more: dict[str, list]) -> _Scored:
        """Score the completions of a prompt in one call per completion. All calls together may take ``timeout_s``.

        If n completions remain, the next may take 1/n of the remaining time. A completion that hangs therefore leaves
        time for all others. Completions that timed out are tried once more, if they can get more time than before.
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
        """Score the completions at ``places`` in one call, and write the results into ``scored``.

        Returns:
            Seconds that the call took, without the start of a process, at most ``timeout_s``.
        """
        own = {name: [values[i] for i in places] for name, values in more.items()}
        if self._closed:
            raise NoWorker("the reward pool is closed")
        worker.ready()
        began = time.monotonic()
        failure = OUTCOME_ERROR
        try:
            call = (*of, [texts[i] for i in places], own)
            values, reasons, columns = worker.ask(call, timeout_s, functools.partial(_are_scores, num=len(places)))
        except Exception as error:
            failure, reason = failed(error)
            values, reasons, columns = [None] * len(places), [reason], [{}] * len(places)
        for i, value, of_completion in zip(places, values, columns, strict=True):
            scored.values[i], scored.columns[i], scored.failures[i] = value, of_completion, failure
        scored.reasons[places[0]] = reasons
        return min(timeout_s, time.monotonic() - began)


class _Scored(NamedTuple):
    """Results of one function for the completions of a prompt, filled in call by call."""

    values: list[Any]  # a number, a number for each turn, or None
    columns: list[dict[str, Any]]  # name -> value as the function returned it
    failures: list[int]  # the outcome of the completion if it has no number
    reasons: dict[int, list[str]]  # error messages, by the first completion of a call

    @classmethod
    def without(cls, num: int) -> _Scored:
        return cls([None] * num, [{}] * num, [OUTCOME_ERROR] * num, {})


def _fill_columns(columns: Mapping[str, np.ndarray], scored: _Scored, request: ColumnRequest) -> None:
    """Write the columns that a function returned into ``columns``, [completions, ...] each.

    A completion with an invalid column loses its score, and ``scored`` receives the reason.
    """
    for i, returned in enumerate(scored.columns):
        for key, value in returned.items():
            name = COLUMN_ALIASES.get(key, key)
            try:
                if name not in COLUMNS or not COLUMNS[name].from_rewards:
                    raise ValueError("no column of rewards has this name")
                if name in columns:
                    columns[name][i] = np.fmax(columns[name][i], _column_value(name, value, i, request))
            except (TypeError, ValueError, IndexError) as error:
                scored.values[i] = None
                reason = f"returned a wrong {key!r:.100}: {reward_worker.message(error)}"
                scored.reasons.setdefault(i, []).append(reason)


def _column_value(name: str, value: Any, i: int, request: ColumnRequest) -> np.ndarray:
    """Return the values of a column for one completion, NaN = no value.

    Args:
        value: the value that the function returned, as plain JSON.
        i: index of the completion.

    Raises:
        TypeError, ValueError, IndexError: the value has not the form that the column's declaration asks for.
    """
    kind, row = COLUMNS[name].from_rewards, np.full(request.shapes[name], np.nan, np.float32)
    if kind == ROW:
        row[...] = checked_number(value)
    elif kind == TURN:
        numbers = [checked_number(x) for x in value]
        if len(numbers) > len(row):
            raise ValueError(f"it has {len(numbers)} turns, and a completion at most {len(row)}")
        row[: len(numbers)] = numbers
    else:
        spans_of: dict[float, list[list[int]]] = {}
        for start, stop, *number in value:
            level = checked_number(*number) if number else 1.0
            spans_of.setdefault(level, []).append([operator.index(start), operator.index(stop)])
        for level, spans in spans_of.items():
            row[request.positions(i, spans)] = level
    return row


def checked_number(value: Any) -> float:
    """Return a number within the limits of a score.

    Raises:
        ValueError: the value is not such a number.
    """
    if not is_number(value):
        raise ValueError(f"{value!r:.100} must be a number of magnitude at most {reward_worker.MAX_SCORE:g}")
    return float(value)


def _joined_columns(answers: Sequence[Sequence[Answer]]) -> dict[str, np.ndarray]:
    """Return the columns of all completions, [B, ...] f32 each: the largest value over the functions, 0.0 without any.

    Args:
        answers: an answer per function, for each prompt.
    """
    columns = {}
    for name in answers[0][0].columns:
        prompts = [np.fmax.reduce([answer.columns[name] for answer in functions]) for functions in answers]
        columns[name] = np.nan_to_num(np.concatenate(prompts), nan=0.0)
    return columns


def _are_scores(answer: Any, num: int) -> bool:
    """Return whether an answer has the form that ``reward_worker.call`` returns, with scores within the limits."""
    match answer:
        case [list(values), list(reasons), list(columns)] if len(values) == len(columns) == num:
            numbers = [x for value in values for x in (value if isinstance(value, list) else [value])]
            return (
                all(x is None or is_number(x) for x in numbers)
                and all(isinstance(reason, str) for reason in reasons)
                and all(isinstance(named, dict) for named in columns)
            )
    return False


def is_number(value: Any) -> bool:
    """Return whether a value of an answer is a number within the limits of a score."""
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
    """A worker process with its socket. A failed process is replaced. One thread at a time may use a worker.

    Args:
        specs: functions that the process imports.
        printer: receives the output of the process.
        serves: module of this package whose ``main`` the process runs.
    """

    def __init__(self, specs: list[str], printer: Printer, serves: str = "jaxrl_llm.scoring.reward_worker"):
        self._specs, self._printer, self._serves, self.process = specs, printer, serves, None
        self._start()

    def _start(self) -> None:
        if self.process:
            end([self])
            self.socket.close()
        self.socket, theirs = socket.socketpair()
        self._is_ready, self.mark = False, f"{os.getpid()}.{time.monotonic_ns()}"
        program = f"from {self._serves} import main; main({theirs.fileno()}, {self._specs!r})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
                stdin=subprocess.DEVNULL,
                stdout=self._printer.descriptor,  # users' functions must not write to the run's stdout
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal must not signal the worker
                # A function that uses jax must not take the accelerator from the run.
                env={**os.environ, "JAX_PLATFORMS": "cpu", MARK: self.mark},
            )

    def ready(self) -> None:
        """Wait until the process can take a call.

        A process that has died or written to the socket since the last call is replaced first.

        Raises:
            NoWorker: no process could be started.
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
        """Return whether the process has written to the socket or closed the socket."""
        self.socket.setblocking(False)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def ask(self, call: tuple[Any, ...], timeout_s: float, is_answer: Callable[[Any], bool]) -> Any:
        """Return the process's answer to a call. If the call fails, another process is started.

        Raises:
            TimeoutError: no answer within ``timeout_s``.
            StrayLine: the process wrote a line without the call's mark, or ``is_answer`` rejects the answer.
            EOFError, OSError: the process died.
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
        with contextlib.suppress(OSError):  # the next call raises NoWorker
            self._start()

    def _line(self, timeout_s: float, payload: bytes = b"") -> Any:
        """Send the payload, and return the parsed line of JSON that the process writes."""
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
        except (ValueError, RecursionError):  # not JSON, two lines, or brackets nested too deep
            raise StrayLine("its process wrote a line that is not one line of JSON") from None


def end(workers: Sequence[Worker]) -> None:
    """Kill the workers' processes and all of their child processes."""
    processes, marks = [worker.process for worker in workers], {worker.mark for worker in workers}
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for _ in range(100):  # children outside the process group, until none is left: they may start others meanwhile
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
    """Kill the workers' processes, and close their sockets and their printer."""
    end(workers)
    for worker in workers:
        worker.socket.close()
    printer.close()


def imported(spec: str, said: str) -> Any:
    """Import the function or class that a user's spec names.

    Raises:
        ConfigError: it cannot be imported. The message begins with ``said``.
    """
    try:
        return reward_worker.resolve(spec)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"{said} cannot be used: {reward_worker.message(error)}") from error


def _checked_spec(name: str, task_scorer: str, examples: Sequence[Example]) -> tuple[str, tuple[str, ...], bool]:
    """Return the spec of a reward function, its optional parameters (MORE), and whether it scores one by one.

    The spec of "environment" is "", because no function is called.

    Raises:
        ConfigError: the function cannot be imported, or does not take every column of the examples.
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
