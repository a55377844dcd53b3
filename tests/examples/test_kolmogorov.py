"""The language of sequences, computed by hand, with its limits and rewards."""

import numpy as np
import pytest
from support.refusal import refused

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.examples import kolmogorov
from jaxrl_llm.examples.kolmogorov import ProgramError, run
from jaxrl_llm.questions import tasks


def load(seed=0, size=200, **arguments):
    return tasks.load(PromptsConfig(source="kolmogorov", size=size, arguments=arguments), seed=seed).examples


@pytest.mark.parametrize(
    ("program", "sequence"),
    [
        ("[1,2,-3]", [1, 2, -3]),
        ("repeat([1, 2], 3)", [1, 2, 1, 2, 1, 2]),
        ("range(2,9,3)", [2, 5, 8]),
        ("range(3,0,-1)", [3, 2, 1]),
        ("concat(reverse([1,2]),[])", [2, 1]),
        ("interleave([1,2,3],range(7,9,1))", [1, 7, 2, 8]),
        ("scan(repeat([1],4))", [1, 2, 3, 4]),
        ("scan([])", []),
        ("repeat([1],-1)", []),
    ],
)
def test_programs(program, sequence):
    assert run(program) == sequence


@pytest.mark.parametrize(
    "program",
    [
        "",
        "3",
        "[1] * 3",
        "[x]",
        "[[1]]",
        "[1.5]",
        "[True]",
        "__import__('os')",
        "repeat([1])",
        "repeat(3,[1])",
        "range(0,9,0)",
        "range(0,99999999999,1)",
        "repeat(repeat([1],9999),9999)",
        "repeat([1],n=3)",
        "scan(repeat([999999999999],9))",
        "[" * 500 + "]" * 500,
        "reverse(" * 300 + "[1]" + ")" * 300,
        "[9999999999999999]",
        "1" * 3000,
    ],
)
def test_what_is_no_program_or_too_much_is_refused(program):
    with pytest.raises(ProgramError):
        run(program)


def test_questions_are_what_their_programs_write():
    assert load() == load() != load(seed=1)
    for example in load(length=30, depth=3, largest=20):
        sequence = example.columns["sequence"]
        assert run(example.columns["program"]) == sequence and len(sequence) <= 30
        assert example.prompt.endswith(": " + " ".join(map(str, sequence)))
    own = [kolmogorov.reward([], [e.columns["program"]], sequence=[e.columns["sequence"]])[0] for e in load()]
    assert min(own) > 0 and np.std(own) > 0.1  # there is something to gain, here more and there less


def test_a_drawn_program_that_writes_too_much_is_no_question(monkeypatch):
    programs = iter(["repeat(range(0,1000,1),11)", "repeat([1],9)", "scan(scan([1000000000000,1]))", "repeat([2],9)"])
    monkeypatch.setattr(kolmogorov, "draw_program", lambda *_: next(programs))
    loaded = kolmogorov.load(PromptsConfig(source="kolmogorov", size=2), seed=0)
    assert [example.columns["sequence"] for example in loaded.examples] == [[1] * 9, [2] * 9]


def test_what_a_program_is_worth():
    wanted = [1, 2] * 6
    texts = ["repeat([1,2],6)", "I say\n```\nrepeat([1, 2], 6)\n```\n", "repeat([1,2],5)", "no", ""]
    texts.append(str(wanted))
    # A function, a list and three numbers for twelve.
    got = kolmogorov.reward([], texts, sequence=[wanted] * 6)
    assert got == pytest.approx([7 / 12, 7 / 12, 0, 0, 0, 0])
    assert kolmogorov.exact([], texts, sequence=[wanted] * 6) == [1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"deep": 3}, ("prompts.arguments.deep", 3)),
        ({"depth": 0}, ("prompts.arguments.depth", 0)),
    ],
)
def test_an_argument_that_cannot_be_is_refused(arguments, named):
    with refused(*named):
        load(**arguments)
