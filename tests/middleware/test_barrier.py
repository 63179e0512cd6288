"""Barriers of several nodes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dmiddleware import WaitTimeout
from dmiddleware.pipeline import Context, OnlineRLContext, Role, Task, middleware
from middleware import Barrier
from tests.middleware.nodes import DEADLINE_S, run_nodes


@middleware(roles=[Role.LEARNER, Role.COLLECTOR])
def work(ctx: OnlineRLContext) -> None: ...


def test_no_node_passes_before_all_have_arrived(tmp_path: Path) -> None:
    passed = {0: 0, 1: 0, 2: 0}
    apart: list[int] = []

    def run(task: Task[Any]) -> None:
        node_id = task.router.node_id  # type: ignore[union-attr]

        @middleware(roles=[Role.LEARNER, Role.COLLECTOR])
        def count(ctx: OnlineRLContext) -> None:
            passed[node_id] += 1
            apart.append(max(passed.values()) - min(passed.values()))

        task.use(Barrier()).use(count).run(max_step=20)

    run_nodes(tmp_path, (Role.LEARNER, run), (Role.COLLECTOR, run), (Role.COLLECTOR, run))
    assert passed == {0: 20, 1: 20, 2: 20}
    # A node that has passed the barrier may be one round ahead of the others.
    assert max(apart) <= 1


def test_missing_nodes_are_named(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> None:
        task.use(Barrier("epoch", timeout_s=0.5)).use(work)
        with pytest.raises(WaitTimeout, match=r"node\(s\) 1 at barrier 'epoch' did not arrive"):
            task.run(max_step=1)
        task.emit("go on")

    def run_other(task: Task[Any]) -> None:
        told = threading.Event()
        task.on("go on", told.set)

        @middleware(roles=[Role.COLLECTOR])
        def wait(ctx: OnlineRLContext) -> None:
            assert told.wait(DEADLINE_S)

        task.use(wait).run(max_step=1)

    run_nodes(tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, run_other))


def test_nodes_that_have_left_are_not_waited_for(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> int:
        task.use(Barrier(timeout_s=DEADLINE_S)).use(work).run(max_step=5)
        return task.ctx.total_step

    def run_other(task: Task[Any]) -> None:
        task.use(Barrier(timeout_s=DEADLINE_S)).use(work).run(max_step=2)

    assert run_nodes(tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, run_other))[0] == 4


def test_two_barriers_are_distinguished_by_name(tmp_path: Path) -> None:
    def run(task: Task[Any]) -> None:
        task.use(Barrier("first")).use(work).use(Barrier("second")).run(max_step=5)

    run_nodes(tmp_path, (Role.LEARNER, run), (Role.COLLECTOR, run))


def test_in_one_process_it_does_not_wait() -> None:
    with Task(Context()) as task:
        task.use(Barrier()).run(max_step=3)
        assert task.ctx.total_step == 2
