"""Rows with tests in MBPP's and HumanEval's forms, and the errors for bad rows."""

import json

import pytest
from support.refusal import ANY, check_row, refused, refused_row

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.questions.tasks import code, load, scorer
from jaxrl_llm.sandbox.sandbox import SandboxError

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
    assert scorer(PromptsConfig(source="code")) == "jaxrl_llm.scoring.code_tests:passed"


def test_what_other_tests_call_or_need_is_not_left_out(loaded):
    """Once, every answer failed by a NameError:

    a helper with an assertion, or a name from a loop with an assertion, was left out.
    """
    helper = "def check(candidate):\n    def same(a, b):\n        assert a == b\n    same(candidate(1), 1)\n"
    other = f"{helper}    assert candidate(2) == 2\n"
    loop = "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i\n"
    loop += "    assert candidate(i) == 2\n"
    apart = loop.replace("candidate(i) == 2", "candidate(3) == 3")
    tests = [loaded(HUMAN | {"test": test}).examples[0].columns["tests"] for test in (helper, other, loop, apart)]
    assert [len(own) for own in tests] == [1, 1, 1, 2]
    for own in tests:
        for test in own:
            exec(test, {"f": lambda x: x})
            with pytest.raises(AssertionError):
                exec(test, {"f": lambda x: x + 1})


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
        ("[1]", ["object", "list"]),
        ("{", ["JSON"]),
        ({"text": "t"}, ["`test_list`", "`test`", "['text']"]),
        (ROW | HUMAN, ["`test_list`", "`test`"]),
        (ROW | {"test_import": []}, ["`test_import`", "`test_imports`"]),
        (ROW | {"zzz": 1}, ["`zzz`", "text, prompt, test_list"]),
        (HUMAN | {"entrypoint": "f"}, ["`entrypoint`", "`entry_point`"]),
        (ROW | {"test_list": "assert f()"}, ["`test_list`", "'assert f()'"]),
        (ROW | {"test_list": [1]}, ["`test_list`", "[1]"]),
        (ROW | {"test_list": []}, ["`test_list`"]),
        (ROW | {"test_list": ["assert f()", "# todo"]}, ["`test_list[1]`='# todo'"]),
        (ROW | {"test_list": ["assert f() ==", "1"]}, ["`test_list[0]`", "invalid syntax"]),
        (ROW | {"test_setup_code": "import"}, ["`test_imports`", "`test_setup_code`"]),
        (ROW | {"prompt": "p"}, ["`text`", "`prompt`"]),
        (ROW | {"text": ""}, ["`text`", "`prompt`"]),
        (HUMAN | {"prompt": ""}, ["`prompt`"]),
        (HUMAN | {"entry_point": None}, ["`entry_point`"]),
        (HUMAN | {"entry_point": "f()"}, ["`entry_point`", "'f()'"]),
        (HUMAN | {"entry_point": "g"}, ["`prompt`", "'g'", "`entry_point`"]),
        (HUMAN | {"test": "assert f(1)"}, ["`test`", "check(candidate)"]),
        (HUMAN | {"test": "def check("}, ["`test`"]),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_key(loaded, row, words):
    with refused_row("tasks.jsonl", 2, *words):
        loaded(ROW, row)
    skipping = loaded(ROW, row, bad_row="skip")
    assert len(skipping.examples) == 1
    check_row(skipping.bad_rows[0], "tasks.jsonl", 2, *words)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tests": 1}, ("prompts.arguments.tests", 1)),
        ({"check_solutions": 1}, ("prompts.arguments.check_solutions", 1)),
        ({"shown_tests": -2}, ("prompts.arguments.shown_tests", -2)),
        ({"template": "{tests}"}, ("prompts.arguments.template", "{tests}")),
        ({"sandbox": 1}, ("prompts.arguments.sandbox", 1)),
        ({"sandbox": {"time": 1}}, ("prompts.arguments.sandbox.time", 1)),
        ({"sandbox": {"seconds": 0}}, ("prompts.arguments.sandbox.seconds", 0)),
        ({"sandbox": {"required": 1}}, ("prompts.arguments.sandbox.required", 1)),
    ],
)
def test_bad_arguments_are_refused_by_name(loaded, arguments, named):
    with refused(*named):
        loaded(ROW, **arguments)


def test_solutions_are_checked_where_that_is_asked_for(loaded):
    both = [ROW, HUMAN | {"canonical_solution": "    return x\n"}]
    assert len(loaded(*both, check_solutions=True).examples) == 2
    skipped = loaded(ROW, HUMAN, SANITISED, ROW | {"code": "f = str"}, check_solutions=True, bad_row="skip").bad_rows
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
    with refused("prompts.arguments.sandbox", ANY, "'required': True", "sandbox.required"):
        loaded(ROW, sandbox={"required": True})
    monkeypatch.undo()
    with refused("prompts.name", ANY, "tasks.jsonl"):
        loaded()
    with refused("prompts.name", "/nowhere.jsonl"):
        load(PromptsConfig(source="code", name="/nowhere.jsonl"), seed=0)


SOLUTION = "def f(x):\n    y = x\n    z = y\n    return z\n"
SOLVED = {"text": "Write f.", "test_list": ["assert f(1) == 1"], "code": SOLUTION}
BODY = {**HUMAN, "canonical_solution": "    y = x\n    return y\n"}


