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
next sentence or a middle sentence, and a model judges whether the prediction is a valid prefix of the text. Differs: a
run uses one of the two forms, the paper mixes them; sentences end by a rule of punctuation and lines; the number of
sentences that a judge reads is ours; without a judge the reward is the word overlap.

Owns: sentence boundaries, the form of the question. Does not know: how a prediction is scored.
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

SCORER = "jaxrl_llm.scoring.scores:f1"

# argument -> (default, least, most)
ARGUMENTS = {"context": (8, 1, 1000), "words": (4, 1, 1000), "middle": (False, False, True), "following": (3, 0, 1000)}
END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')])\s+|\n+")  # the end of a sentence or of a line
HOW = "Think about it, then write it as <answer>..</answer>."


def load(config: PromptsConfig, *, seed: int) -> Loaded:
    """Return the first ``config.size`` sentences of the file ``config.name`` (0 = all), in file order.

    Every sentence has at least one sentence before it in its text. Host; ``columns`` is ``answer`` (the sentence) and
    ``following`` (the sentences after it, "" if there are none).

    Raises:
        ConfigError: a wrong argument, an unreadable file, no sentence, or a bad line under ``prompts.bad_row="error"``.
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
