"""What transports share: calling reply callbacks, waiting for a reply, and the error of a dial.

Failures and locks of a callback do not affect the transport that calls it.
"""

from __future__ import annotations

import logging
import threading

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.interface import OnReply

__all__ = ["Result", "no_connection", "run_callback", "run_callback_in_thread"]

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


def no_connection(address: str, timeout_s: float, cause: OSError | None = None) -> TransportError:
    """Return the error of a dial that has reached its deadline."""
    why = "" if cause is None else f" ({cause})"
    return TransportError(
        f"could not dial {address}: no connection within {timeout_s:g} s{why}; check the address, "
        "and that the peer is running"
    )


class Result:
    """A reply callback for a thread that waits for the reply."""

    __slots__ = ("_done", "_outcome")

    def __init__(self) -> None:
        # A lock is the cheapest thing to wait for.
        self._done = threading.Lock()
        self._done.acquire()

    def __call__(self, outcome: memoryview | TransportError) -> None:
        """Note the outcome."""
        self._outcome = outcome
        self._done.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the outcome; return whether it has arrived."""
        return self._done.acquire(timeout=timeout_s) and self._release()

    def get(self) -> memoryview:
        """Wait for the outcome without a deadline, and return the reply.

        Raises:
            TransportError: if there is none.
        """
        with self._done:
            if isinstance(self._outcome, TransportError):
                raise self._outcome
            return self._outcome

    def _release(self) -> bool:
        self._done.release()
        return True
