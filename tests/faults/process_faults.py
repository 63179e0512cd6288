"""Processes that die, hang, fork, start in any order, or close where they should not."""

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
from tests.faults.ledger import Judgement, join, judge, judge_prefix
from tests.faults.node_program import Sends
from tests.faults.process_cluster import ROOT, Cluster, Process, address_for, cluster, wait_until

__all__ = [
    "all_of",
    "fork_and_close",
    "killed_dialers",
    "killed_listener",
    "left_at",
    "start_order",
    "stopped",
]

_SEED = 11


def killed_dialers(
    transport: str, *, kills: int, dialers: int = 3, size: int = 4096, **settings: Any
) -> FaultResult:
    """Kill a random sender, and start another in its place, again and again.

    Args:
        transport: ``ipc`` or ``tcp``.
        kills: how often.
        dialers: how many send.
        size: bytes of each message.
        settings: of all nodes.
    """
    result = FaultResult(f"kill -9 of a random one of {dialers} senders, {kills} times", transport)
    randomly = random.Random(_SEED)
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
            place = randomly.randrange(dialers)
            victim = alive[place]
            at = victim.kill()
            left.append(left_at(learner, victim.spec.node_id, since=at) - at)
            alive[place] = nodes.again(victim)
            starts.append(alive[place])
            first.append(_first_after_imports(learner, alive[place]))
        lives = learner.alive
        for process in alive:
            process.stop()
        learner.stop()
        verdict = join(_verdict(learner, process, alive) for process in starts)
    result.check("the receiver lives on", f"{lives}", lives)
    result.check("0 accepted lost, duplicated, damaged", verdict, verdict.clean)
    result.at_most("node.left", max(left), 1.0)
    result.at_most("the replacement's first message after its imports", max(first), 3.0)
    return result


def killed_listener(
    transport: str, *, kills: int, size: int = 4096, **settings: Any
) -> FaultResult:
    """Kill the receiver, and start another in its place; the senders keep their processes.

    Args:
        transport: ``ipc`` or ``tcp``.
        kills: how often.
        size: bytes of each message.
        settings: of all nodes.
    """
    result = FaultResult(f"kill -9 of the receiver, {kills} times", transport)
    sends = Sends(size=size, pace_s=0.001)
    with cluster(transport) as nodes:
        learner = nodes.listener(receives=("e",))
        senders = [nodes.dialer(number, sends=sends, expected=1, at_once=True) for number in (1, 2)]
        flows, left, learners, dead_at = [], [], [learner], []
        for sender in senders:
            _first_of(learner, sender)
        for _ in range(kills):
            learner.await_line("got", count=50)
            at = learner.kill()
            dead_at.append(learner.dead_at)
            left += [left_at(sender, 0, since=at) - at for sender in senders]
            learner = nodes.again(learner)
            learners.append(learner)
            listens = learner.await_line("listening")[1]
            flows += [_first_of(learner, sender)[1] - listens for sender in senders]
        same = all(sender.alive for sender in senders)
        for sender in senders:
            sender.stop()
        learner.stop()
        verdict = join(_across(learners, dead_at, sender) for sender in senders)
    result.check("the senders keep their processes", f"{same}", same)
    result.at_most("node.left", max(left), 1.0)
    result.at_most("data flows after it listens again", max(flows), 5.0)
    result.check("per start of the receiver: 0 lost, duplicated, damaged", verdict, verdict.clean)
    return result


