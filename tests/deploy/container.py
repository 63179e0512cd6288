"""Run ditask as in a container: process 1, no privileges, a read-only root, 64 MB of /dev/shm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

__all__ = ["UID", "process_one", "skip_without_containers", "start"]

UID = 10001
NO_CONTAINERS = 77
# The arguments: a folder for the working directory, a file for /etc/hosts, and the command.
SETUP = f"""
set -e
volume=$1 hosts=$2
shift 2
mount --bind "$volume" /mnt || exit {NO_CONTAINERS}
mount --bind "$hosts" /etc/hosts || exit {NO_CONTAINERS}
mount -t tmpfs -o size=64m tmpfs /dev/shm || exit {NO_CONTAINERS}
mount -t tmpfs tmpfs /tmp || exit {NO_CONTAINERS}
mount -o remount,bind,ro / || exit {NO_CONTAINERS}
cd /mnt
exec unshare --user --map-user={UID} --map-group={UID} "$@"
"""
CONTAINER = [
    "unshare", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
    "sh", "-c", SETUP, "sh",
]  # fmt: skip


def start(
    volume: Path, command: list[str], env: Mapping[str, str], *, hosts: Path, output: Path
) -> subprocess.Popen[bytes]:
    """Start a command in a container.

    Args:
        volume: the folder that is the working directory, the only one that outlives the container.
        command: what to run.
        env: the environment variables, except for the search path of programs.
        hosts: a file for /etc/hosts.
        output: the file to which standard output and errors are appended.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with output.open("ab") as file:
        return subprocess.Popen(
            [*CONTAINER, str(volume), str(hosts), *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**env, "PATH": path},
        )


def process_one(container: subprocess.Popen[bytes]) -> psutil.Process:
    """Return process 1 of a container, as it is seen from outside."""
    (found,) = psutil.Process(container.pid).children()
    return found


def skip_without_containers(folder: Path) -> None:
    """Skip a test where this user cannot make namespaces or mount file systems."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    if Path(__file__).is_relative_to("/tmp") or Path(sys.executable).is_relative_to("/tmp"):
        pytest.skip("the checkout is in /tmp, which a container replaces; move it elsewhere")
    hosts, output = folder / "no-hosts", folder / "no-output"
    hosts.touch()
    with start(folder, ["true"], {}, hosts=hosts, output=output) as trial:
        if trial.wait(60):
            pytest.skip(f"this user may not make containers: {output.read_text().strip()}")
