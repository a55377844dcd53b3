"""Grid puzzles in the style of ARC: write a program that turns each grid into its partner.

    python -m jaxrl_llm.train --config=configs/codeit.py --workdir=runs/codeit

This example shows questions with a scorer of their own, and a hindsight function: wrong programs are relabelled, so
that the policy learns from them too (CodeIt).

A grid is rows of digits, "120/034". A question shows pairs of grids, "12/34>21/43 05/60>50/06:". The answer is a
program that turns the first grid of each pair into the second. A program is a sequence of steps without separators:

    h v     mirror left and right, top and bottom        r    turn clockwise        t    swap rows and columns
    u l     shift up, left by one; the row or column that leaves comes back on the other side
    12      change every 1 to 2

``prompts.arguments``:

    pairs      2; number of pairs
    side       3; maximum side length of a grid
    colours    4; number of colours
    steps      3; maximum number of steps of the program that made the question

``:reward`` is 1.0 for a program that solves the question. ``:hindsight``, for ``external.paths``, relabels the other
programs. For each other result it makes the question that this result answers. The new group contains all valid
programs of the old group, each scored on the new question (configs/codeit.py).

Source: CodeIt, Butt et al. 2024, arXiv:2402.04858: programs are relabelled with the outputs that they have. Differs:
the language and the questions are small and ours; programs are not mutated; wrong programs of the group are kept too.

Owns: the language, its questions, relabelling. Does not know: tokens, how relabelled lines become training rows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.examples.grids:reward"

# argument -> (default, least, most)
ARGUMENTS = {"pairs": (2, 1, 9), "side": (3, 2, 30), "colours": (4, 2, 10), "steps": (3, 1, 20)}
STEP = re.compile(r"[hvrtul]|\d\d")
MAX_STEPS = 64


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return ``config.size`` questions drawn from ``seed``. At least one grid of each question changes.

    Host; ``columns`` is ``grids`` (the first grid of each pair), ``made`` (the second grid of each pair) and ``answer``
    (a program).

    Raises:
        ConfigError: an argument that is not in ``ARGUMENTS``, or a value that is not allowed.
    """
    from jaxrl_llm.types import Example

    pairs, side, colours, steps = checked(config.arguments, ARGUMENTS).values()
    rng, examples = np.random.default_rng(seed), []
    while len(examples) < config.size:
        grids = [_drawn(rng, side, colours) for _ in range(pairs)]
        words = [*"hvrtul", f"{rng.integers(colours)}{rng.integers(colours)}"]
        program = "".join(words[rng.integers(len(words))] for _ in range(rng.integers(1, steps + 1)))
        made = [result for grid in grids if (result := run(program, grid)) is not None]
        if len(made) == len(grids) and made != grids:
            prompt = question(grids, made)
            columns = {"grids": grids, "made": made, "answer": program}
            examples.append(Example(prompt, columns, f"grids:{len(examples) + 1}"))
    return Loaded(tuple(examples))


def _drawn(rng: np.random.Generator, side: int, colours: int) -> str:
    height, width = rng.integers(1, side + 1, 2)
    return "/".join("".join(map(str, row)) for row in rng.integers(0, colours, (height, width)))


def question(grids: list[str], made: list[str]) -> str:
    return " ".join(f"{grid}>{other}" for grid, other in zip(grids, made, strict=True)) + ":"


def run(program: str, grid: str) -> str | None:
    """Return the grid that a program makes of ``grid``. Return None if the program is invalid or has too many steps."""
    steps = STEP.findall(program)
    if not steps or "".join(steps) != program or len(steps) > MAX_STEPS:
        return None
    cells = np.array([list(row) for row in grid.split("/")])
    for step in steps:
        cells = np.where(cells == step[0], step[1], cells) if step.isdigit() else STEPS[step](cells)
    return "/".join("".join(row) for row in cells)


STEPS = {
    "h": lambda cells: cells[:, ::-1],
    "v": lambda cells: cells[::-1],
    "r": lambda cells: np.rot90(cells, -1),
    "t": lambda cells: cells.T,
    "u": lambda cells: np.roll(cells, -1, axis=0),
    "l": lambda cells: np.roll(cells, -1, axis=1),
}


def reward(prompts: list, completions: list[str], grids: list, made: list, **columns: Any) -> list[float]:
    """Return 1.0 if the completion is a program that turns each grid into its partner, else 0.0."""
    scores = []
    for text, first, second in zip(completions, grids, made, strict=True):
        scores.append(float([run(text.strip(), grid) for grid in first] == second))
    return scores


def hindsight(prompts: list, completions: list[str], grids: list, made: list, **columns: Any) -> list[dict[str, Any]]:
    """Return one relabelled group for each wrong result of the group's programs, sorted by prompt.

    The list is empty if fewer than two completions are valid programs. A result that leaves the grids unchanged makes
    no group.
    """
    programs = []
    results = []
    for text in completions:
        result = [run(text.strip(), grid) for grid in grids[0]]
        whole = tuple(grid for grid in result if grid is not None)
        if len(whole) == len(result):
            programs.append(text.strip())
            results.append(whole)
    if len(programs) < 2:
        return []
    lines = []
    for wanted in set(results) - {tuple(made[0]), tuple(grids[0])}:
        line = {
            "prompt": question(grids[0], list(wanted)),
            "grids": grids[0],
            "made": list(wanted),
            "completions": programs,
            "rewards": [float(result == wanted) for result in results],
        }
        lines.append(line)
    return sorted(lines, key=lambda line: line["prompt"])
