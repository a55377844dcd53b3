"""The staleness gate (rollout.max_lag_iterations): no prompt stays open for more than so many calls of ``generate``.

Prompts are opened up to

    capacity = min(free entries, (max_lag + calls so far + 1) * P - opened so far)

and a call waits for those that must leave with it. Source: the capacity is that of AReaL, Fu et al. 2025,
arXiv:2505.24298, whose version counts batches. Differs: stragglers are waited for, so that the bound is on what is
trained and not on what is submitted alone.

Owns: these two. Does not know: how prompts are opened and generated (``generator.py``). P prompts of a call.
"""

from __future__ import annotations

from typing import Any

Place = tuple[int, int]  # shard, entry


def within_capacity(generator: Any, free: list[list[Place]]) -> list[list[Place]]:
    """Of the free entries of each shard those that new prompts may take."""
    sampler = generator.sampler
    # Every call so far has collected its share of those opened; what is left of the capacity by shard.
    most = (generator.max_lag + 1) * (sampler.num_prompts // sampler.shards)
    return [entries[: max(0, most - (sampler.entries - len(entries)))] for entries in free]


def due(generator: Any) -> set[Place]:
    """Open prompts that the next call must wait for, lest one stay open for too long; none without a ``max_lag``.

    These are the prompts whose time has come. Of the prompts whose time comes in the next calls, they are the oldest
    that those calls have no room for, if each collects its quota of P / M groups from the shard. A call collects
    fewer only if the shard has no more entries than ``max_lag`` quotas (``quotas.slack_of``): room is left then.
    """
    max_lag, calls = generator.max_lag, generator.calls
    due, per_shard = set(), generator.sampler.num_prompts // generator.sampler.shards
    for shard in range(generator.sampler.shards if max_lag else 0):
        mine = [(where, opened) for where, opened in generator.open_prompts.items() if where[0] == shard]
        by_age = sorted((opened.group_id, opened.call, where) for where, opened in mine)
        for later in range(max_lag):
            late = [where for _, call, where in by_age if call + max_lag <= calls + later]
            due |= set(late[: max(0, len(late) - later * per_shard)])
    return due
