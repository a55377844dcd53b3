"""Credit: rewards of rollouts become advantages of tokens.

    what the host knows of the rewards (memory)
      -> reward terms are added -> advantage of the row or of its tokens -> reshaped (assign)

Owns: grouping by ``group_id``, the order of the functions a config combines, what a failed reward means (no part in
the group, no training). Does not know: any of these functions, how rewards are scored, the ring, the loss.
Letters: B rows, S row width, Q groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from jaxrl_llm.algorithms.inputs import Rows
from jaxrl_llm.ops import groups as compare
from jaxrl_llm.ops.masks import sampled_mask
from jaxrl_llm.settings.schema import ConfigError
from jaxrl_llm.types import STOP_LENGTH, Experience, Rollout, Scores

if TYPE_CHECKING:
    from jaxrl_llm.config import Config

# Stands in for the group of rows without a reward; sorts after every real group_id.
_NO_GROUP = jnp.iinfo(jnp.int32).max


def assign(
    rollout: Rollout, scores: Scores, columns: Mapping[str, Any], config: Config
) -> tuple[Experience, dict[str, Num[Array, "..."]]]:
    """Advantages of one iteration's rollouts. On the device.

    Rows of a group are those of equal ``group_id``, wherever they stand; equal text does not merge groups. A
    row that is not trainable takes no part in its group's baseline and has advantage 0; with
    ``algorithm.overlong_filter`` that is a truncated row too, for its reward tells nothing of where it was heading.

    The reward that is stored is the one that was scored: what reward terms add is in the advantage alone.

    Args:
        rollout: B rows, with at most Q different group ids where trainable: ``rollout.prompts_per_iteration`` from 0
            on, and ``external.groups_per_iteration`` below 0.
        scores: what ``memory.Memory.scores`` made of their rewards.
        columns: what the learner says of the rows (views.COLUMNS).
        config: sections ``algorithm``, ``rewards`` and ``sampling``.

    Returns:
        The experience, and ``{"degenerate_groups": [] i32}``, how many of the run's own groups have no advantage
        other than 0 and teach nothing; and what memories learn from, by function and name.

    Raises:
        ConfigError: a function of the user's own gives something else than a number for each row or token.
    """
    algorithm, num_own = config.algorithm, config.rollout.prompts_per_iteration
    num_groups = num_own + config.external.groups_per_iteration
    mask_BS = sampled_mask(rollout.prompt_length, rollout.length, rollout.policy_version)
    trainable = scores.trainable
    if algorithm.overlong_filter:
        trainable = trainable & (rollout.stop_reason != STOP_LENGTH)
    reward = jnp.where(trainable, scores.reward, 0.0)
    group_id = jnp.where(trainable, rollout.group_id, _NO_GROUP)
    _, group_index = jnp.unique(group_id, size=num_groups + 1, fill_value=_NO_GROUP, return_inverse=True)
    groups = compare.group_rows(group_index, trainable, num_groups + 1)
    rows = Rows(
        reward=reward,
        added=None,
        parts=tuple(zip(scores.parts, config.rewards.weights, strict=True)) if scores.parts else (),
        correct=trainable & (reward >= config.rewards.pass_threshold),
        groups=groups,
        group_id=rollout.group_id,
        length=jnp.sum(mask_BS, axis=1, dtype=jnp.int32),
        mask=mask_BS,
        tokens=rollout.tokens,
        behaviour_logp=rollout.behaviour_logp,
        columns={**rollout.columns, **columns, **scores.columns},
        memory=scores.memory,
        max_length=config.sampling.max_completion_tokens,
    )
    learned = {}

    def call(function: Callable[..., Any], place: str, *given: Any, shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
        value = function(*given)
        if isinstance(value, tuple):  # what its memory learns from comes second
            value, more = value
            learned.update(more)
        if getattr(value, "shape", None) not in shapes:
            what = " or ".join({1: "[B]", 2: "[B, S]"}[len(shape)] for shape in shapes)
            found = getattr(value, "shape", value)
            raise ConfigError(f"algorithm.{place}={function.name!r} must return numbers {what}, not {found}")
        return value

    by_row, by_token = reward.shape, mask_BS.shape
    terms = [call(term, "reward_terms", rows, shapes=(by_row,)) for term in algorithm.reward_terms]
    shaped = reward + sum(terms)
    if terms:
        rows = rows._replace(reward=jnp.where(trainable, shaped, 0.0), added=sum(terms))
    advantage = call(algorithm.advantage, "advantage", rows, shapes=(by_row, by_token))
    made = {"returns": learned.pop("returns")} if "returns" in learned else {}
    if "value" in columns:  # the critic expects the reward at each token, where the advantage says nothing else
        made.setdefault("returns", jnp.where(mask_BS & trainable[:, None], rows.reward[:, None], 0.0))
    # By the rewards as scored, as resampling.is_mixed has it: lengths untie nothing, and tie nothing.
    parts = algorithm.compared(rows.parts, jnp.where) if rows.parts else [(reward, 1.0)]
    compared = [part for part, weight in parts if weight]
    mixed = jnp.any(jnp.stack([compare.is_untied(column, groups) for column in compared]), axis=0)
    if advantage.ndim == 1:
        if config.replay.skip_tied and not algorithm.tied_teaches:
            advantage = jnp.where(mixed, advantage, 0.0)
        advantage = advantage[:, None]
    advantage_BS = jnp.where(mask_BS & trainable[:, None], advantage, 0.0)
    for reshape in algorithm.reshaping:
        advantage_BS = call(reshape, "reshaping", advantage_BS, rows, shapes=(by_token,))

    teaches_B = jnp.any(advantage_BS != 0, axis=1)
    teaches_Q = jnp.any(groups.member & teaches_B[None, :], axis=1)
    is_own_Q = jnp.any(groups.member & (rollout.group_id >= 0)[None, :], axis=1)
    degenerate = num_own - jnp.sum(teaches_Q & is_own_Q, dtype=jnp.int32)
    tied = ~teaches_Q[groups.index]
    if not algorithm.tied_teaches:
        tied &= ~mixed
    group_mean = jnp.where(trainable, compare.group_mean(reward, groups), 0.0)
    made |= {"group_mean": group_mean, "tied": tied, "question_id": scores.question_id}
    keeps_value = algorithm.critic.clip or algorithm.loss_needs("value")  # what the loss is clipped about, or reads
    made |= {name: x for name, x in columns.items() if name != "value" or keeps_value}
    experience = Experience(rollout, reward, advantage_BS, trainable, columns=made)
    return experience, learned | {"degenerate_groups": degenerate}
