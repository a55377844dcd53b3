"""The maze: every question has a path, and both forms of the environment give the same moves."""

import re
from collections import deque

import pytest
from support.refusal import refused

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.examples.maze import Maze, expert, matched, moved, patched, plain, steps, walked
from jaxrl_llm.questions import tasks

# 0,0 - 1,0
#        |
# 0,1 - 1,1
MAZE = {"maze": [["e", "sw"], ["e", "nw"]], "start": [0, 0], "goal": [0, 1]}
STEP = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}


def load(seed=0, size=50, **arguments):
    return tasks.load(PromptsConfig(source="maze", size=size, arguments=arguments), seed=seed).examples


def test_a_way_by_hand_is_worth_what_its_turns_are():
    turns = ["go e", "e", "", "ss", "north, I mean w"]
    # East; a wall; nothing said; south; the last letter of "mean w" is w: out.
    assert walked(turns, **MAZE) == [(0, 0), (1, 0), (1, 0), (1, 0), (1, 1), (0, 1)]
    answers = [plain("p", turns[: i + 1], **MAZE) for i in range(5)]
    assert answers == [" 10sw", " 10sw", " 10sw", " 11nw", None]
    messages = [{"role": role, "content": text} for text in turns for role in ("assistant", "user")]
    given = steps(["p"], [""], [messages], *([x] for x in MAZE.values()))
    assert given == [[0.0, -0.1, -0.1, 0.0, 1.0]]
    game = Maze()
    assert game.reset(**MAZE) == " You are at 0, 0, and can go east."
    said = [game.go(way) for way in ("east", "E", "", "south", "west")]
    assert said[0] == "You are at 1, 0, and can go south or west." and said[4] == "You are out."
    assert said[1] == said[2] == f"There is a wall. {said[0]}"
    assert game.get_reward() == pytest.approx(sum(given[0]))


def test_an_experts_way_is_gone_on_with_whatever_a_turn_says_and_patched_where_it_is_left():
    assert expert(**MAZE) == "esw"
    for turns, answer in (
        (["go e"], " 10sw"),
        (["n"], " e:10sw"),
        (["e", "e"], " s:11nw"),
        (["e", "", "w"], None),  # out
        (["n", "n"], " s:11nw"),  # left twice
        (["n", "s"], " 11nw"),
    ):
        assert patched("p", turns, **MAZE) == answer
    rows = [["e", "", "w"], ["n", "s", "s"], ["e", "s", "w", "w"]]
    messages = [[{"role": "assistant", "content": text} for text in row] for row in rows]
    given = matched([], [""] * 3, messages, *([x] * 3 for x in MAZE.values()))
    assert given == [[1, 0, 1], [0, 1, 0], [1, 1, 1, 0]]


def test_an_episode_ends_with_the_third_step_off_the_experts_way():
    longest = max((example.columns for example in load(width=4, height=4)), key=lambda x: len(expert(**x)))
    assert len(expert(**longest)) > 4
    nowhere = [patched("p", [""] * wrong, **longest) for wrong in (1, 2, 3)]
    assert nowhere[0] and nowhere[1] and nowhere[2] is None


def test_no_way_is_shorter_than_the_experts():
    for example in load(width=4, height=4, loops=3):
        maze, start, goal = (example.columns[name] for name in ("maze", "start", "goal"))
        front, steps_taken = {tuple(start)}, 0
        while tuple(goal) not in front:
            front = {(x + STEP[way][0], y + STEP[way][1]) for x, y in front for way in maze[y][x]}
            steps_taken += 1
        way = expert(maze, start, goal)
        assert len(way) == steps_taken and walked(list(way), maze, start, goal)[-1] == tuple(goal)


@pytest.mark.parametrize(
    "arguments", [{}, {"width": 5, "height": 2, "loops": 0}, {"width": 9, "height": 9, "loops": 200}]
)
def test_every_field_of_every_maze_can_be_reached_and_walls_have_two_sides(arguments):
    for example in load(**arguments):
        maze, (width, height) = example.columns["maze"], (arguments.get("width", 3), arguments.get("height", 3))
        seen, todo, ways = {tuple(example.columns["start"])}, deque([tuple(example.columns["start"])]), 0
        while todo:
            x, y = todo.popleft()
            ways += len(maze[y][x])
            for way in maze[y][x]:
                there = x + STEP[way][0], y + STEP[way][1]
                assert moved(maze, (x, y), way) == there
                assert {"n": "s", "s": "n", "e": "w", "w": "e"}[way] in maze[there[1]][there[0]]
                if there not in seen:
                    seen.add(there)
                    todo.append(there)
        most = width * (height - 1) + height * (width - 1)
        assert len(seen) == width * height
        assert ways // 2 == min(most, width * height - 1 + arguments.get("loops", 1))


def test_questions_are_of_the_seed_and_plain_prompts_are_short():
    assert load() == load() != load(seed=1)
    assert re.fullmatch(r" 0\d[nesw]+ to 2\d:", load(plain=True)[0].prompt)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"widht": 3}, ("prompts.arguments.widht", 3)),
        ({"width": 1}, ("prompts.arguments.width", 1)),
        ({"plain": 1}, ("prompts.arguments.plain", 1)),
    ],
)
def test_an_argument_that_cannot_be_is_refused(arguments, named):
    with refused(*named):
        load(**arguments)
