"""Programming tasks with tests: JSON lines in the format of MBPP or HumanEval. One file may mix both formats.

    MBPP        text or prompt, test_list; test_imports, test_setup_code, challenge_test_list, code
    HumanEval   prompt, test, entry_point; canonical_solution

``prompts.arguments``:

    shown_tests       1; number of tests that an MBPP prompt shows, so that the function's name is known; -1 = all
    template          prompt template for MBPP rows, with {text} and {tests}
    check_solutions   False; True treats a row as bad if its own solution fails its tests
    given_parts       0; number of easier versions of each training question, whose prompts give a part of the solution
    sandbox           limits for each test: seconds (1.0) and the other fields of ``Limits`` (sandbox/sandbox.py);
                      ``required``: refuse to run without isolation; ``isolation``: its method

With ``given_parts`` = K a question has K easier versions, which give the first K/(K+1), ... 1/(K+1) of its solution's
lines. The version that gives the most lines is asked first. Each other version is asked when the version before it is
retired (``prompts.retire_pass_rate``). The original question is last and is never retired. Held-out questions have no
easier versions.

This is the curriculum of code completion subtasks of StepCoder, Dou et al. 2024, arXiv:2402.01391. Differs: a version
gives a number of lines; the paper's versions give a number of conditional statements. The step size and the pass rate
are not from the paper.

Owns: rows, the split of their tests, names under test, easier versions. Does not know: how a program is run and judged.

Source: Austin et al. 2021, arXiv:2108.07732 (MBPP); Chen et al. 2021, arXiv:2107.03374 (HumanEval).
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import difflib
import functools
import sys
from typing import TYPE_CHECKING, Any

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.files import load_rows
from jaxrl_llm.runtime.json_lines import BadRowError, lines, parse
from jaxrl_llm.sandbox.sandbox import Limits, Sandbox, SandboxError
from jaxrl_llm.scoring import code_tests
from jaxrl_llm.settings.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jaxrl_llm.config import PromptsConfig
    from jaxrl_llm.types import Example

SCORER = "jaxrl_llm.scoring.code_tests:passed"
TEMPLATE = "{text}\n\nYour code should pass these tests:\n\n{tests}\n"
SECONDS = 1.0
MOST_PARTS = 100
GO_ON = "{prompt}\nGo on from here:\n\n{given}"  # for MBPP prompts; a HumanEval prompt is code itself

# key -> its type, per format.
MBPP = {
    "text": str,
    "prompt": str,
    "test_list": list,
    "test_imports": list,
    "test_setup_code": str,
    "code": str,
    "challenge_test_list": list,
    "source_file": str,
}
HUMAN_EVAL = {
    "prompt": str,
    "test": str,
    "entry_point": str,
    "canonical_solution": str,
}

Row = dict[str, Any]
Question = tuple[str, dict[str, Any]]  # the prompt, and the columns


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return the first ``config.size`` questions of the file ``config.name`` (0 = all), in file order.

    Host; ``columns`` are:

        tests          list of code, one item per test
        setup          code that runs before the answer
        prefix         code that the answer continues
        given          the part of the solution that the prompt gives, or ""
        names          names that the tests take from the answer
        classes        the classes among ``names``
        shown_tests    list of code
        solution       code, or None
        task_id        the row's own id, or None
        sandbox        settings

    Raises:
        ConfigError: a wrong argument, an unreadable file, or no question; a bad row under ``prompts.bad_row="error"``;
            ``sandbox.required`` and this machine has no sandbox.
    """
    del seed
    settings = _arguments(config.arguments)
    _try_sandbox(settings["sandbox"])

    def question_of_line(line: bytes) -> Question:
        prompt, columns = question(parse(line), settings)
        if settings["check_solutions"]:
            _check_solution(prompt, columns)
        return prompt, columns

    try:
        loaded = load_rows(config, lines, question_of_line)
        return dataclasses.replace(loaded, laddered=functools.partial(laddered, config))
    finally:
        code_tests.close()  # end the sandboxes that checked solutions, because rewards are computed in other processes


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``prompts.arguments`` with their defaults. Raise ConfigError for a wrong argument."""
    where = "prompts.arguments"
    defaults = {
        "shown_tests": 1,
        "template": TEMPLATE,
        "check_solutions": False,
        "given_parts": 0,
        "sandbox": {},
    }
    _check_names(where, arguments, defaults)
    settings: dict[str, Any] = defaults | arguments
    shown = settings["shown_tests"]
    if not _is_integer(shown) or shown < -1:
        raise ConfigError(f"{where}.shown_tests={shown!r} must be a whole number of at least -1 (all)")
    template = settings["template"]
    if not isinstance(template, str) or "{text}" not in template:
        raise ConfigError(f"{where}.template={template!r:.80} must be text with {{text}}, and {{tests}} where they go")
    parts = settings["given_parts"]
    if not _is_integer(parts) or not 0 <= parts <= MOST_PARTS:
        raise ConfigError(f"{where}.given_parts={parts!r} must be a whole number from 0 to {MOST_PARTS}")
    check_solutions = settings["check_solutions"]
    if not isinstance(check_solutions, bool):
        raise ConfigError(f"{where}.check_solutions={check_solutions!r} must be True or False")
    settings["sandbox"] = _sandbox_settings(f"{where}.sandbox", settings["sandbox"])
    return settings


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sandbox_settings(where: str, sandbox: Any) -> dict[str, Any]:
    """Return the settings of the sandbox with their defaults. Raise ConfigError for a wrong setting."""
    if not isinstance(sandbox, dict):
        raise ConfigError(f"{where}={sandbox!r:.80} must be settings by name")
    limits = [field.name for field in dataclasses.fields(Limits)]
    _check_names(where, sandbox, [*limits, "isolation", "required"])
    settings: dict[str, Any] = {"seconds": SECONDS, **sandbox}
    given_limits = {name: settings[name] for name in limits if name in settings}
    try:
        Limits(**given_limits)
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from error
    if not isinstance(settings.get("required", False), bool):
        raise ConfigError(f"{where}.required={settings['required']!r} must be True or False")
    return settings


def _check_names(where: str, settings: dict[str, Any], names: Iterable[str]) -> None:
    known = ", ".join(names)
    for name, value in settings.items():
        if name not in names:
            raise ConfigError(f"{where}.{name}={value!r:.80} is not one of {known}")


def _try_sandbox(settings: dict[str, Any]) -> None:
    """Check that programs can be run as configured, before any device is used.

    A warning lists the limits that are not enforced.
    """
    options = {name: settings[name] for name in ("isolation", "required") if name in settings}
    try:
        Sandbox(**options).close()
    except (SandboxError, ValueError) as error:
        raise ConfigError(f"prompts.arguments.sandbox={settings!r:.200}: {error}") from error


def question(row: Any, settings: dict[str, Any]) -> Question:
    """Return ``(prompt, columns)`` of a row.

    Raises:
        BadRowError: the row is not a question; the message names the wrong key.
    """
    if not isinstance(row, dict):
        raise BadRowError(f"must be an object, not {type(row).__name__}")
    row = {key: value for key, value in row.items() if value is not None}
    is_mbpp = "test_list" in row
    is_human_eval = "test" in row
    if is_mbpp == is_human_eval:
        keys = f"{sorted(row)!s:.300}"
        raise BadRowError(f"must have one of `test_list` (MBPP) and `test` (HumanEval); its keys are {keys}")
    form = MBPP if is_mbpp else HUMAN_EVAL
    for key, value in row.items():
        if key != "task_id":
            _check_key(key, value, form)
    prompt, columns = _of_mbpp(row, settings) if is_mbpp else _of_human_eval(row)
    columns["given"] = ""
    columns["task_id"] = row.get("task_id")
    columns["sandbox"] = settings["sandbox"]
    return prompt, columns


def _check_key(key: str, value: Any, form: dict[str, type]) -> None:
    """Raise BadRowError if the row's format does not have this key, or the value has another type."""
    if key not in form:
        near = difflib.get_close_matches(key, form, n=1)
        hint = f"; did you mean `{near[0]}`" if near else f": its form has {', '.join(form)}, task_id"
        raise BadRowError(f"unknown key `{key}`{hint}")
    if form[key] is str:
        words = "text"
        is_valid = isinstance(value, str)
    else:
        words = "a list of texts"
        is_valid = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not is_valid:
        raise BadRowError(f"`{key}` must be {words}, not {value!r:.60}")


