"""What lasts longer than a step: set-up, state and closing of middleware, and the end of a run."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dmiddleware.errors import CheckpointMismatch
from dmiddleware.pipeline.onion import SkipRest

__all__ = ["Lifecycle", "Stateful", "StopRequest"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class StopRequest:
    """Whether a run was asked to stop, and how; the first request counts.

    Attributes:
        reason: why, as the node that decided it gave it; None without a request.
        ok: False if something has failed, even after the first request.
        only_local: whether the peers continue without this process.
        final: whether the run is finished, and not only interrupted.
        origin: the node that decided it, or None for this one.
    """

    reason: str | None = None
    ok: bool = True
    only_local: bool = False
    final: bool = False
    origin: int | None = None

    @property
    def text(self) -> str | None:
        """The reason, with the node that decided it."""
        if self.reason is None or self.origin is None:
            return self.reason
        return f"node {self.origin}: {self.reason}"

    def make(
        self,
        reason: str,
        *,
        ok: bool = True,
        only_local: bool = False,
        final: bool = True,
        origin: int | None = None,
    ) -> None:
        """Make the request, unless there is one already; a failure is noted in any case."""
        if not ok:
            self.ok = self.final = False
        if self.reason is None:
            self.only_local = only_local
            self.final = final and self.ok and not only_local
            self.origin = origin
            # Set last: the chain may run on another thread, and ends when it sees the reason.
            self.reason = reason


@runtime_checkable
class _Bindable(Protocol):
    def bind(self, chain: Any) -> object: ...


@runtime_checkable
class _SetUp(Protocol):
    def setup(self, task: Any) -> object: ...


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> object: ...


@runtime_checkable
class Stateful(Protocol):
    """An object with a state."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any) -> object:
        """Restore a state."""
        ...


@runtime_checkable
class _HasPendingSteps(Protocol):
    def pending_steps(self) -> int: ...


@dataclass(slots=True)
class _Member:
    label: str
    subject: object
    part: str | None = None
    is_active: bool = False
    is_ready: bool = False


