"""The pieces of the model that have two forms: a projection of the learner's weights and of the sampler's."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.models.attention import rope_tables
from jaxrl_llm.models.presets import PRESETS
from jaxrl_llm.models.transformer import FEW_ROWS, linear, linear_output_first


@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from([1, 3, FEW_ROWS, FEW_ROWS + 1]),
    T=st.integers(1, 3),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
)
def test_both_forms_of_a_projection_are_the_product(rows, T, inputs, outputs):
    rng = np.random.default_rng([rows, T, inputs, outputs])
    x, w = rng.normal(size=(rows, T, inputs)), rng.normal(size=(inputs, outputs))
    for got in (
        linear(x.astype(np.float32), w.astype(np.float32)),
        linear_output_first(x.astype(np.float32), w.T.astype(np.float32)),
    ):
        np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_a_projection_of_bfloat16_adds_up_in_the_type_it_is_asked_for(rows):
    x, w = np.ones((rows, 1, 1024), jax.numpy.bfloat16), np.ones((2, 1024), jax.numpy.bfloat16)
    w[1, 0] = 1 / 128  # the sum, 1023 + 1/128, has 17 bits
    out = linear_output_first(x, w, preferred_element_type=np.float32)
    np.testing.assert_array_equal(out, np.broadcast_to(np.float32([1024, 1023 + 1 / 128]), (rows, 1, 2)))


def test_angles_of_a_table_are_those_of_each_position():
    positions = np.array([[0, 5], [11, 3]])
    for table, angles in zip(
        rope_tables(PRESETS["debug"], np.arange(12)), rope_tables(PRESETS["debug"], positions), strict=True
    ):
        np.testing.assert_array_equal(table[positions], angles)
