"""Transports carry requests and replies, whatever their content."""

from dmiddleware.router.transport.interface import (
    Channel,
    Listener,
    OnReply,
    Reply,
    RequestHandler,
    Transport,
)

__all__ = ["Channel", "Listener", "OnReply", "Reply", "RequestHandler", "Transport"]
