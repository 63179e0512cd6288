"""One task at a time trains in a run folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import RunFolderError
from dmiddleware.pipeline import CurrentNode, Task, running_as
from dmiddleware.policy import DQNPolicy
from middleware import (
    CkptSaver,
    Experiment,
    LearningCurve,
    OfflineRLContext,
    OnlineRLContext,
    RunFolder,
    SnapshotSaver,
    TerminationChecker,
    final_ctx_saver,
    offline_logger,
    online_logger,
)
from tests.variants import mostly_slow

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0


def dqn() -> DQNPolicy:
    return DQNPolicy(
        {"seed": 0, "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
    )


WRITERS: dict[str, Callable[[RunFolder], Any]] = {
    "CkptSaver": lambda run: CkptSaver(dqn(), run),
    "SnapshotSaver": lambda run: SnapshotSaver(run),
    "SnapshotSaver of a path": lambda run: SnapshotSaver(run.path),
    "online_logger": lambda run: online_logger(run),
    "offline_logger": lambda run: offline_logger(run),
    "LearningCurve": lambda run: LearningCurve(run),
    "final_ctx_saver": lambda run: final_ctx_saver(run),
    "Experiment": lambda run: Experiment(run, dqn()),
}


def build(name: str, run: RunFolder) -> Task[Any]:
    ctx = OfflineRLContext() if name == "offline_logger" else OnlineRLContext()
    return Task(ctx, name=name).use(WRITERS[name](run))


def lock_of(run: RunFolder) -> Path:
    return run.path / ".lock"


@pytest.mark.parametrize("second", WRITERS)
@pytest.mark.parametrize("first", ["SnapshotSaver", "CkptSaver", "Experiment"])
def test_a_second_task_is_refused_until_the_first_is_closed(
    run: RunFolder, first: str, second: str
) -> None:
    # Another object for the same folder changes nothing.
    other = RunFolder(run.path)
    with build(first, run) as holder:
        holder.run(max_step=1)
        with pytest.raises(RunFolderError) as raised, build(second, other) as refused:
            refused.run(max_step=1)
        message = str(raised.value)
        for part in (str(run.path), socket.gethostname(), str(os.getpid()), f"task {first!r}"):
            assert part in message
        holder.run(max_step=1)
    assert not lock_of(run).exists()
    with build(second, other) as task:
        task.run(max_step=1)
    assert not lock_of(run).exists()


def test_all_middleware_of_one_task_share_the_folder(run: RunFolder) -> None:
    with Task() as task:
        for name, make in WRITERS.items():
            if name not in ("Experiment", "offline_logger", "SnapshotSaver of a path"):
                task.use(make(RunFolder(run.path)))
        task.run(max_step=2)
        assert lock_of(run).exists()
    assert not lock_of(run).exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("when", ["setup", "step", "close"])
def test_the_lock_is_released_after_an_error(
    run: RunFolder, when: str, error: type[BaseException]
) -> None:
    class Fails:
        def setup(self, task: Any) -> None:
            if when == "setup":
                raise error("no")

        def __call__(self, ctx: Any) -> None:
            assert lock_of(run).exists()
            if when == "step":
                raise error("no")

        def close(self) -> None:
            if when == "close":
                raise error("no")

    with pytest.raises(error), build("CkptSaver", run) as task:
        task.use(Fails()).run(max_step=1)
    assert not lock_of(run).exists()
    with build("CkptSaver", run) as task:
        task.run(max_step=1)


def test_the_lock_is_held_until_the_last_file_is_written(run: RunFolder) -> None:
    class Last:
        def __call__(self, ctx: Any) -> None: ...

        def setup(self, task: Any) -> None: ...

        def close(self) -> None:
            assert lock_of(run).exists()

    with Task() as task:
        task.use(Last()).use(WRITERS["SnapshotSaver"](run)).run(max_step=1)


def test_resuming_is_refused_before_anything_is_read(run: RunFolder) -> None:
    with build("SnapshotSaver", run) as holder:
        holder.use(lambda ctx: holder.stop("enough") if ctx.total_step else None).run()
        snapshots = SnapshotSaver(run)
        with Task() as task, pytest.raises(RunFolderError, match="in use"):
            snapshots.resume(task.use(snapshots))
        assert len(snapshots.paths) == 1


@contextlib.contextmanager
def held(run: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """Let another process train in the folder."""
    command = [sys.executable, "-m", "tests.middleware.holding_program", str(run.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


@pytest.mark.process
@pytest.mark.usefixtures("new_processes")  # it waits for its child without taking the exit code
def test_another_process_is_refused_and_a_killed_one_replaced_at_once(run: RunFolder) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: RunFolder.create(run.name, root=run.path.parent, resume=True),
        lambda: run.save_config({}),
        lambda: run.tb_logger,
        *(lambda name=name: build(name, run).run(max_step=1) for name in WRITERS),  # type: ignore[misc]
    ]
    with held(run) as process:
        for use in uses:
            with pytest.raises(RunFolderError) as raised:
                use()
            for part in (str(run.path), socket.gethostname(), f"process {process.pid} "):
                assert part in str(raised.value)
        assert not (run.path / "config.yaml").exists()
        assert not (run.path / "tb").exists()
        process.send_signal(signal.SIGSTOP)  # it is still there
        with pytest.raises(RunFolderError), build("CkptSaver", run) as task:
            task.run(max_step=1)
        process.send_signal(signal.SIGCONT)
        # Nobody has waited for it yet.
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with build("CkptSaver", run) as task:
            task.run(max_step=1)
    assert not lock_of(run).exists()


def forge(run: RunFolder, **changes: Any) -> None:
    """Leave a lock like that of this task, with changes."""
    with build("CkptSaver", run) as task:
        task.run(max_step=1)
        content = json.loads(lock_of(run).read_text())
    lock_of(run).write_text(json.dumps({**content, **changes}))


def age(run: RunFolder, seconds: float) -> None:
    now = lock_of(run).stat().st_mtime
    os.utime(lock_of(run), (now - seconds, now - seconds))


def test_the_lock_of_another_process_with_the_same_number_is_taken_over(run: RunFolder) -> None:
    forge(run, started="1")
    with build("CkptSaver", run) as task:
        task.run(max_step=1)


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"system": "another boot"}])
def test_the_lock_of_another_host_is_taken_over_when_its_time_is_old(
    run: RunFolder, changes: dict[str, str]
) -> None:
    forge(run, **changes)
    age(run, 3600.0)
    with build("CkptSaver", run) as task:
        task.run(max_step=1)


def test_an_old_lock_that_is_not_complete_is_taken_over(run: RunFolder) -> None:
    lock_of(run).write_text('{"host": ')
    age(run, 3600.0)
    with build("CkptSaver", run) as task:
        task.run(max_step=1)


def test_a_lock_that_another_host_renews_is_respected(run: RunFolder) -> None:
    forge(run, host="elsewhere", pid=17)
    age(run, 30.0)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.05):
            os.utime(lock_of(run))

    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(renew)
        try:
            with (
                pytest.raises(RunFolderError, match="process 17 on host elsewhere"),
                build("CkptSaver", run) as task,
            ):
                task.run(max_step=1)
        finally:
            done.set()
        renewing.result(DEADLINE_S)
    assert json.loads(lock_of(run).read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("name", ["SnapshotSaver", "CkptSaver", "online_logger", "Experiment"])
def test_a_run_whose_folder_is_deleted_ends_with_the_cause(run: RunFolder, name: str) -> None:
    def delete(ctx: Any) -> None:
        if ctx.total_step == 2:
            shutil.rmtree(run.path)
        assert ctx.total_step < 10**6

    with pytest.raises(RunFolderError, match="was deleted or moved"), build(name, run) as task:
        task.use(delete).run()
    assert not (run.path / "snapshots").exists()


def test_a_run_whose_folder_was_taken_over_ends_with_the_cause(run: RunFolder) -> None:
    def take_over(ctx: Any) -> None:
        if ctx.total_step == 2:
            content = json.loads(lock_of(run).read_text())
            lock_of(run).write_text(json.dumps({**content, "host": "elsewhere"}))

    with pytest.raises(RunFolderError, match=r"taken over by .* on host elsewhere"):
        task = build("SnapshotSaver", run)
        with task:
            task.use(take_over).run()
    assert json.loads(lock_of(run).read_text())["host"] == "elsewhere"


def test_a_lock_that_somebody_removed_is_made_again(run: RunFolder) -> None:
    snapshots = SnapshotSaver(run)
    with Task() as task:
        task.use(snapshots).run(max_step=1)
        lock_of(run).unlink()
        snapshots.save(task)
        assert lock_of(run).exists()


@pytest.mark.parametrize("place", ["snapshots", "."])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_step(
    tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "run"
    if place == ".":
        folder.write_text("a file")
    else:
        folder.mkdir()
        (folder / place).write_text("a file")
    steps: list[int] = []
    with Task() as task, pytest.raises(RunFolderError, match="no file can be written"):
        task.use(SnapshotSaver(folder)).use(lambda ctx: steps.append(1)).run(max_step=1)
    assert steps == []


READ_ONLY = """
mount -t tmpfs -o size=1m tmpfs "$1" || exit 77
mkdir "$1/old"
mount -o remount,ro "$1"
exec "$2" -m tests.middleware.holding_program "$1/$3"
"""


@pytest.mark.process
@pytest.mark.parametrize("name", mostly_slow(["new", "old"], keep=1))
def test_a_read_only_file_system_is_refused_before_the_first_step(
    tmp_path: Path, name: str
) -> None:
    command = ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", str(tmp_path), sys.executable, name]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this user may not mount file systems")
    assert "RunFolderError" in done.stderr
    assert "Read-only file system" in done.stderr
    assert "holds" not in done.stdout


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunFolderError, match=r"no file can be written to .*runs"):
        RunFolder.create("a", root=tmp_path / "runs", resume=resume)


def test_a_program_may_change_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with Task() as task:
        task.use(SnapshotSaver(RunFolder.create("a")))
        task.use(lambda ctx: monkeypatch.chdir(tmp_path / "other"))
        task.run(max_step=2)
    assert not (tmp_path / "runs" / "a" / ".lock").exists()


def test_processes_that_write_no_files_of_the_run_need_no_lock(run: RunFolder) -> None:
    with build("SnapshotSaver", run) as learner:
        learner.run(max_step=1)
        for role, rank in (("collector", 0), ("evaluator", 0), ("learner", 1)):
            node = CurrentNode(roles=(role,))
            with running_as(node), Task(rank=rank) as task:
                folder = RunFolder.create(run.name, root=run.path.parent, resume=True)
                task.use(online_logger(folder)).use(CkptSaver(dqn(), folder))
                task.use(lambda ctx: None, roles=[role]).run(max_step=1)
        assert lock_of(run).exists()


def test_a_snapshot_saved_after_the_task_was_closed_leaves_no_lock(run: RunFolder) -> None:
    snapshots = SnapshotSaver(run)
    with Task() as task:
        task.use(snapshots).run(max_step=1)
    snapshots.save(task)
    assert not lock_of(run).exists()
    with Task() as task:
        task.use(snapshots).run(max_step=1)
        assert lock_of(run).exists()
    assert not lock_of(run).exists()


def start_of(run_id: str, folder: Path, *, max_env_step: int) -> str | None:
    """Resume the run of the folder in a job with a name, until its limit; return what ended it."""
    with (
        running_as(CurrentNode(roles=("learner",), run_id=run_id)),
        Task(OnlineRLContext()) as task,
    ):
        snapshots = SnapshotSaver(RunFolder.create(folder.name, root=folder.parent, resume=True))
        task.use(step).use(TerminationChecker(max_env_step=max_env_step)).use(snapshots)
        snapshots.resume(task)
        task.run()
        return task.stop_reason


def step(ctx: OnlineRLContext) -> None:
    ctx.env_step += 1


def test_a_job_continues_the_run_of_another_one_but_not_if_it_has_finished(run: RunFolder) -> None:
    assert start_of("slurm-7.0", run.path, max_env_step=5) is not None
    assert start_of("slurm-8.0", run.path, max_env_step=9) is not None
    for other in ("slurm-9.0", "slurm-8.1", "slurm-8_1.0"):
        with pytest.raises(RunFolderError, match=rf"slurm-8\.0 has finished.*{other}"):
            start_of(other, run.path, max_env_step=9)
        assert not lock_of(run).exists()
    # Requeued, or started by hand.
    for same in ("slurm-8.0", ""):
        assert "env_step reached 9" in str(start_of(same, run.path, max_env_step=9))


def test_a_job_that_runs_is_named_to_another_one(run: RunFolder) -> None:
    node = CurrentNode(roles=("learner",), run_id="slurm-7_2.0")
    with running_as(node), build("SnapshotSaver", run) as holder:
        holder.run(max_step=1)
        with pytest.raises(RunFolderError, match=r"in use: run slurm-7_2\.0, process"):
            start_of("slurm-8.0", run.path, max_env_step=5)
