"""Advantages: what a rollout's reward is compared with, and over which scale.

An advantage is a function of ``Rows`` and of its settings. It returns one number a row [B], or one a token [B,S], 0.0
where there is no valid row; after it, where it has a memory, what that learns from (algorithms.memory). With
``siblings=True`` it compares the rows of a group, and a tied group (max == min) teaches nothing but where
``tied_teaches`` says so.

Owns: those functions, the table of them. Does not know: losses, where rewards come from.
Letters: B rows, S row width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxrl_llm.algorithms import baselines, memory
from jaxrl_llm.algorithms.critic import lambda_returns
from jaxrl_llm.algorithms.facts import needs
from jaxrl_llm.algorithms.inputs import Rows
from jaxrl_llm.ops import groups
from jaxrl_llm.ops.groups import Groups, minus_mean, over_std
from jaxrl_llm.settings.schema import Decay, Number, Share

Sums = dict[str, Float[Array, "..."]]
Learned = tuple[Float[Array, " B"], Sums]


@needs(siblings=True)
def grpo(x: Rows) -> Float[Array, " B"]:
    """(r - mean) / (std + 1e-6) of the group.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. Differs: the explicit tie; failed rows are left out.
    """
    return over_std(minus_mean(x.reward, x.groups), x.groups)


@needs(siblings=True, is_centred_reward=True)
def dr_grpo(x: Rows) -> Float[Array, " B"]:
    """r - mean of the group.

    Source: Liu et al. 2025, arXiv:2503.20783.
    """
    return minus_mean(x.reward, x.groups)


@needs(siblings=True)
def leave_one_out(x: Rows) -> Float[Array, " B"]:
    """r - mean of the others = n / (n - 1) (r - mean), over the n valid rows of the group.

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    count = groups.group_count(x.groups)
    return minus_mean(x.reward, x.groups) * (count / jnp.maximum(count - 1.0, 1.0))


@needs(memory=memory.Moments)
def reinforce_pp(x: Rows, *, norm_decay: Decay = 0.0) -> Learned:
    """(r - mean) / std of the batch; see ``over_batch``. 0 where the batch is tied.

    Source: Hu 2025, arXiv:2501.03262, global normalisation.
    """
    return over_batch(x.reward, x.groups.valid, x, centre=True, decay=norm_decay)


@needs(siblings=True, memory=memory.Moments)
def brorl(x: Rows, *, norm_decay: Decay = 0.0) -> Learned:
    """a / std of the batch, a = r - mean of the group; see ``over_batch``.

    Source: arXiv:2510.01180.
    """
    return over_batch(minus_mean(x.reward, x.groups), x.groups.valid, x, centre=False, decay=norm_decay)


@needs(siblings=True, tied_teaches=lambda settings: settings["delta_v"] != 0)
def asymre(x: Rows, *, delta_v: Number = -0.1) -> Float[Array, " B"]:
    """r - (mean of the group + delta_v): with delta_v below 0 successes weigh more than failures.

    Every row of a tied group has -delta_v: it imitates what it cannot tell apart. 0 with fewer than 2 valid rows.

    Source: Arnal et al. 2025, arXiv:2506.20520.
    """
    return jnp.where(_has_others(x.groups), minus_mean(x.reward, x.groups) - delta_v, 0.0)


@needs(siblings=True)
def mc_grpo(x: Rows) -> Float[Array, " B"]:
    """r - median of the group.

    Source: arXiv:2601.22582. Differs: it divides by the median absolute deviation + 1e-3, which is 0 for two-valued
        rewards in an odd group, and would give 1000; here the scale is 1. It samples one rollout more and drops the
        median one; here that row is in the loss with advantage 0, for of several that are equal none is the one.
    """
    return groups.minus_median(x.reward, x.groups)


def _has_parts(path: str, settings: Any, config: Any) -> str:
    unheard = settings["gate"] and len(config.rewards.functions) < 2
    return f"[{path}.gate] must be 0 but with several rewards.functions" if unheard else ""


@needs(
    siblings=True,
    by_part=lambda parts, settings, where: gated(parts, settings["gate"], where),
    memory=memory.Moments,
    rule=_has_parts,
)
def gdpo(x: Rows, *, gate: Number = 0.0, norm_decay: Decay = 0.0) -> Learned:
    """a / std of the batch, a = sum_k weight_k (r_k - mean) / std of the group, of each reward function by itself.

    With a ``gate`` further reward functions count only where the first gives at least that; 0 = always. What is added
    to rewards is one more part, of weight 1.

    Source: arXiv:2601.05242. Differs: 1e-6 beside a standard deviation, where it is 1e-4.
    """
    parts = [(jnp.where(x.groups.valid, part, 0.0), weight) for part, weight in gated(x.parts, gate, jnp.where)]
    if x.added is not None:
        parts.append((jnp.where(x.groups.valid, x.added, 0.0), 1.0))
    total = sum(weight * over_std(minus_mean(part, x.groups), x.groups) for part, weight in parts)
    return over_batch(total, x.groups.valid, x, centre=False, decay=norm_decay)


