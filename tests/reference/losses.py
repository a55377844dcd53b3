"""Aggregated losses by loops in float64, and the clipped loss of one policy against another."""

import math

import numpy as np


def clipped_surrogate(policy_logp, behaviour_logp, advantage, clip_low, clip_high):
    loss = np.zeros(np.shape(policy_logp))
    for i in np.ndindex(loss.shape):
        ratio = math.exp(float(policy_logp[i]) - float(behaviour_logp[i]))
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        loss[i] = -min(ratio * float(advantage[i]), clipped * float(advantage[i]))
    return loss


def aggregate(term, mask, trainable, kind, max_completion_tokens, group_id=None):
    """Return the aggregated loss over tokens of the mask in trainable rows. Rows without tokens do not count."""
    if kind == "prompt_mean":
        prompts = {}
        for row, keep, used, name in zip(term, mask, trainable, group_id, strict=True):
            prompts.setdefault(int(name), []).extend(float(x) for x, m in zip(row, keep, strict=True) if m and used)
        means = [sum(tokens) / len(tokens) for tokens in prompts.values() if tokens]
        return sum(means) / len(means) if means else 0.0
    rows = [[float(x) for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(term, mask, strict=True)]
    rows = [row for row, t in zip(rows, trainable, strict=True) if t and row]
    if not rows:
        return 0.0
    if kind == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if kind == "sequence_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if kind == "constant_length":
        return sum(map(sum, rows)) / (len(rows) * max_completion_tokens)
    raise AssertionError(kind)
