"""Sampler with a separate temperature for each prompt.

The sampler's state stores the temperature of each row in a column. One compiled program therefore serves requests with
any temperature.

Shape letters: as in ``actor.sampler``.
Owns: where temperatures are stored, how logits are divided. Does not know: requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.actor import turns
from jaxrl_llm.actor.sampler import Sampler, SamplerState
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import Program


@dataclasses.dataclass(frozen=True)
class TemperingSampler(Sampler):
    """Sampler with one completion and one temperature per prompt. ``sampling.temperature`` must be 1."""

    @property
    def columns(self) -> dict[str, tuple[Any, ...]]:
        return super().columns | {"temperature": (jnp.float32,)}

    def tempered(self, logits_ZV: jax.Array, state: SamplerState) -> jax.Array:
        of_rows = state.columns["temperature"][..., 0]
        temperature_MZ = jnp.where(state.slot_row >= 0, turns.by_slot(state, of_rows), 1.0)
        temperature_Z1 = temperature_MZ.reshape(-1, 1)
        logits_ZV = logits_ZV.astype(jnp.float32)
        greedy = jnp.where(logits_ZV == jnp.max(logits_ZV, axis=1, keepdims=True), 0.0, -jnp.inf)
        return jnp.where(
            temperature_Z1 > 0,
            logits_ZV / jnp.where(temperature_Z1 > 0, temperature_Z1, 1.0),
            greedy,
        )

    def programs(self, abstract_params: Any) -> dict[str, Program]:
        """Return the programs of a sampler and the program "temper".

        "temper" (state, temperatures [M,E] f32, 0 = greedy) returns the state with these temperatures. Call "temper"
        after every prefill.
        """
        state = self.abstract_state()
        temperatures = sharding.rows(self.mesh, (self.shards, self.entries), jnp.float32)
        temper = Program(_temper, (state, temperatures), sharding.of(state), donate=(0,))
        return super().programs(abstract_params) | {"temper": temper}


def _temper(state: SamplerState, temperature_ME: jax.Array) -> SamplerState:
    table = state.columns["temperature"]
    column = jnp.broadcast_to(temperature_ME[:, :, None, None], table.shape)
    return state.with_columns(temperature=column)
