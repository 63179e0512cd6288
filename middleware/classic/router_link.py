"""The link of the coordinator and its workers over the router."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from dmiddleware.errors import (
    ConfigError,
    DeliveryTimeout,
    DMiddlewareError,
    EventError,
    RouterStateError,
)
from dmiddleware.flow_control import FairQueue
from dmiddleware.pipeline import Event, Task
from dmiddleware.worker.comm import COORDINATOR_LINK_REGISTRY, Answer, Ask, Link, Store
from dmiddleware.worker.coordinator.conversation import Said
from dmiddleware.worker.coordinator.messages import COORDINATOR, Joined, Left
from middleware.classic.router_store import Packed, RouterStore
from middleware.context import OnlineRLContext

__all__ = ["RouterLink", "open_coordinator_link"]

_TYPES: Final = {one.__name__: one for one in (Ask, Answer)}
_ENDED: Final = Event("classic.ended", timeout_s=5.0)
"""The coordinator has ended the run in order."""

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
    """A :class:`~dmiddleware.worker.comm.Link` over the events of a task.

    Each request or answer is a reliable event that only its addressee subscribes to. The step data
    of the references in it travels with it, into the addressee's store.

    Every link announces its role to the others; the order in which they start does not matter. The
    presence of a node comes from the router; a process that replaces another one of the same node
    is a new peer.

    Args:
        role: ``coordinator``, ``collector`` or ``learner``.
        task: carries the events; None: a new one on the router of the current node. A given task is
            not closed with the link.
        timeout_s: how long the router may take to accept a message.

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
        self._queue: FairQueue[tuple[str, Said]] = FairQueue(changed=self._changed)
        self._answered: list[str] = []
        self._connected: dict[str, _Peer] = {}
        self._introduced: dict[int, _Peer] = {}
        self._watched: set[int] = set()
        self._cur_step = 0
        self._task.at_stop(self._wake)
        self._task.on(self._event(self._own.uid), self._on_message)
        self._task.on("node.joined", self._on_joined)
        self._task.on("node.rejoined", self._on_joined)
        self._task.on("node.left", self._on_left)
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
                self._changed, lambda: self._queue.closed or self.stopped, timeout_s
            )

    def peers(self) -> Mapping[str, str]:
        """Return the role of each connected peer, by uid."""
        with self._changed:
            return {uid: peer.role for uid, peer in self._connected.items()}

    def send(self, peer: str, message: Ask | Answer) -> None:
        """Send to a peer; returns once the router has accepted it.

        Raises:
            DeliveryTimeout: if the peer is not connected, or the link is closed, or the router does
                not accept it in time.
            EncodeError: if the content is something else than plain values.
        """
        with self._changed:
            target = self._connected.get(peer)
            if target is None or self._queue.closed:
                raise DeliveryTimeout(f"{peer} is not connected to {self.uid}; nothing was sent")
        refs = _references(message)
        fields = _plain(
            {one.name: getattr(message, one.name) for one in dataclasses.fields(message)}
        )
        kind = type(message).__name__
        self._emit(target, (tuple(self._own), target.token, kind, fields, self._store.take(refs)))
        if isinstance(message, Answer):
            self._answered = refs
            if self._owns_task:
                self._note_progress(message)

    def receive(self, timeout_s: float) -> tuple[str, Said] | None:
        """Return what has arrived next, and from whom; None after ``timeout_s`` seconds.

        A closed link returns None at once.
        """
        received = self._queue.take(timeout_s)
        if received is None:
            return None
        peer, said = received
        if isinstance(said, Ask) and said.name != "resource":
            # The last answer has arrived, and with it the step data.
            refs, self._answered = self._answered, []
            self._store.delete(refs)
        return peer, said

    def close(self, deadline_s: float) -> None:
        """End; may be called twice. The router delivers all sent messages before it closes.

        The coordinator's link ends the run: the workers are asked to stop.
        """
        with self._changed:
            if self._queue.closed:
                return
            self._queue.close()
        handlers: list[Callable[..., None]] = [
            self._on_message, self._on_ended, self._on_joined, self._on_left,
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

    def _note_progress(self, answer: Answer) -> None:
        """Count the step and what it has done, for the launcher."""
        ctx = self._task.ctx
        ctx.total_step += 1
        if "cur_learner_iter" in answer.result:
            ctx.train_iter = int(answer.result["cur_learner_iter"])
        for report in _reports(answer):
            cur_step = int(report.get("cur_step", self._cur_step))
            ctx.env_step += cur_step - (self._cur_step if cur_step >= self._cur_step else 0)
            self._cur_step = cur_step

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
                    gone = self._queue.closed or self._connected.get(target.uid) != target
                    if gone or time.monotonic() > deadline:
                        raise DeliveryTimeout(f"{target.uid} takes no messages: {error}") from error
                    self._changed.wait(_RETRY_S)

    def _event(self, uid: str) -> Event:
        return Event(f"classic.to.{uid}", timeout_s=self._timeout_s, required=True)

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
    ) -> None:
        peer = _Peer(*sender)
        if token != self._own.token:
            return  # for an earlier process
        try:
            message = _TYPES[kind](**fields)
        except (KeyError, TypeError) as error:
            _log.warning("%s has sent a message that cannot be read: %s", peer.uid, error)
            return
        if isinstance(message, Answer):
            self._store.hold(values)
        elif "data" in message.request:
            self._store.hold_batch(values)
        with self._changed:
            self._introduce(peer)
            self._queue.put((peer.uid, message))

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
            self._queue.put((peer.uid, Left("replaced by a new process")))
        self._introduced[peer.node_id] = self._connected[peer.uid] = peer
        self._queue.put((peer.uid, Joined(peer.role)))

    def _on_joined(self, node_id: int, *, new_incarnation: bool = False, **_: Any) -> None:
        with self._changed:
            is_new = node_id not in self._watched
            self._watched.add(node_id)
            known = self._introduced.get(node_id)
            if new_incarnation and known is not None:
                del self._introduced[node_id]
            elif known is not None:
                self._introduce(known)
        if is_new:
            self._task.on(_hello(node_id), self._on_hello)

    def _on_left(self, node_id: int, reason: str) -> None:
        with self._changed:
            if self._connected.pop(_uid(node_id), None) is not None:
                self._queue.put((_uid(node_id), Left(reason)))


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


def _reports(answer: Answer) -> Iterable[Mapping[str, Any]]:
    """Return the reports in an answer of a collector; of others, the whole answer."""
    return answer.result, *answer.result.get("more", ())


def _references(message: Ask | Answer) -> list[str]:
    """Return the references whose step data travels with a message."""
    metas = message.request.get("data", ()) if isinstance(message, Ask) else _reports(message)
    return [str(meta.get("object_ref", meta["data_id"])) for meta in metas if "data_id" in meta]


def _plain(value: Any) -> Any:
    """Return nested values with plain dictionaries, such as the router can send."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
