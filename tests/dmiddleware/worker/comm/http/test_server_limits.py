"""What a client without the key can make the HTTP server do: almost nothing."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dmiddleware.worker.comm.http.client import HttpClient
from dmiddleware.worker.comm.http.server import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    MAX_UNVERIFIED,
    HttpServer,
    Route,
)
from dmiddleware.worker.comm.http.signing import HttpNode, sign

KEY = b"k" * 32
SERVER, CLIENT = HttpNode("run", 0, "server"), HttpNode("run", 0, "client")
DEADLINE_S = 60.0


@pytest.fixture
def server() -> Iterator[HttpServer]:
    route = Route(lambda node, body: {"n": len(str(body))})
    server = HttpServer(SERVER, "127.0.0.1", 0, {("POST", "/do"): route}, key=KEY)
    server.open()
    yield server
    server.close()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)


def works(server: HttpServer, size: int = 10) -> bool:
    client = HttpClient(f"http://127.0.0.1:{server.port}", CLIENT, key=KEY, to="server")
    return client.request("POST", "/do", {"x": "y" * size})["n"] > size


def head(body: bytes, *fields: str, key: bytes = KEY, length: str | None = None) -> bytes:
    """Return the head of a request for a body."""
    signature = sign(key, CLIENT, time.time(), "POST", "/do", body, to="server")
    lines = ["POST /do HTTP/1.1", "Host: x", f"Authorization: {signature}", *fields]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode()


def ended(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(4096):
            received += piece
    return received


@pytest.mark.parametrize("length", [10, 1 << 20, MAX_BODY_BYTES, 1 << 40])
@pytest.mark.parametrize("signature", ["none", "wrong key"])
def test_a_body_is_not_read_before_the_signature_is_right(
    server: HttpServer, length: int, signature: str
) -> None:
    with connect(server) as connection:
        if signature == "none":
            lines = f"POST /do HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
            connection.sendall(lines.encode())
        else:
            connection.sendall(head(b"", key=b"x" * 32, length=str(length)))
        # No byte of the body was sent.
        assert ended(connection).startswith(b"HTTP/1.1 401")
    assert works(server)


def test_a_body_other_than_the_signed_one_is_refused(server: HttpServer) -> None:
    for signed, sent in ((b"{}", b"[]"), (b"{}", b""), (b'{"a": 1}', b'{"a": 2}')):
        with connect(server) as connection:
            connection.sendall(head(signed, length=str(len(sent))) + sent)
            assert ended(connection).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("length", ["-1", "x", "", "1e3", "99999999999999999999999"])
def test_impossible_lengths_are_refused(server: HttpServer, length: str) -> None:
    with connect(server) as connection:
        connection.sendall(head(b"{}", length=length) + b"{}")
        assert ended(connection)[9:10] == b"4"
    assert works(server)


def test_chunked_bodies_are_refused(server: HttpServer) -> None:
    with connect(server) as connection:
        connection.sendall(head(b"{}", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n")
        assert ended(connection).startswith(b"HTTP/1.1 411")


@pytest.mark.parametrize(
    "data",
    [
        b"x" * (MAX_HEAD_BYTES + 1),
        b"POST /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n",
        b"POST /do HTTP/1.1\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES,
        b"POST /do HTTP/1.1\r\nA: " + b"b" * (1 << 20),
    ],
)
def test_a_head_without_an_end_is_not_read_for_long(server: HttpServer, data: bytes) -> None:
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        assert ended(connection) == b""
    assert works(server)


def test_a_head_that_comes_byte_by_byte_has_a_deadline(server: HttpServer) -> None:
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(0.1)
        while True:
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                assert connection.recv(10) == b""
                break
    assert works(server)


def test_silent_connections_take_a_bounded_number_of_threads(server: HttpServer) -> None:
    n_before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for number in range(4 * MAX_UNVERIFIED):
            stack.enter_context(connect(server))
            if number % 50 == 0:
                assert works(server)
        assert works(server)
        assert threading.active_count() - n_before <= MAX_UNVERIFIED + 32


def test_a_second_request_in_the_same_packet_is_not_answered(server: HttpServer) -> None:
    with connect(server) as connection:
        connection.sendall(2 * (head(b"{}") + b"{}"))
        assert ended(connection).count(b"HTTP/1.1") == 1


def test_a_client_that_keeps_its_connection_is_answered_each_time(server: HttpServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    for _ in range(3):
        header = sign(KEY, CLIENT, time.time(), "POST", "/do", b"{}", to="server")
        connection.request("POST", "/do", b"{}", {"Authorization": header})
        reply = connection.getresponse()
        assert reply.status == 200 and reply.read()
    connection.close()


@pytest.mark.parametrize("size", [0, 1, 5_000, 20_000, 3_000_000])
def test_bodies_of_all_sizes_arrive_in_one_piece_or_in_many(server: HttpServer, size: int) -> None:
    assert works(server, size)
    body = b'{"x": "' + b"y" * size + b'"}'
    for step in (1 << 20, max(1, len(body) // 3)):
        data = head(body) + body
        with connect(server) as connection:
            for start in range(0, len(data), step):
                connection.sendall(data[start : start + step])
            assert ended(connection).startswith(b"HTTP/1.1 200")
