"""The refusal of peers with dmiddleware 0.2 or before, whose frames have another head.

::

    offset  size  field
         0     4  magic "DMWU"
         4     1  kind: 1 for a request, 2 for a reply
         8     4  length of this fragment
        12     8  number of the request
        20     8  length of the whole frame
        28     …  the fragment

The frame itself begins as today, with its magic and version. Such a dialer reports the versions of
both sides if it gets any frame of another version as a reply.
"""

from __future__ import annotations

import struct
from typing import Final

from dmiddleware.errors import FrameError
from dmiddleware.router.wire.frame import VERSION, Frame, FrameType, encode_frame

__all__ = ["OLD_BYTES", "OLD_MAGIC", "OldVersionError"]

OLD_MAGIC: Final = b"DMWU"

_HEAD: Final = struct.Struct("<4sB3xIQQ")
_FRAME: Final = struct.Struct("<4sH")
_REPLY: Final = 2

OLD_BYTES: Final = _HEAD.size + _FRAME.size
"""How many bytes show the version of an old peer."""


class OldVersionError(FrameError):
    """A peer has sent a frame of an old version.

    Args:
        received: the first bytes of the connection.

    Attributes:
        answer: the bytes that the peer understands as a refusal.
    """

    def __init__(self, received: bytes | memoryview) -> None:
        _, _, _, number, _ = _HEAD.unpack_from(received)
        _, version = _FRAME.unpack_from(received, _HEAD.size)
        super().__init__(
            f"the peer has protocol version {version}, this side {VERSION}; install the same "
            "version of dmiddleware on all hosts"
        )
        frame = bytes(encode_frame(Frame(FrameType.REFUSED), max_size=4096))
        self.answer = _HEAD.pack(OLD_MAGIC, _REPLY, len(frame), number, len(frame)) + frame
