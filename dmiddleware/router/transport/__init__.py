"""Transports: they move requests and replies, whatever these contain."""

from dmiddleware.router.transport.interface import (
    Channel,
    Listener,
    OnReply,
    Reply,
    RequestHandler,
    Transport,
)

__all__ = ["Channel", "Listener", "OnReply", "Reply", "RequestHandler", "Transport"]
