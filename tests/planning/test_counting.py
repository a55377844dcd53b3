"""Counting: a program's operations equal its mathematics, and a loop counts once per iteration."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.building import needs_cuda_compiler

from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.planning.counting import count
from jaxrl_llm.planning.hlo import moved, parse, sizes
from jaxrl_llm.planning.operations import causal_share


def compiled_text(fn, *shapes):
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()


def test_a_scanned_matmul_counts_as_often_as_it_turns():
    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    counts = count(compiled_text(scanned, (8, 16), (5, 16, 16)))
    assert counts.total("flops") == 5 * 2 * 8 * 16 * 16
    # Each turn reads its own matrix, not all five.
    assert counts.total("hbm_bytes") < 5 * (3 * 16 * 16 + 10 * 8 * 16) * 4


def test_nested_loops_multiply():
    def nested(x, w):
        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.fori_loop(0, 4, lambda j, x: x @ w, x), x)

    assert count(compiled_text(nested, (8, 8), (8, 8))).total("flops") == 12 * 2 * 8**3


def test_loops_in_a_branch_count_as_often_as_the_loop_around_it_turns_and_of_the_dearest_branch_alone():
    def times(n):
        return lambda x, w: jax.lax.fori_loop(0, n, lambda j, x: jnp.tanh(x @ w), x)

    def branching(x, w, which):
        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.cond(which[i] > 0, times(5), times(7), x, w), x)

    assert count(compiled_text(branching, (8, 8), (8, 8), (3,))).total("flops") == 3 * 7 * 2 * 8**3


def test_a_branch_that_is_taken_now_and_then_counts_as_often():
    def branching(x, w, which):
        def turn(i, x):
            with jax.named_scope("rare"):
                return jax.lax.cond(which[i] > 0, lambda x: x @ w @ w, lambda x: x + 1, x)

        return jax.lax.fori_loop(0, 4, turn, x)

    text = compiled_text(branching, (8, 8), (8, 8), (4,))
    assert count(text, taken=lambda name: 0.25 if "rare" in name else 1.0).total("flops") == 2 * 2 * 8**3
    assert count(text).total("flops") == 4 * 2 * 2 * 8**3


def test_a_loop_of_unknown_length_takes_the_turns_it_is_given():
    def until(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x @ w, x)

    counts = count(compiled_text(until, (8, 8), (8, 8)), turns_of=lambda name: 7)
    assert counts.total("flops") == 7 * 2 * 8**3
    assert list(counts.guessed.values()) == [7]


MESH_SIZE, VALUES = 8, 64


def per_device(kind):
    """Return the bytes of a collective of 64 floats per device over 8 devices."""
    names = {
        "all-gather": lambda x: jax.lax.all_gather(x, "d"),
        "all-reduce": lambda x: jax.lax.psum(x, "d"),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "d", tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % MESH_SIZE) for i in range(MESH_SIZE)]),
    }
    return names[kind]


@pytest.mark.parametrize(
    ("kind", "floats"),
    [
        ("all-gather", 7 * 64),  # its own to seven others
        ("all-reduce", 2 * 7 * 8),  # a reduce-scatter and an all-gather of an eighth
        ("reduce-scatter", 7 * 8),
        ("all-to-all", 7 * 8),  # an eighth to each
        ("collective-permute", 64),
    ],
)
def test_a_collective_sends_what_a_ring_sends(kind, floats):
    mesh = Mesh(jax.devices()[:MESH_SIZE], ("d",))
    split = NamedSharding(mesh, P("d"))
    fn = jax.shard_map(per_device(kind), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    x = jax.ShapeDtypeStruct((MESH_SIZE * VALUES,), jnp.float32, sharding=split)
    assert count(jax.jit(fn).lower(x).compile().as_text()).by_collective() == {kind: 4 * floats}


def test_collectives_in_a_loop_count_as_often_as_it_turns():
    mesh = Mesh(jax.devices()[:MESH_SIZE], ("d",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    def turns(x):
        return jax.lax.fori_loop(0, 6, lambda i, x: jnp.tanh(jax.lax.psum(x, "d")), x)

    x = jax.ShapeDtypeStruct((MESH_SIZE * VALUES,), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    counts = count(jax.jit(turns).lower(x).compile().as_text())
    assert counts.by_collective() == {"all-reduce": 6 * 4 * 2 * 7 * 8}
    assert counts.by_collective("collectives") == {"all-reduce": 6}


# As libtpu writes it. A matmul of [96, 64] by 4 heads of [16, 64] in two halves: the window slides over both of them,
# and all but one place is padding.
TPU = """HloModule jit_f, is_scheduled=true, num_partitions=8

