"""The transport over Unix-domain sockets, with real sockets and processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.interface import Reply
from dmiddleware.router.transport.socket_channel import SocketChannel
from dmiddleware.router.transport.socket_listener import SocketListener
from dmiddleware.router.transport.sockets import SocketTransport
from dmiddleware.router.wire.byte_pieces import BytePieces
from tests.dmiddleware.router.endpoints import NEVER_S, BackgroundRequest, unlimited
from tests.dmiddleware.router.request_handlers import echo, in_threads
from tests.dmiddleware.router.unix_sockets import (
    DEADLINE_S,
    MB,
    BlockingHandler,
    Outcome,
    OutcomeRecorder,
    bare_dial,
    bare_listen,
    comes_true,
    dial,
    listen,
    threads,
)

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_concurrent_threads_get_their_own_replies(tmp_path: Path) -> None:
    wrong: list[object] = []

    def make_requests(channel: SocketChannel, asker: int) -> None:
        sizes = random.Random(asker)
        for number in range(100):
            content = (b"%d %d " % (asker, number)) * sizes.choice([1, 10, 1000, 4000, 30_000])
            answer = bytes(channel.request(content))
            if answer != content:
                wrong.append((asker, number, len(answer)))

    with listen(tmp_path), dial(tmp_path) as channel:
        in_threads(make_requests, [(channel, asker) for asker in range(6)])
    assert wrong == []


def test_requests_are_served_in_order(tmp_path: Path) -> None:
    served: list[bytes] = []

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        served.append(bytes(raw[:4]))
        reply(raw[:4].tobytes())

    names = [b"%4d" % number for number in range(600)]
    replies = OutcomeRecorder()
    with listen(tmp_path, serve), dial(tmp_path) as channel:
        for number, name in enumerate(names):
            # Some replies exceed the socket's buffer, so the writer thread sends the rest.
            channel.send(
                BytePieces([name, bytes(MB if number % 20 == 0 else 10)]), replies, timeout_s=None
            )
        assert replies.wait(len(names)) == names
    assert served == names


def test_a_late_reply_is_ignored(tmp_path: Path) -> None:
    held, replies = BlockingHandler(), OutcomeRecorder()
    with listen(tmp_path, held), dial(tmp_path, reply_timeout_s=0.2) as channel:
        channel.send(b"late", replies, timeout_s=0.2)
        with pytest.raises(TransportError, match=r"within 0\.2 s"):
            channel.request(b"late")
        error = replies.wait(1)[0]
        assert isinstance(error, TransportError)
        assert "within 0.2 s" in str(error)
        held.release.set()
        for number in range(5):
            assert channel.request(b"%d" % number) == b"%d" % number
        assert len(replies.got) == 1
    assert held.served[:2] == [b"late", b"late"]


def test_a_reply_may_be_sent_later_and_counts_once(tmp_path: Path) -> None:
    deferred: list[Reply] = []

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        deferred.append(reply)

    replies = OutcomeRecorder()
    with listen(tmp_path, serve):
        with dial(tmp_path) as channel:
            for _ in range(3):
                channel.send(b"?", replies, timeout_s=None)
            assert comes_true(lambda: len(deferred) == 3)
            for number in (2, 0, 1, 0):
                deferred[number](b"%d" % number)
                deferred[number](None)
            assert replies.wait(3) == [b"2", b"0", b"1"]
            channel.send(b"?", replies, timeout_s=None)
            assert comes_true(lambda: len(deferred) == 4)
        deferred[3](b"too late")


def test_replying_none_closes_only_that_connection(tmp_path: Path) -> None:
    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        reply(None if raw == b"bad" else b"ok")

    with listen(tmp_path, serve), dial(tmp_path) as good, dial(tmp_path) as bad:
        with pytest.raises(TransportError, match="closed the connection"):
            bad.request(b"bad")
        assert good.request(b"good") == b"ok"


def test_a_failing_request_handler_closes_only_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        if raw == b"bad":
            raise ConnectionResetError("a defect")
        reply(b"ok")

    with listen(tmp_path, serve), dial(tmp_path) as good, dial(tmp_path) as bad:
        with pytest.raises(TransportError):
            bad.request(b"bad")
        assert good.request(b"good") == b"ok"
    assert "handling its request failed" in caplog.text


def test_a_failing_callback_does_not_affect_other_replies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(answer: Outcome) -> None:
        raise KeyError("a defect")

    with listen(tmp_path), dial(tmp_path) as channel:
        channel.send(b"?", fail, timeout_s=None)
        assert channel.request(b"good") == b"good"
    assert "a reply was dropped" in caplog.text


def test_closing_twice_fails_pending_requests_at_once(tmp_path: Path) -> None:
    held, replies = BlockingHandler(), OutcomeRecorder()
    with listen(tmp_path, held), dial(tmp_path, reply_timeout_s=60.0) as channel:
        for _ in range(20):
            channel.send(bytes(MB), replies, timeout_s=None)
        assert held.began.wait(DEADLINE_S)
        channel.close()
        channel.close()
        assert not any(name.startswith(("router-read", "router-write")) for name in threads())
        assert len(replies.got) == 20
        assert all("is closed" in str(answer) for answer in replies.got)
        with pytest.raises(TransportError, match="is closed"):
            channel.request(b"?")
        held.release.set()


def test_sending_on_a_closed_channel_fails_from_another_thread(tmp_path: Path) -> None:
    outcomes: list[tuple[Outcome, int]] = []
    with listen(tmp_path), dial(tmp_path) as channel:
        channel.close()
        channel.send(
            b"?", lambda answer: outcomes.append((answer, threading.get_ident())), timeout_s=None
        )
        assert comes_true(lambda: len(outcomes) == 1)
    assert isinstance(outcomes[0][0], TransportError)
    assert outcomes[0][1] != threading.get_ident()


def test_a_channel_may_be_closed_by_its_own_callback(tmp_path: Path) -> None:
    replies = OutcomeRecorder()
    with listen(tmp_path), dial(tmp_path) as channel:

        def close(answer: Outcome) -> None:
            channel.close()
            replies(answer)

        channel.send(b"?", close, timeout_s=None)
        assert replies.wait(1) == [b"?"]


def test_a_listener_may_be_closed_by_its_own_request_handler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listeners: list[SocketListener] = []

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        listeners[0].close()

    with listen(tmp_path, serve) as listener, dial(tmp_path, reply_timeout_s=NEVER_S) as channel:
        listeners.append(listener)
        assert isinstance(BackgroundRequest(channel, b"?").result(), TransportError)
    assert caplog.text == ""


def test_closing_the_listener_breaks_its_connections_but_loses_no_reply(tmp_path: Path) -> None:
    gone: list[int] = []
    replies = OutcomeRecorder()
    with dial_after_listen(tmp_path, gone) as (listener, channel):
        channel.send(b"replied", replies, timeout_s=None)
        replies.wait(1)
        listener.close()
        listener.close()
        with pytest.raises(TransportError):
            channel.request(b"?")
        assert gone == [1]
    assert replies.got == [b"replied"]
    assert gone == [1]


@contextlib.contextmanager
def dial_after_listen(
    folder: Path, gone: list[int]
) -> Iterator[tuple[SocketListener, SocketChannel]]:
    with listen(folder, on_disconnect=gone.append) as listener, dial(folder) as channel:
        yield listener, channel


PEER = """
import sys, time
from dmiddleware.router.transport.sockets import SocketTransport
from tests.dmiddleware.router.endpoints import unlimited
address = "ipc://" + sys.argv[2] + "/s"
if sys.argv[1] == "listen":
    serve = lambda raw, connection, reply: None
    SocketTransport().listen(address, serve, on_disconnect=print, limits=unlimited(1 << 24))