def stopped(transport: str, *, hang_s: float, listener: bool, size: int = 4096) -> FaultResult:
    """Stop a process (SIGSTOP), and let it go on.

    Args:
        transport: ``ipc`` or ``tcp``.
        hang_s: for how long; more than the 3 s after which it counts as gone.
        listener: whether the listener hangs, not the dialer.
        size: bytes of each message.
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
        goes_on_at = hanging.signal(signal.SIGCONT)
        back = other.await_line("node.rejoined", since=goes_on_at)[1] - goes_on_at
        flows = max(
            one.await_line("got", since=goes_on_at)[1] - goes_on_at for one in (learner, collector)
        )
        for process in (learner, collector):
            process.await_line("got", since=time.monotonic(), count=20)
        for process in (learner, collector):
            process.tell("enough")
        verdict = join(
            (all_of(learner, collector), all_of(collector, learner)),
        )
        collector.stop()
        learner.stop()
    result.at_most("left", left_s, 4.0)
    result.at_most("back after SIGCONT", back, 3.0)
    result.at_most("data flows both ways after SIGCONT", flows, 3.0)
    result.check("0 lost, 0 duplicated", verdict, verdict.clean)
    return result


def start_order(transport: str, *, times: int, nodes_each: int = 8) -> FaultResult:
    """Start nodes of a mesh in random order.

    Args:
        transport: ``ipc`` or ``tcp``.
        times: how often.
        nodes_each: how many nodes.
    """
    result = FaultResult(f"{nodes_each} nodes in random start order, {times} times", transport)
    randomly = random.Random(_SEED)
    formed = []
    for _ in range(times):
        with cluster(transport) as nodes:
            formed.append(_form(nodes, randomly, nodes_each))
    in_time = sum(took <= 5.0 for took in formed)
    result.check(f"all form ≤ 5 s after the last has its imports, {times} of {times}",
              f"{in_time} of {times}, slowest {max(formed):.2f} s", in_time == times)  # fmt: skip
    return result


def fork_and_close(transport: str) -> FaultResult:
    """Fork after use, and close a router inside a callback."""
    result = FaultResult("fork after use; close inside a callback", transport)
    with cluster(transport) as nodes:
        for what in ("fork", "close"):
            address = address_for(transport, nodes.folder, what)
            began = time.monotonic()
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
            took = time.monotonic() - began
            result.check(f"{what}: clear, and no hang", f"{said} ({took:.1f} s)", fine)
    return result


def left_at(observer: Process, node_id: int, *, since: float) -> float:
    """Return when a node was seen to leave."""

    def found() -> list[list[Any]]:
        lines = observer.ledger.lines("node.left", since=since)
        return [line for line in lines if line[2] == node_id]

    wait_until(lambda: bool(found()), f"that node {node_id} leaves")
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


def all_of(sender: Process, receiver: Process, *, quiet_s: float = 10.0) -> Judgement:
    """Wait until a sender has ended and all has come, and judge it; what stays away is lost.

    Args:
        sender: one that sends no more, or so many.
        receiver: who had to get all.
        quiet_s: how long to wait for the rest.
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
    return judge(accepted, receiver.ledger.got(sender.spec.node_id, start))


def _verdict(receiver: Process, sender: Process, ended: Sequence[Process]) -> Judgement:
    """Judge a sender: all that it accepted if it ended by itself, else what was acknowledged."""
    start = sender.ledger.lines("started")[0][2]
    got = receiver.ledger.got(sender.spec.node_id, start)
    if sender in ended:
        return judge(sender.ledger.sent(), got)
    return judge_prefix(sender.ledger.lines("sent"), got)


def _across(receivers: Sequence[Process], dead_at: Sequence[float], sender: Process) -> Judgement:
    """Judge one sender's messages over several starts of the receiver.

    A receiver that is killed takes along what it had acknowledged and not handled. So a message
    may be missing if its emission had begun when one was dead, and it lay beyond what that one had
    handled; all others must be there. Each start is judged by itself for duplicates, order and
    damage.
    """
    start = sender.ledger.lines("started")[0][2]
    came = [receiver.ledger.got(sender.spec.node_id, start) for receiver in receivers]
    seen = {number for got in came for number, _ in got}
    sent = [(began, number) for *_, began, number, _ in sender.ledger.lines("sent")]
    handled = list(itertools.accumulate((max(dict(got), default=-1) for got in came), max))
    missing = [(began, number) for began, number in sent if number not in seen]
    lost = sum(
        not any(began <= end and number > last for end, last in zip(dead_at, handled, strict=False))
        for began, number in missing
    )
    each = join(judge(0, got, emitted=len(sent)) for got in came)
    return replace(each, accepted=len(sent), lost=lost)


def _form(nodes: Cluster, randomly: random.Random, count: int) -> float:
    """Start a mesh; return seconds from the last start to the last node that knows all others."""
    addresses = [address_for(nodes.transport, nodes.folder, str(n)) for n in range(count)]
    specs = [
        nodes.spec(n, listen=addresses[n], dial=tuple(addresses[:n]), expected=count - 1)
        for n in range(count)
    ]
    randomly.shuffle(specs)
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
