"""A ring of one shard with limits on rows and on pages of tokens, in plain Python. The oldest rows leave first."""

import collections


class PagedRing:
    def __init__(self, capacity, num_pages, page):
        self.capacity, self.num_pages, self.page = capacity, num_pages, page
        self.rows = collections.deque()  # (id, length), oldest first

    def insert(self, name, length):
        self.rows.append((name, length))
        while len(self.rows) > self.capacity or self.pages() > self.num_pages:
            self.rows.popleft()

    def pages(self):
        return sum((length + self.page - 1) // self.page for _, length in self.rows)

    def ids(self):
        return [name for name, _ in self.rows]

    def tokens(self):
        return sum(length for _, length in self.rows)
