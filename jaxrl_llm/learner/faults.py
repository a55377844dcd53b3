"""Faults of updates that stop a run, and the file with the batch of the last faulty update.

    workdir/nonfinite_12.npz     rows of the last update of iteration 12, by field ("rollout/tokens", "advantage")

Skipped updates change no weights. The checkpoint that the run stops with therefore holds the weights that the update
used with this batch.

Owns: the file, the count of faulty updates, the sampler-learner check. Does not know: which update is skipped (update).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.learner.loss import HIGH_GAP
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.runtime.checkpoint_files import by_name
from jaxrl_llm.runtime.programs import Program, compile_all
from jaxrl_llm.types import Experience, RingState, Rollout

# Largest share of tokens whose gap may be more than ``HIGH_GAP`` times the limit of the mean gap.
HIGH_SHARE = 0.01


class SamplerLearnerGapError(ConfigError):
    """Error for sampler and learner that compute different probabilities for the sampled tokens."""


def gap_message(config: Config, sums: dict[str, Any]) -> str:
    """Return the message for a batch whose sampler-learner gap is above the limit; "" if the gap is allowed.

    Without rounding the limit applies to the largest gap. With rounding it applies to the mean gap, and at most
    ``HIGH_SHARE`` of the tokens may have a gap above ``HIGH_GAP`` times the limit.
    """
    limit = config.update.max_sampler_learner_gap_nats
    num_tokens = sums["own_token_count"]
    largest = sums["gap_max"]
    mean = sums["gap_sum"] / num_tokens
    high_share = sums["gap_high_count"] / num_tokens
    rounding = _rounding_settings(config)
    beginning = "the learner's log-probs differ from the sampler's by"
    allowed = f"update.max_sampler_learner_gap_nats={limit}"
    # The comparisons are negated, so that a gap of NaN counts as above the limit.
    if not rounding and not largest <= limit:
        return f"{beginning} up to {largest:.4f} nats, more than {allowed}"
    if rounding and not (mean <= limit and high_share <= HIGH_SHARE):
        return (
            f"{beginning} {mean:.4f} nats on average, and by more than {HIGH_GAP * limit:.4g} nats for "
            f"{high_share:.1%} of the tokens. With {' and '.join(rounding)}, the mean may be at most {allowed}, and at "
            f"most {HIGH_SHARE:.0%} of the tokens may differ by more than {HIGH_GAP * limit:.4g} nats"
        )
    return ""


def _rounding_settings(config: Config) -> list[str]:
    """Return the settings, as text, that make sampler and learner round differently."""
    settings = []
    if config.model.compute_dtype != "float32":
        settings.append(f"model.compute_dtype={config.model.compute_dtype!r}")
    if config.rollout.weights != "compute" and config.update.weights == "full":
        settings.append(f"rollout.weights={config.rollout.weights!r}")
    return settings


def last_drawn(ring: RingState, *, batch_size: int, row_tokens: int) -> Experience:
    """Return the rows [M, b, ...] of the last draw, in slot order.

    If a shard drew fewer than b rows, other rows with ``trainable`` False fill the end.
    """
    is_drawn = ring.last_use == ring.num_draws[:, None]
    slot_index = jnp.argsort(~is_drawn, axis=1)[:, : batch_size // is_drawn.shape[0]]
    rows = replay.rows_at(ring, slot_index, row_tokens)
    trainable = rows.trainable & jnp.take_along_axis(is_drawn, slot_index, axis=1)
    return dataclasses.replace(rows, trainable=trainable)


class Faults:
    """Counter of consecutive updates whose loss or gradient was not finite. Every host makes the same calls.

    Attributes:
        run: number of consecutive non-finite updates so far, also across iterations.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self._config = config
        self._mesh = mesh
        self.run = 0
        self._has_compared = False
        self._last: tuple[int, Experience] | None = None  # iteration and rows of the update that reached the limit

    def observe(self, sums: dict[str, Any], iteration: int, ring: RingState) -> None:
        """Check an iteration's updates, given their sums and the ring after them. Iterations count from 1.

        Raises:
            SamplerLearnerGapError: the first compared iteration of the run has a gap above the limit (``gap_message``).
                Later iterations only print a warning.
        """
        # Without tokens that the current weights drew there is no gap to compare.
        if sums["own_token_count"]:
            message = gap_message(self._config, sums)
            if message and not self._has_compared:
                raise SamplerLearnerGapError(message)
            if message and hosts.is_first():
                print(f"warning: iteration {iteration}: {message}", file=sys.stderr)
            self._has_compared = True
        run_at_end = int(sums["nonfinite_run"])
        if run_at_end == self._config.update.updates_per_iteration:
            self.run += run_at_end
        else:
            self.run = run_at_end
        if self.run >= self._config.update.max_nonfinite_steps:
            self._last = iteration, self._last_batch(ring)

    def _last_batch(self, ring: RingState) -> Experience:
        """Return the rows [B, ...] of the last draw, on the host."""
        batch_size = self._config.update.batch_size
        draw_again = functools.partial(last_drawn, batch_size=batch_size, row_tokens=self._config.row_tokens)
        # Compile this program only on a fault, because a run without faults never needs it.
        program = Program(draw_again, (ring,), sharding.replicated(self._mesh, 0))
        rows = jax.device_get(compile_all({"last_drawn": program}, self._mesh)["last_drawn"](ring))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

    def state(self) -> list[int | bool]:
        """Return the state that ``restore`` takes, as plain JSON."""
        return [self.run, self._has_compared]

    def restore(self, state: list[int | bool]) -> None:
        """Restore the values that ``state()`` returned."""
        self.run, *has_compared = state
        self._has_compared = any(has_compared)

    def failure(self, workdir: pathlib.Path) -> str | None:
        """Return the error message if too many updates were not finite, else None. The first host writes the file."""
        if self._last is None:
            return None
        iteration, rows = self._last
        path = workdir / f"nonfinite_{iteration}.npz"
        if hosts.is_first():
            np.savez(path, **by_name(rows))
        update = self._config.update
        return (
            f"loss or gradient was not finite in {self.run} updates in a row, and update.max_nonfinite_steps="
            f"{update.max_nonfinite_steps} are allowed. The last of them was update {update.updates_per_iteration} of "
            f"iteration {iteration}. Its batch is in {path}"
        )


def read(path: str | os.PathLike) -> Experience:
    """Return the rows [B, ...] of a ``nonfinite_*.npz`` file as numpy arrays."""
    with np.load(path) as file:
        arrays = flax.traverse_util.unflatten_dict(dict(file), sep="/")
    rollout = Rollout(**arrays.pop("rollout"))
    return Experience(rollout=rollout, **arrays)
