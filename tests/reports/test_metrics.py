"""Metrics: declared names only, always valid JSON, and a resumed run writes the same files as an uninterrupted one."""

import dataclasses
import io
import json
import math
import re
import struct
import types

import numpy as np
import pytest
import rich.console
from support.refusal import raises_with, refused_row

from jaxrl_llm.algorithms.inputs import COLUMNS, ROW, TOKEN, Column
from jaxrl_llm.config import ConfigError, MetricsConfig, freeze
from jaxrl_llm.reports import metrics
from jaxrl_llm.reports.metric_table import (
    RATIOS,
    VOTE,
    column_metrics,
    column_values,
    function_values,
    turn_values,
    vote_values,
)
from jaxrl_llm.reports.metrics import METRICS, MetricsWriter, Progress, cost_values, progress_line, read_metrics
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, SHARED_FILE, STOP_EOS, STOP_LENGTH, STOP_STRING, Rewards

QUIET = MetricsConfig(tensorboard=False)


def test_every_metric_is_named_by_stage_and_quantity_and_says_what_it_is():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z]+/[a-z_]+(age_[0-9]+(-[0-9]+|\+)?|(turn|function)_[0-9])?", name), name
        assert metric.unit and metric.meaning.endswith("."), name
        if metric.unit == "fraction":
            # The meaning names the denominator.
            assert re.search(r"\bover\b|[Ff]raction of", metric.meaning), name
        for suffix, unit in (("_nats", "nats"), ("_s", "s"), ("_tokens", "tokens"), ("_frac", "fraction")):
            if name.endswith(suffix):
                assert metric.unit.startswith(unit) or metric.unit.endswith("/s"), name


def test_an_undeclared_name_is_refused_and_nothing_is_written(tmp_path):
    writer = MetricsWriter(tmp_path, QUIET)
    with pytest.raises(KeyError, match="rollout/rewrad_mean"):
        writer.write(0, {"rollout/reward_mean": 1.0, "rollout/rewrad_mean": 1.0})
    writer.close()
    assert read_metrics(tmp_path) == []


def test_numbers_that_json_cannot_hold_are_null(tmp_path):
    writer = MetricsWriter(tmp_path, MetricsConfig(tensorboard=True))
    values = {
        "update/loss": float("nan"),
        "update/ratio_max": np.float32("inf"),
        "eval/pass_rate": None,
        "rollout/pass_rate": np.float32(0.25),
        "tokens/generated": np.int64(7),
    }
    writer.write(3, values)
    writer.append(
        {"samples.jsonl": [{"reward": float("nan"), "parts": {"task": float("-inf")}, "prompt": 'a "b" <c> é'}]}
    )
    writer.close()

    def strict(text):
        return json.loads(text, parse_constant=lambda name: pytest.fail(name))

    expected = {"iteration": 3, "update/loss": None, "update/ratio_max": None, "eval/pass_rate": None}
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {
        **expected,
        "rollout/pass_rate": 0.25,
        "tokens/generated": 7,
    }
    sample = strict((tmp_path / "samples.jsonl").read_text())
    assert sample == {"reward": None, "parts": {"task": None}, "prompt": 'a "b" <c> é'}
    tags = scalars(tmp_path)
    assert tags == [(3, "rollout/pass_rate", 0.25), (3, "tokens/generated", 7.0)]


