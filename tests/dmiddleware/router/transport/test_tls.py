"""tls+tcp: both sides present a certificate, and a refused one is reported with its reason."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dmiddleware.router.transport.socket_listener import SocketListener
from dmiddleware.router.transport.sockets import SocketTransport
from tests.dmiddleware.router.request_handlers import replying_with

from dmiddleware.errors import AuthError, TransportError
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.tls import TlsFiles
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.process_resources import HEAD, framed

KEY = bytes(range(32))
ANYWHERE = "tls+tcp://127.0.0.1:0"
MAX_BYTES = 1 << 20


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "theirs")


@contextlib.contextmanager
def echo(files: TlsFiles) -> Iterator[SocketListener]:
    listener = SocketTransport(tls=files).listen(
        ANYWHERE,
        replying_with(lambda raw, _: bytes(raw)),
        on_disconnect=lambda _: None,
        limits=unlimited(MAX_BYTES),
    )
    try:
        yield listener
    finally:
        listener.close()


def make_requests(
    files: TlsFiles, address: str, content: bytes = b"hello", *, connect_timeout_s: float = 10.0
) -> bytes:
    channel = SocketTransport(tls=files).dial(
        address,
        connect_timeout_s=connect_timeout_s,
        reply_timeout_s=10.0,
        max_frame_bytes=MAX_BYTES,
    )
    try:
        return bytes(channel.request(content))
    finally:
        channel.close()


def refusal(files: TlsFiles, address: str) -> str:
    with pytest.raises(AuthError) as caught:
        make_requests(files, address)
    return str(caught.value)


def test_certificates_of_the_same_authority_connect(ours: Authority) -> None:
    with echo(ours.files("listener")) as listener:
        assert listener.address.startswith("tls+tcp://127.0.0.1:")
        for content in (b"hello", bytes(900_000)):
            assert make_requests(ours.files("dialer"), listener.address, content) == content


def test_tls_encrypts_everything(ours: Authority) -> None:
    secret = b"what nobody on the network may read"
    with echo(ours.files("listener")) as listener, Eavesdropper(listener.address) as between:
        assert make_requests(ours.files("dialer"), between.address, secret) == secret
    assert len(between.heard) > 2 * len(secret)
    assert secret not in between.heard


def test_a_listener_of_another_authority_is_refused_with_the_reason(
    ours: Authority, theirs: Authority
) -> None:
    with echo(theirs.files("listener")) as listener:
        trusting_ours = TlsFiles(
            ca=ours.ca, cert_and_key=theirs.issue("dialer"), server_name="localhost"
        )
        said = refusal(trusting_ours, listener.address)
    assert f"the certificate of {listener.address} was refused" in said
    assert f"an authority in {ours.ca}" in said


def test_a_dialer_of_another_authority_is_refused_with_the_reason(
    ours: Authority, theirs: Authority
) -> None:
    stranger = theirs.issue("dialer")
    with echo(ours.files("listener")) as listener:
        files = TlsFiles(ca=ours.ca, cert_and_key=stranger, server_name="localhost")
        said = refusal(files, listener.address)
    assert f"{listener.address} refused the certificate in {stranger}" in said


@pytest.mark.parametrize("linger_s", [None, 0], ids=["closed", "reset"])
def test_a_listener_that_closes_after_the_certificate_has_refused_it(
    ours: Authority, linger_s: int | None
) -> None:
    files = ours.files("dialer")
    with (
        Hangup(ours.files("listener"), linger_s) as address,
        pytest.raises(AuthError) as caught,
    ):
        files.check(address, timeout_s=10.0)
    assert f"{address} refused the certificate in {files.cert_and_key}" in str(caught.value)


def test_checking_valid_certificates_raises_nothing(ours: Authority) -> None:
    with echo(ours.files("listener")) as listener:
        ours.files("dialer").check(listener.address, timeout_s=10.0)


def test_a_listener_without_tls_and_one_that_refuses_raise_different_errors(
    ours: Authority,
) -> None:
    plain = SocketTransport().listen(
        "tcp://127.0.0.1:0",
        replying_with(lambda raw, _: bytes(raw)),
        on_disconnect=lambda _: None,
        limits=unlimited(MAX_BYTES),
    )
    try:
        with pytest.raises(TransportError, match="does not speak TLS") as caught:
            make_requests(ours.files("dialer"), f"tls+{plain.address}")
    finally:
        plain.close()
    assert not isinstance(caught.value, AuthError)


def test_a_certificate_for_another_name_is_refused(ours: Authority) -> None:
    with echo(ours.files("listener", host="elsewhere")) as listener:
        said = refusal(ours.files("dialer"), listener.address)
    assert "Hostname mismatch" in said
    assert "valid for the name 'localhost'" in said


def test_dialing_without_certificates_raises_with_the_remedy(ours: Authority) -> None:
    with echo(ours.files("listener")) as listener, pytest.raises(TransportError, match="TlsFiles"):
        SocketTransport().dial(
            listener.address, connect_timeout_s=1, reply_timeout_s=1, max_frame_bytes=MAX_BYTES
        )


def test_a_tls_listener_sends_nothing_to_a_plain_tcp_dialer(ours: Authority) -> None:
    with echo(ours.files("listener")) as listener:
        plain = listener.address.removeprefix("tls+")
        channel = SocketTransport().dial(
            plain, connect_timeout_s=5, reply_timeout_s=5, max_frame_bytes=MAX_BYTES
        )
        with (
            contextlib.closing(channel),
            pytest.raises(TransportError, match="closed the connection"),
        ):
            channel.request(b"hello")


def test_an_address_without_a_listener_is_not_a_certificate_error(ours: Authority) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tls+tcp://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TransportError, match="refused") as caught:
            make_requests(ours.files("dialer"), address, connect_timeout_s=0.1)
        assert not isinstance(caught.value, AuthError)


def test_dialing_a_silent_listener_fails_at_the_deadline(ours: Authority) -> None:
    files = ours.files("dialer")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TransportError, match="no connection within 1 s"):
            make_requests(
                files, f"tls+tcp://127.0.0.1:{silent.getsockname()[1]}", connect_timeout_s=1.0
            )


@pytest.mark.parametrize("missing", ["ca", "cert_and_key"])
def test_a_missing_file_is_named(ours: Authority, missing: str) -> None:
    names = {"ca": ours.ca, "cert_and_key": ours.issue("dialer"), missing: "/nowhere.pem"}
    with (
        pytest.raises(TransportError, match=r"'/nowhere\.pem' does not exist"),
        echo(TlsFiles(**names, server_name="localhost")),
    ):
        pass


def test_a_file_without_a_certificate_is_named(ours: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    files = TlsFiles(ca=ours.ca, cert_and_key=str(empty), server_name="localhost")
    with pytest.raises(TransportError, match=r"empty\.pem"), echo(files):
        pass


def test_events_travel_between_routers_over_tls(ours: Authority) -> None:
    got = Inbox()
    with (
        Router(
            listen=ANYWHERE, key=KEY, transport=SocketTransport(tls=ours.files("learner"))
        ) as learner,
        Router(
            node_id=1,
            dial=[learner.address],
            key=KEY,
            transport=SocketTransport(tls=ours.files("collector")),
        ) as collector,
    ):
        learner.attach(got.deliver)
        learner.subscribe("numbers", active=True)
        collector.wait_for_peers(1, timeout_s=10.0, events=["numbers"])
        for number in range(200):
            collector.emit(Event("numbers"), (number,), {})
        got.wait(200)
    assert got.numbers == list(range(200))


def test_a_router_with_an_untrusted_certificate_fails_at_its_start_timeout(
    ours: Authority, theirs: Authority
) -> None:
    with (
        Router(
            listen=ANYWHERE, key=KEY, transport=SocketTransport(tls=ours.files("learner"))
        ) as learner,
        Router(
            node_id=1,
            dial=[learner.address],
            key=KEY,
            transport=SocketTransport(tls=theirs.files("collector")),
            start_timeout_s=0.5,
        ) as collector,
        pytest.raises(AuthError, match="must be signed by an authority"),
    ):
        collector.wait_for_peers(1, timeout_s=20.0)


class Hangup:
    """A listener that performs the TLS handshake and closes the connection without an alert."""

    def __init__(self, files: TlsFiles, linger_s: int | None) -> None:
        self._linger_s = linger_s
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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
        with self._context.wrap_socket(plain, server_side=True) as secured:
            if self._linger_s is not None:
                linger = struct.pack("ii", 1, self._linger_s)
                secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class Inbox:
    """Records what a router delivers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.numbers: list[int] = []

    def deliver(self, name: str, args: tuple[int, ...], kwargs: object) -> None:
        if name == "numbers":
            with self.changed:
                self.numbers += args
                self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.numbers) >= count, 10.0)


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


def test_bytes_that_are_already_decrypted_are_read_without_waiting_for_more(
    ours: Authority,
) -> None:
    """The last bytes of a record are left when the connection has had its turn."""
    fragment = HEAD.pack(b"DMWU", 1, 1000, 1, 20_000)
    records = [
        fragment + bytes(500),
        *[bytes(500) + fragment + bytes(500)] * 7,
        bytes(500) + framed(1, 2, b"hello"),
    ]
    with (
        echo(ours.files("listener")) as listener,
        socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2]))) as plain,
    ):
        plain.settimeout(10.0)
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        secured = (
            ours.files("dialer")
            .context(listens=False)
            .wrap_bio(received, sent, server_hostname="localhost")
        )
        got = b""
        while len(got) < 2 * HEAD.size + 5:
            try:
                secured.do_handshake()
                while records:
                    secured.write(records.pop(0))
                plain.sendall(sent.read())
                got += secured.read(1000)
            except ssl.SSLWantReadError:
                plain.sendall(sent.read())
                received.write(plain.recv(1 << 16))
    assert got.endswith(b"hello")
