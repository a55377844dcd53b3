"""Agents: programs that call a model over the OpenAI API. The policy in training answers their requests.

    the agent's thread                                   the episode
    first request         messages (and tools)  ----->   the question's prompt
                          <-- the policy's turn ------    the sampled text, or tool calls
    next request          its new messages      ----->   the answer to that turn
    the agent returns     its reward            ----->   the episode ends

Clients that render messages themselves can exchange token ids instead (POST /inference/v1/generate, as in vLLM).

An agent is a function ``(base_url, prompt, **columns)``, which ``environments.factory`` names. ``base_url`` is the
address of a server on this machine, and is different for every episode.

The rollout keeps the sampled tokens. When the agent sends earlier turns back, they are compared with the turns that it
received, and are not encoded again. Every request must continue the conversation so far. If the agent shortens or
rewrites the conversation, or holds two conversations at once, the episode ends as failed.

Owns: an agent's thread, which requests are answered. Does not know: deadlines (environment), tokens.
"""

from __future__ import annotations

import functools
import inspect
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.conversations import openai_api, tools
from jaxrl_llm.runtime.json_server import Events, Exchange, Refused, Server
from jaxrl_llm.scoring.reward_worker import number
from jaxrl_llm.settings.functions import awaited

ROLES = ("user", "tool")  # roles of the messages between two turns of the policy
FIXED_BY_RUN = "cannot be set by an agent: the run's sampling settings hold for its turns"
# Further fields that a request may have and that have no effect: allowed values by name, () = any value.
CHAT: dict[str, tuple[Any, ...]] = {"model": (), "tool_choice": ("auto",)}
# No effect, because the run's settings decide where a turn ends.
TOKENS = openai_api.OF_TOKENS | {"model": (), "stop_token_ids": ()}
ROUTES = {"v1/chat/completions": False, "inference/v1/generate": True}  # True = requests in token ids
Message = dict[str, Any]
Usage = dict[str, int]  # numbers of tokens
Answer = tuple[Message, Usage | None]  # to a request
Outcome = tuple[Any, BaseException | None]  # of an agent: its return value, or the exception that it raised

SPARE_THREADS = 8  # server threads for requests of ended episodes and for lists of models


def is_agent(factory: Any) -> bool:
    """Return whether ``factory`` is an agent: a function with the parameter ``base_url``."""
    if isinstance(factory, type):
        return False
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a function in C may have no signature
        return False
    return "base_url" in signature.parameters


