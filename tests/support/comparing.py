"""Comparisons of tests: trees of arrays to the last bit, and token ids as texts."""

import jax
import numpy as np


def assert_same(actual, expected):
    """Assert that two trees have the same structure, and each array the same dtype, shape and bytes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def raw(tokenizer, ids):
    """Return the text of the ids, special tokens included."""
    return tokenizer._fast.decode(ids, clean_up_tokenization_spaces=False)
