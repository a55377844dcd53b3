"""Which part of a completion is code, and the results of its tests."""

import textwrap
import time

import pytest
from support.refusal import raises_with

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.questions.tasks.code import load, question
from jaxrl_llm.sandbox.sandbox import SandboxError
from jaxrl_llm.scoring import code_tests
from jaxrl_llm.scoring.code_tests import answer, covered, feedback, parses, passed, program, share, stopped

SETTINGS = {"shown_tests": 1, "template": "{text}|{tests}", "sandbox": {"seconds": 0.5}}
MBPP = {
    "text": "Write double(x).",
    "test_imports": ["import math"],
    "test_setup_code": "PI = math.pi",
    "test_list": ["assert double(2) == 4", "assert double(-1) == -2", "assert double(PI) == 2 * math.pi"],
}
PROMPT = (
    'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """The sum. >>> total([1])\n    1\n    """\n'
)
TEST = "METADATA = {}\n\n\ndef check(candidate):\n    one = [1]\n"
TEST += "    assert candidate(one) == 1\n    assert candidate([]) == 0\n"
TEST += "    for i in range(3):\n        assert candidate([i, i]) == 2 * i\n"
HUMAN_EVAL = {"task_id": "T/0", "prompt": PROMPT, "test": TEST, "entry_point": "total"}


@pytest.fixture(scope="module", autouse=True)
def closing():
    yield
    code_tests.close()


def score(function, row, *completions):
    prompt, columns = question(row, SETTINGS)
    several = {key: [value] * len(completions) for key, value in columns.items()}
    return function(prompts=[prompt] * len(completions), completions=list(completions), **several)


RIGHT = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nUse it so:\n```python\nprint(double(3))\n```"
TIMES = {"right": RIGHT, "square": "def double(x):\n    return x * x", "words": "I do not know."}
TIMES |= {
    "loops": "def double(x):\n    if x < 0:\n        while True: pass\n    return 2 * x",
    "exits": "import os; os._exit(0)",
}
TIMES |= {
    "leaves": "raise SystemExit(0)",
    "main": RIGHT.replace("```\nUse", "if __name__ == '__main__':\n    input()\n```\nUse"),
}


def test_all_or_nothing_and_the_share_of_mbpp_s_tests():
    assert score(passed, MBPP, *TIMES.values()) == [1, 0, 0, 0, 0, 0, 1]
    assert score(share, MBPP, *TIMES.values()) == [1, 1 / 3, 0, 1 / 3, 0, 0, 1]
    assert score(stopped, MBPP, *TIMES.values()) == [0, 0, 0, 1, 0, 0, 0]
    assert score(parses, MBPP, *TIMES.values(), "", "(" * 10**4) == [1, 1, 0, 1, 1, 1, 1, 0, 0]


def test_graded_by_what_kind_of_error_there_is():
    """StepCoder: 1 if all tests pass, -0.3 if a test fails, -0.6 at another error, -1 without a program."""
    failing = {"raises": "def double(x):\n    return x.y", "no name": "y = 1", "empty": "", "remark": "# later"}
    failing |= {"asserts": "def double(x):\n    return 2 * abs(x)"}
    expected = [1, -0.3, -1, -0.6, -0.6, -0.6, 1, -0.6, -0.6, -1, -1, -0.3]
    assert score(code_tests.graded, MBPP, *TIMES.values(), *failing.values()) == expected
    assert [said["reward"] for said in score(covered, MBPP, *TIMES.values())] == expected[:7]
    body = HUMAN_EVAL | {"canonical_solution": "    return sum(xs)\n"}
    answers = ["    return sum(xs)", "    return 1", "    return ys", "    return ("]
    assert score(code_tests.graded, body, *answers) == [1, -0.3, -0.6, -1]


@pytest.mark.parametrize("end", ["if 0:\\", "if 0: x = \\", "@lambda f: lambda c: None", "if 0:", "class A:"])
def test_the_end_of_a_program_does_not_take_its_test_in(end):
    mbpp = f"def double(x):\n    return 1\n{end}"
    assert score(share, MBPP, mbpp) == score(passed, MBPP | {"test_list": MBPP["test_list"][:1]}, mbpp) == [0]
    row = HUMAN_EVAL | {"test": "def check(candidate):\n    assert candidate([]) == 0\n"}
    assert score(passed, row, f"def total(xs):\n    return 1\n{end}") == [0]
    _, columns = question(MBPP, SETTINGS)
    assert "failed: SyntaxError" in feedback(mbpp, **columns) or "failed: IndentationError" in feedback(mbpp, **columns)


