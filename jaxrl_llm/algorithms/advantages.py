"""Advantages: the comparison of a rollout's reward, and its scale.

An advantage is a function of ``Rows`` and its settings. It returns one number for each row [B], or one for each token
[B,S], 0.0 at rows that are not valid. An advantage with a memory returns a pair; the second element holds the values
that the memory learns from (algorithms.memory). An advantage that declares ``siblings=True`` compares the rows of a
group. A tied group (max == min) then has advantage 0, unless the advantage declares ``tied_teaches``.

Owns: these functions, their table. Does not know: losses, where rewards come from.
Letters: B rows, S row width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms import baselines, memory
from jaxrl_llm.algorithms.critic import lambda_returns
from jaxrl_llm.algorithms.facts import Parts, needs
from jaxrl_llm.algorithms.inputs import AnyArray, Rows
from jaxrl_llm.ops import groups
from jaxrl_llm.ops.groups import Groups, minus_mean, over_std
from jaxrl_llm.settings.schema import Decay, Number, Share

# Values that memories learn from, by name.
Sums = dict[str, Float[Array, "..."]]
Learned = tuple[Float[Array, " B"], Sums]


@needs(siblings=True)
def grpo(x: Rows) -> Float[Array, " B"]:
    """Return (r - mean) / (std + 1e-6) of the group.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. Differs: a tied group has advantage exactly 0; failed
        rows are left out.
    """
    return over_std(minus_mean(x.reward, x.groups), x.groups)


@needs(siblings=True, is_centred_reward=True)
def dr_grpo(x: Rows) -> Float[Array, " B"]:
    """Return r - mean of the group.

    Source: Liu et al. 2025, arXiv:2503.20783.
    """
    return minus_mean(x.reward, x.groups)


@needs(siblings=True)
def leave_one_out(x: Rows) -> Float[Array, " B"]:
    """Return r - mean of the others = n / (n - 1) (r - mean), over the n valid rows of the group.

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    count = groups.group_count(x.groups)
    factor = count / jnp.maximum(count - 1.0, 1.0)
    return minus_mean(x.reward, x.groups) * factor


@needs(memory=memory.Moments)
def reinforce_pp(x: Rows, *, norm_decay: Decay = 0.0) -> Learned:
    """Return (r - mean) / std of the batch; see ``over_batch``. It is 0 if the batch is tied.

    Source: Hu 2025, arXiv:2501.03262, global normalisation.
    """
    return over_batch(x.reward, x.groups.valid, x, centre=True, decay=norm_decay)


@needs(siblings=True, memory=memory.Moments)
def brorl(x: Rows, *, norm_decay: Decay = 0.0) -> Learned:
    """Return a / std of the batch, where a = r - mean of the group; see ``over_batch``.

    Source: arXiv:2510.01180.
    """
    centred = minus_mean(x.reward, x.groups)
    return over_batch(centred, x.groups.valid, x, centre=False, decay=norm_decay)


def _delta_is_not_zero(settings: Mapping[str, Any]) -> bool:
    return settings["delta_v"] != 0


@needs(siblings=True, tied_teaches=_delta_is_not_zero)
def asymre(x: Rows, *, delta_v: Number = -0.1) -> Float[Array, " B"]:
    """Return r - (mean of the group + delta_v). With delta_v below 0 successes weigh more than failures.

    Every row of a tied group has the advantage -delta_v, so the policy imitates all rows of the group. The advantage is
    0 in a group with fewer than 2 valid rows.

    Source: Arnal et al. 2025, arXiv:2506.20520.
    """
    advantage = minus_mean(x.reward, x.groups) - delta_v
    return jnp.where(_has_others(x.groups), advantage, 0.0)


