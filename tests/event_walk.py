"""The walk of an event: ``python -m tests.event_walk``.

Prints the functions of the project that an event calls on its way from ``task.emit`` in one node to
its handler in another, by file in the order of the first call. The nodes are connected over ipc.
``--count`` prints only how many there are.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dmiddleware import Context, Task, middleware
from dmiddleware.launch import join_run, plan_run
from tests.walks import Function, by_file, function_of, print_walk

__all__ = ["walk"]

_WARM_UP, _WATCHED = 40, 40
_TIMEOUT_S: Final = 30.0


class _Watch:
    """Notes what is called between ``task.emit`` and the handler, one event after the other."""

    def __init__(self) -> None:
        self._walks: list[dict[Function, None]] = []
        self._walk: dict[Function, None] = {}
        self._sender = 0
        self._is_sending = self._is_on_the_way = False
        self._handled = threading.Semaphore(0)

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; this is the profile function of all threads."""
        if event != "call" or not self._is_on_the_way:
            return
        if threading.get_ident() == self._sender and not self._is_sending:
            return
        function = function_of(frame)
        if function is not None:
            self._walk.setdefault(function)

    def emit(self, task: Task[Any], number: int) -> None:
        """Emit an event, and wait until it was handled."""
        self._walk, self._sender = {}, threading.get_ident()
        self._is_sending = self._is_on_the_way = True
        task.emit("number", number, only_remote=True)
        self._is_sending = False
        if not self._handled.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError(f"event {number} was not handled within {_TIMEOUT_S:g} s")

    def handle(self, number: int) -> None:
        """Handle an event."""
        self._is_on_the_way = False
        if number >= _WARM_UP:
            self._walks.append(self._walk)
        self._handled.release()

    def usual(self) -> list[Function]:
        """Return what most events have called, in the order of the first of them that did."""
        counts = Counter(function for walk in self._walks for function in walk)
        usual = {one for one, count in counts.items() if 2 * count > len(self._walks)}
        longest = max(self._walks, key=lambda walk: len(usual & walk.keys()))
        return [*(one for one in longest if one in usual), *sorted(usual - longest.keys())]


def walk(folder: Path) -> dict[str, list[str]]:
    """Return the functions that most events call, by file.

    Args:
        folder: for the socket.
    """
    watch, done = _Watch(), threading.Event()
    plan = plan_run({"learner": 1, "collector": 1}, addresses=[f"ipc://{folder}/learner.sock"])

    @middleware(roles=["learner"])
    def learn(ctx: Context) -> None:
        done.wait(_TIMEOUT_S)

    @middleware(roles=["collector"])
    def collect(ctx: Context) -> None:
        for number in range(_WARM_UP + _WATCHED):
            watch.emit(ctx.task, number)
        done.set()

    def program() -> None:
        with Task(Context()) as task:
            if task.has_role("learner"):
                task.on("number", watch.handle)
            task.use(learn).use(collect).run(max_step=1)

    nodes = [
        threading.Thread(target=join_run, args=(plan, number, program), name=f"node {number}")
        for number in range(2)
    ]
    threading.setprofile(watch.see)
    try:
        for node in nodes:
            node.start()
    finally:
        for node in nodes:
            node.join(2 * _TIMEOUT_S)
        threading.setprofile(None)  # type: ignore[arg-type]
    return by_file(watch.usual())


if __name__ == "__main__":
    print_walk(walk)
