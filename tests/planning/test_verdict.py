"""The verdict: the contents of the memory, and settings with values that divide."""

import dataclasses

import jax
import pytest
from support.building import mesh_of
from support.refusal import refused

from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.planning import verdict
from jaxrl_llm.planning.compiled import Buffer, Row
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime.programs import resident_bytes

LAYERS, WIDTH, VOCAB = 2, 64, 260


def run_of(mesh, arch=PRESETS["debug"], *, teacher="", **settings):
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
    reference = pretrained.resolve(teacher).architecture() if teacher else None
    return assemble(config, arch, (0,), mesh_of(MeshConfig(**{"data": 1, **mesh})), reference)


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
        ("update", {"data": 2, "fsdp": 2}, f"f32[{LAYERS},{WIDTH},128]", "mesh.fsdp=4 with mesh.data=1 (now 2)"),
        ("update", {"fsdp": 4}, f"f32[{LAYERS},{WIDTH},128]", "mesh.tensor=2 with mesh.fsdp=2 (now 1)"),
        ("update", {"fsdp": 4, "sampler_tensor": 1}, f"f32[{LAYERS},{WIDTH},128]", "optimizer.offload=True"),
        ("decode", {"fsdp": 4}, f"f32[24,{VOCAB}]", "rollout.slots=8 (now 16)"),
    ],
)
def test_the_setting_that_lowers_the_largest_kind_comes_first(name, mesh, buffer, expected):
    assert verdict.suggestions(run_of(mesh), row(name, (buffer, 1e12)))[0] == expected


def test_what_is_there_while_a_program_runs_counts_too():
    """Weights in float32 and two moments; the ring; published weights, and slots while the sampler runs."""
    run = run_of({})
    kept = verdict.kept(run, sampling=True)
    weights = 4 * PRESETS["debug"].num_params
    assert kept[verdict.STATE] == pytest.approx(3 * weights, rel=0.01)
    assert kept[verdict.PUBLISHED] == pytest.approx(weights, rel=0.01)
    assert set(verdict.kept(run, sampling=False)) == {verdict.STATE, verdict.RING}
    assert verdict.suggestions(run, row("decode"))[0] == "optimizer.offload=True"


REFERENCE = {"divergence": {"name": "reference", "coefficient": 0.1}}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("teacher", "resets"), [("", ()), ("random:debug_experts", ()), ("", (3,))])
def test_frozen_weights_are_those_that_loading_leaves_beside_the_state(teacher, rank, resets):
    """A second copy, or the base of adapters itself; with a teacher both.

    A reference that is reset is part of the state.
    """
    model = {"path": "random:debug", "reference_path": teacher, "lora": {"rank": rank}}
    run = run_of({}, teacher=teacher, model=model, algorithm=REFERENCE | {"reference_reset_iterations": resets})
    source = pretrained.resolve("random:debug")
    reference = run.learner.reference_model if not resets else None
    models = run.model, reference, run.mesh, source, pretrained.resolve(teacher) if teacher else source
    *frozen, _ = pretrained.weights(*models, seed=0)
    there = {id(x): x.nbytes for x in jax.tree.leaves(frozen)}
    assert run.beside["frozen"] == sum(there.values())
    assert verdict.kept(run, sampling=False).get(verdict.FROZEN, 0) == sum(there.values())
    assert resident_bytes({}, **run.beside) == sum(there.values())


def test_a_reference_that_is_a_mixture_leaves_a_dense_models_adapters_alone():
    """The checks of the policy's adapters and of its sampler's rounding do not apply to the reference's experts."""
    lora = {"rank": 2, "targets": ("q", "gate", "up", "down")}
    model = {"path": "random:debug", "reference_path": "random:debug_experts", "lora": lora}
    run = run_of({}, teacher="random:debug_experts", model=model, algorithm=REFERENCE)
    assert run.learner.reference_model.arch.num_experts == 6 and run.learner.reference_model.lora.rank == 0
    assert run.learner.programs()["annotate"].lower(run.mesh)
    together = dataclasses.replace(PRESETS["debug_experts"], family="gpt_oss")
    with refused("model.lora.targets", ("q", "gate", "up", "down"), "q, k, v, o", "gpt_oss"):
        run_of({}, together, model=model | {"path": "random:debug_experts"}, algorithm=REFERENCE)


def test_the_ring_that_fits_fills_what_is_spare_in_whole_draws():
    run = run_of({"data": 4})
    ring = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(run.learner.abstract_ring))
    # Twice the ring's bytes are spare, on four devices together: three times as many rollouts, and not quite one draw
    # of all devices more.
    assert verdict.ring_that_fits(run, 2 * ring / 4 * 1.01) == 96
    assert verdict.ring_that_fits(run, 0) == 32
    # Rings of whole iterations of 48 rollouts alone are taken, and of whole draws of 4 devices; one more fits not.
    rollout, update = {"prompts_per_iteration": 12, "group_size": 4}, {"batch_size": 16, "micro_batch_size": 16}
    run = run_of({"data": 4}, rollout=rollout, update=update, replay={"capacity": 96, "unit": "group"})
    ring = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(run.learner.abstract_ring))
    assert verdict.ring_that_fits(run, ring / 4 * 0.9) == 144


def test_slots_that_the_samplers_own_mesh_does_not_divide_are_not_advised():
    """Half of 8 slots would fit the learner's two devices with their own rows, but not the sampler's eight."""
    rollout = {"prompts_per_iteration": 8, "group_size": 2, "slots": 8}
    run = run_of({"data": 2, "context": 4}, rollout=rollout)
    assert not any(
        "rollout.slots" in text for text in verdict.suggestions(run, row("decode", (f"f32[24,{VOCAB}]", 1e12)))
    )
