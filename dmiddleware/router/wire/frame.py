"""The frame: the unit of transfer, checked in full before any of it is used.

::

    offset  size  field
         0     4  magic "DMWR"
         4     2  version
         6     1  type (FrameType)
         7     1  flags
         8     8  session          agreed in the handshake; 0 before it
        16     8  incarnation      of the sender, as agreed with its peers
        24     4  stream           data streams are independent of each other
        28     4  metadata length  (at most 64 KiB)
        32     8  sequence         in its session, direction and lane
        40     8  frame length     of the whole frame
        48     4  buffers          how many (at most 8,192 in a frame that is sent as a whole)
        52     8  data sequence    of the events in their stream
        60     4  zero
        64    32  MAC              keyed BLAKE2b (RFC 7693); zero without a key
        96     …  metadata         msgpack
         …     …  table            8 bytes a buffer: its length
         …     …  buffers          each at a multiple of 64 bytes from the frame's start

Integers are little-endian. The MAC covers prefix, metadata and table, and with the flag
``MAC_BODY`` also the BLAKE2b hash of all bytes after the table, which is computed once however many
peers receive them. That flag is set on tcp; on ipc and under mutual TLS the kernel or TLS protects
the buffers.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from dmiddleware.errors import AuthError, FrameError, FrameTooLarge
from dmiddleware.router.wire.byte_pieces import ALIGNMENT, BytePieces

__all__ = [
    "FrameType",
    "FrameFlag",
    "Frame",
    "FrameMac",
    "FrameContents",
    "OutgoingFrame",
    "encode_frame",
    "decode_frame",
    "digest_if_large",
    "type_of",
    "version_of",
    "read_metadata",
    "VERSION",
    "MAX_FRAME_BYTES",
    "ALIGNMENT",
    "MAX_METADATA",
    "MAX_BUFFERS",
    "HEADER_SIZE",
]

T = TypeVar("T")

VERSION: Final = 4
MAX_FRAME_BYTES: Final = 32 << 20
"""The longest frame that any node reads; larger events travel in fragments."""

MAX_METADATA: Final = 64 * 1024
MAX_BUFFERS: Final = 8192

_MAGIC: Final = b"DMWR"
_PREFIX: Final = struct.Struct("<4sHBBQQIIQQIQ4x")
_TYPE_AT: Final = 6
_MAC_SIZE: Final = 32
_NO_MAC: Final = bytes(_MAC_SIZE)
HEADER_SIZE: Final = _PREFIX.size + _MAC_SIZE
_LENGTH: Final = struct.Struct("<Q")


class FrameType(enum.IntEnum):
    """The purpose of a frame."""

    HELLO = 1
    CHALLENGE = 2
    AUTH = 3
    WELCOME = 4
    REFUSED = 5
    DATA = 16
    FRAGMENT = 20
    STATE = 21
    ASK = 22
    SHARE = 23
    AGAIN = 24
    HEARTBEAT = 32
    BYE = 35


class FrameFlag(enum.IntFlag):
    """How to read a frame."""

    NONE = 0
    MAC_BODY = 1
    """The MAC covers the buffers too."""

    SPILLED = 2
    """The first buffer holds the metadata, which is too long for its usual place."""

    ASKS = 4
    """The peer should answer the frame with the state of its inboxes."""


# Converting numbers to enum members would take as long as decoding a whole frame.
_TYPES: Final = {int(kind): kind for kind in FrameType}
_FLAGS: Final = [FrameFlag(bits) for bits in range(8)]
_COVERING: Final = frozenset(flags for flags in _FLAGS if FrameFlag.MAC_BODY in flags)
_MAC_BODY: Final = int(FrameFlag.MAC_BODY)
_ASKS: Final = int(FrameFlag.ASKS)

_JOINED: Final = 4 * 1024
"""Shorter frames are sent as one piece."""

_LARGE: Final = 64 * 1024
"""The body of a longer frame takes a while to check."""


class Frame(msgspec.Struct, frozen=True):
    """One frame, decoded.

    Attributes:
        type: the purpose of the frame.
        session: agreed on in the handshake; 0 before it.
        incarnation: incarnation of the sender.
        stream: number of the data stream.
        sequence: number of the frame in its session, direction and lane.
        data_sequence: number of the events in their stream.
        metadata: msgpack bytes, at most 64 KiB.
        buffers: raw bytes; after decoding, views of the received frame.
        flags: how to read the frame.
        asks: whether it should be answered with the state of the inboxes.
    """

    type: FrameType
    session: int = 0
    incarnation: int = 0
    stream: int = 0
    sequence: int = 0
    data_sequence: int = 0
    metadata: bytes | memoryview = b""
    buffers: Sequence[bytes | memoryview] = ()
    flags: FrameFlag = FrameFlag.NONE
    asks: bool = False


class FrameMac:
    """Signs and checks frames with one session's key.

    Args:
        key: 32 secret bytes.
        cover_body: whether the MAC covers the buffers too.
    """

    def __init__(self, key: bytes, *, cover_body: bool) -> None:
        if len(key) != 32:
            raise ValueError(f"a session key must have 32 bytes, got {len(key)}")
        self._keyed = hashlib.blake2b(key=key, digest_size=_MAC_SIZE, person=b"dmw-frame")
        self.cover_body = cover_body

    def digest(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """Return the MAC of the joined parts."""
        keyed = self._keyed.copy()
        for part in parts:
            keyed.update(part)
        return keyed.digest()


class FrameContents:
    """The metadata and buffers of a frame, laid out once for all peers that receive them.

    Args:
        metadata: msgpack bytes.
        buffers: raw bytes.
        flags: how to read the frame.

    Attributes:
        flag_bits: the flags, as a number.
        metadata_size: the metadata's length.
        n_buffers: how many buffers there are.
        size: the frame's length.
        head: the metadata and the table.
        body: the buffers, and the bytes between them.
        body_digest: their digest, once it was computed.
    """

    __slots__ = (
        *("body", "body_digest", "head"),
        *("flag_bits", "metadata_size", "n_buffers", "size"),
    )

    def __init__(
        self,
        metadata: bytes | memoryview = b"",
        buffers: Sequence[bytes | memoryview] = (),
        flags: FrameFlag = FrameFlag.NONE,
    ) -> None:
        self.flag_bits = int(flags)
        self.metadata_size, self.n_buffers = len(metadata), len(buffers)
        self.head: bytes | memoryview = metadata
        self.body: list[bytes | memoryview] = []
        self.body_digest: bytes | None = None
        self.size = HEADER_SIZE + len(metadata)
        if not buffers:
            return
        lengths = [len(buffer) for buffer in buffers]
        self.head = b"".join((metadata, struct.pack(f"<{len(buffers)}Q", *lengths)))
        position = HEADER_SIZE + len(self.head)
        offsets, self.size = _layout(position, lengths)
        for offset, length, buffer in zip(offsets, lengths, buffers, strict=True):
            self.body += (bytes(offset - position), buffer)
            position = offset + length


class OutgoingFrame(BytePieces):
    """A frame that is signed when its bytes are first used, on the thread that sends it.

    Args:
        kind: the purpose of the frame.
        contents: its metadata and buffers.
        mac: signs the frame; None leaves it unsigned.
        max_size: the largest frame that the receiver accepts, in bytes.
        max_buffers: the most buffers that it accepts.
        session: see :class:`Frame`, as for the arguments after it.
        asks: whether the peer should answer it.

    Raises:
        FrameTooLarge: if the frame exceeds ``max_size``, or has too many bytes of metadata or too
            many buffers.
    """

    __slots__ = ("_contents", "_mac", "_prefix")

    def __init__(
        self,
        kind: FrameType,
        contents: FrameContents,
        mac: FrameMac | None,
        *,
        max_size: int,
        max_buffers: int = MAX_BUFFERS,
        session: int = 0,
        incarnation: int = 0,
        stream: int = 0,
        sequence: int = 0,
        data_sequence: int = 0,
        asks: bool = False,
    ) -> None:
        self._pieces = ()
        self.size = contents.size
        if self.size > max_size:
            raise FrameTooLarge(
                f"the frame has {self.size} bytes, but the receiver accepts {max_size}; send "
                "smaller parts"
            )
        if contents.metadata_size > MAX_METADATA or contents.n_buffers > max_buffers:
            raise FrameTooLarge(
                f"the frame has {contents.metadata_size} bytes of metadata and "
                f"{contents.n_buffers} arrays, but at most {MAX_METADATA} and {max_buffers} can be "
                "sent; send long lists and strings as arrays"
            )
        self._contents = contents
        self._mac = mac
        self._prefix = _PREFIX.pack(
            _MAGIC,
            VERSION,
            kind,
            contents.flag_bits
            | (_MAC_BODY if mac is not None and mac.cover_body else 0)
            | (_ASKS if asks else 0),
            session,
            incarnation,
            stream,
            contents.metadata_size,
            sequence,
            self.size,
            contents.n_buffers,
            data_sequence,
        )

    @property
    def pieces(self) -> Sequence[bytes | memoryview]:
        """The pieces, in order."""
        if not self._pieces:
            contents, mac = self._contents, self._mac
            signature, head, body = _NO_MAC, contents.head, contents.body
            if mac is not None and mac.cover_body and self.size > HEADER_SIZE + len(head):
                if contents.body_digest is None:
                    contents.body_digest = _digest_of_body(body)
                signature = mac.digest((self._prefix, head, contents.body_digest))
            elif mac is not None:
                signature = mac.digest((self._prefix, head))
            if self.size <= _JOINED:
                self._pieces = [b"".join((self._prefix, signature, head, *body))]
            else:
                self._pieces = [b"".join((self._prefix, signature, head)), *body]
        return self._pieces

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


def encode_frame(frame: Frame, mac: FrameMac | None = None, *, max_size: int) -> bytes:
    """Encode a frame as bytes; each buffer is copied once, to its aligned offset.

    Args:
        frame: the frame.
        mac: signs the frame; None leaves it unsigned.
        max_size: the largest frame that the receiver accepts, in bytes.

    Raises:
        FrameTooLarge: if the metadata exceeds 64 KiB or the frame ``max_size``.
    """
    return bytes(
        OutgoingFrame(
            frame.type,
            FrameContents(frame.metadata, frame.buffers, frame.flags),
            mac,
            max_size=max_size,
            session=frame.session,
            incarnation=frame.incarnation,
            stream=frame.stream,
            sequence=frame.sequence,
            data_sequence=frame.data_sequence,
        )
    )


def digest_if_large(raw: bytes | bytearray | memoryview) -> bytes | None:
    """Return the digest of the body of a large frame that claims to be signed as a whole.

    Computing it takes milliseconds. Callers of :func:`decode_frame` that hold a lock do it before.
    """
    if len(raw) < _LARGE:
        return None
    prefix = _PREFIX.unpack_from(raw)
    flags, metadata_size, n_buffers = prefix[3], prefix[7], prefix[10]
    head = HEADER_SIZE + metadata_size + _LENGTH.size * n_buffers
    if not flags & _MAC_BODY or head >= len(raw):
        return None
    return _digest_of_body([memoryview(raw).cast("B")[head:]])


def decode_frame(
    raw: bytes | bytearray | memoryview,
    mac: FrameMac | None = None,
    *,
    body_digest: bytes | None = None,
    max_buffers: int = MAX_BUFFERS,
) -> Frame:
    """Decode a frame; each length is checked before it is used.

    Args:
        raw: the received bytes.
        mac: checks the signature. None accepts unsigned frames only, so a signature is never
            ignored.
        body_digest: what :func:`digest_if_large` returned for these bytes; None: not called.
        max_buffers: the most buffers that are accepted.

    Returns:
        The frame; its metadata and buffers are views of ``raw``.

    Raises:
        FrameError: if ``raw`` is not a complete frame of this version.
        AuthError: if the signature is missing or wrong.
    """
    view = memoryview(raw).cast("B")
    if len(view) < HEADER_SIZE:
        raise FrameError(f"got {len(view)} bytes, but a frame has at least {HEADER_SIZE}")
    (magic, version, kind, flag_bits, session, incarnation, stream, metadata_size, sequence, size,
     n_buffers, data_sequence) = _PREFIX.unpack_from(view)  # fmt: skip
    if magic != _MAGIC:
        raise FrameError(
            "the received bytes are not a frame; check that the peer is a dmiddleware node"
        )
    if version != VERSION:
        raise FrameError(
            f"the peer has protocol version {version}, this side {VERSION}; install the same "
            "version of dmiddleware on all hosts"
        )
    frame_type = _TYPES.get(kind)
    if frame_type is None:
        raise FrameError(
            f"unknown frame type {kind}; install the same version of dmiddleware on all hosts"
        )
    if size != len(view):
        raise FrameError(f"the frame claims to have {size} bytes, but {len(view)} arrived")
    if metadata_size > MAX_METADATA or n_buffers > max_buffers:
        raise FrameError(
            f"the frame claims {metadata_size} bytes of metadata and {n_buffers} arrays, but at "
            f"most {MAX_METADATA} and {max_buffers} are accepted"
        )
    table = HEADER_SIZE + metadata_size
    head = table + _LENGTH.size * n_buffers
    if head > len(view):
        raise FrameError(f"the frame claims a head of {head} bytes, but {len(view)} arrived")
    flags = _FLAGS[flag_bits % len(_FLAGS)]
    _check_mac(view, mac, flags, head, body_digest)
    buffers: tuple[memoryview, ...] = ()
    end = head
    if n_buffers:
        lengths = struct.unpack_from(f"<{n_buffers}Q", view, table)
        offsets, end = _layout(head, lengths)
        buffers = tuple(
            [view[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
        )
    if end != len(view):
        raise FrameError(
            f"the lengths of the arrays add up to a frame of {end} bytes, but {len(view)} arrived"
        )
    return Frame(
        type=frame_type,
        session=session,
        incarnation=incarnation,
        stream=stream,
        sequence=sequence,
        data_sequence=data_sequence,
        metadata=view[HEADER_SIZE:table],
        buffers=buffers,
        flags=flags,
        asks=bool(flag_bits & _ASKS),
    )


def read_metadata(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    """Decode untrusted metadata.

    Raises:
        FrameError: if it is not a valid ``what``.
    """
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"the received bytes are not a valid {what}: {error}") from error


def type_of(raw: bytes | bytearray | memoryview) -> FrameType:
    """Return the type of a valid frame, without decoding the rest."""
    return FrameType(raw[_TYPE_AT])


def version_of(raw: bytes | bytearray | memoryview) -> int | None:
    """Return the protocol version of a frame, without checking the rest; None for other bytes."""
    if len(raw) < _PREFIX.size:
        return None
    magic, version, *_ = _PREFIX.unpack_from(raw)
    return int(version) if magic == _MAGIC else None


def _layout(head: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return each buffer's offset, and the frame's length, after a head of ``head`` bytes."""
    offsets: list[int] = []
    end = head
    for length in lengths:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(offset)
        end = offset + length
    return offsets, end


def _digest_of_body(parts: Iterable[bytes | memoryview]) -> bytes:
    body = hashlib.blake2b(digest_size=_MAC_SIZE, person=b"dmw-body")
    for part in parts:
        body.update(part)
    return body.digest()


def _check_mac(
    view: memoryview,
    mac: FrameMac | None,
    flags: FrameFlag,
    head: int,
    body_digest: bytes | None,
) -> None:
    claimed = bytes(view[_PREFIX.size : HEADER_SIZE])
    if mac is None:
        if claimed != _NO_MAC:
            raise AuthError(
                "the frame is signed, but this side has no key; give all nodes of the run the same "
                "key"
            )
        return
    if mac.cover_body and flags not in _COVERING:
        raise AuthError(
            "the frame's arrays are not signed, but this side requires it; use the same kind of "
            "address on both ends"
        )
    covered: list[bytes | memoryview] = [view[: _PREFIX.size], view[HEADER_SIZE:head]]
    if flags in _COVERING and head < len(view):
        covered.append(body_digest or _digest_of_body([view[head:]]))
    if not hmac.compare_digest(claimed, mac.digest(covered)):
        raise AuthError(
            "the frame's signature is wrong; the peer has another key, or the frame was altered on "
            "the way"
        )
