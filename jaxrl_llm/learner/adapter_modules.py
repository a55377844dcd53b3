"""LoRA adapters whose rank is split into modules that are trained one after another.

    module k: rows k r/M to (k+1) r/M of A, the same columns of B;     B A = sum_k B_k A_k

The next module begins when rewards stall: when the least-squares line through the rewards R of the last W steps does
not rise.

    sum_t (t - (W - 1) / 2) R_t <= 0,    t = 0 .. W - 1

Earlier modules are frozen. Later modules do not change the output yet, because their B is 0. The optimizer receives
only the learning module, and its moments are reset when the next module begins. The last module learns until the run
ends. The sampler, the checkpoint and PEFT contain one adapter of the whole rank.

Source: DPS of ScaleZero, Pu et al. 2025, arXiv:2509.07945, and its code in LightZero. Differences:

    base            DPS trains the backbone of a multi-task world model first. Here the base is never trained.
    next module     DPS starts it after enough newly solved tasks or after a fixed number of steps. Enough is the number
                    of unsolved tasks divided by the number of modules to come. Here it starts when progress stops, the
                    opposite condition. A module whose rewards rise has no step limit.
    scale           DPS uses alpha / (r/M) for each module of rank r/M, and a learned factor near 1 after its training.
                    Here every module has the scale s of the whole adapter, which is M times smaller, and no factor.
    initial A       DPS draws it from a normal distribution with deviation 0.01. Here it is uniform (lora).

Owns: which module learns, when the next module begins. Does not know: where adapters are added, which optimizer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config import ConfigError, LoraConfig
from jaxrl_llm.learner import optim
from jaxrl_llm.models import lora


class Modules(NamedTuple):
    """State of an optimizer that trains one module at a time."""

    own: Any  # state of the optimizer of the learning module
    module: jax.Array  # [] i32, number of the learning module, from 0
    count: jax.Array  # [] i32, steps of the learning module
    rewards: jax.Array  # [W] f32, rewards of the last W steps, newest last


def one_at_a_time(
    optimizer: optax.GradientTransformation,
    config: LoraConfig,
) -> optax.GradientTransformation:
    """Return an optimizer that applies ``optimizer`` to one module at a time, or ``optimizer`` if there is one module.

    With several modules ``update`` takes one more argument: ``reward``, the mean reward [] f32 of the gradient's batch.

    Raises:
        ConfigError: ``modules`` does not divide ``rank``, or ``module_steps`` is set although there is one module.
    """
    steps = config.module_steps
    if config.rank % config.modules:
        raise ConfigError(f"model.lora.modules={config.modules} must divide model.lora.rank={config.rank}")
    if config.modules == 1:
        if steps != LoraConfig().module_steps:
            raise ConfigError(f"model.lora.module_steps={steps} needs a model.lora.modules of at least 2")
        return optimizer

    def init(params: optax.Params) -> Modules:
        first = jnp.int32(0)
        own = optimizer.init(lora.of_module(params, first, config))
        return Modules(own, first, jnp.int32(0), jnp.zeros(steps))

    def update(
        updates: optax.Updates,
        state: Modules,
        params: optax.Params | None = None,
        *,
        reward: jax.Array,
    ) -> tuple[optax.Updates, Modules]:
        module = state.module
        count = state.count + 1
        rewards = jnp.concatenate([state.rewards[1:], reward[None]])
        updates, own = optimizer.update(
            lora.of_module(updates, module, config),
            state.own,
            lora.of_module(params, module, config),
        )
        # Subtract the first reward: with constant rewards such as 0.1, rounding errors alone could make a slope.
        centred_step = jnp.arange(steps) - (steps - 1) / 2
        change = rewards - rewards[0]
        slope = jnp.sum(centred_step * change)
        stalls = (count >= steps) & (slope <= 0) & (module < config.modules - 1)
        own = optim.forgotten(own, lambda _: stalls)
        count = jnp.where(stalls, 0, count)
        return lora.in_whole(updates, module, config), Modules(own, module + stalls, count, rewards)

    return optax.GradientTransformationExtraArgs(init, update)  # pyrefly: ignore[bad-argument-type], it needs `reward`


def sums(opt_state: Any) -> dict[str, jax.Array]:
    """Return the number of the learning module, counted from 1, as a metric sum; {} if the rank is not split."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Modules))
    for leaf in leaves:
        if isinstance(leaf, Modules):
            return {"adapter_module_sum": leaf.module + jnp.float32(1)}
    return {}
