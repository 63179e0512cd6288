"""ditask for real: processes that meet, work, fail and end."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from dmiddleware.launch.cli import ditask
from tests.dmiddleware.launch.ditask_process import start

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PROGRAM = """
    from pathlib import Path
    from dmiddleware import Context, Role, Task, middleware

    def main(fail_in_step=-1):
        taken = []
        with Task(Context()) as task:

            @middleware(roles=[Role.COLLECTOR])
            def collect(ctx):
                ctx.task.emit("number", ctx.total_step, only_remote=True)

            @middleware(roles=[Role.LEARNER])
            def learn(ctx):
                if len(taken) >= 50:
                    ctx.task.stop("fifty have come")

            @middleware(roles=[Role.EVALUATOR])
            def evaluate(ctx):
                if ctx.total_step == fail_in_step:
                    raise ValueError("nothing to evaluate")

            if task.has_role(Role.LEARNER):
                task.on("number", taken.append)
            task.use(collect).use(learn).use(evaluate).run()
            print("ended:", task.stop_reason, flush=True)

    def fail():
        main(fail_in_step=3)

    def forever():
        with Task(Context()) as task:

            @middleware(roles=[*Role])
            def run(ctx):
                if ctx.total_step == 0:
                    print("running", flush=True)

            task.use(run).run()
            Path(f"ended-{task.router.node_id}").write_text(task.stop_reason)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def run(folder: Path, *options: str) -> tuple[int, str]:
    with start(folder, *options) as launcher:
        text, _ = launcher.communicate(timeout=100)
        return launcher.returncode, text


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("ditask-")]


def test_four_processes_meet_and_end_together(folder: Path) -> None:
    code, text = run(folder, "--main", "program.main", "--parallel-workers", "4")
    assert code == 0, text
    assert text.count("fifty have come") == 4
    assert "[node 2] ended: node 0: fifty have come" in text
    assert left_behind(folder) == []


def test_a_failure_is_shown_with_its_node_and_ends_the_run(folder: Path) -> None:
    roles = "learner=1,evaluator=1"
    code, text = run(folder, "--main", "program.fail", "--roles", roles)
    assert code == 1
    assert "[node 1] ValueError: nothing to evaluate" in text
    assert "node 1 (evaluator) ended with exit code 1: ValueError: nothing to evaluate" in text
    assert "ending the run: node 1 (evaluator) failed" in text


def test_a_program_that_is_not_there_is_named(folder: Path) -> None:
    code, text = run(folder, "--main", "nowhere.main")
    assert code == 1
    assert "there is no module nowhere" in text


def test_options_that_cannot_work_together_start_nothing(folder: Path) -> None:
    code, text = run(folder, "--main", "program.main", "--protocol", "ipc", "--ports", "5000")
    assert code == 1
    assert "--ports means nothing with --protocol ipc" in text


SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "a[1-2]"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--key-file", "empty"), 1, "the key in empty has 0 characters, at least 32"),
        (("--max-restarts", "-1"), 2, "-1 is not in the range x>=0"),
        (("--start-timeout", "0"), 2, "0.0 is not in the range x>0"),
        (("--startup-interval", "-1"), 2, "-1.0 is not in the range x>=0"),
        (
            ("--platform", "slurm", "--protocol", "tcp", "--platform-spec", '{"port": "5000"}'),
            1,
            "\"port\" is a number from 1 to 65535, got '5000'",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    result = CliRunner().invoke(
        ditask, ["--main", "program.main", *options], env=SLURM, catch_exceptions=False
    )
    assert (result.exit_code, message in result.output) == (code, True), result.output


def test_an_address_that_is_not_this_host_s_is_named(folder: Path) -> None:
    # 192.0.2.0/24 is kept free for examples.
    tcp = ("--protocol", "tcp", "--address", "192.0.2.1")
    code, text = run(folder, "--main", "program.main", "--parallel-workers", "2", *tcp)
    assert code == 1
    assert "nothing can listen on --address 192.0.2.1" in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_end_all_processes_end(folder: Path, number: int, code: int) -> None:
    with start(folder, "--main", "program.forever", "--parallel-workers", "2") as launcher:
        children = _await_running(launcher, 2)
        launcher.send_signal(number)
        launcher.communicate(timeout=60)
        assert launcher.returncode == code
    assert not any(child.is_running() for child in children)
    assert left_behind(folder) == []


def test_a_run_ends_in_order_though_nobody_reads_what_it_says(folder: Path) -> None:
    # As with `ditask … | tee log`, which Ctrl-C ends too.
    with start(folder, "--main", "program.forever", "--parallel-workers", "2") as launcher:
        _await_running(launcher, 2)
        assert launcher.stdout is not None
        launcher.stdout.close()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130
    told = {path.name: path.read_text() for path in folder.glob("ended-*")}
    assert told.keys() == {"ended-0", "ended-1"}
    assert all("received SIGTERM" in reason for reason in told.values())
    assert left_behind(folder) == []


def test_killed_the_launcher_takes_its_processes_with_it(folder: Path) -> None:
    with start(folder, "--main", "program.forever", "--parallel-workers", "2") as launcher:
        children = _await_running(launcher, 2)
        launcher.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []


def _await_running(launcher: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    assert launcher.stdout is not None
    lines = []
    # The launcher ends, and with it its lines, if its processes do not find each other.
    for line in launcher.stdout:
        lines.append(line)
        count -= line.endswith("running\n")
        if count == 0:
            return psutil.Process(launcher.pid).children()
    pytest.fail("".join(lines))
