"""The benchmarks measure correctly: floors against counts by hand, disturbed steps, comparisons, the workers' line.

No system is timed here: workers are stand-ins.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.building import needs_cuda_compiler
from support.refusal import check_words, raises_with
from support.tiers import mostly_in
from test_launch import INSTALLS, checkout  # noqa: F401

from benchmarks import compare, floors, gpu, machine, micro, race, race_figure, results, roofline, run, saves, stopwatch
from benchmarks.floors import Ceilings, Floor
from benchmarks.results import Figure
from benchmarks.worker import Worker, WorkerError
from benchmarks.workers import link
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.planning import hlo
from jaxrl_llm.questions.tasks import reasoning_gym_task

REPOSITORY = pathlib.Path(__file__).parents[1]
# Two layers of width 4: a token passes 2 * (4*2*2*(2+1) + 3*4*8) = 288 parameters; the head has 10 * 4.
SMALL = Architecture(vocab_size=10, width=4, num_layers=2, num_heads=2, num_kv_heads=1, head_size=2, ffn=8)


# --- floors ---


def test_a_token_passes_every_block_matrix_once():
    assert floors.matrix_params(SMALL) == 288


def test_forward_counts_matrices_attention_and_head():
    # 3 tokens x 2 x 288; 6 causal pairs x 4 x 2 layers x 2 heads x 2; one predicted token x 2 x 40.
    assert floors.forward_flops(SMALL, tokens=3, pairs=6, predicted=1) == 1728 + 192 + 80


def test_prefill_has_no_head():
    # Prompts of 2 and 3 tokens: 5 x 2 x 288, and 3 + 6 pairs x 32; 288 weights of 4 bytes.
    assert floors.prefill(SMALL, [2, 3]) == floors.Work(2880 + 288, 1152)


def test_decode_step_reads_weights_and_cached_keys():
    # 2 rows, 5 keys each: 2 x (2 x 288 + 2 x 40) + 10 x 32; bytes 4 x (288 + 40 + 8 numbers per key x 10).
    assert floors.decode_step(SMALL, rows=2, context=5) == floors.Work(1312 + 320, 4 * (328 + 80))
    assert floors.decode_step(SMALL, rows=2, context=5, read=7, itemsize=2).bytes == 2 * (328 + 56)


@pytest.mark.parametrize(("shared", "prompt_tokens", "prompt_pairs"), [(False, 6, 12), (True, 3, 6)])
def test_update_computes_a_shared_prompt_once_per_group(shared, prompt_tokens, prompt_pairs):
    # One prompt of 3 tokens, 2 completions of 2: each completion token sees the prompt and its own beginning.
    tokens, pairs = prompt_tokens + 4, prompt_pairs + 2 * (2 * 3 + 3)
    assert floors.update_flops(SMALL, [3], 2, 2, shared=shared) == 3 * (tokens * 576 + pairs * 32 + 4 * 80)


def test_a_step_takes_the_larger_of_operations_and_bytes():
    work = floors.Work(flops=100.0, bytes=30.0)
    assert work.seconds(10.0, 10.0) == 10.0
    assert work.seconds(100.0, 10.0) == 3.0


def test_the_floor_of_the_baselines_page():
    """10.8 + 32.6 s unshared and 7.1 + 21.7 s shared, for prompts of 51.4 tokens at 335 GFLOP/s and 28 GB/s."""
    arch = micro.SHAPES["smollm2-135m"]
    lengths = [55] * 6 + [52] + [50] * 3 + [48] * 6
    ceilings = Ceilings(335e9, 335e9, 28e9)
    unshared, shared = (floors.floor(arch, lengths, 8, 64, ceilings, shared=s) for s in (False, True))
    assert (unshared.generate_s, unshared.update_s) == pytest.approx((10.8, 32.6), rel=0.02)
    assert (shared.generate_s, shared.update_s) == pytest.approx((7.1, 21.7), rel=0.03)


def test_shapes_have_the_published_sizes():
    assert micro.SHAPES["smollm2-135m"].num_params == 134_515_008
    assert micro.SHAPES["qwen2-1.5b"].num_params == pytest.approx(1.54e9, rel=0.01)


# --- disturbed steps ---


def test_share_of_others_is_of_the_whole_machine():
    # 2 cores for 10 s; busy 15 CPU seconds, 12 of them ours.
    assert machine.share_of_others(busy_s=15, own_s=12, elapsed_s=10, num_cpus=2) == pytest.approx(0.15)
    assert machine.share_of_others(busy_s=11, own_s=12, elapsed_s=10, num_cpus=2) == 0


class FakeWorker:
    """A worker whose step takes ``seconds``. Other processes take the given shares, one per step."""

    def __init__(self, name, seconds, others, order):
        self.name, self.seconds, self.others, self.order = name, seconds, iter(others), order

    def step(self):
        self.order.append(self.name)
        half = self.seconds / 2
        figures = {"step_s": self.seconds, "generate_s": half, "update_s": half, "tokens": 80, "samples": 8}
        return {**figures, "peak_bytes": 1e9}, next(self.others)


def alternate(*workers, steps=2):
    rates = iter(range(1, 100))
    return run.alternate(
        workers,
        "trl",
        steps=steps,
        max_others=0.1,
        measure=lambda: Ceilings(*[float(next(rates))] * 3),
        floors=lambda c: (Floor(c.decode_flops, 1.0), Floor(c.decode_flops / 2, 0.5)),
        say=lambda text: None,
    )


def test_disturbed_steps_are_rejected_and_repeated_in_turn():
    order = []
    ours = FakeWorker("ours", 4.0, [0.0, 0.11, 0.1, 0.0], order)
    peer = FakeWorker("trl", 10.0, [0.0] * 4, order)
    accepted, rejected, ceilings = alternate(ours, peer)
    assert order == ["ours", "trl"] * 3
    assert [(s.system, s.others) for s in rejected] == [("ours", 0.11)]
    assert [s.system for s in accepted] == ["ours", "trl", "trl", "ours", "trl"]
    # One measurement before the first step and one after each; a step's floor is at the better of its two.
    assert len(ceilings) == 7
    assert [s.unshared.generate_s for s in accepted] == [2, 3, 5, 6, 7]


def test_a_machine_that_is_never_quiet_ends_the_run():
    accepted, rejected, _ = alternate(FakeWorker("ours", 1.0, [0.5] * 6, []))
    assert (len(accepted), len(rejected)) == (0, 6)


def test_figures_are_medians_and_ratios_are_of_one_pair():
    step = lambda system, pair, seconds: run.Step(
        system,
        pair,
        {
            "step_s": seconds,
            "generate_s": 1.0,
            "update_s": seconds - 1,
            "tokens": 64,
            "samples": 8,
            "peak_bytes": seconds,
        },
        0.0,
        Floor(0.5, 1.0),
        Floor(0.25, 0.5),
    )
    steps = [step("ours", "trl", s) for s in (2.0, 3.0, 100.0)] + [step("trl", "trl", s) for s in (6.0, 9.0)]
    steps += [step("ours", "tunix", 4.0), step("tunix", "tunix", 20.0)]
    value = {figure.name: figure.value for figure in run.summarise(steps)}
    assert value["ours/step_s"] == 3.5 and value["trl/step_s"] == 7.5
    assert value["ours/times_faster_than_trl"] == 2.5 and value["ours/times_faster_than_tunix"] == 5.0
    assert value["trl/samples_per_s"] == pytest.approx((8 / 6 + 8 / 9) / 2)
    assert value["tunix/share_of_unshared_floor/step"] == 1.5 / 20
    assert value["tunix/share_of_shared_floor/generate"] == 0.25
    assert value["ours/peak_bytes"] == 100.0


def test_peers_are_measured_in_pairs_with_ours():
    assert run.pairs_of(["ours", "trl", "tunix"]) == [("ours", "trl"), ("ours", "tunix")]
    assert run.pairs_of(["trl", "tunix"]) == [("trl",), ("tunix",)]
    assert run.pairs_of(["ours"]) == [("ours",)]


# --- the race ---


def test_a_run_has_learned_when_its_last_five_steps_have_on_average():
    rates = [0.9, 0.3, 0.65, 0.65, 0.65, 0.65, 0.65, 1.0]  # 0.63, 0.58, then 0.65
    result = race.until_learned((2.0, rate) for rate in rates)
    assert result.learned and result.seconds == 14.0 and len(result.steps) == 7
    assert not race.until_learned([(1.0, 1.0)] * 4).learned
    slow = race.until_learned((1.0, 0.1) for _ in range(1000))
    assert not slow.learned and len(slow.steps) == race.MAX_STEPS


def test_a_race_gives_medians_of_the_seeds_and_none_where_one_has_not_learned():
    runs = lambda *seconds: [race.Result(((s / 2, 1.0),) * 2, True, 1.0) for s in seconds]
    value = {f.name: f.value for f in race.summarise({"ours": runs(1, 7, 2), "trl": runs(8, 4, 20)})}
    assert value["ours/seconds"] == 2 and value["trl/seconds"] == 8 and value["ours/share_of_trl"] == 0.25
    assert value["trl/seed_2/seconds"] == 20 and value["ours/steps"] == 2 and value["trl/learned"] == 3
    late = [*runs(1), race.Result(((50.0, 0.1),), False, 1.0)]
    value = {f.name: f.value for f in race.summarise({"ours": runs(3, 4), "trl": late})}
    assert value["trl/learned"] == 1 and "trl/seconds" not in value and "ours/share_of_trl" not in value


def test_the_picture_counts_minutes_from_the_start_of_the_program():
    figures = [{"name": "ours/seed_0/first_update_s", "value": 60.0}]
    steps = [[10.0, 0.0], [30.0, 1.0], [30.0, 0.5], [30.0, 0.5], [30.0, 0.5], [30.0, 1.0]]
    record = {"figures": figures, "settings": {"curves": {"ours": [steps]}}}
    ((minutes, rates, recent),) = race_figure.curves(record, "ours")
    assert minutes == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]  # the first step ends where it did, compiling included
    assert rates == [rate for _, rate in steps]
    np.testing.assert_allclose(recent, [0, 0.5, 0.5, 0.5, 0.5, 0.7])


def test_the_picture_is_drawn_from_the_stored_records(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["race_figure", f"--out={tmp_path / 'docs' / 'main_job.svg'}"])
    race_figure.main()
    lines = {}
    for path in (tmp_path / "docs" / "main_job.svg", REPOSITORY / "docs" / "main_job.svg"):
        lines[path] = re.findall(r'<g id="((?:ours|trl) seed \d [\d-]+)"', path.read_text())
    drawn, shown = lines.values()
    assert drawn == shown and len(set(drawn)) == 12


@pytest.mark.parametrize("path", race_figure.RECORDS, ids=lambda path: path.stem)
def test_the_table_of_the_race_is_what_its_records_say(path):
    figures = {figure["name"]: figure["value"] for figure in json.loads(path.read_text())["figures"]}
    page = (REPOSITORY / "BENCHMARKS.md").read_text()
    for row, name in [("median", ""), *((f"seed {seed}", f"seed_{seed}/") for seed in range(3))]:
        ours, trl = (figures[f"{system}/{name}seconds"] for system in ("ours", "trl"))
        said = rf"^\| {row} \|.* {ours:.0f} \(\d+\) \| {trl:.0f} \(\d+\) \| {100 * ours / trl:.0f} %"
        assert re.search(said, page, re.MULTILINE), row


@pytest.mark.parametrize(
    "text", ["4 - 1 = 3", "= -3", "5-2", "003", "none", "", "it is 3, not 4", "3.0", "1,003", "-3.5", "\u22123"]
)
def test_a_peers_answer_is_right_when_the_main_job_says_so(text):
    last = reasoning_gym_task.last_integer(text)
    for answer in ("3", "-3", "0"):
        assert link.is_right(text, answer) == (last is not None and int(last) == int(answer))


@pytest.mark.slow
def test_the_races_own_run_is_the_main_command_and_ends_when_it_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "FOLDER", tmp_path)
    monkeypatch.setattr(race, "MAIN_JOB", "configs/debug.py")
    steps = race.ours(0, dict(os.environ))
    seen = [next(steps), next(steps)]
    steps.close()
    assert all(seconds > 0 and 0 <= rate <= 1 for seconds, rate in seen)
    assert len((tmp_path / "ours_0" / "metrics.jsonl").read_text().splitlines()) < race.MAX_STEPS


# --- the line to a worker ---

GOOD = """
from benchmarks.workers.link import Link
link = Link()
print("noise of a library")
link.ready("psutil")
for _ in link.steps():
    print("more noise")
    tokens = 2 * link.job["samples"]
    link.report(generate_s=1.0, update_s=2.0, step_s=3.5, tokens=tokens, samples=link.job["samples"])