%body (p.1: (s32[], f32[96,64])) -> (s32[], f32[96,64]) {
  %p.1 = (s32[]{:T(128)}, f32[96,64]{1,0:T(8,128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %x = f32[96,64]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%counter, %two)
  %kept = f32[96,64]{1,0:T(8,128)S(1)} copy(%x)
  ROOT %out = (s32[]{:T(128)}, f32[96,64]{1,0:T(8,128)}) tuple(%next, %x)
}

%condition (p.2: (s32[], f32[96,64])) -> pred[] {
  %p.2 = (s32[]{:T(128)}, f32[96,64]{1,0:T(8,128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %bound = s32[]{:T(128)} constant(9)
  ROOT %lt = pred[]{:T(512)} compare(%at, %bound), direction=LT
}

ENTRY %main (x: f32[96,64], w: f32[4,16,64]) -> f32[96,4,16] {
  %x.1 = f32[96,64,1]{1,0,2:T(8,128)} parameter(0), metadata={op_name="of two
lines"}
  %w.1 = f32[4,16,64]{2,1,0:T(8,128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %flat = f32[96,64]{1,0:T(8,128)} bitcast(%x.1)
  %start = (s32[]{:T(128)}, f32[96,64]{1,0:T(8,128)}) tuple(%zero, %flat)
  %loop = (s32[]{:T(128)}, f32[96,64]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  %all-gather.1 = f32[8,16,64]{2,1,0:T(8,128)} all-gather(%w.1), replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}
  ROOT %conv = f32[96,4,16]{2,0,1:T(8,128)} convolution(%x.1, %w.1), WINDOW
}
"""
TPU = TPU.replace("WINDOW", "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->b0f")


def test_a_matmul_that_is_written_as_a_convolution_counts_what_meets_no_padding():
    assert count(TPU).total("flops") == 2 * 96 * 64 * 4 * 16


def test_a_loop_whose_turns_are_joined_counts_its_steps():
    (loop,) = [region.turns for region in count(TPU).regions if region.path == "loop"]
    assert loop == 5  # 0, 2, 4, 6, 8


def test_an_element_of_a_tuple_may_have_no_line_of_its_own():
    """The compiler of jax 0.12 writes texts in this form."""
    lines = [line for line in TPU.splitlines() if not line.startswith(("  %at =", "  %counter =", "  %x ="))]
    newer = "\n".join(lines).replace("compare(%at,", "compare(%p.2#0,")
    newer = (
        newer.replace("add(%counter,", "add(%p.1#0,")
        .replace("copy(%x)", "copy(%p.1#1)")
        .replace("%next, %x)", "%next, %p.1#1)")
    )
    assert count(newer).regions == count(TPU).regions


def test_memory_counts_whole_tiles_and_not_what_is_on_the_chip():
    (loop,) = [region for region in count(TPU).regions if region.path == "loop"]
    # The copy reads 96 rows of 64, each in a tile of 128 lanes, and writes to the chip's own memory. The counter's
    # sum and comparison have two numbers of 4 bytes each, and a result of 4 bytes, or 1.
    assert loop.read_bytes == 96 * 128 * 4 + (4 + 4) + (4 + 4) and loop.written_bytes == 4 + 1


def test_groups_of_a_named_mesh_axis_have_its_size():
    (once,) = count(TPU).sent
    # Of 64 floats a row, not of their tiles of 128.
    assert once[0] == 1 and (once[1].chips, once[1].num_bytes) == (2, 4 * 16 * 64 * 4)


# Two heads' completions of 4096 tokens, after a prompt of 128.
SPLASH = """
ENTRY %main (q: bf16[2,4096,64], k: bf16[1,4224,64]) -> bf16[2,4096,64] {
  %q = bf16[2,4096,64]{2,1,0} parameter(0)
  %k = bf16[1,4224,64]{2,1,0} parameter(1)
  ROOT %splash_mha_fwd.1 = bf16[2,4096,64]{2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", backend_config={"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 128}"}
}
"""  # noqa: E501


def test_attention_to_a_prompt_and_the_row_itself_leaves_out_the_blocks_above_the_diagonal():
    """Eight blocks of queries attend to 640, 1152, ..., 4224 keys: 2432 on average, in two matmuls."""
    pairs = 4096 * (640 + 4224) / 2
    assert count(SPLASH).total("flops") == pytest.approx(2 * 2 * 2 * 64 * pairs)
    assert count(SPLASH, attended=lambda *sizes: 0.25 * (sizes == (4096, 4224, 512))).total("flops") == (
        2 * 2 * 2 * 64 * 4096 * 4224 / 4
    )


@pytest.mark.parametrize(("prompt", "tokens"), [(0, 1024), (0, 384), (128, 2048), (100, 1000), (384, 128)])
@pytest.mark.parametrize("window", [0, 128, 300])
def test_the_share_is_what_splash_computes_or_less(prompt, tokens, window):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    queries, keys = (-(-n // kernels.LANES) * kernels.LANES for n in (tokens, prompt + tokens))
    mask = splash.LocalMask((queries, keys), (window - 1 if window else None, 0), offset=prompt)
    kernel = kernels._splash_of(splash.MultiHeadMask([mask]))
    sizes = kernel.kwargs["block_sizes"]
    blocks = kernel.fwd_mask_info.block_mask
    share = 1.0 if blocks is None else np.count_nonzero(blocks) * sizes.block_q * sizes.block_kv / (queries * keys)
    least = causal_share(queries, keys, sizes.block_q, window)
    assert 0.4 * share < least <= share and (window or least == pytest.approx(share, rel=0.1))


SENDS = """HloModule jit_f, is_scheduled=true, num_partitions=4

%begin (p.1: f32[8]) -> (f32[32], f32[8]) {
  %p.1 = f32[8]{0} parameter(0)
  %g.1 = f32[32]{0} all-gather(%p.1), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t.1 = (f32[32]{0}, f32[8]{0}) tuple(%g.1, %p.1)
}

%beside (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p.3)
}

%go_on (p.2: f32[8]) -> f32[32] {
  %p.2 = f32[8]{0} parameter(0)
  %work = f32[8]{0} fusion(%p.2), kind=kLoop, calls=%beside
  ROOT %g.2 = f32[32]{0} all-gather(%p.2), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = (f32[32]{0}, f32[8]{0}) fusion(%x), kind=kOutput, calls=%begin
  %context = f32[8]{0} get-tuple-element(%first), index=1
  %second = f32[32]{0} fusion(%context), kind=kOutput, calls=%go_on
  %other = f32[32]{0} fusion(%x), kind=kOutput, calls=%go_on
  %sum.1 = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %sum.2 = f32[8]{0} all-reduce(%sum.1), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_collectives_of_one_channel_are_each_counted_but_one_that_goes_on_in_fusions_once():
    assert count(SENDS).by_collective("collectives") == {"all-gather": 2, "all-reduce": 2}


def test_what_instructions_give_is_found_in_every_computation():
    assert sizes(TPU, "copy") == [96 * 64] and sizes(TPU, "transpose") == []
    assert moved(TPU) == moved(TPU, "all-gather") == [8 * 16 * 64] and moved(TPU, "all-reduce") == []


def test_text_in_several_lines_is_one_instruction():
    assert parse(TPU)["main"].instructions["x.1"].attributes.endswith('lines"}')


# As XLA writes a batched matmul [16, 512, 256] x [16, 256, 1024] for an H100.
GEMM = """
HloModule example

ENTRY %main (x.1: bf16[16,512,256], y.1: bf16[16,256,1024]) -> bf16[16,512,1024] {
  %x.1 = bf16[16,512,256]{2,1,0} parameter(0)
  %y.1 = bf16[16,256,1024]{2,1,0} parameter(1)
  %custom-call.1 = (bf16[16,512,1024]{2,1,0}, s8[4194304]{0}) custom-call(%x.1, %y.1), custom_call_target="TARGET", metadata={op_name="jit(f)/dot_general"}, backend_config={"operation_queue_id":"0","gemm_backend_config":{"selected_algorithm":"0","alpha_real":1,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"alpha_imag":0,"epilogue":"DEFAULT"}}
  ROOT %get-tuple-element = bf16[16,512,1024]{2,1,0} get-tuple-element(%custom-call.1), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul"])
def test_a_matmul_by_a_librarys_call_on_a_gpu_is_counted_without_its_room_to_work_in(target):
    counts = count(GEMM.replace("TARGET", target))
    assert counts.total("flops") == 2 * 16 * 512 * 256 * 1024 and not counts.uncounted
    assert counts.total("hbm_bytes") == 2 * 16 * (512 * 256 + 256 * 1024 + 512 * 1024)


@needs_cuda_compiler
def test_a_gpus_compiler_writes_matmuls_that_are_counted():
    """This test runs in its own process because of XLA_FLAGS: matmuls by XLA's own kernels, and by library calls."""
    script = """
import jax
from jaxrl_llm.planning import chips
from jaxrl_llm.planning.counting import count
(device,), _ = chips.devices_of("h100:1")
x, y = (jax.ShapeDtypeStruct(s, "bfloat16", sharding=jax.sharding.SingleDeviceSharding(device)) for s in SHAPES)
text = jax.jit(lambda x, y: x @ y).lower(x, y).compile().as_text()
print(int(count(text).total("flops")), "__cublas" in text)
"""
    command = [sys.executable, "-c", script.replace("SHAPES", "((512, 256), (256, 1024))")]
    for flag, by_library in (("true", False), ("false", True)):
        environment = {**os.environ, "XLA_FLAGS": f"--xla_gpu_enable_triton_gemm={flag}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{2 * 512 * 256 * 1024} {by_library}\n"


def test_a_librarys_call_on_a_gpu_is_named_as_not_counted():
    call = 'custom-call(%x.1, %w.1), custom_call_target="__cublas$gemm"'
    text = TPU.replace(TPU[TPU.index("convolution(") : TPU.rindex("\n}")], call)
    counts = count(text)
    assert counts.total("flops") == 0 and counts.uncounted == {"__cublas$gemm": 1}
