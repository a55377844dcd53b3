"""Metrics of a run: metrics.jsonl, samples.jsonl, TensorBoard events and a live progress line.

Owns: the division of sums by counts, the files, cutting the files back on resume. Does not know: the meaning of a
metric (metric_table), how the sums are computed.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import rich.console
import rich.progress
import rich.table

# protobuf defines these classes at run time
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore[missing-module-attribute]
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from jaxrl_llm.config import Config, ConfigError, MetricsConfig
from jaxrl_llm.models import moe
from jaxrl_llm.reports import records
from jaxrl_llm.reports.metric_table import (
    AGE_LABELS,
    COPIED,
    METRICS,
    RATIOS,
    column_values,
    function_values,
    turn_values,
    vote_values,
)
from jaxrl_llm.runtime import hosts, json_lines
from jaxrl_llm.types import (
    OUTCOME_ERROR,
    OUTCOME_SCORE,
    OUTCOME_TIMEOUT,
    SHARED_FILE,
    STOP_LENGTH,
    STOP_STRING,
    DrawSums,
    Rewards,
)

FILES = ("metrics.jsonl", "samples.jsonl")


def rollout_values(config: Config, groups: Sequence[Any], rewards: Rewards, num_tied: int) -> dict[str, float]:
    """Return the metrics of the iteration's rollouts, with the names and denominators of ``METRICS``.

    Args:
        groups: all generated groups, with ``lengths`` and ``stop_reasons``.
        rewards: the rewards of all rows of the groups.
        num_tied: number of degenerate groups, which give no learning signal.
    """
    num_rollouts = len(rewards.outcome)
    tokens = 0
    turns: list[int] = []
    ended: collections.Counter[int] = collections.Counter()
    for group in groups:
        tokens += sum(group.lengths)
        turns += group.turns
        ended.update(group.stop_reasons)
    return {
        "rollout/generated_rows": num_rollouts,
        **_reward_values(config, rewards),
        "rollout/completion_length_tokens": tokens / num_rollouts,
        "rollout/truncated_frac": ended[STOP_LENGTH] / num_rollouts,
        "rollout/stop_string_frac": ended[STOP_STRING] / num_rollouts,
        "rollout/degenerate_group_frac": num_tied / len(groups),
        "reward/timeout_count": int((rewards.outcome == OUTCOME_TIMEOUT).sum()),
        "reward/error_count": int((rewards.outcome == OUTCOME_ERROR).sum()),
        **turn_values(turns, rewards),
        **function_values(config.rewards.functions, rewards),
        **column_values(rewards),
        **vote_values(
            config.rewards.functions,
            config.rewards.weights,
            config.rewards.pass_threshold,
            [len(group.lengths) for group in groups],
            rewards,
        ),
    }


def _reward_values(config: Config, rewards: Rewards) -> dict[str, float]:
    """Return the mean, the standard deviation and the pass rate of the scored rollouts, NaN if none is scored."""
    scored = rewards.total[rewards.outcome == OUTCOME_SCORE]
    if len(scored) == 0:
        return {
            "rollout/reward_mean": math.nan,
            "rollout/reward_std": math.nan,
            "rollout/pass_rate": math.nan,
        }
    passed = scored >= config.rewards.pass_threshold
    return {
        "rollout/reward_mean": float(scored.mean()),
        "rollout/reward_std": float(scored.std()),
        "rollout/pass_rate": float(passed.mean()),
    }


def draw_values(config: Config, draws: DrawSums) -> dict[str, float]:
    """Return the metrics of all tokens sampled in the iteration, also of rollouts that are left out or unfinished."""
    tokens = max(float(draws.tokens), 1.0)
    sampling = config.sampling
    values = {
        "tokens/generated": int(draws.tokens),
        "rollout/sampled_entropy_nats": float(draws.surprise) / tokens,
        "rollout/model_entropy_nats": float(draws.entropy) / tokens,
        "rollout/sampled_entropy_error_nats": math.sqrt(max(draws.error_square, draws.variance)) / tokens,
    }
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        values["rollout/support_cut_frac"] = float(draws.cut) / tokens
    return values


def draw_warning(values: dict[str, float]) -> str | None:
    """Return a warning if the sampled tokens do not match the model's distributions; otherwise None.

    The test compares the entropy of the sampled tokens with the entropy of the distributions. The limit is six standard
    errors, because a normal deviate exceeds six about once in 5e8 times. Differences up to 1e-3 nats count as rounding.
    The function also returns the warning if a value is NaN.
    """
    sampled = _number(values, "rollout/sampled_entropy_nats")
    model = _number(values, "rollout/model_entropy_nats")
    error = _number(values, "rollout/sampled_entropy_error_nats")
    if abs(sampled - model) <= max(6 * error, 1e-3):
        return None
    return (
        f"warning: the entropy of the sampled tokens is {sampled:.4f} nats, but the entropy of their distributions is "
        f"{model:.4f} nats (standard error {error:.4f}): the sampler does not draw from the recorded distributions"
    )


def _number(values: Mapping[str, float | None], name: str) -> float:
    """Return a metric as a number: 0 if it is missing, NaN if it is None."""
    value = values.get(name, 0.0)
    return math.nan if value is None else value


def update_values(config: Config, sums: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of the iteration's updates: divide their sums by their counts. Means are taken only here."""
    reused_count = int(sums["real_count"]) - int(sums["first_use_count"])
    sums = sums | {"reused_count": reused_count}
    values = _ratios(sums) | _copied_values(sums)
    values["update/ess_frac"] = _effective_share(
        float(sums["ratio_sum"]),
        float(sums["ratio_square_sum"]),
        float(sums["token_count"]),
    )
    values["update/sequence_ess_frac"] = _effective_share(
        float(sums["sequence_ratio_sum"]),
        float(sums["sequence_ratio_square_sum"]),
        float(sums["row_count"]),
    )
    values["replay/filled_frac"] = float(sums["filled_slots"]) / config.ring_capacity
    values |= _values_by_age(sums["by_age"])
    if "value_loss_sum" in sums:
        values["update/explained_variance"] = _explained_variance(sums)
    if "update_s" in sums:
        values["time/update_s"] = sums["update_s"]
        values["throughput/update_tokens_per_s"] = values["tokens/trained"] / sums["update_s"]
    return values | moe.metrics(sums)