def laddered(loaded, *rows, parts, rate=0.8):
    """Return (prompt, given) of each training question, by ladder."""
    found = loaded(*rows, given_parts=parts)
    config = PromptsConfig(source="code", name="f", arguments={"given_parts": parts}, retire_pass_rate=rate)
    ladders = {}
    for one in code.laddered(config, found.examples):
        ladders.setdefault(one.ladder, []).append((one.prompt, one.columns["given"]))
    return ladders


def test_easier_versions_give_a_part_of_the_solution_most_first(loaded):
    plain = "Write f.\n\nYour code should pass these tests:\n\nassert f(1) == 1\n"
    first, second = laddered(loaded, SOLVED, BODY, parts=3).values()
    lines = ["def f(x):\n", "    y = x\n", "    z = y\n", "    return z\n"]
    given = ["".join(lines[:count]) for count in (3, 2, 1)]
    assert first == [*((f"{plain}\nGo on from here:\n\n{part}", part) for part in given), (plain, "")]
    # 3/4, 2/4 and 1/4 of two lines: one, one and none.
    assert second == [("def f(x):\n    y = x\n", "    y = x\n"), ("def f(x):\n", "")]


def test_without_parts_or_solutions_questions_are_as_they_are(loaded):
    assert laddered(loaded, SOLVED, parts=0, rate=0.0) == {"": [(loaded(SOLVED).examples[0].prompt, "")]}
    with_one = laddered(loaded, {**SOLVED, "code": None}, BODY, parts=1)
    assert [len(ladder) for ladder in with_one.values()] == [1, 2]


@pytest.mark.parametrize("parts", [-1, 101, 1.0, True, "2"])
def test_parts_are_a_small_number(loaded, parts):
    with refused("prompts.arguments.given_parts", parts, "100"):
        loaded(SOLVED, given_parts=parts)


def test_parts_want_solutions_and_a_rate_to_go_on_at(loaded):
    with refused("prompts.arguments.given_parts", ANY, "'f'"):
        laddered(loaded, {**SOLVED, "code": None}, parts=2)
    with refused("prompts.retire_pass_rate", 0.0, "prompts.arguments.given_parts=2"):
        laddered(loaded, SOLVED, parts=2, rate=0.0)


@pytest.mark.parametrize(
    ("row", "names", "classes"),
    [
        ({"test_list": ["assert set(common((1,), x=2)) == set()"]}, ["common"], []),
        ({"test_list": ["assert sum(10, 15) == 6"]}, ["sum"], []),  # the test uses no other name
        ({"test_list": ["assert len(max([1])) == 6"]}, ["max"], []),
        ({"test_list": ["assert abs(sum(1, 2)) == len(f(1))"], "code": "def sum(a, b): pass"}, ["f", "sum"], []),
        ({"test_list": ["xs = [f(x) for x in (1, 2)]\nassert any(map(lambda y: y, xs))"]}, ["f"], []),
        ({"test_list": ["assert f(math.pi) == K"], "test_setup_code": "K = 3"}, ["f"], []),
        ({"test_list": ["assert depth(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
         ["depth", "Node"], ["Node"]),
        ({"test_list": ["s = Stack()\ns.push(1)\nassert s.pop() == 1"]}, ["Stack"], ["Stack"]),
        ({"test_list": ["assert Find_Min([3, 1]) == 1"]}, ["Find_Min"], []),
        ({"test_list": ["assert Count(3).bit_length() == 1"], "code": "def Count(x): pass"}, ["Count"], []),
        ({"test_list": ["assert chain([Pair(1, 2)]) == 1"], "code": "class Pair: pass\ndef chain(x): pass"},
         ["chain", "Pair"], ["Pair"]),
        ({"test_list": ["try:\n    f()\nexcept Problem as e:\n    assert str(e)"]}, ["f", "Problem"], []),
        ({"test_list": ["assert code.run(1) == 1"], "code": "class code: pass"}, ["code"], ["code"]),
    ],
)  # fmt: skip
def test_names_are_what_the_tests_take_from_an_answer(loaded, row, names, classes):
    (example,) = loaded({"text": "t", **row}).examples
    assert sorted(example.columns["names"]) == sorted(names)
    assert example.columns["classes"] == classes


def test_names_have_the_order_of_the_tests_in_every_process(loaded):
    """A checkpoint records a hash of the columns, so that the order must not depend on Python's hash seed."""
    tests = ["assert eta(delta, alpha) == 1", "assert gamma(beta, zeta, epsilon) == 2"]
    (example,) = loaded({"text": "Write seven functions.", "test_list": tests}).examples
    assert example.columns["names"] == ["eta", "delta", "alpha", "gamma", "beta", "zeta", "epsilon"]


def test_a_standard_module_without_an_import_is_python_s_own(loaded):
    rows = [{"text": "t", "test_list": [f"assert math.floor(f(1)) == 1{more}"]} for more in ("", "; math = 1")]
    setups = [example.columns["setup"].strip() for example in loaded(*rows).examples]
    assert setups == ["import math", ""]


def test_a_test_that_no_answer_takes_part_in_is_a_bad_row(loaded):
    with refused_row("tasks.jsonl", 1, "`test_list`"):
        loaded({"text": "t", "test_list": ["assert 1 == 1"]})
