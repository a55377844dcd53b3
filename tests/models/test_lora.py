"""Adapters: their output over a frozen base, their initial values, their files in PEFT's format."""

import dataclasses
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
import safetensors.numpy
from reference import transformer as oracle
from support import building, families, hybrids
from support.building import CUBE, ONE, TINY, mesh_of
from support.refusal import ANY, raises_with, refused

from jaxrl_llm.config import ConfigError, freeze
from jaxrl_llm.learner import publish
from jaxrl_llm.method_config import LORA_TARGETS, LoraConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.architecture import PRESETS, Layer
from jaxrl_llm.models.files import hf, peft, pretrained
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.transformer import Model, linear
from jaxrl_llm.runtime.programs import compile_all

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"
LLAMA, ADAPTERS = FIXTURES / "tiny_llama", FIXTURES / "adapters"
SOME = LoraConfig(rank=2, alpha=3.0, targets=("q", "down"))
ALL = LoraConfig(rank=4, alpha=2.0, rank_stabilised=True)
DORA = LoraConfig(rank=3, alpha=6.0, dora=True, targets=("k", "o", "up"))


def logits_of(model, params, tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    hidden, _ = model.forward(params, tokens, positions)
    return np.asarray(hidden @ model.head(params).T)


def merged_by_hand(blocks, name, s):
    """Return W + s B A of every layer in float64. With an m, each output's row is scaled to its length."""
    a, b = (np.asarray(blocks[f"{name}_lora_{x}"], np.float64) for x in "ab")
    experts = "E" if "experts" in name else ""
    letters = {"o": "Ldr,Lrnh->Ldnh"}.get(
        name, "Lnhr,Lrd->Lnhd" if name in "qkv" else f"L{experts}or,Lri->L{experts}oi"
    )
    letters = letters.replace(",Lr", f",L{experts}r")
    merged = blocks[name] + s * np.einsum(letters, b, a)
    if f"{name}_lora_m" not in blocks:
        return merged
    inputs = (2, 3) if name == "o" else -1
    m = np.asarray(blocks[f"{name}_lora_m"], np.float64)
    return (
        m.reshape(*m.shape[:-1], *(1,) * np.size(inputs)) * merged / np.linalg.norm(merged, axis=inputs, keepdims=True)
    )


@pytest.mark.parametrize(
    ("config", "s"),
    [
        (LoraConfig(rank=4, alpha=6.0), 1.5),
        (LoraConfig(rank=4, alpha=6.0, rank_stabilised=True), 3.0),
        (LoraConfig(rank=4, alpha=6.0, dora=True), 1.5),
    ],
)
def test_adapters_add_s_times_b_a_and_merging_them_is_the_same(config, s):
    model = Model(TINY, lora=config)
    params = building.host_params(model)
    learned, base = lora.split(params)
    blocks = dict(base["blocks"])
    for name in LORA_TARGETS:
        blocks[name] = merged_by_hand(params["blocks"], name, s)
    tokens = np.random.default_rng(1).integers(0, TINY.vocab_size, (1, 9), np.int32)
    expected = oracle.logits({**base, "blocks": blocks}, TINY, tokens[0])
    largest = np.abs(expected).max()
    apart = logits_of(model, lora.join(learned, base), tokens)[0]
    merged = lora.merge(learned, base, config)
    np.testing.assert_allclose(apart, expected, atol=1e-5 * largest)
    np.testing.assert_allclose(logits_of(model.base, merged, tokens)[0], expected, atol=1e-5 * largest)
    np.testing.assert_allclose(merged["blocks"]["o"], blocks["o"], atol=1e-6)


MIXTURE = dict(num_experts=3, experts_per_token=2, norm_topk=True, ffn=12, shared_ffn=10, family="qwen3_next")


def test_experts_have_adapters_of_their_own_and_the_shared_one_has_none():
    config = LoraConfig(rank=4, alpha=6.0, targets=("k", "gate", "down"))
    model = Model(dataclasses.replace(TINY, **MIXTURE), lora=config)
    params = building.host_params(model)
    learned, base = lora.split(params)
    adapted = {name.removesuffix(lora.A) for name in learned["blocks"] if name.endswith(lora.A)}
    assert adapted == {"k", "experts_gate", "experts_down"}
    blocks = dict(base["blocks"])
    for name in adapted:
        assert learned["blocks"][f"{name}_lora_a"].shape[:-1] == (2, 3, 4) if "experts" in name else (2, 4)
        blocks[name] = merged_by_hand(params["blocks"], name, 1.5).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, TINY.vocab_size, (2, 9), np.int32)
    expected = logits_of(model.base, {**base, "blocks": blocks}, tokens)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(logits_of(model, lora.join(learned, base), tokens), expected, atol=1e-5 * largest)
    merged = lora.merge(learned, base, config)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), merged["blocks"], blocks)
    assert np.abs(logits_of(model.base, base, tokens) - expected).max() > 0.1 * largest


