"""Credit: rewards of rollouts become advantages of tokens.

    what the host knows of the rewards (Memory.scores)
      -> shaped by length -> advantage of the row -> reshaped by confidence -> spread over its completion, or less
         what a critic expected at each of its tokens (assign)

Owns: grouping by ``group_id``, which functions of ``ops`` a config combines, what a failed reward means (no part in
the group, no training), what is remembered of earlier rewards. Does not know: how rewards are scored, the ring, the
loss. Letters: B rows, S row width, Q groups, K reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.limits import NEED_NO_MIXED_GROUP
from jaxrl_llm.ops import advantages, baselines, shaping, values
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.types import OUTCOME_SCORE, STOP_LENGTH, Experience, Rewards, Rollout, Scores

# Stands in for the group of rows without a reward; sorts after every real group_id.
_NO_GROUP = jnp.iinfo(jnp.int32).max
# Of the decay of "mssr" (arXiv:2512.18215): iterations, and nats a token.
KL_WINDOW, KL_TARGET = 20, 0.01


def assign(
    rollout: Rollout, scores: Scores, ref_logp: jax.Array | None, config: Config
) -> tuple[Experience, dict[str, jax.Array]]:
    """Advantages of one iteration's rollouts. On the device.

    Rows of a group are those of equal ``group_id``, wherever they stand; equal text does not merge groups. A
    row that is not trainable takes no part in its group's baseline and has advantage 0; with
    ``credit.overlong_filter`` that is a truncated row too, for its reward tells nothing of where it was heading.

    The reward that is stored is the one that was scored: what shapes it by length is in the advantage alone.

    Args:
        rollout: B rows, with at most Q different group ids where trainable: ``rollout.prompts_per_iteration`` from 0
            on, and ``external.groups_per_iteration`` below 0.
        scores: what ``Memory.scores`` made of their rewards, and what the learner says of the rows.
        ref_logp: [B, S] f32 nats of the frozen reference, or None.
        config: sections ``credit``, ``rewards`` and ``sampling``, and whether the objective clips values.

    Returns:
        The experience, and ``{"degenerate_groups": [] i32}``, how many of the run's own groups have no advantage
        other than 0 and teach nothing; and for ``Memory.observe``, with "poise" ``"regression"`` [F, F + 1] f32, with
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
    if parts is not None and terms:  # normalised like any other reward
        parts, part_weights = jnp.concatenate([parts, sum(terms)[:, None]], axis=1), (*part_weights, 1.0)
    shaped = reward + sum(terms)

    # ---- the advantage of the row
    weight, baseline = None, scores.baseline
    if settings.advantage == "vcpo":
        # Of what the loss has of a row: the sum over its tokens, or their mean.
        weight = baselines.gradient_square(rollout.behaviour_logp, mask_BS)
        if config.objective.aggregation == "sequence_mean":
            weight /= jnp.square(jnp.maximum(length, 1).astype(jnp.float32))
    if scores.regression is not None:
        rows = rollout.behaviour_logp, rollout.entropy, scores.hidden, mask_BS
        features = baselines.row_features(*rows, max_length=config.sampling.max_completion_tokens)
        baseline = baselines.ridge_predict(features, scores.regression)
        # A rollout predicts its siblings: what it learns from is their mean reward.
        has_others = trainable & (advantages.group_count(groups) > 1)
        target = advantages.mean_of_others(shaped, groups)
        sums["regression"] = baselines.regression_sums(features, target, has_others)

    def over_running(value: jax.Array, centre: bool, valid: jax.Array = groups.valid) -> jax.Array:
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
        weight=weight,
        baseline=baseline,
        over_batch=None if scores.moments is None else over_running,
    )
    # By the rewards as scored, as what is sampled anew is (resampling): lengths untie nothing, and tie nothing.
    compared = reward[:, None] if scores.parts is None else scores.parts
    mixed = jnp.any(jnp.stack([advantages.is_untied(x, groups) for x in jnp.moveaxis(compared, 1, 0)]), axis=0)
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
    )
    return experience, sums


