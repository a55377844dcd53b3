"""External rollouts: which lines are groups, which line is read when, and the rows made from them.

Expected log-probabilities come from the loop oracle in float64; orders and positions are computed by hand.
"""

import contextlib
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import transformer
from support import building
from support.building import COMPLETION_TOKENS, CUBE, EOS_IDS, ONE, PROMPT_TOKENS, TINY, mesh_of
from support.refusal import ANY, check_refusal, check_words, refused, refused_row

from jaxrl_llm.actor.actor import Actor
from jaxrl_llm.actor.external_groups import shared_groups
from jaxrl_llm.actor.generator import FinishedGroup
from jaxrl_llm.config import MeshConfig, freeze
from jaxrl_llm.learner import credit
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import encode_examples
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.types import (
    OUTCOME_ERROR,
    OUTCOME_SCORE,
    SHARED_FILE,
    STOP_EOS,
    STOP_LENGTH,
    STOP_STRING,
    Example,
    Rewards,
    Scores,
)

G = 3
END = 257  # of the byte tokenizer


def make_run(*paths, groups=2, mesh=ONE, own=4, **sections):
    settings = {
        "prompts": {"max_tokens": PROMPT_TOKENS},
        "sampling": {"max_completion_tokens": COMPLETION_TOKENS},
        "rollout": {"prompts_per_iteration": own, "group_size": G},
        "external": {"paths": tuple(map(str, paths)), "groups_per_iteration": groups},
        "update": {"batch_size": 4, "micro_batch_size": 4},
        "replay": {"unit": "rollout"},
    }
    settings |= {name: settings.get(name, {}) | values for name, values in sections.items()}
    return assemble(freeze(settings), TINY, EOS_IDS, mesh_of(mesh))


def external(*paths, **settings):
    return building.external_of(make_run(*paths, **settings))


def line(prompt="p", completions=("a", "b"), **fields):
    return json.dumps({"prompt": prompt, "completions": completions} | fields) + "\n"


def written(folder, *lines, name="shown.jsonl"):
    (folder / name).write_text("".join(lines))
    return folder / name


def prompts(batch):
    return [group and group.example.prompt for group in batch.groups]


def unasked(group):
    raise AssertionError("nothing is to be scored")


# ---- which lines are groups ----------------------------------------------------------------------------------------


def test_a_line_becomes_the_rows_of_a_group(tmp_path):
    path = written(tmp_path, line("hi", ["ab", [7, 250]], rewards=[1, None]), "\n", line(prompt_ids=[112]))
    source = external(path, sampling={"stop_strings": ("b",)})
    tickets = []
    batch = source.next_groups(5, lambda group: tickets.append(group) or len(tickets))
    rows = jax.device_get(batch.rows)
    hi, p = (104, 105), 112
    expected = [[*hi, 97, 98, END], [*hi, 7, 250], [*hi], [p, 97, END], [p, 98, END], [p]]
    assert [row[:n].tolist() for row, n in zip(rows.tokens, rows.length, strict=True)] == expected
    assert not any(row[n:].any() for row, n in zip(rows.tokens, rows.length, strict=True))
    assert rows.prompt_length.tolist() == [2, 2, 2, 1, 1, 1]
    # Two groups an iteration and this the sixth: ten groups came before.
    assert rows.group_id.tolist() == [-11] * 3 + [-12] * 3
    assert rows.stop_reason[[0, 1, 3, 4]].tolist() == [STOP_EOS, STOP_LENGTH, STOP_EOS, STOP_EOS]
    # Of the second alone rewards are asked for, with the texts.
    assert [group.example.prompt for group in tickets] == ["p"] and batch.groups[1].ticket == 1
    assert batch.groups[0].rewards[0] == 1 and np.isnan(batch.groups[0].rewards[1])


@pytest.mark.parametrize("reshaping", [[], ["reward_mask"]])
def test_what_comes_without_rewards_the_actor_hands_to_the_pool_as_what_was_sampled(reshaping, tmp_path):
    given = []
    pool = types.SimpleNamespace(submit=lambda *call: given.append(call))
    config = freeze({"algorithm": {"reshaping": reshaping}})
    actor = types.SimpleNamespace(_pool=pool, _decode=make_byte_tokenizer().decode, _byte_ids=(), _config=config)
    path = written(tmp_path, line("asked", ["a", "bc"]), line("told", rewards=[0, 1]))
    external(path).next_groups(0, functools.partial(Actor._score, actor))
    ((example, texts, played, columns),) = given
    assert (example.prompt, texts, played) == ("asked", ["a", "bc"], None)
    length = config.sampling.max_completion_tokens
    assert columns.shapes == ({"reward_mask": (length,)} if reshaping else {})
    assert columns.positions(1, [[1, 2]]) == [1]  # the end has no character


