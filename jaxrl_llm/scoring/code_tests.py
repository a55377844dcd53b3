"""Code tests: find the program in a completion and run a question's tests on it. Reward functions:

    passed      1 if all tests pass, else 0
    graded      1 if all tests pass, -0.3 if one fails, -0.6 at another error, -1 if there is no program
    covered     like graded; it masks statements that no test has run, for ``algorithm.reshaping=reward_mask``
    by_turn     per turn: 1 or -1 for the last turn (all tests pass or not), -0.2 for an earlier one without code (RLEF)
    share       the share of tests that pass
    parses      1 if the extracted program is valid Python: for models that do not write Python yet
    stopped     1 if a limit of the sandbox ended a test, else 0: a metric, to be used with weight 0

They read the columns of ``prompts.source="code"`` (questions/tasks/code.py). A test passes when it runs to its end. A
test fails if it raises, exits early or reaches a limit. If the sandbox itself fails, the call raises: the reward has
failed and is never 0.

Tests run in their own process with Python's own built-ins and modules (sandbox/program_tests.py). The names under
test come from the program: its process receives the arguments of each call and returns the result, as plain values. The
program's process never has the tests, the expected values or the report. docs/reference/programs.md lists what a
program can still do.

``feedback`` describes in words how the program does on the tests that the question shows. ``answer`` is an environment
that sends this feedback between two tries (RLEF, Gehring et al. 2024, arXiv:2410.02089: public tests as feedback over
turns, all tests as reward).

Owns: which part of a completion is code, verdicts. Does not know: where tests come from, jax.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_llm.sandbox.sandbox import Limits, Result, Sandbox, Tests

# An opening fence is at the start of a line, or anywhere in a line if a language follows: "Sure: ```python".
OPENING = re.compile(
    r"^(?P<indent>[ \t]*)(?:(?P<ticks>```+)[^\n`]*|(?P<tildes>~~~+)[^\n]*)$"
    r"|^(?P<before>[^\n`]*)(?P<behind>```+)\w[\w+#-]*[ \t\r]*$",
    re.MULTILINE,
)
# A closing fence is a line of fence characters, a line that begins with them, or fence characters at a line's end.
CLOSING = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>```+|~~~+)(?P<more>[^\n]*)$|(?P<late>```+)[ \t\r]*$",
    re.MULTILINE,
)
MARKER = re.compile(r"[ \t]*(?:[-*+]|\d+[.)])[ \t]+")  # marker of a list item; its width is the item's indentation
THOUGHT = "</think>"  # mark at the end of the model's reasoning, which may begin in the prompt
MAX_CLOSINGS = 32  # maximum closing fences that are tried per block
MAX_TRIES = 64  # maximum candidate blocks that are parsed per completion
MAX_PARSED = 50_000  # maximum characters of a candidate block
# Pattern of an indented first line, such as the body of a function. Sentences are not indented.
BODY = re.compile(r"(?:[ \t]*\r?\n)*(?:[ ]{2}|\t)")
DEFINITION = re.compile(r"^(?:async[ ]+def|def|class)[ ]+(\w+)|^(\w+)[ ]*=", re.MULTILINE)
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
NEW_LINE = re.compile(r"\r\n|\r|\n")
OF_SANDBOX = ("isolation", "required")  # sandbox settings that are not limits
TOO_LONG = ("time", "cpu")  # limits that mean "too slow"
MAX_FEEDBACK = 1000  # characters per test
NAME = "program"  # the module's name, so that code under `if __name__ == "__main__"` does not run
IS_PYTHON = "import ast, sys\nassert ast.parse(sys.stdin.read()).body"
# The value is the lines [first, last] of each statement that did not run. For a statement with a body these are the
# lines of its head. Statements without code of their own, such as docstrings, are left out.
UNRUN = """
import ast, json, sys
code, ran = json.load(sys.stdin)
left = []
for node in ast.walk(ast.parse(code)):
    if not isinstance(node, (ast.stmt, ast.excepthandler)) or isinstance(node, (ast.Global, ast.Nonlocal)):
        continue
    if isinstance(node, (ast.Expr, ast.AnnAssign)) and isinstance(node.value, ast.Constant | None):
        continue
    body = getattr(node, "body", None)
    first = min([node.lineno, *(other.lineno for other in getattr(node, "decorator_list", ()))])
    last = max(first, body[0].lineno - 1 if body else node.end_lineno)
    if set(ran).isdisjoint(range(first, last + 1)):
        left.append([first, last])
