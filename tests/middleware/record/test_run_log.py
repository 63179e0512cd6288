"""Warnings of a run: in its text log, and where Python prints them."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from middleware.record.run_log import RunLog

LOGGER = logging.getLogger("a_library.part")


@contextlib.contextmanager
def no_logging_set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away the handlers of pytest, and later those that the block has added."""
    with monkeypatch.context() as changed:
        for logger in (logging.getLogger(), logging.getLogger("a_library"), LOGGER):
            changed.setattr(logger, "handlers", [])
        yield


def test_a_warning_is_in_the_file_and_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_logging_set_up(monkeypatch), RunLog(tmp_path / "log.txt"):
        LOGGER.info("quiet")
        LOGGER.warning("clips %d%% of the returns", 7)
        LOGGER.error("lost [bold]")
    text = (tmp_path / "log.txt").read_text()
    assert "INFO a_library.part: quiet\n" in text
    assert "WARNING a_library.part: clips 7% of the returns\n" in text
    assert capsys.readouterr().err == "clips 7% of the returns\nlost [bold]\n"


def test_two_runs_at_a_time_print_a_warning_once_and_both_write_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_logging_set_up(monkeypatch), RunLog(tmp_path / "a.txt"), RunLog(tmp_path / "b.txt"):
        LOGGER.warning("once")
    assert capsys.readouterr().err == "once\n"
    assert all(path.read_text().count("once") == 1 for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "a_library", "a_library.part"])
def test_logging_that_a_program_has_set_up_prints_it_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_logging_set_up(monkeypatch):
        logging.getLogger(name or None).addHandler(logging.StreamHandler(sys.stdout))
        with RunLog(tmp_path / "log.txt"):
            LOGGER.warning("once")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("once\n", "")


def test_what_warnings_warn_shows_is_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = warnings.showwarning
        with RunLog(path):
            warnings.warn("divide by zero", RuntimeWarning, stacklevel=1)
            with warnings.catch_warnings(record=True) as recorded:
                warnings.warn("expected", stacklevel=1)
        assert warnings.showwarning is before
        warnings.warn("later", stacklevel=1)
    assert [str(item.message) for item in shown] == ["divide by zero", "later"]
    assert [str(item.message) for item in recorded] == ["expected"]
    (line,) = path.read_text().splitlines()
    assert re.search(r"WARNING py\.warnings: .*test_run_log\.py:\d+: RuntimeWarning: divide", line)


def test_a_warning_that_logging_captures_is_written_and_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(), no_logging_set_up(monkeypatch):
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        try:
            with RunLog(tmp_path / "log.txt"):
                logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
                warnings.warn("captured", stacklevel=1)
        finally:
            logging.captureWarnings(False)
    assert (tmp_path / "log.txt").read_text().count("UserWarning: captured") == 1
    assert capsys.readouterr().out.count("UserWarning: captured") == 1


PROGRAM = """
    import logging, sys, warnings
    from dmiddleware import Task
    from dmiddleware.env import make_env_manager
    from dmiddleware.policy import PPOPolicy
    from middleware import Experiment, GAEEstimator, OnPolicyLearner, StepCollector

    def warn(ctx):
        if ctx.total_step == 1:
            logging.getLogger("a_library").warning("LOGGED")
            warnings.warn("WARNED")

    def main():
        envs = make_env_manager("CartPole-v1", env_num=2)
        policy = PPOPolicy.for_env(envs, batch_size=32)
        with Task(seed=0) as task:
            task.use(StepCollector(policy, envs, n_sample=64)).use(GAEEstimator(policy))
            task.use(OnPolicyLearner(policy)).use(warn).use(Experiment("warned", policy))
            task.run(max_step=3)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.process
def test_above_the_progress_bar_of_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "warned.py").write_text(textwrap.dedent(PROGRAM))
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "warned"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ):
        os.close(end)
        shown = "".join(_lines_of(terminal))
    lines = [line for line in _screen(shown) if line.strip()]
    (logged,) = [at for at, line in enumerate(lines) if line.startswith("LOGGED")]
    (warned,) = [at for at, line in enumerate(lines) if "UserWarning: WARNED" in line]
    bars = [at for at, line in enumerate(lines) if "━" in line]
    assert logged < warned < min(bars) and len(bars) == 1, lines
    text = (tmp_path / "runs/warned/log.txt").read_text()
    assert text.count("LOGGED") == text.count("WARNED") == 1


def _lines_of(terminal: int) -> Iterator[str]:
    with os.fdopen(terminal, "rb", buffering=0) as file:
        try:
            while data := file.read(4096):
                yield data.decode()
        except OSError:  # the other end is closed
            return


def _screen(shown: str) -> list[str]:
    """Return what remains on a terminal that never scrolls."""
    lines, at, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", shown):
        if part == "\r":
            column = 0
        elif part == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part.startswith("\x1b"):
            assert part.endswith(("m", "h", "l")), part
        else:
            lines[at] = lines[at][:column].ljust(column) + part + lines[at][column + len(part) :]
            column += len(part)
    return lines
