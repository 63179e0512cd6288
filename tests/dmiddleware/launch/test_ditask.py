"""ditask with real processes that connect, work, fail and stop."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from dmiddleware.launch.cli import ditask
from tests.dmiddleware.launch.ditask_process import node_processes, start, write_key
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PROGRAM = """
    import subprocess
    from pathlib import Path
    from dmiddleware import Context, Task, middleware
    from dmiddleware.pipeline import Vocabulary

    def main(fail_in_step=-1, context=Context):
        taken = []
        enough = 50 if fail_in_step < 0 else 10**9
        with Task(context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                ctx.task.emit("number", ctx.total_step, only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                if len(taken) >= enough:
                    ctx.task.stop("got fifty numbers")

            @middleware(roles=["evaluator"])
            def evaluate(ctx):
                if ctx.total_step == fail_in_step:
                    raise ValueError("nothing to evaluate")

            if task.has_role("learner"):
                task.on("number", taken.append)
            task.use(collect).use(learn).use(evaluate).run()
            print("ended:", task.stop_reason, flush=True)

    class Led(Context):
        vocabulary = Vocabulary(roles=("learner", "collector", "evaluator"), lead_role="learner")

    def led():
        main(context=Led)

    def fail():
        main(fail_in_step=3)

    def forever():
        with Task(Context()) as task:

            @middleware(roles=["learner", "collector", "evaluator"])
            def run(ctx):
                if ctx.total_step == 0:
                    print("running", flush=True)

            task.use(run).run()
            Path(f"ended-{task.router.node_id}").write_text(task.stop_reason)

    def with_a_reader():
        reader = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL)
        forever()

    def without_roles():
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=3)
            print("steps:", task.ctx.total_step + 1, flush=True)
