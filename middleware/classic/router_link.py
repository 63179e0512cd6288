"""The link of the coordinator and its workers over the router."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, get_args

from dmiddleware.errors import (
    ConfigError,
    DeliveryTimeout,
    DMiddlewareError,
    EventError,
    RouterStateError,
)
from dmiddleware.inbox import Inbox, ItemId, Window
from dmiddleware.pipeline import Event, Task
from dmiddleware.worker.comm.link import COORDINATOR_LINK_REGISTRY, Link
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.messages import (
    COORDINATOR,
    CollectorInfo,
    DataDemand,
    Joined,
    LearnData,
    Left,
    Message,
    StepDataReady,
)
from middleware.classic.router_store import Packed, RouterStore
from middleware.context import OnlineRLContext

__all__ = ["RouterLink", "open_coordinator_link"]

_TYPES: Final = {one.__name__: one for one in get_args(Message) if one not in (Joined, Left)}
_ENDED: Final = Event("classic.ended", timeout_s=5.0)
"""The coordinator has ended the run in order."""

_WINDOW: Final = 16
"""How many messages a peer may be sent that its program has not taken yet."""

_ACKNOWLEDGE: Final = 4
"""Every how many messages their sender hears that they were taken."""

_RETRY_S: Final = 0.05
"""How long to wait for the subscription of a peer that has just connected, in seconds."""

_log = logging.getLogger(__name__)


class _Peer(NamedTuple):
    """The link of a peer, as it has introduced itself.

    Attributes:
        node_id: its node.
        role: its role.
        token: distinguishes it from the link of an earlier process of the same node.
    """

    node_id: int
    role: str
    token: str

    @property
    def uid(self) -> str:
        return _uid(self.node_id)


class RouterLink:
    """A :class:`~dmiddleware.worker.comm.link.Link` over the events of a task.

    Each message is a reliable event that only its addressee subscribes to. The step data of a
    message's references travels with it, into the addressee's store.

    A peer that sends faster than this program receives has to wait: at most 16 of its messages are
    in transit, and the peers take turns.

    Every link announces its role to the others; the order in which they start does not matter. The
    presence of a node comes from the router; a process that replaces another one of the same node
    is a new peer.

    Args:
        role: ``coordinator``, ``collector`` or ``learner``.
        task: carries the events; None: a new one on the router of the current node. A given task is
            not closed with the link.
        timeout_s: how long a peer may take nothing before :meth:`send` raises.

    Raises:
        ConfigError: if the task has no router.
        ValueError: if ``timeout_s`` is not positive.
    """

    def __init__(
        self, role: str, *, task: Task[Any] | None = None, timeout_s: float = 120.0
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._owns_task = task is None
        self._task: Task[Any] = (
            task if task is not None else Task(OnlineRLContext(), name=f"classic {role}")
        )
        router = self._task.router
        if router is None:
            raise ConfigError(
                "workers of type 'router' need several processes; start the program with "
                "ditask --roles coordinator=1,learner=1,collector=2 --main PACKAGE.main"
            )
        self._own = _Peer(router.node_id, role, secrets.token_hex(8))
        self._timeout_s = timeout_s
        self._store = RouterStore(self._task)
        # The lock of a condition is reentrant, because a signal handler may stop the task.
        self._changed = threading.Condition()
        self._inbox = Inbox[tuple[str, Message]](changed=self._changed)
        self._windows: dict[_Peer, Window] = {}
        self._connected: dict[str, _Peer] = {}
        self._introduced: dict[int, _Peer] = {}
        self._watched: set[int] = set()
        self._cur_step = 0
        self._task.at_stop(self._wake)
        self._task.on(self._event(self._own.uid), self._on_message)
        self._task.on(self._taken_event(self._own.uid), self._on_taken)
        self._task.on("node.joined", self._on_joined)
        self._task.on("node.rejoined", self._on_joined)
        self._task.on("node.left", self._on_left)
        self._task.on("node.forgotten", self._on_forgotten)
        self._task.on(_ENDED, self._on_ended)
        for node_id in router.peer_ids():
            self._on_joined(node_id)
        self._task.emit(_hello(self._own.node_id), *self._own, only_remote=True)

    @property
    def uid(self) -> str:
        """The name of this process among its peers, ``node_<id>``."""
        return self._own.uid

    @property
    def store(self) -> RouterStore:
        """Where the step data of the messages is."""
        return self._store

    @property
    def stopped(self) -> bool:
        """Whether the run is over, or this process was asked to stop."""
        return self._task.finish

    def wait_until_stopped(self, timeout_s: float) -> bool:
        """Wait until :attr:`stopped`, at most ``timeout_s`` seconds; return whether it is."""
        with self._changed:
            return self._task.clock.wait_for(
                self._changed, lambda: self._inbox.closed or self.stopped, timeout_s
            )

    def peers(self) -> Mapping[str, str]:
        """Return the role of each connected peer, by uid."""
        with self._changed:
            return {uid: peer.role for uid, peer in self._connected.items()}

    def send(self, peer: str, message: Message) -> None:
        """Send a message to a peer; returns once the router has accepted it.

        Raises:
            DeliveryTimeout: if the peer is unknown, or takes nothing in time; or if the link is
                closed.
            EncodeError: if the message holds something else than plain values.
        """
        target, item_id = self._wait_for_room(peer)
        refs = _references(message)
        values = self._store.take(refs)
        fields = _plain(
            {one.name: getattr(message, one.name) for one in dataclasses.fields(message)}
        )
        kind = type(message).__name__
        content = (tuple(self._own), target.token, kind, fields, values, tuple(item_id))
        self._emit(target, content)
        if isinstance(message, StepDataReady):
            self._store.delete(refs)
        if self._owns_task:
            self._note_progress(message)

    def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        """Return the next message and its sender, or None after ``timeout_s`` seconds.

        A closed link returns None at once.
        """
        return self._inbox.take(timeout_s)

    def close(self, deadline_s: float) -> None:
        """End; may be called twice. The router delivers all sent messages before it closes.

        The coordinator's link ends the run: the workers are asked to stop.
        """
        with self._changed:
            if self._inbox.closed:
                return
            self._inbox.close()
        handlers: list[Callable[..., None]] = [
            self._on_message, self._on_taken, self._on_ended,
            self._on_joined, self._on_left, self._on_forgotten,
        ]  # fmt: skip
        for handler in handlers:
            self._task.off("*", handler)
        for node_id in self._watched:
            self._task.off(_hello(node_id))
        if not self._owns_task:
            return
        if self._own.role == COORDINATOR and not self.stopped:
            with contextlib.suppress(DMiddlewareError):  # those that take nothing are being stopped
                self._task.emit(_ENDED, only_remote=True)
            self._on_ended()
        self._task.close()

    def _note_progress(self, message: Message) -> None:
        """Count the step and what it has done, for the launcher."""
        ctx = self._task.ctx
        ctx.total_step += 1
        if isinstance(message, DataDemand):
            ctx.train_iter = message.cur_learner_iter
        elif isinstance(message, CollectorInfo):
            cur_step = int(message.info.get("cur_step", 0))
            ctx.env_step += cur_step - (self._cur_step if cur_step >= self._cur_step else 0)
            self._cur_step = cur_step

    def _wait_for_room(self, uid: str) -> tuple[_Peer, ItemId]:
        """Wait until a peer may be sent one more message; return it, and the message's id.

        Raises:
            DeliveryTimeout: if it is not connected, or takes nothing in time.
        """
        with self._changed:
            target = self._connected.get(uid)

            def is_gone() -> bool:
                return self._inbox.closed or self._connected.get(uid) != target

            in_time = target is not None and self._changed.wait_for(
                lambda: is_gone() or self._window(target).has_room, self._timeout_s
            )
            if target is None or is_gone():
                raise DeliveryTimeout(f"{uid} is not connected to {self.uid}; nothing was sent")
            if not in_time:
                raise DeliveryTimeout(f"{uid} has taken no message for {self._timeout_s:g} s")
            return target, self._window(target).send()

    def _window(self, peer: _Peer) -> Window:
        if peer not in self._windows:
            self._windows[peer] = Window(_WINDOW)
        return self._windows[peer]

    def _emit(self, target: _Peer, content: tuple[Any, ...]) -> None:
        event = self._event(target.uid)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._task.emit(event, *content, only_remote=True, to=target.node_id)
                return
            except RouterStateError as error:
                raise DeliveryTimeout(f"{target.uid} takes no messages: {error}") from error
            except EventError as error:  # it has not subscribed yet, or the task is closed
                with self._changed:
                    gone = self._inbox.closed or self._connected.get(target.uid) != target
                    if gone or time.monotonic() > deadline:
                        raise DeliveryTimeout(f"{target.uid} takes no messages: {error}") from error
                    self._changed.wait(_RETRY_S)

    def _event(self, uid: str) -> Event:
        return Event(f"classic.to.{uid}", timeout_s=self._timeout_s, required=True)

    def _taken_event(self, uid: str) -> Event:
        """Return the event with which a peer's messages are acknowledged, by their number."""
        return Event(f"classic.taken.{uid}", timeout_s=self._timeout_s)

    def _acknowledge(self, peer: _Peer, item_id: ItemId) -> None:
        if item_id.number % _ACKNOWLEDGE == 0:
            with contextlib.suppress(DMiddlewareError):  # it is leaving, and sends nothing more
                self._task.emit(
                    self._taken_event(peer.uid), *item_id, only_remote=True, to=peer.node_id
                )

    def _on_taken(self, token: str, number: int) -> None:
        with self._changed:
            for window in self._windows.values():
                window.acknowledge(token, number)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_message(
        self,
        sender: tuple[int, str, str],
        token: str,
        kind: str,
        fields: dict[str, Any],
        values: dict[str, Packed],
        item_id: tuple[str, int],
    ) -> None:
        peer = _Peer(*sender)
        if token != self._own.token and self._own.role != COORDINATOR:
            return  # for an earlier process; a coordinator continues its predecessor's work
        try:
            message = _TYPES[kind](**fields)
        except (KeyError, TypeError) as error:
            _log.warning("%s has sent a message that cannot be read: %s", peer.uid, error)
            return
        if isinstance(message, LearnData):
            self._store.hold_batch(values)
        else:
            self._store.hold(values)
        with self._changed:
            self._introduce(peer)
            acknowledge = partial(self._acknowledge, peer, ItemId(*item_id))
            self._inbox.put((peer.uid, message), sender=peer.uid, acknowledge=acknowledge)

    def _on_ended(self) -> None:
        self._task.stop("the coordinator has ended the run")

    def _on_hello(self, *sender: Any) -> None:
        with self._changed:
            self._introduce(_Peer(*sender))

    def _introduce(self, peer: _Peer) -> None:
        """Note the link of a connected node; the caller holds the lock."""
        earlier = self._connected.get(peer.uid)
        if earlier == peer:
            return
        if earlier is not None:
            self._windows.pop(earlier, None)
            self._note(peer.uid, Left("replaced by a new process"))
        self._introduced[peer.node_id] = self._connected[peer.uid] = peer
        self._note(peer.uid, Joined(peer.role))

    def _on_joined(self, node_id: int, *, new_incarnation: bool = False, **_: Any) -> None:
        with self._changed:
            is_new = node_id not in self._watched
            self._watched.add(node_id)
            known = self._introduced.get(node_id)
            if new_incarnation and known is not None:
                del self._introduced[node_id]
                self._windows.pop(known, None)
            elif known is not None:
                self._introduce(known)
        if is_new:
            self._task.on(_hello(node_id), self._on_hello)

    def _on_left(self, node_id: int, reason: str) -> None:
        with self._changed:
            if self._connected.pop(_uid(node_id), None) is not None:
                self._note(_uid(node_id), Left(reason))

    def _on_forgotten(self, node_id: int, _: int) -> None:
        """Open the window: the router has dropped what the node had not taken."""
        with self._changed:
            known = self._introduced.get(node_id)
            if known is not None:
                self._windows.pop(known, None)
                self._changed.notify_all()

    def _note(self, uid: str, change: Joined | Left) -> None:
        """Queue what has become of a peer, after its messages."""
        self._inbox.put((uid, change), sender=uid)


@COORDINATOR_LINK_REGISTRY.register("router")
def open_coordinator_link(cfg: Mapping[str, Any]) -> tuple[Link, Store]:
    """Open the coordinator's end of the link over the router, and its store.

    Args:
        cfg: the coordinator's config, from which nothing is needed.

    Raises:
        ConfigError: if this process has no router.
    """
    link = RouterLink(COORDINATOR)
    return link, link.store


def _uid(node_id: int) -> str:
    return f"node_{node_id}"


def _hello(node_id: int) -> Event:
    """Return the event with which a node's link introduces itself, also to later subscribers."""
    return Event(f"classic.hello.{node_id}", delivery="latest")


def _references(message: Message) -> list[str]:
    """Return the references whose step data travels with a message."""
    if isinstance(message, StepDataReady):
        return [_reference(message.data, message.data_id)]
    if isinstance(message, LearnData):
        return [_reference(meta, meta.get("data_id", "")) for meta in message.data]
    return []


def _reference(meta: Mapping[str, Any], default: str) -> str:
    return str(meta.get("object_ref", default))


def _plain(value: Any) -> Any:
    """Return nested values with plain dictionaries, such as the router can send."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
