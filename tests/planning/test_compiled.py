"""Compiled: what the compiler reports of temporary memory."""

from jaxrl_llm.planning.compiled import Buffer, temporaries

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
    """Two buffers of 0.5 MiB have one place in turn: of 1.5 MiB, half is of each shape."""
    assert temporaries(REPORT) == (Buffer("f32[512,512]", 1, 0.75 * 2**20), Buffer("bf16[512,512]", 2, 0.75 * 2**20))


def test_a_program_without_temporary_memory_has_no_buffers():
    assert temporaries("") == () == temporaries(REPORT[: REPORT.index("f32[512")].rpartition("  cumulative")[0])
