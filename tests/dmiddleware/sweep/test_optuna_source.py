"""Optuna as the sampler and pruner of a sweep: the real library, with and without processes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from dmiddleware.launch.leftovers import ProcessSearch
from dmiddleware.runs import read_metrics
from dmiddleware.runs.metrics_file import MetricsFile
from dmiddleware.sweep.axes import Axis, Choices, Span
from dmiddleware.sweep.optuna_source import OptunaSource
from dmiddleware.sweep.sweep_plan import Search, SweepPlan, SweptRun, read_plan, state_of
from tests.dmiddleware.sweep.sweep_process import MAIN, start, sweep
from tests.waiting import wait_until

optuna = pytest.importorskip("optuna")

AXES = (
    Axis("policy.learning_rate", Span(1e-5, 1e-2, "log")),
    Axis("policy.n_step", Choices(("1", "2", "3"), 1)),
    Axis("policy.compile", Choices(("true", "false")), is_flag=True),
    Axis("learner.momentum", Span(0.5, 0.9, "linear")),
)


def plan(trials: int, **search: object) -> SweepPlan:
    return SweepPlan(
        program="program.main",
        package=".",
        directory=".",
        options=(),
        arguments=(),
        axes=AXES,
        metric="eval/return_mean",
        stop_s=1.0,
        mark="mark",
        search=Search(trials, **search),  # type: ignore[arg-type]
    )


def end(run: SweptRun, code: int, values: list[float]) -> None:
    """Leave what a run leaves in its folder."""
    run.folder.mkdir(exist_ok=True)
    file = MetricsFile(run.folder / "metrics.jsonl")
    for number, value in enumerate(values):
        file.append({"env_step": number, "eval/return_mean": value})
    run.ended.write_text(str(code))


def test_values_are_drawn_from_their_ranges_and_become_arguments(tmp_path: Path) -> None:
    source = OptunaSource(tmp_path, plan(3))
    run = source.next()
    assert run is not None
    assert run.name.startswith("000_learning_rate-")
    assert 1e-5 <= float(run.values["policy.learning_rate"]) <= 1e-2
    assert 0.5 <= float(run.values["learner.momentum"]) <= 0.9
    assert run.values["policy.n_step"] in ("1", "2", "3")
    assert run.words[0] == "--policy.learning-rate"
    assert run.words[4] in ("--policy.compile", "--policy.no-compile")


def test_the_objective_is_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    source = OptunaSource(tmp_path, plan(2))
    run = source.next()
    assert run is not None
    values = [0.0] * 18 + [2.0, 4.0]
    end(run, 0, values)
    source.progressed(run, values)
    source.ended(run, 3.0)
    assert source.study.best_value == 3.0
    assert source.study.trials[0].intermediate_values[20] == 3.0
    assert source.conclusion() == f"best: {run.name}, score 3"


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_run_that_is_worse_than_the_median_is_pruned(direction: str, tmp_path: Path) -> None:
    source = OptunaSource(tmp_path, plan(9, direction=direction))
    sign = 1 if direction == "maximize" else -1
    for number in range(5):
        run = source.next()
        assert run is not None
        values = [sign * number * step for step in range(1, 6)]
        assert not source.progressed(run, values)
        end(run, 0, values)
        source.ended(run, values[-1])
    bad, good = source.next(), source.next()
    assert bad is not None
    assert good is not None
    assert not source.progressed(bad, [0.0, 0.0])  # the first evaluations say little
    assert source.progressed(bad, [0.0, 0.0, sign * -0.1])
    assert not source.progressed(good, [sign * 100.0] * 3)
    bad.folder.mkdir()
    bad.pruned.touch()
    source.ended(bad, 0.0)
    assert source.study.trials[5].state == optuna.trial.TrialState.PRUNED


def test_no_run_is_pruned_without_a_pruner(tmp_path: Path) -> None:
    source = OptunaSource(tmp_path, plan(9, prunes=False))
    for number in range(7):
        run = source.next()
        assert run is not None
        assert not source.progressed(run, [-float(number)] * 5)
        end(run, 0, [-float(number)] * 5)
        source.ended(run, -float(number))


def test_a_search_continues_with_what_was_told_and_what_was_running(tmp_path: Path) -> None:
    source = OptunaSource(tmp_path, plan(5))
    runs = [source.next() for _ in range(4)]
    told, untold, failed, interrupted = [run for run in runs if run is not None]
    end(told, 0, [1.0])
    source.ended(told, 1.0)
    end(failed, 1, [])
    source.ended(failed, None)
    # Killed before it could tell the study, with half a line and the lock in its place.
    end(untold, 0, [5.0])
    interrupted.folder.mkdir()
    with (tmp_path / "study.journal").open("a") as journal:
        journal.write('{"op_code": 5, "wor')
    (tmp_path / "study.journal.lock").symlink_to(tmp_path / "study.journal")

    again = OptunaSource(tmp_path, plan(5))
    assert [run.name for run in again.known()] == [run.name for run in runs if run]
    assert again.study.best_value == 5.0
    assert again.next() == interrupted
    new = again.next()
    assert new is not None
    assert new.name.startswith("004_")
    assert new.values not in [run.values for run in again.known()[:4]]
    assert again.next() is None
    states = Counter(trial.state.name for trial in again.study.trials)
    assert states == {"COMPLETE": 2, "FAIL": 1, "RUNNING": 2}


def test_a_trial_that_was_killed_while_it_was_asked_for_does_not_count(tmp_path: Path) -> None:
    source = OptunaSource(tmp_path, plan(1))
    source.study.ask()
    again = OptunaSource(tmp_path, plan(1))
    assert again.next() is not None
    assert again.next() is None


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_search_that_is_killed_continues(tmp_path: Path) -> None:
    words = ("--sampler", "optuna", "--trials", "4", "--set", "learning_rate=log:1e-3:1")
    rest = ("--jobs", "2", "--output", "s", "--", "--n-evaluation", "20", "--held-at", "9")
    process = start(tmp_path, "--main", MAIN, *words, *rest)
    folder = tmp_path / "s"
    wait_until(lambda: any(folder.glob("000_*/metrics.jsonl")), "the start of the first run")
    (run,) = folder.glob("000_*")
    (tmp_path / f"go-{run.name}").touch()
    wait_until((run / "exit_code").exists, "the end of the first run")
    search = ProcessSearch((read_plan(folder).mark,))
    for pid in (process.pid, *search.running()):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    wait_until(lambda: not search.running(), "the end of all processes")
    (tmp_path / "go").touch()
    code, output = sweep(tmp_path, "--resume", "s", "--jobs", "2")
    assert code == 0, output
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    assert [path.name[:4] for path in runs] == ["000_", "001_", "002_", "003_"]
    assert all(len(read_metrics(run)) == 20 for run in runs)
    assert "best: 00" in output
    starts = Counter((tmp_path / "starts.txt").read_text().split())
    assert set(starts) == {run.name for run in runs}
    source = OptunaSource(folder, read_plan(folder))
    assert {state_of(run) for run in source.known()} == {"done"}
    assert all(trial.state.is_finished() for trial in source.study.trials)