def are_tokens(value: Any) -> bool:
    """Return whether a prompt or an answer is a list of token ids, and not text or messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int for token in value)


def prompt_of(opening: Any, agent_tools: list[Any], template_tools: list[Any], system_prompt: str) -> Any:
    """Return the prompt of an agent's first request.

    If the chat template receives other tools than the agent's, the agent's tools are listed in the system message. This
    is the agent's own system message if it has one, else a new one with ``system_prompt``.

    Args:
        opening: messages or token ids of the first request.
        agent_tools: tools of the first request.
        template_tools: tools that the chat template receives.
        system_prompt: ``prompts.system_prompt``.
    """
    if agent_tools == template_tools:
        return opening
    has_system_message = any(message["role"] in ("system", "developer") for message in opening)
    if system_prompt and not has_system_message:
        opening = [{"role": "system", "content": system_prompt}, *opening]
    return tools.with_tool_list(opening, agent_tools)


def prompt_shown(prompt: Any, decode: Callable[[list[int]], str]) -> Any:
    """Return a prompt as text or messages, so that people can read it. Token ids are decoded."""
    return decode(prompt) if are_tokens(prompt) else prompt


class _Request:
    """A request of an agent that waits for its answer.

    Attributes:
        content: messages or token ids.
        tools: tools of the request.
        answer: receives (message, usage), or None when the episode is over.
    """

    def __init__(self, body: dict[str, Any], is_tokens: bool):
        body = dict(body)
        self.is_tokens = is_tokens
        self.content: list[Any]
        self.tools: list[Any] = []
        self.is_streamed = False
        self.wants_usage = False
        self.answer: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        if is_tokens:
            ids = body.pop("token_ids", None)
            if not are_tokens(ids):
                raise ValueError(f"token_ids={ids!r:.100} must be a list of whole numbers, not empty")
            self.content = ids
            body |= body.pop("sampling_params", None) or {}
        else:
            self.content = tools.texts_of(body.pop("messages", None))
            self.tools = tools.functions_of(body.pop("tools", None) or [])
            self.is_streamed = bool(body.pop("stream", None))
            options = body.pop("stream_options", None) or {}
            self.wants_usage = bool(options.get("include_usage"))
        openai_api.pass_over(body, TOKENS if is_tokens else CHAT, FIXED_BY_RUN)


class Episode:
    """Episode of a running agent, with the interface of ``environment_worker.Episode``.

    The constructor starts the agent and waits for its first request.

    Attributes:
        opening: messages or token ids of the first request.
        tools: tools of the first request.
        num_turns: turns of the policy that the agent has received.
        drawn: token ids and log-probs of a turn, by its number. The caller sets them if the agent uses token ids.
        sizes: (tokens before the turn, tokens of the turn) of each turn. The caller sets them. If ``sizes`` is not set,
            answers have no ``usage``.
    """

    def __init__(self, play: Callable[..., Any], columns: dict[str, Any]):
        self.num_turns = 0
        self.drawn: Mapping[int, Any] = {}
        self.sizes: Sequence[Any] = ()
        self._reward: float | None = 0.0
        self._events: queue.SimpleQueue[_Request | Outcome] = queue.SimpleQueue()
        self._name = secrets.token_hex(16)  # random part of the address, so that other programs cannot guess it
        server = _server()
        server.open(self._name, self._events)
        address = f"http://127.0.0.1:{server.server_port}/{self._name}/v1"
        thread = threading.Thread(target=self._play, args=(play, address, columns), daemon=True)
        thread.start()
        self._request: _Request | None = None
        event = self._events.get()
        if not isinstance(event, _Request):
            self.close()
            self._end(event)
            raise RuntimeError("the agent returned before it asked the policy for anything")
        self._request = event
        self.opening = event.content
        self.tools = event.tools
        self._conversation = event.content  # messages or token ids up to the policy's next turn

    def _play(self, play: Callable[..., Any], address: str, columns: dict[str, Any]) -> None:
        try:
            returned = awaited(play(base_url=address, **columns))
            self._events.put((returned, None))
        except BaseException as error:  # also catch SystemExit, because the episode must receive every exception
            self._events.put((None, error))

    def answer(self, turn: str) -> list[dict[str, str]] | list[int] | None:
        """Send a turn to the agent, and return its answer: messages or token ids, None if the agent has returned.

        Raises:
            ValueError: the agent's next request does not continue the conversation after this turn.
            BaseException: the agent raised it.
        """
        before = self._request
        if before is None:
            raise ValueError("the agent has returned")
        reply: dict[str, Any]
        if before.is_tokens:
            ids, logps = self.drawn[self.num_turns]
            reply = {"token_ids": ids, "logps": logps}
            conversation = self._conversation + ids
        else:
            reply = tools.message_of(turn, before.tools)
            conversation = [*self._conversation, *tools.texts_of([reply])]
        usage = openai_api.usage(*self.sizes[self.num_turns]) if self.sizes else None
        self.num_turns += 1
        before.answer.put((reply, usage))
        event = self._events.get()
        if not isinstance(event, _Request):
            self.close()
            self._end(event)
            return None
        self._request = event
        self._conversation = event.content
        return self._new_content(before, event, conversation)

    def _new_content(self, before: _Request, request: _Request, conversation: list[Any]) -> list[Any]:
        """Return the part of a request that follows the conversation so far.

        Raises:
            ValueError: the request does not continue the conversation, or adds nothing.
        """
        num_known = len(conversation)
        begun = request.content[:num_known]
        new = request.content[num_known:]
        number_of_request = self.num_turns + 1
        is_same = begun == conversation if before.is_tokens else _same(begun, conversation)
        has_same_form = request.is_tokens == before.is_tokens and request.tools == before.tools
        if not has_same_form or not is_same:
            raise ValueError(f"request {number_of_request} of the agent does not continue the conversation so far")
        is_answer = before.is_tokens or all(message["role"] in ROLES for message in new)
        if not new or not is_answer:
            raise ValueError(f"request {number_of_request} of the agent must add messages of role user or tool")
        return new

    def _end(self, outcome: Outcome) -> None:
        """Set the reward from the agent's return value, or raise the agent's exception."""
        returned, error = outcome
        if error is not None:
            raise error
        if returned is None:
            self._reward = None
            return
        self._reward = number(returned, [])
        if self._reward is None:
            raise ValueError(f"the agent returned {returned!r:.100}, not a number or None")

    def reward(self) -> float | None:
        """Return the agent's return value, 0.0 while the agent runs, None if it returned None."""
        return self._reward

    def state(self) -> None:
        """Return None, because a thread cannot be saved. A new process replays the policy's turns instead."""

    def shown(self) -> None:
        """Return None, because an agent has no instance with attributes."""

    def close(self) -> None:
        """End the episode. The agent's pending and later requests are refused."""
        _server().episodes.pop(self._name, None)
        pending = [self._request]
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _Request):
                pending.append(event)
        for request in pending:
            if request is not None:
                request.answer.put(None)


