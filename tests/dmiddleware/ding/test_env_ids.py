from typing import Any

import gymnasium
import numpy as np
from easydict import EasyDict

from dmiddleware.ding.envs import BaseEnv, BaseEnvTimestep
from dmiddleware.ding.envs.by_type import env_ids
from dmiddleware.ding.registries import ENV_REGISTRY
from dmiddleware.env import make_env_manager


@ENV_REGISTRY.register("env_of_two_roles")
class EnvOfTwoRoles(BaseEnv):
    """Returns 1 to evaluators, and 0 to collectors."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._obs = np.array([cfg.is_evaluator], np.float32)

    @staticmethod
    def create_collector_env_cfg(cfg: Any) -> list[Any]:
        n_envs = cfg.pop("collector_env_num")
        return [EasyDict(cfg, is_evaluator=False)] * n_envs

    @staticmethod
    def create_evaluator_env_cfg(cfg: Any) -> list[Any]:
        n_envs = cfg.pop("evaluator_env_num")
        return [EasyDict(cfg, is_evaluator=True)] * n_envs

    def reset(self) -> Any:
        return self._obs

    def step(self, action: Any) -> Any:
        return BaseEnvTimestep(self._obs, np.ones(1), True, {"eval_episode_return": 1.0})

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        pass

    def close(self) -> None:
        pass


def test_any_process_makes_the_env_of_its_role() -> None:
    keys = env_ids({"type": "env_of_two_roles", "collector_env_num": 3, "evaluator_env_num": 2})
    for role, obs in (("collector", 0.0), ("evaluator", 1.0)):
        with make_env_manager(
            keys[f"{role}_id"], env_num=2, env_kwargs=keys["kwargs"], seed=0
        ) as envs:
            assert envs.ready_obs.ravel().tolist() == [obs, obs]
