"""Advantages by loops in float64."""

import numpy as np


def group_advantages(reward, group, valid, kind):
    """reward, group, valid: sequences of B. Returns [B] float64."""
    reward = np.asarray(reward, np.float64)
    result = np.zeros(len(reward))
    for name in set(np.asarray(group)[np.asarray(valid)].tolist()):
        members = [i for i in range(len(reward)) if group[i] == name and valid[i]]
        rewards = [reward[i] for i in members]
        if len(members) < 2 or max(rewards) == min(rewards):
            continue
        for i in members:
            if kind == "leave_one_out":
                others = [reward[j] for j in members if j != i]
                result[i] = reward[i] - sum(others) / len(others)
            else:
                result[i] = reward[i] - np.mean(rewards)
                if kind == "grpo":
                    result[i] /= np.std(rewards) + 1e-6
    return result
