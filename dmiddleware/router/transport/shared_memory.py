"""Shared memory between two nodes of one host: large frames go through it, over any connection.

A connection starts without it. After the handshake, each node sends its peer the name and content
of a *proof*, a file in its folder. A node that finds this file in its own folder has the same
folder. From then on it puts large frames for this peer into slabs, and sends tickets instead, for
which the peer gets the frames. Before the peer has authenticated, nothing is read or created, and
a ticket is an error.

A frame in a slab is numbered and signed by its session like any other, so only the content of the
ticket, which is valid once and cannot be guessed, says who may read it. The folder belongs to this
user alone, whose processes could also change the memory of the node itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dmiddleware.errors import FrameError, TransportError
from dmiddleware.router.transport.slabs import SlabPool, SlabReader, is_slab_name, sweep
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.frame import MAX_FRAME_BYTES

__all__ = ["SlabSharing", "SharedMemory"]

_logger = logging.getLogger(__name__)

MIN_BYTES: Final = 512 << 10
"""From this size up, a slab is faster than a socket."""

_MAX_BYTES: Final = 512 << 20

# Frames start with "DMWR" instead.
_MAGIC: Final = b"DMWT"
_PROOF_BYTES: Final = 16


class SharedMemory:
    """The memory that one router shares with peers of its host.

    Args:
        directory: folder for the slabs' files, which only this user may enter. Nodes share memory
            if they have the same folder.
        min_bytes: shorter frames are sent over the connection.
        max_bytes: how much memory this process's slabs may use; None: an eighth of the directory's
            file system, at most 512 MiB.

    Attributes:
        min_bytes: see above.

    Raises:
        TransportError: if the directory does not exist, or other users can enter it.
    """

    def __init__(
        self, directory: Path, *, min_bytes: int = MIN_BYTES, max_bytes: int | None = None
    ) -> None:
        _check_directory(directory)
        if max_bytes is None:
            system = os.statvfs(directory)
            max_bytes = min(_MAX_BYTES, system.f_blocks * system.f_frsize // 8)
        self.min_bytes = min_bytes
        self._directory = directory
        self._pool = SlabPool(directory, max_bytes=max_bytes)
        self._reader = SlabReader(directory)
        self._readers = itertools.count(1)
        self._lock = threading.Lock()
        self._proof: bytes | None = None
        self._proof_file: Path | None = None

    def sharing(self) -> SlabSharing:
        """Return the part of one connection, which shares nothing yet."""
        return SlabSharing(self, self._pool, self._reader, next(self._readers))

    def stage_arrays(self, arrays: Sequence[memoryview]) -> list[memoryview] | None:
        """Copy arrays into a slab, from which one reader uses them without another copy.

        Returns:
            The copies; None if there is not enough memory.
        """
        return self._pool.stage_arrays(arrays)

    def sweep(self) -> None:
        """Remove the files of dead processes."""
        with contextlib.suppress(OSError):
            sweep(self._directory)

    def close(self) -> None:
        """Remove all files of this process; frames that were received stay valid.

        May be called twice. Connections share nothing from now on.
        """
        with self._lock:
            self._proof = b""
            proof_file, self._proof_file = self._proof_file, None
        self._pool.close()
        self._reader.close()
        if proof_file is not None:
            with contextlib.suppress(OSError):
                proof_file.unlink()

    def proof(self) -> bytes:
        """Return the content and the name of this process's proof, which is created when needed.

        It is empty if the folder cannot be used.
        """
        with self._lock:
            if self._proof is None:
                self._proof = b""
                # Without a proof, for example because the folder is missing, nothing is shared.
                with contextlib.suppress(OSError):
                    sweep(self._directory)
                    self._proof = self._create_proof()
            return self._proof

    def finds(self, proof: bytes) -> bool:
        """Return whether the proof of another process is in the folder."""
        content, name = proof[:_PROOF_BYTES], proof[_PROOF_BYTES:].decode("latin-1")
        if len(content) != _PROOF_BYTES or not is_slab_name(name):
            return False
        try:
            descriptor = os.open(
                self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            try:
                return secrets.compare_digest(os.read(descriptor, _PROOF_BYTES + 1), content)
            finally:
                os.close(descriptor)
        except OSError:
            return False

    def _create_proof(self) -> bytes:
        path = self._directory / f"{os.getpid()}-{secrets.token_hex(8)}.slab"
        content = secrets.token_bytes(_PROOF_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._proof_file = path
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return content + path.name.encode()


class SlabSharing:
    """What two nodes share over one connection, see :meth:`SharedMemory.sharing`.

    Args:
        memory: the router's memory.
        pool: its slabs.
        reader: reads the peer's slabs.
        number: distinguishes the peer from other readers of the slabs.
    """

    __slots__ = ("_agreed", "_has_worked", "_is_closed", "_memory", "_number", "_pool", "_reader")

    def __init__(
        self, memory: SharedMemory, pool: SlabPool, reader: SlabReader, number: int
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._reader = reader
        self._number = number
        self._agreed = False
        self._has_worked = False
        self._is_closed = False

    @property
    def is_agreed(self) -> bool:
        """Whether both nodes have the same folder."""
        return self._agreed

    @property
    def has_worked(self) -> bool:
        """Whether a frame of the peer has been read from memory."""
        return self._has_worked

    def proof(self) -> bytes:
        """Return what to show the authenticated peer; empty: nothing, because nothing is shared."""
        return self._memory.proof()

    def agree(self, proof: bytes) -> None:
        """Share memory from now on, if the proof that the peer has shown is in the folder."""
        if self._memory.proof() and self._memory.finds(proof):
            self._agreed = True

    def put(self, frame: WireBytes) -> WireBytes:
        """Put a large frame into a slab.

        Returns:
            What to send: the ticket, or the frame if it is small, or there is not enough memory.
        """
        if not self._agreed or len(frame) < self._memory.min_bytes:
            return frame
        pool, number = self._pool, self._number
        ticket = pool.complete(frame, reader=number) or pool.fill(frame, reader=number)
        if ticket is None:
            return frame
        if self._is_closed:
            # Closing may have been too early to remove this slab.
            pool.abandon(number)
        return _MAGIC + ticket

    def take(self, raw: memoryview) -> memoryview:
        """Return the frame of a ticket, in its slab; other frames are returned as they are.

        Raises:
            FrameError: if it is a ticket, but nothing is shared.
            TransportError: if the slab cannot be opened.
        """
        if bytes(raw[: len(_MAGIC)]) != _MAGIC:
            return raw
        if not self._agreed:
            raise FrameError("got a ticket, but no memory is shared with the peer")
        frame = self._reader.take(raw[len(_MAGIC) :], max_bytes=MAX_FRAME_BYTES)
        if frame is None:
            raise TransportError("could not read a frame from shared memory; reconnecting")
        self._has_worked = True
        return frame

    def close(self) -> None:
        """Remove the slabs that the peer has not given back; may be called twice."""
        self._is_closed = True
        self._pool.abandon(self._number)


def _check_directory(directory: Path) -> None:
    if not hasattr(os, "posix_fallocate"):
        raise TransportError(
            "this system has no posix_fallocate, without which shared memory is not safe; do not "
            "use it"
        )
    try:
        status = directory.stat()
    except OSError as error:
        raise TransportError(
            f"could not use {directory} for shared memory: {error.strerror}; create the folder "
            "with mode 0700"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise TransportError(
            f"could not use {directory} for shared memory: it must be a folder of this user with "
            f"mode 0700, but has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user "
            f"{status.st_uid}"
        )
