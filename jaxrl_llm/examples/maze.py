"""Mazes: questions, an environment in three forms, rewards by turn, and the settings of a job.

    python -m jaxrl_llm.train --config=configs/maze.py --workdir=runs/maze

This example shows how one module can be a whole task of several turns:

- ``load`` makes the questions of ``prompts.source="maze"``.
- ``Maze``, ``plain`` and ``patched`` are environments (``environments.factory``).
- ``steps`` and ``matched`` are rewards that give every turn its own number (``rewards.functions``).
- ``get_config`` puts them together. The recipes for methods by turn begin with it.

The environments are:

    jaxrl_llm.examples.maze:Maze      a tool, ``go(direction)``
    jaxrl_llm.examples.maze:plain     moves by the last of the letters n, e, s, w in a turn and replies with the field
                                      and its exits, " 12es". For models that cannot call tools.
    jaxrl_llm.examples.maze:patched   like plain, along an expert's shortest path. After a wrong step the reply is the
                                      expert's step and its field, " e:10ns", and the episode continues from there.
                                      The third wrong step ends the episode.

``steps`` is the reward for ``plain``: each turn scores 1.0 if it reaches the goal and -0.1 if it does not move.
``matched`` is the reward for ``patched``: each turn scores 1.0 if it is the expert's step. Different paths lead to the
same field, and the reply for a field is always the same. Methods that compare turns in the same state need this
(algorithm.advantage="gigpo").

``prompts.arguments``:

    width, height    3; size of the maze in fields, 2 to 9
    loops            1; number of walls removed beyond those that connect all fields
    plain            False; True makes prompts of a few letters, for small models

This module depends on no other package than NumPy.

Owns: the questions, moves and their rewards, the settings of the job. Does not know: tokenizers, models.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig, Settings

SCORER = ""  # set rewards.functions to a reward of this module or to "environment"

# argument -> (default, least, most)
ARGUMENTS = {"width": (3, 2, 9), "height": (3, 2, 9), "loops": (1, 0, 200), "plain": (False, False, True)}

MOVES = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}
NAMES = {"n": "north", "e": "east", "s": "south", "w": "west"}
NOWHERE = -0.1
PATCHES = 2


# ---- questions -------------------------------------------------------------------------------------------------


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return ``config.size`` mazes drawn from ``seed``: the start is in the left column, the goal in the right one.

    Host; ``columns`` are ``maze`` (the exits of each field by row, such as "nes"), ``start`` and ``goal`` (x, y; the
    origin is the upper left field).

    Raises:
        ConfigError: an argument that is not in ``ARGUMENTS``, or a value that is not allowed.
    """
    from jaxrl_llm.types import Example  # imported here because reward workers import task modules without jax

    arguments = checked(config.arguments, ARGUMENTS)
    width = arguments["width"]
    height = arguments["height"]
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(1, config.size + 1):
        maze = drawn(rng, width, height, arguments["loops"])
        start = [0, int(rng.integers(height))]
        goal = [width - 1, int(rng.integers(height))]
        prompt = f"Find the way out of the maze, which is at {goal[0]}, {goal[1]}. Call go."
        if arguments["plain"]:
            prompt = f"{field(maze, *start)} to {goal[0]}{goal[1]}:"
        examples.append(Example(prompt, {"maze": maze, "start": start, "goal": goal}, f"maze:{i}"))
    return Loaded(tuple(examples))


def drawn(rng: np.random.Generator, width: int, height: int, loops: int) -> list[list[str]]:
    """Draw a maze in which every field is connected to every other, and return the exits of each field.

    Walls are visited in random order. A wall is removed if it separates two unconnected parts. ``loops`` further walls
    are removed.
    """
    places = [(x, y) for x in range(width) for y in range(height)]
    walls = [(place, way) for place in places for way in "es" if _next(place, way) in places]
    part = {place: place for place in places}
    exits = dict.fromkeys(places, "")
    for i in rng.permutation(len(walls)):
        place, way = walls[i]
        neighbour = _next(place, way)
        here = part[place]
        there = part[neighbour]
        if here == there:
            if loops <= 0:
                continue
            loops -= 1
        for other, its_part in part.items():
            if its_part == there:
                part[other] = here
        exits[place] += way
        exits[neighbour] += {"e": "w", "s": "n"}[way]
    return [["".join(way for way in MOVES if way in exits[x, y]) for x in range(width)] for y in range(height)]


def _next(place: tuple[int, int], way: str) -> tuple[int, int]:
    """Return the field that lies in a direction, without regard to walls."""
    x, y = place
    return x + MOVES[way][0], y + MOVES[way][1]


# ---- environments and rewards ----------------------------------------------------------------------------------


class Maze:
    """Maze that the policy explores with the tool ``go``."""

    def reset(self, maze: list[list[str]], start: list[int], goal: list[int], **columns: Any) -> str:
        self.maze = maze
        self.place = _place(start)
        self.goal = _place(goal)
        self.bumps = 0
        return f" {self._seen()}"

    def go(self, direction: str) -> str:
        """Goes one field in a direction.

        Args:
            direction: north, east, south or west.
        """
        place = moved(self.maze, self.place, str(direction).strip().lower()[:1])
        note = ""
        if place == self.place:
            self.bumps += 1
            note = "There is a wall. "
        self.place = place
        return f"{note}{self._seen()}"

    def get_reward(self) -> float:
        """Return 1.0 at the goal, minus 0.1 for each step against a wall."""
        return float(self.place == self.goal) + NOWHERE * self.bumps

    def _seen(self) -> str:
        if self.place == self.goal:
            return "You are out."
        x, y = self.place
        return f"You are at {x}, {y}, and can go {' or '.join(NAMES[exit] for exit in self.maze[y][x])}."


