"""Plan: the compilers accept every program of a run. A program that does not fit is named, without a traceback."""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.building import ONE, TINY, mesh_of, needs_cuda_compiler, needs_libtpu
from support.command_line import DEBUG_CONFIG, run_command
from support.refusal import check_refusal, raises_with, refused

from jaxrl_llm.commands import plan
from jaxrl_llm.config import ConfigError, MeshConfig, freeze
from jaxrl_llm.models import presets
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.planning import chips, compiled, verdict
from jaxrl_llm.planning import search as searching
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import Memory, Program, in_use_bytes, memory, resident_bytes

MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def no_cache():
    """A program found in a cache is not compiled, and this compiler's client cannot read one."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def small_config(num_chips):
    """Return a small config in which every kind of program exists.

    Per chip it has one prompt of two samples, two slots, two rows per micro-batch and four ring slots. Weights are
    split over pairs of chips, and there is a reference model.
    """
    return freeze(
        {
            "model": {"path": "random:debug"},
            "prompts": {"max_tokens": 32},
            "sampling": {"max_completion_tokens": 32},
            "rollout": {"prompts_per_iteration": num_chips, "group_size": 2, "chunk_steps": 4},
            "replay": {"capacity": 4 * num_chips},
            "update": {"batch_size": 2 * num_chips, "micro_batch_size": 2 * num_chips},
            "algorithm": {"divergence": {"name": "reference", "coefficient": 0.1}},
            "mesh": {"fsdp": 2},
        }
    )


def run_of(config, topology):
    devices, _ = chips.devices_of(topology)
    source = pretrained.resolve(config.model.path)
    mesh = sharding.make_mesh(config.mesh, devices)
    return assemble(config, source.architecture(), source.tokenizer().eos_ids, mesh)


@pytest.fixture(scope="module")
def eight_chips():
    return {row.name: row for row in compiled.compile_rows(run_of(small_config(8), "v5e:2x4"))}


@needs_libtpu
def test_the_tpu_compiler_takes_every_program(eight_chips):
    assert {"prefill", "decode", "insert", "update", "publish", "annotate"} <= set(eight_chips)
    assert all(row.memory is not None and row.refused == "" for row in eight_chips.values())


@needs_libtpu
def test_the_update_replaces_state_and_ring_in_place(eight_chips):
    m = eight_chips["update"].memory
    # What is not aliased is the sums; each scalar is padded to a tile of at least 512 bytes.
    assert m.outputs - m.aliased < 64 * 1024 and m.arguments - m.aliased < 4 * 1024


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "update"])
def test_memory_per_chip_does_not_grow_with_the_pod(eight_chips, name):
    """A loop carry without a layout would be whole on every chip."""
    run = run_of(small_config(16), "v5e:4x4")
    stats = run.programs()[name].lower(run.mesh).compile().memory_analysis()
    assert stats.temp_size_in_bytes <= 1.1 * eight_chips[name].memory.temporary
    assert stats.argument_size_in_bytes <= 1.1 * eight_chips[name].memory.arguments


def run_with_hosts(times=1):
    """Return a run with moments and ring in the hosts' memory.

    The ring is this many times as large as in ``small_config``.
    """
    config = small_config(8)
    optimizer = dataclasses.replace(config.optimizer, offload=True)
    replay = dataclasses.replace(config.replay, memory="host", capacity=times * config.ring_capacity)
    return run_of(dataclasses.replace(config, optimizer=optimizer, replay=replay), "v5e:2x4")


@pytest.fixture(scope="module")
def eight_chips_with_hosts():
    """Return text and memory of each program of the learner, with moments and ring in the hosts' memory."""
    run = run_with_hosts()
    names = ("init_state", "init_ring", "insert", "update")
    compiled = {name: run.programs()[name].lower(run.mesh).compile() for name in names}
    return {name: (program.as_text(), memory(program)) for name, program in compiled.items()}


@needs_libtpu
def test_the_tpu_compiler_moves_moments_and_ring_to_the_hosts(eight_chips, eight_chips_with_hosts):
    plain = {name: eight_chips[name].memory for name in eight_chips_with_hosts}
    moved = {name: numbers for name, (_, numbers) in eight_chips_with_hosts.items()}
    # Two moments of the three copies of the weights.
    assert moved["init_state"].on_host == pytest.approx(2 / 3 * plain["init_state"].outputs, rel=0.01)
    on_host = {"insert": moved["init_ring"].on_host}
    on_host["update"] = on_host["insert"] + moved["init_state"].on_host
    for name, size in on_host.items():
        assert moved[name].on_host == size > 0
        # Tiles of the device are larger than the rows of so small a ring.
        assert moved[name].arguments + size <= plain[name].arguments


