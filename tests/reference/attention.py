"""Softmax attention by the definition, in float64."""

import numpy as np


def attend(query, keys, values):
    """Return the attention output [H] of one query [H] over keys [S,H] and values [S,H]."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    scores = keys @ query / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def attend_whole(q, k, v, seen, grad_out):
    """Return the attention [T,N,H] by the definition, and the gradients of q, k, v.

    The queries q [T,N,H] attend to the keys [K,T,H] that ``seen`` [T,T] allows. The gradients of sum(grad_out * output)
    are written out by hand.
    """
    q, k, v, grad_out = (np.asarray(x, np.float64) for x in (q, k, v, grad_out))
    out, dq, dk, dv = np.zeros(q.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    scale = q.shape[-1] ** -0.5
    for n in range(q.shape[1]):
        head = n // (q.shape[1] // len(k))
        scores = np.where(seen, scale * q[:, n] @ k[head].T, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, n] = weights @ v[head]
        of_weights = grad_out[:, n] @ v[head].T
        of_scores = weights * (of_weights - (weights * of_weights).sum(axis=1, keepdims=True))
        dq[:, n] = scale * of_scores @ k[head]
        dk[head] += scale * of_scores.T @ q[:, n]
        dv[head] += weights.T @ grad_out[:, n]
    return out, (dq, dk, dv)
