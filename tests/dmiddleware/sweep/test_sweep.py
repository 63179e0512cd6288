"""ditask sweep, with real processes: what it runs, and what is left when it is killed."""

from __future__ import annotations

import io
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from dmiddleware.launch.leftovers import ProcessSearch
from dmiddleware.launch.output import SteadyStream
from dmiddleware.runs import read_metrics
from dmiddleware.sweep.new_sweep import SweepOrder, make_sweep
from dmiddleware.sweep.sweep_display import SweepDisplay
from dmiddleware.sweep.sweep_plan import SweepPlan, SweptRun, read_plan, reason_in, state_of
from dmiddleware.sweep.sweeping import GridSource, run_sweep
from tests.dmiddleware.sweep.sweep_process import FOLDER, MAIN, ROOT, start, sweep
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def runs_of(folder: Path) -> tuple[SweepPlan, dict[str, SweptRun]]:
    plan = read_plan(folder / FOLDER)
    return plan, {run.name: run for run in plan.grid_runs(folder / FOLDER)}


def states(folder: Path) -> Counter[str]:
    if not (folder / FOLDER / "sweep.json").exists():
        return Counter()
    return Counter(state_of(run) for run in runs_of(folder)[1].values())


def evaluations(run: SweptRun) -> int:
    return len(read_metrics(run.folder))


def test_a_grid_runs_and_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    varied = ("--set", "learning_rate=1e-4,3e-4", "--set", "seed=0:2")
    code, output = sweep(tmp_path, "--main", MAIN, *varied, "--jobs", "2", "--", "--fails", "1")
    assert code == 1
    assert states(tmp_path) == {"done": 2, "failed": 2}
    _, runs = runs_of(tmp_path)
    assert list(runs) == [
        "learning_rate-1e-4_seed-0",
        "learning_rate-1e-4_seed-1",
        "learning_rate-3e-4_seed-0",
        "learning_rate-3e-4_seed-1",
    ]
    assert all(evaluations(run) == 10 for run in runs.values())
    assert "learning_rate-3e-4_seed-0: done" in output
    assert "last evaluation 0.003, score 0.003" in output
    failed = [line for line in output.splitlines() if line.startswith("[sweep] failed: ")]
    assert [line.split(": ")[1] for line in failed] == [name for name in runs if "seed-1" in name]
    assert "ValueError: bad reward (swept_program.py:" in failed[0]
    assert "Traceback" in runs["learning_rate-1e-4_seed-1"].output.read_text()
    assert f"'learning_rate-1e-4={FOLDER}/learning_rate-1e-4_seed-*'" in output


def test_warnings_of_runs_are_shown_once_each(tmp_path: Path) -> None:
    program = MAIN.replace(".main", ".warned")
    code, output = sweep(tmp_path, "--main", program, "--set", "seed=3:5")
    assert code == 0
    shown = [line for line in output.splitlines() if "warn" in line.lower()]
    assert shown[0] == "[sweep] seed-3: WARNING swept: run 3 clips 7 returns"
    assert "RuntimeWarning: every run says this" in shown[1]
    assert shown[2] == "[sweep] seed-4: WARNING swept: run 4 clips 7 returns"
    assert len(shown) == 3