def test_what_is_masked_of_own_rows_and_of_others_goes_with_them(tmp_path):
    path = written(tmp_path, line("asked", ["a", "bc"]), line("told", rewards=[0, 1]))
    batch = external(path, algorithm={"reshaping": ["reward_mask"]}).next_groups(0, lambda group: "ticket")
    length = batch.column_shapes["reward_mask"][0]

    def rewards(*masked):
        mask = np.zeros((len(masked), length), np.float32)
        for row, positions in zip(mask, masked, strict=True):
            row[positions] = 1.0
        zeros = np.zeros(len(masked))
        return Rewards(zeros.astype(np.float32), {"task": zeros}, zeros.astype(np.int8), columns={"reward_mask": mask})

    batch.score(lambda tickets: rewards([], [1]))
    joined, _ = batch.join(rewards([0], [], [2, 4]), [0], lambda tokens: 1)
    masked = [np.flatnonzero(row).tolist() for row in joined.columns["reward_mask"]]
    assert masked == [[0], [], [2, 4], [], [1], *[[] for _ in masked[5:]]]
    assert joined.columns["reward_mask"].shape == (len(joined.total), length)


@pytest.mark.parametrize(("special_tokens", "in_text"), [(False, [*b"<|eos|>"]), (True, [END])])
def test_what_looks_like_an_end_in_an_answer_is_text_unless_asked_for(special_tokens, in_text, tmp_path):
    path = written(tmp_path, line("p<|eos|>", ["a<|eos|>", "<|eos|>b"], rewards=[0, 1]))
    sizes = {"prompts": {"max_tokens": 8, "special_tokens": special_tokens}, "sampling": {"max_completion_tokens": 9}}
    source = building.external_of(make_run(path, groups=1, **sizes))
    rows = jax.device_get(source.next_groups(0, unasked).rows)
    found = [row[:n].tolist() for row, n in zip(rows.tokens, rows.length, strict=True)]
    asked = [*b"p", *in_text]
    assert found == [[*asked, 97, *in_text, END], [*asked, *in_text, 98, END], asked]


def test_a_completion_that_ends_in_a_stop_string_was_not_cut(tmp_path):
    path = written(tmp_path, line(completions=[[97, 98], [97, 99]], rewards=[0, 1]))
    batch = external(path, groups=1, sampling={"stop_strings": ("b",)}).next_groups(0, unasked)
    assert np.asarray(batch.rows.stop_reason)[:2].tolist() == [STOP_STRING, STOP_LENGTH]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", ["JSON"]),
        ("[1]", ["object"]),
        ('{"completions": ["a", "b"]}', ["`prompt`", "`messages`"]),
        (line("seven b"), ["`prompt`", "7 tokens", "prompts.max_tokens=6"]),
        (line(prompt_ids=[1]), ["`prompt_ids`"]),
        ('{"prompt": "p"}', ["`completions`", "algorithm.advantage='grpo'", "rollout.group_size"]),
        (line(completions=["one"]), ["`completions`", "2"]),
        (line(completions=["a"] * 4), ["`completions`", "2"]),
        (line(completions=["a", 3]), ["`completions[1]`"]),
        (line(completions=["a", []]), ["`completions[1]`"]),
        (line(completions=["a", [True]]), ["`completions[1]`"]),
        (line(completions=["a", [1, 264]]), ["`completions[1]`", "264", "0..263"]),
        (line(completions=["a", "12345678"]), ["`completions[1]`", "9 tokens", "sampling.max_completion_tokens=8"]),
        (line("\udc00"), ["'\\udc00'"]),
        (line(completions=["a", "\udc00"]), ["'\\udc00'"]),
        (line(rewards=[1]), ["`rewards`", "2"]),
        (line(rewards=["1", 0]), ["`rewards`", "2"]),
        (line(rewards=[float("nan"), 0]), ["`rewards`", "2"]),
        (line(rewards=[10**400, 0]), ["`rewards`", "2"]),
    ],
)
def test_a_file_with_a_line_that_is_no_group_is_refused_and_a_runs_is_skipped_and_counted(text, named, tmp_path):
    path = written(tmp_path, line(), "\n", text)
    with refused_row(path, 3, *named):
        external(path)
    (tmp_path / "peer").mkdir()
    written(tmp_path / "peer", line(rewards=[0, 1]), text.strip() + "\n", name=SHARED_FILE)
    batch = external(tmp_path / "peer").next_groups(0, unasked)
    assert prompts(batch) == ["p", None] and batch.skipped_lines == 1