def _effective_share(total: float, square: float, count: float) -> float:
    """Return the effective sample size of weights as a fraction of their count, from their sum and sum of squares."""
    if count * square == 0:
        return math.nan
    return total**2 / (count * square)


def _ratios(sums: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are ratios of two sums, NaN if the denominator is 0."""
    values = {}
    for name, (numerator, denominator) in RATIOS.items():
        if numerator not in sums:
            continue
        if sums[denominator] > 0:
            values[name] = float(sums[numerator]) / float(sums[denominator])
        else:
            values[name] = math.nan
    return values


def _copied_values(sums: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are values of the learner, NaN if their count is 0."""
    values = {}
    for name, copied in COPIED.items():
        if copied.name not in sums:
            continue
        if copied.count and not sums[copied.count] > 0:
            values[name] = math.nan
        else:
            values[name] = copied.kind(sums[copied.name])
    return values


def _values_by_age(by_age: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of the trained tokens by age bucket. A bucket without tokens has no metrics."""
    values = {}
    for i, label in enumerate(AGE_LABELS):
        tokens = float(by_age["token_count"][i])
        if not tokens:
            continue
        values[f"update/clip_frac_age_{label}"] = float(by_age["clipped_count"][i]) / tokens
        total = float(by_age["ratio_sum"][i])
        square = float(by_age["ratio_square_sum"][i])
        values[f"update/ess_frac_age_{label}"] = _effective_share(total, square, tokens)
    return values


def _explained_variance(sums: Mapping[str, Any]) -> float:
    """Return 1 - variance of the critic's error / variance of the return, NaN if all returns are equal."""
    count = float(sums["token_count"])
    return_sum = float(sums["return_sum"])
    return_squares = float(sums["return_square_sum"])
    error_sum = float(sums["value_error_sum"])
    error_squares = float(sums["value_error_square_sum"])
    return_moment = count * return_squares - return_sum**2
    error_moment = count * error_squares - error_sum**2
    rounding = 1e-5 * count * return_squares  # a variance above the rounding error of the sums
    if return_moment <= rounding:
        return math.nan
    return 1 - error_moment / return_moment


def cost_values(config: Config, values: dict[str, float], before: float) -> dict[str, float]:
    """Return the cost ratio mu and the compute of the run, the sum of B + mu R in trained rollouts.

    mu is ``replay.cost_ratio`` if it is set, else the measured ratio. An iteration without training has no measured mu:
    its compute is then counted as 0.

    Args:
        before: compute of the run before this iteration.

    Source: Arnal et al. 2026, arXiv:2604.08706, section 4. Differs: generation and training alternate on one mesh, so
    mu is a ratio of seconds, not of workers. B counts the rows that were actually drawn.
    """
    generated = values["rollout/generated_rows"]
    trained = values["replay/drawn_rows"]
    generate_s = values["time/generate_s"] + values["time/reward_s"]
    update_s = values["time/update_s"]
    measured = math.nan
    if trained and update_s > 0:
        measured = generate_s / generated / (update_s / trained)
    ratio = config.replay.cost_ratio or measured
    cost = trained + ratio * generated
    if not math.isfinite(cost):
        cost = 0.0
    return {
        "time/cost_ratio": measured,
        "time/compute_rollouts": before + cost,
    }


class MetricsWriter:
    """Writer of metrics.jsonl, samples.jsonl and tensorboard/ in ``workdir``.

    With ``share_rollouts`` it also writes shared_rollouts.jsonl. Only the first host writes.
    """

    def __init__(self, workdir: str | os.PathLike, config: MetricsConfig):
        self._workdir = pathlib.Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        names: tuple[str, ...] = ()
        if hosts.is_first():
            names = (*FILES, SHARED_FILE) if config.share_rollouts else FILES
        self._files = {name: open(self._workdir / name, "ab") for name in names}  # noqa: SIM115, closed in close()
        self._use_tensorboard = config.tensorboard and hosts.is_first()
        self._tensorboard: RecordWriter | None = None

    def write(self, iteration: int, values: dict[str, Any]) -> None:
        """Append one JSON object with ``iteration`` and the values to metrics.jsonl.

        Non-finite numbers and None are written as null.

        Raises:
            KeyError: ``METRICS`` does not declare one of the names.
        """
        unknown = values.keys() - METRICS.keys()
        if unknown:
            raise KeyError(f"not declared in METRICS: {', '.join(sorted(unknown))}")
        numbers = plain_numbers(values)
        self.append({"metrics.jsonl": [{"iteration": iteration, **numbers}]})
        if self._use_tensorboard:
            self._write_events(iteration, numbers)

    def _write_events(self, iteration: int, numbers: Mapping[str, float | None]) -> None:
        """Write the metrics that are numbers as TensorBoard events."""
        events = []
        if self._tensorboard is None:
            folder = self._workdir / "tensorboard"
            folder.mkdir(exist_ok=True)
            path = folder / f"events.out.tfevents.{time.time_ns()}"
            self._tensorboard = RecordWriter(str(path))
            # A START event makes TensorBoard hide the events of a killed run from this iteration on.
            start = SessionLog(status=SessionLog.START)
            events.append(Event(file_version="brain.Event:2"))
            events.append(Event(step=iteration, session_log=start))
        for name, number in numbers.items():
            if number is not None:
                summary = scalar(name, number)
                events.append(Event(step=iteration, wall_time=time.time(), summary=summary))
        for event in events:
            self._tensorboard.write(event.SerializeToString())
        self._tensorboard.flush()

    def state(self) -> dict[str, int]:
        """Return the size in bytes of each file, for the checkpoint."""
        return {name: file.tell() for name, file in self._files.items()}

    def restore(self, state: dict[str, int], iteration: int = 0, *, is_written: bool = True) -> list[str]:
        """Cut the files back to their state at a checkpoint, so that a resumed run repeats no line.

        An empty ``state`` (no checkpoint) empties the files. If ``state`` has sizes, a file missing from it keeps its
        size. Lines of metrics.jsonl and samples.jsonl that cannot be read are removed.

        Args:
            state: ``state()`` at the checkpoint, perhaps of files on another machine. Therefore the iterations in
                the lines of metrics.jsonl and samples.jsonl decide which lines stay, not the sizes.
            iteration: finished iterations at the checkpoint.
            is_written: whether the line of the last iteration was written before the checkpoint was saved.

        Returns:
            One warning for each file whose size differs from its size in ``state``.
        """
        warnings = []
        for name, file in self._files.items():
            path = self._workdir / name
            expected_size = state.get(name, file.tell() if state else 0)
            if name in FILES:
                last = iteration
                if name == "metrics.jsonl" and not is_written:
                    last -= 1
                _keep_lines(file, path.read_bytes(), last)
            elif not warnings:
                # After a warning the sizes may belong to another machine's files; lines of this file have no iteration.
                file.truncate(min(expected_size, file.tell()))
            size = file.seek(0, os.SEEK_END)
            if size != expected_size:
                warnings.append(
                    f"warning: {path} has lost lines: it has {size} bytes, but the checkpoint expects {expected_size}"
                )
        return warnings

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # close every file, even if closing another file fails on a full disk
            for file in self._files.values():
                stack.callback(file.close)
            if self._tensorboard is not None:
                stack.callback(self._tensorboard.close)

    def append(self, lines: Mapping[str, list[dict[str, Any]]]) -> None:
        """Append JSON objects to files, one per line. ``lines`` maps file names to objects.

        A concurrent reader may see an incomplete last line.
        """
        for name in lines.keys() & self._files.keys():  # skip files that are not requested or that another host writes
            texts = (json_lines.written(row, ensure_ascii=False) + "\n" for row in lines[name])
            self._files[name].write("".join(texts).encode())
            self._files[name].flush()


def _keep_lines(file: IO[bytes], data: bytes, last: int) -> None:
    """Remove the lines of later iterations than ``last``, and the lines that cannot be read.

    Args:
        file: the file, opened to append.
        data: the content of the file.
    """
    kept_lines = []
    for line in data.splitlines(keepends=True):
        if json_lines.is_whole(line) and json.loads(line).get("iteration", 0) <= last:
            kept_lines.append(line)
    kept = b"".join(kept_lines)
    num_unchanged = len(kept) if data.startswith(kept) else 0
    file.truncate(num_unchanged)
    file.write(kept[num_unchanged:])


def plain_numbers(values: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Return the metrics as JSON values. Non-finite numbers become None, which JSON writes as null."""
    numbers: dict[str, float | int | None] = {}
    for name, value in values.items():
        is_plain = value is None or isinstance(value, int)
        numbers[name] = value if is_plain else json_lines.finite(float(value))
    return numbers


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the rows of ``workdir/metrics.jsonl``, one per iteration.

    Raises:
        ConfigError: there is no such file, or a row is damaged (``records.read_metric_rows``).
    """
    path = pathlib.Path(workdir) / "metrics.jsonl"
    if not os.path.isfile(path):  # the result is False also for an invalid file name
        raise ConfigError(f"no metrics.jsonl in {workdir}")
    return records.read_metric_rows(path)


class Progress:
    """Progress display: one live line on a terminal, one printed line per iteration otherwise.

    Args:
        num_iterations: number of iterations of the whole run.
        start: iterations finished before this process began.
        console: the console to print to; the default is standard output.
    """

    def __init__(
        self,
        num_iterations: int,
        start: int = 0,
        console: rich.console.Console | None = None,
    ):
        self._total = num_iterations
        self._console = rich.console.Console(highlight=False) if console is None else console
        self._times = [time.monotonic()]  # times at the start and after each iteration of this process
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=12),
                # A plain column wraps the line on a narrow terminal instead of cutting off its end.
                rich.progress.TextColumn("{task.description}", markup=False, table_column=rich.table.Column()),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task(
                f"iteration {start}/{num_iterations}",
                total=num_iterations,
                completed=start,
            )
            self._bar.start()

    def restart_clock(self) -> None:
        """Restart the clock of the ETA, so that time before the loop (compiling, loading) does not count."""
        self._times = [time.monotonic()]

    def update(self, iteration: int, values: dict[str, Any]) -> None:
        """Show the state after ``iteration`` iterations.

        ``values`` are metrics as for ``MetricsWriter.write``. Any metric may be missing.
        """
        self._times.append(time.monotonic())
        warning = draw_warning(values)
        if warning is not None:
            self.note(warning)
        line = progress_line(iteration, self._total, values, self._remaining_s(iteration))
        if self._bar is None:
            self.note(line)
        else:
            self._bar.update(self._task, completed=iteration, description=line, refresh=True)

    def note(self, text: str) -> None:
        """Print a text above the live line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _remaining_s(self, iteration: int) -> float:
        # The first iteration includes compilation, so use its time only while no other iteration is finished.
        times = self._times[1:] if len(self._times) > 2 else self._times
        seconds_per_iteration = (times[-1] - times[0]) / (len(times) - 1)
        return seconds_per_iteration * (self._total - iteration)


def progress_line(iteration: int, total: int, values: dict[str, Any], remaining_s: float) -> str:
    """Return ``iteration 3/20 | reward 0.41 | pass 0.38 | ... | ETA 4:05``, with "-" for missing values."""
    numbers = plain_numbers(values)

    def shown(name: str, form: str) -> str:
        number = numbers.get(name)
        return "-" if number is None else format(number, form)

    failed = values.get("reward/timeout_count", 0) + values.get("reward/error_count", 0)
    parts = [
        f"iteration {iteration}/{total}",
        f"reward {shown('rollout/reward_mean', '.3f')}",
        f"pass {shown('rollout/pass_rate', '.3f')}",
    ]
    if failed:
        parts.append(f"failed {failed}")
    parts += [
        f"generate {shown('throughput/generate_tokens_per_s', ',.0f')} tok/s",
        f"update {shown('throughput/update_tokens_per_s', ',.0f')} tok/s",
        f"staleness {shown('replay/age_mean_steps', '.2f')}",
        f"ETA {_clock(remaining_s)}",
    ]
    return " | ".join(parts)


def _clock(seconds: float) -> str:
    """Return a duration as ``4:05`` or ``1:04:05``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"
