"""Questions of any reasoning-gym dataset, by name and arguments, scored by the dataset's own scorer.

    name="chain_sum", arguments={"max_terms": 3}                       one dataset with its own arguments
    name="chain_sum", arguments={"levels": 3}                          the first 3 levels of its curriculum, with
                                                                       equally many questions each
                                                                       (prompts.shuffle=False keeps their order)
    name="mix", arguments={"chain_sum": {"weight": 2, "levels": 3},    several datasets by weight (default 1); datasets
                           "leg_counting": {}}                         with levels rise together

Owns: how questions are made, how the answer is read from a completion. Does not know: chat templates.

Source: Stojanovski et al. 2025, arXiv:2505.24760 (https://github.com/open-thought/reasoning-gym).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import operator
import os
import re
import sys
import types
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.scoring.answers import integer_of, marked, without_thought
from jaxrl_llm.scoring.formula_size import is_computable
from jaxrl_llm.scoring.reward_worker import one_by_one
from jaxrl_llm.settings.schema import ConfigError

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

# package -> datasets that need it. These packages have no wheels, so that some machines cannot install them.
SOURCE_PACKAGES = {
    "pycosat": ("zebra_puzzles",),
    "cellpylib": ("game_of_life", "game_of_life_halting"),
    "zss": ("codeio",),
}


class _Absent(types.ModuleType):
    """Placeholder for a package that is not installed. reasoning-gym imports all its packages, for every dataset."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(_how_to_get(self.__name__), name=self.__name__)


def _how_to_get(package: str) -> str:
    return f"needs {package}, which is built from source: bash launch/setup.sh reasoning (with a C compiler)"


ABSENT = [package for package in SOURCE_PACKAGES if importlib.util.find_spec(package) is None]
sys.modules.update({package: _Absent(package) for package in ABSENT})
try:
    import reasoning_gym
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
except ModuleNotFoundError as error:
    raise ConfigError(f"prompts.source='reasoning_gym' needs {error.name}: bash launch/setup.sh installs it") from error

MIX = "mix"
# Datasets whose questions depend on Python's order of sets.
OF_SETS = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
SCORER = "jaxrl_llm.questions.tasks.reasoning_gym_task:reward"

# Formulas that may be passed to sympy: allowed syntax nodes, maximum sizes, and names beyond those of the right answer.
FORMULA = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Constant, ast.Name, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub),
)
MAX_FORMULA_CHARS = 4000
MAX_EXPONENT = 99
MAX_ANSWER_CHARS = 20_000  # the longest right answers are grids of about 2,000 characters
MAX_COPIES = 0.5
MIN_QUESTIONS_TO_COUNT = 20
LONG_EXPONENT = re.compile(r"[0-9.][eE][+-]?[0-9_]{3,}")
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"}
FUNCTIONS |= {"atanh", "exp", "log", "ln", "sqrt", "Abs", "pi", "E"}


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return ``config.size`` questions of the dataset ``config.name``, or of a mix, generated from ``seed``.

    Host; ``columns`` are:

        answer               str, or None if the dataset accepts any valid answer
        entry                the dataset's whole row
        dataset              the dataset's name
        dataset_arguments    the arguments that create the same dataset

    Raises:
        ConfigError: an unknown dataset, a missing package, or arguments that the dataset does not take.
    """
    if config.name == MIX:
        return _mixed(config, seed)
    if "levels" in config.arguments:
        return _by_level(config, seed)
    return _of_dataset(config, seed)


def _mixed(config: PromptsConfig, seed: int) -> Loaded:
    """Return questions of several datasets. Each dataset is spread evenly over the whole order."""
    weights: dict[str, float] = {}
    for name, arguments in config.arguments.items():
        weight = arguments.get("weight", 1) if isinstance(arguments, dict) else None
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
            raise ConfigError(
                f"prompts.arguments.{name}={arguments!r:.200} must be arguments of the dataset, and a weight above 0"
            )
        weights[name] = weight
    if not weights:
        raise ConfigError(f"prompts.arguments={config.arguments!r} must name the datasets of prompts.name={MIX!r}")
    placed = []  # (place in the order, number of the dataset, question)
    begin = 0
    num_datasets = 0
    for i, name in enumerate(weights):
        end = round(config.size * sum([*weights.values()][: i + 1]) / sum(weights.values()))
        if end > begin:
            arguments = {key: value for key, value in config.arguments[name].items() if key != "weight"}
            part = dataclasses.replace(config, name=name, arguments=arguments, size=end - begin)
            examples = load(part, seed=seed).examples
            for j, example in enumerate(examples):
                placed.append(((j + 0.5) / len(examples), num_datasets, example))
            num_datasets += 1
        begin = end
    placed.sort(key=lambda place: place[:2])
    return Loaded(tuple(example for *_, example in placed))


def _by_level(config: PromptsConfig, seed: int) -> Loaded:
    """Return questions of a dataset's curriculum, from level 0 upwards."""
    name = config.name
    own_arguments = dict(config.arguments)
    levels = own_arguments.pop("levels")
    if name not in DATASETS:
        return _of_dataset(config, seed)  # this call raises ConfigError for wrong arguments
    if name not in CURRICULA:
        raise ConfigError(f"prompts.arguments.levels={levels!r}: {name} has no curriculum")
    if type(levels) is not int or not 1 <= levels <= config.size:
        raise ConfigError(f"prompts.arguments.levels={levels!r} must be a whole number from 1 to prompts.size")
    num_levels = max(len(attribute.levels) for attribute in create_curriculum(name).attributes.values())
    if levels > num_levels:
        raise ConfigError(f"prompts.arguments.levels={levels!r} must be at most {num_levels}, the levels of {name}")
    examples: list[Any] = []
    for level in range(levels):
        curriculum = create_curriculum(name)
        curriculum.set_global_level(level)
        arguments = dataclasses.asdict(curriculum.generate_configuration({"seed": 0, "size": 1}))
        arguments = {key: value for key, value in arguments.items() if key not in ("seed", "size")} | own_arguments
        size = config.size * (level + 1) // levels - len(examples)
        part = dataclasses.replace(config, arguments=arguments, size=size)
        # A dataset makes its i-th question from seed + i. Each level needs new seeds, or its questions would repeat.
        examples += _of_dataset(part, seed + len(examples)).examples
    return Loaded(tuple(examples))


