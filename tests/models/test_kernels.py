"""Attention by kernels equals the reference path.

Prompts are padded with NaN, and gradients are compared too. Compilers accept the kernels. Pallas' kernels run in its
interpreter here. cuDNN's part is replaced by the XLA implementation of the same function.
"""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention
from reference import attention as oracle
from support.building import TINY, Sampling, completions, host_params, make_prompts, make_sampler, needs_libtpu
from support.tiers import mostly_in

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.attention import Cache, Prompt, attend, attend_next
from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.models.kernels import tpu_decode
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.planning import chips
from jaxrl_llm.runtime import sharding

B, P, T, L, N, K, H = 4, 2, 5, 6, 4, 2, 8
ON_TPU, ON_GPU = splash_attention.make_splash_mha_single_device, jax.nn.dot_product_attention
CALL = pallas.pallas_call


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """Make the same calls for a device that the tests have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splash_attention, "make_splash_mha_single_device", functools.partial(ON_TPU, interpret=True))
        patch.setattr(jax.nn, "dot_product_attention", lambda *args, implementation, **kwargs: ON_GPU(*args, **kwargs))
        patch.setattr(pallas, "pallas_call", functools.partial(CALL, interpret=True))
        yield


def arrays(seed):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, K, T, H), (B, K, T, H), (P, K, L, H), (P, K, L, H))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes], rng


@functools.cache
def program(implementation, rows):
    """Return output and gradients of a weighted sum of the output, with respect to all arrays."""

    def call(arrays, visible, weight):
        q, k, v, keys, values = arrays
        rule = {"alone": {}, "of a group": {"prompt": Prompt(keys, values, visible)}, "packed": {"visible": visible}}
        out = attend(q, k, v, **rule[rows], implementation=implementation)
        return jnp.sum(out * weight), out

    return jax.jit(jax.value_and_grad(call, has_aux=True))


@pytest.mark.parametrize("rows", ["alone", "of a group", "packed"])
@pytest.mark.parametrize("implementation", ["splash", "cudnn"])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_kernel_attends_as_the_definition_says_and_its_gradient_is_the_reference_paths(implementation, rows, seed):
    given, rng = arrays(seed)
    q, k, v, keys, values = given
    length = rng.integers(0, L + 1, P) if rows == "of a group" else np.zeros(P, int)
    seen = np.tril(np.ones((B, T, T), bool))
    if rows == "packed":
        seen &= (rng.random(seen.shape) < 0.5) | np.eye(T, dtype=bool)
    truth = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        of, head = b * P // B, n // (N // K)
        pieces = ((keys, k), (values, v))
        both = [np.concatenate([x[of, head, : length[of]], y[b, head, seen[b, t]]]) for x, y in pieces]
        truth[b, t, n] = oracle.attend(q[b, t, n], *both)
    visible = np.arange(L)[None, :] < length[:, None]
    for x in (keys, values):
        x[~visible[:, None].repeat(K, 1)] = np.nan
    visible = seen if rows == "packed" else visible
    weight = rng.normal(size=q.shape).astype(np.float32)
    (_, out), gradient = program(implementation, rows)(given, visible, weight)
    np.testing.assert_allclose(out, truth, atol=3e-6)
    clean = [np.nan_to_num(x) for x in given]
    _, expected = program("xla", rows)(clean, visible, weight)
    for name, one, other in zip("qkvKV", gradient, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)


def test_blocks_of_a_packed_line_that_show_nothing_are_passed_over():
    """Three blocks of 128: no query of the last block attends to the first block."""
    rng, width = np.random.default_rng(0), 300
    q = rng.normal(size=(1, width, 2, H)).astype(np.float32)
    k, v = (rng.normal(size=(1, 1, width, H)).astype(np.float32) for _ in "kv")
    unit = np.arange(width) // 130
    seen = np.tril(unit[:, None] == unit[None, :])
    weight = rng.normal(size=q.shape).astype(np.float32)
    nothing = np.zeros(0, np.float32)
    (_, out), gradient = program("splash", "packed")([q, k, v, nothing, nothing], seen[None], weight)
    truth, expected = oracle.attend_whole(q[0], k[0], v[0], seen, weight[0])
    np.testing.assert_allclose(out[0], truth, atol=3e-6)
    for name, one, other in zip("qkv", gradient, expected, strict=False):
        np.testing.assert_allclose(one[0], other, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("window", mostly_in("slow", [None, 40]))
def test_units_of_a_line_are_a_rule_to_splash_which_passes_over_blocks_where_none_meet(window):
    """Five blocks of 128: units across block borders, a unit of one token, and an empty end."""
    rng, lengths = np.random.default_rng(0), [130, 250, 1, 120, 49, 50]
    unit = np.repeat([1, 2, 3, 4, 5, 0], lengths)
    width = len(unit)
    q, weight = (rng.normal(size=(1, width, 2, H)).astype(np.float32) for _ in "qw")
    k, v = (rng.normal(size=(1, 1, width, H)).astype(np.float32) for _ in "kv")
    weight[0, unit == 0] = 0
    age = np.arange(width)[:, None] - np.arange(width)[None, :]
    seen = (unit[:, None] == unit[None, :]) & (age >= 0) & (age < (window or width))

    def total(q, k, v, unit):
        out = kernels.attend(q, k, v, None, kernels.Units(unit), "splash", window)
        return jnp.sum(out * weight), out

    (_, out), gradient = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(q, k, v, unit[None])
    truth, expected = oracle.attend_whole(q[0], k[0], v[0], seen, weight[0])
    np.testing.assert_allclose(out[0], truth, atol=3e-6)
    for name, one, other in zip("qkv", gradient, expected, strict=True):
        np.testing.assert_allclose(one[0], other, atol=1e-5, err_msg=name)

    # What is passed over, by hand: of 5 x 5 blocks, causal ones with a unit in common.
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((640, 640))] * 2)
    kernel = kernels._skip_other_units(kernels._splash_of(mask), jnp.pad(unit, (0, 640 - width)))
    blocks = np.pad(seen if window is None else unit[:, None] == unit[None, :], ((0, 40), (0, 40)))
    live = (np.tril(blocks).reshape(5, 128, 5, 128).any((1, 3))).sum()
    assert (np.asarray(kernel.fwd_mask_info.block_mask) > 0).sum() == live < 15
    assert (np.asarray(kernel.dkv_mask_info.block_mask) > 0).sum() == live


def windowed(implementation, window, has_prompt):
    """Return output and gradients of a weighted sum of the output, with respect to all arrays."""

    def call(arrays, visible, weight):
        q, k, v, keys, values = arrays
        prompt = Prompt(keys, values, visible) if has_prompt else None
        out = kernels.attend(q, k, v, prompt, None, implementation, window)
        return jnp.sum(out * weight), out

    return jax.jit(jax.value_and_grad(call, has_aux=True))


@pytest.mark.parametrize("has_prompt", [False, True], ids=["alone", "of a group"])
@pytest.mark.parametrize(
    ("implementation", "window", "tokens"),
    [
        *mostly_in("slow", [("splash", 4, 5), ("cudnn", 4, 5), ("splash", 1, 5), ("splash", 30, 300)], plain=2),
        pytest.param("splash", 100, 5, marks=pytest.mark.slow),
    ],
)
def test_a_window_shows_a_token_the_last_tokens_of_its_row(implementation, window, tokens, has_prompt):
    """The window reaches over the end of prompts of any length.

    In one of three blocks of 128, a query attends to none of the first block.
    """
    rng, width = np.random.default_rng(window), 200 if tokens > T else L
    shapes = ((B, tokens, N, H), *2 * ((B, K, tokens, H),), *2 * ((P, K, width, H),))
    given = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    length = rng.integers(1, width + 1, P) if has_prompt else np.zeros(P, int)
    weight = rng.normal(size=shapes[0]).astype(np.float32)
    visible = np.arange(width)[None, :] < length[:, None]
    for x in given[3:]:
        x[~visible[:, None].repeat(K, 1)] = np.nan
    (_, out), gradient = windowed(implementation, window, has_prompt)(given, visible, weight)
    truth, expected = np.zeros(shapes[0]), [np.zeros(shape) for shape in shapes]
    q, k, v, keys, values = given
    for b in range(B):
        n, of = length[b * P // B], b * P // B
        own, past = np.arange(n, n + tokens), np.arange(n + tokens)
        age = own[:, None] - past[None, :]
        both = [np.concatenate([x[of][:, :n], y[b]], axis=1) for x, y in ((keys, k), (values, v))]
        truth[b], (dq, *dkv) = oracle.attend_whole(q[b], *both, (age >= 0) & (age < window), weight[b])
        expected[0][b] = dq
        for i, d in enumerate(dkv):
            expected[1 + i][b] = d[:, n:]
            expected[3 + i][of][:, :n] += d[:, :n]
    np.testing.assert_allclose(out, truth, atol=3e-6)
    for name, one, other in zip("qkvKV", gradient, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)


def test_in_bfloat16_rows_by_cudnn_have_the_scores_of_a_decode_step():
    """Queries divided by the root of 8 and then rounded would change scores of up to 50 by 0.1."""
    rng = np.random.default_rng(0)
    shapes = ((B, 1, N, H), *2 * ((B, K, 1, H),), *2 * ((P, K, L, H),))
    q, k, v, keys, values = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    q, k, keys = (4 * x for x in (q, k, keys))
    prompt, nothing = Prompt(keys, values, np.ones((P, L), bool)), jnp.zeros((B, K, H, 8), jnp.bfloat16)
    cache = Cache((nothing,), (nothing.swapaxes(2, 3),), np.zeros(B, np.int32), np.int32(0))
    rows = jax.jit(functools.partial(attend, implementation="cudnn"))(q, k, v, prompt=prompt)
    step, _ = decode("cudnn")(q, k, v, prompt, cache)
    np.testing.assert_allclose(rows.astype(np.float32), step.astype(np.float32), atol=2**-7)


def test_packed_lines_say_in_their_mask_what_a_window_shows():
    line = np.ones((B, T, T), bool)
    with pytest.raises(AssertionError, match="mask of packed lines"):
        kernels.attend(*arrays(0)[0][:3], None, line, "splash", 4)


def visible_to(rows):
    """Return the shapes of the arguments of attention."""
    return jax.ShapeDtypeStruct((B, T, T) if rows == "packed" else (P, L), bool)


@pytest.mark.parametrize("rows", ["of a group", "packed"])
def test_each_device_calls_the_kernel_on_its_own_rows_and_heads(rows):
    given, rng = arrays(0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 1, 1, 2), sharding.MESH_AXES)
    visible, weight = rng.random(visible_to(rows).shape) < 0.5, np.ones((B, T, N, H), np.float32)
    if rows == "packed":
        visible = np.tril(visible | np.eye(T, dtype=bool))
    (_, alone), of_alone = program("cudnn", rows)(given, visible, weight)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        split = jax.jit(program.__wrapped__("cudnn", rows))
        given = jax.device_put(given, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        (_, together), of_together = split(given, visible, weight)
    same = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(same, (alone, of_alone), (together, of_together))


def cached(seed, C, H=16, B=B):
    """Return the arguments of ``attend_next`` and the attention by the definition.

    Each row has one new token, its group's prompt, and a cache of up to C tokens with any end. Masked positions of the
    cache are NaN, because NaN times a weight of 0 is NaN.
    """
    rng, groups = np.random.default_rng(seed), P if B % P == 0 else 1
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((B, 1, N, H), (B, K, 1, H), (B, K, 1, H)))
    prompts = rng.normal(size=(2, groups, K, L, H)).astype(np.float32)
    shown = np.arange(L)[None, :] < rng.integers(0, L + 1, groups)[:, None]
    keys, values = rng.normal(size=(2, B, K, C, H)).astype(np.float32)
    end, length = int(rng.integers(0, C)), rng.integers(0, C + 1, B).astype(np.int32)
    places = [(end - 1 - np.arange(n)) % C for n in length]
    truth = np.zeros(q.shape)
    for b, n in np.ndindex(B, N):
        of, head = b * groups // B, n // (N // K)
        pieces = zip(prompts, (keys, values), (k, v), strict=True)
        both = [np.concatenate([x[of, head, shown[of]], y[b, head, places[b]], z[b, head]]) for x, y, z in pieces]
        truth[b, 0, n] = oracle.attend(q[b, 0, n], *both)
    for b in range(B):
        hidden = np.setdiff1d(np.arange(C), places[b])
        keys[b, :, hidden], values[b, :, hidden] = np.nan, np.nan
    prompts = np.where(shown[None, :, None, :, None], prompts, np.nan)
    return (q, k, v, Prompt(*prompts, shown), Cache((keys,), (values,), length, np.int32(end))), truth


@functools.cache
def decode(implementation):
    return jax.jit(functools.partial(decode_step, implementation=implementation))


def decode_step(q, k, v, prompt, cache, implementation):
    return attend_next(q, k, v, prompt=prompt, cache=cache, implementation=implementation)


def check_decoded(implementation, given, truth):
    """Check a decode step: only the new token is written."""
    out, ((keys,), (values,)) = decode(implementation)(*given)
    np.testing.assert_allclose(out, truth, atol=3e-6)
    *_, cache = given
    for before, new, after in zip((*cache.keys, *cache.values), given[1:3], (keys, values), strict=True):
        expected = np.array(before)
        expected[:, :, int(cache.end)] = np.array(new)[:, :, 0]
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("C", [16, 384, 512])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_decode_step_attends_to_the_live_part_of_each_rows_cache(C, seed):
    """Caches in one block of 16 positions, three of 128 and two of 256."""
    check_decoded("splash", *cached(seed, C))


@pytest.mark.tier("slow")  # plain: test_a_decode_step_attends_to_the_live_part_of_each_rows_cache
def test_a_decode_step_attends_to_what_is_live_of_caches_of_32k_tokens():
    check_decoded("splash", *cached(0, 2**15))


@pytest.mark.parametrize(
    ("heads", "expected"), [(8, (2, 256)), (4, (4, 256)), (2, (8, 128)), (1, (8, 256))]
)  # of 128 in bfloat16: a MiB of keys, or half of one
def test_a_decode_step_takes_smaller_blocks_where_eight_rows_of_them_are_half_a_step(heads, expected):
    assert tpu_decode.step_of(64, 4096, heads * 128 * 2) == expected
    assert tpu_decode.step_of(3, 384, heads * 128 * 2) == (1, 128) and tpu_decode.step_of(2, 48, 256) == (2, 48)


@pytest.mark.parametrize("window", [1, 2, 100, 300])
def test_a_decode_step_reads_the_window_of_each_rows_cache(window):
    """Windows within a block, over several blocks, and long enough to reach into the prompt of some rows."""
    (q, k, v, prompt, cache), _ = cached(window, 384)
    of = np.arange(B) * P // B
    positions = (prompt.visible.sum(axis=1)[of] + cache.length)[:, None]
    how = {"window": window, "positions": positions, "implementation": "splash"}
    got, _ = jax.jit(lambda: attend_next(q, k, v, prompt=prompt, cache=cache, **how))()
    for b, n in np.ndindex(B, N):
        seen, head = (int(cache.end) - 1 - np.arange(cache.length[b])) % 384, n // (N // K)
        shown = np.flatnonzero(prompt.visible[of[b]])[::-1]
        pieces = ((k, cache.keys[0], prompt.keys), (v, cache.values[0], prompt.values))
        newest_first = [np.concatenate([x[b, head], y[b, head, seen], z[of[b], head, shown]]) for x, y, z in pieces]
        expected = oracle.attend(q[b, 0, n], *(x[:window] for x in newest_first))
        np.testing.assert_allclose(got[b, 0, n], expected, atol=3e-6)


@pytest.mark.tier("slow")  # plain: test_a_decode_step_attends_to_the_live_part_of_each_rows_cache
@pytest.mark.parametrize(("H", "B"), [(64, 3), pytest.param(128, 12, marks=pytest.mark.tier("slow"))])
def test_a_tpus_kernel_reads_caches_as_they_lie_on_both_cores_of_a_chip(monkeypatch, H, B):
    """Caches with tokens innermost and not; an odd number of rows one at a time, and 12 rows four at a time.

    Blocks are fetched and written while others are computed, in memory that is NaN before. A read out of bounds raises.
    """
    decode.cache_clear()  # what was traced before has another interpreter
    chip = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True)
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(CALL, interpret=chip))
    for seed in range(2):
        check_decoded("splash", *cached(seed, 256, H, B))
    assert not interpret_pallas_call.races.races_found


def test_each_device_decodes_its_own_rows_and_heads():
    given, truth = cached(0, 128)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 1, 1, 2), sharding.MESH_AXES)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        given = jax.device_put(given, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        check_decoded("splash", given, truth)


@pytest.mark.tier("slow")  # plain: test_a_decode_step_attends_to_what_is_live_...
@pytest.mark.parametrize("implementation", ["cudnn", "splash"])
def test_a_sampler_with_kernels_draws_what_one_without_draws(monkeypatch, implementation):
    """Slots are used by one row after another, and their caches wrap around."""
    called, arch = [], dataclasses.replace(TINY, head_size=16)
    monkeypatch.setattr(kernels, "cache_length", lambda tokens: 16)
    kernel = kernels.decode
    monkeypatch.setattr(kernels, "decode", lambda *args: called.append(1) or kernel(*args))
    plain = make_sampler(arch=arch, num_slots=8)
    by_kernels = dataclasses.replace(plain, model=Model(arch, attention=implementation))
    (one, _), (other, _) = Sampling(plain)(make_prompts(range(8))), Sampling(by_kernels)(make_prompts(range(8)))
    assert bool(called) == (implementation == "splash") and completions(one) == completions(other)
    np.testing.assert_allclose(one.behaviour_logp, other.behaviour_logp, atol=1e-5)


def test_a_kernels_cache_has_whole_lanes():
    assert [kernels.cache_length(n) for n in (1, 24, 128, 129, 700)] == [16, 32, 128, 256, 768]


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "head_size", "expected"),
    [
        ("auto", {"platform": "cpu"}, "bfloat16", 64, "xla"),
        ("auto", {"platform": "tpu"}, "float32", 16, "splash"),
        ("xla", {"platform": "tpu"}, "float32", 16, "xla"),
        ("auto", {"platform": "gpu", "compute_capability": "9.0"}, "bfloat16", 64, "cudnn"),
        ("xla", {"platform": "gpu", "compute_capability": "9.0"}, "bfloat16", 64, "xla"),
        ("auto", {"platform": "gpu", "compute_capability": "9.0"}, "float32", 64, "xla"),
        ("auto", {"platform": "gpu", "compute_capability": "9.0"}, "bfloat16", 256, "xla"),
        ("auto", {"platform": "gpu", "compute_capability": "7.5"}, "bfloat16", 64, "xla"),
        ("auto", {"platform": "gpu", "compute_capability": "gfx90a"}, "bfloat16", 64, "xla"),
    ],
)
def test_the_device_says_which_kernel(setting, device, dtype, head_size, expected):
    arch = dataclasses.replace(PRESETS["debug"], head_size=head_size)
    assert kernels.choose(setting, types.SimpleNamespace(**device), dtype, arch) == expected
    with_sinks = dataclasses.replace(arch, sinks=True)  # which no kernel knows
    assert kernels.choose(setting, types.SimpleNamespace(**device), dtype, with_sinks) == "xla"


@pytest.mark.parametrize(
    ("rows", "calls"),
    [("alone", "fmhaSoftmax"), ("of a group", "fmhaSoftmax"), ("packed", "fmhaScaleBiasSoftmax")],
)
def test_a_gpus_program_calls_cudnn_forward_and_backward(monkeypatch, rows, calls):
    """An odd width and ragged prompts: shapes that cuDNN does not accept would be refused while lowering."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", ON_GPU)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    given = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(0)[0]]
    traced = program.__wrapped__("cudnn", rows).trace(given, visible_to(rows), given[0])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"__cudnn${calls}(" in text and f"__cudnn${calls}Backward(" in text


