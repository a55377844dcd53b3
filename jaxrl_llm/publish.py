"""Publish: the learner's weights become the sampler's, in one compiled cast and reshard.

Where dtype and layout agree nothing is compiled or copied: the sampler reads the learner's buffers.

Owns: that one program. Does not know: what the weights are.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_llm.programs import Program


def is_free(learner: Any, sampler: Any) -> bool:
    """Whether every array has the same dtype and layout on both sides. Arguments: abstract params."""

    def same(a, b):
        return a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, len(a.shape))

    return jax.tree.all(jax.tree.map(same, learner, sampler))


def program(learner: Any, sampler: Any) -> Program:
    """The cast and reshard from the learner's abstract params to the sampler's."""

    def cast(params):
        return jax.tree.map(lambda x, target: x.astype(target.dtype), params, sampler)

    return Program(cast, (learner,), out_shardings=jax.tree.map(lambda x: x.sharding, sampler))
