"""Code as an answer: its program is found in a completion and run against a question's tests. Reward functions:

    passed      1 where all tests pass, else 0
    graded      1 where all tests pass, -0.3 where one fails, -0.6 at another error, -1 where there is no program
    covered     the same, and what no test has run is masked for ``algorithm.reshaping=reward_mask`` (StepCoder)
    by_turn     by turn: 1 or -1 for the last, whether all tests pass; -0.2 for one before it without code (RLEF)
    share       the share of tests that pass
    parses      1 where what is taken for its program is Python, whatever it does: for models that do not write it yet
    stopped     1 where a test was ended by a limit of the sandbox, else 0: to be watched, with weight 0

The columns that they take are those of ``prompts.source="code"`` (questions/tasks/code.py). A test passes when the
program and the test after it run to their end; one that raises, leaves early or is ended by a limit has failed. Where
the sandbox itself fails nothing is known of the completion, and the call raises: a failed reward, never a 0.

Tests run in the process of the code that they test, as MBPP's and HumanEval's do: code that sets out to deceive them
(an ``__eq__`` that is always true) can, and no sandbox sees it.

``feedback`` is what a program's author may be told between two tries: how it does on the tests that the question shows,
in words, and ``answer`` tells it (RLEF, Gehring et al. 2024, arXiv:2410.02089: public tests as feedback over turns, all
tests as reward).

Owns: which part of a completion is code, verdicts. Does not know: where tests come from, jax.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_llm.environments.sandbox import Limits, Result, Sandbox

# One opens at the start of a line, or with the name of a language anywhere in it: "Sure: ```python".
FENCE = re.compile(r"(?:^([ \t]*)```[^\n]*|```\w[\w+#-]*[ \t\r]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
BODY = re.compile(r"(?:[ \t]*\r?\n)*(?:[ ]{2}|\t)")  # as lines of a function begin, and sentences do not
DEFINITION = re.compile(r"^(?:async[ ]+def|def|class)[ ]+(\w+)|^(\w+)[ ]*=", re.MULTILINE)
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
NEW_LINE = re.compile(r"\r\n|\r|\n")
OF_SANDBOX = ("isolation", "required")  # settings beside the limits
TOO_LONG = ("time", "cpu")  # limits
MAX_FEEDBACK = 1000  # characters of a test
JOINT = "\n\npass\n"  # before a test: no backslash, decorator or head of a block that a program ends with takes it in
NAME = "program"  # of the module: what stands under `if __name__ == "__main__"` is not what is tested
# Runs a program and its tests line by line and ends with the lines [first, last] of each statement that never ran. Of a
# statement with a body these are its head's; what Python makes no code of, such as a docstring, is never among them.
TRACED = """
import ast, json, sys
code, setup, tests = json.load(sys.stdin)
ran, names, where = set(), {"__name__": "program"}, "<answer>"
def look(frame, event, argument):
    if frame.f_code.co_filename == where:
        if event == "line":
            ran.add(frame.f_lineno)
        return look
tree = ast.parse(code)
exec(setup, names)
sys.settrace(look)
for text, place in [(code, where), *((test, "<test>") for test in tests)]:
    try:
        exec(compile(text, place, "exec"), names)
    except BaseException:
        pass
sys.settrace(None)
left = []
for node in ast.walk(tree):
    if not isinstance(node, (ast.stmt, ast.excepthandler)) or isinstance(node, (ast.Global, ast.Nonlocal)):
        continue
    if isinstance(node, (ast.Expr, ast.AnnAssign)) and isinstance(node.value, ast.Constant | None):
        continue
    body = getattr(node, "body", None)
    first = min([node.lineno, *(other.lineno for other in getattr(node, "decorator_list", ()))])
    last = max(first, body[0].lineno - 1 if body else node.end_lineno)
    if ran.isdisjoint(range(first, last + 1)):
        left.append([first, last])
