"""World model that simulates an environment that is too slow, expensive or dangerous to train in.

    python -m jaxrl_llm.serve --model=EXPERIENCE_MODEL --port=8000 &
    python -m jaxrl_llm.train --config=recipe:grpo --workdir=runs/dream --config.model.path=MODEL \\
        --config.prompts.source=jsonl --config.prompts.name=tasks.jsonl --config.prompts.max_tokens=512 \\
        --config.sampling.max_completion_tokens=2048 --config.environments.max_answer_tokens=512 \\
        --config.environments.factory=jaxrl_llm.examples.dream:play \\
        --config.rewards.functions='("environment",)'

    jaxrl_llm.examples.dream:play    an agent, for policies that act by writing: a turn is an action, the reply is the
                                     next observation, the reward is the sum over the steps
    jaxrl_llm.examples.dream:Dream   a base class for policies that call tools; rewards per turn

This example shows an environment that asks another server, and how failures of the server are counted and not scored.

The experience model runs on an OpenAI-compatible server, ``python -m jaxrl_llm.serve`` or any other:

    JAXRL_DREAM_URL           default http://127.0.0.1:8000/v1
    JAXRL_DREAM_MODEL         default: the server's first model
    JAXRL_DREAM_TOKEN         bearer token
    JAXRL_DREAM_EXPERIENCE    file of transitions (examples.experience); default: none

For each step the experience model reads the task (the question and all of its columns), the steps so far and the
action. If there is a file of transitions, the model also reads the transitions that are nearest to state and action. It
reasons, and then returns the next observation, the reward and whether the episode is over.

If the server does not reply, or the reply lacks these values, the episode fails and the run counts the failure. A
failure is never a reward of 0. The model receives up to ``environments.num_workers`` requests at once.
``environments.timeout_s`` applies to one turn.

Owns: the prompt of the experience model, the parsing of its reply. Does not know: the experience model, the search for
near transitions.

Source: DreamGym, arXiv:2511.03773: a model that reasons predicts next state and reward from task, history and the top k
    transitions of a buffer that are like state and action. The reward is 1 at success and else 0. Differs:

    - Any reward is accepted.
    - BM25 finds the nearest transitions. The paper uses cosines of an encoder.
    - The paper's prompts and its k were not found. This example has its own prompt and k.
    - Simulated steps are not added to the file during a run.
    - The paper generates new tasks, chosen by the entropy of their rewards. Here tasks are fixed.
      ``prompts.retire_pass_rate`` drops learned tasks.
    - Any served model can be used. The paper trains its model on steps with their reasons.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from jaxrl_llm.examples.experience import NUMBER, transitions
from jaxrl_llm.examples.retrieval import has_type
from jaxrl_llm.runtime.chat_client import reply_of, reply_to

NUM_NEAREST = 3
MAX_TOKENS = 512  # maximum tokens of a reply; equals the default limit of `jaxrl_llm.serve`
REPLY = {
    "next": str,
    "reward": NUMBER,
    "over": bool,
}
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
    """Return the experience model's {"next", "reward", "over"} for an action.

    Args:
        state: the last observation.
        history: {"action", "next"} of the earlier steps.

    Raises:
        ConfigError: JAXRL_DREAM_EXPERIENCE is wrong.
        OSError: the server cannot be reached, or it refused the request.
        ValueError: the reply has no valid step.
    """
    path = os.environ.get("JAXRL_DREAM_EXPERIENCE")
    nearest = []
    if path:
        query = f"{state}\n{action}"
        nearest = transitions(path).nearest(query, NUM_NEAREST)
    request = PROMPT.format(
        task=task,
        nearest=_json_lines(nearest),
        history=_json_lines(history),
        action=json.dumps(action),
    )
    reply = reply_of("DREAM", request, max_tokens=MAX_TOKENS, temperature=0.0)
    return read(reply)


def _json_lines(steps: list[dict[str, Any]]) -> str:
    """Return one line of JSON for each step, or "None." without a step."""
    lines = [json.dumps(step) for step in steps]
    return "\n".join(lines) or "None."


def read(reply: str) -> dict[str, Any]:
    """Return the step at the end of a reply: the last JSON object with the keys of ``REPLY``.

    Objects inside another object, or inside a string of it, are not steps.

    Raises:
        ValueError: no object has these keys, or a value has another type.
    """
    step = _last_step(reply)
    if step is None:
        raise ValueError(f"the reply of the experience model lacks one of {', '.join(REPLY)}: {reply[-100:]!r}")
    for key, kind in REPLY.items():
        if not has_type(step[key], kind):
            raise ValueError(f"the experience model gives a wrong type for {key}: {step[key]!r:.100}")
    return {key: step[key] for key in REPLY}


def _last_step(reply: str) -> dict[str, Any] | None:
    """Return the last outermost JSON object that has the keys of ``REPLY``, or None."""
    decoder = json.JSONDecoder()
    step = None
    start = reply.find("{")
    while start >= 0:
        end = start + 1
        with contextlib.suppress(ValueError, RecursionError):
            candidate, end = decoder.raw_decode(reply, start)
            if candidate.keys() >= REPLY.keys():
                step = candidate
        start = reply.find("{", end)
    return step


def play(base_url: str, prompt: Any, **columns: Any) -> float:
    """Run one simulated episode to its end and return the sum of its rewards.

    The reward is 0 if the run stops the conversation before the episode's end.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    question = "\n".join(message["content"] for message in messages)
    dream = Dream()
    dream._begin(columns, question)
    while not dream.is_over:
        action = reply_to(base_url, messages, model="policy")
        observation = dream._step(action)
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "user", "content": observation})
    return dream.reward


class Dream:
    """Simulated episode. Derive a class from it that has the tools of the real environment:

        def go(self, direction: str) -> str:  # and its docstring
            return self._step(f"go {direction}")

    The task is the question with its columns. Steps after the end of the episode change nothing.
    """

    def reset(self, **columns: Any) -> None:
        """Begin an episode whose task is the columns of the question."""
        self._begin(columns, "")

    def _begin(self, columns: dict[str, Any], observation: str) -> None:
        path = os.environ.get("JAXRL_DREAM_EXPERIENCE")
        if path:
            transitions(path)  # a wrong file is an error before the run begins
        parts = []
        if observation:
            parts.append(observation)
        if columns:
            parts.append(json.dumps(columns))
        self.task = "\n".join(parts)
        self.seen = observation
        self.history: list[dict[str, str]] = []
        self.reward = 0.0
        self.is_over = False
        self._failure: Exception | None = None

    def _step(self, action: str) -> str:
        """Return the observation after the action. Steps after the end return the last observation."""
        if self.is_over:
            return self.seen
        try:
            step = imagined(self.task, self.seen, self.history, action)
        except Exception as error:
            # The policy reads a tool's error and could continue. So get_reward raises the error again.
            self._failure = error
            raise
        self.seen = step["next"]
        self.is_over = step["over"]
        self.reward += step["reward"]
        self.history.append({"action": action, "next": self.seen})
        return self.seen

    def get_reward(self) -> float:
        """Return the sum of the steps' rewards. If a step failed, its error is raised here, after the turn."""
        if self._failure:
            raise self._failure
        return self.reward

    def state(self) -> dict[str, Any]:
        """Return the state that ``restore`` needs. A restored episode does not repeat any step."""
        state = {}
        for name, value in vars(self).items():
            if not name.startswith("_"):
                state[name] = value
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the episode from a ``state``."""
        vars(self).update(state, _failure=None)
