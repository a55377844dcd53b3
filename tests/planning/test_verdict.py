"""Verdict: what fills the memory, and settings that divide."""

import jax
import pytest
from support.building import mesh_of

from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.planning import verdict
from jaxrl_llm.planning.compiled import Buffer, Row
from jaxrl_llm.run import assemble

LAYERS, WIDTH, VOCAB = 2, 64, 260


def run_of(mesh, **settings):
    config = freeze(
        {
            "prompts": {"max_tokens": 32},
            "sampling": {"max_completion_tokens": 48},
            "rollout": {"prompts_per_iteration": 8, "group_size": 2, "slots": 16},
            "update": {"batch_size": 16, "micro_batch_size": 16, "logp_chunk_tokens": 256},
            "replay": {"capacity": 32},
            "mesh": mesh,
            **settings,
        }
    )
    return assemble(config, PRESETS["debug"], (0,), mesh_of(MeshConfig(**{"data": 1, **mesh})))


def row(name, *buffers):
    return Row(name, None, "too large", buffers=tuple(Buffer(shape, 1, size) for shape, size in buffers))


@pytest.mark.parametrize(
    ("dims", "kind"),
    [
        ((1024, VOCAB), verdict.LOGITS),
        ((VOCAB, WIDTH), verdict.MATRICES),
        ((LAYERS, 4, 80, WIDTH), verdict.KEPT),
        ((4, 80, WIDTH), verdict.LAYER),
        ((LAYERS, WIDTH, 128), verdict.MATRICES),
        ((7,), verdict.OTHER),
    ],
)
def test_a_buffer_is_known_by_its_shape(dims, kind):
    assert verdict.kind_of(run_of({}), dims) == kind


@pytest.mark.parametrize(
    ("name", "mesh", "buffer", "expected"),
    [
        ("update", {"data": 2, "fsdp": 2}, f"f32[1024,{VOCAB}]", "update.logp_chunk_tokens=128 (now 256)"),
        ("update", {"data": 2, "fsdp": 2}, f"f32[{LAYERS},4,80,{WIDTH}]", "update.micro_batch_size=8 (now 16)"),
        ("update", {"data": 2, "fsdp": 2}, f"f32[{LAYERS},{WIDTH},128]", "mesh.fsdp=4 (now 2)"),
        ("update", {"fsdp": 4}, f"f32[{LAYERS},{WIDTH},128]", "mesh.tensor=2 with mesh.fsdp=2 (now 1)"),
        ("decode", {"fsdp": 4}, f"f32[24,{VOCAB}]", "rollout.slots=8 (now 16)"),
    ],
)
def test_the_setting_that_lowers_the_largest_kind_comes_first(name, mesh, buffer, expected):
    assert verdict.suggestions(run_of(mesh), row(name, (buffer, 1e12)))[0] == expected


def test_what_is_there_while_a_program_runs_counts_too():
    """Weights in float32 and two moments; the ring; published weights and slots where the sampler runs."""
    run = run_of({})
    kept = verdict.kept(run, sampling=True)
    weights = 4 * PRESETS["debug"].num_params
    assert kept[verdict.STATE] == pytest.approx(3 * weights, rel=0.01)
    assert kept[verdict.PUBLISHED] == pytest.approx(weights, rel=0.01)
    assert set(verdict.kept(run, sampling=False)) == {verdict.STATE, verdict.RING}
    assert verdict.suggestions(run, row("decode"))[0] == "optimizer.offload=True"


def test_the_ring_that_fits_fills_what_is_spare_in_whole_draws():
    run = run_of({"data": 4})
    ring = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(run.learner.abstract_ring))
    # Twice the ring's bytes are spare, on four devices together: three times as many rollouts, and not quite one draw
    # of all devices more.
    assert verdict.ring_that_fits(run, 2 * ring / 4 * 1.01) == 96
    assert verdict.ring_that_fits(run, 0) == 32
