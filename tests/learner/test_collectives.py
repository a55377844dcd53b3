"""The data that devices send in an update: no more than the layout needs, sums in float32, the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.building import CUBE, ONE, TINY, gradient, make_update, mesh_of, needs_libtpu, random_experience
from support.refusal import refused

from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import EMBEDDING, look_up
from jaxrl_llm.planning import chips
from jaxrl_llm.planning.counting import count
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding

V, D, FSDP, MICRO_BATCHES = 520, 64, 4, 2
SPLIT = MeshConfig(data=2, fsdp=4)


def test_bytes_are_counted_by_the_ring_algorithms_and_by_the_trips_of_loops():
    text = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%all-reduce-scatter.1 (x: f32[8,4]) -> f32[2,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %r = f32[8,4]{1,0} all-reduce(%x), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[2,4]{1,0} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={2,4}
}
%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %y = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %f = f32[2,4]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%next, %y)
}
%condition (p: (s32[], f32[8,4])) -> pred[] {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %c = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}
ENTRY %main (p: f32[8,4], b: bf16[2,4], q: f32[5], r: f32[]) -> f32[] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  %b = bf16[2,4]{1,0} parameter(1)
  %q = f32[5]{0} parameter(2)
  %r = f32[] parameter(3)
  %zero = s32[] constant(0)
  %t = (s32[], f32[8,4]{1,0:T(8,128)}) tuple(%zero, %p)
  %w = (s32[], f32[8,4]{1,0:T(8,128)}) while(%t), condition=%condition, body=%body
  %g = (bf16[2,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%b), channel_id=1, replica_groups=mesh['a'=2,'b'=8] {'b'}
  %s = (f32[5]{0}, f32[]) all-reduce(%q, %r), channel_id=2, replica_groups=[4,2]<=[8], to_apply=%add
  %m = f32[5]{0} collective-permute(%q), channel_id=4, source_target_pairs={{0,1},{1,0}}
  ROOT %one = f32[] all-reduce(%r), channel_id=5, replica_groups={{0},{1}}, to_apply=%add
}
"""
    found = {(one.kind, one.shape, one.chips, times): one.num_bytes for times, one in count(text).sent}
    assert found == {
        ("reduce-scatter", "f32[8,4]", 4, 3): 3 / 4 * 128,
        ("all-gather", "bf16[16,4]", 8, 1): 7 / 8 * 128,
        ("all-reduce", "f32[5]", 2, 1): 2 * 1 / 2 * 24,
        ("collective-permute", "f32[5]", 2, 1): 20,
    }


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=1, fsdp=4), pytest.param(CUBE, marks=pytest.mark.slow)],
    ids=["fsdp 4", "data 2, fsdp 2, tensor 2"],
)
def test_gradients_are_one_devices_on_any_mesh(mesh):
    """Activations are recomputed, as on pods; a single device keeps all of them."""
    update, rows = make_update({"logp_chunk_tokens": 16}, num_devices=8), random_experience(with_reference=False)
    alone, sums = gradient(update, rows)
    recomputing = dataclasses.replace(update, model=dataclasses.replace(update.model, remat="full"))
    together, sums_together = gradient(recomputing, rows, mesh)
    np.testing.assert_allclose(sums_together["loss_sum"], sums["loss_sum"], rtol=1e-5, atol=1e-6)
    close = lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, together, alone)


