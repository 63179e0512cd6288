"""Loading batches in the background while the learner trains."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from multiprocessing import get_context
from typing import Any, TypeAlias

from dmiddleware.errors import ConfigError, NotEnoughData
from dmiddleware.flow_control import FairQueue
from dmiddleware.process.closing import Closing

__all__ = ["LoaderClosed", "PrefetchLoader"]

GetData: TypeAlias = Callable[[Any], "list[Callable[[], Any]] | None"]


class PrefetchLoader(Closing):
    """Iterates over batches whose samples are loaded by workers, in order.

    One thread calls ``get_data``. With workers, it does so for the next batches, and the workers
    load their samples, at most ``prefetch`` batches ahead. Without workers, a batch is loaded when
    it is requested, in the requesting thread.

    Args:
        get_data: called with the batch size; returns that many callables, each of which loads one
            sample. It may block until there is data, but must not return nothing.
        batch_size: samples in a batch; a dictionary of the numbers of each kind of samples is
            passed to ``get_data`` as it is.
        num_workers: number of workers; 0 loads in the calling thread.
        worker: ``"thread"``, or ``"process"`` (spawned; the callables must be picklable).
        prefetch: number of batches to load ahead.
        chunk_size: number of samples that a worker loads at a time; None: 1.
        timeout_s: how long to wait for a batch.

    Raises:
        ValueError: for invalid numbers or an unknown kind of worker.
        ConfigError: if ``chunk_size`` does not divide the batch size.
    """

    def __init__(
        self,
        get_data: GetData,
        batch_size: int | Mapping[str, int],
        *,
        num_workers: int = 0,
        worker: str = "thread",
        prefetch: int = 2,
        chunk_size: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        n_samples = sum(batch_size.values()) if isinstance(batch_size, Mapping) else batch_size
        if n_samples < 1 or num_workers < 0 or prefetch < 1:
            raise ValueError(
                "batch_size and prefetch must be at least 1 and num_workers at least 0, got "
                f"{batch_size}, {prefetch} and {num_workers}"
            )
        self._chunk_size = 1 if chunk_size is None else chunk_size
        if n_samples % self._chunk_size:
            raise ConfigError(
                f"dataloader.chunk_size must divide the batch size {batch_size}, got {chunk_size}"
            )
        self._get_data = get_data
        self._batch_size = batch_size
        self._n_samples = n_samples
        self._timeout_s = timeout_s
        self._executor = _make_executor(worker, num_workers) if num_workers else None
        self._batches = FairQueue[Any](capacity=prefetch)
        self._wanted = threading.Semaphore(0)
        self._feeder = threading.Thread(target=self._feed, name="prefetch", daemon=True)
        self._feeder.start()

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the next batch, a list of samples.

        Raises:
            NotEnoughData: if ``get_data`` returned nothing.
            TimeoutError: if the batch is not loaded in time.
            LoaderClosed: after ``close``, also if this was already waiting.
            Exception: any error of ``get_data`` or of loading a sample.
        """
        if self._batches.closed:
            raise _closed()
        if self._executor is None:
            self._wanted.release()
        item = self._batches.take(self._timeout_s)
        if item is None:
            raise _closed() if self._batches.closed else self._too_late()
        if isinstance(item, BaseException):
            self.close()
            raise item
        if self._executor is None:
            return [load() for load in item]
        return [sample for future in item for sample in self._loaded(future)]

    def close(self) -> None:
        """Stop the workers; a second call does nothing."""
        self._batches.close()
        self._batches.drain()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._wanted.release()
        # If get_data hangs, its daemon thread stays until the process ends.
        if self._feeder is not threading.current_thread():
            self._feeder.join(timeout=1.0)

    def _loaded(self, future: Future[Any]) -> Any:
        try:
            return future.result(timeout=self._timeout_s)
        except CancelledError:
            raise _closed() from None
        except TimeoutError:
            if future.done():  # loading itself raised TimeoutError
                return future.result()
            raise self._too_late() from None

    def _too_late(self) -> TimeoutError:
        return TimeoutError(
            f"the next batch was not loaded within {self._timeout_s} s; get_data or loading a "
            "sample hangs, or dataloader.timeout_s is too short"
        )

    def _ask(self) -> list[Callable[[], Any]]:
        loads = self._get_data(self._batch_size)
        if not loads:
            raise NotEnoughData(
                f"get_data({self._batch_size}) returned {loads!r}; it must wait until data arrives"
            )
        batch = list(itertools.islice(loads, self._n_samples))
        if not all(map(callable, batch)):
            raise ConfigError(
                f"get_data({self._batch_size}) must return callables that each load one sample, "
                f"got {batch!r:.100}"
            )
        return batch

    def _feed(self) -> None:
        while True:
            if self._executor is None:
                self._wanted.acquire()
            if self._batches.closed:
                return
            try:
                item: Any = self._start_loading(self._ask())
            except BaseException as error:  # noqa: BLE001 - raised by __next__
                item = error
            if not self._batches.put(item) or isinstance(item, BaseException):
                return

    def _start_loading(self, loads: list[Callable[[], Any]]) -> list[Any]:
        """Return futures of chunks of samples; without workers the callables themselves."""
        if self._executor is None:
            return loads
        size = self._chunk_size
        chunks = [loads[start : start + size] for start in range(0, len(loads), size)]
        return [self._executor.submit(_load_chunk, chunk) for chunk in chunks]


class LoaderClosed(RuntimeError):
    """The data loader was closed."""


def _closed() -> LoaderClosed:
    return LoaderClosed("the data loader is closed; call setup_dataloader() again")


def _load_chunk(loads: list[Callable[[], Any]]) -> list[Any]:
    return [load() for load in loads]


def _make_executor(worker: str, num_workers: int) -> Executor:
    if worker == "thread":
        return ThreadPoolExecutor(num_workers, thread_name_prefix="sample-loader")
    if worker == "process":
        return ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"))
    raise ValueError(f"worker must be 'thread' or 'process', got {worker!r}")
