"""Networks and connections that break and recover, or that are slow and lose packets."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

from tests.faults.fault_result import FaultResult
from tests.faults.ledger import join
from tests.faults.network_namespaces import ADDRESSES, cable, namespaces, slow_cable
from tests.faults.node_program import Sends
from tests.faults.process_cluster import Cluster, Process, address_for, cluster
from tests.faults.process_faults import all_of, left_at
from tests.faults.relay import Relay
from tests.waiting import wait_until

__all__ = ["cut_connections", "partition", "slow_network"]

_EXEC = ("ip", "netns", "exec")
_SEED = 0


def cut_connections(transport: str, *, times: int, size: int = 4096) -> FaultResult:
    """Cut one or all connections while both sides send, even while they reconnect.

    Args:
        transport: what connects the nodes.
        times: number of cuts.
        size: bytes per message.
    """
    result = FaultResult(f"{times} cuts of one or all connections", transport)
    sends = Sends(size=size, pace_s=0.002)
    settings = {"receives": ("e",), "sends": sends, "expected": 1, "at_once": True}
    rng = random.Random(_SEED)
    flows = []
    with cluster(transport) as nodes:
        learner = nodes.listener(**settings)
        learner.await_line("listening")
        front = address_for(transport, nodes.folder, "front")
        with Relay(front, nodes.address) as relay:
            collector = nodes.start(nodes.spec(1, dial=(front,), **settings))
            for process in (learner, collector):
                process.await_line("got", count=20)
            left = times
            while left:
                for _ in range(min(left, rng.choice((1, 1, 3, 10)))):
                    relay.cut(rng.choice((1, None)))
                    left -= 1
                    threading.Event().wait(rng.choice((0.0, 0.01, 0.05, 0.2)))
                at = time.monotonic()
                flows += [
                    process.await_line("got", since=at)[1] - at for process in (learner, collector)
                ]
            for process in (learner, collector):
                process.send_command("enough")
            verdict = join((all_of(learner, collector), all_of(collector, learner)))
            collector.stop()
            learner.stop()
    result.at_most("data flows both ways after a cut", max(flows), 5.0)
    result.check("reconnections", f"{relay.passed}", relay.passed > 2)
    result.check("0 lost, 0 duplicated", verdict, verdict.clean)
    return result


def partition(transport: str, *, cut_s: float, size: int = 4096) -> FaultResult:
    """Cut the cable between two hosts while both send, and repair it.

    Args:
        transport: ``tcp`` or ``tls+tcp``.
        cut_s: duration of the cut, longer than the time after which a peer counts as lost.
        size: bytes per message.
    """
    result = FaultResult(f"partition of {cut_s:g} s between network namespaces", transport)
    sends = Sends(size=size, pace_s=0.002)
    with (
        namespaces() as (here, there),
        cable(here, there) as link,
        cluster(transport) as nodes,
        _both(nodes, here, there, sends) as (learner, collector),
    ):
        for process in (learner, collector):
            process.await_line("got", count=50)
        at = link.cut()
        left = [left_at(learner, 1, since=at) - at, left_at(collector, 0, since=at) - at]
        wait_until(lambda: time.monotonic() > at + cut_s, "the cut", deadline_s=cut_s + 9)
        repaired_at = link.repair()
        back = [
            process.await_line("node.rejoined", since=repaired_at)[1] - repaired_at
            for process in (learner, collector)
        ]
        for process in (learner, collector):
            process.await_line("got", since=time.monotonic(), count=20)
        for process in (learner, collector):
            process.send_command("enough")
        verdict = join((all_of(learner, collector), all_of(collector, learner)))
    result.at_most("node.left on both sides", max(left), 5.0)
    result.at_most("node.rejoined on both sides", max(back), 3.0)
    result.check("0 lost, 0 duplicated", verdict, verdict.clean)
    return result


def slow_network(
    transport: str,
    *,
    count: int,
    delay_s: float = 0.2,
    loss: float = 0.01,
    size: int = 4096,
    clock_behind_s: float = 600.0,
) -> FaultResult:
    """Send both ways between hosts whose clocks differ, over a slow network that loses packets.

    Args:
        transport: ``tcp`` or ``tls+tcp``.
        count: number of messages in each direction.
        delay_s: delay of one side's packets, and so of a round trip.
        loss: the share of packets that is lost, in both directions.
        size: bytes per message.
        clock_behind_s: seconds by which the date of the second host is behind.
    """
    result = FaultResult(
        f"{1000 * delay_s:.0f} ms delay with {loss:.0%} loss, clocks {clock_behind_s:g} s apart, "
        f"{count:,} messages",
        transport,
    )
    sends = Sends(count=count, size=size, pace_s=0.002)
    with (
        namespaces() as (here, there),
        slow_cable(here, there, delay_s=(delay_s, 0.0), loss=loss) as link,
        cluster(transport) as nodes,
        _both(nodes, here, there, sends, clock_behind_s) as (learner, collector),
    ):
        verdict = join(
            (
                all_of(learner, collector, quiet_s=20.0),
                all_of(collector, learner, quiet_s=20.0),
            )
        )
        n_left = sum(len(one.ledger.lines("node.left")) for one in (learner, collector))
    result.check("0 lost, 0 duplicated", verdict, verdict.clean)
    result.check(
        "packets lost in transit", f"{link.lost} of {link.lost + link.carried}", link.lost > 0
    )
    result.check("no peer counts as lost", f"{n_left} node.left", n_left == 0)
    return result


@contextlib.contextmanager
def _both(
    nodes: Cluster, here: str, there: str, sends: Sends, clock_behind_s: float = 0.0
) -> Iterator[tuple[Process, Process]]:
    """Start a listener and a dialer in two namespaces, which send to each other."""
    nodes.address = f"{nodes.transport}://{ADDRESSES[0]}:5557"
    settings = {"receives": ("e",), "sends": sends, "expected": 1, "at_once": True}
    learner = nodes.listener(prefix=(*_EXEC, here), **settings)
    collector = nodes.dialer(1, prefix=(*_EXEC, there), clock_offset_s=-clock_behind_s, **settings)
    yield learner, collector
    for process in (collector, learner):
        process.stop()
