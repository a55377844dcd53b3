r"""Rewards for ``rewards.functions``, that suit many tasks: ``"jaxrl_llm.questions.tasks.scores:NAME"``.

    format       1.0 where the completion is <think>..</think> <answer>..</answer> and nothing else
    exact        1.0 where the answer is one of column ``answer``, but for case, articles and punctuation
    f1           share of words that answer and ``answer`` have in common (harmonic mean of precision and recall)
    key_steps    the right answer, and a tenth of the share of column ``key_steps`` that the completion has on its way
    keywords     share of column ``keywords``, texts, that the completion has
    majority     1.0 where the answer is that of most completions of the question: no label is looked at (TTRL)
    short_steps  where ``answer`` is met, the less the more steps (paragraphs) there are, above 1/2; else 0

The answer of a completion is the inside of the last <answer></answer>, else of the last \boxed{}, else its last line;
for ``majority`` and ``short_steps`` the number that the inside is, or the last of the line, if any. ``short_steps``
compares it with an ``answer`` that is a number ("#### 72", "$1,000", "5 km"), and with any other the text.

Owns: these functions, what the answer of a completion is. Does not know: questions, jax.
"""

from __future__ import annotations

import collections
import re
import string
from decimal import Decimal
from typing import Any

FORMAT = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.S
)
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|(?<!\w)\.\d+)(?:/\d+|[eE][-+]?\d{1,3}(?!\w|\.\d))?")
# Nothing but a number, with its currency or unit.
QUANTITY = re.compile(rf"(?:\\?[$€£])?\+?({NUMBER.pattern})\s*(?:\\?%|°[CF]?|[€£]|(?:\s[^\W\d_]+(?:/[^\W\d_]+)?)+)?\.?")
MINUS = "\u2212"  # of formulas
# A number with its sign, which no operand stands before, thousands and decimals; else what has no punctuation in it.
_THOUSANDS, _SIGN = r"\d{1,3}(?:,\d{3})+(?!\d)", r"(?:(?<![\w)\]}])-(?=\.?\d))?"
_OTHER = rf"[^\W\d_]+(?=\d+\.\d)|[^\s{re.escape(string.punctuation)}]+"
WORD = re.compile(rf"{_SIGN}(?:(?:{_THOUSANDS}|\d+|(?<!\w))\.\d+|{_THOUSANDS}|{_OTHER})")
DECIMAL = re.compile(r"-?[\d,]*\.?\d+")
PARAGRAPHS = re.compile(r"\n\s*\n")
ARTICLES = ("a", "an", "the")
STEP_WEIGHT = 0.1
SOME_STEPS = 20


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
    answer = answer_of(text).replace(MINUS, "-")
    found = NUMBER.findall(answer)
    said = (found[-1] if found and marked(text) is None else answer).strip(" $")
    return _in_short(said) if NUMBER.fullmatch(said) else said


def _in_short(number: str) -> str:
    """Without commas, powers of ten, and zeros that decimals end with; of .5 0.5."""
    number = re.sub(r"^(-?)\.", r"\g<1>0.", number.replace(",", ""))
    number = f"{Decimal(number):f}" if "e" in number.lower() else number
    return number.rstrip("0").rstrip(".") if "." in number and "/" not in number else number


def words_of(text: str) -> list[str]:
    """Lower case, without punctuation and articles, as SQuAD compares answers; numbers keep their signs and decimals.

    Of a text of articles alone these, of one of punctuation alone that.
    """
    words = _all_words(text)
    return [word for word in words if word not in ARTICLES] or words or text.split()


def _all_words(text: str) -> list[str]:
    words = WORD.findall(text.lower().replace(MINUS, "-"))
    return [_in_short(word) if DECIMAL.fullmatch(word) else word for word in words]


