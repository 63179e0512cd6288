"""Shared memory around another transport, for large bodies between nodes of one host.

A large request or reply is put into a slab, and a ticket for it is sent instead; the other side
reads it in place. When a dialer connects, both sides show each other a file in their folder. If one
of them cannot open the other's file, or if memory is full, the other transport sends everything.

Frames in a slab are signed as the other transport requires; for ipc that means prefix, metadata and
table, but not the arrays. The slabs' files are in a folder that only this user can enter, and a
process of the same user could also change the memory of the node itself. A ticket is valid once and
cannot be guessed.
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
    ListenLimits,
    OnReply,
    Reply,
    RequestHandler,
    Transport,
)
from dmiddleware.router.transport.slabs import SlabPool, SlabReader, sweep
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["SharedMemoryTransport"]

_logger = logging.getLogger(__name__)

MIN_BYTES: Final = 512 << 10
"""From this size up, a slab is faster than a socket."""

_MAX_BYTES: Final = 512 << 20

# Frames start with "DMWR" instead.
_MAGIC: Final = b"DMWS"
_HEAD: Final = struct.Struct("<4sB3x")
_HELLO, _WELCOME, _TICKET, _REFUSED = 1, 2, 3, 4
_PROOF_BYTES: Final = 16


class SharedMemoryTransport:
    """Passes large bodies through shared memory, and everything else to another transport.

    Args:
        inner: the other transport.
        directory: folder for the slabs' files, which only this user may enter. Nodes share memory
            if they have the same folder.
        min_bytes: shorter bodies are sent over the other transport.
        max_bytes: how much memory this process's slabs may use; None: an eighth of the directory's
            file system, at most 512 MiB.

    Raises:
        TransportError: if the directory does not exist, or other users can enter it.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        directory: Path,
        min_bytes: int = MIN_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        _check_directory(directory)
        if max_bytes is None:
            system = os.statvfs(directory)
            max_bytes = min(_MAX_BYTES, system.f_blocks * system.f_frsize // 8)
        self._inner = inner
        self._folder = _Folder(directory, min_bytes=min_bytes, max_bytes=max_bytes)

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> Listener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return _SharingListener(
            self._inner,
            self._folder,
            address,
            serve,
            on_disconnect=on_disconnect,
            limits=limits,
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
        if address in self._folder.not_sharing:
            return channel
        with contextlib.ExitStack() as stack:
            self._folder.enter()
            stack.callback(self._folder.leave)
            try:
                if self._folder.is_shared_with(channel):
                    stack.pop_all()
                    return _SharingChannel(channel, self._folder, address, max_frame_bytes)
            except TransportError:
                # A listener without shared memory closes the connection.
                channel.close()
                channel = connect()
        self._folder.not_sharing.add(address)
        return channel

    def covers_body(self, address: str) -> bool:
        """Return whether the other transport needs a MAC over all bytes of a frame."""
        return self._inner.covers_body(address)

    def stage_arrays(self, arrays: Sequence[memoryview]) -> list[memoryview] | None:
        """Copy large arrays into a slab, from which readers use them without another copy."""
        if sum(map(len, arrays)) < self._folder.min_bytes or not self._folder.in_use:
            return None
        return self._folder.pool.stage_arrays(arrays)


class _Folder:
    """The folder of the slabs, while any connection uses it."""

    def __init__(self, directory: Path, *, min_bytes: int, max_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.not_sharing: set[str] = set()
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._n_users = 0
        self._readers = itertools.count(1)
        self._proof_file = Path()
        self.pool = SlabPool(directory, max_bytes=max_bytes)
        self.reader = SlabReader(directory)

    @property
    def in_use(self) -> bool:
        """Whether there is a connection or a listener."""
        return self._n_users > 0

    def enter(self) -> None:
        """Add a user; the first one removes the slabs of dead processes."""
        with self._lock:
            self._n_users += 1
            if self._n_users > 1:
                return
            self._proof_file = self._directory / f"{os.getpid()}-{secrets.token_hex(8)}.slab"
            # Without a proof, for example because the folder is missing, no peer shares memory.
            with contextlib.suppress(OSError):
                sweep(self._directory)
                descriptor = os.open(self._proof_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(_PROOF_BYTES))

    def leave(self) -> None:
        """Remove a user; the last one removes all files."""
        with self._lock:
            self._n_users -= 1
            if self._n_users:
                return
            self.pool.close()
            self.reader.close()
            with contextlib.suppress(OSError):
                self._proof_file.unlink()

    def abandon(self, reader: int) -> None:
        """Abandon the slabs of a reader that is gone, and remove those of dead processes."""
        self.pool.abandon(reader)
        with contextlib.suppress(OSError):
            sweep(self._directory)

    def new_reader(self) -> int:
        """Return the number of a new reader."""
        return next(self._readers)

    def is_shared_with(self, channel: Channel) -> bool:
        """Ask a listener whether it has the same folder.

        Raises:
            TransportError: if it does not use shared memory.
        """
        answer = channel.request(_HEAD.pack(_MAGIC, _HELLO) + self.proof())
        kind, content = _parse(answer)
        return kind == _WELCOME and self.accepts_proof(content)

    def proof(self) -> bytes:
        """Return the content and the name of this process's proof file."""
        try:
            return self._proof_file.read_bytes() + self._proof_file.name.encode()
        except OSError:
            return b""

    def accepts_proof(self, shown: memoryview) -> bool:
        """Return whether the proof file of another process is in this folder."""
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
        """Put a body into a slab; return what to send instead, or None to send it as it is."""
        if len(content) < self.min_bytes:
            return None
        ticket = self.pool.complete(content, reader=reader) or self.pool.fill(
            content, reader=reader
        )
        return None if ticket is None else _HEAD.pack(_MAGIC, _TICKET) + ticket


class _SharingListener:
    """A listener, some of whose dialers share its folder."""

    def __init__(
        self,
        inner: Transport,
        folder: _Folder,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> None:
        self._folder = folder
        self._serve_frame = serve
        self._on_disconnect = on_disconnect
        self._max_frame_bytes = limits.max_frame_bytes
        self._sharing: dict[int, int] = {}
        self._disconnected: deque[int] = deque()
        self._closed = False
        folder.enter()
        try:
            self._listener = inner.listen(
                address,
                self._serve,
                on_disconnect=self._note_disconnect,
                limits=limits,
            )
        except BaseException:
            folder.leave()
            raise

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._listener.address

    def trust(self, connection: int) -> None:
        """Lift the limits of a connection whose peer has authenticated."""
        self._listener.trust(connection)

    def n_bytes(self, connection: int) -> int:
        """Return how many bytes show that a peer is alive, shared ones excluded."""
        return self._listener.n_bytes(connection)

    def close(self) -> None:
        """Stop listening."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for reader in self._sharing.values():
            self._folder.pool.abandon(reader)
        self._folder.leave()

    def _note_disconnect(self, connection: int) -> None:
        # On the inner transport's thread, which must not be blocked.
        self._disconnected.append(connection)
        self._on_disconnect(connection)

    def _serve(self, raw: memoryview, connection: int, reply: Reply) -> None:
        while self._disconnected:
            with contextlib.suppress(IndexError):
                reader = self._sharing.pop(self._disconnected.popleft(), None)
                if reader is not None:
                    self._folder.abandon(reader)
        kind, content = _parse(raw)
        if kind == _HELLO:
            reply(self._on_hello(content, connection))
            return
        if kind == _TICKET:
            taken = self._folder.reader.take(content, max_bytes=self._max_frame_bytes)
            if taken is None:
                reply(_HEAD.pack(_MAGIC, _REFUSED))
                return
            raw = taken
        del content
        self._serve_frame(raw, connection, _Reply(self, connection, reply))

    def put(self, answer: WireBytes, connection: int) -> bytes | None:
        """Put a reply into a slab, as :meth:`_Folder.put` does, if its reader shares the folder."""
        reader = self._sharing.get(connection)
        if reader is None:
            return None
        put = self._folder.put(answer, reader)
        if put is not None and (self._closed or connection not in self._sharing):
            # Its reader was abandoned, possibly before it was given this slab.
            self._folder.pool.abandon(reader)
        return put

    def _on_hello(self, shown: memoryview, connection: int) -> bytes:
        if not self._folder.accepts_proof(shown):
            return _HEAD.pack(_MAGIC, _REFUSED)
        self._sharing[connection] = self._folder.new_reader()
        return _HEAD.pack(_MAGIC, _WELCOME) + self._folder.proof()


class _Reply:
    """Replies to a request of a dialer that may share the folder."""

    def __init__(self, listener: _SharingListener, connection: int, reply: Reply) -> None:
        self._listener = listener
        self._connection = connection
        self._reply = reply
        self._lock = threading.Lock()
        self._is_done = False

    def __call__(self, raw: WireBytes | None, *, urgent: bool = False) -> None:
        with self._lock:
            # A slab for an ignored reply would never be read.
            if self._is_done:
                return
            self._is_done = True
        put = None if raw is None else self._listener.put(raw, self._connection)
        self._reply(raw if put is None else put, urgent=urgent)


class _SharingChannel:
    """A channel to a listener that shares the folder."""

    def __init__(self, inner: Channel, folder: _Folder, address: str, max_frame_bytes: int) -> None:
        self._inner = inner
        self._folder = folder
        self._address = address
        self._max_frame_bytes = max_frame_bytes
        self._reader = folder.new_reader()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def n_bytes(self) -> int:
        """How many bytes show that the peer is alive, shared ones excluded."""
        return self._inner.n_bytes

    def request(self, raw: WireBytes) -> memoryview:
        """Make a request and wait for the reply."""
        put = self._put(raw)
        answer = self._inner.request(raw if put is None else put)
        if put is not None and self._is_refused(put, answer):
            answer = self._inner.request(raw)
        return self._open(answer)

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        """Make a request without waiting."""
        put = self._put(raw)
        on_inner = functools.partial(self._on_reply, on_reply)
        send = functools.partial(self._inner.send, timeout_s=timeout_s, urgent=urgent)
        if put is None:
            send(raw, on_inner)
            return

        def on_answer_to_ticket(answer: memoryview | TransportError) -> None:
            if not isinstance(answer, TransportError) and self._is_refused(put, answer):
                send(raw, on_inner)
            else:
                on_inner(answer)

        send(put, on_answer_to_ticket)

    def close(self) -> None:
        """Close the connection; pending requests fail at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._inner.close()
        self._folder.abandon(self._reader)
        self._folder.leave()

    def _put(self, raw: WireBytes) -> bytes | None:
        put = self._folder.put(raw, self._reader)
        if put is not None and self._closed:
            # Closing may already have abandoned the reader's slabs.
            self._folder.pool.abandon(self._reader)
        return put

    def _is_refused(self, put: bytes, answer: memoryview) -> bool:
        """Return whether the listener could not use a ticket, and its content must be sent."""
        if _parse(answer)[0] != _REFUSED:
            return False
        _logger.debug("%s could not open a slab; sending its content", self._address)
        self._folder.pool.take_back(put[_HEAD.size :])
        return True

    def _on_reply(self, on_reply: OnReply, answer: memoryview | TransportError) -> None:
        if not isinstance(answer, TransportError):
            try:
                answer = self._open(answer)
            except TransportError as error:
                answer = error
        on_reply(answer)

    def _open(self, answer: memoryview) -> memoryview:
        """Return a reply, from its slab if it is a ticket."""
        kind, content = _parse(answer)
        if kind != _TICKET:
            return answer
        taken = self._folder.reader.take(content, max_bytes=self._max_frame_bytes)
        if taken is None:
            self._folder.not_sharing.add(self._address)
            raise TransportError(
                f"could not read the reply of {self._address} from shared memory; reconnecting "
                "without it"
            )
        return taken


def _parse(raw: memoryview) -> tuple[int, memoryview]:
    """Return the kind and content of one of this module's messages, or 0 and a frame."""
    if len(raw) < _HEAD.size or bytes(raw[: len(_MAGIC)]) != _MAGIC:
        return 0, raw
    return int(_HEAD.unpack_from(raw)[1]), raw[_HEAD.size :]


def _check_directory(directory: Path) -> None:
    if not hasattr(os, "posix_fallocate"):
        raise TransportError(
            "this system has no posix_fallocate, without which shared memory is not safe; use the "
            "inner transport directly"
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
