"""Run torchrun in a network namespace of its own, because its store listens on all interfaces."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

__all__ = ["run_agents", "why_not"]

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
_NAMESPACE = ["unshare", "--map-root-user", "--net", "sh", "-c"]
_LOOPBACK = "ip link set lo up"


def why_not() -> str:
    """Return why torchrun cannot run in a namespace here; empty: it can."""
    try:
        done = subprocess.run(
            [*_NAMESPACE, _LOOPBACK], capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        return "the command `unshare` is missing; install util-linux"
    return f"no network namespace can be created: {done.stderr}" if done.returncode else ""


def run_agents(folder: Path, *agents: Sequence[str], timeout_s: float) -> str:
    """Run agents of torchrun side by side on one loopback interface; all must succeed.

    Args:
        folder: the working directory.
        agents: the arguments of each.
        timeout_s: the deadline in seconds; after it, all processes are killed.

    Returns:
        What they print.
    """
    script = [_LOOPBACK]
    script += [f"{shlex.join([*TORCHRUN, *agent])} & agent{n}=$!" for n, agent in enumerate(agents)]
    script += [f"wait $agent{n} || failed=1" for n in range(len(agents))]
    script += ["exit ${failed:-0}"]
    process = subprocess.Popen(
        [*_NAMESPACE, "\n".join(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    finally:
        _kill(process.pid)
    assert process.returncode == 0, printed
    return printed


def _kill(pid: int) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