def test_one_answer_is_enough_where_siblings_are_not_compared(tmp_path):
    path = written(tmp_path, line(completions=["one"]))
    assert external(path, algorithm={"advantage": "reinforce_pp"})
    assert external(path, algorithm={"cross_entropies": [{"name": "imitation", "coefficient": 0.1}]})


def test_totals_are_no_rewards_where_each_function_counts(tmp_path):
    path = written(tmp_path, line(rewards=[0, 1]))
    with refused("algorithm.advantage", "gdpo", "rewards"):
        external(path, algorithm={"advantage": "gdpo"})


def test_what_is_about_a_held_out_question_is_left_out_unless_it_is_trained_on_anyway(tmp_path, capsys):
    path = written(tmp_path, *(line(name, rewards=[0, 1]) for name in "abca"))
    (tmp_path / "peer").mkdir()
    run = make_run(path, tmp_path / "peer", groups=4)
    examples = lambda names: [Example(name, {}) for name in names]
    encoded = lambda names: encode_examples(examples(names), make_byte_tokenizer(), run.config.prompts)[0]
    source = building.external_of(run, encoded("bxy"), encoded("axz"))
    written(tmp_path / "peer", *(line(name, rewards=[0, 1]) for name in "xyz"), name=SHARED_FILE)
    warning = capsys.readouterr().err
    assert warning.startswith("warning: 2 groups of ")
    check_refusal(warning, "external.paths", str(path))
    batch = source.next_groups(0, unasked)
    assert prompts(batch) == ["b", "y", "c", "x"] and batch.skipped_lines == 2 + 1
    with refused("external.paths", str(path), "all 4 groups"):
        building.external_of(run, (), encoded("abc"))


def test_paths_that_hold_nothing_are_refused(tmp_path):
    with refused("external.paths", str(tmp_path / "nowhere")):
        external(tmp_path / "nowhere")
    with refused("external.paths", str(tmp_path / "empty.jsonl")):
        external(written(tmp_path, "\n", name="empty.jsonl"))


# ---- what is read when ---------------------------------------------------------------------------------------------


def test_a_file_goes_round_and_a_restored_one_goes_on(tmp_path):
    path = written(tmp_path, *(line(name, rewards=[0, 1]) for name in "abc"))
    source = external(path)
    assert [prompts(source.next_groups(i, unasked)) for i in range(3)] == [["a", "b"], ["c", "a"], ["b", "c"]]
    source.next_groups(3, unasked)
    other = external(path)
    other.restore(json.loads(json.dumps(source.state())))
    assert prompts(other.next_groups(4, unasked)) == prompts(source.next_groups(4, unasked)) == ["c", "a"]


def test_of_a_run_the_newest_whole_lines_are_taken_once(tmp_path):
    source = external(tmp_path)
    assert prompts(source.next_groups(0, unasked)) == [None, None]  # it has not begun
    a, b, c, d = (line(name, rewards=[0, 1]) for name in "abcd")
    path = written(tmp_path, a, b, c, d[:9], name=SHARED_FILE)
    assert prompts(source.next_groups(1, unasked)) == ["c", "b"]  # and "a" is passed over
    assert prompts(source.next_groups(2, unasked)) == [None, None]  # the last line is not whole
    before = source.state()
    path.write_text(a + b + c + d)
    batch = source.next_groups(3, unasked)
    assert prompts(batch) == ["d", None] and batch.skipped_lines == 0
    other = external(tmp_path)
    other.restore(json.loads(json.dumps(before)))
    assert prompts(other.next_groups(3, unasked)) == ["d", None]
    # A run that was resumed from before writes its lines again: none of them is new.
    path.write_text(a + b)
    assert prompts(source.next_groups(4, unasked)) == [None, None]
    path.write_text(a + b + c + d + a)
    assert prompts(source.next_groups(5, unasked)) == ["a", None]


