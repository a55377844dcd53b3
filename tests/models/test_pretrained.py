"""The allowed values of ``model.path``."""

import dataclasses
import pathlib
import shutil
import subprocess
import sys

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from support.building import ONE, mesh_of
from support.refusal import raises_with, refused
from support.runs import save_run

from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import ConfigError, ModelConfig, freeze
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.files import peft, pretrained, run_models
from jaxrl_llm.models.files.gguf import make_bpe_tokenizer
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime.weights import is_run

TINY = pathlib.Path(__file__).parents[1] / "fixtures" / "tiny_llama"


@pytest.fixture
def mesh():
    return mesh_of(ONE)


def test_random_weights_come_from_the_seed(mesh, monkeypatch):
    monkeypatch.setattr(Model, "init", lambda model, key, mesh: (model.arch, key, mesh))
    source = pretrained.resolve("random:debug")
    model = Model(source.architecture())
    assert model.arch == PRESETS["debug"] and source.tokenizer().vocab_size == 260
    arch, key, on = source.load_params(model, mesh, seed=7)
    assert (arch, on) == (model.arch, mesh) and key == jax.random.key(7)


def test_a_folder_is_a_model(mesh):
    source = pretrained.resolve(str(TINY))
    model = Model(source.architecture())
    assert source.load_params(model, mesh, seed=0)["blocks"]["q"].shape == (2, 4, 12, 32)
    with raises_with(ConfigError, str(TINY), "tokenizer.json"):
        source.tokenizer()  # the fixture has none


def test_the_folder_of_a_run_is_the_model_that_it_has_trained(mesh, tmp_path):
    """The folder of a run is its newest checkpoint, unless a path names one. A run may start from another run."""
    model, random = Model(PRESETS["debug"]), np.random.default_rng(3)
    draw = lambda x: random.normal(size=x.shape).astype(ml_dtypes.bfloat16)
    first, second, third = (jax.tree.map(draw, model.abstract_params(mesh)) for _ in range(3))
    stops = {"stop_tokens": ("b",)}
    run = save_run(tmp_path / "run", "random:debug", first, second, pass_rates=(0.5, 0.4), sampling=stops)
    other = save_run(tmp_path / "other", f"{run}/checkpoints/1", third)
    for path, params in [
        (run, second),
        (run / "checkpoints", second),
        (run / "checkpoints/1", first),
        (f"{run}/checkpoints/2/", second),
        (f"{run}/best", first),
        (f"{run}/checkpoints/best", first),
        (other, third),
    ]:
        source = pretrained.resolve(str(path))
        assert source.architecture() == PRESETS["debug"]
        assert ord("b") in source.tokenizer().eos_ids
        loaded = source.load_params(model, mesh, seed=0)
        for x, saved in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
            assert x.dtype == "float32"
            np.testing.assert_array_equal(x, saved.astype(np.float32))
    assert [one.model.path for one in source.trained_by] == [f"{run}/checkpoints/1", "random:debug"]
    source.check_weights(model, mesh)
    with raises_with(ConfigError, str(other)):
        source.check_weights(Model(PRESETS["debug_wide"]), mesh)
    with refused("model.path", f"{other}/best", f"{other}/checkpoints"):
        pretrained.resolve(f"{other}/best")
    (tmp_path / "link").symlink_to(run / "checkpoints/1")
    assert is_run(f"{tmp_path}/link") and is_run(f"{run}/best/")
    with refused("model.path", f"{tmp_path}/best"):
        pretrained.resolve(f"{tmp_path}/best")
    (run / "best").mkdir()  # a folder of its own
    with raises_with(ConfigError, f"{run}/best/config.json"):
        pretrained.resolve(f"{run}/best").architecture()
    shutil.rmtree(run)
    with refused("model.path", f"{run}/checkpoints/1", str(other), "jaxrl_llm.export"):
        pretrained.resolve(str(other))
    run.mkdir()
    (run / "metrics.jsonl").touch()
    with refused("model.path", str(run)):
        pretrained.resolve(str(run))
    shutil.copy(TINY / "model.safetensors", run)
    with raises_with(ConfigError, f"{run}/config.json"):
        pretrained.resolve(str(run)).architecture()  # a model's folder, whatever else lies there
    shutil.copytree(TINY, tmp_path / "checkpoints")
    assert pretrained.resolve(f"{tmp_path}/checkpoints").architecture().width == 32


