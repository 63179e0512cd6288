"""Streams of nng: what they cost, what strangers can do, and how they end."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmiddleware.errors import AuthError, RouterStateError, TransportError
from dmiddleware.router.transport import ipc_path
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Listener, Stream
from dmiddleware.router.transport.tls import TlsFiles
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.process_resources import n_descriptors, nothing_left
from tests.dmiddleware.router.stream_ends import DEADLINE_S, End, StreamEndpoints, accept, start_nng
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module", autouse=True)
def nng_runs() -> None:
    """Let nng open the descriptors that it keeps."""
    start_nng()


@pytest.fixture
def ipc(address: str) -> Iterator[StreamEndpoints]:
    with nothing_left():
        yield StreamEndpoints(address, NngStreamTransport(), NngStreamTransport())


@pytest.fixture
def tcp() -> Iterator[StreamEndpoints]:
    with nothing_left():
        yield StreamEndpoints("tcp://127.0.0.1:0", NngStreamTransport(), NngStreamTransport())


def path_of(endpoints: StreamEndpoints) -> Path:
    return Path(endpoints.address.removeprefix("ipc://"))


def listen(endpoints: StreamEndpoints) -> contextlib.closing[Listener]:
    return contextlib.closing(endpoints.listens.listen(endpoints.address, accept))


def test_a_regular_file_at_the_path_is_kept(ipc: StreamEndpoints) -> None:
    path_of(ipc).write_text("precious")
    with pytest.raises(TransportError, match="not a socket"):
        listen(ipc)
    assert path_of(ipc).read_text() == "precious"
    assert [entry.name for entry in path_of(ipc).parent.iterdir()] == [path_of(ipc).name]


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(ipc: StreamEndpoints) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path_of(ipc)))
    with (
        ipc.listening(lambda stream: stream.close()),
        pytest.raises(TransportError, match="already listening"),
    ):
        listen(ipc)
    assert not path_of(ipc).exists()


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_only_this_user_can_connect_whatever_the_umask(ipc: StreamEndpoints, umask: int) -> None:
    before = os.umask(umask)
    try:
        with listen(ipc):
            assert stat.S_IMODE(path_of(ipc).stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_closing_keeps_the_socket_of_another_listener(ipc: StreamEndpoints) -> None:
    with listen(ipc):
        path_of(ipc).unlink()
        with ipc.listening(lambda stream: None) as other:
            pass
        with socket.socket(socket.AF_UNIX) as foreign:
            foreign.bind(str(path_of(ipc)))
            other.close()
    assert path_of(ipc).exists()


def test_listening_does_not_wait_for_the_lock_of_another_process(
    ipc: StreamEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_path, "_LOCK_S", 0.05)
    folder = os.open(path_of(ipc).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(TransportError, match="held the lock"):
            listen(ipc)
    finally:
        os.close(folder)
    assert not list(path_of(ipc).parent.iterdir())


@pytest.mark.parametrize(
    "address",
    ["ipc://relative", "ipc:///" + 120 * "x", "ipc:///tmp/..", "ws://127.0.0.1:0", "tcp://nowhere"],
)
def test_an_address_that_is_not_valid_is_refused(address: str) -> None:
    with nothing_left(), pytest.raises(TransportError, match="could not listen"):
        NngStreamTransport().listen(address, accept)


@pytest.mark.parametrize("address", ["ipc://relative", "tcp://nowhere", "http://127.0.0.1:1"])
def test_an_address_that_is_not_valid_is_not_dialed(address: str) -> None:
    with nothing_left(), pytest.raises(TransportError, match="could not dial"):
        NngStreamTransport().dial(address, timeout_s=1.0)


@pytest.mark.parametrize("host", ["nowhere.invalid", "no..where"])
def test_a_host_name_that_is_not_known_fails_with_the_address(host: str) -> None:
    with nothing_left():
        stream = NngStreamTransport().dial(f"tcp://{host}:1", timeout_s=DEADLINE_S)
        assert f"tcp://{host}:1" in str(End(stream).ended())
        stream.close()


@pytest.mark.parametrize("host", ["localhost", "[::1]", "0.0.0.0"])
def test_hosts_may_be_names_or_addresses(host: str) -> None:
    endpoints = StreamEndpoints(f"tcp://{host}:0", NngStreamTransport(), NngStreamTransport())
    with nothing_left(), endpoints.listening(End) as listener:
        dialer = End(endpoints.dial(listener.address.replace("0.0.0.0", "127.0.0.1")))
        dialer.send(b"hello")


def race_to_listen(endpoints: StreamEndpoints) -> list[Listener]:
    """Listen on the address from four threads at once; return the listeners."""
    listeners: list[Listener] = []
    start = threading.Barrier(4)

    def try_to_listen() -> None:
        start.wait(DEADLINE_S)
        with contextlib.suppress(TransportError):
            listeners.append(
                endpoints.listens.listen(endpoints.address, lambda stream: stream.close())
            )

    threads = [threading.Thread(target=try_to_listen) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return listeners


def test_one_of_several_listeners_that_start_at_once_gets_the_path(ipc: StreamEndpoints) -> None:
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path_of(ipc)))
        (listener,) = race_to_listen(ipc)
        dialer = End(ipc.dials.dial(ipc.address, timeout_s=DEADLINE_S))
        dialer.ended()
        dialer.stream.close()
        listener.close()
        assert not path_of(ipc).exists()


def test_tls_without_certificates_is_refused(tmp_path: Path) -> None:
    for files in (None, TlsFiles(ca=f"{tmp_path}/no", cert_and_key="no", server_name="x")):
        transport = NngStreamTransport(tls=files)
        with pytest.raises(TransportError, match="certificate"):
            transport.listen("tls+tcp://127.0.0.1:0", accept)
        with pytest.raises(TransportError, match="certificate"):
            transport.dial("tls+tcp://127.0.0.1:1", timeout_s=1.0)


def test_connections_that_nobody_accepts_cost_no_descriptor(ipc: StreamEndpoints) -> None:
    is_accepting, may_accept = threading.Event(), threading.Event()

    def hold_up(stream: Stream) -> None:
        is_accepting.set()
        assert may_accept.wait(DEADLINE_S)
        stream.close()

    with ipc.listening(hold_up), contextlib.ExitStack() as stack:
        first = End(ipc.dial(ipc.address))
        assert is_accepting.wait(DEADLINE_S)
        n_before = n_descriptors()
        for _ in range(400):
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                made.connect(str(path_of(ipc)))
        assert n_descriptors() == n_before + 400
        may_accept.set()
        first.ended()


def test_a_thousand_strangers_leave_nothing(ipc: StreamEndpoints) -> None:
    with ipc.listening(lambda stream: stream.close()):
        for number in range(1000):
            with socket.socket(socket.AF_UNIX) as stranger:
                # This waits while the system's queue is full.
                stranger.connect(str(path_of(ipc)))
                if number % 2:
                    with contextlib.suppress(OSError):
                        stranger.sendall(b"garbage")


def test_connections_are_accepted_again_once_there_are_descriptors(
    ipc: StreamEndpoints, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = threading.Semaphore(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        ipc.listening(lambda stream: accepted.release()),
        socket.socket(socket.AF_UNIX) as dialer,
        caplog.at_level(logging.CRITICAL),
    ):
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        fillers = [os.open(os.devnull, os.O_RDONLY)]
        while fillers[-1] < highest:
            fillers.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, hard))
        try:
            dialer.connect(str(path_of(ipc)))
            assert not accepted.acquire(timeout=0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        assert accepted.acquire(timeout=DEADLINE_S)


def test_peers_have_no_threads(ipc: StreamEndpoints) -> None:
    accepted: list[End] = []
    with ipc.listening(lambda stream: accepted.append(End(stream))):
        n_threads = len(list(Path("/proc/self/task").iterdir()))
        dialers = [End(ipc.dial(ipc.address)) for _ in range(100)]
        for dialer in dialers:
            dialer.send(b"hello")
        wait_until(lambda: len(accepted) == 100, "100 connections")
        for end in accepted:
            assert end.received(5) == b"hello"
        # The dialing transport has one.
        assert len(list(Path("/proc/self/task").iterdir())) <= n_threads + 1


def test_short_frames_do_not_wait_until_earlier_ones_are_acknowledged(tcp: StreamEndpoints) -> None:
    with tcp.connected():
        options = [
            opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for opened in connected_tcp_sockets()
        ]
        assert len(options) == 2 and all(options)


def connected_tcp_sockets() -> Iterator[socket.socket]:
    """Yield the connected TCP sockets of this process."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if not entry.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as opened:
                if opened.family == socket.AF_INET and opened.getpeername():
                    yield opened