"""


def start(tmp_path, program, *, timeout_s=60):
    return Worker(
        "fake",
        [sys.executable, "-c", program],
        {"samples": 4},
        environment=dict(os.environ),
        log=tmp_path / "logs" / "fake.log",
        timeout_s=timeout_s,
    )


def test_a_worker_gets_the_job_and_reports_steps(tmp_path):
    worker = start(tmp_path, GOOD)
    assert list(worker.versions) == ["psutil"]
    for _ in range(2):
        figures, others = worker.step()
        assert figures.pop("peak_bytes") > 2**20
        assert figures == {"generate_s": 1.0, "update_s": 2.0, "step_s": 3.5, "tokens": 8, "samples": 4}
        assert 0 <= others <= 1
    worker.close()
    worker.close()
    assert worker._process.returncode == 0
    assert (tmp_path / "logs" / "fake.log").read_text() == "noise of a library\nmore noise\nmore noise\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('no weights')", ["status 1", "no weights"]),
        ("print('hello')", ["'hello'", "JSON"]),
        ("import time; time.sleep(60)", ["1 s"]),
    ],
)
def test_a_worker_that_fails_is_named_with_its_last_words(tmp_path, program, words):
    with raises_with(WorkerError, "worker fake", *words):
        start(tmp_path, program, timeout_s=20 if "sleep" not in program else 1)


# --- results and their comparison ---


def write(path, benchmark="run", **figures):
    better = {"seconds": "less", "share": "more", "ceiling": ""}
    rows = [Figure(name, value, "", better[name]) for name, value in figures.items()]
    results.write(path, benchmark, rows, versions={}, settings={})
    return str(path)


def test_a_result_says_where_it_is_from(tmp_path):
    write(tmp_path / "new folder" / "a.json", seconds=1.5)
    record, figures = results.read(tmp_path / "new folder" / "a.json")
    assert figures == {"seconds": Figure("seconds", 1.5, "", "less")}
    assert record["hardware"]["accelerator"] == "none" and record["hardware"]["cores"] >= 1
    assert set(record) == {"benchmark", "date", "commit", "hardware", "versions", "settings", "figures"}


@pytest.mark.parametrize(
    ("new", "status"),
    [
        ({"seconds": 10.9, "share": 0.46, "ceiling": 1.0}, 0),  # both a little worse, the machine much slower
        ({"seconds": 11.2, "share": 0.5, "ceiling": 9.0}, 1),
        ({"seconds": 10.0, "share": 0.44, "ceiling": 9.0}, 1),
        ({"seconds": 1.0, "share": 0.9, "ceiling": 9.0}, 0),
        ({"seconds": 10.0, "ceiling": 9.0}, 1),  # a figure is gone
    ],
)
def test_compare_fails_where_a_figure_got_worse(tmp_path, capsys, new, status):
    old = write(tmp_path / "old.json", seconds=10.0, share=0.5, ceiling=9.0)
    assert compare.main([old, write(tmp_path / "new.json", **new), "--tolerance", "0.1"]) == status
    assert "seconds" in capsys.readouterr().out


def test_tolerance_is_given(tmp_path):
    old, new = write(tmp_path / "old.json", seconds=10.0), write(tmp_path / "new.json", seconds=10.9)
    assert compare.main([old, new, "--tolerance=0.05"]) == 1


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (run.main, ["torch"], ["'torch'", "ours, trl, trl-bf16, tunix"]),
        (run.main, ["ours", "--steps=0"], ["--steps", "'0'"]),
        (run.main, ["ours", "--questions=3"], ["--questions=3"]),
        (run.main, ["ours", "--wrkdir"], ["--wrkdir"]),
        (compare.main, ["{tmp}/none.json", "{tmp}/none.json"], ["none.json"]),
        (compare.main, ["{tmp}/run.json", "{tmp}/micro.json"], ["run.json", "micro.json"]),
        (compare.main, ["a", "b", "--tolerance=-1"], ["--tolerance", "'-1'"]),
        (micro.main, ["--only", "speed"], ["--only", "'speed'"]),
        (gpu.main, ["--shape", "gpt2"], ["--shape", "'gpt2'"]),
        (roofline.main, ["--topology=v5e:2x2"], ["--topology='v5e:2x2'", "h200:1"]),
        (roofline.main, ["--topology=h200:x"], ["--topology='h200:x'"]),
        (roofline.main, ["--remat=auto"], ["--remat", "'auto'"]),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(tmp_path, capsys, command, arguments, words):
    write(tmp_path / "run.json", seconds=1.0)
    write(tmp_path / "micro.json", "micro", seconds=1.0)
    with pytest.raises(SystemExit) as ended:
        command([argument.format(tmp=tmp_path) for argument in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ") and said.count("\n") == 1
    check_words(said, *words)


def test_a_peer_that_is_not_installed_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    with raises_with(SystemExit, "2"):
        run.main(["trl"])
    check_words(capsys.readouterr().err, ".venv-trl", "bash launch/bench.sh trl\n")

    with raises_with(SystemExit, "2"):
        race.main([])
    check_words(capsys.readouterr().err, ".venv-trl", "bash launch/bench.sh race trl\n")


# --- parts ---


def test_idle_share_is_what_no_program_covers():
    intervals = [
        ("update", 0.0, 2.0),  # before the first end there is no iteration
        ("decode", 1.5, 4.0),  # was waiting: starts at 2
        ("decode", 5.0, 8.0),  # the device was idle from 4 to 5
        ("update", 8.0, 12.0),
        ("decode", 12.0, 13.0),
        ("update", 13.0, 14.0),
    ]
    assert stopwatch.idle_shares(intervals, "update") == pytest.approx([0.1, 0.0])


def test_device_clock_sees_every_program_and_hides_none_of_its_attributes():
    clock = stopwatch.DeviceClock()
    program = clock.wrap("sum", lambda x: {"small": x.sum(), "large": x})
    assert program(jnp.ones(8))["small"] == 8.0
    assert program.__qualname__.endswith("<lambda>")
    program(jnp.ones(8))
    clock.close()
    assert [name for name, _, _ in clock.intervals] == ["sum", "sum"]
    assert all(done > dispatched for _, dispatched, done in clock.intervals)


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        (micro.main, ["--only", "prefill"], [f"prefill/16x{micro.PROMPT}"]),
        *mostly_in(
            "slow",
            [
                (
                    micro.main,
                    ["--only", "questions"],
                    ["questions/300 read", "questions/300 tokenised", "questions/300 next 16"],
                ),
                (micro.main, ["--only", "publish"], ["publish/bfloat16", "publish/bfloat16/share_of_floor"]),
                (micro.main, ["--only", "logp"], ["logp/ours", "logp/autodiff, in chunks", "logp/ours, memory"]),
            ],
        ),
        pytest.param(
            gpu.main,
            ["--preset=tiny"],
            ["tiny/decode_tokens_per_s/batch=4", "tiny/update_mfu"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_micro_and_gpu_run_on_a_cpu(tmp_path, monkeypatch, command, arguments, expected):
    class Known:
        def __init__(self, *arguments, **settings):
            self.measure = lambda: Ceilings(1e9, 1e9, 1e9)

    monkeypatch.setattr(sys.modules[command.__module__], "Probe", Known)
    path = tmp_path / "result.json"
    assert command(["--shape=tiny", *arguments, "--repeats=1", f"--json={path}"]) == 0
    value = {figure["name"]: figure["value"] for figure in json.loads(path.read_text())["figures"]}
    assert all(value[name] > 0 for name in expected)


# As XLA writes it: a loop of 3 turns in which a fusion takes one row of four and writes it into another array, and a
# library's matmul with a workspace; after it a copy, and a branch of two.
COMPILED = """
HloModule example

