"""KoLMogorov task: write the shortest program that produces a given sequence.

    python -m jaxrl_llm.train --config=configs/debug.py --workdir=runs/kolmogorov \\
        --config.prompts.source=kolmogorov --config.prompts.max_tokens=256

This example shows questions with a partial reward: a shorter program scores more than a longer one. It has no
dependency.

    "1 2 1 2 1 2"  is written by  repeat([1,2],3)

A program is an expression of whole numbers, lists in brackets and these functions:

    range(a,b,s)       The numbers a, a+s, .. below b.
    repeat(x,n)        The list x, n times in a row.
    concat(x,y)        The list x, then the list y.
    interleave(x,y)    Items of x and y in turn, until one list ends.
    reverse(x)         The list x from its end to its start.
    scan(x)            The cumulative sums of x.

``prompts.arguments``, whole numbers:

    length     24; maximum length of a sequence
    depth      2; depth of the function calls in the program that made the sequence
    largest    9; largest number drawn for a program

Owns: the language, its questions, compression as a reward. Does not know: tokenizers, models.

Source: The KoLMogorov Test, arXiv:2503.13992: programs of a small language are drawn, and their output is the question.
Differs: this example has its own language. It also has its own reward, because the paper's formula was not found.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked
from jaxrl_llm.settings.schema import ConfigError

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.examples.kolmogorov:reward"

# argument -> (default, least, most)
ARGUMENTS = {
    "length": (24, 4, 1000),
    "depth": (2, 1, 5),
    "largest": (9, 2, 1000),
}
MAX_CHARS = 2000
MAX_NUMBERS = 10_000
MAX_SIZE = 10**12
FENCED = re.compile(r"```(?:\w*\n)?(.*?)```", re.S)


class ProgramError(ValueError):
    """Error for a text that is not a program or that exceeds the limits."""


def run(program: str) -> list[int]:
    """Return the sequence that a program produces.

    Raises:
        ProgramError: the text is not a program, or its output is too large.
    """
    if len(program) > MAX_CHARS:
        raise ProgramError(f"a program of {len(program)} characters; {MAX_CHARS} are allowed")
    try:
        tree = ast.parse(program.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"no program: {error}") from error
    if not isinstance(value, list):
        raise ProgramError("a program gives a list")
    return value


def _value(node: ast.expr) -> int | list[int]:
    """Return the value of an expression's syntax tree."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        numbers = [_number(element) for element in node.elts]
        return _short(numbers)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name in FUNCTIONS and not node.keywords:
            return _call(name, node.args)
    raise ProgramError(f"there is no {ast.unparse(node)[:50]!r} in the language")


def _call(name: str, arguments: list[ast.expr]) -> list[int]:
    """Return the result of a function of the language."""
    function, kinds = FUNCTIONS[name]
    if len(kinds) != len(arguments):
        raise ProgramError(f"{name} takes {len(kinds)} arguments, not {len(arguments)}")
    values: list[Any] = []
    for kind, node in zip(kinds, arguments, strict=True):
        value = _number(node) if kind is int else _list(node)
        values.append(value)
    result = function(*values)
    return _short(result)


def _number(node: ast.expr) -> int:
    """Return the value of an expression that must be a number."""
    value = _value(node)
    if isinstance(value, int) and abs(value) <= MAX_SIZE:
        return value
    raise ProgramError(f"{ast.unparse(node)[:50]!r} must be a number of at most {MAX_SIZE}")


def _list(node: ast.expr) -> list[int]:
    """Return the value of an expression that must be a list."""
    value = _value(node)
    if isinstance(value, list):
        return value
    raise ProgramError("a list is wanted")


def _short(values: list[int]) -> list[int]:
    """Return the list unchanged. Raise ProgramError if it exceeds the limits."""
    has_large_number = any(abs(value) > MAX_SIZE for value in values)
    if len(values) > MAX_NUMBERS or has_large_number:
        raise ProgramError(f"a list of more than {MAX_NUMBERS} numbers, or of too large ones")
    return values


def _range(start: int, stop: int, step: int) -> list[int]:
    if step == 0:
        raise ProgramError("a range without end, or too long")
    numbers = range(start, stop, step)
    if len(numbers) > MAX_NUMBERS:
        raise ProgramError("a range without end, or too long")
    return list(numbers)


def _repeat(values: list[int], count: int) -> list[int]:
    if count * len(values) > MAX_NUMBERS:
        raise ProgramError(f"a list of more than {MAX_NUMBERS} numbers")
    return values * count


def _concat(first: list[int], second: list[int]) -> list[int]:
    return first + second


def _interleave(first: list[int], second: list[int]) -> list[int]:
    values = []
    for pair in zip(first, second, strict=False):
        values.extend(pair)
    return values


def _reverse(values: list[int]) -> list[int]:
    return values[::-1]


def _scan(values: list[int]) -> list[int]:
    return list(itertools.accumulate(values))