@pytest.mark.tier("slow")  # plain: test_experts_have_adapters_of_their_own_and_the_shared_one_has_none
def test_experts_adapters_are_served_beside_dora_of_other_matrices():
    """Experts have no magnitudes. A common configuration has magnitudes only for ``k``."""
    arch, mesh = dataclasses.replace(TINY, **MIXTURE), mesh_of(ONE)
    configs = LoraConfig(rank=4, alpha=6.0, targets=("gate", "down")), LoraConfig(rank=2, dora=True, targets=("k",))
    both = Model(arch, lora=lora.common(configs))
    tokens = np.random.default_rng(1).integers(0, TINY.vocab_size, (2, 9), np.int32)
    for config in configs:
        alone = Model(arch, lora=config)
        params = building.host_params(alone)
        learned, base = lora.split(params)
        fitted = lora.fit(learned, config, both.abstract_params(mesh), both.lora, base)
        assert [name for name in fitted["blocks"] if name.endswith("_m")] == ["k_lora_m"]
        expected = logits_of(alone, params, tokens)
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(logits_of(both, lora.join(fitted, base), tokens), expected, atol=atol)
        merged = lora.merge(learned, base, config)
        np.testing.assert_allclose(logits_of(alone.base, merged, tokens), expected, atol=atol)


# Those without magnitudes begin the same way, and are added as ``test_adapters_add_s_times_b_a`` says.
@pytest.mark.tier("slow")  # plain: test_adapters_add_s_times_b_a; test_magnitudes_reach_the_sampler_...
@pytest.mark.parametrize("dora", [False, True])
def test_new_adapters_change_no_bit_and_do_not_depend_on_the_mesh(dora):
    model = Model(TINY, lora=LoraConfig(rank=4, dora=dora))
    base = model.base.init(jax.random.key(0), mesh_of(ONE))
    learned = lora.init(model.abstract_params(mesh_of(ONE)), model.lora, base, seed=3)
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    adapted, plain = ((model, lora.join(learned, base)), (model.base, base))
    # No bit of what each matrix makes of random activations; of two whole programs XLA may round one another way.
    rng = np.random.default_rng(2)
    for target in LORA_TARGETS:
        own = adapted[1]["blocks"]
        parts = {name: own[name][1] for name in own if name.split("_lora_")[0] == target}
        assert len(parts) == 3 + dora
        x = rng.normal(size=(2, 6, parts[f"{target}_lora_a"][0].size)).astype(np.float32)
        block = types.SimpleNamespace(lora=model.lora, **parts)
        made = linear(x, parts[target])
        np.testing.assert_array_equal(lora.add(made, x, target, block, linear), made)
    np.testing.assert_allclose(logits_of(*adapted, tokens), logits_of(*plain, tokens), atol=1e-6)
    for name, x in learned["blocks"].items():
        if name.endswith("_b"):
            assert not np.any(x)
        elif name.endswith("_m"):
            w = np.asarray(base["blocks"][name.removesuffix("_lora_m")], np.float64)
            np.testing.assert_allclose(x[..., 0], np.linalg.norm(w.reshape(*x.shape[:-1], -1), axis=-1), rtol=1e-6)
        else:  # uniform: standard deviation of the bound over the root of 3
            bound = np.prod(x.shape[2:]) ** -0.5
            assert np.abs(x).max() <= bound
            assert np.std(x) == pytest.approx(bound / np.sqrt(3), rel=0.15)
    base_of_cube = model.base.init(jax.random.key(0), mesh_of(CUBE))
    other = lora.init(model.abstract_params(mesh_of(CUBE)), model.lora, base_of_cube, seed=3)
    for name, x in learned["blocks"].items():  # a norm's sum is over devices
        np.testing.assert_allclose(other["blocks"][name], x, rtol=1e-6 if name.endswith("_m") else 0, err_msg=name)
    assert "tensor" in str(other["blocks"]["q_lora_b"].sharding.spec)
    of_seed_4 = lora.init(model.abstract_params(mesh_of(ONE)), model.lora, base, seed=4)
    assert np.any(of_seed_4["blocks"]["q_lora_a"] != learned["blocks"]["q_lora_a"])