def laddered(config: PromptsConfig, examples: Sequence[Example]) -> list[Example]:
    """Return the questions, each after its easier versions. A question without a solution has no easier versions.

    Raises:
        ConfigError: ``prompts.retire_pass_rate`` is 0, so that only the easiest versions would ever be asked; or no
            question has a solution.
    """
    parts = config.arguments.get("given_parts", 0)
    ladders = []
    for i, example in enumerate(examples):
        ladder = str(i) if parts else ""
        ladders += _easier_versions(example, parts, ladder)
        ladders.append(dataclasses.replace(example, ladder=ladder))
    if parts and config.retire_pass_rate == 0:
        raise ConfigError(
            f"prompts.retire_pass_rate=0.0 must be above 0 with prompts.arguments.given_parts={parts}: a question "
            "waits until its easier version passes at that rate"
        )
    if parts and len(ladders) == len(examples):
        raise ConfigError(
            f"prompts.arguments.given_parts={parts} needs solutions, and no question of {config.name!r} has one"
        )
    return ladders


def _easier_versions(example: Example, parts: int, ladder: str) -> list[Example]:
    """Return the versions of a question that give ``parts`` parts of its solution or fewer, the easiest first."""
    solution = example.columns["solution"] or ""
    lines = solution.splitlines(keepends=True)
    form = "{prompt}{given}" if example.columns["prefix"] else GO_ON
    versions = []
    last_count = 0
    for part in range(parts, 0, -1):
        count = len(lines) * part // (parts + 1)
        if count in (0, last_count):
            continue
        last_count = count
        given = "".join(lines[:count])
        version = dataclasses.replace(
            example,
            prompt=form.format(prompt=example.prompt, given=given),
            columns=example.columns | {"given": given},
            ladder=ladder,
        )
        versions.append(version)
    return versions


