"""Filters and softmax by loops in float64."""

import numpy as np


def softmax(logits):
    weight = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weight / weight.sum()


def kept_tokens(logits, temperature, top_k, top_p, min_p):
    """Return the set of tokens of one row that may be sampled:

    temperature, top-k, top-p of the rest, min-p; ties stay.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    kept = set(range(len(scaled)))
    if top_k and top_k < len(scaled):
        last = sorted(scaled, reverse=True)[top_k - 1]
        kept = {v for v in kept if scaled[v] >= last}
    if top_p < 1:
        tokens = sorted(kept, key=lambda v: -scaled[v])
        probability = softmax([scaled[v] for v in tokens])
        mass, last = 0.0, None
        for v, p in zip(tokens, probability, strict=True):
            mass, last = mass + p, scaled[v]
            if mass >= top_p:
                break
        kept = {v for v in kept if scaled[v] >= last}
    if min_p:
        top = max(scaled[v] for v in kept)
        kept = {v for v in kept if np.exp(scaled[v] - top) >= min_p}
    return kept


def distribution(logits, temperature, top_k, top_p, min_p):
    """Return the probabilities [V] float64 of one row after the filters."""
    kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
    scaled = np.asarray(logits, np.float64) / temperature
    return softmax([x if v in kept else -np.inf for v, x in enumerate(scaled)])