@pytest.mark.parametrize("mesh", [pytest.param(ONE, marks=pytest.mark.slow), CUBE])
def test_magnitudes_reach_the_sampler_as_they_do_the_learner(mesh):
    """The sampler computes no norm.

    The published value is the part of a product that is added, in the compute dtype.
    """
    model, mesh = Model(TINY, lora=DORA), mesh_of(mesh)
    learned, base = lora.split(building.learner_params(model, mesh))
    publishing = compile_all(publish.programs(model, mesh, mesh), mesh)
    published = lora.join(publishing["publish"](learned, base), publishing["publish_base"](base))
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    expected = logits_of(model, building.host_params(model), tokens)
    np.testing.assert_allclose(logits_of(model, published, tokens), expected, atol=1e-5 * np.abs(expected).max())
    assert published["layers"][1]["k_lora_m"].shape == (8,)


@pytest.mark.tier("slow")  # plain: test_magnitudes_reach_the_sampler_as_they_do_the_learner
def test_a_row_of_zeros_stays_so_under_magnitudes():
    """Norm and m are 0, as ``init`` sets them. Files of pruned models have such rows."""
    model, mesh = Model(TINY, lora=DORA), mesh_of(ONE)
    params = building.host_params(model)
    for name in ("k", "k_lora_b", "k_lora_m"):
        params["blocks"][name][:, 0, 0] = 0.0
    learned, base = lora.split(params)
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9)
    merged = lora.merge(learned, base, DORA)
    assert not merged["blocks"]["k"][:, 0, 0].any()
    expected = logits_of(model.base, merged, tokens)
    total = lambda learned: jax.numpy.sum(model.forward(lora.join(learned, base), tokens, tokens)[0])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(jax.grad(total))(learned)))
    publishing = compile_all(publish.programs(model, mesh, mesh), mesh)
    published = lora.join(publishing["publish"](learned, base), publishing["publish_base"](base))
    for whole in (params, published):
        np.testing.assert_allclose(logits_of(model, whole, tokens), expected, atol=1e-5 * np.abs(expected).max())


def test_a_norm_of_what_cancels_is_a_number():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 16), (64, 3)))
    norm = np.asarray(lora._norm(-lora.scale(DORA) * b @ a, a, b, DORA))
    assert (norm < 0.02).all()  # 0 but for rounding: the root of some 1e-7 of 200