def format(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    """Source: DeepSeek-AI 2025, arXiv:2501.12948, section 2.2.2."""
    return [float(FORMAT.fullmatch(text) is not None) for text in completions]


def accepted(answer: Any) -> list[str]:
    """Texts of column ``answer``, but for null and empty ones, which saying nothing would meet; ValueError without."""
    given = answer if isinstance(answer, list) else [answer]
    if not (texts := [str(x) for x in given if x is not None and str(x).strip()]):
        raise ValueError(f"`answer` is {answer!r}: there is nothing to compare with")
    return texts


def has_number_of(text: str, answer: Any) -> bool:
    """Whether its ``number_of``, or its answer, is one that is accepted: a number alone, after #### too, or a text."""
    said = number_of(text), _quantity_of(text)
    labels = accepted([x.rpartition("####")[2] for x in accepted(answer)])
    return any(_quantity_of(x) in said for x in labels)


def _quantity_of(text: str) -> str:
    """The number that its answer is, in short; where it is none, the answer."""
    answer = answer_of(text).replace(MINUS, "-").strip(" $")
    found = QUANTITY.fullmatch(answer)
    return _in_short(found[1]) if found else answer


def exact(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """``answer``: a text, or several of which each is right."""
    given = zip(completions, answer, strict=True)
    return [float(words_of(answer_of(text)) in map(words_of, accepted(right))) for text, right in given]


def f1(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """2 P R / (P + R), P and R the shares of the words of the completion's answer and of the right one in common."""
    given = zip(completions, answer, strict=True)
    return [max(_overlap(words_of(answer_of(text)), words_of(x)) for x in accepted(right)) for text, right in given]


def _overlap(said: list[str], right: list[str]) -> float:
    common = sum((collections.Counter(said) & collections.Counter(right)).values())
    return 2.0 * common / (len(said) + len(right)) if common else float(said == right)


def key_steps(prompts: list, completions: list[str], answer: list, key_steps: list, **columns: Any) -> list[float]:
    """r = [the answer is right] + 0.1 (share of the key steps that the completion has).

    Two wrong answers are told apart by how far they came. A step is there where its words follow each other; one that
    is a list of texts is there in any of these.

    Source: StepRAR of R1-VL, arXiv:2503.12937, the soft match of key steps and its weight (released code). Differs: a
        step is looked for in the whole completion, by words and not by letters; answers are compared as texts; its
        structure reward (StepRVR) is ``format``.
    """
    right = exact(prompts, completions, answer)
    return [r + STEP_WEIGHT * _share(text, own) for r, text, own in zip(right, completions, key_steps, strict=True)]


def keywords(prompts: list, completions: list[str], keywords: list, **columns: Any) -> list[float]:
    """How many of the keywords that a completion must have it has, however many these are; of none 0.

    Source: IFScale, instructions by the hundred of which each is a keyword to be said.
    """
    return [_share(text, own) for text, own in zip(completions, keywords, strict=True)]


def _share(text: str, wanted: list) -> float:
    """Of texts, or lists of texts that mean the same, those that the completion has."""
    said = [f" {' '.join(words)} " for words in (words_of(text), _all_words(text))]

    def has(one: Any) -> bool:
        if isinstance(one, list | tuple):
            return any(map(has, one))
        words = words_of(str(one))
        if _all_words(str(one)):
            return any(f" {' '.join(words)} " in of for of in said)
        return bool(words) and str(one).strip() in text  # of punctuation alone

    return sum(map(has, wanted)) / max(len(wanted), 1)


def majority(prompts: list, completions: list[str], **columns: Any) -> list[float]:
    """1.0 where the answer is that of most of the question's completions; of several as frequent, the first said.

    Completions without any answer vote for none. Give the right answer's function a weight of 0 besides, where it is
    known, and samples.jsonl tells how good the votes are.

    Source: TTRL, Zuo et al. 2025, arXiv:2504.16084. Differs: all completions vote and are trained on; it has 64 vote
        and trains on 32 of them, and a grader of mathematics say which answers are the label, where here they are the
        same text, or the same number.
    """
    answers = [number_of(text) for text in completions]
    votes = collections.Counter(answer for answer in answers if answer)
    if not votes:
        return [0.0] * len(completions)
    (label, _), *_ = votes.most_common(1)
    return [float(answer == label) for answer in answers]


def short_steps(prompts: list, completions: list[str], answer: list, **columns: Any) -> list[float]:
    """(1 + 20 / (20 + k)) / 2 where the answer is right, k paragraphs that are not blank; 0 where it is wrong.

    Above 1/2 for every right answer, however long: give ``rewards.pass_threshold`` that.

    Source: Step Pruner, arXiv:2510.03805: steps are paragraphs, those of right answers are penalised, and wrong ones
        get nothing. Its form was not found: this one, and its 20, are ours. Differs: training is not halted where
        answers shorten no more, or where steps grow long for there being fewer.
    """
    scores = []
    for text, right in zip(completions, answer, strict=True):
        steps = sum(bool(part.strip()) for part in PARAGRAPHS.split(text))
        scores.append((1.0 + SOME_STEPS / (SOME_STEPS + steps)) / 2 if has_number_of(text, right) else 0.0)
    return scores
