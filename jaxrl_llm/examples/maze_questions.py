"""Mazes for the game ``examples.maze``. No dependency.

``prompts.arguments``:

    width, height    3; size of the maze in fields, 2 to 9
    loops            1; number of walls removed beyond those that connect all fields
    plain            False; True makes prompts of a few letters, for small models

Owns: the questions. Does not know: the game, tokenizers, models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.examples.maze import MOVES, field
from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = ""  # set rewards.functions to a reward of environments.maze or to "environment"

# argument -> (default, least, most)
ARGUMENTS = {"width": (3, 2, 9), "height": (3, 2, 9), "loops": (1, 0, 200), "plain": (False, False, True)}


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return ``config.size`` mazes drawn from ``seed``: the start is in the left column, the goal in the right one.

    Host; ``columns`` are ``maze`` (the exits of each field by row, such as "nes"), ``start`` and ``goal`` (x, y; the
    origin is the upper left field).

    Raises:
        ConfigError: an argument that is not in ``ARGUMENTS``, or a value that is not allowed.
    """
    from jaxrl_llm.types import Example  # imported here because reward workers import task modules without jax

    given = checked(config.arguments, ARGUMENTS)
    rng, examples = np.random.default_rng(seed), []
    for i in range(1, config.size + 1):
        maze = drawn(rng, given["width"], given["height"], given["loops"])
        start, goal = [0, int(rng.integers(given["height"]))], [given["width"] - 1, int(rng.integers(given["height"]))]
        prompt = f"Find the way out of the maze, which is at {goal[0]}, {goal[1]}. Call go."
        if given["plain"]:
            prompt = f"{field(maze, *start)} to {goal[0]}{goal[1]}:"
        examples.append(Example(prompt, {"maze": maze, "start": start, "goal": goal}, f"maze:{i}"))
    return Loaded(tuple(examples))


def drawn(rng: np.random.Generator, width: int, height: int, loops: int) -> list[list[str]]:
    """Draw a maze in which every field is connected to every other, and return the exits of each field.

    Walls are visited in random order. A wall is removed if it separates two unconnected parts. ``loops`` further walls
    are removed.
    """
    inside = lambda x, y: 0 <= x < width and 0 <= y < height
    walls = [(x, y, way) for x in range(width) for y in range(height) for way in "es" if inside(*_next(x, y, way))]
    part = {(x, y): (x, y) for x in range(width) for y in range(height)}
    exits = {place: "" for place in part}
    for x, y, way in (walls[i] for i in rng.permutation(len(walls))):
        here, there = part[x, y], part[_next(x, y, way)]
        if here == there and loops <= 0:
            continue
        loops -= here == there
        part = {place: here if own == there else own for place, own in part.items()}
        exits[x, y] += way
        exits[_next(x, y, way)] += {"e": "w", "s": "n"}[way]
    return [["".join(way for way in MOVES if way in exits[x, y]) for x in range(width)] for y in range(height)]


def _next(x: int, y: int, way: str) -> tuple[int, int]:
    return x + MOVES[way][0], y + MOVES[way][1]
