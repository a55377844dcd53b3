"""A system's worker process, as ``run`` sees it: the other end of ``workers.link``.

Owns: start, deadlines, end, and the error message of a worker that failed. Does not know: the content of a step.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, CpuMeter


class WorkerError(RuntimeError):
    """A worker ended, sent nothing for too long, or sent a line that is not JSON."""


class Worker:
    """A started worker that has its weights.

    Args:
        command: the command of the process, which runs in the repository's root.
        job: the first line that the worker receives.
        log: the file of the worker's stderr.
        timeout_s: longest wait for a reply.

    Raises:
        WorkerError: the worker did not become ready.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        job: dict[str, Any],
        *,
        environment: dict[str, str],
        log: Path,
        timeout_s: float,
    ):
        self.name = name
        self._log = log
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        self._replies: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.versions: dict[str, str] = self._ask(json.dumps(job))["ready"]

    @property
    def age_s(self) -> float:
        """Return the seconds since the process was started."""
        return time.monotonic() - self._started

    def step(self) -> tuple[dict[str, float], float]:
        """Run one step. Return its figures, and the share of the machine's CPU time that other processes took."""
        meter = CpuMeter(self._process.pid)
        figures = self._ask("step")
        return figures, meter.share_of_others()

    def close(self) -> None:
        """End the process. A second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # The buffer may hold lines that a dead worker did not read.
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # If the worker has ended, its last line is the reply.
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        try:
            reply = self._replies.get(timeout=self._timeout_s)
            return json.loads(reply)
        except queue.Empty:
            reason = f"sent nothing for {self._timeout_s:.0f} s"
        except ValueError:
            reason = f"sent {reply.strip()!r}, which is not JSON" if reply else self._end()
        self._process.kill()
        self.close()
        last = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise WorkerError(f"worker {self.name} {reason}: {' '.join(last)} (see {self._log})")

    def _end(self) -> str:
        return f"ended with status {self._process.wait(10)}"

    def _read(self) -> None:
        try:
            for line in self._process.stdout:
                self._replies.put(line)
        except ValueError:  # ``close`` has closed the pipe.
            return
        self._replies.put("")
