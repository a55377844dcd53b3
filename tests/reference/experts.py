"""Mixture of experts and its balance cost by loops in float64."""

import numpy as np


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def choose(probs, k):
    """Return the k likeliest experts [X,k], likeliest first; in a tie the lower number comes first."""
    return np.argsort(-probs, axis=-1, kind="stable")[:, :k]


def mixture(x, router, gate, up, down, k, *, normalised, chosen=None, biases=None, limit=np.inf):
    """SwiGLU experts [E,F,D], [E,F,D], [E,D,F] of tokens [X,D], and the k experts that each token chose.

    With ``biases``, of the router [E] and the three matrices [E,F], [E,F], [E,D], they are GPT-OSS's: gates up to the
    limit, ups from there to its negative, and one is added to them.
    """
    x, router, gate, up, down = (np.asarray(a, np.float64) for a in (x, router, gate, up, down))
    of_router, *of_experts = (0, *[np.zeros((len(router), 1))] * 3) if biases is None else biases
    probs = softmax(x @ router.T + of_router)
    chosen = choose(probs, k) if chosen is None else chosen
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        share = probs[t, chosen[t]]
        share = share / share.sum() if normalised else share
        for e, p in zip(chosen[t], share, strict=True):
            g, u = (w[e] @ token + b[e] for w, b in zip((gate, up), of_experts, strict=False))
            if biases is not None:
                g, u = np.where(g > limit, limit, g), np.where(np.abs(u) > limit, np.sign(u) * limit, u) + 1
            steep = 1 if biases is None else 1.702
            out[t] += p * (down[e] @ (g / (1 + np.exp(-steep * g)) * u) + of_experts[2][e])
    return out, chosen


def balance(probs, k, mask):
    """Return E sum_e f_e P_e over the tokens of the mask [X] and all layers; probs is [layers,X,E]."""
    kept = np.concatenate([of_layer[mask] for of_layer in probs])
    f = np.zeros(kept.shape[1])
    for row in choose(kept, k):
        f[row] += 1 / len(kept)
    return kept.shape[1] * np.sum(f * kept.mean(axis=0))
