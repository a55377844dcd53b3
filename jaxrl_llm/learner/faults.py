"""Faults of updates that stop a run, and the file with the batch of the last faulty update.

    workdir/nonfinite_12.npz     rows of the last update of iteration 12, by field ("rollout/tokens", "advantage")

Skipped updates change no weights. The checkpoint that the run stops with therefore holds the weights that the update
used with this batch.

Owns: the file, the count of faulty updates, the sampler-learner check. Does not know: which update is skipped (update).
"""

from __future__ import annotations

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


def gap_said(config: Config, sums: dict[str, Any]) -> str:
    """Return the message for a batch whose sampler-learner gap is above the limit; "" if the gap is allowed.

    Without rounding the limit applies to the largest gap. With rounding it applies to the mean gap, and at most
    ``HIGH_SHARE`` of the tokens may have a gap above ``HIGH_GAP`` times the limit.
    """
    limit, count = config.update.max_sampler_learner_gap_nats, sums["own_token_count"]
    weights = config.rollout.weights
    rounding = [f"model.compute_dtype={config.model.compute_dtype!r}"] * (config.model.compute_dtype != "float32")
    rounding += [f"rollout.weights={weights!r}"] * (weights != "compute" and config.update.weights == "full")
    largest, mean, high = sums["gap_max"], sums["gap_sum"] / count, sums["gap_high_count"] / count
    said = "the learner's log-probs differ from the sampler's by"
    allowed = f"update.max_sampler_learner_gap_nats={limit}"
    if not rounding and not largest <= limit:
        return f"{said} up to {largest:.4f} nats, more than {allowed}"
    if rounding and not (mean <= limit and high <= HIGH_SHARE):
        return (
            f"{said} {mean:.4f} nats on average, and by more than {HIGH_GAP * limit:.4g} for {high:.1%} of the tokens; "
            f"with {' and '.join(rounding)} {allowed} is allowed on average, and {HIGH_SHARE:.0%} of such tokens"
        )
    return ""


def last_drawn(ring: RingState, *, batch_size: int, row_tokens: int) -> Experience:
    """Return the rows [M, b, ...] of the last draw, in slot order.

    If a shard drew fewer than b rows, other rows with ``trainable`` False fill the end.
    """
    is_drawn = ring.last_use == ring.num_draws[:, None]
    slot_index = jnp.argsort(~is_drawn, axis=1)[:, : batch_size // is_drawn.shape[0]]
    rows = replay.rows_at(ring, slot_index, row_tokens)
    return rows.replace(trainable=rows.trainable & jnp.take_along_axis(is_drawn, slot_index, axis=1))


class Faults:
    """Counter of consecutive updates whose loss or gradient was not finite. Every host makes the same calls.

    Attributes:
        run: number of consecutive non-finite updates so far, also across iterations.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self._config, self._mesh = config, mesh
        self.run, self._has_compared = 0, False
        self._last: tuple[int, Experience] | None = None  # iteration and rows of the update that reached the limit

    def observe(self, sums: dict[str, Any], iteration: int, ring: RingState) -> None:
        """Check an iteration's updates, given their sums and the ring after them. Iterations count from 1.

        Raises:
            SamplerLearnerGapError: the first compared iteration of the run has a gap above the limit (``gap_said``).
                Later iterations only print a warning.
        """
        # Without tokens that the current weights drew there is no gap to compare.
        if sums["own_token_count"]:
            if (said := gap_said(self._config, sums)) and not self._has_compared:
                raise SamplerLearnerGapError(said)
            if said and hosts.is_first():
                print(f"warning: iteration {iteration}: {said}", file=sys.stderr)
            self._has_compared = True
        at_end, config = int(sums["nonfinite_run"]), self._config
        self.run = at_end + (self.run if at_end == config.update.updates_per_iteration else 0)
        if self.run < config.update.max_nonfinite_steps:
            return
        whole = functools.partial(last_drawn, batch_size=config.update.batch_size, row_tokens=config.row_tokens)
        # Compiled only here, because a run without faults never needs this program.
        program = Program(whole, (ring,), sharding.replicated(self._mesh, 0))
        rows = jax.device_get(compile_all({"last_drawn": program}, self._mesh)["last_drawn"](ring))
        self._last = iteration, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

    def state(self) -> list[int | bool]:
        """Return the state that ``restore`` takes, as plain JSON."""
        return [self.run, self._has_compared]

    def restore(self, state: list[int | bool]) -> None:
        self.run, *compared = state
        self._has_compared = any(compared)

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
            f"loss or gradient was not finite in {self.run} updates in a row (update.max_nonfinite_steps="
            f"{update.max_nonfinite_steps}), the last of them update {update.updates_per_iteration} of iteration "
            f"{iteration}; its batch is in {path}"
        )


def read(path: str | os.PathLike) -> Experience:
    """Return the rows [B, ...] of a ``nonfinite_*.npz`` file as numpy arrays."""
    with np.load(path) as file:
        found = flax.traverse_util.unflatten_dict(dict(file), sep="/")
    rollout = Rollout(**{"columns": {}} | found["rollout"])
    return Experience(**{"columns": {}} | found | {"rollout": rollout})
