"""The kinds of connections that the tests of this folder run over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.shared_memory import SharedMemory
from dmiddleware.testing.stream_network import StreamNetwork
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.endpoints import Endpoints
from tests.dmiddleware.router.unix_sockets import nothing_left

KINDS = ("memory", "ipc", "tcp", "tls", "shared memory")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Check that a test over Unix-domain sockets leaves no thread and no descriptor."""
    with nothing_left():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/0.sock"


@pytest.fixture(params=KINDS)
def endpoints(request: pytest.FixtureRequest, address: str) -> Endpoints:
    kind = request.param
    if kind == "memory":
        network = StreamNetwork()
        one, other = ({"transport": network.transport(name)} for name in ("a", "b"))
        return Endpoints("memory://a", one, other)
    if kind == "tls":
        ours: Authority = request.getfixturevalue("authority")
        one, other = (
            {"transport": NngStreamTransport(tls=ours.files(name))} for name in ("one", "other")
        )
        return Endpoints("tls+tcp://127.0.0.1:0", one, other)
    if kind == "shared memory":
        folder: Path = request.getfixturevalue("folder")
        sharing = [{"shared_memory": SharedMemory(folder, min_bytes=1)} for _ in range(2)]
        return Endpoints(address, *sharing)
    return Endpoints(address if kind == "ipc" else "tcp://127.0.0.1:0", {}, {})
