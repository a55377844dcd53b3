"""Parts of the model: projections, logits, the table of rotations."""

import dataclasses
import functools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import transformer
from support.building import Sampling, host_params, make_prompts, make_sampler

from jaxrl_llm.models import lora, rope
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.row_logp import plain_logp
from jaxrl_llm.models.transformer import Model, linear
from jaxrl_llm.ops.logp import project


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 5),
    T=st.integers(1, 3),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    merged=st.booleans(),
)
def test_a_projection_and_its_gradients_are_the_products(rows, T, inputs, outputs, merged):
    rng = np.random.default_rng([rows, T, inputs, outputs])
    x, w, g = (
        rng.normal(size=(rows, T, inputs)),
        rng.normal(size=(outputs, inputs)),
        rng.normal(size=(rows, T, outputs)),
    )
    project = functools.partial(linear, merged=merged)
    out, backward = jax.vjp(project, x.astype(np.float32), w.astype(np.float32))
    g_x, g_w = backward(g.astype(np.float32))
    np.testing.assert_allclose(out, x @ w.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(g_x, g @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(g_w, g.reshape(-1, outputs).T @ x.reshape(-1, inputs), rtol=1e-5, atol=1e-5)


def test_logits_of_bfloat16_add_up_in_float32():
    x, w = np.ones((3, 1, 1024), jax.numpy.bfloat16), np.ones((2, 1024), jax.numpy.bfloat16)
    w[1, 0] = 1 / 128  # the sum, 1023 + 1/128, has 17 bits
    out = project(x[:, 0], w)[:, None]
    np.testing.assert_array_equal(out, np.broadcast_to(np.float32([1024, 1023 + 1 / 128]), (3, 1, 2)))


def test_angles_of_a_table_are_those_of_each_position():
    positions = np.array([[0, 5], [11, 3]])
    for table, angles in zip(
        rope.tables(PRESETS["debug"], np.arange(12))[0], rope.tables(PRESETS["debug"], positions)[0], strict=True
    ):
        np.testing.assert_array_equal(table[positions], angles)


def test_a_model_without_layers_runs_in_learner_and_sampler():
    """This is the cheapest model. It is enough for tests of rewards, credit and losses."""
    arch = dataclasses.replace(PRESETS["debug"], num_layers=0, width=8)
    model = Model(arch)
    params = host_params(model)
    assert lora.split(params) == (params,)
    sampling = Sampling(make_sampler(arch=arch))
    rollout, _ = sampling(make_prompts(range(8), arch=arch))
    logp = plain_logp(model, params, rollout.tokens, rollout.prompt_length, rollout.length)
    np.testing.assert_allclose(rollout.behaviour_logp, logp, rtol=1e-5, atol=1e-5)
    row = (rollout.tokens[0], int(rollout.prompt_length[0]), int(rollout.length[0]))
    np.testing.assert_allclose(logp[0], transformer.completion_logp(params, arch, *row), rtol=1e-4, atol=1e-4)
