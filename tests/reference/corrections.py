"""Corrections by loops in float64."""

import math


def weights(log_ratio, mask, kind, low, high, threshold, policy=None):
    """Return weights as lists [B][T], 0 off the mask. ``policy`` has log-ratios of the current policy."""
    result = []
    for i, (row, keep) in enumerate(zip(log_ratio, mask, strict=True)):
        whole = sum(float(x) for x, m in zip(row, keep, strict=True) if m)
        terms = []
        for t, (x, m) in enumerate(zip(row, keep, strict=True)):
            log_w = whole if kind.startswith("sequence") else float(x)
            w = math.exp(log_w)
            if kind == "policy_truncated":
                # pi_old / max(pi_behaviour, pi / high)
                w = 1 / max(math.exp(-float(x)), math.exp(float(policy[i][t]) - float(x)) / high)
            elif kind.endswith("truncated"):
                w = min(w, high)
            if kind.endswith("masked") and not low <= w <= high:
                w = 0.0
            if kind == "second_moment" and log_w**2 > threshold:
                w = 0.0
            terms.append(w if m else 0.0)
        result.append(terms)
    return result


def second_moment_kept(log_ratio, mask, limit):
    """Return the {(row, column)} that stay.

    The largest values leave one by one until the mean square is at most ``limit``.
    """
    tokens = {(i, t): float(log_ratio[i][t]) ** 2 for i, row in enumerate(mask) for t, m in enumerate(row) if m}
    while tokens and sum(tokens.values()) / len(tokens) > limit:
        largest = max(tokens.values())
        tokens = {at: x for at, x in tokens.items() if x < largest}
    return set(tokens)


def moving_average(history, decay):
    """Return the average of params_0 .. params_n after the recursion w <- decay w + 1."""
    average, w = history[0], 1.0
    for params in history[1:]:
        average = (decay * w * average + params) / (decay * w + 1)
        w = decay * w + 1
    return average
