"""The staleness gate: a limit on the calls of ``generate`` during which a prompt stays open.

``rollout.max_lag_iterations`` (``max_lag`` below) sets the limit. Prompts are opened up to

    capacity = min(free entries, (max_lag + calls so far + 1) * P - opened so far)

P is the number of prompts per call. A call waits for the prompts that must leave with it.

Source: the capacity formula is from AReaL, Fu et al. 2025, arXiv:2505.24298. The version of AReaL counts batches.
Differs: a call also waits for stragglers. Therefore the limit bounds the staleness of the rollouts that are trained on,
not only the number of submitted prompts.

Owns: the capacity, the due prompts. Does not know: how prompts are opened and generated (``generator.py``).
"""

from __future__ import annotations

from typing import Any

Place = tuple[int, int]  # shard, entry


def within_capacity(generator: Any, free: list[list[Place]]) -> list[list[Place]]:
    """Return, for each shard, the free entries that new prompts may take."""
    sampler = generator.sampler
    # Capacity of a shard. Past calls cancel out because each call adds P prompts to the capacity and collects P.
    most = (generator.max_lag + 1) * (sampler.num_prompts // sampler.shards)
    return [entries[: max(0, most - (sampler.entries - len(entries)))] for entries in free]


def due(generator: Any) -> set[Place]:
    """Return the open prompts that the next call must wait for. The result is empty if ``max_lag`` is 0.

    The result contains two kinds of prompts:

    - Prompts that reach the limit with the next call.
    - The oldest prompts that reach the limit with a later call: as many as the later calls have no room for.

    A later call is assumed to collect its quota of P / M groups from the shard. A call can collect fewer groups only
    if the shard has at most ``max_lag`` quotas of entries (``quotas.slack_of``). In this case the later calls have
    enough room.
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
