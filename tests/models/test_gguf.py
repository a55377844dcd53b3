"""GGUF files: the real SmolLM2 compared with an independent implementation, and small files written here."""

import importlib.util
import json
import pathlib

import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from support import gguf_files
from support.building import make_mesh
from support.comparing import assert_same, raw
from support.refusal import raises_with, refused

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import RopeScaling
from jaxrl_llm.models.files import gguf, hf, pretrained
from jaxrl_llm.models.files.tokenizer import load_tokenizer
from jaxrl_llm.models.transformer import Model

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
TINY = FIXTURES / "tiny_llama"

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec(pretrained.SMOLLM2_PACKAGE) is None,
    reason="the weights of SmolLM2 are not installed (bash launch/setup.sh)",
)


def write_tiny(path, *, quantise=None, change=lambda writer, tensors: None):
    """Write the fixture's weights as llama.cpp's converter does, without its rope scaling.

    ``quantise`` applies to every matrix. ``change`` may add metadata, change tensors or drop them.
    """
    source = safetensors.numpy.load_file(TINY / "model.safetensors")
    source = {name: tensor.astype(np.float32) for name, tensor in source.items()}
    tensors = {"token_embd.weight": source["model.embed_tokens.weight"], "output.weight": source["lm_head.weight"]}
    tensors["output_norm.weight"] = source["model.norm.weight"]
    modules = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(2):
        for theirs, module in modules.items():
            weight = source[f"model.layers.{layer}.{module}.weight"]
            if theirs in ("attn_q", "attn_k"):  # LlamaModel.permute of convert_hf_to_gguf.py
                heads = 4 if theirs == "attn_q" else 2
                halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(12)
    writer.add_rope_dimension_count(12)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    change(writer, tensors)
    block = 1 if quantise is None else gguf_package.GGML_QUANT_SIZES[quantise][0]
    for name, tensor in tensors.items():
        if quantise is not None and tensor.ndim == 2 and tensor.shape[1] % block == 0:
            writer.add_tensor(name, gguf_package.quants.quantize(tensor, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path, mesh):
    return gguf.load_params(path, Model(gguf.read_architecture(path)), mesh)


@pytest.fixture(scope="module")
def smollm2():
    source = pretrained.resolve(pretrained.SMOLLM2)
    model = Model(source.architecture())
    mesh = make_mesh()
    return source.tokenizer(), model, source.load_params(model, mesh, seed=0)


@pytest.mark.tier("slow")  # plain: the same weights are read in test_load_hf.py
@needs_smollm2
def test_smollm2_gives_the_reference_log_probs_and_greedy_tokens(smollm2):
    tokenizer, model, params = smollm2
    rows = json.loads((FIXTURES / "smollm2_reference.json").read_text())["prompts"]
    assert len(rows) == 3

    @jax.jit
    def logp_of(params, tokens):
        hidden, _ = model.forward(params, tokens, jnp.arange(tokens.shape[1])[None])
        return jax.nn.log_softmax(hidden[0] @ model.head(params).T)

    for row in rows:
        prompt, greedy = row["prompt_ids"], row["greedy_ids"]
        assert tokenizer.encode_prompt(row["user"], chat_template=True, system_prompt="") == prompt
        # Padded to one width: real tokens come before the padding and do not see it.
        tokens = np.zeros((1, 128), np.int32)
        tokens[0, : len(prompt) + len(greedy)] = prompt + greedy
        # The distribution of each greedy token is at the position before it.
        logp = np.asarray(logp_of(params, jnp.asarray(tokens)))[len(prompt) - 1 :][: len(greedy)]
        # Teacher-forced: each greedy token is the most likely after those before it, so decoding finds them all.
        np.testing.assert_array_equal(logp.argmax(-1), greedy)
        # Measured 3.1e-5 nats; the law is 1e-3.
        np.testing.assert_allclose(logp[np.arange(len(greedy)), greedy], row["greedy_logprobs"], atol=2e-4, rtol=0)
        assert tokenizer.decode(greedy[: row["first_eos_index"]]) == row["text"]
        assert raw(tokenizer, greedy) == row["text_all"]
        assert greedy[row["first_eos_index"]] in tokenizer.eos_ids


@pytest.mark.tier("slow")  # plain: test_tokenizer.py
@needs_smollm2
def test_smollm2_tokenizer_round_trips_any_text(smollm2):
    tokenizer, model, _ = smollm2
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (model.arch.vocab_size, (2,))
    texts = ["", " a  b\n\n\tc .", "12345 + 678", "naïve 漢字 🙂\u200d\u0000", "'s I'll <|im_end", "x" * 300, "\r\n e "]
    for text in texts:
        assert raw(tokenizer, tokenizer.encode(text)) == text
    # Digits stand alone in this tokenizer.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]
    # Written control tokens are control tokens where asked for, and hidden from plain text.
    assert tokenizer.encode("<|im_start|>user", special_tokens=True) == [1, *tokenizer.encode("user")]
    assert tokenizer.decode([1, *tokenizer.encode("user"), 2]) == "user"


@needs_smollm2
def test_smollm2_tokenizer_saves_to_the_same_tokenizer(smollm2, tmp_path):
    tokenizer, _, _ = smollm2
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.vocab_size, again.eos_ids, again.bos_id, again.pad_id) == (49152, (2,), 1, 2)
    text = "Compute 17 + 25 - 8.\n  naïve 漢字"
    for system in ["", "Be brief."]:
        ids = [t.encode_prompt(text, chat_template=True, system_prompt=system) for t in (tokenizer, again)]
        assert ids[0] == ids[1]


