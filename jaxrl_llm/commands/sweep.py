"""Sweep: many runs that differ in a few settings, one table and one page.

    python -m jaxrl_llm.sweep --config=configs/sweeps/NAME.py --workdir=DIR [--workers=N] [--launch=print|COMMAND]

The file has two functions: get_config() returns the settings that all points share, and get_sweep() returns a
``points.Sweep``. Each point is a run with the workdir DIR/<name of the point>. DIR/table.csv and DIR/sweep.html are
made from the runs' metrics.jsonl, and the fits on the page also from eval_before.json.

Run the same command again to continue: finished points are skipped, and interrupted points continue from their
checkpoints. --workers=0 runs no point. It writes table and page from the files of the runs.

--launch=print prints the command of each unfinished point, so that you can start the points elsewhere. Any other text
is a shell command that is run once per point, with {command}, {name} and {workdir} filled in:

    --launch='sbatch --job-name={name} --wrap={command}'

These commands do not include the sweep's ``after``. --workers=N calls it for points that have ended elsewhere.

Owns: which points run when, and where. Does not know: training (train), the content of the page (sweeps.page).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import runpy
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Pipe, wait
from typing import Any

import rich.console
from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands.sweep_worker import LOG
from jaxrl_llm.config import Config, ConfigError, freeze, recorded, to_json
from jaxrl_llm.reports.metric_table import METRICS, evaluation_values
from jaxrl_llm.reports.records import NUMBER, read_metric_rows
from jaxrl_llm.runtime import cli
from jaxrl_llm.runtime.checkpoint_files import changed_files, changed_settings, listed
from jaxrl_llm.runtime.run_record import RunRecord, read_run_record
from jaxrl_llm.runtime.stop import StopRequest
from jaxrl_llm.settings.functions import resolve
from jaxrl_llm.settings.schema import differences, flatten, visible
from jaxrl_llm.sweeps import table
from jaxrl_llm.sweeps.page import write_page
from jaxrl_llm.sweeps.points import AFTER, Point, Sweep, freeze_points, plain, point_name
from jaxrl_llm.sweeps.table import FIRST, THEN, Run

FLAGS = flags.FLAGS

Points = dict[str, tuple[Point, Config]]

LAST_LINES = 6  # lines of a failed point's log that are printed
SERVE = "from jaxrl_llm.commands.sweep_worker import main; main(CONNECTION)"


def read_sweep(path: str) -> Sweep:
    """Return the result of ``get_sweep()`` of the file, with its names checked.

    Raises:
        ConfigError: the function is missing or raises, or the sweep names a metric that no run writes.
    """
    try:
        module = runpy.run_path(path)
        sweep = module["get_sweep"]() if "get_sweep" in module else None
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = lines[-1] if lines else 1
        raise ConfigError(f"{path}:{line}: {type(error).__name__}: {error}") from error
    if not isinstance(sweep, Sweep):
        raise ConfigError(
            f"{path}: get_sweep() must return a jaxrl_llm.sweeps.points.Sweep, not {type(sweep).__name__}"
        )
    if not (sweep.then is None or callable(sweep.then)):
        raise ConfigError(f"{path}: then={sweep.then!r} must be a function of runs that returns points, or None")
    for name in sweep.named_metrics():
        if name not in METRICS:
            raise ConfigError(f"{path}: the sweep names {name!r}, which is not a metric: see reports/metric_table.py")
    if sweep.after:
        try:
            resolve(sweep.after)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{path}: after={sweep.after!r}: {type(error).__name__}: {error}") from error
    if sweep.facet and sweep.facet not in sweep.fields():
        raise ConfigError(f"{path}: facet={sweep.facet!r} is not set by any point; {', '.join(sweep.fields())} are")
    return sweep


def points_of(
    path: str,
    base: Any,
    sweep: Sweep,
    folder: pathlib.Path,
    overrides: Collection[str] = (),
) -> Points:
    """Return the points of the sweep. Points of ``then`` are included once all other points are finished.

    Args:
        path: the sweep file.
        base: the settings that all points share.
        folder: the folder of the sweep.
        overrides: dotted names of the settings that the command line has put into ``base``.

    Raises:
        ConfigError: a point is refused, or ``then`` raises.
    """
    points = freeze_points(base, sweep.points, overrides)
    sweep.check(point for point, _ in points.values())
    if sweep.then is None:
        return points
    if not all(is_finished(folder / name, config, sweep) for name, (_, config) in points.items()):
        return points
    try:
        more = list(sweep.then(runs_of(folder, points, sweep, {})))
        if not more:
            return points
        return points | freeze_points(base, more, overrides)
    except Exception as error:
        raise ConfigError(f"{path}: then: {type(error).__name__}: {error}") from error


# ---- files of the points -------------------------------------------------------------------------------------------


def rows_of(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl; [] before the run has begun."""
    path = workdir / "metrics.jsonl"
    return read_metric_rows(path) if path.is_file() else []