def scalars(workdir):
    """Return (step, tag, value) of every scalar in the event files. A record is length u64, crc u32, bytes, crc u32."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def write_iterations(writer, iterations):
    for i in iterations:
        writer.write(i, {"rollout/reward_mean": i / 3})
        writer.append({"samples.jsonl": [{"iteration": i, "prompt": "é" * i}]})


def test_files_of_a_resumed_run_are_those_of_the_uninterrupted_one(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    writer = MetricsWriter(whole, QUIET)
    write_iterations(writer, range(1, 7))
    writer.close()

    writer = MetricsWriter(killed, QUIET)
    write_iterations(writer, range(1, 4))
    state = json.loads(json.dumps(writer.state()))
    write_iterations(writer, range(4, 6))
    with open(killed / "metrics.jsonl", "ab") as torn:  # killed in the middle of a line
        torn.write(b'{"iteration": 6, "rollo')
    resumed = MetricsWriter(killed, QUIET)
    assert resumed.restore(state, 3) == []
    write_iterations(resumed, range(4, 7))
    writer.close()
    resumed.close()
    for name in metrics.FILES:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_that_was_on_another_machine_for_a_while_keeps_the_lines_that_it_had(tmp_path):
    """With ``checkpoint.bucket``. Once, the files were cut to the size of the other machine's files."""

    def session(machine, state, iteration, iterations):
        writer = MetricsWriter(tmp_path / machine, dataclasses.replace(QUIET, share_rollouts=True))
        said = writer.restore(state, iteration)
        writer.append({SHARED_FILE: [{"prompt": machine}] * len(iterations)})
        write_iterations(writer, iterations)
        state = writer.state()
        writer.close()
        return said, state

    said, state = session("a", {}, 0, range(1, 6))
    session("a", state, 5, range(6, 7))  # killed before it was saved
    other, state = session("b", state, 5, range(6, 8))
    again, state = session("a", state, 7, range(8, 9))
    assert said == [] and len(other) == len(again) == 3 and "has lost lines" in again[0]
    kept = [row["iteration"] for row in read_metrics(tmp_path / "a")]
    samples = [json.loads(line)["iteration"] for line in (tmp_path / "a" / "samples.jsonl").read_text().splitlines()]
    assert kept == samples == [1, 2, 3, 4, 5, 6, 8]
    assert len((tmp_path / "a" / SHARED_FILE).read_text().splitlines()) == 7
    assert session("a", state, 8, range(9, 10))[0] == []


def test_an_iteration_that_was_stopped_in_its_evaluation_has_samples_and_no_metrics_yet(tmp_path):
    writer = MetricsWriter(tmp_path, QUIET)
    write_iterations(writer, [1])
    writer.append({"samples.jsonl": [{"iteration": 2}]})
    state = writer.state()
    writer.write(2, {"rollout/reward_mean": 0.5})  # by a run that went on and was killed
    assert writer.restore(state, 2, is_written=False) == [] and writer.state() == state
    writer.close()


def test_without_a_checkpoint_a_run_starts_with_empty_files_and_none_is_ever_lengthened(tmp_path):
    writer = MetricsWriter(tmp_path, QUIET)
    write_iterations(writer, range(1, 4))
    writer.close()
    again = MetricsWriter(tmp_path, QUIET)
    before = again.state()
    again.restore({name: size + 1000 for name, size in before.items()}, 3)
    assert again.state() == before
    again.restore({})
    assert again.state() == {"metrics.jsonl": 0, "samples.jsonl": 0}
    again.close()


def test_what_was_shared_stays_where_a_run_shares_no_more_for_a_while(tmp_path):
    state = {}
    for share in (True, False, True):
        writer = MetricsWriter(tmp_path, dataclasses.replace(QUIET, share_rollouts=share))
        assert writer.restore(state) == []
        writer.append({SHARED_FILE: [{"prompt": "a"}]})
        state = writer.state()
        writer.close()
    assert (tmp_path / SHARED_FILE).read_text() == '{"prompt": "a"}\n' * 2


