"""Presets have the shapes in the models' config.json, and the parameter counts on their pages."""

import json
import pathlib

import pytest
from support.command_line import run_command
from support.refusal import check_refusal, refused

from jaxrl_llm.config import freeze
from jaxrl_llm.models import presets
from jaxrl_llm.models.files import families

# Of each model's config.json on the hub: num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads,
# head_dim, intermediate_size (moe_intermediate_size), vocab_size, max_position_embeddings, tie_word_embeddings,
# rope_theta; and the number of parameters that its page tells (safetensors, a tied head once).
# Compared on 2026-11-26 with other people's tables of them: litgpt's config.py (26857050) for SmolLM2, Llama,
# Qwen2.5, Qwen3, Gemma 3 1B and Mixtral; slime's scripts/models (624b824a8) for Llama, Qwen2.5, Qwen3, Qwen3-Next and
# Qwen3.5; and reports of the config.json for GPT-OSS-20B, SmolLM3 and Gemma 3 270M. Equal, but for the base models'
# files, where those say rms_norm_eps 1e-5 for Qwen2.5-14B and 32B: these here are the instruct models'. None was
# found for OLMo 2 and GPT-OSS-120B.
PUBLISHED = {
    "smollm2-135m": (30, 576, 9, 3, 64, 1536, 49152, 8192, True, 1e5, 134_515_008),
    "smollm2-360m": (32, 960, 15, 5, 64, 2560, 49152, 8192, True, 1e5, 361_821_120),
    "smollm2-1.7b": (24, 2048, 32, 32, 64, 8192, 49152, 8192, True, 1.3e5, 1_711_376_384),
    "llama-3.2-1b": (16, 2048, 32, 8, 64, 8192, 128256, 131072, True, 5e5, 1_235_814_400),
    "llama-3.2-3b": (28, 3072, 24, 8, 128, 8192, 128256, 131072, True, 5e5, 3_212_749_824),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256, 131072, False, 5e5, 8_030_261_248),
    "llama-3.1-70b": (80, 8192, 64, 8, 128, 28672, 128256, 131072, False, 5e5, 70_553_706_496),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, 40960, True, 1e6, 596_049_920),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151936, 40960, True, 1e6, 1_720_574_976),
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 151936, 40960, True, 1e6, 4_022_468_096),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, 40960, False, 1e6, 8_190_735_360),
    "qwen3-14b": (40, 5120, 40, 8, 128, 17408, 151936, 40960, False, 1e6, 14_768_307_200),
    "qwen3-32b": (64, 5120, 64, 8, 128, 25600, 151936, 40960, False, 1e6, 32_762_123_264),
    "qwen2.5-0.5b": (24, 896, 14, 2, 64, 4864, 151936, 32768, True, 1e6, 494_032_768),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151936, 32768, True, 1e6, 1_543_714_304),
    "qwen2.5-3b": (36, 2048, 16, 2, 128, 11008, 151936, 32768, True, 1e6, 3_085_938_688),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064, 32768, False, 1e6, 7_615_616_512),
    "qwen2.5-14b": (48, 5120, 40, 8, 128, 13824, 152064, 32768, False, 1e6, 14_770_033_664),
    "qwen2.5-32b": (64, 5120, 40, 8, 128, 27648, 152064, 32768, False, 1e6, 32_763_876_352),
    "smollm3-3b": (36, 2048, 16, 4, 128, 11008, 128256, 65536, True, 5e6, 3_075_098_624),
    "gemma-3-270m": (18, 640, 4, 1, 256, 2048, 262144, 32768, True, 1e6, 268_098_176),
    "gemma-3-1b": (26, 1152, 4, 1, 256, 6912, 262144, 32768, True, 1e6, 999_885_952),
    "olmo-2-1b": (16, 2048, 16, 16, 128, 8192, 100352, 4096, False, 5e5, 1_484_916_736),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 768, 151936, 40960, False, 1e6, 30_532_122_624),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 1536, 151936, 40960, False, 1e6, 235_093_634_560),
    "gpt-oss-20b": (24, 2880, 64, 8, 64, 2880, 201088, 131072, False, 150000, 20_914_757_184),
    "gpt-oss-120b": (36, 2880, 64, 8, 64, 2880, 201088, 131072, False, 150000, 116_829_156_672),
    # Of these the pages say 80B, 27B and 35B; without the small model of further tokens, which nothing here reads.
    "qwen3-next-80b-a3b": (48, 2048, 16, 2, 256, 512, 151936, 262144, False, 1e7, 79_674_391_296),
    "qwen3.5-27b": (64, 5120, 24, 4, 256, 17408, 248320, 262144, False, 1e7, 26_895_998_464),
    "qwen3.5-35b-a3b": (40, 2048, 16, 2, 256, 512, 248320, 262144, False, 1e7, 34_660_610_688),
    "mixtral-8x7b": (32, 4096, 32, 8, 128, 14336, 32000, 32768, False, 1e6, 46_702_792_704),
}
# model_type and what else is in the files of a name that begins so; of Gemma, what transformers fills in besides.
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
YARN |= {"original_max_position_embeddings": 4096}
GPT_OSS = {"model_type": "gpt_oss", "num_experts_per_tok": 4, "rope_scaling": YARN, "sliding_window": 128}
GPT_OSS |= {"attention_bias": True, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}}
SHARED = {"shared_expert_intermediate_size": 512, "linear_num_value_heads": 32, "rms_norm_eps": 1e-6}
SHARED |= {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}
FURTHER = {
    "qwen3-next": {"model_type": "qwen3_next", "num_experts": 512, "num_experts_per_tok": 10, **SHARED},
    "qwen3.5-35b": {"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8, **SHARED},
    "qwen3.5-27b": {"model_type": "qwen3_5_text", "linear_num_value_heads": 48, "rms_norm_eps": 1e-6}
    | {"rope_parameters": SHARED["rope_parameters"]},
    "gpt-oss-20b": {**GPT_OSS, "num_local_experts": 32},
    "gpt-oss-120b": {**GPT_OSS, "num_local_experts": 128},
    "smollm2": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama-3.1": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_scaling": {**LLAMA3, "factor": 8.0}},
    "llama-3.2": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_scaling": {**LLAMA3, "factor": 32.0}},
    "qwen2.5": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "rms_norm_eps": 1e-6},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, **EXPERTS},
    "qwen3-235b-a22b": {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, **EXPERTS},
    "smollm3": {"model_type": "smollm3", "rms_norm_eps": 1e-6, "no_rope_layers": [1, 1, 1, 0] * 9},
    "gemma-3": {"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "sliding_window": 512, "query_pre_attn_scalar": 256}
    | {"rope_local_base_freq": 10000, "hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 6},
    "olmo-2": {"model_type": "olmo2", "rms_norm_eps": 1e-6},
    "mixtral": {"model_type": "mixtral", "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
}


def further(name):
    return FURTHER[max((begin for begin in FURTHER if name.startswith(begin)), key=len)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_model_of_its_config_json(name):
    layers, width, heads, kv_heads, head_size, ffn, vocabulary, positions, tied, theta, _ = PUBLISHED[name]
    config = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "vocab_size": vocabulary}
    config |= {"num_key_value_heads": kv_heads, "head_dim": head_size, "intermediate_size": ffn, "rope_theta": theta}
    config |= {"max_position_embeddings": positions, "tie_word_embeddings": tied, **further(name)}
    if "num_experts" in config:
        config |= {"moe_intermediate_size": ffn}
    found = families.architecture_of(config, pathlib.Path("config.json"))
    assert presets.PRESETS[name] == found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_of_its_model(name):
    layers, width, heads, kv_heads, head_size, ffn, vocabulary, *_, tied, _, published = PUBLISHED[name]
    kind, experts = (
        further(name)["model_type"],
        further(name).get("num_experts", further(name).get("num_local_experts")),
    )
    attention = 2 * width * head_size * (heads + kv_heads)  # q and o; k and v
    mlp = 3 * width * ffn * (experts or 1) + width * (experts or 0)  # and the router
    small = {  # norms and biases of a layer
        "qwen2": 2 * width + head_size * (heads + 2 * kv_heads),
        "qwen3": 2 * width + 2 * head_size,
        "qwen3_moe": 2 * width + 2 * head_size,
        "gemma3_text": 4 * width + 2 * head_size,
        "olmo2": 2 * width + head_size * (heads + kv_heads),
        # Biases of attention, its sinks, and biases of router and experts.
        "gpt_oss": 3 * width + head_size * (heads + 2 * kv_heads) + heads + (experts or 0) * (1 + 2 * ffn + width),
    }.get(kind, 2 * width)
    blocks = layers * (attention + mlp + small)
    if values := further(name).get("linear_num_value_heads"):
        keys, values_size, shared = 16 * 128, values * 128, 3 * width * 512 + width if experts else 0
        blocks = layers * (mlp + shared + 2 * width)
        blocks += layers // 4 * (attention + width * head_size * heads + 2 * head_size)  # queries have gates
        rule = width * (2 * keys + 2 * values_size + 2 * values) + values_size * width  # what goes in, and out
        rule += 4 * (2 * keys + values_size) + 2 * values + 128  # convolution, rates and biases, norm
        blocks += layers * 3 // 4 * rule
    assert blocks + vocabulary * width * (1 if tied else 2) + width == published
    model = presets.model_of(freeze({}), name)
    assert model.arch.num_params == published and model.reference == model.arch and model.eos_ids


def test_every_preset_is_tested():
    assert presets.PRESETS.keys() == PUBLISHED.keys()


def test_an_unknown_preset_and_a_teacher_beside_one_are_refused():
    with refused("--preset", "gpt", "smollm2-135m"):
        presets.model_of(freeze({}), "gpt")
    config = freeze({"model": {"reference_path": "random:debug"}, "algorithm": {"divergence": {"name": "reference"}}})
    with refused("model.reference_path", "random:debug"):
        presets.model_of(config, "llama-3.1-8b")


def test_the_command_lists_sizes_and_memory(monkeypatch, capfd):
    done = run_command("models", "--filter=llama-3.1-8b", "--json", monkeypatch=monkeypatch, capfd=capfd)
    (row,) = json.loads(done.out)["models"]
    assert (done.status, row["preset"], row["parameters"]) == (0, "llama-3.1-8b", 8_030_261_248)
    # Weights, gradient, two moments and the sampler's copy: 4+4+8+2, 2+2+4+2, 2+2+0+2.
    assert row["bytes"] == {
        name: n * 8_030_261_248 for name, n in {"float32": 18, "bfloat16": 10, "offload": 6}.items()
    }
    done = run_command("models", monkeypatch=monkeypatch, capfd=capfd)
    assert done.status == 0 and all(name in done.out for name in presets.PRESETS)
    done = run_command("models", "--filter=nope", monkeypatch=monkeypatch, capfd=capfd)
    assert done.status == 2
    check_refusal(done.err, "--filter", "nope", "smollm2-135m")