def _same(left: list[dict[str, str]], right: list[dict[str, str]]) -> bool:
    """Return whether two lists of messages are equal up to whitespace around the texts, which agents often strip."""
    return _stripped(left) == _stripped(right)


def _stripped(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"].strip()) for message in messages]


class _Server(Server):
    """HTTP server of this process on the loopback interface, for the requests of all episodes.

    Attributes:
        episodes: event queue of each episode, by the episode's name. The name is part of the address.
    """

    def __init__(self) -> None:
        super().__init__(self._answer_request, ("127.0.0.1", 0), num_threads=SPARE_THREADS)
        self.episodes: dict[str, queue.SimpleQueue] = {}
        self.activate()

    def open(self, name: str, events: queue.SimpleQueue) -> None:
        """Accept the requests of an episode. A request occupies a thread until the policy's turn is sampled."""
        self.episodes[name] = events
        self.add_threads(len(self.episodes) + SPARE_THREADS)

    def _answer_request(self, exchange: Exchange) -> dict[str, Any] | Events:
        if exchange.method == "GET":
            model = {
                "id": "policy",
                "object": "model",
                "created": 0,
                "owned_by": "jaxrl_llm",
            }
            return {"object": "list", "data": [model]}
        name, _, route = exchange.path.removeprefix("/").partition("/")
        if exchange.method != "POST" or route not in ROUTES:
            raise Refused(404, f"no route {exchange.method} {exchange.path}")
        try:
            request = _Request(exchange.body(), ROUTES[route])
        except (ValueError, TypeError, AttributeError) as error:
            raise Refused(400, str(error)) from None
        events = self.episodes.get(name)
        if events is None:
            raise Refused(410, "the episode is over")
        events.put(request)
        answer = request.answer.get()
        if answer is None:
            raise Refused(410, "the episode is over")
        return _answer_to(request, *answer)


@functools.cache
def _server() -> _Server:
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _answer_to(request: _Request, message: Message, usage: Usage | None) -> dict[str, Any] | Events:
    """Return a turn of the policy in the form that the agent requested: one object, token ids, or streamed events."""
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    identifier = f"chatcmpl-{secrets.token_hex(8)}"
    if request.is_tokens:
        token_choice = openai_api.token_choice(message["token_ids"], message["logps"], finish_reason)
        return {"request_id": identifier, "model": "policy", "choices": [token_choice]}
    base = {"id": identifier, "created": int(time.time()), "model": "policy"}
    choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    counts = {"usage": usage} if usage else {}
    if request.is_streamed:
        return _events_of(request, base | {"object": "chat.completion.chunk"}, choice, message, counts)
    return base | {"object": "chat.completion", "choices": [choice | {"message": message}]} | counts


def _events_of(
    request: _Request,
    base: dict[str, Any],
    choice: dict[str, Any],
    message: Message,
    counts: dict[str, Any],
) -> Events:
    """Yield the events of a streamed turn: the whole message as one delta, and the counts of tokens."""
    delta = dict(message)
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
    if calls:
        delta["tool_calls"] = calls
    yield base | {"choices": [choice | {"delta": delta}]}
    if request.wants_usage and counts:
        yield base | {"choices": []} | counts
