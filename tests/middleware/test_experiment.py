import json
from typing import Any

import pytest

from dmiddleware.pipeline import OnlineRLContext, Task
from middleware.experiment import final_ctx_saver
from middleware.run_folder import RunFolder


def saved(run: RunFolder) -> Any:
    return json.loads((run.path / "final_ctx.json").read_text())


def test_counters_and_the_reason_of_the_end_are_saved(run: RunFolder) -> None:
    def work(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        ctx.trajectories = object()
        if ctx.env_step == 24:
            ctx.task.stop("enough")

    with Task(OnlineRLContext()) as task:
        task.use(final_ctx_saver(run)).use(work)
        task.run(max_step=10)
        assert not (run.path / "final_ctx.json").exists()
    assert saved(run) == {
        "total_step": 2,
        "env_step": 24,
        "env_episode": 0,
        "train_iter": 0,
        "last_eval_iter": -1,
        "last_eval_value": None,
        "stop_reason": "enough",
    }


def test_fields_that_a_user_keeps_are_saved(run: RunFolder, run_steps: Any) -> None:
    def visit(ctx: Any) -> None:
        ctx.visits = 3
        ctx.weights = [1.0]
        ctx.keep("visits", "weights")

    run_steps(visit, final_ctx_saver(run))
    assert saved(run)["visits"] == 3
    assert "weights" not in saved(run)


def test_it_is_saved_after_an_error_too(run: RunFolder, run_steps: Any) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_steps(fail, final_ctx_saver(run))
    assert saved(run)["env_step"] == 8


def test_task_that_never_ran_leaves_nothing(run: RunFolder) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(final_ctx_saver(run))
    assert not (run.path / "final_ctx.json").exists()
