"""E1 of the replay study: AsymRE on a bandit with stale data changes its nature at delta_V = 0.

    python -m studies.bandit

A softmax policy over a few arms climbs the expected gradient of (r - (V + delta_V)) log pi(arm) on arms that an old
policy draws, like a FIFO with very old rollouts. V is the mean reward of the old policy. The table shows where the
trained policy ends. With delta_V well below 0 it keeps several arms. Just below 0 most runs end on one arm. At 0 and
above all runs end on one arm, which need not be the best.

Source: Arnal et al. 2025, arXiv:2506.20520; the limit under a fixed behaviour, ``limit``, is derived there.
Owns: the bandit, its dynamics. Does not know: the package jaxrl_llm.
"""

from __future__ import annotations

import numpy as np

REWARDS = np.array([1.0, 1.0, 0.9, 0.5, 0.2, 0.0, 0.0, 0.0])
DELTAS = (-0.5, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1)


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def gradient(policy: np.ndarray, behaviour: np.ndarray, rewards: np.ndarray, delta_v: float) -> np.ndarray:
    """Return the gradient of E_behaviour[(r - (V + delta_v)) log policy] by the logits [..., A].

    The gradient is mu (r - V - delta_v) + delta_v pi, with the behaviour mu and the policy pi.
    """
    value = (behaviour @ rewards)[..., None]
    return behaviour * (rewards - value - delta_v) + delta_v * policy


def limit(behaviour: np.ndarray, rewards: np.ndarray, delta_v: float) -> np.ndarray:
    """Return the limit of the policy under a fixed behaviour, for delta_v below 0.

    pi(y) = (a_y - c)+ / -delta_v with a_y = mu(y) (r_y - V - delta_v). The constant c makes pi sum to 1.
    """
    assert delta_v < 0
    a = behaviour * (rewards - behaviour @ rewards - delta_v)
    low = a.min() + delta_v
    high = a.max()
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(a - middle, 0).sum() > -delta_v:
            low = middle
        else:
            high = middle
    return np.maximum(a - low, 0) / -delta_v


def run(
    behaviour: np.ndarray,
    rewards: np.ndarray,
    delta_v: float,
    *,
    steps: int = 3000,
    rate: float = 1.0,
):
    """Return the policy [..., A] after ``steps`` gradient steps that start from the behaviour."""
    logits = np.log(behaviour)
    for _ in range(steps):
        logits = logits + rate * gradient(softmax(logits), behaviour, rewards, delta_v)
    return softmax(logits)


def summary(policy: np.ndarray, rewards: np.ndarray) -> tuple[float, float, int]:
    """Return the expected reward, the entropy in nats, and the number of arms with more than 1 % of the mass."""
    reward = float(policy @ rewards)
    logarithms = np.log(np.maximum(policy, 1e-300))
    entropy = float(-np.sum(policy * logarithms))
    num_arms = int((policy > 0.01).sum())
    return reward, entropy, num_arms


HEAD = ("delta_V", "reward", "entropy, nats", "arms with 1 %", "end on one arm", "on one that is not the best")


def rows() -> list[list[str]]:
    """Return a table row for each delta_V, with the columns ``HEAD``, over 20 random behaviours.

    Reward, entropy and the number of arms are medians. The last two columns count behaviours.
    """
    cells_of_rows = []
    for delta_v in DELTAS:
        logits = [2 * np.random.default_rng(seed).normal(size=8) for seed in range(20)]
        behaviours = softmax(np.stack(logits))
        ends = run(behaviours, REWARDS, delta_v)
        summaries = [summary(policy, REWARDS) for policy in ends]
        reward, entropy, arms = np.median(summaries, axis=0)
        collapsed = [policy for policy in ends if policy.max() > 0.99]
        wrong = sum(REWARDS[policy.argmax()] < REWARDS.max() for policy in collapsed)
        cells = [f"{delta_v:.2f}", f"{reward:.3f}", f"{entropy:.3f}", f"{arms:.0f}"]
        cells_of_rows.append([*cells, f"{len(collapsed)} of 20", f"{wrong}"])
    return cells_of_rows


def main() -> None:
    for cells in (HEAD, *rows()):
        padded = [f"{cell:>{len(head)}}" for cell, head in zip(cells, HEAD, strict=True)]
        print("  ".join(padded))


if __name__ == "__main__":
    main()
