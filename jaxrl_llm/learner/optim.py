"""The optimizer: AdamW, AdamW-Subset-Norm or Adafactor, with a learning-rate schedule and global-norm clipping.

Owns: the transformation and its schedule, the layout of its state. Does not know: losses, batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.learner import low_memory
from jaxrl_llm.runtime import sharding


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning-rate schedule: linear warm-up from 0, then constant or decay to 0 at step ``num_steps``."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = max(1, num_steps - warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[config.schedule]
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Build the optimizer ``config.name``, in float32, after global-norm clipping (off if ``max_grad_norm`` is 0)."""

    def clip(gradient: Any, _: Any) -> Any:
        gradient = optax.tree.cast(gradient, jnp.float32)
        if not config.max_grad_norm:
            return gradient
        # Multiply by one factor. Optax uses a quotient twice, and XLA then stores one more gradient in memory.
        scale = jnp.minimum(1.0, config.max_grad_norm / optax.tree.norm(gradient))
        return jax.tree.map(lambda g: g * scale, gradient)

    if config.name == "adafactor":
        scaled = low_memory.scale_by_factored_rms()
    else:
        adam = low_memory.scale_by_subset_norm if config.name == "subset_norm" else optax.scale_by_adam
        scaled = adam(config.b1, config.b2, config.eps)
    if config.moment_dtype != "float32":
        kept = low_memory.byte_moments if config.moment_dtype == "int8" else low_memory.rounded_moments
        scaled = kept(scaled)
    steps = optax.scale_by_learning_rate(schedule(config, num_steps))
    decayed = optax.chain(scaled, optax.add_decayed_weights(config.weight_decay), steps)
    optimizer = optax.chain(optax.stateless(clip), decayed)
    of_float32 = optax.GradientTransformation(
        lambda params: optimizer.init(optax.tree.cast(params, jnp.float32)),
        lambda gradient, state, params: optimizer.update(gradient, state, optax.tree.cast(params, jnp.float32)),
    )
    return _starting_anew(of_float32, config.reset_every_steps) if config.reset_every_steps else of_float32


def _starting_anew(optimizer: optax.GradientTransformation, every: int) -> optax.GradientTransformation:
    """Return an optimizer like ``optimizer`` whose moments and step count are reset after every ``every`` steps.

    Source: Kimi k1.5, Kimi team 2025, arXiv:2501.12599, which resets the optimizer in each iteration. Differs: steps
    are counted, so a skipped step delays the next reset.
    """

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(gradient, forgotten(state, lambda adam: adam.count >= every), params)

    return optax.GradientTransformation(optimizer.init, update)


def forgotten(state: Any, when: Callable[[Any], jax.Array]) -> Any:
    """Return the optimizer state with Adam's or Adafactor's state set to zero if ``when`` is true for that state."""
    has_moments = lambda x: isinstance(x, optax.ScaleByAdamState | optax.FactoredState)
    fresh = lambda kept: jax.tree.map(lambda x: jnp.where(when(kept), jnp.zeros_like(x), x), kept)
    return jax.tree.map(lambda x: fresh(x) if has_moments(x) else x, state, is_leaf=has_moments)


def abstract_state(
    optimizer: optax.GradientTransformation, abstract_params: Any, mesh: Mesh, *, offload: bool = False
) -> Any:
    """Return the shapes and shardings of the optimizer's state.

    Moments are sharded as their parameters are. Counters and factored moments are replicated. A shorter moment (one
    value for a row, or a module of the adapters) is sharded as its parameter if no shorter dimension is split.
    Otherwise the shorter moment is replicated.

    Args:
        offload: place the moments in host memory, with the same sharding.
    """
    state = jax.eval_shape(optimizer.init, abstract_params)
    whole = sharding.replicated(mesh, 0)

    def lies(moment: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
        sizes = zip(moment.shape, param.shape, param.sharding.shard_shape(param.shape), strict=False)
        is_alike = len(moment.shape) == len(param.shape) and all(x == y or y == part for x, y, part in sizes)
        layout = param.sharding if is_alike else whole
        return sharding.on_host(layout) if offload else layout

    layouts = optax.tree_utils.tree_map_params(
        optimizer, lies, state, abstract_params, transform_non_params=lambda _: whole
    )
    return sharding.placed(state, layouts)