@pytest.mark.parametrize(
    ("harm", "kept"),
    [
        (lambda data: b"", []),
        (lambda data: data[:-20], [1, 2]),
        (lambda data: b"\xff\x00" * len(data), []),
        (lambda data: data.replace(b'"iteration": 2', b'"iteration" 2 '), [1, 3]),
        (lambda data: data[:-20] + bytes(20), [1, 2]),
        (lambda data: data.replace(b"{", b"[").replace(b"}", b"]"), []),
    ],
    ids=["empty", "cut", "binary", "one_line", "zeros", "no_objects"],
)
def test_what_a_damaged_file_has_left_is_kept_and_the_gap_is_said(harm, kept, tmp_path):
    writer = MetricsWriter(tmp_path, QUIET)
    write_iterations(writer, range(1, 4))
    state = writer.state()
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(harm(path.read_bytes()))
    resumed = MetricsWriter(tmp_path, QUIET)
    (said,) = resumed.restore(state, 3)
    assert said.startswith(f"warning: {path} has lost lines")
    assert f" {path.stat().st_size} bytes" in said and str(state["metrics.jsonl"]) in said
    write_iterations(resumed, [4])
    assert resumed.restore(resumed.state(), 4) == []
    resumed.close()
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [*kept, 4]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4


def test_reading_leaves_out_a_torn_last_line_and_names_a_broken_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with raises_with(ConfigError, "metrics.jsonl", str(tmp_path)):
        read_metrics(tmp_path)
    path.write_text('{"iteration": 0}\n{"iteration": 1}\n{"iter')
    assert read_metrics(tmp_path) == [{"iteration": 0}, {"iteration": 1}]
    path.write_text('{"iteration": 0}\n{"iter\n{"iteration": 2}\n')
    with refused_row("metrics.jsonl", 2, "JSON"):
        read_metrics(tmp_path)
    path.write_text("[1]\n")
    with refused_row("metrics.jsonl", 1):
        read_metrics(tmp_path)


def test_the_cost_of_an_iteration_counts_generated_rollouts_at_mu():
    # 64 rollouts generated in 12 + 4 s, 128 trained in 8 s: mu = (16 / 64) / (8 / 128) = 4, 128 + 4 * 64 = 384.
    values = {"time/generate_s": 12.0, "time/reward_s": 4.0, "time/update_s": 8.0, "replay/drawn_rows": 128}
    values |= {"rollout/generated_rows": 64}
    assert cost_values(freeze({}), values, 16.0) == {"time/cost_ratio": 4.0, "time/compute_rollouts": 400.0}
    declared = freeze({"replay": {"cost_ratio": 5.28}})
    assert cost_values(declared, values, 0.0) == {"time/cost_ratio": 4.0, "time/compute_rollouts": 128 + 5.28 * 64}
    none = cost_values(declared, values | {"replay/drawn_rows": 0}, 0.0)
    assert math.isnan(none["time/cost_ratio"]) and none["time/compute_rollouts"] == 5.28 * 64
    assert cost_values(freeze({}), values | {"replay/drawn_rows": 0}, 7.0)["time/compute_rollouts"] == 7.0
    # What was generated and left out has been paid for too: of 128 rollouts each costs half as much.
    resampled = cost_values(declared, values | {"rollout/generated_rows": 128}, 0.0)
    assert resampled == {"time/cost_ratio": 2.0, "time/compute_rollouts": 128 + 5.28 * 128}


def learned(config=None, **sums):
    """Return the metrics of an iteration's updates whose other sums are 0."""
    names = "real_count first_use_count since_last_use_sum filled_slots gap_max own_token_count row_count ratio_sum"
    names += " ratio_square_sum sequence_ratio_sum sequence_ratio_square_sum token_count update_count"
    by_age = ("token_count", "clipped_count", "ratio_sum", "ratio_square_sum")
    used = dict.fromkeys(names.split(), 0.0) | {"by_age": {name: np.zeros(6, np.float32) for name in by_age}}
    return metrics.update_values(freeze(config or {}), used | sums)


