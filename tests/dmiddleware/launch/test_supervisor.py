"""The supervisor, in this process, with one real process to watch over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from dmiddleware.launch.request import ProcessPlan
from dmiddleware.launch.status import WorkerConfig
from dmiddleware.launch.supervisor import Child, Supervisor, SupervisorOptions

PROGRAM = """
    from dmiddleware import Context, Task

    def forever():
        with Task(Context()) as task:
            print("running", flush=True)
            task.use(lambda ctx: None).run()
"""


class SignallingScreen:
    """Gets signals just while it shows a line, as a person's Ctrl-C may come at any time."""

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
        # As a buffered stream does.
        if self.busy:
            raise RuntimeError("reentrant call")
        self.notes.append(text)

    def update(self, children: Sequence[Child]) -> None: ...


def supervise(folder: Path, screen: SignallingScreen) -> int:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    config = WorkerConfig(
        main="program.forever",
        package=str(folder),
        run_id="run",
        node_id=0,
        roles=[],
        labels=[],
        listen="",
        dial=[],
        n_peers=0,
        start_timeout_s=10.0,
        key_hex="",
        tls=None,
        status_fd=-1,
    )
    plan = ProcessPlan(node_id=0, roles=(), labels=(), listen="", dial=(), n_peers=0)
    return Supervisor([config], [plan], options=SupervisorOptions(), screen=screen).run()


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_comes_while_a_line_is_shown_ends_the_run_in_order(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    screen = SignallingScreen(number)
    before = signal.getsignal(number)
    assert supervise(tmp_path, screen) == code
    assert screen.notes == [f"ending the run: received {number.name}"]
    assert signal.getsignal(number) is before


@pytest.mark.process
def test_asked_twice_by_ctrl_c_nobody_is_waited_for(tmp_path: Path) -> None:
    screen = SignallingScreen(signal.SIGINT, signal.SIGINT)
    assert supervise(tmp_path, screen) == 130
    assert "node 0 (all roles) did not end within 20 s; killed" in screen.notes


@pytest.mark.process
def test_the_launcher_itself_needs_nothing_that_takes_long_to_load() -> None:
    code = (
        "import sys, dmiddleware.launch.cli\n"
        "heavy = {'torch', 'treetensor', 'rich', 'pynng', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import dmiddleware.launch.launch\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