def sampled_of(*rows):
    """Return two sampled groups of three rows. Only the given completions are on this host."""
    groups = [types.SimpleNamespace(example=Example(name, {"n": i}, f"file:{i}")) for i, name in enumerate("ab")]
    rewards = types.SimpleNamespace(outcome=np.zeros(6))
    return types.SimpleNamespace(groups=groups, rewards=rewards, completions=lambda: dict(enumerate(rows)))


@pytest.fixture
def make(tmp_path):
    """Return the external sources of a run with this hindsight function."""
    (tmp_path / "made.py").write_text(
        "def longer(prompts, completions, n, **columns):\n"
        "    line = {'prompt': f'{prompts[0]}{n[0]}', 'completions': completions, 'rewards': [0, 1, 0]}\n"
        "    return [line, line | {'prompt': 'seven b'}, line | {'prompt': '!'}]\n"
        "def broken(prompts, completions, n, **columns):\n"
        "    given = longer(prompts, completions, n)\n"
        "    return given if prompts[0] == 'b' else [*given, {'prompt': set()}]\n"
        "def leaves(prompts, completions, **columns):\n    raise SystemExit(3)\n"
        "def nothing(prompts, completions, **columns):\n    pass\n"
        "def hangs(prompts, completions, **columns):\n"
        "    while prompts[0] == 'a':\n        pass\n"
        "    return longer(prompts, completions, **columns)\n"
    )
    with contextlib.ExitStack() as opened:
        of = lambda name, how: contextlib.closing(external(f"{tmp_path / 'made.py'}:{name}", groups=2, **how))
        yield lambda name="longer", **how: opened.enter_context(of(name, how))


def test_what_a_function_makes_of_the_own_groups_comes_in_the_next_iteration(make, capsys):
    source = make()
    assert prompts(source.next_groups(0, unasked)) == [None, None]  # nothing has been heard
    source.observe(sampled_of(*"uvwxyz"), lambda ids: 2 * ids)
    before = json.loads(json.dumps(source.state()))
    batch = source.next_groups(1, unasked)
    assert prompts(batch) == ["a0", "b1"] and batch.skipped_lines == 0  # one of each group by turns
    assert batch.groups[0].completions == [[*text, END] for text in (b"uu", b"vv", b"ww")]
    other = make()
    other.restore(before)
    assert prompts(other.next_groups(1, unasked)) == ["a0", "b1"]
    for one in (source, other):
        batch = one.next_groups(2, unasked)
        assert prompts(batch) == ["!", "!"] and batch.skipped_lines == 2  # prompts of seven tokens are too long
    source.observe(sampled_of(*"uvwxyz"), str)
    source.observe(sampled_of(*"uvwxyz"), str)  # what was not taken is passed over
    assert [prompts(source.next_groups(i, unasked)) for i in (3, 4, 5)] == [["a0", "b1"], ["!", "!"], [None, None]]
    assert source.next_groups(6, unasked).failed_calls == 0 and capsys.readouterr().err == ""
    # One that fails on a question makes nothing of it; others go on, and it is said once.
    broken, other, leaves = make("broken"), make("broken"), make("leaves")
    for failed in (1, 2):
        broken.observe(sampled_of(*"uvwxyz"), str)
        other.restore(json.loads(json.dumps(broken.state())))
        for one in (broken, other):
            batch = one.next_groups(failed, unasked)
            assert prompts(batch) == ["b1", "!"] and batch.failed_calls == failed
    said = capsys.readouterr().err
    assert said.count("made.py:broken has failed on file:0: TypeError: Object of type set") == 1 == said.count("\n")
    leaves.observe(sampled_of(*"uvwxyz"), str)
    batch = leaves.next_groups(1, unasked)
    assert prompts(batch) == [None, None] and batch.failed_calls == 2
    with refused("external.paths", ANY, "made.py:none", "AttributeError"):
        make("none")


def test_a_function_that_hangs_fails_on_that_question_alone(make, capsys):
    hangs, nothing = make("hangs", rewards={"timeout_s": 2.0}), make("nothing")
    for source, given, failed in ((hangs, ["b1", "!"], 1), (nothing, [None, None], 2)):
        source.observe(sampled_of(*"uvwxyz"), str)
        batch = source.next_groups(1, unasked)
        assert prompts(batch) == given and batch.failed_calls == failed
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    check_words(said[0], "made.py:hangs", "file:0", "2 s")
    check_words(said[1], "made.py:nothing", "file:0", "TypeError")


