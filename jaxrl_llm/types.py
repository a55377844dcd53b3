"""The records that cross the seams between stages.

Letters: B rollouts (rows), P prompts, L prompt width, S row width (prompt + completion), M replay shards, C slots per
shard, N pages of T tokens per shard. Rows are right-padded ``prompt ++ completion``; masks come from ``prompt_length``
and ``length``, never from the value of a token. ``logp[t]`` is the log-probability of ``tokens[t]``.

Owns: names, shapes, units, meaning of zero. Does not know: how any of it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

import flax.struct
import jax

# Two kinds of values where several hosts run one job. What is Agreed enters a program, or decides whether one is
# called: were it another on one host, the others would wait for it without end. What is PerHost is of that host's rows.
T = TypeVar("T")
Agreed = Annotated[T, "the same on every host"]
PerHost = Annotated[T, "of this host's rows alone"]

# Rollout.stop_reason
STOP_NONE = 0  # not finished
STOP_EOS = 1
STOP_LENGTH = 2  # reached max_completion_tokens: a truncated completion
STOP_STRING = 3
STOP_TURNS = 4  # its environment had more to say after environments.max_turns turns
STOP_NAMES = ("none", "eos", "length", "stop_string", "max_turns")

# The column age_bucket of an experience: upper ages of the buckets, in iterations; one more has all above.
AGE_BUCKETS = (0, 1, 3, 7, 15)

# In the workdir of a run that shares its rollouts (metrics.share_rollouts).
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
        columns: everything else of the row; passed to reward functions by keyword.
        origin: where it came from ("file.jsonl:12"), for error messages.
        hidden: what tells it from others of the same prompt, such as the word that an environment knows.
        given: the row's own prompt, and an agent's tools that the chat template is told, where an environment has added
            to ``prompt`` or put another in its place; else None.
        ladder: names the question that it is an easier version of, or is; "" where it has none. Easier ones come first.
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
    group_id: Any  # [P] i32, position in the prompt stream: unique over the run, keys the noise
    examples: tuple[Example, ...]  # P of them


class WithColumns:
    def with_columns(self, **columns: jax.Array) -> Self:
        """The same with these columns, in place of those that it has by these names."""
        return self.replace(columns={**self.columns, **columns})


@flax.struct.dataclass
class Rollout(WithColumns):
    """B finished completions, on the device."""

    tokens: jax.Array  # [B, S] i32, 0 past `length`
    prompt_length: jax.Array  # [B] i32
    length: jax.Array  # [B] i32, prompt + completion; EOS is counted
    behaviour_logp: jax.Array  # [B, S] f32 nats, 0.0 where policy_version is -1
    group_id: jax.Array  # [B] i32, siblings of one prompt share it; below 0 where others than this run wrote them
    policy_version: jax.Array  # [B, S] i32 per token, -1 off the completion and where an environment wrote it
    stop_reason: jax.Array  # [B] i8, STOP_*
    columns: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # what a method needs (views.COLUMNS)


@flax.struct.dataclass
class DrawSums:
    """Sums over the tokens that were drawn, [M] f32 by shard: whether they are what their distribution says.

    Given what came before a token, its d = -log p - entropy has mean 0 and the variance that log p has under its
    distribution: so the sum of all d has mean 0, and the sum of their variances, whatever their number depends on.
    Where likely tokens alone were drawn the sum of d^2 is far less, where unlikely ones were it is more.
    """

    tokens: jax.Array
    surprise: jax.Array  # of -log p, nats
    entropy: jax.Array  # of their distributions, nats
    error_square: jax.Array  # of d^2, nats^2
    variance: jax.Array  # of the variances of log p under their distributions, nats^2
    cut: jax.Array  # tokens whose filter left more ids than sampling.support_tokens


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Scores of B rollouts, on the host (numpy)."""

    total: Any  # [B] f32, weighted sum of parts; NaN where outcome != OUTCOME_SCORE
    parts: dict[str, Any]  # name -> [B] f32, NaN where that function failed
    outcome: Any  # [B] i8, OUTCOME_*
    errors: tuple[str, ...] = ()  # first few messages of failures, for the log
    # [B, K] f32, what of the total each turn of the policy's was given, 0.0 where a row has no such turn; None where
    # completions have one turn.
    by_turn: Any = None
    masked: Any = None  # [B] lists: places of the completion's tokens that reward functions mask; None = none
    # [B, K] f32, seconds that the environment took to answer each turn, 0.0 where it answered none; None where
    # completions have one turn.
    turn_seconds: Any = None