left
"""


def passed(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """1.0 where all tests of the question pass, one after the other within one set of limits, else 0.0."""
    return [float(result.finished) for (result,) in _results(completions, tests, sandbox, columns, apart=False)]


def graded(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """1.0 where all tests pass; else -1.0 where there is no Python, -0.3 at the first assertion that fails, or -0.6.

    Source: the rewards of StepCoder, Dou et al. 2024, arXiv:2402.01391, by a compiler's error, one at run time or a
        test. Differs: a program that comes to a limit of the sandbox, or leaves early, is an error at run time, which
        is ours.
    """
    return [score for score, _ in _graded(prompts, completions, tests=tests, sandbox=sandbox, **columns)]


def _graded(
    prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns
) -> list[tuple[float, Result]]:
    results = [result for (result,) in _results(completions, tests, sandbox, columns, apart=False)]
    is_code = parses(prompts, completions, sandbox=sandbox, **columns)
    of_error = [-0.3 if result.exception.startswith("AssertionError") else -0.6 for result in results]
    kinds = zip(results, is_code, of_error, strict=True)
    return [(1.0 if result.finished else error if is_python else -1.0, result) for result, is_python, error in kinds]


def by_turn(
    prompts: list, completions: list[str], *, messages: list, tests: list, sandbox: list, **columns
) -> list[list[float]]:
    """For each turn: 1.0 or -1.0 for the last one, whether all tests pass; -0.2 for one before it that is no Python.

    An episode of T turns that passes is given 1.2 - T / 5 at least, and one that does not -1 at most: set
    ``rewards.pass_threshold`` between the two, to 0 for up to six turns.

    Source: RLEF, Gehring et al. 2024, arXiv:2410.02089, section 2.2.
    """
    rewards = []
    for i, score in enumerate(passed(prompts, completions, tests=tests, sandbox=sandbox, **columns)):
        earlier = [message["content"] for message in messages[i] if message["role"] == "assistant"][:-1]
        own = {key: [values[i]] * len(earlier) for key, values in columns.items()}
        is_code = parses([prompts[i]] * len(earlier), earlier, sandbox=[sandbox[i]] * len(earlier), **own)
        rewards.append([*(0.0 if valid else -0.2 for valid in is_code), 2.0 * score - 1.0])
    return rewards


def covered(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[dict[str, Any]]:
    """As ``graded``, with the statements of the program that no test has run as ``masked`` (reward_mask).

    The program and its tests run once more for this, line by line, each test to its end or its error; where that comes
    to a limit, or took too long before, nothing is masked. Lines are what is told apart: of two statements on one line
    both ran, or neither.

    Source: fine-grained optimisation of StepCoder, Dou et al. 2024, arXiv:2402.01391.
    """
    scores = []
    for i, (reward, result) in enumerate(_graded(prompts, completions, tests=tests, sandbox=sandbox, **columns)):
        own = {key: values[i] for key, values in columns.items()}
        masked = [] if result.limit in TOO_LONG else _left_out(completions[i], tests[i], sandbox[i], own)
        scores.append({"reward": reward, "masked": masked})
    return scores


def _left_out(completion: str, tests: list[str], sandbox: dict[str, Any], columns: dict[str, Any]) -> list[list[int]]:
    """Spans [start, stop) of characters of the completion, whole lines: statements that no test has run."""
    code, line, start = _placed(completion, columns["prefix"], columns["names"], columns["given"])
    if start < 0:
        return []
    result = run(TRACED, sandbox, stdin=json.dumps([code, columns["setup"], tests]))
    begins = [start, *(start + end.end() for end in NEW_LINE.finditer(completion[start:])), len(completion)]
    if not result.finished or len(result.value or "") >= 1024 * _limits(sandbox).output_kb:
        return []
    try:
        own = {(max(first, line) - line, last - line + 1) for first, last in json.loads(result.value) if last >= line}
        return sorted([begins[first], begins[min(last, len(begins) - 1)]] for first, last in own)
    except (TypeError, ValueError, LookupError, RecursionError):  # what a program that changes Python has put there
        return []


def share(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """The share of tests that pass, each in a process and with limits of its own.

    After a test that takes too long the others of its completion are not run, and have failed.
    """
    several = zip(_results(completions, tests, sandbox, columns, apart=True), tests, strict=True)
    return [sum(result.finished for result in results) / len(every) for results, every in several]


def stopped(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """1.0 where all tests in a row came to a limit of the sandbox (of time, memory, output and the like), else 0.0."""
    return [float(bool(result.limit)) for (result,) in _results(completions, tests, sandbox, columns, apart=False)]


def parses(prompts: list, completions: list[str], *, sandbox: list, **columns) -> list[float]:
    """1.0 where the code of the completion is there and is Python, else 0.0."""
    scores = []
    for i, completion in enumerate(completions):
        code = program(completion, columns["prefix"][i], columns["names"][i], columns["given"][i])
        result = run("import ast, sys\nassert ast.parse(sys.stdin.read()).body", sandbox[i], stdin=code)
        scores.append(float(result.finished))
    return scores


def _results(
    completions: Sequence[str], tests: list, sandbox: list, columns: dict[str, list], *, apart: bool
) -> Iterable[list[Result]]:
    """For each completion what became of its tests, in a row or apart; none after one that takes too long."""
    for i, completion in enumerate(completions):
        code = _code(completion, {key: values[i] for key, values in columns.items()})
        results: list[Result] = []
        for test in tests[i] if apart else ["\n".join(tests[i])]:
            results.append(run(f"{code}{JOINT}{test}", sandbox[i]))
            if results[-1].limit in TOO_LONG:
                break
        yield results


def _code(completion: str, columns: dict[str, Any]) -> str:
    own = program(completion, columns["prefix"], columns["names"], columns["given"])
    return "".join(_future_first(f"{columns['setup']}\n{own}"))


def feedback(completion: str, *, shown_tests: Sequence[str], sandbox: dict[str, Any], **columns) -> str:
    """Which of the tests that are shown fail, and how: "" where none does.

    Where a test says ``assert expression == value``, what the expression gave instead; else the error or the limit.
    None is tried after one that takes too long.

    Args:
        shown_tests, sandbox, columns: those of one question of ``prompts.source="code"``.

    Raises:
        SandboxError: the sandbox failed.
    """
    code, said = _code(completion, columns), []
    for test in shown_tests:
        result = run(f"{code}{JOINT}{test}", sandbox)
        if result.finished:
            continue
        how = f"came to the limit of {result.limit}" if result.limit else result.exception or "left before its end"
        compared = _compared(test)
        if result.exception.startswith("AssertionError") and compared:
            got = run(f"{code}{JOINT}{compared}", sandbox)
            how = f"{compared} gives {got.value}" if got.finished else how
        said.append(f"{test.strip()}\nfailed: {how}"[:MAX_FEEDBACK])
        if result.limit in TOO_LONG:
            break
    return "\n\n".join(said)


def answer(prompt: Any, turns: Sequence[str], **columns) -> str | None:
    """An environment (``environments.factory``): ``feedback`` on the newest turn's program; None where none fails."""
    said = feedback(turns[-1], **columns)
    return f"{said}\n\nTry again." if said else None


