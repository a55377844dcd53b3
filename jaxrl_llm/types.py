"""The records that pass between the stages of a run.

Letters: B rollouts (rows), P prompts, L prompt width, S row width (prompt + completion), M replay shards, C slots per
shard, N pages of T tokens per shard. Rows are right-padded ``prompt ++ completion``; masks come from ``prompt_length``
and ``length``, never from the value of a token. ``logp[t]`` is the log-probability of ``tokens[t]``.

Owns: names, shapes, units, meaning of zero. Does not know: how the values are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, Self, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp

# If several hosts run one job, a host value is of one of two kinds. An Agreed value must be equal on all hosts, because
# it enters a program or decides whether a program is called. If one host had another value, the other hosts would wait
# forever. A PerHost value describes the rows of its host.
T = TypeVar("T")
Agreed = Annotated[T, "the same on every host"]
PerHost = Annotated[T, "of this host's rows alone"]

# Rollout.stop_reason
STOP_NONE = 0  # not finished
STOP_EOS = 1
STOP_LENGTH = 2  # reached max_completion_tokens: a truncated completion
STOP_STRING = 3
STOP_TURNS = 4  # ended after turn number environments.max_turns, the last allowed turn
STOP_NAMES = ("none", "eos", "length", "stop_string", "max_turns")

# Column age_bucket of an experience: largest age of each bucket, in iterations. One more bucket has all older rows.
AGE_BUCKETS = (0, 1, 3, 7, 15)

# File in the workdir of a run that shares its rollouts (metrics.share_rollouts).
SHARED_FILE = "shared_rollouts.jsonl"

# Rewards.outcome
OUTCOME_SCORE = 0
OUTCOME_TIMEOUT = 1
OUTCOME_ERROR = 2
MAX_ERRORS_KEPT = 5


@dataclasses.dataclass(frozen=True)
class Example:
    """One question of a task, on the host.

    Attributes:
        prompt: text, or a list of ``{"role", "content"}`` messages.
        columns: all other fields of the row. Reward functions receive them as keyword arguments.
        origin: source of the question ("file.jsonl:12"), for error messages.
        hidden: text that distinguishes questions with the same prompt, such as a word that only the environment knows.
        given: (the row's own prompt, an agent's tools that the chat template receives), if an environment has extended
            or replaced ``prompt``; else None.
        ladder: name shared by a question and its easier versions; "" if there are none. Easier versions come first.
    """

    prompt: str | list[dict[str, str]]
    columns: dict[str, Any]
    origin: str = ""
    hidden: str = ""
    given: Any = None
    ladder: str = ""


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """P tokenised prompts, on the host (numpy)."""

    tokens: Any  # [P, L] i32, right-padded with 0
    length: Any  # [P] i32, 1..L
    group_id: Any  # [P] i32, position in the prompt stream: unique in the run, selects the random keys
    examples: tuple[Example, ...]  # P questions


class WithColumns:
    """Base of the dataclasses that have columns."""

    columns: Mapping[str, jax.Array]

    def with_columns(self, **columns: jax.Array) -> Self:
        """Return a copy with these columns added. Columns of the same names are replaced."""
        record = cast(Any, self)  # every subclass is a dataclass, but the type of this base class cannot express it
        return dataclasses.replace(record, columns={**self.columns, **columns})


@flax.struct.dataclass
class Rollout(WithColumns):
    """B finished completions, on the device."""

    tokens: jax.Array  # [B, S] i32, 0 past `length`
    prompt_length: jax.Array  # [B] i32
    length: jax.Array  # [B] i32, prompt + completion; EOS is counted
    behaviour_logp: jax.Array  # [B, S] f32 nats, 0.0 if policy_version is -1
    group_id: jax.Array  # [B] i32, the same for all rows of one prompt; below 0 for external rows
    policy_version: jax.Array  # [B, S] i32 per token, -1 off the completion and for tokens of an environment
    stop_reason: jax.Array  # [B] i8, STOP_*
    columns: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # columns of the method (inputs.COLUMNS)


class OpenRollouts(Protocol):
    """The rows of open (unfinished) rollouts in the state of a sampler, on the device.

    The learner reads these rows and adds columns. The sampler owns the state and its other fields. Letters: E open
    prompts per shard, G rows per prompt.
    """

    @property
    def tokens(self) -> jax.Array: ...  # [M, E, G, S] i32

    @property
    def prompt_length(self) -> jax.Array: ...  # [M, E, G] i32

    @property
    def length(self) -> jax.Array: ...  # [M, E, G] i32

    @property
    def behaviour_logp(self) -> jax.Array: ...  # [M, E, G, S] f32

    @property
    def policy_version(self) -> jax.Array: ...  # [M, E, G, S] i32

    @property
    def stop_reason(self) -> jax.Array: ...  # [M, E, G] i8

    @property
    def columns(self) -> Mapping[str, jax.Array]: ...  # [M, E, G, S, ...]

    def with_columns(self, **columns: jax.Array) -> Self: ...


@flax.struct.dataclass
class DrawSums:
    """Sums over the drawn tokens, [M] f32 by shard. They test whether the tokens follow their distributions.

    Given the tokens before, a token's d = -log p - entropy has mean 0. Its variance is the variance of log p under the
    token's distribution. The sum of all d therefore has mean 0, and its variance is the sum of the variances. This
    holds even if the number of tokens depends on the tokens. If only likely tokens were drawn, the sum of d^2 is much
    smaller than the sum of the variances. If too many unlikely tokens were drawn, the sum of d^2 is larger.
    """

    tokens: jax.Array  # number of drawn tokens
    surprise: jax.Array  # sum of -log p, nats
    entropy: jax.Array  # sum of the entropies of the distributions, nats
    error_square: jax.Array  # sum of d^2, nats^2
    variance: jax.Array  # sum of the variances of log p under the distributions, nats^2
    cut: jax.Array  # number of tokens whose filter left more ids than sampling.support_tokens


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Scores of B rollouts, on the host (numpy)."""

    total: Any  # [B] f32, weighted sum of parts; NaN if outcome != OUTCOME_SCORE
    parts: dict[str, Any]  # name -> [B] f32, NaN if that function failed
    outcome: Any  # [B] i8, OUTCOME_*
    errors: tuple[str, ...] = ()  # first few error messages, for the log
    # name -> [B, ...] f32, 0.0 without a value: the columns with ``from_rewards`` in ``algorithms.inputs.COLUMNS`` that
    # the method reads. If completions have several turns, "turn_reward" always exists.
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class ScoredRollouts:
    """Rollouts with their rewards that an actor passes to the learner in one iteration.

    Attributes:
        rollout: P*G rows that the run's own policy drew, on the device.
        rewards: rewards of all rows that go into the ring: own rows and external rows.
        questions: question_id of each group of these rows (``questions.ledger``).
        external: external rows, on the device, without log-probs and columns of the current weights; None = no
            external rows.
        open_rollouts: the sampler's state with open (unfinished) rollouts, which ``learn`` scores, donates and returns.
            None = the learner scores no open rollouts.
    """

    rollout: Agreed[Rollout]
    rewards: Agreed[Rewards]
    questions: Agreed[list[int]]
    external: Agreed[Rollout | None] = None
    open_rollouts: Agreed[OpenRollouts | None] = None