%fused (param_0: f32[4,8], param_1: f32[4,8], param_2: s32[]) -> f32[4,8] {
  %param_0 = f32[4,8]{1,0} parameter(0)
  %param_1 = f32[4,8]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %row = f32[1,8]{1,0} dynamic-slice(%param_0, %param_2, %param_2), dynamic_slice_sizes={1,8}
  ROOT %put = f32[4,8]{1,0} dynamic-update-slice(%param_1, %row, %param_2, %param_2)
}

%body (state: (f32[4,8], f32[4,8], s32[])) -> (f32[4,8], f32[4,8], s32[]) {
  %state = (f32[4,8]{1,0}, f32[4,8]{1,0}, s32[]) parameter(0)
  %a = f32[4,8]{1,0} get-tuple-element(%state), index=0
  %b = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %i = s32[] get-tuple-element(%state), index=2
  %moved = f32[4,8]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused, metadata={op_name="put"}
  %w = bf16[8,2]{1,0} constant({...})
  %gemm = (bf16[4,2]{1,0}, s8[1000]{0}) custom-call(%moved, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %next = (f32[4,8]{1,0}, f32[4,8]{1,0}, s32[]) tuple(%a, %moved, %i)
}

%left (x.1: f32[4,8]) -> f32[4,8] {
  ROOT %x.1 = f32[4,8]{1,0} parameter(0)
}

%right (x.2: f32[4,8]) -> f32[4,8] {
  %x.2 = f32[4,8]{1,0} parameter(0)
  ROOT %negated = f32[4,8]{1,0} negate(%x.2)
}

ENTRY %main (p: f32[4,8], which: pred[]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %which = pred[] parameter(1)
  %zero = s32[] constant(0)
  %start = (f32[4,8]{1,0}, f32[4,8]{1,0}, s32[]) tuple(%p, %p, %zero)
  %loop = (f32[4,8]{1,0}, f32[4,8]{1,0}, s32[]) while(%start), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %end = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %same = f32[4,8]{0,1} copy(%end)
  ROOT %out = f32[4,8]{1,0} conditional(%which, %same, %same), branch_computations={%left, %right}
}
"""  # noqa: E501


def test_what_an_operation_moves_and_multiplies_is_read_from_the_compiled_text():
    computations = hlo.parse(COMPILED)
    found = {cost.operation.name: cost for cost in roofline.costs(computations, computations["main"])}
    seen = {name: (cost.times, cost.bytes, cost.flops) for name, cost in found.items()}
    assert seen == {
        # A row of 32 bytes is read, and where to, and a row is written.
        "moved": (3, 3 * (32 + 4 + 32), 0),
        # 128 + 32 bytes are read, 16 written, the workspace not counted; 4 x 2 sums of 8 products.
        "gemm": (3, 3 * (128 + 32 + 16), 3 * 2 * 4 * 2 * 8),
        "same": (1, 256, 0),
        "negated": (1, 256, 0),
    }
    peaks = Ceilings(decode_flops=1.0, batch_flops=64.0, read_bytes=128.0)
    assert found["same"].seconds(peaks) == 2.0 and found["gemm"].seconds(peaks) == 6.0  # 384 / 64, more than 528 / 128
    summary, table = roofline.report(COMPILED, peaks, 3.25, top=1)
    assert table.row_count == 1
    # 204 / 128 + 6 + 2 + 2 = 11.6 s.
    assert summary.startswith("1.16e+04 ms in all: 0.0 GB, 0.00 TFLOP, 8 operations; at best 28% of the floor")


@needs_cuda_compiler
def test_the_programs_of_a_gpu_that_is_not_here_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "SIZES", {"full": gpu.SIZES["tiny"]})
    assert roofline.main(["--shape", "tiny", "--top", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("ms in all") == 2 and "tiny, a step of 4 rows: " in said and "gemm_fusion" in said


def test_peers_of_an_accelerator_are_told_the_same_sizes_and_compared(tmp_path, monkeypatch):
    """Stand-ins replace the other processes; the package's own time is a given number."""
    told = []

    class Peer:
        def __init__(self, name, command, job, **rest):
            told.append((name, command[-1], job))

        def step(self):
            return {"generate_s": 2.0, "update_s": 0.5}, 0.0

        def close(self):
            pass

    monkeypatch.setattr(gpu, "Worker", Peer)
    monkeypatch.setattr(gpu.workload, "exported", lambda folder: tmp_path)
    sizes = gpu.Sizes(batches=(64, 256))
    figures = list(gpu.peers("small", SMALL, sizes, 2))
    assert [(name, module) for name, module, _ in told] == [
        ("hf", "benchmarks.workers.hf"),
        ("hf", "benchmarks.workers.hf"),
        ("trl", "benchmarks.workers.trl"),
    ]
    assert all(job["config"]["hidden_size"] == 4 for _, _, job in told)
    assert [told[i][2]["rows"] for i in (0, 1)] == [64, 256] and told[2][2]["num_questions"] == 8
    # 64 x 128 tokens in 2 s, 256 x 128 in 2 s; 64 x 512 in half a second.
    assert [figure.value for figure in figures] == [4096, 16384, 65536]
    ours = [Figure("small/generate_tokens_per_s/batch=64", 8192, ""), Figure("small/update_tokens_per_s", 32768, "")]
    value = {figure.name: figure.value for figure in gpu.compared([*ours, *figures])}
    assert value == {
        "small/times_faster_than_hf/generate_tokens_per_s/batch=64": 2.0,
        "small/times_faster_than_trl/update_tokens_per_s": 0.5,
    }


def test_peers_of_an_accelerator_want_their_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.run, "command", lambda name: [str(tmp_path / "python")])
    with pytest.raises(SystemExit):
        gpu.main(["--shape", "tiny", "--peers"])
    check_words(capsys.readouterr().err, "--peers", ".venv-trl", "bash launch/bench.sh gpu")


