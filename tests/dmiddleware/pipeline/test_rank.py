"""Tasks that several processes run as one: ranks, their seeds, and stops that are held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dmiddleware.pipeline import Context, Task, middleware
from dmiddleware.router import Router


class Recorder:
    """Counts what the task calls."""

    def __init__(self, *, lead_only: bool) -> None:
        self.lead_only = lead_only
        self.calls: list[str] = []

    def setup(self, task: Task[Context]) -> None:
        self.calls.append("setup")

    def __call__(self, ctx: Context) -> Iterator[None]:
        self.calls.append("step")
        yield


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_runs_middleware_that_are_lead_only(rank: int) -> None:
    lead, every = Recorder(lead_only=True), Recorder(lead_only=False)
    with Task(Context(), rank=rank) as task:
        task.use(task.serial(lead)).use(every).run(max_step=2)
        assert task.rank == rank
    assert every.calls == ["setup", "step", "step"]
    assert lead.calls == ([] if rank else every.calls)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_function_can_be_lead_only(rank: int) -> None:
    steps = []

    @middleware(lead_only=True)
    def lead(ctx: Context) -> None:
        steps.append(ctx.total_step)

    with Task(Context(), rank=rank) as task:
        task.use(lead).run(max_step=2)
    assert steps == ([] if rank else [0, 1])


def test_ranks_have_seeds_of_their_own_and_rank_0_those_of_a_process_alone() -> None:
    alone, first, second = (
        Task(Context(), seed=7, rank=rank).seed_for("collector") for rank in (0, 0, 1)
    )
    assert alone == first != second


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Task(Context(), rank=-1)


def test_a_held_stop_ends_the_run_only_when_it_is_decided() -> None:
    seen = []

    def work(ctx: Context) -> None:
        if ctx.total_step == 1:
            task.stop("solved", final=False)
        seen.append((ctx.total_step, task.finish, task.held_stop is not None))
        if ctx.total_step == 3:
            assert task.held_stop is not None
            task.decide_stop(task.held_stop)

    with Task(Context()) as task:
        task.hold_stops()
        task.use(work).run()
        assert task.stop_reason == "solved"
        assert task.held_stop is None
    assert seen == [(0, False, False), (1, False, True), (2, False, True), (3, False, True)]


def test_a_stop_from_before_is_held_as_well() -> None:
    with Task(Context()) as task:
        task.stop("too early")
        task.hold_stops()
        assert not task.finish
        assert task.held_stop is not None and task.held_stop["reason"] == "too early"


def test_a_failure_after_the_decision_still_counts() -> None:
    with Task(Context()) as task:
        task.hold_stops()
        task.stop("solved")
        assert task.held_stop is not None
        task.decide_stop(task.held_stop)
        task.stop("it diverged", ok=False)
        assert (task.stop_reason, task.stopped_ok) == ("solved", False)


def test_the_decision_names_the_node_whose_stop_it_was(tmp_path: Path) -> None:
    with Router(node_id=4, listen=f"ipc://{tmp_path}/4.s") as router:
        with Task(Context(), router) as task:
            task.hold_stops()
            task.stop("solved")
            own = task.held_stop
            assert own is not None and own["origin"] == 4
            task.decide_stop(own)
            assert task.stop_reason == "solved"
        with Task(Context(), router) as task:
            task.decide_stop({**own, "origin": 5})
            assert task.stop_reason == "node 5: solved"