def test_imports_from_the_future_stand_before_a_question_s_own():
    future = "```python\nfrom __future__ import annotations\ndouble = lambda x: 2 * x\n```"
    assert score(passed, MBPP, future) == score(share, MBPP, future) == [1]


def test_a_program_that_takes_too_long_is_run_once(monkeypatch):
    ran = []
    run = code_tests.run
    monkeypatch.setattr(code_tests, "run", lambda code, *given, **more: ran.append(code) or run(code, *given, **more))
    loops = "def double(x):\n    while True: pass"
    assert score(covered, MBPP, loops) == [{"reward": -0.6, "masked": []}]
    assert ran == [loops, code_tests.IS_PYTHON]
    _, columns = question(MBPP, SETTINGS | {"shown_tests": 3})
    ran.clear()
    assert feedback(loops, **columns) == "assert double(2) == 4\nfailed: came to the limit of time"
    assert len(ran) == 1


@pytest.mark.parametrize("lines", ["None", "'x'", "[1.5]", "['1']", "[[1]]", "[99] * 10**6", "[10**50]", "1 / 0"])
def test_what_a_program_reports_of_its_own_lines_changes_no_reward(lines):
    """The program's process reports the lines. An invalid report masks everything or nothing, and is no failure."""
    late = "\ndef double(x):\n    import gc\n    for p in gc.get_objects():\n        if type(p).__name__ == 'Peer':\n"
    late += f"            p.operations['lines'] = lambda: {lines}\n    return 2 * x\n"
    (said,) = score(covered, MBPP, late)
    assert said["reward"] == 1
    assert all(0 <= start < stop <= len(late) for start, stop in said["masked"])


def test_turns_without_a_program_cost_a_fifth_and_the_last_one_decides():
    """RLEF: 1 or -1 at the end of an episode, and -0.2 for an earlier turn without code."""
    rows = [[RIGHT], ["I do not know.", "def f(): pass", RIGHT], ["", RIGHT, "def double(x):\n    return 3"], [""]]
    prompt, columns = question(MBPP, SETTINGS)
    several = {key: [value] * len(rows) for key, value in columns.items()}
    said = lambda turn: [{"role": "assistant", "content": turn}, {"role": "user", "content": "x x x"}]
    several["messages"] = [[message for turn in row for message in said(turn)][:-1] for row in rows]
    got = code_tests.by_turn([prompt] * len(rows), [row[-1] for row in rows], **several)
    assert got == [[1], [-0.2, 0, 1], [-0.2, 0, -1], [-1]]


def test_human_eval_s_answers_go_on_from_the_prompt_or_write_it_anew():
    body = "    return sum(xs)\n\n\ndef another():\n    return 1 +\n"  # a base model goes on, and is cut
    anew = "```python\nfrom typing import List\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```"
    first = "```\n    return xs[0]\n```"
    assert score(passed, HUMAN_EVAL, body, anew, first, "") == [1, 1, 0, 0]
    assert score(share, HUMAN_EVAL, body, anew, first, "    return 2 * xs[0] if xs else 0") == [1, 1, 1 / 3, 2 / 3]


@pytest.mark.parametrize("body", ["", "    # The sum.\n", '    """The sum."""\n'])
def test_a_prompt_without_a_docstring_does_not_break_a_function_written_anew(body):
    """The function that the prompt begins has no body, or only a comment. Once, this was an IndentationError."""
    row = HUMAN_EVAL | {"prompt": f"import math\ndef total(xs):\n{body}"}
    anew = "```python\ndef total(xs):\n    if xs:\n        return int(math.fsum(xs))\n    return 0\n```"
    assert score(passed, row, anew, "    return sum(xs)\n", anew.replace("0", "1")) == [1, 1, 0]
    assert score(parses, row, anew) == [1]
    row = row | {"test": "def check(candidate):\n    assert candidate([1]) == 1\n"}
    assert unrun(row, anew) == ["    return 0\n"]