@pytest.mark.slow
@needs_libtpu
def test_a_ring_on_the_hosts_goes_through_tiles_of_a_chip(eight_chips_with_hosts):
    """The chips hold some more tiles, but not the whole ring.

    Here it is 5.0 MB instead of 4.1 MB with a ring on the device.
    """
    moved, run = {"update": eight_chips_with_hosts["update"][1]}, run_with_hosts(times=1024)
    large = memory(run.programs()["update"].lower(run.mesh).compile())
    growth = large.on_host - moved["update"].on_host
    assert growth > 5e6 and large.temporary - moved["update"].temporary < growth / 20


@needs_libtpu
@pytest.mark.parametrize("name", ["init_ring", "insert", "update"])
def test_no_chip_holds_the_rows_of_a_ring_on_the_host(eight_chips_with_hosts, name):
    text, _ = eight_chips_with_hosts[name]
    # 4 slots of 64 tokens a chip. The compiler tiles what a chip handles (":T("); memory space 5 is the host's.
    layouts = re.findall(r"\[1,4,64\](\{[^}]*:T\([^}]*\})", text)
    assert layouts and all("S(5)" in layout for layout in layouts)


@pytest.fixture(scope="module")
def four_gpus():
    """Return each program, packed, in the dtype that kernels accept; and the run."""
    config = small_config(4)
    update = dataclasses.replace(config.update, micro_batch_tokens=4 * 128)
    config = dataclasses.replace(
        config, update=update, model=dataclasses.replace(config.model, compute_dtype="bfloat16")
    )
    run = run_of(config, "h100:4")
    return {name: program.lower(run.mesh).compile() for name, program in run.programs().items()}, run


@needs_cuda_compiler
def test_a_gpus_compiler_takes_every_program_with_its_kernels(four_gpus):
    compiled, _ = four_gpus
    assert {"prefill", "decode", "insert", "update", "publish", "annotate"} <= set(compiled)
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in compiled["update"].as_text()
    assert "__cudnn$fmhaSoftmax" in compiled["prefill"].as_text()


@needs_cuda_compiler
def test_a_gpus_programs_copy_no_cache_and_no_weights(four_gpus):
    compiled, run = four_gpus
    cache = run.sampler.abstract_state().cache_k[0][0]
    weights = run.learner.abstract_state.params["policy"]["blocks"]["gate"]
    for name, x in (("decode", cache), ("update", weights)):
        # As they lie; to gather what fsdp has split along its innermost dimension takes another layout.
        shape = ",".join(map(str, x.sharding.shard_shape(x.shape))) + r"\]{" + ",".join(map(str, range(x.ndim)[::-1]))
        text = compiled[name].as_text()
        assert re.search(rf"= \w+\[{shape}}} ", text) and not re.search(rf"= \w+\[{shape}}} copy\(", text)


@needs_libtpu
def test_a_chip_computes_what_the_models_algebra_says(eight_chips):
    """By hand, for a chip with one prompt of 32 tokens and two completions of 32.

    A layer's matrices: 64 x 16 x 2 (4 + 2) of attention, 3 x 64 x 128 of the MLP. A kernel's rows are filled up to 128
    queries and keys: of the prompt and each completion 4 heads x 128 x 128 x 16, once forward (two products) and 3.5
    times that backward. The backward pass computes a layer again, without its last matrix.
    """
    layer, head = 64 * 16 * 2 * (4 + 2) + 3 * 64 * 128, 64 * 260
    forward, kernels = 2 * layer * (32 + 2 * 32), 3 * 4 * 4 * 128 * 128 * 16
    again = forward - 2 * 64 * 128 * 96 + kernels
    update = 2 * (forward + kernels + again + 2 * forward + 3.5 * kernels) + 3 * 2 * head * 2 * 32
    # Two rows, four steps; each query meets the 32 places of its cache and of its prompt.
    decode = 4 * 2 * (2 * (2 * layer + head) + 2 * 2 * 4 * 4 * 32 * 16)
    assert eight_chips["update"].counts.total("flops") == update
    assert eight_chips["decode"].counts.total("flops") == decode
    assert eight_chips["annotate"].counts.total("flops") == 2 * (forward + kernels) + 2 * head * 2 * 32
    assert not eight_chips["update"].counts.guessed and not eight_chips["update"].counts.uncounted


