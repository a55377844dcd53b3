"""Whole trainings of adapters over a frozen base.

The tests show which weights stay fixed, which are saved, and which settings change no number.
"""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from support import building
from support.building import CUBE, EIGHT, ONE, mesh_of, settings_of
from support.refusal import ANY, raises_with, refused

from jaxrl_llm.commands import evaluate, export, score, sft
from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import ConfigError, LoraConfig, freeze
from jaxrl_llm.learner import publish
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.models import lora
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.files import hf, peft, pretrained, run_models
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.planning import cost, hlo, verdict
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.checkpoint_files import read_arrays, read_text
from jaxrl_llm.runtime.programs import memory
from jaxrl_llm.types import Sums, TrainState

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "debug.py"
ADAPTERS = LoraConfig(rank=3, alpha=6.0)


# --- one update ---


def gradient(update, rows, mesh=ONE):
    """Return the gradient with respect to the adapters, and the sums of the update.

    Both are in numpy, as in ``building.gradient``.
    """
    learned, base = lora.split(building.learner_params(update.model, mesh_of(mesh)))
    whole = sharding.replicated(mesh_of(mesh), 0)
    state = TrainState({"policy": learned}, jax.tree.map(np.zeros_like, {"policy": learned}), np.int32(0), {}, {})
    state = dataclasses.replace(state, step=jax.device_put(np.int32(0), whole))
    with jax.sharding.use_abstract_mesh(mesh_of(mesh).abstract_mesh):
        state, sums = jax.jit(update.apply_batch)(state, building.on_mesh(update, rows, mesh), 0, None, base)
    return jax.device_get((state.opt_state["policy"], sums))


def make_update(settings, lora=ADAPTERS, **how):
    update = building.make_update(settings, **how)
    return dataclasses.replace(update, model=dataclasses.replace(update.model, lora=lora))


