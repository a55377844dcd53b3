"""Properties of a run's compiled programs: memory, collectives, donation, publishing, recompiles, host transfers."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import building, ghosts
from support.building import COMPLETION_TOKENS, CUBE, EIGHT, ONE, PROMPT_TOKENS, ROW_TOKENS, TINY, mesh_of, needs_libtpu
from support.refusal import refused

from jaxrl_llm.actor.sampler import SamplerState
from jaxrl_llm.commands import train as train_module
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.models import lora
from jaxrl_llm.models.architecture import PRESETS, Architecture
from jaxrl_llm.planning import chips, hlo
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.reports.metrics import read_metrics
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import programs, sharding
from jaxrl_llm.runtime.programs import compile_all, memory
from jaxrl_llm.types import RingState, TrainState

# 32 rollouts of 8 prompts in a ring of 64, all 32 rows of an update in one micro-batch: 4 rows per device of eight.
SETTINGS = {
    "prompts": {"max_tokens": PROMPT_TOKENS},
    "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
    "rollout": {"prompts_per_iteration": 8, "group_size": 4, "slots": 16},
    "replay": {"capacity": 64, "max_age_steps": 2},
    "update": {"batch_size": 32, "micro_batch_size": 32, "logp_chunk_tokens": 8, "updates_per_iteration": 2},
}
ROWS_PER_DEVICE = 4


@functools.cache
def make_run(mesh=EIGHT, *, arch=TINY, compute_dtype="float32", logp_chunk_tokens=8, top_k=0):
    settings = SETTINGS | {
        "model": {"compute_dtype": compute_dtype},
        "sampling": SETTINGS["sampling"] | {"top_k": top_k},
        "update": SETTINGS["update"] | {"logp_chunk_tokens": logp_chunk_tokens},
    }
    return assemble(freeze(settings), arch, building.EOS_IDS, mesh_of(mesh))


class GuardedCounter(programs.CompileCounter):
    """``train`` creates its counter last before the loop. From then on only explicit transfers are allowed."""

    def __init__(self):
        super().__init__()
        jax.config.update("jax_transfer_guard", "disallow")


@dataclasses.dataclass
class Finished:
    metrics: list  # rows of metrics.jsonl
    programs: dict  # as assembled
    compiled: dict


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return four guarded iterations of ``train`` on eight devices, with every program in use."""
    tmp_path = tmp_path_factory.mktemp("loop")
    questions = tmp_path / "questions.jsonl"
    rows = [{"prompt": "abcdefghij"[: 1 + i % 6], "period": 2 + i % 3} for i in range(24)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def reward(prompts, completions, *, period, **columns):\n"
        "    return [float(len(text.encode()) % p == 0) for text, p in zip(completions, period)]\n"
    )
    config = freeze(
        SETTINGS
        | {
            "num_iterations": 4,
            "model": {"path": "random:debug"},
            "mesh": dataclasses.asdict(EIGHT),
            "prompts": SETTINGS["prompts"] | {"source": "jsonl", "name": str(questions)},
            "sampling": SETTINGS["sampling"] | {"stop_strings": ("a", "e", "o")},
            "rollout": SETTINGS["rollout"] | {"chunk_steps": 3},
            "rewards": {"functions": (f"{scorer}:reward",), "num_workers": 1},
            "algorithm": {"divergence": {"name": "reference", "coefficient": 0.01}, "old_policy": "generation"},
            "optimizer": {"learning_rate": 0.02},
            "checkpoint": {"every_iterations": 2, "export": False},
            "metrics": {"tensorboard": False},
        }
    )
    record = {}

    def compile_and_record(programs, mesh):
        record.update(programs=programs, compiled=compile_all(programs, mesh))
        return record["compiled"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "debug", TINY)
        patch.setattr(train_module.programs, "CompileCounter", GuardedCounter)
        patch.setattr(train_module, "compile_all", compile_and_record)
        try:
            status = train_module.train(config, tmp_path / "run")
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                jnp.ones(3) + np.ones(3)  # the guard was there
        finally:
            jax.config.update("jax_transfer_guard", "allow")
    assert status == 0
    metrics = read_metrics(tmp_path / "run")
    return Finished(metrics, **record)