left
"""


def passed(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """Return 1.0 if all tests of the question pass, run in sequence within one set of limits, else 0.0."""
    return [float(result.finished) for (result,) in _results(completions, tests, sandbox, columns, apart=False)]


def graded(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """Return 1.0 if all tests pass; else -1.0 without valid Python, -0.3 if an assertion failed first, or else -0.6.

    Source: the rewards of StepCoder, Dou et al. 2024, arXiv:2402.01391, for compile errors, runtime errors and failed
        tests. Differs: reaching a limit of the sandbox, or exiting early, counts as a runtime error, because the source
        does not define it.
    """
    return [score for score, _ in _graded(prompts, completions, tests=tests, sandbox=sandbox, **columns)]


def _graded(
    prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns
) -> list[tuple[float, Result]]:
    results = [result for (result,) in _results(completions, tests, sandbox, columns, apart=False)]
    is_code = parses(prompts, completions, sandbox=sandbox, **columns)
    graded_results = []
    for result, is_python in zip(results, is_code, strict=True):
        if result.finished:
            score = 1.0
        elif not is_python:
            score = -1.0
        elif result.exception.startswith("AssertionError"):
            score = -0.3
        else:
            score = -0.6
        graded_results.append((score, result))
    return graded_results


def by_turn(
    prompts: list,
    completions: list[str],
    *,
    messages: list,
    tests: list,
    sandbox: list,
    **columns,
) -> list[list[float]]:
    """Return the reward of each turn: 1.0 or -1.0 for the last, -0.2 for an earlier turn without valid Python, else 0.

    The last turn scores 1.0 if all tests pass. A passing episode of T turns scores at least 1.2 - T / 5, and a failing
    episode at most -1. Set ``rewards.pass_threshold`` between the two, to 0 for up to six turns.

    Source: RLEF, Gehring et al. 2024, arXiv:2410.02089, section 2.2.
    """
    rewards = []
    for i, score in enumerate(passed(prompts, completions, tests=tests, sandbox=sandbox, **columns)):
        turns = [message["content"] for message in messages[i] if message["role"] == "assistant"]
        earlier = turns[:-1]
        num = len(earlier)
        repeated = {key: [values[i]] * num for key, values in columns.items()}
        is_code = parses([prompts[i]] * num, earlier, sandbox=[sandbox[i]] * num, **repeated)
        turn_rewards = [0.0 if is_python else -0.2 for is_python in is_code]
        rewards.append([*turn_rewards, 2.0 * score - 1.0])
    return rewards


def covered(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[dict[str, Any]]:
    """Return the score of ``graded`` and, as ``masked``, the statements of the program that no test has run.

    The program and its tests run a second time with line tracing, each test to its end or its error. If the traced run
    reaches a limit, or the first run took too long, nothing is masked. The trace has lines, not statements: two
    statements on one line count as both run or both not run. The program's own process reports the lines, so that they
    can be forged.

    Source: fine-grained optimisation of StepCoder, Dou et al. 2024, arXiv:2402.01391.
    """
    scores = []
    for i, (reward, result) in enumerate(_graded(prompts, completions, tests=tests, sandbox=sandbox, **columns)):
        masked = []
        if result.limit not in TOO_LONG:
            masked = _left_out(completions[i], tests[i], sandbox[i], _columns_of(columns, i))
        scores.append({"reward": reward, "masked": masked})
    return scores


def _left_out(completion: str, tests: list[str], sandbox: dict[str, Any], columns: dict[str, Any]) -> list[list[int]]:
    """Return spans [start, stop) of characters of the completion, whole lines: the statements that no test has run."""
    code, first_line, start = _placed(completion, columns["prefix"], columns["names"], columns["given"])
    if start < 0:
        return []
    traced = _judge(code, tests, sandbox, columns, traced=True)
    if not traced.finished:
        return []
    result = run(UNRUN, sandbox, stdin=json.dumps([code, traced.lines]))
    value = result.value or ""
    if not result.finished or len(value) >= 1024 * _limits(sandbox).output_kb:
        return []
    line_starts = [start]
    for line_end in NEW_LINE.finditer(completion[start:]):
        line_starts.append(start + line_end.end())
    line_starts.append(len(completion))
    last_place = len(line_starts) - 1
    spans = set()
    for first, last in json.loads(value):
        if last < first_line:
            continue
        # Lines of the completion, counted from its first: the first line, and the line after the last.
        begin = max(first, first_line) - first_line
        end = last - first_line + 1
        spans.add((line_starts[begin], line_starts[min(end, last_place)]))
    return [list(span) for span in sorted(spans)]


def _columns_of(columns: dict[str, list], i: int) -> dict[str, Any]:
    """Return the columns of completion ``i``."""
    return {key: values[i] for key, values in columns.items()}


def share(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """Return the share of tests that pass. Each test has its own processes and limits.

    After a test that takes too long, the remaining tests of the completion do not run and count as failed.
    """
    shares = []
    for results, all_tests in zip(_results(completions, tests, sandbox, columns, apart=True), tests, strict=True):
        num_passed = sum(result.finished for result in results)
        shares.append(num_passed / len(all_tests))
    return shares


def stopped(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """Return 1.0 if a limit of the sandbox (time, memory, output and the like) ended the tests, else 0.0."""
    scores = []
    for (result,) in _results(completions, tests, sandbox, columns, apart=False):
        scores.append(float(bool(result.limit)))
    return scores


def parses(prompts: list, completions: list[str], *, sandbox: list, **columns) -> list[float]:
    """Return 1.0 if the completion contains code and the code is valid Python, else 0.0."""
    scores = []
    for i, completion in enumerate(completions):
        code = program(completion, columns["prefix"][i], columns["names"][i], columns["given"][i])
        result = run(IS_PYTHON, sandbox[i], stdin=code)
        scores.append(float(result.finished))
    return scores


def _results(
    completions: Sequence[str],
    tests: list,
    sandbox: list,
    columns: dict[str, list],
    *,
    apart: bool,
) -> Iterable[list[Result]]:
    """Yield the results of each completion's tests, run together or apart. A test that takes too long ends the list."""
    for i, completion in enumerate(completions):
        own_columns = _columns_of(columns, i)
        code = program(
            completion,
            own_columns["prefix"],
            own_columns["names"],
            own_columns["given"],
        )
        test_sets = [[test] for test in tests[i]] if apart else [tests[i]]
        results: list[Result] = []
        for test_set in test_sets:
            results.append(_judge(code, test_set, sandbox[i], own_columns))
            if results[-1].limit in TOO_LONG:
                break
        yield results


