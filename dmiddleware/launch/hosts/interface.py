"""The interface between the launcher and a host, which starts the processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from dmiddleware.launch.plan import NodeConfig
from dmiddleware.launch.status import NodeStatus

__all__ = ["Ended", "Host", "HostEvent", "Note", "Output", "Reported", "Started"]


@dataclass(frozen=True, slots=True)
class Started:
    """A node's process runs.

    Attributes:
        node_id: the node.
        where: the process, for the log, such as ``process 4711``.
    """

    node_id: int
    where: str


@dataclass(frozen=True, slots=True)
class Output:
    """A node has printed something.

    Attributes:
        node_id: the node.
        data: the bytes, for its log.
        lines: the lines that they complete.
    """

    node_id: int
    data: bytes
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Reported:
    """A node has reported its status.

    Attributes:
        node_id: the node.
        status: the status.
    """

    node_id: int
    status: NodeStatus


@dataclass(frozen=True, slots=True)
class Ended:
    """A node's process has ended; only processes that it has left behind may still print.

    Attributes:
        node_id: the node.
        code: its exit code; negative: the signal that killed it.
        why: what is known about its end, beside the code; empty: nothing.
    """

    node_id: int
    code: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """The host has something to say.

    Attributes:
        text: one line.
    """

    text: str


HostEvent: TypeAlias = Started | Output | Reported | Ended | Note


class Host(Protocol):
    """Starts nodes, tells what happens to them, and stops them.

    Leaving the ``with`` block kills what still runs and frees everything.
    """

    def __enter__(self) -> Self:
        """Prepare."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill the nodes that still run, and wait until they have ended."""
        ...

    def start(self, config: NodeConfig, *, n_restarts: int) -> None:
        """Start a node, or restart one that has ended.

        Args:
            config: the node's configuration.
            n_restarts: how often it was restarted.

        Raises:
            OSError: if that is not possible.
        """
        ...

    def events(self, timeout_s: float) -> Iterator[HostEvent]:
        """Return what has happened since the last call; wait for the first event.

        The events of one node are in order, and its output comes before its end.

        Args:
            timeout_s: how long to wait; a host may return earlier without events.
        """
        ...

    def stop(self, node_id: int, reason: str) -> None:
        """Ask a node to stop, without waiting; nothing happens if it has ended."""
        ...

    def kill(self, node_id: int) -> None:
        """End a node at once, with the processes that it has started."""
        ...

    def dump_stacks(self, node_id: int) -> None:
        """Let a node print what its threads are doing, if the host can do that."""
        ...

    def leave(self, reason: str, timeout_s: float) -> None:
        """Stop all nodes in order without watching them, after an error of the launcher itself."""
        ...