@needs_libtpu
def test_a_decode_step_sends_numbers_alone_and_an_update_every_matrix(eight_chips):
    """Weights are split over pairs. An update gathers half of each matrix at least once in each pass of its layer."""
    assert sum(eight_chips["decode"].counts.by_collective().values()) < 16 * 1024
    sent = eight_chips["update"].counts.by_collective()
    matrices = 2 * (64 * 16 * 2 * (4 + 2) + 3 * 64 * 128) * 2  # of both layers in bfloat16
    assert sent["all-gather"] >= 2 * matrices / 2
    assert sent["reduce-scatter"] + sent["all-reduce"] > 0


@needs_libtpu
def test_what_the_temporary_memory_is_made_of_is_said(eight_chips):
    update = eight_chips["update"]
    assert update.buffers == tuple(sorted(update.buffers, key=lambda b: -b.size))
    assert sum(b.size for b in update.buffers) > 0 and all(b.number > 0 for b in update.buffers)
    made_of = verdict.made_of(run_of(small_config(8), "v5e:2x4"), update)
    assert made_of[verdict.STATE] > made_of[verdict.RING] > 0


@needs_libtpu
def test_a_program_that_the_compiler_refuses_is_a_verdict():
    run = run_of(small_config(8), "v5e:2x4")
    shape = jax.ShapeDtypeStruct((2**16, 2**18), jnp.float32, sharding=sharding.replicated(run.mesh, 0))  # 64 GiB
    row = compiled.compile_one(run, "update", Program(lambda x: x + 1, (shape,)).lower(run.mesh))
    assert row.memory is None and "exceeds available HBM (15.75G)" in row.refused


def compiled_already(rows):
    """Replace ``compile_rows`` by stored results of a run on eight chips."""
    return lambda run, names=None, keep=False: [rows[name] for name in (names or rows)]


@needs_libtpu
def test_what_does_not_fit_is_named_with_the_settings_that_help_and_exit_status_1(eight_chips, monkeypatch, capsys):
    monkeypatch.setitem(chips.CHIPS, "v5e", dataclasses.replace(chips.CHIPS["v5e"], hbm_gib=0.004))
    monkeypatch.setattr(plan, "compile_rows", compiled_already(eight_chips))
    assert plan.plan(small_config(8), "v5e:2x4") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"does not fit: [a-z_, ]*update[a-z_, ]*; what helps most here: ", last)
    assert "mesh.fsdp=4 (now 2)" in last


@needs_libtpu
def test_a_plan_prints_and_writes_the_time_and_price_of_an_iteration(eight_chips, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plan, "compile_rows", compiled_already(eight_chips))
    paths = {"json_path": str(tmp_path / "p.json"), "html_path": str(tmp_path / "p.html")}
    assert plan.plan(small_config(8), "v5litepod-8", price=1.2, **paths) == 0
    out = capsys.readouterr().out
    assert "v5litepod-8 (v5e:2x4): 8 chips" in out and out.splitlines()[-1] == "fits"
    found = json.loads((tmp_path / "p.json").read_text())
    seconds = found["iteration"]["seconds"]
    costs = {name: of for name, of in found["costs"].items() if of["calls"]}
    assert seconds == pytest.approx(sum(of["calls"] * of["seconds"] for of in costs.values()))
    assert found["iteration"]["dollars_per_1000_iterations"] == pytest.approx(1000 * seconds / 3600 * 8 * 1.2)
    assert found["iteration"]["tokens_per_s_chip"] == pytest.approx(2 * 32 / seconds)
    # Two operations a weight and token of 16 completions and 8 prompts, six of what an update learns from; no prompt
    # meets the head.
    body, head = 2 * (64 * 16 * 2 * (4 + 2) + 3 * 64 * 128 + 2 * 64) + 64, 64 * 260
    flops = (2 + 6) * (body * (8 * 32 + 16 * 32) + head * 16 * 32)
    assert found["iteration"]["model_flops"] == flops
    assert found["iteration"]["mfu"] == pytest.approx(flops / (seconds * 8 * 197e12))
    assert costs["decode"]["calls"] == 32 / 4  # steps by those of a chunk
    assert found["programs"]["update"]["in_use_bytes"] > 0 and found["ring_capacity_that_fits"] > 32
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 3 and "random:debug on v5litepod-8" in page and "<script" not in page