class Lifecycle:
    """Binds, sets up, saves, loads and closes objects, in the order in which they were added.

    An object that is added twice is handled once, and one without any of these methods is not
    stored at all. Methods that an object lacks are skipped.
    """

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._pending: list[_Member] = []
        self._names: Counter[str] = Counter()
        self._lock = threading.RLock()

    def add(
        self, name: str, subject: object, *, part: str | None = None, active: bool = True
    ) -> None:
        """Add an object; it is closed at the end even if it was never set up.

        Args:
            name: names it in messages and in the state; a number is appended to the second object
                with the same name.
            subject: the object.
            part: the named part of the chain that it belongs to; None: the whole chain.
            active: whether :meth:`set_up` sets it up; once active, it stays so.
        """
        if not isinstance(subject, _Bindable | _SetUp | _Closable | Stateful | _HasPendingSteps):
            return
        with self._lock:
            member = self._members.get(id(subject))
            if member is None:
                self._names[name] += 1
                count = self._names[name]
                member = _Member(name if count == 1 else f"{name}#{count}", subject, part)
                self._members[id(subject)] = member
            if active and not member.is_active:
                member.is_active = True
                self._pending.append(member)

    @property
    def has_new(self) -> bool:
        """Whether an active object was not set up yet."""
        return bool(self._pending)

    def bind(self, chain: Callable[[str | None], object], *, only_new: bool = False) -> None:
        """Call ``bind(chain)`` of the active objects.

        Args:
            chain: returns the chain that they are in, as those of a part see it.
            only_new: leave out the objects that were set up.

        Raises:
            BaseException: what a ``bind`` raises, with a note that names the object.
        """
        with self._lock:
            members = list(self._pending if only_new else self._members.values())
        for member in members:
            if not member.is_active or not isinstance(member.subject, _Bindable):
                continue
            try:
                member.subject.bind(chain(member.part))
            except BaseException as error:
                error.add_note(f"while {member.label} was being bound to the chain")
                raise

    def set_up(self, task: Callable[[str | None], object]) -> None:
        """Call ``setup(task)`` of every active object that was not set up before.

        Args:
            task: returns the task, as the middleware of a part see it.

        Raises:
            BaseException: what a ``setup`` raises, with a note that names the object.
        """
        if not self._pending:
            return
        with self._lock:
            while self._pending:
                member = self._pending.pop(0)
                # Set before the call: a set-up that failed half way is not repeated.
                member.is_ready = True
                if not isinstance(member.subject, _SetUp):
                    continue
                try:
                    member.subject.setup(task(member.part))
                except SkipRest:
                    pass  # it was waiting for something when the task was stopped
                except BaseException as error:
                    error.add_note(f"in the set-up of {member.label}")
                    raise

    def pending_steps(self) -> int:
        """Return how many more steps the objects need to deliver what they have received."""
        counts = (
            member.subject.pending_steps()
            for member in self._members.values()
            if member.is_ready and isinstance(member.subject, _HasPendingSteps)
        )
        return max(counts, default=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every object that was set up and has one, by label."""
        return {label: member.state_dict() for label, member in self._stateful()}

    def silent(self) -> list[str]:
        """Return the labels of the objects that have a state but were not set up, in order."""
        return [label for label, _ in self._stateful(is_ready=False)]

    def load_state_dict(self, state: Mapping[str, Any], *, silent: Collection[str] = ()) -> None:
        """Restore what :meth:`state_dict` returned.

        The state may come from a process with other roles. An object that was silent there begins
        from scratch, and the state of one that is silent here is not used; both are logged.

        Args:
            state: the states by label.
            silent: what :meth:`silent` returned when the state was saved.

        Raises:
            CheckpointMismatch: if the objects differ from the saved ones; nothing is
                restored then.
        """
        stateful = self._stateful()
        labels = [label for label, _ in stateful]
        here = self.silent()
        fresh = [label for label in labels if label not in state]
        unused = [label for label in state if label not in labels]
        missing = [label for label in fresh if label not in silent]
        unclaimed = [label for label in unused if label not in here]
        if missing or unclaimed:
            raise CheckpointMismatch(_other_chain(missing, unclaimed))
        if fresh or unused:
            _log.warning(
                "the state was saved by a process with other roles%s%s",
                f"; from scratch begin here: {', '.join(fresh)}" if fresh else "",
                f"; not used here: {', '.join(unused)}" if unused else "",
            )
        before, now = [
            [x for x in order if x in state and x in labels] for order in (state, labels)
        ]
        if before != now:
            _log.warning(
                "the middleware are in another order than when the state was saved (then: %s; now: "
                "%s), so the resumed run may differ from one that was never stopped",
                ", ".join(before),
                ", ".join(now),
            )
        for label, member in stateful:
            if label in state:
                try:
                    member.load_state_dict(state[label])
                except Exception as error:
                    error.add_note(
                        f"while the state of {label} was being restored; build it with the options "
                        "that it had when its state was saved"
                    )
                    raise

    def close(self) -> list[BaseException]:
        """Close every object in reverse order, and forget them all.

        Returns:
            The errors that they raised; one error does not keep the others from being closed.
        """
        errors: list[BaseException] = []
        while self._members:
            _, member = self._members.popitem()
            if not isinstance(member.subject, _Closable):
                continue
            try:
                member.subject.close()
            except BaseException as error:  # noqa: BLE001 (the task raises them all)
                error.add_note(f"while {member.label} was being closed")
                errors.append(error)
        return errors

    def _stateful(self, *, is_ready: bool = True) -> list[tuple[str, Stateful]]:
        return [
            (member.label, member.subject)
            for member in self._members.values()
            if member.is_ready == is_ready and isinstance(member.subject, Stateful)
        ]


def _other_chain(missing: Sequence[str], left: Sequence[str]) -> str:
    """Return the message for states that do not fit the objects."""
    parts = [
        f"{difference} {', '.join(labels)}"
        for difference, labels in (("it lacks", missing), ("it also has", left))
        if labels
    ]
    if len(missing) == len(left) == 1:
        parts.append(f"if {left[0]} was renamed to {missing[0]}, use the old name")
    return (
        f"the state was saved from another chain: {'; '.join(parts)}. Build the same chain as the "
        "one that was saved."
    )