def test_each_figure_is_the_sum_that_it_says_over_the_count_that_it_says():
    """All counts differ. Of 8 rows 2 had been drawn before; 32 of 128 slots are filled."""
    counts = {"token_count": 20, "real_count": 8, "row_count": 4, "batch_count": 5, "update_count": 7, "ended_rows": 3}
    of_tokens = {"entropy_sum": 36, "kl_behaviour_sum": 4, "kl_reference_sum": 6, "clipped_count": 5}
    of_tokens |= {"correction_weight_sum": 16, "value_loss_sum": 2, "ratio_sum": 30, "ratio_square_sum": 50}
    of_tokens |= {"return_square_sum": 20, "return_sum": 0, "value_error_sum": 10, "value_error_square_sum": 10}
    of_rows = {"age_sum": 12, "uses_sum": 20, "first_use_count": 6, "since_last_use_sum": 5}
    of_rows |= {"sequence_ratio_sum": 6, "sequence_ratio_square_sum": 12}
    others = {"loss_sum": 3, "grad_norm_sum": 5, "rate_scale_sum": 1, "gap_sum": 2, "own_token_count": 10, "gap_max": 7}
    others |= {"ended_uses": 9, "unique_prompt_count": 10, "filled_slots": 32, "entropy_coefficient_sum": 6}
    others |= {"environment_loss_sum": 1, "answers_loss_sum": 2, "adapter_module_sum": 4}
    others |= {"imitation_loss_sum": 8, "imitation_weight_sum": 6}
    values = learned({"replay": {"capacity": 128}}, **counts, **of_tokens, **of_rows, **others)
    expected = {
        "replay/age_mean_steps": 12 / 8,
        "replay/uses_mean": 20 / 8,
        "replay/first_use_frac": 6 / 8,
        "replay/since_last_use_mean_steps": 5 / 2,
        "replay/replay_ratio": 9 / 3,
        "replay/unique_prompts_mean": 10 / 5,
        "replay/filled_frac": 32 / 128,
        "update/loss": 3 / 7,
        "update/grad_norm": 5 / 7,
        "update/environment_nats": 1 / 7,
        "update/answers_nats": 2 / 7,
        "update/imitation_nats": 8 / 6,
        "update/entropy_coefficient": 6 / 7,
        "update/adapter_module": 4 / 7,
        "optimizer/rate_scale": 1 / 7,
        "update/entropy_nats": 36 / 20,
        "update/kl_behaviour_nats": 4 / 20,
        "update/kl_reference_nats": 6 / 20,
        "update/clip_frac": 5 / 20,
        "update/correction_weight": 16 / 20,
        "update/value_loss": 2 / 20,
        "update/sampler_learner_gap_mean_nats": 2 / 10,
        "update/sampler_learner_gap_max_nats": 7,
        "update/ess_frac": 30**2 / (20 * 50),
        "update/sequence_ess_frac": 6**2 / (4 * 12),
        "update/explained_variance": 1 - (20 * 10 - 10**2) / (20 * 20),
    }
    assert set(RATIOS) < set(expected)
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_figures_of_rollouts_are_over_all_that_were_generated():
    """Two groups of four, one of them tied. Two rollouts were truncated, three ended with a stop string, one failed."""
    reasons = [STOP_LENGTH, STOP_LENGTH, STOP_STRING, STOP_EOS], [STOP_STRING, STOP_STRING, STOP_EOS, STOP_EOS]
    lengths = [1, 2, 1, 1], [3, 2, 1, 1]
    groups = [types.SimpleNamespace(lengths=n, stop_reasons=r, turns=[]) for n, r in zip(lengths, reasons, strict=True)]
    outcome = np.array([OUTCOME_SCORE] * 7 + [OUTCOME_ERROR])
    rewards = Rewards(np.array([1, 0, 0, 0, 3, 3, 0, np.nan]), {}, outcome)
    values = metrics.rollout_values(freeze({}), groups, rewards, 1)
    assert {name.removeprefix("rollout/"): value for name, value in values.items()} == {
        "generated_rows": 8,
        "reward_mean": 1.0,
        "reward_std": pytest.approx((12 / 7) ** 0.5),  # 0, 1, 1, 1, 2, 2 and 1 away from it
        "pass_rate": pytest.approx(3 / 7),
        "completion_length_tokens": 12 / 8,
        "truncated_frac": 2 / 8,
        "stop_string_frac": 3 / 8,
        "degenerate_group_frac": 1 / 2,
        "reward/timeout_count": 0,
        "reward/error_count": 1,
    }


