"""Advantages, targets and losses of a critic by loops in float64."""

import math

import numpy as np


def gae(value, reward, mask, discount, gae_lambda):
    """Return [B, T] float64 by the definition: the discounted sum of all later temporal differences of each token."""
    result = np.zeros(np.shape(mask))
    for i, row in enumerate(mask):
        tokens = [t for t, inside in enumerate(row) if inside]
        v = [float(value[i][t]) for t in tokens] + [0.0]
        n = len(tokens)
        delta = [(float(reward[i]) if k == n - 1 else 0.0) + discount * v[k + 1] - v[k] for k in range(n)]
        for k, t in enumerate(tokens):
            result[i, t] = math.fsum((discount * gae_lambda) ** (later - k) * delta[later] for later in range(k, n))
    return result


def whitened(advantage, mask):
    """Return (A - mean) / (std + 1e-6) over all tokens of the mask, zeros elsewhere."""
    values = [float(advantage[i]) for i in np.ndindex(mask.shape) if mask[i]]
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))
    return np.where(mask, (np.asarray(advantage, np.float64) - mean) / (std + 1e-6), 0.0)


def centres(bins, low, high):
    return [low + (high - low) * (i + 0.5) / bins for i in range(bins)]


def hl_gauss(target, bins, low, high):
    """Return the mass [bins] of a Gaussian of 0.75 bin widths around the target. Mass outside the bins is left out."""
    width = (high - low) / bins
    target = min(max(target, low), high)
    cdf = [0.5 * (1 + math.erf((low + i * width - target) / (0.75 * width * math.sqrt(2)))) for i in range(bins + 1)]
    return [(cdf[i + 1] - cdf[i]) / (cdf[-1] - cdf[0]) for i in range(bins)]


def softmax(row):
    e = [math.exp(float(x) - max(map(float, row))) for x in row]
    return [x / math.fsum(e) for x in e]


def value(outputs, bins, low, high):
    if not bins:
        return float(outputs[0])
    return math.fsum(p * c for p, c in zip(softmax(outputs), centres(bins, low, high), strict=True))


def loss(outputs, target, bins, low, high, old_value=0.0, clip=0.0):
    """Return the loss of one token. ``outputs`` is a sequence of max(bins, 1) numbers."""
    if bins:
        p = hl_gauss(target, bins, low, high)
        return -math.fsum(a * math.log(b) for a, b in zip(p, softmax(outputs), strict=True))
    v = float(outputs[0])
    errors = [(v - target) ** 2]
    if clip:
        errors.append((old_value + min(max(v - old_value, -clip), clip) - target) ** 2)
    return max(errors) / 2
