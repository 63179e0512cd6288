"""A long run with a fault every few seconds: threads, descriptors and memory stay constant."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import numpy as np
import psutil

from tests.faults.delivery_faults import MB
from tests.faults.fault_result import FaultResult
from tests.faults.ledger import Comparison, compare_killed, join
from tests.faults.node_program import Sends
from tests.faults.process_cluster import Cluster, Process, cluster
from tests.waiting import wait_until

__all__ = ["soak"]

_SEED = 17
_KINDS = ("kill", "hang", "noise")


def soak(
    transport: str,
    *,
    lasts_s: float,
    fault_every_s: float,
    check_slope: bool,
    hang_s: float = 3.6,
) -> FaultResult:
    """Send for a long time while faults are injected periodically.

    Args:
        transport: what connects the nodes.
        lasts_s: duration.
        fault_every_s: seconds between faults: a sender is killed and replaced, a sender hangs, or
            strangers send random bytes.
        check_slope: whether the run is long enough to measure the growth of memory.
        hang_s: how long a sender hangs; after 3 s it counts as lost.
    """
    result = FaultResult(f"soak of {lasts_s:g} s, a fault every {fault_every_s:g} s", transport)
    rng = random.Random(_SEED)
    sends = Sends(size=16 * 1024, pace_s=0.005)
    with cluster(transport) as nodes:
        learner = nodes.listener(receives=("e",))
        alive = [nodes.dialer(n, sends=sends, expected=1, at_once=True) for n in (1, 2, 3)]
        starts = list(alive)
        for process in alive:
            process.await_line("sent", count=20)
        # The first fault of each kind creates threads, buffers and caches that stay.
        for kind in _KINDS:
            _inject(kind, nodes, rng, alive, starts, hang_s)
        before, started_at = _settled(learner), time.monotonic()
        samples = []
        faults = 0
        while (now := time.monotonic()) - started_at < lasts_s:
            _inject(_KINDS[faults % len(_KINDS)], nodes, rng, alive, starts, hang_s)
            faults += 1
            due = now + fault_every_s
            while time.monotonic() < due:
                samples.append((time.monotonic() - started_at, _resident(learner)))
                wait_until(_at(min(due, time.monotonic() + 0.5)), "the next sample")
        after = _settled(learner)
        for process in alive:
            process.stop()
        verdict = join(_compared(learner, process) for process in starts)
        lives = learner.alive
    result.check("the receiver survives", f"{faults} faults", lives)
    result.check("no acknowledged message lost, none duplicated", verdict, verdict.clean)
    result.check(
        "number of threads constant",
        f"{before[0]} before, {after[0]} after",
        after[0] <= before[0],
    )
    result.check(
        "number of file descriptors constant",
        f"{before[1]} before, {after[1]} after",
        after[1] <= before[1],
    )
    if check_slope:
        seconds, resident = np.array(samples).T
        slope = float(np.polyfit(seconds / 60, resident / MB, 1)[0])
        result.at_most("memory growth", slope, 1.0, "MB/min")
    return result


def _inject(
    kind: str,
    nodes: Cluster,
    rng: random.Random,
    alive: list[Process],
    starts: list[Process],
    hang_s: float,
) -> None:
    position = rng.randrange(len(alive))
    victim = alive[position]
    if kind == "kill":
        victim.kill()
        alive[position] = nodes.restart(victim)
        starts.append(alive[position])
        alive[position].await_line("sent")
    elif kind == "hang":
        at = victim.signal(signal.SIGSTOP)
        wait_until(_at(at + hang_s), "the pause", deadline_s=2 * hang_s)
        victim.signal(signal.SIGCONT)
    else:
        for _ in range(10):
            with nodes.raw_peer() as peer:
                peer.write(peer.head(500) + rng.randbytes(500))


def _at(when: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= when


def _settled(learner: Process) -> tuple[int, int]:
    """Return the numbers of threads and descriptors once they are steady.

    The threads that wait for sockets do not count: their number, at most four, depends on how often
    one of them was held up.
    """
    wait_until(lambda: learner.status()["peers"] == [1, 2, 3], "all senders")
    counts: list[tuple[int, int]] = []

    def steady() -> bool:
        counts.append((learner.view.num_threads(), learner.view.num_fds()))
        return len(counts) > 50 and len(set(counts[-50:])) == 1

    wait_until(steady, "steady threads and descriptors")
    n_threads, n_descriptors = counts[-1]
    return n_threads - learner.status()["io_threads"], n_descriptors


def _resident(learner: Process) -> int:
    try:
        return int(learner.view.memory_info().rss)
    except psutil.NoSuchProcess:
        raise RuntimeError(f"the receiver died: {learner.errors()}") from None


def _compared(learner: Process, sender: Process) -> Comparison:
    start = sender.ledger.lines("started")[0][2]
    return compare_killed(
        sender.ledger.lines("sent"), learner.ledger.got(sender.spec.node_id, start)
    )