def assert_same(actual, expected, most=1e-5):
    """Assert that sums agree to 1e-5, and gradients to 1e-5 of the gradient's norm."""
    for name, value in expected[1].named().items():
        np.testing.assert_allclose(actual[1][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    flat = lambda tree: np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
    assert np.linalg.norm(flat(actual[0]) - flat(expected[0])) <= most * np.linalg.norm(flat(expected[0]))


@pytest.mark.parametrize(
    "config", [pytest.param(ADAPTERS, marks=pytest.mark.tier("slow")), dataclasses.replace(ADAPTERS, dora=True)]
)
def test_the_gradient_by_adapters_is_the_merged_matrix_s_times_the_other_factor(config):
    """With y = c (W + s B A) and a constant norm, dL/dm is the component of G along the merged row."""
    settings, rows = building.LOSSES["token mean, k3"], building.random_experience()
    update = make_update(settings, config)
    found, sums = gradient(update, rows)
    params = building.host_params(update.model)
    merged = jax.device_get(lora.merge(*lora.split(params), config))
    plain = building.make_update(settings)
    state = dataclasses.replace(building.train_state(plain), params={"policy": merged})
    state, plain_sums = building.compile_update(plain)(state, building.on_mesh(plain, rows))
    of_merged = {name: np.asarray(x, np.float64) for name, x in state.opt_state["policy"]["blocks"].items()}
    expected = {}
    for name in ADAPTERS.targets:
        a, b = (np.asarray(params["blocks"][f"{name}_lora_{x}"], np.float64) for x in "ab")
        flat_a, flat_b = a.reshape(len(a), 3, -1), b.reshape(len(b), -1, 3)
        g = of_merged[name].reshape(len(a), flat_b.shape[1], flat_a.shape[2])
        if config.dora:
            m, whole = (np.asarray(x["blocks"][name + of], np.float64) for x, of in ((params, "_lora_m"), (merged, "")))
            unit = whole.reshape(g.shape) / m.reshape(len(m), -1, 1)
            expected[f"{name}_lora_m"] = np.sum(g * unit, axis=-1).reshape(m.shape)
            plain_w = params["blocks"][name].reshape(g.shape) + 2.0 * flat_b @ flat_a
            g = g * m.reshape(len(m), -1, 1) / np.linalg.norm(plain_w, axis=-1, keepdims=True)
        expected[f"{name}_lora_a"] = 2.0 * np.einsum("Lor,Loi->Lri", flat_b, g).reshape(a.shape)
        expected[f"{name}_lora_b"] = 2.0 * np.einsum("Loi,Lri->Lor", g, flat_a).reshape(b.shape)
    assert_same((found, sums), ({"blocks": expected}, Sums({"loss_sum": plain_sums["loss_sum"]})))


@pytest.mark.tier("slow")  # plain: test_invariance.py, without adapters
def test_micro_batches_packing_and_devices_change_nothing():
    settings, rows = building.LOSSES["token mean, k3"], building.random_experience()
    expected = gradient(make_update(settings), rows)
    assert all(np.any(x) for x in jax.tree.leaves(expected[0]))
    width = 2 * rows.rollout.tokens.shape[1]
    packed = settings | {"pack_width": width, "micro_batch_tokens": 8 * width, "logp_chunk_tokens": 8}
    assert_same(gradient(make_update(packed, num_devices=8), rows, EIGHT), expected)
    cube = make_update(settings | {"micro_batch_size": 8, "logp_chunk_tokens": 12}, num_devices=4, remat="full")
    assert_same(gradient(cube, rows, CUBE), expected)


def test_a_plan_counts_two_bytes_of_a_frozen_weight_and_twelve_of_one_that_learns():
    arch = PRESETS["debug"]
    plain = freeze(settings_of(CONFIG, {"model.param_dtype": "bfloat16"}))
    adapted = freeze(settings_of(CONFIG, {"model.param_dtype": "bfloat16", "model.lora.rank": 3}))
    kept = {}
    for name, config in (("plain", plain), ("adapted", adapted)):
        run = assemble(config, arch, (257,), mesh_of(ONE))
        kept[name] = verdict.kept(run, sampling=False)
        assert "checksums_base" not in run.programs() or name == "adapted"
    # Rank times inputs plus outputs of q, k, v, o, gate, up, down (width 64, 4 and 2 heads of 16, ffn 128), two layers.
    learned = 2 * 3 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
    counters = kept["plain"][verdict.STATE] - 10 * arch.num_params  # 2 of the weight, 8 of its moments
    assert 0 <= counters < 64
    assert verdict.FROZEN not in kept["plain"] and kept["adapted"][verdict.FROZEN] == 2 * arch.num_params
    # Matrices as they compute, in four bytes; the five norms of 64 as they are kept.
    assert verdict.PUBLISHED not in kept["plain"]
    assert kept["adapted"][verdict.PUBLISHED] == 4 * arch.num_params - 2 * 5 * 64
    assert kept["adapted"][verdict.STATE] == 12 * learned + counters
    assert cost.model_flops(plain, arch) - cost.model_flops(adapted, arch) == pytest.approx(
        # Of each update's eight draws, a prompt and its eight rows; no prompt meets the head.
        2.0 * 2 * 8 * (arch.num_params * (32 + 8 * 8) - 260 * 64 * 32)
    )


# --- runs ---

SETTINGS = {
    "num_iterations": 4,
    "model.lora.rank": 4,
    "model.lora.targets": ("q", "v", "o", "up", "down"),
    "model.lora.modules": 2,
    "model.lora.module_steps": 3,
    "algorithm.divergence": "reference",
    "rollout.group_size": 4,
    "replay.capacity": 64,
    "update.batch_size": 32,
    "update.micro_batch_size": 16,
    "metrics.tensorboard": False,
}
NOT_COMPARED = ("time/", "throughput/", "memory/")


def config_of(base, **changes):
    return freeze(settings_of(CONFIG, SETTINGS | {"model.path": str(base)} | changes))


def left_behind(workdir):
    """Return the arrays and the host state of the last checkpoint, and all metrics that do not depend on time."""
    path = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    host, text = read_text(path)
    rows = read_metrics(workdir)
    metrics = [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]
    return read_arrays(path, dict.fromkeys(text["arrays"])), host, metrics


@pytest.fixture(scope="module", autouse=True)
def few_devices():
    """Let a run use only as many devices as its mesh names."""

    original = sharding.make_mesh

    def make_mesh(config, devices=None):
        config = dataclasses.replace(config, data=config.data or 1)
        num_devices = math.prod(getattr(config, axis) for axis in sharding.MESH_AXES)
        return original(config, jax.devices()[:num_devices])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", make_mesh)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a model's folder."""
    folder = tmp_path_factory.mktemp("base") / "model"
    model = Model(PRESETS["debug"])
    hf.export(model.init(jax.random.key(5), mesh_of(ONE)), model, make_byte_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """Return the workdir of a run, its learner at the end, and its programs."""
    workdir, learners, start, compiled = tmp_path_factory.mktemp("trained"), [], Learner.start, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "start", lambda self, params: learners.append(self) or start(self, params))
        patch.setattr(train_module, "compile_all", building.compile_once(compiled))
        assert train_module.train(config_of(base), workdir) == 0
    return workdir, learners[0], compiled


@pytest.mark.tier("slow")  # plain: test_what_is_published_again_is_adapters_alone
def test_the_base_stays_and_the_reference_is_the_same_arrays(base, trained):
    workdir, learner, _ = trained
    loaded = hf.load_params(base, Model(PRESETS["debug"]), mesh_of(ONE))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((learner._base[0], loaded)))
    assert learner._reference is learner._base[0]
    assert sorted(learner.policy) == ["blocks"] and len(learner.policy["blocks"]) == 10
    assert all(np.any(x) for name, x in learner.policy["blocks"].items() if name.endswith("_b"))
    _, _, metrics = left_behind(workdir)
    # Of the first update it is the base's divergence from itself; two programs, so up to rounding.
    assert metrics[0]["update/kl_reference_nats"] < metrics[-1]["update/kl_reference_nats"]
    assert max(row["update/sampler_learner_gap_max_nats"] for row in metrics) < 1e-5
    assert metrics[0]["update/adapter_module"] < metrics[-1]["update/adapter_module"] == 2


def test_what_is_published_again_is_adapters_alone(trained):
    learner = trained[1]
    first, second = learner.publish(), learner.publish()
    both = [jax.tree_util.tree_leaves_with_path(tree) for tree in (first, second)]
    for (path, x), (_, y) in zip(*both, strict=True):
        assert (x is y) == ("_lora_" not in jax.tree_util.keystr(path))
    (of_base,), adapters = learner._base, sum(x.nbytes for x in jax.tree.leaves(learner.policy))
    found, once = (memory(learner._compiled[name]) for name in ("publish", "publish_base"))
    assert found.arguments == adapters <= found.outputs < adapters + 2048  # and where each array lies
    size = sum(x.nbytes for x in jax.tree.leaves(of_base))
    assert once.arguments == size <= once.outputs < size + 2048


def test_on_a_split_mesh_the_base_is_not_published_again():
    """Otherwise every publication would gather all matrices of the base and drop them."""
    mesh = mesh_of(CUBE)
    model = Model(PRESETS["debug"], lora=ADAPTERS)
    program = publish.programs(model, mesh, mesh)["publish"]
    compiled = program.lower(mesh).compile()
    adapters, base = lora.split(model.abstract_params(mesh))
    smallest_matrix = min(math.prod(x.shape[1:]) for x in jax.tree.leaves(base["blocks"]) if x.ndim > 2)
    largest_factor = max(math.prod(x.shape[1:]) for x in jax.tree.leaves(adapters))
    assert largest_factor < smallest_matrix
    assert max(hlo.moved(compiled.as_text())) <= largest_factor
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(adapters))
    assert memory(compiled).arguments == held


