"""Weights that change between calls of a generator, and the learner's log-probs of the tokens drawn under each.

Owns: the weights of a version. Expected values come from the learner's forward pass over whole rows.
"""

import functools

import jax
import numpy as np
from support import building
from support.building import make_prompts

from jaxrl_llm.learner import publish
from jaxrl_llm.models import moe
from jaxrl_llm.models.row_logp import row_logp


def params_of(model, version):
    """Return the weights of a version. They differ from the previous version much more than after an update."""
    first, other = (building.host_params(model, seed) for seed in (0, 1 + version))

    def between(path, x, y):
        return 0.5 * (x + y) if "norm" in path[-1].key else 0.8 * x + 0.6 * y

    return jax.tree_util.tree_map_with_path(between, first, other)


def generated(sampling, calls, after_call=lambda: None):
    """Return rows of as many calls of a ``building.Sampling``, each with the weights of its number, in numpy."""
    sampler, layout = sampling.sampler, jax.tree.map(lambda x: x.sharding, sampling.params)
    rows, opened = [], 0
    for version in range(calls):
        params = publish.sampler_form(params_of(sampler.model, version), sampler.model.arch)
        sampling.params = jax.device_put(params, layout)
        wanted = sampling.generator.prompts_wanted()
        rows.append(sampling(make_prompts(range(opened, opened + wanted)), version=version)[0])
        opened += wanted
        after_call()
    return jax.tree.map(lambda *x: np.concatenate(x), *rows)


def gaps(sampler, rollout, experts=None):
    """|log-prob of the sampler - log-prob of the learner| [B,S] under the weights that drew each token; 0 elsewhere."""
    width = sampler.sampling.max_completion_tokens
    how = {"sampling": sampler.sampling, "completion_width": width, "chunk_positions": 3}
    learner = jax.jit(functools.partial(row_logp, sampler.model, **how))
    rows = rollout.tokens, rollout.prompt_length, rollout.length, rollout.columns.get("support")
    gap = np.zeros(rollout.tokens.shape, np.float32)
    for version in range(rollout.policy_version.max() + 1):
        logp = learner(params_of(sampler.model, version), *rows, routing=moe.replay(experts, None)).logp
        gap = np.where(rollout.policy_version == version, np.abs(rollout.behaviour_logp - logp), gap)
    return gap


def has_one_version(rollout):
    """[B] bool: the same weights drew all tokens of the row."""
    newest = rollout.policy_version.max(axis=1)[:, None]
    return np.all((rollout.policy_version < 0) | (rollout.policy_version == newest), axis=1)