@flax.struct.dataclass
class Scores:
    """Scores that the host has for B rollouts when they go into the ring."""

    reward: jax.Array  # [B] f32, 0.0 if not trainable
    trainable: jax.Array  # [B] bool, False if the reward failed or the row is padding
    question_id: jax.Array  # [B] i32, question_id of the row's question, the same on every visit
    parts: tuple[jax.Array, ...]  # [B] f32 before weighting, one per reward function; () if only the sum is needed
    columns: Mapping[str, jax.Array]  # [B, ...] f32, values of the methods' memories per row, and Rewards.columns
    memory: Mapping[str, jax.Array]  # f32 arrays of the methods' memories that have no row dimension


@flax.struct.dataclass
class Experience(WithColumns):
    """B rollouts with their credit. The ring stores them and the update reads them."""

    rollout: Rollout
    reward: jax.Array  # [B] f32 as scored, before any shaping; 0.0 if not trainable
    advantage: jax.Array  # [B, S] f32, 0.0 off the completion
    trainable: jax.Array  # [B] bool, False if the reward failed, the row is filtered out or is padding
    columns: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # columns of the method (inputs.COLUMNS)


@flax.struct.dataclass
class RingState:
    """Device ring buffer. The mesh's data axes split M. Each shard has its rings along C (see ``replay``)."""

    # Leaves [M, C, ...], on the device or in its host's memory. With pages, per-token leaves are [M, N, T, ...].
    slots: Experience
    order: jax.Array  # [M, C] i32, slots of the main ring, then slots of the second ring; oldest row first in each ring
    num_draws: jax.Array  # [M] i32, number of batches drawn so far
    uses: jax.Array  # [M, C] i32, times drawn since insertion
    last_use: jax.Array  # [M, C] i32, number (from 1) of the batch that last drew the row, 0 = never drawn
    priority: jax.Array  # [M, C] f32, priority for prioritised draws (replay.priority), set at insertion
    inserted_step: jax.Array  # [M, C] i32, iteration of insertion, -1 = empty
    question: jax.Array  # [M, C] i32, question_id
    is_retired: jax.Array  # [M, C] bool, True = never draw the row again
    # For a ring in pages: "first" [M, C] i32, number of the page where the row begins, and "oldest" [M] i32, number of
    # the oldest page in the log. A row that begins before the oldest page is lost.
    pages: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class TrainState:
    """The state of training: parameters, optimizer state and step count, as a pytree of arrays."""

    # "policy", and "critic" if credit needs one: a value head on the policy's hidden states, {"kernel": [D, m],
    # "bias": [m]} f32, which is neither published nor exported.
    params: Mapping[str, Any]
    opt_state: Mapping[str, Any]  # optimizer state of each entry of params
    step: jax.Array  # [] i32, optimizer steps taken; also the policy version published next
    # Weights of other policies if the method needs them: "average", "previous" (the policy before the updates of the
    # previous iteration), "reference" (only if the run resets the reference).
    others: Mapping[str, Any] = flax.struct.field(default_factory=dict)
    # "entropy_coefficient", if the weight of the entropy bonus changes.
    scalars: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class Sums:
    """Sums and maxima over the tokens or rows of a batch, by name. A name is either a total or a maximum.

    The pieces of a batch, and the batches of an iteration, are combined without a division. Means are computed at the
    end, from totals (``reports.metrics``).
    """

    totals: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # numbers that add up
    maxima: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)
    # [len(AGE_BUCKETS) + 1], the part of a total that the rows of each age bucket contribute
    by_age: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)

    def __getitem__(self, name: str) -> jax.Array:
        return self.totals[name] if name in self.totals else self.maxima[name]

    def union(self, other: Sums) -> Sums:
        """Return the union of two sets of sums. A name may be in only one of them."""
        return Sums(
            {**self.totals, **other.totals},
            {**self.maxima, **other.maxima},
            {**self.by_age, **other.by_age},
        )

    def plus(self, other: Sums) -> Sums:
        """Combine the same sums of two pieces of a batch."""
        return Sums(
            jax.tree.map(jnp.add, self.totals, other.totals),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            jax.tree.map(jnp.add, self.by_age, other.by_age),
        )

    def over_batches(self) -> Sums:
        """Combine the sums of several batches, which are stacked along the first axis."""

        def total(x: jax.Array) -> jax.Array:
            return jnp.sum(x, axis=0)

        return Sums(
            jax.tree.map(total, self.totals),
            jax.tree.map(jnp.max, self.maxima),
            jax.tree.map(total, self.by_age),
        )

    def named(self) -> dict[str, jax.Array]:
        """Return totals and maxima by name, without the sums by age."""
        return {**self.totals, **self.maxima}