def bytes_per_device(tree):
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def sizes(shapes):
    """Return the numbers of elements of every array type in a text: f32[2,3] of HLO or tensor<2x3xf32> of StableHLO."""
    found = re.findall(r"[a-z]+\d+\[([\d,]+)\]", shapes) + re.findall(r"tensor<((?:\d+x)+)[a-z]", shapes)
    return [math.prod(map(int, re.findall(r"\d+", dims))) for dims in found]


# --- what is in the compiled programs ---


def test_no_array_of_rows_by_length_by_vocabulary_is_in_the_compiled_update(finished):
    limit = ROWS_PER_DEVICE * COMPLETION_TOKENS * TINY.vocab_size
    largest = max(sizes(finished.compiled["update"].as_text()))
    # The largest there is are the attention weights of a layer, far from a vocabulary for every position.
    assert largest < limit
    # The search does find such an array: a device's, with chunks as long as completions.
    whole = make_run(logp_chunk_tokens=ROWS_PER_DEVICE * COMPLETION_TOKENS)
    text = whole.programs()["update"].lower(whole.mesh).as_text()
    assert max(sizes(text)) >= limit


def test_insert_moves_no_row_between_devices(finished):
    # Baselines and counts need the scalars of all rollouts; tokens, log-probs and the ring stay where they are.
    moved = hlo.moved(finished.compiled["insert"].as_text())
    B = make_run().config.rollouts_per_iteration
    assert moved and max(moved) <= B < ROWS_PER_DEVICE * ROW_TOKENS


def test_checksums_gather_no_array(finished):
    moved = hlo.moved(finished.compiled["checksums_ring"].as_text())
    num_arrays = len(jax.tree.leaves(finished.programs["checksums_ring"].args))
    assert moved and max(moved) <= num_arrays and memory(finished.compiled["checksums_ring"]).temporary < 2**20


def test_devices_of_a_cpu_add_up_gradients_of_bfloat16():
    """Without an option (``Program.lower``), the compiler of jaxlib 0.10 crashes on this sum."""
    # It dies where some of the mesh's axes are told apart, as in the update of a bfloat16 model.
    mesh, rows, whole = mesh_of(CUBE), PartitionSpec("data"), PartitionSpec()
    each = lambda x, w: sharding.by_device(jnp.multiply, x, w, axes=(rows, whole), shared=2, over=("data",))
    layout = sharding.NamedSharding(mesh, rows), sharding.NamedSharding(mesh, whole)
    shapes = zip(((8, 4), (1, 4)), layout, strict=True)
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape, where in shapes)
    program = programs.Program(jax.grad(lambda x, w: jnp.sum(each(x, w)), 1), args)
    compiled = program.lower(mesh).compile()
    assert hlo.moved(compiled.as_text(), "all-reduce")
    x = np.arange(32).reshape(8, 4)
    given = jax.device_put((x.astype(jnp.bfloat16), np.ones((1, 4), jnp.bfloat16)), layout)
    np.testing.assert_array_equal(compiled(*given), x.sum(axis=0, keepdims=True))


@pytest.mark.slow
def test_what_a_token_was_drawn_among_is_found_and_used_without_moving_logits():
    run = make_run(top_k=5)
    programs = run.programs()
    compiled = compile_all({name: programs[name] for name in ("decode", "update")}, run.mesh)
    decode, update = (compiled[name].as_text() for name in ("decode", "update"))
    assert max(hlo.moved(decode), default=0) < TINY.vocab_size
    # Gradients are added up over the devices; nothing else of that size travels.
    assert max(hlo.moved(update, "all-gather"), default=0) < TINY.vocab_size


