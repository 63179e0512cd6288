"""The status that a node reports to its launcher, one line of JSON at a time."""

from __future__ import annotations

import msgspec

__all__ = ["NodeStatus"]


class NodeStatus(msgspec.Struct, kw_only=True):
    """The progress of a node.

    Attributes:
        phase: ``starting``, ``running``, ``finished`` or ``failed``.
        address: the address that it listens on.
        roles: the roles of its task; None: its program has yet to give it one.
        step: steps of its task.
        counters: further counters of its task by name, such as environment steps.
        blocked_s: seconds spent waiting for peers, either for their data or for room in their
            queues.
        peers: the roles of the peers that were connected since the status before, by their node
            ids.
        reason: why its task stopped; empty while it runs.
        run_is_over: whether its task stopped together with the whole run.
        decided_end: whether the whole run stopped because of its task.
        idle_s: seconds since the main thread last made progress or waited for a peer.
        error: the error that ended it, on one line.
        where: the line of the program that raised the error, as ``file:line``; empty: not known.
        is_final: whether the error came before the first step had been done, and is a mistake in
            the program or its arguments, which a restart would repeat.
        left_early: whether the program called ``sys.exit(0)`` before it built a task, although
            other nodes expect it.
        failed_at: when it failed, on the host's monotonic clock; 0: it has not.
        sent_at: when it sent this, on the same clock.
    """

    phase: str
    address: str = ""
    roles: tuple[str, ...] | None = None
    step: int = 0
    counters: dict[str, int] = {}
    blocked_s: float = 0.0
    peers: dict[int, tuple[str, ...]] = {}
    reason: str = ""
    run_is_over: bool = False
    decided_end: bool = False
    idle_s: float = 0.0
    error: str = ""
    where: str = ""
    is_final: bool = False
    left_early: bool = False
    failed_at: float = 0.0
    sent_at: float = 0.0
