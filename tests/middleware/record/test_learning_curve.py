import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from dmiddleware.data import pack_checkpoint, unpack_checkpoint
from dmiddleware.errors import ChainError
from dmiddleware.pipeline import Task, middleware
from middleware import MetricsLogger, OfflineRLContext, OnlineRLContext
from middleware.record.learning_curve import LearningCurve
from middleware.record.run_folder import RunFolder
from tests.middleware.disk import no_room
from tests.variants import mostly_slow


def collect(ctx: OnlineRLContext) -> None:
    ctx.env_step += 100
    ctx.log("collect/return_mean", ctx.env_step / 10)


def evaluate(ctx: Any) -> None:
    if ctx.total_step % 10 == 0:
        ctx.eval_value = 1.0 + ctx.total_step


def has_color(picture: np.ndarray, red: float, green: float, blue: float) -> bool:
    close = np.abs(picture[..., :3] - np.array([red, green, blue])).max(-1) < 0.02
    return int(close.sum()) > 20


BLUE = (0x1F / 255, 0x77 / 255, 0xB4 / 255)
ORANGE = (1.0, 0x7F / 255, 0x0E / 255)


def test_picture_shows_training_and_evaluation(run: RunFolder, run_steps: Any) -> None:
    run_steps(LearningCurve(run), MetricsLogger(run), collect, evaluate, n_steps=30)
    picture = imread(run.curve_path)
    assert picture.shape[0] > 300
    assert has_color(picture, *BLUE)
    assert has_color(picture, *ORANGE)
    assert sorted(path.name for path in run.path.iterdir()) == [
        "curve.png",
        "metrics.jsonl",
        "tb",
    ]


def test_curve_without_evaluations_is_drawn(run: RunFolder, run_steps: Any) -> None:
    run_steps(LearningCurve(run), collect, n_steps=3)
    picture = imread(run.curve_path)
    assert has_color(picture, *BLUE)
    assert not has_color(picture, *ORANGE)


def test_offline_curve_is_over_updates(run: RunFolder, run_steps: Any) -> None:
    def learn(ctx: OfflineRLContext) -> None:
        ctx.train_iter += 7

    curve: Any = LearningCurve(run)
    run_steps(curve, MetricsLogger(run), learn, evaluate, n_steps=11, ctx=OfflineRLContext())
    assert curve.evaluations == [(7, 1.0), (77, 11.0)]
    assert run.curve_path.exists()


def test_curve_without_returns_is_not_drawn(run: RunFolder, run_steps: Any) -> None:
    run_steps(LearningCurve(run))
    assert not run.curve_path.exists()


def test_failed_run_saves_its_curve(run: RunFolder, run_steps: Any) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        if ctx.total_step == 2:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_steps(LearningCurve(run), collect, fail, n_steps=5)
    assert run.curve_path.exists()


def both(ctx: Any) -> None:
    """A step with a training return, and one with an evaluation now and then."""
    ctx.env_step += 10
    ctx.log("collect/return_mean", math.sin(ctx.env_step) * 100.0)
    if ctx.total_step % 3 == 0:
        ctx.eval_value = math.cos(ctx.env_step)


def saved(*parts: Any) -> Any:
    """Pass the states through the bytes of a snapshot."""
    return unpack_checkpoint(pack_checkpoint([one.state_dict() for one in parts]))


@pytest.mark.parametrize(
    ("stop_at", "goes_on"),
    mostly_slow(itertools.product([1, 700, 2, 40], [0, 1, 50]), keep=[2, 3]),
)
def test_a_resumed_curve_equals_one_that_was_never_stopped(
    tmp_path: Path, run_steps: Any, stop_at: int, goes_on: int
) -> None:
    """Rows that were written after the snapshot, by a run that was then killed, do not count."""
    n_steps = 900
    whole_run, run = (RunFolder.create(name, root=tmp_path) for name in ("whole", "parts"))
    whole, killed, resumed = (LearningCurve(one, title="") for one in (whole_run, run, run))
    run_steps(whole, MetricsLogger(whole_run), both, n_steps=n_steps)
    with Task() as task:
        logger = MetricsLogger(run)
        task.use(killed).use(logger).use(both).run(max_step=stop_at)
        state, ctx = saved(killed, logger), task.ctx.state_dict()
        task.run(max_step=goes_on)
    with Task() as task:
        logger = MetricsLogger(run)
        task.ctx.load_state_dict(ctx)
        for one, its_state in zip((resumed, logger), state, strict=True):
            one.load_state_dict(its_state)
        task.ctx = task.ctx.renew()
        task.use(resumed).use(logger).use(both).run(max_step=n_steps - stop_at)
    assert len(whole.evaluations) == n_steps / 3
    assert resumed.evaluations == whole.evaluations
    assert run.curve_path.read_bytes() == whole_run.curve_path.read_bytes()
    for one in (whole_run, run):
        one.close()


def test_the_state_takes_space_that_does_not_grow_with_the_run(run: RunFolder) -> None:
    curve = LearningCurve(run)
    with Task() as task:
        task.use(curve).use(both)
        sizes = []
        for n_steps in (1000, 9000, 20_000):
            task.run(max_step=n_steps)
            sizes.append(len(pack_checkpoint(curve.state_dict())))
    assert max(sizes) < sizes[0] + 500 * 48
    assert sizes[2] < 20_000


@pytest.mark.parametrize("values", [[math.nan], [math.nan, 1.0, math.inf, 2.0, -math.inf]])
def test_a_curve_with_values_that_are_not_finite_is_drawn(
    run: RunFolder, run_steps: Any, values: list[float]
) -> None:
    left = list(values)

    def report(ctx: OnlineRLContext) -> None:
        ctx.env_step += 1
        ctx.log("collect/return_mean", left[0])
        ctx.eval_value = left.pop(0)

    first, second = LearningCurve(run), LearningCurve(run)
    run_steps(first, MetricsLogger(run), report, n_steps=len(values))
    assert run.curve_path.exists()
    second.load_state_dict(*saved(first))
    assert len(first.evaluations) == len(values)


def test_a_curve_of_evaluations_that_no_logger_writes_is_refused(run: RunFolder) -> None:
    @middleware(writes=("eval_value",))
    def judge(ctx: Any) -> None:
        ctx.eval_value = 1.0

    with Task() as task, pytest.raises(ChainError, match="add MetricsLogger"):
        task.use(LearningCurve(run)).use(judge).run(max_step=1)


def test_a_picture_that_cannot_be_drawn_does_not_fail_the_run(
    run: RunFolder, run_steps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with no_room(500):
        run_steps(LearningCurve(run), both, n_steps=3)
    assert list(run.path.iterdir()) == []
    assert "cannot write the learning curve" in caplog.text


def test_task_that_is_closed_twice_draws_once(run: RunFolder) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(LearningCurve(run)).use(collect)
        task.run(max_step=1)
        task.close()
        run.curve_path.unlink()
    assert not run.curve_path.exists()