@pytest.mark.parametrize("eos_ids", [(), building.EOS_IDS])
def test_a_decode_step_writes_the_cache_in_place(eos_ids):
    run = make_run(ONE)
    sampler = dataclasses.replace(run.sampler, eos_ids=eos_ids)
    program = sampler.programs(run.programs()["decode"].args[0])["decode"]
    decode = compile_all({"decode": program}, run.mesh)["decode"].as_text()
    copied = hlo.sizes(decode, "copy")
    assert copied and sampler.abstract_state().cache_k[0][0].size not in copied


def results_of_branches(jaxpr):
    """Return the shapes of the results of branches, also in nested programs."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            found |= {x.aval.shape for x in equation.outvars}
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found |= results_of_branches(inner)
    return found


def test_no_branch_results_in_caches_or_weights():
    """A GPU's program would copy them in the branch and after it."""
    run = make_run(ONE)
    sampler, params = run.sampler.abstract_state(), run.learner.abstract_state.params["policy"]
    owned = {x.shape for x in jax.tree.leaves((sampler.cache_k, sampler.tokens, params["blocks"]))}
    for name in ("decode", "update"):
        program = run.programs()[name]
        assert not results_of_branches(jax.make_jaxpr(program.fn)(*program.args).jaxpr) & owned
    # The search does find one.
    cond = jax.jit(lambda is_so, x: jax.lax.cond(is_so, jnp.sin, jnp.cos, x))
    assert (3, 5) in results_of_branches(jax.make_jaxpr(cond)(True, jnp.ones((3, 5))).jaxpr)


@needs_libtpu
@pytest.mark.parametrize(
    ("head_size", "completion"),
    [
        pytest.param(64, 256, marks=pytest.mark.slow),
        (128, 700),
        pytest.param(128, 1024, marks=pytest.mark.slow),
    ],
)
def test_a_tpus_decode_program_copies_no_cache(head_size, completion):
    """Neither a layer's read nor its write copies: the kernel accepts the caches in their memory layout."""
    arch = Architecture(260, width=256, num_layers=2, num_heads=4, num_kv_heads=2, head_size=head_size, ffn=256)
    mesh = sharding.make_mesh(MeshConfig(data=4), chips.devices_of("v5e:2x2")[0])
    settings = SETTINGS | {"model": {"compute_dtype": "bfloat16"}, "sampling": {"max_completion_tokens": completion}}
    program = assemble(freeze(settings), arch, (0,), mesh).programs()["decode"]
    cache = program.args[1].cache_k[0][0]
    text = program.lower(mesh).compile().as_text()
    copied = hlo.sizes(text, "copy")
    assert copied and max(copied) < cache.size // 4


def test_ring_train_state_and_sampler_state_are_donated_and_every_donated_byte_is_reused(finished):
    owned = (TrainState, RingState, SamplerState)
    updating = [name for name, program in finished.programs.items() if any(isinstance(x, owned) for x in program.args)]
    assert set(updating) >= {"update", "insert", "prefill", "decode", "collect"}
    for name, program in finished.programs.items():
        if name != "annotate" and not name.startswith("checksums"):  # they look at a state that stays
            assert {i for i, x in enumerate(program.args) if isinstance(x, owned)} <= set(program.donate), name
        donated = bytes_per_device([program.args[i] for i in program.donate])
        assert memory(finished.compiled[name]).aliased >= donated, name


# --- publish ---


