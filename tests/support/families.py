"""Tiny models of every family with unusual sizes: their config.json, and weights as a function of names and shapes.

Owns: the parts that the stored fixture, its maker and the tests of families share. Imports neither the package nor
transformers.
"""

import numpy as np

SHAPE = dict(vocab_size=61, hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=6)
SHAPE |= dict(pad_token_id=None, bos_token_id=1, eos_token_id=2)  # none is left out of gradients
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False)
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
ORIGINAL = {"rope_theta": 700.0, "original_max_position_embeddings": 48}
GEMMA = dict(model_type="gemma3_text", head_dim=6, query_pre_attn_scalar=9, sliding_window=7, tie_word_embeddings=True)
GEMMA |= dict(hidden_activation="gelu_pytorch_tanh", num_hidden_layers=5)
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def of(model_type="llama", rope=PLAIN, **settings):
    return {**SHAPE, "model_type": model_type, "rope_parameters": rope, **settings}


# Rows are of 90 tokens: longer than every window, than 64 places of a cache and than yarn's original context.
CONFIGS = {
    "llama_biased": of(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama_swish": of(hidden_act="swish", head_dim=10),
    "llama_linear": of(rope={**PLAIN, "rope_type": "linear", "factor": 3.0}),
    "llama_dynamic": of(rope={**PLAIN, "rope_type": "dynamic", "factor": 4.0}),
    "llama_yarn": of(rope={**ORIGINAL, "rope_type": "yarn", "factor": 5.0}, head_dim=20),
    "llama_yarn_scaled": of(
        rope={
            **ORIGINAL,
            **dict(rope_type="yarn", factor=4.0, beta_fast=8.0, beta_slow=0.5, truncate=False),
            **dict(mscale=0.7, mscale_all_dim=1.3),
        },
        head_dim=20,
    ),
    "llama_longrope": of(
        rope={
            **ORIGINAL,
            "original_max_position_embeddings": 128,
            "rope_type": "longrope",
            **dict(short_factor=[1.0, 1.1, 1.3, 2.0, 3.0], long_factor=[1.0, 2.0, 4.0, 8.0, 9.0]),
        },
        head_dim=10,
    ),
    "mistral_window": of("mistral", sliding_window=7, head_dim=10),
    "qwen2": of("qwen2", tie_word_embeddings=True),
    "qwen2_window": of("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": of("qwen3", head_dim=10, tie_word_embeddings=True),
    "qwen3_biased": of("qwen3", head_dim=10, attention_bias=True, num_key_value_heads=3),
    "smollm3": of("smollm3", no_rope_layer_interval=2, num_hidden_layers=5, tie_word_embeddings=True),
    "smollm3_window": of(
        **dict(model_type="smollm3", no_rope_layer_interval=3, num_hidden_layers=4, mlp_bias=True),
        **dict(use_sliding_window=True, sliding_window=5, attention_bias=True),
    ),
    "olmo2": of("olmo2", num_key_value_heads=3),
    "olmo2_biased": of("olmo2", attention_bias=True, head_dim=4, num_key_value_heads=6),
    "gemma3": of(
        **GEMMA,
        layer_types=[LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL],
        rope={LOCAL: {**PLAIN, "rope_theta": 40.0}, GLOBAL: {**PLAIN, "rope_type": "linear", "factor": 2.0}},
    ),
}
# Experts and those of a token are no powers of two, nor do their numbers divide each other's.
CONFIGS |= {
    "qwen3_moe": of(
        **dict(model_type="qwen3_moe", head_dim=10, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=13),
        **dict(norm_topk_prob=True, num_hidden_layers=2),
    ),
    "qwen3_moe_plain": of(
        **dict(model_type="qwen3_moe", head_dim=10, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=9),
        **dict(use_sliding_window=True, sliding_window=9, attention_bias=True, num_hidden_layers=2),
    ),
    "gpt_oss": of(
        **dict(model_type="gpt_oss", head_dim=10, num_local_experts=7, num_experts_per_tok=3, intermediate_size=13),
        **dict(sliding_window=7, attention_bias=True, swiglu_limit=0.4),
        rope={**ORIGINAL, "rope_type": "yarn", "factor": 5.0, "truncate": False},
    ),
    "mixtral": of("mixtral", num_local_experts=6, num_experts_per_tok=2, sliding_window=11, num_hidden_layers=2),
}
MOST_TOKENS = 90


def tokens_of(config):
    """Return the token ids of two rows, [2,90]."""
    return np.random.default_rng(5).integers(0, config["vocab_size"], (2, MOST_TOKENS))


def weights(shapes, gemma=False):
    """Return float32 weights by name with bfloat16 values. Norms scale, and logits spread by a few nats.

    Args:
        shapes: shapes of tensors by name; each tensor has its own random stream.
        gemma: norms are stored minus one.
    """
    made = {}
    for name, shape in shapes.items():
        x = 0.2 * np.random.default_rng(list(name.encode())).normal(size=shape)
        x = x + 1.0 * (not gemma) if "norm" in name else x * (0.5 if gemma and "embed" in name else 1.0)
        made[name] = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return made


def projections(name, gradient):
    """Return two numbers for a gradient: its projection on a fixed random unit vector, and its length."""
    direction = np.random.default_rng([1, *name.encode()]).normal(size=gradient.shape)
    gradient = np.asarray(gradient, np.float64)
    return [float(np.sum(gradient * direction) / np.linalg.norm(direction)), float(np.linalg.norm(gradient))]
