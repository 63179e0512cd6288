import copy
import logging
import math
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import ChainError
from dmiddleware.pipeline import Task
from dmiddleware.policy import UpdateOutput
from dmiddleware.runs.metrics_file import read_metrics
from middleware import (
    MetricsLogger,
    OfflineRLContext,
    OnlineRLContext,
    offline_logger,
    online_logger,
)
from middleware.record.run_folder import RunFolder
from tests.middleware.disk import no_room
from tests.middleware.nodes import DEADLINE_S, run_nodes
from tests.tensorboard_events import values_in


def written(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """Return all scalars in the run's tensorboard folder, as (step, value) by name."""
    run.close()
    found: dict[str, list[tuple[int, float]]] = {}
    for step, value in values_in(run.path / "tb"):
        kind = value.WhichOneof("value")
        number = value.simple_value if kind == "simple_value" else float("nan")
        found.setdefault(value.tag, []).append((step, number))
    return found


def collect(ctx: OnlineRLContext) -> None:
    ctx.env_step += 8
    ctx.log("collect/return_mean", float(ctx.env_step))


def learn(ctx: Any) -> None:
    ctx.train_iter += 2
    ctx.train_output = [
        {"total_loss": 1.0, "cur_lr": 0.5, "name": "text"},
        {"total_loss": 2.0, "cur_lr": 0.5, "name": "text"},
    ]


def test_means_are_written_at_an_interval_of_env_steps(run: RunFolder, run_steps: Any) -> None:
    run_steps(online_logger(run, every_env_step=16), collect, learn, n_steps=4)
    scalars = written(run)
    assert scalars["collect/return_mean"] == [(16, 12.0), (32, 28.0)]
    assert scalars["learn/total_loss"] == [(16, 1.5), (32, 1.5)]
    assert scalars["learn/cur_lr"] == [(16, 0.5), (32, 0.5)]
    assert "learn/name" not in scalars


def test_outputs_on_a_gpu_are_read_only_when_they_are_written(
    run: RunFolder, run_steps: Any
) -> None:
    steps: list[int] = []
    reads: list[int] = []

    def learn_on_a_gpu(ctx: Any) -> None:
        ctx.train_iter += 1
        steps.append(ctx.env_step)
        loss = torch.tensor(float(ctx.train_iter))
        ctx.train_output = UpdateOutput({"total_loss": loss}, lambda: reads.append(steps[-1]))

    run_steps(online_logger(run, every_env_step=24), collect, learn_on_a_gpu, n_steps=4)
    assert reads == [24, 24, 24, 32]
    assert written(run)["learn/total_loss"] == [(24, 2.0), (32, 4.0)]


def test_remaining_metrics_are_written_at_the_end(run: RunFolder, run_steps: Any) -> None:
    run_steps(online_logger(run, every_env_step=16), collect, n_steps=3)
    assert written(run)["collect/return_mean"] == [(16, 12.0), (24, 24.0)]


def test_evaluations_are_written_at_once(run: RunFolder, run_steps: Any) -> None:
    def evaluate(ctx: OnlineRLContext) -> None:
        if ctx.env_step == 16:
            ctx.eval_value = 123.0

    run_steps(online_logger(run, every_env_step=1000), collect, evaluate, n_steps=3)
    assert written(run)["eval/return_mean"] == [(16, 123.0)]


def test_spread_and_film_of_an_evaluation_are_written(run: RunFolder, run_steps: Any) -> None:
    def evaluate(ctx: OnlineRLContext) -> None:
        ctx.eval_value = 2.0
        ctx.eval_output = {
            "return_std": 1.0,
            "return_min": 1.0,
            "return_max": 3.0,
            "video": np.zeros((1, 2, 3, 8, 8), np.uint8),
        }

    run_steps(online_logger(run), collect, evaluate)
    scalars = written(run)
    assert scalars["eval/return_std"] == [(8, 1.0)]
    assert scalars["eval/return_min"] == [(8, 1.0)]
    assert scalars["eval/return_max"] == [(8, 3.0)]
    assert [step for step, _ in scalars["eval/video"]] == [8]
    assert run.video_path(8).read_bytes().startswith(b"GIF")


def test_throughput_is_measured(run: RunFolder, run_steps: Any, clock: Any) -> None:
    def work(ctx: OnlineRLContext) -> None:
        clock.advance(0.5)

    run_steps(online_logger(run, every_env_step=16), collect, learn, work, n_steps=2)
    scalars = written(run)
    assert scalars["speed/env_step_per_s"] == [(16, 16.0)]
    assert scalars["speed/train_iter_per_s"] == [(16, 4.0)]


def test_histograms_and_groups_of_scalars_are_written_as_such(
    run: RunFolder, run_steps: Any
) -> None:
    def report(ctx: OnlineRLContext) -> None:
        ctx.train_output = {
            "[histogram]q_value": [1.0, 2.0, 3.0],
            "[scalars]heads": {"a": 1.0, "b": 2.0},
        }

    run_steps(online_logger(run, every_env_step=8), collect, report)
    scalars = written(run)
    assert [step for step, _ in scalars["learn/q_value"]] == [8]
    assert scalars["learn/heads"] == [(8, 1.0), (8, 2.0)]


def test_text_log_has_the_same_values(
    run: RunFolder, run_steps: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluate(ctx: OnlineRLContext) -> None:
        ctx.eval_value = 499.5

    with caplog.at_level(logging.INFO, logger="middleware.record.log"):
        run_steps(online_logger(run, every_env_step=8), collect, learn, evaluate)
    assert caplog.messages == [
        "env_step 8, update 2: mean return 499.50 in the evaluation",
        "env_step 8: collect/return_mean 8, learn/cur_lr 0.5, learn/total_loss 1.5",
    ]


def test_position_in_the_chain_does_not_matter(run: RunFolder, run_steps: Any) -> None:
    run_steps(collect, learn, online_logger(run, every_env_step=8))
    assert written(run)["collect/return_mean"] == [(8, 8.0)]


def test_offline_metrics_are_written_over_updates(run: RunFolder, run_steps: Any) -> None:
    run_steps(offline_logger(run, every_train_iter=4), learn, n_steps=5, ctx=OfflineRLContext())
    assert written(run)["learn/total_loss"] == [(4, 1.5), (8, 1.5), (10, 1.5)]


def test_resumed_run_continues_its_interval(run: RunFolder, run_steps: Any) -> None:
    run_steps(
        online_logger(run, every_env_step=16),
        collect,
        n_steps=2,
        ctx=OnlineRLContext(env_step=1000),
    )
    assert written(run)["collect/return_mean"] == [(1008, 1008.0), (1016, 1016.0)]


def test_online_metrics_may_be_written_at_an_interval_of_updates(
    run: RunFolder, run_steps: Any
) -> None:
    run_steps(online_logger(run, every_train_iter=4), collect, learn, n_steps=4)
    assert written(run)["collect/return_mean"] == [(16, 12.0), (32, 28.0)]


def test_a_second_logger_of_a_folder_is_refused(run: RunFolder) -> None:
    with Task() as task:
        task.use(MetricsLogger(run)).use(MetricsLogger(run, every_env_step=10)).use(collect)
        with pytest.raises(ChainError, match=r"both use the path .*metrics\.jsonl"):
            task.run(max_step=1)


def test_an_interval_in_env_steps_needs_env_steps(run: RunFolder) -> None:
    with Task(OfflineRLContext()) as task:
        task.use(MetricsLogger(run, every_env_step=10)).use(learn)
        with pytest.raises(ChainError, match="OfflineRLContext does not count"):
            task.run(max_step=1)


def test_intervals_must_be_positive(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="every_env_step must be an integer ≥ 1 or None, got 0"):
        online_logger(run, every_env_step=0)
    with pytest.raises(ValueError, match="every_train_iter must be an integer ≥ 1 or None, got -1"):
        offline_logger(run, every_train_iter=-1)


def test_the_routers_totals_are_written(run: RunFolder, tmp_path: Path) -> None:
    came, written_down = threading.Event(), threading.Event()

    def tell(task: Any) -> None:
        task.use(lambda ctx: task.emit("number", ctx.total_step), roles=["collector"])
        task.run(max_step=30)
        assert written_down.wait(DEADLINE_S)

    def listen(task: Any) -> None:
        task.on("number", lambda number: came.set())
        task.use(lambda ctx: came.wait(DEADLINE_S))
        task.use(collect, roles=["learner"]).use(online_logger(run, every_env_step=8))
        task.run(max_step=3)
        written_down.set()

    run_nodes(tmp_path, ("collector", tell), ("learner", listen))
    scalars = written(run)
    assert scalars["router/event/number/received"][-1][1] >= 1
    assert scalars["router/event/number/received_bytes"][-1][1] > 0
    for name in ("received_frames", "resent_frames", "sent_bytes", "waiting", "dropped"):
        assert f"router/node0/{name}" in scalars


def test_a_full_disk_does_not_end_the_run(
    run: RunFolder, run_steps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(ctx: OnlineRLContext) -> None:
        ctx.env_step += 1
        for number in range(500):
            ctx.log(f"metric_{number}", 1.0)

    with no_room(20_000):
        ctx = run_steps(measure, online_logger(run, every_env_step=1), n_steps=50)
    assert ctx.env_step == 50
    assert caplog.text.count("cannot write TensorBoard events") == 1
    assert 0 < len(written(run)["metric_0"]) < 50  # what was written can be read


@pytest.mark.parametrize("values", [[math.nan], [], [math.inf, 1.0, math.nan, 2.0]])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_histogram_leaves_out_values_that_are_not_finite(
    run: RunFolder, run_steps: Any, values: list[float], kind: Any
) -> None:
    def report(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        ctx.train_output = {"[histogram]q_value": kind(values), "loss": math.nan}
        ctx.log("x", -math.inf)

    run_steps(online_logger(run, every_env_step=8), report)
    scalars = written(run)
    assert ("learn/q_value" in scalars) == (len(values) > 1)
    assert math.isnan(scalars["learn/loss"][0][1])
    assert scalars["x"] == [(8, -math.inf)]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5),
        torch.tensor([2.5], requires_grad=True),
        np.float32(2.5),
        np.float64(2.5),
        np.array(2.5),
    ],
    ids=["tensor", "tensor [1]", "float32", "float64", "array"],
)
def test_scalars_of_other_libraries_are_logged(run: RunFolder, run_steps: Any, value: Any) -> None:
    def learn(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        ctx.train_output = [{"loss": value, "rows": np.int64(3), "name": "no number"}]

    run_steps(online_logger(run, every_env_step=8), learn)
    scalars = written(run)
    assert scalars["learn/loss"] == [(8, 2.5)]
    assert scalars["learn/rows"] == [(8, 3.0)]
    assert "learn/name" not in scalars


def test_the_metrics_file_has_a_line_for_each_write_with_counters_and_time(
    run: RunFolder, run_steps: Any, clock: Any
) -> None:
    def work(ctx: OnlineRLContext) -> None:
        clock.advance(0.5)
        if ctx.env_step == 16:
            ctx.eval_value = torch.tensor(7.0)
            ctx.eval_output = {"return_std": 2.0}

    run_steps(online_logger(run, every_env_step=16), collect, learn, work, n_steps=3)
    evaluation, first, last = read_metrics(run.path)
    counters = {"env_step": 16, "train_iter": 4, "time_s": 1.0}
    assert evaluation == counters | {"eval/return_mean": 7.0, "eval/return_std": 2.0}
    assert first == counters | {
        "collect/return_mean": 12.0,
        "learn/cur_lr": 0.5,
        "learn/total_loss": 1.5,
        "speed/env_step_per_s": 16.0,
        "speed/train_iter_per_s": 4.0,
    }
    assert last["env_step"] == 24 and last["time_s"] == 1.5


@pytest.mark.parametrize("n_after", [0, 3])
def test_a_resumed_run_continues_its_metrics(run: RunFolder, clock: Any, n_after: int) -> None:
    """Lines that were written after the snapshot, by a run that was then killed, do not count."""

    def work(ctx: OnlineRLContext) -> None:
        clock.advance(1.0)

    def task_with(logger: Any) -> Task[OnlineRLContext]:
        task = Task(OnlineRLContext(), clock=clock)
        return task.use(logger).use(collect).use(work)

    with task_with(online_logger(run, every_env_step=16)) as killed:
        killed.run(max_step=4)
        state = killed.state_dict()
        killed.run(max_step=n_after)
    clock.advance(100.0)
    with (
        RunFolder(run.path) as again,
        task_with(online_logger(again, every_env_step=16)) as resumed,
    ):
        resumed.load_state_dict(state)
        resumed.run(max_step=4)
    rows = read_metrics(run.path)
    assert [row["env_step"] for row in rows] == [16, 32, 48, 64]
    assert [row["time_s"] for row in rows] == [2.0, 4.0, 6.0, 8.0]


def learn_in_every_way(ctx: Any) -> None:
    """Report numbers, lazy numbers of a GPU, a histogram and several numbers of one plot."""
    ctx.train_iter += 1
    at = float(ctx.train_iter)
    if ctx.train_iter % 2:
        ctx.train_output = [{"total_loss": at}, {"total_loss": torch.tensor(at + 1)}]
    else:
        ctx.train_output = UpdateOutput({"total_loss": torch.tensor(at)}, lambda: None)
    if ctx.train_iter % 3 == 0:
        ctx.train_output = {
            "[histogram]error": torch.arange(3.0) + at,
            "[scalars]parts": {"one": at, "other": torch.tensor(-at)},
        }
    ctx.log("my/number", math.nan if ctx.train_iter == 2 else at)


def histograms_of(run: RunFolder) -> list[tuple[int, float]]:
    return [
        (step, value.histo.sum)
        for step, value in values_in(run.path / "tb")
        if value.tag == "learn/error"
    ]


@pytest.mark.parametrize("make_ctx", [OnlineRLContext, OfflineRLContext])
@pytest.mark.parametrize("stops", [[1], [2], [3], [5, 6], [1, 2, 4, 8, 9], [5, 5, 11]])
def test_rows_of_a_resumed_run_are_those_of_one_that_never_stopped(
    tmp_path: Path, clock: Any, make_ctx: Any, stops: list[int]
) -> None:
    def work(ctx: Any) -> None:
        if isinstance(ctx, OnlineRLContext):
            collect(ctx)
        clock.advance(1.0 + ctx.total_step % 3)

    def rows_with(stops: list[int]) -> tuple[list[dict[str, Any]], list[tuple[int, float]]]:
        state, path = None, tmp_path / str(len(stops))
        for before, after in pairwise([0, *stops, 12]):
            with (
                RunFolder(path) as run,
                Task(make_ctx(), clock=clock) as task,
            ):
                logger = MetricsLogger(run, every_train_iter=5)
                task.use(logger).use(work).use(learn_in_every_way)
                if state is not None:
                    task.load_state_dict(load_checkpoint(path / "state"))
                task.run(max_step=after - before)
                save_checkpoint(path / "state", task.state_dict())
                state = path
            clock.advance(100.0)
        return read_metrics(path), histograms_of(RunFolder(path))

    rows, histograms = rows_with([])
    assert len(rows) == 3
    resumed_rows, resumed_histograms = rows_with(stops)
    assert resumed_rows == rows
    assert set(resumed_histograms) >= set(histograms)


def test_a_full_disk_costs_only_lines_of_metrics(
    run: RunFolder, run_steps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with no_room(800):
        run_steps(online_logger(run, every_env_step=8), collect, n_steps=30)
    assert 0 < len(read_metrics(run.path)) < 30
    assert caplog.text.count(f"cannot write metrics to {run.path / 'metrics.jsonl'}") == 1


def test_names_that_differ_only_by_case_are_a_warning(
    run: RunFolder, run_steps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def log(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        for name in ("my/Loss", "my/loss", "other"):
            ctx.log(name, 1.0)

    run_steps(online_logger(run, every_env_step=8), log, n_steps=5)
    assert caplog.text.count("differ only by upper and lower case") == 1
    assert "my/Loss and my/loss" in caplog.text
    assert read_metrics(run.path)[0]["my/Loss"] == read_metrics(run.path)[0]["my/loss"] == 1.0


def test_outputs_of_any_name_are_written_under_one_that_all_loggers_take(
    run: RunFolder, run_steps: Any
) -> None:
    def learn(ctx: Any) -> None:
        ctx.train_iter += 1
        ctx.train_output = {"my loss": 1.0, "a/b": 2.0, 3: 4.0, 5: "text", "/c": torch.ones(())}

    run_steps(offline_logger(run, every_train_iter=1), learn, ctx=OfflineRLContext())
    (row,) = read_metrics(run.path)
    expected = {"learn/my_loss": 1.0, "learn/a/b": 2.0, "learn/3": 4.0, "learn/c": 1.0}
    assert {name: row[name] for name in row if name.startswith("learn/")} == expected
    assert expected.keys() <= written(run).keys()


class Tally:
    """Logs a total that begins again from zero in a resumed run, as skipped updates do."""

    name = "learn/skipped_draws"

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        if ctx.total_step % 3 == 0:
            self.total += 1
            ctx.log(self.name, self.total)


class SavedTally(Tally):
    """Logs a total that a resumed run continues, as saved rows are."""

    name = "data/rows"

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


@pytest.mark.parametrize("tally", [Tally, SavedTally])
@pytest.mark.parametrize("stops", [[], [1], [2], [4, 5], [1, 3, 6, 9], [10]])
def test_a_total_is_written_as_a_total_also_over_resumed_runs(
    tmp_path: Path, tally: type[Tally], stops: list[int]
) -> None:
    state = None
    for before, after in pairwise([0, *stops, 13]):
        with RunFolder(tmp_path) as run, Task(OnlineRLContext()) as task:
            task.use(MetricsLogger(run, every_env_step=32)).use(tally())
            if state is not None:
                task.load_state_dict(state)
            task.run(max_step=after - before)
            state = copy.deepcopy(task.state_dict())
    totals = {row["env_step"]: row[tally.name] for row in read_metrics(tmp_path)}
    # One in each of the steps 0, 3, 6, 9 and 12, of 8 env steps.
    assert [totals[at] for at in (32, 64, 96, 104)] == [2, 3, 4, 5]


@pytest.mark.parametrize("name", ["data/rows", "collect/env_restarts"])
def test_totals_alone_are_written_at_the_end(run: RunFolder, run_steps: Any, name: str) -> None:
    def count(ctx: OnlineRLContext) -> None:
        ctx.env_step += 8
        if ctx.total_step == 0:
            ctx.log(name, 3)

    run_steps(online_logger(run), count, n_steps=2)
    (row,) = read_metrics(run.path)
    assert row[name] == 3 and row["env_step"] == 16