def _of_dataset(config: PromptsConfig, seed: int) -> Loaded:
    from jaxrl_llm.types import Example  # imported here because reward workers import this module without jax

    name = config.name
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}" if near else "names: reasoning_gym.factory.DATASETS"
        raise ConfigError(f"prompts.name={name!r} is not a reasoning-gym dataset; {hint}")
    if name in REFUSED:
        raise ConfigError(
            f"prompts.name={name!r} cannot be trained on: its scorer {REFUSED[name]}. Choose another dataset"
        )
    for package in ABSENT:
        if name in SOURCE_PACKAGES[package]:
            raise ConfigError(f"prompts.name={name!r} {_how_to_get(package)}")
    if name in OF_SETS and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"prompts.name={name!r} has other questions in each process of Python, so that a run could not be resumed: "
            "set PYTHONHASHSEED=0 in the environment"
        )
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key, value in config.arguments.items():
        if key not in known:
            raise ConfigError(f"prompts.arguments.{key}={value!r} is not one of the arguments of {name}: {known}")
    arguments = {**config.arguments, "seed": seed, "size": config.size}
    try:
        dataset = reasoning_gym.create_dataset(name, **arguments)
        entries = [dataset[i] for i in range(config.size)]
    except (AssertionError, ImportError, TypeError, ValueError, LookupError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"prompts.arguments={config.arguments!r} are not allowed for {name}: {reason}") from error
    _refuse_copies(name, entries)
    return Loaded(
        tuple(
            Example(
                prompt=entry["question"],
                columns={
                    "answer": entry["answer"],
                    "entry": entry,
                    "dataset": name,
                    "dataset_arguments": arguments,
                },
                origin=f"{name}:{i}",
            )
            for i, entry in enumerate(entries, 1)
        )
    )


def _refuse_copies(name: str, entries: list[dict[str, Any]]) -> None:
    """Raise ConfigError if too many right answers are copies of the question's input: a policy would learn to copy."""
    if name in COPIES and len(entries) >= MIN_QUESTIONS_TO_COUNT:
        copies = sum(entry["answer"] == COPIES[name](entry) for entry in entries) / len(entries)
        if copies > MAX_COPIES:
            raise ConfigError(
                f"prompts.name={name!r}: {copies:.0%} of the right answers are copies of the question's input, and at "
                f"most {MAX_COPIES:.0%} may be. Set prompts.arguments so that more inputs change, such as longer "
                "strings"
            )


