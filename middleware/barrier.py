"""A barrier: a point in the chain that all processes reach before any continues."""

from __future__ import annotations

from typing import Any, Final

from dmiddleware.pipeline import Context, Event, Task
from middleware.support.exchange_base import Exchange

__all__ = ["Barrier"]

REACHED: Final = Event("exchange.barrier", timeout_s=120.0)


class Barrier(Exchange):
    """Wait until all connected processes have reached this point of the chain equally often.

    It does not wait for a process that has left. A process that reconnects counts from zero, so a
    barrier is for runs whose processes live as long as the run.

    Args:
        name: the name of the barrier, if a chain has several.
        timeout_s: how long to wait.

    Raises:
        ValueError: if ``timeout_s`` is not positive.
        WaitTimeout: at the deadline; the message names the missing nodes.
    """

    reads = ()
    writes = ()

    def __init__(self, name: str = "barrier", *, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self.settings["name"] = name
        self._name = name
        self._round = 0
        self._reached: dict[int, int] = {}

    def __call__(self, ctx: Context) -> None:
        """Wait for the others."""
        task = self._task
        if task is None:
            return
        assert task.router is not None
        self._round += 1
        task.emit(REACHED, self._name, task.router.node_id, self._round, only_remote=True)
        with self._changed:
            blocked_s = self._wait(
                lambda: not self._missing(),
                lambda: f"node(s) {', '.join(map(str, self._missing()))} at barrier {self._name!r}",
            )
        ctx.log(f"exchange/{self._name}_blocked_s", blocked_s)

    def _subscribe(self, task: Task[Any]) -> None:
        task.on(REACHED, self._handler(self._on_reached))

    def _on_reached(self, name: str, node_id: int, number: int) -> None:
        if name == self._name:
            self._reached[node_id] = number

    def _missing(self) -> list[int]:
        assert self._task is not None and self._task.router is not None
        here = self._task.router.peer_ids()
        return sorted(n for n in here if self._reached.get(n, 0) < self._round)
