"""A model that plays an environment in its place, for what is too slow, dear or dangerous to train in.

    jaxrl_llm.environments.dream:play    an agent (docs/questions.md), for policies that act by what they write: a turn
                                         is an action, the answer what is seen after it, the reward the steps' sum
    Dream                                a class to derive from, for policies that call tools; rewards by turn

The experience model is served elsewhere, by ``python -m jaxrl_llm.serve`` or any other OpenAI-compatible server:
JAXRL_DREAM_URL (http://127.0.0.1:8000/v1), JAXRL_DREAM_MODEL (the server's first), JAXRL_DREAM_TOKEN. For each step it
is told the task (the question and all of its columns), the steps so far, the action, and of the file that
JAXRL_DREAM_EXPERIENCE names (environments.experience; none without) the transitions that are nearest to state and
action. It reasons, and says what is seen next, the reward and whether it is over. A reply that does not say so, and a
server that does not answer, is a failure of the episode, counted; nothing is taken for a reward of 0.
``environments.num_workers`` are asked at once, and ``environments.timeout_s`` is for a turn.

Owns: what an experience model is told, how its reply is read. Does not know: which model it is, what is near.

Source: DreamGym, arXiv:2511.03773: a model that reasons predicts next state and reward from task, history and the top k
    transitions of a buffer that are like state and action; reward is 1 at success and else 0. Differs: any reward is
    taken; nearest is by BM25, not by cosines of an encoder; its prompts and its k were not found, these are ours; the
    file does not grow in a run by what was dreamt; no tasks are made anew by the entropy of their rewards
    (``prompts.retire_pass_rate`` leaves those out that are learned); the model is whatever is served, and is not
    trained here on steps with their reasons.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from jaxrl_llm.environments.chat import said, said_by
from jaxrl_llm.environments.experience import NUMBER, transitions
from jaxrl_llm.environments.retrieval import is_of

NUM_NEAREST = 3
MAX_TOKENS = 512  # of a reply; what `jaxrl_llm.serve` allows unless told otherwise
REPLY = {"next": str, "reward": NUMBER, "over": bool}
PROMPT = """You are the environment that an agent acts in. You say what its newest action leads to.

The agent's task:
{task}

Steps of other agents that may be like this one, from the real environment:
{nearest}

The agent's steps so far:
{history}

Its newest action:
{action}

Think step by step about what this action does here, and whether the task is then done. End with a line of JSON:
{{"next": what the agent sees, a text, "reward": a number, "over": whether the task has ended, true or false}}
The reward is as in steps like this one; where there are none 1 for the task done, and else 0."""


def imagined(task: str, state: str, history: list[dict[str, str]], action: str) -> dict[str, Any]:
    """The experience model's {"next", "reward", "over"} for an action.

    Args:
        state: what was seen last.
        history: {"action", "next"} of the steps before it.

    Raises:
        ConfigError: of JAXRL_DREAM_EXPERIENCE. OSError: no server, or it has refused. ValueError: the reply has none.
    """
    path = os.environ.get("JAXRL_DREAM_EXPERIENCE")
    nearest = transitions(path).nearest(f"{state}\n{action}", NUM_NEAREST) if path else []
    lines = lambda steps: "\n".join(map(json.dumps, steps)) or "None."
    told = PROMPT.format(task=task, nearest=lines(nearest), history=lines(history), action=json.dumps(action))
    return read(said_by("DREAM", told, max_tokens=MAX_TOKENS, temperature=0.0))


def read(reply: str) -> dict[str, Any]:
    """Return the step that a reply ends with: the last JSON object with the keys of ``REPLY``.

    An object inside another one, or inside a text of it, is a part of that.

    Raises:
        ValueError: no object has these keys, or a value has another type.
    """
    step, place = None, reply.find("{")
    while place >= 0:
        end = place + 1
        with contextlib.suppress(ValueError, RecursionError):
            found, end = json.JSONDecoder().raw_decode(reply, place)
            step = found if found.keys() >= REPLY.keys() else step
        place = reply.find("{", end)
    if step is None:
        raise ValueError(f"the experience model says no {', '.join(REPLY)}: {reply[-100:]!r}")
    for key, kind in REPLY.items():
        if not is_of(step[key], kind):
            raise ValueError(f"the experience model says {key}: {step[key]!r:.100}")
    return {key: step[key] for key in REPLY}


def play(base_url: str, prompt: Any, **columns: Any) -> float:
    """An agent whose world is dreamt, to its end; the sum of the rewards. A row that ends before it is worth 0."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    dream = Dream()
    dream._begin(columns, "\n".join(message["content"] for message in messages))
    while not dream.is_over:
        action = said(base_url, messages, model="policy")
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": dream._step(action)}]
    return dream.reward


class Dream:
    """An episode that is dreamt. A class of yours derives from it, with the tools of the real one:

        def go(self, direction: str) -> str:  # and its docstring
            return self._step(f"go {direction}")

    Its task is the question, prompt and columns. Once it is over a step changes nothing.
    """

    def reset(self, **columns: Any) -> None:
        self._begin(columns, "")

    def _begin(self, columns: dict[str, Any], seen: str) -> None:
        if path := os.environ.get("JAXRL_DREAM_EXPERIENCE"):
            transitions(path)  # what is wrong with it is said before the run begins
        self.task = "\n".join(filter(None, (seen, json.dumps(columns) if columns else "")))
        self.seen, self.history, self.reward, self.is_over = seen, [], 0.0, False
        self._failure: Exception | None = None

    def _step(self, action: str) -> str:
        """What is seen after the action."""
        if self.is_over:
            return self.seen
        try:
            step = imagined(self.task, self.seen, self.history, action)
        except Exception as error:
            self._failure = error  # the policy is told what a tool raises: it would go on in no world
            raise
        self.seen, self.is_over = step["next"], step["over"]
        self.reward += step["reward"]
        self.history.append({"action": action, "next": self.seen})
        return self.seen

    def get_reward(self) -> float:
        """The sum of the steps' rewards; what has failed raises here, after the turn."""
        if self._failure:
            raise self._failure
        return self.reward

    def state(self) -> dict[str, Any]:
        """What ``restore`` takes: a dream that goes on asks for no step anew."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _failure=None)
