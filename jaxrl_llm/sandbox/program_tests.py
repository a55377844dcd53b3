"""Tests of a program. The tests and the program run in two processes that exchange messages.

    process of the tests                              process of the program
    --------------------                              ----------------------
    wait                                              run the program's text to its end or its exception
    ask for the names under test           --->
                                           <---       their values, and the exception of the text
    run the tests with these values        <-->       calls (calls.py)
    write the report

Tests have the real built-ins and modules of a fresh interpreter. They use only the names under test from the program.
If the program's text raises, exits or waits for input, the tests use the names that it defined before.

Owns: one run of tests and its report. Does not know: processes, limits. This module imports only the standard library.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import sys
import types
from collections.abc import Callable
from typing import Any

from jaxrl_llm.sandbox.calls import TESTS, Peer, PeerError, builtin_exception

MAX_LINES = 10**5  # largest number of line numbers in a report
LIMITS = ("time", "cpu", "memory", "processes", "output", "disk", "open_files")
LIMITS_BY_ERRNO: dict[int | None, str] = {
    errno.EAGAIN: "processes",
    errno.ENOSPC: "disk",
    errno.EFBIG: "disk",
    errno.EDQUOT: "disk",
    errno.EMFILE: "open_files",
    errno.ENOMEM: "memory",
}


def judge(job: dict[str, Any], peer: Peer) -> dict[str, Any]:
    """Run the tests of ``job`` and return the report. The process of the tests calls this function.

    Returns:
        "finished": True if no test raised and the program's process answered until the end.
        "exception": type and text of the exception of the first failing test; "" without an exception.
        "limit": the resource limit that caused the exception; "" if no limit did.
        "value": the repr of the value of ``job["expression"]``; None without an expression.
        "lines": numbers of the program's lines that ran, if ``job["traced"]`` is set.
    """
    report: dict[str, Any] = {
        "finished": False,
        "exception": "",
        "limit": "",
        "value": None,
        "lines": [],
    }
    module = types.ModuleType(TESTS)
    sys.modules[TESTS] = module
    loading: dict[str, Any] = {}
    try:
        loading = peer.ask("names", job["names"])
        values = _values_under_test(job["names"], loading, peer)
        vars(module).update(values)
        for number, text in enumerate(job["setup"]):
            exec(
                compile(text, f"<setup {number}>", "exec", dont_inherit=True),
                vars(module),
            )
            vars(module).update(values)
        for test in job["tests"]:
            _run_test(test, vars(module), continues_after_failure=job["traced"])
        if job["expression"]:
            report["value"] = repr(eval(job["expression"], vars(module)))
        if job["traced"]:
            report["lines"] = _lines(peer)
        report["finished"] = not peer.broken
    except (PeerError, SystemExit):
        pass
    except BaseException as error:
        is_missing = isinstance(error, NameError) and error.name in job["names"]
        if is_missing and loading["raised"]:
            report["exception"] = loading["raised"]
        else:
            report["exception"] = describe(error)
        report["limit"] = loading["limit"] if is_missing else limit_behind(error)
    return report


def _values_under_test(names: list[str], loading: Any, peer: Peer) -> dict[str, Any]:
    """Return the values of the names under test, by name.

    A class of exceptions becomes a new class with the same name and built-in base. A name that the program does not
    define but that is a built-in becomes a function that raises NameError.

    Args:
        loading: the answer of the program's process to the question "names".

    Raises:
        PeerError: the answer does not have the form of ``attend``.
    """
    match loading:
        case {
            "values": dict(values),
            "exceptions": dict(exceptions),
            "raised": str(),
            "limit": str(limit),
        }:
            if limit and limit not in LIMITS:
                raise PeerError("the program's process has reported an unknown limit")
        case _:
            raise PeerError("the answer to the request for the names is invalid")
    for name in names:
        if name in exceptions:
            base = _first_builtin_exception(exceptions[name])
            peer.exceptions[name] = type(name, (base,), {"__module__": TESTS})
    values_by_name: dict[str, Any] = {}
    for name in names:
        if name in values | exceptions:
            values_by_name[name] = peer.exceptions.get(name, values.get(name))
    for name in names:
        if name not in values_by_name and hasattr(builtins, name):
            values_by_name[name] = _undefined_function(name)
    return values_by_name


def _first_builtin_exception(names: Any) -> type[BaseException]:
    """Return the first built-in exception class among these names, or ``Exception`` if there is none."""
    for name in names:
        kind = builtin_exception(name)
        if kind:
            return kind
    return Exception


def _undefined_function(name: str) -> Callable[..., None]:
    """Return a function that raises NameError. It hides the built-in of the same name from the tests."""

    def undefined(*_: Any, **__: Any) -> None:
        raise NameError(f"name {name!r} is not defined", name=name)

    return undefined


def _run_test(test: str, names: dict[str, Any], *, continues_after_failure: bool) -> None:
    """Run one test.

    Args:
        names: global names of the test.
        continues_after_failure: suppress the exception of a failing test, so that the next test runs.
    """
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), names)
    except PeerError:
        raise
    except BaseException:
        if not continues_after_failure:
            raise


def _lines(peer: Peer) -> list[int]:
    """Return the numbers of the program's lines that ran, or [] if the answer is not a list of numbers."""
    lines = peer.ask("lines")
    if type(lines) is not list or len(lines) > MAX_LINES:
        return []
    if not all(type(line) is int for line in lines):
        return []
    return lines


