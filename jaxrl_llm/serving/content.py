"""Content and tool calls of an answer, from a stream of tokens or from all tokens at once.

    tokens --> text (decoding.GrowingText) --> text before a stop string --> content outside calls (tools.Message)

Owns: the order of these steps, the text before a stop string. Does not know: requests, events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.conversations import tools
from jaxrl_llm.models.files import decoding
from jaxrl_llm.models.files.tokenizer import Tokenizer


class Content:
    """Decoder of an answer that comes in pieces of tokens. Any split into pieces gives the same content and calls.

    Args:
        tokenizer: has ``decode`` and ``byte_ids``.
        stops: stop strings. The content ends before the first stop string.
        functions: tools of the request. Without tools, calls are text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        functions: Sequence[dict[str, Any]],
    ):
        self._text = decoding.GrowingText(tokenizer.decode, tokenizer.byte_ids)
        self._before = TextBefore(stops)
        self._message = tools.Message(functions)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls in the form of the OpenAI API, after ``finish``."""
        return self._message.tool_calls

    def feed(self, tokens: list[int]) -> str:
        """Append tokens, and return the new content that later tokens cannot change."""
        return self._message.feed(self._before.feed(self._text.feed(tokens)))

    def finish(self) -> str:
        """Return the rest of the content."""
        text = self._before.feed(self._text.finish()) + self._before.finish()
        return self._message.feed(text) + self._message.finish()


class TextBefore:
    """Filter of a streamed text that ends the text before the stop string that is completed first."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""  # text at the end that may be the beginning of a stop string
        self._is_over = False

    def feed(self, piece: str) -> str:
        """Append a piece of text, and return the new text that certainly precedes any stop string."""
        if self._is_over:
            return ""
        text = self._held + piece
        # The stop string that is completed first ends the text. If several end at the same character, the longest
        # counts.
        matches = []
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start))
        if matches:
            _, start = min(matches)
            self._is_over = True
            self._held = ""
            return text[:start]
        num_held = 0
        for stop in self._stops:
            for size in range(1, len(stop)):
                if text.endswith(stop[:size]):
                    num_held = max(num_held, size)
        num_certain = len(text) - num_held
        self._held = text[num_certain:]
        return text[:num_certain]

    def finish(self) -> str:
        """Return the text that was held back because it could have been the beginning of a stop string."""
        held = self._held
        self._held = ""
        return held
