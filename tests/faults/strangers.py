"""Strangers: what connections without the key may cost a listener."""

from __future__ import annotations

import contextlib
import threading
import time

from dmiddleware.errors import RouterError
from tests.faults.delivery_faults import MB, Peak
from tests.faults.fault_result import FaultResult
from tests.faults.process_cluster import Cluster, Process, cluster
from tests.faults.raw_peer import Stranger
from tests.waiting import wait_until

__all__ = ["memory_hogs", "silence", "unread_replies"]

_MAX_UNTRUSTED = 128
_TLS_RECORD = bytes.fromhex("1603010200010001fc0303")
"""How a TLS greeting begins."""


def silence(transport: str, *, connections: int = 300) -> FaultResult:
    """Open connections that send nothing, or a part of a message, and leave them open.

    Over TLS, the part is one of the greeting.

    Args:
        transport: what connects the nodes.
        connections: number of connections.
    """
    result = FaultResult(f"{connections} silent connections", transport)
    with cluster(transport) as nodes, contextlib.ExitStack() as stack:
        learner = nodes.listener()
        learner.await_line("listening")
        before = most = learner.view.num_fds()
        for number in range(connections):
            peer = stack.enter_context(nodes.raw_peer(secured=False))
            if number % 2:
                start = _TLS_RECORD if nodes.tls is not None else peer.head(1000)
                peer.write(start[: number % 20])
            most = max(most, learner.view.num_fds())
        result.at_most("a new peer joins", _joining_s(nodes), 2.0)

        def are_closed() -> bool:
            nonlocal most
            n_descriptors = learner.view.num_fds()
            most = max(most, n_descriptors)
            return n_descriptors <= before + 4

        with contextlib.suppress(TimeoutError):
            wait_until(are_closed, "the silent connections to be closed", deadline_s=4.0)
        left = learner.view.num_fds() - before
    result.at_most("descriptors of the listener", most - before, _MAX_UNTRUSTED + 16, "")
    result.at_most("descriptors 4 s later", left, 4, "")
    return result


def memory_hogs(transport: str, *, connections: int = 8, size: int = 60 * MB) -> FaultResult:
    """Send long requests without the key, on several connections at a time.

    Args:
        transport: what connects the nodes.
        connections: number of connections.
        size: bytes of each request.
    """
    result = FaultResult(
        f"{connections} connections without the key send {size // MB} MB each", transport
    )
    with cluster(transport) as nodes:
        learner = nodes.listener()
        learner.await_line("listening")
        with Peak(learner) as peak:
            hogs = [
                threading.Thread(target=_send_zeros, args=(nodes, size)) for _ in range(connections)
            ]
            for hog in hogs:
                hog.start()
            for hog in hogs:
                hog.join()
        result.at_most("memory growth", peak.growth / MB, 16, "MB")
        result.at_most("a new peer joins", _joining_s(nodes), 2.0)
    return result


def unread_replies(transport: str, *, lasts_s: float = 5.0) -> FaultResult:
    """Send requests without the key and without pause, and read no reply.

    Args:
        transport: what connects the nodes.
        lasts_s: how long; whenever the listener closes the connection, there is a new one.
    """
    result = FaultResult(f"requests for {lasts_s:g} s whose replies are not read", transport)
    hello = Stranger(9, bytes(32)).hello()
    with cluster(transport) as nodes:
        learner = nodes.listener()
        learner.await_line("listening")
        used_s = _cpu_s(learner)
        with Peak(learner) as peak:
            deadline = time.monotonic() + lasts_s
            while time.monotonic() < deadline:
                with nodes.raw_peer(timeout_s=lasts_s) as peer:
                    while time.monotonic() < deadline and peer.send(hello):
                        pass
            used_s = _cpu_s(learner) - used_s
            result.at_most("a new peer joins", _joining_s(nodes), 2.0)
        result.at_most("CPU time", used_s, lasts_s / 4)
        result.at_most("memory growth", peak.growth / MB, 16, "MB")
    return result


def _send_zeros(nodes: Cluster, size: int) -> None:
    with nodes.raw_peer() as peer:
        accepted = peer.write(peer.head(size))
        for _ in range(size // MB):
            accepted = accepted and peer.write(bytes(MB))
        if accepted:
            peer.closed_after()


def _joining_s(nodes: Cluster) -> float:
    """Return the seconds that a new peer takes to join."""
    started_at = time.monotonic()
    with nodes.router(1, dial=[nodes.address]) as router:
        try:
            router.wait_for_peers(1, timeout_s=10.0)
        except (RouterError, TimeoutError):
            return float("inf")
        return time.monotonic() - started_at


def _cpu_s(process: Process) -> float:
    used = process.view.cpu_times()
    return used.user + used.system
