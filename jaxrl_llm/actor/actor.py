"""The actor: published weights and questions become scored rollouts.

    next questions -> completions, scored while others are still generated -> asked on where groups are tied
                                                                           -> the answers of others beside them

Owns: the order of these, where the questions stand, what of an iteration the metrics and the samples show. Does not
know: what becomes of the rollouts, the learner's weights.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.actor.guests import External, Guests, shared_groups
from jaxrl_llm.actor.resampling import Sampled, sample
from jaxrl_llm.actor.rewards import RewardPool
from jaxrl_llm.questions.stream import PromptStream
from jaxrl_llm.reports.metrics import draw_values, rollout_values
from jaxrl_llm.runtime import rng, sharding
from jaxrl_llm.runtime.nested import visible
from jaxrl_llm.types import OUTCOME_SCORE, Agreed, DrawSums, PerHost, ScoredRollouts


@dataclasses.dataclass
class Acted:
    """An iteration's rollouts, and what is told of how they were made.

    Attributes:
        scored: for the learner.
        sampled: own groups, those that were left out among them.
        draws: sums over the tokens that were drawn.
        guests: groups of others; None where the run wants none.
        generate_s: seconds of the actor's half without ``sampled.waited_s``.
    """

    scored: ScoredRollouts
    sampled: PerHost[Sampled]
    draws: Agreed[DrawSums]
    guests: PerHost[Guests | None]
    generate_s: PerHost[float]


class Actor:
    """The actor's half of every iteration, with its state.

    Args:
        run: a ``Run``.
        compiled: its programs by name, compiled.
        decode: token ids to text.
        external: the answers of others.
    """

    def __init__(
        self, run: Any, compiled: Any, decode: Any, stream: PromptStream, pool: RewardPool, external: External
    ):
        self._config, self._stream, self._pool, self._external = run.config, stream, pool, external
        self._decode, self._choose = decode, compiled.get("choose")
        self._key = jax.device_put(rng.stream(run.config.seed, "sample"), sharding.replicated(run.mesh, 0))
        self.generator = Generator(run.sampler, compiled, decode, run.config.rollout.max_lag_iterations)

    def act(self, params: Any, version: jax.Array, iteration: int) -> Acted:
        """Ask, sample and score what one iteration trains on.

        Args:
            params: published weights; give them to this call alone, so that an update has their memory.
            version: [] i32 of them.
        """
        started = time.monotonic()
        guests = self._external.next_groups(iteration, self._score)
        sampled = sample(
            self.generator,
            self._stream.next_batch,
            self._pool.collect,
            self._choose,
            params,
            config=self._config,
            version=version,
            key=self._key,
            on_finished=self._score,
        )
        generate_s = time.monotonic() - started - sampled.waited_s
        scored = ScoredRollouts(sampled.rollout, sampled.rewards, self._questions(sampled.groups))
        if guests:
            scored.guests = guests.rows
            scored.rewards, scored.questions = guests.join(
                scored.rewards, scored.questions, self._pool.collect, self._stream.ledger.question_id
            )
        if self.generator.sampler.keeps_old_logp:
            scored.open_rollouts = self.generator
        draws = self.generator.take_draws()
        answers = sampled.answers  # those that were left out too
        passed = answers.total >= self._config.rewards.pass_threshold
        self._stream.ledger.observe(self._questions(sampled.asked), passed, answers.outcome == OUTCOME_SCORE)
        return Acted(scored, sampled, draws, guests, generate_s)

    def _score(self, group: FinishedGroup) -> Any:
        return self._pool.submit(group.example, [self._decode(c) for c in group.completions])

    def _questions(self, groups: list[FinishedGroup]) -> list[int]:
        return [self._stream.question_id(group.group_id) for group in groups]

    def values(self, acted: Acted, *, num_tied: int) -> dict[str, float]:
        """Figures of an iteration for the metrics.

        Args:
            num_tied: of the groups that went into the ring, those that teach nothing.
        """
        sampled = acted.sampled
        values = rollout_values(self._config, sampled.asked, sampled.answers, num_tied + sampled.num_tied_left_out)
        values |= draw_values(self._config, acted.draws)
        values |= {
            "time/generate_s": acted.generate_s,
            "time/reward_s": sampled.waited_s,
            "throughput/generate_tokens_per_s": values["tokens/generated"] / acted.generate_s,
        }
        if acted.guests:
            values |= acted.guests.values()
        if self._config.prompts.retire_pass_rate:
            values["prompts/retired"] = len(self._stream.retired())
        return values

    def samples(self, acted: Acted, iteration: int) -> list[dict[str, Any]]:
        """Rows of samples.jsonl."""
        return acted.sampled.shown(iteration, self._config.metrics.samples_per_iteration, self._decode)

    def shared(self, acted: Acted) -> list[dict[str, Any]]:
        """Lines of what another run reads."""
        return shared_groups(acted.sampled.groups, acted.sampled.rewards, self._stream.lookup)

    def failure(self, acted: Acted) -> str | None:
        """What to say where more of the rewards failed than rewards.max_failure_frac; else None."""
        return too_many_failures(self._config, acted.sampled.answers)

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from here, besides ``generator.state``; plain JSON."""
        open_prompts = self.generator.opened()
        return {
            "stream": self._stream.state(),
            "ledger": self._stream.ledger.state(),
            "external": self._external.state(),
            "open_prompts": open_prompts,
        }

    def restore(self, state: dict[str, Any], slots: Any) -> None:
        """``slots``: the arrays of ``generator.state``, with rollouts that are open."""
        self._stream.restore(state["stream"])
        self._stream.ledger.restore(state["ledger"])
        self._external.restore(state["external"])
        if self._config.rollout.lookahead_prompts:
            self.generator.state = slots
        for *where, group_id in state["open_prompts"]:
            row = self._stream.lookup(group_id)
            self.generator.adopt(*where, group_id, row.example, row.tokens.tolist())


def too_many_failures(config: Any, rewards: Any) -> str | None:
    failed = float(np.mean(rewards.outcome != OUTCOME_SCORE))
    if failed <= config.rewards.max_failure_frac:
        return None
    return (
        f"{failed:.0%} of the rewards failed, more than rewards.max_failure_frac="
        f"{config.rewards.max_failure_frac}: " + "; ".join(map(visible, rewards.errors))
    )
