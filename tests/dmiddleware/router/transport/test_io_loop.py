"""The loop that waits for all sockets of a transport."""

import contextlib
import itertools
import socket
import threading

import pytest

from dmiddleware.router.transport.io_loop import READ, IoLoop

DEADLINE_S = 30.0


class Blocking:
    """Handles events, each until it is released."""

    def __init__(self, loop):
        self.ours, self.theirs = socket.socketpair()
        self.loop = loop
        self.entered = threading.Semaphore(0)
        self.released = threading.Event()
        self.threads = []
        assert loop.add(self.ours.fileno(), self)
        loop.watch(self.ours.fileno(), READ)

    def on_event(self, events, buffer):
        self.threads.append(threading.current_thread())
        self.ours.recv(1)
        self.entered.release()
        assert self.released.wait(DEADLINE_S)
        self.loop.watch(self.ours.fileno(), READ)

    def trigger(self):
        self.theirs.send(b"x")

    def handled(self):
        return self.entered.acquire(timeout=DEADLINE_S)

    def close(self):
        self.released.set()
        self.loop.remove(self.ours.fileno())
        self.ours.close()
        self.theirs.close()


@contextlib.contextmanager
def handlers(count):
    loop = IoLoop()
    found = [Blocking(loop) for _ in range(count)]
    try:
        yield loop, found
    finally:
        for handler in found:
            handler.close()
        loop.join()


@pytest.mark.parametrize("n_blocked", [1, 2, 3])
def test_handlers_that_take_long_do_not_hold_up_the_others(n_blocked):
    with handlers(n_blocked + 1) as (loop, found):
        *blocked, quick = found
        quick.released.set()
        loop.grow()
        for handler in blocked:
            handler.trigger()
        assert all(handler.handled() for handler in blocked)
        for _ in range(3):
            quick.trigger()
            assert quick.handled()
        for handler in blocked:
            handler.released.set()
        for _ in range(3):
            for handler in found:
                handler.trigger()
                assert handler.handled()


def test_one_thread_handles_the_events_of_quick_handlers():
    with handlers(4) as (loop, found):
        loop.grow()
        for handler in found:
            handler.released.set()
        threads = []
        for _ in range(20):
            for handler in found:
                handler.trigger()
                assert handler.handled()
                threads.append(handler.threads[-1])
        # The system may hold up a thread for long, and then another one takes over.
        assert sum(a is not b for a, b in itertools.pairwise(threads)) < 10


def test_the_threads_end_with_the_last_socket():
    with handlers(2) as (loop, found):
        loop.grow()
        found[0].released.set()
        found[0].trigger()
        assert found[0].handled()
        thread = found[0].threads[0]
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
