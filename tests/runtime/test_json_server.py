"""The JSON server handles requests one by one for any bytes; other sites and idle clients are refused."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest

from jaxrl_llm.runtime import json_server
from jaxrl_llm.runtime.json_server import Refused, Server


def answer(exchange):
    """Repeat the request; /events yields three events, /wait lasts until its client has left."""
    if exchange.path == "/refuse":
        raise Refused(418, "no")
    if exchange.path == "/raise":
        raise ValueError("a fault")
    if exchange.path == "/events":
        return ({"number": number} for number in range(3))
    if exchange.path == "/broken":
        return (1 // (2 - number) and {"number": number} for number in range(3))
    if exchange.path == "/wait":
        while not exchange.is_abandoned():
            time.sleep(0.01)
        LEFT.set()
        return {}
    body = exchange.body() if exchange.method == "POST" else None
    return {"method": exchange.method, "path": exchange.path, "body": body}


LEFT = threading.Event()


@contextlib.contextmanager
def serving(**settings):
    server = Server(answer, ("127.0.0.1", 0), **({"num_threads": 4} | settings))
    server.activate()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def sent(server, request, seconds=1.0):
    """Send these bytes. Return the received bytes until the server closes or is silent, and whether it closed."""
    with socket.create_connection(("127.0.0.1", server.server_port), seconds) as connection:
        connection.sendall(request)
        received = b""
        try:
            while part := connection.recv(2**16):
                received += part
        except TimeoutError:
            return received, False
        except ConnectionResetError:  # the server has closed, and left bytes unread
            pass
        return received, True


def statuses(received):
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+) ", received)]


def request(head, body=b"", target=b"POST /a"):
    lines = [target + b" HTTP/1.1", b"Host: 127.0.0.1", *head]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


SECOND = request([], target=b"GET /smuggled")
BODY = b'{"a": 1}'
CHUNKED = b"8\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "first",
    [
        request([b"Content-Length: 8", b"Content-Length: 8"], BODY),
        request([b"Content-Length: 8", b"Content-Length: 0"], BODY),
        request([b"Content-Length: 0", b"content-length: 8"], BODY),
        request([b"Content-Length: 8, 8"], BODY),
        request([b"Content-Length: +8"], BODY),
        request([b"Content-Length: -1"], BODY),
        request([b"Content-Length: 0x8"], BODY),
        request(["Content-Length: \uff18".encode()], BODY),
        request([b"Content-Length : 8"], BODY),
        request([b"Content-Length: 5", b"Transfer-Encoding: chunked"], CHUNKED),
        request([b"Transfer-Encoding: chunked", b"Content-Length: 5"], CHUNKED),
        request([b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"], CHUNKED),
        request([b"Transfer-Encoding: gzip"], CHUNKED),
        request([b"Transfer-Encoding: xchunked"], CHUNKED),
        request([b"Transfer-Encoding: chunked"], b"xyz\r\n" + BODY + b"\r\n0\r\n\r\n"),
        request([b"Host: other.example"], target=b"GET /a"),
        request([b"Content-Length: 8"], BODY, target=b"GET /a"),
        request([b"Transfer-Encoding: chunked"], CHUNKED, target=b"GET /a"),
        request([b"X: a", b" Content-Length: 8"], BODY),
        b"GET /a HTTP/1.1\r\n\r\n",
        request([b"Connection: keep-alive", b"Transfer-Encoding: chunked"], CHUNKED).replace(b"HTTP/1.1", b"HTTP/1.0"),
        b"nonsense\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\nY: b\r\n\r\n",
    ],
)
def test_a_request_that_two_readers_could_understand_differently_is_refused_and_nothing_after_it_is_read(server, first):
    received, is_closed = sent(server, first + SECOND)
    assert statuses(received) in ([400], [501])
    assert is_closed
    assert b"smuggled" not in received


@pytest.mark.parametrize(
    "first",
    [
        request([b"Content-Length: 8"], BODY),
        request([b"CONTENT-LENGTH:8"], BODY),
        request([b"Transfer-Encoding: chunked"], CHUNKED),
        request([b"transfer-encoding: Chunked"], b"4;x=y\r\n" + BODY[:4] + b"\r\n4\r\n" + BODY[4:] + b"\r\n0\r\n\r\n"),
    ],
)
def test_bodies_of_a_length_and_in_chunks_are_read_and_the_next_request_is_the_next(server, first):
    received, _ = sent(server, first + SECOND)
    assert statuses(received) == [200, 200]
    assert b'"body": {"a": 1}' in received
    assert b'"path": "/smuggled"' in received


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"7", b"\xff", b"[" * 100_000, b"null", b'{"a": NaN}'])
def test_a_body_that_is_no_object_is_refused(server, body):
    received, _ = sent(server, request([b"Content-Length: %d" % len(body), b"Connection: close"], body), 5.0)
    assert statuses(received) == [400]
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


def test_a_body_or_head_that_is_too_large_is_refused_before_it_is_read(server):
    assert statuses(sent(server, request([b"Content-Length: 99999999999"]))[0]) == [413]
    received, is_closed = sent(server, request([b"X: " + b"a" * 2**17]))
    assert statuses(received) in ([431], []) and is_closed  # the answer is lost if the client still sends


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Host: 127.0.0.1", 200),
        (b"Host: 127.0.0.1:80", 200),
        (b"Host: localhost:8000", 200),
        (b"Host: LOCALHOST", 200),
        (b"Host: [::1]:8000", 200),
        (b"Host: evil.example", 403),
        (b"Host: evil.example:8000", 403),
        (b"Host: 127.0.0.1.evil.example", 403),
        (b"Host: localhost@evil.example", 403),
        (b"Host: [::1", 403),
        (b"Host: localhost\r\nOrigin: http://localhost:3000", 200),
        (b"Host: localhost\r\nOrigin: http://127.0.0.1", 200),
        (b"Host: localhost\r\nOrigin: https://evil.example", 403),
        (b"Host: localhost\r\nOrigin: null", 403),
    ],
)
def test_without_a_token_other_sites_are_refused(server, head, status):
    """A page in the user's browser sends an Origin. With DNS rebinding, the Host is another name for this machine."""
    received, _ = sent(server, b"GET /a HTTP/1.1\r\nConnection: close\r\n" + head + b"\r\n\r\n")
    assert statuses(received) == [status]


