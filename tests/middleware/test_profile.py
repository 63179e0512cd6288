import logging
from typing import Any

import pytest

from middleware import OnlineRLContext, epoch_timer


def test_mean_duration_is_logged_in_the_next_step(
    run_steps: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[dict[str, float]] = []

    def work(ctx: OnlineRLContext) -> None:
        clock.advance(0.1 * (ctx.total_step + 1))
        logged.append(dict(ctx.logged))

    with caplog.at_level(logging.INFO, logger="middleware.profile"):
        run_steps(epoch_timer(every_step=2), work, n_steps=5)
    assert logged == [
        {},
        {},
        {"time/step_s": pytest.approx(0.15)},
        {},
        {"time/step_s": pytest.approx(0.35)},
    ]
    assert caplog.messages == ["2 steps took 150.000 ms each", "2 steps took 350.000 ms each"]


def test_middleware_before_the_timer_is_not_measured(run_steps: Any, clock: Any) -> None:
    def work(ctx: OnlineRLContext) -> None:
        clock.advance(1.0)

    ctx = run_steps(work, epoch_timer(every_step=1), n_steps=2)
    assert ctx.logged == {"time/step_s": 0.0}


def test_number_of_steps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every_step must be an integer ≥ 1, got 0"):
        epoch_timer(every_step=0)
