"""How events set out: encoded once, accepted for each peer, and sent as far as there is a way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dmiddleware.errors import DeliveryTimeout
from dmiddleware.pipeline import Event
from dmiddleware.router.core import Core, run
from dmiddleware.router.wire.envelope import EncodedEvent, encode_event

__all__ = ["Emitter"]


class Emitter:
    """Gives events to the node, on the thread that emits them.

    Args:
        core: whose node takes them.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def emit(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send an event to those who want it; see :meth:`dmiddleware.router.Router.emit`."""
        core = self._core
        with core.lock:
            if core.fatal is not None:
                raise core.fatal
            targets = core.node.audience.targets(event.name)
        if not targets and event.delivery != "latest":
            return
        encoded = encode_event(
            event.name, [list(args), kwargs], core.codec, core.transport.lay_down
        )
        waiting: list[str] = []
        with core.lock:
            core.node.audience.check_size(encoded, targets)
            if event.delivery == "reliable":
                waiting = self._offer(encoded, targets)
            else:
                self._put(event, encoded, targets)
            moves = core.pump.moves(core.clock.now(), targets)
        run(moves)
        if waiting:
            self._offer_in_time(event, encoded, waiting)

    def _offer(self, encoded: EncodedEvent, targets: Iterable[str]) -> list[str]:
        """Offer an event to peers; returns those that have no room."""
        refused = []
        for node_id in targets:
            if self._core.node.offer(node_id, encoded):
                self._count_sent(encoded)
            else:
                refused.append(node_id)
        return refused

    def _offer_in_time(self, event: Event, encoded: EncodedEvent, waiting: list[str]) -> None:
        core = self._core
        began = core.clock.now()

        def accepted() -> bool:
            refused = self._offer(encoded, waiting)
            taken = [node_id for node_id in waiting if node_id not in refused]
            waiting[:] = refused
            # Sent with the lock held: this wait may go on for long, for other peers.
            run(core.pump.moves(core.clock.now(), taken))
            return core.closing or core.fatal is not None or not waiting

        with core.lock:
            core.clock.wait_for(core.room, accepted, event.timeout_s)
            core.traffic.of(event.name).blocked_s += core.clock.now() - began
            full = ", ".join(self._describe(node_id) for node_id in waiting)
        if not waiting:
            return
        if core.fatal is not None:
            raise core.fatal
        raise DeliveryTimeout(
            f"the event {event.name!r} was not accepted for {event.timeout_s:g} s by {full}; "
            "emit less often, handle it faster there, or declare it latest or lossy"
        )

    def _put(self, event: Event, encoded: EncodedEvent, targets: Sequence[str]) -> None:
        node = self._core.node
        if event.delivery == "latest":
            node.audience.put_latest(encoded)
        for node_id in targets:
            self._count_sent(encoded)
            if event.delivery == "lossy" and (link := node.links.get(node_id)) is not None:
                link.outgoing.put_lossy(encoded)

    def _describe(self, node_id: str) -> str:
        node = self._core.node
        link = node.links.get(node_id)
        outbox = link.outgoing.outbox if link is not None else None
        state = "here" if node.is_here(node_id) else "gone"
        size = f"{outbox.n_messages} events, {outbox.n_bytes} bytes" if outbox else "empty"
        return f"node {node_id} ({state}; its queue holds {size})"

    def _count_sent(self, encoded: EncodedEvent) -> None:
        traffic = self._core.traffic.of(encoded.event)
        traffic.sent += 1
        traffic.sent_bytes += encoded.size
