"""A Ray cluster of several nodes in a network namespace of its own, and ditask in it.

Ray's processes listen on all interfaces. In the namespace there is only the loopback interface, on
which each Ray node has an address of its own, from 127.0.0.2 on. Run as a program, this file starts
the cluster, reads commands from standard input, and answers them, one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["RayCluster", "in_namespace", "ray_cluster", "rays_environment", "why_no_ray"]

_FIRST = 2
_DEADLINE_S = 90.0
_PORT_OF_JOBS = 8265
_STORE_BYTES = 80 * 2**20
_DITASK = [sys.executable, "-m", "dmiddleware.launch", "--platform", "ray"]
_IN_NAMESPACE = ["unshare", "--user", "--net", "--map-root-user", "sh", "-c"]


def why_no_ray() -> str:
    """Return why no cluster can be started here; empty: one can."""
    try:
        import ray  # noqa: F401
    except ImportError:
        return "Ray is not installed"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "the commands `unshare` and `ip` are missing; install util-linux and iproute2"
    try:
        done = subprocess.run(
            [*_IN_NAMESPACE, "ip link set lo up"], capture_output=True, text=True, timeout=30
        )
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class RayCluster:
    """A cluster that runs.

    Args:
        process: the process that holds it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, what: str, **arguments: Any) -> Any:
        """Let the cluster's process do something, and return its answer.

        Raises:
            RuntimeError: if that failed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the cluster's process has ended during {what} {arguments}")

    def add_node(self, n_cpus: int = 1) -> str:
        """Add a Ray node, and return its address."""
        return str(self.do("add", n_cpus=n_cpus))

    def remove_node(self, address: str) -> None:
        """Kill a Ray node without grace."""
        self.do("remove", address=address)

    def start(self, *options: str, cwd: Path) -> None:
        """Start ditask on the cluster; its output goes to the file ``ditask.txt``."""
        self.do("start", options=options, cwd=str(cwd))

    def submit(self, *options: str, cwd: Path) -> None:
        """Start ``ray job submit`` with ditask as the job and ``cwd`` as its working directory."""
        self.do("submit", options=options, cwd=str(cwd))

    def wait(self, timeout_s: float = _DEADLINE_S) -> int:
        """Return the exit code of ditask."""
        return int(self.do("wait", timeout_s=timeout_s))

    def signal(self, number: int) -> None:
        """Send ditask a signal."""
        self.do("signal", number=number)


def in_namespace(*command: str) -> list[str]:
    """Return a command that runs another one in a network namespace of its own."""
    return [*_IN_NAMESPACE, f"ip link set lo up && exec {shlex.join(command)}"]


@contextlib.contextmanager
def rays_environment() -> Iterator[dict[str, str]]:
    """Yield variables with which Ray's files lie in a folder of their own.

    Ray notes the newest cluster of a host in a file, and would connect later programs to it. The
    folder's name is short, because sockets are in it.
    """
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        yield {**os.environ, "RAY_TMPDIR": folder, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(*n_cpus: int, takes_jobs: bool = False) -> Iterator[RayCluster]:
    """Start a cluster with one Ray node for each number of CPUs, and end it.

    Args:
        *n_cpus: CPUs of each Ray node.
        takes_jobs: whether jobs can be submitted, for which ``ray[default]`` must be installed.
    """
    with (
        rays_environment() as environment,
        subprocess.Popen(
            in_namespace(sys.executable, "-m", __spec__.name, *["jobs"] * takes_jobs),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
            env=environment,
        ) as process,
    ):
        try:
            cluster = RayCluster(process)
            for n in n_cpus:
                cluster.add_node(n)
            yield cluster
            cluster.do("end")
        finally:
            process.kill()


class _Commands:
    """What the process of the cluster can do."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._nodes: dict[str, Any] = {}
        self._n_added = 0
        self._ditask: subprocess.Popen[bytes] | None = None

    def add(self, n_cpus: int) -> str:
        from ray.cluster_utils import Cluster

        address = f"127.0.0.{_FIRST + self._n_added}"
        self._n_added += 1
        how = {
            "num_cpus": n_cpus,
            "node_ip_address": address,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": "jobs" in sys.argv,
            "dashboard_port": _PORT_OF_JOBS,
        }
        if self._cluster is None:
            self._cluster = Cluster(initialize_head=True, head_node_args=how)
            self._nodes[address] = self._cluster.head_node
        else:
            self._nodes[address] = self._cluster.add_node(**how)
        return address

    def remove(self, address: str) -> None:
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def start(self, options: list[str], cwd: str) -> None:
        self._run([*_DITASK, "--address", self._cluster.address, *options], cwd)

    def submit(self, options: list[str], cwd: str) -> None:
        job = ["--address", f"http://127.0.0.1:{_PORT_OF_JOBS}", "--working-dir", cwd]
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
        self._run([*ray, "job", "submit", *job, "--", *_DITASK, *options], cwd)

    def _run(self, command: list[str], cwd: str) -> None:
        with (Path(cwd) / "ditask.txt").open("wb") as file:
            self._ditask = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=subprocess.STDOUT)

    def signal(self, number: int) -> None:
        assert self._ditask is not None
        self._ditask.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        assert self._ditask is not None
        try:
            return self._ditask.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._ditask.kill()
            return -1

    def actors(self) -> int:
        """Return how many actors run: their processes are called after their class."""
        done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True)
        return sum(line.startswith("ray::RayNode") for line in done.stdout.splitlines())

    def end(self) -> None:
        if self._ditask is not None:
            self._ditask.kill()
        self._cluster.shutdown()


def _main() -> None:
    commands = _Commands()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        answer = getattr(commands, what)(**arguments)
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