@needs(siblings=True)
def mc_grpo(x: Rows) -> Float[Array, " B"]:
    """Return r - median of the group.

    Source: arXiv:2601.22582. Differs: the source divides by the median absolute deviation + 1e-3. For two-valued
        rewards in an odd group this deviation is 0, and the advantage would be 1000; here the scale is 1. The source
        also samples one more rollout and drops the median one. Here that row is in the loss with advantage 0, because
        equal rollouts have no single median.
    """
    return groups.minus_median(x.reward, x.groups)


def _has_several_parts(path: str, settings: Mapping[str, Any], config: Any) -> str:
    """Return an error message if there is a gate, but only one reward function."""
    if settings["gate"] and len(config.rewards.functions) < 2:
        return f"[{path}.gate] must be 0 with one of rewards.functions: a gate needs two. Set {path}.gate=0"
    return ""


def gated(
    parts: Sequence[tuple[Float[AnyArray, " B"], float]],
    gate: Number,
    where: Callable[..., Float[AnyArray, " B"]],
) -> list[tuple[Float[AnyArray, " B"], float]]:
    """Return (values, weight) by reward function with the gate of ``gdpo``: r_k 1[r_0 >= gate] for k > 0.

    Args:
        where: ``jnp.where``, or numpy's for numpy arrays.
    """
    first, weight_of_first = parts[0]
    result = [(first, weight_of_first)]
    for part, weight in parts[1:]:
        values = where(first >= gate, part, 0.0) if gate else part
        result.append((values, weight))
    return result


def _gated_by_settings(
    parts: Parts,
    settings: Mapping[str, Any],
    where: Callable[..., Any],
) -> Parts:
    return gated(parts, settings["gate"], where)


@needs(
    siblings=True,
    by_part=_gated_by_settings,
    memory=memory.Moments,
    rule=_has_several_parts,
)
def gdpo(x: Rows, *, gate: Number = 0.0, norm_decay: Decay = 0.0) -> Learned:
    """Return a / std of the batch, where a = sum_k weight_k (r_k - mean) / std of the group for each reward function k.

    With a ``gate``, the other reward functions count only if the first reward function gives at least this reward; 0 =
    always. The sum of the reward terms is one more part, with weight 1.

    Source: arXiv:2601.05242. Differs: 1e-6 is added to a standard deviation; the source adds 1e-4.
    """
    parts = gated(x.parts, gate, jnp.where)
    if x.added is not None:
        parts.append((x.added, 1.0))
    total = jnp.zeros_like(x.reward)
    for part, weight in parts:
        valid_part = jnp.where(x.groups.valid, part, 0.0)
        advantage = over_std(minus_mean(valid_part, x.groups), x.groups)
        total = total + weight * advantage
    return over_batch(total, x.groups.valid, x, centre=False, decay=norm_decay)


def _mean_counts_every_answer(
    path: str,
    settings: Mapping[str, Any],
    config: Any,
) -> str:
    """Return an error message if truncated answers are filtered, or if the decay would rise while the policy moves."""
    if config.algorithm.overlong_filter:
        return f"[algorithm.overlong_filter] must be False with {path}: its running means count every answer"
    if settings["decay_moving"] > settings["decay"]:
        return f"[{path}.decay_moving] must be at most [{path}.decay]"
    return ""


@needs(memory=memory.QuestionMean, rule=_mean_counts_every_answer)
def mssr(
    x: Rows,
    *,
    decay: Share = 0.9,
    decay_moving: Share = 0.0,
    norm_decay: Decay = 0.0,
) -> Learned:
    """Return a whitened over the batch, where a = r - the running mean of the question before this visit.

    The reward r includes reward terms, and so does the running mean.

    The counts of the mean fade by ``decay`` with each answer. With ``decay_moving`` above 0 the decay falls to that
    value while the policy moves, see ``memory.QuestionMean``.

    Source: arXiv:2512.18215.
    """
    gain = x.reward - x.columns["question_mean"]
    advantage, learned = over_batch(gain, x.groups.valid, x, centre=True, decay=norm_decay)
    if x.added is not None:
        learned = learned | {"shaped_reward": x.reward}
    return advantage, learned


