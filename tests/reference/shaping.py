"""Reward terms and reshapings of advantages by loops in float64."""

import fractions
import math

import numpy as np
from reference.advantages import mean, members_of


def overlong_penalty(length, max_length, buffer):
    result = []
    for n in np.asarray(length).tolist():
        if n <= max_length - buffer:
            result.append(0.0)
        elif n <= max_length:
            result.append((max_length - buffer - n) / buffer)
        else:
            result.append(-1.0)
    return np.array(result)


def length_reward(length, correct, group, valid):
    result = np.zeros(len(length))
    for members in members_of(group, valid):
        lengths = [int(length[i]) for i in members]
        if max(lengths) == min(lengths):
            continue
        for i in members:
            value = 0.5 - (int(length[i]) - min(lengths)) / (max(lengths) - min(lengths))
            result[i] = value if correct[i] else min(0.0, value)
    return result


def difficulty(correct, group, valid):
    """Return the class of each valid row's group, -1 for other rows."""
    result = np.full(len(correct), -1)
    for members in members_of(group, valid):
        share = fractions.Fraction(sum(bool(correct[i]) for i in members), len(members))
        easy, middling = share >= fractions.Fraction(2, 3), share >= fractions.Fraction(1, 3)
        result[members] = 0 if easy else 1 if middling else 2
    return result


def answers_within(length, correct, group, valid, grid):
    result = np.zeros((3, len(grid) + 1))
    row_class = difficulty(correct, group, valid)
    for i in np.flatnonzero(valid):
        result[row_class[i], -1] += 1
        for j, limit in enumerate(grid):
            result[row_class[i], j] += int(length[i]) <= limit
    return result


def short_answer_target(lengths, group_size, grid, row_class):
    """Return the least L with floor(P(L) C) >= 1 from all answers' lengths of a class (0 easy, 1 medium, 2 hard)."""
    at_least_right = [math.floor(2 * group_size / 3), math.floor(group_size / 3), 1][row_class]
    for limit in grid:
        covered = fractions.Fraction(sum(n <= limit for n in lengths), len(lengths))
        if math.floor(covered * at_least_right) >= 1:
            return limit
    return grid[-1]


def entropy_factor(row_entropy, group, valid, strength):
    result = np.ones(len(row_entropy))
    for members in members_of(group, valid):
        centre = mean([float(row_entropy[i]) for i in members])
        for i in members:
            if centre > 0:
                result[i] = max(0.0, 1 + strength * (centre - float(row_entropy[i])) / centre)
    return result


def entropy_bonus(advantage, entropy, coefficient, limit):
    result = np.zeros(np.shape(advantage))
    for at in np.ndindex(*result.shape):
        result[at] = min(abs(float(advantage[at])) / limit, coefficient * float(entropy[at]))
    return result


def duration_factor(length, valid, exponent):
    trained = [int(n) for n, v in zip(length, valid, strict=True) if v]
    mean = sum(trained) / len(trained)
    return np.array([(int(n) / mean) ** exponent for n in length])


def beta_means(rewards, decay):
    """Return the baseline before each of a question's rewards, in order."""
    a = b = 1.0
    means = []
    for reward in rewards:
        means.append(a / (a + b))
        a, b = decay * a + reward, decay * b + 1 - reward
    return means


def ridge(features, target, ridge):
    """Return the coefficients of a ridge regression by the normal equations."""
    features, target = np.asarray(features, np.float64), np.asarray(target, np.float64)
    return np.linalg.solve(features.T @ features + ridge * np.eye(features.shape[1]), features.T @ target)
