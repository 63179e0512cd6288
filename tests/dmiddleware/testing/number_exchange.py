"""A program in which all nodes send numbers to each other, and a record of what arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dmiddleware.pipeline import Context, Event, Task
from dmiddleware.testing import Tape

N_EVENTS = 200
NUMBER = Event("number", timeout_s=600.0)


class NumberExchange:
    """Numbers that nodes sent and received, in order.

    Each node sends ``1000 * start + n``, where ``start`` counts the starts of the node.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.taken: dict[int, list[tuple[int, int]]] = {}
        self.starts: dict[int, int] = {}
        self.membership = Tape()

    def program(self) -> None:
        """Send numbers to all nodes, and receive theirs until the task is stopped."""
        with Task(Context()) as task:
            assert task.router is not None
            me = task.router.node_id
            start = self.starts[me] = self.starts.get(me, 0) + 1
            taken = self.taken.setdefault(me, [])
            task.on(NUMBER, lambda source, number: taken.append((source, number)))
            for name in ("node.joined", "node.left", "node.rejoined"):
                task.on(name, self._note(me, name, task))
            changed = threading.Condition()

            def send(ctx: Context) -> None:
                is_sending = ctx.total_step < N_EVENTS
                with changed:
                    task.clock.wait_for(changed, lambda: task.finish, 0.01 if is_sending else 1.0)
                if is_sending:
                    number = 1000 * start + ctx.total_step
                    task.emit(NUMBER, me, number, only_remote=True)
                    self.sent.append((me, number))

            task.use(send).run()

    def _note(self, me: int, name: str, task: Task[Any]) -> Callable[..., None]:
        def note(node_id: int, **details: Any) -> None:
            self.membership(me, name, node_id, round(task.clock.now(), 3))

        return note

    def all_taken(self, n_nodes: int) -> bool:
        return sum(map(len, self.taken.values())) >= (n_nodes - 1) * N_EVENTS * n_nodes

    def check(self, n_nodes: int, *, start: int = 1) -> None:
        """Check that each number arrived at each node once, in order."""
        wanted = [1000 * start + number for number in range(N_EVENTS)]
        for me in range(n_nodes):
            for source in range(n_nodes):
                if source != me:
                    assert [
                        number for sender, number in self.taken[me] if sender == source
                    ] == wanted
