"""The threads of a simulation, each with what it waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

__all__ = [
    "Killed",
    "Scheduler",
    "SimulatedThread",
    "SimulationError",
    "Wait",
    "describe",
    "frame_of",
    "released",
]

_PASSED_OVER: Final = frozenset(
    {__file__, str(Path(__file__).with_name("simulation.py")), threading.__file__}
)
"""Files whose lines say nothing of why a thread waits."""


class SimulationError(AssertionError):
    """A simulated program is stuck, or does what a simulation cannot order."""


class Killed(BaseException):
    """Ends a thread from within its waits, as if its process were killed."""


class Scheduler(Protocol):
    """What a simulated thread needs of its simulation."""

    def wait_for_end(self, thread: SimulatedThread, timeout_s: float) -> bool:
        """Wait until a thread has ended, and tell whether it has; with no lock held."""
        ...

    def leave(self, thread: SimulatedThread, error: BaseException | None) -> None:
        """Take note that a thread has ended, and let the next one run."""
        ...


@dataclass(slots=True)
class Wait:
    """What a thread waits for."""

    condition: threading.Condition | None
    predicate: Callable[[], bool]
    deadline: float | None
    place_in_line: int
    notified: bool = False
    looked_at: int = -1
    holds: bool = False
    error: BaseException | None = None

    def result(self) -> bool:
        """Return what the predicate returned last, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.holds


class SimulatedThread:
    """A thread of a simulation; it runs only while it has the baton."""

    def __init__(
        self,
        simulation: Scheduler,
        name: str,
        group: str,
        function: Callable[[], None] | None,
    ) -> None:
        self.name = name
        self.group = group
        self.baton = threading.Semaphore(0)
        self.wait: Wait | None = None
        self.has_ended = False
        self.is_killed = False
        self.n_killed = 0
        self._simulation = simulation
        if function is None:
            self.thread = threading.current_thread()
        else:
            self.thread = threading.Thread(
                target=self._run, args=(function,), name=name, daemon=True
            )
            self.thread.start()

    def is_current(self) -> bool:
        """Tell whether the caller runs on this thread."""
        return threading.current_thread() is self.thread

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended, and tell whether it has."""
        return self._simulation.wait_for_end(self, timeout_s)

    def _run(self, function: Callable[[], None]) -> None:
        self.baton.acquire()
        error: BaseException | None = None
        try:
            if not self.is_killed:
                function()
        except Killed:
            pass
        except BaseException as raised:  # noqa: BLE001 (raised in the first thread)
            # What a killed thread raises while it ends is of no interest.
            error = None if self.is_killed else raised
        self._simulation.leave(self, error)


@contextlib.contextmanager
def released(condition: threading.Condition) -> Iterator[None]:
    """Release a condition, however often it is held, and take it back as often."""
    depth = 0
    with contextlib.suppress(RuntimeError):
        while True:
            condition.release()
            depth += 1
    if depth == 0:
        raise RuntimeError("cannot wait for a condition that is not held")
    try:
        yield
    finally:
        for _ in range(depth):
            condition.acquire()


def describe(thread: SimulatedThread) -> str:
    """Return a line: where a thread waits, and until when."""
    wait = thread.wait
    group = f" of {thread.group}" if thread.group else ""
    if wait is None:
        return f"{thread.name}{group}: can run"
    until = "without a deadline" if wait.deadline is None else f"until {wait.deadline:g} s"
    return f"{thread.name}{group}: waits {until} at {_place(thread)}"


def _place(thread: SimulatedThread) -> str:
    frame = frame_of(thread)
    while frame is not None and _is_passed_over(frame):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def _is_passed_over(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _PASSED_OVER


def frame_of(thread: SimulatedThread) -> FrameType | None:
    """Return what a thread runs now, or None if it has ended."""
    return sys._current_frames().get(thread.thread.ident or 0)
