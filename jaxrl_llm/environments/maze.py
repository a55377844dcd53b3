"""A text game: the way out of a maze, as an environment (``environments.factory``), in two forms.

    jaxrl_llm.environments.maze:Maze    a tool, ``go(direction)``
    jaxrl_llm.environments.maze:plain   goes where the last of the letters n, e, s, w in a turn says, and answers with
                                        the field and its exits, " 12es". For models that do not know how to call tools.

    jaxrl_llm.environments.maze:patched as plain, but along an expert's way, a shortest one: a step that leaves it is
                                        answered with the expert's own and where that comes to, " e:10ns", and the
                                        episode goes on from there; it ends with the third such step

``:steps`` is the reward of ``plain``: for each turn 1.0 where it comes to the goal, -0.1 where it goes nowhere;
``:matched`` that of ``patched``: for each turn whether it was the expert's. The
questions are those of ``prompts.source="maze"``. Many ways lead to one field: its answer is the same each time, which
methods that compare turns of one state need (algorithm.advantage="gigpo").

Owns: moves and what they are worth. Does not know: how mazes are made (questions.tasks.maze).
"""

from __future__ import annotations

import itertools
import re
from typing import Any

MOVES = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}
NAMES = {"n": "north", "e": "east", "s": "south", "w": "west"}
NOWHERE = -0.1
PATCHES = 2


class Maze:
    """A maze; the way is found by going."""

    def reset(self, maze: list[list[str]], start: list[int], goal: list[int], **columns: Any) -> str:
        self.maze, self.place, self.goal, self.bumps = maze, tuple(start), tuple(goal), 0
        return f" {self._seen()}"

    def go(self, direction: str) -> str:
        """Goes one field on.

        Args:
            direction: north, east, south or west.
        """
        place = moved(self.maze, self.place, str(direction).strip().lower()[:1])
        self.bumps += place == self.place
        there = "There is a wall. " if place == self.place else ""
        self.place = place
        return f"{there}{self._seen()}"

    def get_reward(self) -> float:
        """1.0 at the goal, and -0.1 for each time that it went nowhere."""
        return float(self.place == self.goal) + NOWHERE * self.bumps

    def _seen(self) -> str:
        if self.place == self.goal:
            return "You are out."
        x, y = self.place
        return f"You are at {x}, {y}, and can go {' or '.join(NAMES[exit] for exit in self.maze[y][x])}."


def moved(maze: list[list[str]], place: tuple[int, int], direction: str) -> tuple[int, int]:
    """Where a step leads; where there is no way, it stays."""
    x, y = place
    if not direction or direction not in maze[y][x]:
        return place
    return x + MOVES[direction][0], y + MOVES[direction][1]


def walked(turns: list[str], maze: list[list[str]], start: list[int], goal: list[int]) -> list[tuple[int, int]]:
    """Fields after each turn, the start first; those after the goal are the goal."""
    places = [tuple(start)]
    for turn in turns:
        wanted = re.findall("[nesw]", turn)
        here = places[-1]
        places.append(here if here == tuple(goal) else moved(maze, here, wanted[-1] if wanted else ""))
    return places


def plain(prompt: Any, turns: list[str], maze: list, start: list, goal: list, **columns: Any) -> str | None:
    """The field that the last turn came to and its exits; None, the end, at the goal."""
    x, y = place = walked(turns, maze, start, goal)[-1]
    return None if place == tuple(goal) else field(maze, x, y)


def field(maze: list[list[str]], x: int, y: int) -> str:
    return f" {x}{y}{maze[y][x]}"


def expert(maze: list[list[str]], start: list[int], goal: list[int]) -> str:
    """Directions of a shortest way; of several the first in the order n, e, s, w at the field where they part."""
    ways, found = {tuple(start): ""}, [tuple(start)]
    for place in found:
        for direction in MOVES:
            new = moved(maze, place, direction)
            if new not in ways:
                ways[new] = ways[place] + direction
                found.append(new)
    return ways[tuple(goal)]


def _went(turns: list[str], way: str) -> list[bool]:
    """Whether each turn is the expert's step."""
    wanted = [re.findall("[nesw]", turn) for turn in turns]
    return [bool(went) and went[-1] == step for went, step in zip(wanted, way, strict=False)]


def patched(prompt: Any, turns: list[str], maze: list, start: list, goal: list, **columns: Any) -> str | None:
    """The expert's next field, whatever the turn; None, the end, at the goal or after the third step of another way.

    Source: UI-S1, arXiv:2509.11543: the policy's own outputs along an expert's trajectory, patched where they leave it,
        so that later steps are still trained on. Differs: the wrong step stays in the row, and the patch follows it.
    """
    way = expert(maze, start, goal)
    went, taken = _went(turns, way), way[: len(turns)]
    if len(turns) >= len(way) or went.count(False) > PATCHES:
        return None
    x, y = walked(list(taken), maze, start, goal)[-1]
    return field(maze, x, y) if went[-1] else f" {taken[-1]}:{field(maze, x, y).strip()}"


def _turns(messages: list[dict[str, str]]) -> list[str]:
    """What the policy has said."""
    return [message["content"] for message in messages if message["role"] == "assistant"]


def matched(
    prompts: list, completions: list[str], messages: list, maze: list, start: list, goal: list, **columns: Any
) -> list[list[float]]:
    """Of each completion's turns 1.0 for the expert's step, else 0.0."""
    worth = []
    for row, *own in zip(messages, maze, start, goal, strict=True):
        turns = _turns(row)
        went = _went(turns, expert(*own))
        worth.append([float(x) for x in went] + [0.0] * (len(turns) - len(went)))
    return worth


def steps(
    prompts: list, completions: list[str], messages: list, maze: list, start: list, goal: list, **columns: Any
) -> list[list[float]]:
    """Of each completion what its turns are worth."""
    worth = []
    for row, *own in zip(messages, maze, start, goal, strict=True):
        places, out = walked(_turns(row), *own), tuple(own[2])
        pairs = itertools.pairwise(places)
        worth.append([float(after == out != before) if after != before else NOWHERE for before, after in pairs])
    return worth
