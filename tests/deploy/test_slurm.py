"""deploy/slurm/train.sbatch, with Slurm's commands replaced by scripts for two hosts.

These scripts do what Slurm documents: srun starts one task per host and kills the tasks when it
receives SIGTERM itself; scancel --signal sends a signal to all processes of the tasks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deploy import counting_program
from tests.variants import mostly_slow
from tests.waiting import DEADLINE_S, read, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
FAKES = Path(__file__).parent / "fake_slurm"
JOB_ID = "4711"


class Job:
    """A Slurm job on two hosts, which are both this machine.

    Args:
        folder: the directory of the submission, which all starts of the job share.
        main: the program to run.
    """

    def __init__(self, folder: Path, main: str = "program.main") -> None:
        self.folder = folder
        self.output = folder / f"train-{JOB_ID}.out"
        self.home = folder / "home"
        self.home.mkdir()
        self.key = self.home / ".dmiddleware" / f"slurm-{JOB_ID}.key"
        self.set_state("RUNNING")
        (folder / "calls").touch()
        shutil.copy(counting_program.__file__, folder / "program.py")
        with socket.create_server(("127.0.0.2", 0)) as server:
            port = server.getsockname()[1]
        spec = {"roles": ["learner=1,evaluator=1", "collector=1"], "port": port}
        self._arguments = ["--main", main, "--platform-spec", json.dumps(spec)]
        self._shells: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Start the script as Slurm does, appending to the output of the starts before."""
        path = os.pathsep.join([str(FAKES), str(Path(sys.executable).parent), os.environ["PATH"]])
        with self.output.open("ab") as output:
            shell = subprocess.Popen(
                ["bash", SCRIPT, *self._arguments],
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {
                    "PATH": path,
                    "PYTHONPATH": str(ROOT),
                    "HOME": str(self.home),
                    "TMPDIR": str(self.folder),
                    "FAKE_SLURM": str(self.folder),
                    "SLURM_JOB_ID": JOB_ID,
                    "SLURM_JOB_NODELIST": "127.0.0.[2-3]",
                    "SLURM_NTASKS": "2",
                    "SLURM_CPUS_PER_TASK": "1",
                    "SLURM_RESTART_COUNT": str(len(self._shells)),
                },
            )
        self._shells.append(shell)
        return shell

    def kill(self) -> None:
        """Kill what a test that failed has left running."""
        for shell in self._shells:
            if shell.poll() is None:
                for process in psutil.Process(shell.pid).children(recursive=True):
                    process.kill()
                shell.kill()
                shell.wait(DEADLINE_S)

    def set_state(self, state: str) -> None:
        """Set the state of the job, as squeue prints it."""
        (self.folder / "state").write_text(f"{state}\n")

    def calls(self, command: str) -> list[str]:
        """Return how a command of Slurm was called."""
        lines = read(self.folder / "calls").splitlines()
        return [line for line in lines if line.startswith(f"{command} ")]

    def text(self) -> str:
        """Return what the job has printed."""
        return read(self.output)

    def wait_for_step(self, step: int) -> None:
        """Wait until the learner has taken a step."""
        wait_until(
            lambda: f"step {step}\n" in self.text(), lambda: f"step {step} of\n{self.text()}"
        )

    def snapshots(self) -> list[Path]:
        return list((self.folder / "runs" / "sum" / "snapshots").glob("step_*.safetensors"))


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(tmp_path, getattr(request, "param", "program.main"))
    yield job
    job.kill()


def shellcheck() -> str:
    found = shutil.which("shellcheck")
    if found is None and "CI" not in os.environ:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    assert found is not None, "shellcheck must be installed where CI runs"
    return found


@pytest.mark.parametrize("script", [SCRIPT, *sorted(FAKES.iterdir())], ids=lambda path: path.name)
def test_scripts_are_valid(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=DEADLINE_S)
    subprocess.run([shellcheck(), "--shell=bash", script], check=True, timeout=DEADLINE_S)


