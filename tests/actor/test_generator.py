"""Properties of the sampler: its log-probs equal the learner's, and samples depend on seed, prompt and index alone."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import sampling as oracle
from reference import transformer
from support import building
from support.building import (
    COMPLETION_TOKENS,
    CUBE,
    EIGHT,
    EOS_IDS,
    PROMPT_TOKENS,
    Sampling,
    make_prompts,
    make_sampler,
)
from support.tiers import mostly_in

from jaxrl_llm.actor import sampler as sampler_module
from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.config import Config, MeshConfig
from jaxrl_llm.models import attention
from jaxrl_llm.models.row_logp import row_logp
from jaxrl_llm.ops.filters import NO_TOKEN
from jaxrl_llm.ops.sampling import token_logp
from jaxrl_llm.reports import metrics
from jaxrl_llm.runtime import sharding
from jaxrl_llm.types import STOP_EOS, STOP_LENGTH, STOP_NONE, STOP_STRING, DrawSums

PROMPTS = range(8)


@functools.cache
def base():
    """Return a sampler in which every rollout has a slot and a chunk is longer than any completion."""
    return Sampling(make_sampler())


@functools.cache
def base_rollout():
    """Return 72 rollouts of prompts 0 to 23, sampled in three calls."""
    calls = [base()(make_prompts(range(start, start + 8)))[0] for start in (0, 8, 16)]
    return jax.tree.map(lambda *x: np.concatenate(x), *calls)


def of(rollout, prompts):
    return {key: ids for key, ids in building.completions(rollout).items() if key[0] in prompts}


# --- log-probs ---

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


# The filters against the same model: the next tests.
@pytest.mark.parametrize("name", mostly_in("slow", SETTINGS, plain=["plain"]))
def test_sampler_logp_is_the_learners_and_that_of_a_float64_model(name):
    # 5 slots for 24 rollouts and chunks of 3 steps: slots refill again and again. No support is too small.
    every_id = {"support_tokens": building.TINY.vocab_size}
    sampler = make_sampler(num_slots=5, chunk_steps=3, sampling=SETTINGS[name] | every_id)
    sampling = Sampling(sampler)
    rollout, _ = sampling(make_prompts(PROMPTS))
    rows = (rollout.tokens, rollout.prompt_length, rollout.length)
    learner = jax.jit(
        functools.partial(
            row_logp, sampler.model, sampling=sampler.sampling, completion_width=COMPLETION_TOKENS, chunk_positions=3
        )
    )
    # Measured: 2.4e-6 nats at most, over the six settings.
    learner_logp = learner(sampling.params, *rows).logp
    np.testing.assert_allclose(rollout.behaviour_logp, learner_logp, rtol=0, atol=1e-5)
    # Measured: 2.6e-6 nats at most.
    params = building.host_params(sampler.model)
    for row in range(0, 24, 2):
        oracle = transformer.completion_logp(params, sampler.model.arch, *(x[row] for x in rows), **SETTINGS[name])
        np.testing.assert_allclose(rollout.behaviour_logp[row], oracle, rtol=0, atol=1e-5)
    if name == "plain":
        assert building.completions(rollout) == of(base_rollout(), PROMPTS)


@pytest.mark.parametrize(
    ("name", "at_most"),
    mostly_in("slow", [("all", 40), ("all", 64), ("min_p", 7), ("top_k", 64), ("top_p", 24)]),  # the rest: parts of all
)
def test_what_a_token_was_drawn_among_is_kept_and_a_learner_that_moved_weighs_it_among_the_same(name, at_most):
    """Checked under every filter.

    If more ids remain than are kept, a token is drawn among the likeliest ids, and the case is counted.
    """
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | SETTINGS[name]
    size = min(at_most, filters["top_k"] or at_most)
    sampler = make_sampler(num_slots=5, chunk_steps=3, sampling=SETTINGS[name] | {"support_tokens": at_most})
    sampling = Sampling(sampler)
    rollout, _ = sampling(make_prompts(PROMPTS))
    arch, temperature = sampler.model.arch, filters["temperature"]
    assert rollout.columns["support"].shape == (*rollout.tokens.shape, size)
    moved = jax.tree.map(lambda x: x * 1.2, building.learner_params(sampler.model, sampler.mesh))
    rows = (rollout.tokens, rollout.prompt_length, rollout.length)
    learner = functools.partial(
        row_logp, sampler.model, sampling=sampler.sampling, completion_width=COMPLETION_TOKENS, chunk_positions=3
    )
    logp = jax.jit(learner)(moved, *rows, rollout.columns["support"]).logp
    without = jax.jit(learner)(moved, *rows).logp
    params, host_moved = building.host_params(sampler.model), jax.tree.map(np.asarray, moved)
    num_cut = 0
    for row in range(24):
        tokens, start, end = (x[row] for x in rows)
        logits = transformer.logits(params, arch, tokens[:end])
        support = {t: set(rollout.columns["support"][row, t].tolist()) - {NO_TOKEN} for t in range(start, end)}
        for t in range(start, end):
            left = oracle.kept_tokens(logits[t - 1], **filters)
            assert support[t] == set(sorted(left, key=lambda v: -logits[t - 1][v])[:size])
            num_cut += len(left) > size
        if row % 4:
            continue
        among = transformer.completion_logp(params, arch, tokens, start, end, temperature=temperature, support=support)
        np.testing.assert_allclose(rollout.behaviour_logp[row], among, rtol=0, atol=1e-5)
        expected = transformer.completion_logp(
            host_moved, arch, tokens, start, end, temperature=temperature, support=support
        )
        np.testing.assert_allclose(logp[row], expected, rtol=0, atol=1e-5)
    # What today's weights would leave is another set.
    assert np.abs(np.asarray(logp - without)).max() > 0.01
    assert sampling.generator.take_draws().cut == num_cut and (num_cut > 0) == (name in ("top_p", "min_p"))


@pytest.mark.tier("slow")  # plain: entropies in tests/ops/test_logp.py and test_sampling.py
@pytest.mark.parametrize("name", ["all", pytest.param("temperature", marks=pytest.mark.slow)])
def test_entropies_are_those_of_what_was_drawn_from_and_sums_are_of_every_token(name):
    sampler = make_sampler(num_slots=5, chunk_steps=3, sampling=SETTINGS[name], keeps_entropy=True)
    sampling = Sampling(sampler)
    rollout, _ = sampling(make_prompts(PROMPTS))
    params, temperature = building.host_params(sampler.model), SETTINGS[name].get("temperature", 1.0)
    expected, variance = np.zeros(rollout.columns["entropy"].shape), 0.0
    for row in range(24):
        start, end = rollout.prompt_length[row], rollout.length[row]
        logits = transformer.logits(params, sampler.model.arch, rollout.tokens[row, :end])
        for t in range(start, end):
            kept = range(len(logits[t - 1]))
            if "support" in rollout.columns:
                kept = sorted(set(rollout.columns["support"][row, t].tolist()) - {NO_TOKEN})
            p = oracle.softmax(logits[t - 1][kept] / temperature)
            expected[row, t] = -np.sum(p * np.log(p))
            variance += np.sum(p * (np.log(p) + expected[row, t]) ** 2)
    np.testing.assert_allclose(rollout.columns["entropy"], expected, rtol=0, atol=1e-5)
    sums, surprise = sampling.generator.take_draws(), -rollout.behaviour_logp.astype(np.float64)
    lengths = rollout.length - rollout.prompt_length
    assert sums.tokens == lengths.sum()
    np.testing.assert_allclose(sums.surprise, surprise.sum(), rtol=1e-5)
    np.testing.assert_allclose(sums.entropy, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(sums.error_square, np.square(surprise - expected).sum(), rtol=1e-4)
    np.testing.assert_allclose(sums.variance, variance, rtol=1e-4)


def test_greedy_takes_the_most_likely_token_and_its_logp_at_temperature_1():
    sampler = make_sampler(num_slots=5, chunk_steps=3, sampling={"temperature": 0.0})
    rollout, _ = Sampling(sampler)(make_prompts(PROMPTS))
    params = building.host_params(sampler.model)
    for row in range(0, 24, 3):
        start, end = rollout.prompt_length[row], rollout.length[row]
        logits = transformer.logits(params, sampler.model.arch, rollout.tokens[row, :end])
        assert logits[start - 1 : end - 1].argmax(axis=-1).tolist() == rollout.tokens[row, start:end].tolist()
        oracle = transformer.completion_logp(params, sampler.model.arch, rollout.tokens[row], start, end)
        np.testing.assert_allclose(rollout.behaviour_logp[row], oracle, rtol=0, atol=1e-5)


def test_logp_changes_when_the_weights_do_with_nothing_called_in_between():
    sampling = Sampling(make_sampler())
    first, _ = sampling(make_prompts(PROMPTS))
    sampling.params = jax.tree.map(lambda x: x * 1.01, sampling.params)
    second, _ = sampling(make_prompts(PROMPTS))
    start = first.prompt_length[:, None]
    assert (np.take_along_axis(first.behaviour_logp != second.behaviour_logp, start, axis=1)).all()


# --- what a sample depends on ---


def states_left(sampling):
    """Record the device states that are left after each collection of rollouts."""
    left, collect = [], sampling.generator.programs["collect"]

    def watched(*arguments):
        *collected, state = collect(*arguments)
        left.append(jax.device_get(state))
        return *collected, state

    sampling.generator.programs = {**sampling.generator.programs, "collect": watched}
    return left


@pytest.mark.parametrize(
    "settings",
    [
        {"num_slots": 5, "chunk_steps": 1},
        {"num_slots": 7, "chunk_steps": 3, "max_prompt_tokens": PROMPT_TOKENS + 3},
    ],
    ids=["5 slots, 1 step", "7 slots, 3 steps, wider prompts"],
)
def test_samples_do_not_depend_on_slots_chunks_widths_or_the_order_of_prompts(settings):
    sampling = Sampling(make_sampler(**settings))
    left = states_left(sampling)
    order = np.random.default_rng(0).permutation(8).tolist()
    rollout, groups = sampling(make_prompts(order, width=sampling.sampler.max_prompt_tokens))
    assert building.completions(rollout) == of(base_rollout(), PROMPTS)
    assert [group.group_id for group in groups] == rollout.group_id[::3].tolist()
    assert len(left) == 1 and (left[0].slot_row == -1).all()
    assert sampling.generator.state is None  # its caches are freed


@pytest.mark.tier("slow")  # plain: test_samples_do_not_depend_on_slots_...
def test_samples_do_not_depend_on_the_blocks_of_the_caches(monkeypatch):
    """The caches are ring buffers that wrap around, because slots are used by one row after another."""
    monkeypatch.setattr(attention, "BLOCK_PLACES", 4)
    sampling = Sampling(make_sampler(num_slots=5, chunk_steps=4))
    assert len(sampling.sampler.abstract_state().cache_k[0]) == 2
    rollout, _ = sampling(make_prompts(PROMPTS))
    assert building.completions(rollout) == of(base_rollout(), PROMPTS)
    # Sums of two blocks are added in another order. Measured: 1.0e-6 nats.
    np.testing.assert_allclose(rollout.behaviour_logp, base_rollout().behaviour_logp[:24], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"mesh": EIGHT, "num_slots": 8, "chunk_steps": 3}, marks=pytest.mark.slow),
        {"mesh": CUBE, "num_slots": 16, "chunk_steps": 5},
    ],
    ids=["data 8", "data 2 x fsdp 2 x tensor 2"],
)
def test_samples_do_not_depend_on_the_mesh(settings):
    rollout, _ = Sampling(make_sampler(**settings))(make_prompts(PROMPTS))
    assert building.completions(rollout) == of(base_rollout(), PROMPTS)
    # Sums over the tensor axis are rounded in another order. Measured: 3.3e-6 nats.
    assert np.abs(rollout.behaviour_logp - base_rollout().behaviour_logp[: len(rollout.tokens)]).max() < 1e-5


def test_samples_of_a_group_differ_and_seed_and_prompt_id_key_the_noise():
    same_question = make_prompts([3] * 8)

    def sample(ids, seed):
        prompts = building.PromptBatch(
            same_question.tokens, same_question.length, np.asarray(ids, np.int32), same_question.examples
        )
        base().key = base().put(jax.random.key(seed))
        return building.completions(base()(prompts)[0])

    first, other_ids, other_seed = sample(range(8), 0), sample(range(8, 16), 0), sample(range(8), 1)
    again = sample(range(8), 0)
    assert again == first
    # Two samples agree by chance in their first token alone already with a probability far below a half.
    assert len({ids[0] for ids in first.values()}) > 8
    long_ones = [ids for ids in [*first.values(), *other_ids.values(), *other_seed.values()] if len(ids) > 3]
    assert len(long_ones) > 24 and len(set(long_ones)) == len(long_ones)


# --- the end of a completion ---


def test_eos_is_in_the_completion_with_its_logp_also_as_the_last_token_allowed():
    rollout = base_rollout()
    size = rollout.length - rollout.prompt_length
    last = rollout.tokens[np.arange(72), rollout.length - 1]
    ended = np.isin(last, EOS_IDS)
    np.testing.assert_array_equal(rollout.stop_reason, np.where(ended, STOP_EOS, STOP_LENGTH))
    assert (size[~ended] == COMPLETION_TOKENS).all() and (size > 0).all() and (size <= COMPLETION_TOKENS).all()
    assert (ended & (size == COMPLETION_TOKENS)).any() and (~ended).any()
    # Only the last token of a completion may be an end of sequence, and it has a log-prob.
    at = np.arange(rollout.tokens.shape[1])[None, :]
    mask = (at >= rollout.prompt_length[:, None]) & (at < rollout.length[:, None])
    assert not (np.isin(rollout.tokens, EOS_IDS) & mask & (at < rollout.length[:, None] - 1)).any()
    assert (rollout.behaviour_logp[mask] < 0).all() and (rollout.behaviour_logp[~mask] == 0).all()
    assert (rollout.tokens[at >= rollout.length[:, None]] == 0).all()
    assert (rollout.policy_version[mask] == 0).all() and (rollout.policy_version[~mask] == -1).all()


def stops():
    """Return two stop strings that occur: one inside a completion, one at the end of a truncated completion."""
    ids = building.completions(base_rollout())
    truncated = sorted(key for key in of(base_rollout(), PROMPTS) if len(ids[key]) == 8 and ids[key][-1] not in EOS_IDS)
    inside, at_end = building.letters(ids[truncated[0]]), building.letters(ids[truncated[1]])
    return (inside[2:4], at_end[-2:]), truncated[1]


@pytest.mark.parametrize("settings", [{}, {"num_slots": 5, "chunk_steps": 3}], ids=["1 chunk", "chunks of 3"])
def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it(settings):
    stop_strings, at_limit = stops()
    sampling = Sampling(make_sampler(sampling={"stop_strings": stop_strings}, **settings))
    left = states_left(sampling)
    rollout, groups = sampling(make_prompts(PROMPTS))
    reasons = dict(zip(building.completions(rollout), rollout.stop_reason.tolist(), strict=True))
    expected = {}
    for key, ids in of(base_rollout(), PROMPTS).items():
        ends = [n for n in range(1, 1 + len(ids)) if any(s in building.letters(ids[:n]) for s in stop_strings)]
        expected[key] = ids[: min(ends, default=len(ids))]
        assert reasons[key] == (STOP_STRING if ends else STOP_EOS if ids[-1] in EOS_IDS else STOP_LENGTH)
    assert building.completions(rollout) == expected
    assert [tuple(c) for group in groups for c in group.completions] == list(building.completions(rollout).values())
    # A stop string in the last token allowed is no truncation.
    assert len(expected[at_limit]) == COMPLETION_TOKENS and reasons[at_limit] == STOP_STRING
    assert any(len(expected[key]) < len(ids) for key, ids in of(base_rollout(), PROMPTS).items())
    at = np.arange(rollout.tokens.shape[1])[None, :]
    past = at >= rollout.length[:, None]
    assert (rollout.tokens[past] == 0).all() and (rollout.behaviour_logp[past] == 0).all()
    assert (rollout.policy_version[past] == -1).all()
    assert len(left) == 1 and (left[0].slot_row == -1).all()
    assert sampling.generator.state is None  # its caches are freed


# --- the host beside the device ---


class Watched:
    """The compiled programs of a generator, which record their arguments and results."""

    def __init__(self, generator):
        self.run, self.unfinished, self.reasons = generator.programs, [], []
        generator.programs = generator.programs | {"decode": self.decode}

    def decode(self, params, state, *how):
        self.unfinished.append(int((np.asarray(state.stop_reason) == STOP_NONE).sum()))
        state, told = self.run["decode"](params, state, *how)
        self.reasons.append(told[0])
        return state, told


def test_the_next_chunk_is_dispatched_before_the_host_looks_and_the_one_after_before_it_scores():
    sampling, dispatched = Sampling(make_sampler(num_slots=5, chunk_steps=1)), {}
    watched = Watched(sampling.generator)
    sampling(make_prompts(PROMPTS), on_finished=lambda g: dispatched.update({g.group_id: len(watched.reasons)}))
    # Prompt p lies in entry p; chunk k (from 1) is that which its last row stopped in.
    stopped = np.asarray(watched.reasons)[:, 0].all(axis=-1)
    ended = {p: 1 + stopped[:, p].tolist().index(True) for p in PROMPTS}
    assert dispatched == {p: min(k + 2, max(ended.values()) + 1) for p, k in ended.items()}
    # One chunk too many, and it found nothing to do.
    assert len(watched.reasons) == max(ended.values()) + 1 and watched.unfinished.index(0) == max(ended.values())
    assert len(set(ended.values())) > 2


def test_a_stop_string_is_waited_for_and_no_chunk_is_one_too_many():
    sampling = Sampling(make_sampler(sampling={"stop_strings": stops()[0]}, num_slots=5, chunk_steps=3))
    watched = Watched(sampling.generator)
    sampling(make_prompts(PROMPTS))
    assert all(watched.unfinished) and len(watched.unfinished) > 3


@pytest.mark.tier("slow")  # plain: test_samples_do_not_depend_on_slots_...
def test_a_chunk_that_comes_when_every_shard_has_its_share_changes_no_bit():
    sampling = Sampling(make_sampler(mesh=MeshConfig(data=2), num_prompts=4, lookahead=2, num_slots=6, chunk_steps=2))
    run, in_flight = sampling.generator.programs, []

    def collect(state, entries):
        before = jax.device_get(state)
        nothing_due = sampling.put(np.zeros((2, 3), bool))
        nothing_due = jax.device_put(nothing_due, sharding.leading(sampling.sampler.mesh, nothing_due))
        state, _ = run["decode"](sampling.params, state, sampling.put(np.int32(9)), sampling.key, nothing_due)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
        in_flight.append(int((before.slot_row >= 0).sum()))
        return run["collect"](state, entries)

    sampling.generator.programs = run | {"collect": collect}
    for call in range(3):
        ids = range(6) if call == 0 else range(2 + 4 * call, 6 + 4 * call)
        sampling(make_prompts(ids))
    assert max(in_flight) > 0


@pytest.mark.tier("slow")  # plain: test_sampler_logp_is_the_learners_and_that_of_a_float64_model
def test_a_sampler_that_ignores_its_temperature_is_warned_of_and_another_is_not(monkeypatch):
    """120 rollouts each; a false alarm has the probability of a normal deviate beyond 6 (2e-9)."""
    settings = dict(num_slots=5, chunk_steps=3, sampling={"temperature": 0.6})
    config = dataclasses.replace(Config(), sampling=make_sampler(**settings).sampling)

    def said(sampler):
        sampling = Sampling(sampler)
        for call in range(5):
            sampling(make_prompts(range(8 * call, 8 * call + 8)))
        return metrics.draw_warning(metrics.draw_values(config, sampling.generator.take_draws()))

    assert said(make_sampler(**settings)) is None
    draw = sampler_module.sample_inverse_cdf
    wrong = lambda logits, uniform, axis: (
        token := draw(0.6 * logits, uniform, axis)[0],
        token_logp(logits, token)[0],
    )
    monkeypatch.setattr(sampler_module, "sample_inverse_cdf", wrong)
    # One more step in a chunk: programs of its own.
    assert "the sampler does not draw from the recorded distributions" in said(
        make_sampler(**settings | {"chunk_steps": 7})
    )


@pytest.mark.parametrize(("tokens", "rare"), [(512, 1e-3), (1024, 1e-3), (4096, 5e-4), (64, 0.3)])
def test_an_honest_sampler_is_not_warned_of_however_rare_a_token_is(tokens, rare):
    """2,000 iterations of tokens from a distribution over two tokens.

    Using only the drawn tokens would underestimate the variance.
    """
    rng, p = np.random.default_rng(0), np.array([1 - rare, rare])
    entropy, config = -np.sum(p * np.log(p)), Config()
    variance = np.sum(p * (np.log(p) + entropy) ** 2)
    for count in rng.binomial(tokens, rare, 2000):
        drawn = np.array([tokens - count, count])
        squares = drawn @ np.square(-np.log(p) - entropy)
        sums = DrawSums(tokens, drawn @ -np.log(p), tokens * entropy, squares, tokens * variance, 0)
        assert metrics.draw_warning(metrics.draw_values(config, sums)) is None
    broken = DrawSums(tokens, np.nan, tokens * entropy, 1.0, tokens * variance, 0)
    values = metrics.draw_values(config, broken)
    assert metrics.draw_warning(values) is not None
    # As a run says it, which has null for what is not a number.
    assert "nan nats" in metrics.draw_warning(metrics.plain_numbers(values))
    nothing = dict.fromkeys(values)
    assert "(standard error nan)" in metrics.draw_warning(nothing)


# --- prompts ahead of their iteration ---


def test_with_lookahead_every_prompt_comes_out_once_with_the_same_tokens_and_versions_are_kept_per_token():
    sampling = Sampling(make_sampler(mesh=MeshConfig(data=2), num_prompts=4, lookahead=2, num_slots=6, chunk_steps=2))
    opened, collected, tickets = {}, [], []
    for call in range(5):
        wanted = sampling.generator.prompts_wanted()
        assert wanted == (6 if call == 0 else 4)
        ids = range(len(opened), len(opened) + wanted)
        opened |= dict.fromkeys(ids, call)
        rollout, groups = sampling(make_prompts(ids), version=call, on_finished=lambda g: tickets.append(g.group_id))
        collected.append(rollout)
        assert [group.group_id for group in groups] == rollout.group_id[::3].tolist()
    rows = jax.tree.map(lambda *x: np.concatenate(x), *collected)
    out, still_open = rows.group_id[::3].tolist(), [p for p, *_ in sampling.generator.open_prompts.values()]
    assert sorted(out + still_open) == list(opened) and len(out) == 20
    assert len(set(tickets)) == len(tickets) and set(out) <= set(tickets)
    assert building.completions(rows) == of(base_rollout(), out)
    # What was drawn is counted once: of the rows that came out, and of those that are still open.
    state = sampling.generator.state
    left = np.sum(np.asarray(state.length - state.prompt_length)[np.asarray(state.group_id) >= 0])
    assert sampling.generator.take_draws().tokens == (rows.length - rows.prompt_length).sum() + left
    spans = 0
    for row in range(len(rows.length)):
        versions = rows.policy_version[row, rows.prompt_length[row] : rows.length[row]]
        # Of the calls from the one that opened the prompt to the one that handed the rollout out, in order.
        assert opened[rows.group_id[row]] <= versions[0] and versions[-1] <= row // 12
        assert (np.diff(versions) >= 0).all()
        assert (np.delete(rows.policy_version[row], np.s_[rows.prompt_length[row] : rows.length[row]]) == -1).all()
        spans += len(set(versions.tolist())) > 1
    assert spans > 0


def test_a_call_ends_with_the_pth_of_the_groups_that_are_open_and_what_was_begun_comes_out_once():
    """As in APRIL: twice as many prompts are open as a call returns, and each rollout has a slot."""
    sizes = {"num_prompts": 4, "lookahead": 4, "group_size": 1, "num_slots": 8, "chunk_steps": 1}
    sampling = Sampling(make_sampler(**sizes))
    alone = building.completions(base_rollout())
    left, out = {}, []
    for call in range(5):
        ids = range(4 * call + (4 if call else 0), 4 * call + 8)
        left |= {name: len(alone[name, 0]) for name in ids}
        steps = max(0, sorted(left.values())[3])
        left = {name: size - steps for name, size in left.items()}
        rollout, _ = sampling(make_prompts(list(ids)), version=call)
        # The oldest of those that have finished leave.
        names = rollout.group_id.tolist()
        assert names == sorted(name for name, size in left.items() if size <= 0)[:4]
        for name in names:
            del left[name]
        state = sampling.generator.state
        drawn = np.asarray((state.policy_version == call).sum(axis=-1))[np.asarray(state.stop_reason) == STOP_NONE]
        assert set(drawn.tolist()) <= {steps}
        out += names
    assert len(out) == len(set(out)) == 20 and sorted(out + list(left)) == list(range(24))


def test_idle_slots_go_to_the_oldest_prompts():
    sampler = make_sampler(num_slots=5)
    state = sampler._empty()
    state = state.replace(group_id=state.group_id.at[0, :4].set(jnp.array([7, 3, 5, 9])))
    # Three rows of the second entry, and two of the third.
    assert jax.jit(sampler._refill)(state).slot_row.tolist() == [[3, 4, 5, 6, 7]]


class Stragglers:
    """Programs in which a script decides when each prompt stops, as a number of chunks after its opening."""

    def __init__(self, sampler, chunks):
        self.sampler, self.chunks, self.left = sampler, chunks, {}
        self.programs = {"init_sampler": lambda: types.SimpleNamespace(tokens=None, length=None, stop_reason=None)}
        self.programs |= {"prefill": self.prefill, "decode": self.decode, "collect": self.collect}
        self.programs["read_group"] = lambda *_: jnp.zeros((1, 1, 8), int)
        self.collected = []

    def prefill(self, params, state, tokens, length, group_id, entry):
        for name, where in zip(np.asarray(group_id).tolist(), np.asarray(entry).ravel().tolist(), strict=True):
            if where < self.sampler.entries:
                self.left[where] = [name, self.chunks(name)]
        return state

    def decode(self, params, state, version, key, due):
        reasons = np.zeros((1, self.sampler.entries, 1), np.int8)
        for where, one in self.left.items():
            one[1] -= 1
            reasons[0, where] = one[1] <= 0
        return state, (reasons, np.ones(reasons.shape, int))

    def collect(self, state, entries):
        self.collected.append([self.left.pop(where)[0] for where in np.asarray(entries).ravel().tolist()])
        return None, DrawSums(*[np.zeros(1)] * 6), state


@pytest.mark.parametrize(("P", "lookahead", "max_lag"), [(2, 4, 2), (8, 16, 4), (2, 6, 3), (2, 2, 1), (3, 9, 2)])
def test_the_gate_holds_where_many_prompts_come_due_together(P, lookahead, max_lag):
    """All prompts that the first call opens ahead are stragglers; later prompts stop at once."""
    sampler = make_sampler(num_prompts=P, group_size=1, lookahead=lookahead, num_slots=P, chunk_steps=1)
    script = Stragglers(sampler, lambda name: 40 if P <= name < P + lookahead else 1)
    generator = Generator(sampler, script.programs, str, max_lag)
    opened = {}
    for call in range(14):
        wanted = generator.prompts_wanted()
        ids = list(range(len(opened), len(opened) + wanted))
        opened |= dict.fromkeys(ids, call)
        assert len(opened) <= (max_lag + call + 1) * P
        generator.generate(None, make_prompts(ids), version=None, key=None)
        generator.take()
    lags = [call - opened[name] for call, names in enumerate(script.collected) for name in names]
    assert max(lags) == max_lag and len(lags) == 14 * P


def straggling(max_lag):
    """Return the largest lag of a token, in calls, and the largest number of open prompts after a call.

    Two of eight neighbouring rows are collected as soon as they have stopped, before a longer row.
    """
    sampler = make_sampler(num_prompts=2, group_size=1, lookahead=6, num_slots=8, chunk_steps=1)
    sampling = Sampling(sampler)
    sampling.generator.max_lag = max_lag
    opened, lag, most_open = {}, 0, 0
    for call in range(12):
        ids = range(len(opened), len(opened) + sampling.generator.prompts_wanted())
        # The capacity of the source: (eta + version + 1) * batch is never passed by what has been submitted.
        if max_lag:
            assert len(opened) + len(ids) == min((max_lag + call + 1) * 2, 2 * call + 8)
        opened |= dict.fromkeys(ids, call)
        rollout, _ = sampling(make_prompts(list(ids)), version=call)
        versions = np.where(rollout.policy_version >= 0, rollout.policy_version, call)
        lag, most_open = max(lag, int(call - versions.min())), max(most_open, len(sampling.generator.open_prompts))
    return lag, most_open


def test_no_token_is_older_than_the_staleness_gate_allows_and_the_capacity_is_the_sources():
    free, freely_open = straggling(0)
    assert free > 3 and freely_open == 6
    assert [straggling(most) for most in (1, 2, 3)] == [(1, 2), (2, 4), (3, 6)]
