"""Grids and their programs, computed by hand. Relabelled programs solve their new questions."""

import json

import pytest
from support.refusal import refused

from jaxrl_llm.actor.external_groups import GroupParser
from jaxrl_llm.config import PromptsConfig, freeze
from jaxrl_llm.examples import grids
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.questions import tasks


@pytest.mark.parametrize(
    ("program", "made"),
    [
        ("h", "321/654"),
        ("v", "456/123"),
        ("r", "41/52/63"),
        ("t", "14/25/36"),
        ("u", "456/123"),
        ("l", "231/564"),
        ("15", "523/456"),
        ("1551", "123/416"),  # what became 5 becomes 1, and so does what was
        ("rr", "654/321"),
        ("", None),
        ("h ", None),
        ("1", None),
        ("hx", None),
        ("h" * 65, None),
    ],
)
def test_what_a_program_makes_of_a_grid(program, made):
    assert grids.run(program, "123/456") == made


def test_questions_show_their_pairs_and_some_program_solves_them():
    loaded = tasks.load(PromptsConfig(source="grids", size=30, arguments={"steps": 1}), seed=0).examples
    assert loaded == tasks.load(PromptsConfig(source="grids", size=30, arguments={"steps": 1}), seed=0).examples
    steps = [*"hvrtul", *(f"{a}{b}" for a in range(4) for b in range(4))]
    for example in loaded:
        own, answer = example.columns["grids"], example.columns["made"]
        assert example.prompt == f"{own[0]}>{answer[0]} {own[1]}>{answer[1]}:" and own != answer
        given = {"grids": [own] * len(steps), "made": [answer] * len(steps)}
        assert 1.0 in grids.reward([""] * len(steps), steps, **given)
        assert grids.reward([""], [example.columns["answer"]], [own], [answer]) == [1.0]
    with refused("prompts.arguments.side", 1):
        tasks.load(PromptsConfig(source="grids", arguments={"side": 1}), seed=0)


def test_programs_that_did_something_else_are_the_answers_to_that():
    own, answer = ["12/34", "5/6"], ["21/43", "5/6"]
    given = {"grids": [own] * 5, "made": [answer] * 5}
    texts = ["h", "v", " u", "hh", "what"]
    assert grids.reward([""] * 5, texts, **given) == [1, 0, 0, 0, 0]
    (line,) = grids.hindsight([""] * 5, texts, **given)  # not of the identity, nor of what was asked for
    assert line == {
        "prompt": "12/34>34/12 5/6>6/5:",
        "grids": own,
        "made": ["34/12", "6/5"],
        "completions": ["h", "v", "u", "hh"],
        "rewards": [0, 1, 1, 0],
    }
    assert grids.hindsight([""], ["u"], [own], [answer]) == []  # one alone has nothing to be compared with
    settings = {"prompts": {"max_tokens": 64, "chat_template": False}, "rollout": {"group_size": 5}}
    settings |= {"replay": {"capacity": 40}, "update": {"batch_size": 40, "micro_batch_size": 40}}
    group = GroupParser(freeze(settings), make_byte_tokenizer(), 300).group(json.dumps(line).encode(), "")
    assert group.rewards == [0, 1, 1, 0] and group.example.prompt == "12/34>34/12 5/6>6/5:"