def test_checkpoints_and_the_optimizer_hold_adapters_alone(trained):
    arrays, host, _ = left_behind(trained[0])
    weights = [name for name in arrays if name.startswith("train/params/policy/")]
    moments = [name for name in arrays if name.startswith("train/opt_state/") and arrays[name].ndim > 1]
    assert len(weights) == 10 and len(moments) == 20
    assert all("_lora_" in name for name in weights + moments)
    assert len(host["base"]) == 11  # the base's arrays: nine of a block, embedding, final norm


def test_a_run_that_was_resumed_is_the_run_that_was_not(base, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "compile_all", building.compile_once(trained[2]))
    for num_iterations in (2, 4):
        assert train_module.train(config_of(base, num_iterations=num_iterations), tmp_path) == 0
    (arrays, host, metrics), (arrays_2, host_2, metrics_2) = left_behind(tmp_path), left_behind(trained[0])
    assert arrays.keys() == arrays_2.keys() and host["base"] == host_2["base"]
    for name, x in arrays.items():
        np.testing.assert_array_equal(x, arrays_2[name], err_msg=name)
    without_eval = lambda rows: [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]
    assert without_eval(metrics) == without_eval(metrics_2)


@pytest.mark.tier("slow")  # plain: test_a_run_that_was_resumed_is_the_run_that_was_not
def test_a_run_goes_on_with_a_teacher_of_merged_adapters_whose_bits_are_others(base, trained, tmp_path, monkeypatch):
    """On another mesh, the same files are merged with other rounding."""
    export.export(str(trained[0]), "", str(tmp_path / "adapters"))
    monkeypatch.setattr(train_module, "compile_all", building.compile_once({}))
    model = {"model.reference_path": str(tmp_path / "adapters"), "eval.num_prompts": 0}
    run = lambda n: train_module.train(config_of(base, num_iterations=n, **model), tmp_path / "run")
    assert run(1) == 0
    merge = lora.merge
    monkeypatch.setattr(lora, "merge", lambda *of: jax.tree.map(lambda x: x * (1 + 2**-23), merge(*of)))
    assert run(2) == 0