def test_a_run_is_begun_from_one_checkpoint_that_stays(tmp_path, monkeypatch):
    """The newest checkpoint may be another one when the run resumes, and so may the reference and the base."""
    shapes = Model(PRESETS["debug"]).abstract_params(mesh_of(ONE))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    run = save_run(tmp_path / "run", "random:debug", zeros, zeros, pass_rates=(0.5, 0.4))
    others = {"algorithm": {"divergence": "reference"}, "eval": {"num_prompts": 2}}
    config = lambda **model: freeze({"model": model, **others})
    run_models.check(config(path=f"{run}/checkpoints/1", reference_path=f"{run}/checkpoints/2/"), tmp_path / "other")
    for setting, path, found in [
        ("path", run, 2),
        ("reference_path", f"{run}/best", 1),
        ("path", f"{run}/checkpoints", 2),
    ]:
        with refused(f"model.{setting}", str(path), f"'{run}/checkpoints/{found}'"):
            run_models.check(config(**{setting: str(path)}), tmp_path / "other")
    with refused("model.path", str(run), f"'{run}/checkpoints/2'"):
        train_module.train(config(path=str(run)), tmp_path / "other")
    with refused("model.path", f"{run}/checkpoints/1", "model.lora.rank=4", "export --merge"):
        train_module.train(config(path=f"{run}/checkpoints/1", lora={"rank": 4}), tmp_path / "other")
    with refused("model.path", f"{run}/checkpoints/1", f"folder is '{run}'", "--workdir"):
        run_models.check(config(path=f"{run}/checkpoints/1"), run)
    with refused("model.path", f"{tmp_path}/empty/best"):
        (tmp_path / "empty/checkpoints").mkdir(parents=True)
        run_models.check(config(path=f"{tmp_path}/empty/best"), run)
    monkeypatch.setenv("HOME", str(tmp_path))
    with refused("model.path", "~/run/checkpoints/1", "model.lora.rank=4"):
        train_module.train(config(path="~/run/checkpoints/1", lora={"rank": 4}), tmp_path / "other")
    monkeypatch.chdir(run)  # "", no reference, is not the folder that one happens to be in
    run_models.check(config(), tmp_path / "other")
    assert not is_run("") and is_run(".") and is_run("best")


def test_a_path_may_begin_at_home(monkeypatch):
    """A shell does not expand the ~ of --config.model.path=~/model, and no shell reads a config file."""
    monkeypatch.setenv("HOME", str(TINY.parent))
    assert pretrained.resolve("~/tiny_llama").folder == str(TINY)
    with refused("model.path", f"{TINY.parent}/none.gguf"):
        pretrained.resolve("~/none.gguf")
    with raises_with(ConfigError, f"{TINY}/adapter_config.json"):
        peft.read_config("~/tiny_llama")


def test_a_hub_id_is_downloaded(monkeypatch):
    asked = {}
    download = lambda name, **how: asked.update(how) or {"some/model": str(TINY)}[name]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert pretrained.resolve("some/model").architecture().width == 32
    # What an export keeps of a folder is there, and no second copy of the weights.
    texts = ["tokenizer.model", "tokenizer.json", "merges.txt", "vocab.txt", "additional_chat_templates/rag.jinja"]
    weights = ["config.json", "model-00001-of-00002.safetensors"]
    others = ["original/tokenizer.model", "original/model.safetensors", "consolidated.safetensors", "model.gguf"]
    others += ["pytorch_model.bin", "README.md"]
    found = huggingface_hub.utils.filter_repo_objects([*texts, *weights, *others], **asked)
    assert [*found] == [*texts, *weights]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("random:huge", ["random:debug, ", "random:debug_wide"]),
        ("none.gguf", []),
        ("./none", ["Hugging Face", ".gguf", "smollm2"]),
        ("", []),
        ("gpt2", []),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(path, words):
    with refused("model.path", path, *words):
        pretrained.resolve(path)


