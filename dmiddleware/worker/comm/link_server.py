"""Connects a communicating worker to its coordinator over a link."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, Self

from dmiddleware.errors import DeliveryTimeout, EncodeError
from dmiddleware.process.closing import Closing
from dmiddleware.worker.comm.comm_worker import CommWorker
from dmiddleware.worker.coordinator.conversation import Answer, Ask, Link

__all__ = ["LinkServer"]

_CHECK_S: Final = 0.5
"""How often the thread checks whether the server is closed, in seconds."""

_log = logging.getLogger(__name__)


class LinkServer(Closing):
    """Answers a coordinator's requests for a worker, one after the other, on a thread.

    Close the worker first, and then the server.

    Args:
        worker: the worker.
        link: its end of the link; the server closes it.
    """

    def __init__(self, worker: CommWorker[Any], link: Link) -> None:
        self._worker = worker
        self._link = link
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to answer; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="link-server", daemon=True)
            self._thread.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Close the link, and end; may be called twice.

        Args:
            deadline_s: the most seconds that the link may take to deliver the last answer, and the
                request in hand to end.
        """
        self._closing.set()
        self._link.close(deadline_s)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def _serve(self) -> None:
        while not self._closing.is_set():
            match self._link.receive(_CHECK_S):
                case (peer, Ask() as ask):
                    self._send(peer, self._worker.answer(ask))

    def _send(self, peer: str, answer: Answer) -> None:
        try:
            self._link.send(peer, answer)
        except EncodeError as error:
            self._send(peer, Answer(answer.id, failure=f"the result cannot be sent: {error}"))
        except DeliveryTimeout as error:
            if not self._closing.is_set():
                _log.warning("an answer was not sent: %s", error)
            self._worker.take_back()
