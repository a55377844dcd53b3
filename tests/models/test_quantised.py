"""Weights of one byte: rounding, and the computation in sampler and learner."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import building
from support.building import CUBE, ONE, TINY, mesh_of, needs_qwix
from support.refusal import refused

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import freeze
from jaxrl_llm.learner import publish
from jaxrl_llm.models import quantised
from jaxrl_llm.models.architecture import PRESETS, Delta
from jaxrl_llm.models.row_logp import row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime.programs import compile_all

KINDS = ("int8", "fp8", "fp4")
EXPERTS = dataclasses.replace(TINY, num_experts=6, experts_per_token=2, norm_topk=True, ffn=16, shared_ffn=48)
HYBRIDS = (
    PRESETS["debug_hybrid"],
    dataclasses.replace(
        PRESETS["debug_hybrid"], delta=Delta(2, 4, 16, 16, 4, is_grouped=False), family="qwen3_5_moe_text"
    ),
)


def oracle(w_OI, kind):
    """Return values and scales of a matrix from float32 steps in numpy.

    In four bits each scale is repeated 16 times.
    """
    if kind == "fp4":
        values, scale = oracle(w_OI.reshape(-1, 16), "of 16")
        return values.reshape(w_OI.shape), np.broadcast_to(scale, (len(scale), 16)).reshape(w_OI.shape)
    most = np.float32({"int8": 127, "fp8": 448.0, "of 16": 6.0}[kind])
    scale = np.abs(w_OI).max(axis=1, keepdims=True) / most
    scale = np.where(scale == 0, np.float32(1), scale)
    if kind == "int8":
        return np.round(w_OI / scale), scale
    dtype = ml_dtypes.float8_e4m3fn if kind == "fp8" else ml_dtypes.float4_e2m1fn
    return (w_OI / scale).astype(dtype).astype(np.float32), scale


def rounded_blocks(params, kind):
    """Return the parameters with every matrix of the blocks replaced by its values times its scales."""
    return changed_blocks(params, lambda w_OI: np.multiply(*oracle(w_OI, kind)))


def params_of(model, kind):
    """Return parameters.

    In four bits no value is close to the middle of two, because with the tests' flags XLA rounds to float16 first.
    """

    def settled(w_OI):
        x = np.abs(w_OI / oracle(w_OI, kind)[1])[..., None]
        return np.where(
            np.any(np.abs(x / [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5] - 1) < 2e-3, axis=-1), 1.01 * w_OI, w_OI
        )

    params = building.host_params(model)
    return changed_blocks(params, settled) if kind == "fp4" else params


def changed_blocks(params, change):
    def one(name, x):
        if name.startswith("experts_"):  # [L,E,O,I]
            return change(x.reshape(-1, x.shape[-1])).reshape(x.shape).astype(np.float32)
        if name.startswith("delta_") and name[6:] not in ("in", "qkv", "z", "out"):
            return x
        if name.removeprefix("shared_") not in ("q", "k", "v", "o", "gate", "up", "down") and "delta" not in name:
            return x
        O = x.shape[1] * x.shape[2] if name in ("q", "k", "v", "delta_in", "delta_z") else x.shape[1]  # noqa: E741
        return change(x.reshape(-1, x.size // len(x) // O)).reshape(x.shape).astype(np.float32)

    return params | {"blocks": {name: one(name, x) for name, x in params["blocks"].items()}}


@needs_qwix
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_rounded_by_outputs(kind):
    w = np.random.default_rng(0).normal(size=(6, 48)).astype(np.float32)
    w *= 10.0 ** np.arange(-3, 3, dtype=np.float32)[:, None]
    w[3] = 0.0
    made = quantised.rounded("gate", jnp.asarray(w), kind)
    values, scale = oracle(w, kind)
    assert made.qvalue.dtype.itemsize == 1 and made.scale.dtype == jnp.float32
    assert (made.qvalue.shape[1], made.scale.shape[1]) == ((24, 3) if kind == "fp4" else (48, 1))
    found = np.asarray(made.qvalue)
    if kind == "fp4":  # the first of two in a byte's lower half; a sign, two bits of exponent, one of mantissa
        bits = np.stack([found & 15, found >> 4], axis=-1).reshape(6, 48)
        found = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[bits & 7] * np.where(bits & 8, -1, 1)
    np.testing.assert_array_equal(found.astype(np.float32), values)
    np.testing.assert_allclose(np.repeat(made.scale, 16, axis=1) if kind == "fp4" else made.scale, scale, rtol=1e-6)
    # Half a step of what holds 8 bits, a sixteenth of each number where 3 are its mantissa, a quarter where it is one.
    error, most = np.abs(values * scale - w), np.abs(w).max(axis=1, keepdims=True)
    allowed = {"int8": 0.51 * most / 127, "fp8": np.maximum(np.abs(w) / 15.9, most / 448 * 2**-9)}
    assert (error <= allowed.get(kind, np.maximum(np.abs(w) / 3.9, 0.251 * scale))).all()


def test_norms_and_biases_and_the_compute_dtype_are_left_alone():
    w = jnp.ones((2, 3))
    assert quantised.rounded("q_bias", w, "int8") is w and quantised.rounded("q", w, "compute") is w


@functools.cache
def hidden_of(kind, where, dtype="float32", arch=TINY):
    """Return hidden states of some tokens, in full precision or rounded.

    They come from the learner's forward or from published weights.
    """
    on = CUBE if where == "published on a cube" else ONE
    mesh = mesh_of(on)
    model = Model(arch, dtype, weights=kind if where == "learner" else "compute", published=kind)
    layout = jax.tree.map(lambda x: x.sharding, model.abstract_params(mesh))
    params = jax.device_put(params_of(model, kind), layout)
    if where != "learner":
        params = compile_all(publish.programs(model, mesh, mesh), mesh)["publish"](params)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, arch.vocab_size, size=(8, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), tokens.shape)
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(lambda params: model.forward(params, tokens, positions)[0])(params), np.float32)


@needs_qwix
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *((where, kind) for where in ("learner", "published") for kind in KINDS),
        ("published on a cube", "fp4"),  # two numbers in a byte, and a scale for 16 of them: the awkward one to split
        *(pytest.param("published on a cube", kind, marks=pytest.mark.slow) for kind in ("int8", "fp8")),
    ],
)
def test_hidden_states_are_those_of_the_rounded_weights(kind, where):
    model = Model(TINY)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 264, size=(8, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), tokens.shape)
    wanted = model.forward(rounded_blocks(params_of(model, kind), kind), tokens, positions)[0]
    np.testing.assert_allclose(hidden_of(kind, where), wanted, atol=2e-5)
    plain = model.forward(building.host_params(model), tokens, positions)[0]
    assert np.abs(wanted - plain).max() > 3e-3


@needs_qwix
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *(("int8", "learner"), ("fp8", "published"), ("fp4", "published on a cube")),
        pytest.param("int8", "published on a cube", marks=pytest.mark.slow),
    ],
)
def test_experts_are_rounded_by_outputs_and_their_router_is_not(kind, where):
    model = Model(EXPERTS)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 264, size=(8, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), tokens.shape)
    forward = jax.jit(lambda params: model.forward(params, tokens, positions)[0])
    wanted = forward(rounded_blocks(params_of(model, kind), kind))
    np.testing.assert_allclose(hidden_of(kind, where, arch=EXPERTS), wanted, atol=3e-5)
    assert np.abs(wanted - forward(building.host_params(model))).max() > 3e-3


@needs_qwix
@pytest.mark.parametrize(
    ("kind", "where", "arch"),
    [("fp8", "learner", HYBRIDS[0]), ("fp4", "published", HYBRIDS[1])],
)
def test_a_delta_rule_s_large_matrices_are_rounded_and_its_gates_are_not(kind, where, arch):
    model = Model(arch)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 260, size=(8, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), tokens.shape)
    forward = jax.jit(lambda params: model.forward(params, tokens, positions)[0])
    params = params_of(model, kind)
    wanted = forward(rounded_blocks(params, kind))
    np.testing.assert_allclose(hidden_of(kind, where, arch=arch), wanted, atol=4e-4)  # found: 2e-4, of states up to 8
    blocks = {name: x for name, x in params["blocks"].items() if "delta" not in name}
    others = params | {"blocks": params["blocks"] | rounded_blocks({"blocks": blocks}, kind)["blocks"]}
    assert np.abs(wanted - forward(others)).max() > 3e-3


@needs_qwix
def test_published_experts_take_a_byte_each():
    model, mesh = Model(EXPERTS, "bfloat16", published="int8"), mesh_of(CUBE)
    for layer in publish.abstract_params(model, mesh)["layers"]:
        assert all(layer[name].qvalue.dtype == jnp.int8 for name in quantised.OF_EXPERTS)
        assert layer["experts_down"].scale.shape == (6, 1, TINY.width) and layer["router"].dtype == jnp.float32


@needs_qwix
def test_in_bfloat16_learner_and_sampler_differ_by_no_more_than_without_rounding():
    """Values are exact in bfloat16, and scales are applied after the sum, on both sides."""

    def gap(kind):
        return np.abs(hidden_of(kind, "learner", "bfloat16") - hidden_of(kind, "published", "bfloat16")).mean()

    assert gap("int8") < 1.5 * gap("compute")


@needs_qwix
@pytest.mark.parametrize(
    ("kind", "arch"), [("int8", TINY), pytest.param("fp8", TINY, marks=pytest.mark.slow), ("int8", EXPERTS)]
)
def test_the_gradient_is_that_at_the_rounded_weights(kind, arch):
    model = Model(arch)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 264, size=(2, 8)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), tokens.shape)

    def loss(model, params):
        return jnp.sum(jnp.sin(model.forward(params, tokens, positions, remat=True)[0]))

    params = building.host_params(model)
    through = jax.jit(jax.grad(lambda p: loss(dataclasses.replace(model, weights=kind), p)))(params)
    plain = jax.jit(jax.grad(lambda p: loss(model, p)))(rounded_blocks(params, kind))
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * largest), through, plain)


@needs_qwix
def test_published_weights_take_a_byte_each():
    model, mesh = Model(TINY, "bfloat16", published="int8"), mesh_of(CUBE)
    for layer in publish.abstract_params(model, mesh)["layers"]:
        assert all(layer[name].qvalue.dtype == jnp.int8 for name in quantised.MATRICES if "delta" not in name)
        assert layer["down"].scale.shape == (1, TINY.width) and layer["attention_norm"].dtype == jnp.float32
        assert layer["q"].scale.sharding.spec == layer["q"].qvalue.sharding.spec == jax.P(None, "tensor")


@needs_qwix
def test_a_sampler_of_rounded_weights_draws_by_the_log_probs_of_a_learner_that_rounds():
    """Prefill and decode steps. The slow suite tests the same property in whole runs."""
    model, mesh = Model(TINY, weights="int8", published="int8"), mesh_of(ONE)
    sampler = dataclasses.replace(building.make_sampler(num_slots=5, chunk_steps=3), model=model)
    params = building.learner_params(model, mesh)
    published = compile_all(publish.programs(model, mesh, mesh), mesh)["publish"](params)
    rollout, _ = building.Sampling(sampler, params=published)(building.make_prompts(range(8)))
    rows, how = (rollout.tokens, rollout.prompt_length, rollout.length), dict(sampling=sampler.sampling)
    how |= dict(completion_width=building.COMPLETION_TOKENS, chunk_positions=3)
    gap = lambda model: np.abs(jax.jit(functools.partial(row_logp, model, **how))(params, *rows).logp - drawn)
    drawn = rollout.behaviour_logp
    assert gap(model).max() < 1e-5 < 1e-3 < gap(Model(TINY)).max()


SETTINGS = {
    "num_iterations": 2,
    "rollout": {"prompts_per_iteration": 8, "group_size": 4},
    "update": {"batch_size": 32, "micro_batch_size": 16, "max_sampler_learner_gap_nats": 1.0},
    "sampling": {"max_completion_tokens": 8},
    "checkpoint": {"export": False},
    "metrics": {"tensorboard": False},
}


@needs_qwix
@pytest.mark.parametrize(
    ("weights", "learner", "low", "high", "model"),
    [
        pytest.param("int8", "full", 1e-4, 0.1, "debug", marks=pytest.mark.slow),
        pytest.param("int8", "rollout", 0.0, 1e-5, "debug", marks=pytest.mark.slow),
        pytest.param("fp8", "full", 1e-3, 0.5, "debug", marks=pytest.mark.slow),
        pytest.param("fp8", "rollout", 0.0, 1e-5, "debug", marks=pytest.mark.slow),
        pytest.param("fp4", "full", 1e-3, 1.0, "debug", marks=pytest.mark.slow),
        pytest.param("fp4", "rollout", 0.0, 1e-5, "debug", marks=pytest.mark.slow),
        pytest.param("int8", "rollout", 0.0, 1e-5, "debug_hybrid", marks=pytest.mark.slow),
        pytest.param("int8", "full", 1e-4, 0.1, "debug_experts", marks=pytest.mark.slow),
        pytest.param("int8", "rollout", 0.0, 1e-5, "debug_experts", marks=pytest.mark.slow),
    ],
)
def test_what_the_sampler_notes_is_what_the_learner_finds_where_both_round(
    weights, learner, low, high, model, tmp_path
):
    settings = SETTINGS | {"rollout": SETTINGS["rollout"] | {"weights": weights}}
    settings |= {"model": {"path": f"random:{model}"}}
    settings |= {"update": SETTINGS["update"] | {"weights": learner}}
    assert train_module.train(freeze(settings), tmp_path) == 0
    rows = read_metrics(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert low <= row["update/sampler_learner_gap_max_nats"] <= high and row["update/grad_norm"] > 0


@needs_qwix
def test_four_bits_want_inputs_in_sixteens_and_whole_bytes_on_every_device():
    config = freeze({"rollout": {"weights": "fp4"}, "mesh": {"tensor": 16}})
    quantised.kinds(config, TINY, "model", mesh_of(ONE))
    with refused("rollout.weights", "fp4", "16", "40 inputs"):
        quantised.kinds(config, dataclasses.replace(TINY, ffn=40), "model", mesh_of(ONE))
    sixteen, arch = jax.sharding.AbstractMesh((16,), ("tensor",)), dataclasses.replace(TINY, num_heads=32)
    quantised.kinds(config, arch, "model", sixteen)
    quantised.kinds(config, dataclasses.replace(arch, ffn=1040), "model", mesh_of(CUBE))
    for setting in ("tensor", "sampler_tensor"):
        config = freeze({"rollout": {"weights": "fp4"}, "mesh": {setting: 16}})
        with refused(f"mesh.{setting}", 16, "3 of 48 inputs", "'fp4'"):
            quantised.kinds(config, dataclasses.replace(arch, ffn=48), "model", sixteen)
    eight = freeze({"rollout": {"weights": "int8"}, "mesh": {"tensor": 16}})
    quantised.kinds(eight, dataclasses.replace(arch, ffn=48), "model", sixteen)


def test_without_qwix_a_run_says_what_to_install(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "qwix" else find(name))
    config = freeze(SETTINGS | {"rollout": SETTINGS["rollout"] | {"weights": "fp8"}})
    with refused("rollout.weights", "fp8", "qwix", "pip install"):
        train_module.train(config, tmp_path)


def test_a_learner_cannot_round_as_a_sampler_that_does_not():
    with refused("update.weights", "rollout", "rollout.weights='compute'"):
        freeze(SETTINGS | {"update": SETTINGS["update"] | {"weights": "rollout"}})


@needs_qwix
def test_a_reference_rounds_as_the_policy_that_it_was():
    settings = SETTINGS | {"rollout": SETTINGS["rollout"] | {"weights": "int8"}}
    settings |= {"update": SETTINGS["update"] | {"weights": "rollout"}}
    settings |= {"algorithm": {"divergence": {"name": "reference", "coefficient": 0.1}}}
    of = lambda path: freeze(settings | {"model": {"reference_path": path}})
    assert {quantised.kinds(of(""), TINY, who, mesh_of(ONE)) for who in ("model", "reference")} == {("int8", "int8")}
    assert quantised.kinds(of("random:debug_wide"), TINY, "model", mesh_of(ONE)) == ("int8", "int8")
    assert quantised.kinds(of("random:debug_wide"), TINY, "reference", mesh_of(ONE))[0] == "compute"
