"""Rewards from a judge model behind an OpenAI-compatible server, and rewards for a model that learns to judge.

    judged    the judge's grade of the completion, 0 to 1, by column ``rubric`` if the question has one
    stepwise  share of the completion's steps before the first step that the judge finds wrong
    meant     1.0 if the judge finds the answer equal to column ``answer``, or a valid beginning of a text, else 0.0
    fapo      1.0 for a right answer, 0.0 if the judge finds a flaw on the way to it, -1.0 for a wrong answer
    ranked    for a completion that judges: 1.0 if it gives the best of several answers the highest score, else -1.0
    own       per turn, with ``:doubt`` as environments.factory: the answer, and the policy's own verdict on it

The server is ``python -m jaxrl_llm.serve`` or any other. These variables configure it:

    JAXRL_JUDGE_URL      default http://127.0.0.1:8000/v1
    JAXRL_JUDGE_MODEL    default: the server's first model
    JAXRL_JUDGE_TOKEN    bearer token
    JAXRL_JUDGE_VOTES    default 1; ``judged`` averages this number of verdicts

If the judge cannot be reached, the reward fails. If its reply has no verdict, the reward fails too, except for
``fapo``. A completion with a failed reward has no reward, and the run counts it. Set ``rewards.timeout_s`` high enough
for a whole group.

Owns: the questions to the judge, how its verdict is read. Does not know: the served model, which is not trained here.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
from typing import Any

from jaxrl_llm.runtime.chat_client import reply_of
from jaxrl_llm.scoring.answers import accepted, is_answer, marked, without_thought
from jaxrl_llm.scoring.quantities import grade, listed_numbers
from jaxrl_llm.scoring.typography import plain

AT_ONCE = 8  # concurrent requests to the judge
MAX_TOKENS = 256  # longest reply
RUBRIC = "The answer is right, complete and clear."
# Matches the text before a grade: "**Score:** ", "score is ", "Score = $".
GRADE = re.compile(r"score[*_]{0,3}\s{0,3}(?:is\s)?[:=]?\s{0,3}[*_]{0,3}\s{0,3}(?=[\d.(\[*_$\\])", re.I)
VERDICT = re.compile(r"\b(not |never |isn't |no longer )?(?:[a-z]+ )?(un)?(sound|flawed)\b", re.I)
OF_STEPS = re.compile(r"step\s{0,3}(\d{1,9})[\s*_]{0,9}:[\s*_]{0,9}(right|wrong)", re.I)
SCORES = re.compile(r"scores[*_]{0,3}\s{0,3}[:=]", re.I)
YES_OR_NO = re.compile(r"\b(yes|no)\b", re.I)
DOUBT = "Is that answer right? Write yes or no."


def asked(text: str, temperature: float = 0.0) -> str:
    """Return the judge's reply to a text. Raise OSError if there is no reply."""
    return reply_of("JUDGE", text, max_tokens=MAX_TOKENS, temperature=temperature)


def _all(texts: list[str], temperature: float = 0.0) -> list[str]:
    """Return the judge's replies in plain characters, without the thought before them."""
    temperatures = [temperature] * len(texts)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        replies = list(pool.map(asked, texts, temperatures))
    return [_without_thought(reply) for reply in replies]


def _without_thought(text: str) -> str:
    """Return a text in plain characters, without the thought before it."""
    return plain(without_thought(text))


def _says_yes(text: str) -> bool | None:
    """Return whether the last yes or no of a text is yes, or None without a yes or no."""
    verdicts = YES_OR_NO.findall(text)
    if not verdicts:
        return None
    return verdicts[-1].lower() == "yes"


