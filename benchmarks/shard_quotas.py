"""How long an iteration takes if every shard must finish its own quota of groups, and with some slack: a simulation.

    python -m benchmarks.shard_quotas

2 P groups are open (``rollout.lookahead_prompts`` = P), all of them decode at the same time, and their lengths are
lognormal. A call ends when enough groups have finished; those leave, and as many new ones begin. Printed for each
number of shards and each slack: the mean time of a call over that of one shard, of the first call and of calls 10 to
60, and the groups that move to another shard.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.actor import quotas

PROMPTS = 256
CALLS, WARM_UP, SEEDS = 60, 10, 3


def call_times(shards: int, slack: int, sigma: float, seed: int) -> tuple[float, float, float]:
    """Return the time of the first call, the mean of the later ones, and the mean number of groups that move."""
    rng = np.random.default_rng(seed)
    entries = 2 * PROMPTS // shards
    left = rng.lognormal(0.0, sigma, (shards, entries))
    group_id = np.arange(shards * entries).reshape(shards, entries)
    times, moved = [], []
    for _ in range(CALLS):
        most = PROMPTS // shards + slack
        time = max(0.0, np.sort(np.sort(left, axis=1)[:, :most].ravel())[PROMPTS - 1])
        left -= time
        finished = [[(m, int(e)) for e in np.flatnonzero(left[m] <= 1e-12)] for m in range(shards)]
        leaving = quotas.chosen(finished, lambda where: group_id[where], set(), PROMPTS, slack)
        for where in quotas.in_rows(leaving, PROMPTS):
            left[where] = rng.lognormal(0.0, sigma)
            group_id[where] = group_id.max() + 1
        times.append(time)
        moved.append(sum(max(0, len(places) - PROMPTS // shards) for places in leaving))
    return times[0], float(np.mean(times[WARM_UP:])), float(np.mean(moved[WARM_UP:]))


def main() -> None:
    print(f"{'sigma':>5} {'shards':>6} {'slack':>5} {'first call':>10} {'later calls':>11} {'moved':>6}")
    for sigma in (0.5, 1.0, 1.5):
        one = np.mean([call_times(1, 0, sigma, seed) for seed in range(SEEDS)], axis=0)
        for shards in (1, 8, 64):
            for slack in sorted({0, quotas.slack_of(PROMPTS, PROMPTS, shards, 0)}):
                each = np.mean(
                    [call_times(shards, slack, sigma, seed) for seed in range(SEEDS)],
                    axis=0,
                )
                first, later = each[:2] / one[:2]
                print(f"{sigma:5} {shards:6} {slack:5} {first:10.2f} {later:11.2f} {each[2]:6.0f}")


if __name__ == "__main__":
    main()
