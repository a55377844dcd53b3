"""Families of models compared with the numbers that transformers stored, and with transformers itself if torch exists.

The sampler's log-probs equal the learner's in every layout of rows and on every mesh.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from support import building, families, hybrids
from support.building import COMPLETION_TOKENS, CUBE, ONE, PROMPT_TOKENS, Sampling, make_prompts, make_sampler
from support.refusal import ANY, refused
from support.tiers import mostly_in

from jaxrl_llm.commands.generate import generate
from jaxrl_llm.config import SamplingConfig
from jaxrl_llm.learner import publish
from jaxrl_llm.models import blocks as block_forms
from jaxrl_llm.models import rope
from jaxrl_llm.models.architecture import Layer, RopeScaling
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.files import hybrids as hybrid_files
from jaxrl_llm.models.files.families import FAMILIES, config_of
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.row_logp import row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.types import Example, PromptBatch

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
STORED = json.loads((FIXTURES / "families.json").read_text()) | json.loads((FIXTURES / "hybrids.json").read_text())
STORED |= json.loads((FIXTURES / "families_of_experts.json").read_text())
CONFIGS = families.CONFIGS | hybrids.CONFIGS


PLAIN_CONFIGS = ("llama_yarn", "gemma3", "qwen3_moe")


@functools.cache
def arrays():
    return dict(np.load(FIXTURES / "families.npz")) | dict(np.load(FIXTURES / "hybrids.npz"))


def write(folder, name, **changes):
    """Write the folder of a family as transformers would save it."""
    config = {**STORED[name]["config"], **changes}
    of_gemma = config["model_type"] == "gemma3_text"
    of_hybrid = name in hybrids.CONFIGS
    made = (hybrids.weights if of_hybrid else functools.partial(families.weights, gemma=of_gemma))(
        STORED[name]["shapes"]
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(made, folder / "model.safetensors")
    return folder


def logp(model, params, tokens):
    """Return the log-probs [B,T-1] of every token except the first."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    with jax.default_matmul_precision("highest"):
        hidden, _ = model.forward(params, tokens, positions)
        of_all = jax.nn.log_softmax(hidden @ model.head(params).T)
    return jnp.take_along_axis(of_all[:, :-1], tokens[:, 1:, None], axis=2)[:, :, 0]