@pytest.mark.parametrize(
    ("remat", "hbm", "expected"),
    [("auto", 300, "kept"), ("auto", 299, "all"), ("auto", None, "all"), ("full", 300, "all")],
)
def test_what_is_bounded_is_the_update_that_train_takes(remat, hbm, expected, monkeypatch):
    """Once, the bound was for the update that recomputes all, which takes longer than the run's update."""
    run = assemble(freeze({"model": {"remat": remat}}), TINY, (5,), mesh_of(ONE))
    state, update = (compiled.Row(name, Memory(100, 100, 50, 100), "") for name in ("init_state", "update"))
    kept = compiled.Row("update", Memory(100, 100, 200, 100) if hbm else None, "" if hbm else "out of memory")
    monkeypatch.setattr(plan, "compile_one", lambda run, name, lowered: kept)
    chip = dataclasses.replace(chips.CHIPS["v5e"], hbm_gib=(hbm or 300) / 2**30)
    found = plan.taken(run, [state, update], chip)
    assert found[0] is state and found[1] is {"kept": kept, "all": update}[expected]


@needs_libtpu
def test_with_remat_auto_an_iteration_is_counted_with_what_the_update_keeps(eight_chips, monkeypatch, tmp_path, capsys):
    config = small_config(8)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="auto"))
    monkeypatch.setattr(plan, "compile_rows", compiled_already(eight_chips))
    assert plan.plan(config, "v5e:2x4", json_path=str(tmp_path / "p.json")) == 0
    assert "update      keeps the MLPs, in " in capsys.readouterr().out
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["costs"]["update"]["flops"] < eight_chips["update"].counts.total("flops")


@needs_libtpu
def test_the_search_compiles_as_many_as_it_says_and_prints_what_fits(eight_chips, monkeypatch, capsys):
    asked = []

    def compile_rows(run, names):
        asked.append((dict(run.mesh.shape), run.model.remat, tuple(names)))
        return compiled_already(eight_chips)(run, names)

    monkeypatch.setattr(searching, "compile_rows", compile_rows)
    config = small_config(8)
    devices, chip = chips.devices_of("v5e:2x4")
    model = presets.model_of(config)
    assert searching.search(config, model, devices, chip, most=3) == 0
    out = capsys.readouterr().out.splitlines()
    assert "3 are compiled (--search=3)" in out[0] and out[4].startswith("best that fit")
    assert len(out) == 5 + 3 and "mesh.data=" in out[5] and "MFU" in out[5]
    assert sum("update" in names for *_, names in asked) == 3
    meshes = [tuple(mesh.items()) for mesh, _, names in asked if "decode" in names]
    assert len(meshes) == len(set(meshes))  # a sampler's programs once a mesh
    # Where not even the arrays fit, nothing is compiled.
    asked.clear()
    assert searching.search(config, model, devices, dataclasses.replace(chip, hbm_gib=1e-4), most=3) == 1
    assert not asked and "0 are compiled" in capsys.readouterr().out


@needs_libtpu
def test_a_search_without_a_layout_that_divides_is_refused():
    config = small_config(8)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, prompts_per_iteration=7))
    devices, chip = chips.devices_of("v5e:2x4")
    with refused("rollout.prompts_per_iteration", 7, "--search", "8 devices"):
        searching.search(config, presets.model_of(config), devices, chip, most=1)


def test_memory_in_use_counts_what_lives_beside_the_program():
    """Learner 30, ring 20, rollouts 5: 55 MiB stay while a program runs, and 60 MiB more with the host.

    A sampler has 10 MiB, an evaluation's sampler 4 MiB. With lookahead its slots stay; otherwise they are freed with
    its rollouts.
    """

    rows = {
        "init_sampler": (0, 10, 0, 0),
        "decode": (20, 10, 7, 10),  # half of its arguments are weights, which the learner owns
        "eval_init_sampler": (0, 4, 0, 0),
        "eval_decode": (9, 4, 3, 4),
        "collect": (10, 15, 0, 10),
        "publish": (30, 6, 0, 0),
        "init_state": (10, 30, 0, 10, 60),
        "init_ring": (0, 20, 0, 0),
        "update": (50, 51, 40, 50),
    }
    memories = {name: Memory(*(n * MIB for n in sizes)) for name, sizes in rows.items()}
    assert verdict.host_bytes(memories) == 60 * MIB
    for keeps_slots, expected in (
        (False, {"decode": 55 + 6 + 10 + 7, "eval_decode": 55 + 6 + 4 + 3, "update": 55 + 40 + 1}),
        (True, {"decode": 65 + 6 + 7, "eval_decode": 65 + 6 + 4 + 3, "update": 65 + 40 + 1}),
    ):
        assert resident_bytes(memories, keeps_slots=keeps_slots) == (65 if keeps_slots else 55) * MIB
        in_use = in_use_bytes(memories, keeps_slots=keeps_slots)
        # init_state runs before the rest exists: 10 + 30 - 10.
        assert {n: in_use[n] // MIB for n in (*expected, "init_state")} == expected | {"init_state": 30}


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("v9:2x4", ["v4, v5e, v5p, v6e"]),
        ("v5e", ["v4"]),
        ("v5e:3x5", []),
        ("h100:0", ["a100, h100, h200"]),
    ],
)
def test_an_unknown_topology_is_refused(topology, words):
    if not words and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu knows the shapes")
    with refused("--topology", topology, *words):
        chips.devices_of(topology)


