"""The update: U optimizer steps in one dispatch, each on a batch drawn from the ring.

The update does not depend on the algorithm: it reads tokens, masks, advantages, log-probabilities and functions of
these. Every loss term and every metric is a sum with one denominator for the whole batch. Micro-batches, padding, row
order and devices therefore change only float rounding.

    scan over U:   draw a batch [M, b] -> weights of the whole batch
      loop over micro-batches:   forward, backward, add gradients and sums
        log-probs -> old policy -> correction -> surrogate -> sum by weights -> divergence, entropy, critic,
                     cross-entropy of prompts and of external rows
      clip, AdamW, step + 1

Letters: M ring shards, b rows per shard, B = M*b rows, S row width, U updates, n micro-batches.
Owns: the loss's composition, gradient accumulation, the optimizer step. Does not know: how rows are drawn
(the caller passes ``draw``), where rewards come from, an algorithm's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import corrections
from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.aggregation import cross_entropy
from jaxrl_llm.algorithms.divergences import kl_estimate
from jaxrl_llm.algorithms.inputs import OTHER_POLICIES, START, Batch, Ratios, Tokens
from jaxrl_llm.algorithms.old_policies import moving_average_share
from jaxrl_llm.algorithms.surrogates import LOG_RATIO_LIMIT, surrogate_terms
from jaxrl_llm.config import AlgorithmConfig, SamplingConfig, UpdateConfig
from jaxrl_llm.learner import adapter_modules
from jaxrl_llm.learner.low_memory import apply_updates
from jaxrl_llm.learner.micro_batches import MicroBatches, packed, padded
from jaxrl_llm.models import lora, moe
from jaxrl_llm.models.row_logp import RowValues, row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.masks import sampled_mask
from jaxrl_llm.runtime.programs import run_if
from jaxrl_llm.types import AGE_BUCKETS, Experience, RingState, Rollout, TrainState

HIGH_GAP = 10  # a token's sampler-learner gap is high above this many times the limit of the gap
# draw(ring, key) -> ring, rows [M, b, ...], sums over the drawn rows
Draw = Callable[[RingState, jax.Array], tuple[RingState, Experience, dict[str, jax.Array]]]


class Moment(NamedTuple):
    """Context of a batch's loss: policies other than the current one, weight versions and facts of the whole batch."""

    version: jax.Array  # [] i32, current weights; tokens sampled by this version measure the sampler-learner gap
    start_version: jax.Array  # [] i32, weights before the iteration's updates; a skipped update keeps the version
    iteration: jax.Array  # [] i32
    others: Mapping[str, Any] = {}  # weights of other policies (views.OTHER_POLICIES) that the loss needs
    over_batch: jax.Array | None = None  # [] f32, statistic of the whole batch that the correction needs
    entropy_coefficient: jax.Array | None = None  # [] f32 weight of the entropy bonus, if the weight changes
    base: Any = None  # frozen weights under the adapters of all policies; None = no adapters
    expert_counts: jax.Array | None = None  # [layers,E] f32, tokens of the batch per expert, with a load-balance loss


class Weights(NamedTuple):
    """Weight of each token in the parts of the loss, [...,S] f32. All denominators are included."""

    policy: jax.Array  # surrogate, divergence, entropy bonus and critic
    cross_entropies: tuple[jax.Array, ...] = ()  # one for each cross-entropy