@one_by_one  # score completions one by one, so that only a completion that takes too long fails
def reward(
    prompts: list,
    completions: list[str],
    *,
    entry: list,
    dataset: list,
    dataset_arguments: list,
    **columns,
) -> list[float]:
    """Return the score that the dataset's own ``score_answer`` gives the answer in each completion.

    If the right answer is an integer, the score is 1.0 or 0.0, without partial credit. It is 1.0 if the marked number
    of the completion gets the full score. Without a mark the last number counts. Otherwise the score is the dataset's
    raw score of ``free_answer``, with these exceptions:

        unsafe answers (``GUARDS``, MAX_ANSWER_CHARS) are scored as an empty answer
        datasets in ``WITHOUT_PARTIAL_CREDIT`` give 1.0 or 0.0
        an answer that makes the scorer raise scores 0.0
    """
    scores = []
    for text, row, name, arguments in zip(completions, entry, dataset, dataset_arguments, strict=True):
        scores.append(_score(text, row, name, _dataset(name, json.dumps(arguments, sort_keys=True))))
    return scores


def again(prompt: Any, turns: list[str], **columns) -> str | None:
    """Ask for another try until the dataset's scorer gives full credit.

    This function is an environment (``environments.factory``).
    """
    repeated = {name: [value] for name, value in columns.items()}
    (score,) = reward([prompt], turns[-1:], **repeated)
    return None if score >= 1.0 else "That is not right. Try again."


def _score(completion: str, entry: dict[str, Any], name: str, dataset: Any) -> float:
    answer = entry["answer"]
    try:
        if isinstance(answer, str) and re.fullmatch(r"-?[0-9]+", answer.strip()):
            return float(dataset.score_answer(last_integer(completion), entry) >= 1.0)
        text = free_answer(completion)
        is_safe = len(text) <= MAX_ANSWER_CHARS and (name not in GUARDS or GUARDS[name](text, entry))
        score = float(dataset.score_answer(text if is_safe else "", entry))
        if name in WITHOUT_PARTIAL_CREDIT:
            return float(score >= WITHOUT_PARTIAL_CREDIT[name])
        return score
    except Exception:
        dataset.score_answer(answer, entry)  # raises if even the right answer fails: the completion is not at fault
        return 0.0


def _is_literal(text: str, entry: dict[str, Any]) -> bool:
    """Return whether the text is a right answer or a Python literal."""
    if text in (entry["answer"], *entry["metadata"].get("valid_answers", ())):
        return True
    with contextlib.suppress(Exception):
        ast.literal_eval(text)
        return True
    return False


