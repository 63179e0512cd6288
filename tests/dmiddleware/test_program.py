"""A program that is called with the arguments of its command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dmiddleware.command_line import program_call
from dmiddleware.env import EnvSettings
from dmiddleware.policy import BCSettings
from dmiddleware.program import run_program
from dmiddleware.runs.provenance import git_state, versions
from dmiddleware.settings import Whole

ENV = EnvSettings("CartPole-v1", env_num=1)


def main(seed: Whole = 0, env: EnvSettings = ENV, policy: BCSettings = BCSettings()) -> int:
    """Return the seed, and what the call was."""
    call = program_call()
    assert call is not None and call.arguments["seed"] == seed
    return seed


def test_a_program_returns_what_it_returns() -> None:
    assert run_program(main, ["--seed", "3"]) == 3
    assert program_call() is None


def test_without_arguments_those_of_the_process_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program.py", "--seed", "4"])
    assert run_program(main) == 4


def test_the_versions_name_what_computes() -> None:
    assert {"python", "torch", "gymnasium", "dmiddleware"} <= versions().keys()


@pytest.mark.process
def test_the_state_of_the_code_is_its_commit_and_whether_files_differ(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    found = []
    for name in ("clean", "changed"):
        folder = tmp_path / name
        folder.mkdir()
        git("init", "-q")
        (folder / "file").write_text("1")
        git("add", "file")
        git("commit", "-qm", "first")
        (folder / "file").write_text("1" if name == "clean" else "2")
        found.append((git_state(folder), git("rev-parse", "HEAD")))
    assert [state for state, _ in found] == [
        {"commit": commit, "dirty": dirty}
        for (_, commit), dirty in zip(found, (False, True), strict=True)
    ]
    assert git_state(tmp_path) is None


def test_ctrl_c_ends_a_program_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        """Run until Ctrl-C."""
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        run_program(interrupted, [])
    assert stopped.value.code == 130 and stopped.value.__suppress_context__
    assert capsys.readouterr().err == "stopped: received SIGINT (Ctrl-C)\n"
