"""Processes that die, hang, fork, start in any order, or close a router inside a callback."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.faults.fault_result import FaultResult
from tests.faults.ledger import Comparison, compare, compare_killed, join
from tests.faults.node_program import Sends
from tests.faults.process_cluster import ROOT, Cluster, Process, address_for, cluster
from tests.waiting import wait_until

__all__ = [
    "all_of",
    "fork_and_close",
    "killed_dialers",
    "killed_listener",
    "left_at",
    "one_node_id",
    "start_order",
    "stopped",
]

_SEED = 11


def killed_dialers(
    transport: str, *, kills: int, dialers: int = 3, size: int = 4096, **settings: Any
) -> FaultResult:
    """Kill and replace a random sender, repeatedly.

    Args:
        transport: what connects the nodes.
        kills: number of kills.
        dialers: number of senders.
        size: bytes per message.
        settings: settings of all nodes.
    """
    result = FaultResult(f"kill -9 of one of {dialers} senders at random, {kills} times", transport)
    rng = random.Random(_SEED)
    sends = Sends(size=size, pace_s=0.001)
    with cluster(transport) as nodes:
        learner = nodes.listener(receives=("e",), **settings)
        alive = [
            nodes.dialer(number, sends=sends, expected=1, at_once=True, **settings)
            for number in range(1, dialers + 1)
        ]
        starts = list(alive)
        left, first = [], []
        for process in alive:
            process.await_line("sent", count=20)
        for _ in range(kills):
            position = rng.randrange(dialers)
            victim = alive[position]
            at = victim.kill()
            left.append(left_at(learner, victim.spec.node_id, since=at) - at)
            alive[position] = nodes.restart(victim)
            starts.append(alive[position])
            first.append(_first_after_imports(learner, alive[position]))
        lives = learner.alive
        for process in alive:
            process.stop()
        learner.stop()
        verdict = join(_verdict(learner, process, alive) for process in starts)
    result.check("the others keep running", lives, lives)
    result.check("no accepted message lost, duplicated or damaged", verdict, verdict.clean)
    result.at_most("node.left", max(left), 1.0)
    result.at_most("the replacement's first message after its imports", max(first), 3.0)
    return result


def killed_listener(
    transport: str, *, kills: int, size: int = 4096, **settings: Any
) -> FaultResult:
    """Kill and replace the receiver, while the senders keep running.

    Args:
        transport: what connects the nodes.
        kills: number of kills.
        size: bytes per message.
        settings: settings of all nodes.
    """
    result = FaultResult(f"kill -9 of the receiver, {kills} times", transport)
    sends = Sends(size=size, pace_s=0.001)
    with cluster(transport) as nodes:
        learner = nodes.listener(receives=("e",), **settings)
        senders = [
            nodes.dialer(number, sends=sends, expected=1, at_once=True, **settings)
            for number in (1, 2)
        ]
        flows, left, learners, dead_at = [], [], [learner], []
        for sender in senders:
            _first_of(learner, sender)
        for _ in range(kills):
            learner.await_line("got", count=50)
            at = learner.kill()
            dead_at.append(learner.dead_at)
            left += [left_at(sender, 0, since=at) - at for sender in senders]
            learner = nodes.restart(learner)
            learners.append(learner)
            listens = learner.await_line("listening")[1]
            flows += [_first_of(learner, sender)[1] - listens for sender in senders]
        same = all(sender.alive for sender in senders)
        for sender in senders:
            sender.stop()
        learner.stop()
        verdict = join(_across(learners, dead_at, sender) for sender in senders)
    result.check("the others keep running", same, same)
    result.at_most("node.left", max(left), 1.0)
    result.at_most("data flows after it listens again", max(flows), 5.0)
    result.check("no accepted message lost, duplicated or damaged", verdict, verdict.clean)
    return result


def killed_handler(
    transport: str, *, kills: int, count: int, slow_s: float = 0.02, size: int = 1024
) -> FaultResult:
    """Kill and replace a receiver whose handler is slow, with events acknowledged when handled.

    Args:
        transport: what connects the nodes.
        kills: number of kills.
        count: number of events, which the sender emits at once.
        slow_s: seconds that the handler takes per event.
        size: bytes per event.
    """
    what = f"kill -9 of a receiver that takes {slow_s * 1000:g} ms per event, {kills} times"
    result = FaultResult(f"{what}, {count:,} events acknowledged when handled", transport)
    sends = Sends(size=size, count=count, acknowledged="handled")
    with cluster(transport) as nodes:
        receiver = nodes.listener(receives=("e",), slow_s=slow_s)
        sender = nodes.dialer(1, sends=sends, expected=1, at_once=True)
        sender.await_line("sent all")
        start = sender.await_line("started")[2]
        handled: set[int] = set()
        n_handled, acknowledged, unhandled = 0, 0, 0
        for number in range(kills + 1):
            if number < kills:
                receiver.await_line("got", count=count // (2 * kills))
                left_at(sender, 0, since=receiver.kill())
            else:
                wait_until(
                    lambda: not sender.status()["peer_traffic"]["0"]["waiting"],
                    "all events to be handled",
                    deadline_s=30.0 + 2 * count * slow_s,
                )
            got = [number for number, _ in receiver.ledger.got(1, start)]
            handled |= set(got)
            n_handled += len(got)
            acknowledged = count - sender.status()["peer_traffic"]["0"]["waiting"]
            unhandled += len(set(range(acknowledged)) - handled)
            if number < kills:
                receiver = nodes.restart(receiver)
        sender.stop()
        receiver.stop()
    result.check(
        "every event that the sender saw acknowledged was handled",
        f"{acknowledged:,} acknowledged, {unhandled} of them not handled",
        acknowledged > 0 and not unhandled,
    )
    lost, again = count - len(handled), n_handled - len(handled)
    result.check(
        "after restarts every event is handled, at least once",
        f"{count:,} accepted, {lost} lost, {again} handled again",
        not lost,
    )
    return result


def one_node_id(transport: str, *, restarts: int = 2) -> FaultResult:
    """Run several processes with one node id: restarts, a second live one, and a zombie.

    Each restart's clock shows a date that is a minute before that of the process before it.

    Args:
        transport: what connects the nodes.
        restarts: number of restarts.
    """
    result = FaultResult(
        f"{restarts} restarts with clocks behind, a second process, and a zombie", transport
    )
    with cluster(transport) as nodes:
        learner = nodes.listener()
        learner.await_line("listening")
        settings = {"sends": Sends(pace_s=0.05), "at_once": True, "expected": 1}
        first = nodes.dialer(1, **settings)
        first.await_line("ready")
        joins = []
        for number in range(1, restarts + 1):
            first.kill()
            first = nodes.dialer(1, clock_offset_s=-60.0 * number, **settings)
            started_at = first.await_line("started")[1]
            joins.append(first.await_line("ready")[1] - started_at)
        result.at_most("a restarted process is accepted", max(joins), 5.0)
        second = nodes.dialer(1, expected=1, start_timeout_s=1.0)
        error = " ".join(second.await_line("error")[2:])
        result.check(
            "a second process gets an error that names the cause",
            error.partition(";")[0],
            "another process is connected as node 1" in error,
        )
        left = learner.ledger.lines("node.left")
        result.check(
            "the first one is not disturbed",
            f"{len(left)} departures for {restarts} kills",
            first.alive and len(left) == restarts and not first.ledger.lines("node.left"),
        )
        second.stop()
        stopped_at = first.signal(signal.SIGSTOP)
        left_at(learner, 1, since=stopped_at)
        successor = nodes.dialer(1, expected=1)
        successor.await_line("ready")
        resumed_at = first.signal(signal.SIGCONT)
        error = " ".join(first.await_line("error", since=resumed_at)[2:])
        result.check(
            "a zombie is refused for good", error.partition(";")[0], "newer process" in error
        )
        lives = successor.alive and not successor.ledger.lines("node.left")
        result.check("its successor is not disturbed", lives, lives)
        for process in (first, successor, learner):
            process.stop()
    return result


def stopped(transport: str, *, hang_s: float, listener: bool, size: int = 4096) -> FaultResult:
    """Suspend a process with SIGSTOP, and resume it.

    Args:
        transport: what connects the nodes.
        hang_s: duration, longer than the 3 s after which it counts as lost.
        listener: whether the listener hangs instead of the dialer.
        size: bytes per message.
    """
    who = "listener" if listener else "dialer"
    result = FaultResult(f"SIGSTOP of the {who} for {hang_s:g} s", transport)
    sends = Sends(size=size, pace_s=0.001)
    with cluster(transport) as nodes:
        learner = nodes.listener(receives=("e",), sends=sends, expected=1, at_once=True)
        collector = nodes.dialer(1, receives=("e",), sends=sends, expected=1, at_once=True)
        for process in (learner, collector):
            process.await_line("got", count=50)
        hanging, other = (learner, collector) if listener else (collector, learner)
        stopped_at = hanging.signal(signal.SIGSTOP)
        left_s = left_at(other, hanging.spec.node_id, since=stopped_at) - stopped_at
        wait_until(
            lambda: time.monotonic() > stopped_at + hang_s, "the pause", deadline_s=hang_s + 9
        )
        resumed_at = hanging.signal(signal.SIGCONT)
        back = other.await_line("node.rejoined", since=resumed_at)[1] - resumed_at
        flows = max(
            one.await_line("got", since=resumed_at)[1] - resumed_at for one in (learner, collector)
        )
        for process in (learner, collector):
            process.await_line("got", since=time.monotonic(), count=20)
        for process in (learner, collector):
            process.send_command("enough")
        verdict = join(
            (all_of(learner, collector), all_of(collector, learner)),
        )
        collector.stop()
        learner.stop()
    result.at_most("node.left", left_s, 4.0)
    result.at_most("node.rejoined after SIGCONT", back, 3.0)
    result.at_most("data flows both ways after SIGCONT", flows, 3.0)
    result.check("0 lost, 0 duplicated", verdict, verdict.clean)
    return result


def start_order(transport: str, *, times: int, nodes_each: int = 8) -> FaultResult:
    """Start nodes of a mesh in random order.

    Args:
        transport: what connects the nodes.
        times: number of repetitions.
        nodes_each: number of nodes.
    """
    result = FaultResult(f"{nodes_each} nodes in random start order, {times} times", transport)
    rng = random.Random(_SEED)
    formed = []
    for _ in range(times):
        with cluster(transport) as nodes:
            formed.append(_form(nodes, rng, nodes_each))
    in_time = sum(took <= 5.0 for took in formed)
    result.check(
        f"all connected ≤ 5 s after the last one has finished its imports, {times} of {times}",
        f"{in_time} of {times}, slowest {max(formed):.2f} s",
        in_time == times,
    )
    return result


def fork_and_close(transport: str) -> FaultResult:
    """Fork after use, and close a router inside a callback."""
    result = FaultResult("fork after use, and close inside a callback", transport)
    with cluster(transport) as nodes:
        for what in ("fork", "close"):
            address = address_for(transport, nodes.folder, what)
            started_at = time.monotonic()
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "tests.faults.fork_program", what, address],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=20.0,
                    check=False,
                )
                said = done.stdout.strip() or f"rc {done.returncode}: {done.stderr[-300:]}"
                fine = done.returncode == 0
            except subprocess.TimeoutExpired:
                said, fine = "hangs", False
            took = time.monotonic() - started_at
            result.check(f"{what}: clear outcome, no hang", f"{said} ({took:.1f} s)", fine)
    return result


def left_at(observer: Process, node_id: int, *, since: float) -> float:
    """Return when ``observer`` noticed that a node had left."""

    def found() -> list[list[Any]]:
        lines = observer.ledger.lines("node.left", since=since)
        return [line for line in lines if line[2] == node_id]

    wait_until(lambda: bool(found()), f"node {node_id} to leave")
    return float(found()[0][1])


def _first_of(receiver: Process, sender: Process) -> list[Any]:
    start = sender.await_line("started")[2]

    def found() -> list[list[Any]]:
        lines = receiver.ledger.lines("got")
        return [line for line in lines if line[3:5] == [sender.spec.node_id, start]]

    wait_until(lambda: bool(found()), f"a message of node {sender.spec.node_id}")
    return found()[0]


def _first_after_imports(receiver: Process, sender: Process) -> float:
    started = sender.await_line("started")[1]
    return float(_first_of(receiver, sender)[1] - started)


def all_of(sender: Process, receiver: Process, *, quiet_s: float = 10.0) -> Comparison:
    """Wait until a sender is done and its messages have arrived, and compare the ledgers.

    Args:
        sender: a sender that sends no more, or a fixed number of messages.
        receiver: the node that had to receive all of them.
        quiet_s: how long to wait for messages that are still missing; after that they are lost.
    """
    sender.await_line("sent all")
    start = sender.ledger.lines("started")[0][2]
    accepted = sender.ledger.sent()
    with contextlib.suppress(TimeoutError):
        wait_until(
            lambda: len(receiver.ledger.got(sender.spec.node_id, start)) >= accepted,
            "all messages",
            deadline_s=quiet_s,
        )
    return compare(accepted, receiver.ledger.got(sender.spec.node_id, start))


def _verdict(receiver: Process, sender: Process, ended: Sequence[Process]) -> Comparison:
    """Compare all accepted messages of a sender, or only acknowledged ones if it was killed."""
    start = sender.ledger.lines("started")[0][2]
    got = receiver.ledger.got(sender.spec.node_id, start)
    if sender in ended:
        return compare(sender.ledger.sent(), got)
    return compare_killed(sender.ledger.lines("sent"), got)


def _across(receivers: Sequence[Process], dead_at: Sequence[float], sender: Process) -> Comparison:
    """Compare one sender's messages with the ledgers of several starts of the receiver.

    A killed receiver loses the messages that it had acknowledged but not handled. So a message may
    be missing if it was emitted before a receiver died and comes after the last one that this
    receiver handled; all others must have arrived. Duplicates, order and damage are counted per
    start.
    """
    start = sender.ledger.lines("started")[0][2]
    arrived = [receiver.ledger.got(sender.spec.node_id, start) for receiver in receivers]
    seen = {number for got in arrived for number, _ in got}
    sent = [(started_at, number) for *_, started_at, number, _ in sender.ledger.lines("sent")]
    handled = list(itertools.accumulate((max(dict(got), default=-1) for got in arrived), max))
    missing = [(started_at, number) for started_at, number in sent if number not in seen]
    lost = sum(
        not any(
            started_at <= end and number > last for end, last in zip(dead_at, handled, strict=False)
        )
        for started_at, number in missing
    )
    each = join(compare(0, got, emitted=len(sent)) for got in arrived)
    return replace(each, accepted=len(sent), lost=lost)


def _form(nodes: Cluster, rng: random.Random, count: int) -> float:
    """Start a mesh, and return the seconds from the last start until all nodes are connected."""
    addresses = [address_for(nodes.transport, nodes.folder, str(n)) for n in range(count)]
    specs = [
        nodes.spec(n, listen=addresses[n], dial=tuple(addresses[:n]), expected=count - 1)
        for n in range(count)
    ]
    rng.shuffle(specs)
    processes = [nodes.start(spec) for spec in specs]
    started = max(process.await_line("started")[1] for process in processes)
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: _are_ready(processes) or not _are_alive(processes), "all nodes")
    unready = [process for process in processes if not process.ledger.lines("ready")]
    if unready or not _are_alive(processes):
        raise RuntimeError("; ".join(map(_how_it_is, processes)))
    return float(max(process.ledger.lines("ready")[0][1] for process in processes) - started)


def _are_ready(processes: Sequence[Process]) -> bool:
    return all(process.ledger.lines("ready") for process in processes)


def _are_alive(processes: Sequence[Process]) -> bool:
    return all(process.alive for process in processes)


def _how_it_is(process: Process) -> str:
    if not process.alive:
        return f"node {process.spec.node_id} is dead: {process.errors()}"
    ready = "ready" if process.ledger.lines("ready") else "not ready"
    return f"node {process.spec.node_id} is {ready} and has peers {process.status()['peers']}"