def test_much_that_arrives_while_it_is_received_keeps_its_order(ipc: StreamEndpoints) -> None:
    n_bytes = 8 << 20
    content = bytes(range(251)) * (n_bytes // 251)
    with ipc.connected(buffer_bytes=1 << 18) as (dialer, accepted):
        for start in range(0, len(content), 1 << 20):
            dialer.send(content[start : start + (1 << 20)])
        assert accepted.received(len(content)) == content
        dialer.send(b"one more")
        assert accepted.received(len(content) + 8)[-8:] == b"one more"


def test_a_dial_that_nobody_answers_fails_at_its_deadline(tcp: StreamEndpoints) -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            made = stack.enter_context(socket.socket())
            made.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                made.connect(full.getsockname())
        ends = []
        # nng may report a connection too early, which the deadline of the handshake ends.
        for _ in range(20):
            stream = tcp.dial(f"tcp://127.0.0.1:{full.getsockname()[1]}", timeout_s=0.2)
            stack.callback(stream.close)
            ends.append(End(stream))
        wait_until(lambda: any(end.error for end in ends), "the deadline of a dial")
        errors = [str(end.error) for end in ends if end.error is not None]
        assert all("within 0.2 s" in error for error in errors)


def test_a_listener_may_listen_on_the_port_again(tcp: StreamEndpoints) -> None:
    with tcp.connected() as (dialer, _):
        address = dialer.stream._address  # type: ignore[attr-defined]
    for _ in range(5):
        with contextlib.closing(tcp.listens.listen(address, accept)) as listener:
            assert listener.address == address


@pytest.mark.parametrize("error", [ZeroDivisionError(), TransportError("full"), OSError()])
def test_an_on_connection_that_raises_closes_only_its_connection(
    ipc: StreamEndpoints, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(stream: Stream) -> None:
        raise error

    with ipc.listening(fail), caplog.at_level(logging.CRITICAL):
        for _ in range(3):
            End(ipc.dial(ipc.address)).ended()


class TestTls:
    @pytest.fixture
    def tls(self, authority: Authority) -> Iterator[StreamEndpoints]:
        one, other = (NngStreamTransport(tls=authority.files(name)) for name in ("one", "other"))
        with nothing_left():
            yield StreamEndpoints("tls+tcp://127.0.0.1:0", one, other)

    def test_a_dialer_with_a_certificate_of_others_is_refused(
        self, tls: StreamEndpoints, tmp_path: Path
    ) -> None:
        theirs = Authority(tmp_path, "theirs").files("stranger")
        accepted: list[End] = []
        with tls.listening(lambda stream: accepted.append(End(stream))) as listener:
            stranger = NngStreamTransport(tls=theirs).dial(listener.address, timeout_s=DEADLINE_S)
            with contextlib.closing(stranger):
                assert isinstance(End(stranger).ended(), AuthError)
                wait_until(lambda: bool(accepted), "the connection")
                accepted[0].ended()
            dialer = End(tls.dial(listener.address))
            dialer.send(b"hello")
            # The stranger has dialed once more, to find out why it was refused.
            wait_until(
                lambda: [end.received_now() for end in accepted].count(b"hello") == 1,
                "the message at one listener",
            )

    def test_a_listener_of_another_name_is_refused(
        self, tls: StreamEndpoints, authority: Authority
    ) -> None:
        expecting = NngStreamTransport(tls=authority.files("picky", expects="elsewhere"))
        with tls.listening(End) as listener:
            stream = expecting.dial(listener.address, timeout_s=DEADLINE_S)
            with contextlib.closing(stream):
                assert isinstance(End(stream).ended(), AuthError)

    def test_strangers_that_say_nothing_do_not_hold_up_others(self, tls: StreamEndpoints) -> None:
        accepted: list[End] = []
        with (
            tls.listening(lambda stream: accepted.append(End(stream))) as listener,
            contextlib.ExitStack() as stack,
        ):
            target = "127.0.0.1", int(listener.address.rpartition(":")[2])
            for number in range(20):
                stranger = stack.enter_context(socket.create_connection(target, DEADLINE_S))
                if number % 2:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            dialer = End(tls.dial(listener.address))
            dialer.send(b"hello")
            wait_until(
                lambda: any(end.received_now() == b"hello" for end in accepted),
                "the message at a listener",
            )


@pytest.mark.process
class TestProcesses:
    @pytest.mark.parametrize(
        "count", [400, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
    )
    @pytest.mark.parametrize("scheme", ["ipc", "tcp", "tls"])
    def test_closing_in_any_order_loses_no_callback(
        self, scheme: str, count: int, address: str, authority: Authority
    ) -> None:
        arguments = [address if scheme == "ipc" else "tcp://127.0.0.1:0", str(count)]
        if scheme == "tls":
            files = authority.files("one")
            arguments = ["tls+tcp://127.0.0.1:0", str(count)]
            arguments += [files.ca, files.cert_and_key, files.server_name]
        assert self.run("stream_closing_program", *arguments) == f"{count}\n"

    @pytest.mark.parametrize("scheme", ["ipc", "tcp"])
    def test_a_program_may_leave_with_open_connections(self, scheme: str, address: str) -> None:
        for _ in range(3):
            where = address if scheme == "ipc" else "tcp://127.0.0.1:0"
            assert self.run("stream_exit_program", where) == "leaving\n"

    def test_a_forked_process_gets_an_error(self, ipc: StreamEndpoints) -> None:
        with ipc.connected() as (dialer, accepted):
            child = os.fork()
            if not child:
                try:
                    signal.alarm(int(DEADLINE_S))
                    n_errors = 0
                    for attempt in (
                        lambda: ipc.dial(ipc.address),
                        lambda: listen(ipc),
                        lambda: dialer.stream.send([b"hello"], dialer.on_sent),
                        lambda: End(accepted.stream),
                    ):
                        with contextlib.suppress(RouterStateError):
                            attempt()
                            continue
                        n_errors += 1
                    dialer.stream.close()
                    os._exit(n_errors)
                except BaseException:  # noqa: BLE001 (nothing of the test must run here)
                    os._exit(99)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 4
            dialer.send(b"hello")
            assert accepted.received(5) == b"hello"

    def run(self, program: str, *arguments: str) -> str:
        command = [sys.executable, "-m", f"tests.dmiddleware.router.{program}", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
        assert not done.returncode, done.stderr
        assert not done.stderr
        return done.stdout
