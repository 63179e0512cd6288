from typing import Any

import pytest

from dmiddleware.pipeline import Task
from middleware import OfflineRLContext, OnlineRLContext, termination_checker


def count(ctx: Any) -> None:
    ctx.env_step += 8
    ctx.train_iter += 5


def test_run_ends_in_the_step_that_reaches_the_limit() -> None:
    with Task(OnlineRLContext()) as task:
        task.use(count).use(termination_checker(max_env_step=20))
        task.run(max_step=100)
        assert task.ctx.env_step == 24
        assert task.stop_reason == "env_step reached 24 (max_env_step is 20)"


def test_updates_may_be_limited() -> None:
    with Task(OnlineRLContext()) as task:
        task.use(count).use(termination_checker(max_env_step=10_000, max_train_iter=15))
        task.run(max_step=100)
        assert task.ctx.train_iter == 15


def test_epochs_may_be_limited_offline() -> None:
    def pass_over_data(ctx: OfflineRLContext) -> None:
        ctx.train_epoch += 1

    with Task(OfflineRLContext()) as task:
        task.use(pass_over_data).use(termination_checker(max_train_epoch=3))
        task.run(max_step=100)
        assert task.ctx.train_epoch == 3


def test_time_may_be_limited(clock: Any) -> None:
    def work(ctx: OnlineRLContext) -> None:
        clock.advance(2.0)

    with Task(OnlineRLContext(), clock=clock) as task:
        task.use(termination_checker(max_time_s=5.0)).use(work)
        task.run(max_step=100)
        assert task.ctx.total_step == 3
        assert task.stop_reason == "6.0 s have passed (max_time_s is 5)"


def test_time_counts_from_the_first_step(clock: Any) -> None:
    checker = termination_checker(max_time_s=5.0)
    clock.advance(60.0)
    with Task(OnlineRLContext(), clock=clock) as task:
        task.use(checker)
        task.run(max_step=3)
        assert not task.finish


def test_time_continues_to_count_after_a_resume(clock: Any) -> None:
    def work(ctx: OnlineRLContext) -> None:
        clock.advance(2.0)

    def build() -> Any:
        return Task(clock=clock).use(termination_checker(max_time_s=7.0)).use(work)

    with build() as task:
        task.run(max_step=3)
        state = task.state_dict()
    clock.advance(1000.0)
    with build() as task:
        task.load_state_dict(state)
        task.run(max_step=10)
        assert task.ctx.total_step == 4
        assert "8.0 s have passed" in task.stop_reason


def test_run_that_is_resumed_at_its_limit_makes_no_step() -> None:
    def build(limit: int) -> Any:
        return Task().use(count).use(termination_checker(max_env_step=limit))

    with build(20) as task:
        task.run()
        state = task.state_dict()
    with build(20) as task:
        task.load_state_dict(state)
        task.run()
        assert task.ctx.env_step == 24
    with build(40) as task:
        task.load_state_dict(state)
        task.run()
        assert task.ctx.env_step == 40


def test_checker_reads_only_counters_with_a_limit() -> None:
    checker: Any = termination_checker(max_train_iter=3)
    assert checker.reads == ("train_iter",)


def test_checker_without_a_limit_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one limit"):
        termination_checker()


@pytest.mark.parametrize(
    "name", ["max_env_step", "max_train_iter", "max_train_epoch", "max_time_s"]
)
def test_limit_that_is_not_positive_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* or None, got 0"):
        termination_checker(**{name: 0})
