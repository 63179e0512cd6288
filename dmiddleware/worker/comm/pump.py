"""Connects a communicating worker to its coordinator over a link."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from typing import Any, Final, Self

from dmiddleware.closing import Closing
from dmiddleware.errors import ConfigError, DeliveryTimeout
from dmiddleware.worker.comm.comm_worker import CommWorker, Job
from dmiddleware.worker.comm.link import Link
from dmiddleware.worker.coordinator.messages import (
    Joined,
    LearnData,
    Left,
    Message,
    ResourceQuery,
    Resources,
    TaskAlive,
    TaskClose,
    TaskDone,
    TaskFailed,
    TaskOffer,
    TaskRefused,
    TaskStarted,
)
from dmiddleware.worker.errors import TaskFail

__all__ = ["WorkerPump"]

_CHECK_S: Final = 0.5
"""How often a thread checks whether the pump is closed, in seconds."""

_log = logging.getLogger(__name__)


class WorkerPump(Closing):
    """Passes a coordinator's messages to a worker, and the worker's reports to the coordinator.

    One thread receives, another one sends what the worker reports. Close the worker first, and then
    the pump. A task keeps running while the
    coordinator is away: its reports wait, and are sent when the coordinator is back and asks what
    the worker runs.

    Args:
        worker: the worker.
        link: its end of the link; the pump closes it.
        alive_s: after how many seconds without a report to send ``TaskAlive``.
        timeout_s: how long a message waits for a coordinator that is away, in seconds; then it is
            dropped, with a warning.
    """

    def __init__(
        self,
        worker: CommWorker[Any],
        link: Link,
        *,
        alive_s: float = 5.0,
        timeout_s: float = 120.0,
    ) -> None:
        if alive_s <= 0 or timeout_s <= 0:
            raise ValueError(
                f"alive_s and timeout_s must be positive, got {alive_s} and {timeout_s}"
            )
        self._worker = worker
        self._link = link
        self._alive_s = alive_s
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        # Held from taking a report until it is sent, so that it precedes the end of its task.
        self._reporting = threading.Lock()
        self._coordinator: str | None = None
        self._last_end: TaskDone | TaskFailed | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; a second call does nothing."""
        if self._threads:
            return
        for work, name in ((self._receive, "receive"), (self._report, "report")):
            thread = threading.Thread(target=work, name=f"worker-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, deadline_s: float = 10.0) -> None:
        """End the threads, and close the link; may be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._link.close(deadline_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def _receive(self) -> None:
        while not self._closed:
            received = self._link.receive(_CHECK_S)
            if received is not None:
                self._handle(*received)

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case ResourceQuery():
                self._set_coordinator(peer)
                self._send(self._resources())
                for repeated in self._worker.repeat_reports():
                    self._send(repeated)
            case TaskOffer():
                self._set_coordinator(peer)
                self._answer(message)
            case TaskClose():
                self._close_task(message)
            case LearnData():
                self._worker.take_data(message)
            case Joined() | Left():
                pass
            case _:
                _log.warning("%s from %s is not for a worker", type(message).__name__, peer)
        with self._changed:
            self._changed.notify_all()

    def _set_coordinator(self, peer: str) -> None:
        with self._changed:
            self._coordinator = peer

    def _resources(self) -> Resources:
        job = self._worker.job
        resource = self._worker.deal_with_resource()
        if job is None:
            return Resources(resource)
        return Resources(resource, job.ids["task_id"], job.attempt)

    def _answer(self, offer: TaskOffer) -> None:
        if self._worker.job is not None:
            self._send(self._take(offer))
            return
        with self._reporting:  # so that the task's first report comes after the answer
            self._send(self._take(offer))

    def _take(self, offer: TaskOffer) -> Message:
        """Start an offered task, and return the answer."""
        if self._runs(offer):
            return TaskStarted(offer.task_id, offer.attempt)  # the offer arrived twice
        if offer.kind != self._worker.kind:
            reason = f"this worker is a {self._worker.kind}, and the task is for a {offer.kind}"
            return TaskRefused(offer.task_id, offer.attempt, reason)
        try:
            info = {**offer.task_info, "task_id": offer.task_id}
            self._worker.start_task(info, offer.attempt)
        except (TaskFail, ConfigError) as error:
            return TaskRefused(offer.task_id, offer.attempt, str(error))
        return TaskStarted(offer.task_id, offer.attempt)

    def _runs(self, message: TaskOffer | TaskClose) -> bool:
        job = self._worker.job
        asked = message.task_id, message.attempt
        return job is not None and (job.ids["task_id"], job.attempt) == asked

    def _close_task(self, close: TaskClose) -> None:
        if not self._runs(close):
            end = self._last_end
            if end is None or (end.task_id, end.attempt) != (close.task_id, close.attempt):
                why = "this worker does not run the task"
                end = TaskFailed(close.task_id, close.attempt, why)
            self._send(end)
            return
        try:
            messages = self._worker.close_task()
        except TaskFail as failure:
            messages = [TaskFailed(close.task_id, close.attempt, failure.message)]
        except Exception as error:  # noqa: BLE001 - reported
            text = "".join(traceback.format_exception(error))
            messages = [TaskFailed(close.task_id, close.attempt, text)]
        with self._reporting:
            for message in messages:
                self._send(message)

    def _report(self) -> None:
        sent_at = time.monotonic()
        while not self._closed:
            job: Job | None = self._worker.job
            if job is None:
                self._wait_for_change()
                continue
            if job.closing:
                alive = TaskAlive(job.ids["task_id"], job.attempt)
                self._wait_for_change()
                if time.monotonic() - sent_at >= self._alive_s and self._worker.job is job:
                    self._send(alive)
                    sent_at = time.monotonic()
                continue
            with self._reporting:
                for message in self._next_reports(job):
                    self._send(message)
            sent_at = time.monotonic()

    def _wait_for_change(self) -> None:
        with self._changed:
            self._changed.wait(min(_CHECK_S, self._alive_s))

    def _next_reports(self, job: Job) -> list[Message]:
        task_id = job.ids["task_id"]
        try:
            messages = self._worker.report(self._alive_s)
        except TaskFail as failure:
            if job.closing or not job.failure:
                return []  # ended by a TaskClose, which answers it
            return [TaskFailed(task_id, job.attempt, failure.message)]
        if messages or job.closing:
            return list(messages)
        return [TaskAlive(task_id, job.attempt)]

    def _send(self, message: Message) -> None:
        """Send a message to the coordinator, as soon as it is there."""
        if isinstance(message, TaskDone | TaskFailed):
            self._last_end = message
        try:
            self._link.send(self._wait_for_coordinator(), message)
        except DeliveryTimeout as error:
            if not self._closed:
                _log.warning("%s was not sent: %s", type(message).__name__, error)

    def _wait_for_coordinator(self) -> str:
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while not self._closed and time.monotonic() < deadline:
                if self._coordinator is not None and self._coordinator in self._link.peers():
                    return self._coordinator
                self._changed.wait(_CHECK_S)
        raise DeliveryTimeout(f"the coordinator was away for {self._timeout_s:g} s")
