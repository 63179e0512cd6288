"""The node that a process is in a run, and how a task ends there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dmiddleware.pipeline import Context, CurrentNode, Task, current_node, middleware, running_as
from dmiddleware.router import Router
from dmiddleware.seeding import derive_seed
from tests.router_state import locked_node


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    with Router(node_id=4, listen=f"ipc://{tmp_path}/4.s") as router:
        yield router


def test_a_program_runs_alone_unless_there_is_a_current_node(router: Router) -> None:
    assert current_node() is None
    with running_as(CurrentNode(router=router)) as node:
        assert current_node() is node
        assert node.node_id == 4
    assert current_node() is None


def test_a_node_without_roles_has_them_all() -> None:
    assert CurrentNode().has_role("learner")
    assert CurrentNode(roles=("learner",)).has_role("learner")
    assert not CurrentNode(roles=("collector",)).has_role("learner")


def test_a_node_that_waits_for_others_does_not_hang() -> None:
    node = CurrentNode()
    assert node.since_waiting_s() > 0.0
    with node.waiting():
        assert node.since_waiting_s() == 0.0
    assert node.progress().blocked_s > 0.0
    waited = node.since_waiting_s()
    assert waited >= 0.0


def test_shared_names_are_the_same_in_all_processes_of_a_run() -> None:
    one, other = CurrentNode(run_token="run 7"), CurrentNode(run_token="run 7")
    first = one.next_shared_name()
    assert (first, one.next_shared_name()) == (other.next_shared_name(), other.next_shared_name())
    assert first != one.next_shared_name()
    assert first != CurrentNode(run_token="run 8").next_shared_name()
    assert CurrentNode().next_shared_name() == ""


def test_seeds_depend_on_the_node_in_a_run_of_several_processes(router: Router) -> None:
    with Task(Context(), seed=3) as alone, Task(Context(), router=router, seed=3) as task:
        assert alone.seed_for("collector") == derive_seed(3, "collector")
        assert task.seed_for("collector") == derive_seed(3, "node", 4, "collector")


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_interrupted_process_accepts_no_events_after_its_task(
    router: Router, interrupted: bool
) -> None:
    with running_as(CurrentNode(router=router)) as node, Task(Context()) as task:
        task.use(lambda ctx: node.stop("SIGTERM", interrupted=interrupted)).run()
    assert node.interrupted is interrupted
    with locked_node(router) as protocol:
        assert protocol.accepting is not interrupted


def test_a_signal_can_stop_the_node_while_a_task_is_registered() -> None:
    node = CurrentNode()
    reasons: list[str] = []

    class Registered:
        ctx, stop_reason, stopped_ok, ends_run, decided_end = Context(), None, True, False, False

        def stop(
            self, reason: str, *, ok: bool = True, only_local: bool = False, final: bool = True
        ) -> None:
            reasons.append(reason)

    def signal_before_each_line(frame: FrameType, event: str, arg: object) -> Any:
        # A signal handler runs between two lines, on the same thread.
        if frame.f_code is CurrentNode.register.__code__ and event == "line":
            node.stop("received SIGTERM")
        return signal_before_each_line

    before = sys.gettrace()
    sys.settrace(signal_before_each_line)
    try:
        node.register(Registered())
    finally:
        sys.settrace(before)
    assert set(reasons) == {"received SIGTERM"}


def test_a_node_knows_whether_it_stops_alone_or_with_the_run() -> None:
    node = CurrentNode()
    with running_as(node), Task(Context()) as first, Task(Context()) as second:
        assert not node.ends_run
        first.stop("asked to leave", only_local=True)
        assert not node.ends_run
        assert not node.decided_end
        second.stop("all is done")
        assert node.ends_run
        assert node.decided_end


class Mail:
    """Stores received data, and delivers one item in each step."""

    last_step = True

    def __init__(self, *held: str) -> None:
        self.held = list(held)

    def __call__(self, ctx: Any) -> None:
        ctx.word = self.held.pop(0) if self.held else None

    def pending_steps(self) -> int:
        return len(self.held)


def test_after_a_stop_the_remaining_data_is_delivered_to_observers() -> None:
    tape: list[str] = []

    @middleware(last_step=True)
    def observe(ctx: Any) -> Iterator[None]:
        yield
        tape.append(f"saw {ctx.word}{' at the end' if ctx.task.in_last_step else ''}")

    def work(ctx: Any) -> None:
        tape.append("worked")
        ctx.task.stop("enough")

    with Task(Context()) as task:
        task.use(task.serial(observe, Mail("a", "b", "c"))).use(work).run()
        assert not task.in_last_step
        assert task.ctx.total_step == 2
    assert tape == ["worked", "saw a", "saw b at the end", "saw c at the end"]


def test_without_a_stop_nothing_is_delivered_early() -> None:
    mail = Mail("a", "b", "c")
    with Task(Context()) as task:
        task.use(mail).run(max_step=1)
    assert mail.held == ["b", "c"]


def test_an_error_in_a_last_step_is_raised_by_the_run() -> None:
    @middleware(last_step=True)
    def observe(ctx: Any) -> None:
        if ctx.task.in_last_step:
            raise OSError("disk full")

    with Task(Context()) as task:
        task.use(Mail("a", "b")).use(observe).use(lambda ctx: task.stop("enough"))
        with pytest.raises(OSError, match="disk full"):
            task.run()
        assert not task.stopped_ok
        assert not task.in_last_step
