"""Starts that cannot succeed, odd surroundings, and the same run twice."""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.launch.cli import ditask
from tests.dmiddleware.launch.ditask_process import DITASK, start, write_key
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import argparse, os, sys
    from dmiddleware import Context, Task, middleware
    from dmiddleware.errors import ConfigError

    def main():
        print("ünïcode → done", flush=True)
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=2)

    def has_no_module():
        import nowhere

    def has_a_bad_config():
        raise ConfigError("unknown key")

    def has_a_bad_chain():
        @middleware(reads=["train_output"])
        def learn(ctx):
            pass

        with Task() as task:
            task.use(learn).run()

    def has_bad_arguments():
        parser = argparse.ArgumentParser()
        parser.add_argument("--seed")
        parser.parse_args()

    def has_a_bad_config_later():
        def step(ctx):
            raise ConfigError("unknown key")

        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=3)
            task.use(step).run()

    def fails():
        raise ValueError("the disk is busy")

    if "--broken" in sys.argv:
        def f(: pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = textwrap.dedent(PROGRAM)
    (tmp_path / "program.py").write_text(text.partition("if ")[0])
    (tmp_path / "broken.py").write_text(text)
    (tmp_path / "incomplete.py").write_text("import nowhere\n\ndef main():\n    pass\n")
    return tmp_path


def run(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    with start(folder, *options, env=env) as launcher:
        text, _ = launcher.communicate(timeout=100)
        return launcher.returncode, text


@pytest.mark.parametrize(
    ("main", "error"),
    mostly_slow(
        [
            ("program.has_no_module", "No module named 'nowhere' (program.py:"),
            ("broken.main", "SyntaxError: "),
            ("program.has_a_bad_config", "ConfigError: unknown key"),
            ("program.has_bad_arguments", "it called sys.exit(2)"),
            ("program.nothing", "has no function 'nothing'"),
            ("incomplete.main", "No module named 'nowhere' (incomplete.py:1)"),
            ("program.has_a_bad_chain", "ChainError: the chain cannot run"),
            ("program", "does not name a function"),
        ],
        keep=[3],
    ),
)
def test_a_program_that_cannot_start_is_not_restarted(folder: Path, main: str, error: str) -> None:
    options = ("--on-failure", "restart", "--max-restarts", "1000000", "--", "--sed", "--broken")
    code, text = run(folder, "--main", main, *options)
    assert code == 1, text
    assert error in text.splitlines()[-1], text
    assert "restarting" not in text


@pytest.mark.slow
@pytest.mark.parametrize("main", ["program.has_a_bad_config_later", "program.fails"])
def test_other_failures_are_restarted(folder: Path, main: str) -> None:
    code, text = run(folder, "--main", main, "--on-failure", "restart", "--max-restarts", "1")
    assert code == 1, text
    assert "restart 1 of 1" in text and "--max-restarts 1" in text


def server_behind_a_free_port() -> socket.socket:
    """Return a server on a port of which the port before is free."""
    for _ in range(100):
        server = socket.create_server(("127.0.0.1", 0))
        try:
            socket.create_server(("127.0.0.1", server.getsockname()[1] - 1)).close()
        except OSError:
            server.close()
        else:
            return server
    raise AssertionError("no two free ports in a row")


@pytest.mark.parametrize("topology", mostly_slow(["mesh", "star"], keep=1))
def test_a_second_run_with_the_same_ports_is_refused(folder: Path, topology: str) -> None:
    key = write_key(folder / "key")
    options = ["--protocol", "tcp", "--key-file", str(key), "--topology", topology]
    with server_behind_a_free_port() as other:
        port = other.getsockname()[1]
        first = port if topology == "star" else port - 1
        options += ["--ports", str(first), "--parallel-workers", "2", "--on-failure", "restart"]
        code, text = run(folder, "--main", "program.main", *options)
    assert code == 1, text
    assert f"port {port} of 127.0.0.1 is in use" in text and "--ports" in text
    assert "[node" not in text
    # Free again, also with connections that have just been closed.
    for _ in range(2):
        code, text = run(folder, "--main", "program.main", *options)
        assert code == 0, text


@pytest.mark.parametrize(
    ("n_tasks", "is_noted"), mostly_slow([("1", False), ("4", True), ("", False)], keep=2)
)
def test_a_run_that_srun_starts_several_times_says_so(
    folder: Path, n_tasks: str, is_noted: bool
) -> None:
    env = {"SLURM_STEP_NUM_TASKS": n_tasks, "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
    code, text = run(folder, "--main", "program.main", env=env)
    assert code == 0, text
    assert ("srun starts this command 4 times" in text) is is_noted


@pytest.mark.slow
def test_copies_of_a_run_in_one_step_do_not_disturb_each_other(folder: Path) -> None:
    options = ("--main", "program.main", "--parallel-workers", "2")
    copies = [start(folder, *options, env={"SLURM_PROCID": str(rank)}) for rank in range(3)]
    texts = [copy.communicate(timeout=100)[0] for copy in copies]
    assert [copy.returncode for copy in copies] == [0, 0, 0], texts
    logs = list(folder.glob("logs/*/node-*.log"))
    assert len(logs) == 6
    assert all(log.read_text("utf-8").count("=== ditask: start") == 1 for log in logs)


@pytest.mark.parametrize(
    "env",
    mostly_slow(
        [
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            {},
            {"PYTHONIOENCODING": "ascii"},
            {"PYTHONIOENCODING": "latin-1:strict"},
        ],
        keep=1,
    ),
    ids=["ascii locale", "nothing", "ascii streams", "latin-1 streams"],
)
def test_a_run_needs_no_variables_and_no_locale(folder: Path, env: dict[str, str]) -> None:
    # Among those that are missing: HOME, TERM, PATH and LANG.
    for function, expected in (("main", 0), ("fails", 1)):
        done = subprocess.run(
            [*DITASK, "--main", f"program.{function}", "--parallel-workers", "2"],
            cwd=folder,
            capture_output=True,
            timeout=100,
            env={"TMPDIR": str(folder), **env},
            check=False,
        )
        assert done.returncode == expected, done.stdout + done.stderr
        assert done.stderr == b""
    done = subprocess.run(
        [*DITASK, "--help"], capture_output=True, timeout=100, env=env, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "streams", mostly_slow(["<&- >&- 2>&-", "2>&1 | head -1 >/dev/null", ">&-"], keep=1)
)
def test_a_run_needs_no_standard_streams(folder: Path, streams: str) -> None:
    command = f'"$@" --main program.main --parallel-workers 2 {streams}; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", f"({command}) > code" if "|" in streams else command, "bash", *DITASK],
        cwd=folder,
        stdout=subprocess.PIPE,
        timeout=100,
        env={**os.environ, "TMPDIR": str(folder)},
        check=True,
        text=True,
    )
    said = (folder / "code").read_text() if "|" in streams else done.stdout
    assert said.split() == ["0"]
    (log,) = folder.glob("logs/*/node-0.log")
    assert "done" in log.read_text("utf-8")


def test_a_limit_on_processes_is_named() -> None:
    # The limit does not hold for root, and other users may not be able to start Python.
    code = """
import os, resource
from dmiddleware.errors import LaunchError
from dmiddleware.launch.guard import guard
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.geteuid() == 0:
    os.setuid(4242)
try:
    with guard("mark", [], grace_s=0.0):
        print("started")
except LaunchError as error:
    print(error)
"""
    done = subprocess.run(
        [DITASK[0], "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.startswith("cannot start a process (") and "ulimit -u" in done.stdout


def test_names_that_are_not_utf_8_are_refused(folder: Path) -> None:
    code, text = run(folder, "--main", "program.main", "--log-dir", os.fsdecode(b"logs-\xff"))
    assert code == 1
    assert "--log-dir is not valid UTF-8" in text
    odd = folder / os.fsdecode(b"odd-\xff")
    odd.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(odd)
        result = CliRunner().invoke(ditask, ["--main", "program.main"])
    assert result.exit_code == 1 and "working directory is not valid UTF-8" in result.output


def test_arguments_and_variables_may_have_any_bytes(folder: Path) -> None:
    text = os.fsdecode(b"\xff\xfe")
    options = ("--main", "program.main", "--env", f"A={text}", "--", text)
    code, text = run(folder, *options)
    assert code == 0, text