else:
    channel = SocketTransport().dial(
        address, connect_timeout_s=5, reply_timeout_s=60, max_frame_bytes=1 << 24
    )
    channel.send(b"?", print, timeout_s=None)
print("up", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def peer(what: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PEER, what, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path.cwd()) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


@pytest.mark.process
def test_a_killed_listener_fails_requests_at_once_and_can_be_replaced(
    tmp_path: Path,
) -> None:
    replies = OutcomeRecorder()
    with peer("listen", tmp_path) as process, dial(tmp_path, reply_timeout_s=60.0) as channel:
        with pytest.raises(TransportError, match="another process"), listen(tmp_path):
            pass
        for _ in range(10):
            channel.send(bytes(MB), replies, timeout_s=None)
        process.send_signal(signal.SIGKILL)
        assert all(isinstance(answer, TransportError) for answer in replies.wait(10))
        with pytest.raises(TransportError):
            channel.request(b"?")
    assert Path(tmp_path, "s").exists()
    with listen(tmp_path), dial(tmp_path) as channel:
        assert channel.request(b"again") == b"again"


@pytest.mark.process
def test_the_disconnect_of_a_killed_dialer_is_reported_once(tmp_path: Path) -> None:
    asked: list[int] = []
    gone: list[int] = []

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        asked.append(connection)

    with listen(tmp_path, serve, gone.append), peer("dial", tmp_path) as process:
        assert comes_true(lambda: len(asked) == 1)
        process.send_signal(signal.SIGKILL)
        assert comes_true(lambda: len(gone) == 1)
    assert asked == gone


def test_the_socket_file_is_private_and_removed_on_close(tmp_path: Path) -> None:
    with listen(tmp_path) as listener:
        assert listener.address == f"ipc://{tmp_path}/s"
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        with pytest.raises(TransportError, match="another process"), listen(tmp_path):
            pass
        with dial(tmp_path) as channel:
            assert channel.request(b"still there") == b"still there"
    assert list(tmp_path.iterdir()) == []


def test_a_regular_file_at_the_address_is_kept(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(TransportError, match="not a socket"), listen(tmp_path):
        pass
    assert (tmp_path / "s").read_text() == "precious"


def test_closing_keeps_the_socket_file_of_a_successor(tmp_path: Path) -> None:
    with listen(tmp_path) as first:
        (tmp_path / "s").rename(tmp_path / "away")
        with listen(tmp_path):
            first.close()
            with dial(tmp_path) as channel:
                assert channel.request(b"?") == b"?"


def test_only_one_of_two_listeners_replaces_a_dead_one(tmp_path: Path) -> None:
    with bare_listen(tmp_path):
        pass
    dead = (tmp_path / "s").stat().st_ino
    got: list[contextlib.closing[SocketListener]] = []

    def take() -> None:
        with contextlib.suppress(TransportError):
            got.append(listen(tmp_path))

    takers = [threading.Thread(target=take) for _ in range(8)]
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    for taker in takers:
        taker.start()
    takers[0].join(0.1)
    assert got == []
    assert (tmp_path / "s").stat().st_ino == dead
    os.close(descriptor)
    for taker in takers:
        taker.join(DEADLINE_S)
    assert len(got) == 1
    with got[0], dial(tmp_path) as channel:
        assert channel.request(b"?") == b"?"


@pytest.mark.parametrize(
    ("address", "outcomes"),
    [
        ("ipc:///tmp/" + "x" * 200, "has 205 bytes, but the system allows 107"),
        ("ipc://relative/path", "ipc:///path"),
        ("ipc://\0abstract", "ipc:///path"),
        ("ipc:///tmp/a\0b", "ipc:///path"),
        ("ipc:///no/such/folder/s", "o such file"),
        ("udp://127.0.0.1:5000", "ipc:///path"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(address: str, outcomes: str) -> None:
    transport = SocketTransport()
    with pytest.raises(TransportError, match=outcomes):
        transport.listen(address, echo, on_disconnect=lambda _: None, limits=unlimited(1))
    with pytest.raises(TransportError, match=outcomes):
        transport.dial(address, connect_timeout_s=0.05, reply_timeout_s=1.0, max_frame_bytes=1)


@pytest.mark.usefixtures("leaves_nothing")
def test_dialing_without_descriptors_or_threads_raises_a_transport_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*family: int) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with listen(tmp_path):
        with monkeypatch.context() as patched:
            patched.setattr(
                "dmiddleware.router.transport.socket_addresses.socket.socket", no_socket
            )
            with pytest.raises(TransportError, match="Too many open files"):
                SocketTransport().dial(
                    f"ipc://{tmp_path}/s",
                    connect_timeout_s=0.1,
                    reply_timeout_s=1.0,
                    max_frame_bytes=1,
                )
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(TransportError, match="can't start new thread"):
                dial(tmp_path)
        with dial(tmp_path) as channel:
            assert channel.request(b"?") == b"?"


def test_a_dialer_may_start_first(tmp_path: Path) -> None:
    asking = threading.Event()
    replies: list[bytes] = []

    def make_requests() -> None:
        asking.set()
        with dial(tmp_path) as channel:
            replies.append(bytes(channel.request(b"?")))

    asker = threading.Thread(target=make_requests)
    asker.start()
    assert asking.wait(DEADLINE_S)
    time.sleep(0.05)
    with listen(tmp_path):
        asker.join(DEADLINE_S)
    assert replies == [b"?"]


def test_silent_connections_do_not_block_new_ones(tmp_path: Path) -> None:
    with listen(tmp_path), contextlib.ExitStack() as silent:
        for _ in range(200):
            silent.enter_context(bare_dial(tmp_path))
        with dial(tmp_path) as channel:
            assert channel.request(b"?") == b"?"
