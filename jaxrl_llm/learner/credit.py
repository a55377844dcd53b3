"""Credit: rewards of rollouts become advantages of tokens.

    rewards and memories of the host (algorithms.memory)
      -> reward terms are added -> advantage of each row or token -> reshapings, in order (assign)

Owns: groups of rows by ``group_id``, the order in which the functions of a config are called, the treatment of failed
rewards (no part in the group, no training). Does not know: the functions themselves, how rewards are scored, the ring,
the loss. Letters: B rows, S row width, Q groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from jaxrl_llm.algorithms.inputs import COLUMNS, Rows
from jaxrl_llm.config import Config
from jaxrl_llm.ops import groups as compare
from jaxrl_llm.ops.groups import Groups
from jaxrl_llm.ops.masks import sampled_mask
from jaxrl_llm.settings.schema import ConfigError
from jaxrl_llm.settings.use import Chosen
from jaxrl_llm.types import STOP_LENGTH, Experience, Rollout, Scores

# Group id of the rows without a reward. It sorts after every real group_id.
_NO_GROUP = jnp.iinfo(jnp.int32).max


def assign(
    rollout: Rollout,
    scores: Scores,
    columns: Mapping[str, Any],
    config: Config,
) -> tuple[Experience, dict[str, Num[Array, ...]]]:
    """Return the rollouts of one iteration with their advantages. On the device.

    Rows with equal ``group_id`` form a group, at any place in the batch. Groups with equal text stay separate. A row
    that is not trainable takes no part in its group's baseline and has advantage 0. With ``algorithm.overlong_filter``
    truncated rows are not trainable either, because their reward does not show how they would have ended.

    The stored reward is the reward as scored. Reward terms change only the advantage.

    Args:
        rollout: B rows. The trainable rows have at most Q different group ids: ``rollout.prompts_per_iteration`` from 0
            on, and ``external.groups_per_iteration`` below 0.
        scores: their rewards, from ``memory.Memory.scores``.
        columns: columns of the rows that the learner has computed (inputs.COLUMNS).
        config: this function reads the sections ``algorithm``, ``rewards``, ``rollout``, ``external``, ``replay`` and
            ``sampling``.

    Returns:
        The experience, and the values that memories learn from, by name. The entry "degenerate_groups" [] i32 is the
        number of the run's own groups whose advantages are all 0.

    Raises:
        ConfigError: a function of the user returns something else than its place needs.
    """
    algorithm = config.algorithm
    trainable = scores.trainable
    if algorithm.overlong_filter:
        trainable = trainable & (rollout.stop_reason != STOP_LENGTH)
    reward_columns = _reward_columns(rollout, scores)
    all_columns = {**rollout.columns, **columns, **scores.columns, **reward_columns}
    as_scored = _rows(rollout, scores, trainable, all_columns, config)
    is_mixed = _is_mixed(as_scored, config)
    is_trained_BS = as_scored.mask & trainable[:, None]
    row_shape = as_scored.reward.shape
    token_shape = as_scored.mask.shape

    learned: dict[str, Any] = {}
    rows = _add_reward_terms(as_scored, trainable, config, learned)
    advantage = _call(algorithm.advantage, "advantage", (rows,), (row_shape, token_shape), learned)
    credit_columns = _returns(rows, is_trained_BS, columns, learned)
    advantage_BS = _on_tokens(advantage, is_trained_BS, is_mixed, config)
    for reshaping in algorithm.reshaping:
        advantage_BS = _call(reshaping, "reshaping", (advantage_BS, rows), (token_shape,), learned)

    teaches_Q = _groups_with_advantage(advantage_BS, rows.groups)
    learned["degenerate_groups"] = _num_degenerate(rollout, teaches_Q, rows.groups, config)
    tied = ~teaches_Q[rows.groups.index]
    if not algorithm.tied_teaches:
        tied &= ~is_mixed
    group_mean = compare.group_mean(as_scored.reward, rows.groups)
    credit_columns["group_mean"] = jnp.where(trainable, group_mean, 0.0)
    credit_columns["tied"] = tied
    credit_columns["question_id"] = scores.question_id
    credit_columns |= _columns_of_loss(columns, reward_columns, config)
    experience = Experience(rollout, as_scored.reward, advantage_BS, trainable, columns=credit_columns)
    return experience, learned


def _rows(
    rollout: Rollout,
    scores: Scores,
    trainable: jax.Array,
    columns: Mapping[str, jax.Array],
    config: Config,
) -> Rows:
    """Return the rows as the method's functions see them, with the reward as scored."""
    reward = jnp.where(trainable, scores.reward, 0.0)
    mask_BS = sampled_mask(rollout.prompt_length, rollout.length, rollout.policy_version)
    return Rows(
        reward=reward,
        added=None,
        parts=_parts(scores, config),
        correct=trainable & (reward >= config.rewards.pass_threshold),
        groups=_group_rows(rollout, trainable, config),
        group_id=rollout.group_id,
        length=jnp.sum(mask_BS, axis=1, dtype=jnp.int32),
        mask=mask_BS,
        tokens=rollout.tokens,
        behaviour_logp=rollout.behaviour_logp,
        columns=columns,
        memory=scores.memory,
        max_length=config.sampling.max_completion_tokens,
    )


