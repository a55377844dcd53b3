"""Credit: rewards of rollouts become advantages of tokens.

    what the host knows of the rewards (memory)
      -> shaped by length -> advantage of the row -> reshaped by confidence -> spread over its completion, or less
         what a critic expected at each of its tokens (assign)

Owns: grouping by ``group_id``, which functions a config combines, what a failed reward means (no part in
the group, no training). Does not know: how rewards are scored, what is remembered of earlier ones, the ring, the loss.
Letters: B rows, S row width, Q groups, K reward functions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Num

from jaxrl_llm.algorithms import advantages, baselines, shaping
from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.config import Config
from jaxrl_llm.method_limits import NEED_NO_MIXED_GROUP
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.types import STOP_LENGTH, Experience, Rollout, Scores

# Stands in for the group of rows without a reward; sorts after every real group_id.
_NO_GROUP = jnp.iinfo(jnp.int32).max


def assign(
    rollout: Rollout, scores: Scores, ref_logp: Float[ArrayLike, "B S"] | None, config: Config
) -> tuple[Experience, dict[str, Num[Array, "..."]]]:
    """Advantages of one iteration's rollouts. On the device.

    Rows of a group are those of equal ``group_id``, wherever they stand; equal text does not merge groups. A
    row that is not trainable takes no part in its group's baseline and has advantage 0; with
    ``credit.overlong_filter`` that is a truncated row too, for its reward tells nothing of where it was heading.

    The reward that is stored is the one that was scored: what shapes it by length is in the advantage alone.

    Args:
        rollout: B rows, with at most Q different group ids where trainable: ``rollout.prompts_per_iteration`` from 0
            on, and ``external.groups_per_iteration`` below 0.
        scores: what ``memory.Memory.scores`` made of their rewards, and what the learner says of the rows.
        ref_logp: [B, S] f32 nats of the frozen reference, or None.
        config: sections ``credit``, ``rewards`` and ``sampling``, and whether the objective clips values.

    Returns:
        The experience, and ``{"degenerate_groups": [] i32}``, how many of the run's own groups have no advantage
        other than 0 and teach nothing; and for ``memory``, with "poise" ``"regression"`` [F, F + 1] f32, with
        ``credit.short_answer_iterations`` ``"correct_within"`` (``shaping.correct_within``), with
        ``credit.advantage_norm_decay`` ``"moments"`` [3] f32.
    """
    settings, num_own = config.credit, config.rollout.prompts_per_iteration
    num_groups = num_own + config.external.groups_per_iteration
    mask_BS = completion_mask(rollout.prompt_length, rollout.length, rollout.tokens.shape[1])
    length = rollout.length - rollout.prompt_length
    trainable = scores.trainable
    if settings.overlong_filter:
        trainable = trainable & (rollout.stop_reason != STOP_LENGTH)
    reward = jnp.where(trainable, scores.reward, 0.0)
    correct = trainable & (reward >= config.rewards.pass_threshold)
    group_id = jnp.where(trainable, rollout.group_id, _NO_GROUP)
    _, group_index = jnp.unique(group_id, size=num_groups + 1, fill_value=_NO_GROUP, return_inverse=True)
    groups = advantages.group_rows(group_index, trainable, num_groups + 1)
    sums = {}

    # ---- what is added to the reward
    terms = []
    if settings.overlong_buffer_tokens:
        limit = config.sampling.max_completion_tokens
        terms.append(shaping.overlong_penalty(length, max_length=limit, buffer=settings.overlong_buffer_tokens))
    if settings.length_reward:
        terms.append(settings.length_reward * shaping.length_reward(length, correct, groups))
    if settings.short_answer_tokens:
        target, bonus = settings.short_answer_tokens, settings.short_answer_bonus
        if scores.short_answer is not None:
            row_class, grid = shaping.difficulty(correct, groups), config.short_answer_grid
            target = scores.short_answer[row_class]
            sums["correct_within"] = shaping.correct_within(length, correct, row_class, groups, grid=grid)
        terms.append(shaping.short_bonus(length, correct, target=target, bonus=bonus))
    parts, part_weights = scores.parts, config.rewards.weights
    if settings.gate_threshold:
        parts = shaping.gated(parts, threshold=settings.gate_threshold)
    compared = [reward]
    if parts is not None:
        columns = zip(jnp.moveaxis(parts, 1, 0), part_weights, strict=True)
        compared = [column for column, weight in columns if weight]
    if parts is not None and terms:  # normalised like any other reward
        parts, part_weights = jnp.concatenate([parts, sum(terms)[:, None]], axis=1), (*part_weights, 1.0)
    shaped = reward + sum(terms)

    # ---- the advantage of the row
    baseline = scores.baseline
    if scores.regression is not None:
        rows = rollout.behaviour_logp, rollout.entropy, scores.hidden, mask_BS
        features = baselines.row_features(*rows, max_length=config.sampling.max_completion_tokens)
        baseline = baselines.ridge_predict(features, scores.regression)
        # A rollout predicts its siblings: what it learns from is their mean reward.
        has_others = trainable & (advantages.group_count(groups) > 1)
        target = advantages.mean_of_others(shaped, groups)
        sums["regression"] = baselines.regression_sums(features, target, has_others)

    def over_running(
        value: Float[Array, "*any"], centre: bool, valid: Bool[Array, "*any"] = groups.valid
    ) -> Float[Array, "*any"]:
        decay = settings.advantage_norm_decay
        sums["moments"] = advantages.running_moments(value, valid, scores.moments, decay=decay)
        return jnp.where(valid, advantages.over_moments(value, sums["moments"], centre=centre), 0.0)

    advantage = advantages.estimate(
        shaped,
        groups,
        kind=settings.advantage,
        delta_v=settings.delta_v,
        parts=parts,
        part_weights=part_weights,
        baseline=baseline,
        over_batch=None if scores.moments is None else over_running,
    )
    # By the rewards as scored, as resampling.is_mixed has it: lengths untie nothing, and tie nothing.
    mixed = jnp.any(jnp.stack([advantages.is_untied(column, groups) for column in compared]), axis=0)
    if config.replay.skip_tied and settings.advantage not in NEED_NO_MIXED_GROUP:
        advantage = jnp.where(mixed, advantage, 0.0)

    # ---- what is done to it
    if settings.positive_amplification:
        advantage = shaping.amplify_positive(advantage, correct, factor=settings.positive_amplification)
    if settings.entropy_reweighting:
        row_entropy = jnp.sum(jnp.where(mask_BS, rollout.entropy, 0.0), axis=1) / jnp.maximum(length, 1)
        advantage *= shaping.entropy_factor(row_entropy, groups, strength=settings.entropy_reweighting)
    returns_BS = None
    if scores.value is None:
        advantage_BS = jnp.where(mask_BS, advantage[:, None], 0.0)
    else:
        active_BS = mask_BS & trainable[:, None]
        returns_BS = values.lambda_returns(
            scores.value, advantage, active_BS, discount=settings.discount, gae_lambda=settings.gae_lambda
        )
        gain_BS = returns_BS - jnp.where(active_BS, scores.value, 0.0)
        whiten = advantages.whiten if scores.moments is None else lambda gain, valid: over_running(gain, True, valid)
        advantage_BS = whiten(gain_BS, active_BS)
        advantage = jnp.max(jnp.abs(advantage_BS), axis=1)
    if settings.duration_weight:
        factor = shaping.duration_factor(length, trainable, exponent=settings.duration_weight)
        advantage_BS *= factor[:, None]
    if settings.entropy_bonus:
        entropy_BS = jnp.where(mask_BS, rollout.entropy, 0.0)
        advantage_BS += shaping.entropy_bonus(
            advantage_BS, entropy_BS, coefficient=settings.entropy_bonus, limit=settings.entropy_bonus_limit
        )

    teaches_Q = jnp.any(groups.member & (advantage != 0)[None, :], axis=1)
    is_own_Q = jnp.any(groups.member & (rollout.group_id >= 0)[None, :], axis=1)
    sums["degenerate_groups"] = num_own - jnp.sum(teaches_Q & is_own_Q, dtype=jnp.int32)
    tied = ~teaches_Q[groups.index]
    if settings.advantage not in NEED_NO_MIXED_GROUP:
        tied &= ~mixed
    old_value = scores.value if config.objective.value_clip else None
    group_mean = advantages.group_sum(reward, groups) / jnp.maximum(advantages.group_count(groups), 1.0)
    experience = Experience(
        rollout.replace(entropy=None, old_logp=None),
        reward,
        advantage_BS,
        trainable,
        tied,
        jnp.where(trainable, group_mean, 0.0),
        ref_logp,
        returns=returns_BS,
        value=old_value,
        old_logp=scores.old_logp,
        question_id=scores.question_id,
    )
    return experience, sums
