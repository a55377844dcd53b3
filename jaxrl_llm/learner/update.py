"""The update: U optimizer steps in one dispatch, each on a batch drawn from the ring.

The update does not depend on the algorithm. It reads tokens, masks, advantages and log-probabilities, and calls the
functions that the config names. Every loss term and every metric is a sum with one denominator for the whole batch.
Micro-batches, padding, row order and devices therefore change only float rounding.

    scan over U:   draw a batch [M, b] -> weights of the whole batch
      loop over micro-batches:   forward, backward, add gradients and sums
        log-probs -> old policy -> terms of the loss (learner.loss)
      clip, AdamW, step + 1

Letters: M ring shards, b rows per shard, B = M*b rows, S row width, U updates, n micro-batches.
Owns: forward passes of the loss, gradient accumulation, the optimizer step. Does not know: how rows are drawn
(the caller passes ``draw``), terms of the loss, where rewards come from, an algorithm's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.inputs import OTHER_POLICIES, START, Batch, Ratios, Tokens
from jaxrl_llm.algorithms.old_policies import moving_average_share
from jaxrl_llm.algorithms.surrogates import LOG_RATIO_LIMIT
from jaxrl_llm.config import AlgorithmConfig, SamplingConfig, UpdateConfig
from jaxrl_llm.learner import adapter_modules
from jaxrl_llm.learner.loss import GAP_SUMS, LossInputs, Objective, Weights, loss
from jaxrl_llm.learner.low_memory import apply_updates
from jaxrl_llm.learner.micro_batches import MicroBatches, packed, padded
from jaxrl_llm.models import lora, moe
from jaxrl_llm.models.row_logp import RowValues, row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.masks import sampled_mask
from jaxrl_llm.runtime.programs import run_if
from jaxrl_llm.types import Experience, RingState, Rollout, Sums, TrainState

# draw(ring, key) -> ring, rows [M, b, ...], sums over the drawn rows
Draw = Callable[[RingState, jax.Array], tuple[RingState, Experience, Sums]]

TokenWeights = TypeVar("TokenWeights")  # one or more arrays [M, b, S]


class Moment(NamedTuple):
    """Context of a batch's loss: policies other than the current one, weight versions and facts of the whole batch."""

    version: jax.Array  # [] i32, current weights; tokens sampled by this version measure the sampler-learner gap
    start_version: jax.Array  # [] i32, weights before the iteration's updates; a skipped update keeps the version
    iteration: jax.Array | int  # [] i32, from 0
    others: Mapping[str, Any] = {}  # weights of other policies (inputs.OTHER_POLICIES) that the loss needs
    over_batch: jax.Array | None = None  # [] f32, statistic of the whole batch that the correction needs
    entropy_coefficient: jax.Array | None = None  # [] f32 weight of the entropy bonus, if the weight changes
    base: Any = None  # frozen weights under the adapters of all policies; None = no adapters
    expert_counts: jax.Array | None = None  # [layers,E] f32, tokens of the batch per expert, with a load-balance loss