def test_what_the_author_is_told_of_the_tests_that_are_shown():
    _, columns = question(MBPP, SETTINGS | {"shown_tests": 2})
    told = {}
    for name, completion in TIMES.items():
        told[name] = feedback(completion, **columns)
    second = "assert double(-1) == -2\nfailed: "
    assert told["right"] == told["main"] == ""
    assert told["square"] == second + "double(-1) gives 1"
    assert told["loops"] == second + "came to the limit of time"
    assert told["words"].startswith("assert double(2) == 4\nfailed: SyntaxError: ")
    assert told["exits"].endswith(second + "left before its end")


def test_its_environment_tells_it_so_and_ends_where_no_test_that_is_shown_fails():
    text, columns = question(MBPP, SETTINGS | {"shown_tests": 2})
    said = answer(text, [TIMES["right"], TIMES["square"]], **columns)
    assert said == "assert double(-1) == -2\nfailed: double(-1) gives 1\n\nTry again."
    assert answer(text, [TIMES["square"], TIMES["right"]], **columns) is None


@pytest.mark.tier("sandbox")  # plain: test_code_attacks.test_a_sandbox_whose_process_of_tests_fails_raises
def test_a_sandbox_that_fails_is_no_score(monkeypatch):
    pool = code_tests._sandbox()
    monkeypatch.setattr("jaxrl_llm.sandbox.sandbox.GRACE_S", 0.0)
    worker = pool._workers[0]
    monkeypatch.setattr(worker, "_next_message", lambda *_: {"error": "no process starts"})
    with raises_with(SandboxError, "no process starts"):
        score(passed, MBPP, RIGHT)
    monkeypatch.undo()
    assert score(passed, MBPP, RIGHT) == [1.0]


@pytest.mark.parametrize(
    ("completion", "prefix", "names", "code"),
    [
        ("x = 1", "", [], "x = 1"),
        ("Text\n```python\nx = 1\n```\nmore\n```\ny = 2\n```", "", [], "y = 2\n"),
        ("Text\n```python\nx = 1\n```\nmore\n```\ny = 2\n```", "", ["x"], "x = 1\n"),
        ("1. So:\n   ```python\n   def f(x):\n       return x\n\n  y = 1\n   ```", "", ["f"],
         "def f(x):\n    return x\n\ny = 1\n"),
        ("\t```\n\tif x:\n\t\ty\n", "", [], "if x:\n\ty\n"),
        ("    ```\n\ndef f(x):\n    if x:\n        y\n    ```", "", ["f"], "\ndef f(x):\n    if x:\n        y\n"),
        ("   ```\n  x\n   ```", "", [], "  x\n"),
        ("    ```\n    return 1\n    ```", "def f():\n", ["f"], "def f():\n    return 1\n"),
        ("  ```\n      return 1\n  ```", "def f():\n", ["f"], "def f():\n    return 1\n"),
        ("```py\nx = 1\n", "", [], "x = 1\n"),  # cut off at the longest completion
        ("<think>```\nx = 1\n```</think>\ny = 2", "", ["x"], "\ny = 2"),
        ("  return 1\nprint(2)\n", "def f():\n", ["f"], "def f():\n  return 1\n"),
        ("  x = 1\n\n  return x", "def f():\n", ["f"], "def f():\n  x = 1\n\n  return x"),
        ("class f: pass", "import re\ndef f():\n  'x'", ["f"], "import re\ndef f():\n  'x'\nclass f: pass"),
        ("from __future__ import annotations\nx = 1", "import re\ndef x(): 1", ["x"],
         "from __future__ import annotations\nimport re\ndef x(): 1\nx = 1"),
        ("", "", [], ""),
        ("Sure: ```python\ndef f(x):\n    return x\n```\nThis is it.", "", ["f"], "def f(x):\n    return x\n"),
        ("1. ```python\n    def f(x):\n        return x\n   ```\n2. Run it.", "", ["f"], "def f(x):\n    return x\n"),
        ("- So: ```py\r\n  return 1\r\n  ```", "def f():\n", ["f"], "def f():\n  return 1\r\n"),
        ("A ```f(2)``` and ```\nx\n```python\nf = 1\n```", "", ["f"], "f = 1\n"),  # no language: no fence inside a line
        ("f = 1\n```\n\nThis is one.", "", ["f"], "f = 1\n"),  # the prompt opened the fence
        ("f = 1\n```\nUse it:\n```python\nprint(f)\n```", "", ["f"], "f = 1\n"),
        ("f = 1\n```\nOr:\n```python\nf = 2\n```", "", ["f"], "f = 1\n"),
        ("f is 1:\n```\ng = 1\n```", "", ["f"], "g = 1\n"),
        ("    return 1\n```\n\nThis is one.", "def f():\n", ["f"], "def f():\n    return 1\n"),
        (" Here:\n```\n    return 1\n```", "def f():\n", ["f"], "def f():\n    return 1\n"),
        ("def f(x):\n    return x", "import re\ndef g():\n    pass\n\ndef f(x):\n", ["f"],
         "import re\ndef g():\n    pass\n\n\ndef f(x):\n    return x"),
        ("f = 1", "def f():\n    # One.\n    # Or two.", ["f"], "f = 1"),
        ("f = 1", "def f():\n  '\\d'\n", ["f"], "def f():\n  '\\d'\n\nf = 1"),
    ],
)  # fmt: skip
def test_the_code_of_a_completion(completion, prefix, names, code):
    assert program(completion, prefix, names) == code


