"""Which finished groups leave with a call, and how the surplus of a shard moves to shards with fewer groups."""

import types

import jax
import numpy as np
import pytest
from support import building
from support.building import Sampling, make_prompts, make_sampler

from jaxrl_llm.actor import quotas
from jaxrl_llm.actor.generator import Generator, OpenPrompt
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.runtime import sharding


@pytest.mark.parametrize(
    ("num_prompts", "lookahead", "shards", "max_lag", "slack"),
    [
        (256, 256, 64, 0, 2),
        (256, 256, 8, 0, 6),
        (8, 8, 8, 0, 1),
        (256, 64, 64, 0, 1),  # a shard has one group beyond its quota
        (256, 256, 1, 0, 0),  # nobody to give to
        (256, 0, 64, 0, 0),  # all that is open leaves
        (16, 32, 4, 2, 0),  # at full capacity each shard must give its quota, or a prompt stays too long
        (16, 32, 4, 3, 2),
    ],
)
def test_the_slack_is_the_root_of_the_quota_where_a_shard_may_give_less(num_prompts, lookahead, shards, max_lag, slack):
    assert quotas.slack_of(num_prompts, lookahead, shards, max_lag) == slack


def test_the_oldest_leave_first_up_to_the_slack_and_those_that_are_due_in_any_case():
    ages = {(0, 0): 3, (0, 1): 1, (0, 2): 2, (0, 3): 0, (1, 1): 9, (1, 2): 7, (2, 0): 5}
    finished = [[place for place in ages if place[0] == shard] for shard in range(3)]
    leaving = quotas.chosen(finished, ages.get, {(1, 1)}, 6, 1)
    # Of shard 0 three at most, the oldest; the youngest of all leaves, for it is due.
    assert leaving == [[(0, 3), (0, 1), (0, 2)], [(1, 2), (1, 1)], [(2, 0)]]
    assert quotas.in_rows(leaving, 6) == [(0, 3), (0, 1), (1, 2), (1, 1), (2, 0), (0, 2)]
    entry, source = quotas.arrays(leaving, 6, 1, 4)
    assert entry.tolist() == [[3, 1, 2], [2, 1, 4], [0, 4, 4]]
    assert source.tolist() == [[-1, -1], [-1, -1], [-1, 0]]


@pytest.mark.parametrize(("finished", "slack", "is_enough"), [((2, 2), 0, True), ((4, 1), 0, False), ((4, 1), 1, True)])
def test_a_call_has_enough_by_all_shards_together_within_the_slack(finished, slack, is_enough):
    assert quotas.is_enough(np.array(finished), 4, slack) == is_enough


@pytest.mark.parametrize(
    ("num_prompts", "lookahead", "shards", "max_lag"), [(16, 16, 4, 2), (8, 8, 8, 2), (64, 128, 8, 3)]
)
def test_no_prompt_stays_longer_than_the_gate_allows_though_shards_give_more_or_less_than_their_quota(
    num_prompts, lookahead, shards, max_lag
):
    """Simulated without a device: one answer in four takes a hundred times as long as the others."""
    rng, slack = np.random.default_rng(0), quotas.slack_of(num_prompts, lookahead, shards, max_lag)
    entries, opened, given = (num_prompts + lookahead) // shards, 0, []
    sampler = types.SimpleNamespace(num_prompts=num_prompts, shards=shards, entries=entries, lookahead=0)
    host = Generator(sampler, {}, str, max_lag)
    left = {}
    for call in range(60):
        host.calls = call
        for where in (where for of_shard in host._free() for where in of_shard):
            host.open_prompts[where] = OpenPrompt(opened, None, [], call)
            left[where] = rng.choice([1.0, 100.0], p=[0.75, 0.25]) * rng.random()
            opened += 1
        due, time = host._due(), 0.0
        for time in (0.0, *sorted(left.values())):
            done = [[where for where in left if where[0] == m and left[where] <= time] for m in range(shards)]
            is_enough = quotas.is_enough(np.array([len(places) for places in done]), num_prompts, slack)
            if is_enough and all(left[where] <= time for where in due):
                break
        leaving = quotas.chosen(done, lambda where: host.open_prompts[where].group_id, due, num_prompts, slack)
        given.append([len(places) for places in leaving])
        assert sum(given[-1]) == num_prompts and max(given[-1]) <= num_prompts // shards + slack
        for where in quotas.in_rows(leaving, num_prompts):
            assert call - host.open_prompts.pop(where).call <= max_lag
            del left[where]
        assert all(call - prompt.call < max_lag for prompt in host.open_prompts.values())
        left = {where: size - time for where, size in left.items()}
    assert slack > 0 and np.ptp(given) > 0


