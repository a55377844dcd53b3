"""Code as an answer: its program is found in a completion and run against a question's tests. Four reward functions:

    passed      1 where all tests pass, else 0
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
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_llm.environments.sandbox import Limits, Result, Sandbox

FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
DEFINITION = re.compile(r"^(?:async[ ]+def|def|class)[ ]+(\w+)|^(\w+)[ ]*=", re.MULTILINE)
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
OF_SANDBOX = ("isolation", "required")  # settings beside the limits
MAX_FEEDBACK = 1000  # characters of a test
NAME = "program"  # of the module: what stands under `if __name__ == "__main__"` is not what is tested


def passed(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """1.0 where all tests of the question pass, one after the other within one set of limits, else 0.0."""
    return [float(all(rates)) for rates, _ in _verdicts(completions, tests, sandbox, columns, apart=False)]


def share(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """The share of tests that pass, each in a process and with limits of its own.

    After a test that takes too long the others of its completion are not run, and have failed.
    """
    return [sum(rates) / len(rates) for rates, _ in _verdicts(completions, tests, sandbox, columns, apart=True)]


def stopped(prompts: list, completions: list[str], *, tests: list, sandbox: list, **columns) -> list[float]:
    """1.0 where all tests in a row came to a limit of the sandbox (of time, memory, output and the like), else 0.0."""
    return [float(is_stopped) for _, is_stopped in _verdicts(completions, tests, sandbox, columns, apart=False)]


def parses(prompts: list, completions: list[str], *, sandbox: list, **columns) -> list[float]:
    """1.0 where the code of the completion is there and is Python, else 0.0."""
    scores = []
    for i, completion in enumerate(completions):
        code = program(completion, columns["prefix"][i], columns["names"][i])
        result = run("import ast, sys\nassert ast.parse(sys.stdin.read()).body", sandbox[i], stdin=code)
        scores.append(float(result.finished))
    return scores


def _verdicts(
    completions: Sequence[str], tests: list, sandbox: list, columns: dict[str, list], *, apart: bool
) -> Iterable[tuple[list[bool], bool]]:
    """For each completion: which tests pass, and whether a limit ended one."""
    for i, completion in enumerate(completions):
        code = _code(completion, {key: values[i] for key, values in columns.items()})
        parts = tests[i] if apart else ["\n".join(tests[i])]
        verdicts, is_stopped = [], False
        for test in parts:
            result = run(f"{code}\n{test}", sandbox[i])
            verdicts.append(result.finished)
            is_stopped |= bool(result.limit)
            if result.limit in ("time", "cpu"):
                break
        yield verdicts + [False] * (len(parts) - len(verdicts)), is_stopped


def _code(completion: str, columns: dict[str, Any]) -> str:
    return f"{columns['setup']}\n{program(completion, columns['prefix'], columns['names'])}"


def feedback(completion: str, *, shown_tests: Sequence[str], sandbox: dict[str, Any], **columns) -> str:
    """Which of the tests that are shown fail, and how: "" where none does.

    Where a test says ``assert expression == value``, what the expression gave instead; else the error or the limit.

    Args:
        shown_tests, sandbox, columns: those of one question of ``prompts.source="code"``.

    Raises:
        SandboxError: the sandbox failed.
    """
    code, said = _code(completion, columns), []
    for test in shown_tests:
        result = run(f"{code}\n{test}", sandbox)
        if result.finished:
            continue
        how = f"came to the limit of {result.limit}" if result.limit else result.exception or "left before its end"
        compared = _compared(test)
        if result.exception.startswith("AssertionError") and compared:
            got = run(f"{code}\n{compared}", sandbox)
            how = f"{compared} gives {got.value}" if got.finished else how
        said.append(f"{test.strip()}\nfailed: {how}"[:MAX_FEEDBACK])
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


def program(completion: str, prefix: str, names: Sequence[str]) -> str:
    """The code in a completion.

    The last block between fences that defines one of ``names``, else the last block; without fences all of it. What a
    model thought before ``</think>`` is no answer.

    Args:
        prefix: code that the completion goes on from, "" for none. Where the completion defines one of ``names`` itself
            it stands behind the prefix; else it is the rest of its last function, to the first line without indent.
        names: what the tests call.
    """
    text = completion.rpartition("</think>")[2]
    blocks = FENCE.findall(text) or [text]
    defining = [block for block in blocks if _defined(block) & set(names)]
    code = (defining or blocks)[-1]
    if prefix and defining:
        code = f"{prefix}\n{code}"
    elif prefix:
        lines = code.splitlines(keepends=True)
        end = next((i for i, line in enumerate(lines) if i and line[0] not in " \t\r\n"), len(lines))
        code = prefix + "".join(lines[:end])
    return "".join(line.strip() + "\n" for line in FUTURE.findall(code)) + FUTURE.sub("", code)


def _defined(code: str) -> set[str]:
    return {name for pair in DEFINITION.findall(code) for name in pair if name}


def run(code: str, settings: dict[str, Any], *, stdin: str = "") -> Result:
    """The program in this process's sandbox.

    Raises:
        SandboxError: the sandbox failed.
    """
    limits = {name: value for name, value in settings.items() if name not in OF_SANDBOX}
    own = {name: value for name, value in settings.items() if name in OF_SANDBOX}
    return _sandbox(**own).run(code, stdin=stdin, name=NAME, limits=Limits(**limits))


_SANDBOXES: dict[tuple, Sandbox] = {}  # for the life of the process, with which they end


def _sandbox(isolation: str = "", required: bool = False) -> Sandbox:
    if (isolation, required) not in _SANDBOXES:
        _SANDBOXES[isolation, required] = Sandbox(isolation=isolation, required=required)
    return _SANDBOXES[isolation, required]


def close() -> None:
    """End this process's sandboxes; the next program starts another."""
    while _SANDBOXES:
        _SANDBOXES.popitem()[1].close()
