import io
import re
import sys
from typing import Any

import pytest
from rich.console import Console

from dmiddleware.pipeline import Task
from middleware import OfflineRLContext, OnlineRLContext, ProgressBar, termination_checker


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def shown(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def work_with(clock: Any, seconds: float = 1.0) -> Any:
    def work(ctx: OnlineRLContext) -> None:
        ctx.env_step += 100
        ctx.train_iter += 10
        ctx.log("collect/return_mean", 20.0 + ctx.total_step)
        clock.advance(seconds)

    return work


def test_plain_output_is_one_line_every_few_seconds_and_one_at_the_end(
    run_steps: Any, clock: Any
) -> None:
    console = plain()
    bar = ProgressBar(every_s=5.0, console=console)
    run_steps(bar, work_with(clock), termination_checker(max_env_step=2000), n_steps=12)
    assert shown(console).splitlines() == [
        "step 500/2,000 | return 22.0 | 100/s 10 updates/s 0:15 left",
        "step 1,000/2,000 | return 24.5 | 100/s 10 updates/s 0:10 left",
        "step 1,200/2,000 | return 25.5 | 100/s 10 updates/s in 0:12",
    ]


def test_last_evaluation_is_shown(run_steps: Any, clock: Any) -> None:
    def evaluate(ctx: OnlineRLContext) -> None:
        ctx.last_eval_value = 321.04

    console = plain()
    run_steps(ProgressBar(console=console), evaluate, work_with(clock))
    assert shown(console) == "step 100 | return 20.0 eval 321.0 | 100/s 10 updates/s in 0:01\n"


def test_return_is_a_dash_before_the_first_episode(run_steps: Any, clock: Any) -> None:
    console = plain()
    run_steps(ProgressBar(console=console), termination_checker(max_env_step=10))
    assert shown(console) == "step 0/10 | return - | 0/s 0 updates/s in 0:00\n"


def test_return_is_the_mean_of_the_last_episodes(run_steps: Any, clock: Any) -> None:
    console = plain()
    bar = ProgressBar(console=console, every_s=1e9)
    run_steps(bar, work_with(clock), n_steps=100)
    # The last 20 of 20, 21, …, 119.
    assert "return 109.5" in shown(console)


def test_rate_is_measured_over_the_last_seconds(run_steps: Any, clock: Any) -> None:
    def slow_down(ctx: OnlineRLContext) -> None:
        clock.advance(1.0 if ctx.total_step < 30 else 4.0)

    console = plain()
    bar = ProgressBar(console=console, every_s=1.0)
    run_steps(bar, slow_down, work_with(clock, 0.0), n_steps=60)
    assert "| 100/s" in shown(console).splitlines()[20]
    assert "| 25/s" in shown(console).splitlines()[-2]
    assert "| 40/s" in shown(console).splitlines()[-1]


def test_long_times_are_shown_in_hours(run_steps: Any, clock: Any) -> None:
    console = plain()
    bar = ProgressBar(every_s=1.0, console=console)
    run_steps(bar, work_with(clock), termination_checker(max_env_step=1_000_000))
    assert "2:46:39 left" in shown(console)


def test_run_with_a_limit_of_updates_counts_updates(run_steps: Any, clock: Any) -> None:
    console = plain()
    bar = ProgressBar(console=console)
    run_steps(bar, work_with(clock), termination_checker(max_train_iter=100), n_steps=4)
    assert shown(console) == "update 40/100 | return 21.5 | 10/s in 0:04\n"


def test_offline_run_counts_updates(run_steps: Any, clock: Any) -> None:
    def learn(ctx: OfflineRLContext) -> None:
        ctx.train_iter += 10
        clock.advance(1.0)

    console = plain()
    run_steps(ProgressBar(console=console), learn, ctx=OfflineRLContext())
    assert shown(console) == "update 10 | return - | 10/s in 0:01\n"


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_gets_a_live_bar_of_one_line(run_steps: Any, clock: Any, width: int) -> None:
    console = terminal(width)
    bar = ProgressBar(console=console)
    run_steps(bar, work_with(clock), termination_checker(max_env_step=2000), n_steps=10)
    frames = re.split(r"\r|\n", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(console)))
    last = [frame for frame in frames if frame.strip()][-1]
    assert " 50%" in last
    updates = " 10 updates/s" if width == 120 else ""
    assert f"step 1,000/2,000  return 24.5  100/s{updates} in 0:10" in last
    assert last.count("━") >= 15
    assert len(last) <= width


def test_cursor_is_visible_again_after_an_error(run_steps: Any, clock: Any) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        raise RuntimeError("no")

    console = terminal()
    with pytest.raises(RuntimeError, match="no"):
        run_steps(ProgressBar(console=console), fail)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert shown(console).count(hide) == shown(console).count(show) == 1


def test_last_line_says_why_the_run_stopped(run_steps: Any, clock: Any) -> None:
    def stop(ctx: OnlineRLContext) -> None:
        ctx.task.stop("the mean return 500 has reached stop_value 495")

    console = plain()
    run_steps(ProgressBar(console=console), work_with(clock), stop, n_steps=9)
    assert shown(console).splitlines()[-1] == (
        "stopped: the mean return 500 has reached stop_value 495"
    )


def test_task_that_never_ran_shows_nothing(clock: Any) -> None:
    console = plain()
    with Task(OnlineRLContext()) as task:
        task.use(ProgressBar(console=console))
    assert shown(console) == ""


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every_s must be a positive number, got 0"):
        ProgressBar(every_s=0)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_colors_that_are_forced_do_not_make_a_pipe_a_terminal(
    is_terminal: bool, run_steps: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notebooks force them in the programs that they start."""

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    run_steps(ProgressBar(every_s=10.0), work_with(clock), n_steps=35)
    assert ("\x1b[" in stream.getvalue()) == is_terminal
    if not is_terminal:
        assert len(stream.getvalue().splitlines()) == 4