def _always(settings: Mapping[str, Any]) -> bool:
    return True


@needs("entropy", "hidden", memory=memory.Regression, siblings=True, tied_teaches=_always)
def poise(x: Rows, *, decay: Share = 0.9) -> Learned:
    """Return r - mean of the predictions from the group's other rows, by ridge regression from their features.

    The advantage is 0 in a group with fewer than 2 valid rows. The regression's sums of an iteration count ``decay``
    times as much in the next iteration.

    Source: arXiv:2605.07579. Differs: the source has two rollouts per prompt; with more rollouts, this package takes
        the mean over the others.
    """
    features = baselines.row_features(
        x.behaviour_logp,
        x.columns["entropy"],
        x.columns["hidden"],
        x.mask,
        max_length=x.max_length,
    )
    predicted = baselines.ridge_predict(features, x.memory["regression"])
    # A rollout predicts its siblings, so its target is their mean reward.
    has_others = _has_others(x.groups)
    target = groups.mean_of_others(x.reward, x.groups)
    sums = baselines.regression_sums(features, target, has_others)
    gain = x.reward - groups.mean_of_others(predicted, x.groups)
    return jnp.where(has_others, gain, 0.0), {"regression": sums}


@needs("value", memory=memory.Moments)
def gae(
    x: Rows,
    *,
    gae_lambda: Share = 1.0,
    discount: Share = 1.0,
    norm_decay: Decay = 0.0,
) -> tuple[Float[Array, "B S"], Sums]:
    """Return the return of each token minus the critic's value, whitened over the batch's tokens [B,S].

    Settings:
        gae_lambda: with 1 the target of each token is the row's reward; smaller values use more of the critic's values
            at the next tokens.
        discount: factor by which a reward shrinks for each token between it and the token judged. See
            ``critic.lambda_returns``.

    Source: Schulman et al. 2015, arXiv:1506.02438.
    """
    active = x.mask & x.groups.valid[:, None]
    value = x.columns["value"]
    returns = lambda_returns(value, x.reward, active, discount=discount, gae_lambda=gae_lambda)
    gain = returns - jnp.where(active, value, 0.0)
    advantage, learned = over_batch(gain, active, x, centre=True, decay=norm_decay)
    return advantage, learned | {"returns": returns}


def over_batch(
    value: Float[AnyArray, "*any"],
    valid: Bool[AnyArray, "*any"],
    x: Rows,
    *,
    centre: bool,
    decay: float,
) -> tuple[Float[Array, "*any"], Sums]:
    """Return values divided by the standard deviation of the batch's valid values, and the sums to remember.

        (value - mean) / (std + 1e-6);   without ``centre`` the mean is not subtracted

    With a ``decay`` above 0, mean and std are over this batch and all earlier batches. The weight of an earlier batch
    is multiplied by ``decay`` at every further batch (``groups.running_moments``).

    Args:
        value, valid: [B] or [B,S].
    """
    if decay:
        moments = groups.running_moments(value, valid, x.memory["moments"], decay=decay)
        scaled = groups.over_moments(value, moments, centre=centre)
        return jnp.where(valid, scaled, 0.0), {"moments": moments}
    if value.ndim == 2:
        return groups.whiten(value, valid), {}
    batch = groups.whole_batch(x.groups)
    centred = minus_mean(value, batch) if centre else value
    return over_std(centred, batch), {}


def _has_others(rows: Groups) -> Bool[Array, " B"]:
    """Return whether a row is valid and its group has another valid row."""
    return rows.valid & (groups.group_count(rows) > 1)


ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "leave_one_out": leave_one_out,
    "reinforce_pp": reinforce_pp,
    "brorl": brorl,
    "asymre": asymre,
    "mc_grpo": mc_grpo,
    "gdpo": gdpo,
    "mssr": mssr,
    "poise": poise,
    "gae": gae,
}