@dataclasses.dataclass
class ScoredRollouts:
    """What an actor gives the learner in one iteration.

    Attributes:
        rollout: P*G rows that the run's own policy drew, on the device.
        rewards: of all rows that go into the ring: these, and those of others beside them.
        questions: the question_id of each of their groups (``questions.ledger``).
        guests: rows of others, on the device, without what the current weights say of them; None where there are none.
        open_rollouts: holder of the sampler's ``state``, whose open rollouts the learner scores; None = nobody's.
    """

    rollout: Agreed[Rollout]
    rewards: Agreed[Rewards]
    questions: Agreed[list[int]]
    guests: Agreed[Rollout | None] = None
    open_rollouts: Agreed[Any] = None


@flax.struct.dataclass
class Scores:
    """What the host knows of B rollouts when they go into the ring."""

    reward: jax.Array  # [B] f32, 0.0 where not trainable
    trainable: jax.Array  # [B] bool, False where the reward failed or the row is padding
    question_id: jax.Array  # [B] i32, of the row's question: the same on every visit
    parts: tuple[jax.Array, ...]  # [B] f32 before weighting, one a reward function; () where their sum alone counts
    columns: Mapping[str, jax.Array]  # [B, ...] f32, what memories of methods know of each row; "turn_reward" [B, K]
    memory: Mapping[str, jax.Array]  # and of no row, f32


@flax.struct.dataclass
class Experience(WithColumns):
    """A rollout with its credit: what the ring stores and the update reads."""

    rollout: Rollout
    reward: jax.Array  # [B] f32 as scored, before any shaping; 0.0 where not trainable
    advantage: jax.Array  # [B, S] f32, 0.0 off the completion
    trainable: jax.Array  # [B] bool, False where the reward failed, the row is filtered out or is padding
    columns: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # what a method needs (views.COLUMNS)


@flax.struct.dataclass
class RingState:
    """Device ring buffer. The shard axis M lies on the mesh's data axes, rings run over C (see ``replay``)."""

    # Every leaf [M, C, ...], on the device or in its host's memory; what a ring in pages has for each token [M, N, T].
    slots: Experience
    order: jax.Array  # [M, C] i32, slots of the main ring and then of that of correct ones, each oldest row first
    num_draws: jax.Array  # [M] i32, batches ever drawn
    uses: jax.Array  # [M, C] i32, times drawn since insertion
    last_use: jax.Array  # [M, C] i32, number (from 1) of the draw it was last in, 0 = never drawn
    priority: jax.Array  # [M, C] f32, stored scalar for prioritised draws (replay.priority), as of insertion
    inserted_step: jax.Array  # [M, C] i32, iteration of insertion, -1 = empty
    question: jax.Array  # [M, C] i32, question_id
    is_retired: jax.Array  # [M, C] bool, never to be drawn (again)
    # Of a ring in pages: "first" [M, C] i32, number of the page where the row begins, and "oldest" [M] i32, of the
    # oldest page held: a row that begins before is gone.
    pages: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class TrainState:
    """Everything the optimizer owns: a pure pytree."""

    # "policy", and "critic" where credit asks for one: a value head on the policy's hidden states, {"kernel": [D, m],
    # "bias": [m]} f32, which is neither published nor exported.
    params: Mapping[str, Any]
    opt_state: Mapping[str, Any]  # of each of these
    step: jax.Array  # [] i32, optimizer steps taken; also the policy version published next
    # Weights of other policies where the method asks for them: "average", "previous" (before the updates of the
    # iteration before), "reference" where it does not stay that of the beginning.
    others: Mapping[str, Any] = flax.struct.field(default_factory=dict)
    scalars: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # "entropy_coefficient" where it moves
