"""A server of JSON over HTTP. It turns each request into an ``Exchange``, which an application answers.

waitress reads the requests and enforces limits and timeouts. This module adds three things:

    status 400    for several Content-Length or Host headers, or a Content-Length with a Transfer-Encoding (RFC 9112)
    status 403    for a Host or Origin of another site, if requests bear no token: such requests come from pages in the
                  user's browser or from DNS rebinding
    answers       as JSON, errors included, or as server-sent events if the application returns an iterator

Owns: connections, their limits, how an answer is written. Does not know: routes, users' bearer tokens, models.
"""

from __future__ import annotations

import contextlib
import http
import logging
import resource
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable, Generator, Iterator
from typing import Any

from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer, create_server

from jaxrl_llm.runtime import json_lines

MAX_BODY = 2**24  # bytes
MAX_HEADERS = 2**16  # bytes
MAX_CONNECTIONS = 1000  # largest number of connections; others wait until one closes
IDLE_S = 60  # seconds after which a connection without a request in progress is closed
CLEANUP_S = 5  # seconds between two searches for idle connections
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Headers that a request may have only once. If two readers took different copies, they would see different requests.
SINGLE = ("content-length", "host", "transfer-encoding")

Events = Generator[dict[str, Any], None, None]

# By default, waitress warns about every request that waits for a thread and every client that leaves.
logging.getLogger("waitress").setLevel(logging.ERROR)


class Refused(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Exchange:
    """A request, and whether its client still waits for the answer.

    Attributes:
        method: "GET", "POST" and so on.
        path: without the query, percent-decoded.
    """

    def __init__(self, environ: dict[str, Any]):
        self._environ = environ
        self.method: str = environ["REQUEST_METHOD"]
        # WSGI has the bytes of a path as Latin-1.
        self.path: str = environ["PATH_INFO"].encode("latin-1").decode(errors="replace")

    def header(self, name: str) -> str:
        """Return the value of a header, "" if the request has none."""
        return self._environ.get("HTTP_" + name.upper().replace("-", "_"), "")

    def is_abandoned(self) -> bool:
        """Return whether the client has closed the connection."""
        return self._environ["waitress.client_disconnected"]()

    def body(self) -> dict[str, Any]:
        """Return the request's JSON object.

        Raises:
            Refused: the body is not a JSON object (400).
        """
        try:
            body = json_lines.strict(self._environ["wsgi.input"].read())
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, f"the body must be a JSON object, not {type(body).__name__}")
        return body


