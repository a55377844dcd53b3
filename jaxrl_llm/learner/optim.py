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
    peak = config.learning_rate
    warmup = config.warmup_steps
    decay_steps = max(1, num_steps - warmup)
    match config.schedule:
        case "constant":
            after_warmup = optax.constant_schedule(peak)
        case "linear":
            after_warmup = optax.linear_schedule(peak, 0.0, decay_steps)
        case "cosine":
            after_warmup = optax.cosine_decay_schedule(peak, decay_steps)
    if warmup == 0:
        return after_warmup
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])


def make(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Build the optimizer ``config.name``, in float32, after global-norm clipping (off if ``max_grad_norm`` is 0)."""

    def clip(gradient: optax.Updates, _: optax.Params | None = None) -> optax.Updates:
        gradient = optax.tree.cast(gradient, jnp.float32)
        if not config.max_grad_norm:
            return gradient
        # Multiply by one factor. Optax's clipping uses a quotient twice, and XLA then stores one more gradient in
        # memory.
        scale = jnp.minimum(1.0, config.max_grad_norm / optax.tree.norm(gradient))
        return jax.tree.map(lambda g: g * scale, gradient)

    learning_rate = optax.scale_by_learning_rate(schedule(config, num_steps))
    # The chains are nested, because checkpoints name the arrays of the optimizer's state by the state's structure.
    step = optax.chain(_scaled(config), optax.add_decayed_weights(config.weight_decay), learning_rate)
    optimizer = _in_float32(optax.chain(optax.stateless(clip), step))
    if config.reset_every_steps:
        return _starting_anew(optimizer, config.reset_every_steps)
    return optimizer


def _scaled(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return the part of the optimizer that divides the gradient by its moments."""
    match config.name:
        case "adamw":
            scaled = optax.scale_by_adam(config.b1, config.b2, config.eps)
        case "subset_norm":
            scaled = low_memory.scale_by_subset_norm(config.b1, config.b2, config.eps)
        case "adafactor":
            scaled = low_memory.scale_by_factored_rms()
    match config.moment_dtype:
        case "float32":
            return scaled
        case "bfloat16":
            return low_memory.rounded_moments(scaled)
        case "int8":
            return low_memory.byte_moments(scaled)


def _in_float32(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return an optimizer like ``optimizer`` that reads the parameters in float32."""

    def init(params: optax.Params) -> optax.OptState:
        return optimizer.init(optax.tree.cast(params, jnp.float32))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is not None:
            params = optax.tree.cast(params, jnp.float32)
        return optimizer.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _starting_anew(
    optimizer: optax.GradientTransformation,
    every: int,
) -> optax.GradientTransformation:
    """Return an optimizer like ``optimizer`` whose moments and step count are reset after every ``every`` steps.

    Source: Kimi k1.5, Kimi team 2025, arXiv:2501.12599, which resets the optimizer in each iteration. Differs: steps
    are counted, so a skipped step delays the next reset.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        return optimizer.update(
            updates,
            forgotten(state, lambda moments: jnp.asarray(moments.count) >= every),
            params,
        )

    return optax.GradientTransformation(optimizer.init, update)


Moments = optax.ScaleByAdamState | optax.FactoredState


def forgotten(state: Any, when: Callable[[Moments], jax.Array]) -> Any:
    """Return the optimizer state with Adam's or Adafactor's state set to zero if ``when`` is true for that state."""

    def has_moments(x: Any) -> bool:
        return isinstance(x, Moments)

    def reset(x: Any) -> Any:
        if not has_moments(x):
            return x
        return jax.tree.map(lambda leaf: jnp.where(when(x), jnp.zeros_like(leaf), leaf), x)

    return jax.tree.map(reset, state, is_leaf=has_moments)


def abstract_state(
    optimizer: optax.GradientTransformation,
    abstract_params: Any,
    mesh: Mesh,
    *,
    offload: bool = False,
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

    def layout(
        moment: jax.ShapeDtypeStruct,
        param: jax.ShapeDtypeStruct,
    ) -> jax.sharding.Sharding:
        place = param.sharding if _is_sharded_alike(moment, param) else whole
        return sharding.on_host(place) if offload else place

    layouts = optax.tree_utils.tree_map_params(
        optimizer.init,
        layout,
        state,
        abstract_params,
        transform_non_params=lambda _: whole,
    )
    return sharding.placed(state, layouts)


def _is_sharded_alike(
    moment: jax.ShapeDtypeStruct,
    param: jax.ShapeDtypeStruct,
) -> bool:
    """Return whether the sharding of a parameter fits a moment: no shorter dimension of the moment is split."""
    if len(moment.shape) != len(param.shape):
        return False
    parts = param.sharding.shard_shape(param.shape)
    dims = zip(moment.shape, param.shape, parts, strict=True)
    return all(size == param_size or param_size == part for size, param_size, part in dims)
