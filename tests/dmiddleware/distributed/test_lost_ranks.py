"""Ranks that are killed, hang, fail or never come: the others end with an error that names them."""

import functools
import os
import signal
import time

import pytest
import torch

from dmiddleware.distributed import data_parallel, rank_and_world_size, sum_over_ranks
from dmiddleware.errors import ConfigError, RankLost
from dmiddleware.launch.ports import free_port
from dmiddleware.policy import DQNPolicy
from dmiddleware.tree import as_tree
from tests.dmiddleware.distributed.rank_processes import (
    DEADLINE_S,
    agent_store,
    run_ranks,
    start_ranks,
)
from tests.variants import mostly_slow

TIMEOUT_S = 6.0


def learn_until_one_is_lost(rank, *, lost, how):
    cfg = {"model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}, "seed": 0}
    policy = DQNPolicy({**cfg, "multi_gpu": True})
    batch = as_tree(
        {
            "obs": torch.randn(8, 4),
            "next_obs": torch.randn(8, 4),
            "action": torch.zeros(8, dtype=torch.int64),
            "reward": torch.randn(8),
            "terminated": torch.zeros(8, dtype=torch.bool),
        }
    )
    for number in range(10_000):
        if rank == lost and number == 5:
            if how == "raises":
                raise ValueError("no more data")
            if how == "ends":
                return "done"
            os.kill(os.getpid(), getattr(signal, how))
        policy.learn_mode.forward(batch)
    return "never lost"


@pytest.mark.process
@pytest.mark.parametrize(
    ("lost", "how", "named"),
    mostly_slow(
        [
            (0, "SIGKILL", "rank 0, which stores the group's state, cannot be reached"),
            (1, "raises", "rank 1 has failed: ValueError: no more data"),
            (1, "SIGKILL", "rank 1 gives no sign of life"),
            (1, "SIGSTOP", "rank 1 gives no sign of life"),
            (1, "ends", "rank 1 has ended"),
        ],
        keep=2,
    ),
)
def test_the_other_ranks_end_within_the_deadline_and_name_the_lost_one(lost, how, named):
    job = functools.partial(learn_until_one_is_lost, lost=lost, how=how)
    processes, answers = start_ranks(job, timeout_s=TIMEOUT_S)
    try:
        errors = {}
        while 1 - lost not in errors:
            rank, _, error = answers.get(timeout=DEADLINE_S)
            errors[rank] = error
        assert "RankLost" in errors[1 - lost]
        assert named in errors[1 - lost]
    finally:
        for process in processes:
            process.kill()
            process.join(timeout=10)


def add_ranks(rank):
    return sum_over_ranks([rank])


@pytest.mark.slow
@pytest.mark.process
def test_what_the_ranks_wrote_before_a_restart_by_torchrun_does_not_count():
    with agent_store() as port:
        assert run_ranks(add_ranks, agent_port=port) == [[1.0], [1.0]]
        job = functools.partial(learn_until_one_is_lost, lost=1, how="SIGKILL")
        processes, answers = start_ranks(job, timeout_s=TIMEOUT_S, agent_port=port)
        try:
            rank, _, error = answers.get(timeout=DEADLINE_S)
        finally:
            for process in processes:
                process.kill()
                process.join(timeout=10)
    # The first rank 1 has ended in order.
    assert (rank, "rank 1 gives no sign of life" in error) == (0, True), error


def test_without_a_group_in_the_environment_a_program_runs_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with data_parallel() as rank:
        assert rank == 0
        assert rank_and_world_size() == (0, 1)
        assert sum_over_ranks([2.0]) == [2.0]


def test_an_incomplete_environment_is_refused_with_the_missing_variable(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK is ''"), data_parallel():
        pass


def test_a_group_that_is_not_complete_in_time_is_refused(monkeypatch):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    expected = pytest.raises(RankLost, match=r"rank 1 .* 127.0.0.1:1 within 1 s")
    with expected, data_parallel(timeout_s=1.0):
        pass
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("rank", mostly_slow([0, 1], keep=1))
def test_a_rank_that_waits_for_the_others_says_so(rank, monkeypatch, caplog, tmp_path):
    port = str(free_port("127.0.0.1"))
    group = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for name, value in {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankLost, match="could not join"), data_parallel(timeout_s=6.0):
        pass
    (line,) = [one.getMessage() for one in caplog.records if "waits" in one.getMessage()]
    assert line.startswith(f"rank {rank} waits at 127.0.0.1:{port} for the others of 2 ranks")
    assert "at most 6 s" in line
