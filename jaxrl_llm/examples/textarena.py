"""TextArena games for one player, as an agent: ``environments.factory="jaxrl_llm.examples.textarena:play"``.

    python -m jaxrl_llm.train --config=recipe:grpo --workdir=runs/game --config.model.path=MODEL \\
        --config.prompts.source=jsonl --config.prompts.name=games.jsonl --config.prompts.max_tokens=512 \\
        --config.sampling.max_completion_tokens=2048 --config.environments.max_answer_tokens=512 \\
        --config.environments.factory=jaxrl_llm.examples.textarena:play \\
        --config.rewards.functions='("environment",)'

This example shows an agent: a function that runs the conversation and asks the policy for each turn.

Questions have a column ``game``, such as "Wordle-v0", and a column ``seed``, a whole number that determines the game.
The policy reads the game's messages, its turns are moves, and the game's own reward is the reward.

Install with ``pip install textarena``. Wordle downloads word files of nltk when it is first played.

Owns: the connection between TextArena's loop and a conversation. Does not know: games.

Source: TextArena, https://github.com/LeonGuertler/TextArena.
"""

from __future__ import annotations

import random
from typing import Any

from jaxrl_llm.runtime.chat_client import reply_to


def play(base_url: str, prompt: Any, game: str, seed: int, **columns: Any) -> float:
    """Play one game and return its reward."""
    import textarena  # imported here because the import takes a second

    random.seed(seed)  # some games draw from Python's own generator
    env = textarena.make(env_id=f"{game}-raw")  # "-raw" games send only new messages
    env.reset(num_players=1, seed=seed)
    messages: list[dict[str, str]] = []
    is_over = False
    while not is_over:
        _, observations = env.get_observation()
        # Skip the policy's own turns (player 0).
        texts = [str(text) for player, text, *_ in observations if player != 0]
        messages.append({"role": "user", "content": "\n".join(texts)})
        move = reply_to(base_url, messages, model="policy")
        messages.append({"role": "assistant", "content": move})
        is_over, _ = env.step(action=move)
    rewards, _ = env.close()
    return float(rewards[0])