def _compared(test: str) -> str:
    """The expression of a test that is ``assert expression == value`` alone, else ""."""
    body = ast.parse(test).body
    match body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()]))]:
            return ast.unparse(left)
    return ""


def program(completion: str, prefix: str, names: Sequence[str], given: str = "") -> str:
    """The code in a completion."""
    return _placed(completion, prefix, names, given)[0]


def _placed(completion: str, prefix: str, names: Sequence[str], given: str) -> tuple[str, int, int]:
    """The code in a completion; its first line, from 1, that is the completion's; where that begins in the completion.

    -1 for the latter where lines have changed places.

    The last block between fences that defines one of ``names``; else what stands before the first fence, where that
    does, or is a body for the prefix: the prompt may have opened the fence. Else the last block; without fences all of
    it. What a model thought before ``</think>`` is no answer.

    Args:
        prefix: code that the completion goes on from, "" for none. Where the completion defines one of ``names`` itself
            it stands behind the lines of the prefix that are whole; else it is the rest of its last function, to the
            first line without indent.
        names: what the tests call.
        given: the part of the solution that the prompt gives, which the completion goes on from likewise. Before one
            that defines one of ``names`` itself it stands where it is whole: a line of imports, and not half a loop.
    """
    text = completion.rpartition("</think>")[2]
    fences = list(FENCE.finditer(text))
    blocks = [(_dedented(found[2], found[1]), found[2], found.start(2)) for found in fences]
    defining = [block for block in blocks if _defined(block[0]) & set(names)]
    if not defining:
        before = text[: fences[0].start()] if fences else text
        whole = (before, before, 0)
        defining = [whole] if _defined(before) & set(names) else []
        blocks = [whole] if not fences or (prefix + given and BODY.match(before)) else blocks
    code, indented, start = (defining or blocks)[-1]
    if given and not (defining and not _is_whole(prefix + given)):
        prefix += given
    while prefix and defining and not _is_whole(prefix):  # a function without a body, which is written anew
        prefix = prefix[: prefix.rstrip("\n").rfind("\n") + 1]
    line = 1 + len(NEW_LINE.findall(prefix))
    if prefix and defining:
        code, line = f"{prefix}\n{code}", line + 1
    elif prefix:
        is_body = code.lstrip("\r\n")[:1].isspace()  # or else its indentation is the body's, and not its fence's
        lines = (code if is_body else indented).splitlines(keepends=True)
        end = next((i for i, one in enumerate(lines) if i and one[0] not in " \t\r\n"), len(lines))
        code = prefix + "".join(lines[:end])
    future, rest = _future_first(code)
    return future + rest, line, -1 if future else len(completion) - len(text) + start


