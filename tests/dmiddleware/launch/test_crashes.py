"""Nodes that crash, or ask for input: the report names the line of the program."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow

PROGRAM = """
    import ctypes, json, os, pdb, signal, threading
    import gymnasium as gym
    import numpy as np
    from dmiddleware import Context, Task
    from dmiddleware.env import make_env_manager

    CALLS = {
        "SIGSEGV": lambda: ctypes.string_at(0),  # SIGSEGV
        "SIGABRT": lambda: os.abort(),  # SIGABRT
        "SIGFPE": lambda: signal.raise_signal(signal.SIGFPE),  # SIGFPE
        "SIGBUS": lambda: signal.raise_signal(signal.SIGBUS),  # SIGBUS
        "SIGILL": lambda: signal.raise_signal(signal.SIGILL),  # SIGILL
        "breakpoint": lambda: breakpoint(),  # breakpoint
        "set_trace": lambda: pdb.set_trace(),  # set_trace
        "input": lambda: input("seed? "),  # input
        "json": lambda: json.loads("{"),  # json
    }

    def run(*calls, parallel=False):
        with Task(Context()) as task:

            def step(ctx):
                # Other threads must not be taken for the one that crashes.
                threading.Thread(target=threading.Event().wait, daemon=True).start()
                calls[0]()

            task.use(task.parallel(step, lambda ctx: None) if parallel else step).run(max_step=1)

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def __init__(self, call):
            self.call = call

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            self.call()

    def run_env(name):
        envs = make_env_manager(lambda: Env(CALLS[name]), env_num=1, mode="async", max_retry=0)
        with envs:
            envs.reset()
            envs.step(np.zeros(1, np.int64))

    def function(name):
        return lambda: run(CALLS[name])

    def parallel(name):
        return lambda: run(CALLS[name], parallel=True)

    def env(name):
        return lambda: run_env(name)

    for name in CALLS:
        globals()[name + "_in_a_step"] = function(name)
        globals()[name + "_in_a_branch"] = parallel(name)
        globals()[name + "_in_an_env"] = env(name)
"""


def ditask(folder: Path, function: str) -> tuple[str, str]:
    """Return the last line of the launcher, and the log of the node."""
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    roles = ("--roles", "learner=1")
    with start(folder, "--main", f"program.{function}", *roles) as launcher:
        text, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 1, text
    (log,) = folder.glob("logs/*/node-0.log")
    return text.splitlines()[-1], log.read_text()


def line_of(name: str) -> str:
    lines = textwrap.dedent(PROGRAM).splitlines()
    (number,) = (at for at, line in enumerate(lines, 1) if line.endswith(f"# {name}"))
    return f"program.py:{number}"


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", mostly_slow(["SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "SIGILL"], keep=1)
)
def test_a_crash_is_reported_with_its_line(tmp_path: Path, name: str) -> None:
    last, log = ditask(tmp_path, f"{name}_in_a_step")
    assert last.endswith(f"node 0 (learner) was killed by {name} ({line_of(name)})")
    assert "Fatal Python error" in log and "in step" in log


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", mostly_slow(["SIGSEGV", "SIGFPE"], keep=1))
def test_the_crash_of_an_env_is_reported_with_its_stack(tmp_path: Path, name: str) -> None:
    last, log = ditask(tmp_path, f"{name}_in_an_env")
    assert f"was killed by {name}" in last
    where = line_of(name).replace("program.py:", 'program.py", line ')
    assert "Fatal Python error" in log and where in log


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "place"),
    mostly_slow(
        [
            ("breakpoint", "step"),
            ("input", "branch"),
            ("breakpoint", "branch"),
            ("set_trace", "step"),
            ("set_trace", "branch"),
            ("input", "step"),
        ],
        keep=2,
    ),
)
def test_a_node_says_that_it_has_no_terminal(tmp_path: Path, name: str, place: str) -> None:
    last, log = ditask(tmp_path, f"{name}_in_a_{place}")
    assert "nodes have no terminal" in last and "PYTHONBREAKPOINT" in last
    assert "nodes have no terminal" in log
    if place == "step":
        # pdb stops in the line that runs next.
        assert re.search(r"\(program.py:\d+\)$", last), last


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", mostly_slow(["breakpoint", "input"], keep=1))
def test_a_process_of_envs_says_that_it_has_no_terminal(tmp_path: Path, name: str) -> None:
    last, _ = ditask(tmp_path, f"{name}_in_an_env")
    assert "processes of envs have no terminal" in last and 'mode="sync"' in last


@pytest.mark.process
@pytest.mark.timeout(180)
def test_an_error_in_the_standard_library_is_that_of_its_caller(tmp_path: Path) -> None:
    last, _ = ditask(tmp_path, "json_in_a_step")
    assert re.search(rf"JSONDecodeError: .* \({line_of('json')}\)$", last), last
