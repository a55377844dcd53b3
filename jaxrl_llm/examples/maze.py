"""Mazes: questions, an environment in three forms, rewards by turn, and the settings of a job.

    python -m jaxrl_llm.train --config=configs/maze.py --workdir=runs/maze

This example shows how one module can be a whole task of several turns:

- ``load`` makes the questions of ``prompts.source="maze"``.
- ``Maze``, ``plain`` and ``patched`` are environments (``environments.factory``).
- ``steps`` and ``matched`` are rewards that give every turn its own number (``rewards.functions``).
- ``get_config`` puts these parts together. The recipes for methods with one advantage per turn start from this config.

The environments are:

    jaxrl_llm.examples.maze:Maze      a tool, ``go(direction)``
    jaxrl_llm.examples.maze:plain     moves by the last of the letters n, e, s, w in a turn and replies with the field
                                      and its exits, " 12es". For models that cannot call tools.
    jaxrl_llm.examples.maze:patched   like plain, along an expert's shortest path. After a wrong step the reply is the
                                      expert's step and its field, " e:10ns", and the episode continues from there.
                                      The third wrong step ends the episode.

``steps`` is the reward for ``plain``: each turn scores 1.0 if it reaches the goal and -0.1 if it does not move.
``matched`` is the reward for ``patched``: each turn scores 1.0 if it is the expert's step. Different paths lead to the
same field, and the reply for a field is always the same. Methods that compare turns in the same state need such
repeated replies (algorithm.advantage="gigpo").

``prompts.arguments``:

    width, height    3; size of the maze in fields, 2 to 9
    loops            1; number of walls removed after all fields are connected
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
ARGUMENTS = {
    "width": (3, 2, 9),
    "height": (3, 2, 9),
    "loops": (1, 0, 200),
    "plain": (False, False, True),
}

MOVES = {
    "n": (0, -1),
    "e": (1, 0),
    "s": (0, 1),
    "w": (-1, 0),
}
OPPOSITES = {"e": "w", "s": "n"}
NAMES = {
    "n": "north",
    "e": "east",
    "s": "south",
    "w": "west",
}
NOWHERE = -0.1  # reward of a step against a wall
PATCHES = 2  # wrong steps that the expert corrects


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
    for number in range(1, config.size + 1):
        maze = draw_maze(rng, width, height, arguments["loops"])
        start = [0, int(rng.integers(height))]
        goal = [width - 1, int(rng.integers(height))]
        goal_x, goal_y = goal
        prompt = f"Find the way out of the maze, which is at {goal_x}, {goal_y}. Call go."
        if arguments["plain"]:
            start_field = field(maze, *start)
            prompt = f"{start_field} to {goal_x}{goal_y}:"
        columns = {"maze": maze, "start": start, "goal": goal}
        examples.append(Example(prompt, columns, f"maze:{number}"))
    return Loaded(tuple(examples))


def draw_maze(rng: np.random.Generator, width: int, height: int, loops: int) -> list[list[str]]:
    """Draw a maze in which every field is connected to every other, and return the exits of each field.

    Walls are visited in random order. A wall is removed if the fields on its two sides are not connected yet.
    Afterwards, ``loops`` of the remaining walls are removed.
    """
    places = list(itertools.product(range(width), range(height)))
    walls = _walls(places)
    parts = {place: place for place in places}
    exits = dict.fromkeys(places, "")
    for i in rng.permutation(len(walls)):
        place, direction = walls[i]
        neighbour = _neighbour(place, direction)
        part = parts[place]
        neighbour_part = parts[neighbour]
        if part == neighbour_part:
            if loops <= 0:
                continue
            loops -= 1
        for member, member_part in parts.items():
            if member_part == neighbour_part:
                parts[member] = part
        exits[place] += direction
        exits[neighbour] += OPPOSITES[direction]
    rows = []
    for y in range(height):
        row = [_in_order(exits[x, y]) for x in range(width)]
        rows.append(row)
    return rows


def _walls(places: list[tuple[int, int]]) -> list[tuple[tuple[int, int], str]]:
    """Return each wall between two fields once, as a field and the direction of the wall."""
    walls: list[tuple[tuple[int, int], str]] = []
    for place in places:
        for direction in "es":
            if _neighbour(place, direction) in places:
                walls.append((place, direction))
    return walls


def _in_order(directions: str) -> str:
    """Return the directions in the order of ``MOVES``."""
    return "".join(direction for direction in MOVES if direction in directions)


def _neighbour(place: tuple[int, int], direction: str) -> tuple[int, int]:
    """Return the field that lies in a direction. Walls are ignored."""
    x, y = place
    step_x, step_y = MOVES[direction]
    return x + step_x, y + step_y


# ---- environments and rewards ----------------------------------------------------------------------------------


class Maze:
    """Maze that the policy explores with the tool ``go``."""

    def reset(self, maze: list[list[str]], start: list[int], goal: list[int], **columns: Any) -> str:
        """Begin at the start of the question's maze and return the first observation."""
        self.maze = maze
        self.place = _place(start)
        self.goal = _place(goal)
        self.bumps = 0
        return f" {self._observation()}"

    def go(self, direction: str) -> str:
        """Goes one field in a direction.

        Args:
            direction: north, east, south or west.
        """
        letter = str(direction).strip().lower()[:1]
        place = moved(self.maze, self.place, letter)
        note = ""
        if place == self.place:
            self.bumps += 1
            note = "There is a wall. "
        self.place = place
        return f"{note}{self._observation()}"

    def get_reward(self) -> float:
        """Return 1.0 at the goal, minus 0.1 for each step against a wall."""
        goal_reward = float(self.place == self.goal)
        return goal_reward + NOWHERE * self.bumps

    def _observation(self) -> str:
        if self.place == self.goal:
            return "You are out."
        x, y = self.place
        names = [NAMES[direction] for direction in self.maze[y][x]]
        exits = " or ".join(names)
        return f"You are at {x}, {y}, and can go {exits}."