def _dedented(code: str, indent: str | None) -> str:
    """Without the indentation of its fence, as Markdown has it, where it has that; its lines stay what they are.

    That of its first line, where the fence opens behind other text, as on a list item's own line (None).
    """
    indent = re.match(r"(?:[ \t]*\r?\n)*([ \t]*)", code)[1] if indent is None else indent
    has_it = re.match(rf"(?:[ \t]*\r?\n)*{indent}", code)
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE) if indent and has_it else code


def _future_first(code: str) -> tuple[str, str]:
    """Its imports from ``__future__``, which no line may stand before, and the rest."""
    return "".join(one.strip() + "\n" for one in FUTURE.findall(code)), FUTURE.sub("", code)


def _is_whole(code: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a backslash that should be two
        return bool(ast.parse(code))
    return False


def _defined(code: str) -> set[str]:
    return {name for pair in DEFINITION.findall(code) for name in pair if name}


def run(code: str, settings: dict[str, Any], *, stdin: str = "") -> Result:
    """The program in this process's sandbox.

    Raises:
        SandboxError: the sandbox failed.
    """
    own = {name: value for name, value in settings.items() if name in OF_SANDBOX}
    return _sandbox(**own).run(code, stdin=stdin, name=NAME, limits=_limits(settings))


def _limits(settings: dict[str, Any]) -> Limits:
    return Limits(**{name: value for name, value in settings.items() if name not in OF_SANDBOX})


_SANDBOXES: dict[tuple, Sandbox] = {}  # for the life of the process, with which they end


def _sandbox(isolation: str = "", required: bool = False) -> Sandbox:
    if (isolation, required) not in _SANDBOXES:
        _SANDBOXES[isolation, required] = Sandbox(isolation=isolation, required=required)
    return _SANDBOXES[isolation, required]


def close() -> None:
    """End this process's sandboxes; the next program starts another."""
    while _SANDBOXES:
        _SANDBOXES.popitem()[1].close()
