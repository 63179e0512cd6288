"""The supervisor, in this process, with real node processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from dmiddleware.launch.child import Child
from dmiddleware.launch.hosts.local import LocalHost
from dmiddleware.launch.plan import NodeConfig, NodePlan, RunPlan
from dmiddleware.launch.supervisor import Supervisor, SupervisorOptions

PROGRAM = """
    import threading
    from pathlib import Path
    from dmiddleware import Context, Task

    end = Path(__file__).with_name("end")

    def forever():
        with Task(Context()) as task:
            print("running", flush=True)
            task.use(lambda ctx: None).run()

    def stay():
        def sleep(ctx):
            print("running", flush=True)
            threading.Event().wait()

        with Task(Context()) as task:
            task.use(sleep).run()

    def speak_once():
        print("last words", flush=True)

    def speak_on():
        while not end.exists():
            print("more words", flush=True)
"""


class SignallingDisplay:
    """Sends signals to this process while it shows a line, as Ctrl-C may come at any time."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.numbers = list(numbers)
        self.notes: list[str] = []
        self.busy = False

    def line(self, child: Child, text: str) -> None:
        self.busy = True
        while self.numbers:
            os.kill(os.getpid(), self.numbers.pop(0))
        self.busy = False

    def note(self, text: str) -> None:
        # Buffered streams refuse reentrant calls, too.
        if self.busy:
            raise RuntimeError("reentrant call")
        self.notes.append(text)

    def update(self, children: Sequence[Child]) -> None: ...


class WaitingDisplay(SignallingDisplay):
    """Blocks until the first process has ended, and only then lets the others end."""

    def __init__(self, end: Path) -> None:
        super().__init__()
        self.end = end
        self.said: list[tuple[int, str]] = []

    def line(self, child: Child, text: str) -> None:
        self.said.append((child.plan.node_id, text))

    def update(self, children: Sequence[Child]) -> None:
        if children[0].where.startswith("process "):
            wait_until_ended(int(children[0].where.split()[1]))
        if children[0].exit_code is not None:
            self.end.touch()


def wait_until_ended(pid: int) -> None:
    """Wait until a child of this process has ended, and leave its exit code to others."""
    with contextlib.suppress(ChildProcessError):  # its exit code has been read
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def supervise(folder: Path, display: SignallingDisplay, *functions: str) -> int:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    configs = [
        NodeConfig(
            run=RunPlan(nodes=(NodePlan(node_id),)),
            main=f"program.{function}",
            package=str(folder),
        )
        for node_id, function in enumerate(functions or ["forever"])
    ]
    options = SupervisorOptions()
    with LocalHost() as host:
        return Supervisor(configs, host=host, options=options, display=display).run()


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "SIGINT (Ctrl-C)"), (signal.SIGTERM, 143, "SIGTERM")],
)
def test_a_signal_during_a_print_ends_the_run_in_order(
    tmp_path: Path, number: signal.Signals, code: int, name: str
) -> None:
    display = SignallingDisplay(number)
    before = signal.getsignal(number)
    assert supervise(tmp_path, display) == code
    assert display.notes == [f"stopping the run: received {name}"]
    assert signal.getsignal(number) is before


@pytest.mark.process
def test_a_second_ctrl_c_kills_the_nodes_at_once(tmp_path: Path) -> None:
    display = SignallingDisplay(signal.SIGINT, signal.SIGINT)
    assert supervise(tmp_path, display, "stay") == 130
    assert "node 0 (all roles) did not end within 20 s; killed" in display.notes


@pytest.mark.process
def test_the_last_output_of_a_node_is_read_while_another_prints(tmp_path: Path) -> None:
    display = WaitingDisplay(tmp_path / "end")
    assert supervise(tmp_path, display, "speak_once", "speak_on") == 0
    assert (0, "last words") in display.said


@pytest.mark.process
def test_the_command_line_imports_nothing_slow() -> None:
    code = (
        "import sys, dmiddleware.launch.cli\n"
        "heavy = {'torch', 'treetensor', 'rich', 'pynng', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import dmiddleware.launch.launcher\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=80)