def test_unknown_accelerators_have_no_peaks():
    Device = dataclasses.make_dataclass("Device", ["platform", "device_kind"])
    assert gpu.peaks(Device("gpu", "NVIDIA H200"), SMALL) == Ceilings(989e12, 989e12, 4.8e12)
    with raises_with(ValueError, "'NVIDIA X1'", "H200"):
        gpu.peaks(Device("gpu", "NVIDIA X1"), SMALL)


# --- launch/bench.sh ---

PIP = "-m pip install --quiet --quiet --disable-pip-version-check"
TRL, TUNIX = f"{PIP} trl==1.16.*", f"{PIP} google-tunix==0.1.7"


@pytest.fixture
def bench(checkout):  # noqa: F811
    # The stand-in's environment knows one venv; a peer's is one more copy of it.
    text = (checkout.bin / "python3").read_text().replace('-m venv .venv"', '-m venv .venv"*')
    text = text.replace('mkdir -p .venv/bin && cp "$0" .venv/bin/python', 'mkdir -p $3/bin && cp "$0" $3/bin/python')
    checkout.stand_in("python3", text)
    return checkout


def test_bench_installs_each_peer_once_and_measures_all(bench):
    assert bench.run("launch/bench.sh").returncode == 0
    assert bench.log[:2] == INSTALLS
    assert bench.log[2].startswith(TRL) and bench.log[3].startswith(TUNIX)
    assert bench.log[4:] == ["-m benchmarks.run"]
    bench.run("launch/bench.sh", "--steps", "1")
    assert bench.log == ["-m benchmarks.run --steps 1"]


