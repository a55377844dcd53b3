"""Inputs of a method's functions: rows of an iteration, tokens of a micro-batch, ratios, slots of the ring.

Letters: B rows, S row width, T width of the tokens that a loss reads, D model width.
Owns: these records, the columns that a method may need. Does not know: who fills them, any function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.ops.groups import Groups

# Functions receive arrays on the device. Tests may also pass numpy arrays, and the check at run time accepts them.
if TYPE_CHECKING:
    AnyArray = jax.Array
else:
    AnyArray = jax.Array | np.ndarray

# Classes of questions by the share of correct answers: easy, medium, hard.
NUM_DIFFICULTIES = 3


# Column.from_rewards: a value of the column belongs to a row, to a turn of the policy, or to a token of the completion.
ROW = "row"
TURN = "turn"
TOKEN = "token"


class Column(NamedTuple):
    """A column of the rows. A row has the column if a function of the method needs it.

    Attributes:
        per_token: the column is [B, S, ...], 0 off the completion; else [B, ...].
        is_stored: the ring keeps the column. A function of a loss can only need stored columns.
        meaning: dtype, unit and meaning.
        from_rewards: ROW, TURN or TOKEN if reward functions or environments make the column (``Rewards.columns``); else
            "". A column with TOKEN is ``per_token``.
    """

    per_token: bool
    is_stored: bool
    meaning: str
    from_rewards: str = ""


# Names of Rollout.columns, Experience.columns and Rows.columns. Log-probabilities are in nats.
COLUMNS = {
    # Recorded by the sampler.
    "support": Column(True, True, "[B, S, N] i32 ids that each token was drawn among (ops.filters)"),
    "entropy": Column(True, False, "f32 nats, of the distribution that each token was drawn from"),
    "earlier_logp": Column(
        True,
        False,
        "f32, of the learner's older weights that drew the token, 0.0 elsewhere",
    ),
    "experts": Column(
        True,
        True,
        "[B, S, layers*k] experts that the token before each chose, in prompts too",
    ),
    # Computed by the learner for new rows (learner.annotation).
    "generation_logp": Column(
        True,
        True,
        "f32, of the weights that drew each token, with the learner's numerics",
    ),
    "ref_logp": Column(True, True, "f32, of the frozen reference"),
    "value": Column(True, True, "f32 reward that the critic expected at each token"),
    "hidden": Column(False, False, "[B, D] f32, mean hidden state of the completion"),
    # Computed by credit.
    "returns": Column(True, True, "f32 reward that the critic should expect at each token"),
    "group_mean": Column(
        False,
        True,
        "f32, mean of the group's rewards at that time, 0.0 if not trainable",
    ),
    "tied": Column(
        False,
        False,
        "bool: the group has no advantage and, if the advantage compares siblings, equal rewards",
    ),
    "question_id": Column(False, False, "i32; the ring stores it beside the rows (RingState.question)"),
    # Made with the rewards (Rewards.columns); 0.0 for rows that are not trainable.
    "turn_reward": Column(False, False, "[B, K] f32, share of the reward that each turn received", TURN),
    "turn_seconds": Column(
        False,
        False,
        "[B, K] f32, seconds that the environment took to answer each turn; 0.0 = no answer",
        TURN,
    ),
    "reward_mask": Column(
        True,
        False,
        "f32, 1.0 for tokens of the completion that a reward function masks",
        TOKEN,
    ),
    # Made for the rows of an update batch.
    "age_bucket": Column(False, False, "i32, 0..len(AGE_BUCKETS)"),
}


def reward_columns(needed: Iterable[str], *, max_turns: int, max_length: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes per row of the columns in ``needed`` that are made with the rewards, as the host has them.

    Args:
        needed: names of columns.
        max_turns: largest number of turns of the policy in a completion.
        max_length: longest completion, in tokens. A column with TOKEN has a value for each of these positions.
    """
    shape_of_kind: dict[str, tuple[int, ...]] = {
        ROW: (),
        TURN: (max_turns,),
        TOKEN: (max_length,),
    }
    shapes = {}
    for name in sorted(needed):
        if name in COLUMNS and COLUMNS[name].from_rewards:
            shapes[name] = shape_of_kind[COLUMNS[name].from_rewards]
    return shapes


# Columns that the learner computes for new rows.
COMPUTED_BY_LEARNER = ("generation_logp", "ref_logp", "value", "hidden")
# Column that every slot of the ring has. A loss can compute an advantage anew from it when a row is replayed.
GROUP_MEAN = "group_mean"
# Fields of rows that have a token dimension. Columns declare theirs in ``COLUMNS``.
PER_TOKEN = ("tokens", "behaviour_logp", "policy_version", "advantage")

