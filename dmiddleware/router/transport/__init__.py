"""Transports carry requests and replies, whatever their content."""

from dmiddleware.router.transport.interface import (
    Channel,
    Listener,
    ListenLimits,
    OnReply,
    Reply,
    RequestHandler,
    Transport,
)

__all__ = [
    "Channel",
    "ListenLimits",
    "Listener",
    "OnReply",
    "Reply",
    "RequestHandler",
    "Transport",
]
