"""Sockets that listen on an address, or are connected to one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.callbacks import no_connection

__all__ = ["IPC", "TCP", "TLS", "ListeningSocket", "connected_socket", "tuned"]

IPC: Final = "ipc://"
TCP: Final = "tcp://"
TLS: Final = "tls+tcp://"

_MAX_PATH: Final = 107
_QUEUE: Final = 512
_DIAL_EVERY_S: Final = 0.02

_SOCKET_BYTES: Final = 2 << 20
"""The requested size of a local socket's send buffer; the system may allow less."""

_UNSENT_BYTES: Final = 512 * 1024
"""How many bytes the system may hold that are not on the network yet: urgent frames follow them."""

_NOTSENT_LOWAT: Final = 25
"""Linux's TCP_NOTSENT_LOWAT."""


class ListeningSocket:
    """A socket that listens on an address, without blocking.

    Raises:
        TransportError: if the address is not valid, or cannot be listened on.
    """

    def __init__(self, address: str) -> None:
        self._path: Path | None = None
        self._file = (0, 0)
        try:
            if address.startswith(IPC):
                self._path = _path("listen on", address)
                self.socket, self._file = _listening_on_path(self._path)
                self.address = address
            else:
                host, port = _host_and_port("listen on", address)
                self.socket = _listening_on_port(host, port)
                self.address = f"{address.rpartition(':')[0]}:{self.socket.getsockname()[1]}"
        except OSError as error:
            raise TransportError(
                f"could not listen on {address}: {error.strerror or error}"
            ) from error
        self.socket.setblocking(False)

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                # If someone removed the file, another listener may have created a new one.
                if _identity(self._path) == self._file:
                    self._path.unlink()
        self.socket.close()


def connected_socket(address: str, *, timeout_s: float) -> socket.socket:
    """Return a socket that is connected to an address, trying again until the timeout.

    Raises:
        TransportError: if the address is not valid, or cannot be reached in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.01, deadline - time.monotonic())
        try:
            if address.startswith(IPC):
                return _connected_to_path(_path("dial", address), left_s)
            host, port = _host_and_port("dial", address)
            return tuned(socket.create_connection((host, port), left_s))
        except OSError as error:
            if time.monotonic() + _DIAL_EVERY_S >= deadline:
                raise no_connection(address, timeout_s, error) from error
        time.sleep(_DIAL_EVERY_S)


def tuned(connected: socket.socket) -> socket.socket:
    """Set the options of a connected socket, and return it."""
    if connected.family == socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    else:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT_BYTES)
    return connected


def _host_and_port(doing: str, address: str) -> tuple[str, int]:
    scheme, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if f"{scheme}{separator}" not in (TCP, TLS) or not colon or not port.isdecimal():
        raise TransportError(
            f"could not {doing} {address}: write ipc:///path, tcp://host:port or "
            "tls+tcp://host:port"
        )
    return host.strip("[]"), int(port)


def _path(doing: str, address: str) -> Path:
    path = address.removeprefix(IPC)
    if not path.startswith("/") or "\0" in path:
        raise TransportError(f"could not {doing} {address}: write ipc:///path/to/socket")
    size = len(os.fsencode(path))
    if size > _MAX_PATH:
        raise TransportError(
            f"could not {doing} {address}: the socket path has {size} bytes, but the system allows "
            f"{_MAX_PATH}; use a shorter folder, for example under /tmp"
        )
    return Path(path)


def _listening_on_port(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )
    family, _, _, _, target = found[0]
    return socket.create_server(
        target[:2],
        family=family,
        backlog=_QUEUE,
        # Every address of the host, the IPv4 ones included.
        dualstack_ipv6=family == socket.AF_INET6 and host == "::",
    )


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _connected_to_path(path: Path, within_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(within_s)
        made.connect(str(path))
        return tuned(made)
    except BaseException:
        made.close()
        raise


def _listening_on_path(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """Return a socket to which only this user can connect, and the identity of its file."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Two listeners that start at once must not consider each other dead.
        with _locked(path.parent):
            _remove_if_dead(path)
            made.bind(str(path))
            path.chmod(0o600)
            made.listen(_QUEUE)
            return made, _identity(path)
    except BaseException:
        made.close()
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_dead(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "the path exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            # Its queue is full, so a listener is running.
            pass
    raise OSError(errno.EADDRINUSE, "another process is already listening there")