"""

# Not in the program above: importing torch takes longer than most of these runs.
PROGRAM_WITH_TORCH = """
    import torch
    from dmiddleware import Context, Task

    def threads():
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=1)
            print("threads:", torch.get_num_threads(), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def run(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    with start(folder, *options, env=env) as launcher:
        text, _ = launcher.communicate(timeout=100)
        return launcher.returncode, text


def stop_reasons(folder: Path) -> list[str]:
    """Return the stop reasons that the nodes of ``program.forever`` wrote."""
    return [path.read_text() for path in folder.glob("ended-*")]


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("ditask-")]


@pytest.mark.slow
def test_four_processes_connect_and_end_together(folder: Path) -> None:
    code, text = run(folder, "--main", "program.main", "--parallel-workers", "4")
    assert code == 0, text
    assert text.count("got fifty numbers") == 4
    assert "[node 2] ended: node 0: got fifty numbers" in text
    assert left_behind(folder) == []


@pytest.mark.parametrize(
    ("options",),
    mostly_slow(
        [
            (("--roles", "collector=2,evaluator=1,learner=1"),),
            (("--parallel-workers", "3", "--topology", "mesh"),),
            (("--parallel-workers", "3", "--protocol", "tcp", "--address", "::1"),),
        ],
        keep=[2],
    ),
    ids=["learner last", "mesh", "IPv6"],
)
def test_processes_connect_whatever_the_order_the_topology_and_the_address(
    folder: Path, options: tuple[str, ...]
) -> None:
    code, text = run(folder, "--main", "program.main", *options)
    assert code == 0, text
    assert text.count("got fifty numbers") >= 3


def test_a_failure_is_shown_with_its_node_and_ends_the_run(folder: Path) -> None:
    roles = "learner=1,collector=1,evaluator=1"
    code, text = run(folder, "--main", "program.fail", "--roles", roles)
    assert code == 1
    assert "[node 2] ValueError: nothing to evaluate" in text
    failure = "node 2 (evaluator) failed: ValueError: nothing to evaluate"
    assert f"stopping the run: {failure}" in text
    assert f"[node 0] ended: {failure}" in text
    assert "--on-failure abort (the default) ends the run" in text
    assert text.count("Traceback") == 1
    assert "node_process.py" not in text and "main_function.py" not in text


def test_a_program_without_roles_runs_its_whole_chain_in_every_node(folder: Path) -> None:
    code, text = run(folder, "--main", "program.without_roles", "--parallel-workers", "3")
    assert code == 0, text
    assert text.count("steps: 3") == 3


@pytest.mark.parametrize(
    "variables",
    mostly_slow([{}, {"OMP_NUM_THREADS": "2"}], keep=1),
    ids=["default", "chosen"],
)
def test_each_node_has_one_thread_unless_more_are_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (folder / "with_torch.py").write_text(textwrap.dedent(PROGRAM_WITH_TORCH))
    options = ("--main", "with_torch.threads", "--parallel-workers", "2")
    code, text = run(folder, *options, env=variables)
    assert code == 0, text
    assert text.count(f"threads: {variables.get('OMP_NUM_THREADS', 1)}") == 2


def test_two_learners_of_a_program_without_data_parallel_are_refused(folder: Path) -> None:
    code, text = run(folder, "--main", "program.main", "--roles", "learner=2,collector=2")
    assert code == 1
    assert "2 processes with the role learner" in text
    assert "data_parallel()" in text and "learner=1" in text
    assert "step 1" not in text and not (folder / "runs").exists()


def test_a_run_without_the_learner_that_its_chain_needs_is_refused(folder: Path) -> None:
    code, text = run(folder, "--main", "program.led", "--roles", "collector=2")
    assert code == 1
    assert "the run has no learner" in text and "--roles learner=1" in text


def test_a_run_without_a_role_that_its_chain_needs_is_refused(folder: Path) -> None:
    code, text = run(folder, "--main", "program.main", "--roles", "collector=2")
    assert code == 1
    assert "is for the role 'learner', but no process of the run has it" in text
    assert "--roles collector=1,evaluator=1" in text or "--roles collector=1,learner=1" in text


def test_a_node_that_is_stopped_by_a_signal_stops_the_run_with_that_reason(folder: Path) -> None:
    with start(folder, "--main", "program.forever", "--parallel-workers", "2") as launcher:
        children = _await_running(launcher, 2)
        children[0].terminate()
        text, _ = launcher.communicate(timeout=60)
        assert launcher.returncode == 143, text
    reasons = set(stop_reasons(folder))
    assert "received SIGTERM" in reasons and len(reasons) == 2
    assert all(reason.endswith("received SIGTERM") for reason in reasons)


@pytest.mark.parametrize("policy", mostly_slow(["restart", "abort", "continue"], keep=1))
@pytest.mark.parametrize("first", mostly_slow(["launcher", "nodes"], keep=1))
def test_a_signal_to_all_processes_stops_the_run(folder: Path, first: str, policy: str) -> None:
    # As batch systems send it.
    options = ("--parallel-workers", "2", "--on-failure", policy)
    with start(folder, "--main", "program.forever", *options) as launcher:
        processes = [psutil.Process(launcher.pid), *_await_running(launcher, 2)]
        for process in processes if first == "launcher" else reversed(processes):
            process.terminate()
        text, _ = launcher.communicate(timeout=60)
        assert launcher.returncode == 143, text
    assert "[ditask] the run was stopped: received SIGTERM" in text
    assert "restarting" not in text
    assert len(stop_reasons(folder)) == 2


def test_a_missing_program_is_named(folder: Path) -> None:
    code, text = run(folder, "--main", "nowhere.main")
    assert code == 1
    assert "found no module nowhere" in text
    assert "Traceback" not in text


def test_contradictory_options_start_nothing(folder: Path) -> None:
    code, text = run(folder, "--main", "program.main", "--protocol", "ipc", "--ports", "5000")
    assert code == 1
    assert "--ports has no effect with --protocol ipc" in text


SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "a[1-2]"}
SLURM_TCP = ("--platform", "slurm", "--protocol", "tcp")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--key-file", "empty"), 1, "the key in --key-file empty has 0 characters"),
        (("--key-file", "shared"), 1, "chmod 600 shared"),
        (("--max-restarts", "-1"), 2, "-1 is not in the range x>=0"),
        (("--start-timeout", "0"), 2, "0.0 is not in the range x>0"),
        (("--startup-interval", "-1"), 2, "-1.0 is not in the range x>=0"),
        (
            (*SLURM_TCP, "--platform-spec", '{"port": "5000"}'),
            1,
            "\"port\" must be a number from 1 to 65535, got '5000'",
        ),
        (("--protocol", "tcp", "--bind", "0.0.0.0"), 1, "--bind 0.0.0.0 listens on all addresses"),
        ((*SLURM_TCP, "--address", "10.0.0.1"), 1, "--address 10.0.0.1 has no effect"),
        ((*SLURM_TCP, "--topology", "alone"), 1, "use star"),
        (
            (*SLURM_TCP, "--ports", "26000", "--platform-spec", '{"port": 27000}'),
            1,
            '--ports 26000 and the "port" 27000 in --platform-spec differ',
        ),
    ],
)
def test_invalid_values_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("def main(): pass")
    write_key(Path("empty"), "")
    Path("shared").write_text("0123456789" * 4)
    Path("shared").chmod(0o644)
    result = CliRunner().invoke(
        ditask, ["--main", "program.main", *options], env=SLURM, catch_exceptions=False
    )
    assert (result.exit_code, message in result.output) == (code, True), result.output


