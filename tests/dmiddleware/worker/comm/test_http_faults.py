"""Runs over HTTP with workers in processes of their own, some of which are killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.data import load_checkpoint
from dmiddleware.worker import Coordinator
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.http import Master
from dmiddleware.worker.comm.http_link import HttpLink
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE_S = 90.0

WORKER = """
import json, sys
import torch
from dmiddleware.worker import create_comm_collector, create_comm_learner
torch.set_num_threads(1)
role, cfg = json.loads(sys.argv[1])
create = {"collector": create_comm_collector, "learner": create_comm_learner}[role]
with create(cfg) as worker:
    worker.join()
"""

COORDINATOR = """
import json, sys
from dmiddleware.worker import Coordinator
with Coordinator(json.loads(sys.argv[1])) as coordinator:
    while not coordinator.wait(0.1):
        print(coordinator.counters.get("finished", 0), flush=True)
"""


class Run:
    """The processes of a run, and its config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {role: free_port() for role in ("collector", "learner")}
        self._processes: list[subprocess.Popen[str]] = []

    def config(self, **coordinator: Any) -> dict[str, Any]:
        policy = {
            "type": "dqn",
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
            "learn": {
                "batch_size": 8,
                "learner": {
                    "type": "base", "train_iterations": 10, "hook": {"save_ckpt_after_run": False},
                },
            },
            "collect": {"n_sample": 8, "collector": {"type": "zergling"}},
            "other": {
                "commander": {"type": "naive"},
                "replay_buffer": {"type": "naive", "replay_buffer_size": 64},
            },
        }  # fmt: skip
        env = {"id": "CartPole-v1", "env_num": 2, "manager": {"episode_num": 2}}
        main = {"exp_name": str(self.folder / "exp"), "env": env, "policy": policy}
        addresses = {
            role: {f"{role}0": [f"{role}0", "127.0.0.1", port]} for role, port in self.ports.items()
        }
        own = {"type": "flask_fs", "port": 0, **addresses, **coordinator}
        return {"main": main, "system": {**self._paths(), "coordinator": own}}

    def _paths(self) -> dict[str, str]:
        return {
            "path_data": str(self.folder / "data"), "path_policy": str(self.folder / "policy"),
        }  # fmt: skip

    def link(self) -> dict[str, Any]:
        """Return a link that soon notices that a worker is gone, and the store."""
        workers = {f"{role}0": (role, "127.0.0.1", port) for role, port in self.ports.items()}
        master = Master(
            port=0, heartbeat_tolerance=4.0, heartbeat_check_span=0.2, request_retries=1,
            request_retry_waiting=0.1,
        )  # fmt: skip
        store = FileStore(self.folder / "data", self.folder / "policy", "run")
        return {"link": HttpLink(master, workers), "store": store}

    def worker(self, role: str) -> subprocess.Popen[str]:
        cfg = {
            "type": "flask_fs", "port": self.ports[role], "heartbeat_span": 0.5,
            "request_retries": 2, "request_retry_waiting": 0.2, **self._paths(),
        }  # fmt: skip
        return self._spawn(WORKER, [role, cfg])

    def coordinator(self, **options: Any) -> subprocess.Popen[str]:
        return self._spawn(COORDINATOR, self.config(**options))

    def _spawn(self, program: str, arguments: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(arguments)],
            stdout=subprocess.PIPE, cwd=self.folder, text=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def files(self) -> list[Path]:
        return [path for path in (self.folder / "data").rglob("*") if path.is_file()]

    def close(self) -> None:
        for process in self._processes:
            with process:
                process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def wait_for_tasks(coordinator: Coordinator, *, n_more: int) -> None:
    n_finished = coordinator.counters.get("finished", 0) + n_more
    wait_until(
        lambda: coordinator.counters.get("finished", 0) >= n_finished,
        lambda: f"{n_finished} finished tasks, counted {coordinator.counters}",
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def test_killed_workers_are_replaced_and_the_run_leaves_no_step_data(run: Run) -> None:
    workers = {role: run.worker(role) for role in run.ports}
    coordinator = Coordinator(run.config(), **run.link())
    with coordinator:
        wait_for_tasks(coordinator, n_more=2)
        for role in ("collector", "learner"):
            workers[role].kill()
            wait_until(lambda: f"{role}0" not in coordinator.workers, "a lost worker")  # noqa: B023
            workers[role] = run.worker(role)
            wait_until(lambda: f"{role}0" in coordinator.workers, "a new worker")  # noqa: B023
            wait_for_tasks(coordinator, n_more=3)
        assert run.files()
    assert run.files() == []
    for worker in workers.values():
        assert worker.wait(DEADLINE_S) == 0


def test_a_killed_coordinator_is_replaced_and_adopts_what_runs(run: Run) -> None:
    workers = [run.worker(role) for role in run.ports]
    state = run.folder / "state.safetensors"
    first = run.coordinator(state_path=str(state), state_every_s=0.2)
    assert first.stdout is not None
    for line in first.stdout:
        if int(line) >= 3 and state.exists():
            break
    first.kill()
    first.wait()
    second = Coordinator(run.config(), **run.link())
    second.load_state_dict(load_checkpoint(state))
    with second:
        wait_for_tasks(second, n_more=4)
        assert second.counters.get("failed", 0) == 0
    assert run.files() == []
    for worker in workers:
        assert worker.wait(DEADLINE_S) == 0


def test_a_stopped_run_leaves_no_process(run: Run) -> None:
    workers = [run.worker(role) for role in run.ports]
    with Coordinator(run.config(), **run.link()) as coordinator:
        wait_for_tasks(coordinator, n_more=1)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            assert worker.wait(DEADLINE_S) == 143
    assert run.files() == []