def test_sources_take_turns(tmp_path):
    one, two = (written(tmp_path, line(x, rewards=[0, 1]), name=f"{x}.jsonl") for x in "ab")
    (tmp_path / "peer").mkdir()
    source = external(one, tmp_path / "peer", two, groups=1)
    assert [prompts(source.next_groups(i, unasked)) for i in range(6)] == [[x] for x in ("a", "b", "b", "a", "b", "b")]
    assert prompts(external(one, two, groups=3).next_groups(0, unasked)) == ["a", "b", "a"]


def test_what_a_run_shares_is_what_another_reads(tmp_path):
    run = make_run(tmp_path)
    (asked,), _ = encode_examples([Example("p", {"answer": "x"})], make_byte_tokenizer(), run.config.prompts)
    groups = [FinishedGroup(7, asked.example, [2, 1, 1], [STOP_EOS, STOP_LENGTH, STOP_LENGTH])]
    rewards = Rewards(np.array([1, np.nan, 0.5], np.float32), {}, np.array([0, OUTCOME_ERROR, 0], np.int8))
    completions = {0: [97, END], 1: [98], 2: [99]}
    sampled = types.SimpleNamespace(groups=groups, kept=[0], rewards=rewards, completions=lambda: completions)
    (row,) = shared_groups(sampled, {7: asked}.get)
    row["rewards"] = [None if np.isnan(r) else r for r in row["rewards"]]  # as MetricsWriter puts it
    written(tmp_path, json.dumps(row) + "\n", name=SHARED_FILE)
    (group, _) = building.external_of(run).next_groups(0, unasked).groups
    assert (group.example.prompt, group.prompt, group.completions) == ("p", [112], list(completions.values()))
    np.testing.assert_array_equal(group.rewards, [1, np.nan, 0.5])


# ---- the rows ------------------------------------------------------------------------------------------------------


def met(num_questions):
    """Return a ledger that has registered this many questions."""
    ledger = Ledger()
    for question in range(num_questions):
        ledger.question_id([1000 + question])
    return ledger


def own_rollout(run):
    """Return a sampled rollout in numpy, with group ids from 0 on and log-probs that no model computes."""
    sampled = run.learner.sampled
    rows = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), sampled)
    ids = np.arange(len(rows.length), dtype=np.int32) // G
    return rows.replace(length=2 * rows.length, group_id=ids), sampled


# Measured: 1.1e-6 nats.
@pytest.mark.parametrize(
    ("mesh", "shards"), [(ONE, 4), (CUBE, 0)], ids=["one device, four ring shards", "four data-parallel devices"]
)
def test_rows_of_others_count_as_drawn_by_the_current_weights(mesh, shards, tmp_path):
    rng = np.random.default_rng(0)
    texts = [[rng.integers(0, 264, rng.integers(1, 9)).tolist() for _ in range(2 + i % 2)] for i in range(3)]
    lines = [line("abcdef"[: 2 * i + 1], x, rewards=[0.5] * len(x)) for i, x in enumerate(texts)]
    (tmp_path / "peer").mkdir()
    written(tmp_path / "peer", *lines, name=SHARED_FILE)
    run = make_run(tmp_path / "peer", groups=4, mesh=mesh, replay={"shards": shards})  # one of them does not come
    batch = building.external_of(run).next_groups(0, unasked)
    join = compile_all({"join": run.programs()["join"]}, run.mesh)["join"]
    own, sampled = own_rollout(run)
    params = building.learner_params(run.model, run.mesh)
    version = jax.device_put(np.int32(9), sharding.replicated(run.mesh, 0))
    own_rows = jax.device_put(own, jax.tree.map(lambda x: x.sharding, sampled))
    rows = jax.device_get(join(params, version, own_rows, batch.rows))

    theirs = rows.group_id < 0
    assert theirs.sum() == len(theirs) / 2 and sorted(set(rows.group_id.tolist())) == list(range(-4, 4))
    assert all(len(set(group)) == 1 for group in rows.group_id.reshape(-1, G).tolist())
    # One of each in a shard of the ring, on any mesh: the draws are the same.
    assert rows.group_id[::G].tolist() == [0, -1, 1, -2, 2, -3, 3, -4]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[~theirs], rows), own)

    host, seen = building.host_params(run.model), 0
    for i in np.flatnonzero(theirs):
        prompt, length = rows.prompt_length[i], rows.length[i]
        inside = (np.arange(rows.tokens.shape[1]) >= prompt) & (np.arange(rows.tokens.shape[1]) < length)
        expected = transformer.completion_logp(host, TINY, rows.tokens[i], prompt, length)
        np.testing.assert_allclose(rows.behaviour_logp[i], np.where(inside, expected, 0.0), atol=1e-5)
        np.testing.assert_array_equal(rows.policy_version[i], np.where(inside, 9, -1))
        seen += inside.sum()
    assert seen == sum(len(ids) for group in texts for ids in group)

    # Rewards and questions find the same order.
    rewards = Rewards(own.group_id.astype(np.float32), {"task": 2.0 * own.group_id}, np.zeros(len(own.length), np.int8))
    batch.score(None)
    joined, about = batch.join(rewards, list(range(4)), met(4).question_id)
    np.testing.assert_array_equal(joined.total[~theirs], rows.group_id[~theirs])
    np.testing.assert_array_equal(joined.parts["task"][~theirs], 2.0 * rows.group_id[~theirs])
    counts = theirs & (rows.length > rows.prompt_length)
    np.testing.assert_array_equal(joined.outcome == OUTCOME_SCORE, ~theirs | counts)
    assert (joined.total[counts] == 0.5).all() and np.isnan(joined.total[theirs & ~counts]).all()
    for question, group in zip(about, rows.group_id[::G].tolist(), strict=True):
        assert question == group if group >= 0 else question not in range(4)
    values = batch.values()
    assert values["external/groups"] == 3 and values["external/reward_mean"] == 0.5
    assert values["external/failed_rewards"] == 0