def decoded(R=N // K, C=384, H=64):
    """Return the shapes of the arguments of ``attend_next``."""
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    row, cache, prompt = bf16(B, K, 1, H), bf16(B, K, C, H), bf16(P, K, L, H)
    cache = Cache((cache,), (cache,), jax.ShapeDtypeStruct((B,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))
    return bf16(B, 1, K * R, H), row, row, Prompt(prompt, prompt, jax.ShapeDtypeStruct((P, L), bool)), cache


@needs_libtpu
@pytest.mark.parametrize(
    "shape",
    [{}, {"R": 1, "H": 80}, {"C": 256, "H": 128}, {"C": 48, "H": 32}, {"C": 16, "R": 8, "H": 128}, {"C": 2**15}],
    ids=str,
)
def test_a_tpus_decode_step_calls_the_kernel_and_turns_no_cache(monkeypatch, shape):
    """Split over four chips, with caches in the memory layout of a program's arguments."""
    monkeypatch.setattr(pallas, "pallas_call", CALL)
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2), chips.devices_of("v5e:2x2")[0])
    q, k, v, prompt, cache = decoded(**shape)
    rows = {q.shape: ("data", None, "tensor"), cache.length.shape: ("data",)}
    rows |= {x.shape: ("data", "tensor") for x in (k, prompt.keys, *cache.keys)}
    split = lambda x: jax.NamedSharding(mesh, jax.P(*rows.get(x.shape, ())))

    def step(q, k, v, prompt, end, length, keys, values):
        return decode_step(q, k, v, prompt, Cache(keys, values, length, end), "splash")

    given = (q, k, v, prompt, cache.end, cache.length, cache.keys, cache.values)
    given = jax.tree.map(lambda x: x.update(sharding=split(x)), given)
    out = (split(q), jax.tree.map(split, (cache.keys, cache.values)))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(step, donate_argnums=(6, 7), out_shardings=out).lower(*given).compile().as_text()
    _, _, C, size = cache.keys[0].shape
    assert "decode_attention" in text and not re.search(rf"= bf16\[2,1,{C},{size}\]\S* copy\(", text)


