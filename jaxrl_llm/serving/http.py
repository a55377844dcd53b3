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
import hmac
import queue
import select
import socket
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.actor import openai_api, stop_strings, tools
from jaxrl_llm.actor.environment import has_place_for_tools
from jaxrl_llm.actor.openai_api import Refused
from jaxrl_llm.config import ConfigError
from jaxrl_llm.serving.content import Content
from jaxrl_llm.serving.engine import BusyError, Engine, Request

POLL_S = 1.0  # between looks at whether a client is still there
READ_S = 60.0  # that a client may take to say what it wants
MOST_STOPS, MOST_STOP_CHARS = 16, 256


class Server(openai_api.Server):
    """Serves engines of one sampler: a request names the model of one, or has the first.

    It has its port once it is made, and is heard from ``server_activate`` on.

    Args:
        address: host and port; port 0 takes a free one (``server_port``).
        engines: by names of their models.
        tokenizer: of all models.
        temperature: of requests that name none; 0 = of all, greedy.
        token: that requests must bear; "" = none.

    Raises:
        OSError: the address is another's, or none.
    """

    def __init__(
        self, address: tuple[str, int], engines: Mapping[str, Engine], tokenizer: Any, temperature: float, token: str
    ):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler, bind_and_activate=False)
        self.engines, self.tokenizer = engines, tokenizer
        self.temperature, self.token = temperature, token
        self.began = int(time.time())
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise


