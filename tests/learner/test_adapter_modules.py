"""Adapters of several modules learn one after the other, the next one where rewards stall."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import building

from jaxrl_llm.config import ConfigError, LoraConfig, OptimizerConfig, freeze
from jaxrl_llm.learner import adapter_modules, low_memory, optim
from jaxrl_llm.learner.update import Update
from jaxrl_llm.types import TrainState
from tests.reference import optimizers

# Of rank 6; the axis that is the rank, in each.
SHAPES = {"q_lora_a": (2, 6, 4), "q_lora_b": (2, 3, 2, 6), "o_lora_a": (2, 6, 3, 2), "experts_up_lora_a": (2, 5, 6, 4)}
RANK = {"q_lora_a": 1, "q_lora_b": 3, "o_lora_a": 1, "experts_up_lora_a": 2}
# Of three steps the slope is the third less the first: 0 after the fifth, -0.1 after the eighth; then the last goes on.
REWARDS = [0.1, 0.2, 0.3, 0.4, 0.3, 0.5, 0.4, 0.4, 0.9, 0.8, 0.7, 0.6]


def test_each_module_learns_as_alone_until_rewards_stall():
    learns = optimizers.modules(REWARDS, number=3, steps=3)
    assert learns == [0] * 5 + [1] * 3 + [2] * 4
    draw = np.random.default_rng(0)
    gradients = {name: draw.normal(size=(len(REWARDS), *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    config = OptimizerConfig(learning_rate=0.01, max_grad_norm=0.0)
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
        expected = [optimizers.adam(gradient, rate=0.01)[0] for gradient in of_module]
        found = params["blocks"][name]
        np.testing.assert_allclose(found, np.concatenate(expected, axis=RANK[name]), rtol=1e-4, atol=1e-7, err_msg=name)
    # Lengths of rows (DoRA) learn in every step, at 1 % each.
    np.testing.assert_allclose(params["blocks"]["q_lora_m"], -0.01 * len(REWARDS), rtol=1e-4)


class Still(Update):
    """An update whose gradient is 0."""

    def gradient(self, learned, batch, moment):
        return jax.tree.map(jnp.zeros_like, learned), {"loss_sum": jnp.float32(0), "token_count": jnp.float32(1)}


def test_the_update_says_the_mean_reward_of_rows_that_count():
    seen = optax.GradientTransformationExtraArgs(
        lambda params: jnp.float32(0), lambda gradient, state, params, *, reward: (gradient, reward)
    )
    update = building.make_update(building.LOSSES["token mean, k3"])
    update = Still(**{field.name: getattr(update, field.name) for field in dataclasses.fields(update)})
    update, rows = dataclasses.replace(update, optimizer=seen), building.random_experience()
    state = TrainState({"policy": {"x": jnp.ones(3)}}, {"policy": jnp.float32(0)}, jnp.int32(0), {}, {})
    state, _ = update.apply_batch(state, building.on_mesh(update, rows))
    counts = rows.trainable.astype(bool)
    assert 0 < counts.sum() < len(counts) and state.opt_state["policy"] == pytest.approx(rows.reward[counts].mean())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 6, "modules": 4}, r"model\.lora\.modules=4 must divide model\.lora\.rank=6"),
        ({"rank": 6, "module_steps": 5}, r"model\.lora\.module_steps=5 needs a model\.lora\.modules of at least 2"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        adapter_modules.one_at_a_time(optax.sgd(0.1), LoraConfig(**settings))
    with pytest.raises(ConfigError, match=r"model\.lora\.modules=2 needs a model\.lora\.rank=0 of at least 1"):
        freeze({"model": {"lora": {"modules": 2}}})