def _parts(scores: Scores, config: Config) -> tuple[tuple[jax.Array, float], ...]:
    """Return the scores [B] and the weight of each reward function; () if only the sum of the scores counts."""
    if not scores.parts:
        return ()
    return tuple(zip(scores.parts, config.rewards.weights, strict=True))


def _reward_columns(rollout: Rollout, scores: Scores) -> dict[str, jax.Array]:
    """Return the columns that reward functions gave, by name, with values per token at their tokens."""
    columns = {}
    for name, column in scores.columns.items():
        if name in COLUMNS:
            columns[name] = _placed(name, column, rollout)
    return columns


def _placed(name: str, column: jax.Array, rollout: Rollout) -> jax.Array:
    """Return a column of the rewards in the layout of the functions' inputs, with each value at its token.

    Args:
        column: [B, N] if the column is per token: values of the first N tokens of the completion; else [B, ...].

    Returns:
        [B, S] if the column is per token, 0.0 off the completion; else ``column``.
    """
    if not COLUMNS[name].per_token:
        return column
    position = jnp.arange(rollout.tokens.shape[1])[None, :]
    index_BS = position - rollout.prompt_length[:, None]
    is_completion = (index_BS >= 0) & (position < rollout.length[:, None])
    clipped = jnp.clip(index_BS, 0, column.shape[1] - 1)
    value_BS = jnp.take_along_axis(column, clipped, axis=1)
    return jnp.where(is_completion, value_BS, 0.0)


def _group_rows(rollout: Rollout, trainable: jax.Array, config: Config) -> Groups:
    """Return the group of each row (``ops.groups``). All rows that are not trainable form one separate group."""
    num_groups = config.rollout.prompts_per_iteration + config.external.groups_per_iteration
    group_id = jnp.where(trainable, rollout.group_id, _NO_GROUP)
    _, group_index = jnp.unique(group_id, size=num_groups + 1, fill_value=_NO_GROUP, return_inverse=True)
    return compare.group_rows(group_index, trainable, num_groups + 1)


def _add_reward_terms(
    rows: Rows,
    trainable: jax.Array,
    config: Config,
    learned: dict[str, Any],
) -> Rows:
    """Return the rows with the reward terms of the config added to their rewards."""
    if not config.algorithm.reward_terms:
        return rows
    added = jnp.zeros_like(rows.reward)
    for term in config.algorithm.reward_terms:
        added = added + _call(term, "reward_terms", (rows,), (rows.reward.shape,), learned)
    reward = jnp.where(trainable, rows.reward + added, 0.0)
    return rows._replace(reward=reward, added=added)


