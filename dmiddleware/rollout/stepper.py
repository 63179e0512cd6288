"""The step that collectors and evaluators share: the policy acts and the envs answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dmiddleware.data import from_numpy, index_rows, map_nested, to_numpy
from dmiddleware.env import BaseEnvManager, BatchedTimestep
from dmiddleware.policy import CollectMode, EvalMode

__all__ = ["VectorStep", "Stepper"]

Ids: TypeAlias = npt.NDArray[np.int64]

_EPISODE_BITS = 32
_NO_IDS: Ids = np.zeros(0, np.int64)


@dataclass(slots=True)
class VectorStep:
    """What one step made.

    Attributes:
        timestep: the env manager's answer, ``E'`` rows.
        obs: what the policy acted on, a tensor or tree ``[E', …]`` whose rows are the timestep's.
        output: what the policy returned, tensors or trees ``[E', …]``; ``action`` among them.
        episode_id: the episode that each row belongs to, ``[E'] int64``; never written again.
        ended: the envs whose episode ended.
        begun: the envs that began another episode: those, and the envs that failed.
        lost: ids of the episodes that a failing env cut short.
    """

    timestep: BatchedTimestep
    obs: Any
    output: dict[str, Any]
    episode_id: Ids
    ended: Sequence[int] = ()
    begun: Sequence[int] = ()
    lost: Sequence[int] = ()


class Stepper:
    """Lets a policy act in the envs of a manager, and counts.

    Every episode has an id that no other episode of the run has: the collector's ``source_id`` in
    the upper 32 bits, a running number in the lower ones.

    Args:
        mode: the policy's collect or eval mode.
        env_manager: a manager; it is launched at the first step if it is not yet.
        source_id: tells the collectors of one run apart, below 2^31.
    """

    def __init__(
        self,
        mode: CollectMode | EvalMode,
        env_manager: BaseEnvManager,
        *,
        source_id: int = 0,
    ) -> None:
        if not 0 <= source_id < 2**31:
            raise ValueError(f"source_id must be in [0, 2**31), got {source_id}")
        self._mode = mode
        self._manager = env_manager
        self._n_begun = source_id << _EPISODE_BITS
        self._episode_id: Ids | None = None
        self._launch = 0
        self.env_step = 0
        self.env_episode = 0
        self.episode_returns: list[float] = []

    @property
    def env_manager(self) -> BaseEnvManager:
        """The env manager."""
        return self._manager

    @property
    def env_num(self) -> int:
        """Number of envs, ``E``."""
        return self._manager.env_num

    @property
    def episode_id(self) -> Ids:
        """The id of each env's current episode, ``[E] int64``."""
        if self._episode_id is None:
            self.begin()
        assert self._episode_id is not None
        return self._episode_id

    def begin(self) -> None:
        """Launch the manager if needed, refuse envs that do not fit the policy, name the episodes.

        Raises:
            SpaceError: if the policy's model does not fit the env's spaces.
        """
        manager = self._manager
        if manager.closed:
            manager.launch()
        self._launch = manager.n_launches
        check = self._mode.get_attribute("check_spaces")
        check(manager.observation_space, manager.action_space)
        self._episode_id = np.zeros(manager.env_num, np.int64)
        self._name_episodes(range(manager.env_num))

    def leave_earlier_launch(self) -> Ids:
        """Begin other episodes if the manager was closed and launched again since the last step.

        Returns:
            The ids of the episodes that are over by that.
        """
        if self._episode_id is None or self._launch == self._manager.n_launches:
            return _NO_IDS
        left = self._episode_id
        self._mode.reset()
        self.begin()
        return left

    def restart(self, env_ids: Ids) -> None:
        """Give up the episodes of these envs and begin others."""
        if len(env_ids) == 0:
            return
        self._manager.reset(env_ids.tolist())
        self._start_episodes(env_ids.tolist())

    def reset(
        self,
        *,
        mode: CollectMode | EvalMode | None = None,
        env_manager: BaseEnvManager | None = None,
    ) -> None:
        """Begin fresh episodes in all envs, maybe of another manager, maybe with another policy."""
        self._mode = mode or self._mode
        if env_manager is not None:
            self._manager = env_manager
        if not self._manager.closed:
            self._manager.reset()
        self._mode.reset()
        self.begin()

    def step(
        self,
        policy_kwargs: Mapping[str, Any],
        *,
        random: bool = False,
        only: Ids | None = None,
    ) -> VectorStep:
        """Let the policy act once in all envs that are ready.

        Args:
            policy_kwargs: given to the policy's forward.
            random: replace the actions by draws from the manager's seeded action space. The policy
                is asked all the same, so that the columns are those of any other step.
            only: step these envs alone (sorted), if the manager can; else step all.
        """
        episode_id = self.episode_id
        manager = self._manager
        env_id, obs = manager.ready_obs_id, manager.ready_obs
        if only is not None and manager.in_lockstep:
            only = None
        if only is not None:
            chosen = np.flatnonzero(np.isin(env_id, only))
            env_id, obs = env_id[chosen], map_nested(lambda leaf: leaf[chosen], obs)
        given = torch.from_numpy(obs) if type(obs) is np.ndarray else from_numpy(obs)
        output = self._mode.forward(given, env_id=env_id, **policy_kwargs)
        if random:
            output = {**output, "action": self._draw_actions(env_id, output["action"])}
        actions = _to_numpy(output["action"])
        timestep = manager.step(actions if only is None else _by_env(actions, env_id))
        if timestep.is_full:
            step = VectorStep(timestep, given, output, episode_id)
            self.env_step += len(env_id)
        else:
            step = self._align(timestep, env_id, given, output)
        done = timestep.done.tolist()  # of so few, faster than numpy's any() by far
        if True in done:
            self._end_episodes(step, [row for row, is_end in enumerate(done) if is_end])
        return step

    def _align(self, timestep: BatchedTimestep, env_id: Ids, obs: Any, output: Any) -> VectorStep:
        """Pick the rows acted on that came back, and begin new episodes where an env failed."""
        assert self._episode_id is not None
        where = np.full(self.env_num, -1)
        where[env_id] = np.arange(len(env_id))
        rows = torch.from_numpy(where[timestep.env_id])
        step = VectorStep(
            timestep,
            _rows(obs, rows),
            {name: _rows(column, rows) for name, column in output.items()},
            self._episode_id[timestep.env_id],
        )
        if timestep.abnormal.any():
            step.lost = step.episode_id[timestep.abnormal].tolist()
            step.begun = timestep.env_id[timestep.abnormal].tolist()
            self._start_episodes(step.begun)
        self.env_step += len(timestep) - len(step.lost)
        return step

    def _end_episodes(self, step: VectorStep, rows: list[int]) -> None:
        timestep = step.timestep
        for row in rows:
            self.episode_returns.append(float(timestep.info.row(row)["eval_episode_return"]))
        self.env_episode += len(rows)
        step.ended = rows if timestep.is_full else timestep.env_id[rows].tolist()
        step.begun = [*step.begun, *step.ended]
        self._start_episodes(step.ended)

    def _start_episodes(self, env_ids: Sequence[int]) -> None:
        self._name_episodes(env_ids)
        self._mode.reset(env_ids)

    def _name_episodes(self, env_ids: Sequence[int]) -> None:
        assert self._episode_id is not None
        # A new array, since steps hold on to the old one.
        self._episode_id = self._episode_id.copy()
        for env in env_ids:
            self._episode_id[env] = self._n_begun
            self._n_begun += 1

    def split_episode(self, episode_id: int) -> int:
        """Give the rest of an episode an id of its own; returns it."""
        rest = self._n_begun
        self._n_begun += 1
        is_current = self.episode_id == episode_id
        if is_current.any():
            self._episode_id = np.where(is_current, rest, self.episode_id)
        return rest

    def _draw_actions(self, env_id: Ids, like: Any) -> Any:
        drawn = self._manager.sample_actions()
        if len(env_id) < self.env_num:
            drawn = map_nested(lambda leaf: leaf[env_id], drawn)
        actions = from_numpy(drawn)
        if isinstance(actions, torch.Tensor) and isinstance(like, torch.Tensor):
            return actions.to(like.dtype)
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode ids, and the envs' state where they have one."""
        return {
            "env_step": self.env_step,
            "env_episode": self.env_episode,
            "n_begun": self._n_begun,
            "episode_id": None if self._episode_id is None else self._episode_id.tolist(),
            "envs": None if self._manager.closed else self._manager.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Count on from ``state``, in the episodes of ``state`` where the envs can go on.

        Returns:
            Whether they can; otherwise their episodes begin anew, under new ids.
        """
        self.env_step, self.env_episode = state["env_step"], state["env_episode"]
        self._n_begun = state["n_begun"]
        self.episode_returns = []
        self._episode_id = None
        if state["envs"] is None or state["episode_id"] is None:
            return False
        if self._manager.closed:
            self._manager.launch()
        if not self._manager.load_state_dict(state["envs"]):
            return False
        self._launch = self._manager.n_launches
        self._episode_id = np.array(state["episode_id"], np.int64)
        return True


def _to_numpy(action: Any) -> Any:
    if isinstance(action, torch.Tensor):
        return action.numpy()
    return to_numpy(action)


def _by_env(actions: Any, env_id: Ids) -> dict[int, Any]:
    def one(row: int) -> Any:
        return map_nested(lambda leaf: leaf[row], actions)

    return {env: one(row) for row, env in enumerate(env_id.tolist())}


def _rows(column: Any, rows: torch.Tensor) -> Any:
    return column[rows] if isinstance(column, torch.Tensor) else index_rows(column, rows)
