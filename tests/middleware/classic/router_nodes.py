"""Nodes of one run in this process, connected by real routers."""

from __future__ import annotations

import contextlib

from dmiddleware.pipeline import Context, CurrentNode, Task, running_as
from dmiddleware.router import Router
from middleware.classic import RouterLink

DEADLINE_S = 30.0


class Nodes:
    """Starts nodes in a folder; each may be closed alone, and started again."""

    def __init__(self, folder):
        self.folder = folder
        self.open = contextlib.ExitStack()

    def router(self, node_id, role):
        return Router(
            node_id=node_id,
            roles=[role],
            listen=f"ipc://{self.folder}/{node_id}.s",
            dial=[f"ipc://{self.folder}/{other}.s" for other in range(node_id)],
            start_timeout_s=DEADLINE_S,
        )

    def task(self, node_id, role):
        router = self.open.enter_context(self.router(node_id, role))
        return self.open.enter_context(
            contextlib.closing(Task(Context(), router=router, roles=[role]))
        )

    def link(self, node_id, role, **options):
        task = self.task(node_id, role)
        link = RouterLink(role, task=task, **options)
        self.open.callback(link.close, 1.0)
        return link

    @contextlib.contextmanager
    def current(self, node_id, role):
        """Run the block as a node, as a program under ditask does."""
        with self.router(node_id, role) as router, running_as(CurrentNode(router=router)):
            yield router

    def close(self):
        self.open.close()


def received(link, kind, timeout_s=DEADLINE_S):
    """Return the next message of a kind with its sender; earlier ones are dropped."""
    while True:
        found = link.receive(timeout_s)
        assert found is not None, f"no {kind.__name__} has arrived"
        if isinstance(found[1], kind):
            return found