@dataclasses.dataclass(frozen=True)
class Update:
    """Static description of the update; ``step`` is its one compiled program.

    Attributes:
        sampling: settings of the distribution that completions were drawn from.
        num_devices: number of data-parallel devices that split a micro-batch.
        line_tokens: width of the lines that rows are packed into; 0 = rows are padded.
        group_size: number of neighbouring rows of a batch that share a prompt; 1 = every row has its own prompt.
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

    @property
    def objective(self) -> Objective:
        """Static description of the loss."""
        return Objective(self.algorithm, self.config, self.model.arch, self.compares_mixed)

    @property
    def optimizers(self) -> dict[str, optax.GradientTransformationExtraArgs]:
        """Optimizers by the name of the weights: "policy", and "critic" if there is one."""
        optimizers = {"policy": optax.with_extra_args_support(self.optimizer)}
        if self.critic_optimizer:
            optimizers["critic"] = optax.with_extra_args_support(self.critic_optimizer)
        return optimizers

    @property
    def num_lines(self) -> int:
        """Number of packed lines in a micro-batch; 0 = rows are padded."""
        return self.config.micro_batch_tokens // self.line_tokens if self.line_tokens else 0

    def step(
        self,
        state: TrainState,
        ring: RingState,
        iteration: jax.Array,
        key: jax.Array,
        draw: Draw,
        base: Any = None,
    ) -> tuple[TrainState, RingState, Sums]:
        """Take U optimizer steps.

        Args:
            state: the caller should donate it.
            ring: the caller should donate it.
            iteration: [] i32, from 0.
            key: random key of this iteration's draws.
            draw: function that draws a batch from the ring.
            base: frozen weights under the adapters of the state's policies; None = no adapters.

        Returns:
            New state and ring, and sums over all updates. The total "nonfinite_run" counts the consecutive non-finite
            updates at the end.
        """
        start = state  # keeping it costs one more copy of the weights, only if the loss reads it

        def take_step(carry: tuple[TrainState, RingState], index: jax.Array):
            state, ring = carry
            ring, batch, draw_sums = draw(ring, jax.random.fold_in(key, index))
            state, sums = self.apply_batch(state, batch, iteration, start, base)
            return (state, ring), sums.union(draw_sums)

        numbers = jnp.arange(self.config.updates_per_iteration)
        (state, ring), sums_of_steps = jax.lax.scan(take_step, (state, ring), numbers)
        if "previous" in state.others:
            others = {**state.others, "previous": start.params["policy"]}
            state = dataclasses.replace(state, others=others)
        is_nonfinite_newest_first = sums_of_steps["nonfinite_count"][::-1]
        nonfinite_run = jnp.sum(jnp.cumprod(is_nonfinite_newest_first))
        sums = sums_of_steps.over_batches().union(Sums({"nonfinite_run": nonfinite_run}))
        return state, ring, sums

    def apply_batch(
        self,
        state: TrainState,
        batch: Experience,
        iteration: jax.Array | int,
        start: TrainState | None = None,
        base: Any = None,
    ) -> tuple[TrainState, Sums]:
        """Take one optimizer step on rows [M, b, ...].

        The step is skipped if the rows have no token to train on, or if the loss or a gradient is not finite.

        Args:
            iteration, base: as for ``step``.
            start: state before the iteration's updates; None = ``state``.
        """
        if start is None:
            start = state
        moment = self._moment(state, batch, iteration, start, base)
        gradient, batch_sums = self.gradient(state.params, batch, moment)
        norms = {}
        for name, part in gradient.items():
            norms[name] = optax.tree.norm(optax.tree.cast(part, jnp.float32))
        checked_values = jnp.stack([batch_sums["loss_sum"], *norms.values()])
        is_finite = jnp.all(jnp.isfinite(checked_values))
        has_tokens = batch_sums["token_count"] > 0
        is_usable = is_finite & has_tokens
        totals = {f"{name}_sum": value for name, value in state.scalars.items()}
        totals |= adapter_modules.sums(state.opt_state)
        totals["grad_norm_sum"] = norms["policy"]
        totals["update_count"] = jnp.float32(1)
        scale = None
        if self.algorithm.step_size:
            scale = self.algorithm.step_size(
                batch_sums["sequence_ratio_sum"],
                batch_sums["sequence_ratio_square_sum"],
                batch_sums["row_count"],
            )
            totals["rate_scale_sum"] = scale

        def apply(state: TrainState) -> TrainState:
            mean_reward = jnp.mean(batch.reward, where=batch.trainable)
            mean_entropy = batch_sums["entropy_sum"] / batch_sums["token_count"]
            return self._stepped(state, gradient, scale, mean_reward, mean_entropy)

        counts = {
            "batch_count": has_tokens.astype(jnp.float32),
            "skipped_count": 1.0 - is_usable.astype(jnp.float32),
            "nonfinite_count": 1.0 - is_finite.astype(jnp.float32),
        }
        sums = _zero_unless(is_usable, batch_sums.union(Sums(totals)))
        return run_if(is_usable, apply, state), sums.union(Sums(counts))

    def _stepped(
        self,
        state: TrainState,
        gradient: Mapping[str, Any],
        scale: jax.Array | None,
        mean_reward: jax.Array,
        mean_entropy: jax.Array,
    ) -> TrainState:
        """Return the state after one optimizer step.

        Args:
            scale: factor [] f32 of the policy's step; None = 1.
            mean_reward: mean reward [] f32 of the batch.
            mean_entropy: mean entropy [] f32 of the batch's trained tokens, nats.
        """
        params = {}
        opt_state = {}
        for name, optimizer in self.optimizers.items():
            updates, opt_state[name] = optimizer.update(
                gradient[name],
                state.opt_state[name],
                state.params[name],
                reward=mean_reward,
            )
            if scale is not None and name == "policy":
                updates = jax.tree.map(lambda update: update * scale, updates)
            params[name] = apply_updates(state.params[name], updates, state.step)
        others = state.others
        if "average" in others:
            share = moving_average_share(self.algorithm.average_decay, state.step + 1)

            def move(old: jax.Array, new: jax.Array) -> jax.Array:
                return old + share * (new - old)

            average = jax.tree.map(move, others["average"], params["policy"])
            others = {**others, "average": average}
        bonus = self.algorithm.entropy_bonus
        scalars = {name: bonus(coefficient, mean_entropy) for name, coefficient in state.scalars.items()}
        return TrainState(params, opt_state, state.step + 1, others, scalars)

    def _moment(
        self,
        state: TrainState,
        batch: Experience,
        iteration: jax.Array | int,
        start: TrainState,
        base: Any,
    ) -> Moment:
        """Build the context of a batch's loss, with the weights of other policies only if the loss needs them."""
        policies = {START: start.params["policy"], **state.others}
        needed = [name.removesuffix("_logp") for name in OTHER_POLICIES if self.algorithm.loss_needs(name)]
        moment = Moment(
            state.step,
            start.step,
            iteration,
            others={name: policies[name] for name in needed},
            base=base,
            entropy_coefficient=state.scalars.get("entropy_coefficient"),
        )
        correction = self.algorithm.correction
        over_batch = correction.facts.over_batch
        if over_batch is None:
            return moment
        ratios = self._ratios_of_batch(state.params["policy"], batch, moment)
        return moment._replace(over_batch=over_batch(ratios, **correction.settings))

    def _ratios_of_batch(
        self,
        params: Any,
        batch: Experience,
        moment: Moment,
    ) -> Ratios:
        """Return the correction's ratios of all rows.

        This costs one more forward pass over the whole batch, so that a statistic of the ratios does not depend on the
        micro-batches.
        """
        rollout = batch.rollout
        mask = jax.vmap(sampled_mask)(rollout.prompt_length, rollout.length, rollout.policy_version)
        micros = self.micro_batches(batch, mask & batch.trainable[:, :, None])

        def add(i: jax.Array, ratios: Ratios) -> Ratios:
            rows, mask = micros.at(i)
            policy_logp = self._micro_batch_logp(params, rows, moment.base).logp
            piece = self.objective.ratios(self._tokens(policy_logp, rows, mask, moment))
            return jax.tree.map(lambda whole, part: whole.at[i].set(part), ratios, piece)

        shape = (micros.max_count, *jax.eval_shape(micros.at, 0)[1].shape)
        empty = Ratios(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape, bool))
        ratios = jax.lax.fori_loop(0, micros.count, add, empty)
        return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), ratios)

    def gradient(
        self,
        learned: Mapping[str, Any],
        batch: Experience,
        moment: Moment,
    ) -> tuple[dict[str, Any], Sums]:
        """Return the gradients of the loss over rows [M, b, ...], by name as in ``learned``, and sums for metrics."""
        flat_batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        flat_weights = self._weights(flat_batch)
        weights = jax.tree.map(lambda x: x.reshape(*batch.reward.shape, -1), flat_weights)
        micros = self.micro_batches(batch, weights)
        if self.config.load_balance:

            def routed(rows: Experience) -> tuple[jax.Array, ...]:
                return self._micro_batch_logp(learned["policy"], rows, moment.base).routed

            moment = moment._replace(expert_counts=moe.counts_of_batch(micros, routed, self.model.arch))

        def accumulate(i: jax.Array, carry: tuple[Any, Sums]) -> tuple[Any, Sums]:
            gradient, sums = carry
            # Each layer adds to the accumulated gradient in place, so a micro-batch needs no gradient buffer.
            accumulated = jax.tree.map(jax.ref.new_ref, gradient)
            rows, weights = micros.at(i)

            def loss_of_rows(learned: Mapping[str, Any]) -> tuple[jax.Array, Sums]:
                return self._loss(learned, rows, weights, moment)

            _, backward, micro_sums = jax.vjp(loss_of_rows, learned, has_aux=True)
            # pyrefly: ignore[missing-attribute], jax declares a plain function, and returns an object with this method
            backward.with_refs(accumulated)(jnp.float32(1))
            return jax.tree.map(jax.ref.freeze, accumulated), sums.plus(micro_sums)

        def sums_of_first() -> Sums:
            _, sums = self._loss(learned, *micros.at(0), moment)
            return sums

        abstract_sums = jax.eval_shape(sums_of_first)
        zeros = jax.tree.map(jnp.zeros_like, (learned, abstract_sums))
        return jax.lax.fori_loop(0, micros.count, accumulate, zeros)

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
        cross_entropies = tuple(weigh(batch) for weigh in self.algorithm.cross_entropies)
        return Weights(self.algorithm.aggregation(sampled, batch), cross_entropies)

    def micro_batches(
        self,
        batch: Experience,
        weight: TokenWeights,
    ) -> MicroBatches[TokenWeights]:
        """Cut rows [M, b, ...] and their weights, arrays [M, b, S], into padded or packed micro-batches."""
        if not self.num_lines:
            return padded(batch, weight, num_rows=self.config.micro_batch_size)
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
            readout = self._value_readout(head)
        rows = (
            rollout.tokens,
            rollout.prompt_length,
            rollout.length,
            rollout.columns.get("support"),
            rollout.columns.get("experts"),
        )
        num_rows = rollout.tokens.shape[0]
        if num_lines:
            rows = jax.tree.map(lambda x: x.reshape(num_lines, -1, *x.shape[1:]), rows)
        tokens, prompt_length, length, support, experts = rows
        rows_per_device = max(1, (num_lines or num_rows) // self.num_devices)
        return row_logp(
            self.model,
            params,
            tokens,
            prompt_length,
            length,
            support,
            sampling=self.sampling,
            completion_width=self.sampling.max_completion_tokens,
            chunk_positions=max(1, self.config.logp_chunk_tokens // rows_per_device),
            line_width=self.line_tokens if num_lines else 0,
            group_size=group_size,
            remat=remat,
            readout=readout,
            with_prompts=with_prompts,
            routing=moe.replay(experts, expert_counts),
        )

    def _value_readout(self, head: Any) -> Callable[[jax.Array], jax.Array]:
        """Return the function from hidden states to the outputs of a value head."""
        share = self.algorithm.critic.gradient_share

        def readout(hidden: jax.Array) -> jax.Array:
            return values.head_outputs(head, hidden, gradient_share=share)

        return readout

    def _micro_batch_logp(
        self,
        params: Any,
        rows: Experience,
        base: Any,
        **settings: Any,
    ) -> RowValues:
        """Return ``logp`` of one micro-batch, with the base joined to adapters.

        Args:
            settings: keywords of ``logp``.
        """
        params = lora.join(params, base)
        return self.logp(
            params,
            rows.rollout,
            group_size=self.group_size,
            num_lines=self.num_lines,
            **settings,
        )

    def _loss(
        self,
        learned: Mapping[str, Any],
        rows: Experience,
        weights: Weights,
        moment: Moment,
    ) -> tuple[jax.Array, Sums]:
        """Return a micro-batch's loss, [] f32, and sums. ``learned`` has "policy", and "critic" if there is one."""
        outputs = self._micro_batch_logp(
            learned["policy"],
            rows,
            moment.base,
            remat=True,
            head=learned.get("critic"),
            with_prompts=self.objective.reads_prompt_logp,
            expert_counts=moment.expert_counts,
        )
        inputs = LossInputs(
            rows,
            weights,
            self._tokens(outputs.logp, rows, weights.policy > 0, moment),
            outputs,
            version=moment.version,
            over_batch=moment.over_batch,
            entropy_coefficient=moment.entropy_coefficient,
            expert_counts=moment.expert_counts,
        )
        return loss(self.objective, inputs)

    def _tokens(
        self,
        policy_logp: jax.Array,
        rows: Experience,
        mask: jax.Array,
        moment: Moment,
    ) -> Tokens:
        """Build ``Tokens``, the input of the loss functions: rows with the old policy's log-probs, 0.0 off the mask."""
        rollout = rows.rollout
        behaviour_logp = rollout.behaviour_logp
        columns = {name: x for name, x in rows.columns.items() if self.algorithm.loss_needs(name)}
        for name, params in moment.others.items():
            columns[f"{name}_logp"] = self._constant_logp(params, rows, moment.base)
        steps_ahead = rollout.policy_version - moment.start_version
        tokens = Tokens(
            policy_logp,
            behaviour_logp,
            behaviour_logp,
            rows.advantage,
            rows.reward,
            mask,
            age=-(steps_ahead // self.config.updates_per_iteration),
            iteration=jnp.asarray(moment.iteration),
            group_size=self.group_size,
            columns=columns,
        )
        if not self.objective.old_is_behaviour:
            # Clip, because the ratio of a token that the old policy would never draw overflows float32.
            log_ratio = self.algorithm.old_policy(tokens) - behaviour_logp
            log_ratio = jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            tokens = dataclasses.replace(tokens, old_logp=behaviour_logp + log_ratio)
        return tokens.only(mask)

    def _constant_logp(self, params: Any, rows: Experience, base: Any) -> jax.Array:
        """Return the log-probs [B,S] of rows under other weights, without a gradient."""
        params = jax.lax.stop_gradient(params)
        return jax.lax.stop_gradient(self._micro_batch_logp(params, rows, base).logp)


def _zero_unless(is_usable: jax.Array, sums: Sums) -> Sums:
    """Return the sums of a batch, or zeros if its update is skipped.

    The sums of the sampler-learner gap stay, because a large gap shows a fault.
    """

    def keep(named: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        kept = {}
        for name, x in named.items():
            kept[name] = x if name in GAP_SUMS else jnp.where(is_usable, x, 0)
        return kept

    return Sums(keep(sums.totals), keep(sums.maxima), keep(sums.by_age))
