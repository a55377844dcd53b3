"""Files of what has been seen, looked up by what is seen now (BM25; extra ``retrieval``).

    transitions   {"state": "..", "action": "..", "next": "..", "reward": 0}: what an action did in a state
    notes         {"state": "..", "note": ".."}: what is worth knowing there

JSON lines; other keys of a line are kept. ``advised`` puts the notes of states alike behind each answer of an
environment:

    from jaxrl_llm.environments import maze
    from jaxrl_llm.environments.experience import advised

    plain = advised("notes.jsonl")(maze.plain)      # a function; in a class a tool: @advised("notes.jsonl")

Owns: which lines of a file are near. Does not know: who is told of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.environments.retrieval import Index, rows
from jaxrl_llm.runtime.functions import awaited

NUMBER = (int, float)
TRANSITIONS = {"state": str, "action": str, "next": str, "reward": NUMBER}
NOTES = {"state": str, "note": str}
NUM_NOTES = 3


class Experience:
    """Lines of a file, found by the words of some of their keys.

    Raises:
        ConfigError: the file cannot be read, or a line lacks a key; named with its number.
    """

    def __init__(self, path: str, kinds: Mapping[str, Any], by: tuple[str, ...]):
        self.rows = [row for _, row in rows(path, kinds)]
        texts = ["\n".join(row[key] for key in by) for row in self.rows]
        # All words count, of one letter too: an action may be "n", or "no".
        self._index = Index([*map(str, range(len(texts)))], texts, token_pattern=r"\w+", stopwords=[])

    def nearest(self, text: str, count: int) -> list[dict[str, Any]]:
        """At most ``count`` lines, nearest first; none without a word in common."""
        return [self.rows[place] for place in self._index.search(text, count)]


@functools.lru_cache(maxsize=4)
def transitions(path: str) -> Experience:
    """Of a file, to be asked for state and action, a line each; raises as ``Experience``."""
    return Experience(path, TRANSITIONS, ("state", "action"))


def advised(path: str, count: int = NUM_NOTES) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: what a function or a tool answers is followed by the nearest notes of the file, a line each.

    They are looked up for each answer, by its words, and not once in an episode. None, the end, stays None.

    Raises:
        ConfigError: as ``Experience``, where the decorator is used.

    Source: SLEA-RL, arXiv:2603.18079: experience that is retrieved at each step by the observation; two lines of
        advice and a warning. Differs: states are alike by BM25, where it clusters them; advice and warnings are notes
        of one kind; the file is what it is: nothing is distilled, scored or admitted in a run. Its advantage of steps
        is the recipe gigpo.
    """
    notes = Experience(path, NOTES, ("state",))

    def decorate(answers: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(answers)
        def answer(*given: Any, **named: Any) -> str | None:
            said = awaited(answers(*given, **named))
            if said is None:
                return None
            return "\n".join([str(said), *(row["note"] for row in notes.nearest(str(said), count))])

        return answer

    return decorate
