"""Evaluations: what failed rewards do to them."""

import json
import types

import numpy as np
import pytest

from jaxrl_llm.actor import evaluation
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example, Rewards

S, T, E = OUTCOME_SCORE, OUTCOME_TIMEOUT, OUTCOME_ERROR


class Generator:
    """Two completions to each of the questions."""

    sampler = types.SimpleNamespace(num_prompts=2, group_size=2)

    def __init__(self, played=None):
        self.played, self.draws = played, []

    def generate(self, params, batch, **_):
        group = lambda example: types.SimpleNamespace(
            example=example, completions=[[1], [2]], lengths=[1, 3], played=self.played
        )
        return [group(example) for example in batch.examples]

    def take(self):
        self.draws.append("arrays on the device")


def measured(outcome, total, folder, monkeypatch, played=None):
    monkeypatch.setattr(evaluation.prompts_lib, "batch_of", lambda rows, *_, **__: types.SimpleNamespace(examples=rows))
    rewards = Rewards(np.array(total, np.float32), {}, np.array(outcome, np.int8))
    pool = types.SimpleNamespace(submit=lambda *_: None, collect=lambda _: rewards)
    found = object.__new__(evaluation.Evaluation)
    found._generator, found._how = Generator(played), {"threshold": 1.0, "key": None}
    found._given = [Example("1+1=", {}), Example("2+2=", {})], pool, str
    told = found.measure(folder / "eval_1", None, None)
    assert found._generator.draws == []  # nobody takes them: they would be there to the run's end
    return told


def test_a_vote_is_of_the_policys_last_turns_not_of_what_its_environment_said(tmp_path, monkeypatch):
    """Whole completions answer 1 and 2, of which the first does not pass; the last turns agree."""
    played = types.SimpleNamespace(last_turns=lambda: ["it is 7", "7"])
    measured([S] * 4, [0, 1, 0, 1], tmp_path, monkeypatch, played)
    assert json.loads((tmp_path / "eval_1.json").read_text())["maj_at_2"] == 1.0
    measured([S] * 4, [0, 1, 0, 1], tmp_path, monkeypatch)
    assert json.loads((tmp_path / "eval_1.json").read_text())["maj_at_2"] == 0.0


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