@pytest.mark.slow
def test_another_base_is_refused_in_one_line(base, trained, tmp_path):
    other = shutil.copytree(base, tmp_path / "base")
    workdir = shutil.copytree(trained[0], tmp_path / "run")
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    safetensors.numpy.save_file(tensors, other / "model.safetensors")
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    config = config_of(other, num_iterations=5)
    with refused("model.path", str(other), "weights", "base") as error:
        train_module.train(config, workdir, allow_config_changes=True)
    assert "\n" not in str(error.value)
    with refused("model.path", str(other), "weights", "base"):
        evaluate.evaluate(config, "", str(workdir), 1)
    with refused("model.path", str(base), "weights", "base"):  # as a model
        source = run_models.source(str(workdir), lambda path: pretrained.resolve(str(other)), "--model")
        source.load_params(Model(PRESETS["debug"]), mesh_of(ONE), seed=0)
    with refused("model.lora.rank"):
        evaluate.evaluate(freeze(settings_of(CONFIG, {"model.path": str(base)})), "", str(workdir), 1)
    with refused("model.lora", ANY, "alpha=8.0", "alpha=32.0", str(workdir)):
        evaluate.evaluate(config_of(base, **{"model.lora.alpha": 8.0}), "", str(workdir), 1)
    # The same weights elsewhere are the same base.
    assert train_module.train(config_of(moved, num_iterations=4), workdir, allow_config_changes=True) == 0