@dataclasses.dataclass(frozen=True)
class Update:
    """Static description of the update; ``step`` is its one compiled program.

    Attributes:
        sampling: settings of the distribution that completions were drawn from.
        num_devices: number of data-parallel devices that split a micro-batch.
        line_tokens: width of the lines that rows are packed into; 0 = rows are padded.
        group_size: number of neighbouring rows of a batch that share a prompt; 1 = every row has its own.
        critic_optimizer: optimizer of the value head, if the state has a value head.
        pass_threshold: a rollout is correct if its reward is at least this.
        compares_mixed: whether the sampler-learner gap includes the new tokens of rows that also have tokens of older
            weights. False if the sampler attended to keys of the older weights.
    """

    config: UpdateConfig
    sampling: SamplingConfig
    model: Model
    optimizer: optax.GradientTransformation
    num_devices: int
    group_size: int = 1
    line_tokens: int = 0
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic_optimizer: optax.GradientTransformation | None = None
    pass_threshold: float = 1.0
    compares_mixed: bool = True

    def step(
        self, state: TrainState, ring: RingState, iteration: jax.Array, key: jax.Array, draw: Draw, base: Any = None
    ) -> tuple[TrainState, RingState, dict[str, jax.Array]]:
        """Take U optimizer steps.

        Args:
            state: the caller should donate it.
            ring: the caller should donate it.
            iteration: [] i32, from 0.
            key: random key of this iteration's draws.
            draw: function that draws a batch from the ring.
            base: frozen weights under the adapters of the state's policies; None = no adapters.

        Returns:
            New state and ring, and sums [] f32 over all updates. Names ending in ``_max`` are maxima. Names ending in
            ``_by_age`` are sums [len(AGE_BUCKETS) + 1]. "nonfinite_run" counts the consecutive non-finite updates at
            the end.
        """
        start = state  # costs one more copy of the weights if the loss reads it

        def one(carry, index):
            state, ring = carry
            ring, batch, drawn = draw(ring, jax.random.fold_in(key, index))
            state, sums = self.apply_batch(state, batch, iteration, start, base)
            return (state, ring), sums | drawn

        (state, ring), sums = jax.lax.scan(one, (state, ring), jnp.arange(self.config.updates_per_iteration))
        if "previous" in state.others:
            state = state.replace(others={**state.others, "previous": start.params["policy"]})
        run = jnp.sum(jnp.cumprod(sums["nonfinite_count"][::-1]))
        sums = {k: jnp.max(v) if k.endswith("_max") else jnp.sum(v, axis=0) for k, v in sums.items()}
        return state, ring, sums | {"nonfinite_run": run}

    def apply_batch(
        self, state: TrainState, batch: Experience, iteration: Any, start: TrainState | None = None, base: Any = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one optimizer step on rows [M, b, ...].

        The step is skipped if the rows have no token to train on, or if the loss or a gradient is not finite.

        Args:
            iteration, base: as for ``step``.
            start: state before the iteration's updates; None = ``state``.
        """
        moment = self._moment(state, batch, iteration, state if start is None else start, base)
        gradient, sums = self.gradient(state.params, batch, moment)
        norm = {name: optax.tree.norm(optax.tree.cast(part, jnp.float32)) for name, part in gradient.items()}
        is_finite = jnp.all(jnp.isfinite(jnp.stack([sums["loss_sum"], *norm.values()])))
        usable = is_finite & (sums["token_count"] > 0)
        algorithm = self.algorithm
        if algorithm.step_size:
            names = ("sequence_ratio_sum", "sequence_ratio_square_sum", "row_count")
            sums["rate_scale_sum"] = scale = algorithm.step_size(*(sums[name] for name in names))
        sums |= {f"{name}_sum": value for name, value in state.scalars.items()} | adapter_modules.sums(state.opt_state)

        def apply(state: TrainState) -> TrainState:
            params, opt_state, others, reward = {}, {}, state.others, jnp.mean(batch.reward, where=batch.trainable)
            for name, optimizer in self.optimizers.items():
                given = gradient[name], state.opt_state[name], state.params[name]
                updates, opt_state[name] = optimizer.update(*given, reward=reward)
                if algorithm.step_size and name == "policy":
                    updates = jax.tree.map(lambda u: u * scale, updates)
                params[name] = apply_updates(state.params[name], updates, state.step)
            if "average" in others:
                share = moving_average_share(algorithm.average_decay, state.step + 1)
                move = lambda old, new: old + share * (new - old)
                others = {**others, "average": jax.tree.map(move, others["average"], params["policy"])}
            moved = lambda coefficient: algorithm.entropy_bonus(coefficient, sums["entropy_sum"] / sums["token_count"])
            scalars = {name: moved(coefficient) for name, coefficient in state.scalars.items()}
            return TrainState(params, opt_state, state.step + 1, others, scalars)

        # A skipped batch adds only to the sampler-learner gap, which shows faults, and to the counts below.
        told = sums | {"grad_norm_sum": norm["policy"], "update_count": jnp.float32(1)}
        told = {k: x if k.startswith(("gap_", "own_")) else jnp.where(usable, x, 0) for k, x in told.items()}
        return run_if(usable, apply, state), told | {
            "batch_count": (sums["token_count"] > 0).astype(jnp.float32),
            "skipped_count": 1.0 - usable.astype(jnp.float32),
            "nonfinite_count": 1.0 - is_finite.astype(jnp.float32),
        }

    def _moment(self, state: TrainState, batch: Experience, iteration: Any, start: TrainState, base: Any) -> Moment:
        """Build the context of a batch's loss, with the weights of other policies only if the loss needs them."""
        weights = {START: start.params["policy"], **state.others}
        wanted = [name.removesuffix("_logp") for name in OTHER_POLICIES if self.algorithm.loss_needs(name)]
        others, coefficient = {name: weights[name] for name in wanted}, state.scalars.get("entropy_coefficient")
        moment = Moment(state.step, start.step, iteration, others, base=base, entropy_coefficient=coefficient)
        correction = self.algorithm.correction
        over_batch = correction.fact("over_batch")
        if over_batch is None:
            return moment
        # One more forward pass over the whole batch, so that the statistic does not depend on the micro-batches.
        rollout = batch.rollout
        mask = jax.vmap(sampled_mask)(rollout.prompt_length, rollout.length, rollout.policy_version)
        micros = self.micro_batches(batch, mask & batch.trainable[:, :, None])

        def ratios(i: jax.Array, seen: Ratios) -> Ratios:
            rows, mask = micros.at(i)
            policy_logp = self._micro_batch_logp(state.params["policy"], rows, base).logp
            found = self._ratios(self._tokens(policy_logp, rows, mask, moment))
            return jax.tree.map(lambda x, new: x.at[i].set(new), seen, found)

        shape = (micros.max_count, *jax.eval_shape(micros.at, 0)[1].shape)
        nothing = Ratios(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape, bool))
        seen = jax.lax.fori_loop(0, micros.count, ratios, nothing)
        seen = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), seen)
        return moment._replace(over_batch=over_batch(seen, **correction.settings))

    def gradient(
        self, learned: Mapping[str, Any], batch: Experience, moment: Moment
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Return the gradients of the loss over rows [M, b, ...], by name as in ``learned``, and sums for metrics."""
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        per_shard = lambda x: x.reshape(*batch.reward.shape, -1)
        micros = self.micro_batches(batch, jax.tree.map(per_shard, self._weights(flat)))
        if self.config.load_balance:
            routed = lambda rows: self._micro_batch_logp(learned["policy"], rows, moment.base).routed
            moment = moment._replace(expert_counts=moe.counts_of_batch(micros, routed, self.model.arch))

        def accumulate(i, carry):
            # Each layer adds to the accumulated gradient in place, so a micro-batch needs no gradient buffer.
            gradient, micro = jax.tree.map(jax.ref.new_ref, carry[0]), micros.at(i)
            _, backward, sums = jax.vjp(lambda learned: self._loss(learned, *micro, moment), learned, has_aux=True)
            backward.with_refs(gradient)(jnp.float32(1))
            old = carry[1]
            merged = {k: jnp.maximum(old[k], v) if k.endswith("_max") else old[k] + v for k, v in sums.items()}
            return jax.tree.map(jax.ref.freeze, gradient), merged

        sums = jax.eval_shape(lambda: self._loss(learned, *micros.at(0), moment)[1])
        return jax.lax.fori_loop(0, micros.count, accumulate, jax.tree.map(jnp.zeros_like, (learned, sums)))

    def _weights(self, rows: Experience) -> Weights:
        """Compute the token weights of rows [B, ...], which must be the whole batch."""
        rollout = rows.rollout
        sampled = sampled_mask(rollout.prompt_length, rollout.length, rollout.policy_version)
        batch = Batch(
            trainable=rows.trainable,
            group_id=rollout.group_id,
            correct=rows.reward >= self.pass_threshold,
            prompt_length=rollout.prompt_length,
            length=rollout.length,
            width=rollout.tokens.shape[1],
            max_length=self.sampling.max_completion_tokens,
            sampled=sampled,
        )
        others = tuple(one(batch) for one in self.algorithm.cross_entropies)
        return Weights(self.algorithm.aggregation(sampled, batch), others)

    def micro_batches(self, batch: Experience, weight: Any) -> MicroBatches:
        """Cut rows [M, b, ...] and their weights, arrays [M, b, S], into padded or packed micro-batches."""
        config = self.config
        if not self.num_lines:
            return padded(batch, weight, num_rows=config.micro_batch_size)
        completion_width = self.sampling.max_completion_tokens
        prompt_width = batch.rollout.tokens.shape[-1] - completion_width
        return packed(
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
        expert_counts: jax.Array | None = None,
    ) -> RowValues:
        """Return log-probs, entropies and other values of rows, [B,S], under ``params`` (see models.row_logp).

        Args:
            num_lines: number of packed lines that the rows fill; 0 = the rows are padded.
            head: value head. Its outputs replace ``readout``.
        """
        if head is not None:
            share = self.algorithm.critic.gradient_share
            readout = lambda hidden: values.head_outputs(head, hidden, gradient_share=share)
        kept = map(rollout.columns.get, ("support", "experts"))
        rows = (rollout.tokens, rollout.prompt_length, rollout.length, *kept)
        per_device = max(1, (num_lines or rollout.tokens.shape[0]) // self.num_devices)
        if num_lines:
            rows = jax.tree.map(lambda x: x.reshape(num_lines, -1, *x.shape[1:]), rows)
        *rows, chosen = rows
        return row_logp(
            self.model,
            params,
            *rows,
            sampling=self.sampling,
            completion_width=self.sampling.max_completion_tokens,
            chunk_positions=max(1, self.config.logp_chunk_tokens // per_device),
            line_width=self.line_tokens if num_lines else 0,
            group_size=group_size,
            remat=remat,
            readout=readout,
            with_prompts=with_prompts,
            routing=moe.replay(chosen, expert_counts),
        )

    def _micro_batch_logp(self, params: Any, rows: Experience, base: Any, **how: Any) -> RowValues:
        """Return ``logp`` of one micro-batch, with the base joined to adapters."""
        params = lora.join(params, base)
        return self.logp(params, rows.rollout, group_size=self.group_size, num_lines=self.num_lines, **how)

    @property
    def optimizers(self) -> dict[str, optax.GradientTransformation]:
        """Optimizers by the name of the weights: "policy", and "critic" if there is one."""
        both = {"policy": self.optimizer, "critic": self.critic_optimizer}
        return {name: optax.with_extra_args_support(one) for name, one in both.items() if one}

    @property
    def num_lines(self) -> int:
        """Number of packed lines in a micro-batch; 0 = rows are padded."""
        return self.config.micro_batch_tokens // self.line_tokens if self.line_tokens else 0

    @property
    def bins(self) -> values.Bins:
        """Bins that turn a value head's outputs into values."""
        critic = self.algorithm.critic
        return values.Bins(critic.bins, critic.low, critic.high)

    def _loss(self, learned, rows: Experience, weights: Weights, moment: Moment):
        """Return a micro-batch's loss, [] f32, and sums. ``learned`` has "policy", and "critic" if there is one."""
        rollout, algorithm = rows.rollout, self.algorithm
        params, head = learned["policy"], learned.get("critic")
        with_prompts = any(one.fact("reads") == "prompt_logp" for one in algorithm.cross_entropies)
        policy_logp, entropy, outputs, prompt_logp, routed = self._micro_batch_logp(
            params,
            rows,
            moment.base,
            remat=True,
            head=head,
            with_prompts=with_prompts,
            expert_counts=moment.expert_counts,
        )
        weight_BS = weights.policy
        mask = weight_BS > 0
        tokens = self._tokens(policy_logp, rows, mask, moment)
        total = lambda x: jnp.sum(jnp.where(mask, x, 0).astype(jnp.float32))
        sums = {}

        used = tokens  # tokens that the correction drops do not enter a row's sums in the surrogate either
        if algorithm.correction:
            ratios = self._ratios(tokens)._replace(over_batch=moment.over_batch)
            log_weight, is_kept = algorithm.correction(ratios)
            correction = corrections.weight(log_weight, is_kept, is_carried=not self._weighed)
            used = tokens.only(is_kept)
            sums["correction_weight_sum"] = total(correction)
        term, is_clipped = surrogate_terms(algorithm.surrogate, used)
        if algorithm.correction:
            term = correction * term
        loss = jnp.sum(weight_BS * term)

        if algorithm.divergence:
            kl = algorithm.divergence(tokens)
            loss += algorithm.divergence["coefficient"] * jnp.sum(weight_BS * kl)
            sums["kl_reference_sum"] = jnp.sum(kl)
        if algorithm.entropy_bonus:
            moved, fixed = moment.entropy_coefficient, algorithm.entropy_bonus["coefficient"]
            coefficient = fixed if moved is None else moved
            loss -= coefficient * jnp.sum(weight_BS * jnp.where(mask, entropy, 0.0))
        if head is not None:
            of_rows = outputs, rows.columns["returns"], rows.columns.get("value"), mask
            value_loss, value_sums = values.value_terms(*of_rows, self.bins, clip=algorithm.critic.clip)
            loss += jnp.sum(weight_BS * value_loss)
            sums |= value_sums
        for one, weight in zip(algorithm.cross_entropies, weights.cross_entropies, strict=True):
            value = cross_entropy(prompt_logp if one.fact("reads") == "prompt_logp" else policy_logp, weight)
            loss += one["coefficient"] * value
            sums |= {f"{one.name}_loss_sum": value, f"{one.name}_weight_sum": jnp.sum(weight)}

        sums |= moe.sums(routed, mask, moment.expert_counts, self.model.arch)
        if self.config.load_balance:
            loss += self.config.load_balance * sums["balance_sum"]

        policy_logp, behaviour_logp = tokens.policy_logp, tokens.behaviour_logp
        ratio = jnp.where(mask, jnp.exp(policy_logp - behaviour_logp), 0.0)
        sequence_ratio = corrections.sequence_ratio(policy_logp - behaviour_logp, mask)
        # External rows have the learner's own log-probs, so they cannot measure the gap to the sampler.
        is_new = rollout.policy_version == moment.version
        own = mask & is_new & (rollout.group_id >= 0)[:, None]
        if not self.compares_mixed:
            own &= jnp.all(is_new | (rollout.policy_version < 0), axis=1)[:, None]
        gap = jnp.where(own, jnp.abs(policy_logp - behaviour_logp), 0.0)
        sums |= {
            "loss_sum": loss,
            "token_count": total(mask),
            "entropy_sum": total(entropy),
            # The behaviour policy drew the samples, so it is k3's first argument.
            "kl_behaviour_sum": total(kl_estimate(behaviour_logp, policy_logp, kind="k3")),
            "clipped_count": total(is_clipped),
            "ratio_sum": jnp.sum(ratio),
            "ratio_square_sum": jnp.sum(jnp.square(ratio)),
            "ratio_max": jnp.max(ratio),
            "row_count": jnp.sum(jnp.any(mask, axis=1).astype(jnp.float32)),
            "sequence_ratio_sum": jnp.sum(sequence_ratio),
            "sequence_ratio_square_sum": jnp.sum(jnp.square(sequence_ratio)),
            "own_token_count": jnp.sum(own.astype(jnp.float32)),
            "gap_max": jnp.max(gap),
            "gap_sum": jnp.sum(gap),
            "gap_high_count": jnp.sum((gap > HIGH_GAP * self.config.max_sampler_learner_gap_nats).astype(jnp.float32)),
        }
        if not self._old_is_behaviour:
            sums["old_gap_max"] = jnp.max(jnp.abs(tokens.old_logp - behaviour_logp))
        if "age_bucket" in rows.columns:
            in_bucket = rows.columns["age_bucket"][None, :] == jnp.arange(len(AGE_BUCKETS) + 1)[:, None]
            parts = {"token_count": mask, "clipped_count": mask & is_clipped, "ratio_sum": ratio}
            for name, value in (parts | {"ratio_square_sum": jnp.square(ratio)}).items():
                sums[f"{name}_by_age"] = jnp.sum(jnp.where(in_bucket, jnp.sum(value, axis=1)[None, :], 0), axis=1)
        return loss, jax.lax.stop_gradient(jax.tree.map(lambda x: x.astype(jnp.float32), sums))

    def _tokens(self, policy_logp: jax.Array, rows: Experience, mask: jax.Array, moment: Moment) -> Tokens:
        """Build the loss functions' view of the rows, with the old policy's log-probs and constants off the mask."""
        rollout, behaviour_logp = rows.rollout, rows.rollout.behaviour_logp
        columns = {name: x for name, x in rows.columns.items() if self.algorithm.loss_needs(name)}
        columns |= {
            f"{name}_logp": self._constant_logp(params, rows, moment.base) for name, params in moment.others.items()
        }
        tokens = Tokens(
            policy_logp,
            behaviour_logp,
            behaviour_logp,
            rows.advantage,
            rows.reward,
            mask,
            age=-((rollout.policy_version - moment.start_version) // self.config.updates_per_iteration),
            iteration=moment.iteration,
            group_size=self.group_size,
            columns=columns,
        )
        if not self._old_is_behaviour:
            # Clip, because the ratio of a token that the old policy would never draw overflows float32.
            away = self.algorithm.old_policy(tokens) - behaviour_logp
            away = jnp.clip(away, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            tokens = dataclasses.replace(tokens, old_logp=behaviour_logp + away)
        return tokens.only(mask)

    def _constant_logp(self, params: Any, rows: Experience, base: Any) -> jax.Array:
        """Return the log-probs [B,S] of rows under other weights, without a gradient."""
        params = jax.lax.stop_gradient(params)
        return jax.lax.stop_gradient(self._micro_batch_logp(params, rows, base).logp)

    @property
    def _old_is_behaviour(self) -> bool:
        return self.algorithm.old_policy.fact("is_behaviour", False)

    @property
    def _weighed(self) -> str:
        """Policy whose ratio to the behaviour policy the correction supplies: "old", "policy" or "".

        "" means that the surrogate has this ratio itself or needs none.
        """
        base = self.algorithm.surrogate.fact("base", "")
        return "" if base == "old" and self._old_is_behaviour else base

    def _ratios(self, tokens: Tokens) -> Ratios:
        """Return the correction's ratios to the behaviour policy, without gradients.

        ``log_ratio`` is the old policy's if ``_weighed`` is "old", else the current policy's.
        """
        base_logp = tokens.old_logp if self._weighed == "old" else tokens.policy_logp
        log_ratios = (base_logp - tokens.behaviour_logp, tokens.policy_logp - tokens.behaviour_logp)
        return Ratios(*(jax.lax.stop_gradient(x) for x in log_ratios), tokens.mask)
