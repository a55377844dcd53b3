"""The architecture: imports go downward, and the loop and the update name no method."""

import ast
import dataclasses
import doctest
import functools
import importlib
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jaxrl_llm import method_config

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jaxrl_llm"
STANDARD_LIBRARY_OF_OPS = {"__future__", "collections", "functools", "math", "typing"}

# From the bottom up: a folder or module imports only those that stand before it here. Imports for types count.
FLOORS = [
    "types",
    "settings",
    "ops",
    "algorithms",
    "limits",
    "method_config",
    "config",
    "runtime",
    "sandbox",
    "models",
    "scoring",
    "questions",
    "replay",
    "reports",
    "learner",
    "conversations",
    "actor",
    "run",
    "serving",
    "planning",
    "sweeps",
    "commands",
    "examples",
    "recipes",
]
# Thin runners, so that ``python -m jaxrl_llm.NAME`` works: modules beside the folders, and those of packages.
RUNNERS = {PACKAGE / path.name for path in (PACKAGE / "commands").glob("[!_]*.py")}


def module_file(name: str) -> pathlib.Path | None:
    """Return the file of a dotted module of the package, or None."""
    path = ROOT / name.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@functools.cache
def imports(path: pathlib.Path) -> set[str]:
    """Return the dotted names that a file imports, also for types alone. "from a import b" is a.b if b is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if module_file(full) else node.module)
    return found


def own_imports(path: pathlib.Path) -> set[str]:
    """Return the modules of the package that a file imports, without the package's name."""
    own = {name for name in imports(path) if name.startswith("jaxrl_llm.") and module_file(name)}
    return {name.removeprefix("jaxrl_llm.") for name in own}


def modules() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    """Return the dotted name of a module without the package's."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def test_folders_import_downward():
    upward = []
    for path in modules():
        name = name_of(path)
        folder = name.split(".")[0]
        if name == "__init__" or path in RUNNERS or path.name == "__main__.py":
            continue
        for other in own_imports(path):
            other_folder = other.split(".")[0]
            if other_folder != folder and FLOORS.index(other_folder) >= FLOORS.index(folder):
                upward.append(f"{name} imports {other}")
    assert not upward, upward


def test_no_module_imports_itself_through_others():
    graph = {name_of(path): own_imports(path) - {name_of(path)} for path in modules()}
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, {name: sorted(others & graph.keys()) for name, others in graph.items()}


def test_the_core_imports_no_example():
    for path in modules():
        if path.parent.name not in ("examples", "recipes"):
            assert not [name for name in imports(path) if name.startswith("jaxrl_llm.examples")], path.name


def test_ops_import_jax_alone():
    for path in sorted((PACKAGE / "ops").glob("*.py")):
        for name in imports(path):
            top = name.split(".")[0]
            fine = top in {"jax", "jaxtyping", "numpy"} | STANDARD_LIBRARY_OF_OPS or name.startswith("jaxrl_llm.ops")
            assert fine, f"{path.name} imports {name}"


def test_no_room_without_a_purpose():
    banned = {"utils", "common", "helpers", "misc", "base"}
    assert not [path for path in modules() if path.stem in banned or path.parent.name in banned]


def test_oracles_are_independent():
    for path in sorted((ROOT / "tests" / "reference").glob("*.py")):
        assert not {name for name in imports(path) if name.split(".")[0] in {"jaxrl_llm", "jax"}}, path.name


def test_the_loop_and_the_update_name_no_function_of_a_method():
    """Only the tables contain these names: a new method is a function and a row."""
    slots = [
        field.metadata["slot"]
        for settings in (method_config.AlgorithmConfig, method_config.ReplayConfig)
        for field in dataclasses.fields(settings)
        if "slot" in field.metadata
    ]
    keys = {key for slot in slots for key in slot.table}
    assert len(keys) > 60
    for name in ("commands/train.py", "learner/update.py", "learner/loss.py"):
        tree = ast.parse((PACKAGE / name).read_text())
        named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not named & keys, name
        words = set(re.findall("[a-z]+", (PACKAGE / name).read_text().lower())) if "learner" in name else set()
        assert not words & {"grpo", "dapo", "ppo", "rloo", "gspo", "cispo", "reinforce"}


def test_every_public_function_of_ops_says_what_it_computes():
    for path in sorted((PACKAGE / "ops").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                said = ast.get_docstring(node) or ""
                assert "Returns:" in said or " = " in said or re.search(r"\[[A-Z.]", said), f"{path.name}: {node.name}"


def test_examples_in_ops_are_true():
    names = [f"jaxrl_llm.ops.{path.stem}" for path in sorted((PACKAGE / "ops").glob("[!_]*.py"))]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in results) >= 1
    assert not sum(result.failed for result in results)


def test_every_module_says_what_it_owns():
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_lint_and_format_are_clean():
    ruff = shutil.which("ruff") or str(pathlib.Path(sys.executable).parent / "ruff")
    if not pathlib.Path(ruff).exists():
        pytest.skip("ruff is not installed (extra [test])")
    for command in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        done = subprocess.run([ruff, *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_types_are_clean():
    command = [sys.executable, "-m", "pyrefly", "check", "--python-interpreter-path", sys.executable]
    if importlib.util.find_spec("pyrefly") is None:
        pytest.skip("pyrefly is not installed (extra [test])")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