def test_parts_of_the_parameters_come_together_again():
    model = Model(TINY, param_dtype="bfloat16", lora=SOME)
    whole = model.abstract_params(mesh_of(ONE))
    learned, base = lora.split(whole)
    assert sorted(learned["blocks"]) == ["down_lora_a", "down_lora_b", "q_lora_a", "q_lora_b"]
    assert learned["blocks"]["q_lora_b"].shape == (2, 4, 4, 2)  # layers, heads, head size, rank
    assert {str(x.dtype) for x in jax.tree.leaves(learned)} == {"float32"}
    assert jax.tree.map(str, base) == jax.tree.map(str, model.base.abstract_params(mesh_of(ONE)))
    assert jax.tree.map(str, lora.join(learned, base)) == jax.tree.map(str, whole)
    assert lora.split(base) == (base,)


# --- files ---


@pytest.fixture
def folder(tmp_path):
    """Return a copy of peft's folder "all" whose base is tiny_llama."""
    shutil.copytree(ADAPTERS / "all", tmp_path / "all")
    edit(tmp_path / "all", base_model_name_or_path=str(LLAMA))
    return tmp_path / "all"


def edit(folder, **changes):
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "config"), [("some", SOME), pytest.param("all", ALL, marks=pytest.mark.slow), ("dora", DORA)]
)
def test_peft_s_adapters_have_the_logits_that_peft_stored(name, config):
    stored, mesh = np.load(ADAPTERS / "logits.npz"), mesh_of(ONE)
    assert peft.read_config(ADAPTERS / name) == config
    model = Model(hf.read_architecture(LLAMA), lora=config)
    learned, base = peft.load(ADAPTERS / name, model, mesh), hf.load_params(LLAMA, model.base, mesh)
    for whole, of in ((lora.join(learned, base), model), (lora.merge(learned, base, config), model.base)):
        np.testing.assert_allclose(logits_of(of, whole, stored["tokens"]), stored[name], atol=1e-5 * 20)
    assert np.abs(logits_of(model.base, base, stored["tokens"]) - stored[name]).max() > 1


def test_a_folder_of_adapters_is_its_base_with_them(folder):
    stored, mesh = np.load(ADAPTERS / "logits.npz"), mesh_of(ONE)
    source = pretrained.resolve(str(folder))
    model = Model(source.architecture())
    source.check_weights(model, mesh)
    logits = logits_of(model, source.load_params(model, mesh, seed=0), stored["tokens"])
    np.testing.assert_allclose(logits, stored["all"], atol=1e-5 * 20)


@pytest.mark.parametrize(("name", "config"), [("some", SOME), ("dora", DORA)])
def test_what_is_written_is_read_back_and_named_as_peft_names_it(tmp_path, name, config):
    mesh, model = mesh_of(ONE), Model(hf.read_architecture(LLAMA), lora=config)
    learned = peft.load(ADAPTERS / name, model, mesh)
    for _ in range(2):  # the second replaces the first
        peft.export(learned, model, make_byte_tokenizer(), tmp_path, "some/base")
    files = [safetensors.numpy.load_file(x / "adapter_model.safetensors") for x in (tmp_path, ADAPTERS / name)]
    assert files[0].keys() == files[1].keys()
    for key, value in files[1].items():
        np.testing.assert_array_equal(files[0][key], value)
    theirs = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    for key, value in json.loads((tmp_path / "adapter_config.json").read_text()).items():
        if key == "base_model_name_or_path":
            assert value == "some/base"
        else:
            assert value == theirs[key] or sorted(value) == sorted(theirs[key]), key
    assert peft.read_config(tmp_path) == config
    (tmp_path / "config.json").write_text("{}")
    with raises_with(ConfigError, str(tmp_path), "config.json"):
        peft.export(learned, model, make_byte_tokenizer(), tmp_path, "some/base")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of peft's own