def stored_gradients(folder, gradients, model):
    """Return gradients by the names in files, through an export."""
    hf.export(gradients, model, make_byte_tokenizer(), folder)
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", mostly_in("slow", CONFIGS, plain=PLAIN_CONFIGS))
def test_log_probs_and_gradients_are_those_that_transformers_stored(tmp_path, name):
    model = Model(hf.read_architecture(write(tmp_path / "theirs", name)))
    mesh = building.mesh_of(ONE)
    params = hf.load_params(tmp_path / "theirs", model, mesh)
    assert sum(x.size for x in jax.tree.leaves(params)) == model.arch.num_params
    tokens = jnp.asarray(families.tokens_of(CONFIGS[name]), jnp.int32)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def mean(params):
        found = logp(model, params, tokens)
        return jnp.mean(found), found

    (_, ours), gradients = jax.jit(mean)(params)
    np.testing.assert_allclose(ours, arrays()[f"{name}.logp"], rtol=0, atol=4e-5)  # measured: 1.2e-5, of 8 nats
    of_file = stored_gradients(tmp_path / "gradients", gradients, model)
    expected = STORED[name]["gradients"]
    assert set(of_file) == set(expected) == set(STORED[name]["shapes"])
    for key, (along, length) in expected.items():
        # Measured: 1e-5 of its length. A bias of keys without rope changes no softmax: its gradient is rounding, 3e-9.
        atol = 1e-4 * length + 1e-7
        np.testing.assert_allclose(families.projections(key, of_file[key]), (along, length), rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_plain", "mixtral", "gpt_oss", "qwen3", *hybrids.CONFIGS])
def test_the_sampler_s_likeliest_tokens_are_those_that_transformers_stored(tmp_path, name):
    """The tokens are decoded one by one with caches; the stored tokens were computed without caches."""
    model = Model(hf.read_architecture(write(tmp_path / "theirs", name)))
    params = hf.load_params(tmp_path / "theirs", model, building.mesh_of(ONE))
    (row, _), stored = families.tokens_of(CONFIGS[name]), arrays()[f"{name}.greedy"][:COMPLETION_TOKENS]
    sizes = dict(num_prompts=1, group_size=1, num_slots=1, max_prompt_tokens=len(row), chunk_steps=8)
    sampler = make_sampler(arch=model.arch, sampling={"temperature": 0.0}, **sizes)
    sampler = dataclasses.replace(sampler, eos_ids=())
    sampling = Sampling(sampler)
    sampling.params = publish.sampler_form(params, model.arch)
    length = np.array([len(row)], np.int32)
    prompts = PromptBatch(row[None].astype(np.int32), length, np.zeros(1, np.int32), (Example("", {}),))
    with jax.default_matmul_precision("highest"):
        rollout, _ = sampling(prompts)
    np.testing.assert_array_equal(rollout.tokens[0, len(row) :], stored)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_is_the_same_folder_again(tmp_path, name):
    model = Model(hf.read_architecture(write(tmp_path / "theirs", name)))
    mesh = building.mesh_of(CUBE)
    params = hf.load_params(tmp_path / "theirs", model, building.mesh_of(ONE))
    hf.export(params, model, make_byte_tokenizer(), tmp_path / "ours")
    assert hf.read_architecture(tmp_path / "ours") == model.arch
    ours, theirs = (safetensors.numpy.load_file(tmp_path / x / "model.safetensors") for x in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    for key, x in theirs.items():
        np.testing.assert_array_equal(ours[key], x)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (
        STORED[name]["config"]["model_type"],
        [FAMILIES[config["model_type"]].class_name],
    )
    if model.arch.num_kv_heads % 2 == 0:  # sharded, it is read to the same
        sharded = hf.load_params(tmp_path / "ours", model, mesh)
        jax.tree.map(np.testing.assert_array_equal, sharded, params)


@pytest.mark.parametrize("name", mostly_in("slow", CONFIGS, plain=0))
def test_greedy_completions_are_those_that_transformers_stored(tmp_path, name):
    """The command generate with a prompt longer than every window: prefill, cache and sampler at temperature 0."""
    write(tmp_path / "theirs", name)
    prompt = families.tokens_of(CONFIGS[name])[0].tolist()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_ids": prompt}) + "\n")
    theirs = tmp_path / "theirs"
    load = lambda model, mesh, *, seed: hf.load_params(theirs, model, mesh)
    arch = lambda: hf.read_architecture(theirs)
    source = Source(arch, make_byte_tokenizer, lambda model, mesh: None, load)
    expected = arrays()[f"{name}.greedy"].tolist()
    sampling = SamplingConfig(temperature=0.0, max_completion_tokens=len(expected))
    how = dict(sampling=sampling, ignore_eos=True, batch_size=1, seed=0, compute_dtype="float32")
    (row,) = generate(source, str(tmp_path / "prompts.jsonl"), **how)
    assert row["completion_ids"] == expected


HYBRID = hybrids.tiny(building.TINY)
# Of building.TINY's sizes: queries and keys split over two devices. Rows are of 14 tokens, completions of 8.
KINDS = {
    "qwen": dict(qkv_bias=True, qk_norm="head", o_bias=True, mlp_bias=True),
    "window": dict(layers=(Layer(window=3),) * 2),
    "wide_window": dict(layers=(Layer(window=6),) * 2),
    "no_rope": dict(num_layers=3, layers=(Layer(window=5), Layer(rope=-1), Layer(window=5))),
    "olmo2": dict(qk_norm="all", pre_norm=False, post_norm=True),
    "gemma3": dict(
        **dict(qk_norm="head", post_norm=True, norm_offset=1.0, activation="gelu_tanh", score_width=9.0),
        **dict(embedding_scale=4.0, num_layers=3, layers=(Layer(4, 1), Layer(4, 1), Layer())),
    ),
    "sinks": dict(sinks=True, o_bias=True, num_layers=3, layers=(Layer(window=5), Layer(), Layer(window=5))),
    "delta": {x.name: getattr(HYBRID, x.name) for x in dataclasses.fields(HYBRID)},
    "experts": dict(
        num_experts=6, experts_per_token=3, norm_topk=True, ffn=12, experts_bias=True, glu_limit=0.3, shared_ffn=10
    ),
    "yarn": dict(rope_scaling=RopeScaling("yarn", (("factor", 4.0), ("original_max_position_embeddings", 4)))),
}


# Of rows as the learner lays them beside rows apart: positions a line, if any, and rows of a group.
LAYOUTS = {
    "groups": (0, 3),
    "lines": (6 * building.ROW_TOKENS, 1),
    "lines of groups": (2 * (PROMPT_TOKENS + 3 * COMPLETION_TOKENS), 3),
}


@pytest.mark.tier("slow")  # plain: test_generator.test_sampler_logp_is_the_learners_...; test_delta.py
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("delta", ["lines of groups"], id="delta"),
        *(pytest.param(name, [*LAYOUTS], marks=pytest.mark.slow, id=f"{name}, all layouts") for name in KINDS),
    ],
)
def test_sampler_logp_is_the_learners_of_rows_of_groups_and_of_lines(name, layouts):
    arch = dataclasses.replace(building.TINY, **KINDS[name])
    # 5 slots for 24 rollouts and chunks of 3 steps: slots refill again and again, and caches come round.
    sampler = make_sampler(arch=arch, num_slots=5, chunk_steps=3)
    sampling = Sampling(sampler)
    rollout, _ = sampling(make_prompts(range(8)))
    rows = (rollout.tokens, rollout.prompt_length, rollout.length)
    how = dict(sampling=sampler.sampling, completion_width=COMPLETION_TOKENS, chunk_positions=3)
    params = building.learner_params(sampler.model, building.mesh_of(ONE))

    def learner(rows, **layout):
        return jax.jit(functools.partial(row_logp, sampler.model, **how, **layout))(params, *rows).logp

    apart = learner(rows)
    np.testing.assert_allclose(rollout.behaviour_logp, apart, rtol=0, atol=1e-5)  # measured 3e-6
    lines = tuple(x.reshape(4, 6, *x.shape[1:]) for x in rows)  # two groups a line
    for width, group_size in (LAYOUTS[layout] for layout in layouts):
        found = learner(lines, line_width=width, group_size=group_size) if width else learner(rows, group_size=3)
        np.testing.assert_allclose(found, apart, rtol=0, atol=1e-5)


