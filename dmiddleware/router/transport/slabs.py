"""Slabs: files in memory that one process fills and another reads, without a copy in between.

::

    offset  size  field
         0     8  magic "DMWSLAB1"
         8    16  token of this use, which the reader must know
        24     1  state: 0 free, 1 filled, 2 taken
        64     …  content

The owner fills a free slab. The reader takes it once, and when nothing refers to its content any
longer, the slab is free again. If the reader is gone, the slab is abandoned: its file is removed,
and its memory is freed once no process has it mapped.

Arrays can be staged in a slab before the frame around them is known. A frame that is later sent
with these arrays, and nothing else that is large, needs no further copy: its head is written into
the space that is reserved before the arrays.

Files are allocated in full before they are used, so a full file system is an error where a slab is
created, and never a SIGBUS where it is accessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import re
import secrets
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from dmiddleware.router.wire.byte_pieces import ALIGNMENT, BytePieces, WireBytes, write_into

__all__ = ["SlabPool", "SlabReader", "is_slab_name", "sweep"]

_logger = logging.getLogger(__name__)

_MAGIC: Final = b"DMWSLAB1"
_TOKEN: Final = slice(8, 24)
_TOKEN_BYTES: Final = 16
_STATE: Final = 24
_CONTENT: Final = 64
_ARRAYS: Final = 4096
"""Offset of staged arrays; the space before them is for a frame's head."""

_FREE, _FILLED, _TAKEN = 0, 1, 2

_GRAIN: Final = 1 << 16
_UNREAD_S: Final = 30.0
_KEPT_MAPPINGS: Final = 64

_NAME: Final = re.compile(r"(?P<pid>\d+)-[0-9a-f]{16}\.slab")
_TICKET: Final = struct.Struct(f"<{_TOKEN_BYTES}sQQ")


def is_slab_name(name: str) -> bool:
    """Return whether a file with this name may be opened or removed."""
    return _NAME.fullmatch(name) is not None


def sweep(directory: Path) -> int:
    """Remove the slabs of dead processes; return how many there were."""
    count = 0
    for path in directory.iterdir():
        named = _NAME.fullmatch(path.name)
        if named is not None and not _is_alive(int(named["pid"])):
            path.unlink(missing_ok=True)
            count += 1
    return count


class _Slab:
    """A slab that this process has created."""

    __slots__ = ("capacity", "filled_at", "memory", "path", "reader", "staged", "token")

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self.memory = memory
        self.capacity = len(memory)
        self.token = b""
        self.reader = 0
        self.filled_at = 0.0
        self.staged: weakref.ref[_Staged] | None = None

    @property
    def state(self) -> int:
        return self.memory[_STATE]

    @property
    def is_free(self) -> bool:
        return self.memory[_STATE] == _FREE and (self.staged is None or self.staged() is None)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
        # While it is being filled it cannot be closed; the last reference frees it.
        with contextlib.suppress(BufferError):
            self.memory.close()