def _returns(
    rows: Rows,
    is_trained_BS: jax.Array,
    columns: Mapping[str, Any],
    learned: dict[str, Any],
) -> dict[str, jax.Array]:
    """Return the column "returns", which the critic learns to predict; {} without a critic.

    An advantage may return it among the values in ``learned``; this function removes it there. By default the critic
    learns to predict the reward at each token.
    """
    if "returns" in learned:
        return {"returns": learned.pop("returns")}
    if "value" in columns:
        return {"returns": jnp.where(is_trained_BS, rows.reward[:, None], 0.0)}
    return {}


def _on_tokens(
    advantage: jax.Array,
    is_trained_BS: jax.Array,
    is_mixed: jax.Array,
    config: Config,
) -> jax.Array:
    """Return an advantage of rows [B] or tokens [B,S] at each trained token, [B,S], 0.0 elsewhere."""
    if advantage.ndim == 1:
        if config.replay.skip_tied and not config.algorithm.tied_teaches:
            advantage = jnp.where(is_mixed, advantage, 0.0)
        advantage = advantage[:, None]
    return jnp.where(is_trained_BS, advantage, 0.0)


def _is_mixed(as_scored: Rows, config: Config) -> jax.Array:
    """Return, for each row, whether the rewards of its group differ, [B] bool.

    Rewards as scored decide this, as in ``resampling.is_mixed``. Reward terms, such as a length penalty, do not count.
    """
    parts = [(as_scored.reward, 1.0)]
    if as_scored.parts:
        parts = config.algorithm.compared(as_scored.parts, jnp.where)
    untied = [compare.is_untied(values, as_scored.groups) for values, weight in parts if weight]
    return jnp.any(jnp.stack(untied), axis=0)


def _groups_with_advantage(advantage_BS: jax.Array, groups: Groups) -> jax.Array:
    """Return which groups have an advantage other than 0, [Q] bool."""
    teaches_B = jnp.any(advantage_BS != 0, axis=1)
    return jnp.any(groups.member & teaches_B[None, :], axis=1)


def _columns_of_loss(
    columns: Mapping[str, jax.Array],
    reward_columns: Mapping[str, jax.Array],
    config: Config,
) -> dict[str, jax.Array]:
    """Return the columns of the learner and of the rewards that the ring stores for the loss."""
    algorithm = config.algorithm
    reads_value = algorithm.critic.clip > 0 or algorithm.loss_needs("value")
    stored = {}
    for name, column in columns.items():
        if name != "value" or reads_value:
            stored[name] = column
    for name, column in reward_columns.items():
        if COLUMNS[name].is_stored and algorithm.loss_needs(name):
            stored[name] = column
    return stored


def _num_degenerate(
    rollout: Rollout,
    teaches_Q: jax.Array,
    groups: Groups,
    config: Config,
) -> jax.Array:
    """Return the number [] i32 of the run's own groups without an advantage other than 0."""
    is_own_Q = jnp.any(groups.member & (rollout.group_id >= 0)[None, :], axis=1)
    num_teaching = jnp.sum(teaches_Q & is_own_Q, dtype=jnp.int32)
    return config.rollout.prompts_per_iteration - num_teaching


def _call(
    function: Chosen[Any],
    field: str,
    arguments: tuple[Any, ...],
    shapes: tuple[tuple[int, ...], ...],
    learned: dict[str, Any],
) -> jax.Array:
    """Return the array that a method's function returns, and add the values for its memory to ``learned``.

    Args:
        field: setting of the function in ``config.algorithm``, for the error.
        shapes: allowed shapes of the array.
        learned: a function with a memory returns (array, mapping). The mapping is added here.
    """
    value = function(*arguments)
    if isinstance(value, tuple):
        value, learned_values = value
        learned.update(learned_values)
    if getattr(value, "shape", None) not in shapes:
        letters = {1: "[B]", 2: "[B, S]"}
        expected = " or ".join(letters[len(shape)] for shape in shapes)
        received = getattr(value, "shape", value)
        raise ConfigError(
            f"algorithm.{field}={function.name!r} must return an array of shape {expected}, not {received}. B is the "
            "number of rows and S their width: change the function to return one number for each row or token"
        )
    return value
