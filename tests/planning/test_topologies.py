"""Every program that a run may have, compiled by the TPU compiler for slices of each size and kind.

The models are small. tests/system/test_pod_job.py tests the programs of an 8B model.
"""

import time

import pytest
from support.building import needs_libtpu

from jaxrl_llm.config import freeze
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.planning import chips
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding

SLICES = ("v5e:2x4", "v5p:2x2x4", "v5e:8x8", "v6e:8x8", "v5e:16x16", "v5p:8x8x4")
# CPU seconds of one program: all on one core it takes no longer. Others may use the machine.
MOST_SECONDS = 180
SAMPLER = {"init_sampler", "prefill", "decode", "read_group", "collect"}
LEARNER = {"publish", "init_state", "init_ring", "insert", "update", "annotate", "checksums_train", "checksums_ring"}


def plain(rows):
    return {
        "model": {"compute_dtype": "bfloat16"},
        "prompts": {"max_tokens": 32},
        "sampling": {"max_completion_tokens": 32},
        "rollout": {"prompts_per_iteration": rows, "group_size": 2, "chunk_steps": 4},
        "replay": {"capacity": 8 * rows},
        "update": {"batch_size": 2 * rows, "micro_batch_size": 2 * rows},
        "algorithm": {"divergence": {"name": "reference", "coefficient": 0.1}},
        "mesh": {"fsdp": 4, "tensor": 2},
    }


def looks_ahead(rows):
    """Rollouts that stay open, a reference that is reset, an evaluation; rows of different lengths in one line."""
    of = plain(rows)
    of["rollout"]["lookahead_prompts"] = rows
    of["algorithm"] |= {"reference_reset_iterations": (3,), "old_policy": "generation"}
    of["update"]["micro_batch_tokens"] = rows * 96
    return of | {"eval": {"num_prompts": rows, "temperature": 0.0}}


def resamples(rows):
    """Adapters of a mixture with split experts and split rows; stop strings; external rollouts."""
    of = plain(rows)
    of["rollout"]["max_resample_rounds"] = 2
    of["sampling"]["stop_strings"] = ("a",)
    of["external"] = {"groups_per_iteration": rows, "paths": ("x.jsonl",)}
    of["model"]["lora"] = {"rank": 4}
    return of | {"mesh": {"fsdp": 2, "expert": 2, "context": 2}}


ALL, OTHERS = SAMPLER | LEARNER | {"checksums_sampler"}, {"stop_rows", "join", "choose", "publish_base"}
JOBS = (
    (looks_ahead, "debug", ALL | {f"eval_{name}" for name in SAMPLER} | {"score_open", "reset_reference", "reread"}),
    (resamples, "debug_experts", ALL | {f"checksums_{x}" for x in ("base", "rounds")} | OTHERS),
)
CASES = [pytest.param(name, *job, id=f"{job[0].__name__}-{name}") for job in JOBS for name in SLICES]


@needs_libtpu
@pytest.mark.slow  # in the plain suite those of v5e:2x4, in tests/test_plan.py
@pytest.mark.parametrize(("name", "job", "model", "names"), CASES)
def test_the_compiler_takes_every_program_on_every_slice(name, job, model, names):
    devices, _ = chips.devices_of(name)
    config = freeze(job(len(devices)))
    run = assemble(config, PRESETS[model], (0,), sharding.make_mesh(config.mesh, devices))
    programs, seconds = run.programs(), {}
    assert set(programs) == names
    for each, program in programs.items():
        started = time.process_time()
        program.lower(run.mesh).compile()
        seconds[each] = time.process_time() - started
    longest = max(seconds, key=seconds.get)
    print(f"{name} {job.__name__}: {sum(seconds.values()):.0f} s, {seconds[longest]:.0f} of them {longest}")
    assert seconds[longest] < MOST_SECONDS, seconds
