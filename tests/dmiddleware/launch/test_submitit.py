"""Runs whose nodes are the tasks of a job of submitit, with its executor for this host."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import stat
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deploy import counting_program
from tests.waiting import read, wait_until

if "CI" not in os.environ and importlib.util.find_spec("submitit") is None:
    pytest.skip("the extra submitit is not installed", allow_module_level=True)

import submitit

from dmiddleware.launch import SubmititRun

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROLES = {"learner": 1, "evaluator": 1, "collector": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(counting_program.__file__, tmp_path / "program.py")
    # The tasks start in this directory.
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(folder: Path, run: Callable[[], Any], n_tasks: int = 3) -> submitit.Job[Any]:
    executor = submitit.LocalExecutor(folder / "jobs")
    executor.update_parameters(tasks_per_node=n_tasks, timeout_min=4)
    return executor.submit(run)


def make_run(folder: Path, program: str = "program.main") -> SubmititRun:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return SubmititRun(
        program, ROLES, key_file=folder / "keys" / "key", package=str(folder), port=port
    )


def output(job: submitit.Job[Any]) -> str:
    return read(job.paths.stdout) + read(job.paths.stderr)


@pytest.mark.slow
def test_each_task_is_one_node_of_the_run(folder: Path) -> None:
    job = submit(folder, make_run(folder))
    wait_until(job.done, lambda: f"the end of\n{output(job)}")
    assert job.results() == [None] * 3
    assert counting_program.result(1) in output(job)
    assert stat.S_IMODE((folder / "keys" / "key").stat().st_mode) == 0o600


@pytest.mark.slow  # Slurm itself requeues in tests/deploy/test_slurm.py
def test_a_preempted_job_is_requeued_and_continues_exactly(folder: Path) -> None:
    (folder / "hold").touch()
    job = submit(folder, make_run(folder))
    wait_until(lambda: "step 20\n" in output(job), lambda: f"step 20 of\n{output(job)}")
    # What Slurm sends. The executor for this host does not pass signals on.
    tasks = psutil.Process(int(job.job_id)).children()
    assert len(tasks) == 3
    for number in (signal.SIGTERM, signal.SIGUSR2):
        for task in tasks:
            task.send_signal(number)
    wait_until(job.done, lambda: f"the end of\n{output(job)}")
    assert job.results() == [None] * 3
    assert counting_program.result(2) in output(job)
    assert list(folder.glob("runs/sum/snapshots/step_*.safetensors"))


def test_an_error_of_the_program_is_an_error_of_the_job(folder: Path) -> None:
    job = submit(folder, make_run(folder, "program.fail"))
    wait_until(job.done, lambda: f"the end of\n{output(job)}")
    with pytest.raises(submitit.core.utils.FailedJobError, match="bad reward"):
        job.result()


def test_a_job_with_another_number_of_tasks_is_refused(folder: Path) -> None:
    job = submit(folder, make_run(folder), n_tasks=2)
    wait_until(job.done, lambda: f"the end of\n{output(job)}")
    with pytest.raises(submitit.core.utils.FailedJobError, match="3 nodes, but the job 2 tasks"):
        job.results()


TWO_JOBS = """
    from pathlib import Path

    from submitit import JobEnvironment

    from dmiddleware import Context, Task, middleware

    def main():
        job_id = JobEnvironment().job_id
        with Task(Context()) as task:
            received = set()
            task.on("hello", received.add)

            @middleware(roles=["learner"])
            def learn(ctx):
                Path(f"learns-{job_id}").touch()
                task.wait_for("hello", 60.0)
                if len(list(Path().glob("learns-*"))) == 2:
                    task.stop("both jobs run")

            @middleware(roles=["collector"])
            def collect(ctx):
                task.emit("hello", job_id, only_remote=True)

            task.use(learn).use(collect).run()
            return sorted(received)
"""


def test_two_jobs_on_one_host_with_one_key_do_not_mix(folder: Path) -> None:
    (folder / "together.py").write_text(textwrap.dedent(TWO_JOBS))
    roles = {"learner": 1, "collector": 1}
    run = SubmititRun("together.main", roles, key_file=folder / "key", package=str(folder))
    jobs = [submit(folder, run, n_tasks=2) for _ in range(2)]
    for job in jobs:
        wait_until(job.done, lambda job=job: f"the end of\n{output(job)}")  # type: ignore[misc]
        assert job.results() == [[job.job_id], []]
