"""The replay ring as Python deques of dicts, one per shard."""

import collections


class DequeRing:
    """A row is ``{"id", "trainable", "inserted", "uses"}``; the oldest falls out at the left."""

    def __init__(self, capacity, num_shards):
        self.shards = [collections.deque(maxlen=capacity // num_shards) for _ in range(num_shards)]

    def insert(self, ids, trainable, iteration):
        per_shard = len(ids) // len(self.shards)
        for r, (name, good) in enumerate(zip(ids, trainable, strict=True)):
            row = {"id": name, "trainable": good, "inserted": iteration, "uses": 0}
            self.shards[r // per_shard].append(row)

    def drawable(self, shard, iteration, max_age_steps, max_uses):
        """Rows of a shard that may be drawn now, by id."""
        return {
            row["id"]: row
            for row in self.shards[shard]
            if row["trainable"]
            and (not max_age_steps or iteration - row["inserted"] <= max_age_steps)
            and (not max_uses or row["uses"] < max_uses)
        }
