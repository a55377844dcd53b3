"""What the functions of a method see: rows of an iteration, tokens of a micro-batch, ratios, slots of the ring.

Letters: B rows, S row width, T width of what a loss sees, D model width.
Owns: these records, the columns that a method may ask for. Does not know: who fills them, any function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Bool, Float, Int

# Classes of questions by how many answers are right: easy, middling, hard.
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


# Names of Rollout.columns, Experience.columns and Rows.columns. Log-probabilities in nats.
COLUMNS = {
    # Noted by the sampler.
    "support": Column(True, True, "[B, S, N] i32 ids that each token was drawn among (ops.filters)"),
    "entropy": Column(True, False, "f32 nats, of the distribution that each token was drawn from"),
    "earlier_logp": Column(True, False, "f32, of the learner's older weights that drew the token, 0.0 elsewhere"),
    "experts": Column(True, True, "[B, S, layers*k] experts that the token before each chose, in prompts too"),
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
    # Made with the rewards (Rewards.columns); 0.0 for rows that are not trainable.
    "turn_reward": Column(False, False, "[B, K] f32, share of the reward that each turn received", TURN),
    "turn_seconds": Column(
        False, False, "[B, K] f32, seconds that the environment took to answer each turn; 0.0 = no answer", TURN
    ),
    "reward_mask": Column(True, False, "f32, 1.0 for tokens of the completion that a reward function masks", TOKEN),
    # Of drawn rows.
    "age_bucket": Column(False, False, "i32, 0..len(AGE_BUCKETS)"),
}


def reward_columns(needed: Iterable[str], *, max_turns: int, max_length: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes per row of the columns in ``needed`` that are made with the rewards, as the host has them.

    Args:
        max_turns: largest number of turns of the policy in a completion.
        max_length: longest completion, in tokens. A column with TOKEN has a value for each of these positions.
    """
    shapes = {ROW: (), TURN: (max_turns,), TOKEN: (max_length,)}
    kinds = {name: COLUMNS[name].from_rewards for name in sorted(needed) if name in COLUMNS}
    return {name: shapes[kind] for name, kind in kinds.items() if kind}


# Those that the learner says of fresh rows.
COMPUTED_BY_LEARNER = ("generation_logp", "ref_logp", "value", "hidden")
# That which every slot of the ring has, so that a loss can take an advantage anew at replay.
GROUP_MEAN = "group_mean"
# Fields of rows that are per token too.
PER_TOKEN = ("tokens", "behaviour_logp", "policy_version", "advantage")

# Log-probabilities [B, T] nats of policies whose weights the learner keeps where a loss asks for them.
START = "start"
OTHER_POLICIES = {
    "start_logp": "the weights before the iteration's updates",
    "average_logp": "the moving average of the weights, whose setting `decay` the function has",
    "previous_logp": "the weights before the updates of the iteration before",
}


class Sizes(NamedTuple):
    """Numbers of a run that a memory needs."""

    width: int  # of the model
    max_length: int  # longest completion, tokens
    max_turns: int = 1  # of the policy in a completion
    group_size: int = 1  # answers to a question


class Rows(NamedTuple):
    """An iteration's rollouts as advantages, reward terms and reshapings see them; [B] but where it says so."""

    reward: jax.Array  # f32, what was scored and what reward terms have added; 0.0 where not valid
    added: jax.Array | None  # f32, what reward terms have added; None where there are none
    parts: tuple[tuple[jax.Array, float], ...]  # values by reward function, and its weight; () where their sum counts
    correct: jax.Array  # bool
    groups: Any  # ops.groups.Groups; its valid rows are those that are trained on
    group_id: jax.Array  # i32, the same for rows of a group
    length: jax.Array  # i32, of the completion
    mask: jax.Array  # [B, S] bool, what the policy drew: between its turns stands what an environment answered
    tokens: jax.Array  # [B, S] i32
    behaviour_logp: jax.Array  # [B, S] f32
    columns: Mapping[str, jax.Array]  # what the function ``needs``
    memory: Mapping[str, jax.Array]
    max_length: int  # longest completion there may be, tokens


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Rows [B, T] as the functions of a loss see them; 0.0 off the mask.

    What a function ``needs`` is an attribute too: ``x.ref_logp`` [B, T], ``x.group_mean`` [B].
    """

    policy_logp: Float[ArrayLike, "B T"]  # current policy, differentiated
    old_logp: Float[ArrayLike, "B T"]  # old policy
    behaviour_logp: Float[ArrayLike, "B T"]  # policy that drew the tokens
    advantage: Float[ArrayLike, "B T"]
    reward: Float[ArrayLike, " B"]
    mask: Bool[ArrayLike, "B T"]  # tokens with a loss; a row without any is no sibling of its group
    age: Int[ArrayLike, "B T"] | None = None  # iterations since the token was drawn, by the optimizer steps taken
    iteration: Int[ArrayLike, ""] | None = None
    group_size: int = 1  # neighbouring rows that are siblings
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # [B, T], or [B] where not per token

    def __getattr__(self, name: str) -> jax.Array:
        columns = self.__dict__.get("columns", {})
        if name in columns:
            return columns[name]
        raise AttributeError(f"{name!r} is not there: a function that reads it says so, @needs({name!r})")

    def only(self, mask: jax.Array) -> Tokens:
        """Those of a mask alone, with constants elsewhere: 0 * nan is nan."""
        is_row = jnp.any(mask, axis=1)
        keep = lambda x: jnp.where(mask if x.ndim == 2 else is_row, x, 0.0)
        names = ("policy_logp", "old_logp", "behaviour_logp", "advantage", "reward")
        kept = {name: keep(getattr(self, name)) for name in names}
        columns = {name: keep(x) for name, x in self.columns.items()}
        return dataclasses.replace(self, **kept, columns=columns, mask=mask)


class Ratios(NamedTuple):
    """What a correction judges, [B, T]; constants to differentiation, 0.0 off the mask."""

    log_ratio: jax.Array  # f32 nats: old / behaviour, or current / behaviour where the term has no ratio to an old one
    policy_log_ratio: jax.Array  # f32 nats: current / behaviour
    mask: jax.Array  # bool, tokens with a loss
    over_batch: jax.Array | None = None  # [] f32 of the whole batch, for corrections that ask for it


class Batch(NamedTuple):
    """Rows of a whole batch as aggregations see them; [B] but where it says so."""

    trainable: jax.Array  # bool
    group_id: jax.Array  # i32
    correct: jax.Array  # bool
    prompt_length: jax.Array  # i32
    length: jax.Array  # i32
    width: int  # S
    max_length: int  # longest completion there may be, tokens
    sampled: jax.Array | None = None  # [B, S] bool, tokens that the policy drew


class Stored(NamedTuple):
    """Slots of the ring as draws see them, all of one shape."""

    priority: jax.Array  # f32 in [0, 1], over the largest of the shard
    age: jax.Array  # i32 iterations since insertion
    uses: jax.Array  # i32 times drawn
