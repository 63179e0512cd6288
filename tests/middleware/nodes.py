"""Tasks that are nodes of one run, each on its own thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from dmiddleware.pipeline import Task
from dmiddleware.router import Router
from middleware import OnlineRLContext

DEADLINE_S = 20.0

Program: TypeAlias = Callable[[Task[Any]], Any]


@contextlib.contextmanager
def node(
    folder: Path, node_id: int, role: str, *, n_nodes: int = 1, topology: str = "mesh"
) -> Iterator[Task[Any]]:
    """A task of one role, whose router connects to the other nodes of the folder."""
    is_hub = topology == "mesh" or node_id == 0
    n_peers = n_nodes - 1 if is_hub else min(n_nodes - 1, 1)
    others = range(node_id if is_hub else 1) if n_peers else ()
    with (
        Router(
            node_id=node_id,
            roles=[role],
            listen=f"ipc://{folder}/{node_id}.s",
            dial=[f"ipc://{folder}/{other}.s" for other in others],
            expected_peers=n_peers,
            start_timeout_s=DEADLINE_S,
        ) as router,
        Task(OnlineRLContext(), router=router, roles=[role], name=f"node {node_id}") as task,
    ):
        yield task


def run_nodes(folder: Path, *programs: tuple[str, Program], topology: str = "mesh") -> list[Any]:
    """Run one program per node at the same time; return their results."""

    def run(node_id: int) -> Any:
        role, program = programs[node_id]
        with node(folder, node_id, role, n_nodes=len(programs), topology=topology) as task:
            return program(task)

    with ThreadPoolExecutor(len(programs)) as pool:
        futures = [pool.submit(run, node_id) for node_id in range(len(programs))]
        return [future.result(DEADLINE_S) for future in futures]
