"""The memory that a node grants to its peers for large events."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from dmiddleware.errors import FrameError
from dmiddleware.router.protocol.fragments import Assembly
from dmiddleware.router.protocol.peer import Peer

__all__ = ["MemoryGrants"]

_logger = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """A large frame that a peer asks memory for."""

    peer: Peer
    stream: int
    sequence: int
    total: int


class MemoryGrants:
    """Grants memory for large frames, in the order in which it was asked for.

    Args:
        max_bytes: how much memory there is.
        peers: all peers.
        gone: the disconnected ones, which keep no memory that others need.

    Attributes:
        wanted: what was asked for and could not be granted yet.
    """

    def __init__(
        self, max_bytes: int, *, peers: Mapping[str, Peer], gone: Mapping[str, Peer]
    ) -> None:
        self._max_bytes = max_bytes
        self._peers = peers
        self._gone = gone
        self.wanted: deque[_Wanted] = deque()

    def ask(self, peer: Peer, stream: int, sequence: int, total: int) -> None:
        """Note that a peer asks for memory; call :meth:`grant` next.

        Raises:
            FrameError: if no peer that follows the protocol asks so.
        """
        if total > self._max_bytes:
            raise FrameError(
                f"node {peer.node_id} wants to send a frame of {total} bytes, but this node has "
                f"announced that it accepts at most {self._max_bytes}"
            )
        if any(request.peer is peer and request.stream == stream for request in self.wanted):
            raise FrameError(f"node {peer.node_id} asks twice for the memory of a large frame")
        peer.incoming.check_next(stream, sequence)
        self.wanted.append(_Wanted(peer, stream, sequence, total))

    def grant(self) -> list[Peer]:
        """Grant what is possible; return the peers that need an answer."""
        granted = []
        while self.wanted and (memory := self._memory_for(self.wanted[0])) is not None:
            peer = self.wanted.popleft().peer
            peer.incoming.grant(memory)
            granted.append(peer)
        return granted

    def drop(self, peer: Peer) -> None:
        """Forget what a peer has asked for; over its next connection it asks again."""
        self.wanted = deque(request for request in self.wanted if request.peer is not peer)
        peer.incoming.on_restart()

    def _memory_for(self, request: _Wanted) -> Assembly | None:
        """Return memory for a large frame; None: there is none at the moment."""
        peer, stream, sequence, total = request
        assembly = peer.incoming.assembly(stream, sequence)
        if assembly is not None and assembly.total == total:
            return assembly
        peer.incoming.drop_unfinished(stream)
        if self._n_held() + total > self._max_bytes:
            for gone in self._gone.values():
                gone.incoming.drop_unfinished()
            if self._n_held() + total > self._max_bytes:
                return None
        try:
            return Assembly(stream, sequence, total)
        except MemoryError:
            _logger.warning(
                "the system refused %d bytes for an event of node %s, which is kept waiting; "
                "free some memory, or lower max_event_bytes",
                total,
                peer.node_id,
            )
            return None

    def _n_held(self) -> int:
        return sum(peer.incoming.large_bytes for peer in self._peers.values())
