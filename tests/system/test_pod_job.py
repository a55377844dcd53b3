"""The job of an 8B model on pods, compiled for TPUs by name:

it fits, compiles in minutes, and reads only what it must.
"""

import functools
import re
import time

import pytest
from support.building import libtpu_is_missing

from benchmarks import pod, pod_decode
from jaxrl_llm.planning import chips
from jaxrl_llm.planning.compiled import compile_one
from jaxrl_llm.runtime.programs import in_use_bytes

pytestmark = [pytest.mark.tier("compiler"), libtpu_is_missing, pytest.mark.timeout(3600)]
# CPU seconds of one program: all on one core it takes no longer.
MOST_SECONDS = 180


@functools.cache
def compiled(topology, **mesh):
    """Return the run, and the compiler's report and CPU seconds of each program. No program is compiled twice."""
    run = pod.run_of(topology, mesh)

    @functools.cache
    def row(name):
        started = time.process_time()  # not the clock's: others may use the machine
        return compile_one(run, name, run.programs()[name].lower(run.mesh)), time.process_time() - started

    return run, row


def decode_of(**mesh):
    """Return the run on v5p:2x2x4, and the measured traffic of its decode program."""
    run, row = compiled("v5p:2x2x4", **mesh)
    return run, row("decode")[0]


@pytest.mark.parametrize(
    ("topology", "headroom"),
    [("v5p:2x2x4", 0.44), ("v5e:8x8", 0.27), ("v6e:8x8", 0.21), ("v5e:16x16", 0.60), ("v5p:8x8x4", 0.93)],
    ids=lambda x: str(x),
)
def test_an_8b_job_fits_with_the_headroom_that_the_guide_states(topology, headroom):
    run, row = compiled(topology, **pod.MESHES[topology])
    rows, seconds = zip(*map(row, run.programs()), strict=True)
    assert all(row.memory is not None for row in rows), [row.refused for row in rows]
    assert max(seconds) < MOST_SECONDS, dict(zip(run.programs(), seconds, strict=True))
    limit = chips.devices_of(topology)[1].hbm_gib * 2**30
    need = in_use_bytes({row.name: row.memory for row in rows}, keeps_slots=False)
    free = 1 - need[fullest := max(need, key=need.get)] / limit
    print(f"{topology}: {sum(seconds):.0f} s, {need[fullest] / 2**20:.0f} MiB in {fullest}, {free:.3f} free")
    assert free >= headroom, need


def test_eight_chips_of_16_gib_cannot_take_the_job_which_is_a_verdict():
    _, row = compiled("v5e:2x4", fsdp=8)
    update, _ = row("update")
    assert update.memory is None and re.search(r"Ran out of memory .* exceeds available HBM", update.refused)


@pytest.mark.parametrize("mesh", [{"fsdp": 16}, {"fsdp": 4, "tensor": 4}], ids=str)
def test_a_decode_step_reads_weights_and_filled_blocks_of_caches_once(mesh):
    run, decode = decode_of(**mesh)
    step = pod_decode.step_of(run, decode)
    assert step.must < step.read <= 1.08 * step.must
    # By hand, GiB of a chip: 16 bytes a parameter of 8.03e9 without the table; see docs/explanation/layouts.md.
    tensor = mesh.get("tensor", 1)
    weights = 2 * (8030261248 - 128256 * 4096) / tensor
    rows, prompts = 1024 * tensor // 16, 64 * tensor // 16
    token = 2 * 2 * 32 * 8 * 128 / tensor  # keys and values of all layers
    assert step.must == weights + token * (rows * 4096 / 2 + prompts * 512)
    # Half a block of each cache: 256 tokens of eight heads, two of whose rows fill a step, or 128 of two heads.
    assert step.of_blocks == rows * token * (256 if tensor == 1 else 128) / 2


def test_a_decode_step_sends_no_weights():
    """Whole layers send ids and sums of rows.

    Layers split over 4 chips send two sums of 256 rows of activations each.
    """
    run, decode = decode_of(fsdp=16)
    assert sum(pod_decode.step_of(run, decode).sent.values()) < 1024
    run, decode = decode_of(fsdp=4, tensor=4)
    of_layers = 32 * 2 * 2 * 3 / 4 * 256 * 4096 * 2
    assert of_layers <= sum(pod_decode.step_of(run, decode).sent.values()) <= 1.05 * of_layers
