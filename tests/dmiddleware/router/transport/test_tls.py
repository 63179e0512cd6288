"""tls+tcp: both sides present a certificate, and nothing is readable on the way."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from dmiddleware.errors import AuthError, RouterError, TransportError
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.transport.tls import TlsFiles
from tests.accepting import accepting
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.stream_ends import End
from tests.waiting import wait_until

KEY = bytes(range(32))
ANYWHERE = "tls+tcp://127.0.0.1:0"
DEADLINE_S = 20.0

Ends: TypeAlias = "queue.SimpleQueue[End]"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "theirs")


@contextlib.contextmanager
def greeting(files: TlsFiles | None, address: str = ANYWHERE) -> Iterator[str]:
    """Listen, and greet each dialer."""
    transport = NngStreamTransport(tls=files)

    def accept(stream: Stream) -> float:
        End(stream)
        stream.send([b"welcome"], lambda error: None)
        return 0.0

    try:
        yield transport.listen(address, accept).address
    finally:
        assert transport.close(timeout_s=DEADLINE_S)


def outcome(files: TlsFiles, address: str, content: bytes = b"hello") -> bytes | RouterError:
    """Dial and send something; return what arrives, or why nothing does."""
    transport = NngStreamTransport(tls=files)
    end = End(transport.dial(address, timeout_s=DEADLINE_S))
    try:
        end.stream.send([content], end.on_sent)
        return end.received(7) or end.ended()
    finally:
        assert transport.close(timeout_s=DEADLINE_S)


def test_tls_encrypts_everything(ours: Authority) -> None:
    secret = b"what nobody on the network may read"
    with greeting(ours.files("listener")) as address, Eavesdropper(address) as between:
        assert outcome(ours.files("dialer"), between.address, secret) == b"welcome"
    assert len(between.heard) > 2 * len(secret)
    assert secret not in between.heard and b"welcome" not in between.heard


def test_a_certificate_for_another_name_is_refused_with_the_name(ours: Authority) -> None:
    with greeting(ours.files("listener", host="elsewhere")) as address:
        refused = outcome(ours.files("dialer"), address)
    assert isinstance(refused, AuthError)
    assert "Hostname mismatch" in str(refused)
    assert "valid for the name 'localhost'" in str(refused)


def test_a_listener_without_tls_is_not_a_certificate_error(ours: Authority) -> None:
    with greeting(None, "tcp://127.0.0.1:0") as address:
        refused = outcome(ours.files("dialer"), f"tls+{address}")
    assert isinstance(refused, TransportError) and not isinstance(refused, AuthError)
    assert "does not speak TLS" in str(refused)


def test_an_address_without_a_listener_is_not_a_certificate_error(ours: Authority) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused = outcome(ours.files("dialer"), f"tls+tcp://127.0.0.1:{unused.getsockname()[1]}")
    assert isinstance(refused, TransportError) and not isinstance(refused, AuthError)


def test_a_tls_listener_sends_nothing_readable_to_a_plain_dialer(ours: Authority) -> None:
    with greeting(ours.files("listener")) as address:
        host, _, port = address.removeprefix("tls+tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as plain:
            plain.sendall(bytes(100))
            received = b""
            with contextlib.suppress(ConnectionError):
                while part := plain.recv(1000):
                    received += part
    assert b"welcome" not in received


@pytest.mark.parametrize("missing", ["ca", "cert_and_key"])
def test_a_missing_file_is_named(ours: Authority, missing: str) -> None:
    names = {"ca": ours.ca, "cert_and_key": ours.issue("dialer"), missing: "/nowhere.pem"}
    with (
        pytest.raises(TransportError, match=r"'/nowhere\.pem' does not exist"),
        greeting(TlsFiles(**names, server_name="localhost")),
    ):
        pass


def test_a_file_without_a_certificate_is_named(ours: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    files = TlsFiles(ca=ours.ca, cert_and_key=str(empty), server_name="localhost")
    with pytest.raises(TransportError, match=r"empty\.pem"), greeting(files):
        pass


def secured(files: TlsFiles, address: str, **versions: ssl.TLSVersion) -> ssl.SSLSocket:
    """Connect with Python's own sockets, without a handshake."""
    context = files.context(listens=False)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    for name, version in versions.items():
        setattr(context, name, version)
    host, _, port = address.removeprefix("tls+tcp://").rpartition(":")
    plain = socket.create_connection((host, int(port)), DEADLINE_S)
    return context.wrap_socket(plain, server_hostname="localhost", do_handshake_on_connect=False)


@contextlib.contextmanager
def accepting_ends(files: TlsFiles, *, buffer_bytes: int) -> Iterator[tuple[str, Ends]]:
    """Listen, and keep the ends of the connections."""
    transport, ends = NngStreamTransport(tls=files), queue.SimpleQueue[End]()

    def accept(stream: Stream) -> float:
        ends.put(End(stream, buffer_bytes=buffer_bytes))
        return 0.0

    try:
        yield transport.listen(ANYWHERE, accept).address, ends
    finally:
        assert transport.close(timeout_s=DEADLINE_S)


def test_the_last_words_before_the_end_arrive_although_nothing_was_being_received(
    ours: Authority,
) -> None:
    words = bytes(range(256)) * 1000
    with accepting_ends(ours.files("listener"), buffer_bytes=0) as (address, ends):
        with secured(ours.files("dialer"), address) as dialer:
            dialer.do_handshake()
            dialer.sendall(words)
        end = ends.get(timeout=DEADLINE_S)
        end.read(1 << 16)
        assert isinstance(end.ended(), TransportError)
        assert end.received_now() == words


