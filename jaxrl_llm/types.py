"""The records that cross the seams between stages.

Letters: B rollouts (rows), P prompts, L prompt width, S row width (prompt + completion), M replay shards, C slots per
shard, N pages of T tokens per shard. Rows are right-padded ``prompt ++ completion``; masks come from ``prompt_length``
and ``length``, never from the value of a token. ``logp[t]`` is the log-probability of ``tokens[t]``.

Owns: names, shapes, units, meaning of zero. Does not know: how any of it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

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
STOP_NAMES = ("none", "eos", "length", "stop_string")

# Experience.age_bucket: upper ages of the buckets, in iterations; one more has all above.
AGE_BUCKETS = (0, 1, 3, 7, 15)

# Classes of questions by how many answers are right: easy, middling, hard.
NUM_DIFFICULTIES = 3

# In the workdir of a run that shares its rollouts (metrics.share_rollouts).
SHARED_FILE = "shared_rollouts.jsonl"

# Rewards.outcome
OUTCOME_SCORE = 0
OUTCOME_TIMEOUT = 1
OUTCOME_ERROR = 2


@dataclasses.dataclass(frozen=True)
class Example:
    """One question of a task, on the host.

    Attributes:
        prompt: text, or a list of ``{"role", "content"}`` messages.
        columns: everything else of the row; passed to reward functions by keyword.
        origin: where it came from ("file.jsonl:12"), for error messages.
    """

    prompt: str | list[dict[str, str]]
    columns: dict[str, Any]
    origin: str = ""


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """P tokenised prompts, on the host (numpy)."""

    tokens: Any  # [P, L] i32, right-padded with 0
    length: Any  # [P] i32, 1..L
    group_id: Any  # [P] i32, position in the prompt stream: unique over the run, keys the noise
    examples: tuple[Example, ...]  # P of them


class Column(NamedTuple):
    """What rows have where a method asks for it.

    Attributes:
        per_token: [B, S, ...], 0 off the completion; else [B, ...].
        is_stored: the ring keeps it.
    """

    per_token: bool
    is_stored: bool
    meaning: str


# Names of Rollout.columns, Experience.columns and Rows.columns. Log-probabilities in nats.
COLUMNS = {
    # Noted by the sampler.
    "support": Column(True, True, "[B, S, N] i32 ids that each token was drawn among (ops.sampling)"),
    "entropy": Column(True, False, "f32 nats, of the distribution that each token was drawn from"),
    "earlier_logp": Column(True, False, "f32, of the learner's older weights that drew the token, 0.0 elsewhere"),
    # Said by the learner of fresh rows (learner.annotation).
    "generation_logp": Column(True, True, "f32, of the weights that drew each token, as the learner computes them"),
    "ref_logp": Column(True, True, "f32, of the frozen reference"),
    "value": Column(True, True, "f32 reward that the critic expected at each token"),
    "hidden": Column(False, False, "[B, D] f32, mean hidden state of the completion"),
    # Made by credit.
    "returns": Column(True, True, "f32 reward that the critic should expect at each token"),
    "group_mean": Column(False, True, "f32, mean of the group's rewards at that time, 0.0 where not trainable"),
    "tied": Column(False, False, "bool: of a group without an advantage, and of equal rewards where siblings compare"),
    "question_id": Column(False, False, "i32; the ring keeps it beside the rows (RingState.question)"),
    # Of drawn rows.
    "age_bucket": Column(False, False, "i32, 0..len(AGE_BUCKETS)"),
}
# Fields of rows that are per token too.
PER_TOKEN = ("tokens", "behaviour_logp", "policy_version", "advantage")

# Log-probabilities [B, T] nats of policies whose weights the learner keeps where a loss asks for them.
START = "start"
OTHER_POLICIES = {
    "start_logp": "the weights before the iteration's updates",
    "average_logp": "the moving average of the weights, whose setting `decay` the function has",
    "previous_logp": "the weights before the updates of the iteration before",
}


@flax.struct.dataclass
class Rollout:
    """B finished completions, on the device."""

    tokens: jax.Array  # [B, S] i32, 0 past `length`
    prompt_length: jax.Array  # [B] i32
    length: jax.Array  # [B] i32, prompt + completion; EOS is counted
    behaviour_logp: jax.Array  # [B, S] f32 nats, 0.0 off the completion
    group_id: jax.Array  # [B] i32, siblings of one prompt share it; below 0 where others than this run wrote them
    policy_version: jax.Array  # [B, S] i32 per token, -1 off the completion
    stop_reason: jax.Array  # [B] i8, STOP_*
    columns: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # of COLUMNS, what a method needs

    def with_columns(self, **columns: jax.Array) -> Rollout:
        """The same with these columns, in place of those that it has by these names."""
        return self.replace(columns={**self.columns, **columns})


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
    rewards: PerHost[Rewards]
    questions: PerHost[list[int]]
    guests: Agreed[Rollout | None] = None
    open_rollouts: Agreed[Any] = None


@flax.struct.dataclass
class Scores:
    """What the host knows of B rollouts when they go into the ring."""

    reward: jax.Array  # [B] f32, 0.0 where not trainable
    trainable: jax.Array  # [B] bool, False where the reward failed or the row is padding
    question_id: jax.Array  # [B] i32, of the row's question: the same on every visit
    parts: tuple[jax.Array, ...]  # [B] f32 before weighting, one a reward function; () where their sum alone counts
    columns: Mapping[str, jax.Array]  # [B] f32, what memories of methods know of each row
    memory: Mapping[str, jax.Array]  # and of no row, f32


@flax.struct.dataclass
class Experience:
    """A rollout with its credit: what the ring stores and the update reads."""

    rollout: Rollout
    reward: jax.Array  # [B] f32 as scored, before any shaping; 0.0 where not trainable
    advantage: jax.Array  # [B, S] f32, 0.0 off the completion
    trainable: jax.Array  # [B] bool, False where the reward failed, the row is filtered out or is padding
    columns: Mapping[str, jax.Array] = flax.struct.field(default_factory=dict)  # of COLUMNS, what a method needs

    def with_columns(self, **columns: jax.Array) -> Experience:
        """The same with these columns, in place of those that it has by these names."""
        return self.replace(columns={**self.columns, **columns})


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


# ---- what the functions of a method see (algorithms)


class Sizes(NamedTuple):
    """Numbers of a run that a memory needs."""

    width: int  # of the model
    max_length: int  # longest completion, tokens


class Rows(NamedTuple):
    """An iteration's rollouts as advantages, reward terms and reshapings see them; [B] but where it says so."""

    reward: jax.Array  # f32, what was scored and what reward terms have added; 0.0 where not valid
    added: jax.Array | None  # f32, what reward terms have added; None where there are none
    parts: tuple[tuple[jax.Array, float], ...]  # values by reward function, and its weight; () where their sum counts
    correct: jax.Array  # bool
    groups: Any  # ops.groups.Groups; its valid rows are those that are trained on
    length: jax.Array  # i32, of the completion
    mask: jax.Array  # [B, S] bool, the completion
    behaviour_logp: jax.Array  # [B, S] f32
    columns: Mapping[str, jax.Array]  # what the function ``needs``
    memory: Mapping[str, jax.Array]
    max_length: int  # longest completion there may be, tokens


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Rows [B, T] as the functions of a loss see them; 0.0 off the mask.

    What a function ``needs`` is an attribute too: ``x.ref_logp``.
    """

    policy_logp: jax.Array  # [B, T] current policy, differentiated
    old_logp: jax.Array  # [B, T] old policy
    behaviour_logp: jax.Array  # [B, T] policy that drew the tokens
    advantage: jax.Array  # [B, T] f32
    reward: jax.Array  # [B] f32
    mask: jax.Array  # [B, T] bool, tokens with a loss; a row without any is no sibling of its group
    policy_version: jax.Array | None = None  # [B, T] i32 that drew the token
    version: jax.Array | None = None  # [] i32 of the current weights
    start_version: jax.Array | None = None  # [] i32 of the weights before the iteration's updates
    iteration: jax.Array | None = None  # [] i32
    group_size: int = 1  # neighbouring rows that are siblings
    columns: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)  # [B, T]

    def __getattr__(self, name: str) -> jax.Array:
        columns = self.__dict__.get("columns", {})
        if name in columns:
            return columns[name]
        raise AttributeError(f"{name!r} is not there: a function that reads it says so, @needs({name!r})")

    def only(self, mask: jax.Array) -> Tokens:
        """Those of a mask alone, with constants elsewhere: 0 * nan is nan."""
        keep = lambda x: jnp.where(mask, x, 0.0)
        names = ("policy_logp", "old_logp", "behaviour_logp", "advantage")
        kept = {name: keep(getattr(self, name)) for name in names}
        columns = {name: keep(x) for name, x in self.columns.items()}
        reward = jnp.where(jnp.any(mask, axis=1), self.reward, 0.0)
        return dataclasses.replace(self, **kept, columns=columns, reward=reward, mask=mask)


class Ratios(NamedTuple):
    """What a correction judges, [B, T]; constants to differentiation, 0.0 off the mask."""

    log_ratio: jax.Array  # f32 nats: old / behaviour, or current / behaviour where the term has no ratio to an old one
    policy_log_ratio: jax.Array  # f32 nats: current / behaviour
    mask: jax.Array  # bool, tokens with a loss
    over_batch: jax.Array | None = None  # [] f32 of the whole batch, for corrections that ask for it


class Batch(NamedTuple):
    """Rows of a whole batch as aggregations see them; [B]."""

    trainable: jax.Array  # bool
    group_id: jax.Array  # i32
    correct: jax.Array  # bool
    prompt_length: jax.Array  # i32
    length: jax.Array  # i32
    width: int  # S
    max_length: int  # longest completion there may be, tokens


class Stored(NamedTuple):
    """Slots of the ring as draws see them, all of one shape."""

    priority: jax.Array  # f32 in [0, 1], over the largest of the shard
    age: jax.Array  # i32 iterations since insertion
    uses: jax.Array  # i32 times drawn