DOC = 'def f(x):\n    """\n    ```\n    >>> f(1)\n    2\n    ```\n    """\n    return x + 1\n'
TOP = '"""What it does:\n\n```\nf(1)\n```\n"""\ndef f(x):\n    return x\n'
TILDES = "def f(x):\n    '''\n~~~\n```\n    '''\n    return x\n"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        (f"```python\n{DOC}```", DOC),  # a fence that is indented as code is closes nothing
        (f"Text.\n\n```python\n{DOC}```\nIt is `f`.\n```\nf(2)\n```", DOC),
        (f"{DOC}```\nText", DOC),  # the prompt has opened the fence
        (f"```python\n{TOP}```\nand more", TOP),  # at the start of a line, in a string that goes on
        (f"{TOP}```\nand more", TOP),
        (TOP, TOP),
        (f"~~~python\n{TILDES}~~~\n", TILDES),
        (f"```python\n{TILDES}```\n", TILDES),
        ("~~~\nf = 1\n```\n~~~", "f = 1\n```\n"),  # another character closes nothing
        ("~~~~py\nf = 1\n~~~\n~~~~~", "f = 1\n~~~\n"),  # nor do fewer
        ("````python\nf = '''\n```\n'''\n````", "f = '''\n```\n'''\n"),
        ("```python\nf = 1```", "f = 1"),  # at the end of a line of code
        ("```python\nf = 1```\nText\n```python\nprint(f)\n```", "f = 1"),
        ("```python\n# as ```f()```\nf = 1\n```", "# as ```f()```\nf = 1\n"),
        ("```python\nf = '```'\n```", "f = '```'\n"),
        ("```python\nf = 1\n   ```\ntext", "f = 1\n"),  # as deep as CommonMark allows
        ("```python\nf = 1\n``` \ntext", "f = 1\n"),
        ("```python\nf = 1\n```text\nmore", "f = 1\n"),
        ("```python\r\nf = 1\r\n```\r\ntext", "f = 1\r\n"),
        ("f = 1\n```", "f = 1\n"),
        ("```f = 2```\n~~~\nf = 1\n~~~", "f = 1\n"),  # code inside a line opens no block
        ("```python\nf = (\n```", "f = (\n"),  # no reading of it is Python
        ("<think>f?</think>```python\nf = '</think>'\n```", "f = '</think>'\n"),  # the program's own
        ("<think>no </think> yet\n```\nf = 2\n```\n</think>f = 1", "f = 1"),
        ("f = 2</think></think>f = 1", "f = 1"),
    ],
)
def test_a_fence_is_what_commonmark_and_python_take_for_one(completion, code):
    assert program(completion, "", ["f"]) == code


