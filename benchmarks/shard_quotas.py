"""Simulate how long an iteration takes if every shard must finish a quota of groups, with and without slack.

    python -m benchmarks.shard_quotas

There are 2 P open groups (``rollout.lookahead_prompts`` = P). All groups decode at the same time, and their lengths are
lognormal. A call ends when enough groups have finished. The finished groups leave, and as many new groups begin. The
command prints a row for each number of shards and each slack. A row has the time of the first call and the mean time of
calls 10 to 60, both divided by the time of one shard. Its last column is the number of groups that move to another
shard.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.actor import quotas

PROMPTS = 256
CALLS = 60
WARM_UP = 10
SEEDS = 3


def call_times(shards: int, slack: int, sigma: float, seed: int) -> tuple[float, float, float]:
    """Return the time of the first call, the mean of the later ones, and the mean number of groups that move."""
    rng = np.random.default_rng(seed)
    entries = 2 * PROMPTS // shards
    left = rng.lognormal(0.0, sigma, (shards, entries))
    group_id = np.arange(shards * entries).reshape(shards, entries)
    quota = PROMPTS // shards
    times = []
    moved = []
    for _ in range(CALLS):
        time = time_of_call(left, quota + slack)
        left -= time
        finished = []
        for shard in range(shards):
            is_finished = left[shard] <= 1e-12
            finished.append([(shard, int(entry)) for entry in np.flatnonzero(is_finished)])
        leaving = quotas.chosen(finished, lambda where: group_id[where], set(), PROMPTS, slack)
        for where in quotas.in_rows(leaving, PROMPTS):
            left[where] = rng.lognormal(0.0, sigma)
            group_id[where] = group_id.max() + 1
        times.append(time)
        moved.append(sum(max(0, len(places) - quota) for places in leaving))
    return times[0], float(np.mean(times[WARM_UP:])), float(np.mean(moved[WARM_UP:]))


def time_of_call(left: np.ndarray, most: int) -> float:
    """Return the time until ``PROMPTS`` groups have finished, if each shard counts at most ``most`` groups.

    Args:
        left: remaining time of each open group, [shards, entries].
    """
    counted = np.sort(left, axis=1)[:, :most]
    return max(0.0, np.sort(counted.ravel())[PROMPTS - 1])


def mean_times(shards: int, slack: int, sigma: float) -> np.ndarray:
    """Return the results of ``call_times``, averaged over seeds."""
    return np.mean([call_times(shards, slack, sigma, seed) for seed in range(SEEDS)], axis=0)


def main() -> None:
    """Print the table."""
    print(f"{'sigma':>5} {'shards':>6} {'slack':>5} {'first call':>10} {'later calls':>11} {'moved':>6}")
    for sigma in (0.5, 1.0, 1.5):
        of_one_shard = mean_times(1, 0, sigma)
        for shards in (1, 8, 64):
            largest_slack = quotas.slack_of(PROMPTS, PROMPTS, shards, 0)
            for slack in sorted({0, largest_slack}):
                means = mean_times(shards, slack, sigma)
                first, later = means[:2] / of_one_shard[:2]
                print(f"{sigma:5} {shards:6} {slack:5} {first:10.2f} {later:11.2f} {means[2]:6.0f}")


if __name__ == "__main__":
    main()