class Handler(openai_api.Handler):
    timeout = READ_S
    server: Server
    model: str  # that the request has chosen

    def do_GET(self) -> None:
        self.answer(self._get)

    def do_POST(self) -> None:
        self.answer(self._post)

    def _check_token(self) -> None:
        given, token = self.headers.get("Authorization", ""), self.server.token
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refused(401, "the bearer token is missing or wrong")

    def _get(self) -> None:
        if self.path == "/health":  # of launchers and balancers, which have no token
            return self.send(200, {"status": "ok"})
        self._check_token()
        said = {"object": "model", "created": self.server.began, "owned_by": "jaxrl_llm"}
        models = {x: {"id": x, **said, "max_model_len": of.sampler.row_tokens} for x, of in self.server.engines.items()}
        if self.path == "/v1/models":
            return self.send(200, {"object": "list", "data": [*models.values()]})
        name = urllib.parse.unquote(self.path.removeprefix("/v1/models/"))
        if name == self.path:
            raise Refused(404, f"no route GET {self.path}")
        return self.send(200, models[self._served(name)])

    def _post(self) -> None:
        self._check_token()
        routes = {"/inference/v1/generate": self._generate, "/v1/chat/completions": self._chat}
        if self.path not in routes:
            raise Refused(404, f"no route POST {self.path}")
        body = self.body()
        name = body.pop("model", None)
        self.model = next(iter(self.server.engines)) if name is None else self._served(name)
        routes[self.path](body)

    def _served(self, name: Any) -> str:
        """The name of a model; Refused where it is none's."""
        names = list(self.server.engines)
        if name not in names:
            raise Refused(404, f"the model served is {' or '.join(map(repr, names))}")
        return name

    # ---- routes ----

    def _generate(self, body: dict[str, Any]) -> None:
        ids, asked = body.pop("token_ids", None), body.pop("sampling_params", None)
        if not isinstance(asked, dict | None):
            raise Refused(400, f"sampling_params={asked!r:.100} must be an object")
        with self._submitted(ids, {**body, **(asked or {})}, openai_api.OF_TOKENS) as request:
            tokens, logps, why = self._whole(request)
        choice = openai_api.token_choice(tokens, logps, why)
        self.send(200, {"request_id": uuid.uuid4().hex, "model": self.model, "choices": [choice]})

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
        try:
            given = tools.functions_of([] if given is None else given)
            given = [] if choice == "none" else given
            ids = self._encoded(messages, given, how)
        except ValueError as error:  # a ConfigError too
            raise Refused(400, str(error)) from None
        stream, wants_logprobs = _flag("stream", stream), _flag("logprobs", body.pop("logprobs", None))
        wants_usage = _flag("stream_options.include_usage", (options or {}).get("include_usage"))
        base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        with self._submitted(ids, body, {}) as request:
            if stream:
                return self._stream(request, base, wants_usage, given, wants_logprobs)
            tokens, logps, why = self._whole(request)
        text = Content(self.server.tokenizer, request.stop, [])
        message = tools.message_of(text.feed(tokens) + text.finish(), given)
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else why}
        choice["logprobs"] = self._logprobs(tokens, logps) if wants_logprobs else None
        usage = openai_api.usage(len(ids), len(tokens))
        return self.send(200, base | {"object": "chat.completion", "choices": [choice], "usage": usage})

    def _encoded(self, messages: Any, given: list[Any], how: dict[str, Any]) -> list[int]:
        """Token ids of a conversation.

        Where its template has no place for tools, the system's message has them, and the assistant's messages its
        earlier calls, where it has none for these.
        """
        tokenizer = self.server.tokenizer
        if given and not has_place_for_tools(tokenizer, how):
            return tokenizer.encode_prompt(tools.told(tools.texts_of(messages), given), **how)
        if given:
            how = how | {"chat_template_kwargs": {**how["chat_template_kwargs"], "tools": given}}
        with contextlib.suppress(ConfigError):
            return tokenizer.encode_prompt(tools.texts_of(messages, apart=True), **how)
        return tokenizer.encode_prompt(tools.texts_of(messages), **how)

    def _logprobs(self, tokens: list[int], logps: list[float]) -> dict[str, Any]:
        decode, said = self.server.tokenizer.decode, {"bytes": None, "top_logprobs": []}
        return {"content": [{"token": decode([i]), "logprob": x} | said for i, x in zip(tokens, logps, strict=True)]}

    def _stream(
        self, request: Request, base: dict[str, Any], wants_usage: bool, given: list[Any], wants_logprobs: bool
    ) -> None:
        self.begin_events()
        say = lambda event: self.say(base | {"object": "chat.completion.chunk"} | event)

        def delta(content: dict[str, Any], why: str | None = None) -> None:
            """With the log-probs of all tokens since the last one."""
            logprobs = self._logprobs(tokens[len(tokens) - len(logps) :], logps) if wants_logprobs and logps else None
            say({"choices": [{"index": 0, "delta": content, "finish_reason": why, "logprobs": logprobs}]})
            logps.clear()

        tokens, logps = [], []
        content = Content(self.server.tokenizer, request.stop, given)
        delta({"role": "assistant", "content": ""})
        for new, its_logps, why in self._deltas(request):
            tokens += new
            logps += its_logps
            text = content.feed(new)
            text += content.finish() if why else ""
            if text:
                delta({"content": text})
            if why:
                calls = content.tool_calls
                if calls:
                    delta({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
                delta({}, "tool_calls" if calls else why)
        if wants_usage:
            say({"choices": [], "usage": openai_api.usage(len(request.prompt), len(tokens))})
        self.end_events()

    # ---- what they share ----

    @contextlib.contextmanager
    def _submitted(self, ids: Any, asked: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[Request]:
        """A request; Refused where it asks for what is not there. After the context its slot is free, come what may.

        Args:
            neutral: what asks for nothing on its route alone.
        """
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
        stop = asked.pop("stop", None)
        stop = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(x, str) and x for x in stop):
            raise Refused(400, f"stop={stop!r:.100} must be a text or a list of texts")
        if len(stop) > MOST_STOPS or max(map(len, stop), default=0) > MOST_STOP_CHARS:
            said = f"at most {MOST_STOPS} texts of at most {MOST_STOP_CHARS} characters"
            raise Refused(400, f"stop={stop!r:.100} must be {said}")
        stop_ids = asked.pop("stop_token_ids", None)
        stop_ids = [] if stop_ids is None else stop_ids
        if not isinstance(stop_ids, list) or not all(map(is_id, stop_ids)):
            raise Refused(400, f"stop_token_ids={stop_ids!r:.100} must be a list of ids from 0 to {vocab - 1}")
        ends = self._ends(stop, stop_ids)
        seed = asked.pop("seed", None)
        if seed is not None and type(seed) is not int:
            raise Refused(400, f"seed={seed!r:.100} must be a whole number")
        openai_api.pass_over(asked, neutral)
        request = Request(ids, min(sizes, default=most), *ends, float(temperature), seed)
        try:
            engine.submit(request)
        except BusyError:
            raise Refused(429, "too many requests wait; try again") from None
        except RuntimeError as error:
            raise Refused(503, str(error)) from None
        try:
            yield request
        finally:
            request.is_cancelled = True

    def _ends(self, stop: Sequence[str], stop_ids: list[int]) -> tuple[tuple[str, ...], frozenset[int]]:
        """Texts and ids that end an answer: a special token's text, which clients know as a model's end, as its id."""
        texts, found, tokenizer = [], {*stop_ids}, self.server.tokenizer
        for text in stop:
            try:
                is_special, ids = stop_strings.has_special(text, tokenizer), tokenizer.encode(text, special_tokens=True)
            except ConfigError as error:
                raise Refused(400, f"stop={text!r:.100}: {error}") from None
            if is_special and len(ids) > 1:
                said = "has a special token beside others, and texts have none: stop_token_ids ends answers at such"
                raise Refused(400, f"stop={text!r:.100} {said}")
            texts += [] if is_special else [text]
            found |= {*ids} if is_special else set()
        return tuple(texts), frozenset(found)

    def _deltas(self, request: Request) -> Iterator[tuple[list[int], list[float], str | None]]:
        """What comes of a request; ConnectionError where its client has gone."""
        why = None
        while why is None:
            try:
                delta = request.deltas.get(timeout=POLL_S)
            except queue.Empty:
                delta = None
            self._check_client()
            if delta is None:
                continue
            tokens, logps, why = delta
            if why == "error":
                raise Refused(500, f"the engine has ended: {self.server.engines[self.model].error!r:.200}")
            yield tokens, logps, why

    def _check_client(self) -> None:
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self.connection, select.POLLIN)
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError

    def _whole(self, request: Request) -> tuple[list[int], list[float], str | None]:
        tokens, logps, why = [], [], None
        for new, its_logps, ended in self._deltas(request):
            tokens += new
            logps += its_logps
            why = ended
        return tokens, logps, why


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise Refused(400, f"{name}={value!r:.100} must be true or false")
    return bool(value)
