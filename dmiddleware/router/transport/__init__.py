"""Transports: they move requests and answers, and know nothing of what these say."""

from dmiddleware.router.transport.base import Channel, Listener, OnAnswer, Reply, Serve, Transport

__all__ = ["Channel", "Listener", "OnAnswer", "Reply", "Serve", "Transport"]
