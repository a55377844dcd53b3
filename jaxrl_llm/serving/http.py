"""HTTP routes of a completion server.

    GET  /v1/models, /v1/models/ID   the served models (a base and its adapters) with ``max_model_len``
    GET  /health                     status 200; the route needs no token
    POST /inference/v1/generate      prompt token ids -> completion token ids and log-probs, for agents in training
    POST /v1/chat/completions        messages -> text, in the form of the OpenAI API. With ``stream``, the server sends
                                     the text while the model writes it. With ``tools``, the server returns the tool
                                     calls of the model as ``tool_calls``.

The server refuses a request with an option that it does not support, such as a frequency penalty. The status is 400,
and the message names the option. If too many requests wait, the status is 429. When a client disconnects, its request
frees its decode slot.

Owns: routes, the options of a request, the form of an answer. Does not know: how tokens are drawn (``engine``).
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
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import ConfigError
from jaxrl_llm.conversations import openai_api, tools
from jaxrl_llm.conversations.environment import has_place_for_tools
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.runtime import json_server
from jaxrl_llm.runtime.json_server import Events, Exchange, Refused
from jaxrl_llm.serving.content import Content
from jaxrl_llm.serving.engine import BusyError, Engine, Request

POLL_S = 1.0  # seconds between checks whether the client is still connected
# Threads in addition to one thread per request of the engines. They answer refused requests and lists of models.
SPARE_THREADS = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
# Largest ratio of the characters of a text to the characters of its tokens. Normalisers drop spaces and accents.
LOSS_OF_NORMALISERS = 4

# New token ids, their log-probs, and the finish reason of the completion or None.
Delta = tuple[list[int], list[float], str | None]


class Server(json_server.Server):
    """HTTP server of engines with one sampler. A request names its model; without a name it gets the first model.

    Args:
        address: host and port; port 0 selects a free port (``server_port``).
        engines: engine of each model, by the name of the model.
        tokenizer: the tokenizer of all models.
        temperature: temperature of the requests without a temperature; 0 = all requests are greedy.
        token: bearer token that requests must have; "" = requests need no token.
        num_requests: largest number of requests of an engine, decoding or waiting.

    Raises:
        OSError: the address is in use, or it does not belong to this machine.
    """

    def __init__(
        self,
        address: tuple[str, int],
        engines: Mapping[str, Engine],
        tokenizer: Tokenizer,
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
        """Return the answer to a request, or raise ``Refused``."""
        # /health needs no token, because launchers and load balancers have none.
        if exchange.method == "GET" and exchange.path == "/health":
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
        """Refuse a request without the server's bearer token."""
        if not self._token:
            return
        scheme, _, token = exchange.header("Authorization").partition(" ")
        is_bearer = scheme.lower() == "bearer"  # RFC 9110: the scheme is not case-sensitive
        if not is_bearer or not hmac.compare_digest(token.strip().encode(), self._token.encode()):
            raise Refused(401, "the bearer token is missing or wrong")

    def _models(self, path: str) -> dict[str, Any]:
        """Return the list of models for /v1/models, and one model for /v1/models/NAME."""
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
        """Return the name if it is the name of a served model. Otherwise raise ``Refused``."""
        names = list(self.engines)
        if name not in names:
            allowed = " or ".join(map(repr, names))
            raise Refused(404, f"model={name!r:.100} must be {allowed}")
        return name