@pytest.mark.parametrize("config", [SOME, ALL, DORA])
def test_peft_computes_the_same_of_what_is_written(tmp_path, config):
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    mesh, model = mesh_of(ONE), Model(hf.read_architecture(LLAMA), lora=config)
    shapes, _ = lora.split(model.abstract_params(mesh))
    rng = np.random.default_rng(0)
    learned = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)
    peft.export(learned, model, make_byte_tokenizer(), tmp_path, str(LLAMA))
    tokens = np.load(ADAPTERS / "logits.npz")["tokens"]
    ours = logits_of(model, lora.join(learned, hf.load_params(LLAMA, model.base, mesh)), tokens)
    base = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs.PeftModel.from_pretrained(base, tmp_path)(torch.tensor(tokens, dtype=torch.long)).logits
    np.testing.assert_allclose(ours, logits.numpy(), atol=1e-5 * np.abs(ours).max())


def test_a_hybrid_s_adapters_are_named_by_the_layers_that_attend(tmp_path):
    """Adapters are stacked without the other layers, but files number all layers."""
    layers = (Layer(mixer="delta_rule"), Layer()) * 2
    arch = dataclasses.replace(PRESETS["debug_hybrid"], layers=layers)
    model = Model(arch, lora=LoraConfig(rank=2, targets=("q", "down")))
    learned, _ = lora.split(building.host_params(model))
    peft.export(learned, model, make_byte_tokenizer(), tmp_path, "some/base")
    file = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    places = {tuple(name.split(".")[i] for i in (4, 6)) for name in file if "q_proj" in name}
    assert places == {("1", "q_proj"), ("3", "q_proj")}
    assert {name.split(".")[4] for name in file if "down_proj" in name} == set("0123")
    np.testing.assert_array_equal(
        file["base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"], learned["blocks"]["q_lora_a"][1]
    )


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of peft's own
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_next_experts"])
def test_peft_computes_the_same_of_experts_adapters(tmp_path, name):
    """For each expert, as PEFT wrote adapters before transformers joined experts; newer versions still read them."""
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoConfig.for_model(**(families.CONFIGS | hybrids.CONFIGS)[name], initializer_range=0.2)
    own._experts_implementation = "eager"
    transformers.AutoModelForCausalLM.from_config(own).save_pretrained(tmp_path / "base")
    config = LoraConfig(rank=2, alpha=3.0, targets=("q", "gate", "up", "down"))
    mesh, model = mesh_of(ONE), Model(hf.read_architecture(tmp_path / "base"), lora=config)
    shapes, _ = lora.split(model.abstract_params(mesh))
    rng = np.random.default_rng(0)
    learned = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)
    peft.export(learned, model, make_byte_tokenizer(), tmp_path / "adapters", str(tmp_path / "base"))
    assert peft.read_config(tmp_path / "adapters") == config
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "adapters", model, mesh), learned)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 20), np.int32)
    base = hf.load_params(tmp_path / "base", model.base, mesh)
    ours = logits_of(model, lora.join(learned, base), tokens)
    assert np.abs(ours - logits_of(model.base, base, tokens)).max() > 0.1 * np.abs(ours).max()
    network = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        adapted = theirs.PeftModel.from_pretrained(network, tmp_path / "adapters")
        logits = adapted(torch.tensor(tokens, dtype=torch.long)).logits
    np.testing.assert_allclose(ours, logits.numpy(), atol=2e-5 * np.abs(ours).max())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, ("peft_type", "IA3", "'LORA'")),
        ({"use_dora": True}, ("base_model.", ANY, "layers.0", "lora_magnitude_vector")),
        ({"use_dora": "yes"}, ("dora", "yes", "adapter_config.json")),
        ({"use_qalora": True}, ("use_qalora", True)),
        ({"modules_to_save": ["lm_head"]}, ("modules_to_save", ["lm_head"])),
        ({"rank_pattern": {"q_proj": 2}}, ("rank_pattern", {"q_proj": 2})),
        ({"bias": "all"}, ("bias", "all")),
        ({"init_lora_weights": "pissa"}, ("init_lora_weights", "pissa")),
        ({"r": 3}, ("base_model.", ANY, "down_proj.lora_A.weight", "(4, 48)", "(3, 48)")),
        ({"r": None}, ("r", None, "adapter_config.json")),
        ({"r": "4"}, ("rank", "4", "adapter_config.json")),
        ({"lora_alpha": -1}, ("alpha", -1.0, "adapter_config.json")),
        ({"base_model_name_or_path": "a/b", "revision": "v2"}, ("revision", "v2", "'a/b'", "'main'")),
        ({"base_model_name_or_path": None}, ("base_model_name_or_path", None)),
        ({"base_model_name_or_path": "/nowhere"}, ("base_model_name_or_path", "/nowhere")),
        ({"base_model_name_or_path": str(ADAPTERS / "some")}, (str(ADAPTERS / "some"), ANY, "export --merge")),
    ],
)
def test_folders_of_other_adapters_are_refused(folder, changes, named):
    edit(folder, **changes)

    def read():
        source = pretrained.resolve(str(folder))
        source.check_weights(Model(source.architecture()), mesh_of(ONE))

    with refused(*named):
        read()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up_proj.lora_B" not in k}, ["1.mlp.up_proj.lora_B"]),
        (lambda t: t | {"base_model.model.lm_head.lora_A.weight": np.ones((4, 32), np.float32)}, ["lm_head.lora_A"]),
        (lambda t: {"other": np.ones(2, np.float32)}, ["q_proj, k_proj"]),
        (lambda t: {k: v * np.float32("nan") for k, v in t.items()}, ["NaN"]),
    ],
)
def test_tensors_that_are_not_adapters_of_the_base_are_refused(folder, change, words):
    path = folder / "adapter_model.safetensors"
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)
    with raises_with(ConfigError, str(folder), *words):
        peft.load(folder, Model(hf.read_architecture(LLAMA), lora=peft.read_config(folder)), mesh_of(ONE))