def _is_formula(text: str, entry: dict[str, Any]) -> bool:
    """Return whether the text is a right answer or a safe formula.

    A safe formula contains only the nodes of ``FORMULA`` and known names, and no powers that could fill the memory. If
    the right answer has no names, as in number games, no names are allowed.
    """
    if text == entry["answer"]:
        return True
    names = set(re.findall(r"[A-Za-z_]\w*", entry["answer"]))
    if names:
        names |= FUNCTIONS
    try:
        nodes = [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except Exception:
        return False
    if len(text) > MAX_FORMULA_CHARS:
        return False
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    numbers = [value for value in constants if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(constants):
        return False
    if not is_computable(text) or LONG_EXPONENT.search(text) or not all(map(math.isfinite, numbers)):
        return False
    for node in nodes:
        if not isinstance(node, FORMULA) or (isinstance(node, ast.Name) and node.id not in names):
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_small_power(node):
            return False
    return True


def _is_small_power(power: ast.BinOp) -> bool:
    """Return whether a power cannot fill the memory."""
    is_of_numbers = not _names(power.left)
    if is_of_numbers and not (isinstance(power.left, ast.Constant) and isinstance(power.right, ast.Constant)):
        return False
    for node in ast.walk(power.right):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            has_variable = bool(_names(node.left) - FUNCTIONS)
            if not has_variable:  # allowed, because a power of a variable, as in E**(x**2), is not computed
                return False
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > MAX_EXPONENT:
            return False
    return True


def _names(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _of_form(pattern: str) -> Callable[[str, dict[str, Any]], bool]:
    return lambda text, entry: re.fullmatch(pattern, text) is not None


def _makes_24(text: str, entry: dict[str, Any]) -> bool:
    """Return whether an answer is a formula that uses each of the question's four numbers once and equals exactly 24.

    The dataset's scorer accepts any four numbers, so that 6*4*1*1 would be right for every question.
    """
    if not _is_formula(text, entry):
        return False
    tree = ast.parse(text.strip(), mode="eval")
    numbers: list[Any] = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return sorted(numbers) == sorted(entry["metadata"]["numbers"]) and _value(tree.body) == 24


def _value(node: ast.AST) -> Fraction | None:
    """Return the value of a formula of numbers. Return None for division by 0, an unknown operator or a large power."""
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=inner):
            value = _value(inner)
            return value if value is None or isinstance(op, ast.UAdd) else -value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            base = _value(left)
            other = _value(right)
            if base is None or other is None:
                return None
            if isinstance(op, ast.Pow) and (other.denominator > 1 or abs(other) > 9):
                return None
            with contextlib.suppress(ZeroDivisionError):
                return OPERATORS[type(op)](base, other)
    return None


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _is_the_answer(text: str, entry: dict[str, Any]) -> bool:
    return text == entry["answer"]


def _is_near(text: str, entry: dict[str, Any]) -> bool:
    """Return whether an answer is a number in digits within 5 % of the right one.

    The dataset's scorer compares common prefixes, so that 0 is right for 0.3125. It treats all numbers below 0.0001 as
    equal.
    """
    if not re.fullmatch(r"[\d\s.,/+-]*([eE][+-]?\d{1,3})?", text):
        return False
    try:
        value = Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False
    right = Fraction(entry["answer"].replace(",", ""))
    return abs(value - right) <= abs(right) / 20


# dataset -> check that an answer is safe for the dataset's scorer. The scorers have these problems:
# - Datasets with _is_literal or _is_formula evaluate the answer as Python, with access to the right answer.
# - puzzle24 ignores the numbers of its question. game_of_life_halting accepts any text that is not empty.
# - rush_hour executes a move of 99999999999 steps, and rubiks_cube any number of turns.
# - The other scorers accept NaN or 0, or compute 1e999999999.
GUARDS: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "n_queens": _is_literal,
    "binary_matrix": _is_literal,
    "spiral_matrix": _is_literal,
    "string_insertion": _is_literal,
    "countdown": _is_formula,
    "polynomial_multiplication": _is_formula,
    "simple_integration": _is_formula,
    "intermediate_integration": _is_formula,
    "puzzle24": _makes_24,
    "game_of_life_halting": _is_the_answer,
    "coin_flip": _is_near,
    "complex_arithmetic": _of_form(r"[\d\s.eEijIJ()*+-]*"),
    "number_sorting": _of_form(r"[^A-DF-Za-df-z]*"),
    "rush_hour": _of_form(r"(?:\D|\d(?!\d\d))*"),
    "rubiks_cube": _of_form(r"(?s:.{0,2000})"),
}

# dataset -> minimum score that counts as 1.0; lower scores count as 0.0. In these datasets one fixed answer, or a copy
# of the question, earns partial credit.
WITHOUT_PARTIAL_CREDIT = dict.fromkeys(
    (
        "coin_flip",
        "countdown",
        "futoshiki",
        "game_of_life",
        "knights_knaves",
        "mini_sudoku",
        "prime_factorization",
        "rotate_matrix",
        "sentence_reordering",
        "sudoku",
        "time_intervals",
        "word_sorting",
    ),
    1.0,
)
# The score depends on the distance to the roots, which are rounded.
WITHOUT_PARTIAL_CREDIT["polynomial_equations"] = 0.98

# dataset -> the reason why no check can make its scorer fair.
REFUSED = {
    "propositional_logic": "gives full credit for any conclusion: 'P or Q' is right for 84 % of its questions",
}

# dataset -> function that returns a copy of the question's input. The copy may be the right answer to at most
# MAX_COPIES of the questions.
COPIES = {
    "string_insertion": lambda entry: entry["metadata"]["string"],
    "string_manipulation": lambda entry: entry["metadata"]["string"],
    "rotate_matrix": lambda entry: "\n".join(" ".join(map(str, row)) for row in entry["metadata"]["matrix"]),
}


def last_integer(completion: str) -> str | None:
    """Return the integer that a completion gives: the marked number, or else the last number if it is an integer."""
    return integer_of(completion)


def free_answer(completion: str) -> str:
    """Return the marked answer, or else all text after the thought, stripped."""
    answer = marked(completion)
    return without_thought(completion).strip() if answer is None else answer


@functools.lru_cache(maxsize=8)
def _dataset(name: str, arguments: str) -> Any:
    """Return the dataset. It is cached per process because some datasets read word lists when they are created."""
    return reasoning_gym.create_dataset(name, **json.loads(arguments))
