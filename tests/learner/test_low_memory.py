"""Weights, gradients and moments in bfloat16, and Adafactor: their accuracy and the memory that they save."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.refusal import refused
from support.tiers import mostly_in

from jaxrl_llm.config import Config, OptimizerConfig, freeze
from jaxrl_llm.learner import faults, low_memory, optim, publish
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.rng import STREAMS, stream
from jaxrl_llm.types import TrainState
from tests.reference import optimizers
from tests.support import building
from tests.support.building import CUBE, ONE, TINY, mesh_of

BELOW, ABOVE = 1.0, 1.0 + 2**-7  # neighbours in bfloat16, which has 8 bits of mantissa


@pytest.mark.parametrize("share", [0.0, 0.125, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_value_becomes_one_of_its_neighbours_and_is_their_mean(share, sign):
    n = 1 << 14
    value = sign * (BELOW + share * (ABOVE - BELOW))
    rounded = low_memory.stochastic_round(jnp.full(n, value, jnp.float32), jax.random.key(3))
    assert rounded.dtype == jnp.bfloat16
    rounded = sign * np.asarray(rounded, np.float64)
    assert set(np.unique(rounded)) <= {BELOW, ABOVE}
    # The share of n coins of that chance, to five standard deviations.
    assert np.mean(rounded == ABOVE) == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / n))


def test_what_is_no_number_stays_so():
    given = jnp.array([np.inf, -np.inf, np.nan, 0.0, -0.0])
    rounded = np.asarray(low_memory.stochastic_round(given, jax.random.key(0)), np.float32)
    np.testing.assert_array_equal(rounded, np.asarray(given))
    assert np.signbit(rounded[4])


def test_steps_too_small_for_bfloat16_add_up():
    # A step of a hundredth of what lies between neighbours; rounded to the nearest, nothing would move.
    start, n, steps = jnp.full((4096,), 0.02, jnp.bfloat16), 4096, 300
    spacing = 2.0**-13  # of bfloat16 between 1/64 and 1/32
    move = jnp.full((n,), spacing / 100, jnp.float32)
    assert (optax.apply_updates(start, move) == start).all()
    step = lambda t, weights: low_memory.apply_updates(weights, move, t)
    moved = jax.lax.fori_loop(0, steps, step, start)
    moved = np.asarray(moved, np.float64) - np.asarray(start, np.float64)
    # A walk of 300 coins of chance 1/100 each: mean 3 spacings, standard deviation sqrt(300 * .01 * .99).
    assert moved.mean() / spacing == pytest.approx(3.0, abs=5 * np.sqrt(2.97 / n))
    assert moved.std() / spacing == pytest.approx(np.sqrt(2.97), rel=0.1)


@pytest.mark.parametrize(("step", "name"), list(enumerate(STREAMS)))
def test_the_chances_of_a_step_are_those_of_no_stream_of_a_run(step, name):
    params, move = jnp.ones(4096, jnp.bfloat16), jnp.full(4096, 2.0**-8, jnp.float32)
    moved = low_memory.apply_updates(params, move, jnp.int32(step))
    for seed in (0, 1):
        key = jax.random.fold_in(stream(seed, name), 0)
        assert (moved != low_memory.stochastic_round(1 + move, key)).any()


def test_float32_weights_move_as_optax_moves_them():
    params, updates = {"a": jnp.array([0.1, 0.2])}, {"a": jnp.array([1e-9, 1e-3])}
    moved = low_memory.apply_updates(params, updates, jnp.int32(4))
    np.testing.assert_array_equal(moved["a"], params["a"] + updates["a"])


def test_moments_in_bfloat16_are_those_of_float32_on_average():
    # 2,048 weights of one gradient each step, falling to a tenth: the second moment has to follow it down.
    rng, n, steps = np.random.default_rng(0), 2048, 400
    gradient = rng.normal(1.0, 0.3, steps) * np.where(np.arange(steps) < 100, 1.0, 0.1)
    config = OptimizerConfig(learning_rate=0.01, max_grad_norm=0.0, moment_dtype="bfloat16")
    optimizer = optim.make(config, steps)

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(jnp.full(n, g), state, params)
        return (params + updates, state), None

    start = jnp.zeros(n), optimizer.init(jnp.zeros(n))
    (moved, state), _ = jax.lax.scan(step, start, jnp.asarray(gradient, jnp.float32))
    total, v = optimizers.adam(gradient[:, None], rate=0.01)
    adam = optax.tree_utils.tree_get(state, "ScaleByAdamState")
    assert adam.mu.dtype == adam.nu.dtype == jnp.bfloat16
    # Measured: 0.03 % and 0.01 % off. Rounded to the nearest, the second moment ends 31 % too high.
    assert np.asarray(adam.nu, np.float64).mean() == pytest.approx(v[0], rel=2e-3)
    assert np.asarray(moved).mean() == pytest.approx(total[0], rel=2e-3)


@pytest.mark.parametrize("kind", [low_memory.FIRST, low_memory.SECOND])
def test_a_byte_is_one_of_two_neighbours_whose_mean_is_the_value(kind):
    most, power = kind
    n, scale = 1 << 14, 3.0
    # Of codes 0, 12 and 254 a part more, and the largest of the row, which every row has.
    given = np.array([0.3, 12.7, most - 0.4])
    values = scale * ((given // 1 / most) ** power * 0.7 + ((given // 1 + 1) / most) ** power * 0.3)
    if kind == low_memory.FIRST:
        values *= -1
    row = np.append(values, scale).astype(np.float32)
    codes, largest = low_memory.to_bytes(jnp.tile(row, (n, 1)), jax.random.key(2), kind)
    assert codes.dtype == ("int8" if kind == low_memory.FIRST else "uint8")
    np.testing.assert_array_equal(largest, np.full((n, 1), np.float32(scale)))
    codes = np.abs(np.asarray(codes, np.int32))
    np.testing.assert_array_equal(codes[:, 3], most)
    for i, below in enumerate(given // 1):
        # A second moment is never rounded to 0.
        assert set(codes[:, i]) == ({1} if below == 0 and kind == low_memory.SECOND else {below, below + 1})
    found = np.asarray(
        low_memory.from_bytes(*low_memory.to_bytes(jnp.tile(row, (n, 1)), jax.random.key(2), kind), kind)
    )
    for i in range(0 if kind == low_memory.FIRST else 1, 3):
        apart = scale * (((given[i] // 1 + 1) / most) ** power - (given[i] // 1 / most) ** power)
        # The share of n coins of chance 0.3, to five standard deviations.
        assert abs(found[:, i].astype(np.float64).mean() - row[i]) < 5 * apart * np.sqrt(0.21 / n)


def test_moments_of_a_byte_are_those_of_float32_on_average():
    # As above, of rows with a weight whose gradient is a thirtieth of the other's: Adam moves both alike.
    rng, n, steps = np.random.default_rng(0), 2048, 400
    gradient = rng.normal(1.0, 0.3, steps) * np.where(np.arange(steps) < 100, 1.0, 0.1)
    sizes = np.array([1.0, 1 / 30])
    config = OptimizerConfig(learning_rate=0.01, max_grad_norm=0.0, moment_dtype="int8")
    optimizer = optim.make(config, steps)

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(jnp.tile(g * sizes.astype(np.float32), (n, 1)), state, params)
        return (params + updates, state), None

    start = jnp.zeros((n, 2)), optimizer.init(jnp.zeros((n, 2)))
    (moved, state), _ = jax.jit(lambda start, g: jax.lax.scan(step, start, g))(
        start, jnp.asarray(gradient, jnp.float32)
    )
    total, v = optimizers.adam(gradient[:, None] * sizes, rate=0.01)
    kept = optax.tree_utils.tree_get(state, "ByteMoments")
    nu = np.asarray(low_memory.from_bytes(kept.adam.nu, kept.nu_scale, low_memory.SECOND), np.float64)
    # Measured: 0.2 % off at most; the smaller ones' way differs by 1.8 % (standard deviation) from one to the other.
    np.testing.assert_allclose(nu.mean(axis=0), v, rtol=1e-2)
    np.testing.assert_allclose(np.asarray(moved).mean(axis=0), total, rtol=1e-2)
    assert (np.asarray(moved).std(axis=0) < 0.05 * np.abs(total)).all()


def test_the_first_moments_of_a_byte_are_not_rounded():
    """Otherwise XLA would compute the random bits of all moments while compiling, for minutes even in a small model."""
    adam = low_memory.byte_moments(optax.scale_by_adam())
    params = {"w": jnp.ones((64, 64))}
    assert "random_bits" in str(jax.make_jaxpr(adam.update)(params, adam.init(params)))
    assert "random_bits" not in str(jax.make_jaxpr(adam.init)(params))


def test_a_row_s_one_second_moment_is_the_mean_of_its_squares():
    gradients = np.random.default_rng(4).normal(size=(5, 3, 7)).astype(np.float32)
    gradients[:, 1] *= 100
    optimizer = optim.make(OptimizerConfig(name="subset_norm", learning_rate=0.1, max_grad_norm=0.0), 5)
    params = jnp.zeros((3, 7))
    state = optimizer.init(params)
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 3 * 7 + 3
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = params + updates
    np.testing.assert_allclose(params, optimizers.adam(gradients, rate=0.1, rows=True)[0], rtol=1e-4, atol=1e-6)


def each_tensor(gradients, shape):
    """Return the stacked gradients [T, ...] of tensors as [T, *shape] of each tensor."""
    return np.reshape(gradients, (len(gradients), -1, *shape)).swapaxes(0, 1)


def after(config, shapes, gradients):
    """Return parameters and the optimizer's state after updates by gradients [T, ...], by path.

    Parameters start at 0.
    """
    tree = lambda of: {
        **{name: x for name, x in of.items() if "." not in name},
        "blocks": {name.removeprefix("blocks."): x for name, x in of.items() if "." in name},
    }
    params = tree({name: jnp.zeros(shape) for name, shape in shapes.items()})
    optimizer = optim.make(config, len(next(iter(gradients.values()))))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for t in range(len(next(iter(gradients.values())))):
        updates, state = update(tree({name: jnp.asarray(x[t]) for name, x in gradients.items()}), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return {**params, **{f"blocks.{name}": x for name, x in params["blocks"].items()}}, state


def draw_gradients(shapes, steps=4):
    """Draw gradients whose sizes differ by factors of e between positions in every dimension, and between steps."""
    rng, found = np.random.default_rng(2), {}
    for name, shape in shapes.items():
        x = rng.normal(size=(steps, *shape))
        for dim, size in enumerate(x.shape):
            x *= np.exp(rng.normal(size=[size if i == dim else 1 for i in range(x.ndim)]))
        found[name] = x.astype(np.float32)
    return found


# Of each parameter its shape, and that of one layer's, or expert's, as files have it: outputs by inputs, or a vector.
ROWS_OF = {
    "blocks.q": ((2, 3, 2, 4), (6, 4)),
    "blocks.o": ((2, 4, 3, 2), (4, 6)),
    "blocks.experts_up": ((2, 2, 3, 4), (3, 4)),
    "blocks.router": ((2, 2, 4), (2, 4)),
    "head": ((5, 4), (5, 4)),
}
NO_ROWS_OF = {
    "embedding": (5, 4),
    "final_norm": (4,),
    "blocks.attention_norm": (2, 4),
    "blocks.q_bias": (2, 3, 2),
    "blocks.experts_up_bias": (2, 2, 3),
    "blocks.delta_conv": (2, 6, 1, 4),
}


def test_subsets_are_of_the_rows_of_matrices_alone():
    shapes = {name: shape for name, (shape, *_) in ROWS_OF.items()} | NO_ROWS_OF
    gradients = draw_gradients(shapes)
    config = OptimizerConfig(name="subset_norm", learning_rate=0.1, max_grad_norm=0.0)
    found, state = after(config, shapes, gradients)
    for name in NO_ROWS_OF:
        expected = optimizers.adam(gradients[name], rate=0.1)[0]
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
    rows = 0
    for name, (shape, one) in ROWS_OF.items():
        parts = each_tensor(gradients[name], one)
        expected = np.reshape([optimizers.adam(x, rate=0.1, rows=True)[0] for x in parts], shape)
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
        rows += len(parts) * one[0]
    second = optax.tree_utils.tree_get(state, "nu")
    assert sum(x.size for x in jax.tree.leaves(second)) == rows + sum(map(np.prod, NO_ROWS_OF.values()))


def test_small_tensors_keep_moments_that_are_not_rounded():
    # 50 norms of 100, and two matrices of 4,096 weights, which are rounded.
    shapes = {"blocks.attention_norm": (50, 100), "blocks.gate": (2, 64, 64), "blocks.k": (2, 1, 63, 65)}
    gradients = draw_gradients(shapes)
    config = OptimizerConfig(learning_rate=0.1, max_grad_norm=0.0, moment_dtype="int8")
    found, state = after(config, shapes, gradients)
    for name in ("blocks.attention_norm", "blocks.k"):
        expected = optimizers.adam(gradients[name], rate=0.1)[0]
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
    kept = optax.tree_utils.tree_get(state, "ByteMoments").adam
    dtypes = {name: (x.dtype, kept.nu["blocks"][name].dtype) for name, x in kept.mu["blocks"].items()}
    assert dtypes == {"attention_norm": ("float32",) * 2, "gate": ("int8", "uint8"), "k": ("float32",) * 2}


def test_bytes_are_the_same_on_every_mesh_and_are_offloaded():
    split = jax.NamedSharding(mesh_of(CUBE), jax.P("fsdp", "tensor"))
    x = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    one, cube = (
        jax.jit(lambda x: low_memory.to_bytes(x, jax.random.key(0), low_memory.FIRST))(given)
        for given in (x, jax.device_put(x, split))
    )
    jax.tree.map(np.testing.assert_array_equal, one, cube)

    optimizer = low_memory.offloaded(optim.make(OptimizerConfig(moment_dtype="int8"), 10))
    kept = optim.abstract_state(optimizer, Model(TINY).abstract_params(mesh_of(CUBE)), mesh_of(CUBE), offload=True)
    kept = optax.tree_utils.tree_get(kept, "ByteMoments")
    assert {x.sharding.memory_kind for x in jax.tree.leaves(kept) if x.ndim} == {"pinned_host"}
    assert not kept.adam.nu["blocks"]["q"].sharding.is_fully_replicated


def test_adafactor_is_the_papers():
    rng = np.random.default_rng(1)
    spread = np.exp(rng.normal(size=(1, 130, 1))) * np.exp(rng.normal(size=(1, 1, 144)))
    gradients = (rng.normal(size=(4, 130, 144)) * spread).astype(np.float32)
    gradients[2] *= 30  # an update that is clipped
    optimizer = optim.make(OptimizerConfig(name="adafactor", learning_rate=0.1, max_grad_norm=0.0), 4)
    params = jnp.zeros((130, 144))
    state = optimizer.init(params)
    assert sum(x.size for x in jax.tree.leaves(state)) < 130 + 144 + 8
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = params + updates
    np.testing.assert_allclose(params, optimizers.adafactor(gradients, rate=0.1), rtol=2e-4, atol=1e-5)


# Two of their largest dimensions are of one matrix in none but the first two.
FACTORED = {
    "embedding": ((130, 72), (130, 72)),
    "blocks.q": ((2, 2, 40, 70), (80, 70)),
    "blocks.o": ((2, 66, 4, 20), (66, 80)),
    "blocks.experts_up": ((2, 80, 66, 64), (66, 64)),
    "blocks.attention_norm": ((64, 96), (96,)),
    "blocks.k_bias": ((64, 2, 66), (132,)),
    "blocks.gate_lora_a": ((80, 16, 512), (16, 512)),
}


def test_adafactor_factors_each_matrix_by_itself_and_no_vector():
    shapes = {name: shape for name, (shape, *_) in FACTORED.items()}
    gradients = draw_gradients(shapes)
    found, state = after(OptimizerConfig(name="adafactor", learning_rate=0.1, max_grad_norm=0.0), shapes, gradients)
    for name, (shape, one) in FACTORED.items():
        parts = each_tensor(gradients[name], one)
        expected = np.reshape([optimizers.adafactor(x, rate=0.1) for x in parts], shape)
        np.testing.assert_allclose(found[name], expected, rtol=2e-4, atol=1e-5, err_msg=name)
    rows, columns = (optax.tree_utils.tree_get(state, name)["blocks"]["experts_up"] for name in ("v_row", "v_col"))
    assert (rows.shape, columns.shape) == ((2, 80, 66), (2, 80, 64))


WIDE = dataclasses.replace(TINY, width=256, ffn=512, num_layers=4, head_size=64)


@pytest.mark.parametrize(
    ("param_dtype", "settings", "most"),
    mostly_in(
        "slow",
        [
            ("float32", {}, 18.002),  # weights 4, gradient 4, two moments 8, the sampler's copy 2, and 4 of norms
            ("bfloat16", {"moment_dtype": "bfloat16"}, 10.0),
            ("bfloat16", {"moment_dtype": "int8"}, 8.1),  # and a row's largest value
            ("bfloat16", {"name": "subset_norm", "moment_dtype": "bfloat16"}, 8.1),
            ("bfloat16", {"name": "subset_norm", "moment_dtype": "int8"}, 7.1),
            ("bfloat16", {"name": "adafactor"}, 6.05),  # and a number by row and by column
        ],
        plain=2,
    ),
)
def test_bytes_a_parameter(param_dtype, settings, most):
    model = Model(WIDE, "bfloat16", remat="full", param_dtype=param_dtype)
    optimizer = optim.make(OptimizerConfig(**settings), 10)
    params = model.abstract_params(mesh_of(ONE))
    opt_state = optim.abstract_state(optimizer, params, mesh_of(ONE))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / model.arch.num_params
    held = size(params) + size(opt_state) + size(publish.abstract_params(model, mesh_of(ONE)))
    update = dataclasses.replace(building.make_update({"micro_batch_size": 2}), model=model, optimizer=optimizer)
    state = TrainState({"policy": params}, {"policy": opt_state}, jax.ShapeDtypeStruct((), "int32"))
    batch = building.on_mesh(update, building.random_experience())
    of = lambda state, batch: update.gradient(state.params, batch, update._moment(state, batch, 0, state, None))
    gradient, _ = jax.eval_shape(of, state, batch)
    assert most - 0.1 < held + size(gradient) <= most + 1e-3
    # And the update leaves the state as it took it.
    after, _ = jax.eval_shape(update.apply_batch, state, batch, 0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_rounding_is_the_same_on_every_mesh():
    model = Model(TINY, param_dtype="bfloat16")

    def moved(layout):
        mesh = mesh_of(layout)
        layouts = jax.tree.map(lambda x: x.sharding, model.abstract_params(mesh))
        weights = building.host_params(model)
        params = jax.device_put(jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights), layouts)
        updates = jax.device_put(jax.tree.map(lambda x: np.float32(1e-3) * x, weights), layouts)
        return jax.jit(low_memory.apply_updates)(params, updates, jnp.int32(5))

    jax.tree.map(np.testing.assert_array_equal, moved(ONE), moved(CUBE))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer": {"name": "adafactor", "b1": 0.8}}, ("optimizer.b1", 0.8)),
        ({"optimizer": {"name": "adafactor", "reset_every_steps": 2}}, ("optimizer.reset_every_steps", 2)),
        ({"optimizer": {"name": "adam"}}, ("optimizer.name", "adam")),
        ({"optimizer": {"name": "adafactor", "moment_dtype": "int8"}}, ("optimizer.moment_dtype", "int8")),
        ({"model": {"param_dtype": "float16"}}, ("model.param_dtype", "float16")),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, named):
    with refused(*named):
        freeze(settings)


BFLOAT16 = {"model": {"compute_dtype": "bfloat16"}}
BOTH_ROUND = {"rollout": {"weights": "int8"}, "update": {"weights": "rollout"}}


@pytest.mark.parametrize(
    ("settings", "gap_sum", "high", "gap_max", "message"),
    [
        ({}, 1.0, 0, 0.04, None),
        ({}, 1.0, 0, 0.06, r"differ from the sampler's by up to 0\.0600 nats, more than update\.max_sampler"),
        # SmolLM2's of 577 tokens, measured on a CPU: mean 0.026, a fiftieth above 0.1, one of 0.19.
        (BFLOAT16, 100 * 0.026, 0, 0.19, None),
        (BFLOAT16, 100 * 0.026, 1, 0.6, None),
        (
            BFLOAT16,
            100 * 0.06,
            0,
            0.19,
            r"by 0\.0600 nats on average, .*With model.compute_dtype='bfloat16'",
        ),
        (BFLOAT16, 100 * 0.04, 2, 0.6, r"more than 0\.5 nats for 2\.0% of the tokens.*model\.compute_dtype="),
        (BFLOAT16, float("nan"), 0, float("nan"), r"differ from the sampler's by nan nats"),
        ({"rollout": {"weights": "int8"}}, 100 * 0.04, 0, 0.3, None),
        ({"rollout": {"weights": "int8"}}, 100 * 0.06, 0, 0.3, r"rollout\.weights='int8'.*update\.max"),
        (BOTH_ROUND, 1.0, 0, 0.06, r"by up to 0\.0600 nats, more than update\.max_sampler"),
    ],
)
def test_a_gap_is_of_the_largest_or_where_something_is_rounded_of_the_mean(settings, gap_sum, high, gap_max, message):
    config = freeze(settings)
    sums = {"own_token_count": 100.0, "gap_sum": gap_sum, "gap_max": gap_max, "gap_high_count": high}
    said = faults.gap_message(config, sums)
    assert re.search(message, said) if message else said == ""


def test_the_first_batch_with_tokens_of_its_own_is_compared_whenever_it_comes(capfd):
    """The first comparison may come late, if rollouts are drawn late or left out at first.

    Later gaps only warn, also after a resume.
    """
    config = Config()
    found, resumed = (faults.Faults(config, sharding.make_mesh(config.mesh)) for _ in range(2))
    good = {"nonfinite_run": 0.0, "own_token_count": 1.0, "gap_sum": 0.0, "gap_max": 0.0, "gap_high_count": 0}
    bad = good | {"gap_max": 1.0}
    found.observe(bad | {"own_token_count": 0.0}, 1, None)
    with pytest.raises(faults.SamplerLearnerGapError):
        found.observe(bad, 2, None)
    found.observe(good, 2, None)
    assert capfd.readouterr().err == ""
    found.observe(bad, 3, None)
    assert re.match(r"warning: iteration 3: .* by up to 1\.0000 nats, more than update\.max", capfd.readouterr().err)
    resumed.restore(json.loads(json.dumps(found.state())))
    resumed.observe(bad, 4, None)  # as the run that goes on undisturbed
    assert re.match(r"warning: iteration 4: .* by up to 1\.0000 nats, more than update\.max", capfd.readouterr().err)
    stopped = faults.Faults(config, sharding.make_mesh(config.mesh))
    stopped.restore(stopped.state())  # before the first one
    with pytest.raises(faults.SamplerLearnerGapError):
        stopped.observe(bad, 1, None)
    # So it is with rollouts that go on under new weights: what is compared of them are tokens of one version.
    config = freeze({"rollout": {"lookahead_prompts": 8}})
    in_flight, resumed = (faults.Faults(config, sharding.make_mesh(config.mesh)) for _ in range(2))
    in_flight.restore(in_flight.state())  # inside the first generation
    with pytest.raises(faults.SamplerLearnerGapError):
        in_flight.observe(bad, 1, None)
    in_flight.observe(good, 1, None)
    resumed.restore(json.loads(json.dumps(in_flight.state())))
    resumed.observe(bad, 2, None)
    assert re.match(r"warning: iteration 2: .* by up to 1\.0000 nats, more than update\.max", capfd.readouterr().err)


@pytest.mark.slow
def test_pretrained_weights_train_in_bfloat16_with_the_settings_that_are_there(tmp_path):
    # Weights, gradient and arithmetic in bfloat16, 6 bytes a parameter; on one device.
    changes = {
        "num_iterations": 2,
        "model.compute_dtype": "bfloat16",
        "model.param_dtype": "bfloat16",
        "optimizer.name": "adafactor",
        "rollout.prompts_per_iteration": 8,
        "update.batch_size": 32,
        "replay.capacity": 0,
        "eval.num_prompts": 0,
    }
    config = "--config=configs/grpo_smollm2_135m_chain_sum.py"
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    command = [sys.executable, "-m", "jaxrl_llm.train", config, f"--workdir={tmp_path}", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, check=True, timeout=900, env=environment)
    first, last = read_metrics(tmp_path)
    assert 0.005 < first["update/sampler_learner_gap_mean_nats"] < 0.05
    assert last["update/skipped_steps"] == 0 and 0 < last["update/grad_norm"] < 100