def describe(error: BaseException) -> str:
    """Return the type and the text of an exception, or only the type if the text raises an exception."""
    try:
        return f"{type(error).__name__}: {str(error)[:300]}".removesuffix(": ")
    except BaseException:
        return type(error).__name__


def limit_behind(error: BaseException) -> str:
    """Return the resource limit that caused an exception, or "" if no limit did."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        return LIMITS_BY_ERRNO.get(error.errno, "")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "processes"
    return ""


def attend(job: dict[str, Any], peer: Peer, names: dict[str, Any], filename: str) -> None:
    """Run the program's text, then answer the questions of its tests. The process of the program calls this function.

    Args:
        names: global names of the program.
        filename: file name of the program's text in tracebacks and line counts.
    """
    lines: set[int] = set()

    def record_line(frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != filename:
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return record_line

    # The setup can fail here because it needs names of the program. The process of the tests runs the setup again.
    with contextlib.suppress(Exception):
        exec(compile(job["setup"], "<setup>", "exec", dont_inherit=True), names)
    raised: BaseException | None = None
    if job["traced"]:
        sys.settrace(record_line)
    try:
        exec(compile(job["code"], filename, "exec", dont_inherit=True), names)
    except BaseException as error:
        raised = error

    def answer_names(requested: list[str]) -> dict[str, Any]:
        values = {name: names[name] for name in requested if name in names}
        exceptions = _exception_classes(values)
        return {
            "values": {name: value for name, value in values.items() if name not in exceptions},
            "exceptions": {name: _base_names(kind) for name, kind in exceptions.items()},
            "raised": "" if raised is None or isinstance(raised, SystemExit) else describe(raised),
            "limit": "" if raised is None else limit_behind(raised),
        }

    def answer_lines() -> list[int]:
        return sorted(lines)

    peer.program = names["__name__"]
    peer.operations = {
        "names": answer_names,
        "lines": answer_lines,
        "await": asyncio.run,
    }
    peer.serve()


def _exception_classes(values: dict[str, Any]) -> dict[str, type[BaseException]]:
    """Return the exception classes among ``values`` that the program has defined, by name."""
    classes: dict[str, type] = {}
    for name, value in values.items():
        if isinstance(value, type) and value.__module__ != "builtins":
            classes[name] = value
    return {name: kind for name, kind in classes.items() if issubclass(kind, BaseException)}


def _base_names(kind: type) -> list[str]:
    """Return the names of the classes that ``kind`` derives from, nearest first."""
    return [base.__name__ for base in kind.__mro__[1:]]