def test_the_processes_have_less_time_than_slurm_gives_the_job() -> None:
    text = SCRIPT.read_text()
    directives = dict(
        line.partition("=")[::2] for line in re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    )
    assert {"--requeue", "--open-mode", "--nodes", "--time"} <= directives.keys()
    assert (directives["--ntasks-per-node"], directives["--open-mode"]) == ("1", "append")
    who, notice_s = directives["--signal"].split("@")
    assert who == "B:TERM"
    (kill_after_s,) = re.findall(r"--kill-after (\d+)", text)
    assert int(kill_after_s) + 10 <= int(notice_s)


@pytest.mark.parametrize("receiver", mostly_slow(["the processes", "the shell"], keep=1))
def test_a_preempted_job_is_requeued_and_continues_exactly(job: Job, receiver: str) -> None:
    (job.folder / "hold").touch()
    first = job.start()
    job.wait_for_step(20)
    assert stat.S_IMODE(job.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(job.key.parent.stat().st_mode) == 0o700
    key = job.key.read_text().strip()
    started = psutil.Process(first.pid).children(recursive=True)
    assert len(started) >= 6  # srun, two ditask and three nodes
    assert not any(key in " ".join(process.cmdline()) for process in started)
    if receiver == "the shell":  # before the time limit, because of B:
        first.send_signal(signal.SIGTERM)
    else:  # at a preemption
        subprocess.run(
            [FAKES / "scancel", "--signal=TERM", JOB_ID],
            env={**os.environ, "FAKE_SLURM": str(job.folder)},
            check=True,
            timeout=DEADLINE_S,
        )
    assert first.wait(DEADLINE_S) == 143, job.text()
    assert job.calls("scancel") == [f"scancel --signal=TERM {JOB_ID}"]
    assert job.calls("scontrol") == [f"scontrol requeue {JOB_ID}"]
    assert job.snapshots(), job.text()
    assert counting_program.result(1) not in job.text()

    assert job.start().wait(DEADLINE_S) == 0, job.text()
    assert counting_program.result(2) in job.text()
    assert job.calls("scontrol") == [f"scontrol requeue {JOB_ID}"]
    assert not job.key.exists()
    assert [path.name for path in (job.folder / "runs").iterdir()] == ["sum"]


@pytest.mark.slow
def test_a_canceled_job_is_not_requeued(job: Job) -> None:
    (job.folder / "hold").touch()
    first = job.start()
    job.wait_for_step(20)
    job.set_state("COMPLETING")
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE_S) == 143, job.text()
    assert job.calls("squeue") and not job.calls("scontrol")
    assert not job.key.exists()


@pytest.mark.parametrize("job", ["program.fail"], indirect=True)
def test_a_failed_job_has_the_exit_code_of_ditask_and_is_not_requeued(job: Job) -> None:
    assert job.start().wait(DEADLINE_S) == 1, job.text()
    assert "ValueError: bad reward" in job.text()
    assert not job.calls("scontrol")
    assert not job.key.exists()


@pytest.mark.slow
@pytest.mark.parametrize("job", ["program.main_without_snapshots"], indirect=True)
def test_a_requeued_job_that_resumes_nothing_gets_a_new_run_folder(job: Job) -> None:
    for _ in range(2):
        assert job.start().wait(DEADLINE_S) == 0, job.text()
    assert {path.name for path in (job.folder / "runs").iterdir()} == {"sum", "sum-2"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", ["examples.cartpole_preemptible.main"], indirect=True)
def test_a_policy_that_is_preempted_while_it_learns_is_trained_to_the_end(job: Job) -> None:
    run = job.folder / "runs" / "cartpole_preemptible"
    first = job.start()
    wait_until(
        lambda: any((run / "snapshots").glob("step_*.safetensors")),
        lambda: f"a snapshot of\n{job.text()}",
    )
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE_S) == 143, job.text()
    assert json.loads((run / "result.json").read_text())["mean_return"] is None
    assert job.start().wait(600) == 0, job.text()
    (step, update) = re.findall(r"resumed at step (\d+), update (\d+)", read(run / "log.txt"))[0]
    assert int(step) > 0 and int(update) >= 2000
    result = json.loads((run / "result.json").read_text())
    assert result["mean_return"] >= 475.0
    assert result["train_iter"] > int(update)
