"""Document search by BM25 (extra ``retrieval``), as an environment (``environments.factory``) with one tool.

    python -m jaxrl_llm.train --config=recipe:step_search --workdir=runs/search --config.model.path=MODEL \\
        --config.prompts.source=jsonl --config.prompts.name=questions.jsonl --config.prompts.arguments='{}' \\
        --config.prompts.chat_template=True --config.prompts.max_tokens=512 --config.sampling.stop_tokens='()' \\
        --config.sampling.max_completion_tokens=2048 --config.environments.max_answer_tokens=512 \\
        --config.environments.factory=jaxrl_llm.examples.retrieval:Search \\
        --config.rewards.functions='("jaxrl_llm.examples.retrieval:gain",)'

    jaxrl_llm.examples.retrieval:Search   ``search(query)`` replies with the best matching documents
    jaxrl_llm.examples.retrieval:gain     a reward per turn: new evidence found, minus documents found before

This example shows an environment with data of its own, which each worker process loads once, and a reward that reads
what the environment replied.

The documents of a question are its column ``documents``, a list of texts, or the file that its column ``corpus`` names.
The file has JSON lines with ``text`` and ``id`` (default: the line's number). Each process indexes a file once.
``gain`` reads column ``evidence``, the ids of the documents that the answer needs.

Owns: indices, the reply to a search. Does not know: questions, rewards of answers (scoring.scores).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.runtime import json_lines
from jaxrl_llm.settings.schema import ConfigError

NUM_RESULTS = 3
MAX_CHARS = 400  # characters shown of each document
FOUND = re.compile(r"^\[(.+?)\] ", re.M)


class Index:
    """BM25 index of documents. ``words`` are bm25s options that define how texts are split into words."""

    def __init__(self, ids: list[str], texts: list[str], **words: Any):
        try:
            import bm25s  # imported here because most runs do not search
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"a search needs {error.name}: pip install 'jaxrl_llm[retrieval]'") from error

        self.ids, self.texts = ids, texts
        self._tokens = functools.partial(bm25s.tokenize, show_progress=False, **words)
        self._index = bm25s.BM25()
        self._index.index(self._tokens(texts), show_progress=False)

    def search(self, query: str, count: int) -> list[int]:
        """Return the positions of at most ``count`` documents, best first, that share a word with the query."""
        count = min(count, len(self.texts))
        places, scores = self._index.retrieve(self._tokens([query]), k=count, show_progress=False)
        return [int(place) for place, score in zip(places[0], scores[0], strict=True) if score > 0]


@functools.lru_cache(maxsize=4)
def of_file(path: str) -> Index:
    """Return the index of a file's documents. Raise ConfigError for a bad row or an unreadable id."""
    found = rows(path, {"text": str})
    ids = [str(row.get("id", where.rpartition(":")[2])) for where, row in found]
    for (where, _), name in zip(found, ids, strict=True):
        if "] " in name or not name.strip() or len(name.splitlines()) > 1:
            wanted = "one line without ']' before a space: a search shows it as [id] before the text"
            raise ConfigError(f"{where}: id={name!r:.100} must be {wanted}")
    return Index(ids, [row["text"] for _, row in found])


def rows(path: str, kinds: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a file of JSON lines, each with its place "file:line". All have the keys of ``kinds``.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is wrong; the message names the line and the fault.
    """
    wanted = {key: f"an object with `{key}`, {'a text' if kind is str else 'a number'}" for key, kind in kinds.items()}
    found = json_lines.objects(path, next(iter(wanted.values())))
    for where, row in found:
        for key, kind in kinds.items():
            if not is_of(row.get(key), kind):
                raise ConfigError(f"{where}: must be {wanted[key]}, not {row!r:.100}")
    return found


def is_of(value: Any, kind: Any) -> bool:
    """Return whether a JSON value has a type. Booleans are not numbers, and neither are infinities and NaN."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and not math.isfinite(value))


class Search:
    """Environment with one tool that searches documents."""

    def reset(self, documents: list[str] | None = None, corpus: str = "", **columns: Any) -> None:
        if documents:
            self.index = Index([str(i) for i in range(1, len(documents) + 1)], documents)
        elif corpus:
            self.index = of_file(corpus)
        else:
            raise ValueError("a question must have a column `documents` or `corpus`")

    def search(self, query: str) -> str:
        """Searches the documents, and gives those that fit best.

        Args:
            query: Words to look for.
        """
        found = self.index.search(str(query), NUM_RESULTS)
        shown = [f"[{self.index.ids[i]}] {' '.join(self.index.texts[i].split())[:MAX_CHARS]}" for i in found]
        return "\n".join(shown) or "Nothing was found."


def gain(prompts: list, completions: list[str], messages: list, evidence: list, **columns: Any) -> list[list[float]]:
    """Return for each turn the share of the evidence that is new, minus the share of its documents that were known.

        r_k = |new evidence of search k| / |evidence| - |found by k and before| / |found by k|

    A turn without a search, or without a found document, scores 0.

    Source: StepSearch, arXiv:2505.15107: information gain minus redundancy. Differs: a document is the evidence or it
        is not; the paper compares texts by cosines.
    """
    worth = []
    for row, wanted in zip(messages, evidence, strict=True):
        wanted, known, given = {*map(str, wanted)}, set(), []
        for i, message in enumerate(row):
            if message["role"] != "assistant":
                continue
            answers = itertools.takewhile(lambda said: said["role"] != "assistant", row[i + 1 :])  # one per search
            # Skip replies to failed calls. They begin differently and may quote the policy's own lines.
            texts = [said["content"] for said in answers if FOUND.match(said["content"])]
            found = {x for text in texts for x in FOUND.findall(text)}
            new = len((found - known) & wanted) / max(len(wanted), 1)
            given.append(new - (len(found & known) / len(found) if found else 0.0))
            known |= found
        worth.append(given)
    return worth