def _check_solution(prompt: str, columns: dict[str, Any]) -> None:
    if columns["solution"] is None:
        raise BadRowError("has no solution (`code` or `canonical_solution`) that check_solutions could check")
    repeated = {key: [value] for key, value in columns.items()}
    try:
        (share,) = code_tests.share([prompt], [columns["solution"]], **repeated)
    except SandboxError as error:
        raise ConfigError(f"prompts.arguments.sandbox={columns['sandbox']!r:.200}: {error}") from error
    if share < 1:
        raise BadRowError(f"its own solution passes {share:.0%} of its tests")


def _of_mbpp(row: Row, settings: dict[str, Any]) -> Question:
    texts = [row[key] for key in ("text", "prompt") if row.get(key)]
    if len(texts) != 1:
        raise BadRowError("must have one of `text` and `prompt`, and not empty")
    tests = row["test_list"]
    challenge_tests = row.get("challenge_test_list", [])
    if not tests:
        raise BadRowError("`test_list` is empty")
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "")])
    _parsed("test_imports` or `test_setup_code", setup)
    trees = _test_trees("test_list", tests) + _test_trees("challenge_test_list", challenge_tests)
    num_shown = settings["shown_tests"]
    shown = tests if num_shown == -1 else tests[:num_shown]
    prompt = settings["template"].replace("{tests}", "\n".join(shown))
    prompt = prompt.replace("{text}", texts[0])
    solution = row.get("code")
    solution_tree = _tree(solution)
    setup = _with_imports(setup, trees, solution_tree)
    names, classes = _under_test(trees, _tree(setup), solution_tree)
    if not names:
        raise BadRowError("`test_list` uses no name that an answer could define: all are built-ins or the setup's own")
    columns = {
        "tests": tests + challenge_tests,
        "setup": setup,
        "prefix": "",
        "names": names,
        "classes": classes,
        "shown_tests": shown,
        "solution": solution,
    }
    return prompt, columns


