"""The transports that the tests of this folder run over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.shared_memory import SharedMemory
from dmiddleware.testing.stream_network import StreamNetwork
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.endpoints import RouterEndpoints
from tests.dmiddleware.router.process_resources import nothing_left
from tests.dmiddleware.router.stream_ends import StreamEndpoints, start_nng

STREAMS = ("memory", "ipc", "tcp", "tls")
ROUTERS = ("memory", "ipc", "tcp", "tls", "shared memory")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/0.sock"


@pytest.fixture(params=STREAMS)
def endpoints(request: pytest.FixtureRequest, address: str) -> Iterator[StreamEndpoints]:
    """Two transports, which leave no thread and no descriptor."""
    kind = request.param
    if kind == "memory":
        network = StreamNetwork()
        found = StreamEndpoints("memory://a", network.transport("a"), network.transport("b"))
    elif kind == "tls":
        authority: Authority = request.getfixturevalue("authority")
        found = StreamEndpoints(
            "tls+tcp://127.0.0.1:0",
            NngStreamTransport(tls=authority.files("one")),
            NngStreamTransport(tls=authority.files("other")),
        )
    else:
        found = StreamEndpoints(
            "tcp://127.0.0.1:0" if kind == "tcp" else address,
            NngStreamTransport(),
            NngStreamTransport(),
        )
    start_nng()
    with nothing_left():
        yield found


@pytest.fixture(params=ROUTERS)
def router_endpoints(request: pytest.FixtureRequest, address: str) -> RouterEndpoints:
    """Return what two routers need to be connected."""
    kind = request.param
    one: dict[str, Any]
    other: dict[str, Any]
    if kind == "memory":
        network = StreamNetwork()
        one, other = ({"transport": network.transport(name)} for name in ("a", "b"))
        return RouterEndpoints("memory://a", one, other)
    if kind == "tls":
        authority: Authority = request.getfixturevalue("authority")
        one, other = (
            {"transport": NngStreamTransport(tls=authority.files(name))}
            for name in ("one", "other")
        )
        return RouterEndpoints("tls+tcp://127.0.0.1:0", one, other)
    if kind == "shared memory":
        folder: Path = request.getfixturevalue("folder")
        one, other = ({"shared_memory": SharedMemory(folder, min_bytes=1)} for _ in range(2))
        return RouterEndpoints(address, one, other)
    return RouterEndpoints(address if kind == "ipc" else "tcp://127.0.0.1:0", {}, {})
