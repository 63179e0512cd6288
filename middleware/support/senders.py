"""Who sent a batch: a process that was started again must not be taken for the one before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dmiddleware.data import as_tree

__all__ = ["Senders"]

_EPISODE_BITS: Final = 32
_LAST_SOURCE: Final = 2**31 - 1


class Senders:
    """Keeps the episodes apart that processes of one node id, one after the other, number alike.

    A collector's ``episode_id`` begins with its node id, and counts from 0 in every process. What a
    node's second process sends, and its third, gets ids here that no other process has: they begin
    with a number from the top of the range, where there are no node ids.
    """

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        self._later: dict[str, int] = {}

    def tell_apart(self, ctx: Any, node_id: int, token: str) -> None:
        """Give the rows in the context ids that no earlier process of the node used.

        Args:
            ctx: with ``trajectories`` and ``episodes``, batches with or without ``episode_id``.
            node_id: whose.
            token: names the process.
        """
        if self._first.setdefault(node_id, token) == token:
            return
        source = self._later.setdefault(token, _LAST_SOURCE - len(self._later))
        ctx.trajectories = _of_source(ctx.trajectories, source)
        if ctx.episodes is not None:
            ctx.episodes = [_of_source(episode, source) for episode in ctx.episodes]

    def state_dict(self) -> dict[str, Any]:
        """Return which processes have sent something."""
        return {"first": list(self._first.items()), "later": list(self._later.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._first = {int(node_id): token for node_id, token in state["first"]}
        self._later = {token: int(source) for token, source in state["later"]}


def _of_source(batch: Any, source: int) -> Any:
    if not hasattr(batch, "items"):  # a list of transitions has no ids to change
        return batch
    columns = dict(batch.items())
    if "episode_id" not in columns:
        return batch
    number = columns["episode_id"] % (1 << _EPISODE_BITS)
    return as_tree({**columns, "episode_id": number + (source << _EPISODE_BITS)})