def test_an_address_of_another_host_is_named(folder: Path) -> None:
    # 192.0.2.0/24 is reserved for documentation.
    tcp = ("--protocol", "tcp", "--address", "192.0.2.1")
    code, text = run(folder, "--main", "program.main", "--parallel-workers", "2", *tcp)
    assert code == 1
    assert "cannot listen on 192.0.2.1" in text and "--bind" in text


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    mostly_slow(
        [
            (signal.SIGINT, 130, "received SIGINT (Ctrl-C)"),
            (signal.SIGTERM, 143, "received SIGTERM"),
            (signal.SIGUSR1, 138, "received SIGUSR1"),
            (signal.SIGUSR2, 140, "received SIGUSR2"),
            (signal.SIGQUIT, 131, "received SIGQUIT"),
            (signal.SIGXCPU, 152, "received SIGXCPU (the limit of CPU time)"),
            (signal.SIGALRM, 142, "received SIGALRM"),
            (signal.SIGHUP, 129, "received SIGHUP (the terminal was closed)"),
        ],
        keep=1,
    ),
)
def test_a_signal_to_the_launcher_stops_all_nodes_which_report_it(
    folder: Path, number: int, code: int, reason: str
) -> None:
    with start(folder, "--main", "program.forever", "--parallel-workers", "2") as launcher:
        children = _await_running(launcher, 2)
        launcher.send_signal(number)
        launcher.communicate(timeout=60)
        assert launcher.returncode == code
    assert set(stop_reasons(folder)) <= {reason, f"node 0: {reason}", f"node 1: {reason}"}
    assert len(stop_reasons(folder)) == 2
    assert not any(child.is_running() for child in children)
    assert left_behind(folder) == []


def test_a_child_that_reads_standard_input_does_not_hide_the_reason(folder: Path) -> None:
    with start(folder, "--main", "program.with_a_reader") as launcher:
        _await_running(launcher, 1)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=60)
        assert launcher.returncode == 130
    assert stop_reasons(folder) == ["received SIGINT (Ctrl-C)"]


def test_a_run_stops_in_order_when_its_output_is_closed(folder: Path) -> None:
    # As in `ditask … | tee log`, where Ctrl-C ends tee as well.
    with start(folder, "--main", "program.forever", "--parallel-workers", "2") as launcher:
        _await_running(launcher, 2)
        assert launcher.stdout is not None
        launcher.stdout.close()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130
    assert len(stop_reasons(folder)) == 2
    assert all("received SIGINT (Ctrl-C)" in reason for reason in stop_reasons(folder))
    assert left_behind(folder) == []


def test_the_nodes_of_a_killed_launcher_stop_and_report_why(folder: Path) -> None:
    with start(folder, "--main", "program.forever", "--parallel-workers", "2") as launcher:
        children = _await_running(launcher, 2)
        launcher.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
    assert len(stop_reasons(folder)) == 2
    assert all("the launcher has died" in reason for reason in stop_reasons(folder))


def test_a_failing_test_kills_its_launcher_instead_of_waiting_for_it(folder: Path) -> None:
    with (
        pytest.raises(AssertionError, match="a failing check"),
        start(folder, "--main", "program.forever", "--parallel-workers", "1") as launcher,
    ):
        raise AssertionError("a failing check")
    assert launcher.returncode == -signal.SIGKILL


def _await_running(launcher: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    assert launcher.stdout is not None
    lines = []
    # If the nodes do not find each other, the launcher ends and its output is closed.
    for line in launcher.stdout:
        lines.append(line)
        count -= line.endswith("running\n")
        if count == 0:
            return node_processes(launcher)
    pytest.fail("".join(lines))