def _judge(
    code: str,
    tests: Sequence[str],
    sandbox: dict[str, Any],
    columns: dict[str, Any],
    **more: Any,
) -> Result:
    """Run tests on the program.

    Args:
        columns: ``names``, ``classes``, ``setup`` and ``prefix`` of the question.
        more: further fields of ``Tests``.
    """
    test_run = Tests(
        tests=tuple(tests),
        names=tuple(columns["names"]),
        program_setup=columns["setup"],
        setup=(columns["setup"], _whole(columns["prefix"])),
        has_classes=bool(columns["classes"]),
        **more,
    )
    return run(code, sandbox, tests=test_run)


def _whole(prefix: str) -> str:
    """Return the code without trailing lines that begin a definition but give it no body."""
    while prefix and not _is_whole(prefix):
        prefix = prefix[: prefix.rstrip("\n").rfind("\n") + 1]
    return prefix


def feedback(completion: str, *, shown_tests: Sequence[str], sandbox: dict[str, Any], **columns) -> str:
    """Return a description of the shown tests that fail, or "" if none fails.

    For a test ``assert expression == value`` it contains the actual value of the expression. For other tests it
    contains the error or the limit. After a test that takes too long, no further test runs.

    Args:
        shown_tests, sandbox, columns: columns of one question of ``prompts.source="code"``.

    Raises:
        SandboxError: the sandbox failed.
    """
    code = program(completion, columns["prefix"], columns["names"], columns["given"])
    failures = []
    for test in shown_tests:
        result = _judge(code, [test], sandbox, columns)
        if result.finished:
            continue
        reason = result.exception or "left before its end"
        if result.limit:
            reason = f"came to the limit of {result.limit}"
        expression = _compared(test)
        if expression and result.exception.startswith("AssertionError"):
            evaluated = _judge(code, [], sandbox, columns, expression=expression)
            if evaluated.finished:
                reason = f"{expression} gives {evaluated.value}"
        failures.append(f"{test.strip()}\nfailed: {reason}"[:MAX_FEEDBACK])
        if result.limit in TOO_LONG:
            break
    return "\n\n".join(failures)


