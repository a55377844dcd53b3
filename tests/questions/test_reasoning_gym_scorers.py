"""Scorers of reasoning-gym with answers that ignore the question: constants, copies, and answers that stop a scorer."""

import collections
import json
import math
import statistics
import time

import pytest
from support.refusal import refused

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.questions import tasks
from jaxrl_llm.settings.schema import ConfigError

gym = pytest.importorskip("jaxrl_llm.questions.tasks.reasoning_gym_task")

# A package of reasoning-gym leaves a file of puzzles open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

# dataset -> what was found with 20 questions each and some 200 answers (mean scores before the guard), and what guards.
FOUND = {
    "coin_flip": ("'0' 0.96, '0.5' 0.62: a common prefix counts, and small probabilities equal 0", "guard, no partial"),
    "complex_arithmetic": ("'nan' is right", "guard"),
    "countdown": ("'1e999999999' and 9**9**9 are computed, '1' 0.05", "guard, no partial"),
    "futoshiki": ("a board of ones 0.15", "no partial"),
    "game_of_life": ("a dead board has most cells right", "no partial"),
    "game_of_life_halting": ("every text that is not empty 0.5 to 1", "guard"),
    "graph_color": ("one colouring by turns 0.36: its default graphs have few edges", "none: raise edge_probability"),
    "intermediate_integration": ("'1e999999999' is computed", "guard"),
    "knights_knaves": ("the example of the instructions 0.56", "no partial"),
    "mini_sudoku": ("any full board 0.24", "no partial"),
    "n_queens": ("text is run as Python", "guard"),
    "binary_matrix": ("text is run as Python", "guard"),
    "spiral_matrix": ("text is run as Python", "guard"),
    "number_sorting": ("a list of NaN is right", "guard"),
    "polynomial_equations": ("'0' 0.35: credit by distance", "no partial"),
    "polynomial_multiplication": ("'1e999999999' is computed", "guard"),
    "prime_factorization": ("the number itself 0.6", "no partial"),
    "propositional_logic": ("'P or Q' 0.85, the first premise 0.78, deep brackets hang", "refused"),
    "puzzle24": ("'6*4*1*1' 1.0: the question's numbers are not compared; '1e999999999' is computed", "guard"),
    "rotate_matrix": ("a copy of the question 0.22, of its matrix 0.4", "no partial, most may not be copies"),
    "rubiks_cube": ("thousands of turns take seconds", "guard"),
    "rush_hour": ("a move of 99999999999 steps hangs", "guard"),
    "sentence_reordering": ("a copy of the words 0.17", "no partial"),
    "simple_integration": ("'1e999999999' is computed", "guard"),
    "string_insertion": ("text is run as Python; a copy of the string 0.91", "guard, most may not be copies"),
    "string_manipulation": ("a copy of the string 0.39", "most may not be copies"),
    "sudoku": ("any full board 0.1", "no partial"),
    "time_intervals": ("'12:00' 0.39: credit by distance", "no partial"),
    "word_sorting": ("a copy of the list 0.24", "no partial"),
}

# Scores of answers that are wrong, which these datasets give to any text or to any text of the right form.
FLOORS = {"pool_matrix": 0.1, "sentence_reordering": 0.05, "boxnet": 0.05}