@pytest.mark.tier("slow")  # plain: test_a_folder_of_adapters_is_exported_like_its_base
def test_commands_take_a_checkpoint_its_adapters_and_the_merged_model(base, trained, tmp_path):
    workdir, *_ = trained
    measured = json.loads((workdir / "eval_after.json").read_text())
    assert evaluate.evaluate(config_of(base), "", str(workdir), 4) == measured | {"skipped_count": 0}
    with refused("--adapter", "x", "--model"):
        evaluate.evaluate(config_of(base), "", str(workdir), 4, "x")
    with raises_with(ConfigError, "nowhere/adapter_config.json"):
        evaluate.evaluate(config_of(base), str(base), "", 4, "nowhere")

    export.export(str(workdir), "", str(tmp_path / "merged"), merge=True)
    export.export("", str(workdir), str(tmp_path / "adapters"))
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        assert (tmp_path / "adapters" / name).read_bytes() == (workdir / "hf" / name).read_bytes()

    rows = [{"prompt_ids": [*b"hi"], "completion_ids": [*b"abc"]}, {"prompt_ids": [9], "completion_ids": [*b"Wa:", 7]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logp = {}
    for name in (base, tmp_path / "merged", tmp_path / "adapters", workdir, pathlib.Path("over")):
        over = {"adapter": str(tmp_path / "adapters")} if name.name == "over" else {}
        source = pretrained.resolve(str(base if over else name), **over)
        rows = score.score(source, str(tmp_path / "rows.jsonl"), batch_size=2, compute_dtype="float32")
        logp[name.name] = np.concatenate([row["logp"] for row in rows])
    np.testing.assert_allclose(logp["merged"], logp["adapters"], atol=1e-6)
    np.testing.assert_array_equal(logp["over"], logp["adapters"])
    np.testing.assert_array_equal(logp[workdir.name], logp["adapters"])
    assert np.abs(logp["merged"] - logp["model"]).max() > 0.1


@pytest.mark.parametrize("merge", [True, False])
def test_a_folder_of_adapters_is_exported_like_its_base(merge, tmp_path):
    """The export is in float32. A model without adapters cannot be exported with --merge."""
    plain, mesh, tokenizer = Model(PRESETS["debug"]), mesh_of(ONE), make_byte_tokenizer()
    base, adapters, out = (tmp_path / name for name in ("base", "adapters", "out"))
    hf.export(plain.init(jax.random.key(5), mesh), plain, tokenizer, base, dtype="bfloat16")
    (base / "generation_config.json").write_text('{"eos_token_id": 257, "top_k": 20}')
    adapted = Model(PRESETS["debug"], lora=ADAPTERS)
    peft.export(peft.begin(adapted, mesh, seed=7), adapted, tokenizer, adapters, str(base))
    export.export("", str(adapters), str(out), merge=merge)
    assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    was, now = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in (base, out))
    assert was.keys() == now.keys() and {str(x.dtype) for x in now.values()} == {"bfloat16"}
    for name, x in now.items():  # new adapters add nothing
        np.testing.assert_array_equal(x, was[name], err_msg=name)
    with refused("--merge", True, str(base)):
        export.export("", str(base), str(out), merge=True)


def flags_holder(value):
    return type("Flag", (), {"value": value})


@pytest.mark.slow
def test_adapters_of_one_run_start_another_and_supervised_training_makes_some(base, trained, tmp_path):
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "answer": "ab"}) + "\n" for i in range(24))
    )
    questions = {"prompts.source": "jsonl", "prompts.name": str(tmp_path / "questions.jsonl"), "prompts.size": 0}
    settings = questions | {"algorithm.divergence": "none", "num_iterations": 30, "eval.num_prompts": 8}
    made = tmp_path / "made"
    assert sft.sft(config_of(base, **settings), made) > 20 * 264**-3  # the base's; its head, which stays, is small
    assert not (made / "config.json").exists()
    before = pretrained.resolve(str(made))
    started = config_of(base, num_iterations=1, **{"model.lora.path": str(made), "optimizer.learning_rate": 1e-20})
    assert train_module.train(started, tmp_path / "run") == 0
    both = [safetensors.numpy.load_file(x / "adapter_model.safetensors") for x in (made, tmp_path / "run" / "hf")]
    assert before.architecture() == PRESETS["debug"]
    for name, x in both[0].items():
        np.testing.assert_array_equal(x, both[1][name], err_msg=name)


@pytest.mark.slow
def test_a_split_base_and_split_adapters_learn_alike(base, tmp_path):
    """One update on all sampled rows. Adam's first step has the same length even if a gradient is only rounding."""
    found = []
    for name, mesh in (("whole", {}), ("split", {"mesh.fsdp": 2, "mesh.tensor": 2})):
        one = {"num_iterations": 1, "update.updates_per_iteration": 1, "eval.num_prompts": 0}
        assert train_module.train(config_of(base, **one | mesh), tmp_path / name) == 0
        found.append(left_behind(tmp_path / name)[2][0])
    whole, split = found
    for name in ("rollout/reward_mean", "update/loss", "update/grad_norm", "update/entropy_nats"):
        assert split[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    assert split["update/sampler_learner_gap_max_nats"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.reference_reset_iterations": (1,), "rollout.lookahead_prompts": 8, "model.param_dtype": "bfloat16"},
        {"algorithm.old_policy": "ewma", "algorithm.advantage": "gae", "optimizer.name": "adafactor"},
        {"algorithm.old_policy": "generation", "rollout.lookahead_prompts": 8, "optimizer.moment_dtype": "bfloat16"},
        {"algorithm.old_policy": "ewma", "model.lora.dora": True, "model.compute_dtype": "float32"},
    ],
)
def test_methods_that_look_at_other_weights_look_at_other_adapters(base, tmp_path, changes):
    config = config_of(base, num_iterations=2, **{"eval.num_prompts": 0} | changes)
    assert train_module.train(config, tmp_path) == 0
    arrays, _, metrics = left_behind(tmp_path)
    copies = [name for name in arrays if name.startswith("train/others/")]
    assert all("_lora_" in name for name in copies)
    assert bool(copies) == ("generation" not in changes.values())
    assert metrics[-1]["update/nonfinite_steps"] == 0 and metrics[0]["update/sampler_learner_gap_max_nats"] < 1e-5
    assert train_module.train(dataclasses.replace(config, num_iterations=3), tmp_path) == 0
