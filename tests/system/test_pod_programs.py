"""Properties of the sampler's programs on a pod, compiled for TPUs by name: traffic between chips, and duplicates."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import building
from support.building import needs_libtpu
from support.refusal import refused

from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.planning import chips, counting, hlo
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import compile_all, memory

# A device's part of the vocabulary is no multiple of the draw's blocks: 1088 = 4.25 x 256.
ARCH = Architecture(
    2176, width=512, num_layers=4, num_heads=4, num_kv_heads=2, head_size=128, ffn=1024, tied=False, max_positions=512
)
# Its matrices are too large for the memory beside a chip's cores.
LARGE = dataclasses.replace(ARCH, vocab_size=16032, width=2048, num_heads=16, num_kv_heads=8, ffn=8192)
# What a device sends or gets of each row of activations, beside which nothing may be large.
ROWS = 16
GATHER = [kind for kind in hlo.COLLECTIVES if kind != "all-reduce"]


@functools.cache
def run_of(arch=ARCH, top_k=0, **mesh):
    settings = {
        "model": {"compute_dtype": "bfloat16"},
        "prompts": {"max_tokens": 64},
        "sampling": {"max_completion_tokens": 128, "top_k": top_k},
        "rollout": {"prompts_per_iteration": ROWS // 2, "group_size": 4, "chunk_steps": 4},
        "update": {"batch_size": 2 * ROWS, "micro_batch_size": 2 * ROWS},
        "eval": {"num_prompts": ROWS // 2, "temperature": 0.0},
        "mesh": mesh,
    }
    devices, _ = chips.devices_of("v5e:2x2")
    return assemble(freeze(settings), arch, (0,), sharding.make_mesh(MeshConfig(**mesh), devices))


@functools.cache
def compiled(name, **settings):
    run = run_of(**settings)
    return run.programs()[name].lower(run.mesh).compile()


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "settings"),
    [("decode", {}), ("decode", {"top_k": 20}), ("eval_decode", {})],
    ids=["all", "top-k", "greedy"],
)
def test_a_decode_step_moves_no_logits_and_gathers_no_parameter(name, settings):
    text = compiled(name, fsdp=2, tensor=2, **settings).as_text()
    rows = ROWS  # of two data shards
    # The most that is added up is activations of rows; what is gathered, sums and candidates of each part.
    assert max(hlo.moved(text)) <= rows * ARCH.width
    assert max(hlo.moved(text, *GATHER)) <= rows * 2 * max(settings.get("top_k", 0), 1)


@needs_libtpu
def test_a_decode_step_sends_what_layers_in_two_parts_need_and_a_hundredth_more():
    """Computed by hand: activations of a data shard's rows in bfloat16 are summed over two devices.

    Each device sends 2 x 1/2 of their bytes, twice per layer and once for the embedding, whose vocabulary is split. The
    rest is sums of rows.
    """
    steps = run_of(fsdp=2, tensor=2).config.rollout.chunk_steps
    sent = counting.count(compiled("decode", fsdp=2, tensor=2).as_text()).by_collective()
    needed = (2 * ARCH.num_layers + 1) * ROWS * ARCH.width * 2
    assert needed <= sum(sent.values()) / steps <= 1.01 * needed


FOUR_CHIPS = [pytest.param({"fsdp": 4}, marks=pytest.mark.slow), {"fsdp": 2, "tensor": 2}]


@needs_libtpu
@pytest.mark.parametrize("mesh", FOUR_CHIPS, ids=str)
def test_a_tpus_decode_program_turns_no_weight(mesh):
    text = compiled("decode", **mesh).as_text()
    copied = hlo.sizes(text, "copy", "transpose")
    least = ARCH.width * ARCH.num_kv_heads * ARCH.head_size // mesh.get("tensor", 1)  # of a layer's matrices
    assert copied and max(copied) < least


@needs_libtpu
@pytest.mark.parametrize("mesh", FOUR_CHIPS, ids=str)
def test_publish_gathers_one_matrix_at_a_time(mesh):
    m, tensor = memory(compiled("publish", arch=LARGE, **mesh)), mesh.get("tensor", 1)
    embedding = 2 * LARGE.vocab_size * LARGE.width / tensor
    assert m.outputs > 9 * embedding
    # The largest matrix, beside what a device casts of its own part.
    assert m.temporary < 2 * embedding


@needs_libtpu
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_publish_between_equal_layouts_sends_nothing_and_holds_nothing_but_what_it_makes(mesh):
    text, m = compiled("publish", **mesh).as_text(), memory(compiled("publish", **mesh))
    assert not counting.count(text).by_collective()
    size = jax.tree.reduce(lambda n, x: n + x.size, run_of(**mesh).model.abstract_params(run_of(**mesh).mesh), 0)
    of_chip = 2 * size / mesh.get("tensor", 1)  # in bfloat16, made of float32
    assert of_chip <= m.outputs <= 1.01 * of_chip and m.arguments <= 2.02 * of_chip
    assert m.temporary <= 0.01 * of_chip


# --- a sampler that splits layers over more devices than the learner ---


@functools.cache
def rollouts_of(**mesh):
    """Return published weights, rollouts and the run, on eight CPU devices."""
    settings = {
        "prompts": {"max_tokens": building.PROMPT_TOKENS},
        "sampling": {"max_completion_tokens": building.COMPLETION_TOKENS},
        "rollout": {"prompts_per_iteration": 8, "group_size": 2},
        "update": {"batch_size": 16, "micro_batch_size": 16},
        "mesh": mesh,
    }
    config = freeze(settings)
    run = assemble(config, building.TINY, building.EOS_IDS, sharding.make_mesh(config.mesh))
    names = ("publish", "init_sampler", "prefill", "decode", "read_group", "collect", "insert")
    programs = {name: program for name, program in run.programs().items() if name in names}
    compiled = compile_all(programs, run.mesh)
    params = compiled["publish"](building.learner_params(run.model, run.mesh))
    generator = Generator(run.sampler, compiled, building.letters)
    version, key = jax.device_put((np.int32(0), jax.random.key(0)), sharding.replicated(run.mesh, (0, 0)))
    generator.generate(params, building.make_prompts(range(8)), version=version, key=key)
    rollout = generator.take()
    return params, rollout, run


@pytest.mark.tier("slow")  # plain: test_generator.test_samples_do_not_depend_on_the_mesh
def test_a_sampler_with_more_tensor_parallelism_draws_the_same_for_the_same_learner():
    params, rollout, run = rollouts_of(fsdp=8, sampler_tensor=2)
    _, expected, _ = rollouts_of(fsdp=8)
    assert run.mesh.devices.shape == (1, 8, 1, 1, 1) and run.sampler.mesh.devices.shape == (1, 4, 1, 1, 2)
    assert building.completions(jax.device_get(rollout)) == building.completions(jax.device_get(expected))
    # Sums over the tensor axis are rounded in another order.
    np.testing.assert_allclose(rollout.behaviour_logp, expected.behaviour_logp, rtol=0, atol=1e-5)
    # Each device has half of a layer; the learner gets its rows as from a sampler on its own mesh.
    assert params["layers"][0]["up"].addressable_shards[0].data.size == params["layers"][0]["up"].size // 2
    assert rollout.tokens.sharding.is_equivalent_to(expected.tokens.sharding, 2)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"fsdp": 2, "tensor": 2, "sampler_tensor": 3}, ["mesh.tensor=2"]),
        ({"fsdp": 2, "tensor": 2, "sampler_tensor": 8}, ["mesh.fsdp=2 x mesh.context=1 x mesh.tensor=2"]),
        ({"fsdp": 8, "sampler_tensor": 8}, ["4 heads", "2 key heads"]),
    ],
)
def test_a_sampler_that_its_devices_or_heads_do_not_split_is_refused(mesh, words):
    with refused("mesh.sampler_tensor", mesh["sampler_tensor"], *words):
        rollouts_of(**mesh)