# What the model reads in float32, whatever it computes in.
FINE = ("norm", "router", "sinks", "experts_down_bias", "delta_rate", "delta_bias")


def test_what_is_read_in_float32_is_published_as_the_learner_has_it():
    """Matrices have bfloat16 values here and these parameters do not. In float32, a lost bit would show."""
    model, mesh = Model(dataclasses.replace(HYBRID, sinks=True, **KINDS["experts"]), "bfloat16"), building.mesh_of(ONE)
    coarse = lambda path, x: x if any(of in path[-1].key for of in FINE) else x.astype(jnp.bfloat16).astype(x.dtype)
    params = jax.tree_util.tree_map_with_path(coarse, building.host_params(model))
    params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, model.abstract_params(mesh)))
    published = compile_all(publish.programs(model, mesh, mesh), mesh)["publish"](params)
    published = jax.tree.map(lambda x: x.astype(jnp.float32), published)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, building.TINY.vocab_size, (4, 14)), jnp.int32)
    ours, theirs = (jax.jit(functools.partial(logp, Model(model.arch)))(x, tokens) for x in (params, published))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)  # 0.05 where these are rounded too


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no_rope", "olmo2", "gemma3", "qwen", "sinks", "delta"])
def test_a_mesh_gives_the_same_completions_and_gradients(name):
    """Heads, their norms and biases are split over two devices; rows and widths over two more each."""
    arch = dataclasses.replace(building.TINY, **KINDS[name])
    samplers = [make_sampler(mesh, arch=arch, num_slots=8, chunk_steps=3) for mesh in (ONE, CUBE)]
    rollouts = [Sampling(sampler)(make_prompts(range(8)))[0] for sampler in samplers]
    assert building.completions(rollouts[0]) == building.completions(rollouts[1])
    rows = (rollouts[0].tokens, rollouts[0].prompt_length, rollouts[0].length)

    def gradient(mesh):
        model = Model(arch)

        def total(params):
            how = dict(sampling=samplers[0].sampling, completion_width=COMPLETION_TOKENS, chunk_positions=3)
            return jnp.mean(row_logp(model, params, *rows, group_size=3, remat=True, **how).logp)

        with jax.set_mesh(building.mesh_of(mesh)):
            found = jax.jit(jax.grad(total))(building.learner_params(model, building.mesh_of(mesh)))
        return jax.tree.map(np.asarray, found)

    one, cube = gradient(ONE), gradient(CUBE)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(one))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale), one, cube)


