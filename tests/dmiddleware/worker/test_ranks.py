from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from dmiddleware.worker.ranks import (
    broadcast_from_first,
    mean_over_ranks,
    rank_and_world_size,
    sum_over_ranks,
)

SCRIPT = textwrap.dedent(
    """
    import datetime, itertools, json, sys, warnings
    import numpy as np
    import torch
    import torch.distributed as dist
    from dmiddleware.classic import NaiveReplayBuffer
    from dmiddleware.worker.learner import BaseLearner, LogReduceHook
    from dmiddleware.worker.ranks import broadcast_from_first, sum_over_ranks

    rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    learner = BaseLearner({}, exp_name=folder)
    learner.log_buffer["scalar"].update(
        {"loss": 1.0 + rank, "count": rank, "noreduce_rank": rank, "name": "text", "flag": True}
    )
    group = {"a": [np.float32(rank), 2.0], "b": torch.tensor([rank, 4])}
    learner.log_buffer["scalars"]["q"] = group
    learner.log_buffer["histogram"]["w"] = torch.tensor([1.0, 3.0]) * rank
    LogReduceHook("reduce", 1, position="after_iter")(learner)
    buffer = learner.log_buffer
    q = buffer["scalars"]["q"]
    hours = itertools.count(0, 3600).__next__
    with NaiveReplayBuffer({}, None, folder, f"buffer_{rank}", clock=hours) as replay_buffer:
        replay_buffer.push([1, 2], 0)
    print(json.dumps({
        "scalar": buffer["scalar"],
        "a": q["a"],
        "b": [q["b"].tolist(), str(q["b"].dtype)],
        "w": buffer["histogram"]["w"].tolist(),
        "hooks": [hook.name for hook in learner.hooks["after_iter"]],
        "ranks": [learner.rank, learner.world_size],
        "sum": sum_over_ranks([1, 10 * rank]),
        "said": broadcast_from_first({"by": rank}),
    }))
    dist.destroy_process_group()
    """
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.process
def test_two_ranks_average_their_log_buffers(tmp_path):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, answer in enumerate(answers):
        assert answer["scalar"] == {
            "loss": 1.5,
            "count": 0.5,
            "noreduce_rank": rank,
            "name": "text",
            "flag": True,
        }
        assert answer["a"] == [0.5, 2.0]
        assert answer["b"] == [[0, 4], "torch.int64"]
        assert answer["w"] == [0.5, 1.5]
        assert answer["hooks"][0] == "log_reduce_after_iter"
        assert answer["ranks"] == [rank, 2]
        assert answer["sum"] == [2.0, 10.0]
        assert answer["said"] == {"by": 0}
    assert (tmp_path / "log" / "buffer_0" / "buffer_0_logger.txt").exists()
    assert not (tmp_path / "log" / "buffer_1").exists()


def test_a_single_rank_changes_nothing():
    data = {"a": [1, torch.ones(2)], "noreduce_b": 3}
    assert rank_and_world_size() == (0, 1)
    assert mean_over_ranks(data) is data
    assert sum_over_ranks([1, 2]) == [1, 2]
    assert broadcast_from_first("x") == "x"
