"""Ctrl-C ends ``ditask`` with one line, whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.launch import cli
from dmiddleware.process.ctrl_c import exit_at_ctrl_c
from tests.waiting import wait_until

LINE = "stopped: received SIGINT (Ctrl-C)\n"


@pytest.mark.process
def test_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import pathlib, threading\n"
        "try:\n"
        "    pathlib.Path('begun').touch()\n"
        "    threading.Event().wait(60)\n"
        "except BaseException:\n"
        "    threading.Event().wait(60)\n"  # as in an import that ignores errors
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dmiddleware.launch", "train", "dqn", "CartPole-v1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        wait_until(
            lambda: (tmp_path / "begun").exists() or process.poll() is not None,
            "the import of torch",
            deadline_s=50,
        )
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, output) == (130, LINE)


def test_while_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.ditask, "callback", interrupted)
    result = CliRunner().invoke(cli.ditask, ["--main", "a.b"])
    assert (result.exit_code, result.output) == (130, LINE)


def test_afterwards_an_interrupt_is_an_error_again() -> None:
    with exit_at_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_program_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exit_at_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
