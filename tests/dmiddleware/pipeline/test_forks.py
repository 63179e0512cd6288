"""Processes that are forked while a run holds signals back: signals end them as usual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_processes")]

START = """
import multiprocessing, os, signal, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from dmiddleware import Context, Task
from dmiddleware.launch import join_run, plan_run
from dmiddleware.process.signals import HeldSignals, ignore_signal

context = multiprocessing.get_context("fork")

def end_at_once(number):
    '''Send a signal to a new fork, probably before its first instruction.'''
    waits, parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(parent)
        os.read(waits, 1)
        os._exit(99)  # the parent has closed its end
    os.kill(child, number)
    os.close(parent)
    os.close(waits)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def within_task(function):
    with Task(Context()) as task:
        task.use(lambda ctx: function()).run(max_step=1)

def within_node(function):
    plan = plan_run({"learner": 1}, addresses=[f"ipc://{os.getcwd()}/node"])
    join_run(plan, 0, lambda: within_task(function))

def within_learner(function):
    with HeldSignals():
        function()

def within_learner_of_node(function):
    plan = plan_run({"learner": 1}, addresses=[f"ipc://{os.getcwd()}/node"])
    join_run(plan, 0, lambda: within_learner(function))

def within_submitit(function):
    ignore_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    within_node(function)
    signal.raise_signal(signal.SIGTERM)
"""


def run(program: str, folder: Path, *arguments: str) -> None:
    """Run a program; a child that hangs ends with it."""
    command = [sys.executable, "-c", START + program, *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("runs", ["task", "node", "learner", "learner_of_node", "submitit"])
def test_a_signal_ends_a_process_that_was_forked_just_now(runs: str, tmp_path: Path) -> None:
    program = """
def check():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) * 10:
        ends.append((end_at_once(number), -number))

    thread = threading.Thread(target=lambda: ends.append((end_at_once(15), -15)))
    thread.start()
    thread.join()

ends = []
globals()[f"within_{sys.argv[1]}"](check)
assert len(ends) == 31 and all(code == expected for code, expected in ends), ends
"""
    run(program, tmp_path, runs)


def test_a_forked_process_has_the_handlers_and_the_mask_of_its_program(tmp_path: Path) -> None:
    program = """
def mine(number, frame): pass

def look():
    return [
        *(signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)),
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ]

def check():
    before = look()
    assert before[1:3] != [signal.SIG_DFL, signal.default_int_handler]
    child = os.fork()
    if child == 0:
        os._exit(0 if look() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert look() == before

signal.signal(signal.SIGUSR1, mine)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
expected = [mine, signal.SIG_DFL, signal.default_int_handler, {signal.SIGUSR2}]
for within in (within_task, within_node, within_learner_of_node):
    before = look()
    within(check)
    assert look() == before == expected, (before, look())
"""
    run(program, tmp_path)


def test_pools_and_processes_with_fork_end_within_a_task(tmp_path: Path) -> None:
    program = """
def square(number):
    return number * number

def stop_at_once():
    process = context.Process(target=signal.pause)
    process.start()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM

def check():
    for _ in range(20):
        stop_at_once()
        with context.Pool(2) as pool:
            assert pool.map(square, range(3)) == [0, 1, 4]
        pool = context.Pool(2)
        pool.apply_async(signal.pause)
        pool.terminate()
        pool.join()
        with ProcessPoolExecutor(2, context) as executor:
            assert list(executor.map(square, range(3))) == [0, 1, 4]

within_task(check)
"""
    run(program, tmp_path)


def test_loaders_and_vector_envs_with_fork_end_within_a_task(tmp_path: Path) -> None:
    program = """
import gymnasium
import torch
from torch.utils.data import DataLoader

def check():
    for _ in range(5):
        loader = DataLoader(range(64), batch_size=4, num_workers=2, multiprocessing_context="fork")
        next(iter(loader))  # and leave the rest
        makers = [lambda: gymnasium.make("CartPole-v1")] * 2
        envs = gymnasium.vector.AsyncVectorEnv(makers, context="fork")
        envs.reset(seed=0)
        envs.close(terminate=True)

torch.set_num_threads(1)
within_task(check)
"""
    run(program, tmp_path)
