"""Rows with tests in MBPP's and HumanEval's forms, and how a bad one is refused."""

import json
import warnings

import pytest

from jaxrl_llm.config import ConfigError, PromptsConfig
from jaxrl_llm.environments.sandbox import SandboxError
from jaxrl_llm.questions.tasks import code, load, scorer

ROW = {"text": "Write f.", "test_list": ["assert f(1) == 1", "assert f(2) == 2"], "code": "f = int", "task_id": 7}
SANITISED = {"prompt": "Write g.", "test_imports": ["import re"], "test_list": ["assert g()"], "source_file": "x"}
TEST = "def check(candidate):\n    base = 1\n    assert candidate(base) == 1\n    assert candidate(2) == 2\n"
HUMAN = {"task_id": "a/1", "prompt": "def f(x):\n", "entry_point": "f", "test": TEST, "canonical_solution": "    pass"}


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "Sandbox", lambda **settings: _Closing(settings))

    def load_rows(*rows, bad_row="error", size=0, **arguments):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        config = PromptsConfig(source="code", name=str(path), arguments=arguments, bad_row=bad_row, size=size)
        return load(config, seed=0)

    return load_rows


class _Closing:
    asked: list = []  # noqa: RUF012

    def __init__(self, settings):
        self.asked.append(settings)

    def close(self):
        pass


def test_both_forms_become_questions_with_tests_one_by_one(loaded):
    examples = loaded(ROW, SANITISED, HUMAN).examples
    prompts = [example.prompt for example in examples]
    assert prompts[0] == "Write f.\n\nYour code should pass these tests:\n\nassert f(1) == 1\n"
    assert prompts[1].startswith("Write g.") and prompts[2] == "def f(x):\n"
    columns = [example.columns for example in examples]
    assert [c["tests"] for c in columns[:2]] == [ROW["test_list"], ["assert g()"]]
    assert columns[2]["tests"] == [
        f"def check(candidate):\n    base = 1\n    assert candidate({x}) == {y}\ncheck(f)"
        for x, y in (("base", 1), (2, 2))
    ]
    assert [c["setup"].strip() for c in columns] == ["", "import re", ""]
    assert [c["prefix"] for c in columns] == ["", "", "def f(x):\n"]
    assert [c["names"] for c in columns] == [["f"], ["g"], ["f"]]
    assert [c["solution"] for c in columns] == ["f = int", None, "    pass"]
    assert [c["shown_tests"] for c in columns] == [["assert f(1) == 1"], ["assert g()"], []]
    assert [c["task_id"] for c in columns] == [7, None, "a/1"]
    assert {c["sandbox"]["seconds"] for c in columns} == {1.0}
    assert examples[2].origin.endswith("tasks.jsonl:3")
    assert scorer(PromptsConfig(source="code")) == "jaxrl_llm.environments.code_tests:passed"


