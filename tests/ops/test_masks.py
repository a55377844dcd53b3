import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.masks import completion_mask


def test_mask_covers_the_completion_with_its_last_token_and_nothing_else():
    # Row 0: prompt t = 0, 1, completion t = 2, 3, 4 (the last may be EOS). Row 1: empty. Row 2: full width.
    mask = completion_mask(jnp.array([2, 3, 1]), jnp.array([5, 3, 6]), 6)
    np.testing.assert_array_equal(mask, [[0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]])


def test_wider_rows_only_append_false():
    prompt_length, length = jnp.array([2, 1]), jnp.array([4, 2])
    wide = completion_mask(prompt_length, length, 9)
    np.testing.assert_array_equal(wide[:, :5], completion_mask(prompt_length, length, 5))
    assert not wide[:, 5:].any()
