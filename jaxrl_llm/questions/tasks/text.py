"""Sentences of plain text, to be guessed from what stands around them: ``prompts.source="text"``, a JSONL file with a
text in column ``text`` on each line.

``prompts.arguments``: ``context``, sentences before the one that is asked for, at most (8); ``words``, what it has at
least (4); ``middle``, whether the sentence after it is shown too (False); ``following``, sentences after it that a
judge is shown, at most (3).

The reward of the task is ``scores:f1``, the words that the guess and the sentence have in common;
``jaxrl_llm.questions.tasks.judges:meant`` asks a model whether the text goes on as the guess does, for a sentence or
several: column ``following`` has those after it.

Source: RLPT, reinforcement learning on pre-training data, arXiv:2509.19249: the next sentence, or one in the middle, is
reasoned about before it is written, and a model says whether it is a valid prefix of what follows. Differs: a run asks
for the one or the other, where both are mixed; where sentences end is a rule of punctuation and of lines; how many of
them a judge is shown is ours; without a judge the reward is the share of words.

Owns: what a sentence is, how it is asked for. Does not know: how a guess is scored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.questions.tasks import Loaded
from jaxrl_llm.questions.tasks.arguments import checked
from jaxrl_llm.questions.tasks.files import load_rows
from jaxrl_llm.runtime.json_lines import BadRowError, lines, parse

if TYPE_CHECKING:
    from jaxrl_llm.config import PromptsConfig

SCORER = "jaxrl_llm.questions.tasks.scores:f1"

# argument -> (default, least, most)
ARGUMENTS = {"context": (8, 1, 1000), "words": (4, 1, 1000), "middle": (False, False, True), "following": (3, 0, 1000)}
END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')])\s+|\n+")  # of a sentence, or of a line
HOW = "Think about it, then write it as <answer>..</answer>."


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """The first ``config.size`` sentences of the file ``config.name`` (0 = all) with one before them, in file order.

    Host; ``columns`` is ``answer``, the sentence, and ``following``, those after it, "" where there is none.

    Raises:
        ConfigError: an argument, the file, or (``prompts.bad_row="error"``) a line that is none; no sentence.
    """
    del seed
    context, words, middle, following = checked(config.arguments, ARGUMENTS).values()

    def read(path: Path) -> Iterator[tuple[int, Any]]:
        for number, line in lines(path):
            try:
                sentences = _sentences(parse(line))
            except BadRowError as error:
                yield number, error
                continue
            for i in range(1, len(sentences) - middle):
                if len(sentences[i].split()) >= words:
                    shown = sentences[i + 1] if middle else ""
                    after = " ".join(sentences[i + 1 : i + 1 + following])
                    yield number, (sentences[max(0, i - context) : i], sentences[i], shown, after)

    def made(row: Any) -> tuple[str, dict[str, Any]]:
        if isinstance(row, BadRowError):
            raise row
        before, sentence, shown, after = row
        asked = f"[...] {shown}\n\nWhich sentence stands at [...]?" if shown else "\n\nWhich sentence comes next?"
        columns = {"answer": sentence, "following": after}
        return f"{' '.join(before)} {asked} {HOW}".replace(" \n", "\n"), columns

    return load_rows(config, read, made)


def _sentences(row: Any) -> list[str]:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise BadRowError(f"must be an object with a text in column `text`, not {row!r:.60}")
    return [part.strip() for part in END.split(text) if part.strip()]