class SlabPool:
    """The slabs that this process fills.

    Args:
        directory: folder of their files, which only this user may enter.
        max_bytes: how much memory they may use in all.
        now: returns monotonic seconds.
    """

    def __init__(
        self, directory: Path, *, max_bytes: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._now = now
        self._lock = threading.Lock()
        self._slabs: dict[str, _Slab] = {}
        self._secret = secrets.token_bytes(32)
        self._n_uses = 0
        self._warned = False
        self._is_closed = False

    @property
    def n_bytes(self) -> int:
        """How much memory the slabs use."""
        with self._lock:
            return sum(slab.capacity for slab in self._slabs.values())

    def fill(self, content: WireBytes, *, reader: int) -> bytes | None:
        """Put content into a free slab.

        Args:
            content: the content, which is copied.
            reader: number of the reader, for :meth:`abandon`.

        Returns:
            A ticket, for which :meth:`SlabReader.take` returns the content; None if there is not
            enough memory.
        """
        with self._lock:
            slab = self._find(_CONTENT + len(content))
            if slab is None:
                return None
            # From here on no other thread uses it.
            self._assign(slab, reader)
        try:
            write_into(memoryview(slab.memory)[_CONTENT:], content)
        except ValueError:  # abandoned in the meantime
            return None
        return _ticket(slab, _CONTENT, len(content))

    def stage_arrays(self, arrays: Sequence[memoryview]) -> list[memoryview] | None:
        """Copy arrays into a slab, one behind the other, aligned as in a frame.

        Args:
            arrays: the arrays' bytes.

        Returns:
            The copies, for :meth:`complete`; the slab is reserved while one of them is alive. None
            if there is not enough memory.
        """
        from dmiddleware.router.wire.arrays import view_with_owner

        starts, end = [], _ARRAYS
        for array in arrays:
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
            end = starts[-1] + len(array)
        with self._lock:
            slab = self._find(end)
            if slab is None:
                return None
            staged = _Staged(slab, len(arrays), end - _ARRAYS)
            slab.staged = weakref.ref(staged)
        whole = view_with_owner(slab.memory, staged)
        offset = _ARRAYS
        for start, array in zip(starts, arrays, strict=True):
            whole[offset:start] = bytes(start - offset)
            offset = start + len(array)
            write_into(whole[start:offset], BytePieces([array]))
        return [
            whole[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)
        ]

    def complete(self, content: WireBytes, *, reader: int) -> bytes | None:
        """Write the head of a frame before its staged arrays.

        Args:
            content: the frame.
            reader: number of the reader, for :meth:`abandon`.

        Returns:
            A ticket for the frame; None if it has other arrays or was completed before, and must be
            copied into another slab with :meth:`fill`.
        """
        parts = _staged_in(content)
        if parts is None:
            return None
        head, staged = parts
        slab, start = staged.slab, _ARRAYS - len(head)
        with self._lock:
            if staged.is_used or start < _CONTENT or self._slabs.get(slab.path.name) is not slab:
                return None
            staged.is_used = True
            slab.memory[start:_ARRAYS] = head
            self._assign(slab, reader)
        return _ticket(slab, start, len(content))

    def abandon(self, reader: int) -> None:
        """Remove the slabs of a reader that is gone; its views stay valid."""
        with self._lock:
            for slab in list(self._slabs.values()):
                if slab.reader == reader and slab.state != _FREE:
                    self._remove(slab)

    def close(self) -> None:
        """Remove all files and create no more; the readers' views stay valid.

        May be called twice.
        """
        with self._lock:
            self._is_closed = True
            for slab in list(self._slabs.values()):
                self._remove(slab)

    def _assign(self, slab: _Slab, reader: int) -> None:
        slab.token = self._new_token()
        slab.reader, slab.filled_at = reader, self._now()
        slab.memory[_TOKEN] = slab.token
        slab.memory[_STATE] = _FILLED

    def _new_token(self) -> bytes:
        # As hard to guess as random bytes, which may take the system longer than the copy.
        self._n_uses += 1
        count = self._n_uses.to_bytes(8, "little")
        return hashlib.blake2b(count, key=self._secret, digest_size=_TOKEN_BYTES).digest()

    def _find(self, size: int) -> _Slab | None:
        capacity = _rounded(size)
        fitting: _Slab | None = None
        for slab in self._slabs.values():
            if size <= slab.capacity <= 2 * capacity and slab.is_free:
                if slab.capacity == capacity:
                    return slab
                if fitting is None or slab.capacity < fitting.capacity:
                    fitting = slab
        if fitting is not None:
            return fitting
        free = [slab for slab in self._slabs.values() if slab.is_free]
        unread_since = self._now() - _UNREAD_S
        for slab in list(self._slabs.values()):
            if slab.state == _FILLED and slab.filled_at < unread_since:
                self._remove(slab)
        in_use = sum(slab.capacity for slab in self._slabs.values())
        for slab in free:
            if in_use + capacity <= self._max_bytes:
                break
            in_use -= slab.capacity
            self._remove(slab)
        return self._make(capacity) if in_use + capacity <= self._max_bytes else None

    def _make(self, capacity: int) -> _Slab | None:
        if self._is_closed:
            return None
        path = self._directory / f"{os.getpid()}-{secrets.token_hex(8)}.slab"
        try:
            memory = _create(path, capacity)
        except OSError as error:
            path.unlink(missing_ok=True)
            if not self._warned:
                self._warned = True
                _logger.warning(
                    "could not allocate %d bytes of shared memory in %s (%s); the slower "
                    "socket is used instead, free some space there to avoid that",
                    capacity,
                    self._directory,
                    error.strerror,
                )
            return None
        slab = self._slabs[path.name] = _Slab(path, memory)
        return slab

    def _remove(self, slab: _Slab) -> None:
        del self._slabs[slab.path.name]
        slab.remove()


class SlabReader:
    """Reads the slabs of other processes.

    Args:
        directory: folder of the slabs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._mapped: dict[str, mmap.mmap] = {}

    def take(self, ticket: bytes | memoryview, *, max_bytes: int) -> memoryview | None:
        """Take the content of a ticket.

        Args:
            ticket: a ticket of :meth:`SlabPool.fill`, possibly a forged one.
            max_bytes: longer contents are refused.

        Returns:
            The content, whose slab is free again when no view of it is alive; None if there is no
            such slab, or it has been taken before.
        """
        ticket = bytes(ticket)
        if len(ticket) < _TICKET.size:
            return None
        token, start, length = _TICKET.unpack_from(ticket)
        name = ticket[_TICKET.size :].decode(errors="replace")
        if length > max_bytes or not is_slab_name(name):
            return None
        with self._lock:
            memory = self._map(name)
            if (
                memory is None
                or not _CONTENT <= start <= len(memory) - length
                or memory[_STATE] != _FILLED
                or not secrets.compare_digest(memory[_TOKEN], token)
            ):
                return None
            memory[_STATE] = _TAKEN
        from dmiddleware.router.wire.arrays import view_with_release

        content = memoryview(memory)[start : start + length]
        return view_with_release(content, partial(_give_back, memory, token))

    def close(self) -> None:
        """Unmap all slabs; views stay valid. May be called twice."""
        with self._lock:
            self._mapped.clear()

    def _map(self, name: str) -> mmap.mmap | None:
        memory = self._mapped.get(name)
        if memory is None:
            try:
                memory = _open(self._directory / name)
            except OSError as error:
                _logger.debug("cannot open the slab %s: %s", name, error)
                return None
            if memory is None:
                return None
            if len(self._mapped) >= _KEPT_MAPPINGS:
                self._prune()
            self._mapped[name] = memory
        return memory

    def _prune(self) -> None:
        """Unmap the slabs that their owners have removed, or all if that is not enough."""
        existing: set[str] = set()
        with contextlib.suppress(OSError):
            existing.update(path.name for path in self._directory.iterdir())
        kept = {name: memory for name, memory in self._mapped.items() if name in existing}
        self._mapped = kept if len(kept) < _KEPT_MAPPINGS else {}


class _Staged:
    """Arrays that are staged in a slab, which is reserved while one of them is alive."""

    def __init__(self, slab: _Slab, n_arrays: int, n_bytes: int) -> None:
        self.slab = slab
        self.n_arrays = n_arrays
        self.n_bytes = n_bytes
        self.is_used = False


def _staged_in(content: WireBytes) -> tuple[bytes, _Staged] | None:
    """Return a frame's head and arrays, if these are all the arrays staged in one slab."""
    if not isinstance(content, BytePieces):
        return None
    from dmiddleware.router.wire.arrays import owner_of

    owners = [owner_of(piece) for piece in content.pieces]
    staged = next((owner for owner in owners if isinstance(owner, _Staged)), None)
    if staged is None:
        return None
    is_staged = [owner is staged for owner in owners]
    first = is_staged.index(True)
    gaps = [piece for piece, inside in zip(content.pieces, is_staged, strict=True) if not inside]
    if sum(is_staged) != staged.n_arrays or any(any(gap) for gap in gaps[first:]):
        return None
    head = b"".join(gaps[:first])
    if len(content) - len(head) != staged.n_bytes:  # parts of the arrays
        return None
    return head, staged


def _ticket(slab: _Slab, start: int, length: int) -> bytes:
    return _TICKET.pack(slab.token, start, length) + slab.path.name.encode()


def _give_back(memory: mmap.mmap, token: bytes) -> None:
    if memory[_TOKEN] == token:
        memory[_STATE] = _FREE


def _create(path: Path, capacity: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, capacity)
        memory = _mapping(descriptor, capacity)
    finally:
        os.close(descriptor)
    memory[: len(_MAGIC)] = _MAGIC
    return memory


def _open(path: Path) -> mmap.mmap | None:
    """Map a file; return None if it is not a slab of this user."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_size < _CONTENT
        ):
            return None
        memory = _mapping(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    return memory if memory[: len(_MAGIC)] == _MAGIC else None


def _mapping(descriptor: int, size: int) -> mmap.mmap:
    # All pages at once: page faults one by one take longer than copying.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(descriptor, size, flags=flags)


def _rounded(size: int) -> int:
    """Round up a little, to fit contents of similar length."""
    grain = max(_GRAIN, 1 << max(0, size.bit_length() - 4))
    return -(-size // grain) * grain


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