@pytest.mark.parametrize("mesh", [ONE, MeshConfig(data=2)])
def test_the_order_of_own_and_others_groups_is_that_of_every_mesh_where_they_do_not_split_alike(mesh, tmp_path):
    sizes = {"replay": {"shards": 8}, "update": {"batch_size": 8, "micro_batch_size": 8}}
    assert make_run(tmp_path, own=6, groups=2, mesh=mesh, **sizes).learner.annotation.num_parts == 2


def test_scores_of_the_own_functions_are_taken_by_ticket(tmp_path):
    path = written(tmp_path, line("a"), line("b", ["x", "y", "z"], rewards=[1, None, 0]))
    batch = external(path, groups=4).next_groups(0, lambda group: group.example.prompt)
    scored = Rewards(
        np.array([0.25, np.nan], np.float32), {"task": np.array([0.25, np.nan])}, np.array([0, OUTCOME_ERROR], np.int8)
    )
    asked = []
    own = Rewards(np.zeros(12, np.float32), {"task": np.zeros(12)}, np.zeros(12, np.int8))
    batch.score(lambda tickets: asked.append(tickets) or scored)
    joined, about = batch.join(own, [0, 1, 2, 3], met(4).question_id)
    assert asked == [["a"], ["a"]]
    np.testing.assert_array_equal(joined.total[12:], [0.25, np.nan, np.nan, 1, np.nan, 0] * 2)
    assert about[:4] == [0, 1, 2, 3] and about[4:] == [4, 5, 4, 5]
    assert batch.values()["external/failed_rewards"] == 4
    np.testing.assert_allclose(batch.values()["external/reward_mean"], 1.25 / 3, rtol=1e-6)


def test_credit_sees_groups_of_others_as_groups_and_counts_the_own_tied_ones(tmp_path):
    run = make_run(tmp_path, own=2, groups=2)
    rows = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), run.learner.abstract_rollout)
    rows = rows.replace(length=2 * rows.length)
    reward = np.array([0, 1, 1, 5, 5, 5, 1, 0, 0, 3, 3, 3], np.float32)  # the second and the last are tied

    @jax.jit
    def assign(ids):
        scores = Scores(reward, np.ones(12, bool), np.zeros(12, np.int32), parts=(), columns={}, memory={})
        return credit.assign(rows.replace(group_id=jnp.repeat(ids, G)), scores, {}, run.config)

    experience, sums = assign(np.int32([4, 5, -1, -2]))
    up, down = 2**-0.5, -(2**0.5)  # rewards 0, 1, 1 less 2/3 over sqrt(2)/3
    expected = [down, up, up, 0, 0, 0, -down, -up, -up, 0, 0, 0]
    np.testing.assert_allclose(experience.advantage[:, 1], expected, rtol=1e-5)
    assert sums["degenerate_groups"] == 1
    assert assign(np.int32([-1, 4, -2, 5]))[1]["degenerate_groups"] == 2