def test_an_end_in_order_is_the_end(ours: Authority) -> None:
    with accepting_ends(ours.files("listener"), buffer_bytes=1 << 16) as (address, ends):
        with secured(ours.files("dialer"), address) as dialer:
            dialer.do_handshake()
            dialer.sendall(b"hello")
            # It sends the end, and does not wait for that of the listener.
            dialer.setblocking(False)
            with contextlib.suppress(ssl.SSLWantReadError):
                dialer.unwrap()
        end = ends.get(timeout=DEADLINE_S)
        assert "has ended" in str(end.ended())
        assert end.received_now() == b"hello"


def test_a_peer_that_resets_the_connection_ends_it_for_who_sends_and_receives(
    ours: Authority,
) -> None:
    with accepting_ends(ours.files("listener"), buffer_bytes=0) as (address, ends):
        with secured(ours.files("dialer"), address) as dialer:
            dialer.do_handshake()
            dialer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end = ends.get(timeout=DEADLINE_S)
        end.read(1 << 16)
        assert isinstance(end.ended(), TransportError)
        with pytest.raises(TransportError):
            end.send(b"lost")


def test_a_failed_handshake_ends_the_connection_although_nobody_receives(ours: Authority) -> None:
    with accepting_ends(ours.files("listener"), buffer_bytes=0) as (address, ends):
        host, _, port = address.removeprefix("tls+tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1000):
                pass
        end = ends.get(timeout=DEADLINE_S)
        with pytest.raises(TransportError, match="handshake with a peer that dialed"):
            end.send(b"lost")


def test_an_older_version_of_tls_is_refused_by_both_sides(ours: Authority) -> None:
    with (
        accepting_ends(ours.files("listener"), buffer_bytes=1 << 16) as (address, ends),
        secured(ours.files("dialer"), address, maximum_version=ssl.TLSVersion.TLSv1_2) as dialer,
    ):
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            dialer.do_handshake()
        assert "unsupported protocol" in str(ends.get(timeout=DEADLINE_S).ended())
    with Hangup(ours.files("listener"), maximum_version=ssl.TLSVersion.TLSv1_2) as address:
        refused = outcome(ours.files("dialer"), address)
    assert isinstance(refused, TransportError)
    assert "protocol version" in str(refused)


def test_no_session_is_resumed(ours: Authority) -> None:
    with (
        greeting(ours.files("listener")) as address,
        secured(ours.files("dialer"), address) as dialer,
    ):
        dialer.do_handshake()
        assert dialer.recv(7) == b"welcome"
        assert dialer.version() == "TLSv1.3"
        assert dialer.session is None or not dialer.session.has_ticket


def test_many_peers_that_dial_at_once_all_connect(ours: Authority) -> None:
    n_peers = 24
    with greeting(ours.files("listener")) as address:
        transports = [NngStreamTransport(tls=ours.files("dialer")) for _ in range(n_peers)]
        with contextlib.ExitStack() as stack:
            for transport in transports:
                stack.callback(transport.close, timeout_s=DEADLINE_S)
            for _ in range(5):
                ends = [End(peer.dial(address, timeout_s=DEADLINE_S)) for peer in transports]
                assert [end.received(7) for end in ends] == n_peers * [b"welcome"]
                for end in ends:
                    end.stream.close()


def test_events_travel_between_routers_over_tls(ours: Authority) -> None:
    numbers: list[int] = []
    with (
        Router(
            listen=ANYWHERE, key=KEY, transport=NngStreamTransport(tls=ours.files("learner"))
        ) as learner,
        Router(
            node_id=1,
            dial=[learner.address],
            key=KEY,
            transport=NngStreamTransport(tls=ours.files("collector")),
        ) as collector,
    ):
        learner.attach(
            accepting(
                lambda name, args, kwargs: numbers.extend(args) if name == "n" else None, waits=True
            )
        )
        learner.subscribe("n", active=True)
        collector.wait_for_peers(1, timeout_s=DEADLINE_S, events=["n"])
        for number in range(200):
            collector.emit(Event("n"), (number,), {})
        wait_until(lambda: len(numbers) == 200, "200 numbers")
    assert numbers == list(range(200))


def test_a_router_with_an_untrusted_certificate_fails_at_its_start_timeout(
    ours: Authority, theirs: Authority
) -> None:
    with (
        Router(
            listen=ANYWHERE, key=KEY, transport=NngStreamTransport(tls=ours.files("learner"))
        ) as learner,
        Router(
            node_id=1,
            dial=[learner.address],
            key=KEY,
            transport=NngStreamTransport(tls=theirs.files("collector")),
            start_timeout_s=0.5,
        ) as collector,
        pytest.raises(AuthError, match="must be signed by an authority"),
    ):
        collector.wait_for_peers(1, timeout_s=DEADLINE_S)


class Hangup:
    """A listener that closes a connection after the TLS handshake, or its failure."""

    def __init__(self, files: TlsFiles, *, maximum_version: ssl.TLSVersion) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.maximum_version = maximum_version
        self._context.load_cert_chain(files.cert_and_key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(10.0)
        self._thread = threading.Thread(target=self._answer)

    def __enter__(self) -> str:
        self._thread.start()
        return f"tls+tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        plain, _ = self._socket.accept()
        with plain, contextlib.suppress(ssl.SSLError):
            self._context.wrap_socket(plain, server_side=True).close()


class Eavesdropper:
    """Forwards the bytes of a connection, and keeps a copy of them."""

    def __init__(self, address: str) -> None:
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tls+tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self.heard = bytearray()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Eavesdropper:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.join(5.0)
            assert not thread.is_alive()
        self._socket.close()

    def _accept(self) -> None:
        with self._socket.accept()[0] as one, socket.create_connection(self._target) as other:
            back = threading.Thread(target=self._pass, args=(other, one))
            back.start()
            self._pass(one, other)
            back.join(5.0)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                self.heard += part
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)