@pytest.mark.parametrize("kinds", ["ababa", "abcabc", "abb", "aaaa", "ab"])
def test_layers_of_several_kinds_are_run_one_after_the_other_and_their_gradient_adds_to_a_ref(kinds):
    """The learner adds the gradient of every micro-batch in place. Compared with a loop over layers."""
    names = {"a": Layer(), "b": Layer(window=2), "c": Layer(rope=-1)}
    layers = tuple(names[kind] for kind in kinds)
    acts = {names["a"]: jnp.sin, names["b"]: jnp.cos, names["c"]: jnp.tanh}
    w = np.random.default_rng(0).normal(size=(len(kinds), 3)).astype(np.float32)

    def block(act, x, w):
        return act(x * w), x

    def scanned(w):
        blocks = {layer: functools.partial(block, acts[layer]) for layer in dict.fromkeys(layers)}
        x, made = block_forms.scan(blocks, layers, jnp.ones(3), w)
        return jnp.sum(x) + jnp.sum(made * made), made

    def looped(w):
        x, made = jnp.ones(3), []
        for i, layer in enumerate(layers):
            made.append(x)
            x = acts[layer](x * w[i])
        return jnp.sum(x) + jnp.sum(jnp.stack(made) ** 2), jnp.stack(made)

    def added(w):
        ref = jax.ref.new_ref(jnp.ones_like(w))
        _, backward, made = jax.vjp(scanned, w, has_aux=True)
        backward.with_refs(ref)(jnp.float32(1))
        return jax.ref.freeze(ref), made

    gradient, made = jax.jit(added)(w)
    expected, expected_made = jax.grad(looped, has_aux=True)(w)
    np.testing.assert_allclose(made, expected_made, rtol=1e-6)
    np.testing.assert_allclose(gradient, 1 + expected, rtol=1e-5, atol=1e-6)


