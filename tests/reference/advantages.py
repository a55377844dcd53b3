"""Advantages by loops in float64."""

import math

import numpy as np

EPSILON = 1e-6


def members_of(group, valid):
    for name in set(np.asarray(group)[np.asarray(valid)].tolist()):
        yield [i for i in range(len(group)) if group[i] == name and valid[i]]


def mean(values):
    return math.fsum(values) / len(values)


def std(values):
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / len(values))


def median(values):
    ordered, n = sorted(values), len(values)
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def standardised(values):
    """Return (v - mean) / (std + eps) of a list; zeros if all values are equal."""
    if not values or max(values) == min(values):
        return [0.0] * len(values)
    return [(v - mean(values)) / (std(values) + EPSILON) for v in values]


def group_advantages(reward, group, valid, kind, *, delta_v=0.0, parts=None, part_weights=(), baseline=None):
    """Return [B] float64. reward, group, valid and the other arguments are sequences of length B."""
    reward = np.asarray(reward, np.float64)
    result = np.zeros(len(reward))
    everyone = [i for i in range(len(reward)) if valid[i]]
    if kind in ("reinforce_pp", "mssr"):
        values = [reward[i] - (float(baseline[i]) if kind == "mssr" else 0.0) for i in everyone]
        result[everyone] = standardised(values)
        return result
    for members in members_of(group, valid):
        rewards = [reward[i] for i in members]
        n = len(members)
        if n < 2:
            continue
        for i in members:
            others = [j for j in members if j != i]
            if kind == "poise":
                result[i] = reward[i] - mean([float(baseline[j]) for j in others])
            elif kind == "asymre":
                result[i] = reward[i] - (mean(rewards) + delta_v)
            elif kind == "gdpo":
                for k, part_weight in enumerate(part_weights):
                    column = [float(parts[j][k]) for j in members]
                    result[i] += part_weight * standardised(column)[members.index(i)]
            elif max(rewards) == min(rewards):
                pass
            elif kind == "leave_one_out":
                result[i] = reward[i] - mean([reward[j] for j in others])
            elif kind == "mc_grpo":
                result[i] = reward[i] - median(rewards)
            else:
                result[i] = reward[i] - mean(rewards)
                if kind == "grpo":
                    result[i] /= std(rewards) + EPSILON
    if kind in ("brorl", "gdpo"):
        result[everyone] /= std(result[everyone].tolist()) + EPSILON
    return result
