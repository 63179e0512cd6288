"""Why a TLS connection fails, which nng itself does not report."""

from __future__ import annotations

import contextlib
import queue
from pathlib import Path

import pytest

from dmiddleware.errors import AuthError, RouterError
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.transport.tls import TlsFiles
from tests.dmiddleware.router.certificates import Authority

DEADLINE_S = 10.0


def outcome(listens: TlsFiles, dials: TlsFiles) -> int | RouterError:
    """Return the first outcome of a dialer that sends and receives."""
    accepted: list[Stream] = []
    outcomes: queue.Queue[int | RouterError] = queue.Queue()

    def accept(stream: Stream) -> float:
        accepted.append(stream)
        stream.send([b"welcome"], lambda error: None)
        stream.receive([memoryview(bytearray(100))], lambda outcome: None)
        return 0.0

    with contextlib.ExitStack() as stack:
        listener = NngStreamTransport(tls=listens).listen("tls+tcp://127.0.0.1:0", accept)
        stack.callback(lambda: [stream.close() for stream in accepted])
        stack.callback(listener.close)
        dialed = NngStreamTransport(tls=dials).dial(listener.address, timeout_s=DEADLINE_S)
        stack.callback(dialed.close)
        dialed.receive([memoryview(bytearray(100))], outcomes.put)
        dialed.send([b"hello"], lambda error: None)
        return outcomes.get(timeout=DEADLINE_S)


def test_a_dialer_is_told_why_it_refuses_the_certificate_of_the_listener(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    error = outcome(ours.files("listener"), theirs.files("dialer"))
    assert isinstance(error, AuthError)
    assert "the certificate of tls+tcp://127.0.0.1:" in str(error)
    assert "unable to get local issuer certificate" in str(error)


def test_a_dialer_is_told_that_the_listener_refuses_its_certificate(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    stranger = TlsFiles(
        ca=ours.ca, cert_and_key=theirs.files("dialer").cert_and_key, server_name="localhost"
    )
    error = outcome(ours.files("listener"), stranger)
    assert isinstance(error, AuthError)
    assert "refused the certificate in" in str(error)


def test_trusted_certificates_connect(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    assert outcome(ours.files("listener"), ours.files("dialer")) == len(b"welcome")


@pytest.mark.parametrize("side", ["listener", "dialer"])
def test_a_certificate_for_another_host_is_refused_by_the_dialer(tmp_path: Path, side: str) -> None:
    ours = Authority(tmp_path, "ours")
    files = {
        name: ours.files(name, host="elsewhere" if name == side else "localhost")
        for name in ("listener", "dialer")
    }
    found = outcome(files["listener"], files["dialer"])
    # The names in the certificates of dialers do not matter: they have no address.
    assert isinstance(found, AuthError) if side == "listener" else found == len(b"welcome")
