"""Agents: programs that ask a model over the OpenAI API, and are answered by the policy that is trained.

    the agent's thread                                   the episode
    first request         messages (and tools)  ----->   the question's prompt
                          <-- the policy's turn ------    what was drawn, as text, or as calls of tools
    next request          what is new in it     ----->   the answer to that turn
    the agent returns     its reward            ----->   the episode ends

Or in token ids, of both (POST /inference/v1/generate, as vLLM has it, for clients that render messages themselves).

An agent is a function ``(base_url, prompt, **columns)``, as ``environments.factory`` names it; ``base_url`` is of a
server on this machine that knows one episode. The row has the tokens that were drawn: what the agent sends back of its
turns is compared with what it was given, and is not encoded again. A request that does not go on from there, for the
agent has shortened or rewritten the conversation or holds two at once, ends the episode as failed.

Owns: an agent's thread, which requests are answered. Does not know: deadlines (environment), tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.actor import openai_api, tools
from jaxrl_llm.actor.reward_worker import number
from jaxrl_llm.runtime.functions import awaited
from jaxrl_llm.runtime.json_server import Events, Exchange, Refused, Server

ROLES = ("user", "tool")  # who may speak between two turns of the policy's
NOT_ITS = "is not an agent's to say: the run's sampling settings hold for its turns"
# What requests may say besides, and none hears: by name the values, () any.
CHAT: dict[str, tuple[Any, ...]] = {"model": (), "tool_choice": ("auto",)}
TOKENS = openai_api.OF_TOKENS | {"model": (), "stop_token_ids": ()}  # a turn ends as the run has it
ROUTES = {"v1/chat/completions": False, "inference/v1/generate": True}  # whether it is of token ids
SPARE_THREADS = 8  # of the server, for requests of episodes that are over and for lists of models


def is_agent(found: Any) -> bool:
    """Whether what ``environments.factory`` names is an agent: a function that takes ``base_url``."""
    with contextlib.suppress(TypeError, ValueError):  # one in C that does not say what it takes
        return not isinstance(found, type) and "base_url" in inspect.signature(found).parameters
    return False


def are_tokens(said: Any) -> bool:
    """Whether a prompt or an answer is token ids, not text or messages."""
    return isinstance(said, list) and bool(said) and all(type(x) is int for x in said)


def prompt_of(opening: Any, asked: list[Any], told: list[Any], system_prompt: str) -> Any:
    """The prompt of what an agent begins with: where the chat template is not told of its tools, which are ``told``,
    the system's message tells of those that it has ``asked`` with.

    That is the agent's own, or else ``system_prompt``, which has no place before it any more.
    """
    if asked == told:
        return opening
    if system_prompt and not any(message["role"] in ("system", "developer") for message in opening):
        opening = [{"role": "system", "content": system_prompt}, *opening]
    return tools.told(opening, asked)


def prompt_shown(prompt: Any, decode: Callable[[list[int]], str]) -> Any:
    """A question's prompt as people read it: text or messages."""
    return decode(prompt) if are_tokens(prompt) else prompt


class _Request:
    """Of an agent's that waits for its answer; ``said`` are messages or token ids."""

    def __init__(self, body: dict[str, Any], is_tokens: bool):
        self.is_tokens, body = is_tokens, dict(body)
        if is_tokens:
            self.said = body.pop("token_ids", None)
            body |= body.pop("sampling_params", None) or {}
            if not are_tokens(self.said):
                raise ValueError(f"token_ids={self.said!r:.100} must be a list of whole numbers, not empty")
        else:
            self.said = tools.texts_of(body.pop("messages", None))
        heard = {} if is_tokens else {name: body.pop(name, None) for name in ("tools", "stream", "stream_options")}
        self.tools = tools.functions_of(heard.get("tools") or [])
        self.is_streamed, options = bool(heard.get("stream")), heard.get("stream_options") or {}
        self.wants_usage = bool(options.get("include_usage"))
        openai_api.pass_over(body, TOKENS if is_tokens else CHAT, NOT_ITS)
        self.answer: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (message, usage); None: the episode is over


