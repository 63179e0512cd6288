"""Bursts, slow consumers and slow readers: nothing is lost, and memory use stays bounded."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable
from typing import Any, Self

from dmiddleware.process.closing import Closing
from tests.faults.fault_result import FaultResult
from tests.faults.ledger import Comparison, compare
from tests.faults.node_program import Sends
from tests.faults.process_cluster import Process, cluster
from tests.waiting import wait_until

__all__ = ["burst", "slow_consumer", "slow_weight_reader", "Peak"]

KB, MB = 1 << 10, 1 << 20
FRAMES_IN_HAND = 12
# Return freed frames to the system, so that only memory in use is measured.
GIVE_BACK = ("env", "MALLOC_MMAP_THRESHOLD_=131072")


class Peak(Closing):
    """Samples the memory use of a process, without shared memory, which has its own limit.

    Args:
        process: the process.
        every_s: seconds between samples.
    """

    def __init__(self, process: Process, *, every_s: float = 0.02) -> None:
        self._view = process.view
        self._shares = bool(process.spec.shared)
        self._every_s = every_s
        self._done = threading.Event()
        self.before = self._resident()
        self.highest = self.before
        self._thread = threading.Thread(target=self._watch, name="peak", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join(5.0)

    @property
    def growth(self) -> int:
        """The largest growth, in bytes."""
        return self.highest - self.before

    def _resident(self) -> int:
        memory = self._view.memory_info()
        return int(memory.rss - (memory.shared if self._shares else 0))

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self.highest = max(self.highest, self._resident())


def burst(
    transport: str,
    *,
    count: int,
    size: int,
    from_listener: bool = False,
    on_bus: bool = False,
    batch: int = 256 * KB,
    quiet_s: float = 3.0,
) -> FaultResult:
    """Send as fast as possible; every accepted message must arrive.

    Args:
        transport: what connects the nodes.
        count: number of messages.
        size: bytes per message.
        from_listener: whether the listener sends instead of the dialer.
        on_bus: whether the nodes use the stub that loses messages instead of the router.
        batch: bytes up to which messages share a frame.
        quiet_s: after this many seconds without a message, missing ones count as lost.
    """
    way = "listener to dialer" if from_listener else "dialer to listener"
    result = FaultResult(f"burst of {count:,} x {size // KB:,} KB, {way}", transport)
    sends = Sends(count=count, size=size)
    common: dict[str, Any] = {"on_bus": on_bus, "options": {"batch_bytes": batch}}
    if on_bus:
        common["key"] = ""
    with cluster(transport) as nodes:
        settings = [
            {"sends": sends, "expected": 1, **common},
            {"receives": ("e",), **common},
        ]
        listens, dials = settings if from_listener else reversed(settings)
        first, second = nodes.listener(**listens), nodes.dialer(1, **dials)
        sender, receiver = (first, second) if from_listener else (second, first)
        sender.await_line("ready")
        sender.send_command("send")
        sender.await_line("sent all", deadline_s=300.0)
        _settle(receiver, count, quiet_s)
        second.stop()
        first.stop()
        verdict = _compared(sender, receiver)
        result.check("0 lost, in order", verdict, verdict.clean and verdict.accepted == count)
    return result


def slow_consumer(
    transport: str, *, count: int, size: int, slow_s: float, bound: int
) -> FaultResult:
    """Send ten times as fast as the other side handles messages.

    Args:
        transport: what connects the nodes.
        count: number of messages.
        size: bytes per message.
        slow_s: seconds that the consumer takes per message.
        bound: limit in bytes of the sender's queue, and of the receiver's.
    """
    result = FaultResult(f"consumer 10 x too slow, {count:,} x {size // KB:,} KB", transport)
    options = {"outbox_bytes": bound, "inbox_bytes": bound, "batch_bytes": 256 * KB}
    sends = Sends(count=count, size=size, pace_s=slow_s / 10)
    with cluster(transport) as nodes:
        receiver = nodes.listener(receives=("e",), slow_s=slow_s, options=options, prefix=GIVE_BACK)
        sender = nodes.dialer(1, sends=sends, expected=1, options=options, prefix=GIVE_BACK)
        sender.await_line("ready")
        with Peak(sender) as at_sender, Peak(receiver) as at_receiver:
            sender.send_command("send")
            sender.await_line("sent all", deadline_s=600.0)
            _settle(receiver, count, max(3.0, 20 * slow_s))
        blocked_s = sender.status()["traffic"]["e"]["blocked_s"]
        sender.stop()
        receiver.stop()
        verdict = _compared(sender, receiver)
    result.check("0 lost", verdict, verdict.clean and verdict.accepted == count)
    # In addition to the queue: frames that senders copy out, or that serving contexts copy in.
    allowed = bound + FRAMES_IN_HAND * max(size, 256 * KB)
    for name, peak in (("sender", at_sender), ("receiver", at_receiver)):
        growth, most = peak.growth / MB, 1.1 * allowed / MB
        result.at_most(f"memory growth of the {name}", growth, round(most, 1), "MB")
    if nodes.slabs is not None:
        most = sum(process.spec.shared_bytes for process in (sender, receiver)) / MB
        result.at_most("files in shared memory", nodes.slabs.most_bytes / MB, most, "MB")
    result.check("the producer's waiting time is reported", f"{blocked_s:.1f} s", blocked_s > 0)
    return result


def slow_weight_reader(transport: str, *, count: int, size: int, slow_s: float) -> FaultResult:
    """Publish versions while one reader is slow.

    Args:
        transport: what connects the nodes.
        count: number of versions.
        size: bytes per version.
        slow_s: seconds that the slow reader takes per version; the other takes none.
    """
    result = FaultResult(f"slow weight reader, {count:,} versions of {size // KB:,} KB", transport)
    sends = Sends(event="weights", delivery="latest", count=count, size=size, pace_s=slow_s / 10)
    with cluster(transport) as nodes:
        learner = nodes.listener(sends=sends, expected=2)
        slow = nodes.dialer(1, receives=("weights",), slow_s=slow_s)
        fast = nodes.dialer(2, receives=("weights",))
        learner.await_line("ready")
        learner.send_command("send")
        copies = 0
        while not learner.ledger.lines("sent all"):
            copies = max(copies, learner.status()["copies"])
        start = learner.ledger.lines("started")[0][2]
        for reader in (slow, fast):
            wait_until(_newest_at(reader, start, count - 1), "the newest version")
        usual_s = statistics.median(line[2] for line in learner.ledger.lines("published"))
        rises, newest, whole = True, True, True
        for reader in (slow, fast):
            got = reader.ledger.got(0, start, "weights")
            versions = [number for number, _ in got]
            rises &= versions == sorted(set(versions))
            newest &= versions[-1] == count - 1
            whole &= all(fine for _, fine in got)
        skipped = count - len(slow.ledger.got(0, start, "weights"))
        for process in (slow, fast, learner):
            process.stop()
    result.check(
        "versions only increase, and end with the newest one",
        f"{skipped} skipped by the slow reader",
        rises and whole and newest,
    )
    result.check("encoded copies at the learner ≤ 2", f"{copies}", 1 <= copies <= 2)
    # A writer that waits for the slow reader would take as long as the reader.
    result.at_most("the writer is not slowed down: median emit", usual_s, slow_s / 2)
    return result


def _newest_at(reader: Process, start: int, number: int) -> Callable[[], bool]:
    return lambda: (number, True) in reader.ledger.got(0, start, "weights")[-1:]


def _settle(receiver: Process, count: int, quiet_s: float) -> None:
    """Wait until all messages have arrived, or none arrives for ``quiet_s``."""
    have = -1
    while have < len(receiver.ledger.lines("got")) < count:
        have = len(receiver.ledger.lines("got"))
        with contextlib.suppress(TimeoutError):
            wait_until(_beyond(receiver, have), "more messages", deadline_s=quiet_s)


def _beyond(receiver: Process, have: int) -> Callable[[], bool]:
    return lambda: len(receiver.ledger.lines("got")) > have


def _compared(sender: Process, receiver: Process) -> Comparison:
    start = sender.ledger.lines("started")[0][2]
    got = receiver.ledger.got(sender.spec.node_id, start)
    return compare(sender.ledger.sent(), got)
