"""Adapters of several modules: parts of the rank, of which one learns at a time.

    module k: rows k r/M to (k+1) r/M of A, the same columns of B;     B A = sum_k B_k A_k

The next one begins where rewards stall: where the line of least squares through the last W steps' has no slope above 0.

    sum_t (t - (W - 1) / 2) R_t <= 0,    t = 0 .. W - 1

Those before it stay as they are, and those to come add nothing yet, for their B is 0. The optimizer sees the module
that learns alone, and forgets what it has seen when the next begins. The last one goes on to the end. What a sampler, a
checkpoint or PEFT sees is one adapter of the whole rank.

Source: DPS of ScaleZero, Pu et al. 2025, arXiv:2509.07945, and its code in LightZero. Differs: there a world model of
many tasks grows, whose backbone learns first; here the base never learns. There the next module begins after a success,
as soon as so many tasks more are solved as an even share of the unsolved over the modules to come, or when a module has
had a given number of steps; here it begins where progress has stopped, the opposite sign, and a module whose rewards
rise has no limit. There each adapter of rank r/M is scaled by alpha / (r/M), and by a learned factor near 1 once the
next one learns; here by the whole one's s, which is M times less, with no factor. A begins normal of deviation 0.01
there, uniform here (lora).
Owns: which part learns, when the next begins. Does not know: where adapters are added, which optimizer.
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
    """The optimizer's own state, the module that learns, its steps so far, [] i32, and rewards [W] f32, newest last."""

    own: Any
    module: jax.Array
    count: jax.Array
    rewards: jax.Array


def one_at_a_time(optimizer: optax.GradientTransformation, config: LoraConfig) -> optax.GradientTransformation:
    """The same for one module at a time; itself where there is but one.

    ``update`` wants besides, as ``reward``, the mean reward [] f32 of the batch that the gradient is of.

    Raises:
        ConfigError: the rank has no such equal parts, or nothing hears ``module_steps``.
    """
    steps = config.module_steps
    if config.rank % config.modules:
        raise ConfigError(f"model.lora.modules={config.modules} must divide model.lora.rank={config.rank}")
    if config.modules == 1:
        if steps != LoraConfig().module_steps:
            raise ConfigError(f"model.lora.module_steps={steps} needs a model.lora.modules of at least 2")
        return optimizer

    def init(params: Any) -> Modules:
        first = jnp.int32(0)
        return Modules(optimizer.init(lora.of_module(params, first, config)), first, jnp.int32(0), jnp.zeros(steps))

    def update(gradient: Any, state: Modules, params: Any = None, *, reward: jax.Array) -> tuple[Any, Modules]:
        own, module, count, rewards = state
        count, rewards = count + 1, jnp.concatenate([rewards[1:], reward[None]])
        part = lambda of: lora.of_module(of, module, config)
        updates, own = optimizer.update(part(gradient), own, part(params))
        # Less the first of them, as the rounding of what all share, such as 0.1, would be a slope of its own.
        slope = jnp.sum((jnp.arange(steps) - (steps - 1) / 2) * (rewards - rewards[0]))
        stalls = (count >= steps) & (slope <= 0) & (module < config.modules - 1)
        own, count = optim.forgotten(own, lambda _: stalls), jnp.where(stalls, 0, count)
        return lora.in_whole(updates, module, config), Modules(own, module + stalls, count, rewards)

    return optax.GradientTransformationExtraArgs(init, update)


def sums(opt_state: Any) -> dict[str, jax.Array]:
    """The number of the module that learns, from 1 on, where there are several."""
    of_modules = lambda x: isinstance(x, Modules)
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=of_modules) if of_modules(x)]
    return {"adapter_module_sum": found[0].module + jnp.float32(1)} if found else {}