def _shown(prompt: Any) -> str:
    """Return a prompt as the judge reads it: a text, or messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    lines = [f"{message['role']}: {message['content']}" for message in prompt]
    return "\n".join(lines)


def judged(prompts: list, completions: list[str], rubric: list | None = None, **columns: Any) -> list[float | None]:
    """Return the last "Score: N" of the judge's reply, divided by 10, or None (no reward) without a score from 0 to 10.

    With several votes, replies are drawn at temperature 1 and the scores among them are averaged.

    Source: rubrics, a generative judge and the votes of DeepSeek-GRM (arXiv:2504.02495). Differs: no model filters the
        votes; the served judge is trained elsewhere (``ranked``).
    """
    num_votes = int(os.environ.get("JAXRL_JUDGE_VOTES", "1"))
    rules = rubric or [RUBRIC] * len(prompts)
    requests = []
    for prompt, text, rule in zip(prompts, completions, rules, strict=True):
        request = (
            f"Question:\n{_shown(prompt)}\n\nAnswer:\n{text}\n\nGrade the answer from 0 to 10 by this rubric: {rule}\n"
            "Say briefly why, then end with a line 'Score: N'."
        )
        requests += [request] * num_votes
    temperature = 1.0 if num_votes > 1 else 0.0
    grades = [_grade(reply) for reply in _all(requests, temperature)]
    scores: list[float | None] = []
    for first in range(0, len(grades), num_votes):
        grades_of_answer = grades[first : first + num_votes]
        votes = [grade for grade in grades_of_answer if grade is not None]
        scores.append(sum(votes) / len(votes) if votes else None)
    return scores


def _grade(reply: str) -> float | None:
    """Return the last grade of a judge's reply divided by 10, or None without a grade from 0 to 10."""
    matches = list(GRADE.finditer(reply))
    if not matches:
        return None
    after_match = reply[matches[-1].end() :]
    value = grade(after_match)
    if value is None or value > 10:
        return None
    return value / 10


def stepwise(prompts: list, completions: list[str], **columns: Any) -> list[float | None]:
    r"""Return k / n: n is the number of steps (lines), k the number before the first step that the judge finds wrong.

    The score is 0 without an answer in <answer></answer> or \boxed{}. Without this rule a policy that is judged by its
    steps alone would learn to write no answer. The score is None if the judge omits a step before the first wrong one.

    Source: SPARK, arXiv:2512.03244: a generative judge of steps as the reward, behind a check of the format. Differs:
        the served judge is not trained on labels by agreement, and this package chose the formula of the reward.
    """
    steps_by_completion = {}
    requests = []
    for i, text in enumerate(completions):
        if marked(text) is None:
            continue
        steps = [line.strip() for line in text.splitlines() if line.strip()]
        steps_by_completion[i] = steps
        solution = "\n".join(f"Step {number}: {step}" for number, step in enumerate(steps, 1))
        requests.append(
            f"Question:\n{_shown(prompts[i])}\n\nSolution:\n{solution}\n\nGo through the steps in order. "
            "Write for each one a line 'Step N: right' or 'Step N: wrong'."
        )
    scores: list[float | None] = [0.0] * len(completions)
    replies = _all(requests)
    for (i, steps), reply in zip(steps_by_completion.items(), replies, strict=True):
        scores[i] = _share_before_wrong(reply, len(steps))
    return scores


def _share_before_wrong(reply: str, num_steps: int) -> float | None:
    """Return the share of the steps before the first wrong one, or None if the reply omits one before it."""
    verdicts = {}
    for number, word in OF_STEPS.findall(reply):
        verdicts[int(number)] = word.lower()
    num_right = num_steps
    for number in range(1, num_steps + 1):
        if verdicts.get(number) == "wrong":
            num_right = number - 1
            break
    for number in range(1, num_right + 1):
        if number not in verdicts:
            return None
    return num_right / num_steps


