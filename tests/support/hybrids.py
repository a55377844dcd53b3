"""Tiny models with the gated delta rule: their config.json, and weights as a function of names and shapes.

Owns: the parts that the stored fixture, its maker and the tests of hybrids share. Does not import transformers.
"""

import dataclasses

import numpy as np
from support import families

SIZES = dict(head_dim=16, num_attention_heads=4, num_hidden_layers=5, full_attention_interval=2)
SIZES |= dict(linear_num_key_heads=2, linear_key_head_dim=6, linear_value_head_dim=10, linear_conv_kernel_dim=4)
ROPE = {**families.PLAIN, "partial_rotary_factor": 0.25}
MIXTURE = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=13, shared_expert_intermediate_size=11)
MIXTURE |= dict(num_hidden_layers=3)
# Rows are longer than a chunk.
CONFIGS = {
    "qwen3_next_experts": families.of("qwen3_next", ROPE, **SIZES | MIXTURE, linear_num_value_heads=4),
    "qwen3_5_experts": families.of("qwen3_5_moe_text", ROPE, **SIZES | MIXTURE, linear_num_value_heads=2),
    "qwen3_next": families.of("qwen3_next", ROPE, **SIZES, linear_num_value_heads=4, num_experts=0),
    "qwen3_next_tied": families.of(
        "qwen3_next",
        {**ROPE, "partial_rotary_factor": 0.5},
        **{**SIZES, "num_hidden_layers": 3, "linear_num_key_heads": 3, "linear_conv_kernel_dim": 3},
        **dict(linear_num_value_heads=3, num_experts=4, mlp_only_layers=[0, 1, 2], tie_word_embeddings=True),
        **dict(attention_bias=True, layer_types=["full_attention", "linear_attention", "linear_attention"]),
    ),
    "qwen3_5": families.of("qwen3_5_text", ROPE, **SIZES, linear_num_value_heads=4),
}


def weights(shapes):
    """Return weights like ``families.weights``.

    Norms are stored minus one, and states decay within some dozens of tokens.
    """
    made = families.weights(shapes, gemma=True)
    for name, x in made.items():
        x = x + 1.0 if "linear_attn.norm" in name else x - 4.0 if name.endswith("dt_bias") else x
        made[name] = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return made


def tiny(arch):
    """Return a small architecture with the rule in its first two layers, and with the attention of such models."""
    from jaxrl_llm.models.architecture import Delta, Layer  # the fixture's maker has no package

    # What a state of one token gives may be all rounding, which the norm after it makes large: it is softened.
    return dataclasses.replace(
        arch,
        **dict(num_layers=3, layers=(Layer(mixer="delta_rule"), Layer(mixer="delta_rule"), Layer()), norm_eps=1e-3),
        **dict(delta=Delta(2, 4, 8, 6, 4, is_grouped=True), output_gate=True, rotary_size=2, qk_norm="head"),
    )