def test_the_program_is_found_in_time_in_a_text_of_fences():
    for text in ("```\n", "~~~\n```", "````\n```\n", "```python\nx\n```\n</think>", "```py\n'''\n", "</think>"):
        began = time.monotonic()
        program(text * 3000, "", ["f"])
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("text", ["(" * 9999, "-" * 9999 + "1", "x" + ".a" * 9999, "x" + "()" * 9999, "\0", "'\ud800'"])
def test_a_text_that_no_parser_likes_is_a_program_that_fails(text):
    assert score(passed, MBPP, f"```python\n{text}\n```\n~~~\n```", RIGHT) == [0, 1]


def test_columns_are_what_the_scorer_takes(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"text": "t", "test_list": ["assert f() == 1"]}')
    (example,) = load(PromptsConfig(source="code", name=str(path), size=0), seed=0).examples
    assert passed([example.prompt], ["def f(): return 1"], **{k: [v] for k, v in example.columns.items()}) == [1.0]


SIGN = """Here it is:
```python
LIMIT = 0
def sign(x):
    \"\"\"What it does, on
    two lines.\"\"\"
    here: int
    if x > LIMIT:
        return 1
    elif x < LIMIT:
        return (
            -1
        )
    try:
        return 0
    except ValueError:
        x = 2; x = 3
    while True:
        pass

def other(): return 2
```
It is right.
"""
UNRUN_OF_SIGN = [
    "        return (\n            -1\n        )\n",
    "    except ValueError:\n",
    "        x = 2; x = 3\n",
    "    while True:\n",
    "        pass\n",
]


def unrun(row, completion):
    (said,) = score(covered, row, completion)
    assert said["reward"] == score(code_tests.graded, row, completion)[0]
    return [completion[start:stop] for start, stop in said["masked"]]


def test_statements_that_no_test_has_run_are_masked():
    """Text without code of its own (docstring, annotation, comment, text around the program) is never masked."""
    row = {"text": "sign", "test_list": ["assert sign(3) == 1", "assert sign(3) == 5", "assert sign(0) == 0"]}
    assert unrun(row, SIGN) == UNRUN_OF_SIGN
    with_thought = "```python\nx\n```</think>" + SIGN
    assert unrun(row, with_thought) == UNRUN_OF_SIGN
    in_list = lambda text: textwrap.indent(text, "   ")
    assert unrun(row, f"1. So:\n{in_list(SIGN)}") == [in_list(text) for text in UNRUN_OF_SIGN]
    below = ["        return 1\n", "    try:\n", "        return 0\n", *UNRUN_OF_SIGN[1:]]
    assert unrun({**row, "test_list": ["assert sign(-3) == -1"]}, SIGN) == below


def test_a_completion_that_goes_on_from_given_code_is_masked_in_its_own_lines():
    row = HUMAN_EVAL | {"test": "def check(candidate):\n    assert candidate([]) == 0\n"}
    assert unrun(row, "    if xs:\n        return sum(xs)\n    return 0\nprint(total([1]))\n") == [
        "        return sum(xs)\n"
    ]
    anew = "def total(xs):\r\n    if xs:\r\n        return 1\r\n    return 0"
    assert unrun(row, anew) == ["        return 1\r\n"]


@pytest.mark.parametrize(
    "completion",
    [
        "def sign(x) return 1",
        "I do not know.",
        "def sign(x):\n    while True: pass\n    return 2",
        "import os\nos._exit(0)\nx = 1",
        "from __future__ import annotations\ndef sign(x):\n    return 1\n    return 2",  # its lines change places
    ],
)
def test_where_nothing_is_known_of_the_lines_nothing_is_masked(completion):
    assert unrun({"text": "sign", "test_list": ["assert sign(3) == 1"]}, completion) == []


def test_a_part_of_the_solution_that_was_given_stands_before_the_rest_of_it():
    given = "import math\ndef area(r):\n    if r < 0:\n"
    assert program("        return 0\n    return 2\nprint(1)", "", ["area"], given) == (
        "import math\ndef area(r):\n    if r < 0:\n        return 0\n    return 2\n"
    )
    whole = "def area(r):\n    return math.pi * r * r\n"
    assert program(whole, "", ["area"], given) == whole  # half an `if` cannot stand before it
    assert program(whole, "", ["area"], "import math\n") == "import math\n\n" + whole
    assert program("    return 2", PROMPT, ["total"], "    x = 1\n") == PROMPT + "    x = 1\n    return 2"
