"""The job that is compiled for absent pods: GRPO with the shape of Llama-3.1-8B, in bfloat16.

An iteration has 1,024 rollouts of up to 512 + 4,096 tokens, 16 for each prompt. The ring holds 4,096 rollouts. One
update trains on all new rollouts in micro-batches of 64. ``MESHES`` has the mesh for each slice.

Owns: the job's settings. Does not know: the measurements on its programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.config import freeze
from jaxrl_llm.models import presets
from jaxrl_llm.planning import chips
from jaxrl_llm.run import Run, assemble
from jaxrl_llm.runtime import sharding

MODEL = "llama-3.1-8b"
JOB = {
    "model": {"path": "random:debug", "compute_dtype": "bfloat16"},  # The shape comes from the preset.
    "prompts": {"max_tokens": 512},
    "sampling": {"max_completion_tokens": 4096},
    "rollout": {"prompts_per_iteration": 64, "group_size": 16},
    "replay": {"capacity": 4096},
    "update": {"batch_size": 1024, "micro_batch_size": 64},
}
MESHES = {
    "v5p:2x2x4": {"fsdp": 16},
    "v5e:8x8": {"fsdp": 64, "sampler_tensor": 8},
    "v6e:8x8": {"fsdp": 64},
    "v5e:16x16": {"fsdp": 64, "tensor": 4},
    "v5p:8x8x4": {"fsdp": 64, "tensor": 4},
}


def run_of(
    topology: str,
    mesh: Mapping[str, int],
    *,
    layers: int = 0,
    changed: Mapping[str, Any] = {},
) -> Run:
    """Return the job on a slice.

    Args:
        layers: the number of the model's layers; 0 = all.
        changed: settings by group that replace the job's settings.

    Raises:
        ConfigError: bad input.
    """
    jax.config.update("jax_platforms", "cpu")  # The run only compiles.
    settings = {part: of | dict(changed.get(part, {})) for part, of in JOB.items()}
    config = freeze(settings | {"mesh": dict(mesh)})
    arch = presets.PRESETS[MODEL]
    arch = dataclasses.replace(arch, num_layers=layers or arch.num_layers)
    devices, _ = chips.devices_of(topology)
    return assemble(config, arch, presets.eos_ids(MODEL), sharding.make_mesh(config.mesh, devices))
