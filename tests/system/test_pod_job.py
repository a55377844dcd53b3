"""The job of an 8B model on pods, compiled for TPUs by name: it fits, is compiled in minutes, reads what it must."""

import functools
import time

import pytest
from support.building import needs_libtpu

from benchmarks import pod, pod_decode
from jaxrl_llm.planning import chips
from jaxrl_llm.planning.compiled import compile_one
from jaxrl_llm.runtime.programs import in_use_bytes

pytestmark = [needs_libtpu, pytest.mark.slow]
# CPU seconds of one program: all on one core it takes no longer.
MOST_SECONDS = 180


@functools.cache
def decode_of(**mesh):
    """The run on v5p:2x2x4, and what its decode program is found to do."""
    run = pod.run_of("v5p:2x2x4", mesh)
    return run, compile_one(run, "decode", run.programs()["decode"].lower(run.mesh))


@pytest.mark.parametrize(
    ("topology", "headroom"), [("v5p:2x2x4", 0.44), ("v5e:8x8", 0.05), ("v6e:8x8", 0.21)], ids=lambda x: str(x)
)
def test_an_8b_job_fits_with_the_headroom_that_the_guide_states(topology, headroom):
    run, rows, seconds = pod.run_of(topology, pod.MESHES[topology]), [], {}
    for name, program in run.programs().items():
        started = time.process_time()  # not the clock's: others may use the machine
        rows.append(compile_one(run, name, program.lower(run.mesh)))
        seconds[name] = time.process_time() - started
    assert all(row.memory is not None for row in rows), [row.refused for row in rows]
    assert max(seconds.values()) < MOST_SECONDS, seconds
    limit = chips.devices_of(topology)[1].hbm_gib * 2**30
    need = in_use_bytes({row.name: row.memory for row in rows}, keeps_slots=False)
    assert max(need.values()) <= (1 - headroom) * limit, need


@pytest.mark.parametrize("mesh", [{"fsdp": 16}, {"fsdp": 4, "tensor": 4}], ids=str)
def test_a_decode_step_reads_weights_and_filled_blocks_of_caches_once(mesh):
    run, decode = decode_of(**mesh)
    step = pod_decode.step_of(run, decode)
    assert 1.0 <= 1 + step.above <= 1.08
    # By hand, GiB of a chip: 16 bytes a parameter of 8.03e9 without the table; see docs/tpu.md.
    tensor = mesh.get("tensor", 1)
    weights = 2 * (8030261248 - 128256 * 4096) / tensor
    rows, prompts = 1024 * tensor // 16, 64 * tensor // 16
    token = 2 * 2 * 32 * 8 * 128 / tensor  # keys and values of all layers
    assert step.must == weights + token * (rows * 4096 / 2 + prompts * 512)
    assert step.of_blocks == rows * token * 256 / 2


def test_a_decode_step_sends_no_weights():
    """Layers whole: ids and sums of rows. Split over 4: in each layer two sums of 256 rows of activations."""
    run, decode = decode_of(fsdp=16)
    assert sum(pod_decode.step_of(run, decode).sent.values()) < 1024
    run, decode = decode_of(fsdp=4, tensor=4)
    of_layers = 32 * 2 * 2 * 3 / 4 * 256 * 4096 * 2
    assert of_layers <= sum(pod_decode.step_of(run, decode).sent.values()) <= 1.05 * of_layers
