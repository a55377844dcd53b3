"""Surrogates by loops in float64, and their gradients by central differences.

``rows`` is a list of dicts, one a row: lists ``policy``, ``old``, ``behaviour``, ``ref``, ``advantage`` of its tokens
with a loss (none: the row is no sibling), a number ``reward``; ``group_size`` neighbours are siblings. Every function
gives a list of terms per row.
"""

import math

# Surrogates whose settings ``low`` and ``high`` bound the ratio itself. Others bound its distance from 1.
BOUND_THE_RATIO = ("cispo",)


def _clip(ratio, advantage, low, high, dual=0.0):
    value = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if dual and advantage < 0:
        value = max(value, dual * advantage)
    return -value


def clipped(rows, s):
    return [
        [
            _clip(math.exp(p - o), a, 1 - s["clip_low"], 1 + s["clip_high"], s["dual_clip"])
            for p, o, a in zip(row["policy"], row["old"], row["advantage"], strict=True)
        ]
        for row in rows
    ]


def gspo(rows, s):
    return _of_row_ratio(rows, s, lambda n: 1 / n)


def sequence_clipped(rows, s):
    return _of_row_ratio(rows, s, lambda n: 1.0)


def _of_row_ratio(rows, s, power):
    result = []
    for row in rows:
        n = len(row["policy"])
        ratio = math.exp((sum(row["policy"]) - sum(row["old"])) * power(n)) if n else 1.0
        bounds = 1 - s["clip_low"], 1 + s["clip_high"], s["dual_clip"]
        result.append([_clip(ratio, a, *bounds) for a in row["advantage"]])
    return result


def remix_centred(rows, s):
    result = []
    for row in rows:
        terms = []
        for p, o, b, a in zip(row["policy"], row["old"], row["behaviour"], row["advantage"], strict=True):
            centre = math.exp(o - b)
            terms.append(_clip(math.exp(p - b), a, centre - s["clip_low"], centre + s["clip_high"]))
        result.append(terms)
    return result


def reinforce(rows, s):
    return [[-a * p for p, a in zip(row["policy"], row["advantage"], strict=True)] for row in rows]


def opmd(rows, s):
    return [[term / (1 + s["beta"]) for term in terms] for terms in reinforce(rows, s)]


def cispo(rows, s):
    """The weights are constants to differentiation: they come from ``fixed`` rows, log-probs from ``rows``."""
    result = []
    for row, fixed in zip(rows, s.get("fixed", rows), strict=True):
        terms = []
        for p, q, o, a in zip(row["policy"], fixed["policy"], row["old"], row["advantage"], strict=True):
            weight = min(max(math.exp(q - o), 1 - s["clip_low"]), 1 + s["clip_high"])
            terms.append(-weight * a * p)
        result.append(terms)
    return result


def _groups(rows, s):
    return [rows[i : i + s["group_size"]] for i in range(0, len(rows), s["group_size"])]


def _spread(values, rows):
    return [[value] * len(row["policy"]) for value, row in zip(values, rows, strict=True)]


def _difference(row, anchor):
    return sum(row["policy"]) - sum(row[anchor])


def _regression(rows, s, anchor, centred):
    values = []
    for group, fixed in zip(_groups(rows, s), _groups(s.get("fixed", rows), s), strict=True):
        siblings = [_difference(row, anchor) for row in fixed if row["policy"]]
        middle = sum(siblings) / len(siblings) if centred and siblings else 0.0
        for row in group:
            gain = sum(a * (p - o) for a, p, o in zip(row["advantage"], row["policy"], row[anchor], strict=True))
            values.append(s["beta"] / 2 * (_difference(row, anchor) - middle) ** 2 - gain)
    return _spread(values, rows)


def agro(rows, s):
    return _regression(rows, s, "ref", True)


def gvpo(rows, s):
    return _regression(rows, s, "old", True)


def kimi_k15(rows, s):
    return _regression(rows, s, "old", False)


def _soft_values(rows, s):
    """Return the Q of each row, with Q0 from the other rows of its group; None if it has no other rows."""
    values = []
    for group in _groups(rows, s):
        for row in group:
            others = [other for other in group if other is not row and other["policy"]]
            if not others or not row["policy"]:
                values.append(None)
                continue
            weights = [math.exp(sum(other["ref"]) - sum(other["behaviour"])) for other in others]
            mean = sum(w * math.exp(other["reward"] / s["beta"]) for w, other in zip(weights, others, strict=True))
            values.append(s["beta"] * math.log(mean / sum(weights)) + s["beta"] * _difference(row, "ref"))
    return values


def spo(rows, s):
    values = zip(_soft_values(rows, s), rows, strict=True)
    return _spread([0.0 if q is None else (q - row["reward"]) ** 2 for q, row in values], rows)


def spo_cross_entropy(rows, s):
    values = []
    for q, row in zip(_soft_values(rows, s), rows, strict=True):
        if q is None:
            values.append(0.0)
            continue
        success = min(math.exp(row["reward"]), 1.0)
        edge = -0.01
        if q <= edge:
            failure = math.log(1 - math.exp(q))
        else:  # the tangent at the edge
            failure = math.log(1 - math.exp(edge)) - math.exp(edge) / (1 - math.exp(edge)) * (q - edge)
        values.append(-(success * q + (1 - success) * failure))
    return _spread(values, rows)


def vcpo(rows, s):
    """The weights and the values that they are squared for are constants to differentiation.

    They come from ``fixed`` rows.
    """
    cap, result = 1 + s["clip_high"], []
    for group, fixed in zip(_groups(rows, s), _groups(s.get("fixed", rows), s), strict=True):
        members = [row for row in fixed if row["policy"]]
        rewards = [row["reward"] for row in members]
        weight = {id(row): min(math.exp(_difference(row, "behaviour")), cap) for row in members}
        norm = {id(row): sum((1 - math.exp(p)) ** 2 for p in row["policy"]) for row in members}
        share = {name: weight[name] ** 2 * norm[name] for name in weight}
        baseline = sum(share[id(row)] * row["reward"] for row in members) / sum(share.values()) if members else 0.0
        for row, constant in zip(group, fixed, strict=True):
            gain = row["reward"] - baseline if len(set(rewards)) > 1 else 0.0
            result.append([-weight[id(constant)] * gain * p for p in row["policy"]])
    return result


def inpo(rows, s):
    values = []
    for group in _groups(rows, s):
        siblings = [row for row in group if row["policy"]]
        for row in group:
            total = 0.0
            for other in siblings:
                if other is row or not row["policy"] or row["reward"] == other["reward"]:
                    continue
                winner, loser = (row, other) if row["reward"] > other["reward"] else (other, row)
                gap = {name: sum(winner[name]) - sum(loser[name]) for name in ("policy", "ref", "old")}
                h = gap["policy"] - gap["ref"] / 3 - 2 / 3 * gap["old"]
                total += (h - 1 / (2 * s["beta"])) ** 2
            values.append(total / max(len(siblings) - 1, 1))
    return _spread(values, rows)
