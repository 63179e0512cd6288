"""What only informs does not fail a run; what the run is for does, with the cause."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dmiddleware.data import load_checkpoint
from dmiddleware.errors import CheckpointWriteError
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy
from middleware import (
    Experiment,
    ExperimentResult,
    OnlineRLContext,
    ProgressBar,
    RunFolder,
    SnapshotSaver,
)
from tests.middleware.disk import no_more_files, no_room
from tests.variants import mostly_slow

ROOT = Path(__file__).parents[2]


def dqn() -> DQNPolicy:
    return DQNPolicy(
        {"seed": 0, "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
    )


def work(ctx: OnlineRLContext) -> None:
    ctx.env_step += 8
    ctx.train_iter += 1
    ctx.log("collect/return_mean", float(ctx.env_step))
    ctx.eval_value = 1.0 + ctx.total_step
    ctx.train_output = [{"loss": 1.0, "[scalars]heads": {"a": 1.0}}]


def build(run: RunFolder) -> tuple[Task[Any], Experiment, SnapshotSaver]:
    experiment, snapshots = Experiment(run, dqn()), SnapshotSaver(run, every_train_iter=2)
    return Task().use(work).use(experiment).use(snapshots), experiment, snapshots


def a_folder(path: Path) -> None:
    path.mkdir()


def a_file(path: Path) -> None:
    path.write_text("a file")


def a_full_device(path: Path) -> None:
    path.symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [
        ("curve.png", a_folder),
        ("result.json", a_folder),
        ("final_ctx.json", a_folder),
        ("metrics.jsonl", a_folder),
        ("metrics.jsonl", a_full_device),
        ("log.txt", a_full_device),
        ("tb", a_file),
    ],
)
def test_a_file_that_only_informs_does_not_fail_the_run(
    run: RunFolder, name: str, obstacle: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    obstacle(run.path / name)
    task, experiment, snapshots = build(run)
    with task:
        task.run(max_step=5)
    assert experiment.result.train_iter == 5
    assert load_checkpoint(run.best_ckpt)["last_eval_value"] == 5.0
    assert load_checkpoint(run.ckpt_dir / "final.safetensors")["last_iter"] == 5
    assert len(snapshots.paths) == 2
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1 and str(run.path / name) in warnings[0], warnings
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []
    again, _, snapshots = build(run)
    with again:
        assert snapshots.resume(again)
        again.run(max_step=1)
        assert again.ctx.train_iter == 5


class Broken(io.StringIO):
    """A stream that nobody reads, or a file on a full disk."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(5, "gone"), ValueError("closed")]
)
def test_progress_that_cannot_be_shown_does_not_fail_the_run(
    run_steps: Any, error: Exception, is_terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    console = Console(file=Broken(error), force_terminal=is_terminal, width=80)
    ctx = run_steps(ProgressBar(every_s=1e-9, console=console), work, n_steps=5)
    assert ctx.train_iter == 5
    assert caplog.text.count("cannot show the progress") == 1


@pytest.mark.process
@pytest.mark.parametrize("output", mostly_slow(["full", "closed pipe", "closed"], keep=1))
def test_output_that_nobody_can_read_does_not_fail_the_run(tmp_path: Path, output: str) -> None:
    @contextmanager
    def stream() -> Iterator[Any]:
        if output != "closed pipe":
            with Path("/dev/full").open("wb") as file:
                yield file
            return
        read, write = os.pipe()
        os.close(read)
        yield write
        os.close(write)

    program = [sys.executable, "-m", "tests.middleware.test_full_disk", str(tmp_path)]
    if output == "closed":
        program = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *program]
    # With the variable, nothing would be left to write at the end.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with stream() as file:
        done = subprocess.run(
            program, cwd=ROOT, env=env, stdout=file, stderr=file, timeout=100, check=False
        )
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["train_iter"] == 5


@pytest.mark.parametrize("limit", [lambda: no_room(500), no_more_files])
@pytest.mark.parametrize("at", ["middle", "end"])
def test_a_policy_or_a_snapshot_that_cannot_be_saved_ends_the_run_with_the_cause(
    run: RunFolder, limit: Callable[[], Any], at: str
) -> None:
    task, _, snapshots = build(run)
    task.run(max_step=4)
    kept = snapshots.paths
    with limit(), pytest.raises(Exception) as raised:
        if at == "middle":
            task.run(max_step=2)
        else:
            task.close()
    assert any(isinstance(one, CheckpointWriteError) for one in leaves(raised.value))
    remedy = "ulimit -n" if limit is no_more_files else "Free disk space"
    assert any(remedy in str(one) for one in leaves(raised.value))
    assert all(isinstance(one, CheckpointWriteError) for one in leaves(raised.value))
    task.close()
    assert snapshots.paths == kept
    assert load_checkpoint(run.best_ckpt)["last_eval_value"] == 4.0
    again, _, snapshots = build(run)
    with again:
        assert snapshots.resume(again)
        again.run(max_step=1)


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in leaves(one)]
    return [error]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_results_that_are_not_finite_are_null_in_the_file(run: RunFolder, value: float) -> None:
    result = ExperimentResult(
        path=run.path,
        mean_return=value,
        last_return=1.0,
        n_episode=2,
        env_step=np.int64(3),  # type: ignore[arg-type]
        train_iter=4,
        train_s=np.float32(0.5),  # type: ignore[arg-type]
        evaluations=((1, value), (2, 3.0)),
    )
    result.save()
    fields = json.loads(run.result_path.read_text(), parse_constant=pytest.fail)
    assert fields["mean_return"] is None
    assert fields["evaluations"] == [[1, None], [2, 3.0]]
    assert (fields["env_step"], fields["train_s"]) == (3, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_ruins_nothing(run: RunFolder, bad: float) -> None:
    def report(ctx: OnlineRLContext) -> None:
        work(ctx)
        if ctx.total_step == 2:
            ctx.eval_value = bad
            ctx.log("collect/return_mean", bad)
            ctx.log("other", bad)

    for resume in (False, True):
        experiment, snapshots = Experiment(run, dqn()), SnapshotSaver(run, every_train_iter=1)
        with Task() as task:
            task.use(report).use(experiment).use(snapshots)
            assert snapshots.resume(task) == resume
            task.run(max_step=3)
    assert load_checkpoint(run.best_ckpt)["last_eval_value"] == 6.0
    for name in ("result.json", "final_ctx.json"):
        json.loads((run.path / name).read_text(), parse_constant=pytest.fail)
    evaluations = dict(experiment.result.evaluations)
    assert [evaluations[8 * step] for step in (1, 2, 4, 5, 6)] == [1.0, 2.0, 4.0, 5.0, 6.0]
    assert not math.isfinite(evaluations[24])
    assert run.curve_path.exists()


if __name__ == "__main__":
    with RunFolder.create("run", root=sys.argv[1]) as folder:
        training, _, _ = build(folder)
        with training:
            training.run(max_step=5)