def test_a_window_s_cache_holds_the_window():
    arch = dataclasses.replace(building.TINY, num_layers=3, layers=(Layer(window=16), Layer(), Layer(window=64)))
    sampler = make_sampler(arch=arch, sampling={"max_completion_tokens": 40})
    state = sampler.abstract_state()
    for cache, places_axis in ((state.cache_k, 3), (state.cache_v, 2)):
        assert [sum(block.shape[places_axis] for block in blocks) for blocks in cache] == [16, 40, 40]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama_swish", {"logit_scale": 0.5}, ("logit_scale", 0.5, "model_type='llama'")),
        ("llama_swish", {"no_rope_layers": [1, 0, 1]}, ("no_rope_layers", [1, 0, 1])),
        (
            "llama_swish",
            {"quantization_config": {"quant_method": "gptq"}},
            ("quantization_config", {"quant_method": "gptq"}),
        ),
        ("llama_swish", {"sliding_window": 9}, ("sliding_window", 9, "model_type='llama'")),
        ("llama_swish", {"is_causal": False}, ("is_causal", False)),
        ("gemma3", {"is_causal": None}, ("is_causal", None)),
        ("qwen3_next", {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ("qwen3_5_experts", {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ("qwen3_5", {"hidden_act": "relu"}, ("hidden_act", "relu")),
        ("mistral_window", {"layer_types": ["full_attention"] * 3}, ("layer_types",)),
        ("mistral_window", {"sliding_window": 2.5}, ("sliding_window", 2.5)),
        ("qwen2", {"attention_bias": True}, ("attention_bias", True, "model_type='qwen2'")),
        ("qwen2", {"use_sliding_window": "yes"}, ("use_sliding_window", "yes")),
        ("qwen3", {"layer_types": ["full_attention"]}, ("layer_types", ["full_attention"], "3")),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention", 3]},
            ("layer_types", ANY, "chunked_attention"),
        ),
        ("qwen3", {"hidden_act": ["silu"]}, ("hidden_act", ["silu"], "silu, swish")),
        ("qwen3", {"num_experts": 8}, ("num_experts", 8, "model_type='qwen3'")),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ("decoder_sparse_step", 2)),
        ("qwen3_moe", {"mlp_only_layers": [1]}, ("mlp_only_layers", [1])),
        ("qwen3_moe", {"num_experts_per_tok": 0}, ("num_experts_per_tok", 0)),
        ("qwen3_moe", {"num_local_experts": "7"}, ("num_experts", "7")),
        ("qwen3_moe", {"norm_topk_prob": 1}, ("norm_topk_prob", 1)),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 8},
            ("shared_expert_intermediate_size", 8, "model_type='qwen3_moe'"),
        ),
        ("mixtral", {"moe_intermediate_size": 8}, ("moe_intermediate_size", 8, "model_type='mixtral'")),
        ("gpt_oss", {"swiglu_alpha": 1.0}, ("swiglu_alpha", 1.0)),
        ("gpt_oss", {"swiglu_limit": 0}, ("swiglu_limit", 0)),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            ("quantization_config", {"quant_method": "awq"}, "'mxfp4'"),
        ),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 2]}, ("no_rope_layers", [1, 0, 1, 0, 2], "5")),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, ("no_rope_layer_interval", 0)),
        ("gemma3", {"final_logit_softcapping": 30.0}, ("final_logit_softcapping", 30.0, "model_type='gemma3_text'")),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping", 50.0, "model_type='gemma3_text'")),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            ("use_bidirectional_attention", True, "model_type='gemma3_text'"),
        ),
        ("gemma3", {"query_pre_attn_scalar": "9"}, ("query_pre_attn_scalar", "9")),
        ("gemma3", {"model_type": "gemma3"}, ("model_type", "gemma3")),
        (
            "llama_yarn",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "ext": 1}},
            ("ext", 1, "'yarn'", "truncate"),
        ),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0}}, ("factor",)),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, ("truncate", 1)),
        ("llama_yarn", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", 0.5)),
        ("llama_yarn", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", 0.5, "model_type='llama'")),
        (
            "llama_longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 5}},
            ("short_factor", [1.0] * 4, "5"),
        ),
    ],
)
def test_what_may_change_the_computation_and_is_not_known_is_refused(tmp_path, name, changes, named):
    with refused(*named) as caught:
        hf.read_architecture(write(tmp_path / "model", name, **changes))
    assert str(tmp_path / "model" / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_what_changes_nothing_is_let_pass(tmp_path):
    inert = {"unsloth_version": "2025.1", "transformers.js_config": {"dtype": "q4"}, "_name_or_path": "x"}
    inert |= {"use_mrope": False, "rope_interleaved": False, "quantization_config": None, "use_cache": True}
    plain, noisy = (write(tmp_path / x, "qwen2", **keys) for x, keys in (("plain", {}), ("noisy", inert)))
    assert hf.read_architecture(noisy) == hf.read_architecture(plain)


def together(tensors):
    """Return tensors in Qwen3.5's released form: an expert's first rows are the gate, the second half is up."""
    found = {name: x for name, x in tensors.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        of = lambda e, part, block=block: tensors[f"{block}.experts.{e}.{part}_proj.weight"]
        experts = range(sum(name.startswith(f"{block}.experts.") and "up_proj" in name for name in tensors))
        found[f"{block}.experts.gate_up_proj"] = np.stack(
            [np.concatenate([of(e, "gate"), of(e, "up")]) for e in experts]
        )
        found[f"{block}.experts.down_proj"] = np.stack([of(e, "down") for e in experts])
    return found


@pytest.mark.parametrize(("kind", "name"), [("qwen3_5", "qwen3_5"), ("qwen3_5_moe", "qwen3_5_experts")])
def test_of_a_model_that_sees_images_too_the_one_of_texts_is_read(tmp_path, kind, name):
    """As Qwen3.5 was released, with the keys of its files. An export contains only the text model."""
    said = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mlp_only_layers": []}
    said |= {"mtp_use_dedicated_embeddings": False}
    plain, seeing = write(tmp_path / "plain", name), write(tmp_path / "seeing", name)
    text = json.loads((plain / "config.json").read_text()) | said
    whole = {"model_type": kind, "text_config": text, "vision_config": {"depth": 2}, "image_token_id": 3}
    (seeing / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in together(tensors).items()}
    renamed |= {"model.visual.blocks.0.norm1.weight": np.ones(3, np.float32), "mtp.fc.weight": np.ones(2, np.float32)}
    safetensors.numpy.save_file(renamed, seeing / "model.safetensors")
    told = {"eos_token_id": 7}
    given = [whole | {"text_config": text | told}, whole | told, text | told, whole | {"text_config": {}}]
    assert [hybrid_files.ends_of(x) for x in given] == [7, 7, 7, None]
    model, mesh = Model(hf.read_architecture(seeing)), building.mesh_of(ONE)
    assert model.arch == hf.read_architecture(plain)
    hf.check_weights(seeing, model, mesh)
    params = hf.load_params(seeing, model, mesh)
    jax.tree.map(np.testing.assert_array_equal, params, hf.load_params(plain, model, mesh))
    hf.export(params, model, make_byte_tokenizer(), tmp_path / "ours", like=seeing)
    assert set(safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")) == set(tensors)
    # Each in the dtype that it has there, where experts lie together.
    halves = {name: x.astype(np.float16) for name, x in renamed.items()}
    safetensors.numpy.save_file(halves, seeing / "model.safetensors")
    hf.export(params, model, make_byte_tokenizer(), tmp_path / "half", like=seeing)
    half = safetensors.numpy.load_file(tmp_path / "half" / "model.safetensors")
    assert {x.dtype for x in half.values()} == {np.dtype(np.float16)} and set(half) == set(tensors)
    with refused("attn_output_gate", False):
        hf.read_architecture(write(tmp_path / "other", "qwen3_5", attn_output_gate=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_number_that_is_absent_is_what_transformers_takes(name):
    import transformers

    theirs = transformers.AutoConfig.for_model(name, use_sliding_window=True).to_dict()
    ours = {key: value for key, value in FAMILIES[name].keys.items() if type(value) in (int, float) and key in theirs}
    assert ours and ours == {key: theirs[key] for key in ours}


def test_older_spellings_mean_the_same(tmp_path):
    """The keys of transformers 4: rope bases and scaling as separate keys, the pattern of windows as a number."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = dict(rope_theta=700.0, rope_local_base_freq=40.0, rope_scaling=scaling, rope_parameters=None)
    old |= dict(sliding_window_pattern=3, layer_types=None)
    new, older = write(tmp_path / "new", "gemma3"), write(tmp_path / "old", "gemma3", **old)
    assert hf.read_architecture(older) == hf.read_architecture(new)
    no_rope = write(tmp_path / "listed", "smollm3", no_rope_layers=[1, 0, 1, 0, 1], no_rope_layer_interval=7)
    assert hf.read_architecture(no_rope) == hf.read_architecture(write(tmp_path / "interval", "smollm3"))


@pytest.mark.parametrize(
    ("name", "windows"), [("qwen2", [0, 4096, 4096]), ("qwen3", [0, 4096, 4096]), ("qwen3_moe", [4096, 4096])]
)
def test_a_window_that_is_used_and_not_stated_is_of_4096_tokens(tmp_path, name, windows):
    """4096 is the default of transformers' classes; without ``use_sliding_window`` it has no effect."""
    said = dict(use_sliding_window=True, max_window_layers=1, num_hidden_layers=len(windows))
    path = write(tmp_path / "model", name, **said) / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("sliding_window", "layer_types")}
    path.write_text(json.dumps(config))
    assert [layer.window for layer in hf.read_architecture(path.parent).by_layer] == windows
    path.write_text(json.dumps(config | {"use_sliding_window": False, "is_causal": True}))
    assert hf.read_architecture(path.parent).layers == ()


def test_a_row_is_no_longer_than_the_frequencies_hold(tmp_path):
    """Beyond its original context, longrope has other frequencies from the start.

    So 128 of the 256 positions are served.
    """
    arch = hf.read_architecture(write(tmp_path / "model", "llama_longrope"))
    assert arch.max_positions == 128
    assert config_of(arch)["max_position_embeddings"] == 256
    # sqrt(1 + ln(256 / 128) / ln(128))
    np.testing.assert_allclose(rope.frequencies(arch)[1], 1.0690449676496976, rtol=1e-12)


@pytest.mark.parametrize("name", ["llama_yarn", "yarn_without_original", "llama_longrope"])
def test_transformers_reads_the_rope_of_an_export_as_it_read_the_model_s(tmp_path, name):
    """Version 5 is tested here.

    Version 4.56 (modeling_rope_utils) reads longrope's original context only outside rope_scaling.
    """
    import transformers

    changes, original = {}, {"llama_yarn": 48, "llama_longrope": 128}.get(name)
    if original is None:
        changes = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 700.0, "factor": 5.0}}
    theirs = write(tmp_path / "theirs", "llama_longrope" if name == "llama_longrope" else "llama_yarn", **changes)
    arch = hf.read_architecture(theirs)
    written = config_of(arch)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(written))
    before, after = (transformers.AutoConfig.from_pretrained(tmp_path / x) for x in ("theirs", "ours"))
    stated = {"factor": 2.0} if name == "llama_longrope" else {}  # 256 / 128, which their file does not state
    assert after.rope_parameters == before.rope_parameters | stated
    assert after.max_position_embeddings == before.max_position_embeddings == 256
    assert written["rope_scaling"].get("original_max_position_embeddings") == original
    beside = original if name == "llama_longrope" else None
    assert written.get("original_max_position_embeddings") == beside
    after.save_pretrained(tmp_path / "again")
    assert hf.read_architecture(tmp_path / "again") == arch


def test_a_gpt_oss_with_plain_rope_is_exported_with_plain_rope(tmp_path):
    """Without a key about rope, the family's default would be YaRN."""
    import transformers

    plain = {"rope_type": "default", "rope_theta": 700.0}
    arch = hf.read_architecture(write(tmp_path / "theirs", "gpt_oss", rope_parameters=plain))
    assert arch.rope_scaling is None
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config_of(arch)))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").rope_parameters == plain
    assert hf.read_architecture(tmp_path / "ours") == arch