ANSWERS = [
    *("", " ", "0", "1", "2", "-1", "10", "0.5", "1/2", "True", "False", "Yes", "No", "None", "nan", "inf", "-", "?"),
    *("[]", "{}", "()", "[[]]", "[0]", '{"a": 1}', '""', "A", "a", "x", "x + C", "A=1", "1/0", "1/3", "3:4", "12:00"),
    *("1e999", "1e-400", "1e999999999", "1e-999999999", "9**9**9", "(10**9)!", "1e9_99", "[NaN]", "[1e999]", "1j"),
    *("__import__('os')", "().__class__", "lambda: 1", "\u2212" + "1", "\uff11", "\u00bd", "\x00", "\U0001f600"),
    *("6*4*1*1", "A+9 B-9", "U U'", "Monday", "up", "infeasible", "0 0", "1 1 1 1\n" * 4, "correct", "I do not know"),
    *("(" * 200 + "1" + ")" * 200, "A+99999999999", "1.5e+0999999999"),
]
LONG_ANSWERS = [
    *("9" * 5000, "0\n" * 5000, "a " * 20_000, "1," * 20_000, "[" * 100_000, "(" * 5000 + "1" + ")" * 5000),
    *("U R " * 3000, "ABC" * 10_000, "UDLR" * 4000, "(a+)+$" * 500, "\U0001f4a3" * 10_000),
]


@pytest.fixture(autouse=True)
def _one_order_of_sets(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def playable():
    absent = {game for package in gym.ABSENT for game in gym.SOURCE_PACKAGES[package]}
    return sorted(set(gym.DATASETS) - absent - set(gym.REFUSED) - {"composite"})


def questions_of(name, size):
    return gym._of_dataset(PromptsConfig(source="reasoning_gym", name=name, size=size), 1).examples


def scores_of(examples, texts):
    columns = {key: [example.columns[key] for example in examples] for key in examples[0].columns}
    return gym.reward([None] * len(examples), [f"<answer>{text}</answer>" for text in texts], **columns)


def test_every_dataset_that_was_found_wanting_is_guarded_as_the_table_says():
    for name, (_, guard) in FOUND.items():
        assert ("guard" in guard.split(", ")) == (name in gym.GUARDS), name
        assert ("no partial" in guard) == (name in gym.WITHOUT_PARTIAL_CREDIT), name
        assert (guard == "refused") == (name in gym.REFUSED), name
        assert ("copies" in guard) == (name in gym.COPIES), name
    assert {*gym.GUARDS, *gym.WITHOUT_PARTIAL_CREDIT, *gym.REFUSED, *gym.COPIES} <= set(FOUND)
    assert set(FOUND) <= set(gym.DATASETS)


def test_scores_of_hostile_answers_are_numbers_from_0_to_1_and_right_ones_are_1():
    for name in playable():
        example = questions_of(name, 1)[0]
        asked = [*ANSWERS, example.prompt, example.prompt[-20:]]
        scores = scores_of([example] * len(asked), asked)
        assert all(0.0 <= score <= 1.0 for score in scores), name
        if example.columns["answer"] is not None:
            assert scores_of([example], [example.columns["answer"]]) == [1.0], name


BLIND = [
    ("coin_flip", ["0", "0.5", "1/2", "0.0", "1e-9", "1e-400", "1e-5", "0.0001"], 0.0),
    ("puzzle24", ["6*4*1*1", "(2+2+2)*4*1", "8*3*1*1"], 0.2),
    ("time_intervals", ["12:00", "00:00:00", "10 days, 12:00"], 0.0),
    ("polynomial_equations", ["1", "-1", "2.5", "0, 0"], 0.2),
    ("mini_sudoku", ["1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1"], 0.06),
    ("futoshiki", ["1   1   1   1   1\n" * 5], 0.0),
    ("knights_knaves", ["Zoey is a sage, and Riley is a fool"], 0.0),
]


@pytest.mark.parametrize(("name", "answers", "most"), BLIND, ids=[name for name, *_ in BLIND])
def test_one_answer_to_all_questions_earns_next_to_nothing(name, answers, most):
    examples = questions_of(name, 6)
    for text in answers:
        assert statistics.mean(scores_of(examples, [text] * 6)) <= most + 0.01, text
    assert scores_of(examples, [example.columns["answer"] for example in examples]) == [1.0] * 6


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("prime_factorization", lambda entry: str(entry["metadata"]["number"])),
        ("word_sorting", lambda entry: ", ".join(entry["metadata"]["original_words"])),
        ("sentence_reordering", lambda entry: entry["question"].partition(": ")[2]),
        ("rotate_matrix", lambda entry: entry["question"].split("\n\n")[-1]),
    ],
)
def test_a_copy_of_the_question_earns_only_what_it_is_right_for(name, copy):
    examples = questions_of(name, 12)
    texts = [copy(example.columns["entry"]) for example in examples]
    scores = scores_of(examples, texts)
    right = [text.strip() == str(e.columns["answer"]).strip() for e, text in zip(examples, texts, strict=True)]
    assert [score > 0 for score in scores] == right and set(scores) <= {0.0, 1.0}


