from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from dmiddleware.pipeline import OfflineRLContext, OnlineRLContext, Task
from middleware.learning_curve import LearningCurve
from middleware.run_folder import RunFolder


def collect(ctx: OnlineRLContext) -> None:
    ctx.env_step += 100
    ctx.log("collect/return_mean", ctx.env_step / 10)


def evaluate(ctx: Any) -> None:
    if ctx.total_step % 10 == 0:
        ctx.eval_value = 1.0 + ctx.total_step


def has_colour(picture: np.ndarray, red: float, green: float, blue: float) -> bool:
    close = np.abs(picture[..., :3] - np.array([red, green, blue])).max(-1) < 0.02
    return int(close.sum()) > 20


BLUE = (0x1F / 255, 0x77 / 255, 0xB4 / 255)
ORANGE = (1.0, 0x7F / 255, 0x0E / 255)


def test_picture_shows_training_and_evaluation(run: RunFolder, run_steps: Any) -> None:
    run_steps(LearningCurve(run), collect, evaluate, n_steps=30)
    picture = imread(run.curve_path)
    assert picture.shape[0] > 300
    assert has_colour(picture, *BLUE)
    assert has_colour(picture, *ORANGE)
    assert sorted(path.name for path in run.path.iterdir()) == ["curve.png"]


def test_curve_without_evaluations_is_drawn(run: RunFolder, run_steps: Any) -> None:
    run_steps(LearningCurve(run), collect, n_steps=3)
    picture = imread(run.curve_path)
    assert has_colour(picture, *BLUE)
    assert not has_colour(picture, *ORANGE)


def test_offline_curve_is_over_updates(run: RunFolder, run_steps: Any) -> None:
    def learn(ctx: OfflineRLContext) -> None:
        ctx.train_iter += 7

    curve: Any = LearningCurve(run)
    run_steps(curve, learn, evaluate, n_steps=11, ctx=OfflineRLContext())
    assert curve.state_dict()["evaluation"] == [(7, 1.0), (77, 11.0)]
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


def test_restored_curve_continues(run: RunFolder, run_steps: Any) -> None:
    first: Any = LearningCurve(run)
    run_steps(first, collect, n_steps=2)
    second: Any = LearningCurve(run)
    second.load_state_dict(first.state_dict())
    run_steps(second, collect, ctx=OnlineRLContext(env_step=200))
    assert second.state_dict()["training"] == [(100, 10.0), (200, 20.0), (300, 30.0)]


def test_task_that_is_closed_twice_draws_once(run: RunFolder) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(LearningCurve(run)).use(collect)
        task.run(max_step=1)
        task.close()
        run.curve_path.unlink()
    assert not run.curve_path.exists()