def test_means_are_over_the_steps_that_were_taken_and_of_none_there_is_none():
    values = learned(loss_sum=3.0, grad_norm_sum=5.0, imitation_loss_sum=1.5, imitation_weight_sum=1.0, update_count=2)
    assert (values["update/loss"], values["update/grad_norm"], values["update/imitation_nats"]) == (1.5, 2.5, 1.5)
    values = learned(loss_sum=0.0, grad_norm_sum=0.0, imitation_loss_sum=0.0, imitation_weight_sum=0.0)
    assert all(math.isnan(values[f"update/{name}"]) for name in ("loss", "grad_norm", "imitation_nats"))


def test_a_maximum_of_nothing_is_none():
    """If no batch could be drawn, all sums are 0. A ratio of 0 or an age of 0 would look like a measurement."""
    sums = {"ratio_max": 1.5, "old_gap_max": 0.5, "gap_max": 0.25, "age_max": 3}
    names = ("update/ratio_max", "update/old_policy_gap_max_nats", "update/sampler_learner_gap_max_nats")
    of = lambda **counts: [learned(**sums, **counts)[name] for name in (*names, "replay/age_max_steps")]
    assert of(update_count=1, own_token_count=1, real_count=1) == [1.5, 0.5, 0.25, 3]
    assert all(map(math.isnan, of()))
    assert of(real_count=1)[3] == 3  # drawn, in a step that was skipped


def test_figures_by_age_are_of_the_tokens_of_that_age():
    by_age = lambda x: np.array([0, x, 0, 0, 0, 0], np.float32)
    sums = {"token_count": 8, "clipped_count": 2, "ratio_sum": 6, "ratio_square_sum": 9}
    values = learned(by_age={name: by_age(x) for name, x in sums.items()})
    found = {name: x for name, x in values.items() if "_age_" in name and name.startswith("update/")}
    assert found == {"update/clip_frac_age_1": 0.25, "update/ess_frac_age_1": 0.5}


def test_returns_that_are_all_alike_have_no_variance_to_explain():
    """1000 tokens with the return 0.1: the float32 sums differ only by rounding."""
    returns = np.full(1000, 0.1, np.float32)
    sums = {"token_count": 1000, "value_loss_sum": 1.0, "value_error_sum": 0.0, "value_error_square_sum": 1e-6}
    of = lambda x: {"return_sum": np.sum(x, dtype=np.float32), "return_square_sum": np.float32(1.000001 * np.sum(x**2))}
    assert 1000 * of(returns)["return_square_sum"] > of(returns)["return_sum"] ** 2
    assert math.isnan(learned(**sums, **of(returns))["update/explained_variance"])
    # Returns of 0.1 and -0.1: N S2 = 10^4 and the square of the sum 0. Errors of all 0.05 have no variance.
    varied = np.where(np.arange(1000) % 2, returns, -returns)
    sums |= {"value_error_sum": 50.0, "value_error_square_sum": 2.5}
    assert learned(**sums, **of(varied))["update/explained_variance"] == pytest.approx(1.0)
    # Half of them 0 and half of them 0.1: N E2 - E^2 = 1000 * 5 - 50^2, a quarter of the returns' 10^4.
    sums["value_error_square_sum"] = 5.0
    assert learned(**sums, **of(varied))["update/explained_variance"] == pytest.approx(0.75)


VALUES = {
    "rollout/reward_mean": 0.4111,
    "rollout/pass_rate": float("nan"),
    "throughput/generate_tokens_per_s": 1234.5,
    "replay/age_mean_steps": 1.5,
}