def _test_trees(key: str, tests: list[str]) -> list[ast.Module]:
    """Return the parsed tests of a key of the row. Raise BadRowError for a test that is not Python or is empty."""
    trees = []
    for i, test in enumerate(tests):
        tree = _parsed(f"{key}[{i}]", test)
        if not tree.body:
            raise BadRowError(f"`{key}[{i}]`={test!r:.60} tests nothing: it has no statement")
        trees.append(tree)
    return trees


def _of_human_eval(row: Row) -> Question:
    for key in ("prompt", "entry_point"):
        if not row.get(key):
            raise BadRowError(f"`{key}` is missing or empty")
    name = row["entry_point"]
    if not name.isidentifier():
        raise BadRowError(f"`entry_point` must be the name of a function, not {name!r:.60}")
    prompt = row["prompt"]
    first_lines = [line for line in prompt.splitlines() if line.startswith(("def ", "async def "))]
    if not any(name in line for line in first_lines):
        raise BadRowError(f"`prompt` does not begin a function {name!r:.60}, which is `entry_point`")
    test_tree = _parsed("test", row["test"])
    tests = [f"{part}\ncheck({name})" for part in _one_assertion_each(test_tree)]
    prompt_tree = _tree(_without_last_definition(prompt))
    classes = [node.name for node in prompt_tree.body if isinstance(node, ast.ClassDef)]
    columns = {
        "tests": tests,
        "setup": "",
        "prefix": prompt,
        "names": [name],
        "classes": classes,
        "shown_tests": [],
        "solution": row.get("canonical_solution"),
    }
    return prompt, columns


def _without_last_definition(prompt: str) -> str:
    """Return the code of a prompt before the function that it begins."""
    last = max(prompt.rfind("\ndef "), prompt.rfind("\nasync def "))
    return prompt[: max(last, 0)]


def _tree(code: str | None) -> ast.Module:
    """Return the parsed code, or an empty module if the code is None or not Python."""
    try:
        return ast.parse(code or "")
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _with_imports(setup: str, tests: list[ast.Module], solution: ast.Module) -> str:
    """Return the setup, preceded by an import of each standard module that the tests use without binding it.

    Tests of MBPP's first edition use modules that only its solutions import. The tests need the real module, because a
    module from the program would be the program's own object.
    """
    bound = _bound_in_any([*tests, _tree(setup)])
    bound |= {definition.name for definition in _definitions(solution)}
    modules: dict[str, None] = {}
    for node in _all_nodes(tests):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        name = node.value.id
        if name in sys.stdlib_module_names and name not in bound:
            modules[name] = None
    imports = [f"import {name}" for name in modules]
    return "\n".join([*imports, setup])


def _all_nodes(trees: Iterable[ast.Module]) -> Iterator[ast.AST]:
    for tree in trees:
        yield from ast.walk(tree)


