"""Sentences of plain text to predict from their context: ``prompts.source="text"``, a JSONL file with column ``text``.

    python -m jaxrl_llm.train --config=recipe:grpo --workdir=runs/text --config.model.path=MODEL \\
        --config.prompts.source=text --config.prompts.name=FILE.jsonl --config.prompts.max_tokens=512 \\
        --config.sampling.max_completion_tokens=128

This example shows how questions and their answers are made from data without labels.

``prompts.arguments``:

    context      8; maximum number of sentences shown before the wanted sentence
    words        4; minimum number of words of the wanted sentence
    middle       False; True also shows the sentence after the wanted sentence
    following    3; maximum number of later sentences that a judge reads

The task's reward is ``scores:f1``, the word overlap of the prediction and the sentence. The alternative
``jaxrl_llm.scoring.judges:meant`` asks a model whether the text begins with the prediction. The prediction may
span several sentences, because the column ``following`` contains the sentences after the wanted one.

Source: RLPT, reinforcement learning on pre-training data, arXiv:2509.19249. The policy reasons before it writes the
next sentence or a middle sentence, and a model judges whether the prediction is a valid prefix of the text. Differs:

- A run uses one of the two forms. The paper mixes both forms.
- Punctuation and line breaks decide where sentences end.
- This example chose the number of sentences that a judge reads.
- Without a judge the reward is the word overlap.

Owns: sentence boundaries, the form of the question. Does not know: how a prediction is scored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked
from jaxrl_llm.questions.tasks.files import load_rows
from jaxrl_llm.runtime.json_lines import BadRowError, lines, parse

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.scoring.scores:f1"

# argument -> (default, least, most)
ARGUMENTS = {
    "context": (8, 1, 1000),
    "words": (4, 1, 1000),
    "middle": (False, False, True),
    "following": (3, 0, 1000),
}
END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')])\s+|\n+")  # the end of a sentence or of a line
INSTRUCTION = "Think about it, then write it as <answer>..</answer>."


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return the first ``config.size`` sentences of the file ``config.name`` (0 = all), in file order.

    Every sentence has at least one sentence before it in its text. Host; ``columns`` is ``answer`` (the sentence) and
    ``following`` (the sentences after it, "" if there are none).

    Raises:
        ConfigError: a wrong argument, an unreadable file, no sentence, or a bad line under ``prompts.bad_row="error"``.
    """
    del seed
    arguments = checked(config.arguments, ARGUMENTS)

    def read(path: Path) -> Iterator[tuple[int, Any]]:
        return _questions(
            path,
            context=arguments["context"],
            words=arguments["words"],
            middle=arguments["middle"],
            following=arguments["following"],
        )

    return load_rows(config, read, _prompt_and_columns)


class _Question(NamedTuple):
    """Sentence of a text with its context."""

    before: list[str]
    sentence: str
    next_sentence: str  # the sentence after the wanted one; "" if the prompt does not show it
    following: str  # the sentences after it, which a judge reads


def _questions(
    path: Path, *, context: int, words: int, middle: bool, following: int
) -> Iterator[tuple[int, _Question | BadRowError]]:
    """Yield the questions of a file, or the error of a bad line, with the line's number."""
    for number, line in lines(path):
        try:
            sentences = _sentences(parse(line))
        except BadRowError as error:
            yield number, error
            continue
        # The last sentence has no next sentence that the prompt could show.
        end = len(sentences) - 1 if middle else len(sentences)
        for i in range(1, end):
            sentence = sentences[i]
            if len(sentence.split()) < words:
                continue
            question = _Question(
                before=sentences[max(0, i - context) : i],
                sentence=sentence,
                next_sentence=sentences[i + 1] if middle else "",
                following=" ".join(sentences[i + 1 : i + 1 + following]),
            )
            yield number, question


def _prompt_and_columns(row: _Question | BadRowError) -> tuple[str, dict[str, Any]]:
    """Return the prompt of a question and its columns. Raise the error of a bad line."""
    if isinstance(row, BadRowError):
        raise row
    before = " ".join(row.before)
    if row.next_sentence:
        request = f"[...] {row.next_sentence}\n\nWhich sentence stands at [...]?"
    else:
        request = "\n\nWhich sentence comes next?"
    prompt = f"{before} {request} {INSTRUCTION}".replace(" \n", "\n")
    columns = {"answer": row.sentence, "following": row.following}
    return prompt, columns


def _sentences(row: Any) -> list[str]:
    """Return the sentences of column ``text`` of a row."""
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise BadRowError(f"must be an object with a text in column `text`, not {row!r:.60}")
    parts = [part.strip() for part in END.split(text)]
    return [part for part in parts if part]
