"""A parallel collector with one policy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from dmiddleware.data import from_numpy, map_nested, to_numpy
from dmiddleware.env import BaseEnvManager, EnvTimestep, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy.base.collate import row
from dmiddleware.worker.collector.parallel.base import PARALLEL_COLLECTOR_REGISTRY
from dmiddleware.worker.collector.parallel.trajectory_collector import TrajectoryCollector

__all__ = ["ZerglingParallelCollector"]


@PARALLEL_COLLECTOR_REGISTRY.register("zergling")
class ZerglingParallelCollector(TrajectoryCollector):
    """One policy plays in many envs.

    All envs that are ready act together. The weights are updated between two steps, never during
    one.

    Args:
        cfg: see :class:`TrajectoryCollector`.
        clock: seconds that never decrease.

    Raises:
        ConfigError: for an unusable config, or a policy whose config has neither ``n_sample`` nor
            ``n_episode``.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(cfg, clock=clock)
        self._policy_iter = 0
        self._obs: dict[int, Any] = {}
        self._outputs: dict[int, dict[str, Any]] = {}
        if self._cfg.policy:
            self.policy = self._make_policy(self._cfg.policy)

    @property
    def policy(self) -> Any:
        """The policy's collect mode, or its eval mode when evaluating.

        Raises:
            ConfigError: when it is set to a mode whose config has neither ``n_sample`` nor
                ``n_episode``.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        self._traj_len = math.inf if self._eval_flag else self._longest_trajectory(policy)
        self._policy = policy

    def _make_env_manager(self) -> BaseEnvManager:
        manager = make_env_manager(**self._env_options())
        manager.episode_num = self._episode_num
        return manager

    def _run(self) -> None:
        if self._policy is None:
            raise ConfigError(f"{self} has no policy; set policy in its config, or its property")
        manager = self._env_manager
        manager.launch()
        self._policy.get_attribute("check_spaces")(manager.observation_space, manager.action_space)
        super()._run()

    def _ready_obs(self) -> dict[int, Any]:
        manager = self._env_manager
        obs = from_numpy(manager.ready_obs)
        finished = set() if manager.in_lockstep else self._finished_envs()
        return {
            env_id: row(obs, index)
            for index, env_id in enumerate(manager.ready_obs_id.tolist())
            if env_id not in finished
        }

    def _finished_envs(self) -> set[int]:
        if self._episode_num is None:
            return set()
        counts = enumerate(self._env_manager.episode_counts)
        return {env_id for env_id, count in counts if count >= self._episode_num}

    def _policy_inference(self, obs: dict[int, Any]) -> dict[int, Any]:
        kwargs = {} if self._eval_flag else self._cfg.collect_setting
        self._obs, self._outputs = obs, self._policy.forward(obs, **kwargs)
        return {env_id: output["action"] for env_id, output in self._outputs.items()}

    def _env_step(self, action: dict[int, Any]) -> dict[int, EnvTimestep]:
        finished = self._finished_envs()  # envs in lockstep step on; what they do is not counted
        actions = {env_id: map_nested(to_numpy, one) for env_id, one in action.items()}
        timestep = self._env_manager.step(actions)
        return {one.env_id: one for one in timestep if one.env_id not in finished}

    def _process_timestep(self, timestep: dict[int, EnvTimestep]) -> None:
        for env_id, one in timestep.items():
            if one.info.get("abnormal"):
                self._drop(env_id)
                self._policy.reset([env_id])
                continue
            self._step_count += 1
            if not self._eval_flag:
                self._gather(
                    (env_id, 0),
                    self._policy,
                    self._policy.process_transition(self._obs[env_id], self._outputs[env_id], one),
                    policy_iter=self._policy_iter,
                    traj_len=self._traj_len,
                    is_end=one.done,
                )
            if one.done:
                self._count_episode(one)
                self._policy.reset([env_id])
        if any(one.done for one in timestep.values()):
            self._report()

    def _update_policy(self) -> None:
        is_first = math.isinf(self._last_update)
        if not self._is_update_due():
            return
        found = self._fetch(self._cfg.policy_update_path, is_first=is_first)
        if found is not None:
            self._policy_iter = int(found["iter"])
            self._policy.load_state_dict({k: v for k, v in found.items() if k != "iter"})

    def _train_iter(self) -> int:
        return self._policy_iter