def share_done(workdir: pathlib.Path, rows: list[dict[str, Any]], config: Config, sweep: Sweep) -> float:
    """Return the share of a run's iterations on disk. It is 1 only if the files that a run writes last exist."""
    share = rows[-1]["iteration"] / config.num_iterations if rows else 0.0
    has_last_files = all((workdir / name).is_file() for name in sweep.last_files)
    return min(share, 1.0 if has_last_files else 0.99)


def is_finished(workdir: pathlib.Path, config: Config, sweep: Sweep) -> bool:
    return share_done(workdir, rows_of(workdir), config, sweep) == 1


def check_folders(folder: pathlib.Path, points: Points) -> None:
    """Check that the runs in a folder were made with the settings of the sweep. Their table would mix them otherwise.

    Raises:
        ConfigError: a run has other settings. The error names the point and the settings.
    """
    for name, (_, config) in points.items():
        path = folder / name / "config.json"
        rows = rows_of(folder / name)
        record = _record(folder / name)
        # A file that is being written, or that a power cut has left in half, is skipped. The run itself compares its
        # settings with its checkpoint.
        if not rows or record is None or not record.settings:
            continue
        iterations = rows[-1]["iteration"]
        if iterations > config.num_iterations:
            raise ConfigError(
                f"{folder / name} was run for {iterations} iterations, more than "
                f"num_iterations={config.num_iterations}. Use another workdir"
            )
        try:
            before = recorded(record.settings)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        changed = changed_settings(before, config) | changed_files(record.files, config)
        if changed:
            raise ConfigError(f"{folder / name} was run with other settings: {listed(changed)}. Use another workdir")


def runs_of(folder: pathlib.Path, points: Points, sweep: Sweep, failed: Mapping[str, str]) -> list[Run]:
    """Return every point with its results on disk.

    Args:
        failed: {name: last lines of the log} of the points that failed in this process.
    """
    runs = []
    afters = {}
    for name in points:
        after = _object(folder / name / AFTER)
        afters[name] = {column: value for column, value in after.items() if NUMBER.accepts(value)}
    columns: dict[str, None] = {}  # ordered and without duplicates
    for after in afters.values():
        columns |= dict.fromkeys(after)
    first_names = {point_name(plain(point)) for point in sweep.points}
    for name, (point, config) in points.items():
        rows = rows_of(folder / name)
        run = Run(
            name=name,
            point=point,
            status=_status(
                share_done(folder / name, rows, config, sweep) == 1,
                name in failed,
                bool(rows),
            ),
            rows=rows,
            made_with=made_with_of(folder / name) if rows else {},
            after={column: afters[name].get(column) for column in columns},
            stage=FIRST if name in first_names else THEN,
            lost_rows=rows[-1]["iteration"] - len(rows) if rows else 0,
        )
        runs.append(run)
    return runs


def _status(is_finished: bool, has_failed: bool, has_begun: bool) -> str:
    """Return the status of a ``table.Run``."""
    if not has_begun and not has_failed:
        return ""
    if is_finished:
        return "finished"
    return "failed" if has_failed else "unfinished"


def before(workdir: pathlib.Path) -> dict[str, float | None]:
    """Return the metrics of a run's evaluation before training; empty if its file is missing or damaged."""
    try:
        values = evaluation_values(_object(workdir / "eval_before.json"))
    except (LookupError, TypeError):
        return {}
    return values if all(map(NUMBER.accepts, values.values())) else {}


