"""Adapter modules learn one after another; the next module begins when rewards stall."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import building
from support.refusal import refused

from jaxrl_llm.config import LoraConfig, OptimizerConfig, freeze
from jaxrl_llm.learner import adapter_modules, low_memory, optim
from jaxrl_llm.learner.update import Update
from jaxrl_llm.types import Sums, TrainState
from tests.reference import optimizers

# Of rank 6; the axis that is the rank, in each.
SHAPES = {"q_lora_a": (2, 6, 4), "q_lora_b": (2, 3, 2, 6), "o_lora_a": (2, 6, 3, 2), "experts_up_lora_a": (2, 5, 6, 4)}
RANK = {"q_lora_a": 1, "q_lora_b": 3, "o_lora_a": 1, "experts_up_lora_a": 2}
# Of a module of rank 2, one layer's or expert's matrix as its paper has it, outputs by inputs.
MATRIX = {"q_lora_a": (2, 4), "q_lora_b": (6, 2), "o_lora_a": (2, 6), "experts_up_lora_a": (2, 4)}
# Of three steps the slope is the third less the first: 0 after the fifth, -0.1 after the eighth; then the last goes on.
REWARDS = [0.1, 0.2, 0.3, 0.4, 0.3, 0.5, 0.4, 0.4, 0.9, 0.8, 0.7, 0.6]


def alone(name, gradients, shape):
    """Return the sum of updates by gradients [T, ...] of matrices of ``shape``, each with its own optimizer."""
    each = np.reshape(gradients, (len(gradients), -1, *shape)).swapaxes(0, 1)
    of = {"adamw": {}, "subset_norm": {"rows": True}}
    if name == "adafactor":
        found = [optimizers.adafactor(one, rate=0.01) for one in each]
    else:
        found = [optimizers.adam(one, rate=0.01, **of[name])[0] for one in each]
    return np.reshape(found, gradients.shape[1:])


@pytest.mark.parametrize("name_of_optimizer", ["adamw", "subset_norm", "adafactor"])
def test_each_module_learns_as_alone_until_rewards_stall(name_of_optimizer):
    learns = optimizers.modules(REWARDS, number=3, steps=3)
    assert learns == [0] * 5 + [1] * 3 + [2] * 4
    draw = np.random.default_rng(0)
    gradients = {name: draw.normal(size=(len(REWARDS), *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    config = OptimizerConfig(name=name_of_optimizer, learning_rate=0.01, max_grad_norm=0.0)
    lora, of_all = LoraConfig(rank=6, modules=3, module_steps=3), optim.make(config, len(REWARDS))
    optimizer = low_memory.offloaded(adapter_modules.one_at_a_time(of_all, lora))
    start = {"blocks": {name: jnp.zeros(shape) for name, shape in SHAPES.items()} | {"q_lora_m": jnp.zeros((2, 3, 1))}}
    params, state, numbers = start, optimizer.init(start), []
    update = jax.jit(optimizer.update)
    for t, reward in enumerate(REWARDS):
        gradient = {"blocks": {name: x[t] for name, x in gradients.items()} | {"q_lora_m": jnp.ones((2, 3, 1))}}
        numbers.append(float(adapter_modules.sums({"policy": state})["adapter_module_sum"]) - 1)
        updates, state = update(gradient, state, params, reward=jnp.float32(reward))
        params = jax.tree.map(jnp.add, params, updates)
    assert numbers == learns
    for name, x in gradients.items():
        of_module = [np.take(x, [2 * k, 2 * k + 1], axis=1 + RANK[name])[np.array(learns) == k] for k in range(3)]
        expected = [alone(name_of_optimizer, gradient, MATRIX[name]) for gradient in of_module]
        found = params["blocks"][name]
        np.testing.assert_allclose(found, np.concatenate(expected, axis=RANK[name]), rtol=1e-4, atol=1e-7, err_msg=name)
    # Lengths of rows (DoRA) learn in every step, at 1 % each.
    np.testing.assert_allclose(params["blocks"]["q_lora_m"], -0.01 * len(REWARDS), rtol=1e-4)


def test_a_factored_module_s_steps_are_as_long_as_alone():
    """Rank 128 in two modules: each is a matrix of 64 rows, whose update has a root mean square of at most 1."""
    rewards = [0.3, 0.2, 0.1, 0.1, 0.1]
    learns = optimizers.modules(rewards, number=2, steps=3)
    assert learns == [0, 0, 0, 1, 1]
    draw = np.random.default_rng(1)
    # The second module's are a thousand times smaller, and the first's unlike in size from step to step.
    sizes = np.array([1.0, 3.0, 30.0, 1e-3, 3e-3])[:, None, None, None]
    gradients = (draw.normal(size=(5, 2, 128, 80)) * np.exp(draw.normal(size=(1, 2, 128, 1))) * sizes).astype(
        np.float32
    )
    lora = LoraConfig(rank=128, modules=2, module_steps=3)
    of_all = optim.make(OptimizerConfig(name="adafactor", learning_rate=0.01, max_grad_norm=0.0), 5)
    optimizer = adapter_modules.one_at_a_time(of_all, lora)
    params = {"blocks": {"q_lora_a": jnp.zeros((2, 128, 80))}}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient, reward in zip(gradients, rewards, strict=True):
        updates, state = update({"blocks": {"q_lora_a": gradient}}, state, params, reward=jnp.float32(reward))
        params = jax.tree.map(jnp.add, params, updates)
    parts = [gradients[np.array(learns) == k, :, 64 * k : 64 * (k + 1)] for k in range(2)]
    expected = np.concatenate([alone("adafactor", part, (64, 80)) for part in parts], axis=1)
    np.testing.assert_allclose(params["blocks"]["q_lora_a"], expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("steps", [10, 50])
def test_rewards_that_stay_the_same_stall(reward, steps):
    optimizer = adapter_modules.one_at_a_time(optax.sgd(0.1), LoraConfig(rank=6, modules=3, module_steps=steps))
    params = {"blocks": {"q_lora_a": jnp.zeros((2, 6, 4))}}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(steps):
        assert state.module == 0
        _, state = update(params, state, params, reward=jnp.float32(reward))
    assert state.module == 1


def test_moments_are_of_the_module_that_learns_and_lie_as_the_adapters():
    """Half of the rank learns, so there is half of the moments.

    They are sharded like their adapters unless the rank is split.
    """
    shapes = {"q_lora_a": ((2, 8, 4), (None, None, "fsdp")), "q_lora_b": ((2, 2, 3, 8), (None, "tensor"))}
    mesh = building.mesh_of(building.CUBE)
    params = {
        "blocks": {
            name: jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, jax.P(*spec)))
            for name, (shape, spec) in shapes.items()
        }
    }
    optimizer = adapter_modules.one_at_a_time(optim.make(OptimizerConfig(), 5), LoraConfig(rank=8, modules=2))
    adam = optax.tree_utils.tree_get(optim.abstract_state(optimizer, params, mesh), "ScaleByAdamState")
    for moments in (adam.mu["blocks"], adam.nu["blocks"]):
        assert {name: x.shape for name, x in moments.items()} == {"q_lora_a": (2, 4, 4), "q_lora_b": (2, 2, 3, 4)}
        assert all(x.sharding == params["blocks"][name].sharding for name, x in moments.items())


class Still(Update):
    """An update whose gradient is 0."""

    def gradient(self, learned, batch, moment):
        totals = {"loss_sum": jnp.float32(0), "token_count": jnp.float32(1), "entropy_sum": jnp.float32(0)}
        return jax.tree.map(jnp.zeros_like, learned), Sums(totals)


def test_the_update_says_the_mean_reward_of_rows_that_count():
    seen = optax.GradientTransformationExtraArgs(
        lambda params: jnp.float32(0), lambda gradient, state, params, *, reward: (gradient, reward)
    )
    update = building.make_update(building.LOSSES["token mean, k3"])
    update = Still(**{field.name: getattr(update, field.name) for field in dataclasses.fields(update)})
    update, rows = dataclasses.replace(update, optimizer=seen), building.random_experience()
    state = TrainState({"policy": {"x": jnp.ones(3)}}, {"policy": jnp.float32(0)}, jnp.int32(0), {}, {})
    state, _ = update.apply_batch(state, building.on_mesh(update, rows), 0)
    counts = rows.trainable.astype(bool)
    assert 0 < counts.sum() < len(counts) and state.opt_state["policy"] == pytest.approx(rows.reward[counts].mean())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": 6, "modules": 4}, ("model.lora.modules", 4, "model.lora.rank=6")),
        ({"rank": 6, "module_steps": 5}, ("model.lora.module_steps", 5, "model.lora.modules")),
    ],
)
def test_settings_that_have_no_effect_are_refused(settings, named):
    with refused(*named):
        adapter_modules.one_at_a_time(optax.sgd(0.1), LoraConfig(**settings))
    with refused("model.lora.modules", 2):
        freeze({"model": {"lora": {"modules": 2}}})
