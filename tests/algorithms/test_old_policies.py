import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import corrections as oracle
from support.building import algorithm_config
from support.refusal import refused

from jaxrl_llm.algorithms.inputs import Tokens
from jaxrl_llm.algorithms.old_policies import OLD_POLICIES, moving_average_share


def tokens(policy, behaviour, age, **columns):
    mask, zeros = jnp.ones(policy.shape, bool), jnp.zeros(len(policy))
    return Tokens(policy, behaviour, behaviour, 0 * policy, zeros, mask, age=age, columns=columns)


def test_each_old_policy_is_what_it_says_and_reads_nothing_else():
    behaviour = jnp.full((1, 2), -4.0)
    columns = {f"{name}_logp": behaviour + i for i, name in enumerate(("generation", "start", "average"), 1)}
    expected = {
        "behaviour": behaviour,
        "generation": columns["generation_logp"],
        "start": columns["start_logp"],
        "ewma": columns["average_logp"],
    }
    assert {*expected, "interpolated"} == set(OLD_POLICIES)
    for name, logp in expected.items():
        chosen = algorithm_config(old_policy=name).old_policy
        needed = {column: columns[column] for column in chosen.facts.columns}
        x = tokens(behaviour + 9, behaviour, jnp.zeros((1, 2), jnp.int32), **needed)
        np.testing.assert_array_equal(chosen(x), logp)
        assert chosen.facts.is_behaviour == (name == "behaviour")
        assert ("decay" in chosen.settings) == ("average_logp" in needed)
    with pytest.raises(AttributeError, match="average_logp"):
        OLD_POLICIES["ewma"](dataclasses.replace(x, columns={}))


def test_unknown_ones_are_named():
    with refused("old_policy", "new", "'behaviour', 'generation'"):
        algorithm_config(old_policy="new")


def test_interpolated_policy_by_hand():
    # Drawn in this iteration and in the one before: by the behaviour policy. Three before: two thirds of the way.
    policy, behaviour = jnp.full((1, 4), -1.0), jnp.full((1, 4), -4.0)
    age = jnp.array([[0, 1, 2, 3]])
    interpolated = OLD_POLICIES["interpolated"]
    np.testing.assert_allclose(interpolated(tokens(policy, behaviour, age)), [[-4.0, -4.0, -2.5, -2.0]], rtol=1e-6)
    gradient = jax.grad(lambda p: interpolated(tokens(p, behaviour, age)).sum())(policy)
    assert (gradient == 0).all()


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_moving_average_is_that_of_the_recursion(decay):
    history = np.random.default_rng(4).normal(size=8)
    average = history[0]
    for step, params in enumerate(history[1:], start=1):
        share = float(moving_average_share(decay, jnp.int32(step)))
        average = (1 - share) * average + share * params
    np.testing.assert_allclose(average, oracle.moving_average(history, decay), rtol=1e-5)
