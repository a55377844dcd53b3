"""Softmax attention of one query by the definition, in float64."""

import numpy as np


def attend(query, keys, values):
    """[H] of one query [H] over keys [S,H] and values [S,H]."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    scores = keys @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()
