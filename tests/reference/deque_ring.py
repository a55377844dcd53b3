"""The replay ring by its definition, in plain Python: the inserted rows determine which rows it holds."""


class DequeRing:
    """A row is ``{"id", "state", "inserted", "uses", "last_use"}``; its state is "right", "wrong" or "failed" (not
    trainable), ``last_use`` the number of the batch it was last in.

    New rows take the place of those that can never be drawn again, then of the oldest. A correct one that goes though
    it might be drawn is kept in the second lane of its shard, by the same rule.
    """

    def __init__(self, capacity, num_shards, num_positive=0, max_age_steps=0, max_uses=0):
        """Create the ring.

        ``num_positive`` slots of each shard are for correct rows that the main ring has overwritten.
        """
        self.num_draws = 0
        self.max_age_steps, self.max_uses = max_age_steps, max_uses
        self.sizes = capacity // num_shards - num_positive, num_positive
        self.shards = [([], []) for _ in range(num_shards)]
        self.ended = []  # uses of the rows that are gone

    def is_spent(self, row, iteration):
        too_old = self.max_age_steps and iteration - row["inserted"] > self.max_age_steps
        return row["state"] == "failed" or too_old or (self.max_uses and row["uses"] >= self.max_uses)

    def push(self, lane, size, rows, iteration):
        """Append rows. Return the overwritten rows in the order of time."""
        surplus = max(0, len(lane) + len(rows) - size)
        going = [row for row in lane if self.is_spent(row, iteration)][:surplus]
        going += [row for row in lane if not self.is_spent(row, iteration)][: surplus - len(going)]
        names = {row["id"] for row in going}
        gone = [row for row in lane if row["id"] in names]
        lane[:] = [row for row in lane if row["id"] not in names] + rows
        return gone

    def insert(self, ids, states, iteration):
        per_shard = len(ids) // len(self.shards)
        for m, (main, kept) in enumerate(self.shards):
            mine = slice(m * per_shard, (m + 1) * per_shard)
            rows = [
                {"id": name, "state": state, "inserted": iteration, "uses": 0, "last_use": None}
                for name, state in zip(ids[mine], states[mine], strict=True)
            ]
            gone = self.push(main, self.sizes[0], rows, iteration)
            moving = [row for row in gone if row["state"] == "right" and not self.is_spent(row, iteration)]
            ended = [row for row in gone if row not in moving or not self.sizes[1]]
            if self.sizes[1]:
                ended += moving[: -self.sizes[1]]
                ended += self.push(kept, self.sizes[1], moving[-self.sizes[1] :], iteration)
            self.ended += [row["uses"] for row in ended]

    def lanes(self, shard):
        """Return the rows of the main ring and of the second ring, oldest first."""
        return self.shards[shard]

    def drawable(self, shard, iteration):
        """Return the ids of a shard's rows that may be drawn in this iteration."""
        rows = [row for lane in self.lanes(shard) for row in lane]
        return {row["id"]: row for row in rows if not self.is_spent(row, iteration)}
