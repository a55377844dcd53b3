"""Games of TextArena for one player, as an agent: ``environments.factory="jaxrl_llm.environments.textarena:play"``.

Questions have a column ``game``, such as "Wordle-v0", and ``seed``, a whole number, which makes the same game each
time. What the game tells is what the policy reads, its turns are moves, and the game's own reward is the reward. ``pip
install textarena``; Wordle looks its words up in files of nltk, which it fetches when it is first played.

Owns: the way between TextArena's loop and a conversation. Does not know: games.

Source: TextArena, https://github.com/LeonGuertler/TextArena.
"""

from __future__ import annotations

import random
from typing import Any

from jaxrl_llm.environments.chat import said


def play(base_url: str, prompt: Any, game: str, seed: int, **columns: Any) -> float:
    """Plays one game, and gives its reward."""
    import textarena  # here: an import of it takes a second, which others need not wait for

    random.seed(seed)  # of games that draw by Python's own
    env = textarena.make(env_id=f"{game}-raw")  # tells what is new alone
    env.reset(num_players=1, seed=seed)
    messages, is_over = [], False
    while not is_over:
        _, told = env.get_observation()
        texts = [str(text) for who, text, *_ in told if who != 0]  # what player 0 has said is its turn
        messages.append({"role": "user", "content": "\n".join(texts)})
        messages.append({"role": "assistant", "content": said(base_url, messages, model="policy")})
        is_over, _ = env.step(action=messages[-1]["content"])
    rewards, _ = env.close()
    return float(rewards[0])
