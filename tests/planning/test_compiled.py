"""The compiler's report of temporary memory."""

import dataclasses

import pytest
from support.building import ONE, mesh_of

from jaxrl_llm.config import freeze
from jaxrl_llm.models.architecture import PRESETS, Layer
from jaxrl_llm.planning.compiled import Buffer, attended_share, head_share, temporaries
from jaxrl_llm.run import assemble

REPORT = """Memory Space: default (color=0)
Total bytes: 1 (1B)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   64.00MiB(100%);   64.00MiB;            0;                1; bf16[8192,4096]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    1.00MiB( 50%);    1.00MiB;            0;                2; f32[512,512], pred[]
    1.50MiB( 75%);  512.00KiB;      1048576;                2; 2\u00d7bf16[512,512]
    2.00MiB(100%);  512.00KiB;      1048576;                1; bf16[512,512]

Memory Space: vmem (color=1)
Total bytes: 1 (1B)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    1.00MiB( 25%);    1.00MiB;            0;                1; f32[1]
    1.00MiB( 50%);    1.00MiB;            0;                1; f32[2]
    1.00MiB( 75%);    1.00MiB;            0;                1; f32[3]
    1.00MiB(100%);    1.00MiB;            0;                1; f32[4]
"""


def test_temporary_memory_is_neither_arguments_nor_what_is_on_the_chip_and_adds_up():
    """Two buffers of 0.5 MiB share one address at different times: of 1.5 MiB, half belongs to each shape."""
    assert temporaries(REPORT) == (Buffer("f32[512,512]", 1, 0.75 * 2**20), Buffer("bf16[512,512]", 2, 0.75 * 2**20))


def test_a_program_without_temporary_memory_has_no_buffers():
    assert temporaries("") == () == temporaries(REPORT[: REPORT.index("f32[512")].rpartition("  cumulative")[0])


def run_of(update, *, unit, windows=(0, 0)):
    """Return a run with rows of 4 + 8 tokens and two rows per prompt."""
    arch = dataclasses.replace(PRESETS["debug"], layers=tuple(Layer(window=n) for n in windows))
    settings = {
        "prompts": {"max_tokens": 4},
        "sampling": {"max_completion_tokens": 8},
        "rollout": {"prompts_per_iteration": 4, "group_size": 2},
        "replay": {"unit": unit},
        "update": {"batch_size": 8, "micro_batch_size": 8, **update},
    }
    return assemble(freeze(settings), arch, (257,), mesh_of(ONE))


def test_attention_is_that_of_the_mean_layer():
    """Of two blocks of queries, the first attends to 128 keys and the second to 256, or to 128 + 31 with a window."""
    run = run_of({}, unit="rollout", windows=(0, 32))
    expected = ((128 + 256) / 2 + (128 + 159) / 2) / 2 / 256
    assert attended_share(run, "update", 256, 256, 128) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("unit", "windows", "lines", "pairs"),
    [
        ("rollout", (0, 0), 4, 2 * 12 * 13 / 2),  # 8 rows in 4 lines, each token sees its row
        ("rollout", (0, 4), 4, 2 * (78 + 42) / 2),  # 1 + 2 + 3, and nine times 4
        ("group", (0, 0), 2, 2 * (10 + 2 * 68)),  # a prompt once; what comes after it twice
        ("rollout", (0, 0), 3, 78 * 8 / 6),  # 4 lines in two micro-batches of 3
    ],
)
def test_packed_lines_compute_what_their_rows_see(unit, windows, lines, pairs):
    width = 24 if unit == "rollout" else 40
    run = run_of({"pack_width": width, "micro_batch_tokens": lines * width}, unit=unit, windows=windows)
    assert attended_share(run, "update", 128, 128, 128) == pytest.approx(pairs / 128**2)
    if windows == (0, 0):  # other programs know no lines
        assert attended_share(run, "annotate", 128, 128, 128) == 1


@pytest.mark.parametrize(
    ("unit", "lines", "width", "share"),
    [
        ("rollout", 4, 24, 16 / 24),  # two rows of 4 + 8 tokens in each line
        ("rollout", 4, 30, 16 / 30),
        ("rollout", 3, 24, 8 * 8 / 6 / 24),  # 4 lines in two micro-batches of 3
        ("group", 2, 40, 32 / 40),  # two groups of 4 + 2 * 8
    ],
)
def test_packed_lines_project_what_completions_they_hold(unit, lines, width, share):
    """Once, chunks after the last target were counted too."""
    run = run_of({"pack_width": width, "micro_batch_tokens": lines * width}, unit=unit)
    assert head_share(run, "update") == pytest.approx(share)
    assert head_share(run, "annotate") == 1 == head_share(run_of({}, unit=unit), "update")
