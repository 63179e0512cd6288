"""Signals to a run of one process: they stop it in order, in real subprocesses."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

PROGRAM = """
import sys, threading
from dmiddleware import Context, Task

def step(ctx):
    print("ready", flush=True)
    if sys.argv[1] == "waiting":
        ctx.task.wait_for("never", 100.0)
    if sys.argv[1] == "blocked":
        threading.Event().wait()
    yield
    print("step done", flush=True)

class Observer:
    def setup(self, task):
        task.at_step_end(lambda: self.end_step(task))

    def end_step(self, task):
        print("finish" if task.finish else "continue", task.stop_reason, flush=True)
        task.at_step_end(lambda: self.end_step(task))

    def close(self):
        print("closed", flush=True)

    def __call__(self, ctx):
        pass

with Task(Context()) as task:
    task.use(Observer()).use(step).run()
    print("never", flush=True)
"""


Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the program in a mode; none outlives its test, also if the test fails."""

    def start_one(mode: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, mode],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.enter_context(process)
        processes.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    with ExitStack() as processes:
        yield start_one


@pytest.mark.process
@pytest.mark.parametrize("mode", ["running", "waiting"])
@pytest.mark.parametrize(
    ("number", "reason", "exit_code"),
    [
        (signal.SIGINT, "received SIGINT (Ctrl-C)", -signal.SIGINT),
        (signal.SIGTERM, "received SIGTERM", 143),
    ],
)
def test_a_signal_ends_the_run_in_order(
    start: Start, number: int, reason: str, exit_code: int, mode: str
) -> None:
    process = start(mode)
    process.send_signal(number)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == exit_code, errors
    *_, last_step, closed = output.splitlines()
    assert (last_step, closed) == (f"finish {reason}", "closed")
    assert "never" not in output
    assert "send it again to stop now" in errors


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGHUP, "received SIGHUP (the terminal was closed)"),
        (signal.SIGQUIT, "received SIGQUIT"),
        (signal.SIGUSR1, "received SIGUSR1"),
        (signal.SIGUSR2, "received SIGUSR2"),
        (signal.SIGALRM, "received SIGALRM"),
        (signal.SIGXCPU, "received SIGXCPU (the limit of CPU time)"),
    ],
)
def test_every_signal_that_would_end_the_process_ends_the_run_in_order(
    start: Start, number: int, reason: str
) -> None:
    process = start("running")
    process.send_signal(number)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number, errors
    *_, last_step, closed = output.splitlines()
    assert (last_step, closed) == (f"finish {reason}", "closed")


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1])
def test_a_second_signal_interrupts_at_once(start: Start, number: int) -> None:
    process = start("blocked")
    process.send_signal(number)
    assert process.stderr is not None
    assert "send it again to stop now" in process.stderr.readline()
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -number


@pytest.mark.process
def test_a_run_restores_handlers_and_leaves_custom_ones_alone() -> None:
    program = """
import signal
from dmiddleware import Task

def mine(number, frame): pass

def look(ctx):
    seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

seen = []
signal.signal(signal.SIGTERM, mine)
with Task() as task:
    task.use(look).run(max_step=1)
look(None)
during, after = seen
assert during[1] is mine and after == (signal.default_int_handler, mine), seen
assert during[0] is not signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=DEADLINE_S)


@pytest.mark.process
def test_handlers_of_other_signals_keep_them() -> None:
    program = """
import faulthandler, os, signal
from dmiddleware import Task

def step(ctx):
    if ctx.total_step == 0:
        signal.signal(signal.SIGALRM, lambda number, frame: seen.append("alarm"))
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGHUP):
        signal.raise_signal(number)

seen = []
faulthandler.register(signal.SIGUSR2)
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append("mine"))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with Task() as task:
    task.use(step).run(max_step=2)
step(task.ctx)
assert seen == ["mine", "alarm"] * 3, seen
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, check=True, timeout=DEADLINE_S, stderr=subprocess.PIPE, text=True
    )
    assert done.stderr.count("most recent call first") == 3


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_forked_worker_and_not_the_run(number: int) -> None:
    program = """
import os, signal, sys
from dmiddleware import Task

def step(ctx):
    ready, is_ready = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(is_ready, b"x")
        signal.pause()
        os._exit(1)
    os.read(ready, 1)
    os.kill(worker, int(sys.argv[1]))
    assert os.waitpid(worker, 0)[1] == int(sys.argv[1])

with Task() as task:
    task.use(step).run(max_step=1)
    assert not task.finish
"""
    command = [sys.executable, "-c", program, str(int(number))]
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_S)
