"""Cost: rooflines and prices, computed by hand."""

import types

import pytest

from jaxrl_llm.config import freeze
from jaxrl_llm.models import presets
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.planning import cost
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.collectives import Sent
from jaxrl_llm.planning.counting import Counts, Region
from jaxrl_llm.settings.use import use

# A second for 1e12 operations, 1e9 bytes of memory, 1e9 sent, 1e9 to the host.
CHIP = Chip(1.0, tflops=1.0, hbm_gb=1.0, link_gb=1.0, host_gb=1.0)


def test_a_loops_turns_take_the_longest_of_what_they_do_and_loops_follow_each_other():
    matmuls = Region("a", 2, flops=3e12, read_bytes=1e9, sent=[Sent("all-gather", "", 2, 2e9, "")])
    both_ways = {"host_read_bytes": 1e9, "host_written_bytes": 0.5e9}  # at once
    copies = Region("b", 1, flops=0, read_bytes=1e9, written_bytes=3e9, **both_ways)
    found = cost.seconds(Counts((matmuls, copies), {}, {}), CHIP)
    assert found.total == pytest.approx(2 * 3 + 4)
    assert found.by == pytest.approx({"operations": 6, "memory": 6, "links": 4, "host": 1})
    assert found.bound == "operations"  # of six seconds of the ten


def test_a_token_is_computed_by_its_own_experts():
    """The figures on the models' cards: 12.9 of 46.7 billion, 3.3 of 30.5 billion."""
    mixtral, qwen = (presets.PRESETS[name] for name in ("mixtral-8x7b", "qwen3-30b-a3b"))
    assert cost.active_params(mixtral) == 12_879_925_248
    assert cost.active_params(qwen) == 3_353_032_704
    dense = presets.PRESETS["qwen3-8b"]
    assert cost.active_params(dense) == dense.num_params


@pytest.mark.parametrize("reads_prompts", [False, True])
def test_the_head_is_of_completions_and_of_prompts_that_are_read(reads_prompts):
    """Two prompts of 5 tokens with four completions of 7 tokens each, and an update of both groups."""
    arch = PRESETS["debug"]
    settings = {
        "prompts": {"max_tokens": 5},
        "sampling": {"max_completion_tokens": 7},
        "rollout": {"prompts_per_iteration": 2, "group_size": 4},
        "update": {"batch_size": 8, "micro_batch_size": 8},
    }
    if reads_prompts:
        settings["algorithm"] = {"cross_entropies": [use("environment", coefficient=0.1)]}
    head = 260 * 64
    body, read = arch.num_params - head, 2 * 4 * 7 + 2 * 4 * reads_prompts
    passed = 2 * 5 + 8 * 7
    expected = 2 * (body * passed + head * 56) + 6 * (body * passed + head * read)
    assert cost.model_flops(freeze(settings), arch) == expected


@pytest.mark.parametrize(("lookahead", "steps"), [(0, 2 * 7), (2, 10)])
def test_a_lookahead_leaves_no_slot_idle(lookahead, steps):
    """8 rollouts of 7 tokens in 6 slots: two rounds, or 56 tokens at 6 per step."""
    rollout = {"prompts_per_iteration": 2, "group_size": 4, "slots": 6, "lookahead_prompts": lookahead}
    update = {"batch_size": 8, "micro_batch_size": 8}
    config = freeze({"sampling": {"max_completion_tokens": 7}, "rollout": rollout, "update": update})
    assert cost.decode_steps(config) == steps


@pytest.mark.parametrize(("chunk", "share"), [(8, 12 / 16), (4, 1), (64, 12 / 64)])
def test_the_last_chunk_of_steps_ends_with_the_last_row(chunk, share):
    """One slot for each rollout of 12 tokens: 12 steps. Once, two chunks of 8 were counted as 16."""
    rollout = {"prompts_per_iteration": 2, "group_size": 4, "chunk_steps": chunk}
    update = {"batch_size": 8, "micro_batch_size": 8}
    settings = {"sampling": {"max_completion_tokens": 12}, "rollout": rollout, "update": update}
    run = types.SimpleNamespace(
        config=freeze(settings), mesh=types.SimpleNamespace(size=1), model=types.SimpleNamespace(arch=PRESETS["debug"])
    )
    of = Counts((Region("", 1, flops=1e6),), {}, {})
    assert cost.iteration(run, CHIP, {"decode": of}).seconds == pytest.approx(-(-12 // chunk) * share * 1e-6)


def test_dollars_are_of_all_chips():
    least = cost.Iteration(36.0, {}, 0.0, 0.0, 0.0)
    assert least.dollars(1000, chips=16, price=4.2) == pytest.approx(10 * 16 * 4.2)


@pytest.mark.parametrize("uncounted", [{}, {"__cudnn$fmhaSoftmax": 1}])
def test_what_a_kernel_computes_and_is_not_told_takes_what_the_models_algebra_says(uncounted):
    """Two chips of 1e12 operations a second.

    The program does almost nothing, and the operations of a part of it are unknown.
    """
    settings = {"model": {"path": "random:debug"}, "update": {"batch_size": 8, "micro_batch_size": 8}}
    run = types.SimpleNamespace(
        config=freeze(settings), mesh=types.SimpleNamespace(size=2), model=types.SimpleNamespace(arch=PRESETS["debug"])
    )
    of = Counts((Region("", 1, flops=1e6),), {}, uncounted)
    found = cost.iteration(run, CHIP, {"update": of, "eval_decode": of})
    algebra = cost.model_flops(run.config, PRESETS["debug"]) / 2e12
    assert algebra > 1e-5 and found.seconds == pytest.approx(algebra if uncounted else 1e-6)
    assert found.mfu == pytest.approx(1 if uncounted else algebra / 1e-6)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