@pytest.mark.tier("slow")  # plain: the quotas by hand, in this file
def test_a_surplus_moves_to_the_shards_that_lack_and_every_group_comes_out_once_with_its_own_rows():
    """The tokens equal those of one shard, and the rows are in the order that ``generate`` returns."""
    alone = Sampling(make_sampler(num_prompts=24, num_slots=24))
    expected = building.completions(alone(make_prompts(range(24)))[0])
    mesh = MeshConfig(data=4)
    sampling = Sampling(make_sampler(mesh=mesh, lookahead=8, slack=2, num_slots=24, chunk_steps=1))
    collect, given, tickets, seen = sampling.generator.programs["collect"], [], [], {}

    def watched(state, entry, source):
        given.append((np.asarray(entry) < 4).sum(axis=1))
        return collect(state, entry, source)

    sampling.generator.programs = {**sampling.generator.programs, "collect": watched}
    opened = 0
    for _ in range(3):
        wanted = sampling.generator.prompts_wanted()
        prompts = make_prompts(range(opened, opened + wanted))
        opened += wanted
        rollout, groups = sampling(prompts, on_finished=lambda group: tickets.append(group.group_id))
        assert [group.group_id for group in groups] == rollout.group_id[::3].tolist()
        for group, row in zip(groups, range(0, 24, 3), strict=True):
            for g, ids in enumerate(group.completions):
                first = rollout.prompt_length[row + g]
                assert rollout.tokens[row + g, first : first + len(ids)].tolist() == ids
        seen |= building.completions(rollout)
    assert len(seen) == 72 and len({*tickets}) == len(tickets)
    assert {key: ids for key, ids in seen.items() if key[0] < 24} == {key: expected[key] for key in seen if key[0] < 24}
    assert max(counts.max() for counts in given) > 2 and min(counts.min() for counts in given) < 2
    assert all(counts.sum() == 8 for counts in given)


def test_only_the_groups_beyond_the_quotas_are_sent():
    sampler = make_sampler(mesh=MeshConfig(data=4), lookahead=8, slack=1, num_slots=24)
    program = sampler.programs(building.abstract_sampler_params(sampler))["collect"]
    sent = program.lower(sampler.mesh).compile().as_text()
    rows = sharding.num_data_shards(sampler.mesh) * 3  # of the slack of all shards, three to a group
    width = sampler.row_tokens
    gathered = [line for line in sent.splitlines() if "all-gather(" in line]
    sizes = [int(np.prod([int(n) for n in line.split("[")[1].split("]")[0].split(",")])) for line in gathered]
    assert sizes and max(sizes) <= rows * width


def test_the_device_has_enough_when_the_host_has():
    """A chunk that starts when all shards together have enough groups changes no bit, even if one shard has too few."""
    sampling = Sampling(make_sampler(mesh=MeshConfig(data=4), lookahead=8, slack=2, num_slots=24, chunk_steps=1))
    run, lacking = sampling.generator.programs, []

    def collect(state, entry, source):
        before = jax.device_get(state)
        nothing_due = np.zeros((4, 4), bool)
        nothing_due = jax.device_put(nothing_due, sharding.leading(sampling.sampler.mesh, nothing_due))
        state, _ = run["decode"](sampling.params, state, sampling.put(np.int32(9)), sampling.key, nothing_due)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
        lacking.append((np.asarray(source) >= 0).any())
        return run["collect"](state, entry, source)

    sampling.generator.programs = run | {"collect": collect}
    for first in (0, 16, 24):
        sampling(make_prompts(range(first, first + (16 if first == 0 else 8))))
    assert any(lacking)