def test_progress_line_shows_what_is_known():
    assert progress_line(3, 20, VALUES, 245.2) == (
        "iteration 3/20 | reward 0.411 | pass - | generate 1,234 tok/s | update - tok/s | staleness 1.50 | ETA 4:05"
    )
    assert progress_line(3, 20, {}, 3723).endswith("ETA 1:02:03")
    failed = {"reward/timeout_count": 2, "reward/error_count": 1}
    assert " | pass - | failed 3 | generate" in progress_line(3, 20, VALUES | failed, 245.2)
    assert "failed" not in progress_line(3, 20, VALUES | dict.fromkeys(failed, 0), 245.2)


def test_progress_is_one_plain_line_per_iteration_off_a_terminal(capsys):
    out = io.StringIO()
    progress = Progress(2, console=rich.console.Console(file=out, width=40))
    progress.update(1, VALUES)
    progress.note("[bold]as it is[/bold] 1 + 1")
    progress.update(2, VALUES)
    progress.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and lines[1] == "[bold]as it is[/bold] 1 + 1"
    assert lines[0].startswith("iteration 1/2 | reward 0.411") and lines[2].endswith("ETA 0:00")


def test_progress_on_a_terminal_keeps_notes_above_the_live_line():
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=True, width=160, color_system=None)
    progress = Progress(4, start=2, console=console)
    progress.note("a note")
    progress.update(3, VALUES)
    progress.close()
    note, live = out.getvalue().index("a note\n"), out.getvalue().index("iteration 3/4 | reward 0.411")
    assert note < live


def test_eta_leaves_out_the_first_iteration_once_there_is_another(monkeypatch):
    clock = iter([0.0, 100.0, 110.0, 130.0])  # start; the first takes 100 s, then 10 s, then 20 s
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    progress = Progress(5, console=rich.console.Console(file=out))
    for iteration in (1, 2, 3):
        progress.update(iteration, {})
    # 4 left at 100 s; 3 left at 10 s; 2 left at (10 + 20) / 2 s
    assert re.findall(r"ETA (\S+)", out.getvalue()) == ["6:40", "0:30", "0:30"]


def test_rewards_by_turn_are_means_over_the_scored_rollouts_that_have_the_turn():
    given = np.array([[1.0, 2.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 0.0, 0.0]], np.float32)
    given = np.concatenate([given, [[5.0, 4.0, 6.0, 8.0, 9.0]]])
    total = given.sum(axis=1)
    outcome = np.array([OUTCOME_SCORE, OUTCOME_SCORE, OUTCOME_ERROR, OUTCOME_SCORE])
    values = turn_values([2, 1, 3, 5], Rewards(total, {}, outcome, columns={"turn_reward": given}))
    assert values == {
        "rollout/turns_mean": 11 / 4,
        "rollout/reward_turn_1": 3.0,
        "rollout/reward_turn_2": 3.0,
        "rollout/reward_turn_3": 6.0,
        "rollout/reward_turn_4": 8.0,
    }
    columns = {"turn_reward": given[:2, :2]}
    assert turn_values([1, 1], Rewards(total[:2], {}, outcome[:2], columns=columns)) == {
        "rollout/turns_mean": 1.0,
        "rollout/reward_turn_1": 2.0,
    }
    assert turn_values([], Rewards(total, {}, outcome)) == {}


