"""A mixture's programs for TPUs: a token is multiplied by its own experts only, and plan counts this."""

import dataclasses
import functools

import pytest
from support.building import needs_libtpu

from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.planning import chips, counting
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding

ARCH = Architecture(
    **dict(vocab_size=2048, width=512, num_layers=2, num_heads=4, num_kv_heads=4, head_size=128, ffn=256, tied=False),
    **dict(num_experts=16, experts_per_token=2, norm_topk=True, family="qwen3_moe", max_positions=512),
)
TOKENS = 8 * 64  # of a prefill


@functools.cache
def counts(arch, name, **mesh):
    settings = {
        "model": {"compute_dtype": "bfloat16"},
        "prompts": {"max_tokens": 64},
        "sampling": {"max_completion_tokens": 64},
        "rollout": {"prompts_per_iteration": 8, "group_size": 4},
        "update": {"batch_size": 32, "micro_batch_size": 32},
        "mesh": mesh,
    }
    devices, _ = chips.devices_of("v5e:2x2")
    run = assemble(freeze(settings), arch, (0,), sharding.make_mesh(MeshConfig(**mesh), devices))
    compiled = run.programs()[name].lower(run.mesh).compile()
    return counting.count(compiled.as_text())


def of_experts(name, **mesh):
    """Return the operations per device that experts add to a model that has almost nothing else."""
    flops = lambda arch: sum(x.turns * x.flops for x in counts(arch, name, **mesh).regions)
    return flops(ARCH) - flops(dataclasses.replace(ARCH, ffn=128)), counts(ARCH, name, **mesh)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 1, "expert": 4}, {"data": 1, "expert": 2, "tensor": 2}])
def test_a_prefill_multiplies_each_token_by_its_own_experts(mesh):
    """The ffn's share: 2 of 16 experts' 3 matrices [128,512] for each token, only in the first of two layers.

    The last layer needs only keys and values.
    """
    added, found = of_experts("prefill", **mesh)
    assert added == 2 * TOKENS * 2 * 3 * 128 * 512 / 4
    assert not found.uncounted
