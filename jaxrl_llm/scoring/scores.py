"""Reward functions that suit many tasks: ``rewards.functions = ("jaxrl_llm.scoring.scores:NAME",)``.

    format       1.0 for <think>..</think> <answer>..</answer> and nothing else
    exact        1.0 if the answer is one of column ``answer``; case, articles and punctuation do not count
    f1           harmonic mean of precision and recall of the words of the answer against column ``answer``
    key_steps    1.0 for the right answer, plus 0.1 times the share of column ``key_steps`` that the completion contains
    keywords     share of the texts of column ``keywords`` that the completion contains
    majority     1.0 if the answer is the most frequent one of the question's completions; no label is read (TTRL)
    short_steps  between 1/2 and 1 for a right answer, more for fewer steps (paragraphs); 0.0 for a wrong one

``jaxrl_llm.scoring.answers`` finds the answer of a completion and decides whether two answers are the same.

Owns: these functions. Does not know: how an answer is found and read, questions, jax.
"""

from __future__ import annotations

import collections
import math
import re
from typing import Any

from jaxrl_llm.scoring.answers import accepted, all_words, answer_of, same_text, vote, words
from jaxrl_llm.scoring.answers import is_answer as has_number_of

_TAGS = re.compile(r"</?(?:think|answer)>")
STEP_WEIGHT = 0.1
SOME_STEPS = 20
STEP_CHARS = 200  # a longer paragraph counts as several steps


def format(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for <think>..</think> <answer>..</answer> and nothing else.

    The first tag may be missing: the chat templates of thinking models write ``<think>`` at the end of the prompt.

    Source: DeepSeek-AI 2025, arXiv:2501.12948, section 2.2.2.
    """
    return [float(_has_format(text.strip())) for text in completions]


def _has_format(text: str) -> bool:
    text = text.removeprefix("<think>")
    tags = list(_TAGS.finditer(text))
    if [tag[0] for tag in tags] != ["</think>", "<answer>", "</answer>"]:
        return False
    thought_end, opened, closed = tags
    between = text[thought_end.end() : opened.start()]
    is_at_end = closed.end() == len(text)
    return is_at_end and not between.strip()


def exact(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """Return 1.0 if the answer is the same text as ``answer`` (a text or a list of accepted texts), else 0.0."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        given_answer = answer_of(text)
        is_right = any(same_text(given_answer, accepted_text) for accepted_text in accepted(right))
        scores.append(float(is_right))
    return scores


def f1(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """Return 2 P R / (P + R): P and R are the shares of the given and of the right answer's words that both contain."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        given_words = words(answer_of(text))
        overlaps = [_overlap(given_words, words(accepted_text)) for accepted_text in accepted(right)]
        scores.append(max(overlaps))
    return scores


def _overlap(given: list[str], right: list[str]) -> float:
    common = collections.Counter(given) & collections.Counter(right)
    num_common = sum(common.values())
    if num_common == 0:
        return float(given == right)
    return 2.0 * num_common / (len(given) + len(right))


def key_steps(prompts: list, completions: list[str], answer: list, key_steps: list, **columns: Any) -> list[float]:
    """Return [the answer is right] + 0.1 times the share of the key steps that the completion contains.

    The share distinguishes two wrong answers. A completion contains a step if the words of the step follow each other
    in the completion. A step may be a list of texts: one of its texts suffices.

    Source: StepRAR of R1-VL, arXiv:2503.12937, the soft match of key steps and its weight (released code). Differs: a
        step is searched in the whole completion, by words instead of letters; answers are compared as texts; its
        structure reward (StepRVR) is ``format``.
    """
    scores = []
    is_right = exact(prompts, completions, answer)
    for score, text, steps in zip(is_right, completions, key_steps, strict=True):
        scores.append(score + STEP_WEIGHT * _share(text, steps))
    return scores


def keywords(prompts: list, completions: list[str], keywords: list, **columns: Any) -> list[float]:
    """Return the share of the keywords that the completion contains, or 0.0 if the question has no keywords.

    Source: IFScale, whose prompts contain hundreds of instructions that each ask for a keyword.
    """
    scores = []
    for text, wanted in zip(completions, keywords, strict=True):
        scores.append(_share(text, wanted))
    return scores


def _share(text: str, wanted: list) -> float:
    """Return the share of the wanted texts that a text contains. A list counts if the text has one text of the list."""
    without_articles = _padded(words(text))
    with_articles = _padded(all_words(text))

    def contains(item: Any) -> bool:
        if isinstance(item, list | tuple):
            return any(contains(alternative) for alternative in item)
        item_text = str(item)
        item_words = words(item_text)
        if all_words(item_text):
            phrase = _padded(item_words)
            return phrase in without_articles or phrase in with_articles
        # A keyword of punctuation only has no words and is searched as text.
        return bool(item_words) and item_text.strip() in text

    num_contained = sum(contains(item) for item in wanted)
    return num_contained / max(len(wanted), 1)


def _padded(text_words: list[str]) -> str:
    """Return the words with spaces around each, so that a phrase is found at word boundaries only."""
    joined = " ".join(text_words)
    return f" {joined} "


def majority(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for the most frequent answer to the question, else 0.0. The first given answer wins a tie.

    Completions without an answer do not vote. If the right answers are known, add a reward function that reads them,
    with weight 0. The metrics rollout/label_accuracy and rollout/reward_accuracy then measure the quality of the votes.

    Source: TTRL, Zuo et al. 2025, arXiv:2504.16084. Differs: all completions vote and are trained on. The paper takes
        64 votes, trains on 32 completions, and finds the label with a grader of mathematics. Here two answers are the
        same if they are the same number, choice, words or formula.
    """
    answers = [vote(text) for text in completions]
    given_answers = [answer for answer in answers if answer]
    if not given_answers:
        return [0.0] * len(completions)
    votes = collections.Counter(given_answers)
    ((label, _),) = votes.most_common(1)
    return [float(answer == label) for answer in answers]


def short_steps(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """Return (1 + 20 / (20 + k)) / 2 for a right answer in k steps, 0 for a wrong one.

    A paragraph counts as one step per 200 characters or part of them, so that removing blank lines gains nothing. The
    score is above 1/2 for every right answer, however long: set ``rewards.pass_threshold`` to 0.5.

    Source: Step Pruner, arXiv:2510.03805: steps are paragraphs, steps of right answers are penalised, and wrong answers
        get nothing. The paper's formula was not found; this function has its own formula and its own constant 20.
        Differs: the paper ends training when answers stop getting shorter or when steps grow long. Here a long
        paragraph counts as several steps.
    """
    scores = []
    for text, right in zip(completions, answer, strict=True):
        if not has_number_of(text, right):
            scores.append(0.0)
            continue
        share = SOME_STEPS / (SOME_STEPS + num_steps(text))
        scores.append((1.0 + share) / 2)
    return scores


def num_steps(text: str) -> int:
    """Return the number of paragraphs of a text. A long paragraph counts as several."""
    sizes = [0]
    for line in text.splitlines():
        stripped = line.strip()
        if stripped:
            sizes[-1] += len(stripped) + 1
        else:
            sizes.append(0)
    return sum(math.ceil(size / STEP_CHARS) for size in sizes)