def moved(maze: list[list[str]], place: tuple[int, int], direction: str) -> tuple[int, int]:
    """Return the field that a step leads to, or the same field if there is no exit in this direction."""
    x, y = place
    if not direction or direction not in maze[y][x]:
        return place
    return x + MOVES[direction][0], y + MOVES[direction][1]


def walked(turns: list[str], maze: list[list[str]], start: list[int], goal: list[int]) -> list[tuple[int, int]]:
    """Return the start and the field after each turn. After the goal is reached, the field stays the goal."""
    places = [_place(start)]
    for turn in turns:
        here = places[-1]
        directions = re.findall("[nesw]", turn)
        if here != _place(goal):
            here = moved(maze, here, directions[-1] if directions else "")
        places.append(here)
    return places


def _place(coordinates: list[int]) -> tuple[int, int]:
    x, y = coordinates
    return x, y


def plain(prompt: Any, turns: list[str], maze: list, start: list, goal: list, **columns: Any) -> str | None:
    """Return the field that the last turn reached and its exits, or None at the goal, which ends the episode."""
    x, y = place = walked(turns, maze, start, goal)[-1]
    return None if place == tuple(goal) else field(maze, x, y)


def field(maze: list[list[str]], x: int, y: int) -> str:
    return f" {x}{y}{maze[y][x]}"


def expert(maze: list[list[str]], start: list[int], goal: list[int]) -> str:
    """Return the directions of a shortest path. Among equal paths, the order n, e, s, w decides where they separate."""
    paths = {_place(start): ""}
    queue = [_place(start)]
    for place in queue:
        for direction in MOVES:
            neighbour = moved(maze, place, direction)
            if neighbour not in paths:
                paths[neighbour] = paths[place] + direction
                queue.append(neighbour)
    return paths[_place(goal)]


def _is_expert_step(turns: list[str], path: str) -> list[bool]:
    """Return for each turn whether it is the expert's step. Turns after the end of the path have no entry."""
    directions = [re.findall("[nesw]", turn)[-1:] for turn in turns]
    return [direction == [step] for direction, step in zip(directions, path, strict=False)]


def patched(prompt: Any, turns: list[str], maze: list, start: list, goal: list, **columns: Any) -> str | None:
    """Return the expert's next field. It does not depend on the turn.

    The result is None, which ends the episode, at the goal or after the third wrong step.

    Source: UI-S1, arXiv:2509.11543: the policy's own outputs follow an expert's trajectory and are patched when they
        leave it, so that later steps are still trained on. Differs: the wrong step stays in the row, before its patch.
    """
    path = expert(maze, start, goal)
    is_right = _is_expert_step(turns, path)
    taken = path[: len(turns)]
    if len(turns) >= len(path) or is_right.count(False) > PATCHES:
        return None
    x, y = walked(list(taken), maze, start, goal)[-1]
    reply = field(maze, x, y)
    return reply if is_right[-1] else f" {taken[-1]}:{reply.strip()}"


def _turns(messages: list[dict[str, str]]) -> list[str]:
    """Return the policy's own messages."""
    return [message["content"] for message in messages if message["role"] == "assistant"]


def matched(
    prompts: list, completions: list[str], messages: list, maze: list, start: list, goal: list, **columns: Any
) -> list[list[float]]:
    """Return for each turn of each completion 1.0 if it is the expert's step, else 0.0."""
    scores = []
    for row, *question in zip(messages, maze, start, goal, strict=True):
        turns = _turns(row)
        is_right = _is_expert_step(turns, expert(*question))
        scores.append([float(x) for x in is_right] + [0.0] * (len(turns) - len(is_right)))
    return scores


def steps(
    prompts: list, completions: list[str], messages: list, maze: list, start: list, goal: list, **columns: Any
) -> list[list[float]]:
    """Return the reward of each turn of each completion."""
    scores = []
    for row, field_exits, first, last in zip(messages, maze, start, goal, strict=True):
        places = walked(_turns(row), field_exits, first, last)
        row_scores = []
        for before, after in itertools.pairwise(places):
            if after == before:
                row_scores.append(NOWHERE)
            else:
                row_scores.append(float(after == _place(last)))
        scores.append(row_scores)
    return scores


# ---- the job ---------------------------------------------------------------------------------------------------


def get_config() -> Settings:
    """Return the settings of a job with plain GRPO. The maze has 3 x 2 fields, and a turn ends with its letter."""
    from jaxrl_llm.config import defaults  # imported here because environments run in processes without jax

    config = defaults()
    config.prompts.source = "maze"
    config.prompts.arguments = {"width": 3, "height": 2, "plain": True}
    config.prompts.chat_template = False
    config.sampling.max_completion_tokens = 48
    config.sampling.stop_tokens = ("n", "e", "s", "w")
    config.environments.factory = "jaxrl_llm.examples.maze:plain"
    config.environments.max_answer_tokens = 8
    config.environments.max_turns = 6
    config.rewards.functions = ("jaxrl_llm.examples.maze:steps",)
    return config