@pytest.mark.parametrize("mesh", [ONE, SPLIT], ids=["one device", "eight"])
def test_the_embeddings_gradient_is_summed_in_float32(mesh):
    """800 gradients of 1 for one token id: a bfloat16 sum stops at 256, because bfloat16 cannot represent 257."""
    table, tokens = np.ones((5, 8), np.float32), np.full((8, 100), 3, np.int32)

    axes = None if mesh is ONE else "fsdp"

    def total(table, tokens):
        find = functools.partial(look_up, jnp.bfloat16, 8, axes)
        split = {"axes": (("batch", "length"), jax.P(None, axes)), "shared": 2, "over": sharding.TOKEN_AXES}
        x_BTD = sharding.by_device(find, tokens, table, **split)
        assert x_BTD.dtype == jnp.bfloat16
        return jnp.sum(x_BTD.astype(jnp.float32))

    mesh = mesh_of(mesh)
    args = jax.device_put(
        (table, tokens), (sharding.named(mesh, table.shape, EMBEDDING), sharding.leading(mesh, tokens))
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = jax.jit(jax.grad(total))(*args)
    np.testing.assert_array_equal(found, np.where(np.arange(5)[:, None] == 3, 800.0, np.zeros((5, 8))))


@pytest.mark.parametrize("num_devices", [2, 3, 6, 8])
def test_a_copy_for_each_device_is_whole_and_its_gradient_the_sum_of_all(num_devices):
    mesh = mesh_of(MeshConfig(data=1, fsdp=num_devices))
    x = np.arange(2 * 2 * num_devices, dtype=np.float32).reshape(2, -1)
    weight = np.random.default_rng(0).normal(size=(num_devices, *x.shape)).astype(np.float32)

    def total(x):
        copies = sharding.gather_copies(x, jax.P(None, "fsdp"))
        return jnp.sum(copies * weight), copies

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        where = sharding.named(mesh, x.shape, EMBEDDING)
        found, copies = jax.jit(jax.grad(total, has_aux=True))(jax.device_put(x, where))
    np.testing.assert_array_equal(copies, np.broadcast_to(x, weight.shape))
    np.testing.assert_allclose(found, weight.sum(axis=0), rtol=1e-5, atol=1e-6)


RULES = {"embed over data and fsdp": {"embed": ("data", "fsdp")}, "vocab over rows": {"vocab": "fsdp", "embed": None}}


@pytest.mark.tier("slow")  # plain: test_gradients_are_one_devices_on_any_mesh
@pytest.mark.parametrize(
    "rules",
    [RULES["embed over data and fsdp"], pytest.param(RULES["vocab over rows"], marks=pytest.mark.slow)],
    ids=RULES,
)
def test_weights_lie_where_rules_say_and_gradients_are_the_same(rules):
    config = MeshConfig(data=2, fsdp=2, tensor=2, rules=rules)
    mesh, rows = mesh_of(CUBE), random_experience(with_reference=False)
    update = make_update({"logp_chunk_tokens": 16}, num_devices=4)
    alone, _ = gradient(update, rows)
    model = dataclasses.replace(update.model, rules=sharding.rules_of(config))
    table = model.abstract_params(mesh)["embedding"].sharding.spec
    assert table == (jax.P("tensor", ("data", "fsdp")) if rules["embed"] else jax.P("fsdp", None))
    together, _ = gradient(dataclasses.replace(update, model=model), rows, CUBE)
    for name in ("embedding", "final_norm"):
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("rules", [{"width": "fsdp"}, {"batch": "data"}, {"embed": "model"}, {"embed": 3}])
def test_a_rule_of_an_unknown_axis_is_refused(rules):
    with refused("mesh.rules", rules, "vocab, embed,", "data, fsdp, expert, context, tensor"):
        assemble(freeze({"mesh": {"rules": rules}}), TINY, (5,), mesh_of(ONE))


def run_of(topology):
    """Return the counts of an update of two micro-batches, each of eight chunks of positions.

    The weights are split over four chips.
    """
    devices, _ = chips.devices_of(topology)
    num_chips = len(devices)
    config = freeze(
        {
            "model": {"path": "random:debug", "compute_dtype": "bfloat16"},
            "prompts": {"max_tokens": 32},
            "sampling": {"max_completion_tokens": 32},
            "rollout": {"prompts_per_iteration": num_chips, "group_size": 2},
            "replay": {"capacity": 4 * num_chips},
            "update": {"batch_size": 4 * num_chips, "micro_batch_size": 2 * num_chips, "logp_chunk_tokens": 8},
            "mesh": {"fsdp": FSDP},
        }
    )
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16}
    arch = Architecture(vocab_size=V, width=D, num_layers=2, ffn=128, tied=False, **heads)
    return assemble(config, arch, (5,), sharding.make_mesh(config.mesh, devices))


def compile_program(run, name):
    return run.programs()[name].lower(run.mesh).compile()


@pytest.fixture(scope="module")
def update_of_eight():
    return sent_by(compile_program(run_of("v5e:2x4"), "update"))


