"""The transports that the tests of this folder run over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmiddleware.router.transport.memory import MemoryNetwork
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.transport.redis import RedisTransport
from dmiddleware.router.transport.shared_memory import SharedMemoryTransport
from dmiddleware.router.transport.sockets import SocketTransport
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.endpoints import Endpoints
from tests.dmiddleware.router.redis_server import RedisServer
from tests.dmiddleware.router.unix_sockets import nothing_left

KINDS = (
    *("memory", "ipc", "tcp", "tls", "redis", "shared memory"),
    *("nng ipc", "nng tcp", "nng tls"),
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


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


names = itertools.count()


@pytest.fixture(params=KINDS)
def endpoints(request: pytest.FixtureRequest, address: str) -> Endpoints:
    kind = request.param
    if kind == "memory":
        network = MemoryNetwork()
        return Endpoints("memory://a", network.transport("one"), network.transport("other"))
    make = NngTransport if kind.startswith("nng") else SocketTransport
    if kind.endswith("tls"):
        ours: Authority = request.getfixturevalue("authority")
        one, other = (make(tls=ours.files(name)) for name in ("one", "other"))
        return Endpoints("tls+tcp://127.0.0.1:0", one, other)
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return Endpoints(f"{server.url}/{next(names)}", RedisTransport(), RedisTransport())
    if kind.endswith("tcp"):
        return Endpoints("tcp://127.0.0.1:0", make(), make())
    if kind.endswith("ipc"):
        return Endpoints(address, make(), make())
    folder: Path = request.getfixturevalue("folder")
    sharing = [
        SharedMemoryTransport(SocketTransport(), directory=folder, min_bytes=1) for _ in range(2)
    ]
    return Endpoints(address, *sharing)
