"""Quotas: the numbers of finished groups that the data shards give to an iteration, and the choice of groups.

The learner takes the same number of rows from every shard: the quota, P / M groups. If each shard had to finish its own
quota, the slowest shard would decide when a call of ``generate`` ends. With few groups per shard, a call would take
twice as long. Therefore a call ends when all shards together have P finished groups. A shard may give up to ``slack``
groups beyond its quota, and the surplus moves to the shards that have fewer groups:

    shard 0   quota 4, 6 finished     gives 5     rows 1-4 stay, row 5 moves -+
    shard 1   quota 4, 3 finished     gives 3     rows 1-3 stay, row 4  <-----+

``benchmarks/shard_quotas.py`` simulates how much time a slack saves.

Letters: M data shards, P groups per call, q = P / M the quota, s the slack, E entries per shard, G rows per group.
Owns: when a call has enough groups, which groups leave the table, how a surplus moves between shards. Does not know:
how a group is generated, which groups must leave with a call (``generator.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.actor import tables
from jaxrl_llm.runtime import sharding

Place = tuple[int, int]  # shard, entry


def slack_of(num_prompts: int, lookahead: int, shards: int, max_lag: int) -> int:
    """Return how many groups beyond its quota a shard may give: the root of the quota, rounded up.

    The result is 0 in three cases:

    - Without lookahead prompts, every open group leaves with its call.
    - With one shard, no other shard can take a surplus.
    - With a staleness gate so tight that a shard may have to give its whole quota to keep the gate.
    """
    quota = num_prompts // shards
    entries = (num_prompts + lookahead) // shards
    if lookahead == 0 or shards == 1:
        return 0
    has_tight_gate = 0 < max_lag * quota < entries
    if has_tight_gate:
        return 0
    root = math.isqrt(quota - 1) + 1
    return min(root, entries - quota)


def is_enough(num_finished_M: Any, num_prompts: int, slack: int) -> Any:
    """Return whether the finished groups of all shards fill a call. Takes numpy arrays and jax arrays."""
    quota = num_prompts // num_finished_M.shape[0]
    return num_finished_M.clip(0, quota + slack).sum() >= num_prompts


def chosen(
    finished: list[list[Place]],
    age: Callable[[Place], int],
    due: set[Place],
    num_prompts: int,
    slack: int,
) -> list[list[Place]]:
    """Return the places of the P groups that leave: one list per shard, oldest group first.

    Due groups are chosen first, then the oldest groups of all shards. Each shard gives at most quota + slack groups.

    Args:
        finished: places of the finished groups by shard. ``is_enough`` is true for these groups, and they include the
            due groups.
        age: returns a number for a place; older groups have smaller numbers.
        due: places of the groups that must leave with this call.
    """
    most = num_prompts // len(finished) + slack

    def urgency(place: Place) -> tuple[bool, int]:
        return place not in due, age(place)

    queue = sorted(itertools.chain(*finished), key=urgency)
    leaving: list[list[Place]] = [[] for _ in finished]
    left = num_prompts
    for place in queue:
        shard, _ = place
        if left and len(leaving[shard]) < most:
            leaving[shard].append(place)
            left -= 1
    return [sorted(places, key=age) for places in leaving]


def in_rows(leaving: list[list[Place]], num_prompts: int) -> list[Place]:
    """Return the places in the order of the rollout's groups: each shard's own groups, then the groups moved to it."""
    quota = num_prompts // len(leaving)
    surplus = itertools.chain(*(places[quota:] for places in leaving))
    rows = []
    for places in leaving:
        own = places[:quota]
        moved = [next(surplus) for _ in range(quota - len(own))]
        rows += [*own, *moved]
    return rows


def arrays(leaving: list[list[Place]], num_prompts: int, slack: int, entries: int) -> tuple[np.ndarray, ...]:
    """Return the index arrays that ``take`` needs to collect the groups that leave.

    Returns:
        The entries [M,q+s] i32 of the groups; unused positions hold the value ``entries``. If the slack is positive,
        also the source [M,q] i32 of each group of a shard's quota. A source of -1 means the shard's own group. Other
        sources index the M s groups beyond the quotas.
    """
    M = len(leaving)
    quota = num_prompts // M
    entry = np.full((M, quota + slack), entries, np.int32)
    surplus: list[int] = []  # indices among the M s groups beyond the quotas
    for shard, places in enumerate(leaving):
        entry[shard, : len(places)] = [entry_of_shard for _, entry_of_shard in places]
        first = shard * slack
        num_beyond = max(0, len(places) - quota)
        surplus += range(first, first + num_beyond)
    if not slack:
        return (entry,)
    source = np.full((M, quota), -1, np.int32)
    unused = iter(surplus)
    for shard, places in enumerate(leaving):
        for row in range(len(places), quota):
            source[shard, row] = next(unused)
    return entry, source


def take(table: jax.Array, entry_MX: jax.Array, source_Mq: jax.Array | None = None) -> jax.Array:
    """Return the groups [M,q,...] that leave a table [M,E,...], in the order given by ``arrays``.

    Only the groups beyond the quotas are sent between devices: every device receives all M s of these groups.
    """
    groups = tables.take(table, entry_MX)
    if source_Mq is None:
        return groups
    quota = source_Mq.shape[1]
    own = groups[:, :quota]
    beyond = groups[:, quota:]
    beyond = beyond.reshape(-1, *beyond.shape[2:])
    beyond = sharding.constrain(beyond, *(None,) * beyond.ndim)

    def with_moved(own: jax.Array, source: jax.Array, beyond: jax.Array) -> jax.Array:
        is_own = (source < 0).reshape(*source.shape, *(1,) * (own.ndim - 2))
        moved = beyond[jnp.maximum(source, 0)]
        return jnp.where(is_own, own, moved)

    return sharding.by_device(with_moved, own, source_Mq, beyond, axes=(("batch",), ("batch",), jax.P()))