def test_a_reference_is_the_models_own_source_or_another_that_reads_its_token_ids(monkeypatch):
    learner = pretrained.resolve("random:debug")
    assert pretrained.resolve_reference(ModelConfig(), learner) is learner
    # 264 rows of embeddings hold the 260 ids; the other way round there are too few.
    wide = pretrained.resolve_reference(ModelConfig(reference_path="random:debug_wide"), learner)
    assert wide.architecture() == PRESETS["debug_wide"]
    with refused("model.reference_path", "random:debug", "model.path=", "260 embeddings"):
        pretrained.resolve_reference(ModelConfig("random:debug_wide", reference_path="random:debug"), wide)
    with refused("model.reference_path", "random:huge"):
        pretrained.resolve_reference(ModelConfig(reference_path="random:huge"), learner)
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [len(text), *range(next(calls))])
    calls = iter(range(9))  # each tokenizer cuts otherwise than the one before
    with refused("model.reference_path", "random:debug_wide"):
        pretrained.resolve_reference(ModelConfig(reference_path="random:debug_wide"), learner)


SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|reserved_special_token_2|>"]


@pytest.mark.parametrize(
    ("special", "later", "told"),
    [
        (["<s>", "<end>", "<user>", "<|im_end|>", "<pad>"], [], ["id 1 ", "'</s>'", "'<end>'"]),
        (SPECIAL[:3], ["!", "?"], ["id 3 ", "'<|im_end|>'", "'a'"]),  # 'a' is not a special token
        (SPECIAL, ["<think>"], []),  # one token more, as Qwen3 has compared with Qwen2.5
        ([*SPECIAL[:4], "<|eom_id|>"], [], []),  # Llama 3.1 renames a token that no text of Llama 3 has
        (SPECIAL, [], []),
    ],
)
def test_a_teacher_whose_special_tokens_are_others_is_refused(special, later, told, monkeypatch):
    """Both tokenizers split texts alike, but the student's end of a turn is another token of the teacher."""

    def source(special, later=()):
        how = {
            "merges": [],
            "pre_tokenizer": "gpt-2",
            "chat_template": None,
            "bos": "<s>",
            "eos": special[1],
            "pad": None,
        }
        made = make_bpe_tokenizer(tokens=[*special, *"abc", *later], special=[*special, *later], **how)
        return dataclasses.replace(pretrained.resolve("random:debug"), tokenizer=lambda: made)

    student, teacher = source(SPECIAL), source(special, later)
    monkeypatch.setattr(pretrained, "resolve", lambda path, **_: teacher)
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [5])
    if not told:
        assert pretrained.resolve_reference(ModelConfig(reference_path="teacher"), student) is teacher
        return
    with refused("model.reference_path", "teacher", *told):
        pretrained.resolve_reference(ModelConfig(reference_path="teacher"), student)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def fail(name, **_):
        raise OSError("no network\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with refused("model.path", "out/folder", "no network") as caught:
        pretrained.resolve("out/folder")
    assert "\n" not in str(caught.value)


def test_smollm2_is_found_without_importing_its_engine(tmp_path, monkeypatch):
    package = tmp_path / pretrained.SMOLLM2_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / pretrained.SMOLLM2_FILE).write_bytes(b"x")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from jaxrl_llm.models.files import pretrained
assert pretrained._find_smollm2("model.path") == {str(package / pretrained.SMOLLM2_FILE)!r}
assert "transformers" not in sys.modules and "torch" not in sys.modules, "imports stay light"
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    monkeypatch.setattr(pretrained, "SMOLLM2_PACKAGE", "no_such_package_here")
    with refused("model.path", pretrained.SMOLLM2, "no_such_package_here", "launch/setup.sh"):
        pretrained.resolve(pretrained.SMOLLM2)