class Memory:
    """What is remembered of earlier rewards, for the advantages that compare with them. On the host.

        "mssr"   of each question, Beta counts: a <- decay a + r, b <- decay b + 1 - r from a = b = 1, and the
                 baseline a / (a + b) of its next visit. It is a running mean, so rewards need not lie in [0, 1].
                 With baseline_decay_moving, decay = still + (moving - still) min(1, KL / (2 KL_TARGET)), where KL is
                 the mean of the last KL_WINDOW iterations' update/kl_behaviour_nats.
        "poise"  discounted sums of the regression from a rollout's features to its siblings' rewards.
        credit.advantage_norm_decay
                 discounted count, sum and sum of squares of the advantages.
        credit.short_answer_iterations
                 of each difficulty, how many correct answers were within each length of the grid since the last
                 choice, and the choice: the least length with one of them per group, else the longest.

    For the others it stays empty. What an iteration is compared with never knows its own rewards.

    Source: arXiv:2512.18215; arXiv:2605.07579; arXiv:2110.00641; LASER-D, arXiv:2505.15612. Differs: how the decay
        follows the KL is ours, and so is the start of the counts. The second's decay is fixed, where it keeps a window
        of recent rollouts. The last counts on a set kept for it; here the run's own rollouts since the last choice
        serve, and until the first any length is short.

    Args:
        hidden_size: width of the model, for "poise".
    """

    def __init__(self, config: Config, hidden_size: int = 0):
        self._config = config
        self._counts: dict[int, tuple[float, float]] = {}  # question -> a, b
        self._drifts: list[float] = []  # KL of the last iterations, nats a token
        features = baselines.num_features(hidden_size)
        self._regression = np.zeros((features, features + 1))
        self._moments = np.zeros(3)
        self._correct_within = np.zeros((shaping.NUM_DIFFICULTIES, 1))
        self._short_answer = [config.sampling.max_completion_tokens] * shaping.NUM_DIFFICULTIES
        self._iterations = 0

    def scores(self, rewards: Rewards, questions: Sequence[int]) -> Scores:
        """The iteration's rewards as ``assign`` takes them, numpy.

        Args:
            rewards: of B rows, those of a question beside each other.
            questions: which question of the data each of the P groups of rows answers.
        """
        kind, scored = self._config.credit.advantage, rewards.outcome == OUTCOME_SCORE
        known = lambda x: np.where(scored, x, 0.0).astype(np.float32)  # noqa: E731
        parts = baseline = regression = short_answer = moments = None
        if kind == "gdpo":
            parts = np.stack([known(rewards.parts[name]) for name in self._config.rewards.functions], axis=1)
        if kind == "mssr":
            expected = [a / (a + b) for a, b in (self._counts.get(question, (1.0, 1.0)) for question in questions)]
            baseline = np.repeat(np.float32(expected), len(scored) // len(questions))
        if kind == "poise":
            regression = self._regression.astype(np.float32)
        if self._config.credit.short_answer_iterations:
            short_answer = np.array(self._short_answer, np.int32)
        if self._config.credit.advantage_norm_decay:
            moments = self._moments.astype(np.float32)
        total = known(rewards.total)
        return Scores(total, scored, parts, baseline, regression, short_answer=short_answer, moments=moments)

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: dict[str, Any]) -> None:
        """Learn from an iteration: its rewards, and the sums that ``assign`` and the update returned."""
        if self._config.credit.advantage == "mssr":
            decay = self._decay(sums)
            for question, group in zip(questions, rewards.total.reshape(len(questions), -1), strict=True):
                a, b = self._counts.get(question, (1.0, 1.0))
                for reward in group[np.isfinite(group)].tolist():
                    a, b = decay * a + reward, decay * b + 1 - reward
                self._counts[question] = a, b
        if self._config.credit.advantage == "poise":
            self._regression = self._config.credit.baseline_decay * self._regression + sums["regression"]
        if self._config.credit.advantage_norm_decay:
            self._moments = np.asarray(sums["moments"])
        if self._config.credit.short_answer_iterations:
            self._correct_within = self._correct_within + sums["correct_within"]
            self._iterations += 1
            if self._iterations % self._config.credit.short_answer_iterations == 0:
                self._choose_short_answers()

    def _decay(self, sums: dict[str, Any]) -> float:
        """Of "mssr" in this iteration."""
        still, moving = self._config.credit.baseline_decay, self._config.credit.baseline_decay_moving
        if not moving:
            return still
        drift = float(sums["kl_behaviour_sum"]) / max(float(sums["token_count"]), 1.0)
        self._drifts = [*self._drifts, drift][-KL_WINDOW:]
        return still + (moving - still) * min(1.0, sum(self._drifts) / len(self._drifts) / (2 * KL_TARGET))

    def _choose_short_answers(self) -> None:
        """A difficulty that nobody met keeps what it has."""
        grid = self._config.short_answer_grid
        for i, (*within, groups) in enumerate(self._correct_within.tolist()):
            if groups > 0:
                enough = (length for length, count in zip(grid, within, strict=True) if count >= round(groups))
                self._short_answer[i] = next(enough, grid[-1])
        self._correct_within = 0.0 * self._correct_within

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs; plain JSON."""
        return {
            "counts": [[q, *ab] for q, ab in self._counts.items()],
            "drifts": self._drifts,
            "regression": self._regression.tolist(),
            "moments": self._moments.tolist(),
            "correct_within": self._correct_within.tolist(),
            "short_answer": self._short_answer,
            "iterations": self._iterations,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._counts = {question: (a, b) for question, a, b in state["counts"]}
        self._drifts = state["drifts"]
        self._regression = np.array(state["regression"])
        self._moments = np.array(state["moments"])
        self._correct_within = np.array(state["correct_within"])
        self._short_answer, self._iterations = state["short_answer"], state["iterations"]