@pytest.mark.parametrize(("shape", "dtype"), [(CUBE, jnp.bfloat16), (ONE, jnp.float32)])
def test_published_weights_are_the_learners_cast_split_by_layer_and_turned(shape, dtype):
    run = make_run(shape, arch=dataclasses.replace(TINY, tied=False), compute_dtype=dtype.dtype.name)
    params = building.learner_params(run.model, run.mesh)
    published = compile_all({"publish": run.programs()["publish"]}, run.mesh)["publish"](params)

    def check(mine, theirs, wanted):
        to = dtype if mine.ndim > 1 else jnp.float32  # norms are read in float32
        assert theirs.dtype == to and theirs.sharding == wanted.sharding
        np.testing.assert_array_equal(np.asarray(theirs), np.asarray(mine).astype(to))

    wanted = run.sampler_params
    check(params["embedding"], published["embedding"], wanted["embedding"])
    check(params["final_norm"], published["final_norm"], wanted["final_norm"])
    check(params["head"], published["head"], wanted["head"])
    assert len(published["layers"]) == run.model.arch.num_layers and "blocks" not in published
    for i, layer in enumerate(published["layers"]):
        for name, leaf in params["blocks"].items():
            mine = np.asarray(leaf[i])
            if name in ("q", "k", "v"):  # [N,H,D]
                mine = mine.reshape(-1, run.model.arch.width).T
            elif "norm" not in name:  # [D,N,H], [F,D] and [D,F]
                mine = mine.reshape(len(mine), -1).T
            check(mine, layer[name], wanted["layers"][i][name])
    if shape is CUBE:
        layer = published["layers"][0]
        assert layer["q"].sharding.spec == layer["gate"].sharding.spec == PartitionSpec(None, "tensor")
        assert layer["o"].sharding.spec == layer["down"].sharding.spec == PartitionSpec("tensor", None)
    # The learner keeps its own.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


# --- the reference ---


def test_a_reference_that_is_reset_is_the_policy_and_the_ring_is_empty():
    algorithm = {"divergence": {"name": "reference", "coefficient": 0.1}, "reference_reset_iterations": (1,)}
    run = assemble(freeze(SETTINGS | {"algorithm": algorithm}), TINY, building.EOS_IDS, mesh_of(ONE))
    wanted = ("init_state", "init_ring", "reset_reference")
    compiled = compile_all({name: run.programs()[name] for name in wanted}, run.mesh)
    state, ring = compiled["init_state"](building.learner_params(run.model, run.mesh)), compiled["init_ring"]()
    jax.tree.map(np.testing.assert_array_equal, state.others["reference"], building.host_params(run.model))
    other = building.host_params(run.model, seed=1)
    placed = jax.device_put(other, jax.tree.map(lambda x: x.sharding, run.learner.params))
    state = state.replace(params={"policy": placed})
    ring = ring.replace(inserted_step=ring.inserted_step + 1)
    state, ring = compiled["reset_reference"](state, ring)
    jax.tree.map(np.testing.assert_array_equal, (state.params["policy"], state.others["reference"]), (other, other))
    assert (np.asarray(ring.inserted_step) == -1).all()
    # Each has its own buffers: the update takes over the policy's.
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.params, state.others))]
    assert len(set(places)) == len(places)


