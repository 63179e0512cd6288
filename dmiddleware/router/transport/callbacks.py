"""Calling reply callbacks, so that their failures and locks do not affect the transport."""

from __future__ import annotations

import logging
import threading

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.interface import OnReply

__all__ = ["run_callback", "run_callback_in_thread"]

_logger = logging.getLogger(__name__)


def run_callback(on_reply: OnReply, outcome: memoryview | TransportError) -> None:
    """Call a reply callback; if it raises, log that and return, so that others are served."""
    try:
        on_reply(outcome)
    except Exception:
        _logger.exception("a reply was dropped, its callback failed")


def run_callback_in_thread(on_reply: OnReply, error: TransportError) -> None:
    """Call a reply callback from a new thread: the caller may hold a lock that it needs."""
    threading.Thread(
        target=run_callback, args=(on_reply, error), name="router-callback", daemon=True
    ).start()
