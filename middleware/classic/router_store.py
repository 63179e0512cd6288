"""Step data and policies that travel through the router."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmiddleware.data import pack_checkpoint, unpack_checkpoint
from dmiddleware.errors import CheckpointDamaged, ConfigError, StepDataLost
from dmiddleware.pipeline import Event, Task

__all__ = ["Packed", "RouterStore"]

Packed = npt.NDArray[np.uint8]
"""Packed step data, or a packed policy: the bytes of a checkpoint, ``[n] uint8``."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class RouterStore:
    """A :class:`~dmiddleware.worker.comm.store.Store` without files.

    Step data is held in memory: by the collector until it is announced, and then by the
    coordinator, which receives it with its metadata. A learner that demands it gets a copy. So a
    collector that is killed leaves no reference whose data is gone. A policy's newest state goes to
    all who have asked for that policy, as an event of delivery ``latest``.

    Values are packed like checkpoints, so reading one never executes code.

    Args:
        task: carries the policies.
    """

    def __init__(self, task: Task[Any]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._values: dict[str, Packed] = {}
        # A batch is read before the next one is demanded; one may arrive twice.
        self._batches: deque[Mapping[str, Packed]] = deque(maxlen=2)
        self._policies: dict[str, tuple[int, Packed]] = {}
        self._followed: set[str] = set()

    def put(self, name: str, value: Any) -> str:
        """Store step data: nested containers of tensors, arrays, numbers and strings.

        Returns:
            The reference, which is the name.

        Raises:
            TypeError: for a value of any other type.
        """
        packed = _packed(value)
        with self._lock:
            self._values[name] = packed
        return name

    def get(self, ref: str) -> Any:
        """Return step data.

        Raises:
            StepDataLost: if this process does not have it, or it is damaged.
        """
        with self._lock:
            packed = self._find(ref)
        if packed is None:
            raise StepDataLost(
                f"this process does not have the step data {ref}; ask for another sample instead",
                data_id=ref,
            )
        try:
            return unpack_checkpoint(packed.tobytes())
        except CheckpointDamaged as error:
            raise StepDataLost(f"the step data {ref} is damaged: {error}", data_id=ref) from error

    def delete(self, refs: Iterable[str]) -> None:
        """Delete step data; references that are already gone are ignored."""
        with self._lock:
            for ref in refs:
                self._values.pop(ref, None)

    def missing(self, refs: Iterable[str]) -> set[str]:
        """Return which of the references this process does not have."""
        with self._lock:
            return {ref for ref in refs if self._find(ref) is None}

    def clear(self) -> None:
        """Delete all step data of this process."""
        with self._lock:
            self._values.clear()
            self._batches.clear()

    def publish(self, name: str, version: int, state: Mapping[str, Any]) -> None:
        """Send a policy's state to all who have asked for it, also to those that connect later.

        Raises:
            ConfigError: for a name with other characters than letters, digits, ``_``, ``.``, ``-``.
            TypeError: for a state with a value of another type than a checkpoint can hold.
        """
        self._task.emit(_policy_event(name), int(version), _packed(dict(state)), only_remote=True)

    def newest(self, name: str, have: int) -> tuple[int, Mapping[str, Any]] | None:
        """Return version and state of a policy, or None if none newer than ``have`` has arrived.

        The first call for a name begins to follow that policy.

        Raises:
            ConfigError: for a name with other characters than letters, digits, ``_``, ``.``, ``-``.
        """
        event = _policy_event(name)
        with self._lock:
            is_new = name not in self._followed
            self._followed.add(name)
            found = self._policies.get(name)
        if is_new:
            self._task.on(event, lambda version, packed: self._keep(name, version, packed))
        if found is None or found[0] <= have:
            return None
        return found[0], unpack_checkpoint(found[1].tobytes())

    def take(self, refs: Iterable[str]) -> dict[str, Packed]:
        """Return the packed step data that this process has, without deleting it."""
        with self._lock:
            found = {ref: self._find(ref) for ref in refs}
        return {ref: packed for ref, packed in found.items() if packed is not None}

    def hold(self, values: Mapping[str, Packed]) -> None:
        """Store packed step data that has arrived, until it is deleted."""
        with self._lock:
            self._values.update(values)

    def hold_batch(self, values: Mapping[str, Packed]) -> None:
        """Store the packed step data of a batch that has arrived, until others replace it."""
        with self._lock:
            self._batches.append(values)

    def _find(self, ref: str) -> Packed | None:
        for values in (self._values, *self._batches):
            if ref in values:
                return values[ref]
        return None

    def _keep(self, name: str, version: int, packed: Packed) -> None:
        with self._lock:
            known = self._policies.get(name)
            if known is None or version > known[0]:
                self._policies[name] = version, packed


def _packed(value: Any) -> Packed:
    return np.frombuffer(pack_checkpoint(value), np.uint8)


def _policy_event(name: str) -> Event:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a policy; use letters, digits, '_', '.' and '-' only"
        )
    return Event(f"classic.policy.{name}", delivery="latest")
