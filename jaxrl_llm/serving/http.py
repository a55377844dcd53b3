"""Routes of a server of completions, over HTTP.

    GET  /v1/models, /v1/models/ID   what is served, a base and its adapters, with ``max_model_len``
    GET  /health                     200, without a token
    POST /inference/v1/generate      token ids in, token ids and their log-probs out: for agents that are trained
    POST /v1/chat/completions        messages in, text out, as the OpenAI API has it; with ``stream``, as it comes; with
                                     ``tools``, what the model writes as calls of them comes as ``tool_calls``

What a request asks for that is not there, such as a penalty of what was said before, is refused with 400 and named. Too
many requests at once are answered with 429. One whose client has gone gives its slot back.

Owns: routes, what a request may ask for, what its answer looks like. Does not know: how tokens are drawn (``engine``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import queue
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.actor import stop_strings
from jaxrl_llm.config import ConfigError
from jaxrl_llm.conversations import openai_api, tools
from jaxrl_llm.conversations.environment import has_place_for_tools
from jaxrl_llm.runtime import json_server
from jaxrl_llm.runtime.json_server import Events, Exchange, Refused
from jaxrl_llm.serving.content import Content
from jaxrl_llm.serving.engine import BusyError, Engine, Request

POLL_S = 1.0  # between looks at whether a client is still there
SPARE_THREADS = 16  # beside those of requests that the engines have: for refusals and lists of models
MOST_STOPS, MOST_STOP_CHARS = 16, 256
LOSS_OF_NORMALISERS = 4  # a text may be so many times longer than the characters of its tokens: spaces, accents


class Server(json_server.Server):
    """Serves engines of one sampler. A request names the model of an engine; without a name it has the first.

    Args:
        address: host and port; port 0 takes a free one (``server_port``).
        engines: by names of their models.
        tokenizer: of all models.
        temperature: of requests that name none; 0 = of all, greedy.
        token: that requests must bear; "" = none.
        num_requests: requests that an engine may have, decoded or waiting.

    Raises:
        OSError: the address is in use, or is not this machine's.
    """

    def __init__(
        self,
        address: tuple[str, int],
        engines: Mapping[str, Engine],
        tokenizer: Any,
        temperature: float,
        token: str,
        *,
        num_requests: int,
    ):
        num_threads = min(num_requests + SPARE_THREADS, json_server.MAX_CONNECTIONS)
        super().__init__(self._answer_request, address, num_threads=num_threads, any_site=bool(token))
        self.engines = engines
        self.tokenizer = tokenizer
        self.temperature = temperature
        self._token = token
        self._began = int(time.time())

    def _answer_request(self, exchange: Exchange) -> dict[str, Any] | Events:
        if exchange.method == "GET" and exchange.path == "/health":  # of launchers and balancers, without a token
            return {"status": "ok"}
        self._check_token(exchange)
        if exchange.method == "GET":
            return self._models(exchange.path)
        routes = {"/inference/v1/generate": _Generation, "/v1/chat/completions": _Chat}
        if exchange.method != "POST" or exchange.path not in routes:
            raise Refused(404, f"no route {exchange.method} {exchange.path}")
        body = exchange.body()
        name = body.pop("model", None)
        model = next(iter(self.engines)) if name is None else self._served(name)
        return routes[exchange.path](self, exchange, model).answer(body)

    def _check_token(self, exchange: Exchange) -> None:
        scheme, _, given = exchange.header("Authorization").partition(" ")  # RFC 9110: the scheme in any case
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode())
        if self._token and not is_right:
            raise Refused(401, "the bearer token is missing or wrong")

    def _models(self, path: str) -> dict[str, Any]:
        """Return the list of models, or one of them by its name."""
        common = {"object": "model", "created": self._began, "owned_by": "jaxrl_llm"}
        models = {
            name: {"id": name, **common, "max_model_len": engine.sampler.row_tokens}
            for name, engine in self.engines.items()
        }
        if path == "/v1/models":
            return {"object": "list", "data": [*models.values()]}
        name = path.removeprefix("/v1/models/")
        if name == path:
            raise Refused(404, f"no route GET {path}")
        return models[self._served(name)]

    def _served(self, name: Any) -> str:
        """Return the name of a model; Refused if no model has it."""
        names = list(self.engines)
        if name not in names:
            raise Refused(404, f"model={name!r:.100} must be {' or '.join(map(repr, names))}")
        return name


@dataclasses.dataclass
class _Route:
    """A request for a completion, with what all routes share."""

    server: Server
    exchange: Exchange
    model: str

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | Events:
        """Return the answer to a request's body."""
        raise NotImplementedError

    @property
    def sampler(self) -> Any:
        return self.server.engines[self.model].sampler

    def submit(self, ids: Any, asked: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Request:
        """Queue a request. Whoever reads its deltas sets ``is_cancelled`` at the end, which frees its slot.

        Args:
            ids: token ids of the prompt.
            asked: the other fields of the body.
            neutral: values that ask for nothing on this route alone.

        Raises:
            Refused: a value is not allowed (400), too many requests wait (429), or the engine has ended (503).
        """
        self._check_prompt(ids)
        max_tokens = self._max_tokens(asked)
        temperature = self._temperature(asked.pop("temperature", None))
        stop, stop_ids = self._ends(asked.pop("stop", None), asked.pop("stop_token_ids", None))
        seed = asked.pop("seed", None)
        if seed is not None and type(seed) is not int:
            raise Refused(400, f"seed={seed!r:.100} must be a whole number")
        openai_api.pass_over(asked, neutral)
        request = Request(ids, max_tokens, stop, stop_ids, temperature, seed)
        try:
            self.server.engines[self.model].submit(request)
        except BusyError:
            raise Refused(429, "too many requests wait; try again") from None
        except RuntimeError as error:
            raise Refused(503, str(error)) from None
        return request

    def whole(self, request: Request) -> tuple[list[int], list[float], str | None]:
        """Return all tokens of a request, their log-probs, and why it ended."""
        tokens, logps, why = [], [], None
        try:
            for new, its_logps, ended in self.deltas(request):
                tokens += new
                logps += its_logps
                why = ended
        finally:
            request.is_cancelled = True
        return tokens, logps, why

    def deltas(self, request: Request) -> Iterator[tuple[list[int], list[float], str | None]]:
        """Yield new tokens, their log-probs, and why the request ended.

        Raises:
            ConnectionError: the client has left.
            Refused: the engine has ended (500).
        """
        why = None
        while why is None:
            delta = None
            with contextlib.suppress(queue.Empty):
                delta = request.deltas.get(timeout=POLL_S)
            if self.exchange.is_abandoned():
                raise ConnectionError
            if delta is None:
                continue
            tokens, logps, why = delta
            if why == "error":
                raise Refused(500, f"the engine has ended: {self.server.engines[self.model].error!r:.200}")
            yield tokens, logps, why

    # ---- what a request may ask for ----

    def _is_id(self, value: Any) -> bool:
        vocab_size = self.sampler.model.arch.vocab_size
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size

    def _check_prompt(self, ids: Any) -> None:
        most = self.sampler.max_prompt_tokens
        if isinstance(ids, list) and len(ids) > most:
            raise Refused(400, f"a prompt of {len(ids)} tokens; {most} are allowed")
        if not isinstance(ids, list) or not ids or not all(map(self._is_id, ids)):
            last = self.sampler.model.arch.vocab_size - 1
            raise Refused(400, f"token_ids must be a list of ids from 0 to {last}, not empty")

    def _max_tokens(self, asked: dict[str, Any]) -> int:
        most = self.sampler.sampling.max_completion_tokens
        given = [asked.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
        sizes = [size for size in given if size is not None]
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
                raise Refused(400, f"max_tokens={size!r:.100} must be a whole number from 1 to {most}")
        return min(sizes, default=most)

    def _temperature(self, given: Any) -> float:
        of_server = self.server.temperature
        temperature = of_server if given is None else given
        if of_server == 0 and temperature != 0:
            raise Refused(400, f"temperature={temperature!r:.100} must be 0, the server's")
        is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not is_number or not (temperature == 0 or 0.01 <= temperature <= 100):
            raise Refused(400, f"temperature={temperature!r:.100} must be 0 or from 0.01 to 100")
        return float(temperature)

    def _ends(self, stop: Any, stop_ids: Any) -> tuple[tuple[str, ...], frozenset[int]]:
        """Return the texts and the token ids that end a completion.

        The text of a special token, which clients know as a model's end, becomes its id.
        """
        texts, ids = [], {*self._stop_ids(stop_ids)}
        tokenizer = self.server.tokenizer
        for text in _stop_texts(stop):
            try:
                is_special = stop_strings.has_special(text, tokenizer)
                its_ids = tokenizer.encode(text, special_tokens=True)
            except ConfigError as error:
                raise Refused(400, f"stop={text!r:.100}: {error}") from None
            if not is_special:
                texts.append(text)
            elif len(its_ids) == 1:
                ids.update(its_ids)
            else:
                raise Refused(
                    400,
                    f"stop={text!r:.100} must be one special token or none: completions have no special tokens as "
                    "text. Use stop_token_ids",
                )
        return tuple(texts), frozenset(ids)

    def _stop_ids(self, given: Any) -> list[int]:
        ids = [] if given is None else given
        if not isinstance(ids, list) or not all(map(self._is_id, ids)):
            last = self.sampler.model.arch.vocab_size - 1
            raise Refused(400, f"stop_token_ids={ids!r:.100} must be a list of ids from 0 to {last}")
        return ids


class _Generation(_Route):
    """Token ids in, token ids and their log-probs out."""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body.pop("token_ids", None)
        asked = _object_of("sampling_params", body.pop("sampling_params", None))
        tokens, logps, why = self.whole(self.submit(ids, body | asked, openai_api.OF_TOKENS))
        choice = openai_api.token_choice(tokens, logps, why)
        return {"request_id": uuid.uuid4().hex, "model": self.model, "choices": [choice]}


class _Chat(_Route):
    """Messages in, text out."""

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | Events:
        messages = body.pop("messages", None)
        is_streamed = _flag("stream", body.pop("stream", None))
        options = _object_of("stream_options", body.pop("stream_options", None))
        wants_usage = _flag("stream_options.include_usage", options.get("include_usage"))
        wants_logprobs = _flag("logprobs", body.pop("logprobs", None))
        template_kwargs = _object_of("chat_template_kwargs", body.pop("chat_template_kwargs", None))
        given = body.pop("tools", None)
        self._check_size((messages, given, template_kwargs))
        try:
            functions = tools.functions_of([] if given is None else given)
            functions = [] if _chooses_no_tool(body.pop("tool_choice", None)) else functions
            ids = self._encoded(messages, functions, template_kwargs)
        except ValueError as error:  # a ConfigError too
            raise Refused(400, str(error)) from None
        base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        request = self.submit(ids, body, {})
        if is_streamed:
            return self._events(request, base, functions, wants_usage, wants_logprobs)
        return base | self._completion(request, functions, wants_logprobs)

    def _check_size(self, asked: Any) -> None:
        """Refuse texts that cannot fit into a prompt, before they are encoded, which takes a second for a megabyte."""
        most = LOSS_OF_NORMALISERS * self.server.tokenizer.longest_token * self.sampler.max_prompt_tokens
        size = _characters(asked)
        if size > most:
            raise Refused(400, f"messages of {size} characters; a prompt has {self.sampler.max_prompt_tokens} tokens")

    def _encoded(self, messages: Any, functions: list[Any], template_kwargs: dict[str, Any]) -> list[int]:
        """Return the token ids of a conversation.

        If its template has no place for tools, the system's message lists them. If it has none for earlier calls, the
        assistant's messages have these as text.
        """
        tokenizer = self.server.tokenizer
        how = {"system_prompt": "", "chat_template": True, "chat_template_kwargs": template_kwargs}
        if functions and not has_place_for_tools(tokenizer, how):
            return tokenizer.encode_prompt(tools.with_tool_list(tools.texts_of(messages), functions), **how)
        if functions:
            how = how | {"chat_template_kwargs": {**template_kwargs, "tools": functions}}
        with contextlib.suppress(ConfigError):
            return tokenizer.encode_prompt(tools.texts_of(messages, apart=True), **how)
        return tokenizer.encode_prompt(tools.texts_of(messages), **how)

    def _completion(self, request: Request, functions: list[Any], wants_logprobs: bool) -> dict[str, Any]:
        tokens, logps, why = self.whole(request)
        content = Content(self.server.tokenizer, request.stop, [])
        message = tools.message_of(content.feed(tokens) + content.finish(), functions)
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else why}
        choice["logprobs"] = self._logprobs(tokens, logps) if wants_logprobs else None
        usage = openai_api.usage(len(request.prompt), len(tokens))
        return {"object": "chat.completion", "choices": [choice], "usage": usage}

    def _events(
        self, request: Request, base: dict[str, Any], functions: list[Any], wants_usage: bool, wants_logprobs: bool
    ) -> Events:
        base = base | {"object": "chat.completion.chunk"}

        def event(content: dict[str, Any], why: str | None = None) -> dict[str, Any]:
            """With the log-probs of all tokens since the last event."""
            new = tokens[len(tokens) - len(logps) :]
            logprobs = self._logprobs(new, logps) if wants_logprobs and logps else None
            logps.clear()
            return base | {"choices": [{"index": 0, "delta": content, "finish_reason": why, "logprobs": logprobs}]}

        tokens: list[int] = []
        logps: list[float] = []
        try:
            content = Content(self.server.tokenizer, request.stop, functions)
            yield event({"role": "assistant", "content": ""})
            for new, its_logps, why in self.deltas(request):
                tokens += new
                logps += its_logps
                text = content.feed(new)
                text += content.finish() if why else ""
                if text:
                    yield event({"content": text})
                if why:
                    calls = content.tool_calls
                    if calls:
                        yield event({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
                    yield event({}, "tool_calls" if calls else why)
        finally:
            request.is_cancelled = True
        if wants_usage:
            yield base | {"choices": [], "usage": openai_api.usage(len(request.prompt), len(tokens))}

    def _logprobs(self, tokens: list[int], logps: list[float]) -> dict[str, Any]:
        """Return a text, its bytes and a log-prob for each token. A token may be a part of a character."""
        content = []
        for token, logp in zip(tokens, logps, strict=True):
            text = self.server.tokenizer.decode([token])
            text_bytes = [*self.server.tokenizer.bytes_of(token)]
            content.append({"token": text, "logprob": logp, "bytes": text_bytes, "top_logprobs": []})
        return {"content": content}


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise Refused(400, f"{name}={value!r:.100} must be true or false")
    return bool(value)


def _object_of(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise Refused(400, f"{name}={value!r:.100} must be an object")
    return value or {}


def _chooses_no_tool(choice: Any) -> bool:
    if choice not in (None, "auto", "none"):
        raise Refused(400, f"tool_choice={choice!r:.100} must be 'auto' or 'none'")
    return choice == "none"


def _stop_texts(given: Any) -> list[str]:
    texts = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused(400, f"stop={texts!r:.100} must be a text or a list of texts")
    if len(texts) > MOST_STOPS or max(map(len, texts), default=0) > MOST_STOP_CHARS:
        allowed = f"at most {MOST_STOPS} texts of at most {MOST_STOP_CHARS} characters"
        raise Refused(400, f"stop={texts!r:.100} must be {allowed}")
    return texts


def _characters(value: Any) -> int:
    """Return the number of characters in all texts of a JSON value."""
    if isinstance(value, str):
        return len(value)
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_characters, inner))
