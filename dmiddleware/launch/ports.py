"""Ports to listen on: those that are free on this host, and those that the user has chosen."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import zlib
from collections.abc import Iterator
from typing import Final

from dmiddleware.errors import LaunchError
from dmiddleware.launch.options import DEFAULT_PORT
from dmiddleware.launch.plan import LaunchRequest, count_hubs
from dmiddleware.router.protocol.topology import count_listening

__all__ = ["free_port", "free_ports", "port_of_run"]

_THIS_HOST: Final = "127.0.0.1"
_N_PORTS: Final = 4000


def free_ports(request: LaunchRequest) -> tuple[list[int], int]:
    """Find ports that are free on this host: one per node that will listen, and one for learners.

    They are below the range from which systems choose ports for outgoing connections: such a
    connection could otherwise take the port of a node that is being restarted. The search starts at
    a random port, so runs that start together choose different ones.
    """
    n_wanted = count_listening(
        request.topology, len(request.roles), request.attach_to, count_hubs(request)
    )
    if request.protocol == "ipc":
        n_wanted = 0
    elif request.ports:
        _check_ports(request, n_wanted)
        n_wanted = 0
    ports: list[int] = []
    for port in _candidates():
        is_last = len(ports) == n_wanted
        host = _THIS_HOST if is_last else request.bind or request.address
        if port in request.ports or not _is_free(host, port):
            continue
        if is_last:
            return ports, port
        ports.append(port)
    return ports, 0


def port_of_run(name: str) -> int:
    """Return the port of a run that all its hosts derive from its name.

    Runs with other names on the same host almost always have other ports.
    """
    return DEFAULT_PORT + zlib.crc32(name.encode()) % _N_PORTS


def free_port(host: str, wanted: int = 0) -> int:
    """Return a free port of this host.

    Args:
        host: the address to listen on.
        wanted: the port to return if it is free; 0: any.

    Raises:
        LaunchError: if none is free.
    """
    if wanted:
        with contextlib.suppress(OSError):
            _probe(host, wanted, reuse=True)
            return wanted
    for port in _candidates():
        if _is_free(host, port):
            return port
    last = DEFAULT_PORT + _N_PORTS - 1
    raise LaunchError(f"no port of {host} from {DEFAULT_PORT} to {last} is free")


def _candidates() -> Iterator[int]:
    """Yield all ports to choose from, from a random one on."""
    first = secrets.randbelow(_N_PORTS)
    for offset in range(_N_PORTS):
        yield DEFAULT_PORT + (first + offset) % _N_PORTS


def _check_ports(request: LaunchRequest, n_listening: int) -> None:
    """Refuse ports that are taken: the processes of this run would join the one that has them."""
    last, n_more = request.ports[-1], max(n_listening - len(request.ports), 0)
    ports = (*request.ports[:n_listening], *range(last + 1, last + 1 + n_more))
    host = request.bind or request.address
    for port in (port for port in ports if port < 65536):
        try:
            _probe(host, port, reuse=True)
        except OSError as error:
            # The nodes report other errors when they listen.
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {port} of {host} is in use, maybe by another run of this program; give "
                    "other --ports, or stop that run"
                ) from error


def _is_free(host: str, port: int) -> bool:
    try:
        _probe(host, port, reuse=False)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise LaunchError(
            f"cannot listen on {host} ({error.strerror}); give an address of this host with "
            "--address, and if other hosts reach it by another one, the local one with --bind"
        ) from error
    return True


def _probe(host: str, port: int, *, reuse: bool) -> None:
    """Bind a socket to a port and close it.

    Args:
        host: the local address.
        port: the port.
        reuse: whether the port may have connections that were closed a short time ago.

    Raises:
        OSError: if that is not possible.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        if reuse:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
