"""What the launcher says about a process that was killed by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmiddleware.launch.out_of_memory import OutOfMemoryKills
from tests.dmiddleware.launch.ditask_process import DITASK, start

PROGRAM = """
    import os, signal

    def fill_memory():
        taken = bytearray(2_000_000_000)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)
"""
MB = 1_000_000


def write(root: Path, **files: str) -> None:
    paths = {
        "host": "proc/vmstat",
        "group": "proc/self/cgroup",
        "v2": "sys/fs/cgroup/run/memory.events",
        "max": "sys/fs/cgroup/run/memory.max",
        "v1": "sys/fs/cgroup/memory/run/memory.oom_control",
        "limit": "sys/fs/cgroup/memory/memory.limit_in_bytes",
    }
    for name, text in files.items():
        path = root / paths[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_kill_at_the_limit_of_the_control_group_is_named(tmp_path: Path) -> None:
    write(tmp_path, group="0::/run\n", v2="oom 0\noom_kill 2\n", max="8000000000\n")
    kills = OutOfMemoryKills(tmp_path)
    write(tmp_path, v2="oom 1\noom_kill 3\n")
    assert "out of memory: the kernel killed a process of this control group at its limit of " in (
        message := kills.explain()
    )
    assert "8.0 GB" in message
    assert "not for lack of memory" in kills.explain()


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    write(tmp_path, group="4:cpu,memory:/run\n0::/\n", v1="under_oom 0\noom_kill 0\n")
    write(tmp_path, limit="9223372036854771712\n")
    kills = OutOfMemoryKills(tmp_path)
    write(tmp_path, v1="under_oom 0\noom_kill 1\n")
    message = kills.explain()
    assert message.startswith("out of memory") and "GB" not in message


def test_a_kill_on_the_host_is_probably_the_reason(tmp_path: Path) -> None:
    write(tmp_path, host="pgfault 5\noom_kill 7\n")
    kills = OutOfMemoryKills(tmp_path)
    write(tmp_path, host="pgfault 5\noom_kill 8\n")
    assert kills.explain().startswith("probably out of memory")


def test_without_counters_nothing_is_claimed(tmp_path: Path) -> None:
    assert OutOfMemoryKills(tmp_path).explain().startswith("maybe out of memory")


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group with 300 MB."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    inside = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), "")
    name = f"test-{secrets.token_hex(4)}"
    v1 = Path("/sys/fs/cgroup/memory") / inside.lstrip("/") / name
    v2 = Path("/sys/fs/cgroup") / name
    folder, limit = (v1, "memory.limit_in_bytes") if inside else (v2, "memory.max")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        with contextlib.suppress(OSError):
            (folder / limit).write_text(str(300 * MB))
        if not (folder / limit).exists():
            pytest.skip("the memory of control groups is not limited here")
        yield folder
    finally:
        folder.rmdir()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_process_that_the_kernel_kills_for_its_memory(folder: Path, control_group: Path) -> None:
    command = [*DITASK, "--main", "program.fill_memory"]
    done = subprocess.run(
        ["sh", "-c", f'echo $$ > {control_group}/cgroup.procs; exec "$@"', "-", *command],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    last = done.stdout.splitlines()[-1]
    assert "was killed by SIGKILL (out of memory: " in last and "0.3 GB" in last


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_process_that_somebody_kills_is_not_said_to_lack_memory(folder: Path) -> None:
    with start(folder, "--main", "program.die") as launcher:
        text, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert f"was killed by {signal.SIGKILL.name} (" in text
    assert "(out of memory" not in text
