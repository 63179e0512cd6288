"""Time in which nothing could run does not count: for hangs, and for other limits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from dmiddleware.launch.hosts.interface import HostEvent
from dmiddleware.launch.pauses import Pauses
from dmiddleware.launch.plan import NodePlan
from dmiddleware.launch.supervisor import SupervisorOptions
from tests.dmiddleware.launch import ditask_process
from tests.dmiddleware.launch.scripted_host import ScriptedHost, finished, running, supervised
from tests.variants import mostly_slow
from tests.waiting import wait_until


class Time:
    """A clock that a test sets; it counts as looked at every 0.2 s, unless it jumps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses = Pauses(lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            self.pauses.tick()

    def jump(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.tick()


def test_a_duration_leaves_out_each_pause_in_it() -> None:
    time = Time()
    began = time.now
    time.pass_by(10.0)
    time.jump(300.0)
    time.pass_by(4.0)
    middle = time.now
    time.jump(30.0)
    time.pass_by(6.0)
    assert time.pauses.elapsed(began) == pytest.approx(20.0)
    assert time.pauses.elapsed(middle) == pytest.approx(6.0)
    assert time.pauses.elapsed(time.now) == 0.0


def test_a_pause_is_noticed_by_the_question_itself() -> None:
    time = Time()
    began = time.now
    time.pass_by(2.0)
    time.now += 50.0
    assert time.pauses.elapsed(began) == pytest.approx(2.0)


def test_a_moment_within_a_pause_counts_from_its_end() -> None:
    time = Time()
    began = time.now
    time.jump(50.0)
    time.pass_by(3.0)
    assert time.pauses.elapsed(began + 20.0) == pytest.approx(3.0)


def test_short_delays_count() -> None:
    time = Time()
    began = time.now
    for _ in range(30):
        time.jump(0.9)
    assert time.pauses.elapsed(began) == pytest.approx(27.0)


COLLECTOR = NodePlan(0, ("collector",))


def hang_timeout(
    script: Sequence[tuple[float, HostEvent | float]], *, lives_s: float = 1000.0
) -> tuple[int, str]:
    options = SupervisorOptions(hang_timeout_s=60.0)
    host = ScriptedHost(script, lives_s=lives_s)
    code, notes = supervised(host, [COLLECTOR], options)
    return code, "\n".join(notes)


def end(second: float) -> list[tuple[float, HostEvent | float]]:
    return [(second, event) for event in finished(0)]


def reports(first: int, last: int, *, idle_s: float = 0.0) -> list[tuple[float, HostEvent | float]]:
    """Return a report for each second, as from a node that makes progress."""
    return [(float(second), running(0, idle_s=idle_s)) for second in range(first, last)]


def test_a_job_that_was_suspended_has_not_hung() -> None:
    # Its node was in a long step, and notices no pause either.
    script = [*reports(1, 10), (10.0, 500.0), *reports(512, 530, idle_s=4.0), *end(540.0)]
    code, text = hang_timeout(script)
    assert code == 0, text


def test_a_launcher_that_was_suspended_alone_does_not_blame_its_nodes() -> None:
    # Its nodes could not print meanwhile, as the launcher did not read it.
    script = [*reports(1, 10), (10.0, 500.0), (510.3, running(0, idle_s=480.0)), *end(520.0)]
    code, text = hang_timeout(script)
    assert code == 0, text


def test_a_node_that_hangs_is_noticed_despite_pauses() -> None:
    silent = [(10.0, 500.0), (520.0, 100.0)]
    code, text = hang_timeout([*reports(1, 10), *silent])
    assert code == 1 and "hung: it made no progress for 60 s" in text
    idle: list[tuple[float, HostEvent | float]] = [
        (float(second), running(0, idle_s=second - 9.0)) for second in range(10, 200)
    ]
    code, text = hang_timeout(idle)
    assert code == 1 and "hung: it made no progress for 6" in text


PROGRAM = """
    from pathlib import Path
    from dmiddleware import Context, Task

    def step(ctx):
        Path("stepping").touch()
        Path("end").read_text()  # a pipe: the step ends when the test says so
        ctx.task.stop("all done")

    def main():
        with Task(Context()) as task:
            task.use(step).run()
"""


@contextlib.contextmanager
def suspended(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", mostly_slow(["job", "launcher", "node"], keep=1))
def test_a_run_survives_that_it_is_suspended(tmp_path: Path, who: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    os.mkfifo(tmp_path / "end")
    # A node that does not come back has failed, so its pause must be shorter than the limit.
    pause_s, limit_s, more_s = (4.0, 7.0, 4.0) if who == "node" else (4.0, 3.0, 1.0)
    options = ("--main", "program.main", "--hang-timeout", f"{limit_s}")
    with ditask_process.start(tmp_path, *options) as launcher:
        wait_until((tmp_path / "stepping").exists, "the node", deadline_s=60)
        itself, nodes = psutil.Process(launcher.pid), ditask_process.node_processes(launcher)
        processes = {"job": [*nodes, itself], "launcher": [itself], "node": nodes}[who]
        with suspended(processes), pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(pause_s)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(more_s)
        (tmp_path / "end").write_text("")
        text, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, text
    assert "--hang-timeout" not in text
