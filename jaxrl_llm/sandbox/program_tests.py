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
from typing import Any

from jaxrl_llm.sandbox.calls import TESTS, Peer, PeerError

MAX_LINES = 10**5  # largest number of line numbers in a report
LIMITS = ("time", "cpu", "memory", "processes", "output", "disk", "open_files")


def judge(job: dict[str, Any], peer: Peer) -> dict[str, Any]:
    """Run the tests of ``job`` and return the report. The process of the tests calls this function.

    Returns:
        "finished": True if no test raised and the program's process answered until the end.
        "exception": type and text of the exception of the first failing test; "" without an exception.
        "limit": the resource limit that caused the exception; "" if no limit did.
        "value": the repr of the value of ``job["expression"]``; None without an expression.
        "lines": numbers of the program's lines that ran, if ``job["traced"]`` is set.
    """
    report: dict[str, Any] = {"finished": False, "exception": "", "limit": "", "value": None, "lines": []}
    module = types.ModuleType(TESTS)
    sys.modules[TESTS] = module
    loading: dict[str, Any] = {}
    try:
        loading = peer.ask("names", job["names"])
        given = _given(job["names"], loading, peer)
        vars(module).update(given)
        for number, text in enumerate(job["setup"]):
            exec(compile(text, f"<setup {number}>", "exec", dont_inherit=True), vars(module))
            vars(module).update(given)
        for test in job["tests"]:
            _run_test(test, vars(module), goes_on=job["traced"])
        if job["expression"]:
            report["value"] = repr(eval(job["expression"], vars(module)))
        report["lines"] = _lines(peer) if job["traced"] else []
        report["finished"] = not peer.broken
    except (PeerError, SystemExit):
        pass
    except BaseException as error:
        missing = isinstance(error, NameError) and error.name in job["names"]
        report["exception"] = loading["raised"] if missing and loading["raised"] else describe(error)
        report["limit"] = loading["limit"] if missing else limit_behind(error)
    return report


def _given(names: list[str], loading: Any, peer: Peer) -> dict[str, Any]:
    """Return the values of the names under test, by name.

    A class of exceptions becomes a new class with the same name and built-in base. A name that the program does not
    define but that is a built-in becomes a function that raises NameError.

    Args:
        loading: the answer of the program's process to the question "names".

    Raises:
        PeerError: the answer does not have the form of ``attend``.
    """
    match loading:
        case {"values": dict(values), "exceptions": dict(exceptions), "raised": str(), "limit": str(limit)}:
            if limit and limit not in LIMITS:
                raise PeerError("no such limit")
        case _:
            raise PeerError("no answer to the first question")
    for name in names:
        if name not in exceptions:
            continue
        base = next((kind for kind in map(_exception, exceptions[name]) if kind), Exception)
        peer.exceptions[name] = type(name, (base,), {"__module__": TESTS})
    found = {name: peer.exceptions.get(name, values.get(name)) for name in names if name in values | exceptions}
    missing = {name: _missing(name) for name in names if name not in found and hasattr(builtins, name)}
    return found | missing


def _exception(name: Any) -> type | None:
    """Return the built-in exception class of this name, or None."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def _missing(name: str) -> Any:
    """Return a function that raises NameError. It hides the built-in of the same name from the tests."""

    def missing(*_, **__) -> None:
        raise NameError(f"name {name!r} is not defined", name=name)

    return missing


def _run_test(test: str, names: dict[str, Any], *, goes_on: bool) -> None:
    """Run one test.

    Args:
        names: global names of the test.
        goes_on: suppress the exception of a failing test, so that the next test runs.
    """
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), names)
    except PeerError:
        raise
    except BaseException:
        if not goes_on:
            raise


def _lines(peer: Peer) -> list[int]:
    """Return the numbers of the program's lines that ran, or [] if the answer is not a list of numbers."""
    lines = peer.ask("lines")
    if type(lines) is list and len(lines) <= MAX_LINES and all(type(line) is int for line in lines):
        return lines
    return []


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
        found = {errno.EAGAIN: "processes", errno.ENOSPC: "disk", errno.EFBIG: "disk", errno.EDQUOT: "disk"}
        return (found | {errno.EMFILE: "open_files", errno.ENOMEM: "memory"}).get(error.errno, "")
    return "processes" if isinstance(error, RuntimeError) and "can't start new thread" in str(error) else ""


def attend(job: dict[str, Any], peer: Peer, names: dict[str, Any], filename: str) -> None:
    """Run the program's text, then answer the questions of its tests. The process of the program calls this function.

    Args:
        names: global names of the program.
        filename: file name of the program's text in tracebacks and line counts.
    """
    ran: set[int] = set()

    def note(frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != filename:
            return None
        if event == "line":
            ran.add(frame.f_lineno)
        return note

    # The setup can fail here because it needs names of the program. The process of the tests runs the setup again.
    with contextlib.suppress(Exception):
        exec(compile(job["setup"], "<setup>", "exec", dont_inherit=True), names)
    raised: BaseException | None = None
    if job["traced"]:
        sys.settrace(note)
    try:
        exec(compile(job["code"], filename, "exec", dont_inherit=True), names)
    except BaseException as error:
        raised = error

    def answer(wanted: list[str]) -> dict[str, Any]:
        own = {name: names[name] for name in wanted if name in names}
        classes = {name: x for name, x in own.items() if isinstance(x, type) and x.__module__ != "builtins"}
        kinds = {name: kind for name, kind in classes.items() if issubclass(kind, BaseException)}
        return {
            "values": {name: value for name, value in own.items() if name not in kinds},
            "exceptions": {name: [base.__name__ for base in kind.__mro__[1:]] for name, kind in kinds.items()},
            "raised": "" if raised is None or isinstance(raised, SystemExit) else describe(raised),
            "limit": "" if raised is None else limit_behind(raised),
        }

    peer.program = names["__name__"]
    peer.operations = {"names": answer, "lines": lambda: sorted(ran), "await": asyncio.run}
    peer.serve()