def answer(prompt: Any, turns: Sequence[str], **columns) -> str | None:
    """Return ``feedback`` on the newest turn's program, or None if no test fails.

    This function is an environment (``environments.factory``).
    """
    failures = feedback(turns[-1], **columns)
    return f"{failures}\n\nTry again." if failures else None


def _compared(test: str) -> str:
    """Return the left side of a test that consists only of ``assert expression == value``, else ""."""
    body = ast.parse(test).body
    match body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()]))]:
            return ast.unparse(left)
    return ""


def program(completion: str, prefix: str, names: Sequence[str], given: str = "") -> str:
    """Return the program in a completion."""
    return _placed(completion, prefix, names, given)[0]


def _placed(completion: str, prefix: str, names: Sequence[str], given: str) -> tuple[str, int, int]:
    """Return the program, its first line that the completion wrote, and where this line begins in the completion.

    The position is -1 if lines have changed places. Lines count from 1.

    These rules select the program; the first match wins:

    1. The last fenced block that defines one of ``names``. If it is not valid Python, valid Python under rule 2 comes
       first.
    2. The text before the first fence, if it defines one of ``names`` or is a body for the prefix. The prompt may have
       opened the fence.
    3. The last fenced block.
    4. The whole text, if it has no fences.

    The model's thought before ``</think>`` is never part of the program.

    Args:
        prefix: code that the completion continues, "" for none. If the completion itself defines one of ``names``, the
            program is the complete lines of the prefix and then the completion. Otherwise the completion is the rest of
            the prefix's last function, up to the first line without indentation.
        names: the names that the tests take from the program.
        given: the part of the solution that the prompt gives; the completion continues it in the same way. If the
            completion itself defines one of ``names``, this part is kept only if it is complete Python, such as a line
            of imports, and not half a loop.
    """
    text = _answer(completion)
    selected, defines_name = _selected(text, prefix + given, names)
    code = selected.code
    if given and (not defines_name or _is_whole(prefix + given)):
        prefix += given
    if defines_name:
        prefix = _whole(prefix)
    line = 1 + len(NEW_LINE.findall(prefix))
    if prefix and defines_name:
        code = f"{prefix}\n{code}"
        line += 1
    elif prefix:
        is_body = code.lstrip("\r\n")[:1].isspace()  # keep the indentation of a function's body
        code = prefix + _body(code if is_body else selected.indented)
    future, rest = _future_first(code)
    position = -1 if future else len(completion) - len(text) + selected.start
    return future + rest, line, position


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Part of a completion that may be its program.

    Attributes:
        code: the program, without the indentation of its fence.
        indented: the same text as it stands in the completion.
        start: where the code begins in the text after the thought.
    """

    code: str
    indented: str
    start: int

    def defines_any(self, names: Sequence[str]) -> bool:
        return not _defined(self.code).isdisjoint(names)


def _selected(text: str, prefix: str, names: Sequence[str]) -> tuple[_Candidate, bool]:
    """Return the program in a text by the rules of ``_placed``, and whether it defines one of ``names``."""
    fences = _Fences(text)
    blocks = fences.blocks()
    candidates = []
    for block in blocks:
        indented = text[block.start : block.end]
        candidates.append(_Candidate(_dedented(indented, block.indent), indented, block.start))
    defining = [candidate for candidate in candidates if candidate.defines_any(names)]
    if defining and _is_python(defining[-1].code):
        return defining[-1], True
    end, _ = fences.end_of_block(0, "```", 0)
    before = text[:end]
    is_code = _is_python(before)
    if not is_code:
        before = text[: blocks[0].fence] if blocks else text
    unfenced = _Candidate(before, before, 0)
    if unfenced.defines_any(names) and (is_code or not defining):
        return unfenced, True
    if defining:
        return defining[-1], True
    is_body_of_prefix = prefix != "" and BODY.match(before) is not None
    if is_body_of_prefix or not candidates:
        return unfenced, False
    return candidates[-1], False


def _body(code: str) -> str:
    """Return the first line of the code and the lines after it that are indented or empty."""
    lines = code.splitlines(keepends=True)
    end = 1
    while end < len(lines) and lines[end][0] in " \t\r\n":
        end += 1
    return "".join(lines[:end])


def _answer(completion: str) -> str:
    """Return the text after the last ``</think>``. A later ``</think>`` inside a code block does not count."""
    _, mark, text = completion.partition(THOUGHT)
    if not mark:
        return completion
    outside = ""  # the text with its code blocks replaced by spaces
    place = 0
    for block in _Fences(text).blocks() if THOUGHT in text else ():
        outside += text[place : block.start] + " " * (block.end - block.start)
        place = block.end
    last = (outside + text[place:]).rfind(THOUGHT)
    return text if last < 0 else text[last + len(THOUGHT) :]


@dataclasses.dataclass(frozen=True)
class _Block:
    """Code between fences: where it begins and ends in the text, and where its opening fence begins.

    ``indent`` is the indentation of the fence. It is None if the fence follows other text on its line, as in a list
    item.
    """

    start: int
    end: int
    fence: int
    indent: str | None


class _Fences:
    """Fences of one text."""

    def __init__(self, text: str):
        self.text = text
        self._closings = list(CLOSING.finditer(text))
        self._places = [found.start() for found in self._closings]
        self._tries = MAX_TRIES

    def blocks(self) -> list[_Block]:
        """Return each fenced block, in order. A fence at the end of the text does not open a block."""
        blocks: list[_Block] = []
        place = 0
        while True:
            opening = OPENING.search(self.text, place)
            if opening is None or opening.end() >= len(self.text):
                return blocks
            indent = opening["indent"]
            before = indent or ""
            if indent is None:
                marker = MARKER.match(opening["before"] or "")
                before = marker[0] if marker else ""
            start = opening.end() + 1
            fence = opening["ticks"] or opening["tildes"] or opening["behind"]
            end, place = self.end_of_block(start, fence, len(before.expandtabs(4)))
            blocks.append(_Block(start, end, opening.start(), indent))

    def end_of_block(self, start: int, fence: str, width: int) -> tuple[int, int]:
        """Return where the code of a block that begins at ``start`` ends, and where the text after its fence begins.

        The first closing fence by CommonMark's rules ends the block: a line of the same character, at least as many,
        indented by at most three columns more than the opening fence. If the code up to there is not valid Python, the
        block ends at the first candidate that makes it valid. A fence in a docstring therefore does not close the
        block, and a fence at the end of a line of code can close it.

        Args:
            fence: the opening fence.
            width: number of columns that indent it.
        """
        strict: tuple[int, int] | None = None
        loose: tuple[int, int] | None = None
        readings = []
        first = bisect.bisect_left(self._places, start)
        for found in self._closings[first : first + MAX_CLOSINGS]:
            mark = found["fence"] or found["late"]
            if mark[0] != fence[0] or len(mark) < len(fence):
                continue
            is_own_line = found["fence"] is not None
            begin = found.start() if is_own_line else found.start("late")
            reading = (begin, found.end())
            readings.append(reading)
            is_near = is_own_line and len(found["indent"].expandtabs(4)) <= width + 3
            if is_near and found["more"].strip():
                loose = loose or reading
            elif is_near:
                strict = strict or reading
        unclosed = (len(self.text), len(self.text))
        default = strict or loose or unclosed
        if not readings:
            return default
        for reading in dict.fromkeys([default, *readings, unclosed]):
            if self._is_python(start, reading[0]):
                return reading
        return default

    def _is_python(self, start: int, end: int) -> bool:
        self._tries -= 1
        return self._tries >= 0 and _is_python(self.text[start:end])


def _is_python(code: str) -> bool:
    """Return whether the text is valid Python, by itself or as an indented body."""
    if not code.strip() or len(code) > MAX_PARSED:
        return False
    if _is_whole(code):
        return True
    is_indented = code.lstrip("\r\n")[:1].isspace()
    return is_indented and _is_whole(f"if 1:\n{code}")


def _dedented(code: str, indent: str | None) -> str:
    """Return the code without the indentation of its fence, as Markdown defines it. Line numbers do not change.

    If the fence follows other text on its line (None), the indentation of the first line of code is removed.
    """
    if indent is None:
        first_line = re.match(r"(?:[ \t]*\r?\n)*([ \t]*)", code)
        indent = first_line[1] if first_line else ""
    has_indent = re.match(rf"(?:[ \t]*\r?\n)*{indent}", code)
    if not indent or not has_indent:
        return code
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE)


def _future_first(code: str) -> tuple[str, str]:
    """Return the imports from ``__future__``, which must come first, and the rest of the code."""
    imports = "".join(line.strip() + "\n" for line in FUTURE.findall(code))
    return imports, FUTURE.sub("", code)


def _is_whole(code: str) -> bool:
    errors = (SyntaxError, ValueError, RecursionError, MemoryError)
    with contextlib.suppress(*errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # suppress the warnings about invalid escape sequences
        return bool(ast.parse(code))
    return False


def _defined(code: str) -> set[str]:
    """Return the names that the code defines."""
    defined = set()
    for alternatives in DEFINITION.findall(code):
        defined.update(alternatives)
    return defined - {""}


def run(code: str, settings: dict[str, Any], *, stdin: str = "", tests: Tests | None = None) -> Result:
    """Run the program in this process's sandbox.

    Raises:
        SandboxError: the sandbox failed.
    """
    sandbox = _sandbox(settings.get("isolation", ""), settings.get("required", False))
    return sandbox.run(code, stdin=stdin, name=NAME, limits=_limits(settings), tests=tests)


def _limits(settings: dict[str, Any]) -> Limits:
    limits = {name: value for name, value in settings.items() if name not in OF_SANDBOX}
    return Limits(**limits)


_SANDBOXES: dict[tuple, Sandbox] = {}  # the sandboxes live as long as the process


def _sandbox(isolation: str = "", required: bool = False) -> Sandbox:
    key = (isolation, required)
    if key not in _SANDBOXES:
        _SANDBOXES[key] = Sandbox(isolation=isolation, required=required)
    return _SANDBOXES[key]


def close() -> None:
    """End this process's sandboxes. The next program starts a new sandbox."""
    while _SANDBOXES:
        _SANDBOXES.popitem()[1].close()