def test_puzzle24_takes_the_numbers_of_its_question_alone():
    entry = {"answer": "10*(8 - 5) - 6", "metadata": {"numbers": [10, 8, 5, 6]}}
    good = ["10*(8 - 5) - 6", "(8-5)*10-6", "-(6 - 10*(8-5))"]
    bad = ["6*4*1*1", "24", "10+8+6", "10*(8-5)-6.0", "10*(8-5)-6+0", "1e999999999", "10**8**5**6", "10/(8-5-6+3)", ""]
    assert all(gym.GUARDS["puzzle24"](text, entry) for text in good)
    assert not any(gym.GUARDS["puzzle24"](text, entry) for text in bad)


ENDLESS = [
    "1e999999999",
    "1e-999999999",
    "2*1e+999999999",
    "1e9_99999",
    "9**9**9",
    "9**99999",
    "(" * 50 + "1" + ")" * 50,
]
FORMULAS = ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"]


@pytest.mark.parametrize("text", ENDLESS)
def test_numbers_without_end_are_no_formulas(text):
    for name in FORMULAS:
        assert not gym.GUARDS[name](text, {"answer": "x + C", "metadata": {"numbers": [1]}}), name


def test_of_game_of_life_halting_only_the_right_word_counts():
    for answer, other in (("True", "False"), ("False", "True")):
        assert gym.GUARDS["game_of_life_halting"](answer, {"answer": answer})
        assert not gym.GUARDS["game_of_life_halting"](other, {"answer": answer})


def test_datasets_without_a_fair_scorer_are_refused():
    with refused("prompts.name", "propositional_logic"):
        tasks.load(PromptsConfig(source="reasoning_gym", name="propositional_logic", size=1), seed=0)


def test_a_set_whose_right_answers_are_mostly_copies_is_refused():
    own = {"min_string_length": 100, "max_string_length": 200}
    for arguments, is_refused in (({}, True), (own, False)):
        config = PromptsConfig(source="reasoning_gym", name="string_insertion", arguments=arguments, size=60)
        if is_refused:
            with refused("prompts.name", "string_insertion", "prompts.arguments"):
                tasks.load(config, seed=1)
        else:
            assert len(tasks.load(config, seed=1).examples) == 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", playable())
def test_no_answer_that_looks_at_no_question_scores_above_chance(name):
    size = 20
    try:
        examples = questions_of(name, size)
    except ConfigError:
        assert name in gym.COPIES
        return
    answers = [str(example.columns["answer"]) for example in examples]
    chance = collections.Counter(answers).most_common(1)[0][1] / size
    most = max(0.1, chance if len(set(answers)) > 1 else 0.0, FLOORS.get(name, 0.0)) + 0.05
    for text in [*ANSWERS, *LONG_ANSWERS, *answers[:5]]:
        began = time.monotonic()
        scores = scores_of(examples, [text] * size)
        assert all(math.isfinite(score) and 0.0 <= score <= 1.0 for score in scores), text[:40]
        assert statistics.mean(scores) <= max(most, answers.count(text) / size + 0.1), text[:40]
        assert time.monotonic() - began < 60, text[:40]
    copies = scores_of(examples, [example.prompt for example in examples])
    assert statistics.mean(copies) <= most or name in gym.COPIES
    assert json.dumps(scores_of(examples, answers)) == json.dumps([1.0] * size) or set(answers) == {"None"}
