from __future__ import annotations

import functools
import itertools
import operator
import queue
import threading

import pytest

from dmiddleware.errors import NotEnoughData
from dmiddleware.worker.learner.prefetch import PrefetchLoader


def numbers():
    """Return a source of samples 0, 1, 2, …"""
    counter = itertools.count()
    return lambda n: [functools.partial(operator.mul, next(counter), 10) for _ in range(n)]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_are_complete_and_in_order(num_workers):
    with PrefetchLoader(numbers(), 4, num_workers=num_workers, timeout_s=20) as loader:
        batches = list(itertools.islice(loader, 5))
    assert batches == [[10 * (4 * b + i) for i in range(4)] for b in range(5)]


@pytest.mark.process
def test_samples_can_be_loaded_in_processes():
    with PrefetchLoader(numbers(), 2, num_workers=1, worker="process", timeout_s=60) as loader:
        assert next(loader) == [0, 10]


def test_at_most_prefetch_batches_are_loaded_ahead():
    asked = threading.Semaphore(0)
    source, n_asked = numbers(), []

    def get_data(n):
        n_asked.append(n)
        asked.release()
        return source(n)

    with PrefetchLoader(get_data, 1, num_workers=1, prefetch=2, timeout_s=20) as loader:
        # Two in the queue, and one in the thread that fills it.
        for _ in range(3):
            assert asked.acquire(timeout=20)
        assert next(loader) == [0]
        assert asked.acquire(timeout=20)
    assert len(n_asked) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("what", ["get_data", "a sample"])
@pytest.mark.parametrize("error", [OSError, TimeoutError, queue.Empty])
def test_an_error_is_raised_where_the_batch_is_requested(num_workers, what, error):
    def broken(*_):
        raise error("a broken file")

    get_data = broken if what == "get_data" else lambda n: [broken] * n
    with (
        PrefetchLoader(get_data, 2, num_workers=num_workers, timeout_s=20) as loader,
        pytest.raises(error, match="a broken file"),
    ):
        next(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_source_that_returns_nothing_is_an_error(num_workers):
    with (
        PrefetchLoader(lambda n: None, 2, num_workers=num_workers, timeout_s=20) as loader,
        pytest.raises(NotEnoughData, match=r"get_data\(2\) returned None"),
    ):
        next(loader)


def test_a_batch_that_is_not_loaded_is_a_timeout():
    release = threading.Event()
    with PrefetchLoader(
        lambda n: [lambda: release.wait(20)] * n, 1, num_workers=1, timeout_s=0.01
    ) as loader:
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            next(loader)
        release.set()


def test_the_loader_can_be_closed_twice_and_ends_its_threads():
    before = set(threading.enumerate())
    loader = PrefetchLoader(numbers(), 2, num_workers=2, timeout_s=20)
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_closing_wakes_a_thread_that_waits_for_a_batch():
    asked, release = threading.Event(), threading.Event()

    def get_data(n):
        asked.set()
        release.wait(60)
        return []

    loader = PrefetchLoader(get_data, 2, num_workers=1, prefetch=1, timeout_s=60)
    errors = []

    def take():
        try:
            next(loader)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    assert asked.wait(30)
    loader.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert "closed" in str(errors[0])
    loader.close()  # leaves an item for a waiting thread, which fills the queue
    release.set()
    for thread in threading.enumerate():
        if thread.name == "prefetch":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    "options", [{"num_workers": -1}, {"prefetch": 0}, {"num_workers": 1, "worker": "fiber"}]
)
def test_invalid_options_are_rejected(options):
    with pytest.raises(ValueError, match=r"must be"):
        PrefetchLoader(numbers(), 2, **options)