# Log-probabilities [B, T] in nats of other policies. The learner keeps their weights if a loss needs them.
START = "start"
OTHER_POLICIES = {
    "start_logp": "the weights before the iteration's updates",
    "average_logp": "the moving average of the weights; the function has a setting `decay`",
    "previous_logp": "the weights before the updates of the previous iteration",
}


class Sizes(NamedTuple):
    """Numbers of a run that a memory needs."""

    width: int  # hidden size of the model
    max_length: int  # longest completion, tokens
    max_turns: int = 1  # of the policy in a completion
    group_size: int = 1  # number of answers to a question


class Rows(NamedTuple):
    """The rollouts of an iteration, the input of advantages, reward terms and reshapings; [B] unless stated."""

    reward: jax.Array  # f32, the score plus reward terms; 0.0 if not valid
    added: jax.Array | None  # f32, the sum of the reward terms; None without reward terms
    parts: tuple[tuple[jax.Array, float], ...]  # values and weight of each reward function; () if unread
    correct: jax.Array  # bool
    groups: Groups  # groups of the rows; the valid rows are trained on
    group_id: jax.Array  # i32, the same for rows of a group
    length: jax.Array  # i32, number of tokens of the completion
    mask: jax.Array  # [B, S] bool, tokens that the policy drew; an environment's answers between its turns are False
    tokens: jax.Array  # [B, S] i32
    behaviour_logp: jax.Array  # [B, S] f32
    columns: Mapping[str, jax.Array]  # columns that the function needs
    memory: Mapping[str, jax.Array]
    max_length: int  # longest possible completion, tokens


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Rows [B, T], the input of the functions of a loss; 0.0 off the mask.

    The columns that a function ``needs`` are attributes too: ``x.ref_logp`` [B, T], ``x.group_mean`` [B].
    """

    policy_logp: Float[AnyArray, "B T"]  # current policy, differentiated
    old_logp: Float[AnyArray, "B T"]  # old policy
    behaviour_logp: Float[AnyArray, "B T"]  # policy that drew the tokens
    advantage: Float[AnyArray, "B T"]
    reward: Float[AnyArray, " B"]
    mask: Bool[AnyArray, "B T"]  # tokens with a loss; a row without such tokens does not count in its group
    age: Int[AnyArray, "B T"] | None = None  # iterations since the token was drawn, by the optimizer steps taken
    iteration: Int[AnyArray, ""] | None = None
    group_size: int = 1  # number of neighbouring rows that form a group
    # The columns, [B, T], or [B] if a column is not per token.
    columns: Mapping[str, AnyArray] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> jax.Array:
        columns = self.__dict__.get("columns", {})
        if name in columns:
            return columns[name]
        raise AttributeError(f"the column {name!r} is missing: declare it with @needs({name!r}) at the function")

    def only(self, mask: AnyArray) -> Tokens:
        """Return the tokens with another mask, and with 0 off that mask, because 0 * nan is nan."""
        is_row = jnp.any(mask, axis=1)

        def keep(x: AnyArray) -> jax.Array:
            return jnp.where(mask if x.ndim == 2 else is_row, x, 0.0)

        return dataclasses.replace(
            self,
            policy_logp=keep(self.policy_logp),
            old_logp=keep(self.old_logp),
            behaviour_logp=keep(self.behaviour_logp),
            advantage=keep(self.advantage),
            reward=keep(self.reward),
            columns={name: keep(x) for name, x in self.columns.items()},
            mask=mask,
        )


class Ratios(NamedTuple):
    """Ratios of probabilities, the input of a correction, [B, T]; constants to differentiation, 0.0 off the mask."""

    log_ratio: jax.Array  # f32 nats: old / behaviour, or current / behaviour if the term has no ratio to an old policy
    policy_log_ratio: jax.Array  # f32 nats: current / behaviour
    mask: jax.Array  # bool, tokens with a loss
    over_batch: jax.Array | None = None  # [] f32 of the whole batch, for corrections that declare ``over_batch``


class Batch(NamedTuple):
    """Rows of a whole batch, the input of aggregations; [B] unless stated."""

    trainable: jax.Array  # bool
    group_id: jax.Array  # i32
    correct: jax.Array  # bool
    prompt_length: jax.Array  # i32
    length: jax.Array  # i32
    width: int  # S
    max_length: int  # longest possible completion, tokens
    sampled: jax.Array | None = None  # [B, S] bool, tokens that the policy drew


class Stored(NamedTuple):
    """Slots of the ring, the input of draws. All fields have one shape."""

    priority: jax.Array  # f32 in [0, 1], divided by the largest of the shard
    age: jax.Array  # i32 iterations since insertion
    uses: jax.Array  # i32 times drawn
