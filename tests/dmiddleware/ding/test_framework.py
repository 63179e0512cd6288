"""Tasks, events and processes with DI-engine's names."""

from __future__ import annotations

import multiprocessing
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dmiddleware.ding as door
from dmiddleware.errors import LaunchError
from dmiddleware.testing import Cluster


@pytest.fixture(autouse=True)
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    door.open_door()
    yield
    door.close_door()


def test_a_wrapped_middleware_returns_its_way_back_to_call() -> None:
    from ding.framework import task

    order = []

    def child(ctx: Any) -> Iterator[None]:
        order.append("forward")
        yield
        order.append("back")

    with task.start():
        wrapped = task.wrap(child)

        def parent(ctx: Any) -> None:
            back = wrapped(ctx)
            order.append("between")
            back()

        task.use(parent)
        task.run(max_step=1)
    assert order == ["forward", "between", "back"]


def test_a_middleware_of_the_program_compares_the_value_of_no_evaluation() -> None:
    from ding.framework import OnlineRLContext, task

    best, stock = [], []

    def note(ctx: Any) -> None:
        best.append(max(ctx.eval_value, 3.0))

    note_stock = type("Stock", (), {"__call__": lambda self, ctx: stock.append(ctx.eval_value)})()
    note_stock.__module__ = "middleware.stock"
    with task.start(ctx=OnlineRLContext()):
        task.use(note)
        task.use(note_stock)
        task.run(max_step=1)
    assert (best, stock) == ([3.0], [None])


def test_an_event_loop_raises_the_error_of_a_handler_at_the_next_event() -> None:
    from ding.framework import EventLoop

    loop, failed = EventLoop("failing"), threading.Event()

    def fail() -> None:
        failed.set()
        raise ArithmeticError("of the handler")

    loop.on("event", fail)
    loop.on("event", lambda: None)
    loop.emit("event")
    assert failed.wait(10)
    with pytest.raises(ArithmeticError, match="of the handler"):
        while True:  # until its thread has noted the error
            loop.emit("event")
    loop.stop()


@pytest.mark.parametrize("kind", ["THREAD", pytest.param("PROCESS", marks=pytest.mark.process)])
def test_a_supervisor_calls_objects_and_returns_answers_in_the_order_of_the_calls(
    kind: str,
) -> None:
    from ding.framework import Supervisor
    from ding.framework.supervisor import ChildType, SendPayload

    class Counter:
        limit = 2

        def __init__(self, first: int) -> None:
            self.count = first

        def add(self, number: int) -> int:
            self.count += number
            if self.count % 10 > self.limit:
                raise ArithmeticError(f"{self.count}")
            return self.count

    supervisor = Supervisor(ChildType[kind])
    for first in (0, 10):
        supervisor.register(lambda first=first: Counter(first))
    with pytest.raises(RuntimeError, match="start_link"):
        supervisor.send(SendPayload(proc_id=0, method="add", args=[1]))
    supervisor.start_link()
    calls = [SendPayload(proc_id=number, method="add", args=[2]) for number in (1, 0)]
    for call in calls:
        supervisor.send(call)
    assert [answer.data for answer in supervisor.recv_all(calls)] == [12, 2]
    assert (supervisor.count, supervisor.limit) == ([2, 12], [2, 2])
    supervisor.send(calls[0])
    with pytest.raises(ArithmeticError, match="14"):
        supervisor.recv()
    supervisor._children[1].restart()
    supervisor.send(SendPayload(proc_id=1, method="add", args=[1]))
    assert supervisor.recv().data == 11
    supervisor.shutdown()


def test_a_supervisor_gives_up_late_answers_and_keeps_those_to_other_calls() -> None:
    from ding.framework.supervisor import ChildType, SendPayload, Supervisor

    released = threading.Event()

    class Slow:
        def wait(self) -> None:
            released.wait(10)

        def answer(self) -> int:
            return 5

    supervisor = Supervisor(ChildType.THREAD)
    supervisor.register(Slow())
    supervisor.register(Slow())
    supervisor.start_link()
    late, other = SendPayload(0, method="wait"), SendPayload(1, method="answer")
    supervisor.send(late)
    supervisor.send(other)
    with pytest.raises(TimeoutError, match="1 call"):
        supervisor.recv_all([late], timeout=0.01)
    again: list[str | None] = []
    (error,) = supervisor.recv_all(
        [late],
        ignore_err=True,
        timeout=0.01,
        callback=lambda answer, _: again.append(answer.method),
    )
    assert isinstance(error.err, TimeoutError)
    assert (again, supervisor.recv(timeout=10).data) == (["wait"], 5)
    with pytest.raises(queue.Empty):
        supervisor.recv(timeout=0.01)
    released.set()
    supervisor.shutdown()


