"""Advantages by turn by loops in float64.

A row is a dict: ``group``, ``reward`` of the whole, ``turns``, the reward of each turn, ``states``, the state that each
turn answers, and ``histories``, all tokens before each turn. Only valid rows are included. Each function gives a list
of lists, by row and turn.
"""

import math

EPSILON = 1e-6


def mean(values):
    return math.fsum(values) / len(values)


def standardised(value, values, std=True):
    """Return (value - mean) / (std + eps) among ``values``; 0 if all are equal."""
    if max(values) == min(values):
        return 0.0
    gap = value - mean(values)
    return gap / (math.sqrt(mean([(v - mean(values)) ** 2 for v in values])) + EPSILON) if std else gap


def to_go(row, discount):
    return [
        math.fsum(discount ** (j - k) * r for j, r in enumerate(row["turns"]) if j >= k)
        for k in range(len(row["turns"]))
    ]


def siblings(rows, row):
    return [other for other in rows if other["group"] == row["group"]]


def of_row(rows, row, std=True):
    return standardised(row["reward"], [other["reward"] for other in siblings(rows, row)], std)


def turn_returns(rows, discount=1.0, std=True):
    def one(row, k):
        others = [to_go(r, discount)[k] for r in siblings(rows, row) if len(r["turns"]) > k]
        return standardised(to_go(row, discount)[k], others, std)

    return [[one(row, k) for k in range(len(row["turns"]))] for row in rows]


def ui_s1(rows, discount=0.5, weight=1.0, std=True, matched=1.0, min_std=0.3):
    def to_mismatch(row, k):
        """Return the discounted rewards from turn k to the first turn that is not a match.

        For such a turn, return only its own reward.
        """
        turns = row["turns"]
        end = next((j for j in range(k, len(turns)) if turns[j] < matched), len(turns))
        return math.fsum(discount ** (j - k) * turns[j] for j in range(k, end)) if end > k else turns[k]

    def is_kept(row):
        """Return whether a group is kept, as in the released code:

        by the standard deviation of the returns of the first turns.
        """
        first = [to_mismatch(r, 0) for r in siblings(rows, row)]
        return min_std == 0 or math.sqrt(mean([(v - mean(first)) ** 2 for v in first])) > min_std

    def one(row, k):
        if not is_kept(row):
            return 0.0
        others = [to_mismatch(r, k) for r in siblings(rows, row) if len(r["turns"]) > k]
        of_steps = [r["reward"] for r in siblings(rows, row) for _ in r["turns"]]
        return standardised(row["reward"], of_steps, std) + weight * standardised(to_mismatch(row, k), others, std)

    return [[one(row, k) for k in range(len(row["turns"]))] for row in rows]


def mt_grpo(rows, coefficient=1.0):
    def one(row, k):
        outcome = standardised(row["turns"][-1], [r["turns"][-1] for r in siblings(rows, row)])
        if k == len(row["turns"]) - 1:
            return outcome
        others = [r["turns"][k] for r in siblings(rows, row) if len(r["turns"]) - 1 > k]
        return outcome + coefficient * standardised(row["turns"][k], others)

    return [[one(row, k) for k in range(len(row["turns"]))] for row in rows]


def gigpo(rows, discount=0.95, weight=1.0, std=True):
    def one(row, k):
        same = [
            to_go(r, discount)[j]
            for r in siblings(rows, row)
            for j in range(len(r["turns"]))
            if r["states"][j] == row["states"][k]
        ]
        return of_row(rows, row, std) + weight * standardised(to_go(row, discount)[k], same, std)

    return [[one(row, k) for k in range(len(row["turns"]))] for row in rows]


def parted(rows, row, most=1):
    """Return (last shared turn, rows that share it).

    The turn is at most 1 + group mod ``most``; 0 without a shared turn.
    """
    histories = row["histories"][: 2 + row["group"] % most]
    together = [[r for r in siblings(rows, row) if history in r["histories"]] for history in histories]
    last = max([k for k, alike in enumerate(together) if len(alike) > 1], default=0)
    return last, together[last]


def logo(rows, weight=1.0, std=True, branch_turns=1):
    def one(row, k):
        last, alike = parted(rows, row, branch_turns)
        local = standardised(to_go(row, 1.0)[last], [to_go(r, 1.0)[last] for r in alike], std)
        return of_row(rows, row, std) + (weight * local if 0 < last <= k else 0.0)

    return [[one(row, k) for k in range(len(row["turns"]))] for row in rows]


def step_values(rows, std=False, branch_turns=1):
    def value(row):
        return mean([r["reward"] for r in parted(rows, row, branch_turns)[1]])

    def one(row, k):
        last, alike = parted(rows, row, branch_turns)
        if k < last:
            return standardised(value(row), [value(r) for r in siblings(rows, row)], std)
        return standardised(row["reward"], [r["reward"] for r in alike], std)

    return [[one(row, k) for k in range(len(row["turns"]))] for row in rows]


def lambda_returns(rewards, values, discount, gae_lambda):
    """Return G of each step by the definition: a mixture of n-step returns."""
    n = len(rewards)

    def steps(k, m):  # m steps, then the critic
        seen = math.fsum(discount**i * rewards[k + i] for i in range(m))
        return seen + (discount**m * values[k + m] if k + m < n else 0.0)

    def one(k):
        rest = n - k
        mixed = [(1 - gae_lambda) * gae_lambda ** (m - 1) * steps(k, m) for m in range(1, rest)]
        return math.fsum([*mixed, gae_lambda ** (rest - 1) * steps(k, rest)])

    return [one(k) for k in range(n)]