@pytest.mark.tier("slow")  # plain: test_a_kernel_attends_as_the_definition_says_...
def test_a_models_layers_share_one_mask_of_packed_lines_and_give_what_the_reference_path_gives():
    """Lines of 3 x 3 blocks: no layer reads the mask from which the kernel's mask was made."""
    width, arch = 300, dataclasses.replace(TINY, num_layers=2)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, arch.vocab_size, (2, width))
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    seen = np.tril(rng.random((2, width, width)) < 0.1) | np.eye(width, dtype=bool)
    weight = 0.01 * rng.normal(size=(2, width, arch.width)).astype(np.float32)
    params = host_params(Model(arch))

    def total(params, attention):
        model = Model(arch, remat="dots", attention=attention)
        hidden, _ = model.forward(params, tokens, positions, visible=jnp.asarray(seen), remat=True)
        return jnp.sum(hidden * weight), hidden

    (_, hidden), gradient = jax.value_and_grad(total, has_aux=True)(params, "splash")
    (_, expected), of_reference = jax.value_and_grad(total, has_aux=True)(params, "xla")
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradient, of_reference)
    whole = re.compile(r"bool\[[\d,]*384,384\]")
    traced = jax.make_jaxpr(functools.partial(total, attention="splash"))(params)
    layers = [str(eqn.params["jaxpr"]) for eqn in traced.eqns if eqn.primitive.name == "scan"]
    assert whole.search(str(traced)) and len(layers) == 1 and not whole.search(layers[0])


@needs_libtpu
@pytest.mark.parametrize("rows", ["of a group", "packed", "window"])
def test_a_tpus_program_calls_splash_forward_and_backward(monkeypatch, rows):
    """Heads of size 64 and an odd width, split over four chips."""
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", ON_TPU)
    devices, _ = chips.devices_of("v5e:2x2")
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2), devices)
    whole = sharding.replicated(mesh, 0)
    given = [jax.ShapeDtypeStruct((*x.shape[:-1], 64), jnp.bfloat16, sharding=whole) for x in arrays(0)[0]]
    visible = visible_to(rows).update(sharding=whole)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        called = windowed("splash", 3, True) if rows == "window" else program.__wrapped__("splash", rows)
        lowered = called.lower(given, visible, given[0])
    text = lowered.compile().as_text()
    assert all(f"splash_mha_{name}" in text for name in ("fwd", "dq", "dkv"))