class Server:
    """An HTTP server of one application. It takes its port at once and accepts clients after ``activate``.

    Args:
        answer: called in a thread with each ``Exchange``. It returns the JSON object of the answer, or an iterator of
            events, or raises ``Refused``.
        address: host and port; port 0 takes a free one (``server_port``).
        num_threads: number of requests that are answered at the same time. Other requests wait.
        any_site: whether to answer requests with another Host or Origin. Only safe if every request bears a token.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
    """

    def __init__(
        self,
        answer: Callable[[Exchange], dict[str, Any] | Events],
        address: tuple[str, int],
        *,
        num_threads: int,
        any_site: bool = False,
    ):
        self._answer = answer
        self._hosts = None if any_site else frozenset({*LOOPBACK, _in_url(address[0]).lower()})
        self._num_threads = num_threads
        self._connections: dict[int, Any] = {}
        self._is_stopping = threading.Event()
        self._server: TcpWSGIServer | None = None
        self._socket = _bound(address)
        self.host: str = address[0]
        self.server_port: int = self._socket.getsockname()[1]

    def activate(self) -> None:
        """Accept connections. Before this call, a client's connection is refused at once."""
        _raise_file_limit()
        server = create_server(
            self._respond,
            map=self._connections,
            sockets=[self._socket],
            threads=self._num_threads,
            ident=None,
            backlog=1024,
            connection_limit=MAX_CONNECTIONS,
            channel_timeout=IDLE_S,
            cleanup_interval=CLEANUP_S,
            max_request_header_size=MAX_HEADERS,
            max_request_body_size=MAX_BODY,
            channel_request_lookahead=1,  # read on while a request is answered, to notice that its client leaves
            asyncore_use_poll=True,  # use poll, because `select` does not accept descriptors above 1023
            clear_untrusted_proxy_headers=True,
        )
        assert isinstance(server, TcpWSGIServer)  # the server has one socket
        server.channel_class = _Channel
        self._server = server

    def serve_forever(self) -> None:
        """Serve until ``shutdown`` is called."""
        if self._server is None:
            self.activate()
        while not self._is_stopping.is_set():
            wasyncore.loop(timeout=1.0, use_poll=True, map=self._connections, count=1)

    def add_threads(self, num_threads: int) -> None:
        """Raise the number of threads to at least ``num_threads``."""
        if num_threads > self._num_threads:
            self._num_threads = num_threads
            assert self._server is not None, "the server must be activated first"
            self._server.task_dispatcher.set_thread_count(num_threads)

    def shutdown(self) -> None:
        """End ``serve_forever``. May be called from any thread."""
        self._is_stopping.set()
        if self._server is not None:
            with contextlib.suppress(OSError):  # the server has already ended
                self._server.pull_trigger()

    def server_close(self) -> None:
        """Close the address and all connections."""
        self._socket.close()
        if self._server is not None:
            self._server.task_dispatcher.shutdown(cancel_pending=True, timeout=1)
            wasyncore.close_all(self._connections, ignore_all=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.server_close()

    # ---- answers ----

    def _respond(self, environ: dict[str, Any], start_response: Callable) -> Iterator[bytes] | list[bytes]:
        """Answer one request. This is the WSGI application (PEP 3333)."""
        exchange = Exchange(environ)
        try:
            self._check_site(exchange)
            answer = self._answer(exchange)
        except Exception as error:
            status, body = _failure(error, exchange)
            return _json(start_response, status, body)
        if isinstance(answer, dict):
            return _json(start_response, 200, answer)
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        return _events(answer, exchange)

    def _check_site(self, exchange: Exchange) -> None:
        if self._hosts is None:
            return
        host = exchange.header("Host")
        if host and _host_of(f"//{host}") not in self._hosts:
            raise Refused(
                403,
                f"Host={host!r:.100} must be this server's own address: requests bear no token",
            )
        origin = exchange.header("Origin")
        if origin and _host_of(origin) not in self._hosts:
            raise Refused(403, f"Origin={origin!r:.100} is another site: requests bear no token")


class _Parser(HTTPRequestParser):
    """A parser that refuses a request if two HTTP readers could understand it differently."""

    def parse_header(self, header_plus: bytes) -> None:
        lines = header_plus.split(b"\r\n")[1:]
        names = [line.partition(b":")[0].strip().lower().decode("latin-1") for line in lines]
        for name in SINGLE:
            if names.count(name) > 1:
                raise ParsingError(f"several {name} headers")
        if "content-length" in names and "transfer-encoding" in names:
            raise ParsingError("a Content-Length beside Transfer-Encoding")
        if any(line[:1] in (b" ", b"\t") for line in lines):
            raise ParsingError("a header that is folded over lines")
        super().parse_header(header_plus)
        if self.version == "1.1" and "host" not in names:
            raise ParsingError("no Host header")
        if self.version != "1.1" and "transfer-encoding" in names:
            raise ParsingError("a Transfer-Encoding, which HTTP/1.0 does not have")
        if self.command in ("GET", "HEAD") and (self.content_length or self.chunked):
            raise ParsingError(f"a {self.command} request with a body")


class _Channel(HTTPChannel):
    parser_class = _Parser


def _bound(address: tuple[str, int]) -> socket.socket:
    """Return a socket that is bound to its address and does not listen yet."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _raise_file_limit() -> None:
    """Let this process have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host_of(url: str) -> str:
    """Return the host that a URL names, in lower case; "" for none, such as the origin "null"."""
    try:
        return _in_url(urllib.parse.urlsplit(url).hostname or "")
    except ValueError:
        return ""


def _failure(error: Exception, exchange: Exchange) -> tuple[int, dict[str, Any]]:
    """Return the status and the body for an error. An error other than ``Refused`` is printed, too."""
    if isinstance(error, Refused):
        status = error.status
        text = str(error)
    else:
        status = 500
        text = f"{type(error).__name__}: {error}"[:300]
        if not isinstance(error, ConnectionError):
            print(
                f"warning: {exchange.method} {exchange.path[:200]} failed: {text}",
                file=sys.stderr,
                flush=True,
            )
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": text, "type": kind, "code": status}}


def _json(start_response: Callable, status: int, body: dict[str, Any]) -> list[bytes]:
    data = json_lines.written(body).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
    start_response(f"{status} {http.HTTPStatus(status).phrase}", headers)
    return [data]


def _events(events: Events, exchange: Exchange) -> Iterator[bytes]:
    """Yield server-sent events. After a failure, the last event is the error and [DONE] is missing."""
    try:
        for event in events:
            yield f"data: {json_lines.written(event)}\n\n".encode()
    except ConnectionError:
        return
    except Exception as error:
        _, body = _failure(error, exchange)
        yield f"data: {json_lines.written(body)}\n\n".encode()
        return
    finally:
        events.close()
    yield b"data: [DONE]\n\n"