def meant(
    prompts: list,
    completions: list[str],
    answer: list,
    following: list | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return 1.0 if the last yes or no of the judge's reply is yes. Return 0.0 if it is no or if no answer is marked.

    The judge compares the marked answer with ``answer``. With a column ``following`` (the text after ``answer``) the
    judge decides whether the text begins with the meaning of the marked answer, in one sentence or several.

    Source: the prefix reward of RLPT, arXiv:2509.19249, section 3.2. Differs: the paper's prompt for the judge was not
        found, so this function has its own. Half a sentence does not count as a prefix.
    """
    given_answers = {}
    for i, text in enumerate(completions):
        answer_text = marked(text)
        if answer_text:
            given_answers[i] = answer_text
    same = "First text:\n{}\n\nSecond text:\n{}\n\nDo they mean the same? End with one word, yes or no."
    begins = (
        "Prediction:\n{}\n\nReference:\n{}\n\nDoes the reference begin with what the prediction says, its first "
        "sentence or more of it, in these words or in others? End with one word, yes or no."
    )
    template = same if following is None else begins
    requests = []
    for i, answer_text in given_answers.items():
        after = "" if following is None else following[i]
        first_accepted = accepted(answer[i])[0]
        reference = f"{first_accepted} {after}".strip()
        requests.append(template.format(answer_text, reference))
    scores: list[float | None] = [0.0] * len(completions)
    for i, reply in zip(given_answers, _all(requests), strict=True):
        says_yes = _says_yes(reply)
        scores[i] = None if says_yes is None else float(says_yes)
    return scores


def ranked(prompts: list, completions: list[str], truth: list[list[float]], **columns: Any) -> list[float]:
    """Return 1.0 if a completion that judges n answers gives the best of them the single highest score, else -1.0.

        1  n >= 2, S_j > S_i for all i != j, j = argmax r;   1  n = 1, S_1 = r_1;   else -1

    The reward trains a judge: prompts show the answers, column ``truth`` has the value r of each answer, and the
    completion ends with "Scores: a, b, ..".

    Source: DeepSeek-GRM, arXiv:2504.02495, the outcome reward of its rule-based reinforcement.
    """
    rewards = []
    for completion, values in zip(completions, truth, strict=True):
        text = _without_thought(completion)
        matches = list(SCORES.finditer(text))
        scores = []
        if matches:
            after_match = text[matches[-1].end() :]
            scores = listed_numbers(after_match)
        rewards.append(1.0 if _ranks_best_first(scores, values) else -1.0)
    return rewards


def _ranks_best_first(scores: list[float], values: list[float]) -> bool:
    """Return whether the answer of the largest value has the single highest score. A lone answer has its value."""
    if len(scores) != len(values):
        return False
    best = values.index(max(values))
    others = [score for i, score in enumerate(scores) if i != best]
    if not others:
        return scores[0] == values[0]
    return scores[best] > max(others)


def doubt(prompt: Any, turns: list[str], **columns: Any) -> str | None:
    """Ask the policy in a second turn whether its answer is right. This function is an environment of two turns."""
    return DOUBT if len(turns) == 1 else None


def own(prompts: list, completions: list[str], messages: list, answer: list, **columns: Any) -> list[list[float]]:
    """Return per turn: 1.0 for an answer equal to ``answer``, and 1.0 for a last yes or no that judges it correctly.

    Source: SPARK (synergistic), arXiv:2509.22624: the same policy learns to answer and to judge, on its own answers.
        Differs: the verdict is a second turn of the row, after the answer; only single answers are judged.
    """
    rewards = []
    for row, right in zip(messages, answer, strict=True):
        turns = [message["content"] for message in row if message["role"] == "assistant"]
        is_right = is_answer(turns[0], right)
        turn_rewards = [float(is_right)]
        for turn in turns[1:]:
            says_right = _says_yes(_without_thought(turn))
            turn_rewards.append(float(says_right == is_right))
        rewards.append(turn_rewards)
    return rewards


def fapo(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """Return 1.0 for a right answer, 0.0 for a right answer with a flawed solution, -1.0 for a wrong answer.

        r = (1 if right, else -1) - (lambda = 1 if right and flawed, else 0)

    The judge reads right answers only. A reply without either word counts as no flaw. With ``rewards.pass_threshold``
    at 1.0 only sound answers pass.

    Source: FAPO, arXiv:2510.22543, eq. 4 and 8; in the released code an unreadable verdict is no flaw either. Differs:
        the paper trains a generative reward model that names the first wrong step. Here any served model gives one
        word. Held-out answers are judged too; in the paper they only need to be right.
    """
    right = [i for i, text in enumerate(completions) if is_answer(text, answer[i])]
    requests = []
    for i in right:
        requests.append(
            f"Question:\n{_shown(prompts[i])}\n\nSolution:\n{completions[i]}\n\nIts final answer is right. Is every "
            "step that leads there right too, and none guessed? End with one word, 'sound' or 'flawed'."
        )
    rewards = [-1.0] * len(completions)
    for i, reply in zip(right, _all(requests), strict=True):
        rewards[i] = 0.0 if _is_flawed(reply) else 1.0
    return rewards


def _is_flawed(reply: str) -> bool:
    """Return whether the last "sound" or "flawed" of a judge's reply means flawed. "not" and "un" reverse the word."""
    verdicts = list(VERDICT.finditer(reply))
    if not verdicts:
        return False
    negation, prefix, word = verdicts[-1].groups()
    is_turned = bool(negation) != bool(prefix)
    return (word.lower() == "flawed") != is_turned
