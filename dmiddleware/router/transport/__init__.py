"""Transports: they move requests and answers, and know nothing of what these say."""

from dmiddleware.router.transport.interface import (
    Channel,
    Listener,
    OnReply,
    Reply,
    RequestHandler,
    Transport,
)

__all__ = ["Channel", "Listener", "OnReply", "Reply", "RequestHandler", "Transport"]
