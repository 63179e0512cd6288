"""A parallel collector with one policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dmiddleware.classic.collate import split_outputs
from dmiddleware.env import BatchedTimestep, EnvTimestep, make_env_manager
from dmiddleware.rollout.act_inputs import ActInputs
from dmiddleware.tree import from_numpy, index_rows, stack, to_numpy
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
        self._obs: dict[int, Any] = {}
        self._outputs: dict[int, dict[str, Any]] = {}
        self._memory: ActInputs | None = None
        self._inputs: dict[int, dict[str, Any]] = {}
        self._create_policies()

    @property
    def policy(self) -> Any:
        """The policy's collect mode, or its eval mode when evaluating; None before it is set.

        Raises:
            ConfigError: when it is set to a mode whose config has neither ``n_sample`` nor
                ``n_episode``.
        """
        return self._modes[0] if self._modes else None

    @policy.setter
    def policy(self, policy: Any) -> None:
        self._use_policies([policy])

    def _create_policies(self) -> None:
        """Build what the config's ``policy`` describes."""
        if self._cfg.policy:
            self.policy = self._make_policy(self._cfg.policy)

    def _policy_paths(self) -> list[tuple[Any, bool]]:
        return [(self._cfg.policy_update_path, True)]

    def _make_env_manager(self) -> Any:
        return make_env_manager(**self._env_options())

    def _prepare_acting(self) -> None:
        self._memory = ActInputs.of(self._modes[0], self._env_manager)

    def _ready_obs(self) -> dict[int, Any]:
        manager = self._env_manager
        obs = from_numpy(manager.ready_obs)
        playing = range(self._env_num) if manager.in_lockstep else set(self._goal.unfinished)
        return {
            env_id: index_rows(obs, index)
            for index, env_id in enumerate(manager.ready_obs_id.tolist())
            if env_id in playing
        }

    def _policy_inference(self, obs: dict[int, Any]) -> dict[int, Any]:
        kwargs = {} if self._eval_flag else self._collect_kwargs(0)
        self._obs = obs
        if self._memory is None:
            self._outputs = self._modes[0].forward(obs, **kwargs)
        else:
            env_ids = list(obs)
            batched = self._memory.act(stack(list(obs.values())), np.array(env_ids), kwargs)
            self._outputs = split_outputs(batched, env_ids)
        return {env_id: output["action"] for env_id, output in self._outputs.items()}

    def _env_step(self, action: dict[int, Any]) -> dict[int, EnvTimestep]:
        playing = set(self._goal.unfinished)  # envs in lockstep continue, uncounted
        actions = {env_id: to_numpy(one) for env_id, one in action.items()}
        timestep = self._env_manager.step(actions)
        if self._memory is not None:
            self._remember(self._memory, timestep)
        return {one.env_id: one for one in timestep if one.env_id in playing}

    def _remember(self, memory: ActInputs, timestep: BatchedTimestep) -> None:
        env_ids = list(self._outputs)
        action = stack([output["action"] for output in self._outputs.values()])
        seen = memory.record(np.array(env_ids), action, timestep)
        self._inputs = split_outputs(seen, timestep.env_id.tolist())
        memory.restart(timestep.env_id[timestep.done | timestep.abnormal].tolist())

    def _process_timestep(self, timestep: dict[int, EnvTimestep]) -> None:
        for env_id, one in timestep.items():
            if one.info.get("abnormal"):
                self._drop(env_id)
                continue
            self._step_count += 1
            if not self._eval_flag:
                transition = self._modes[0].process_transition(
                    self._obs[env_id], self._outputs[env_id], one
                )
                transition = {**self._inputs.get(env_id, {}), **transition}
                self._gather(env_id, 0, transition, is_end=one.done)
            if one.done:
                self._count_episode(env_id, one.info)
        abnormal = [env_id for env_id, one in timestep.items() if one.info.get("abnormal")]
        self._end_step({env_id: one.done for env_id, one in timestep.items()}, abnormal)

    def _train_iter(self) -> Any:
        return self._policy_iters[0] if self._policy_iters else 0