@pytest.mark.tier("slow")  # plain: test_the_loop_resets_the_reference_...
def test_adapters_that_start_from_others_have_the_base_alone_as_their_first_reference():
    """As in a run without a reset: the reference is the base's arrays."""
    algorithm = {"divergence": {"name": "reference", "coefficient": 0.1}, "reference_reset_iterations": (1000,)}
    adapters = {"rank": 4, "dora": True, "rank_stabilised": True, "modules": 2, "targets": ("q", "down")}
    of = lambda **path: freeze(SETTINGS | {"algorithm": algorithm, "model": {"lora": adapters | path}})
    run = assemble(of(), TINY, building.EOS_IDS, mesh_of(CUBE))
    compiled = compile_all({name: run.programs()[name] for name in ("init_state", "init_ring")}, run.mesh)
    compiled |= {"publish_base": lambda base: base, "checksums_base": lambda base: np.zeros(1)}
    start, base = lora.split(building.learner_params(run.model, run.mesh))
    static = dataclasses.replace(run.learner, config=of(path="of/others"))  # whose folder nobody reads here
    learner = Learner(static, compiled, Ledger(), base=base)
    learner.start(start)
    reference, like = learner.state.others["reference"], run.learner.abstract_state.others["reference"]
    form = lambda x: (x.shape, x.dtype, x.sharding)
    assert jax.tree.map(form, reference) == jax.tree.map(form, like)
    merged = lora.merge(reference, base, run.config.model.lora)
    assert all(np.any(x) for name, x in learner.policy["blocks"].items() if name.endswith("_b"))
    for name, x in merged["blocks"].items():
        np.testing.assert_allclose(x, base["blocks"][name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("path", ["", "of/a/teacher"])
def test_a_run_goes_on_with_the_reference_that_it_had(path):
    algorithm = {"divergence": {"name": "reference", "coefficient": 0.1}}
    of = lambda path: freeze(SETTINGS | {"algorithm": algorithm, "model": {"path": "mine", "reference_path": path}})
    run = assemble(of(path), TINY, building.EOS_IDS, mesh_of(ONE), TINY)
    compiled = compile_all({"checksums_reference": run.programs()["checksums_reference"]}, run.mesh)
    weights = building.learner_params(run.model, run.mesh)
    others = {**weights, "final_norm": weights["final_norm"].at[3].add(1e-6)}
    learner = lambda reference, path=path: Learner(
        dataclasses.replace(run.learner, config=of(path)), compiled, Ledger(), reference=reference
    )
    saved = json.loads(json.dumps(learner(weights).host_state()))
    nothing = {"train": None, "ring": None}
    learner(weights).restore(saved, nothing)
    setting, value = ("model.reference_path", "of/a/teacher") if path else ("model.path", "mine")
    with refused(setting, value, "weights", "reference"):
        learner(others).restore(saved, nothing)
    learner(others, "of/another").restore(saved, nothing)  # as someone has said
    learner(others).restore({k: v for k, v in saved.items() if k != "reference"}, nothing)  # of an earlier version


def test_the_loop_resets_the_reference_after_the_iterations_that_are_said(tmp_path, monkeypatch):
    called, ghost = [], ghosts.ghost
    noted = lambda name, program: lambda *args: called.append(name) or ghost(name, program)(*args)
    monkeypatch.setattr(ghosts, "ghost", noted)
    ghosts.haunt(monkeypatch)
    settings = SETTINGS | {
        "num_iterations": 3,
        "prompts": {"size": 8},
        "rewards": {"num_workers": 1},
        "algorithm": {
            "divergence": {"name": "reference", "coefficient": 0.1},
            "reference_reset_iterations": (1, 3),
        },
        "checkpoint": {"export": False},
        "metrics": {"tensorboard": False},
    }
    assert train_module.train(freeze(settings), tmp_path) == 0
    seen = [name for name in called if name in ("annotate", "update", "reset_reference")]
    one, reset = ["annotate", "update"], ["reset_reference"]
    assert seen == one + reset + one + one + reset


# --- the loop ---


def test_loop_compiles_nothing_after_warmup_and_samples_from_the_weights_of_the_last_update(finished):
    # That no transfer was implicit, the fixture's guard has seen.
    assert len(finished.metrics) == 4
    for row in finished.metrics:
        assert row["compile/recompiles_after_warmup"] == 0
        # Of the tokens sampled by the learner's version. From the second iteration on a sampler with stale weights
        # would be far off: the rollouts of earlier versions are, by kl_behaviour. Measured: 1.0e-6 nats.
        assert 0 < row["update/sampler_learner_gap_max_nats"] < 1e-5
        assert row["update/grad_norm"] > 0 and row["update/kl_behaviour_nats"] > 1e-3
        # The learner's log-probs of when a rollout went into the ring are the sampler's, of replayed rollouts too.
        assert 0 < row["update/old_policy_gap_max_nats"] < 1e-5
