"""With the old policy "generation", every token has the learner's log-prob under the weights that drew it."""

import jax
import numpy as np
import pytest
from reference import transformer
from support.building import EIGHT, EOS_IDS, ONE, PROMPT_TOKENS, TINY, host_params, make_prompts, mesh_of

from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.config import freeze
from jaxrl_llm.learner import publish
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import compile_all

NAMES = ("init_sampler", "prefill", "reread", "decode", "read_group", "collect", "init_state", "annotate", "score_open")


def config_of(num_prompts, lookahead):
    return freeze(
        {
            "prompts": {"max_tokens": PROMPT_TOKENS},
            "sampling": {"max_completion_tokens": 8},
            "rollout": {
                "prompts_per_iteration": num_prompts,
                "group_size": 2,
                "lookahead_prompts": lookahead,
                "slots": num_prompts + lookahead,
                "chunk_steps": 2,
            },
            "replay": {"capacity": 2 * num_prompts},
            "update": {"batch_size": 2 * num_prompts, "micro_batch_size": 8, "logp_chunk_tokens": 32},
            "algorithm": {"old_policy": "generation"},
        }
    )


@pytest.mark.tier("slow")  # plain: tests/learner/test_update.py
@pytest.mark.parametrize("mesh", [ONE, EIGHT], ids=["one device", "eight"])
def test_the_old_log_probs_of_rollouts_that_span_versions_are_those_of_the_version_of_each_token(mesh):
    num_prompts, lookahead = (4, 4) if mesh == ONE else (8, 8)
    run = assemble(config_of(num_prompts, lookahead), TINY, EOS_IDS, mesh_of(mesh))
    compiled = compile_all({name: run.programs()[name] for name in NAMES}, run.mesh)
    generator = Generator(run.sampler, compiled, str)
    put = lambda x, like: jax.device_put(x, jax.tree.map(lambda y: y.sharding, like))
    key = jax.device_put(jax.random.key(0), sharding.replicated(run.mesh, 0))
    weights, spans, first_id = [], 0, 0
    for version in range(4):
        weights.append(host_params(run.model, seed=version))
        step_like = sharding.undivided(run.mesh, np.int32)
        params, step = put((weights[-1], np.int32(version)), (run.learner.params, step_like))
        sampler_params = put(publish.sampler_form(weights[-1], run.model.arch), run.sampler_params)
        wanted = generator.prompts_wanted()
        prompts = make_prompts(range(first_id, first_id + wanted))
        first_id += wanted
        generator.generate(sampler_params, prompts, version=step, key=key)
        rollout = generator.take()
        state = compiled["init_state"](params).replace(step=step)
        columns = compiled["annotate"](state, None, rollout)
        assert set(columns) == {"generation_logp"}
        old_logp = np.asarray(columns["generation_logp"])
        generator.state = compiled["score_open"](state.params["policy"], step, generator.state)
        rows = jax.tree.map(np.asarray, rollout)
        for i in range(len(rows.length)):
            of_row = rows.tokens[i], rows.prompt_length[i], rows.length[i]
            own = rows.policy_version[i]
            versions = sorted(set(own[own >= 0].tolist()))
            spans += len(versions) > 1
            expected = np.zeros(len(own))
            for v in versions:
                expected += np.where(own == v, transformer.completion_logp(weights[v], TINY, *of_row), 0)
            # Measured: 2e-6 nats at most.
            np.testing.assert_allclose(old_logp[i], expected, rtol=0, atol=1e-5)
    assert spans > 3
