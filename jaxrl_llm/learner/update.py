"""The update: U optimizer steps in one dispatch, each on a batch drawn from the ring.

It is blind to algorithms: it sees tokens, masks, advantages and log-probabilities. Every term of the
loss and every metric is a sum under one denominator of the whole batch, so micro-batches, padding, row
order and devices change nothing beyond float rounding.

    scan over U:   draw a batch [M, b] -> weights of the whole batch
      loop over micro-batches:   forward, backward, add gradients and sums
        log-probs -> old policy -> correction -> surrogate -> sum by weights -> divergence, entropy, critic,
                     cross-entropy of prompts and of what others wrote
      clip, AdamW, step + 1

Letters: M ring shards, b rows per shard, B = M*b rows, S row width, U updates, n micro-batches.
Owns: the loss's composition, gradient accumulation, the optimizer step. Does not know: how rows are drawn
(``draw`` is given), where rewards come from, an algorithm's name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import corrections
from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.losses import (
    adapted_entropy_coefficient,
    aggregation_weights,
    cross_entropy,
    kl_estimate,
    reference_share,
)
from jaxrl_llm.algorithms.surrogates import LOG_RATIO_LIMIT, SURROGATES, Settings, Tokens
from jaxrl_llm.config import ObjectiveConfig, SamplingConfig, UpdateConfig
from jaxrl_llm.learner import micro_batches as cut
from jaxrl_llm.learner.micro_batches import MicroBatches
from jaxrl_llm.models.row_logp import RowValues, packed_logp, row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.runtime.programs import run_if
from jaxrl_llm.types import AGE_BUCKETS, Critic, Experience, RingState, Rollout, TrainState

# draw(ring, key) -> ring, rows [M, b, ...], sums of what was drawn
Draw = Callable[[RingState, jax.Array], tuple[RingState, Experience, dict[str, jax.Array]]]


class Moment(NamedTuple):
    """When a batch is used: the policies beside the current one that its loss may look at, and their versions."""

    version: jax.Array  # [] i32 of the current weights; tokens sampled by it measure the sampler-learner gap
    start_version: jax.Array | None = None  # [] i32 of the weights before the iteration's updates
    start: Any = None  # those weights, where the objective asks for them
    average: Any = None  # moving average of the weights, likewise
    previous: Any = None  # weights before the updates of the iteration before, likewise
    threshold: jax.Array | None = None  # [] f32 of the correction "second_moment"
    entropy_coefficient: jax.Array | None = None  # [] f32 weight of the entropy bonus, where it moves


class Weights(NamedTuple):
    """What each token counts in the parts of the loss, [...,S] f32: every division has been done."""

    policy: jax.Array  # in what completions are trained by
    environment: jax.Array | None = None  # in the cross-entropy of prompts
    imitation: jax.Array | None = None  # in that of correct completions which others wrote


@dataclasses.dataclass(frozen=True)
class Update:
    """Static description of the update; ``step`` is its one compiled program.

    Attributes:
        sampling: the distribution completions were drawn from.
        num_devices: data-parallel devices a micro-batch is split over.
        line_tokens: width of the lines that a batch is packed in; 0 = its rows are padded.
        group_size: each run of this many rows of a batch has one prompt; 1 = each its own.
        critic_optimizer: of the value head, where the state has one.
        pass_threshold: a rollout is correct when its reward is at least this.
    """

    config: UpdateConfig
    sampling: SamplingConfig
    model: Model
    optimizer: optax.GradientTransformation
    num_devices: int
    group_size: int = 1
    line_tokens: int = 0
    objective: ObjectiveConfig = ObjectiveConfig()
    critic_optimizer: optax.GradientTransformation | None = None
    pass_threshold: float = 1.0

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
            New state and ring, and sums [] f32 over all updates; names ending in ``_max`` are maxima, those ending in
            ``_by_age`` sums [len(AGE_BUCKETS) + 1].
        """
        start = state  # one more copy of the weights where the loss looks at it

        def one(carry, index):
            state, ring = carry
            ring, batch, drawn = draw(ring, jax.random.fold_in(key, index))
            state, sums = self.apply_batch(state, batch, start)
            return (state, ring), sums | drawn

        updates = jnp.arange(self.config.updates_per_iteration)
        (state, ring), sums = jax.lax.scan(one, (state, ring), updates)
        if state.previous is not None:
            state = state.replace(previous=start.params)
        return state, ring, {k: jnp.max(v) if k.endswith("_max") else jnp.sum(v, axis=0) for k, v in sums.items()}

    def apply_batch(
        self, state: TrainState, batch: Experience, start: TrainState | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step on rows [M, b, ...]; skipped where they hold no token or the gradient is not finite.

        Args:
            start: the state before the iteration's updates; None = this one.
        """
        moment = self._moment(state, batch, state if start is None else start)
        moment = moment._replace(entropy_coefficient=state.entropy_coefficient)
        critic = state.critic
        (gradient, of_head), sums = self.gradient(state.params, batch, moment, critic.head if critic else None)
        norm = optax.tree.norm(gradient)
        usable = jnp.isfinite(norm) & (sums["token_count"] > 0)
        if critic:
            usable &= jnp.isfinite(optax.tree.norm(of_head))
        if self.objective.ess_learning_rate:
            scale = corrections.step_scale(
                sums["sequence_ratio_sum"], sums["sequence_ratio_square_sum"], sums["row_count"]
            )
            sums |= {"rate_scale_sum": scale}
        if state.entropy_coefficient is not None:
            sums |= {"entropy_coefficient_sum": state.entropy_coefficient}

        def apply(state: TrainState) -> TrainState:
            updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
            if self.objective.ess_learning_rate:
                updates = jax.tree.map(lambda u: u * scale, updates)
            params = optax.apply_updates(state.params, updates)
            average = state.average
            if average is not None:
                share = corrections.moving_average_share(self.objective.ewma_decay, state.step + 1)
                average = jax.tree.map(lambda old, new: old + share * (new - old), average, params)
            critic = state.critic
            if critic:
                updates, head_state = self.critic_optimizer.update(of_head, critic.opt_state, critic.head)
                critic = Critic(optax.apply_updates(critic.head, updates), head_state)
            coefficient = state.entropy_coefficient
            if coefficient is not None:
                coefficient = adapted_entropy_coefficient(
                    coefficient,
                    sums["entropy_sum"] / sums["token_count"],
                    target=self.objective.entropy_target,
                    rate=self.objective.entropy_rate,
                )
            new = {"average": average, "critic": critic, "entropy_coefficient": coefficient}
            return state.replace(params=params, opt_state=opt_state, step=state.step + 1, **new)

        return run_if(usable, apply, state), sums | {
            "grad_norm_sum": norm,
            "update_count": jnp.float32(1),
            "skipped_count": 1.0 - usable.astype(jnp.float32),
        }

    def _moment(self, state: TrainState, batch: Experience, start: TrainState) -> Moment:
        """What the loss of a batch may look at; weights only where the objective asks for them."""
        objective = self.objective
        needs_start = objective.proximal == "start"
        start_params = start.params if needs_start else None
        moment = Moment(state.step, start.step, start_params, state.average, state.previous)
        if objective.correction != "second_moment":
            return moment
        # Of the whole batch, so that micro-batches change nothing: one forward more.
        rollout = batch.rollout
        mask = jax.vmap(completion_mask, (0, 0, None))(rollout.prompt_length, rollout.length, rollout.tokens.shape[2])
        micros = self.micro_batches(batch, mask & batch.trainable[:, :, None])

        def log_ratio(i: jax.Array, seen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rows, mask = micros.at(i)
            policy_logp = self._micro_batch_logp(state.params, rows).logp
            found = self._correction_ratio(self._tokens(policy_logp, rows, mask, moment)), mask
            return jax.tree.map(lambda x, new: x.at[i].set(new), seen, found)

        shape = (micros.most, *jax.eval_shape(micros.at, 0)[1].shape)
        seen = jax.lax.fori_loop(0, micros.count, log_ratio, (jnp.zeros(shape), jnp.zeros(shape, bool)))
        ratio, mask = (x.reshape(-1, x.shape[-1]) for x in seen)
        threshold = corrections.second_moment_threshold(ratio, mask, objective.correction_second_moment)
        return moment._replace(threshold=threshold)

    def gradient(
        self, params: Any, batch: Experience, moment: Moment, head: Any = None
    ) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
        """Gradients of the aggregated loss over rows [M, b, ...] by params and value head, and sums for the metrics."""
        learned = (params, head)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        per_shard = lambda x: x.reshape(*batch.reward.shape, -1)
        micros = self.micro_batches(batch, jax.tree.map(per_shard, self._weights(flat)))

        def accumulate(i, carry):
            # Each layer adds to the gradient where it lies: a micro-batch has none of its own.
            gradient, micro = jax.tree.map(jax.ref.new_ref, carry[0]), micros.at(i)
            _, backward, sums = jax.vjp(lambda learned: self._loss(learned, *micro, moment), learned, has_aux=True)
            backward.with_refs(gradient)(jnp.float32(1))
            old = carry[1]
            merged = {k: jnp.maximum(old[k], v) if k.endswith("_max") else old[k] + v for k, v in sums.items()}
            return jax.tree.map(jax.ref.freeze, gradient), merged

        sums = jax.eval_shape(lambda: self._loss(learned, *micros.at(0), moment)[1])
        return jax.lax.fori_loop(0, micros.count, accumulate, jax.tree.map(jnp.zeros_like, (learned, sums)))

    def _weights(self, rows: Experience) -> Weights:
        """Of rows [B, ...], the whole batch.

            environment   w = 1 / (rows * tokens of the row's prompt but its first): each row's prompt is a mean, in
                          which one that siblings share counts as often as it has siblings
            imitation     w = 1 / tokens of the correct completions which others wrote, as in ``sft``

        Source: environment, arXiv:2605.24517. Differs: nothing is left out of a prompt as a warning of the harness.
        """
        rollout, objective = rows.rollout, self.objective
        width = rollout.tokens.shape[1]
        mean = functools.partial(
            aggregation_weights,
            group_id=rollout.group_id,
            max_completion_tokens=self.sampling.max_completion_tokens,
        )
        completion = completion_mask(rollout.prompt_length, rollout.length, width)
        weights = Weights(mean(completion, rows.trainable, kind=objective.aggregation))
        if objective.environment_coefficient:
            predicted = completion_mask(jnp.ones_like(rollout.prompt_length), rollout.prompt_length, width)
            weights = weights._replace(environment=mean(predicted, rows.trainable, kind="sequence_mean"))
        if objective.imitation_coefficient:
            shown = rows.trainable & (rollout.group_id < 0) & (rows.reward >= self.pass_threshold)
            weights = weights._replace(imitation=mean(completion, shown, kind="token_mean"))
        return weights

    def micro_batches(self, batch: Experience, weight: Any) -> MicroBatches:
        """Cut rows [M, b, ...] and their weights, arrays [M, b, S], as the config says."""
        config = self.config
        if not self.num_lines:
            return cut.padded(batch, weight, num_rows=config.micro_batch_size)
        completion_width = self.sampling.max_completion_tokens
        prompt_width = batch.rollout.tokens.shape[-1] - completion_width
        return cut.packed(
            batch,
            weight,
            num_lines=self.num_lines,
            width=self.line_tokens,
            unit_width=prompt_width + self.group_size * completion_width,
            group_size=self.group_size,
        )

    def logp(
        self,
        params: Any,
        rollout: Rollout,
        *,
        group_size: int = 1,
        num_lines: int = 0,
        remat: bool = False,
        head: Any = None,
        readout: Callable[[jax.Array], jax.Array] | None = None,
        with_prompts: bool = False,
    ) -> RowValues:
        """Log-probs of rows [B,S] under ``params`` and what else is read off them (see models.policy).

        ``readout`` is that of a value ``head`` where there is one. With ``num_lines`` the rows are of packed lines.
        """
        if head is not None:
            share = self.objective.value_coefficient
            readout = lambda hidden: values.head_outputs(head, hidden, gradient_share=share)
        rows = rollout.tokens, rollout.prompt_length, rollout.length, rollout.support
        per_device = max(1, (num_lines or rollout.tokens.shape[0]) // self.num_devices)
        common = {
            "sampling": self.sampling,
            "chunk_positions": max(1, self.config.logp_chunk_tokens // per_device),
            "group_size": group_size,
            "remat": remat,
            "readout": readout,
            "with_prompts": with_prompts,
        }
        if num_lines:
            lines = jax.tree.map(lambda x: x.reshape(num_lines, -1, *x.shape[1:]), rows)
            return packed_logp(self.model, params, *lines, width=self.line_tokens, **common)
        return row_logp(self.model, params, *rows, completion_width=self.sampling.max_completion_tokens, **common)

    def _micro_batch_logp(self, params: Any, rows: Experience, **how: Any) -> RowValues:
        """``logp`` of the rows of one of ``micro_batches``."""
        return self.logp(params, rows.rollout, group_size=self.group_size, num_lines=self.num_lines, **how)

    @property
    def num_lines(self) -> int:
        """Lines of a micro-batch; 0 = its rows are padded."""
        return self.config.micro_batch_tokens // self.line_tokens if self.line_tokens else 0

    @property
    def bins(self) -> values.Bins:
        """How a value head's outputs become values."""
        return values.Bins(self.objective.value_bins, self.objective.value_low, self.objective.value_high)

    def predict_values(self, params: Any, head: Any, rollout: Rollout, *, group_size: int = 1) -> jax.Array:
        """What the critic expects at each token of rows, [B,S] f32 in units of reward, 0.0 off the completion."""
        # The log-probs are not used, and the compiler leaves them out.
        outputs = self.logp(params, rollout, group_size=group_size, head=head).readout
        mask = completion_mask(rollout.prompt_length, rollout.length, rollout.tokens.shape[1])
        return jnp.where(mask, values.expected_value(outputs, self.bins), 0.0)

    def mean_hidden(self, params: Any, rollout: Rollout, *, group_size: int = 1) -> jax.Array:
        """Mean of the hidden states that predict a row's completion tokens, [B,D] f32; 0.0 where there are none."""
        states = lambda hidden: hidden.astype(jnp.float32)
        total = jnp.sum(self.logp(params, rollout, group_size=group_size, readout=states).readout, axis=1)
        return total / jnp.maximum(rollout.length - rollout.prompt_length, 1)[:, None]

    def _loss(self, learned, rows: Experience, weights: Weights, moment: Moment):
        """The loss of a micro-batch [] f32, and sums; ``learned``: policy and value head."""
        rollout, objective = rows.rollout, self.objective
        params, head = learned
        with_prompts = objective.environment_coefficient > 0
        policy_logp, entropy, outputs, prompt_logp = self._micro_batch_logp(
            params, rows, remat=True, head=head, with_prompts=with_prompts
        )
        weight_BS = weights.policy
        mask = weight_BS > 0
        tokens = self._tokens(policy_logp, rows, mask, moment)
        total = lambda x: jnp.sum(jnp.where(mask, x, 0).astype(jnp.float32))
        sums = {}

        used = tokens  # those the correction keeps; the others have no part in a row's sums either
        if objective.correction != "none":
            correction, is_kept = self._correction(tokens, moment)
            used = tokens.only(is_kept)
            sums["correction_weight_sum"] = total(correction)
        settings = Settings(
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip,
            beta=objective.regression_beta,
            group_size=self.group_size,
        )
        term, is_clipped = SURROGATES[objective.surrogate].term(used, settings)
        if objective.correction != "none":
            term = correction * term
        loss = jnp.sum(weight_BS * term)

        kl = self._divergence(tokens, rows, moment)
        if kl is not None:
            loss += objective.kl_coefficient * jnp.sum(weight_BS * kl)
            sums["kl_reference_sum"] = jnp.sum(kl)
        if objective.entropy_coefficient or objective.entropy_target:
            coefficient = moment.entropy_coefficient if objective.entropy_target else objective.entropy_coefficient
            loss -= coefficient * jnp.sum(weight_BS * jnp.where(mask, entropy, 0.0))
        if head is not None:
            value_loss, value_sums = self._value_loss(outputs, rows, mask)
            loss += jnp.sum(weight_BS * value_loss)
            sums |= value_sums
        if objective.environment_coefficient:
            sums["environment_loss_sum"] = cross_entropy(prompt_logp, weights.environment)
            loss += objective.environment_coefficient * sums["environment_loss_sum"]
        if objective.imitation_coefficient:
            sums["imitation_loss_sum"] = cross_entropy(policy_logp, weights.imitation)
            loss += objective.imitation_coefficient * sums["imitation_loss_sum"]

        policy_logp, behaviour_logp = tokens.policy_logp, tokens.behaviour_logp
        ratio = jnp.where(mask, jnp.exp(policy_logp - behaviour_logp), 0.0)
        sequence_ratio = corrections.sequence_ratio(policy_logp - behaviour_logp, mask)
        own = mask & (rollout.policy_version == moment.version)
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
            "row_count": jnp.sum(jnp.any(mask, axis=1).astype(jnp.float32)),
            "sequence_ratio_sum": jnp.sum(sequence_ratio),
            "sequence_ratio_square_sum": jnp.sum(jnp.square(sequence_ratio)),
            "own_token_count": jnp.sum(own.astype(jnp.float32)),
            "gap_max": jnp.max(jnp.where(own, jnp.abs(policy_logp - behaviour_logp), 0.0)),
        }
        if objective.proximal != "behaviour":
            sums["old_gap_max"] = jnp.max(jnp.abs(tokens.old_logp - behaviour_logp))
        if rows.age_bucket is not None:
            in_bucket = rows.age_bucket[None, :] == jnp.arange(len(AGE_BUCKETS) + 1)[:, None]
            parts = {"token_count": mask, "clipped_count": mask & is_clipped, "ratio_sum": ratio}
            for name, value in (parts | {"ratio_square_sum": jnp.square(ratio)}).items():
                sums[f"{name}_by_age"] = jnp.sum(jnp.where(in_bucket, jnp.sum(value, axis=1)[None, :], 0), axis=1)
        return loss, jax.lax.stop_gradient(jax.tree.map(lambda x: x.astype(jnp.float32), sums))

    def _value_loss(
        self, outputs: jax.Array, rows: Experience, mask: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss [B,S] of the critic's predictions, 0.0 off the mask, and sums of what they explain."""
        keep = lambda x: None if x is None else jnp.where(mask, x, 0.0)
        returns = keep(rows.returns)
        loss = values.value_loss(
            outputs, returns, self.bins, old_value=keep(rows.value), clip=self.objective.value_clip
        )
        error = keep(returns - values.expected_value(outputs, self.bins))
        return keep(loss), {
            "value_loss_sum": jnp.sum(keep(loss)),
            "return_sum": jnp.sum(returns),
            "return_square_sum": jnp.sum(jnp.square(returns)),
            "value_error_sum": jnp.sum(error),
            "value_error_square_sum": jnp.sum(jnp.square(error)),
        }

    def _tokens(self, policy_logp: jax.Array, rows: Experience, mask: jax.Array, moment: Moment) -> Tokens:
        """The rows as the objective sees them, the old policy among them: harmless constants off the mask."""
        rollout, behaviour_logp = rows.rollout, rows.rollout.behaviour_logp
        proximal = self.objective.proximal
        if proximal == "behaviour":
            old_logp = behaviour_logp
        elif proximal == "generation":
            old_logp = rows.old_logp
        elif proximal == "interpolated":
            old_logp = corrections.interpolated_logp(
                policy_logp, behaviour_logp, rollout.policy_version, moment.start_version, moment.version
            )
        else:
            params = moment.start if proximal == "start" else moment.average
            old_logp = self._constant_logp(params, rows)
        if proximal != "behaviour":
            # A token the old policy would never have drawn must not make a ratio that float32 cannot hold.
            away = jnp.clip(old_logp - behaviour_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            old_logp = behaviour_logp + away
        tokens = Tokens(policy_logp, old_logp, behaviour_logp, rows.ref_logp, rows.advantage, rows.reward, mask)
        return tokens.only(mask)

    def _constant_logp(self, params: Any, rows: Experience) -> jax.Array:
        """Log-probs [B,S] of rows under other weights, a constant to differentiation."""
        params = jax.lax.stop_gradient(params)
        return jax.lax.stop_gradient(self._micro_batch_logp(params, rows).logp)

    @property
    def _weighed(self) -> str:
        """Whose ratio to the behaviour policy is left to the correction: "old", "policy" or "" (the term's own)."""
        base = SURROGATES[self.objective.surrogate].base
        return "" if base == "behaviour" or (base == "old" and self.objective.proximal == "behaviour") else base

    def _correction_ratio(self, tokens: Tokens) -> jax.Array:
        """Log-ratio [B,S] that the correction judges; the current policy's where the term carries a ratio itself."""
        base_logp = tokens.old_logp if self._weighed == "old" else tokens.policy_logp
        return jax.lax.stop_gradient(base_logp - tokens.behaviour_logp)

    def _correction(self, tokens: Tokens, moment: Moment) -> tuple[jax.Array, jax.Array]:
        """Weight [B,S] of each token's term, and which tokens stay."""
        return corrections.correction_weight(
            self._correction_ratio(tokens),
            tokens.mask,
            kind=self.objective.correction,
            low=self.objective.correction_low,
            high=self.objective.correction_high,
            threshold=moment.threshold,
            policy_log_ratio=jax.lax.stop_gradient(tokens.policy_logp - tokens.behaviour_logp),
            is_carried=not self._weighed,
        )

    def _divergence(self, tokens: Tokens, rows: Experience, moment: Moment) -> jax.Array | None:
        """Estimate [B,S] of the policy's divergence to the anchor; None where there is no penalty."""
        objective = self.objective
        if not objective.kl_coefficient:
            return None

        def to(anchor_logp: jax.Array) -> jax.Array:
            anchor_logp = jnp.where(tokens.mask, anchor_logp, 0.0)
            return kl_estimate(tokens.policy_logp, anchor_logp, kind=objective.kl_estimator)

        if objective.kl_anchor == "ewma":
            is_old = objective.proximal == "ewma"  # whose log-probs are there already
            return to(tokens.old_logp if is_old else self._constant_logp(moment.average, rows))
        if objective.kl_anchor == "convex":
            share = reference_share(moment.version // self.config.updates_per_iteration)
            return share * to(rows.ref_logp) + (1 - share) * to(self._constant_logp(moment.previous, rows))
        return to(rows.ref_logp)
