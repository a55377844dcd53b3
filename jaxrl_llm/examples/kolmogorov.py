"""KoLMogorov task: write the shortest program that produces a given sequence.

    python -m jaxrl_llm.train --config=configs/debug.py --workdir=runs/kolmogorov \\
        --config.prompts.source=kolmogorov --config.prompts.max_tokens=256

This example shows questions with a partial reward: a shorter program scores more than a longer one. It has no
dependency.

    "1 2 1 2 1 2"  is written by  repeat([1,2],3)

A program is an expression of whole numbers, lists in brackets and these functions:

    range(a,b,s)     a, a+s, .. up to but without b             repeat(x,n)      x, n times in a row
    concat(x,y)      x, then y                                  interleave(x,y)  items in turn, as long as both last
    reverse(x)       x from its end to its start                scan(x)          cumulative sums

``prompts.arguments``, whole numbers:

    length     24; maximum length of a sequence
    depth      2; depth of the function calls in the program that made the sequence
    largest    9; largest number drawn for a program

Owns: the language, its questions, compression as a reward. Does not know: tokenizers, models.

Source: The KoLMogorov Test, arXiv:2503.13992: programs of a small language are drawn, and their output is the question.
Differs: the language is ours. The reward is ours too, because the paper's formula was not found.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked
from jaxrl_llm.settings.schema import ConfigError

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.examples.kolmogorov:reward"

# argument -> (default, least, most)
ARGUMENTS = {"length": (24, 4, 1000), "depth": (2, 1, 5), "largest": (9, 2, 1000)}
MAX_CHARS, MAX_NUMBERS, MAX_SIZE = 2000, 10_000, 10**12
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
        value = _value(ast.parse(program.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(f"no program: {error}") from error
    if not isinstance(value, list):
        raise ProgramError("a program gives a list")
    return value


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return _short([_number(x) for x in node.elts])
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
    ):
        return _call(node.func.id, node.args)
    raise ProgramError(f"there is no {ast.unparse(node)[:50]!r} in the language")


def _call(name: str, arguments: list[ast.expr]) -> list[int]:
    """Return the result of a function of the language."""
    function, kinds = FUNCTIONS[name]
    if len(kinds) != len(arguments):
        raise ProgramError(f"{name} takes {len(kinds)} arguments, not {len(arguments)}")
    values: list[Any] = []
    for kind, node in zip(kinds, arguments, strict=True):
        values.append(_number(node) if kind is int else _list(node))
    return _short(function(*values))


def _number(node: ast.expr) -> int:
    value = _value(node)
    if isinstance(value, int) and abs(value) <= MAX_SIZE:
        return value
    raise ProgramError(f"{ast.unparse(node)[:50]!r} must be a number of at most {MAX_SIZE}")


def _list(node: ast.expr) -> list[int]:
    if isinstance(value := _value(node), list):
        return value
    raise ProgramError("a list is wanted")


def _short(values: list[int]) -> list[int]:
    if len(values) > MAX_NUMBERS or any(abs(x) > MAX_SIZE for x in values):
        raise ProgramError(f"a list of more than {MAX_NUMBERS} numbers, or of too large ones")
    return values


def _range(a: int, b: int, s: int) -> list[int]:
    if s == 0 or len(range(a, b, s)) > MAX_NUMBERS:
        raise ProgramError("a range without end, or too long")
    return list(range(a, b, s))


def _repeat(x: list[int], n: int) -> list[int]:
    if n * len(x) > MAX_NUMBERS:
        raise ProgramError(f"a list of more than {MAX_NUMBERS} numbers")
    return x * n


FUNCTIONS = {
    "range": (_range, (int, int, int)),
    "repeat": (_repeat, (list, int)),
    "concat": (lambda x, y: x + y, (list, list)),
    "interleave": (lambda x, y: [z for pair in zip(x, y, strict=False) for z in pair], (list, list)),
    "reverse": (lambda x: x[::-1], (list,)),
    "scan": (lambda x: np.cumsum(np.array(x, object)).tolist() if x else [], (list,)),
}


def size(program: str) -> int:
    """Return the number of numbers, lists and function calls in a program."""
    kinds = (ast.Constant, ast.List, ast.Call)
    return sum(isinstance(node, kinds) for node in ast.walk(ast.parse(program.strip(), mode="eval")))


def worth(program: str, sequence: list[int]) -> float:
    """Return the ``reward`` of one program."""
    return max(0.0, 1.0 - size(program) / len(sequence)) if writes(program, sequence) else 0.0


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

    length, depth, largest = checked(config.arguments, ARGUMENTS).values()
    rng, examples, tries = np.random.default_rng(seed), [], 0
    while len(examples) < config.size:
        if (tries := tries + 1) > 1000 * (len(examples) + 1):
            raise ConfigError(
                f"prompts.arguments={config.arguments!r} leave hardly a program shorter than what it writes"
            )
        program = drawn(rng, depth, largest)
        try:
            sequence = run(program)
        except ProgramError:  # the output is too large
            continue
        if not sequence or len(sequence) > length or not worth(program, sequence):
            continue
        prompt = f"Write the shortest program that gives this sequence: {' '.join(map(str, sequence))}"
        origin = f"kolmogorov:{len(examples) + 1}"
        examples.append(Example(prompt, {"sequence": sequence, "program": program}, origin))
    return Loaded(tuple(examples))


def drawn(rng: np.random.Generator, depth: int, largest: int) -> str:
    """Draw a program whose function calls are nested at most ``depth`` deep."""
    number = lambda low=0: int(rng.integers(low, largest + 1))
    if depth == 0:
        return f"[{','.join(str(number()) for _ in range(rng.integers(1, 5)))}]"
    inner = lambda: drawn(rng, depth - 1, largest)
    forms = {
        "range": lambda: f"range({number()},{number() + largest},{number(1)})",
        "repeat": lambda: f"repeat({inner()},{rng.integers(2, 6)})",
        "concat": lambda: f"concat({inner()},{inner()})",
        "interleave": lambda: f"interleave({inner()},{inner()})",
        "reverse": lambda: f"reverse({inner()})",
        "scan": lambda: f"scan({inner()})",
    }
    return forms[list(forms)[rng.integers(len(forms))]]()


def program_of(completion: str) -> str:
    """Return the last fenced block of a completion, or else its last line that is not blank."""
    if fenced := FENCED.findall(completion):
        return fenced[-1].strip()
    lines = [line.strip() for line in completion.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def reward(prompts: list, completions: list[str], *, sequence: list[list[int]], **columns) -> list[float]:
    """Return how much shorter the program is than the sequence, or 0.0 if the program does not produce the sequence.

        max(0, 1 - (numbers, lists and functions of the program) / numbers of the sequence)

    A program that only lists the sequence scores 0.
    """
    return [worth(program_of(text), wanted) for text, wanted in zip(completions, sequence, strict=True)]


def exact(prompts: list, completions: list[str], *, sequence: list[list[int]], **columns) -> list[float]:
    """Return 1.0 if the program produces the sequence, however long the program is, else 0.0."""
    return [float(writes(program_of(text), wanted)) for text, wanted in zip(completions, sequence, strict=True)]