def test_with_a_token_any_name_of_the_server_is_answered():
    with serving(any_site=True) as server:
        received, _ = sent(
            server, b"GET /a HTTP/1.1\r\nConnection: close\r\nHost: gpu.example\r\nOrigin: https://ui.example\r\n\r\n"
        )
    assert statuses(received) == [200]


def test_errors_are_json_and_what_nobody_foresaw_is_printed_too(server, capfd):
    for path, status, printed in ((b"GET /refuse", 418, ""), (b"GET /raise", 500, "ValueError: a fault")):
        received, _ = sent(server, request([], target=path))
        assert statuses(received) == [status]
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == status
        assert printed in capfd.readouterr().err


def test_events_come_one_by_one_and_end_with_done_unless_one_fails(server, capfd):
    received, _ = sent(server, request([], target=b"GET /events"))
    assert received.count(b"data: {") == 3 and received.count(b"data: [DONE]") == 1
    received, _ = sent(server, request([], target=b"GET /broken"))
    assert b"ZeroDivisionError" in received and b"[DONE]" not in received
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_an_application_sees_that_its_client_has_left(server):
    LEFT.clear()
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(request([], target=b"GET /wait"))
        time.sleep(0.1)
        assert not LEFT.is_set()
    assert LEFT.wait(10)


def test_idle_connections_are_bounded_in_number_and_time(monkeypatch):
    monkeypatch.setattr(json_server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(json_server, "IDLE_S", 1)
    monkeypatch.setattr(json_server, "CLEANUP_S", 1)
    with serving() as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.server_port)
        idle = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(20)]
        for connection in idle[:3]:
            connection.sendall(b"POST /a HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # and no more
        # A client that comes after them is answered once the idle ones have been closed.
        received, _ = sent(server, request([], target=b"GET /late"), 30.0)
        assert statuses(received) == [200]
        assert idle[0].recv(1) == b""


def test_before_it_is_activated_a_server_has_its_port_and_lets_nobody_in():
    with Server(answer, ("127.0.0.1", 0), num_threads=1) as server:
        assert server.server_port > 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.server_port))


def test_a_port_that_another_server_has_is_an_error(server):
    with pytest.raises(OSError):
        Server(answer, ("127.0.0.1", server.server_port), num_threads=1)
