"""Grid puzzles in the style of ARC: write a program that turns the first grid of each pair into the second.

    python -m jaxrl_llm.train --config=configs/codeit.py --workdir=runs/codeit

This example shows questions with a scorer in the same module, and a hindsight function. Wrong programs are relabelled,
so that the policy learns from them too (CodeIt).

A grid is rows of digits, "120/034". A question shows pairs of grids, "12/34>21/43 05/60>50/06:". The answer is a
program that turns the first grid of each pair into the second. A program is a sequence of steps without separators:

    h v     Mirror left and right, top and bottom.        r    Turn clockwise.        t    Swap rows and columns.
    u l     Shift up, left by one. The row or column that leaves comes back on the other side.
    12      Change every 1 to 2.

``prompts.arguments``:

    pairs      2; number of pairs
    side       3; maximum side length of a grid
    colours    4; number of colours
    steps      3; maximum number of steps of the program that made the question

``:reward`` is 1.0 for a program that solves the question. ``:hindsight``, for ``external.paths``, relabels the other
programs. If a program produces wrong grids, ``:hindsight`` makes the question whose correct grids are these. The new
group contains all valid programs of the old group, each scored on the new question (configs/codeit.py).

Source: CodeIt, Butt et al. 2024, arXiv:2402.04858: programs are relabelled with the outputs that they produce. Differs:
this example has a small language and questions of its own. Programs are not mutated. Wrong programs of the group are
kept too.

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
ARGUMENTS = {
    "pairs": (2, 1, 9),
    "side": (3, 2, 30),
    "colours": (4, 2, 10),
    "steps": (3, 1, 20),
}
STEP = re.compile(r"[hvrtul]|\d\d")
MAX_STEPS = 64


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return ``config.size`` questions drawn from ``seed``. At least one grid of each question changes.

    Host; ``columns`` is ``grids`` (the first grid of each pair), ``made`` (the second grid of each pair) and ``answer``
    (a program).

    Raises:
        ConfigError: an argument that is not in ``ARGUMENTS``, or a value that is not allowed.
    """
    from jaxrl_llm.types import Example  # imported here because reward workers import this module without jax

    arguments = checked(config.arguments, ARGUMENTS)
    rng = np.random.default_rng(seed)
    examples = []
    while len(examples) < config.size:
        grids = []
        for _ in range(arguments["pairs"]):
            grids.append(_draw_grid(rng, arguments["side"], arguments["colours"]))
        program = _draw_program(rng, arguments["colours"], arguments["steps"])
        results = run_on_all(program, grids)
        if results is None or results == grids:
            continue
        prompt = question(grids, results)
        columns = {"grids": grids, "made": results, "answer": program}
        origin = f"grids:{len(examples) + 1}"
        examples.append(Example(prompt, columns, origin))
    return Loaded(tuple(examples))


def _draw_grid(rng: np.random.Generator, side: int, colours: int) -> str:
    """Draw a grid whose sides are at most ``side`` long."""
    height, width = rng.integers(1, side + 1, 2)
    cells = rng.integers(0, colours, (height, width))
    rows = ["".join(map(str, row)) for row in cells]
    return "/".join(rows)


def _draw_program(rng: np.random.Generator, colours: int, max_steps: int) -> str:
    """Draw a program of at most ``max_steps`` steps. It uses at most one change of colours."""
    before = rng.integers(colours)
    after = rng.integers(colours)
    choices = [*STEPS, f"{before}{after}"]
    num_steps = rng.integers(1, max_steps + 1)
    program = ""
    for _ in range(num_steps):
        program += choices[rng.integers(len(choices))]
    return program


def question(grids: list[str], results: list[str]) -> str:
    """Return the prompt that shows pairs of grids, such as "12/34>21/43 05/60>50/06:"."""
    pairs = [f"{grid}>{result}" for grid, result in zip(grids, results, strict=True)]
    return " ".join(pairs) + ":"


def run(program: str, grid: str) -> str | None:
    """Return the grid that a program produces from ``grid``; None if the program is invalid or too long."""
    steps = STEP.findall(program)
    is_whole = "".join(steps) == program
    if not steps or not is_whole or len(steps) > MAX_STEPS:
        return None
    rows = [list(row) for row in grid.split("/")]
    cells = np.array(rows)
    for step in steps:
        if step.isdigit():
            before, after = step
            cells = np.where(cells == before, after, cells)
        else:
            cells = STEPS[step](cells)
    return "/".join("".join(row) for row in cells)


def run_on_all(program: str, grids: list[str]) -> list[str] | None:
    """Return the grid that a program produces from each grid, or None if the program is invalid."""
    results = []
    for grid in grids:
        result = run(program, grid)
        if result is None:
            return None
        results.append(result)
    return results


def _mirror_left_right(cells: np.ndarray) -> np.ndarray:
    return cells[:, ::-1]


def _mirror_top_bottom(cells: np.ndarray) -> np.ndarray:
    return cells[::-1]


def _turn_clockwise(cells: np.ndarray) -> np.ndarray:
    return np.rot90(cells, -1)


def _shift_up(cells: np.ndarray) -> np.ndarray:
    return np.roll(cells, -1, axis=0)


def _shift_left(cells: np.ndarray) -> np.ndarray:
    return np.roll(cells, -1, axis=1)


# The order determines which programs a seed draws.
STEPS = {
    "h": _mirror_left_right,
    "v": _mirror_top_bottom,
    "r": _turn_clockwise,
    "t": np.transpose,
    "u": _shift_up,
    "l": _shift_left,
}


def reward(prompts: list, completions: list[str], grids: list, made: list, **columns: Any) -> list[float]:
    """Return 1.0 if the completion is a program that turns the first grid of each pair into the second, else 0.0."""
    scores = []
    for text, question_grids, wanted in zip(completions, grids, made, strict=True):
        results = run_on_all(text.strip(), question_grids)
        scores.append(float(results == wanted))
    return scores


def hindsight(prompts: list, completions: list[str], grids: list, made: list, **columns: Any) -> list[dict[str, Any]]:
    """Return one relabelled group for each wrong result of the group's programs, sorted by prompt.

    The list is empty if fewer than two completions are valid programs. A program that leaves the grids unchanged gives
    no group.
    """
    question_grids = list(grids[0])
    question_results = list(made[0])
    programs = []
    results_of_programs = []
    for text in completions:
        program = text.strip()
        results = run_on_all(program, question_grids)
        if results is not None:
            programs.append(program)
            results_of_programs.append(results)
    if len(programs) < 2:
        return []
    groups: dict[str, dict[str, Any]] = {}
    for wanted in results_of_programs:
        prompt = question(question_grids, wanted)
        if prompt in groups or wanted in (question_results, question_grids):
            continue
        groups[prompt] = {
            "prompt": prompt,
            "grids": grids[0],
            "made": wanted,
            "completions": programs,
            "rewards": [float(results == wanted) for results in results_of_programs],
        }
    return [groups[prompt] for prompt in sorted(groups)]