def test_after_kill_9_of_everything_no_run_is_lost_or_repeated(tmp_path: Path) -> None:
    words = ("--set", "seed=0:3", "--jobs", "2", "--", "--n-evaluation", "60", "--held-at", "9")
    (tmp_path / "go-seed-0").touch()
    process = start(tmp_path, "--main", MAIN, *words)
    wait_until(lambda: states(tmp_path)["done"] >= 1, "the end of a run")
    wait_until(lambda: states(tmp_path)["interrupted"] >= 1, "the start of another")
    plan, runs = runs_of(tmp_path)
    search = ProcessSearch((plan.mark,))
    for pid in (process.pid, *search.running()):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    wait_until(lambda: not search.running(), "the end of all processes")
    done = [name for name, run in runs.items() if state_of(run) == "done"]
    assert 1 <= len(done) < len(runs)
    (tmp_path / "go").touch()
    code, output = sweep(tmp_path, "--resume", FOLDER, "--jobs", "2")
    assert code == 0, output
    assert states(tmp_path) == {"done": 3}
    starts = Counter((tmp_path / "starts.txt").read_text().split())
    assert [starts[name] for name in done] == [1] * len(done)
    assert all(starts[name] <= 2 for name in runs)
    for run in runs.values():
        assert [row["env_step"] for row in read_metrics(run.folder)] == [
            100 * step for step in range(60)
        ]


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_training_behind(tmp_path: Path) -> None:
    words = ("--set", "seed=0:2", "--jobs", "2", "--", "--held-at", "1")
    process = start(tmp_path, "--main", MAIN, *words)
    wait_until(lambda: states(tmp_path)["interrupted"] == 2, "two runs")
    plan, runs = runs_of(tmp_path)
    for run in runs.values():
        wait_until((run.folder / "metrics.jsonl").exists, "metrics")
    search = ProcessSearch((plan.mark,))
    assert len(search.running()) >= 4  # a launcher and a node each
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not search.running(), "the end of all processes", deadline_s=30)
    assert states(tmp_path) == {"interrupted": 2}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_runs_and_is_the_exit_code(
    number: signal.Signals, tmp_path: Path
) -> None:
    words = ("--set", "seed=0:3", "--jobs", "2", "--", "--held-at", "1")
    process = start(tmp_path, "--main", MAIN, *words)
    wait_until(lambda: states(tmp_path)["interrupted"] == 2, "two runs")
    plan, runs = runs_of(tmp_path)
    for run in list(runs.values())[:2]:
        wait_until((run.folder / "metrics.jsonl").exists, "metrics")
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert time.monotonic() - began < 30
    assert ProcessSearch((plan.mark,)).running() == set()
    assert states(tmp_path) == {"interrupted": 2, "waiting": 1}
    assert f"to continue: ditask sweep --resume {FOLDER}" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_run_that_is_killed_has_failed_and_is_tried_again(tmp_path: Path) -> None:
    words = ("--set", "seed=0:1", "--", "--n-evaluation", "100", "--held-at", "1")
    process = start(tmp_path, "--main", MAIN, *words)
    wait_until(lambda: states(tmp_path)["interrupted"] == 1, "the run")
    plan, (run, *_) = runs_of(tmp_path)[0], [*runs_of(tmp_path)[1].values()]
    wait_until((run.folder / "metrics.jsonl").exists, "metrics")
    for pid in ProcessSearch((plan.mark,)).running():
        if "node_process" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed by SIGKILL" in output
    (tmp_path / "go").touch()
    assert sweep(tmp_path, "--resume", FOLDER)[0] == 0
    assert evaluations(run) == 100


class _Pruning(GridSource):
    """Stops each run at its third evaluation."""

    told: list[float | None]

    def progressed(self, run: SweptRun, values: list[float]) -> bool:
        return len(values) >= 3

    def ended(self, run: SweptRun, score: float | None) -> None:
        self.told = [score]


def test_a_run_that_is_pruned_stops_in_order_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    arguments = ["--held-at", "3"]
    order = SweepOrder(MAIN, ["seed=1:2"], Path(), "eval/return_mean", arguments=arguments)
    plan = make_sweep(order, tmp_path / "s")
    source = _Pruning(plan.grid_runs(tmp_path / "s"))
    out = io.StringIO()
    with SweepDisplay(SteadyStream(out)) as display:
        assert run_sweep(tmp_path / "s", plan, source, display, jobs=1) == 0
    (run,) = source.known()
    assert state_of(run) == "pruned"
    assert ProcessSearch((plan.mark,)).running() == set()
    assert 3 <= evaluations(run) < 10
    assert source.told[0] is not None
    assert "seed-1: pruned in" in out.getvalue()