def sent_by(compiled):
    return count(compiled.as_text(), turns_of=lambda name: MICRO_BATCHES).sent


def sent_bytes(sent):
    return sum(times * one.num_bytes for times, one in sent)


@needs_libtpu
def test_head_and_embedding_send_what_their_layout_needs_once_a_micro_batch(update_of_eight):
    """The traffic does not depend on the number of chunks: the head in bfloat16, and its gradient in float32.

    Over ``data`` each chip sends, once per update, a shard of the gradients of head and embedding. Otherwise the
    embedding sends only activations.
    """
    of_tables = [(times, one) for times, one in update_of_eight if f"[{V}," in one.shape]
    size, others = V * D, (FSDP - 1) / FSDP
    head = others * size * 2 + others * size * 4
    over_data = 2 * (1 / 2) * size / FSDP * 4
    assert sent_bytes(of_tables) == MICRO_BATCHES * head + 2 * over_data
    assert {one.kind for _, one in of_tables if one.shape.startswith("bf16")} == {"all-gather"}
    rows, width = 2 * 64 - 32, D // FSDP  # a group's prompt once, two completions
    activations = [(times, one) for times, one in update_of_eight if one.kind == "all-to-all"]
    assert sent_bytes(activations) == MICRO_BATCHES * 2 * others * FSDP * rows * width * 2


@needs_libtpu
def test_an_update_sends_what_its_layout_needs_and_nothing_more(update_of_eight):
    """A layer's matrices are gathered in bfloat16 for each pass.

    Their gradients are scattered in bfloat16, and shards are summed over data. The expected bytes are computed by hand,
    with head and embedding as above. Ids, gradients of norms and scalars add less than 8 KiB.
    """
    layers, matrices, others = 2, 64 * 16 * 2 * (4 + 2) + 3 * 64 * 128, (FSDP - 1) / FSDP
    of_layers = MICRO_BATCHES * others * layers * matrices * 2 * (2 + 1) + layers * matrices / FSDP * 2
    of_tables = MICRO_BATCHES * others * V * D * (2 + 4) + 2 * V * D / FSDP * 4
    looked_up = MICRO_BATCHES * 2 * others * FSDP * 96 * D / FSDP * 2
    needed = of_layers + of_tables + looked_up
    assert needed <= sent_bytes(update_of_eight) <= needed + 8192
    # Each matrix twice, and the head once, in every micro-batch.
    gathered = [(times, one) for times, one in update_of_eight if one.kind == "all-gather" and one.shape[0] == "b"]
    assert sum(times for times, _ in gathered) == MICRO_BATCHES * (layers * 7 * 2 + 1)


@needs_libtpu
def test_a_draw_sends_nothing_and_an_insert_counts():
    run = run_of("v5e:2x4")
    learner, update = run.learner, run.config.update

    def draw(ring, key, iteration):
        how = {"batch_size": update.batch_size, "group_size": run.config.rows_per_draw, "row_tokens": 64}
        return replay.draw(ring, key, iteration, run.config.replay, **how)[:2]

    args = run.programs()["update"].args
    with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
        drawn = jax.jit(draw).lower(learner.abstract_ring, args[3], args[2]).compile()
    assert sent_by(drawn) == []
    # Sums and counts, not rows: the tokens of its 16 rows of 64 alone are 4 KiB.
    assert sent_bytes(sent_by(compile_program(run, "insert"))) < 4096


@needs_libtpu
@pytest.mark.slow
def test_a_chip_of_twice_as_many_sends_as_much_but_for_what_is_summed_over_them(update_of_eight):
    sixteen = sent_by(compile_program(run_of("v5e:4x4"), "update"))
    of_group = lambda one: one.chips <= FSDP and one.kind != "all-reduce"
    within = lambda found: sent_bytes((times, one) for times, one in found if of_group(one))
    assert 0.99 <= within(sixteen) / within(update_of_eight) <= 1  # measured: 0.993
    # An all-reduce of n chips sends 2 (n-1)/n of its bytes: of 4 for 2 over ``data``, of 16 for 8 over all.
    summed = lambda found: sent_bytes((times, one) for times, one in found if one.kind == "all-reduce")
    assert summed(sixteen) <= 1.5 * summed(update_of_eight)