class Episode:
    """An agent at work, from its first request on, with as much of ``environment_worker.Episode`` as turns ask for.

    Attributes:
        opening: messages of its first request, or token ids.
        tools: of its first request.
        num_turns: of the policy's that it has been given.
        drawn: by the number of a turn its token ids and log-probs, to be set if the agent asks for token ids.
        sizes: tokens before each of them and its own, to be set; where they are not, it is told of no usage.
    """

    def __init__(self, play: Callable[..., Any], columns: dict[str, Any]):
        self.num_turns, self._reward = 0, 0.0
        self.drawn: Mapping[int, Any] = {}
        self.sizes: Sequence[Any] = ()
        self._events: queue.SimpleQueue[_Request | Any] = queue.SimpleQueue()
        self._name = secrets.token_hex(16)  # part of its address: nobody else's requests come here
        server = _server()
        server.open(self._name, self._events)
        address = f"http://127.0.0.1:{server.server_port}/{self._name}/v1"
        threading.Thread(target=self._play, args=(play, address, columns), daemon=True).start()
        self._request = self._events.get()
        if not isinstance(self._request, _Request):
            self.close()
            self._end(self._request)
            raise RuntimeError("the agent returned before it asked the policy for anything")
        self._said = self.opening = self._request.said
        self.tools = self._request.tools

    def _play(self, play: Callable[..., Any], address: str, columns: dict[str, Any]) -> None:
        try:
            self._events.put((awaited(play(base_url=address, **columns)), None))
        except BaseException as error:  # SystemExit too
            self._events.put((None, error))

    def answer(self, turn: str) -> list[dict[str, str]] | list[int] | None:
        """What the agent says to a turn, messages or token ids; None where it has returned.

        Raises:
            ValueError: its next request does not go on from this turn. Whatever the agent raises.
        """
        before = self._request
        if before.is_tokens:
            ids, logps = self.drawn[self.num_turns]
            said, reply = self._said + ids, {"token_ids": ids, "logps": logps}
        else:
            reply = tools.message_of(turn, before.tools)
            said = [*self._said, *tools.texts_of([reply])]
        usage = openai_api.usage(*self.sizes[self.num_turns]) if self.sizes else None
        self.num_turns += 1
        before.answer.put((reply, usage))
        event = self._events.get()
        if not isinstance(event, _Request):
            self.close()
            return self._end(event)
        self._request = event
        begun, new, is_tokens = event.said[: len(said)], event.said[len(said) :], before.is_tokens
        same = event.is_tokens == is_tokens and event.tools == before.tools
        if not same or not (begun == said if is_tokens else _same(begun, said)):
            raise ValueError(f"request {self.num_turns + 1} of the agent does not go on from what was said before it")
        self._said = event.said
        if not new or not (is_tokens or all(message["role"] in ROLES for message in new)):
            raise ValueError(f"request {self.num_turns + 1} of the agent must add messages of the user's or of tools'")
        return new

    def _end(self, event: tuple[Any, BaseException | None]) -> None:
        reward, error = event
        if error is not None:
            raise error
        self._reward = None if reward is None else number(reward, [])
        if self._reward is None and reward is not None:
            raise ValueError(f"the agent returned {reward!r:.100}, which is no reward")

    def reward(self) -> float | None:
        """What the agent has returned, 0.0 before that; None where it returned None."""
        return self._reward

    def state(self) -> None:
        """None: a thread cannot be saved. It plays again what the policy has said."""

    def shown(self) -> None:
        """An agent shows nothing."""

    def close(self) -> None:
        """The episode is over: what the agent still asks for is refused."""
        _server().episodes.pop(self._name, None)
        waiting = [self._request]
        while not self._events.empty():
            waiting.append(self._events.get())
        for request in waiting:
            if isinstance(request, _Request):
                request.answer.put(None)


def _same(one: list[dict[str, str]], other: list[dict[str, str]]) -> bool:
    """Whether messages are the same, but for what stands around their texts: agents strip what they are told."""
    plain = lambda messages: [(message["role"], message["content"].strip()) for message in messages]
    return plain(one) == plain(other)


class _Server(Server):
    """The server of this process, on the loopback interface, for all of its episodes.

    Attributes:
        episodes: events of each episode by its name, which is part of its address.
    """

    def __init__(self) -> None:
        super().__init__(self._answer_request, ("127.0.0.1", 0), num_threads=SPARE_THREADS)
        self.episodes: dict[str, queue.SimpleQueue] = {}
        self.activate()

    def open(self, name: str, events: queue.SimpleQueue) -> None:
        """Let an episode's requests come in. Each may hold a thread until its turn has been sampled."""
        self.episodes[name] = events
        self.add_threads(len(self.episodes) + SPARE_THREADS)

    def _answer_request(self, exchange: Exchange) -> dict[str, Any] | Events:
        if exchange.method == "GET":
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "jaxrl_llm"}
            return {"object": "list", "data": [model]}
        _, name, route = exchange.path.split("/", 2) if exchange.path.count("/") > 1 else ("", "", "")
        if exchange.method != "POST" or route not in ROUTES:
            raise Refused(404, f"no route {exchange.method} {exchange.path}")
        try:
            request = _Request(exchange.body(), ROUTES[route])
        except (ValueError, TypeError, AttributeError) as error:
            raise Refused(400, str(error)) from None
        events = self.episodes.get(name)
        if events is not None:
            events.put(request)
        answered = request.answer.get() if events is not None else None
        if answered is None:
            raise Refused(410, "the episode is over")
        return _answer_to(request, *answered)


@functools.cache
def _server() -> _Server:
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _answer_to(request: _Request, message: dict[str, Any], usage: dict[str, int] | None) -> dict[str, Any] | Events:
    """Return a turn of the policy as the agent has asked for it: whole, in token ids, or as events."""
    why = "tool_calls" if message.get("tool_calls") else "stop"
    base = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": "policy"}
    choice = {"index": 0, "finish_reason": why, "logprobs": None}
    counts = {"usage": usage} if usage else {}
    if request.is_tokens:
        choice = openai_api.token_choice(message["token_ids"], message["logps"], why)
        return {"request_id": base["id"], "model": "policy", "choices": [choice]}
    if not request.is_streamed:
        return base | {"object": "chat.completion", "choices": [choice | {"message": message}]} | counts
    return _events_of(request, base | {"object": "chat.completion.chunk"}, choice, message, counts)


def _events_of(
    request: _Request, base: dict[str, Any], choice: dict[str, Any], message: dict[str, Any], counts: dict[str, Any]
) -> Events:
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
    delta = message | ({"tool_calls": calls} if calls else {})
    yield base | {"choices": [choice | {"delta": delta}]}
    if request.wants_usage and counts:
        yield base | {"choices": []} | counts