def run_prepared(folder: Path, *, metric: str = "eval/return_mean", fails: int = 0) -> str:
    """Make a sweep of one run, of which the disk takes nothing more, and return what it shows.

    The run's folder has a snapshot, so it is kept as it is.
    """
    arguments = ["--n-evaluation", "3", "--fails", str(fails)]
    plan = make_sweep(SweepOrder(MAIN, ["seed=1:2"], Path(), metric, arguments=arguments), folder)
    (run,) = plan.grid_runs(folder)
    (run.folder / "snapshots").mkdir(parents=True)
    (run.folder / "snapshots" / "step_1.safetensors").touch()
    for file in (run.output, run.ended.with_name(f".{run.ended.name}.partial")):
        file.symlink_to("/dev/full")
    out = io.StringIO()
    with SweepDisplay(SteadyStream(out)) as display:
        assert run_sweep(folder, plan, GridSource([run]), display, jobs=1) == 1
    return out.getvalue()


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (1, "ValueError: bad reward (swept_program.py:"),
        pytest.param(
            0, "its end cannot be noted in", marks=pytest.mark.slow, id="a run without a failure"
        ),
    ],
)
def test_on_a_full_disk_the_sweep_still_says_why_a_run_failed(
    fails: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (line,) = [
        line
        for line in run_prepared(tmp_path / "s", fails=fails).splitlines()
        if line.startswith("[sweep] failed: seed-1: ")
    ]
    assert reason in line


def test_what_ditask_says_about_a_failure_counts_more_than_what_it_prints_last() -> None:
    output = (
        "Traceback\n[ditask] the run failed: ValueError: bad\n[ditask] could not write logs\n\n"
    )
    assert reason_in(output) == "ValueError: bad"
    assert reason_in("Traceback\n\nOSError: no room\n") == "OSError: no room"
    assert reason_in("\n") == ""


def test_a_metric_that_no_run_has_is_answered_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    order = SweepOrder(
        MAIN, ["seed=1:3"], Path(), "eval/retrun_mean", arguments=["--n-evaluation", "3"]
    )
    plan = make_sweep(order, tmp_path / "s")
    out = io.StringIO()
    with SweepDisplay(SteadyStream(out)) as display:
        run_sweep(tmp_path / "s", plan, GridSource(plan.grid_runs(tmp_path / "s")), display, jobs=2)
    assert (
        out.getvalue().count("no values of eval/retrun_mean; did you mean eval/return_mean?") == 1
    )


@pytest.mark.slow
def test_a_training_that_was_stopped_continues_from_its_snapshot(tmp_path: Path) -> None:
    main = "tests.middleware.resumable_program.main"
    folder = tmp_path / FOLDER
    varied = ("--set", "learning_rate=1e-3,2e-3", "--output", FOLDER)
    process = start(tmp_path, "--main", main, *varied, "--", "--max-env-step", "6016")
    first = folder / "learning_rate-1e-3"
    wait_until(lambda: (first / "metrics.jsonl").exists(), "metrics")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stdout is not None
    process.stdout.close()
    (snapshot,) = list((first / "snapshots").glob("step_*"))[-1:]
    code, output = sweep(tmp_path, "--resume", FOLDER)
    assert code == 0, output
    assert states(tmp_path) == {"done": 2}
    steps = [row["env_step"] for row in read_metrics(first)]
    assert steps == sorted(steps)
    assert steps[-1] >= 6016
    assert snapshot.name.startswith("step_")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_zoo_is_swept_with_its_tuned_settings(tmp_path: Path) -> None:
    words = ("train", "dqn", "CartPole-v1", "--set", "batch_size=32,64", "--output", "zoo")
    code, output = sweep(tmp_path, *words, "--", "--max-env-step", "600")
    assert code == 0, output
    text = (tmp_path / "zoo" / "batch_size-32" / "config.yaml").read_text()
    assert "batch_size: 32" in text
    assert "n_step: 3" in text  # not the algorithm's default