def test_a_tied_model_s_stored_head_is_its_embedding(tmp_path):
    """As in transformers: a different head would not be tied."""
    folder = write(tmp_path / "model", "qwen2")
    model, mesh = Model(hf.read_architecture(folder)), building.mesh_of(ONE)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    safetensors.numpy.save_file({**tensors, "lm_head.weight": table}, folder / "model.safetensors")
    hf.check_weights(folder, model, mesh)
    other = table.copy()
    other[-1, -1] += 1
    for name, head in (("other", other), ("short", table[:-1])):
        folder = write(tmp_path / name, "qwen2")  # of its own: what two tables are is known by the time of their file
        safetensors.numpy.save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
        for read in (hf.check_weights, hf.load_params):
            with refused("tie_word_embeddings=true", ANY, "lm_head.weight", "model.embed_tokens.weight"):
                read(folder, model, mesh)


@pytest.mark.torch
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same_of_long_rows_before_loading_and_after_export(tmp_path, name):
    """Rows of up to 1,500 tokens test windows, frequencies and blocks of queries far from the start."""
    torch = pytest.importorskip("torch")
    import transformers

    settings = {**CONFIGS[name], "max_position_embeddings": 2048, "initializer_range": 0.2}
    own = transformers.AutoConfig.for_model(**settings)
    own._experts_implementation = "eager"  # the grouped one wants sizes of multiples of 16 bytes
    theirs = transformers.AutoModelForCausalLM.from_config(own, attn_implementation="eager").eval()
    torch.manual_seed(1)
    for key, parameter in theirs.named_parameters():
        if "norm" in key or "bias" in key:
            torch.nn.init.normal_(parameter, float("norm" in key and "gemma" not in settings["model_type"]), 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    model = Model(hf.read_architecture(tmp_path / "theirs"))
    length = min(1500, model.arch.max_positions)
    tokens = np.random.default_rng(2).integers(0, settings["vocab_size"], (1, length))

    def of(network):
        with torch.no_grad():
            each = torch.log_softmax(network(torch.from_numpy(tokens)).logits, dim=-1)
        return np.take_along_axis(each.numpy()[:, :-1], tokens[:, 1:, None], axis=2)[:, :, 0]

    before = of(theirs)
    params = hf.load_params(tmp_path / "theirs", model, building.mesh_of(ONE))
    ours = jax.jit(functools.partial(logp, model))(params, jnp.asarray(tokens, jnp.int32))
    # What the delta rule gives may be nearly all rounding, which the norm after it makes large: of some tokens. With
    # chunks of 16 in place of 64, transformers' own log-probs differ by 5e-4; measured here 1.3e-3.
    np.testing.assert_allclose(ours, before, rtol=0, atol=4e-3 if name in hybrids.CONFIGS else 1e-4)
    assert np.quantile(np.abs(ours - before), 0.95) < 1e-4
    hf.export(params, model, make_byte_tokenizer(), tmp_path / "ours")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert type(back) is type(theirs)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    np.testing.assert_allclose(of(back), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3_next_experts", {"mlp_only_layers": [1]}, ("mlp_only_layers", [1], "decoder_sparse_step=1")),
        ("qwen3_next_experts", {"decoder_sparse_step": 2}, ("decoder_sparse_step", 2)),
        ("qwen3_next_experts", {"mlp_only_layers": 1}, ("mlp_only_layers", 1)),
        ("qwen3_5_experts", {"shared_expert_intermediate_size": 0}, ("shared_expert_intermediate_size", 0)),
        ("qwen3_next", {"linear_num_value_heads": 3}, ("value_heads", 3)),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, ("taps", 1)),
        ("qwen3_5", {"linear_key_head_dim": None}, ("linear_key_head_dim", None)),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 5}, ("layer_types", ANY, "5")),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_theta": 10, "partial_rotary_factor": 0.2}},
            ("partial_rotary_factor", 0.2, "3"),
        ),
    ],
)
def test_sizes_of_a_delta_rule_are_checked(tmp_path, name, changes, named):
    with refused(*named):
        hf.read_architecture(write(tmp_path / "theirs", name, **changes))
