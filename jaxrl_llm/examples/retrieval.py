"""Document search by BM25 (extra ``retrieval``), as an environment (``environments.factory``) with one tool.

    python -m jaxrl_llm.train --config=recipe:step_search --workdir=runs/search --config.model.path=MODEL \\
        --config.prompts.source=jsonl --config.prompts.name=questions.jsonl --config.prompts.arguments='{}' \\
        --config.prompts.chat_template=True --config.prompts.max_tokens=512 --config.sampling.stop_tokens='()' \\
        --config.sampling.max_completion_tokens=2048 --config.environments.max_answer_tokens=512 \\
        --config.environments.factory=jaxrl_llm.examples.retrieval:Search \\
        --config.rewards.functions='("jaxrl_llm.examples.retrieval:gain",)'

    jaxrl_llm.examples.retrieval:Search   ``search(query)`` replies with the best matching documents
    jaxrl_llm.examples.retrieval:gain     a reward per turn: new evidence found, minus documents found before

This example shows an environment whose data each worker process loads once, and a reward that reads the environment's
replies.

The documents of a question are its column ``documents``, a list of texts, or the file that its column ``corpus`` names.
The file has JSON lines with ``text`` and ``id`` (default: the line's number). Each process indexes a file once.
``gain`` reads column ``evidence``, the ids of the documents that the answer needs.

Owns: indices, the reply to a search. Does not know: questions, rewards of answers (scoring.scores).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.runtime import json_lines
from jaxrl_llm.settings.schema import ConfigError

NUM_RESULTS = 3
MAX_CHARS = 400  # characters shown of each document
DOCUMENT_ID = re.compile(r"^\[(.+?)\] ", re.M)


class Index:
    """BM25 index of documents. ``words`` are bm25s options that define how texts are split into words."""

    def __init__(self, ids: list[str], texts: list[str], **words: Any):
        try:
            import bm25s  # imported here because most runs do not search
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"a search needs {error.name}: pip install 'jaxrl_llm[retrieval]'") from error

        self.ids = ids
        self.texts = texts
        self._tokens = functools.partial(bm25s.tokenize, show_progress=False, **words)
        self._index = bm25s.BM25()
        self._index.index(self._tokens(texts), show_progress=False)

    def search(self, query: str, count: int) -> list[int]:
        """Return the positions of at most ``count`` documents, best first, that share a word with the query."""
        count = min(count, len(self.texts))
        query_tokens = self._tokens([query])
        positions, scores = self._index.retrieve(query_tokens, k=count, show_progress=False)
        matches = []
        for position, score in zip(positions[0], scores[0], strict=True):
            if score > 0:
                matches.append(int(position))
        return matches


@functools.lru_cache(maxsize=4)
def index_of_file(path: str) -> Index:
    """Return the index of a file's documents.

    Raises:
        ConfigError: a row is wrong, or ``gain`` could not read its id in a reply.
    """
    ids = []
    texts = []
    for place, row in rows(path, {"text": str}):
        line_number = place.rpartition(":")[2]
        document_id = str(row.get("id", line_number))
        _check_id(document_id, place)
        ids.append(document_id)
        texts.append(row["text"])
    return Index(ids, texts)


def _check_id(document_id: str, place: str) -> None:
    """Raise ConfigError if the id could not be read back from "[id] text"."""
    is_blank = not document_id.strip()
    has_many_lines = len(document_id.splitlines()) > 1
    if "] " in document_id or is_blank or has_many_lines:
        allowed = "one line without ']' before a space: a search shows it as [id] before the text"
        raise ConfigError(f"{place}: id={document_id!r:.100} must be {allowed}")


def rows(path: str, kinds: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a file of JSON lines, each with its place "file:line". Each has all keys of ``kinds``.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is wrong. The message names the line and the fault.
    """
    descriptions = {}
    for key, kind in kinds.items():
        kind_name = "a text" if kind is str else "a number"
        descriptions[key] = f"an object with `{key}`, {kind_name}"
    first_description = next(iter(descriptions.values()))
    objects = json_lines.objects(path, first_description)
    for place, row in objects:
        for key, kind in kinds.items():
            if not has_type(row.get(key), kind):
                raise ConfigError(f"{place}: must be {descriptions[key]}, not {row!r:.100}")
    return objects


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a JSON value has a type. Booleans are not numbers, and neither are infinities and NaN."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, kind)


class Search:
    """Environment with one tool that searches documents."""

    def reset(self, documents: list[str] | None = None, corpus: str = "", **columns: Any) -> None:
        """Begin a conversation about the question's own documents, or about the documents of a file."""
        if documents:
            ids = [str(number) for number in range(1, len(documents) + 1)]
            self.index = Index(ids, documents)
        elif corpus:
            self.index = index_of_file(corpus)
        else:
            raise ValueError("a question must have a column `documents` or `corpus`")

    def search(self, query: str) -> str:
        """Searches the documents, and gives those that fit best.

        Args:
            query: Words to look for.
        """
        positions = self.index.search(str(query), NUM_RESULTS)
        lines = []
        for position in positions:
            document_id = self.index.ids[position]
            text = " ".join(self.index.texts[position].split())
            lines.append(f"[{document_id}] {text[:MAX_CHARS]}")
        return "\n".join(lines) or "Nothing was found."


def gain(
    prompts: list,
    completions: list[str],
    messages: list,
    evidence: list,
    **columns: Any,
) -> list[list[float]]:
    """Return for each turn its share of new evidence, minus the share of its documents that earlier turns found.

        r_k = |new evidence of search k| / |evidence| - |found by k and before| / |found by k|

    A turn without a search, or without a found document, scores 0.

    Source: StepSearch, arXiv:2505.15107: information gain minus redundancy. Differs: a document either is evidence or
        is not. The paper compares texts by cosines.
    """
    scores = []
    for conversation, evidence_ids in zip(messages, evidence, strict=True):
        scores.append(_turn_gains(conversation, {str(document_id) for document_id in evidence_ids}))
    return scores


def _turn_gains(messages: list[dict[str, Any]], evidence: set[str]) -> list[float]:
    """Return the gain of each turn of one conversation."""
    earlier: set[str] = set()
    gains = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        documents = _replied_documents(messages[i + 1 :])
        new_evidence = (documents - earlier) & evidence
        turn_gain = len(new_evidence) / max(len(evidence), 1)
        if documents:
            turn_gain -= len(documents & earlier) / len(documents)
        gains.append(turn_gain)
        earlier |= documents
    return gains


def _replied_documents(messages: list[dict[str, Any]]) -> set[str]:
    """Return the ids of the documents in the replies that precede the policy's next turn. Each search has one reply."""
    documents: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            break
        text = message["content"]
        # Skip replies to failed calls. They begin differently and may quote the policy's own lines.
        if DOCUMENT_ID.match(text):
            documents.update(DOCUMENT_ID.findall(text))
    return documents