def test_without_a_compiler_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for topology, extra in (("v5e:2x4", "plan"), ("h100:8", "plan-gpu")):
        with raises_with(ConfigError, f"pip install 'jaxrl_llm[{extra}]'"):
            chips.devices_of(topology)


@needs_libtpu
def test_a_search_says_what_no_mesh_changes():
    config = small_config(8)
    config = dataclasses.replace(config, executables="nowhere/at/all")
    devices, chip = chips.devices_of("v5e:2x4")
    with raises_with(ConfigError, "nowhere/at/all"):
        searching.search(config, presets.model_of(config), devices, chip, most=1)


def test_a_file_without_a_folder_is_refused_before_anything_is_compiled():
    with refused("--json", "nowhere/plan.json"):
        plan.plan(small_config(8), "v5e:2x4", json_path="nowhere/plan.json")


@needs_libtpu
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("--save", str(tmp_path / "file")):
        plan.plan(small_config(8), "v5e:2x4", save=str(tmp_path / "file"))


@needs_libtpu
def test_the_numbers_are_written_before_the_programs(eight_chips, monkeypatch, tmp_path):
    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(plan, "compile_rows", compiled_already(eight_chips))
    monkeypatch.setattr(plan, "save_all", full)
    with pytest.raises(OSError, match="disk full"):
        plan.plan(small_config(8), "v5e:2x4", json_path=str(tmp_path / "p.json"), save=str(tmp_path / "programs"))
    assert json.loads((tmp_path / "p.json").read_text())["does_not_fit"] == []


@needs_libtpu
def test_a_config_that_takes_saved_programs_is_planned_before_there_are_any(monkeypatch, capfd):
    def compile_rows(*args, **kwargs):
        raise ConfigError("all is assembled")

    monkeypatch.setattr(plan, "compile_rows", compile_rows)
    words = [f"--config={DEBUG_CONFIG}", "--topology=v5e:1x1", "--config.executables=nowhere"]
    assert run_command("plan", *words, monkeypatch=monkeypatch, capfd=capfd).err.endswith("all is assembled\n")


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_price_that_is_no_number_of_dollars_is_refused(price, monkeypatch, capfd):
    words = [f"--config={DEBUG_CONFIG}", "--topology=v5e:1x1", f"--price={price}"]
    check_refusal(run_command("plan", *words, monkeypatch=monkeypatch, capfd=capfd).err, "--price", float(price))


@needs_libtpu
def test_a_mesh_that_is_not_the_pod_is_refused():
    devices, _ = chips.devices_of("v5p:2x2x2")
    with refused("mesh.data", 3, "8 devices"):
        sharding.make_mesh(MeshConfig(data=3), devices)


@needs_libtpu
@pytest.mark.slow
def test_smollm2_fits_eight_chips(capsys):
    config = freeze(
        {
            "model": {"path": "smollm2-135m-instruct", "compute_dtype": "bfloat16"},
            "prompts": {"max_tokens": 56},
            "sampling": {"max_completion_tokens": 24},
            "rollout": {"prompts_per_iteration": 8, "group_size": 8},
            "update": {"batch_size": 64, "micro_batch_size": 16},
            "mesh": {"fsdp": 8},
        }
    )
    assert plan.plan(config, "v5e:2x4") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "fits"


@needs_libtpu
@pytest.mark.slow
def test_a_plan_saves_every_program_and_a_search_compiles(tmp_path, capsys):
    config = small_config(4)
    assert plan.plan(config, "v5e:2x2", save=str(tmp_path)) == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("4 x TPU v5 lite, jax ") and "libtpu" in folder.name
    assert len(list(folder.iterdir())) == len(run_of(config, "v5e:2x2").programs())
    assert all(file.stat().st_size > 1000 for file in folder.iterdir())
    devices, chip = chips.devices_of("v5e:2x2")
    assert searching.search(config, presets.model_of(config), devices, chip, most=1) == 0
