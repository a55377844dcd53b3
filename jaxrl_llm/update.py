"""The update: U optimizer steps in one dispatch, each on a batch drawn from the ring.

It is blind to algorithms: it sees tokens, masks, advantages and log-probabilities. Every term of the
loss and every metric is a sum under one denominator of the whole batch, so micro-batches, padding, row
order and devices change nothing beyond float rounding.

    scan over U:   draw a batch [M, b] -> weights of the whole batch
      scan over micro-batches:   forward, backward, add gradients and sums
      clip, AdamW, step + 1

Letters: M ring shards, b rows per shard, B = M*b rows, S row width, U updates, n micro-batches.
Owns: the loss's composition, gradient accumulation, the optimizer step. Does not know: how rows are drawn
(``draw`` is given), where rewards come from, an algorithm's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.config import SamplingConfig, UpdateConfig
from jaxrl_llm.models.policy import row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.losses import aggregation_weights, clipped_surrogate, kl_estimate
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.types import Experience, RingState, Rollout, TrainState

# draw(ring, key) -> ring, rows [M, b, ...], sums of what was drawn
Draw = Callable[[RingState, jax.Array], tuple[RingState, Experience, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Update:
    """Static description of the update; ``step`` is its one compiled program.

    Attributes:
        sampling: the distribution completions were drawn from.
        num_devices: data-parallel devices a micro-batch is split over.
        group_size: each run of this many rows of a batch has one prompt; 1 = each its own.
    """

    config: UpdateConfig
    sampling: SamplingConfig
    model: Model
    optimizer: optax.GradientTransformation
    num_devices: int
    group_size: int = 1

    def step(
        self, state: TrainState, ring: RingState, key: jax.Array, draw: Draw
    ) -> tuple[TrainState, RingState, dict[str, jax.Array]]:
        """U optimizer steps.

        Args:
            state: donate it.
            ring: donate it.
            key: random key of this iteration's draws.
            draw: takes a batch from the ring.

        Returns:
            New state and ring, and sums [] f32 over all updates; names ending in ``_max`` are maxima.
        """

        def one(carry, index):
            state, ring = carry
            ring, batch, drawn = draw(ring, jax.random.fold_in(key, index))
            state, sums = self.apply_batch(state, batch)
            return (state, ring), sums | drawn

        updates = jnp.arange(self.config.updates_per_iteration)
        (state, ring), sums = jax.lax.scan(one, (state, ring), updates)
        return state, ring, {k: jnp.max(v) if k.endswith("_max") else jnp.sum(v) for k, v in sums.items()}

    def apply_batch(self, state: TrainState, batch: Experience) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step on rows [M, b, ...]; skipped where they hold no token or the gradient is not finite."""
        gradient, sums = self.gradient(state.params, batch, state.step)
        norm = optax.tree.norm(gradient)
        usable = jnp.isfinite(norm) & (sums["token_count"] > 0)

        def apply(state: TrainState) -> TrainState:
            updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
            return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)

        state = jax.lax.cond(usable, apply, lambda state: state, state)
        return state, sums | {
            "grad_norm_sum": norm,
            "update_count": jnp.float32(1),
            "skipped_count": 1.0 - usable.astype(jnp.float32),
        }

    def gradient(self, params: Any, batch: Experience, version: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Gradient of the aggregated loss over rows [M, b, ...], and sums for the metrics.

        Args:
            version: [] i32 policy version of ``params``; tokens sampled by it measure the sampler-learner gap.
        """
        M, b = batch.reward.shape
        num_micro = M * b // self.config.micro_batch_size
        flat = jax.tree.map(lambda x: x.reshape(M * b, *x.shape[2:]), batch)
        rollout = flat.rollout
        mask = completion_mask(rollout.prompt_length, rollout.length, rollout.tokens.shape[1])
        weight = aggregation_weights(
            mask,
            flat.trainable,
            kind=self.config.aggregation,
            max_completion_tokens=self.sampling.max_completion_tokens,
        )

        def split(x):  # [M*b, ...] -> [n, M * b/n, ...]: every micro-batch takes rows of every shard
            x = x.reshape(M, num_micro, b // num_micro, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(num_micro, M * (b // num_micro), *x.shape[3:])

        def accumulate(carry, micro):
            (_, sums), grads = jax.value_and_grad(self._loss, has_aux=True)(params, *micro, version)
            new = jax.tree.map(jnp.add, carry[0], grads)
            old = carry[1]
            merged = {k: jnp.maximum(old[k], v) if k.endswith("_max") else old[k] + v for k, v in sums.items()}
            return (new, merged), None

        micros = jax.tree.map(split, (flat, weight))
        first = jax.tree.map(lambda x: x[0], micros)
        shapes = jax.eval_shape(lambda *m: self._loss(params, *m, version)[1], *first)
        zero_sums = {k: jnp.zeros(v.shape, v.dtype) for k, v in shapes.items()}
        zero_grads = jax.tree.map(jnp.zeros_like, params)
        (gradient, sums), _ = jax.lax.scan(accumulate, (zero_grads, zero_sums), micros)
        return gradient, sums

    def logp(self, params: Any, rollout: Rollout, *, group_size: int = 1, remat: bool = False):
        """Log-probs of rows [B,S] under ``params`` and entropies, each [B,S] f32 nats (see models.policy)."""
        rows_per_device = max(1, rollout.tokens.shape[0] // self.num_devices)
        return row_logp(
            self.model,
            params,
            rollout.tokens,
            rollout.prompt_length,
            rollout.length,
            sampling=self.sampling,
            completion_width=self.sampling.max_completion_tokens,
            chunk_positions=max(1, self.config.logp_chunk_tokens // rows_per_device),
            group_size=group_size,
            remat=remat,
        )

    def _loss(self, params, rows: Experience, weight_BS: jax.Array, version) -> tuple[jax.Array, dict[str, jax.Array]]:
        rollout, config = rows.rollout, self.config
        policy_logp, entropy = self.logp(params, rollout, group_size=self.group_size, remat=True)
        # Off the loss's tokens every input is a harmless constant: 0 * nan is nan.
        mask = weight_BS > 0
        policy_logp = jnp.where(mask, policy_logp, 0.0)
        behaviour_logp = jnp.where(mask, rollout.behaviour_logp, 0.0)
        advantage = jnp.where(mask, rows.advantage, 0.0)

        term, is_clipped = clipped_surrogate(
            policy_logp, behaviour_logp, advantage, clip_low=config.clip_low, clip_high=config.clip_high
        )
        loss = jnp.sum(weight_BS * term)
        sums = {}
        if rows.ref_logp is not None:
            ref_logp = jnp.where(mask, rows.ref_logp, 0.0)
            kl = kl_estimate(policy_logp, ref_logp, kind=config.kl_estimator)
            loss += config.kl_coefficient * jnp.sum(weight_BS * kl)
            sums["kl_reference_sum"] = jnp.sum(kl)
        ratio = jnp.where(mask, jnp.exp(policy_logp - behaviour_logp), 0.0)
        own = mask & (rollout.policy_version == version)
        total = lambda x: jnp.sum(jnp.where(mask, x, 0).astype(jnp.float32))  # noqa: E731
        sums |= {
            "loss_sum": loss,
            "token_count": total(mask),
            "entropy_sum": total(entropy),
            # From samples of the behaviour policy, so the behaviour is k3's first argument.
            "kl_behaviour_sum": total(kl_estimate(behaviour_logp, policy_logp, kind="k3")),
            "clipped_count": total(is_clipped),
            "ratio_sum": jnp.sum(ratio),
            "ratio_square_sum": jnp.sum(jnp.square(ratio)),
            "ratio_max": jnp.max(ratio),
            "own_token_count": jnp.sum(own.astype(jnp.float32)),
            "gap_max": jnp.max(jnp.where(own, jnp.abs(policy_logp - behaviour_logp), 0.0)),
        }
        return loss, jax.lax.stop_gradient(sums)
