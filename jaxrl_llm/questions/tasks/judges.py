"""Rewards that ask a model, over an OpenAI-compatible server: ``python -m jaxrl_llm.serve``, or any other.

    judged   what a judge gives for the completion, 0 to 1, by column ``rubric`` where there is one
    fapo     1.0 where column ``answer`` is met and the judge finds no flaw on the way, else 0.0

The server is JAXRL_JUDGE_URL (http://127.0.0.1:8000/v1), its model JAXRL_JUDGE_MODEL (the server's first), its bearer
token JAXRL_JUDGE_TOKEN. A judge that cannot be reached, or that gives no verdict, has failed: its completions have no
reward and are counted so. Give ``rewards.timeout_s`` time for a group.

Owns: what a judge is asked, how its verdict is read. Does not know: which model it is: the one that is served, which
learns nothing here.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import urllib.request
from typing import Any

from jaxrl_llm.questions.tasks.scores import number_of

URL = "http://127.0.0.1:8000/v1"
AT_ONCE, MAX_TOKENS = 8, 256
RUBRIC = "The answer is right, complete and clear."
GRADE = re.compile(r"score[\s*_]*[:=]?[\s*_]*(\d+(?:\.\d+)?)", re.I)  # "**Score:** 8" too
VERDICT = re.compile(r"\b(sound|flawed)\b", re.I)


def asked(text: str) -> str:
    """The judge's answer to a text; OSError where there is none."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS, "temperature": 0}
    if model := os.environ.get("JAXRL_JUDGE_MODEL"):
        body["model"] = model
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("JAXRL_JUDGE_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    url = f"{os.environ.get('JAXRL_JUDGE_URL', URL).rstrip('/')}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:  # the pool has the deadline
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def _all(texts: list[str]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(asked, texts))


def _shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{x['role']}: {x['content']}" for x in prompt)


def judged(prompts: list, completions: list[str], rubric: list | None = None, **columns: Any) -> list[float | None]:
    """The last "Score: N" of the judge's answer, over 10; None, no reward, where it gives none from 0 to 10.

    Source: rubrics and a generative judge as in DeepSeek-GRM's SPCT (arXiv:2504.02495). Differs: one vote, and the
        judge is not trained.
    """
    texts = [
        f"Question:\n{_shown(prompt)}\n\nAnswer:\n{text}\n\nGrade the answer from 0 to 10 by this rubric: {rule}\n"
        "Say briefly why, then end with a line 'Score: N'."
        for prompt, text, rule in zip(prompts, completions, rubric or [RUBRIC] * len(prompts), strict=True)
    ]
    grades = [GRADE.findall(said) for said in _all(texts)]
    return [float(found[-1]) / 10 if found and float(found[-1]) <= 10 else None for found in grades]


def fapo(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float | None]:
    """1 for a right answer, 1 - 1 where it was come to by a flawed way; the judge is asked of right ones alone.

    Source: FAPO, arXiv:2510.22543: flawed positives lose lambda = 1. Differs: its generative reward model is trained
        for it, this one is whatever is served.
    """
    right = [number_of(text) == number_of(str(wanted)) for text, wanted in zip(completions, answer, strict=True)]
    texts = [
        f"Question:\n{_shown(prompt)}\n\nSolution:\n{text}\n\nIts final answer is right. Is every step that leads "
        "there right too, and none guessed? End with one word, 'sound' or 'flawed'."
        for prompt, text, is_right in zip(prompts, completions, right, strict=True)
        if is_right
    ]
    said = iter(_all(texts))
    scores: list[float | None] = []
    for is_right in right:
        verdicts = VERDICT.findall(next(said)) if is_right else []
        scores.append(0.0 if not is_right else float(verdicts[-1].lower() == "sound") if verdicts else None)
    return scores
