"""Chains that train several agents."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import AgentSpaces, make_env_manager, team_spaces
from dmiddleware.policy import IPPOPolicy, MAPPOPolicy, QMIXPolicy, VDNPolicy
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.zoo.envs import TwoStepGame
from middleware import (
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
    interaction_evaluator,
)
from tests.dmiddleware.team_envs import CountingTeam


class Matching(gym.Env[dict[str, Any], Any]):
    """Three steps: agent ``i`` sees one of three signs and gets 1 for the number ``sign + i``."""

    def __init__(self) -> None:
        spaces = AgentSpaces(2, gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(3), None)
        self.observation_space, self.action_space = team_spaces(spaces)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        reward = (action == (self.signs + np.arange(2)) % 3).astype(float)
        self.t += 1
        return self._obs(), reward, self.t == 3, False, {}

    def _obs(self) -> dict[str, Any]:
        self.signs = self.np_random.integers(3, size=2)
        return {
            "agents": np.eye(3, dtype=np.float32)[self.signs],
            "agent_mask": np.ones(2, np.int8),
        }


@pytest.mark.learning
@pytest.mark.parametrize(("cls", "recompute"), [(IPPOPolicy, False), (MAPPOPolicy, True)])
def test_agents_learn_what_depends_on_what_they_see_and_who_they_are(
    cls: type[IPPOPolicy], recompute: bool
) -> None:
    policy = cls.for_env(
        Matching(),
        seed=0,
        learning_rate=5e-3,
        batch_size=128,
        epoch_per_collect=4,
        value_norm=True,
        recompute_advantage=recompute,
    )
    envs = make_env_manager(Matching, env_num=32, seed=0)
    with envs, Task(OnlineRLContext(), seed=0) as task:
        task.use(StepCollector(policy, envs, n_sample=384))
        task.use(gae_estimator(policy))
        task.use(OnPolicyLearner(policy))
        before = np.mean(evaluate_episodes(policy, envs, 64).get_episode_return())
        task.run(max_step=15)
        after = np.mean(evaluate_episodes(policy, envs, 64).get_episode_return())
    assert before < 1.6
    assert after > 2.7


@pytest.mark.learning
@pytest.mark.parametrize(("cls", "best"), [(QMIXPolicy, 8.0), (VDNPolicy, 7.0)])
def test_qmix_gets_8_in_the_two_step_game_and_vdn_gets_7(cls: type[VDNPolicy], best: float) -> None:
    envs = make_env_manager(TwoStepGame, env_num=8, seed=0)
    policy = cls.for_env(
        envs,
        seed=0,
        model={"encoder_hidden_sizes": [64]},
        learning_rate=5e-3,
        batch_size=128,
        target_update_freq=50,
        eps=1.0,
    )
    buffer = TensorBuffer(2000, seed=0)
    with envs, Task(OnlineRLContext(), seed=0) as task:
        task.use(eps_greedy_handler(policy)).use(StepCollector(policy, envs, n_sample=400))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=120))
        task.run(max_step=4)
        assert evaluate_episodes(policy, envs, 8).get_episode_return() == [best] * 8


def test_an_evaluation_reports_the_return_of_each_agent() -> None:
    envs = make_env_manager(CountingTeam, env_num=2, seed=0)
    policy = IPPOPolicy.for_env(envs, seed=0)
    outputs = []
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(interaction_evaluator(policy, envs, n_episode=4))
        task.use(lambda ctx: outputs.append(ctx.eval_output))
        task.run(max_step=1)
    assert outputs[0]["return_mean"] == 30
    each = [outputs[0]["episode_info"][f"eval_episode_return_{agent}"] for agent in range(3)]
    assert each == [15, 30, 45]
