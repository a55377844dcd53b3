"""What tests compare: trees of arrays to the last bit, and ids of tokens as the text that they stand for."""

import jax
import numpy as np


def assert_same(actual, expected):
    """Structure, and of each array dtype, shape and bytes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def raw(tokenizer, ids):
    """Text of the ids, special tokens included."""
    return tokenizer._fast.decode(ids, clean_up_tokenization_spaces=False)