def gated(
    parts: Sequence[tuple[Float[ArrayLike, " B"], float]], gate: Number, where: Callable[..., Float[ArrayLike, " B"]]
) -> list[tuple[Float[ArrayLike, " B"], float]]:
    """(values, weight) by reward function with the gate of ``gdpo``: r_k 1[r_0 >= gate] for k > 0.

    Args:
        where: ``jnp.where``, or numpy's for numpy arrays.
    """
    (first, weight), *others = parts
    return [(first, weight), *((where(first >= gate, part, 0.0) if gate else part, w) for part, w in others)]


def _sinks(path: str, settings: Any, config: Any) -> str:
    if config.algorithm.overlong_filter:
        return f"[algorithm.overlong_filter] must be False with {path}, whose running means count every answer"
    rises = settings["decay_moving"] > settings["decay"]
    return f"[{path}.decay_moving] must be at most [{path}.decay]" if rises else ""


@needs(memory=memory.QuestionMean, rule=_sinks)
def mssr(x: Rows, *, decay: Share = 0.9, decay_moving: Share = 0.0, norm_decay: Decay = 0.0) -> Learned:
    """a whitened over the batch, a = r - the running mean of the question before it was answered.

    The reward r, and so the running mean too, has what reward terms add.

    The mean's counts fade by ``decay`` an answer; with ``decay_moving`` above 0 they sink to that while the policy
    moves, see ``memory.QuestionMean``.

    Source: arXiv:2512.18215.
    """
    gain = x.reward - x.columns["question_mean"]
    advantage, learned = over_batch(gain, x.groups.valid, x, centre=True, decay=norm_decay)
    return advantage, learned if x.added is None else learned | {"shaped_reward": x.reward}


@needs("entropy", "hidden", memory=memory.Regression, siblings=True, tied_teaches=lambda settings: True)
def poise(x: Rows, *, decay: Share = 0.9) -> Learned:
    """r - mean of what the other rows of the group predict, by ridge regression from their features.

    0 with fewer than 2 valid rows. What was learned of an iteration counts ``decay`` times as much in the next.

    Source: arXiv:2605.07579. Differs: it has two rollouts a prompt; the mean over the others for more is ours.
    """
    features = baselines.row_features(
        x.behaviour_logp, x.columns["entropy"], x.columns["hidden"], x.mask, max_length=x.max_length
    )
    predicted = baselines.ridge_predict(features, x.memory["regression"])
    # A rollout predicts its siblings: what it learns from is their mean reward.
    has_others = _has_others(x.groups)
    target = groups.mean_of_others(x.reward, x.groups)
    sums = baselines.regression_sums(features, target, has_others)
    return jnp.where(has_others, x.reward - groups.mean_of_others(predicted, x.groups), 0.0), {"regression": sums}


@needs("value", memory=memory.Moments)
def gae(
    x: Rows, *, gae_lambda: Share = 1.0, discount: Share = 1.0, norm_decay: Decay = 0.0
) -> tuple[Float[Array, "B S"], Sums]:
    """The return of each token less what the critic expected there, whitened over the batch's tokens [B,S].

    GAE lambda: 1 judges each token by the row's reward, below it more by what the critic says soon after. Discount:
    what a reward keeps of its worth per token that it is away. See ``critic.lambda_returns``.

    Source: Schulman et al. 2015, arXiv:1506.02438.
    """
    active = x.mask & x.groups.valid[:, None]
    value = x.columns["value"]
    returns = lambda_returns(value, x.reward, active, discount=discount, gae_lambda=gae_lambda)
    gain = returns - jnp.where(active, value, 0.0)
    advantage, learned = over_batch(gain, active, x, centre=True, decay=norm_decay)
    return advantage, learned | {"returns": returns}


def over_batch(
    value: Float[ArrayLike, "*any"], valid: Bool[ArrayLike, "*any"], x: Rows, *, centre: bool, decay: float
) -> tuple[Float[Array, "*any"], Sums]:
    """Values over the standard deviation of all valid ones of the batch, and what is remembered of them.

        (value - mean) / (std + 1e-6);   not ``centre``: nothing is taken away

    With a ``decay`` above 0 mean and std are over this batch and earlier ones, an earlier one counting ``decay`` times
    as much with every one that follows (``groups.running_moments``).

    Args:
        value, valid: [B] or [B,S].
    """
    if decay:
        moments = groups.running_moments(value, valid, x.memory["moments"], decay=decay)
        return jnp.where(valid, groups.over_moments(value, moments, centre=centre), 0.0), {"moments": moments}
    if value.ndim == 2:
        return groups.whiten(value, valid), {}
    batch = groups.whole_batch(x.groups)
    return over_std(minus_mean(value, batch) if centre else value, batch), {}


def _has_others(of: Groups) -> Bool[Array, " B"]:
    return of.valid & (groups.group_count(of) > 1)


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
