"""What servers that speak the OpenAI API have in common: connections, answers, what may be asked for nothing.

The agents' (agents) and ``jaxrl_llm.serve``'s (serving.http) add their routes to it.

Owns: what is read of a request and how it is answered, refusals, neutral values. Does not know: routes, models.
"""

from __future__ import annotations

import contextlib
import http.server
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.runtime import json_lines

MAX_BODY = 2**24  # bytes
# What a request may say that asks for nothing: by name the values, () any. Null asks for nothing, whatever its name.
# A server that hears one of these takes it out of a request first.
NEUTRAL: dict[str, tuple[Any, ...]] = {"n": (1,), "best_of": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
NEUTRAL |= {"repetition_penalty": (1,), "length_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,)}
NEUTRAL |= {"min_tokens": (0,), "ignore_eos": (False,), "use_beam_search": (False,), "stop": ([],), "seed": ()}
NEUTRAL |= {"logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "stream": (False,), "echo": (False,)}
NEUTRAL |= {"response_format": ({"type": "text"},), "modalities": (["text"],), "parallel_tool_calls": (True,)}
NEUTRAL |= {"service_tier": ("auto", "default"), "store": (False,), "skip_special_tokens": (True,)}
NEUTRAL |= {"spaces_between_special_tokens": (), "include_stop_str_in_output": (False,), "metadata": (), "user": ()}
NEUTRAL |= {"safety_identifier": (), "prompt_cache_key": (), "cache_salt": (), "priority": ()}
# Where the answer is token ids: it has them all with their log-probs, and no text.
OF_TOKENS: dict[str, tuple[Any, ...]] = {"logprobs": (), "skip_special_tokens": (), "detokenize": ()}
OF_TOKENS |= {"include_stop_str_in_output": (), "routed_experts_prompt_start": ()}


class Refused(Exception):
    """An answer other than 200: its status, and what to say."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def pass_over(asked: Mapping[str, Any], more: Mapping[str, tuple[Any, ...]], why: str = "is not known here") -> None:
    """Refused where one of these asks for something.

    Args:
        asked: by name, what a server has not heard of a request.
        more: what asks for nothing besides ``NEUTRAL``, or in its place.
        why: what is said of a name in neither.
    """
    neutral = {**NEUTRAL, **more}
    for name, value in asked.items():
        if value is None:
            continue
        if name not in neutral:
            raise Refused(400, f"{name} {why}")
        if neutral[name] and value not in neutral[name]:
            raise Refused(400, f"{name}={value!r:.100} is not there: only {neutral[name][0]!r}")


def token_choice(ids: Sequence[int], logps: Sequence[float], why: str) -> dict[str, Any]:
    """The answer to a request of tokens: vLLM's, and log-probs under each token's id."""
    content = [{"token": f"token_id:{i}", "logprob": logp} for i, logp in zip(ids, logps, strict=True)]
    return {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": why}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection, of which there may be as many as the system lets this process have."""

    request_queue_size = 1024

    def __init__(self, *given: Any, **how: Any):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        super().__init__(*given, **how)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no error of the server's."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two writes: the second would wait for the first one's receipt, 40 ms
    is_streaming = False  # its status is out, and events may follow

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, method: Callable[[], None]) -> None:
        """Let ``method`` answer; what it raises is told to the client, and what nobody foresaw on stderr too."""
        self.is_streaming = False
        try:
            try:
                method()
            except Refused as refused:
                self._fail(refused.status, str(refused))
            except (ConnectionError, TimeoutError):
                raise
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:300]
                print(f"warning: {self.command} {self.path[:200]} failed: {said}", file=sys.stderr, flush=True)
                self._fail(500, said)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def body(self) -> dict[str, Any]:
        """The request's; Refused where it is no JSON object, or too large to be read."""
        size = self.headers.get("Content-Length", "")
        is_size = size.isascii() and size.isdigit()
        if not is_size or len(size) > len(str(MAX_BODY)) or int(size) > MAX_BODY:
            raise Refused(413 if is_size else 411, f"Content-Length={size!r:.100} must be at most {MAX_BODY}")
        try:
            body = json_lines.strict(self.rfile.read(int(size)))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        return body

    def send(self, status: int, body: dict[str, Any]) -> None:
        data = json_lines.written(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:  # what of its body was not read is not the next request
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def begin_events(self) -> None:
        """The head of an answer that comes in parts: ``say`` each, then ``end_events``."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.is_streaming = self.close_connection = True
        self.end_headers()

    def say(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json_lines.written(event)}\n\n".encode())

    def end_events(self) -> None:
        self.wfile.write(b"data: [DONE]\n\n")

    def _fail(self, status: int, text: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"error": {"message": text, "type": kind, "code": status}}
        if self.is_streaming:  # without an end: what has come is not the whole
            self.say(error)
        else:
            self.send(status, error)