def test_a_start_that_the_settings_do_not_fit_is_refused(folder):
    arch, mesh = hf.read_architecture(LLAMA), mesh_of(ONE)
    start = dataclasses.replace(ALL, path=str(folder), targets=LORA_TARGETS[::-1])
    peft.check(Model(arch, lora=start), mesh, str(LLAMA))
    for changes, named in (
        ({"rank": 8}, ("model.lora.rank", 8, "4", f"model.lora.path={str(folder)!r}")),
        ({"alpha": 4.0}, ("model.lora.alpha", 4.0, "2.0")),
        ({"rank_stabilised": False}, ("model.lora.rank_stabilised", False, "True")),
        ({"dora": True}, ("model.lora.dora", True, "False")),
        ({"targets": ("q",)}, ("model.lora.targets", ("q",), "('q', 'k', ")),
        ({"path": "nowhere"}, ("nowhere/adapter_config.json",)),
    ):
        with refused(*named):
            peft.check(Model(arch, lora=dataclasses.replace(start, **changes)), mesh, str(LLAMA))
    with refused("model.path", str(folder), "model.lora.rank=4"):
        peft.check(Model(arch, lora=ALL), mesh, str(folder))
    experts = Model(PRESETS["debug_experts"], lora=dataclasses.replace(DORA, targets=("q", "up")))
    with refused("model.lora.targets", ("q", "up"), "q, k, v, o", "model.lora.dora=True"):
        peft.check(experts, mesh, "random:debug_experts")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"alpha": 8.0}, ("model.lora.alpha", 8.0, "model.lora.rank=0")),
        ({"path": "x"}, ("model.lora.path", "x", "model.lora.rank=0")),
        ({"rank": 4, "targets": ()}, ("model.lora.targets", ())),
        ({"rank": 4, "targets": ("q", "q")}, ("model.lora.targets", ("q", "q"))),
        ({"rank": 4, "targets": ("head",)}, ("model.lora.targets[0]", "head")),
        ({"rank": 2000}, ("model.lora.rank", 2000)),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, named):
    with refused(*named):
        freeze({"model": {"lora": settings}})
