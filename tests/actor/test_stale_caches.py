"""Weights change while rollouts are open: later tokens are drawn from the distribution of the new weights."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import building
from support.building import Sampling, interrupt, make_prompts, make_sampler
from support.moving import gaps, generated, has_one_version, params_of
from support.tiers import mostly_in

from jaxrl_llm.actor import turns
from jaxrl_llm.config import LoraConfig, MeshConfig
from jaxrl_llm.models import moe
from jaxrl_llm.models.architecture import Layer
from jaxrl_llm.runtime.programs import compile_all

WIDTH, CALLS = 24, 5
tiny = functools.partial(dataclasses.replace, building.TINY)
EXPERTS = tiny(num_experts=5, experts_per_token=2, ffn=8)
MODELS = {
    "attention": building.TINY,
    "windows": tiny(layers=(Layer(window=5), Layer())),
    "delta rule": building.TINY_DELTA,
    "experts": EXPERTS,
}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """Make the sampler read answers in several parts."""
    monkeypatch.setattr(turns, "REREAD_TOKENS", 3)


def sampling_of(stale_cache, model=None, **settings):
    """Return a sampling run with fewer slots than rows, and short chunks.

    Prompts wait for slots, answers for the next call.
    """
    sizes = {"num_prompts": 4, "lookahead": 8, "num_slots": 14, "chunk_steps": 2, "stale_cache": stale_cache}
    sampler = make_sampler(sampling={"max_completion_tokens": WIDTH}, **sizes | settings)
    sampler = dataclasses.replace(sampler, model=model) if model else sampler
    programs = sampler.programs(building.abstract_sampler_params(sampler))
    return Sampling(sampler, compiled=compile_all(programs, sampler.mesh))


@pytest.mark.parametrize("stale_cache", mostly_in("slow", ["keep", "recompute"]))
@pytest.mark.parametrize("name", mostly_in("slow", MODELS, plain=["attention"]))
def test_tokens_have_the_probabilities_of_the_weights_that_their_version_names(name, stale_cache):
    sampling = sampling_of(stale_cache, arch=MODELS[name])
    rollout = generated(sampling, CALLS)
    gap, is_one = gaps(sampling.sampler, rollout), has_one_version(rollout)
    later = is_one & (rollout.policy_version.max(axis=1) > 0)
    assert later.sum() > 8 and (~is_one).sum() > 8
    # A state of float32 gathers the rounding of all tokens before: 1.5e-5 measured; the others 0.9e-5 at most.
    at_most = 3e-5 if name == "delta rule" else 1e-5
    assert gap[is_one].max() <= at_most
    if stale_cache == "recompute":
        assert gap.max() <= at_most
    else:  # the weights are far enough apart to tell
        assert np.median(gap[~is_one].max(axis=1)) > 0.01


@pytest.mark.tier("slow")  # plain: on one device, above
def test_the_same_holds_over_a_mesh_and_with_adapters():
    model = dataclasses.replace(make_sampler().model, lora=LoraConfig(rank=2, targets=("q", "down")))
    sampling = sampling_of("recompute", model, mesh=MeshConfig(data=2, tensor=2), slack=1)
    rollout = generated(sampling, CALLS)
    assert (~has_one_version(rollout)).sum() > 8
    # Sums over the tensor axis are rounded in another order. Measured: 0.9e-5 with jax 0.10.2, 5.1e-5 with 0.12.0.1.
    # Caches that were not read again are wrong by more than 1e-2 (above).
    assert gaps(sampling.sampler, rollout).max() <= 1e-4


@pytest.mark.tier("slow")  # plain: test_moe.test_the_sampler_notes_what_the_learner_would_choose
@pytest.mark.parametrize("stale_cache", ["keep", "recompute"])
def test_experts_that_the_learner_replays_are_those_of_the_weights_that_read_the_tokens(stale_cache):
    """The experts of a prompt come from the weights that last read it.

    The same holds for an unfinished answer that is read again.
    """
    sampling = sampling_of(stale_cache, arch=EXPERTS, keeps_experts=True)
    rollout = generated(sampling, CALLS)
    sampler, newest = sampling.sampler, rollout.policy_version.max(axis=1)
    positions = np.broadcast_to(np.arange(rollout.tokens.shape[1]), rollout.tokens.shape)
    of_prompt = positions < rollout.prompt_length[:, None]
    in_row = (positions > 0) & (positions < rollout.length[:, None])
    # The call that collected the group may have begun when these rows had ended: their prompt was read again then.
    groups = {group: newest[rollout.group_id == group].max() for group in rollout.group_id.tolist()}
    read = np.array([groups[group] for group in rollout.group_id.tolist()])
    num_compared = 0
    for version in range(CALLS):
        params = params_of(sampler.model, version)
        _, chosen = moe.by_token(*jax.jit(sampler.model.forward)(params, rollout.tokens, positions))
        chosen = np.roll(np.asarray(chosen), 1, axis=1)  # each token has the choice of the one before it
        same = (rollout.columns["experts"] == chosen).all(axis=2)
        assert same[in_row & of_prompt & (read == version)[:, None]].all()
        exact = newest == version
        if stale_cache == "keep":
            exact &= has_one_version(rollout)
        assert same[in_row & ~of_prompt & exact[:, None]].all()
        num_compared += exact.sum()
    assert num_compared > 8
    current = newest == read
    gap = gaps(sampler, rollout, rollout.columns["experts"])
    is_new = (rollout.policy_version == newest[:, None]) & current[:, None]
    if stale_cache == "keep":
        is_new &= has_one_version(rollout)[:, None]
    assert is_new.sum() > 50 and gap[is_new].max() <= 1e-5


def test_an_answer_that_goes_on_keeps_its_tokens_their_log_probs_and_their_versions():
    sampling, begun = sampling_of("recompute"), {}

    def note():
        state = jax.device_get(sampling.generator.state)
        for m, e, g in np.argwhere((state.group_id >= 0)[..., None] & (state.length > state.prompt_length)):
            end = state.length[m, e, g]
            kept = (x[m, e, g, :end] for x in (state.tokens, state.behaviour_logp, state.policy_version))
            begun.setdefault((int(state.group_id[m, e]), g), []).append([*kept])

    rollout = generated(sampling, CALLS, note)
    kept = rollout.tokens, rollout.behaviour_logp, rollout.policy_version
    samples = sampling.sampler.group_size
    went_on = 0
    for row, group_id in enumerate(rollout.group_id.tolist()):
        for earlier in begun.get((group_id, row % samples), []):
            for now, then in zip(kept, earlier, strict=True):
                np.testing.assert_array_equal(now[row, : len(then)], then)
            went_on += 1
    assert went_on > 12


@pytest.mark.tier("slow")  # plain: test_turns.test_a_run_that_stops_inside_a_generation_goes_on_...
@pytest.mark.parametrize("chunk", [1, pytest.param(2, marks=pytest.mark.tier("slow"))])
def test_a_call_that_stops_inside_goes_on_bit_by_bit_and_reads_nothing_again(chunk):
    def at_version_2(sampling):
        generated(sampling, 2)
        sampling.params = jax.tree.map(lambda x: 0.9 * x, sampling.params)
        first = 16  # prompts that two calls have asked for
        return make_prompts(range(first, first + sampling.generator.prompts_wanted()))

    straight, stopped, resumed = (sampling_of("recompute") for _ in range(3))
    expected, _ = straight(at_version_2(straight), version=2)
    interrupt(stopped, at_version_2(stopped), after=chunk, version=2)
    saved = stopped.generator
    assert (np.asarray(saved.state.prompt_version)[np.asarray(saved.state.group_id) >= 0] == 2).any()
    resumed.params = stopped.params
    resumed.generator.state = jax.tree.map(jax.device_put, jax.device_get(saved.state))
    for shard, entry, lag, group_id in saved.opened():
        example, ids = saved.open_prompts[shard, entry][1:3]
        resumed.generator.adopt(shard, entry, lag, group_id, example, ids)
    rollout, _ = resumed(make_prompts(range(0)), version=2)
    assert (~has_one_version(expected)).any()
    jax.tree.map(np.testing.assert_array_equal, rollout, expected)
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(x.generator.state) for x in (resumed, straight)))