def test_a_column_with_one_number_per_rollout_has_a_metric(monkeypatch):
    monkeypatch.setitem(COLUMNS, "level", Column(False, True, "f32 levels, how hard the answer was", ROW))
    monkeypatch.setitem(COLUMNS, "weight", Column(True, True, "f32", TOKEN))
    outcome = np.array([OUTCOME_SCORE, OUTCOME_ERROR, OUTCOME_SCORE])
    columns = {"level": np.array([1.0, 5.0, 2.0]), "weight": np.ones((3, 4))}
    rewards = Rewards(np.zeros(3), {}, outcome, columns=columns)
    assert column_values(rewards) == {"rollout/level_mean": 1.5}
    assert column_metrics(COLUMNS).keys() == {"rollout/level_mean"}
    group = types.SimpleNamespace(lengths=[1, 1, 1], stop_reasons=[0, 0, 0], turns=[])
    assert metrics.rollout_values(freeze({}), [group], rewards, 0)["rollout/level_mean"] == 1.5
    failed = Rewards(np.zeros(3), {}, np.full(3, OUTCOME_ERROR), columns=columns)
    assert column_values(failed) == {}


def test_labels_of_a_vote_are_compared_with_those_that_are_known():
    """TTRL: four questions with three answers each, one without a score; computed by hand."""
    votes = np.array([1, 1, 0, 1, 1, 0, 1, 0, 0, np.nan, np.nan, np.nan])
    truth = np.array([1, 1, 0, 0, 0, 1, 0, 0, 0, 1.0, 1.0, 0.0])
    outcome = np.array([OUTCOME_SCORE] * 9 + [OUTCOME_ERROR] * 3)
    rewards = Rewards(np.zeros(12), {VOTE: votes, "task": truth}, outcome)
    sizes = [3, 3, 3, 3]
    values = vote_values((VOTE, "task"), (1.0, 0.0), 1.0, sizes, rewards)
    assert values == {
        "rollout/majority_frac": pytest.approx(5 / 9),
        "rollout/label_accuracy": pytest.approx(1 / 3),  # of the three questions with a vote the first
        "rollout/reward_accuracy": pytest.approx(5 / 9),  # 3 of 3, 0 of 3, 2 of 3
    }
    assert values["rollout/reward_accuracy"] >= values["rollout/label_accuracy"]
    assert vote_values((VOTE, "task"), (1.0, 1.0), 1.0, sizes, rewards) == {
        "rollout/majority_frac": pytest.approx(5 / 9)
    }
    assert vote_values(("task",), (0.0,), 1.0, sizes, rewards) == {}
    config = freeze({"rewards": {"functions": (VOTE, "task"), "weights": (1.0, 0.0)}})
    groups = [types.SimpleNamespace(lengths=[1] * 3, stop_reasons=[0] * 3, turns=[]) for _ in range(4)]
    assert metrics.rollout_values(config, groups, rewards, 0)["rollout/label_accuracy"] == pytest.approx(1 / 3)
    assert set(values) < set(METRICS)


def test_each_of_several_reward_functions_has_a_mean_over_what_it_scored():
    parts = {"b": np.array([4.0, 0.0, np.nan]), "a": np.array([0.25, np.nan, np.nan]), "c": np.full(3, np.nan)}
    outcome = np.array([OUTCOME_SCORE, OUTCOME_ERROR, OUTCOME_ERROR])
    rewards = Rewards(np.array([4.25, np.nan, np.nan]), parts, outcome)
    assert function_values(("a", "b", "c"), rewards) == {
        "rollout/reward_function_1": 0.25,
        "rollout/reward_function_2": 2.0,
    }
    assert function_values(("b",), rewards) == {}
    config = freeze({"rewards": {"functions": ("c", "b"), "weights": (1.0, 1.0)}})
    group = types.SimpleNamespace(lengths=[1, 1, 1], stop_reasons=[0, 0, 0], turns=[])
    values = metrics.rollout_values(config, [group], rewards, 0)
    assert values["rollout/reward_function_2"] == 2.0 and "rollout/reward_function_1" not in values
    many = [f"f{k}" for k in range(9)]
    rewards = Rewards(np.zeros(1), {name: np.ones(1) for name in many}, np.array([OUTCOME_SCORE]))
    assert set(function_values(many, rewards)) < set(METRICS)