@dataclasses.dataclass
class _Route:
    """Handler of one completion request: the part that all routes share."""

    server: Server
    exchange: Exchange
    model: str

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | Events:
        """Return the answer to the request with this body."""
        raise NotImplementedError

    @property
    def sampler(self) -> Sampler:
        return self.server.engines[self.model].sampler

    def submit(self, ids: Any, options: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Request:
        """Queue a request. Whoever reads its ``deltas`` must at last set ``is_cancelled``, which frees the decode slot.

        Args:
            ids: token ids of the prompt.
            options: the other fields of the body.
            neutral: option values that this route accepts because they have no effect, by option.

        Raises:
            Refused: a value is not allowed (400), too many requests wait (429), or the engine has ended (503).
        """
        self._check_prompt(ids)
        max_tokens = self._max_tokens(options)
        temperature = self._temperature(options.pop("temperature", None))
        stop, stop_ids = self._stops(options.pop("stop", None), options.pop("stop_token_ids", None))
        seed = options.pop("seed", None)
        if seed is not None and type(seed) is not int:
            raise Refused(400, f"seed={seed!r:.100} must be a whole number")
        openai_api.pass_over(options, neutral)
        request = Request(ids, max_tokens, stop, stop_ids, temperature, seed)
        try:
            self.server.engines[self.model].submit(request)
        except BusyError:
            raise Refused(429, "too many requests wait; try again later") from None
        except RuntimeError as error:
            raise Refused(503, str(error)) from None
        return request

    def whole(self, request: Request) -> tuple[list[int], list[float], str]:
        """Return all tokens of a request, their log-probs, and its finish reason."""
        tokens: list[int] = []
        logps: list[float] = []
        finish_reason = None
        try:
            for new_tokens, new_logps, reason in self.deltas(request):
                tokens += new_tokens
                logps += new_logps
                finish_reason = reason
        finally:
            request.is_cancelled = True
        assert finish_reason is not None, "the last delta has a finish reason"
        return tokens, logps, finish_reason

    def deltas(self, request: Request) -> Iterator[Delta]:
        """Yield the new tokens of a request with their log-probs. Only the last item has a finish reason.

        Raises:
            ConnectionError: the client has disconnected.
            Refused: the engine has ended (500).
        """
        finish_reason = None
        while finish_reason is None:
            delta = None
            with contextlib.suppress(queue.Empty):
                delta = request.deltas.get(timeout=POLL_S)
            if self.exchange.is_abandoned():
                raise ConnectionError
            if delta is None:
                continue
            tokens, logps, finish_reason = delta
            if finish_reason == "error":
                raise Refused(
                    500,
                    f"the engine has ended: {self.server.engines[self.model].error!r:.200}",
                )
            yield tokens, logps, finish_reason

    # ---- options of a request ----

    def _is_id(self, value: Any) -> bool:
        vocab_size = self.sampler.model.arch.vocab_size
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size

    def _check_prompt(self, ids: Any) -> None:
        """Refuse a prompt that is not a list of token ids, or that is too long."""
        limit = self.sampler.max_prompt_tokens
        if isinstance(ids, list) and len(ids) > limit:
            raise Refused(
                400,
                f"the prompt has {len(ids)} tokens, but at most {limit} are allowed",
            )
        if not isinstance(ids, list) or not ids or not all(map(self._is_id, ids)):
            last = self.sampler.model.arch.vocab_size - 1
            raise Refused(400, f"token_ids={ids!r:.100} must be a list of ids from 0 to {last}, and not empty")

    def _max_tokens(self, options: dict[str, Any]) -> int:
        """Return the largest number of tokens of the completion. Two options can limit the number."""
        limit = self.sampler.sampling.max_completion_tokens
        smallest = limit
        for name in ("max_tokens", "max_completion_tokens"):
            size = options.pop(name, None)
            if size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= limit:
                raise Refused(
                    400,
                    f"{name}={size!r:.100} must be a whole number from 1 to {limit}",
                )
            smallest = min(smallest, size)
        return smallest

    def _temperature(self, value: Any) -> float:
        """Return the temperature of the request; None = the server's temperature."""
        server_temperature = self.server.temperature
        temperature = server_temperature if value is None else value
        if server_temperature == 0 and temperature != 0:
            raise Refused(
                400,
                f"temperature={temperature!r:.100} must be 0, because the server decodes greedily",
            )
        is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not is_number or not (temperature == 0 or 0.01 <= temperature <= 100):
            raise Refused(400, f"temperature={temperature!r:.100} must be 0 or from 0.01 to 100")
        return float(temperature)

    def _stops(self, stop: Any, stop_ids: Any) -> tuple[tuple[str, ...], frozenset[int]]:
        """Return the texts and the token ids that end a completion.

        The text of a special token becomes the token's id, because completions have no special tokens as text.
        """
        texts = []
        ids = {*self._stop_ids(stop_ids)}
        tokenizer = self.server.tokenizer
        for text in _stop_texts(stop):
            try:
                is_special = stop_strings.has_special(text, tokenizer)
                special_ids = tokenizer.encode(text, special_tokens=True)
            except ConfigError as error:
                raise Refused(400, f"stop={text!r:.100}: {error}") from None
            if not is_special:
                texts.append(text)
            elif len(special_ids) == 1:
                ids.update(special_ids)
            else:
                raise Refused(
                    400,
                    f"stop={text!r:.100} must be one special token or a text without special tokens, because "
                    "completions have no special tokens as text. Use stop_token_ids",
                )
        return tuple(texts), frozenset(ids)

    def _stop_ids(self, value: Any) -> list[int]:
        ids = [] if value is None else value
        if not isinstance(ids, list) or not all(map(self._is_id, ids)):
            last = self.sampler.model.arch.vocab_size - 1
            raise Refused(
                400,
                f"stop_token_ids={ids!r:.100} must be a list of ids from 0 to {last}",
            )
        return ids


class _Generation(_Route):
    """Handler of /inference/v1/generate: a prompt and a completion of token ids, with log-probs."""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body.pop("token_ids", None)
        sampling_params = _object_of("sampling_params", body.pop("sampling_params", None))
        request = self.submit(ids, body | sampling_params, openai_api.OF_TOKENS)
        tokens, logps, finish_reason = self.whole(request)
        choice = openai_api.token_choice(tokens, logps, finish_reason)
        return {
            "request_id": uuid.uuid4().hex,
            "model": self.model,
            "choices": [choice],
        }


class _Chat(_Route):
    """Handler of /v1/chat/completions: messages and a completion of text."""

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | Events:
        messages = body.pop("messages", None)
        is_streamed = _flag("stream", body.pop("stream", None))
        options = _object_of("stream_options", body.pop("stream_options", None))
        wants_usage = _flag("stream_options.include_usage", options.get("include_usage"))
        wants_logprobs = _flag("logprobs", body.pop("logprobs", None))
        template_kwargs = _object_of("chat_template_kwargs", body.pop("chat_template_kwargs", None))
        schemas = body.pop("tools", None)
        self._check_size((messages, schemas, template_kwargs))
        try:
            functions = tools.functions_of([] if schemas is None else schemas)
            if _chooses_no_tool(body.pop("tool_choice", None)):
                functions = []
            ids = self._encoded(messages, functions, template_kwargs)
        except ValueError as error:  # ConfigError is a ValueError
            raise Refused(400, str(error)) from None
        base = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model,
        }
        request = self.submit(ids, body, {})
        if is_streamed:
            return self._events(request, base, functions, wants_usage, wants_logprobs)
        return base | self._completion(request, functions, wants_logprobs)

    def _check_size(self, texts: Any) -> None:
        """Refuse texts that are too long for a prompt. Encoding them first would take a second for each megabyte."""
        max_tokens = self.sampler.max_prompt_tokens
        limit = LOSS_OF_NORMALISERS * self.server.tokenizer.longest_token * max_tokens
        size = _characters(texts)
        if size > limit:
            raise Refused(
                400,
                f"messages of {size} characters are too long: a prompt has at most {max_tokens} tokens",
            )

    def _encoded(self, messages: Any, functions: list[Any], template_kwargs: dict[str, Any]) -> list[int]:
        """Return the token ids of a conversation.

        If the chat template does not support tools, the system message lists the tools. If the template does not
        support earlier tool calls, the calls become text in the assistant's messages.
        """
        tokenizer = self.server.tokenizer
        encoding = {
            "system_prompt": "",
            "chat_template": True,
            "chat_template_kwargs": template_kwargs,
        }
        if functions and not has_place_for_tools(tokenizer, encoding):
            return tokenizer.encode_prompt(tools.with_tool_list(tools.texts_of(messages), functions), **encoding)
        if functions:
            encoding["chat_template_kwargs"] = {**template_kwargs, "tools": functions}
        with contextlib.suppress(ConfigError):
            return tokenizer.encode_prompt(tools.texts_of(messages, apart=True), **encoding)
        return tokenizer.encode_prompt(tools.texts_of(messages), **encoding)

    def _completion(self, request: Request, functions: list[Any], wants_logprobs: bool) -> dict[str, Any]:
        """Return the answer to a request without ``stream``, after the completion has ended."""
        tokens, logps, finish_reason = self.whole(request)
        content = Content(self.server.tokenizer, request.stop, [])
        message = tools.message_of(content.feed(tokens) + content.finish(), functions)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message else finish_reason,
            "logprobs": self._logprobs(tokens, logps) if wants_logprobs else None,
        }
        usage = openai_api.usage(len(request.prompt), len(tokens))
        return {"object": "chat.completion", "choices": [choice], "usage": usage}

    def _events(
        self,
        request: Request,
        base: dict[str, Any],
        functions: list[Any],
        wants_usage: bool,
        wants_logprobs: bool,
    ) -> Events:
        """Yield the events of an answer with ``stream``, while the completion is decoded."""
        base = base | {"object": "chat.completion.chunk"}
        tokens: list[int] = []
        logps: list[float] = []  # log-probs of the tokens since the last event

        def event(content: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
            """Return an event with the log-probs of all tokens since the last event."""
            new_tokens = tokens[len(tokens) - len(logps) :]
            logprobs = self._logprobs(new_tokens, logps) if wants_logprobs and logps else None
            logps.clear()
            choice = {
                "index": 0,
                "delta": content,
                "finish_reason": finish_reason,
                "logprobs": logprobs,
            }
            return base | {"choices": [choice]}

        try:
            content = Content(self.server.tokenizer, request.stop, functions)
            yield event({"role": "assistant", "content": ""})
            for new_tokens, new_logps, finish_reason in self.deltas(request):
                tokens += new_tokens
                logps += new_logps
                text = content.feed(new_tokens)
                if finish_reason:
                    text += content.finish()
                if text:
                    yield event({"content": text})
                if finish_reason:
                    calls = content.tool_calls
                    if calls:
                        yield event({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
                    yield event({}, "tool_calls" if calls else finish_reason)
        finally:
            request.is_cancelled = True
        if wants_usage:
            yield base | {
                "choices": [],
                "usage": openai_api.usage(len(request.prompt), len(tokens)),
            }

    def _logprobs(self, tokens: list[int], logps: list[float]) -> dict[str, Any]:
        """Return the text, the bytes and the log-prob of each token. A token can be a part of a character."""
        content = []
        for token, logp in zip(tokens, logps, strict=True):
            text = self.server.tokenizer.decode([token])
            text_bytes = [*self.server.tokenizer.bytes_of(token)]
            content.append(
                {
                    "token": text,
                    "logprob": logp,
                    "bytes": text_bytes,
                    "top_logprobs": [],
                }
            )
        return {"content": content}


def _flag(name: str, value: Any) -> bool:
    """Return the value of an option that is true, false or missing."""
    if not isinstance(value, bool | None):
        raise Refused(400, f"{name}={value!r:.100} must be true or false")
    return bool(value)


def _object_of(name: str, value: Any) -> dict[str, Any]:
    """Return the value of an option that is an object; missing = an empty object."""
    if not isinstance(value, dict | None):
        raise Refused(400, f"{name}={value!r:.100} must be an object")
    return value or {}


def _chooses_no_tool(choice: Any) -> bool:
    """Return whether the option ``tool_choice`` turns the tools off."""
    if choice not in (None, "auto", "none"):
        raise Refused(400, f"tool_choice={choice!r:.100} must be 'auto' or 'none'")
    return choice == "none"


def _stop_texts(value: Any) -> list[str]:
    """Return the texts of the option ``stop``: one text, a list of texts or None."""
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused(400, f"stop={texts!r:.100} must be a text or a list of texts")
    if len(texts) > MAX_STOPS or max(map(len, texts), default=0) > MAX_STOP_CHARS:
        allowed = f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters"
        raise Refused(400, f"stop={texts!r:.100} must be {allowed}")
    return texts


def _characters(value: Any) -> int:
    """Return the number of characters in all texts of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0
