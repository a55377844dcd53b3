"""The gated delta rule by its recurrence, token by token, in float64."""

import numpy as np


def rule(q, k, v, g, b, state):
    """Outputs [T,V] of one head, and the state after them.

    Args:
        q, k: [T,H]. v: [T,V]. g, b: [T], logarithm of the decay and the share corrected. state: [H,V] before.
    """
    q, k, v, g, b, state = (np.asarray(x, np.float64) for x in (q, k, v, g, b, state))
    out = []
    for t in range(len(q)):
        state = np.exp(g[t]) * state
        state = state + b[t] * np.outer(k[t], v[t] - state.T @ k[t])
        out.append(state.T @ q[t])
    return np.stack(out), state


def convolution(x, weight, before):
    """Return each channel's causal convolution [T,C] of x [T,C], weight [C,taps] and the earlier inputs [taps-1,C]."""
    taps = weight.shape[1]
    every = np.concatenate([before, x]).astype(np.float64)
    return np.stack([np.sum(every[t : t + taps].T * weight, axis=1) for t in range(len(x))])


def path(unit, row, t):
    """Return the places of a line in the past of token t, which is the last: its unit's prompt and its own row."""
    return [s for s in range(t + 1) if unit[s] == unit[t] and row[s] in (0, row[t])]
