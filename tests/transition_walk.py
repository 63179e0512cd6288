"""The walk of a transition: ``python -m tests.transition_walk``.

Prints the functions of the project that a step of a DQN chain calls once it runs evenly, by file in
the order of the first call: from the collector, which steps the environments, through the buffer to
the update. ``--count`` prints only how many there are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.rl import Schedule
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    MetricsLogger,
    OffPolicyLearner,
    OnlineRLContext,
    RunFolder,
    StepCollector,
)
from tests.walks import Function, by_file, function_of, print_walk

__all__ = ["walk"]

_WARM_UP, _WATCHED = 40, 40


def walk(folder: Path) -> dict[str, list[str]]:
    """Return the functions that the steps of a chain call, by file.

    Args:
        folder: for the files of the run.
    """
    called: dict[Function, None] = {}
    steps = iter(range(_WARM_UP + _WATCHED))

    def see(frame: FrameType, event: str, _: Any) -> None:
        function = function_of(frame)
        if event == "call" and function is not None:
            called.setdefault(function)

    def start(_: Any) -> None:
        if next(steps) >= _WARM_UP:
            sys.setprofile(see)

    def end(_: Any) -> None:
        sys.setprofile(None)

    with RunFolder.create("walk", root=folder) as run, Task(OnlineRLContext(), seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=8, seed=0)
        eps = Schedule.linear(1.0, 0.05, decay=1_000)
        policy = DQNPolicy.for_env(envs, seed=0, batch_size=32, eps=eps)
        buffer = TensorBuffer(10_000, seed=0)
        logger = MetricsLogger(run)
        task.use(EpsGreedyHandler(policy)).use(start)
        task.use(StepCollector(policy, envs, n_sample=64)).use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=4)).use(end)
        task.use(logger).run(max_step=_WARM_UP + _WATCHED)
    return by_file(called)


if __name__ == "__main__":
    print_walk(walk)
