"""The actor: the half of an iteration that generates rollouts with published weights and scores them.

    next questions -> completions, scored while others are still generated -> further questions if groups are tied
                                                                           -> rollouts from external sources

Owns: the order of these steps, the position in the prompt stream, the actor's metrics and sample files. Does not know:
the use of the rollouts, the learner's weights.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.actor import redistribution
from jaxrl_llm.actor.episodes import Conversations
from jaxrl_llm.actor.external import External, ExternalBatch
from jaxrl_llm.actor.external_groups import ExternalGroup, shared_groups
from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.actor.resampling import Sampled, sample
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config
from jaxrl_llm.conversations.environment import Environment
from jaxrl_llm.models.files.decoding import tokens_in
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.questions.stream import PromptStream
from jaxrl_llm.reports.metrics import draw_values, rollout_values
from jaxrl_llm.runtime import hosts, rng, sharding
from jaxrl_llm.scoring.reward_columns import ColumnRequest
from jaxrl_llm.scoring.rewards import RewardPool
from jaxrl_llm.settings.schema import visible
from jaxrl_llm.types import (
    OUTCOME_SCORE,
    SHARED_FILE,
    Agreed,
    DrawSums,
    Example,
    OpenRollouts,
    PerHost,
    Rewards,
    ScoredRollouts,
)


@dataclasses.dataclass
class Acted:
    """The rollouts of one iteration with statistics of their generation.

    Attributes:
        scored: scored rollouts for the learner.
        sampled: all groups that the run's own policy generated, including the groups that were left out.
        draws: sums over the drawn tokens.
        external: groups from external sources; None if the run uses no external sources.
        generate_s: seconds that ``act`` took, without ``sampled.waited_s``.
    """

    scored: ScoredRollouts
    sampled: Agreed[Sampled]
    draws: Agreed[DrawSums]
    external: Agreed[ExternalBatch | None]
    generate_s: PerHost[float]


class ActorParts(Protocol):
    """The static parts of a run that its actor uses. A ``Run`` has these parts."""

    @property
    def config(self) -> Config: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def sampler(self) -> Sampler: ...


class Actor:
    """The generation and scoring half of every iteration, with its state.

    Attributes:
        is_inside: whether a call of ``act`` is unfinished, for example because the run was stopped during the call.
        spent_s: seconds of an unfinished ``act`` before the run was stopped.

    Args:
        run: a ``Run``.
        compiled: the compiled programs of the run by name.
        external: the external sources of rollouts.
        environment: the environment that answers turns; None means that each completion has one turn.
        pool: scores completions. ``pool.check`` raises ``Stopped`` if the run must stop. A later call of ``act``
            continues from the saved ``state``.
    """

    def __init__(
        self,
        run: ActorParts,
        compiled: Mapping[str, Callable[..., Any]],
        tokenizer: Tokenizer,
        stream: PromptStream,
        pool: RewardPool,
        external: External,
        environment: Environment | None,
    ):
        self._config = run.config
        self._stream = stream
        self._pool = pool
        self._external = external
        self._decode = tokenizer.decode
        self._byte_ids = tokenizer.byte_ids
        self._choose = compiled.get("choose")
        self._key = sharding.put(rng.stream(run.config.seed, "sample"), sharding.replicated(run.mesh, 0))
        self.generator = Generator(
            run.sampler,
            compiled,
            tokenizer.decode,
            max_lag=run.config.rollout.max_lag_iterations,
            check=pool.check,
            conversations=Conversations(environment, tokenizer, run.config) if environment else None,
        )
        self._rounds: list[Sampled] = []  # one element with the merged rounds of this iteration, or empty
        self._external_state: dict[str, Any] | None = None  # state at the start of an unfinished iteration
        self.is_inside = False
        self.spent_s = 0.0
        self._began = 0.0  # start of ``act``, moved back by ``spent_s``

    def act(self, params: Any, version: jax.Array, iteration: int) -> Acted:
        """Generate and score the rollouts of one iteration.

        Args:
            params: published weights. Keep no other reference to them, so that the update can use their memory.
            version: [] i32 policy version of the weights.
            iteration: number of the iteration, from 0.
        """
        self._began = time.monotonic() - self.spent_s
        hosts.doing(f"generation of iteration {iteration + 1}")
        self._external_state = self._external.state()
        self.is_inside = True
        external = self._external.next_groups(iteration, self._score)

        def collect(tickets: list[Any]) -> Rewards:
            if external:
                external.score(self._pool.collect)
            return self._pool.collect(tickets)

        sampled = sample(
            self.generator,
            self._stream.next_batch,
            collect,
            self._choose,
            params,
            config=self._config,
            rounds=self._rounds,
            version=version,
            key=self._key,
            on_finished=self._score,
        )
        generate_s = time.monotonic() - self._began - sampled.waited_s
        self._external.observe(sampled, self._decode)
        self.is_inside = False
        self.spent_s = 0.0
        scored = self._scored(sampled, external)
        self._observe_answers(sampled)
        return Acted(scored, sampled, self.generator.take_draws(), external, generate_s)

    def _scored(self, sampled: Sampled, external: ExternalBatch | None) -> ScoredRollouts:
        """Return the rows for the learner: own rows, external rows, and open rollouts if their log-probs are needed."""
        scored = ScoredRollouts(sampled.rollout, sampled.rewards, self._questions(sampled.groups))
        if external:
            question_id = self._stream.ledger.question_id
            scored.external = external.rows
            scored.rewards, scored.questions = external.join(scored.rewards, scored.questions, question_id)
        if self.generator.sampler.keeps_old_logp:
            scored.open_rollouts = self.generator.state
        return scored

    def _observe_answers(self, sampled: Sampled) -> None:
        """Record in the ledger which answers pass, including the answers of groups that were left out."""
        answers = sampled.answers
        passed = answers.total >= self._config.rewards.pass_threshold
        self._stream.ledger.observe(self._questions(sampled.asked), passed, answers.outcome == OUTCOME_SCORE)

    def receive_open_rollouts(self, state: OpenRollouts | None) -> None:
        """Replace the sampler's state by the state that ``Learner.learn`` returned; None keeps the state."""
        if state is not None:
            self.generator.state = state

    def _score(self, group: FinishedGroup | ExternalGroup) -> Any:
        """Queue a group of this host for scoring, and return its ticket."""
        completions = group.completions
        assert completions is not None, "only the host that owns the rows scores a group"

        def positions(i: int, spans: list[list[int]]) -> list[int]:
            return tokens_in(self._decode, completions[i], spans, self._byte_ids)

        columns = ColumnRequest(self._config.reward_columns, positions)
        texts = [self._decode(ids) for ids in completions]
        return self._pool.submit(group.example, texts, group.played, columns)

    def _questions(self, groups: list[FinishedGroup]) -> list[int]:
        return [self._stream.question_id(group.group_id) for group in groups]

    def values(self, acted: Acted, *, num_tied: int) -> dict[str, float]:
        """Return the actor's metrics of an iteration by name.

        Args:
            num_tied: number of degenerate groups, without a learning signal, among the groups that went into the ring.
        """
        sampled = acted.sampled
        values = rollout_values(
            self._config,
            sampled.asked,
            sampled.answers,
            num_tied + sampled.num_tied_left_out,
        )
        values |= draw_values(self._config, acted.draws)
        values["time/generate_s"] = acted.generate_s
        values["time/reward_s"] = sampled.waited_s
        values["throughput/generate_tokens_per_s"] = values["tokens/generated"] / acted.generate_s
        if self.generator.conversations:
            values["time/environment_s"] = self.generator.conversations.take_waited_s()
        if acted.external:
            values |= acted.external.values()
        if self._config.prompts.retire_pass_rate:
            values["prompts/retired"] = len(self._stream.retired())
        return values

    def lines(self, acted: Acted, iteration: int) -> dict[str, list[dict[str, Any]]]:
        """Return the lines to append to each file: sample rollouts, and the kept groups if the run shares rollouts."""
        sampled = acted.sampled
        settings = self._config.metrics
        shared = []
        if settings.share_rollouts:
            shared = shared_groups(sampled, self._stream.lookup)
        samples = sampled.sample_lines(iteration, settings.samples_per_iteration, self._decode)
        return {"samples.jsonl": samples, SHARED_FILE: shared}

    def arrays(self) -> dict[str, Any]:
        """Return the device arrays that ``restore`` needs. An entry is None if it does not exist."""
        return {
            "sampler": self.generator.state,
            "rounds": self._rounds[0].rollout if self._rounds else None,
        }

    def state(self) -> dict[str, Any]:
        """Return the host state that ``restore`` needs, as plain JSON."""
        conversations = self.generator.conversations
        return {
            "stream": self._stream.state(),
            "ledger": self._stream.ledger.state(),
            "external": self._external_state if self.is_inside else self._external.state(),
            "open_prompts": self.generator.opened(),
            "conversations": conversations.state() if conversations else [],
            "draws": [_leaves_of(sums) for sums in self.generator.draws],
            "rounds": [sampled.state() for sampled in self._rounds],
            "spent_s": time.monotonic() - self._began if self.is_inside else self.spent_s,
        }

    def restore(
        self,
        state: dict[str, Any],
        arrays: dict[str, Any],
        shapes: dict[str, list[int]],
    ) -> list[str]:
        """Restore the actor from a checkpoint.

        Args:
            state: from ``state()``.
            arrays: from ``arrays()``.
            shapes: shapes of the saved arrays by name.

        Returns:
            Messages for the user. They are empty unless the number of data shards has changed.
        """
        self._stream.restore(state["stream"])
        self._stream.ledger.restore(state["ledger"])
        self._external.restore(state["external"])
        self.generator.state, state, messages = redistribution.redistribute(
            self.generator, arrays["sampler"], state, shapes
        )
        for shard, entry, lag, group_id in state["open_prompts"]:
            row = self._stream.lookup(group_id)
            self.generator.adopt(shard, entry, lag, group_id, row.example, row.tokens.tolist())
        if self.generator.conversations:
            self.generator.conversations.restore(state["conversations"])
        self.generator.draws = [_draw_sums(leaves) for leaves in state["draws"]]
        self.spent_s = state.get("spent_s", 0.0)

        def question(group_id: int) -> Example:
            return self._stream.lookup(group_id).example

        self._rounds.clear()
        for saved in state["rounds"]:
            rounds = Sampled.restored(saved, arrays["rounds"], question, self._config.reward_columns)
            self._rounds.append(rounds)
        return messages


def _leaves_of(sums: DrawSums) -> list[list[float]]:
    """Return the sums of one call of ``generate`` as plain JSON, for ``_draw_sums``."""
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(sums)]


def _draw_sums(leaves: list[list[float]]) -> DrawSums:
    """Return the sums of one call of ``generate`` from a checkpoint, in numpy."""
    arrays: list[Any] = [np.array(leaf, np.float32) for leaf in leaves]
    return DrawSums(*arrays)


def too_many_failures(config: Config, rewards: Rewards) -> str | None:
    """Return an error message if the fraction of failed rewards exceeds rewards.max_failure_frac, otherwise None."""
    failed = float(np.mean(rewards.outcome != OUTCOME_SCORE))
    limit = config.rewards.max_failure_frac
    if failed <= limit:
        return None
    errors = "; ".join(map(visible, rewards.errors))
    return f"{failed:.0%} of the rewards failed, more than rewards.max_failure_frac={limit}: {errors}"
