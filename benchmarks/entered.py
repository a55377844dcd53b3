"""Report which modules and functions of the package a training run enters, and which functions are long.

    python -m benchmarks.entered                                            two iterations of the debug run
    python -m benchmarks.entered --config=recipe:dapo --workdir=runs/dapo   any training run, with the flags of train

A module counts as entered if the run calls one of its functions; importing it is not enough. Worker processes are not
traced.
"""

import ast
import contextlib
import dataclasses
import pathlib
import runpy
import sys
import tempfile
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

REPOSITORY = pathlib.Path(__file__).parents[1]
PACKAGE = REPOSITORY / "jaxrl_llm"
LONG_LINES = 60
DEBUG_RUN = ["--config=configs/debug.py", "--config.num_iterations=2", "--config.metrics.tensorboard=False"]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the package, with its first line (that of its first decorator) and its number of lines."""

    path: str
    first_line: int
    name: str
    num_lines: int


def functions_of(path: pathlib.Path) -> list[Function]:
    """Return the functions and methods that a file defines."""
    functions = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        functions.append(Function(str(path), first_line, node.name, num_lines))
    return functions


@contextlib.contextmanager
def traced() -> Iterator[set[tuple[str, int]]]:
    """Add (file, first line) of every function of the package that is called inside the context."""
    entered: set[tuple[str, int]] = set()
    package = str(PACKAGE)

    def note(code: CodeType) -> None:
        if code.co_filename.startswith(package):
            entered.add((code.co_filename, code.co_firstlineno))

    if sys.version_info >= (3, 12):
        with _monitored(note):
            yield entered
    else:
        with _profiled(note):
            yield entered


@contextlib.contextmanager
def _monitored(note: Any) -> Iterator[None]:
    monitoring = sys.monitoring  # type: ignore[attr-defined]  # Python 3.12 and newer
    tool = monitoring.PROFILER_ID

    def start(code: CodeType, offset: int) -> Any:
        note(code)
        return monitoring.DISABLE  # the first call of a function is enough

    monitoring.use_tool_id(tool, "entered")
    monitoring.register_callback(tool, monitoring.events.PY_START, start)
    monitoring.set_events(tool, monitoring.events.PY_START)
    try:
        yield
    finally:
        monitoring.set_events(tool, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(tool)


@contextlib.contextmanager
def _profiled(note: Any) -> Iterator[None]:
    def call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            note(frame.f_code)

    threading.setprofile(call)
    sys.setprofile(call)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def table(entered: set[tuple[str, int]]) -> list[str]:
    """Return the report: entered modules and functions by folder, modules that were not entered, long functions."""
    functions = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        functions[path] = functions_of(path)
    is_entered = {f: (f.path, f.first_line) in entered for listed in functions.values() for f in listed}
    by_folder: dict[str, list[pathlib.Path]] = {}
    for path, listed in functions.items():
        if listed:
            by_folder.setdefault(path.parent.relative_to(REPOSITORY).as_posix(), []).append(path)
    lines = [f"{'folder':<32} {'modules':>9} {'functions':>11}   entered / all"]
    idle = []
    for folder, paths in by_folder.items():
        inside = [f for path in paths for f in functions[path]]
        modules = [path for path in paths if any(is_entered[f] for f in functions[path])]
        idle += [path for path in paths if path not in modules]
        num_functions = sum(is_entered[f] for f in inside)
        of_modules = f"{len(modules)}/{len(paths)}"
        of_functions = f"{num_functions}/{len(inside)}"
        lines.append(f"{folder:<32} {of_modules:>9} {of_functions:>11}")
    lines += ["", f"functions of more than {LONG_LINES} lines:"]
    long_functions = [f for f in is_entered if f.num_lines > LONG_LINES]
    for f in sorted(long_functions, key=lambda f: -f.num_lines):
        place = pathlib.Path(f.path).relative_to(REPOSITORY).as_posix()
        mark = "entered" if is_entered[f] else ""
        lines.append(f"{f.num_lines:>5}  {place}:{f.first_line} {f.name}  {mark}".rstrip())
    lines += ["", f"modules that the run does not enter ({len(idle)}):"]
    names: dict[str, list[str]] = {}
    for path in idle:
        names.setdefault(path.parent.relative_to(REPOSITORY).as_posix(), []).append(path.stem)
    lines += [f"{folder:<32} {' '.join(stems)}" for folder, stems in names.items()]
    return lines


def main() -> None:
    arguments = sys.argv[1:] or DEBUG_RUN
    with tempfile.TemporaryDirectory() as folder:
        if not any(argument.startswith("--workdir") for argument in arguments):
            arguments = [*arguments, f"--workdir={folder}/run"]
        sys.argv = ["train", *arguments]
        with traced() as entered, contextlib.suppress(SystemExit):
            runpy.run_module("jaxrl_llm.train", run_name="__main__")
    print("\n".join(table(entered)))


if __name__ == "__main__":
    main()
