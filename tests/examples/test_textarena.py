"""TextArena's games as agents, with the real package if it is installed, and with a stand-in of the same interface."""

import dataclasses
import importlib.util

import pytest
from support.replies import text

from jaxrl_llm.config import Config, EnvironmentsConfig
from jaxrl_llm.conversations.environment import Environment, shown
from jaxrl_llm.types import OUTCOME_SCORE, Example

SETTINGS = dataclasses.replace(
    Config(),
    environments=EnvironmentsConfig(factory="jaxrl_llm.examples.textarena:play", num_workers=1, timeout_s=60.0),
)
STAND_IN = """
import random

class Game:
    def reset(self, num_players, seed):
        self.number, self.news = random.randint(1, 9), [(-1, "Guess.", 1)]
    def get_observation(self):
        news, self.news = self.news, []
        return 0, news
    def step(self, action):
        self.done = str(self.number) in action
        self.news = [(0, action, 2), (-1, "No.", 4)]
        return self.done, {}
    def close(self):
        return {0: 1 if self.done else 0}, {}

def make(env_id):
    assert env_id == "Nine-v0-raw"
    return Game()
"""


def played(game, seed, turns):
    _, ((one,), _), _ = shown(SETTINGS, None, [Example("Play.", {"game": game, "seed": seed})], [])
    with Environment(SETTINGS, [one]) as environment:
        answers, replies = [], []
        for i in range(len(turns)):
            replies.append(environment.ask(0, one, turns[: i + 1], answers).result(60))
            answers.append(replies[-1].answer)
            if answers[-1] is None:
                break
    assert all(reply.outcome == OUTCOME_SCORE for reply in replies), replies[-1].reason
    return one.prompt, [text(reply) for reply in replies], replies[-1].reward


def test_a_games_words_are_answers_and_its_seed_makes_it_the_same(tmp_path, monkeypatch):
    (tmp_path / "textarena.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for seed in (0, 1):
        prompt, answers, reward = played("Nine-v0", seed, [f"It is {i}." for i in range(1, 10)])
        assert prompt == [{"role": "user", "content": "Guess."}]
        assert answers == ["No."] * (len(answers) - 1) + [None] and reward == 1.0
        assert answers == played("Nine-v0", seed, [f"It is {i}." for i in range(1, 10)])[1]


@pytest.mark.tier("parity")
@pytest.mark.skipif(not importlib.util.find_spec("textarena"), reason="textarena is not installed")
def test_a_game_of_the_package_is_played_to_its_end():
    turns = [f"[{i}]" for i in range(1, 21)]
    (opening,), answers, reward = played("GuessTheNumber-v0", 3, turns)
    assert opening["role"] == "user" and opening["content"].startswith("You are Player 0.")
    assert answers.pop() is None and reward == 1.0  # its number is at most 10, the guesses that it allows
    assert answers and all("higher" in answer for answer in answers)