def test_arguments_change_the_prompt_and_the_limits(loaded):
    row = ROW | {"challenge_test_list": ["assert f(3) == 3"]}
    (example,) = loaded(
        row, template="{text} {tests}!", shown_tests=-1, sandbox={"seconds": 3, "required": True}
    ).examples
    assert example.prompt == "Write f. assert f(1) == 1\nassert f(2) == 2!"
    assert example.columns["tests"] == [*ROW["test_list"], "assert f(3) == 3"]
    assert example.columns["sandbox"] == {"seconds": 3, "required": True}
    assert _Closing.asked[-1] == {"required": True}
    assert loaded(ROW, shown_tests=0, template="{text}{tests}").examples[0].prompt == "Write f."
    assert len(loaded(ROW, ROW, ROW, size=2).examples) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("[1]", "must be an object, not list"),
        ("{", "not JSON"),
        ({"text": "t"}, "must have one of `test_list` (MBPP) and `test` (HumanEval); its keys are ['text']"),
        (ROW | HUMAN, "must have one of `test_list` (MBPP) and `test` (HumanEval)"),
        (ROW | {"test_import": []}, "unknown key `test_import`; did you mean `test_imports`"),
        (ROW | {"zzz": 1}, "unknown key `zzz`: its form has text, prompt, test_list"),
        (HUMAN | {"entrypoint": "f"}, "unknown key `entrypoint`; did you mean `entry_point`"),
        (ROW | {"test_list": "assert f()"}, "`test_list` must be a list of texts, not 'assert f()'"),
        (ROW | {"test_list": [1]}, "`test_list` must be a list of texts, not [1]"),
        (ROW | {"test_list": []}, "`test_list` is empty"),
        (ROW | {"test_list": ["assert f() ==", "1"]}, "`test_list[0]` is not Python: invalid syntax"),
        (ROW | {"test_setup_code": "import"}, "`test_imports` or `test_setup_code` is not Python"),
        (ROW | {"prompt": "p"}, "must have one of `text` and `prompt`"),
        (ROW | {"text": ""}, "must have one of `text` and `prompt`, and not empty"),
        (HUMAN | {"prompt": ""}, "`prompt` is missing or empty"),
        (HUMAN | {"entry_point": None}, "`entry_point` is missing or empty"),
        (HUMAN | {"entry_point": "f()"}, "`entry_point` must be the name of a function, not 'f()'"),
        (HUMAN | {"entry_point": "g"}, "`prompt` does not begin a function 'g', which is `entry_point`"),
        (HUMAN | {"test": "assert f(1)"}, "`test` does not define a function check(candidate)"),
        (HUMAN | {"test": "def check("}, "`test` is not Python"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_key(loaded, row, words):
    with pytest.raises(ConfigError) as refused:
        loaded(ROW, row)
    assert "tasks.jsonl:2: " in str(refused.value) and words in str(refused.value)
    skipping = loaded(ROW, row, bad_row="skip")
    assert len(skipping.examples) == 1 and words in skipping.bad_rows[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tests": 1}, "prompts.arguments.tests=1 is not one of shown_tests, template, check_solutions"),
        ({"check_solutions": 1}, "prompts.arguments.check_solutions=1 must be True or False"),
        ({"shown_tests": -2}, "prompts.arguments.shown_tests=-2 must be a whole number of at least -1"),
        ({"template": "{tests}"}, "prompts.arguments.template='{tests}' must be text with {text}"),
        ({"sandbox": 1}, "prompts.arguments.sandbox=1 must be settings by name"),
        ({"sandbox": {"time": 1}}, "prompts.arguments.sandbox.time=1 is not one of seconds, memory_mb"),
        ({"sandbox": {"seconds": 0}}, "prompts.arguments.sandbox.seconds=0 must be a number of at least 0.01"),
        ({"sandbox": {"required": 1}}, "prompts.arguments.sandbox.required=1 must be True or False"),
    ],
)
def test_bad_arguments_are_refused_by_name(loaded, arguments, words):
    with pytest.raises(ConfigError) as refused:
        loaded(ROW, **arguments)
    assert words in str(refused.value)


def test_solutions_are_checked_where_that_is_asked_for(loaded):
    both = [ROW, HUMAN | {"canonical_solution": "    return x\n"}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where there are no namespaces
        assert len(loaded(*both, check_solutions=True).examples) == 2
        skipped = loaded(
            ROW, HUMAN, SANITISED, ROW | {"code": "f = str"}, check_solutions=True, bad_row="skip"
        ).bad_rows
    assert not code.code_tests._SANDBOXES
    words = [
        "2: its own solution passes 0% of its tests",
        "3: has no solution (`code` or",
        "4: its own solution passes",
    ]
    assert all(word in bad for word, bad in zip(words, skipped, strict=True))


def test_a_sandbox_that_cannot_be_had_is_refused_before_the_run(loaded, monkeypatch):
    def none(**settings):
        raise SandboxError("sandbox.required, and there is none here: unshare: Operation not permitted")

    monkeypatch.setattr(code, "Sandbox", none)
    with pytest.raises(ConfigError, match=r"prompts.arguments.sandbox: sandbox.required, and there is none here"):
        loaded(ROW, sandbox={"required": True})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="holds no question"):
        loaded()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(PromptsConfig(source="code", name="/nowhere.jsonl"), seed=0)