def _definitions(solution: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    """Return the functions and classes that a solution defines."""
    return [node for node in solution.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def _under_test(
    tests: list[ast.Module],
    setup: ast.Module,
    solution: ast.Module,
) -> tuple[list[str], list[str]]:
    """Return the names that the tests take from an answer, and the classes among these names.

    A name belongs to the result in three cases:

    - The tests use it, but it is not defined by the tests, by the setup or by Python.
    - The solution defines it and the tests use it.
    - The tests use built-ins only, as for a function that must be called ``sum``. Then the names are the functions of
      the innermost calls.

    Without a solution, a class is a name that begins in upper case, if the tests read attributes of objects.
    """
    trees = [*tests, setup]
    used: dict[str, None] = {}
    for tree in trees:
        used.update(dict.fromkeys(_names(tree, ast.Load)))
    bound = _bound_in_any(trees)
    definitions = _definitions(solution)
    names = [name for name in used if name not in bound and not hasattr(builtins, name)]
    for definition in definitions:
        if definition.name in used and definition.name not in names:
            names.append(definition.name)
    if not names:
        for tree in tests:
            names += [name for name in _innermost_calls(tree) if name not in names]
    if solution.body:
        classes = [definition.name for definition in definitions if isinstance(definition, ast.ClassDef)]
        return names, [name for name in classes if name in names]
    reads_objects = any(_is_of_object(node, bound) for node in _all_nodes(trees))
    if not reads_objects:
        return names, []
    return names, [name for name in names if name[0].isupper()]


def _is_of_object(node: ast.AST, bound: set[str]) -> bool:
    """Return whether the node is an attribute of a call's result or of a variable of the tests."""
    if not isinstance(node, ast.Attribute):
        return False
    if isinstance(node.value, ast.Name):
        return node.value.id in bound
    return isinstance(node.value, ast.Call)


def _bound_in_any(trees: Iterable[ast.Module]) -> set[str]:
    """Return all names that one of the trees binds, in any scope."""
    bound: set[str] = set()
    for tree in trees:
        bound |= _bound(tree)
    return bound


def _bound(tree: ast.Module) -> set[str]:
    """Return all names that the code binds, in any scope."""
    bound = set(_names(tree, ast.Store))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def _innermost_calls(tree: ast.Module) -> list[str]:
    """Return the names of the functions that are called without a call among their arguments."""
    names: dict[str, None] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            has_inner_call = any(_contains_call(argument) for argument in call.args)
            if not has_inner_call:
                names[call.func.id] = None
    return list(names)


def _contains_call(argument: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(argument))


def _one_assertion_each(tree: ast.Module) -> list[str]:
    """Return one text per asserting statement of ``check``: this statement and all statements that do not assert.

    Definitions do not count as asserting, because other statements call them. If an asserting statement binds a name
    that another statement needs, as a loop does, the code is not split.
    """
    place, check = _check_function(tree)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    asserting = []
    needed: set[str] = set()
    for i, statement in enumerate(check.body):
        has_assertion = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
        if has_assertion and not isinstance(statement, definitions):
            asserting.append(i)
        needed |= set(_names(statement, ast.Load)) - set(_names(statement, ast.Store))
    for i in asserting:
        if not needed.isdisjoint(_names(check.body[i], ast.Store)):
            return [ast.unparse(tree)]
    texts = []
    for kept in asserting:
        others = [i for i in asserting if i != kept]
        part = copy.copy(check)
        part.body = [statement for i, statement in enumerate(check.body) if i not in others]
        module = copy.copy(tree)
        module.body = [*tree.body[:place], part, *tree.body[place + 1 :]]
        texts.append(ast.unparse(module))
    return texts or [ast.unparse(tree)]


def _check_function(tree: ast.Module) -> tuple[int, ast.FunctionDef]:
    """Return the place of the first function ``check`` of a module, and the function.

    Raises:
        BadRowError: the module has no such function.
    """
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return place, node
    raise BadRowError("`test` does not define a function check(candidate)")


def _names(statement: ast.AST, context: type) -> list[str]:
    """Return the names that a statement loads or stores, by ``context``.

    The order is that of the syntax tree, because the names are a column of the question. A set would have another order
    in each process, and a resumed run compares the columns with its checkpoint.
    """
    names: dict[str, None] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            names[node.id] = None
    return list(names)


def _parsed(key: str, code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise BadRowError(f"`{key}` is not Python: {error}") from error
