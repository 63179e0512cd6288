"""The first example as four nodes in simulated time: repeated, cut off, killed and solved."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware.data import load_checkpoint
from dmiddleware.router import EventTraffic
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.testing import Cluster
from examples import cartpole_dqn

# A run asks git for its commit.
pytestmark = pytest.mark.process

ROLES = {"learner": 1, "collector": 2, "evaluator": 1}
ENV_STEPS = 1700
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Outcome:
    """The values by which two runs are compared.

    Attributes:
        messages: a hash of all delivered frames with their times, sources and targets.
        order: a hash of which thread ran when.
        parameters: a hash of everything learned.
        env_step: environment steps by node id.
        train_iter: updates by node id.
        n_sent: batches that the collectors sent since their last start.
        n_received: batches that the learner received.
    """

    messages: str
    order: str
    parameters: str
    env_step: dict[str, int]
    train_iter: dict[str, int]
    n_sent: int
    n_received: int


def train(
    seed: int,
    *,
    disturb: Callable[[Cluster], None] | None = None,
    env_steps: int = ENV_STEPS,
    topology: TopologyName = "mesh",
) -> Outcome:
    """Train in the current folder."""
    program = functools.partial(cartpole_dqn.main, seed=seed, max_env_step=env_steps)
    delays = (0.01, 0.04)
    with Cluster(program, roles=ROLES, topology=topology, seed=seed, delay_s=delays) as cluster:
        cluster.start()
        if disturb is not None:
            disturb(cluster)
        results = cluster.join()
        messages, order = list(cluster.tape), cluster.simulation.history
        learner, *collectors = (traffic_of(cluster, node_id) for node_id in (0, 1, 2))
    return Outcome(
        messages=hashlib.sha256(repr(messages).encode()).hexdigest(),
        order=order,
        parameters=digest(results[0].path / "ckpt" / "final.safetensors"),
        env_step={str(node): result.env_step for node, result in results.items()},
        train_iter={str(node): result.train_iter for node, result in results.items()},
        n_sent=sum(traffic.sent for traffic in collectors),
        n_received=learner.received,
    )


def traffic_of(cluster: Cluster, node_id: int) -> EventTraffic:
    """Return a node's counters for collected batches."""
    router = cluster.nodes[node_id].router
    counters = router.traffic() if router is not None else {}
    return counters.get("exchange.collected.0", EventTraffic())


def digest(ckpt: Path) -> str:
    """Return the SHA-256 of everything learned that a checkpoint holds."""
    hashed = hashlib.sha256()
    _update(hashed, load_checkpoint(ckpt))
    return hashed.hexdigest()


def _update(hashed: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            hashed.update(f"{name}:".encode())
            _update(hashed, value[name])
    elif isinstance(value, list | tuple):
        for item in value:
            _update(hashed, item)
    elif isinstance(value, torch.Tensor):
        hashed.update(value.contiguous().numpy().tobytes())
    else:
        hashed.update(repr(value).encode())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return what a training from seed 1 gives."""
    with contextlib.chdir(tmp_path_factory.mktemp("first")):
        return train(1)


@pytest.mark.slow
def test_the_same_seed_repeats_a_training_and_another_seed_does_not(first: Outcome) -> None:
    again, other = train(1), train(2)
    assert again == first
    assert other.messages != first.messages
    assert other.parameters != first.parameters
    assert first.env_step["0"] >= ENV_STEPS
    assert first.train_iter["0"] >= 64


def test_a_seed_gives_the_same_training_in_a_process_with_other_hashes(
    tmp_path: Path, first: Outcome
) -> None:
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.dmiddleware.testing.test_training_in_a_cluster", "1"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, check=True, timeout=100, stdout=subprocess.PIPE, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == asdict(first)


def test_a_link_that_is_cut_in_training_costs_time_and_no_data() -> None:
    def disturb(cluster: Cluster) -> None:
        assert cluster.wait_until(
            lambda: all(traffic_of(cluster, node_id).sent for node_id in (1, 2)), 10.0
        )
        cluster.cut(0)
        cluster.run_for(1.0)
        received = traffic_of(cluster, 0).received
        cluster.run_for(19.0)
        assert traffic_of(cluster, 0).received == received
        assert cluster.nodes[0].running
        cluster.heal(0)

    outcome = train(3, disturb=disturb)
    assert outcome.env_step["0"] >= ENV_STEPS
    # Batches in transit when the learner stops are dropped: at most two per collector.
    assert outcome.n_sent - 4 <= outcome.n_received <= outcome.n_sent


@pytest.mark.slow
def test_a_training_in_a_star_loses_no_batch() -> None:
    outcome = train(3, topology="star")
    assert outcome.env_step["0"] >= ENV_STEPS
    assert outcome.train_iter["0"] >= 64
    # Batches in transit when the learner stops are dropped: at most two per collector.
    assert outcome.n_sent - 4 <= outcome.n_received <= outcome.n_sent


def test_a_killed_collector_that_returns_continues_to_collect() -> None:
    def disturb(cluster: Cluster) -> None:
        assert cluster.wait_until(lambda: traffic_of(cluster, 1).sent >= 1, 10.0)
        cluster.kill(1)
        cluster.run_for(0.05)
        cluster.start(1)
        assert cluster.wait_until(lambda: traffic_of(cluster, 1).sent >= 2, 10.0)
        assert cluster.nodes[0].running

    outcome = train(4, disturb=disturb, env_steps=3500)
    assert outcome.env_step["0"] >= 3500
    assert outcome.train_iter["1"] > 0


@pytest.mark.slow
def test_cartpole_is_solved_in_simulated_time() -> None:
    program = functools.partial(cartpole_dqn.main, seed=0)
    with Cluster(program, roles=ROLES) as cluster:
        assert cluster.run()[0].mean_return >= 475


if __name__ == "__main__":
    print(json.dumps(asdict(train(int(sys.argv[1])))))
