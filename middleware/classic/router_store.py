"""Step data and policies that travel through the router."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.files.atomic_file import DTYPE_NAMES, raw_bytes
from dmiddleware.files.serialization import pack, unpack
from dmiddleware.pipeline import Event, Task
from dmiddleware.worker.errors import StepDataLost

__all__ = ["Packed", "RouterStore"]

Packed = npt.NDArray[np.uint8]
"""Packed step data, or a packed policy, ``[n] uint8``."""

_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_heads = msgspec.msgpack.Decoder(tuple[bytes, list[tuple[str, str, tuple[int, ...]]]])
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class RouterStore:
    """A :class:`~dmiddleware.worker.comm.store.Store` without files.

    Step data is held in memory: by the collector until it is announced, and then by the
    coordinator, which receives it with its metadata. A learner that demands it gets a copy. So a
    collector that is killed leaves no reference whose data is gone. A policy's newest state goes to
    all who have asked for that policy, as an event of delivery ``latest``.

    Values are packed in the way of checkpoints, so reading one never executes code.

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
            return _unpacked(packed)
        except ValueError as error:
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
        return found[0], _unpacked(found[1])

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
    """Return nested containers of tensors, arrays, numbers and strings as bytes.

    They are a head (its length, and msgpack of the containers and of each tensor's name, dtype and
    shape) and the tensors' bytes. A checkpoint has the same content, but takes longer to read.
    """
    rest, tensors = pack(value)
    # Wide types first: every tensor is then aligned.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    table = [(name, DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in order]
    head = msgspec.msgpack.encode((rest, table))
    head += b"\0" * (-len(head) % 8)
    parts = [len(head).to_bytes(8, "little"), head, *(raw_bytes(one).tobytes() for _, one in order)]
    return np.frombuffer(b"".join(parts), np.uint8)


def _unpacked(packed: Packed) -> Any:
    """Return the value that :func:`_packed` packed.

    Raises:
        ValueError: if the bytes are not a packed value.
    """
    data = bytearray(packed)
    length = int.from_bytes(data[:8], "little")
    try:
        rest, table = _heads.decode(bytes(data[8 : 8 + length]).rstrip(b"\0"))
    except msgspec.DecodeError as error:
        raise ValueError(f"the bytes are not a packed value: {error}") from error
    tensors, offset = {}, 8 + length
    for name, dtype_name, shape in table:
        dtype, n_items = _DTYPES[dtype_name], math.prod(shape)
        if n_items:
            flat = torch.frombuffer(data, dtype=dtype, count=n_items, offset=offset)
            tensors[name] = flat.reshape(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)
        offset += n_items * dtype.itemsize
    return unpack(rest, tensors)


def _policy_event(name: str) -> Event:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a policy; use letters, digits, '_', '.' and '-' only"
        )
    return Event(f"classic.policy.{name}", delivery="latest")
