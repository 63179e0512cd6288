"""Mistakes that every start would repeat end the run at once; crashes are restarted."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest
import torch

from dmiddleware import Task
from dmiddleware.env import SyncEnvManager
from dmiddleware.errors import (
    ChainError,
    ConfigError,
    EnvCrashed,
    EnvProtocolError,
    HandshakeRefused,
    NoSubscriber,
    RunFolderError,
    SpaceError,
    WaitTimeout,
)
from dmiddleware.launch.hosts.interface import Ended, Reported
from dmiddleware.launch.mistakes import is_mistake
from dmiddleware.launch.plan import NodePlan
from dmiddleware.launch.status import NodeStatus
from dmiddleware.launch.supervisor import SupervisorOptions
from tests.dmiddleware.launch.ditask_process import start
from tests.dmiddleware.launch.scripted_host import ScriptedHost, finished, running, supervised
from tests.variants import mostly_slow


def raised_by(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def fall_back() -> None:
    try:
        _ = dict[str, int]()["fast"]
    except KeyError:
        raise RuntimeError("the slow way failed too") from None


def refuse_once() -> None:
    raise ValueError("the file is not complete yet")


def without_its_module() -> gymnasium.Env[object, object]:
    import no_such_module  # type: ignore[import-not-found]  # noqa: F401

    raise AssertionError


IN_THE_CODE: dict[str, Callable[[], BaseException]] = {
    "a missing module": lambda: ModuleNotFoundError("no module"),
    "a module that does not parse": lambda: IndentationError("unexpected indent"),
    "a wrong argument": lambda: raised_by(lambda: Task(no_such_option=1)),  # type: ignore[call-arg]
    "a name": lambda: UnboundLocalError("x"),
    "an attribute": lambda: raised_by(lambda: socket.no_such_name),  # type: ignore[attr-defined]
    "a chain": lambda: ChainError("no"),
    "a setting": lambda: ConfigError("no"),
    "a space": lambda: SpaceError("no"),
    "an env that breaks the interface": lambda: EnvProtocolError("no"),
    "a middleware": lambda: raised_by(lambda: Task().use(lambda: None)),  # type: ignore[arg-type, misc]
    "an env that does not exist": lambda: raised_by(lambda: gymnasium.make("NoSuchEnv-v9")),
    "an error because of one": lambda: chained(RuntimeError("install it"), ImportError("no")),
    "one of several": lambda: ExceptionGroup("two", [OSError("no"), TypeError("no")]),
    "an env whose module is missing": lambda: raised_by(
        lambda: SyncEnvManager([without_its_module]).launch()
    ),
    "a usage message": lambda: SystemExit(2),
    "a debugger without a terminal": lambda: EOFError("EOF when reading a line"),
}
IN_WHAT_IT_WAS_GIVEN: dict[str, BaseException] = {
    "a value": raised_by(lambda: Task().run(max_step=-1)),
    "a value for torch": raised_by(lambda: torch.optim.SGD([torch.zeros(1)], lr=-1.0)),
    "a variable": KeyError("HOME_OF_DATA"),
    "a missing file": FileNotFoundError("settings.yaml"),
    "a folder instead of a file": IsADirectoryError("data"),
    "an assertion": AssertionError("needs 2 envs"),
    "an exit with a text": SystemExit("no data"),
}
CURABLE: dict[str, BaseException] = {
    "a device": RuntimeError("CUDA error"),
    "memory": MemoryError(),
    "a disk": OSError("no space left"),
    "a connection": ConnectionResetError("reset"),
    "a peer": HandshakeRefused("no"),
    "a peer that is missing": WaitTimeout("no"),
    "a peer that has no handler": NoSubscriber("no"),
    "a folder that is in use": RunFolderError("in use"),
    "an env that dies": EnvCrashed("lost its process"),
    "an exit": SystemExit(3),
    "a value that the program refuses itself": raised_by(refuse_once),
    "a fallback that failed": raised_by(fall_back),
}


@pytest.mark.parametrize("what", IN_THE_CODE)
def test_mistakes_in_the_code_are_repeated_by_every_start(what: str) -> None:
    error = IN_THE_CODE[what]()
    assert is_mistake(error, in_step=False)
    assert is_mistake(error, in_step=True)


@pytest.mark.parametrize("what", IN_WHAT_IT_WAS_GIVEN)
def test_what_a_program_was_given_is_repeated_until_it_takes_a_step(what: str) -> None:
    error = IN_WHAT_IT_WAS_GIVEN[what]
    assert is_mistake(error, in_step=False)
    assert not is_mistake(error, in_step=True)


@pytest.mark.parametrize("what", CURABLE)
def test_a_restart_may_cure_what_depends_on_the_machine_or_on_peers(what: str) -> None:
    assert not is_mistake(CURABLE[what], in_step=False)
    assert not is_mistake(CURABLE[what], in_step=True)


def restart(*steps_of_starts: int) -> ScriptedHost:
    """Let a node fail with a mistake in each of its starts, after a number of steps."""
    script: list[tuple[float, Reported | Ended | float]] = []
    for number, step in enumerate(steps_of_starts):
        at, is_final = 20.0 * number, step == 0
        if step:
            script.append((at + 1.0, running(0)))
        status = NodeStatus(phase="failed", step=step, error="TypeError", is_final=is_final)
        script += [(at + 5.0, Reported(0, status)), (at + 5.0, Ended(0, 1))]
    script += [(200.0, event) for event in finished(0)]
    host = ScriptedHost(script)
    options = SupervisorOptions(on_failure="restart")
    supervised(host, [NodePlan(0, ("learner",))], options)
    return host


def test_a_node_that_has_worked_is_restarted_although_its_next_start_fails() -> None:
    assert len(restart(5, 0).starts) == 3
    assert len(restart(0).starts) == 1


PROGRAM = """
    import functools, sys
    from dmiddleware import Context, Task

    def wrong_argument():
        with Task(Context()) as task:
            task.use(lambda ctx: None, no_such_option=True).run()

    def missing_file():
        with open("settings.yaml") as file:
            print(file.read())

    def wrong_value():
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=-1)

    def wrong_type_in_the_first_step():
        with Task(Context()) as task:
            task.use(lambda ctx: len(ctx.total_step)).run()
"""


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "function",
    mostly_slow(
        ["wrong_argument", "missing_file", "wrong_value", "wrong_type_in_the_first_step"], keep=1
    ),
)
def test_ditask_does_not_restart_a_program_that_cannot_start(tmp_path: Path, function: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    with start(tmp_path, "--main", f"program.{function}", "--on-failure", "restart") as launcher:
        text, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "restarting" not in text
    assert "would fail in the same way if it were restarted" in text


NOTEBOOK = """
    import sys, types
    from pathlib import Path
    import cloudpickle
    from dmiddleware.errors import LaunchError
    from dmiddleware.launch import launch

    # A module that only this process has, as one that was made by hand.
    module = types.ModuleType("made_by_hand")
    exec("def main(): return 1", module.__dict__)
    module.main.__module__ = "made_by_hand"
    sys.modules["made_by_hand"] = module

    with launch(module.main, on_failure="restart", log_dir="logs") as run:
        try:
            run.result(60.0)
        except LaunchError as error:
            print("error:", error)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_function_that_nodes_cannot_import_is_not_restarted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NOTEBOOK)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "restarting" not in done.stdout
    assert "error: the run failed: " in done.stdout and "made_by_hand" in done.stdout
