"""Shared memory around another transport: large bodies between nodes of one host are not sent.

A large request or answer is put into a slab, and a ticket for it is sent in its place; the other
side reads it where it lies. When the dialer connects, both sides show each other a file in their
folder: where they cannot both open it, or where memory is full, everything is sent as without this
module.

What is signed: frames in a slab are signed as the transport beneath wants it, which for ipc means
prefix, metadata and table, not the arrays. The slabs' files lie in a folder that only this user can
enter; whoever could change them there could also change the process itself. A ticket is good for
one use, and nobody can guess it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.interface import (
    Channel,
    Listener,
    OnReply,
    Reply,
    RequestHandler,
    Transport,
)
from dmiddleware.router.transport.slabs import SlabPool, SlabReader, sweep
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["SharedMemoryTransport"]

_logger = logging.getLogger(__name__)

LEAST_BYTES: Final = 512 << 10
"""From here on a slab is faster than a socket."""

_MAX_BYTES: Final = 512 << 20

# No frame begins so: those begin with "DMWR".
_MAGIC: Final = b"DMWS"
_HEAD: Final = struct.Struct("<4sB3x")
_HELLO, _WELCOME, _TICKET, _NOT_TAKEN = 1, 2, 3, 4
_PROOF_BYTES: Final = 16


class SharedMemoryTransport:
    """Passes large bodies through shared memory, and everything else to another transport.

    Args:
        inner: makes the connections.
        directory: for the slabs' files; only this user may be able to enter it. Nodes share memory
            if they have the same one.
        least_bytes: shorter bodies are sent.
        max_bytes: how much memory this process's slabs may take; None: an eighth of what the
            directory's file system has, and at most 512 MiB.

    Raises:
        TransportError: if the directory does not exist, or others can enter it.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        directory: Path,
        least_bytes: int = LEAST_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        _check_directory(directory)
        if max_bytes is None:
            system = os.statvfs(directory)
            max_bytes = min(_MAX_BYTES, system.f_blocks * system.f_frsize // 8)
        self._inner = inner
        self._room = _Room(directory, least_bytes=least_bytes, max_bytes=max_bytes)

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        max_frame_bytes: int,
    ) -> Listener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return _SharingListener(
            self._inner,
            self._room,
            address,
            serve,
            on_disconnect=on_disconnect,
            max_frame_bytes=max_frame_bytes,
        )

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> Channel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""

        def connect() -> Channel:
            return self._inner.dial(
                address,
                connect_timeout_s=connect_timeout_s,
                reply_timeout_s=reply_timeout_s,
                max_frame_bytes=max_frame_bytes,
            )

        channel = connect()
        if address in self._room.strangers:
            return channel
        with contextlib.ExitStack() as stack:
            self._room.enter()
            stack.callback(self._room.leave)
            try:
                if self._room.is_shared_with(channel):
                    stack.pop_all()
                    return _SharingChannel(channel, self._room, address, max_frame_bytes)
            except TransportError:
                # It does not know what it was asked, and has hung up.
                channel.close()
                channel = connect()
        self._room.strangers.add(address)
        return channel

    def covers_body(self, address: str) -> bool:
        """Tell whether frames need all their bytes signed: as the transport beneath says."""
        return self._inner.covers_body(address)

    def stage_arrays(self, arrays: Sequence[memoryview]) -> list[memoryview] | None:
        """Copy large arrays to where they are read; see :class:`Transport`."""
        if sum(map(len, arrays)) < self._room.least_bytes or not self._room.in_use:
            return None
        return self._room.pool.stage_arrays(arrays)


