"""Attention by kernels is the reference path's, prompts padded with NaN, gradients included; compilers take them.

Splash runs in Pallas' interpreter here, cuDNN's half by the XLA implementation of the same function.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from building import needs_libtpu
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu import splash_attention
from reference import attention as oracle

from jaxrl_llm import plan, sharding
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models import kernels
from jaxrl_llm.models.attention import Prompt, attend

B, P, T, L, N, K, H = 4, 2, 5, 6, 4, 2, 8
ON_TPU, ON_GPU = splash_attention.make_splash_mha_single_device, jax.nn.dot_product_attention


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """The same calls, for a device that tests have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splash_attention, "make_splash_mha_single_device", functools.partial(ON_TPU, interpret=True))
        patch.setattr(jax.nn, "dot_product_attention", lambda *args, implementation, **kwargs: ON_GPU(*args, **kwargs))
        yield


def arrays(seed):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, K, T, H), (B, K, T, H), (P, K, L, H), (P, K, L, H))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes], rng


@functools.cache
def program(implementation, with_prompt):
    """Output and gradients of a weighted sum of it, with respect to all arrays."""

    def call(arrays, visible, weight):
        q, k, v, keys, values = arrays
        prompt = Prompt(keys, values, visible) if with_prompt else None
        out = attend(q, k, v, prompt=prompt, implementation=implementation)
        return jnp.sum(out * weight), out

    return jax.jit(jax.value_and_grad(call, has_aux=True))


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("implementation", ["splash", "cudnn"])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_kernel_attends_as_the_definition_says_and_its_gradient_is_the_reference_paths(
    implementation, with_prompt, seed
):
    given, rng = arrays(seed)
    q, k, v, keys, values = given
    length = rng.integers(0, L + 1, P) if with_prompt else np.zeros(P, int)
    truth = np.zeros(q.shape)
    for b, t, n in np.ndindex(B, T, N):
        of, head = b * P // B, n // (N // K)
        seen = [np.concatenate([x[of, head, : length[of]], y[b, head, : t + 1]]) for x, y in ((keys, k), (values, v))]
        truth[b, t, n] = oracle.attend(q[b, t, n], *seen)
    visible = np.arange(L)[None, :] < length[:, None]
    for x in (keys, values):
        x[~visible[:, None].repeat(K, 1)] = np.nan
    weight = rng.normal(size=q.shape).astype(np.float32)
    (_, out), gradient = program(implementation, with_prompt)(given, visible, weight)
    np.testing.assert_allclose(out, truth, atol=3e-6)
    clean = [np.nan_to_num(x) for x in given]
    _, expected = program("xla", with_prompt)(clean, visible, weight)
    for name, one, other in zip("qkvKV", gradient, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)


def test_each_device_calls_the_kernel_on_its_own_rows_and_heads():
    given, _ = arrays(0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 2), ("data", "fsdp", "tensor"))
    visible, weight = np.arange(L)[None, :] < np.array([[2], [5]]), np.ones((B, T, N, H), np.float32)
    alone = program("cudnn", True)(given, visible, weight)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        split = jax.jit(program.__wrapped__("cudnn", True))
        given = jax.device_put(given, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        together = split(given, visible, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), alone, together)


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
    assert kernels.choose(setting, types.SimpleNamespace(**device), dtype, head_size) == expected


def test_a_gpus_program_calls_cudnn_forward_and_backward(monkeypatch):
    """An odd width and ragged prompts: shapes that cuDNN does not take are refused while lowering."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", ON_GPU)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    given = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(0)[0]]
    rest = jax.ShapeDtypeStruct((P, L), bool), jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    for with_prompt in (False, True):
        traced = program.__wrapped__("cudnn", with_prompt).trace(given, *rest)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "__cudnn$fmhaSoftmax(" in text and "__cudnn$fmhaSoftmaxBackward(" in text


@needs_libtpu
def test_a_tpus_program_calls_splash_forward_and_backward(monkeypatch):
    """Heads of 64 and an odd width, split over four chips."""
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", ON_TPU)
    devices, _ = plan.devices_of("v5e:2x2")
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2), devices)
    whole = sharding.replicated(mesh, 0)
    given = [jax.ShapeDtypeStruct((*x.shape[:-1], 64), jnp.bfloat16, sharding=whole) for x in arrays(0)[0]]
    visible = jax.ShapeDtypeStruct((P, L), bool, sharding=whole)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = program.__wrapped__("splash", True).lower(given, visible, given[0])
    text = lowered.compile().as_text()
    assert all(f"splash_mha_{name}" in text for name in ("fwd", "dq", "dkv"))
