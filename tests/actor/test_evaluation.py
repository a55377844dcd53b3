"""Evaluations with rewards that failed."""

import dataclasses
import json
import types

import numpy as np
import pytest

from jaxrl_llm.actor import evaluation
from jaxrl_llm.config import Config, PromptsConfig
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example, Rewards

S, T, E = OUTCOME_SCORE, OUTCOME_TIMEOUT, OUTCOME_ERROR


class Generator:
    """Stand-in for a generator: two or more completions of each question."""

    def __init__(self, played=None, completions=([1], [2])):
        self.played, self.completions, self.draws = played, list(completions), []
        self.sampler = types.SimpleNamespace(num_prompts=2, group_size=len(self.completions))

    def generate(self, params, batch, **_):
        group = lambda example: types.SimpleNamespace(
            example=example, completions=self.completions, lengths=[1, 3], played=self.played
        )
        return [group(example) for example in batch.examples]

    def take(self):
        self.draws.append("arrays on the device")


def measured(outcome, total, folder, monkeypatch, *given, source="letters", decode=str):
    monkeypatch.setattr(evaluation, "Generator", lambda *_, **__: Generator(*given))
    monkeypatch.setattr(evaluation, "sharding", types.SimpleNamespace(put=lambda *_: None, replicated=lambda *_: None))
    monkeypatch.setattr(evaluation.prompts_lib, "batch_of", lambda rows, *_, **__: types.SimpleNamespace(examples=rows))
    rewards = Rewards(np.array(total, np.float32), {}, np.array(outcome, np.int8))
    pool = types.SimpleNamespace(submit=lambda *_: None, collect=lambda _: rewards)
    config = dataclasses.replace(Config(), prompts=PromptsConfig(source=source))
    run, tokenizer = types.SimpleNamespace(config=config, mesh=None, eval_sampler=object()), types.SimpleNamespace()
    pool.check, tokenizer.decode = None, decode
    held_out = [Example("1+1=", {}), Example("2+2=", {})]
    found = evaluation.Evaluation(run, {}, tokenizer, held_out, pool, None)
    told = found.measure(folder / "eval_1", None, None)
    assert found._generator.draws == []  # nobody takes them: they would be there to the run's end
    return told


def test_a_vote_is_of_the_policys_last_turns_not_of_what_its_environment_said(tmp_path, monkeypatch):
    """By whole completions, the second and third answer agree and pass; by last turns, the first and the third."""
    given = [S] * 6, [0, 1, 1] * 2, tmp_path, monkeypatch
    played = types.SimpleNamespace(last_turns=lambda: ["it is 7", "8", "7"])
    for own, expected in ((played, 0.0), (None, 1.0)):
        measured(*given, own, ([1], [2], [2]))
        assert json.loads((tmp_path / "eval_1.json").read_text())["maj_at_3"] == expected


@pytest.mark.parametrize(("source", "expected"), [("letters", 0.0), ("code", 1.0)])
def test_programs_vote_by_their_texts(source, expected, tmp_path, monkeypatch):
    """The last numbers of the first two programs are equal, but only the other programs have equal texts."""
    programs = ["def f(x):\n    return 1", "def f(x):\n    return x - 1", "f = len", "f = len"]
    decode = lambda ids: programs[ids[0]]
    ids = ([0], [1], [2], [3])
    measured([S] * 8, [0, 0, 1, 1] * 2, tmp_path, monkeypatch, None, ids, source=source, decode=decode)
    assert json.loads((tmp_path / "eval_1.json").read_text())["maj_at_4"] == expected


@pytest.mark.parametrize(
    ("outcome", "total", "rate", "counts", "line"),
    [
        ([S, S, S, S], [1, 0, 0, 0], 0.25, (0, 0), "held-out pass rate 0.250 over 2 questions (eval_1)"),
        (
            [S, T, E, S],
            [1, np.nan, np.nan, 0],
            0.5,
            (1, 1),
            "held-out pass rate 0.500 over 2 questions (eval_1); without the 2 of 4 completions whose reward failed",
        ),
        (
            [T] * 4,
            [np.nan] * 4,
            None,
            (4, 0),
            "held-out pass rate - over 2 questions (eval_1); without the 4 of 4 completions whose reward failed",
        ),
    ],
)
def test_failed_rewards_are_told_and_where_none_is_left_there_is_no_rate(
    outcome, total, rate, counts, line, tmp_path, monkeypatch
):
    found = measured(outcome, total, tmp_path, monkeypatch)
    assert found.line == line and found.values["eval/pass_rate"] == rate
    assert (found.values["eval/timeout_count"], found.values["eval/error_count"]) == counts
    refuse = lambda word: pytest.fail(f"{word} is no JSON")
    assert json.loads((tmp_path / "eval_1.json").read_text(), parse_constant=refuse)["pass_rate"] == rate