def _object(path: pathlib.Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if there is no such file, or a power cut has left half of it."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def made_with_of(workdir: pathlib.Path) -> dict[str, Any]:
    """Return the environment that a run's config.json records; {} if the file is missing or damaged."""
    record = _record(workdir)
    return (record.made_with or {}) if record is not None else {}


def _record(workdir: pathlib.Path) -> RunRecord | None:
    """Return the content of a run's config.json; None if it is missing, damaged or still being written."""
    try:
        return read_run_record(workdir / "config.json")
    except ConfigError:
        return None


def write_results(
    folder: pathlib.Path,
    points: Points,
    sweep: Sweep,
    failed: dict[str, str],
    *,
    page: bool = False,
) -> None:
    """Write table.csv from the points' metrics. If ``page`` is True, also write sweep.html."""
    runs = runs_of(folder, points, sweep, failed)
    sweep = dataclasses.replace(sweep, points=[run.point for run in runs])  # includes the points of ``then``
    table.write_table(folder / "table.csv", runs, sweep)
    if not page:
        return
    # Read the evaluations only for the page, because the files are long. An evaluation that is being written cannot be
    # read.
    for i, run in enumerate(runs):
        if run.status == "finished":
            runs[i] = dataclasses.replace(run, before=before(folder / run.name))
    units = {name: metric.unit for name, metric in METRICS.items()}
    write_page(folder / "sweep.html", runs, sweep, units)


# ---- elsewhere -------------------------------------------------------------------------------------------------


def train_command(config_file: str, base: Config, config: Config, workdir: pathlib.Path) -> str:
    """Return the command that runs a point alone.

    Args:
        base: the result of the file's ``get_config()``, without overrides.

    Raises:
        ConfigError: a setting cannot be given on a command line.
    """
    words = [
        "python",
        "-m",
        "jaxrl_llm.train",
        f"--config={config_file}",
        f"--workdir={workdir}",
    ]
    flat = flatten(config)
    for field, (old, new) in differences(base, config, whole=True).items():
        if isinstance(new, dict):
            words += _dictionary_flags(field, old, new)
            continue
        # For a function give all its settings, because another function has other defaults. Leave out the digest of the
        # function's file.
        for path, value in flat.items():
            is_part = path.startswith(field + ".") and not path.endswith(".source")
            if path == field or is_part:
                words.append(f"--config.{path}={value}")
    return shlex.join(words)


def _dictionary_flags(field: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the flags that change the dictionary ``old`` to ``new``.

    Raises:
        ConfigError: the keys differ, or a value cannot be given on a command line.
    """
    if set(new) != set(old):
        raise ConfigError(f"{field}={new!r}: --launch needs the same keys in get_config()")
    words = []
    for key, value in new.items():
        if value == old[key]:
            continue
        if type(value) not in (bool, int, float, str) or type(value) is not type(old[key]):
            raise ConfigError(
                f"{field}.{key}={value!r} cannot be given by --launch in place of {old[key]!r}: "
                "both must be texts, numbers or truth values of one type"
            )
        # Quote texts, so that the text "4" is not read as the number 4.
        words.append(f"--config.{field}.{key}={value!r}")
    return words


def launch_commands(template: str, commands: dict[str, str], folder: pathlib.Path) -> int:
    """Print each command, or run the template with it. Return the number of runs that failed."""
    failures = 0
    for name, command in commands.items():
        if template == "print":
            print(command)
            continue
        values = {"command": command, "name": name, "workdir": str(folder / name)}
        try:
            filled = template.format(**{key: shlex.quote(value) for key, value in values.items()})
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"--launch={template!r}: {error}; it may name {{command}}, {{name}}, {{workdir}}"
            ) from None
        failures += subprocess.run(filled, shell=True, check=False).returncode != 0
    return failures


# ---- here ------------------------------------------------------------------------------------------------------


class _Worker:
    """A worker process, the connection to it, and the name of the point that it runs ("" = none)."""

    def __init__(self, serve: str, cores: set[int]):
        self.connection, worker_end = Pipe()
        self.point = ""
        with worker_end:
            set_paths = f"import sys; sys.path[:] = {sys.path!r}\n"
            code = set_paths + serve.replace("CONNECTION", str(worker_end.fileno()))
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
                # In its own process group Ctrl-C does not reach the worker. The sweep passes it on once.
                start_new_session=True,
            )
        if cores:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self.process.pid, cores)  # before jax starts one thread per core

    def start(self, name: str, config: Config, workdir: pathlib.Path, after: str) -> None:
        self.point = name
        with contextlib.suppress(OSError):  # the process has ended, which ``answer`` reports
            self.connection.send((to_json(config), str(workdir), after))

    def answer(self) -> bool | None:
        """Return whether the point ended well, or None if the process has ended."""
        self.point = ""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        """End the process and the processes that it started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def cores_of_workers(num_workers: int) -> list[set[int]]:
    """Return the cores of each worker, as evenly divided as possible; empty sets if they need not be divided."""
    if num_workers == 1 or not hasattr(os, "sched_setaffinity") or os.environ.get("JAX_PLATFORMS") != "cpu":
        return [set()] * num_workers
    cores = sorted(os.sched_getaffinity(0))
    of_workers = []
    for i in range(num_workers):
        own = cores[i::num_workers] or [cores[i % len(cores)]]  # more workers than cores: share a core
        of_workers.append(set(own))
    return of_workers


def run_points(
    folder: pathlib.Path,
    points: dict[str, Config],
    sweep: Sweep,
    *,
    num_workers: int,
    on_change: Callable[[list[str], dict[str, str]], None],
    serve: str = SERVE,
) -> tuple[dict[str, str], str | None]:
    """Run every point, several at a time. A point that fails does not stop the others.

    After Ctrl-C or SIGTERM the running points save and end. A second Ctrl-C kills them.

    Args:
        points: {name: config} in the order of their start.
        on_change: called each second, and after every start and end, with the names of the running points and the last
            lines of the points that failed.
        serve: Python code of a worker. Its end of the connection is the file descriptor CONNECTION.

    Returns:
        The last lines of every point that failed, and the signal that stopped the sweep.
    """
    runs = _Runs(folder, points, sweep, num_workers, serve)
    with StopRequest() as stop:
        try:
            has_passed_on_stop = False
            while True:
                runs.start_waiting(stop)
                running = runs.running()
                on_change([worker.point for worker in running], runs.failed)
                if not running:
                    return runs.failed, stop.requested
                if stop.requested and not has_passed_on_stop:
                    has_passed_on_stop = True
                    for worker in running:
                        worker.process.terminate()
                ready = wait([worker.connection for worker in running], timeout=1.0)
                for worker in running:
                    if worker.connection in ready:
                        runs.receive(worker, stop)
        finally:
            runs.kill()


class _Runs:
    """The points that wait for a worker, the workers, and the points that failed.

    Attributes:
        failed: {name: last lines of the log} of the points that failed.

    Args:
        folder, points, sweep, num_workers, serve: as for ``run_points``.
    """

    def __init__(self, folder: pathlib.Path, points: dict[str, Config], sweep: Sweep, num_workers: int, serve: str):
        self.failed: dict[str, str] = {}
        self._folder = folder
        self._points = points
        self._sweep = sweep
        self._serve = serve
        self._waiting = list(points)
        self._cores = cores_of_workers(num_workers)
        self._workers: list[_Worker | None] = [None] * num_workers

    def start_waiting(self, stop: StopRequest) -> None:
        """Start waiting points on the workers that run no point, until a signal stops the sweep."""
        for i, worker in enumerate(self._workers):
            if stop.requested:
                return
            if worker and worker.point:
                continue
            name = self._next_waiting()
            if name is None:
                return
            worker = worker or _Worker(self._serve, self._cores[i])
            self._workers[i] = worker
            worker.start(name, self._points[name], self._folder / name, self._sweep.after)

    def _next_waiting(self) -> str | None:
        """Remove the next point that is not finished from the queue, and return its name; None if no point waits."""
        while self._waiting:
            name = self._waiting.pop(0)
            # Another sweep in this folder, or the rest of a killed sweep, may have ended a point.
            if not self._is_finished(name):
                return name
        return None

    def _is_finished(self, name: str) -> bool:
        return is_finished(self._folder / name, self._points[name], self._sweep)

    def running(self) -> list[_Worker]:
        """Return the workers that run a point."""
        return [worker for worker in self._workers if worker and worker.point]

    def receive(self, worker: _Worker, stop: StopRequest) -> None:
        """Receive the answer of a worker whose point has ended, and record the point if it failed.

        If a signal has stopped the sweep, a point that is not finished has not failed.
        """
        name = worker.point
        ended_well = worker.answer()
        note = ""
        if ended_well is None:
            worker.kill()
            self._workers[self._workers.index(worker)] = None
            note = f"\nits process ended with status {worker.process.returncode}"
        is_over = self._is_finished(name) or stop.requested is not None
        if ended_well is False or not is_over:
            self.failed[name] = last_lines(self._folder / name / LOG) + note

    def kill(self) -> None:
        """End all workers."""
        for worker in self._workers:
            if worker:
                worker.kill()


def last_lines(path: pathlib.Path) -> str:
    """Return the last lines of a log that are not empty."""
    if not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    shown = [visible(line) for line in lines if line.strip()]
    return "\n".join(shown[-LAST_LINES:])


class _Display:
    """Live status line of a sweep on a terminal, and one printed line for every point that ends.

    Args:
        on_end: called with the failed points after a point has ended.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        points: Points,
        sweep: Sweep,
        on_end: Callable[[dict[str, str]], None],
    ):
        self._folder = folder
        self._sweep = sweep
        self._on_end = on_end
        self._configs = {name: config for name, (_, config) in points.items()}
        self._first = {name: self._share(name) for name in points}
        self._done = dict(self._first)  # share of each point's iterations
        self._running: set[str] = set()
        self._console = rich.console.Console(highlight=False)
        self._status = self._console.status("")
        self._started = time.monotonic()

    def __enter__(self) -> _Display:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def _share(self, name: str) -> float:
        workdir = self._folder / name
        return share_done(workdir, rows_of(workdir), self._configs[name], self._sweep)

    def show(self, running: list[str], failed: dict[str, str]) -> None:
        ended = self._running - set(running)
        self._running = set(running)
        self._done |= {name: self._share(name) for name in ended | self._running}
        line = self._line(running, failed)
        for name in sorted(ended):
            state = "stopped"
            if self._done[name] == 1:
                state = "finished"
            elif name in failed:
                state = "FAILED"
            self._print(f"{state} {name} | {line}")
            if name in failed:
                self._print("\n".join(f"    {text}" for text in failed[name].splitlines()))
        self._status.update(line)
        if not ended:
            return
        try:
            self._on_end(failed)
        except Exception as error:  # a full disk, or an error in the sweep's own label: the other points continue
            self._print(f"warning: the table is not written: {type(error).__name__}: {error}")

    def _line(self, running: list[str], failed: dict[str, str]) -> str:
        """Return the text of the status line."""
        worked = sum(self._done.values()) - sum(self._first.values())
        left = sum(1 - share for name, share in self._done.items() if name not in failed)
        eta = "-"
        if worked > 0:
            passed_s = time.monotonic() - self._started
            eta = str(datetime.timedelta(seconds=round(passed_s * left / worked)))
        num_finished = sum(share == 1 for share in self._done.values())
        shares = ", ".join(f"{self._done[name]:.0%}" for name in running)
        if shares:
            shares = f" ({shares})"
        parts = (
            f"points {num_finished}/{len(self._done)} finished",
            f"{len(running)} running{shares}",
            f"{len(failed)} failed",
            f"ETA {eta}",
        )
        return " | ".join(parts)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def run_sweep(
    folder: pathlib.Path,
    points: Points,
    sweep: Sweep,
    *,
    num_workers: int,
    serve: str = SERVE,
) -> tuple[dict[str, str], str | None]:
    """Run the unfinished points, and write table and page. The result is that of ``run_points``."""
    unfinished: dict[str, Config] = {}
    if num_workers:
        for name, (_, config) in points.items():
            if not is_finished(folder / name, config, sweep):
                unfinished[name] = config
    write = functools.partial(write_results, folder, points, sweep)
    failed: dict[str, str] = {}
    stopped = None
    if unfinished:
        with _Display(folder, points, sweep, write) as display:
            failed, stopped = run_points(
                folder,
                unfinished,
                sweep,
                num_workers=min(num_workers, len(unfinished)),
                on_change=display.show,
                serve=serve,
            )
    write(failed, page=True)
    return failed, stopped


def run_stages(
    folder: pathlib.Path,
    known: Callable[[], Points],
    sweep: Sweep,
    *,
    num_workers: int,
    serve: str = SERVE,
) -> tuple[Points, dict[str, str], str | None]:
    """Run the sweep's own points, then the points that ``then`` makes from their results.

    Args:
        known: function that returns the points that are known so far (``points_of``).

    Returns:
        All points, and the result of ``run_points``.
    """
    points: Points = {}
    failed: dict[str, str] = {}
    stopped = None
    while not failed and not stopped:
        more = known()
        if len(more) <= len(points):
            break
        points = more
        check_folders(folder, points)
        failed, stopped = run_sweep(folder, points, sweep, num_workers=num_workers, serve=serve)
    return points, failed, stopped


def exit_status(failed: Mapping[str, str], stopped: str | None) -> int:
    """Return the exit status, as train does: 128 and the signal's number shows launchers that points are left."""
    if stopped:
        return 128 + signal.Signals[stopped]
    return 1 if failed else 0


def sweep(
    config_file: str,
    workdir: pathlib.Path,
    *,
    settings: Mapping[str, Any] | None = None,
    overrides: Collection[str] = (),
    num_workers: int = 1,
    launch: str = "",
) -> int:
    """Run the points of a sweep file that are not finished, and write table and page.

    Args:
        config_file: Python file with ``get_config()`` and ``get_sweep()``.
        workdir: folder of the sweep. Each point has its own folder in it.
        settings: settings that all points share; None = the result of ``get_config()``.
        overrides: dotted names of the settings in which ``settings`` differs from ``get_config()``.
        num_workers: points that run at the same time; 0 = run nothing, and write table and page.
        launch: "print", or a shell command for each point; "" = run the points here.

    Returns:
        Exit status: 0 if all points have finished or were launched, 1 if a point failed, 128 and its number if a signal
        stopped the sweep.

    Raises:
        ConfigError: bad input, before any point runs.
    """
    if num_workers < 0:
        raise ConfigError(f"--workers={num_workers} must be at least 0")
    definition = read_sweep(config_file)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir={workdir} cannot be a folder: {error.strerror}") from error
    if settings is None:
        settings = runpy.run_path(config_file)["get_config"]()
    known = functools.partial(points_of, config_file, settings, definition, workdir, overrides)
    points = known()
    check_folders(workdir, points)
    if launch:
        return launch_unfinished(launch, config_file, points, definition, workdir)
    points, failed, stopped = run_stages(workdir, known, definition, num_workers=num_workers)
    print(f"table  {workdir / 'table.csv'}\npage   {workdir / 'sweep.html'}")
    if stopped:
        print(f"stopped by {stopped}; run the same command again to continue")
    if failed:
        _report_failed(failed, len(points), has_more=definition.then is not None)
    return exit_status(failed, stopped)


def _report_failed(failed: Mapping[str, str], num_points: int, *, has_more: bool) -> None:
    """Print which points failed. ``has_more`` is True if the sweep has points of ``then``."""
    print(f"error: {len(failed)} of {num_points} points failed: {', '.join(failed)}", file=sys.stderr)
    if has_more:
        print("the points of `then` are made once all of these points are finished", file=sys.stderr)


def launch_unfinished(
    template: str,
    config_file: str,
    points: Points,
    definition: Sweep,
    folder: pathlib.Path,
) -> int:
    """Launch the commands of the points whose training is not finished, and return 1 if a launch failed, else 0."""
    base = freeze(runpy.run_path(config_file)["get_config"]())
    trained = dataclasses.replace(definition, after="")  # the commands only train: ``after`` is not called
    commands = {
        name: train_command(config_file, base, config, folder / name)
        for name, (_, config) in points.items()
        if not is_finished(folder / name, config, trained)
    }
    return 1 if launch_commands(template, commands, folder) else 0


def main() -> None:
    """Run the command with the values of its flags."""
    flag: Any = FLAGS["config"]  # an object of ml_collections, which does not export its type
    if not flag.present:  # the settings come from the record of a run
        raise ConfigError("--config must be a Python file with get_config() and get_sweep(): a record has no points")
    status = sweep(
        flag.config_filename,
        pathlib.Path(FLAGS.workdir),
        settings=FLAGS.config,
        overrides=[path for path, _ in cli.apart(sys.argv)[1]],
        num_workers=FLAGS.workers,
        launch=FLAGS.launch,
    )
    sys.exit(status)


def define_flags() -> None:
    """Define the flags of the command."""
    config_flags.DEFINE_config_file("config", None, "Python file with get_config() and get_sweep().")
    flags.DEFINE_string("workdir", None, "Folder of the sweep. Each run has its own folder in it.")
    flags.DEFINE_integer("workers", 1, "Points that run at the same time; 0 only writes table and page.")
    flags.DEFINE_string(
        "launch",
        "",
        "'print', or a command that is run for each point; see the text above.",
    )
    flags.mark_flags_as_required(["config", "workdir"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__, alone=True)
