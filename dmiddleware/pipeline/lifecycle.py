"""The life of middleware beyond single steps: set-up, state, and closing in reverse order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dmiddleware.errors import CheckpointMismatch

__all__ = ["Lifecycle"]


class Lifecycle:
    """Sets up, saves, loads and closes objects, in the order in which they were added.

    An object that was added twice is treated once. Methods that it lacks are passed over.
    """

    def __init__(self) -> None:
        self._members: list[tuple[str, Any]] = []
        self._known: set[int] = set()
        self._ready: set[int] = set()
        self._names: Counter[str] = Counter()

    def add(self, name: str, member: object) -> None:
        """Add an object; it is closed in the end, whether or not it is ever set up.

        Args:
            name: how messages, and the keys of the state, name it; a number is appended to the
                second object of one name.
            member: the object.
        """
        if id(member) in self._known:
            return
        self._known.add(id(member))
        self._names[name] += 1
        count = self._names[name]
        self._members.append((name if count == 1 else f"{name}#{count}", member))

    def set_up(self, task: object, *, silent: Collection[int] = ()) -> None:
        """Call ``setup(task)`` of every object that was not set up before.

        Args:
            task: what to give them.
            silent: the ``id`` of objects to leave out.

        Raises:
            BaseException: what a ``setup`` raises, with a note that names the object.
        """
        for label, member in tuple(self._members):
            if id(member) in self._ready or id(member) in silent:
                continue
            # Before the call: a set-up that failed half way is not repeated.
            self._ready.add(id(member))
            setup = _method(member, "setup")
            if setup is None:
                continue
            try:
                setup(task)
            except BaseException as error:
                error.add_note(f"in the set-up of {label}")
                raise

    def pending_steps(self) -> int:
        """Return how many more steps the objects need to hand out what they hold."""
        counts = (
            _method(member, "pending_steps")
            for _, member in self._members
            if id(member) in self._ready
        )
        return max((count() for count in counts if count is not None), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every object that was set up and has one, by label."""
        return {label: member.state_dict() for label, member in self._stateful()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if the objects are others than those that were saved; nothing is
                restored then.
        """
        stateful = self._stateful()
        labels = {label for label, _ in stateful}
        if labels != set(state):
            missing, left = sorted(labels - set(state)), sorted(set(state) - labels)
            raise CheckpointMismatch(
                "the state belongs to another chain: "
                + "; ".join(
                    f"{what} {', '.join(names)}"
                    for what, names in (("it lacks", missing), ("it has besides", left))
                    if names
                )
                + ". Build the same chain as the one that was saved."
            )
        for label, member in stateful:
            member.load_state_dict(state[label])

    def close(self) -> list[BaseException]:
        """Close every object in reverse order, and forget them all.

        Returns:
            What was raised meanwhile; the others were closed all the same.
        """
        errors: list[BaseException] = []
        while self._members:
            label, member = self._members.pop()
            close = _method(member, "close")
            if close is None:
                continue
            try:
                close()
            except BaseException as error:  # noqa: BLE001 (the task raises them all)
                error.add_note(f"while {label} was closed")
                errors.append(error)
        return errors

    def _stateful(self) -> list[tuple[str, Any]]:
        return [
            (label, member)
            for label, member in self._members
            if id(member) in self._ready
            and _method(member, "state_dict") is not None
            and _method(member, "load_state_dict") is not None
        ]


def _method(member: object, name: str) -> Callable[..., Any] | None:
    method = getattr(member, name, None)
    return method if callable(method) else None
