"""Mixture of experts and its balance cost as loops in float64."""

import numpy as np


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def choose(probs, k):
    """The k likeliest [X,k], the likelier first, of equal ones that of the lower number."""
    return np.argsort(-probs, axis=-1, kind="stable")[:, :k]


def mixture(x, router, gate, up, down, k, *, normalised, chosen=None):
    """SwiGLU experts [E,F,D], [E,F,D], [E,D,F] of tokens [X,D], of which each has k, and those."""
    x, router, gate, up, down = (np.asarray(a, np.float64) for a in (x, router, gate, up, down))
    probs = softmax(x @ router.T)
    chosen = choose(probs, k) if chosen is None else chosen
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        share = probs[t, chosen[t]]
        share = share / share.sum() if normalised else share
        for e, p in zip(chosen[t], share, strict=True):
            opened = gate[e] @ token
            out[t] += p * (down[e] @ (opened / (1 + np.exp(-opened)) * (up[e] @ token)))
    return out, chosen


def balance(probs, k, mask):
    """E sum_e f_e P_e over tokens of the mask [X] and all layers, probs [layers,X,E]."""
    kept = np.concatenate([of_layer[mask] for of_layer in probs])
    f = np.zeros(kept.shape[1])
    for row in choose(kept, k):
        f[row] += 1 / len(kept)
    return kept.shape[1] * np.sum(f * kept.mean(axis=0))
