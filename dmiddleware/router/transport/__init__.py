"""Transports: they move requests and answers, and know nothing of what these say."""

from dmiddleware.router.transport.base import Channel, Listener, Serve, Transport

__all__ = ["Channel", "Listener", "Serve", "Transport"]
