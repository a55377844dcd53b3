"""The replay ring by its definition, in plain Python: which rows it holds follows from all that were ever inserted."""


class DequeRing:
    """A row is ``{"id", "state", "inserted", "uses", "last_use"}``; its state is "right", "wrong" or "failed" (not
    trainable), ``last_use`` the number of the batch it was last in."""

    def __init__(self, capacity, num_shards, num_positive=0):
        """``num_positive`` slots of each shard are for correct rows that the others no longer hold."""
        self.num_draws = 0
        self.history = [[] for _ in range(num_shards)]
        self.num_main, self.num_positive = capacity // num_shards - num_positive, num_positive

    def insert(self, ids, states, iteration):
        per_shard = len(ids) // len(self.history)
        for r, (name, state) in enumerate(zip(ids, states, strict=True)):
            row = {"id": name, "state": state, "inserted": iteration, "uses": 0, "last_use": None}
            self.history[r // per_shard].append(row)

    def lanes(self, shard):
        """The freshest rows, and the freshest correct ones not among those; both oldest first."""
        rows = self.history[shard]
        older = rows[: max(0, len(rows) - self.num_main)]
        right = [row for row in older if row["state"] == "right"]
        return rows[-self.num_main :], right[max(0, len(right) - self.num_positive) :]

    def drawable(self, shard, iteration, max_age_steps, max_uses):
        """Rows of a shard that may be drawn now, by id."""
        return {
            row["id"]: row
            for lane in self.lanes(shard)
            for row in lane
            if row["state"] != "failed"
            and (not max_age_steps or iteration - row["inserted"] <= max_age_steps)
            and (not max_uses or row["uses"] < max_uses)
        }
