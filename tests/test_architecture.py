"""The house keeps its plan: imports go downward, and the loop and the update name no method."""

import ast
import dataclasses
import doctest
import importlib
import pathlib
import re
import shutil
import subprocess

import pytest

from jaxrl_llm import method_config

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jaxrl_llm"
STANDARD_LIBRARY_OF_OPS = {"__future__", "collections", "functools", "math", "typing"}

# From the bottom up: a module imports what stands above it here, and of its own line its own wing alone.
FLOORS = [
    {"types", "runtime.nested", "runtime.functions"},
    {"ops"},
    {"scoring"},  # the text rules that rewards, votes, evaluation and judges share
    {"algorithms"},
    {"limits"},
    {"method_config"},
    {"config"},
    {"runtime"},
    {"environments"},  # what runs beside a run: no module of a training step imports it but by name
    {"models"},
    {"questions", "replay", "reports"},
    {"learner", "actor"},
    {"run"},
    {"serving"},
    {"planning"},
    {"train", "evaluate", "generate", "serve", "score", "export", "sft", "plan", "replay_plan", "report"},
    {"models.__main__"},  # a command of its own beside what it lists
    {"sweep"},
]


def module_file(name: str) -> pathlib.Path | None:
    """File of a dotted module of the package, or None."""
    path = ROOT / name.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names a file imports, not those under TYPE_CHECKING; ``from a import b`` is a.b where that is a module."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if module_file(full) else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def own(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "jaxrl_llm" and module_file(name)}


def modules() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def floor_of(name: str) -> tuple[int, str]:
    """Floor and wing of a module named without the package."""
    for wing in (name, name.split(".")[0]):
        for floor, wings in enumerate(FLOORS):
            if wing in wings:
                return floor, wing
    raise AssertionError(f"{name} stands on no floor")


def test_modules_import_what_stands_below_them():
    for path in modules():
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name == "__init__":
            continue
        floor, wing = floor_of(name)
        for other in own(imports(path)):
            if "." in other:
                other_floor, other_wing = floor_of(other.removeprefix("jaxrl_llm."))
                assert other_floor < floor or other_wing == wing, f"{name} imports {other}"


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
    """Their keys stand in the tables alone: a new one is a function and a row."""
    slots = [
        field.metadata["slot"]
        for settings in (method_config.AlgorithmConfig, method_config.ReplayConfig)
        for field in dataclasses.fields(settings)
        if "slot" in field.metadata
    ]
    keys = {key for slot in slots for key in slot.table}
    assert len(keys) > 60
    for name in ("train.py", "learner/update.py"):
        tree = ast.parse((PACKAGE / name).read_text())
        named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not named & keys, name
    words = set(re.findall("[a-z]+", (PACKAGE / "learner" / "update.py").read_text().lower()))
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


def test_lint_is_clean():
    ruff = shutil.which("ruff") or str(pathlib.Path(__import__("sys").executable).parent / "ruff")
    if not pathlib.Path(ruff).exists():
        pytest.skip("ruff is not installed (extra [test])")
    done = subprocess.run([ruff, "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
