"""A program whose learner makes the poles of the collectors longer.

The collector kills a process of its envs, and writes what its envs have after each of its steps.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from gymnasium.envs.classic_control import CartPoleEnv

from dmiddleware import Task, middleware
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from middleware import (
    ContextExchanger,
    Curriculum,
    DataPusher,
    EpsGreedyHandler,
    ModelExchanger,
    OffPolicyLearner,
    OnlineRLContext,
    Role,
    StepCollector,
    TerminationChecker,
)

__all__ = ["LeveledCartPole", "main"]


class LeveledCartPole(CartPoleEnv):
    """CartPole with a level, which changes nothing."""

    level = 0


def longer(ctx: OnlineRLContext, now: dict[str, float]) -> dict[str, float] | None:
    if ctx.env_step >= 100 * (now["level"] + 1):
        return {"level": now["level"] + 1, "length": now["length"] + 0.25}
    return None


def main() -> None:
    """Train for a moment."""
    envs = make_env_manager(
        "tests.middleware.curriculum_program:LeveledCartPole", env_num=2, mode="async", seed=0
    )
    tiny = {"encoder_hidden_sizes": [8]}
    agent = DQNPolicy.for_env(envs, batch_size=8, model=tiny, eps=0.5, seed=0)
    seen = Path("collector.jsonl")

    @middleware(roles=[Role.COLLECTOR])
    def watch(ctx: OnlineRLContext) -> None:
        values = {name: envs.get_attr(name) for name in ("level", "length")}
        with seen.open("a") as file:
            file.write(json.dumps({**values, "restarts": envs.restarts}) + "\n")
        if envs.restarts == 0 and values["level"][0] >= 2:
            os.kill(envs.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]

    @middleware(roles=[Role.LEARNER])
    def tell(ctx: OnlineRLContext) -> None:
        Path("learner.json").write_text(json.dumps(dict(curriculum.snapshot_parts["values"].now)))

    replay = TensorBuffer(2_000, seed=0)
    curriculum = Curriculum(longer, envs, start={"level": 0, "length": 0.25})
    with Task(seed=0) as task:
        task.use(ContextExchanger()).use(ModelExchanger(agent)).use(curriculum)
        task.use(EpsGreedyHandler(agent))
        task.use(StepCollector(agent, envs, n_sample=20)).use(watch)
        task.use(DataPusher(replay)).use(OffPolicyLearner(agent, replay))
        task.use(tell).use(TerminationChecker(max_env_step=600)).run()
