"""Rows as the functions of credit receive them, with one token each by default."""

import jax.numpy as jnp

from jaxrl_llm.algorithms.inputs import Rows


def make_rows(groups, **given):
    """Return rows. ``given`` are fields of ``Rows``; the other fields are empty, zero or one."""
    num_rows = groups.index.shape[0]
    zeros, one = jnp.zeros(num_rows), jnp.ones((num_rows, 1))
    rows = Rows(
        reward=zeros,
        added=None,
        parts=(),
        correct=zeros > 0,
        groups=groups,
        group_id=groups.index,
        length=jnp.ones(num_rows, jnp.int32),
        mask=one > 0,
        tokens=jnp.zeros((num_rows, 1), jnp.int32),
        behaviour_logp=0 * one,
        columns={},
        memory={},
        max_length=16,
    )
    return rows._replace(**given)
