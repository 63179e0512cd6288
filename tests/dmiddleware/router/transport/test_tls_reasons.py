"""Why a TLS connection fails, on both sides."""

from __future__ import annotations

import contextlib
import queue
from pathlib import Path

import pytest

from dmiddleware.errors import AuthError, RouterError, TransportError
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.transport.tls import TlsFiles
from tests.dmiddleware.router.certificates import Authority

DEADLINE_S = 10.0


def outcomes(
    listens: TlsFiles, dials: TlsFiles
) -> tuple[int | RouterError, int | RouterError | None]:
    """Return the first outcomes of a dialer and of a listener, which both send and receive.

    The dialer closes its connection as soon as it fails, as the router does.
    """
    accepted: list[Stream] = []
    at_dialer: queue.Queue[int | RouterError] = queue.Queue()
    at_listener: queue.Queue[int | RouterError] = queue.Queue()

    def accept(stream: Stream) -> float:
        accepted.append(stream)
        stream.send([b"welcome"], lambda error: None)
        stream.receive([memoryview(bytearray(100))], at_listener.put)
        return 0.0

    with contextlib.ExitStack() as stack:
        listener = NngStreamTransport(tls=listens).listen("tls+tcp://127.0.0.1:0", accept)

        def close_all() -> None:
            for stream in accepted:
                stream.close()

        stack.callback(close_all)
        stack.callback(listener.close)
        dialed = NngStreamTransport(tls=dials).dial(listener.address, timeout_s=DEADLINE_S)
        stack.callback(dialed.close)
        dialed.receive([memoryview(bytearray(100))], at_dialer.put)
        dialed.send([b"hello"], lambda error: None)
        first = at_dialer.get(timeout=DEADLINE_S)
        if not isinstance(first, int):
            dialed.close()
        return first, at_listener.get(timeout=DEADLINE_S)


# What arrives after a connection was closed makes the system reset it, and drop what it has sent.
@pytest.mark.parametrize("number", range(10))
def test_both_sides_know_why_the_dialer_refuses_the_certificate_of_the_listener(
    tmp_path: Path, number: int
) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    at_dialer, at_listener = outcomes(ours.files("listener"), theirs.files("dialer"))
    assert isinstance(at_dialer, AuthError)
    assert "the certificate of tls+tcp://127.0.0.1:" in str(at_dialer)
    assert "self-signed certificate in certificate chain" in str(at_dialer)
    assert isinstance(at_listener, AuthError)
    assert "a peer that dialed tls+tcp://127.0.0.1:" in str(at_listener)
    assert "refused the certificate in" in str(at_listener)
    assert "unknown ca" in str(at_listener)


@pytest.mark.parametrize("number", range(10))
def test_both_sides_know_why_the_listener_refuses_the_certificate_of_the_dialer(
    tmp_path: Path, number: int
) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    stranger = TlsFiles(
        ca=ours.ca, cert_and_key=theirs.files("dialer").cert_and_key, server_name="localhost"
    )
    at_dialer, at_listener = outcomes(ours.files("listener"), stranger)
    assert isinstance(at_dialer, AuthError)
    assert f"refused the certificate in {stranger.cert_and_key}: unknown ca" in str(at_dialer)
    assert isinstance(at_listener, AuthError)
    assert "the certificate of a peer that dialed" in str(at_listener)
    assert f"signed by an authority in {ours.ca}" in str(at_listener)


def test_trusted_certificates_connect(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    assert outcomes(ours.files("listener"), ours.files("dialer")) == (
        len(b"welcome"),
        len(b"hello"),
    )


@pytest.mark.parametrize("side", ["listener", "dialer"])
def test_a_certificate_for_another_host_is_refused_by_the_dialer(tmp_path: Path, side: str) -> None:
    ours = Authority(tmp_path, "ours")
    files = {
        name: ours.files(name, host="elsewhere" if name == side else "localhost")
        for name in ("listener", "dialer")
    }
    at_dialer, at_listener = outcomes(files["listener"], files["dialer"])
    # The names in the certificates of dialers do not matter: they have no address.
    if side == "listener":
        assert isinstance(at_dialer, AuthError) and isinstance(at_listener, AuthError)
    else:
        assert (at_dialer, at_listener) == (len(b"welcome"), len(b"hello"))


@pytest.mark.parametrize("name", ["", ".localhost"])
def test_a_name_that_no_certificate_can_have_is_refused(tmp_path: Path, name: str) -> None:
    files = Authority(tmp_path, "ours").files("dialer", expects=name)
    with pytest.raises(TransportError, match="server_name"):
        NngStreamTransport(tls=files).dial("tls+tcp://127.0.0.1:1", timeout_s=DEADLINE_S)
