"""Optimizers as their papers define them, in float64 numpy.

Sources: Adam, Kingma and Ba 2014, arXiv:1412.6980, algorithm 1; Adafactor, Shazeer and Stern 2018, arXiv:1804.04235,
algorithms 4 and 5 with decay 1 - t^-0.8, epsilon 1e-30 and update clipping at 1, which factor one matrix by its rows
and columns, and no vector; subset-norm, Nguyen and Nguyen 2024, arXiv:2411.07120, with the mean of a row's squares;
modules that begin where progress stalls, ScaleZero, Pu et al. 2025, arXiv:2509.07945, with the slope of rewards for
progress.
"""

import numpy as np


def adam(gradients, *, rate, b1=0.9, b2=0.999, eps=1e-8, rows=False):
    """Return the sum of the updates and the second moment after gradients [T,...].

    With ``rows``, each row has one second moment.
    """
    m = v = total = np.zeros_like(gradients[0], dtype=np.float64)
    for t, g in enumerate(np.asarray(gradients, np.float64), 1):
        square = np.stack([np.full(len(row), row @ row / len(row)) for row in g]) if rows else g * g
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * square
        total = total - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return total, v


def adafactor(gradients, *, rate, least=64):
    """Return the sum of the updates of a matrix [R,C] after gradients [T,R,C], or of a vector [n].

    A matrix with fewer than ``least`` rows or columns is treated like a vector.
    """
    rows = columns = whole = 0.0
    total = np.zeros(gradients.shape[1:])
    for t, g in enumerate(np.asarray(gradients, np.float64), 1):
        decay = 1 - t**-0.8
        square = g * g + 1e-30
        if g.ndim == 2 and min(g.shape) >= least:
            rows = decay * rows + (1 - decay) * np.sum(square, axis=1)
            columns = decay * columns + (1 - decay) * np.sum(square, axis=0)
            second = np.outer(rows, columns) / np.sum(rows)
        else:
            second = whole = decay * whole + (1 - decay) * square
        update = g / np.sqrt(second)
        update = update / max(1.0, np.sqrt(np.mean(update**2)))
        total = total - rate * update
    return total


def modules(rewards, *, number, steps):
    """Return the learning module of each step, from 0 on.

    The next module begins when the line of ``steps`` rewards does not rise.
    """
    module, since, found = 0, [], []
    for reward in rewards:
        found.append(module)
        since.append(reward)
        if len(since) >= steps and module < number - 1:
            slope, _ = np.polyfit(np.arange(steps), since[-steps:], 1)
            if slope <= 1e-12:  # rounding of a line that is level
                module, since = module + 1, []
    return found
