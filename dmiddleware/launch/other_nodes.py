"""The nodes of a run that other launchers have started."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from dmiddleware.launch.plan import NodePlan
from dmiddleware.launch.status import NodeStatus

__all__ = ["OtherNodes", "few_nodes"]

GONE_S: Final = 3.0
"""Seconds without a connection after which a node has left; a broken one is restored sooner."""
_N_SHOWN: Final = 4


class OtherNodes:
    """Notices when nodes that other launchers have started join the run, and when they leave it.

    Args:
        own: the ids of the nodes that this launcher has started.
        attached: whether those joined the run of another launcher.
        decides: whether the program gives the nodes of the run their roles.
    """

    def __init__(self, *, own: Collection[int], attached: bool, decides: bool = False) -> None:
        self._own = own
        self._decides = decides
        self._words = ("connected to", "no longer connected to")
        if not attached:
            self._words = ("joined the run:", "left the run:")
        self._nodes: dict[int, NodePlan] = {}
        self._seen_at: dict[int, float] = {}

    def changes(self, statuses: Sequence[NodeStatus], now: float) -> Iterator[str]:
        """Yield messages about what has changed since the last call.

        Args:
            statuses: the status of each of the launcher's nodes that is alive.
            now: the time by a monotonic clock, in seconds.
        """
        present = {
            node_id: NodePlan(node_id, roles=roles, decides=self._decides and not roles)
            for status in statuses
            for node_id, roles in status.peers.items()
            if node_id not in self._own
        }
        joined = [node_id for node_id in present if node_id not in self._seen_at]
        self._nodes |= present
        if any(status.phase != "running" for status in statuses):
            # A node that was restarted has yet to connect.
            self._seen_at = dict.fromkeys(self._seen_at, now)
        self._seen_at |= dict.fromkeys(present, now)
        gone = [node_id for node_id, at in self._seen_at.items() if now - at > GONE_S]
        for words, node_ids in zip(self._words, (joined, gone), strict=True):
            if node_ids:
                yield f"{words} {few_nodes([self._nodes[node_id] for node_id in node_ids])}"
        for node_id in gone:
            del self._seen_at[node_id]


def few_nodes(nodes: Sequence[NodePlan]) -> str:
    """Return names for a message; a run over many hosts has hundreds of nodes."""
    names, n_more = ", ".join(map(str, nodes[:_N_SHOWN])), len(nodes) - _N_SHOWN
    return names if n_more <= 0 else f"{names} and {n_more} more"
