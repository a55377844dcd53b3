"""Routes of a server of completions, over HTTP.

    GET  /v1/models                  what is served, a base and its adapters, with ``max_model_len``
    POST /inference/v1/generate      token ids in, token ids and their log-probs out: for agents that are trained
    POST /v1/chat/completions        messages in, text out, as the OpenAI API has it; with ``stream``, as it comes; with
                                     ``tools``, what the model writes as calls of them comes as ``tool_calls``

What a request asks for that is not there, such as a penalty of what was said before, is refused with 400 and named. Too
many requests at once are answered with 429. One whose client has gone gives its slot back.

Owns: routes, what a request may ask for, what its answer looks like. Does not know: how tokens are drawn (``engine``).
"""

from __future__ import annotations

import hmac
import http.server
import json
import queue
import select
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.actor import tools
from jaxrl_llm.config import ConfigError
from jaxrl_llm.serving.engine import BusyError, Engine, Request

MAX_BODY = 2**24  # bytes
POLL_S = 1.0  # between looks at whether a client is still there
READ_S = 60.0  # that a client may take to say what it wants
# What a request may say that asks for nothing: by name the values, () any. Null asks for nothing, whatever its name.
NEUTRAL: dict[str, tuple[Any, ...]] = {"n": (1,), "best_of": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
NEUTRAL |= {"repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "min_tokens": (0,)}
NEUTRAL |= {"top_logprobs": (0,), "store": (False,), "skip_special_tokens": (), "spaces_between_special_tokens": ()}
NEUTRAL |= {"response_format": ({"type": "text"},), "logit_bias": ({},), "metadata": ()}
NEUTRAL |= {"user": (), "cache_salt": (), "priority": (), "routed_experts_prompt_start": ()}


class Refused(Exception):
    """An answer other than 200: its status, and what to say."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server(http.server.ThreadingHTTPServer):
    """Serves engines of one sampler: a request names the model of one, or has the first.

    Args:
        address: host and port; port 0 takes a free one (``server_port``).
        engines: by names of their models.
        tokenizer: of all models.
        temperature: of requests that name none; 0 = of all, greedy.
        token: that requests must bear; "" = none.
    """

    request_queue_size = 1024

    def __init__(
        self, address: tuple[str, int], engines: Mapping[str, Engine], tokenizer: Any, temperature: float, token: str
    ):
        super().__init__(address, Handler)
        self.engines, self.tokenizer = engines, tokenizer
        self.temperature, self.token = temperature, token
        self.began = int(time.time())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no error of the server's."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", READ_S
    server: Server
    model: str  # that the request has chosen

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, method: Any) -> None:
        try:
            if self.server.token:
                given = self.headers.get("Authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
                    raise Refused(401, "the bearer token is missing or wrong")
            method()
        except Refused as refused:
            kind = "invalid_request_error" if refused.status < 500 else "server_error"
            self._send(refused.status, {"error": {"message": str(refused), "type": kind, "code": refused.status}})
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:  # what of its body was not read is not the next request
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def _get(self) -> None:
        if self.path != "/v1/models":
            raise Refused(404, f"no route GET {self.path}")
        said = {"object": "model", "created": self.server.began, "owned_by": "jaxrl_llm"}
        models = [{"id": x, **said, "max_model_len": of.sampler.row_tokens} for x, of in self.server.engines.items()]
        self._send(200, {"object": "list", "data": models})

    def _post(self) -> None:
        routes = {"/inference/v1/generate": self._generate, "/v1/chat/completions": self._chat}
        if self.path not in routes:
            raise Refused(404, f"no route POST {self.path}")
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > MAX_BODY:
            raise Refused(413 if size.isdigit() else 411, f"Content-Length={size!r} must be at most {MAX_BODY}")
        try:
            body = json.loads(self.rfile.read(int(size)))
        except ValueError as error:
            raise Refused(400, f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        names = list(self.server.engines)
        self.model = body.pop("model", names[0])
        if self.model not in names:
            raise Refused(404, f"the model served is {' or '.join(map(repr, names))}")
        routes[self.path](body)

    # ---- routes ----

    def _generate(self, body: dict[str, Any]) -> None:
        ids, asked = body.pop("token_ids", None), body.pop("sampling_params", {})
        if not isinstance(asked, dict):
            raise Refused(400, f"sampling_params={asked!r:.100} must be an object")
        request = self._request(ids, {**body, **asked})
        tokens, logps, why = self._whole(request)
        content = [{"token": f"token_id:{i}", "logprob": logp} for i, logp in zip(tokens, logps, strict=True)]
        choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": why}
        self._send(200, {"request_id": uuid.uuid4().hex, "model": self.model, "choices": [choice]})

    def _chat(self, body: dict[str, Any]) -> None:
        messages, stream, options = (body.pop(name, None) for name in ("messages", "stream", "stream_options"))
        told = body.pop("chat_template_kwargs", None)
        for name, given in (("stream_options", options), ("chat_template_kwargs", told)):
            if not isinstance(given, dict | None):
                raise Refused(400, f"{name}={given!r:.100} must be an object")
        how = {"system_prompt": "", "chat_template": True, "chat_template_kwargs": told or {}}
        given, choice = body.pop("tools", None), body.pop("tool_choice", None)
        if choice not in (None, "auto", "none"):
            raise Refused(400, f"tool_choice={choice!r:.100} must be 'auto' or 'none'")
        body.pop("parallel_tool_calls", None)
        try:
            messages, given = tools.texts_of(messages), tools.functions_of(given or [])
            given = [] if choice == "none" else given
            ids = self._encoded(messages, given, how)
        except ValueError as error:  # a ConfigError too
            raise Refused(400, str(error)) from None
        wants_logprobs = bool(body.pop("logprobs", False))
        request = self._request(ids, body)
        base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        if stream:
            return self._stream(request, base, bool((options or {}).get("include_usage")), bool(given), wants_logprobs)
        tokens, logps, why = self._whole(request)
        text = _before(self.server.tokenizer.decode(tokens), request.stop, is_whole=True)
        message = tools.message_of(text, has_tools=bool(given))
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else why}
        choice["logprobs"] = self._logprobs(tokens, logps) if wants_logprobs else None
        usage = _usage(request, tokens)
        self._send(200, base | {"object": "chat.completion", "choices": [choice], "usage": usage})
        return None

    def _encoded(self, messages: list[dict[str, str]], given: list[Any], how: dict[str, Any]) -> list[int]:
        """Token ids of a conversation; where its template has no place for tools, the system's message has them."""
        encode = self.server.tokenizer.encode_prompt
        plain = encode(messages, **how)  # what is wrong with it is none of the tools' doing
        if not given:
            return plain
        try:
            return encode(messages, **how | {"chat_template_kwargs": {**how["chat_template_kwargs"], "tools": given}})
        except ConfigError:
            return encode(tools.told(messages, given), **how)

    def _logprobs(self, tokens: list[int], logps: list[float]) -> dict[str, Any]:
        decode, said = self.server.tokenizer.decode, {"bytes": None, "top_logprobs": []}
        return {"content": [{"token": decode([i]), "logprob": x} | said for i, x in zip(tokens, logps, strict=True)]}

    def _stream(
        self, request: Request, base: dict[str, Any], wants_usage: bool, has_tools: bool, wants_logprobs: bool
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection, base = True, base | {"object": "chat.completion.chunk"}
        say = lambda event: self.wfile.write(f"data: {json.dumps(base | event)}\n\n".encode())

        def delta(content: dict[str, Any], why: str | None = None) -> None:
            """With the log-probs of all tokens since the last one."""
            logprobs = self._logprobs(tokens[len(tokens) - len(logps) :], logps) if wants_logprobs and logps else None
            say({"choices": [{"index": 0, "delta": content, "finish_reason": why, "logprobs": logprobs}]})
            logps.clear()

        tokens, logps, said, held = [], [], "", (tools.BEGIN, tools.MISTRAL) if has_tools else ()
        delta({"role": "assistant", "content": ""})
        for new, its_logps, why in self._deltas(request):
            tokens += new
            logps += its_logps
            whole = _before(self.server.tokenizer.decode(tokens), request.stop, is_whole=bool(why))
            text, calls = tools.calls_in(whole) if has_tools and why else (whole, [])
            if calls:
                text = tools.apart(whole)[0]
            elif not why:  # what may be a call is not told as text
                is_held = has_tools and tools.may_become_call(whole)
                text = "" if is_held else _before(whole, held, is_whole=False)
            if text.startswith(said) and len(text) > len(said):
                delta({"content": text[len(said) :]})
                said = text
            if calls:
                delta({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
            if why:
                delta({}, "tool_calls" if calls else why)
        if wants_usage:
            say({"choices": [], "usage": _usage(request, tokens)})
        self.wfile.write(b"data: [DONE]\n\n")

    # ---- what they share ----

    def _request(self, ids: Any, asked: dict[str, Any]) -> Request:
        """Submitted; Refused where it asks for what is not there."""
        engine = self.server.engines[self.model]
        sampler = engine.sampler
        vocab, most = sampler.model.arch.vocab_size, sampler.sampling.max_completion_tokens
        is_id = lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < vocab
        if not isinstance(ids, list) or not ids or not all(map(is_id, ids)):
            raise Refused(400, f"token_ids must be a list of ids from 0 to {vocab - 1}, not empty")
        if len(ids) > sampler.max_prompt_tokens:
            raise Refused(400, f"a prompt of {len(ids)} tokens; {sampler.max_prompt_tokens} are allowed")
        given = [asked.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
        sizes = [size for size in given if size is not None]
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
                raise Refused(400, f"max_tokens={size!r:.100} must be a whole number from 1 to {most}")
        temperature = asked.pop("temperature", None)
        temperature = self.server.temperature if temperature is None else temperature
        if self.server.temperature == 0 and temperature != 0:
            raise Refused(400, f"temperature={temperature!r:.100} must be 0, the server's")
        is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not is_number or not (temperature == 0 or 0.01 <= temperature <= 100):
            raise Refused(400, f"temperature={temperature!r:.100} must be 0 or from 0.01 to 100")
        stop = asked.pop("stop", None) or ()
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(x, str) and x for x in stop):
            raise Refused(400, f"stop={stop!r:.100} must be a text or a list of texts")
        stop_ids = asked.pop("stop_token_ids", None) or []
        if not isinstance(stop_ids, list) or not all(map(is_id, stop_ids)):
            raise Refused(400, f"stop_token_ids={stop_ids!r:.100} must be a list of ids from 0 to {vocab - 1}")
        asked.pop("logprobs", None)  # they are always there
        seed = asked.pop("seed", None)
        if seed is not None and type(seed) is not int:
            raise Refused(400, f"seed={seed!r:.100} must be a whole number")
        for name, value in asked.items():
            if value is None:
                continue
            if name not in NEUTRAL:
                raise Refused(400, f"{name} is not known here")
            if NEUTRAL[name] and value not in NEUTRAL[name]:
                raise Refused(400, f"{name}={value!r:.100} is not there: only {NEUTRAL[name][0]!r}")
        request = Request(ids, min(sizes, default=most), tuple(stop), frozenset(stop_ids), float(temperature), seed)
        try:
            engine.submit(request)
        except BusyError:
            raise Refused(429, "too many requests wait; try again") from None
        except RuntimeError as error:
            raise Refused(503, str(error)) from None
        return request

    def _deltas(self, request: Request) -> Iterator[tuple[list[int], list[float], str | None]]:
        """What comes of a request; ConnectionError, and its slot is free, where its client has gone."""
        why = None
        try:
            while why is None:
                try:
                    tokens, logps, why = request.deltas.get(timeout=POLL_S)
                except queue.Empty:
                    self._check_client()
                    continue
                if why == "error":
                    raise Refused(500, f"the engine has ended: {self.server.engines[self.model].error!r:.200}")
                yield tokens, logps, why
        finally:
            request.is_cancelled = True

    def _check_client(self) -> None:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError

    def _whole(self, request: Request) -> tuple[list[int], list[float], str | None]:
        tokens, logps, why = [], [], None
        for new, of_new, ended in self._deltas(request):
            tokens, logps, why = tokens + new, logps + of_new, ended
            self._check_client()
        return tokens, logps, why


def _usage(request: Request, tokens: list[int]) -> dict[str, int]:
    sizes = len(request.prompt), len(tokens)
    return {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)}


def _before(text: str, stop: tuple[str, ...], *, is_whole: bool) -> str:
    """What may be shown of a text: all before a stop string, and while more may come, before what may become one."""
    places = [place for x in stop if (place := text.find(x)) >= 0]
    if places:
        return text[: min(places)]
    if is_whole:
        return text
    text = text.rstrip("\ufffd")  # half a character is no text yet
    begun = [n for x in stop for n in range(1, len(x)) if text.endswith(x[:n])]
    return text[: len(text) - max(begun, default=0)]
