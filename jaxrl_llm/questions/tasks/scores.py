r"""Rewards for ``rewards.functions``, that suit many tasks: ``"jaxrl_llm.questions.tasks.scores:NAME"``.

    format       1.0 where the completion is <think>..</think> <answer>..</answer> and nothing else
    exact        1.0 where the answer is one of column ``answer``, but for case, articles and punctuation
    f1           share of words that answer and ``answer`` have in common (harmonic mean of precision and recall)
    key_steps    share of column ``key_steps``, texts, that the completion has on its way, with the right answer besides
    keywords     share of column ``keywords``, texts, that the completion has
    majority     1.0 where the answer is that of most completions of the question: no label is looked at (TTRL)
    short_steps  where ``answer`` is met, the less the more steps (lines) there are; else 0

The answer of a completion is the inside of the last <answer></answer>, else of the last \boxed{}, else its last line;
for ``majority`` and ``short_steps`` its last number, where it has one.

Owns: these functions, what the answer of a completion is. Does not know: questions, jax.
"""

from __future__ import annotations

import collections
import re
import string
from typing import Any

FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.S
)
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.S)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
STEP_WEIGHT = 0.1
MOST_STEPS = 20


def answer_of(text: str) -> str:
    r"""Inside of the last <answer></answer>, else of the last \boxed{}, else the last line that is not blank."""
    found = marked(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return found if found is not None else lines[-1] if lines else ""


def marked(text: str) -> str | None:
    r"""Inside of the last <answer></answer>, else of the last \boxed{}, stripped; None where neither is there."""
    if tagged := TAGGED.findall(text):
        return tagged[-1].strip()
    _, box, inside = text.rpartition(r"\boxed{")
    depth = 1
    for i, letter in enumerate(inside if box else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return inside[:i].strip()
    return None


def number_of(text: str) -> str:
    """Its answer, or where none is marked the last number of its last line; in short."""
    answer, found = answer_of(text), NUMBER.findall(answer_of(text))
    said = (found[-1] if found and marked(text) is None else answer).strip(" $")
    if not NUMBER.fullmatch(said):
        return said
    number = said.replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number and "/" not in number else number


def words_of(text: str) -> list[str]:
    """Lower case, without punctuation and articles, as SQuAD compares answers."""
    plain = "".join(" " if x in string.punctuation else x for x in text.lower())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def format(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    """Source: DeepSeek-AI 2025, arXiv:2501.12948, section 2.2.2."""
    return [float(FORMAT.fullmatch(text) is not None) for text in completions]


def _accepted(answer: Any) -> list[str]:
    return [str(x) for x in answer] if isinstance(answer, list) else [str(answer)]


def exact(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """``answer``: a text, or several of which each is right."""
    given = zip(completions, answer, strict=True)
    return [float(words_of(answer_of(text)) in map(words_of, _accepted(right))) for text, right in given]


def f1(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """2 P R / (P + R), P and R the shares of the words of the completion's answer and of the right one in common."""
    given = zip(completions, answer, strict=True)
    return [max(_overlap(words_of(answer_of(text)), words_of(x)) for x in _accepted(right)) for text, right in given]


def _overlap(said: list[str], right: list[str]) -> float:
    common = sum((collections.Counter(said) & collections.Counter(right)).values())
    return 2.0 * common / (len(said) + len(right)) if common else float(said == right)


def key_steps(prompts: list, completions: list[str], answer: list, key_steps: list, **columns: Any) -> list[float]:
    """r = [the answer is right] + 0.1 (share of the key steps that the completion has).

    Two wrong answers are told apart by how far they came. A step is there where its words follow each other.

    Source: StepRAR of R1-VL, arXiv:2503.12937, the soft match of key steps. Differs: its structure reward (StepRVR) is
        ``format``; the weight 0.1 is ours.
    """
    right = exact(prompts, completions, answer)
    return [r + STEP_WEIGHT * _share(text, own) for r, text, own in zip(right, completions, key_steps, strict=True)]


def keywords(prompts: list, completions: list[str], keywords: list, **columns: Any) -> list[float]:
    """How many of the keywords that a completion must have it has, however many these are; of none 0.

    Source: IFScale, instructions by the hundred of which each is a keyword to be said.
    """
    return [_share(text, own) for text, own in zip(completions, keywords, strict=True)]


def _share(text: str, wanted: list[str]) -> float:
    """Of texts those whose words follow each other in the completion's."""
    said = f" {' '.join(words_of(text))} "
    return sum(f" {' '.join(words_of(one))} " in said for one in wanted) / max(len(wanted), 1)


def majority(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    """1.0 where the answer is that of most of the question's completions; of several as frequent, the first said.

    Completions without any answer vote for none. Give the right answer's function a weight of 0 besides, where it is
    known, and samples.jsonl tells how good the votes are.

    Source: TTRL, Zuo et al. 2025, arXiv:2504.16084. Differs: all completions vote and are trained on; it has 64 vote
        and trains on 32 of them.
    """
    answers = [number_of(text) for text in completions]
    votes = collections.Counter(answer for answer in answers if answer)
    if not votes:
        return [0.0] * len(completions)
    (label, _), *_ = votes.most_common(1)
    return [float(answer == label) for answer in answers]


def short_steps(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """1 - steps / 20 where the answer is right, at least 0; steps are lines that are not blank. 0 where it is wrong.

    Source: Step Pruner: steps of right answers are penalised, wrong ones get nothing. Its form was not found: this one
        is ours, and steps are not capped in length (``rewards.functions`` see whole completions).
    """
    scores = []
    for text, right in zip(completions, answer, strict=True):
        is_right = any(number_of(text) == number_of(x) for x in _accepted(right))
        steps = sum(bool(line.strip()) for line in text.splitlines())
        scores.append(max(0.0, 1.0 - steps / MOST_STEPS) if is_right else 0.0)
    return scores
