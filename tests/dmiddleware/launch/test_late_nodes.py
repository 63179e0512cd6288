"""Nodes that do not end although the run has ended."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.launch import launch
from dmiddleware.launch.hosts.interface import Ended, HostEvent, Reported
from dmiddleware.launch.plan import NodePlan, RankPlan
from dmiddleware.launch.status import NodeStatus
from dmiddleware.launch.supervisor import SupervisorOptions
from tests.dmiddleware.launch.ditask_process import start
from tests.dmiddleware.launch.scripted_host import ScriptedHost, finished, running, supervised
from tests.variants import mostly_slow

LEARNER = NodePlan(0, ("learner",))
COLLECTOR = NodePlan(1, ("collector",))
EVALUATOR = NodePlan(2, ("evaluator",))
RANKS = [NodePlan(rank, ("learner",), ranks=RankPlan(rank, 2, 1)) for rank in range(2)]


def at(second: float, events: Sequence[HostEvent]) -> list[tuple[float, HostEvent | float]]:
    return [(second, event) for event in events]


def run(
    nodes: Sequence[NodePlan], script: list[tuple[float, HostEvent | float]], **options: Any
) -> tuple[ScriptedHost, int, str]:
    host = ScriptedHost(script)
    options = {"kill_after_s": 20.0, **options}
    code, notes = supervised(host, nodes, SupervisorOptions(**options))
    return host, code, "\n".join(notes)


@pytest.mark.parametrize("late", [COLLECTOR, EVALUATOR], ids=str)
@pytest.mark.parametrize("has_heard", [True, False])
def test_a_node_that_hangs_has_until_kill_after_from_the_end_of_the_run(
    late: NodePlan, has_heard: bool
) -> None:
    last = running(late.node_id, is_over=has_heard)
    host, code, text = run([LEARNER, late], [(9.0, last), *at(10.0, finished(0))])
    assert code == 0
    assert host.killed == {late.node_id: pytest.approx(30.0, abs=0.5)}
    assert f"{late} did not end within 20 s of the end of the run; killed" in text
    assert f"waiting for {late}, at most 20 s (--kill-after)" in text


def test_nodes_that_end_in_time_are_left_alone() -> None:
    script = [*at(10.0, finished(0)), (11.0, running(1, is_over=True)), *at(29.0, finished(1))]
    host, code, _text = run([LEARNER, COLLECTOR], script)
    assert (host.killed, code) == ({}, 0)


def test_a_learner_may_go_on_after_its_task_for_as_long_as_it_likes() -> None:
    last = Reported(0, NodeStatus(phase="running", step=9, run_is_over=True, reason="all done"))
    script = [(9.0, last), *at(10.0, finished(2)), (11.0, running(1, is_over=True, peers=()))]
    host, code, _text = run([LEARNER, COLLECTOR, EVALUATOR], [*script, *at(300.0, finished(0))])
    assert code == 0
    assert host.killed == {1: pytest.approx(320.0, abs=0.5)}


def test_the_first_rank_completes_the_run_and_no_other_can_hold_it_up() -> None:
    hung = running(1, is_over=True)
    host, code, _text = run(RANKS, [(5.0, hung), *at(10.0, finished(0))])
    assert (list(host.killed), code) == ([1], 0)
    # The first one may still save something.
    host, code, __text = run(RANKS, [*at(10.0, finished(1)), *at(100.0, finished(0))])
    assert (host.killed, code) == ({}, 0)


def test_each_learner_of_a_part_may_go_on_to_evaluate_its_policy() -> None:
    nodes = [NodePlan(0, ("learner", "learner:red")), NodePlan(1, ("learner:blue",)), EVALUATOR]
    script = [*at(10.0, finished(0)), (11.0, running(1, is_over=True)), (12.0, running(2))]
    host, code, _text = run(nodes, [*script, *at(100.0, finished(1))])
    assert code == 0
    assert host.killed == {2: pytest.approx(120.0, abs=0.5)}


def test_ranks_that_end_without_a_stop_have_ended_too() -> None:
    ends: list[HostEvent] = [Reported(0, NodeStatus(phase="finished", step=9)), Ended(0, 0)]
    host, code, _ = run(RANKS, [(5.0, running(1)), *at(10.0, ends)])
    assert (list(host.killed), code) == ([1], 0)


def test_a_launcher_that_has_joined_counts_from_when_the_learner_has_left() -> None:
    knows = running(1, is_over=True, peers=("learner", "evaluator"))
    left = running(1, is_over=True, peers=("evaluator",))
    host, code, _text = run([COLLECTOR], [(5.0, knows), (100.0, left)])
    assert code == 0
    assert host.killed == {1: pytest.approx(120.0, abs=0.5)}


def test_without_a_learner_the_node_that_ended_the_run_may_go_on() -> None:
    nodes = [NodePlan(0, ("writer",)), NodePlan(1, ("reader",))]
    decided = NodeStatus(
        phase="running", run_is_over=True, decided_end=True, reason="all done", step=4
    )
    script = [(5.0, Reported(0, decided)), *at(6.0, finished(1)), *at(300.0, finished(0))]
    host, code, _ = run(nodes, script)
    assert (host.killed, code) == ({}, 0)
    script = [(5.0, running(1, is_over=True)), *at(6.0, finished(0))]
    host, code, _ = run(nodes, script)
    assert (list(host.killed), code) == ([1], 0)


def test_a_node_that_hangs_after_the_end_of_the_run_has_not_failed() -> None:
    hung = running(1, is_over=True, idle_s=9.0)
    script = [(9.0, hung), *at(10.0, finished(0))]
    _host, code, text = run([LEARNER, COLLECTOR], script, hang_timeout_s=12.0, on_failure="abort")
    assert code == 0
    assert "--hang-timeout" not in text


def test_a_pause_of_the_launcher_does_not_count() -> None:
    script = [(9.0, running(1, is_over=True)), *at(10.0, finished(0)), (15.0, 500.0)]
    host, code, _ = run([LEARNER, COLLECTOR], script)
    assert code == 0
    assert host.killed == {1: pytest.approx(530.0, abs=1.0)}


PROGRAM = """
    import os, subprocess, threading
    from dmiddleware import Context, Task, middleware

    def main(hangs, after=""):
        everybody = threading.Event()
        with Task(Context()) as task:
            is_late = any(map(task.has_role, hangs))

            @middleware(roles=["learner"])
            def learn(ctx):
                if everybody.wait(0.01):
                    ctx.task.stop("all done")

            @middleware(roles=["collector", "evaluator"])
            def act(ctx):
                if ctx.total_step == 2 and is_late:
                    ctx.task.emit("late", only_remote=True)
                    threading.Event().wait()
                if ctx.total_step == 2:
                    ctx.task.wait_for("the end", 600.0)

            if task.has_role("learner"):
                task.on("late", everybody.set)
                if not hangs:
                    everybody.set()
            task.use(learn).use(act).run()
            is_collector = task.has_role("collector")
        if after == "collector" and is_collector:
            subprocess.run(["sleep", "1000"])
        return "learned"

    def in_a_collector():
        return main(["collector"])

    def in_an_evaluator():
        return main(["evaluator"])

    def after_the_task():
        return main([], after="collector")
"""
WHO = {
    "in_a_collector": "node 1 (collector)",
    "in_an_evaluator": "node 2 (evaluator)",
    "after_the_task": "node 1 (collector)",
}


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("function", mostly_slow(list(WHO), keep=1))
def test_ditask_ends_although_a_node_hangs(tmp_path: Path, function: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    roles = ("--roles", "learner=1,collector=1,evaluator=1")
    with start(tmp_path, "--main", f"program.{function}", *roles, "--kill-after", "1") as launcher:
        text, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, text
    assert f"{WHO[function]} did not end within 1 s of the end of the run; killed" in text


@pytest.mark.slow
@pytest.mark.process
def test_launch_returns_the_result_although_a_node_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.syspath_prepend(tmp_path)
    with launch(
        "late_program.in_a_collector",
        roles={"learner": 1, "collector": 1},
        package=tmp_path,
        kill_after=1.0,
        log_dir=str(tmp_path / "logs"),
        show=False,
    ) as run:
        assert run.result(100.0) == "learned"