# name -> (function, types of its arguments)
FUNCTIONS: dict[str, tuple[Callable[..., list[int]], tuple[type, ...]]] = {
    "range": (_range, (int, int, int)),
    "repeat": (_repeat, (list, int)),
    "concat": (_concat, (list, list)),
    "interleave": (_interleave, (list, list)),
    "reverse": (_reverse, (list,)),
    "scan": (_scan, (list,)),
}


def size(program: str) -> int:
    """Return the number of numbers, lists and function calls in a program."""
    tree = ast.parse(program.strip(), mode="eval")
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.List | ast.Call):
            count += 1
    return count


def worth(program: str, sequence: list[int]) -> float:
    """Return the ``reward`` of one program."""
    if not writes(program, sequence):
        return 0.0
    relative_size = size(program) / len(sequence)
    return max(0.0, 1.0 - relative_size)


def writes(program: str, sequence: list[int]) -> bool:
    """Return whether the program produces exactly this sequence."""
    try:
        return run(program) == sequence
    except ProgramError:
        return False


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return ``config.size`` sequences. Each is the output of a shorter program drawn from ``seed``.

    Host; ``columns`` is ``sequence`` (list of whole numbers) and ``program`` (the drawn program, which may not be the
    shortest).

    Raises:
        ConfigError: an argument that is not in ``ARGUMENTS``, or a value that is not allowed.
    """
    from jaxrl_llm.types import Example  # imported here because reward workers import this module without jax

    arguments = checked(config.arguments, ARGUMENTS)
    rng = np.random.default_rng(seed)
    examples = []
    num_programs = 0
    while len(examples) < config.size:
        num_programs += 1
        if num_programs > 1000 * (len(examples) + 1):
            raise ConfigError(
                f"prompts.arguments={config.arguments!r} must allow programs that are shorter than their output: "
                "hardly any was drawn. Set a larger length."
            )
        program = draw_program(rng, arguments["depth"], arguments["largest"])
        try:
            sequence = run(program)
        except ProgramError:  # the output is too large
            continue
        if not sequence or len(sequence) > arguments["length"] or worth(program, sequence) == 0.0:
            continue
        numbers = " ".join(str(number) for number in sequence)
        prompt = f"Write the shortest program that gives this sequence: {numbers}"
        columns = {"sequence": sequence, "program": program}
        origin = f"kolmogorov:{len(examples) + 1}"
        examples.append(Example(prompt, columns, origin))
    return Loaded(tuple(examples))


def draw_program(rng: np.random.Generator, depth: int, largest: int) -> str:
    """Draw a program whose function calls are nested at most ``depth`` deep."""
    if depth == 0:
        return _draw_list(rng, largest)
    # The order of the names and of the draws determines which programs a seed draws.
    names = ("range", "repeat", "concat", "interleave", "reverse", "scan")
    name = names[rng.integers(len(names))]
    if name == "range":
        start = _draw_number(rng, 0, largest)
        stop = _draw_number(rng, 0, largest) + largest
        step = _draw_number(rng, 1, largest)
        return f"range({start},{stop},{step})"
    first = draw_program(rng, depth - 1, largest)
    if name == "repeat":
        count = rng.integers(2, 6)
        return f"repeat({first},{count})"
    if name in ("concat", "interleave"):
        second = draw_program(rng, depth - 1, largest)
        return f"{name}({first},{second})"
    return f"{name}({first})"


def _draw_list(rng: np.random.Generator, largest: int) -> str:
    """Draw a list of one to four numbers."""
    count = rng.integers(1, 5)
    numbers = [str(_draw_number(rng, 0, largest)) for _ in range(count)]
    return f"[{','.join(numbers)}]"


def _draw_number(rng: np.random.Generator, least: int, largest: int) -> int:
    return int(rng.integers(least, largest + 1))


def program_of(completion: str) -> str:
    """Return the last fenced block of a completion, or else its last line that is not blank."""
    blocks = FENCED.findall(completion)
    if blocks:
        return blocks[-1].strip()
    for line in reversed(completion.splitlines()):
        if line.strip():
            return line.strip()
    return ""


def reward(prompts: list, completions: list[str], *, sequence: list[list[int]], **columns) -> list[float]:
    """Return the fraction by which the program is shorter than the sequence; 0.0 if it produces another sequence.

        max(0, 1 - (numbers, lists and functions of the program) / numbers of the sequence)

    A program that only lists the sequence scores 0.
    """
    scores = []
    for text, wanted in zip(completions, sequence, strict=True):
        program = program_of(text)
        scores.append(worth(program, wanted))
    return scores


def exact(prompts: list, completions: list[str], *, sequence: list[list[int]], **columns) -> list[float]:
    """Return 1.0 if the program produces the sequence, however long the program is, else 0.0."""
    scores = []
    for text, wanted in zip(completions, sequence, strict=True):
        program = program_of(text)
        scores.append(float(writes(program, wanted)))
    return scores
