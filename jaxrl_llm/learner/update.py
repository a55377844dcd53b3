"""The update: U optimizer steps in one dispatch, each on a batch drawn from the ring.

It is blind to algorithms: it sees tokens, masks, advantages, log-probabilities and functions of these. Every term
of the loss and every metric is a sum under one denominator of the whole batch, so micro-batches, padding, row order and
devices change nothing beyond float rounding.

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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import corrections
from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.aggregation import cross_entropy
from jaxrl_llm.algorithms.anchors import kl_estimate
from jaxrl_llm.algorithms.old_policies import moving_average_share
from jaxrl_llm.algorithms.surrogates import LOG_RATIO_LIMIT, surrogate_terms
from jaxrl_llm.algorithms.views import OTHER_POLICIES, START, Batch, Ratios, Tokens
from jaxrl_llm.config import AlgorithmConfig, SamplingConfig, UpdateConfig
from jaxrl_llm.learner import adapter_modules
from jaxrl_llm.learner.low_memory import apply_updates
from jaxrl_llm.learner.micro_batches import MicroBatches, padded
from jaxrl_llm.learner.packed_batches import packed
from jaxrl_llm.models import lora, moe
from jaxrl_llm.models.row_logp import RowValues, row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.masks import sampled_mask
from jaxrl_llm.runtime.programs import run_if
from jaxrl_llm.types import AGE_BUCKETS, Experience, RingState, Rollout, TrainState

HIGH_GAP = 10  # times the mean that is allowed, between sampler and learner where one of them rounds
# draw(ring, key) -> ring, rows [M, b, ...], sums of what was drawn
Draw = Callable[[RingState, jax.Array], tuple[RingState, Experience, dict[str, jax.Array]]]


class Moment(NamedTuple):
    """When a batch is used: the policies beside the current one that its loss may look at, and their versions."""

    version: jax.Array  # [] i32 of the current weights; tokens sampled by it measure the sampler-learner gap
    start_version: jax.Array  # [] i32 of those before the iteration's updates; skipped updates make no version
    iteration: jax.Array  # [] i32
    others: Mapping[str, Any] = {}  # weights of other policies (views.OTHER_POLICIES) that the loss asks for
    over_batch: jax.Array | None = None  # [] f32, what a correction asks of the whole batch
    entropy_coefficient: jax.Array | None = None  # [] f32 weight of the entropy bonus, where it moves
    base: Any = None  # weights that all policies are adapters of, where they are
    expert_counts: jax.Array | None = None  # [layers,E] f32, tokens of the batch by expert, where their balance counts


class Weights(NamedTuple):
    """What each token counts in the parts of the loss, [...,S] f32: every division has been done."""

    policy: jax.Array  # in what completions are trained by
    cross_entropies: tuple[jax.Array, ...] = ()  # in those, each


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
        compares_mixed: whether sampler and learner must also agree about the new tokens of a row that has tokens of
            older weights; False if the sampler attended to keys of those weights.
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
        """U optimizer steps.

        Args:
            state: donate it.
            ring: donate it.
            iteration: [] i32, from 0.
            key: random key of this iteration's draws.
            draw: takes a batch from the ring.
            base: weights that do not learn, where the state's policies are adapters of them.

        Returns:
            New state and ring, and sums [] f32 over all updates; names ending in ``_max`` are maxima, those ending in
            ``_by_age`` sums [len(AGE_BUCKETS) + 1]; "nonfinite_run" counts the updates at the end alone.
        """
        start = state  # one more copy of the weights where the loss looks at it

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
        """One optimizer step on rows [M, b, ...]; skipped where they hold no token, or loss or gradient is not finite.

        Args:
            iteration, base: as for ``step``.
            start: the state before the iteration's updates; None = this one.
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

        # Figures are of what was trained on; the sampler-learner gap, which tells of a fault, is of every batch.
        told = sums | {"grad_norm_sum": norm["policy"], "update_count": jnp.float32(1)}
        told = {k: x if k.startswith(("gap_", "own_")) else jnp.where(usable, x, 0) for k, x in told.items()}
        return run_if(usable, apply, state), told | {
            "batch_count": (sums["token_count"] > 0).astype(jnp.float32),
            "skipped_count": 1.0 - usable.astype(jnp.float32),
            "nonfinite_count": 1.0 - is_finite.astype(jnp.float32),
        }

    def _moment(self, state: TrainState, batch: Experience, iteration: Any, start: TrainState, base: Any) -> Moment:
        """What the loss of a batch may look at; weights only where the objective asks for them."""
        weights = {START: start.params["policy"], **state.others}
        wanted = [name.removesuffix("_logp") for name in OTHER_POLICIES if self.algorithm.loss_needs(name)]
        others, coefficient = {name: weights[name] for name in wanted}, state.scalars.get("entropy_coefficient")
        moment = Moment(state.step, start.step, iteration, others, base=base, entropy_coefficient=coefficient)
        correction = self.algorithm.correction
        over_batch = correction.fact("over_batch")
        if over_batch is None:
            return moment
        # Of the whole batch, so that micro-batches change nothing: one forward more.
        rollout = batch.rollout
        mask = jax.vmap(sampled_mask)(rollout.prompt_length, rollout.length, rollout.policy_version)
        micros = self.micro_batches(batch, mask & batch.trainable[:, :, None])

        def ratios(i: jax.Array, seen: Ratios) -> Ratios:
            rows, mask = micros.at(i)
            policy_logp = self._micro_batch_logp(state.params["policy"], rows, base).logp
            found = self._ratios(self._tokens(policy_logp, rows, mask, moment))
            return jax.tree.map(lambda x, new: x.at[i].set(new), seen, found)

        shape = (micros.most, *jax.eval_shape(micros.at, 0)[1].shape)
        nothing = Ratios(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape, bool))
        seen = jax.lax.fori_loop(0, micros.count, ratios, nothing)
        seen = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), seen)
        return moment._replace(over_batch=over_batch(seen, **correction.settings))

    def gradient(
        self, learned: Mapping[str, Any], batch: Experience, moment: Moment
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Gradients of the aggregated loss over rows [M, b, ...] by all that is learned, and sums for the metrics."""
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        per_shard = lambda x: x.reshape(*batch.reward.shape, -1)
        micros = self.micro_batches(batch, jax.tree.map(per_shard, self._weights(flat)))
        if self.config.load_balance:
            routed = lambda rows: self._micro_batch_logp(learned["policy"], rows, moment.base).routed
            moment = moment._replace(expert_counts=moe.counts_of_batch(micros, routed, self.model.arch))

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
        """Of rows [B, ...], the whole batch."""
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
        """Cut rows [M, b, ...] and their weights, arrays [M, b, S], as the config says."""
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
        """Log-probs of rows [B,S] under ``params`` and what else is read off them (see models.row_logp).

        ``readout`` is that of a value ``head`` where there is one. With ``num_lines`` the rows are of packed lines.
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
        """``logp`` of the rows of one of ``micro_batches``."""
        params = lora.join(params, base)
        return self.logp(params, rows.rollout, group_size=self.group_size, num_lines=self.num_lines, **how)

    @property
    def optimizers(self) -> dict[str, optax.GradientTransformation]:
        """Of what is learned, by name."""
        both = {"policy": self.optimizer, "critic": self.critic_optimizer}
        return {name: optax.with_extra_args_support(one) for name, one in both.items() if one}

    @property
    def num_lines(self) -> int:
        """Lines of a micro-batch; 0 = its rows are padded."""
        return self.config.micro_batch_tokens // self.line_tokens if self.line_tokens else 0

    @property
    def bins(self) -> values.Bins:
        """How a value head's outputs become values."""
        critic = self.algorithm.critic
        return values.Bins(critic.bins, critic.low, critic.high)

    def _loss(self, learned, rows: Experience, weights: Weights, moment: Moment):
        """The loss of a micro-batch [] f32, and sums; ``learned``: policy, and critic where there is one."""
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

        used = tokens  # those the correction keeps; the others have no part in a row's sums either
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
        # Others' rows have the learner's own log-probs: they say nothing of the sampler's.
        is_new = rollout.policy_version == moment.version
        own = mask & is_new & (rollout.group_id >= 0)[:, None]
        if not self.compares_mixed:
            own &= jnp.all(is_new | (rollout.policy_version < 0), axis=1)[:, None]
        gap = jnp.where(own, jnp.abs(policy_logp - behaviour_logp), 0.0)
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
        """The rows as the loss sees them, the old policy among them: harmless constants off the mask."""
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
            # A token the old policy would never have drawn must not make a ratio that float32 cannot hold.
            away = self.algorithm.old_policy(tokens) - behaviour_logp
            away = jnp.clip(away, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            tokens = dataclasses.replace(tokens, old_logp=behaviour_logp + away)
        return tokens.only(mask)

    def _constant_logp(self, params: Any, rows: Experience, base: Any) -> jax.Array:
        """Log-probs [B,S] of rows under other weights, a constant to differentiation."""
        params = jax.lax.stop_gradient(params)
        return jax.lax.stop_gradient(self._micro_batch_logp(params, rows, base).logp)

    @property
    def _old_is_behaviour(self) -> bool:
        return self.algorithm.old_policy.fact("is_behaviour", False)

    @property
    def _weighed(self) -> str:
        """Whose ratio to the behaviour policy is left to the correction: "old", "policy" or "" (the term's own)."""
        base = self.algorithm.surrogate.fact("base", "")
        return "" if base == "old" and self._old_is_behaviour else base

    def _ratios(self, tokens: Tokens) -> Ratios:
        """What the correction judges; the current policy's ratio where the term carries a ratio itself."""
        base_logp = tokens.old_logp if self._weighed == "old" else tokens.policy_logp
        log_ratios = (base_logp - tokens.behaviour_logp, tokens.policy_logp - tokens.behaviour_logp)
        return Ratios(*(jax.lax.stop_gradient(x) for x in log_ratios), tokens.mask)
