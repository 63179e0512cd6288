from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.command_line import arguments_of, arguments_with
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Task
from middleware import (
    InteractionEvaluatorSettings,
    OfflineRLContext,
    OnlineRLContext,
    RunFolder,
    SnapshotSaver,
)
from middleware.programs import train
from middleware.support.interval import Interval, IntervalSettings

STEPS = st.lists(st.integers(0, 200), min_size=1, max_size=50)


def counters(steps: list[int]) -> list[int]:
    """Return a counter after each of some steps of the task."""
    return [sum(steps[: n + 1]) for n in range(len(steps))]


def due_at(interval: Interval, at: list[int]) -> list[int]:
    return [one for one in at if interval.is_due(OnlineRLContext(env_step=one))]


@given(steps=STEPS, every=st.integers(1, 300))
def test_each_multiple_is_due_once_in_the_step_that_reaches_it(
    steps: list[int], every: int
) -> None:
    interval = Interval(IntervalSettings(every_env_step=every))
    interval.start(OnlineRLContext())
    at = counters(steps)
    expected = []
    for before, now in zip([0, *at], at, strict=False):
        if any(number % every == 0 for number in range(before + 1, now + 1)):
            expected.append(now)
    assert due_at(interval, at) == expected


@given(steps=STEPS, every=st.integers(1, 300), stop=st.integers(0, 50))
def test_a_resumed_interval_equals_one_that_was_never_stopped(
    steps: list[int], every: int, stop: int
) -> None:
    at = counters(steps)
    whole, first, second = (Interval(IntervalSettings(every_env_step=every)) for _ in range(3))
    whole.start(OnlineRLContext())
    first.start(OnlineRLContext())
    before = due_at(first, at[:stop])
    second.start(OnlineRLContext(env_step=at[min(stop, len(at)) - 1] if stop else 0))
    second.load_state_dict(first.state_dict())
    assert before + due_at(second, at[stop:]) == due_at(whole, at)


def test_without_an_interval_the_default_is_that_of_the_context() -> None:
    interval = Interval(IntervalSettings(), online=10, offline=2)
    interval.start(OnlineRLContext())
    assert not interval.is_due(OnlineRLContext(env_step=9, train_iter=9))
    assert interval.is_due(OnlineRLContext(env_step=10, train_iter=9))
    interval.start(OfflineRLContext())
    assert interval.is_due(OfflineRLContext(train_iter=2))


def test_without_any_interval_it_is_never_due() -> None:
    interval = Interval(IntervalSettings())
    interval.start(OnlineRLContext())
    assert not interval.is_due(OnlineRLContext(env_step=10**9, train_iter=10**9))


def test_env_steps_are_refused_where_none_are_counted() -> None:
    chain: Any = SimpleNamespace(context=OfflineRLContext())
    found = list(Interval(IntervalSettings(every_env_step=5)).preflight(chain))
    assert len(found) == 1 and "every_train_iter" in found[0]
    assert not list(Interval(IntervalSettings(every_train_iter=5)).preflight(chain))


def test_both_intervals_are_refused() -> None:
    with pytest.raises(ConfigError, match="every_env_step must be None with every_train_iter=3"):
        IntervalSettings(every_train_iter=3, every_env_step=4)


def program(
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=5, every_train_iter=640
    ),
) -> None:
    """Do nothing."""


def test_a_command_line_may_replace_the_counter_of_the_interval() -> None:
    line = ["--evaluator.every-env-step", "5000"]
    evaluator = arguments_of(program, line)["evaluator"]
    assert (evaluator.every_train_iter, evaluator.every_env_step) == (None, 5000)
    assert evaluator.n_episode == 5
    unchanged = arguments_of(program, ["--evaluator.n-episode", "7"])["evaluator"]
    assert (unchanged.every_train_iter, unchanged.every_env_step) == (640, None)


def test_a_file_may_replace_the_counter_of_the_interval() -> None:
    found = arguments_with(program, {"evaluator": {"every_env_step": 5000}}, at="a file")
    assert found["evaluator"].every_train_iter is None
    assert found["evaluator"].every_env_step == 5000


def test_options_of_train_may_replace_the_counter_of_the_interval(tmp_path: Path) -> None:
    result = train(
        "dqn",
        "CartPole-v1",
        max_env_step=1256,
        evaluator={"every_env_step": 128, "n_episode": 10},
        eval_env_num=10,
        experiment={"root": tmp_path, "n_fresh_episode": 10, "every_env_step": 64},
    )
    # The first step makes 1,000 random env steps, and each of the others 128.
    assert [at for at, _ in result.evaluations] == [1000, 1128, 1256]
    assert "every_env_step=128" in result.chain
    assert "every_train_iter" not in result.chain


def test_snapshots_at_an_interval_of_env_steps(tmp_path: Path) -> None:
    def collect(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8

    snapshots = SnapshotSaver(RunFolder(tmp_path), every_env_step=20, keep=9)
    with Task(seed=0) as task:
        task.use(collect).use(snapshots).run(max_step=9)
    steps = sorted(int(path.stem.removeprefix("step_")) for path in snapshots.paths)
    assert steps == [2, 4, 7]  # counted from 0: at 24, 40 and 64 env steps
