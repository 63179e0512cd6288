"""Transports: ordered streams of bytes between two processes, and the frames in them.

``NngStreamTransport`` is imported when it is first used, because nng starts threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmiddleware.process.late_imports import late_names

if TYPE_CHECKING:
    from dmiddleware.router.transport.nng_stream import NngStreamTransport

__all__ = ["NngStreamTransport"]

__getattr__ = late_names(
    __name__, {"NngStreamTransport": "dmiddleware.router.transport.nng_stream"}
)