class _Room:
    """The folder with the slabs, as long as any connection uses it."""

    def __init__(self, directory: Path, *, least_bytes: int, max_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.strangers: set[str] = set()
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._n_users = 0
        self._readers = itertools.count(1)
        self._proof = Path()
        self.pool = SlabPool(directory, max_bytes=max_bytes)
        self.reader = SlabReader(directory)

    @property
    def in_use(self) -> bool:
        """Whether anybody is connected, or may be."""
        return self._n_users > 0

    def enter(self) -> None:
        """Take note of a user; the first one sweeps up after processes that are dead."""
        with self._lock:
            self._n_users += 1
            if self._n_users > 1:
                return
            self._proof = self._directory / f"{os.getpid()}-{secrets.token_hex(8)}.slab"
            # Without a proof, for want of the folder say, nobody shares anything with this process.
            with contextlib.suppress(OSError):
                sweep(self._directory)
                descriptor = os.open(self._proof, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(_PROOF_BYTES))

    def leave(self) -> None:
        """Take note that a user is gone; the last one leaves nothing behind."""
        with self._lock:
            self._n_users -= 1
            if self._n_users:
                return
            self.pool.close()
            self.reader.close()
            with contextlib.suppress(OSError):
                self._proof.unlink()

    def let_go(self, reader: int) -> None:
        """Give up the slabs of somebody who is gone, and remove theirs if they are dead."""
        self.pool.abandon(reader)
        with contextlib.suppress(OSError):
            sweep(self._directory)

    def new_reader(self) -> int:
        """Return a number for somebody who will read slabs."""
        return next(self._readers)

    def is_shared_with(self, channel: Channel) -> bool:
        """Ask a listener whether it has the same folder.

        Raises:
            TransportError: if it does not understand.
        """
        answer = channel.request(_HEAD.pack(_MAGIC, _HELLO) + self.show())
        kind, content = _parse(answer)
        return kind == _WELCOME and self.believes(content)

    def show(self) -> bytes:
        """Return the proof's name and content."""
        try:
            return self._proof.read_bytes() + self._proof.name.encode()
        except OSError:
            return b""

    def believes(self, shown: memoryview) -> bool:
        """Look whether what another process has shown lies in this very folder."""
        proof, name = bytes(shown[:_PROOF_BYTES]), bytes(shown[_PROOF_BYTES:]).decode("latin-1")
        if len(proof) != _PROOF_BYTES or Path(name).name != name or not name:
            return False
        try:
            descriptor = os.open(
                self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            with os.fdopen(descriptor, "rb") as file:
                return secrets.compare_digest(file.read(_PROOF_BYTES + 1), proof)
        except (OSError, ValueError):
            return False

    def put(self, content: WireBytes, reader: int) -> bytes | None:
        """Put a body into a slab; returns what to send instead, or None to send it as it is."""
        if len(content) < self.least_bytes:
            return None
        ticket = self.pool.complete(content, reader=reader) or self.pool.fill(
            content, reader=reader
        )
        return None if ticket is None else _HEAD.pack(_MAGIC, _TICKET) + ticket


class _SharingListener:
    """A listener, some of whose dialers have the same folder."""

    def __init__(
        self,
        inner: Transport,
        room: _Room,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        max_frame_bytes: int,
    ) -> None:
        self._room = room
        self._serve_frame = serve
        self._on_disconnect = on_disconnect
        self._max_frame_bytes = max_frame_bytes
        self._sharing: dict[int, int] = {}
        self._gone: deque[int] = deque()
        self._closed = False
        room.enter()
        try:
            self._listener = inner.listen(
                address, self._serve, on_disconnect=self._note_gone, max_frame_bytes=max_frame_bytes
            )
        except BaseException:
            room.leave()
            raise

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._listener.address

    def close(self) -> None:
        """Stop listening."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for reader in self._sharing.values():
            self._room.pool.abandon(reader)
        self._room.leave()

    def _note_gone(self, connection: int) -> None:
        # On the inner transport's thread: only take note.
        self._gone.append(connection)
        self._on_disconnect(connection)

    def _serve(self, raw: memoryview, connection: int, reply: Reply) -> None:
        while self._gone:
            with contextlib.suppress(IndexError):
                reader = self._sharing.pop(self._gone.popleft(), None)
                if reader is not None:
                    self._room.let_go(reader)
        kind, content = _parse(raw)
        if kind == _HELLO:
            reply(self._on_hello(content, connection))
            return
        if kind == _TICKET:
            taken = self._room.reader.take(content, max_bytes=self._max_frame_bytes)
            if taken is None:
                reply(_HEAD.pack(_MAGIC, _NOT_TAKEN))
                return
            raw = taken
        del content
        self._serve_frame(raw, connection, _Reply(self, connection, reply))

    def put(self, answer: WireBytes, connection: int) -> bytes | None:
        """Put an answer into a slab, as :meth:`_Room.put` does, if its reader shares the folder."""
        reader = self._sharing.get(connection)
        if reader is None:
            return None
        put = self._room.put(answer, reader)
        if put is not None and (self._closed or connection not in self._sharing):
            # Its reader was let go of, maybe before this slab was its.
            self._room.pool.abandon(reader)
        return put

    def _on_hello(self, shown: memoryview, connection: int) -> bytes:
        if not self._room.believes(shown):
            return _HEAD.pack(_MAGIC, _NOT_TAKEN)
        self._sharing[connection] = self._room.new_reader()
        return _HEAD.pack(_MAGIC, _WELCOME) + self._room.show()


class _Reply:
    """Answers a request of a dialer's that may have the same folder."""

    def __init__(self, listener: _SharingListener, connection: int, reply: Reply) -> None:
        self._listener = listener
        self._connection = connection
        self._reply = reply
        self._lock = threading.Lock()
        self._is_given = False

    def __call__(self, answer: WireBytes | None) -> None:
        with self._lock:
            # A slab for an answer that does not count would never be read.
            if self._is_given:
                return
            self._is_given = True
        put = None if answer is None else self._listener.put(answer, self._connection)
        self._reply(answer if put is None else put)


class _SharingChannel:
    """A channel to a listener that has the same folder."""

    def __init__(self, inner: Channel, room: _Room, address: str, max_frame_bytes: int) -> None:
        self._inner = inner
        self._room = room
        self._address = address
        self._max_frame_bytes = max_frame_bytes
        self._reader = room.new_reader()
        self._lock = threading.Lock()
        self._closed = False

    def request(self, raw: WireBytes) -> memoryview:
        """Make a request and wait for its answer."""
        put = self._put(raw)
        answer = self._inner.request(raw if put is None else put)
        if put is not None and self._is_not_taken(put, answer):
            answer = self._inner.request(raw)
        return self._open(answer)

    def send(self, raw: WireBytes, on_reply: OnReply) -> None:
        """Make a request without waiting."""
        put = self._put(raw)
        on_inner = functools.partial(self._on_reply, on_reply)
        if put is None:
            self._inner.send(raw, on_inner)
            return

        def on_answer_to_ticket(answer: memoryview | TransportError) -> None:
            if not isinstance(answer, TransportError) and self._is_not_taken(put, answer):
                self._inner.send(raw, on_inner)
            else:
                on_inner(answer)

        self._inner.send(put, on_answer_to_ticket)

    def close(self) -> None:
        """Close the connection; requests under way fail at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._inner.close()
        self._room.let_go(self._reader)
        self._room.leave()

    def _put(self, raw: WireBytes) -> bytes | None:
        put = self._room.put(raw, self._reader)
        if put is not None and self._closed:
            # Closing may have let go of the reader's slabs before.
            self._room.pool.abandon(self._reader)
        return put

    def _is_not_taken(self, put: bytes, answer: memoryview) -> bool:
        """Tell whether a ticket was of no use, and its content has to be sent."""
        if _parse(answer)[0] != _NOT_TAKEN:
            return False
        _logger.debug("%s did not take a slab; its content is sent", self._address)
        self._room.pool.take_back(put[_HEAD.size :])
        return True

    def _on_reply(self, on_reply: OnReply, answer: memoryview | TransportError) -> None:
        if not isinstance(answer, TransportError):
            try:
                answer = self._open(answer)
            except TransportError as error:
                answer = error
        on_reply(answer)

    def _open(self, answer: memoryview) -> memoryview:
        """Return an answer, from its slab if it is a ticket for one."""
        kind, content = _parse(answer)
        if kind != _TICKET:
            return answer
        taken = self._room.reader.take(content, max_bytes=self._max_frame_bytes)
        if taken is None:
            self._room.strangers.add(self._address)
            raise TransportError(
                f"could not take the answer of {self._address} from shared memory; the next "
                "connection does without"
            )
        return taken


def _parse(raw: memoryview) -> tuple[int, memoryview]:
    """Return what kind of message of this module it is, or 0 for a frame."""
    if len(raw) < _HEAD.size or bytes(raw[: len(_MAGIC)]) != _MAGIC:
        return 0, raw
    return int(_HEAD.unpack_from(raw)[1]), raw[_HEAD.size :]


def _check_directory(directory: Path) -> None:
    if not hasattr(os, "posix_fallocate"):
        raise TransportError(
            "this system cannot promise memory to a file before it is used, so that shared memory "
            "is not safe here; use the transport without it"
        )
    try:
        status = directory.stat()
    except OSError as error:
        raise TransportError(
            f"there is no folder {directory} for shared memory ({error.strerror}); make one, with "
            "mode 0700"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise TransportError(
            f"{directory} must be a folder of this user that nobody else can enter (mode 0700), "
            f"it has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user {status.st_uid}"
        )
