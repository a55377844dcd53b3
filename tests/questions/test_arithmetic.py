"""The arithmetic task: right answers, the same questions for a seed, settings refused by name."""

import re

import numpy as np
import pytest
from support.refusal import refused

from jaxrl_llm.actor.evaluation import questions
from jaxrl_llm.config import PromptsConfig, freeze
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.tasks import arithmetic


def load(seed=0, size=200, part="", **arguments):
    config = PromptsConfig(source="arithmetic", name=part, size=size, arguments=arguments)
    return tasks.load(config, seed=seed).examples


def test_every_answer_is_the_sum():
    for arguments, pattern in [
        ({}, r"(\d+)\+(\d+)="),
        ({"terms": 3, "largest": 9}, r"(\d)\+(\d)\+(\d)="),
        ({"modulus": 7}, r"(\d+)\+(\d+) mod 7="),
    ]:
        for example in load(**arguments):
            terms = [int(x) for x in re.fullmatch(pattern, example.prompt).groups()]
            total = sum(terms) % 7 if "modulus" in arguments else sum(terms)
            steps = {"key_steps": [str(terms[0] + terms[1])]} if len(terms) == 3 else {}
            assert example.columns == {"answer": str(total)} | steps and max(terms) <= arguments.get("largest", 99)


def test_questions_are_of_the_seed_and_spread_over_all_terms():
    assert load() == load() != load(seed=1)
    assert load(size=50) == load()[:50]
    terms = np.array([re.findall(r"\d+", example.prompt) for example in load(size=4000)], int)
    assert terms.min() == 0 and terms.max() == 99
    assert np.abs(terms.mean(axis=0) - 49.5).max() < 2.3  # standard error 0.46: 5 of them


def test_no_question_is_of_both_parts_whatever_the_seed():
    sums = {"terms": 3, "largest": 9}
    train = [{e.prompt for e in load(seed, 4000, "train", **sums)} for seed in (0, 1)]
    test = [[e.prompt for e in load(seed, 4000, "test", **sums)] for seed in (0, 1)]
    assert not (train[0] | train[1]) & {*test[0], *test[1]}
    assert all(len(set(some)) == len(some) for some in test)
    assert {e.prompt for e in load(0, 4000, **sums)} == train[0] | set(test[0])
    assert 80 <= len(test[0]) <= 170  # of 1000 questions, 125 expected with standard deviation 10
    config = freeze({"prompts": {"source": "arithmetic", "name": "train"}, "eval": {"name": "test", "num_prompts": 9}})
    rows, held_out, _ = questions(config, make_byte_tokenizer())
    assert len(held_out) == 9 and not {r.example.prompt for r in rows} & {r.example.prompt for r in held_out}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"term": 2}, ("prompts.arguments.term", 2)),
        ({"terms": 1}, ("prompts.arguments.terms", 1)),
        ({"largest": 9.0}, ("prompts.arguments.largest", 9.0)),
        ({"part": "tests"}, ("prompts.name", "tests", "'train'", "'test'")),
        ({"part": "test", "size": 1}, ("prompts.size", 1, "'test'")),
        ({"modulus": True}, ("prompts.arguments.modulus", True)),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments, named):
    with refused(*named):
        load(**arguments)


def test_the_answer_alone_scores():
    texts = ["12", " 12\n", "012", "12.", "1 2", "", "-12"]
    assert arithmetic.reward(["?"] * 7, texts, answer=["12"] * 7) == [1, 1, 0, 0, 0, 0, 0]
    assert tasks.scorer(PromptsConfig(source="arithmetic")) == "jaxrl_llm.questions.tasks.arithmetic:reward"