@pytest.mark.parametrize(
    ("arguments", "installs"),
    [(["ours"], []), (["trl-bf16", "--json", "tunix"], [TRL]), (["--json=trl", "tunix"], [TUNIX])],
)
def test_bench_installs_what_is_measured(bench, arguments, installs):
    assert bench.run("launch/bench.sh", *arguments).returncode == 0
    assert [line.split(" torch")[0].split(" jax")[0] for line in bench.log[2:-1]] == installs
    assert bench.log[-1] == "-m benchmarks.run " + " ".join(arguments)


@pytest.mark.parametrize(("arguments", "installs"), [([], [TRL]), (["ours", "--seeds", "1"], [])])
def test_bench_races_against_trl(bench, arguments, installs):
    assert bench.run("launch/bench.sh", "race", *arguments).returncode == 0
    assert [line.split(" torch")[0] for line in bench.log[2:-1]] == installs
    assert bench.log[-1] == " ".join(["-m benchmarks.race", *arguments])


def test_bench_measures_an_accelerator_beside_trl(bench):
    assert bench.run("launch/bench.sh", "gpu", "--shape", "smollm2-135m", "qwen2-1.5b").returncode == 0
    assert [line.split(" torch")[0] for line in bench.log[2:-1]] == [TRL]
    assert bench.log[-1] == "-m benchmarks.gpu --peers --shape smollm2-135m qwen2-1.5b"


def test_a_peer_whose_installation_failed_is_tried_again(bench):
    bench.run("launch/setup.sh")
    assert bench.run("launch/bench.sh", "trl", FAKE_PIP="1").returncode == 1
    bench.run("launch/bench.sh", "trl")
    assert bench.log[0].startswith(TRL)
    shutil.rmtree(bench.root / ".venv-trl")
    bench.run("launch/bench.sh", "trl")
    assert bench.log[0].startswith(TRL)


@pytest.mark.tier("slow")  # plain: test_micro_and_gpu_run_on_a_cpu
def test_saves_are_timed_by_size_and_leave_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["saves", f"--workdir={tmp_path}", "--gb=0.001,0.2"])
    read, restore = [], saves.Checkpointer.restore
    monkeypatch.setattr(
        saves.Checkpointer, "restore", lambda *args, **how: read.append(restore(*args, **how)) or read[-1]
    )
    saves.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [float(row[0]) for row in rows] == [0.001, 0.2] and all(float(x) >= 0 for row in rows for x in row)
    assert [sum(x.nbytes for x in jax.tree.leaves(found.device_state)) for found in read] == [10**6, 2 * 10**8]
    assert list(tmp_path.iterdir()) == []
