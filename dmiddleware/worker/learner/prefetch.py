"""Batches that are loaded while the learner learns."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Self, TypeAlias

from dmiddleware.errors import ConfigError, NotEnoughData

__all__ = ["PrefetchLoader"]

GetData: TypeAlias = Callable[[int], "list[Callable[[], Any]] | None"]


class PrefetchLoader:
    """Iterates over batches whose samples are loaded by workers, in order.

    With workers, one thread asks ``get_data`` for the next batches and the workers load their
    samples, at most ``prefetch`` batches ahead. Without, everything happens when a batch is asked
    for.

    Args:
        get_data: called with the batch size; returns as many callables, each of which loads one
            sample. It may wait for data; that it returns nothing is an error.
        batch_size: samples in a batch.
        num_workers: 0, or how many workers load.
        worker: ``"thread"``, or ``"process"`` (spawned; the callables must be picklable).
        prefetch: how many batches are under way.
        timeout_s: how long the next batch may take.

    Raises:
        ValueError: for impossible numbers or an unknown kind of worker.
    """

    def __init__(
        self,
        get_data: GetData,
        batch_size: int,
        *,
        num_workers: int = 0,
        worker: str = "thread",
        prefetch: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        if batch_size < 1 or num_workers < 0 or prefetch < 1:
            raise ValueError(
                "batch_size and prefetch must be at least 1 and num_workers at least 0, got "
                f"{batch_size}, {prefetch} and {num_workers}"
            )
        self._get_data = get_data
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._executor = _make_executor(worker, num_workers) if num_workers else None
        self._batches: queue.Queue[list[Future[Any]] | BaseException] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._feeder: threading.Thread | None = None
        if self._executor is not None:
            self._feeder = threading.Thread(
                target=self._feed, args=(self._executor,), name="prefetch", daemon=True
            )
            self._feeder.start()

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the next batch, a list of samples.

        Raises:
            NotEnoughData: if ``get_data`` gave nothing.
            TimeoutError: if the batch does not come in time.
            RuntimeError: after ``close``, also if that comes while this waits.
            Exception: whatever ``get_data`` or a sample's loading raised.
        """
        if self._stop.is_set():
            raise _closed()
        if self._executor is None:
            return [load() for load in self._ask()]
        try:
            item = self._batches.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._too_late() from None
        if isinstance(item, BaseException):
            self.close()
            raise item
        return [self._loaded(future) for future in item]

    def close(self) -> None:
        """Stop the workers; a second call does nothing."""
        self._stop.set()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        if self._feeder is not None:
            # The feeder may wait for room; once the stop is set it puts at most one more item.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._batches.get_nowait()
            # A get_data that hangs keeps its daemon thread; that ends with the process.
            self._feeder.join(timeout=1.0)
            # Another thread may wait for a batch that will not come.
            with contextlib.suppress(queue.Full):
                self._batches.put_nowait(_closed())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _loaded(self, future: Future[Any]) -> Any:
        try:
            return future.result(timeout=self._timeout_s)
        except TimeoutError:
            if future.done():  # it may be the loading's own
                return future.result()
            raise self._too_late() from None

    def _too_late(self) -> TimeoutError:
        return TimeoutError(
            f"the next batch did not come within {self._timeout_s} s; get_data or the loading "
            "of a sample hangs, or dataloader.timeout_s is too short"
        )

    def _ask(self) -> list[Callable[[], Any]]:
        loads = self._get_data(self._batch_size)
        if not loads:
            raise NotEnoughData(
                f"get_data({self._batch_size}) returned {loads!r}; it must wait until data arrives"
            )
        batch = list(itertools.islice(loads, self._batch_size))
        if not all(map(callable, batch)):
            raise ConfigError(
                f"get_data({self._batch_size}) must return callables that each load one sample, "
                f"got {batch!r:.100}"
            )
        return batch

    def _feed(self, executor: Executor) -> None:
        while not self._stop.is_set():
            item: list[Future[Any]] | BaseException
            try:
                item = [executor.submit(load) for load in self._ask()]
            except BaseException as error:  # noqa: BLE001 - raised again where the batch is taken
                item = error
            if self._stop.is_set():
                return  # while it was asked for; there may be no room, and no one to make some
            self._batches.put(item)
            if isinstance(item, BaseException):
                return


def _closed() -> RuntimeError:
    return RuntimeError("the data loader is closed; set it up again to go on")


def _make_executor(worker: str, num_workers: int) -> Executor:
    if worker == "thread":
        return ThreadPoolExecutor(num_workers, thread_name_prefix="sample-loader")
    if worker == "process":
        return ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"))
    raise ValueError(f"worker must be 'thread' or 'process', got {worker!r}")
