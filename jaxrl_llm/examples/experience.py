"""Experience files, searched by the current state with BM25 (extra ``retrieval``).

    transitions   {"state": "..", "action": "..", "next": "..", "reward": 0}: the result of an action in a state
    notes         {"state": "..", "note": ".."}: advice for a state

The files contain JSON lines. A line may have further keys. ``advised`` appends the notes of similar states to each
reply of an environment:

    from jaxrl_llm.examples import maze
    from jaxrl_llm.examples.experience import advised

    plain = advised("notes.jsonl")(maze.plain)      # a function; in a class a tool: @advised("notes.jsonl")

With these lines in mine.py, ``--config.environments.factory=mine.py:plain`` uses the notes:

    python -m jaxrl_llm.train --config=configs/maze.py --workdir=runs/notes \\
        --config.environments.factory=mine.py:plain --config.environments.max_answer_tokens=24

This example shows how to extend an environment without changing it.

Owns: the search for the nearest lines of a file. Does not know: the readers of these lines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.examples.retrieval import Index, rows
from jaxrl_llm.settings.functions import awaited

NUMBER = (int, float)
TRANSITIONS = {
    "state": str,
    "action": str,
    "next": str,
    "reward": NUMBER,
}
NOTES = {"state": str, "note": str}
NUM_NOTES = 3


class Experience:
    """Searchable lines of a file, indexed by the words of some of their keys.

    Raises:
        ConfigError: the file cannot be read, or a line lacks a key; the message has the line's number.
    """

    def __init__(self, path: str, kinds: Mapping[str, Any], by: tuple[str, ...]):
        self.rows = []
        texts = []
        for _, row in rows(path, kinds):
            self.rows.append(row)
            texts.append("\n".join(row[key] for key in by))
        ids = [str(number) for number in range(len(texts))]
        # Keep words of one letter and stop words, because an action may be "n" or "no".
        self._index = Index(ids, texts, token_pattern=r"\w+", stopwords=[])

    def nearest(self, text: str, count: int) -> list[dict[str, Any]]:
        """Return at most ``count`` lines, nearest first. Lines without a common word are left out."""
        positions = self._index.search(text, count)
        return [self.rows[position] for position in positions]


@functools.lru_cache(maxsize=4)
def transitions(path: str) -> Experience:
    """Return the transitions of a file, indexed by state and action. Raises the same errors as ``Experience``."""
    return Experience(path, TRANSITIONS, ("state", "action"))


def advised(path: str, count: int = NUM_NOTES) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that appends the nearest notes of the file, one per line, to each reply of a function or tool.

    The notes are searched for every reply, by its words. A reply of None, which ends the episode, stays None.

    Raises:
        ConfigError: same as ``Experience``, when ``advised`` is called.

    Source: SLEA-RL, arXiv:2603.18079: each observation retrieves experience, which is two lines of advice and a
        warning. The paper's step-level advantage is the recipe gigpo. Differs:

        - The paper clusters similar states. Here BM25 finds them.
        - Advice and warnings are notes of one kind.
        - The file does not change in a run, so no note is distilled, scored or admitted.
    """
    notes = Experience(path, NOTES, ("state",))

    def decorate(reply_function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reply_function)
        def advised_reply(*args: Any, **kwargs: Any) -> str | None:
            reply = awaited(reply_function(*args, **kwargs))
            if reply is None:
                return None
            text = str(reply)
            lines = [text]
            for row in notes.nearest(text, count):
                lines.append(row["note"])
            return "\n".join(lines)

        return advised_reply

    return decorate
