"""How those are told what became of their requests, whom nothing of theirs may disturb."""

from __future__ import annotations

import logging
import threading

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.base import OnAnswer

__all__ = ["tell", "tell_elsewhere"]

_logger = logging.getLogger(__name__)


def tell(on_answer: OnAnswer, answer: memoryview | TransportError) -> None:
    """Tell what became of a request; the thread goes on to others even if that fails."""
    try:
        on_answer(answer)
    except Exception:
        _logger.exception("an answer could not be taken")


def tell_elsewhere(on_answer: OnAnswer, error: TransportError) -> None:
    """Tell that a request failed, from another thread: the caller may hold what is needed there."""
    threading.Thread(target=tell, args=(on_answer, error), name="router-tell", daemon=True).start()
