"""Annotation: log-probs, values and hidden states that the learner computes for fresh rollouts before training.

The forward passes run in pieces of at most ``update.micro_batch_size`` rows.

Owns: these functions of an iteration's rollouts. Does not know: which method needs which column, the
ring, credit. Letters: B rows, S row width, D model width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.critic import expected_value
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.masks import completion_mask, sampled_mask
from jaxrl_llm.types import OpenRollouts, Rollout, TrainState

Open = TypeVar("Open", bound=OpenRollouts)


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Annotation functions of a run.

    Attributes:
        reference_model: model that computes the reference's log-probs.
        columns: names of the columns that ``annotate`` computes (views.COLUMNS).
        group_size: number of neighbouring fresh rollouts that share a prompt.
        num_parts: ``join`` cuts own and external rows into this many parts each and interleaves the parts.
    """

    update: Update
    reference_model: Model
    group_size: int
    num_parts: int
    columns: frozenset[str] = frozenset()

    def annotate(self, state: TrainState, reference: Any, rollout: Rollout, base: Any = None) -> dict[str, jax.Array]:
        """Compute ``columns`` for fresh rollouts, [B,...] each.

        Args:
            reference: weights of the reference; None = the reference in ``state.others``.
            base: frozen weights under the adapters; None = the policy has no adapters. A frozen reference can be the
                same arrays.
        """
        whole = functools.partial(lora.join, base=base)
        learned = {**state.params, "policy": (policy := whole(state.params["policy"]))}
        says = {
            "generation_logp": lambda: self.old_logp(policy, state.step, rollout),
            "hidden": lambda: self.hidden(policy, rollout),
            "ref_logp": lambda: (
                self.reference(whole(state.others["reference"]), rollout, self.update.model)
                if reference is None
                else self.reference(reference, rollout, self.reference_model)
            ),
            "value": lambda: self.values(learned, rollout),
        }
        return {name: say() for name, say in says.items() if name in self.columns}

    def logp(self, params: Any, rollout: Rollout, *, with_entropy: bool = False) -> Any:
        """Return the log-probs of fresh rollouts, [B,S]; with ``with_entropy`` a pair of log-probs and entropies."""

        def look(rows: Rollout, unit: int) -> Any:
            seen = self.update.logp(params, rows, group_size=unit)
            return (seen.logp, seen.entropy) if with_entropy else seen.logp

        return self._by_micro_batch(look, rollout)

    def old_logp(self, params: Any, version: jax.Array, rollout: Rollout) -> jax.Array:
        """Return the learner's log-prob [B,S] of each token under the weights that drew the token.

        Tokens of the current weights are computed here. Tokens of older weights come from the column "earlier_logp".
        """
        logp, before = self.logp(params, rollout), rollout.columns.get("earlier_logp")
        return logp if before is None else jnp.where(rollout.policy_version == version, logp, before)

    def score_open(self, params: Any, version: jax.Array, state: Open, base: Any = None) -> Open:
        """Store the learner's log-probs of the tokens that the current weights drew in open (unfinished) rollouts.

        The log-probs go into the column "earlier_logp". ``old_logp`` reads the column when the rollouts are finished.
        """
        table = state.tokens
        flat = lambda x: x.reshape(-1, *x.shape[3:])  # [M, E, G, ...]
        names = ("tokens", "prompt_length", "length", "behaviour_logp", "policy_version", "stop_reason", "columns")
        rows = {name: jax.tree.map(flat, getattr(state, name)) for name in names}
        group = jnp.arange(table.shape[0] * table.shape[1] * table.shape[2], dtype=jnp.int32) // table.shape[2]
        logp = self.logp(lora.join(params, base), Rollout(**rows, group_id=group)).reshape(table.shape)
        earlier = jnp.where(state.policy_version == version, logp, state.columns["earlier_logp"])
        return state.with_columns(earlier_logp=earlier)

    def reference(self, params: Any, rollout: Rollout, model: Model) -> jax.Array:
        """Return the log-probs of fresh rollouts under the reference, [B,S]. The ring stores them with the rollouts."""
        teacher = dataclasses.replace(self.update, model=model)
        rollout = rollout.with_columns(experts=None)  # the reference routes with its own weights
        return dataclasses.replace(self, update=teacher).logp(params, rollout)

    def join(self, params: Any, version: jax.Array, rollout: Rollout, external: Rollout, base: Any = None) -> Rollout:
        """Join own and external rows. External rows look as if the current weights had just drawn their completions.

        The current weights give the external rows their behaviour log-probs and entropies.
        """
        mask = completion_mask(external.prompt_length, external.length, external.tokens.shape[1])
        behaviour_logp, entropy = self.logp(lora.join(params, base), external, with_entropy=True)
        said = {"entropy": entropy, "earlier_logp": jnp.zeros_like(behaviour_logp)}
        external = external.replace(
            behaviour_logp=behaviour_logp,
            policy_version=jnp.where(mask, version, -1),
            columns={name: said[name] for name in rollout.columns},
        )
        apart = lambda x: x.reshape(self.num_parts, -1, *x.shape[1:])
        beside = lambda x, y: jnp.concatenate([apart(x), apart(y)], axis=1).reshape(-1, *x.shape[1:])
        return jax.tree.map(beside, rollout, external)

    def values(self, params: Any, rollout: Rollout) -> jax.Array:
        """Return the critic's value at each sampled token of fresh rollouts, [B,S] f32 in units of reward, else 0.0."""

        def look(rows: Rollout, unit: int) -> jax.Array:
            # Only the readout is used. The compiler removes the unused log-probs.
            outputs = self.update.logp(params["policy"], rows, group_size=unit, head=params["critic"]).readout
            mask = sampled_mask(rows.prompt_length, rows.length, rows.policy_version)
            return jnp.where(mask, expected_value(outputs, self.update.objective.bins), 0.0)

        return self._by_micro_batch(look, rollout)

    def hidden(self, params: Any, rollout: Rollout) -> jax.Array:
        """Return the mean of the hidden states that predict the completion tokens of fresh rollouts, [B,D] f32."""

        def look(rows: Rollout, unit: int) -> jax.Array:
            states = lambda hidden: hidden.astype(jnp.float32)
            total = jnp.sum(self.update.logp(params, rows, group_size=unit, readout=states).readout, axis=1)
            return total / jnp.maximum(rows.length - rows.prompt_length, 1)[:, None]

        return self._by_micro_batch(look, rollout)

    def _by_micro_batch(self, look: Callable[[Rollout, int], Any], rollout: Rollout) -> Any:
        """Apply ``look(rows, group_size)``, [b,...], to all fresh rollouts, [B,...], one micro-batch at a time."""
        B = rollout.tokens.shape[0]
        shards, group, most = self.update.num_devices, self.group_size, self.update.config.micro_batch_size
        unit = group if group * shards <= most else 1  # the prompt of a whole group is computed once
        units = B // shards // unit
        num_micro = min(n for n in range(1, units + 1) if units % n == 0 and B // n <= most)
        # Every micro-batch takes rows of every shard: [B, ...] -> [n, shards * rows, ...]
        split = lambda x: x.reshape(shards, num_micro, -1, *x.shape[1:]).swapaxes(0, 1)
        micros = jax.tree.map(lambda x: split(x).reshape(num_micro, B // num_micro, *x.shape[1:]), rollout)
        seen = jax.lax.map(lambda rows: look(rows, unit), micros)
        whole = lambda x: x.reshape(num_micro, shards, -1, *x.shape[2:]).swapaxes(0, 1).reshape(B, *x.shape[2:])
        return jax.tree.map(whole, seen)