def moved(maze: list[list[str]], place: tuple[int, int], direction: str) -> tuple[int, int]:
    """Return the field that a step leads to, or the same field if there is no exit in this direction."""
    x, y = place
    exits = maze[y][x]
    if not direction or direction not in exits:
        return place
    return _neighbour(place, direction)


def walked(
    turns: list[str],
    maze: list[list[str]],
    start: list[int],
    goal: list[int],
) -> list[tuple[int, int]]:
    """Return the start and the field after each turn. After the goal is reached, the field stays the goal."""
    place = _place(start)
    places = [place]
    for turn in turns:
        if place != _place(goal):
            place = moved(maze, place, _direction(turn))
        places.append(place)
    return places


def _direction(turn: str) -> str:
    """Return the last direction that a turn writes, or "" without a direction."""
    directions = re.findall("[nesw]", turn)
    return directions[-1] if directions else ""


def _place(coordinates: list[int]) -> tuple[int, int]:
    """Return a field of the question's columns as a tuple, which can be a dictionary key."""
    x, y = coordinates
    return x, y


def plain(prompt: Any, turns: list[str], maze: list, start: list, goal: list, **columns: Any) -> str | None:
    """Return the field that the last turn reached and its exits, or None at the goal, which ends the episode."""
    place = walked(turns, maze, start, goal)[-1]
    if place == _place(goal):
        return None
    return field(maze, *place)


def field(maze: list[list[str]], x: int, y: int) -> str:
    """Return a field and its exits as ``plain`` writes it, such as " 12es"."""
    exits = maze[y][x]
    return f" {x}{y}{exits}"


def expert(maze: list[list[str]], start: list[int], goal: list[int]) -> str:
    """Return the directions of a shortest path.

    If several paths are shortest, the expert takes the first direction in the order n, e, s, w.
    """
    start_place = _place(start)
    paths = {start_place: ""}
    queue = [start_place]
    for place in queue:
        for direction in MOVES:
            neighbour = moved(maze, place, direction)
            if neighbour not in paths:
                paths[neighbour] = paths[place] + direction
                queue.append(neighbour)
    return paths[_place(goal)]


def _is_expert_step(turns: list[str], path: str) -> list[bool]:
    """Return for each turn whether it is the expert's step. Turns after the end of the path have no entry."""
    is_right = []
    for turn, expert_step in zip(turns, path, strict=False):
        is_right.append(_direction(turn) == expert_step)
    return is_right


def patched(prompt: Any, turns: list[str], maze: list, start: list, goal: list, **columns: Any) -> str | None:
    """Return the expert's next field, whatever the policy's turn was.

    The result is None, which ends the episode, at the goal or after the third wrong step.

    Source: UI-S1, arXiv:2509.11543: the policy's own outputs follow an expert's trajectory and are replaced by the
        expert's when they leave it, so that later steps are still trained on. Differs: the wrong step stays in the row,
        before the expert's step.
    """
    path = expert(maze, start, goal)
    is_right = _is_expert_step(turns, path)
    num_wrong = is_right.count(False)
    if len(turns) >= len(path) or num_wrong > PATCHES:
        return None
    expert_steps = list(path[: len(turns)])
    place = walked(expert_steps, maze, start, goal)[-1]
    reply = field(maze, *place)
    if is_right[-1]:
        return reply
    return f" {expert_steps[-1]}:{reply.strip()}"


def _turns(messages: list[dict[str, str]]) -> list[str]:
    """Return the messages of the policy in a conversation."""
    return [message["content"] for message in messages if message["role"] == "assistant"]


def matched(
    prompts: list,
    completions: list[str],
    messages: list,
    maze: list,
    start: list,
    goal: list,
    **columns: Any,
) -> list[list[float]]:
    """Return for each turn of each completion 1.0 if it is the expert's step, else 0.0."""
    scores = []
    for row, *question in zip(messages, maze, start, goal, strict=True):
        turns = _turns(row)
        path = expert(*question)
        is_right = _is_expert_step(turns, path)
        num_later_turns = len(turns) - len(is_right)
        row_scores = [float(value) for value in is_right]
        scores.append(row_scores + [0.0] * num_later_turns)
    return scores


def steps(
    prompts: list,
    completions: list[str],
    messages: list,
    maze: list,
    start: list,
    goal: list,
    **columns: Any,
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
