"""A decoder of the Llama family by loops over rows and heads in float64, and log-probs of completions from it."""

import numpy as np
from reference import sampling


def _norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def _rotate(x, theta):
    """Rotate the pairs (i, i + H/2) of [T, H] by position * theta^(-2i/H)."""
    T, H = x.shape
    angle = np.outer(np.arange(T), theta ** (-2 * np.arange(H // 2) / H))
    a, b = x[:, : H // 2], x[:, H // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)


def hidden(params, arch, tokens):
    """Return [T, D] float64 of one row of T token ids.

    ``params`` is a nested dict of arrays, with blocks stacked by layer.
    """
    p = {name: np.asarray(value, np.float64) for name, value in params["blocks"].items()}
    embedding = np.asarray(params["embedding"], np.float64)
    x = embedding[np.asarray(tokens)]
    T = len(x)
    per_kv = arch.num_heads // arch.num_kv_heads
    for layer in range(arch.num_layers):
        h = _norm(x, p["attention_norm"][layer], arch.norm_eps)
        out = np.zeros_like(x)
        for n in range(arch.num_heads):
            q = _rotate(h @ p["q"][layer, n].T, arch.rope_theta)
            k = _rotate(h @ p["k"][layer, n // per_kv].T, arch.rope_theta)
            v = h @ p["v"][layer, n // per_kv].T
            for t in range(T):
                weight = sampling.softmax(k[: t + 1] @ q[t] / np.sqrt(arch.head_size))
                out[t] += (weight @ v[: t + 1]) @ p["o"][layer, :, n].T
        x = x + out
        h = _norm(x, p["mlp_norm"][layer], arch.norm_eps)
        gate = h @ p["gate"][layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["up"][layer].T)) @ p["down"][layer].T
    return _norm(x, np.asarray(params["final_norm"], np.float64), arch.norm_eps)


def logits(params, arch, tokens):
    """Return [T, V] float64 of one row of T token ids."""
    head = np.asarray(params["embedding" if arch.tied else "head"], np.float64).T
    return hidden(params, arch, tokens) @ head


def completion_logp(
    params,
    arch,
    tokens,
    prompt_length,
    length,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    keep_token=False,
    support=None,
):
    """Return [S] float64 nats of one row's tokens under the filtered distribution; 0 off the completion.

    With ``keep_token`` the row's own token joins the tokens that the filters keep. With ``support``, a set of ids for
    each token replaces the filters.
    """
    result = np.zeros(len(tokens))
    rows = logits(params, arch, tokens[:length])
    for t in range(prompt_length, length):
        kept = sampling.kept_tokens(rows[t - 1], temperature, top_k, top_p, min_p) if support is None else support[t]
        if keep_token:
            kept = kept | {int(tokens[t])}
        probability = sampling.softmax([x / temperature if v in kept else -np.inf for v, x in enumerate(rows[t - 1])])
        with np.errstate(divide="ignore"):
            result[t] = np.log(probability[tokens[t]])
    return result