@pytest.mark.process
def test_a_supervisor_shares_memory_with_its_processes() -> None:
    from ding.framework.supervisor import ChildType, SendPayload, Supervisor

    memory = multiprocessing.Array("i", 2)

    def share(answer: Any, shared: Any) -> None:
        shared[answer.proc_id], answer.data = answer.data, None

    supervisor = Supervisor(ChildType.PROCESS)
    supervisor.register("text", shm_buffer=memory, shm_callback=share)
    supervisor.start_link()
    supervisor.send(SendPayload(0, method="count", args=["t"]))
    assert (supervisor.recv(timeout=10).data, memory[0]) == (None, 2)
    supervisor.shutdown()


@pytest.mark.parametrize(("period", "loaded"), [(1, [0, 1, 2, 3]), (2, [0, 1, 1, 3])])
def test_a_module_that_no_policy_has_is_exchanged_step_by_step(
    period: int, loaded: list[int]
) -> None:
    from ding.framework import OnlineRLContext, task
    from ding.framework.middleware import PeriodicalModelExchanger

    def program() -> list[int]:
        module, weights = torch.nn.Linear(1, 1), []
        torch.nn.init.zeros_(module.weight)

        def train(ctx: Any) -> None:
            ctx.task.wait_for("ready", timeout=60)
            module.weight.data += 1

        def note(ctx: Any) -> None:
            weights.append(int(module.weight.item()))
            ctx.task.emit("ready")

        # All nodes of a simulated cluster share the one global task.
        with task.start(ctx=OnlineRLContext()) as started:
            learns = task.router.node_id == 0
            started.add_role(task.role.LEARNER if learns else task.role.COLLECTOR)
            started.use(PeriodicalModelExchanger(module, period=period, stale_toleration=period))
            started.use(train if learns else note)
            started.run(max_step=4)
        return weights

    with Cluster(program, roles={"none": 2}) as cluster:
        assert cluster.run()[1] == loaded


def test_a_logger_writes_to_the_writer_of_the_program() -> None:
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import online_logger
    from ding.utils import DistributedWriter

    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, tuple[float, int]] = {}
            self.histograms: dict[str, Any] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars[tag] = value, step

        def add_histogram(self, tag: str, values: Any, step: int) -> None:
            self.histograms[tag] = values, step

    ctx, writer = OnlineRLContext(), Writer()
    DistributedWriter.root, before = writer, DistributedWriter.root
    log = online_logger(record_train_iter=True, train_show_freq=10)
    DistributedWriter.root = before
    ctx.env_step, ctx.train_iter = 80, 9
    ctx.train_output = [{"loss": 2.0}, {"loss": 1.0, "[histogram]q": [1, 2], "priority": [3]}]
    log(ctx)
    ctx.env_step, ctx.eval_value = 90, 7.0
    log(ctx)  # too early for another update
    assert writer.scalars == {
        "basic/train_loss-env_step": (1.0, 80),
        "basic/train_loss-train_iter": (1.0, 9),
        "basic/eval_episode_return_mean-env_step": (7.0, 90),
        "basic/eval_episode_return_mean-train_iter": (7.0, 9),
    }
    assert writer.histograms["q"] in (([1, 2], 80), ([1, 2], 9))
    ctx.train_iter, ctx.train_output = 20, {"[scalars]": 1}
    with pytest.raises(NotImplementedError, match="scalars"):
        log(ctx)


PROGRAM = """
import threading
from ding.framework import Parallel, task

def main(word):
    router, words, arrived = Parallel(), [], threading.Event()

    def hear(text):
        words.append(text)
        arrived.set()

    router.on("word", hear)
    while not arrived.wait(0.01):  # the other one may not listen yet
        router.emit("word", f"{word} of {router.node_id}")
    router.emit("word", f"{word} of {router.node_id}")
    assert words[0] == f"{word} of {1 - router.node_id}"
    assert not task.start().roles
    if router.node_id == 1:
        raise ArithmeticError("of the program")
"""


@pytest.mark.process
def test_processes_exchange_events_and_the_first_failure_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "its_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(folder))
    from ding.framework import Parallel
    from its_program import main

    try:
        with pytest.raises(LaunchError, match="of the program"):
            Parallel.runner(n_parallel_workers=2)(main, word="hello")
    finally:
        del sys.modules["its_program"]
