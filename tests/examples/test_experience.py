"""The search for the nearest lines of a file, and the notes of similar states after an environment's answers."""

import json

import pytest
from support.refusal import raises_with, refused_row

from jaxrl_llm.config import ConfigError
from jaxrl_llm.examples import experience
from jaxrl_llm.examples.maze import Maze, plain, walked
from jaxrl_llm.examples.retrieval import rows

# 0,0 - 1,0
#        |
# 0,1 - 1,1
MAZE = {"maze": [["e", "sw"], ["e", "nw"]], "start": [0, 0], "goal": [0, 1]}


def written(path, lines):
    path.write_text("\n\n".join(map(json.dumps, lines)))  # blank lines are none
    return str(path)


@pytest.mark.tier("extras")
def test_transitions_are_nearest_by_the_words_of_state_and_action(tmp_path):
    pytest.importorskip("bm25s")
    steps = [("a lamp on the desk", "take it"), ("a lamp", "n"), ("the hall", "n"), ("a desk", "go on")]
    lines = [{"state": s, "action": a, "next": f"{i}", "reward": 0, "why": "so"} for i, (s, a) in enumerate(steps)]
    path = written(tmp_path / "steps.jsonl", lines)
    # Words of the lines: 7, 3, 3 and 4, on average 17 / 4. Of 4 lines "lamp" is in 2 and "n" in 2: both have the weight
    # ln(1 + 2.5 / 2.5), which one in a line of l words counts by 1 / (1 + 1.5 (0.25 + 0.75 l / (17 / 4))): 0.46 where
    # l = 3, 0.31 where l = 7. Line 1 has both, 0.92; the last has no word in common.
    found = experience.transitions(path)
    assert found.nearest("Lamp!\nN", 4) == [lines[i] for i in (1, 2, 0)]
    assert found.nearest("lamp\nn", 1) == [lines[1]]
    assert found.nearest("on", 4) == [lines[i] for i in (3, 0)]  # words that a search for topics leaves out
    assert experience.transitions(path) is found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"state": "a", "action": "b", "next": "c", "reward": 1', ["JSON"]),
        ("[1]", ["`state`", "list"]),
        ('{"state": "a", "action": 3, "next": "c", "reward": 1}', ["`action`"]),
        ('{"state": "a", "action": "b", "reward": 1}', ["`next`"]),
        ('{"state": "a", "action": "b", "next": "c", "reward": NaN}', ["`reward`"]),
        ('{"state": "a", "action": "b", "next": "c", "reward": true}', ["`reward`"]),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_its_line(tmp_path, line, words):
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{{"state": "a", "action": "b", "next": "c", "reward": -0.5}}\n{line}\n')
    with refused_row(path, 2, *words):
        experience.transitions(str(path))
    path.write_text("\n")
    with raises_with(ConfigError, str(path)):
        rows(str(path), experience.NOTES)
    with raises_with(ConfigError, str(tmp_path / "none.jsonl"), "No such file"):
        experience.advised(str(tmp_path / "none.jsonl"))


@pytest.mark.tier("extras")
def test_notes_of_states_alike_follow_each_answer(tmp_path):
    """A policy that follows the newest note leaves the maze. The first note of the episode alone is not enough."""
    pytest.importorskip("bm25s")
    ways = {"00e": "e", "10sw": "s", "11nw": "w"}
    path = written(tmp_path / "notes.jsonl", [{"state": x, "note": f"Go {way}"} for x, way in ways.items()])
    advised = experience.advised(path, count=1)
    told, turns = advised(plain), ["e"]  # by the note of the first field
    while (answer := told("p", turns, **MAZE)) is not None and len(turns) < 5:
        assert answer == f"{plain('p', turns, **MAZE)}\nGo {ways[answer.split()[0]]}"
        turns.append(answer[-1])
    assert turns == ["e", "s", "w"] and walked(turns, **MAZE)[-1] == (0, 1)
    assert walked(["e"] * 5, **MAZE)[-1] == (1, 0)
    assert told.__doc__ == plain.__doc__

    class Advised(Maze):
        go = advised(Maze.go)

        @advised
        async def wait(self):
            """Does nothing."""
            return "11nw"

    game = Advised()
    game.reset(**MAZE)
    assert game.go("east") == "You are at 1, 0, and can go south or west."  # no word of a field's short name
    assert game.wait() == "11nw\nGo w" and Advised.go.__doc__ == Maze.go.__doc__
