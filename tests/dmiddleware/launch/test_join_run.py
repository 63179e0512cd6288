"""Join a run from processes that somebody else starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import msgspec
import pytest

from dmiddleware.errors import ConfigError, LaunchError, TopologyError
from dmiddleware.launch import NodeStatus, RunPlan, join_run, plan_run
from dmiddleware.pipeline.current_node import NODE_VARIABLE
from dmiddleware.router import Router
from tests.variants import mostly_slow
from tests.waiting import wait_until

PROCESS = """
    import json, os, sys, threading
    from pathlib import Path
    import msgspec
    from dmiddleware import Context, Task, middleware
    from dmiddleware.launch import RunPlan, join_run

    plan = msgspec.json.decode(Path("plan.json").read_bytes(), type=RunPlan)
    me = int(sys.argv[1])
    seen, all_are_here = [], threading.Event()

    def hear(node):
        seen.append(node)
        if {1, 2} <= set(seen) and (not restart or seen.count(2) > 1):
            all_are_here.set()

    def main():
        with Task(Context()) as task:
            task.on("hello", hear)

            @middleware(roles=["learner"])
            def learn(ctx):
                if "forever" in sys.argv:
                    task.wait_for("the end", 600.0)
                assert all_are_here.wait(60.0)
                task.stop("all are here")

            @middleware(roles=["collector"])
            def collect(ctx):
                task.emit("hello", me, only_remote=True)
                Path(f"ran-{me}").touch()
                if "fail" in sys.argv and me == 1:
                    raise ValueError("node 1 cannot continue")
                if restart and me == 2 and not Path("again").exists():
                    Path("again").touch()
                    threading.Event().wait()
                task.wait_for("the end", 600.0)

            task.use(learn).use(collect).run()
            return task.stop_reason

    restart = "restart" in sys.argv
    statuses = []
    answer = join_run(plan, me, main, on_status=statuses.append)
    answer = answer.rpartition(": ")[2]  # a peer that hears of it adds the node
    print(json.dumps([answer, statuses[-1].phase, len(statuses), os.environ.get("DITASK_NODE")]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "process.py").write_text(textwrap.dedent(PROCESS))
    return tmp_path


def write_plan(folder: Path, roles: Mapping[str, int], topology: str = "star") -> RunPlan:
    addresses = [f"ipc://{folder}/{number}" for number in range(sum(roles.values()))]
    plan = plan_run(roles, addresses=addresses, topology=topology)  # type: ignore[arg-type]
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    return plan


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "process.py", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def processes(folder: Path, *extra: str) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        started = []
        for node_id in range(3):
            process = stack.enter_context(start(folder, str(node_id), *extra))
            stack.callback(process.kill)
            started.append(process)
        yield started


def answers(started: Sequence[subprocess.Popen[str]]) -> list[Any]:
    texts = [process.communicate(timeout=60)[0] for process in started]
    return [json.loads(text.splitlines()[-1]) for text in texts]


@pytest.mark.process
@pytest.mark.parametrize("topology", mostly_slow(["star", "mesh"], keep=1))
def test_processes_that_others_start_form_a_run(folder: Path, topology: str) -> None:
    write_plan(folder, {"learner": 1, "collector": 2}, topology)
    with processes(folder) as started:
        for answer, phase, n_statuses, variable in answers(started):
            assert (answer, phase, variable) == ("all are here", "finished", None)
            assert n_statuses >= 2
        assert [process.returncode for process in started] == [0, 0, 0]


def test_a_peer_that_joins_and_leaves_between_two_statuses_is_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_noticed = Event()
    peers = Router.peers

    def noticed(router: Router) -> list[Any]:
        identities = peers(router)
        if router.node_id == 0 and identities:
            was_noticed.set()
        return identities

    monkeypatch.setattr(Router, "peers", noticed)
    addresses = [f"ipc://{tmp_path}/{number}" for number in range(2)]
    plan = plan_run({"learner": 1, "collector": 1}, addresses=addresses)
    is_running, has_met = Event(), Event()
    seen: list[dict[int, tuple[str, ...]]] = []

    def look(status: NodeStatus) -> None:
        if status.phase == "running":
            seen.append(status.peers)
            is_running.set()
        if status.phase == "running" and status.peers:
            has_met.set()

    def learn() -> None:
        has_met.wait(20.0)

    with ThreadPoolExecutor() as pool:
        learner = pool.submit(join_run, plan, 0, learn, on_status=look)
        assert is_running.wait(20.0)
        pool.submit(join_run, plan, 1, lambda: was_noticed.wait(20.0)).result(40.0)
        learner.result(40.0)
    assert has_met.is_set()
    assert {1: ("collector",)} in seen


def test_nodes_of_one_process_end_in_any_order_and_leave_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    plan = write_plan(tmp_path, {"learner": 1, "collector": 1})
    both_run, first_has_ended = Barrier(2), Event()
    names: list[str | None] = []

    def first() -> None:
        both_run.wait(20.0)

    def second() -> None:
        both_run.wait(20.0)
        assert first_has_ended.wait(40.0)
        names.append(os.environ.get(NODE_VARIABLE))

    with ThreadPoolExecutor() as pool:
        learner = pool.submit(join_run, plan, 0, first)
        wait_until(lambda: NODE_VARIABLE in os.environ, "the first node")
        collector = pool.submit(join_run, plan, 1, second)
        learner.result(40.0)
        first_has_ended.set()
        collector.result(40.0)
    assert names == [f"{os.getpid()}:1"]
    assert NODE_VARIABLE not in os.environ


@pytest.mark.process
def test_a_killed_process_is_replaced_by_one_with_the_same_plan(folder: Path) -> None:
    write_plan(folder, {"learner": 1, "collector": 2})
    with processes(folder, "restart") as started:
        wait_until((folder / "again").exists, "node 2", deadline_s=60)
        started[2].kill()
        started[2].wait(30)
        with start(folder, "2", "restart") as another:
            assert {answer[0] for answer in answers([*started[:2], another])} == {"all are here"}


@pytest.mark.process
def test_an_error_of_the_program_is_raised_and_the_node_leaves(folder: Path) -> None:
    write_plan(folder, {"learner": 1, "collector": 2})
    with processes(folder, "fail") as started:
        text, _ = started[1].communicate(timeout=60)
        assert started[1].returncode == 1
        assert text.rstrip().endswith("node 1 cannot continue") or "ValueError" in text
        assert text.count("Traceback") == 1


@pytest.mark.process
def test_sigterm_stops_one_node_in_order(folder: Path) -> None:
    write_plan(folder, {"learner": 1, "collector": 2})
    with processes(folder, "forever") as started:
        wait_until((folder / "ran-1").exists, "node 1", deadline_s=60)
        started[1].send_signal(signal.SIGTERM)
        started[1].wait(60)
        assert started[1].returncode == 128 + signal.SIGTERM
        assert started[0].poll() is None


def test_one_process_needs_no_address_and_gets_the_result() -> None:
    found: list[NodeStatus] = []
    before = dict(os.environ)
    assert join_run(plan_run(), 0, lambda: [1, 2], on_status=found.append) == [1, 2]
    assert found[-1].phase == "finished"
    assert dict(os.environ) == before


def test_an_error_in_this_process_is_the_programs_own() -> None:
    found: list[NodeStatus] = []

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        join_run(plan_run(), 0, fail, on_status=found.append)
    assert found[-1].phase == "failed"
    assert found[-1].error == "KeyError: 'mine'"


def test_a_wrong_node_or_program_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"no node 3; it has the nodes 0"):
        join_run(plan_run(), 3, lambda: None)
    with pytest.raises(LaunchError, match="no module nowhere"):
        join_run(plan_run(), 0, "nowhere.main")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"roles": {"learner": 1, "collector": 1}}, LaunchError, "addresses of the nodes 0"),
        (
            {"roles": {"learner": 1, "collector": 1}, "addresses": ["learner:1"]},
            TopologyError,
            "not a valid address",
        ),
        ({"roles": {"lerner": 1}}, LaunchError, "did you mean learner"),
        ({"key": b"short"}, ConfigError, "5 characters"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_run(**arguments)  # type: ignore[arg-type]


def test_every_node_of_a_plan_reaches_every_hub() -> None:
    roles = {"collector": 3, "learner": 2, "evaluator": 1}
    addresses = [f"tcp://10.0.0.{number}:5000" for number in range(6)]
    star = plan_run(roles, addresses=addresses)
    hubs = {3: addresses[3], 4: addresses[4]}
    assert {node.node_id: node.listen for node in star.nodes if node.listen} == hubs
    for node in star.nodes:
        others = set(hubs.values()) - {node.listen}
        dialed = set(node.dial)
        assert dialed == others or node.node_id == 3
    mesh = plan_run(roles, addresses=addresses, topology="mesh")
    pairs = {frozenset((node.listen, other)) for node in mesh.nodes for other in node.dial}
    assert len(pairs) == 15
    assert sum(len(node.dial) for node in mesh.nodes) == 15
    assert {node.n_peers for node in mesh.nodes} == {5}


def test_each_plan_has_a_key_and_a_token_of_its_own() -> None:
    first, second = plan_run(), plan_run()
    assert first.key_hex != second.key_hex and first.run_token != second.run_token
    assert first.key_hex not in repr(first)