def test_a_gguf_holds_the_model_of_the_folder_it_was_made_from(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    arch, theirs = gguf.read_architecture(path), hf.read_architecture(TINY)
    assert arch == gguf.Architecture(**{**vars(theirs), "rope_scaling": None})
    expected = hf.load_params(TINY, Model(theirs), make_mesh())
    assert_same(load(path, make_mesh()), expected)
    assert_same(load(path, make_mesh(data=2, fsdp=2, tensor=2)), expected)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
@pytest.mark.parametrize("kind", [None, "linear", "none"])
def test_a_factor_of_rope_without_a_type_is_linear(tmp_path, key, kind):
    """As in llama.cpp. The result is the same with an explicit type, and "none" ignores the factor."""

    def change(writer, tensors):
        writer.add_float32(f"llama.{key}", 4.0)
        if kind:
            writer.add_string("llama.rope.scaling.type", kind)

    arch = gguf.read_architecture(write_tiny(tmp_path / "tiny.gguf", change=change))
    assert arch.rope_scaling == (None if kind == "none" else RopeScaling("linear", (("factor", 4.0),)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_parameters_do_not_depend_on_the_mesh(tmp_path, kind):
    # Blocks run over 32 columns, and the shards of fsdp=8 split them.
    path = write_tiny(tmp_path / "tiny.gguf", quantise=gguf_package.GGMLQuantizationType[kind])
    params = load(path, make_mesh())
    assert_same(load(path, make_mesh(fsdp=8)), params)
    assert_same(load(path, make_mesh(fsdp=2, tensor=2)), params)
    exact = hf.load_params(TINY, Model(hf.read_architecture(TINY)), make_mesh())
    # Half a step of 1/127 or 1/15 of a block's range, plus the float16 of its scale; weights reach 0.9.
    bound = {"Q8_0": 0.5 / 127, "Q4_1": 1.1 / 15, "F16": 2**-11, "BF16": 2**-30}[kind] * 1.1
    jax.tree.map(lambda x, want: np.testing.assert_allclose(x, want, atol=bound), params, exact)


def test_a_file_without_a_head_is_tied(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf", change=lambda writer, tensors: tensors.pop("output.weight"))
    assert gguf.read_architecture(path).tied
    assert "head" not in load(path, make_mesh())


def _with(name, value):
    return lambda writer, tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, t: t.pop("blk.1.ffn_up.weight"), ["blk.1.ffn_up.weight"]),
        (_with("blk.0.attn_norm.weight", np.ones(31, np.float32)), ["blk.0.attn_norm.weight", "(31,)", "(32,)"]),
        (_with("blk.0.attn_q.bias", np.ones(48, np.float32)), ["blk.0.attn_q.bias", "llama"]),
        (_with("rope_freqs.weight", np.ones(6, np.float32)), ["scaled rope"]),
        (_with("blk.0.ffn_norm.weight", np.ones(32, np.int32)), ["blk.0.ffn_norm.weight", "I32"]),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(tmp_path, change, words):
    path = write_tiny(tmp_path / "tiny.gguf", change=change)
    with raises_with(ConfigError, str(path), *words):
        load(path, make_mesh())


def test_unreadable_files_are_named(tmp_path):
    good = write_tiny(tmp_path / "good.gguf").read_bytes()
    for name, content in {"cut": good[:-100], "header": good[:200], "text": b"not a model", "empty": b""}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with raises_with(ConfigError, str(path), "GGUF"):
            gguf.read_architecture(path)
    with raises_with(ConfigError, str(tmp_path / "none.gguf")):
        gguf.read_architecture(tmp_path / "none.gguf")


def test_other_architectures_and_tokenizers_are_refused(tmp_path):
    writer = gguf_package.GGUFWriter(tmp_path / "q.gguf", "qwen2")
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refused("general.architecture", "qwen2", "llama"):
        gguf.read_architecture(tmp_path / "q.gguf")
    with refused("tokenizer.ggml.model", "t5", "llama", "gpt2", "gpt-2", "smollm"):
        gguf.read_tokenizer(tmp_path / "q.gguf")


# ---- Tokenizers: those of tests/fixtures/tokenizers, which are beginnings of public ones -----------------------------

AWKWARD = ["", " ", "  a  b\n\n\tc .", "The 17th answer, x² = 4: naïve?", "\tdef f(x):\n    return x  # 3.14"]
AWKWARD += [
    "日本語 🙂 ١٢٣ 1234567",
    " two  spaces ",
    "I'm we'LL in '12345'S",
    "e\u0301 A\u030a \ufb01",
    "\r\n e \r\n\r\n  x",
]
AWKWARD += [
    "🙂\u200d🙂 \0\x7f",
    "한국어 ไทย",
    "<|im_start|>a<|im_end|> <think>b",
    "<s>hi</s> the<|eot_id|> house",
    "<0x0A>\u2581 ",
]
ROLES = {
    "qwen2": {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
    "llama-bpe": {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
    "llama": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
}


def tokenizer_file(tmp_path, kind, **how):
    core = gguf_files.read_core(FIXTURES / "tokenizers" / f"{kind}.json")
    how = {"pre": None if kind == "llama" else kind, "roles": ROLES[kind], "padding": 3, **how}
    return gguf_files.write_tokenizer(tmp_path / f"{kind}.gguf", core, **how)


@pytest.mark.parametrize("kind", ROLES)
def test_a_tokenizer_gives_the_ids_of_the_tokenizer_json_it_was_made_from(tmp_path, kind):
    published = tokenizers.Tokenizer.from_file(str(FIXTURES / "tokenizers" / f"{kind}.json"))
    ours = gguf.read_tokenizer(tokenizer_file(tmp_path, kind, chat_template=gguf.PLAIN_TEMPLATE))
    ours.save(tmp_path / "saved")
    merges_of = lambda tokenizer: json.loads(tokenizer.to_str())["model"]["merges"]
    assert merges_of(ours._fast.backend_tokenizer) == merges_of(published)
    assert ours.vocab_size == published.get_vocab_size()  # without the rows that no text comes to
    first = [] if kind == "qwen2" else [published.token_to_id(ROLES[kind]["bos"])]
    for text in AWKWARD:
        ids = published.encode(text, add_special_tokens=False).ids
        for tokenizer in (ours, load_tokenizer(tmp_path / "saved")):
            assert tokenizer.encode(text, special_tokens=True) == ids, text
            how = {"special_tokens": True, "system_prompt": ""}
            begun = first if ids[:1] != first else []  # a text may have a beginning of its own
            assert tokenizer.encode_prompt(text, chat_template=False, **how) == begun + ids, text
            assert tokenizer.encode_prompt(text, chat_template=True, **how) == ids, text
        assert raw(ours, ids) == published.decode(ids, skip_special_tokens=False)
    special = "".join(token.content for token in ours._special.values())
    spelled = ours.encode(special)  # of a user's text they are no tokens
    assert not ours._special.keys() & set(spelled) and raw(ours, spelled) == special


def test_a_file_says_how_its_texts_begin_and_end(tmp_path):
    read = lambda **flags: gguf.read_tokenizer(tokenizer_file(tmp_path, "llama", **flags))
    ids = lambda tokenizer: tokenizer.encode_prompt("hi", chat_template=False, system_prompt="")
    usual = read()
    bos, eos, bare = usual.bos_id, usual.end_id, usual.encode("hi")
    assert ids(usual) == [bos, *bare]
    assert ids(read(add_bos_token=False)) == bare
    assert ids(read(add_eos_token=True)) == [bos, *bare, eos]
    assert read(add_space_prefix=False).encode(" hi") == bare


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"pre": "tekken"}, ["tokenizer.ggml.pre='tekken'", "llama", "gpt2"]),
        ({"roles": {}, "add_bos_token": True}, ["begin or end with a token"]),
    ],
)
def test_a_tokenizer_that_cannot_be_read_says_why(tmp_path, how, words):
    path = tokenizer_file(tmp_path, "llama", **how)
    with raises_with(ConfigError, str(path), *words):
        gguf.read_tokenizer(path)
