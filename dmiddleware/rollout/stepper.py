"""One step of acting: the policy chooses actions and the environments take them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.env import BaseEnvManager, BatchedTimestep, check_env_manager
from dmiddleware.env.batching import NestedArrays
from dmiddleware.env.timestep import IdArray, StepInfo
from dmiddleware.errors import ConfigError, EnvProtocolError, PolicyOutputError
from dmiddleware.policy import CollectMode, EvalMode
from dmiddleware.rollout.act_inputs import (
    ActInputs,
    check_masks,
    masks_in,
    on_host,
    sample_allowed,
)
from dmiddleware.rollout.episode_info import SUCCESS_KEYS, success_of, warn_of_success
from dmiddleware.tree import Batch, Value, from_numpy, index_rows, leaves, to_numpy

__all__ = ["Stepper", "VectorStep", "check_output", "first_episode_id"]

_FLOATS: Final = frozenset((float, np.float32, np.float64))

_SOURCE_BITS: Final = 35
_COUNTER_BITS: Final = 28
_NO_IDS: Final[IdArray] = np.zeros(0, np.int64)
_NO_INPUTS: Final[Mapping[str, Value]] = {}
# Columns that describe the action that the policy drew; a random action makes them wrong.
_ACTION_OUTPUTS: Final = ("log_prob", "raw_action")


@dataclass(slots=True)
class VectorStep:
    """One step of several environments.

    As in a batch, ``obs`` is what was acted on, and ``timestep.next_obs`` what followed.

    Attributes:
        timestep: what the env manager returned, ``E'`` rows.
        obs: what the policy acted on, a tensor or tree ``[E', …]``, row by row as in the timestep.
        output: what the policy returned, tensors or trees ``[E', …]``; it includes ``action``, but
            not the next recurrent state.
        inputs: what the policy declared in ``act_inputs`` and saw, tensors or trees ``[E', …]``,
            by keyword; with ``state`` if it is recurrent, and ``next_action_mask``.
        episode_id: the episode that each row belongs to, ``[E'] int64``; never written again.
        ended: the envs whose episode ended.
        begun: the envs that started another episode: those in ``ended`` and those that failed.
        lost: the ids of the episodes that a failing env cut short.
    """

    timestep: BatchedTimestep
    obs: Value
    output: dict[str, Any]
    episode_id: IdArray
    inputs: Mapping[str, Value] = field(default_factory=dict)
    ended: Sequence[int] = ()
    begun: Sequence[int] = ()
    lost: Sequence[int] = ()


class Stepper:
    """Lets a policy act in the envs of a manager, and counts steps and episodes.

    Every episode has an id that no other episode has, in this process or any other: 35 random bits
    that each stepper draws from the operating system, followed by a 28-bit counter.

    Attributes:
        env_manager: the env manager.
        env_num: number of envs, ``E``.
        env_step: transitions made so far, over all envs.
        env_episode: episodes finished so far, over all envs.
        episode_returns: undiscounted returns of the episodes that ended, in this order.
        episode_lengths: the steps of these episodes.
        episode_successes: 1.0 for each of these episodes that reached its goal, 0.0 for the others;
            only of envs that say so in the last info of an episode, by a key in
            :data:`~dmiddleware.rollout.episode_info.SUCCESS_KEYS`.
        episode_id: the id of each env's current episode, ``[E] int64``; empty before the first one.

    Args:
        mode: the policy's collect or eval mode.
        env_manager: the envs; launched at the first step if they are closed.
        user: the caller's name, for messages.

    Raises:
        ConfigError: if ``env_manager`` is not an env manager.
    """

    def __init__(
        self, mode: CollectMode | EvalMode, env_manager: BaseEnvManager, *, user: str
    ) -> None:
        self._user = user
        self._mode = mode
        self._memory: ActInputs | None = None
        self._next_id = first_episode_id()
        self._is_checked = False
        self.env_step = 0
        self.env_episode = 0
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []
        self.episode_successes: list[float] = []
        self._lengths: IdArray = _NO_IDS  # the steps of each env's current episode
        self._use_envs(env_manager)

    def _use_envs(self, env_manager: BaseEnvManager) -> None:
        check_env_manager(env_manager, user=self._user)
        self.env_manager = env_manager
        self.env_num = env_manager.env_num
        self._all_ids: IdArray = np.arange(self.env_num)
        self._revision = 0
        self.episode_id = _NO_IDS

    def start(self) -> None:
        """Launch the envs if they are closed; the first time, check that the policy fits them.

        Stepping does this too.

        Raises:
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        if not len(self.episode_id):
            self._open()
            self._begin_all()
        elif self.env_manager.closed:
            self.env_manager.launch()

    def _open(self) -> None:
        """Launch the envs if they are closed, check that the policy fits them, and forget."""
        manager = self.env_manager
        launches = manager.closed
        if launches:
            manager.launch()
        try:
            self._mode.spec.check_spaces(manager.observation_space, manager.action_space)
            self._memory = self._make_memory()
        except BaseException:
            if launches:
                manager.close()
            raise

    def _make_memory(self) -> ActInputs | None:
        """Return what the policy sees in addition to observations; None: nothing."""
        return ActInputs.of(self._mode, self.env_manager)

    def reset(self) -> None:
        """Start new episodes in all envs.

        Raises:
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        if not self.env_manager.closed:
            self.env_manager.reset()
        self._mode.reset()
        self._is_checked = False
        self.episode_id = _NO_IDS
        self.start()

    def step(
        self,
        policy_kwargs: Mapping[str, Any],
        *,
        random: bool = False,
        only: IdArray | None = None,
    ) -> VectorStep:
        """Let the policy act once in all envs.

        Args:
            policy_kwargs: passed to the policy's forward.
            random: replace the actions by draws from the manager's seeded action space. The policy
                is still called, and the rows have the same columns as in any other step.
            only: step only these envs (sorted) if the manager can; otherwise step all.

        Raises:
            ConfigError: if ``random`` and the policy is on-policy.
            PolicyOutputError: if the policy does not return one row per env, with ``action``.
        """
        if not len(self.episode_id):
            self.start()
        manager, memory, episode_id = self.env_manager, self._memory, self.episode_id
        env_id, ready_obs = self._all_ids, manager.ready_obs
        steps_some = only is not None and len(only) < self.env_num and not manager.in_lockstep
        if steps_some:
            assert only is not None
            env_id, ready_obs = only, index_rows(ready_obs, only)
        is_array = type(ready_obs) is np.ndarray
        obs = torch.from_numpy(ready_obs) if is_array else from_numpy(ready_obs)
        if memory is None:
            output = self._mode.forward(obs, env_id=env_id, **policy_kwargs)
            output = output if is_array else on_host(output)
        else:
            output = memory.act(obs, env_id, policy_kwargs)
        if not self._is_checked:
            check_output(output, len(env_id))
        if random:
            output = self._with_random_actions(output, env_id)
        action = output["action"]
        actions = action.numpy() if type(action) is torch.Tensor else to_numpy(action)
        timestep = manager.step(_by_env(actions, env_id) if steps_some else actions)
        self._revision = manager.revision
        if not self._is_checked:
            if memory is None or not memory.has_masks:
                check_masks(self._mode, manager)  # they must not appear only now
            self._is_checked = True
        inputs = _NO_INPUTS if memory is None else memory.record(env_id, action, timestep)
        if timestep.is_full:
            step = VectorStep(timestep, obs, output, episode_id, inputs)
            self.env_step += len(env_id)
            self._lengths += 1
        else:
            step = self._align(timestep, env_id, obs, output, inputs, episode_id)
        done = timestep.done.tolist()  # for so few values, much faster than numpy's any()
        if True in done:
            self._end_episodes(step, np.flatnonzero(timestep.done).tolist())
        return step

    def _align(
        self,
        timestep: BatchedTimestep,
        env_id: IdArray,
        obs: Value,
        output: dict[str, Any],
        inputs: Mapping[str, Value],
        episode_id: IdArray,
    ) -> VectorStep:
        """Keep the rows of the envs in the timestep; start new episodes where an env failed."""
        self.env_step += int(np.count_nonzero(timestep.valid))
        self._lengths[timestep.env_id[timestep.valid]] += 1
        if timestep.env_id is env_id and not timestep.abnormal.any():
            # All envs were stepped, and some only reset.
            return VectorStep(timestep, obs, output, episode_id, inputs)
        position = np.full(self.env_num, -1)
        position[env_id] = np.arange(len(env_id))
        rows = torch.from_numpy(position[timestep.env_id])
        step = VectorStep(
            timestep,
            index_rows(obs, rows),
            {name: index_rows(column, rows) for name, column in output.items()},
            episode_id[timestep.env_id],
            inputs,
        )
        if timestep.abnormal.any():
            step.lost = step.episode_id[timestep.abnormal].tolist()
            step.begun = timestep.env_id[timestep.abnormal].tolist()
            self._begin_episodes(step.begun)
        return step

    def _end_episodes(self, step: VectorStep, rows: list[int]) -> None:
        timestep = step.timestep
        # Even a timestep of all envs may have its rows in another order, after a failure.
        step.ended = rows if timestep.is_full else timestep.env_id[rows].tolist()
        step.begun = [*step.begun, *step.ended]
        for env_id, value in zip(step.ended, timestep.returns, strict=True):
            if type(value) not in _FLOATS or not math.isfinite(value):
                _check_return(value, env_id)
            self.episode_returns.append(float(value))
        self.episode_lengths += self._lengths[step.ended].tolist()
        infos = timestep.infos
        for row in rows:
            # Usually one dictionary for each row; columns, where the env or a reader wants them.
            info = infos.values_of(SUCCESS_KEYS, row) if isinstance(infos, StepInfo) else infos[row]
            if not info.keys().isdisjoint(SUCCESS_KEYS):
                self._note_success(info)
        self.env_episode += len(rows)
        self._begin_episodes(step.ended)

    def _note_success(self, info: Mapping[str, Any]) -> None:
        warn_of_success(info, self.env_manager)
        success = success_of(info)
        if success is not None:
            self.episode_successes.append(success)

    def _begin_episodes(self, env_ids: Sequence[int]) -> None:
        """Give the new episodes of some envs their ids, and forget what acting kept of them."""
        self.episode_id = self.episode_id.copy()  # earlier steps refer to the old array
        self.episode_id[env_ids] = self._new_ids(len(env_ids))
        self._lengths[env_ids] = 0
        if self._memory is not None:
            self._memory.restart(env_ids)
        self._mode.reset(env_ids)

    def _begin_all(self) -> None:
        self.episode_id = self._new_ids(self.env_num)
        self._lengths = np.zeros(self.env_num, np.int64)
        if self._memory is not None:
            self._memory.restart(range(self.env_num))
        self._revision = self.env_manager.revision

    def _new_ids(self, n: int) -> IdArray:
        """Return ids that no other episode has, ``[n] int64``."""
        if self._next_id % (1 << _COUNTER_BITS) + n >= 1 << _COUNTER_BITS:
            self._next_id = first_episode_id()
        first = self._next_id
        self._next_id += n
        return np.arange(first, self._next_id)

    def check_random_actions(self) -> None:
        """Reject random actions for an on-policy policy, which cannot learn from them.

        Raises:
            ConfigError: if the policy is on-policy.
        """
        if self._mode.spec.on_policy:
            raise ConfigError(
                f"{self._user} cannot use random actions with an on-policy policy such as PPO, "
                "which learns from the actions of its own distribution; collect without random "
                "actions, they are for off-policy policies such as DQN"
            )

    def _with_random_actions(self, output: dict[str, Any], env_id: IdArray) -> dict[str, Any]:
        self.check_random_actions()
        check_replaceable(output, user=self._user)
        drawn = self.env_manager.sample_actions()
        if len(env_id) < self.env_num:
            drawn = index_rows(drawn, env_id)
        mask = masks_in(self.env_manager.ready_obs, self.env_manager.ready_info)
        if mask is not None:
            drawn = sample_allowed(self.env_manager.action_space, mask[torch.from_numpy(env_id)])
        actions, replaced = from_numpy(drawn), output["action"]
        if isinstance(actions, torch.Tensor) and isinstance(replaced, torch.Tensor):
            actions = actions.to(replaced.dtype)
        if self._memory is not None:
            return self._memory.with_actions(output, actions)
        return {**output, "action": actions}

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode ids, what the policy remembers, and the envs if launched."""
        return {
            "env_step": self.env_step,
            "env_episode": self.env_episode,
            "next_id": self._next_id,
            "episode_id": self.episode_id.tolist(),
            "lengths": self._lengths.tolist(),
            "envs": None if self.env_manager.closed else self.env_manager.state_dict(),
            "memory": None if self._memory is None else self._memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore what :meth:`state_dict` returned.

        Returns:
            Whether the envs continue their episodes; otherwise they start new ones with new ids.

        Raises:
            CheckpointMismatch: if the policy needs other inputs than the one that was saved.
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        self.env_step, self.env_episode = state["env_step"], state["env_episode"]
        self._next_id = state["next_id"]
        self.episode_returns, self.episode_lengths, self.episode_successes = [], [], []
        self.episode_id = _NO_IDS
        if state["envs"] is None or not state["episode_id"]:
            return False
        self._open()
        if not self.env_manager.load_state_dict(state["envs"]):
            return False
        self._revision = self.env_manager.revision
        self.episode_id = np.array(state["episode_id"], np.int64)
        self._lengths = np.array(state["lengths"], np.int64)
        if self._memory is not None:
            self._memory.load_state_dict(state.get("memory") or {})
        return True


def _check_return(value: Any, env_id: int) -> None:
    """Check the return of an episode, which the info of an env may give itself.

    Raises:
        EnvProtocolError: if it is not a finite number.
    """
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "iufb" or not math.isfinite(array):
        raise EnvProtocolError(
            f"env {env_id} ended an episode with info['eval_episode_return'] = {_short(value)}; it "
            "must be a finite number. Correct the env, or leave the key out: the rewards are summed"
        )


def first_episode_id() -> int:
    """Draw an id for an episode, from which to count: no other process draws a close one."""
    return secrets.randbits(_SOURCE_BITS) << _COUNTER_BITS


def check_output(output: Mapping[str, object], n_envs: int) -> None:
    """Check that a policy returned tensors with one row per env.

    Raises:
        PolicyOutputError: with what was returned.
    """
    expected = f"a dictionary of tensors [{n_envs}, …], one row per env"
    for name, column in output.items():
        if not isinstance(column, torch.Tensor | Batch):
            raise PolicyOutputError(
                f"the policy's forward returned {name}={_short(column)}; it must return {expected}"
            )
        for path, leaf in leaves(column, name):
            if leaf.dim() == 0 or leaf.shape[0] != n_envs:
                raise PolicyOutputError(
                    f"the policy's forward returned {path} of shape {tuple(leaf.shape)} for "
                    f"{n_envs} envs; it must return {expected}"
                )


def check_replaceable(output: Mapping[str, object], *, user: str) -> None:
    """Check that random actions may replace those that a policy returned.

    Raises:
        ConfigError: if other columns depend on the actions.
    """
    wrong = [name for name in _ACTION_OUTPUTS if name in output]
    if wrong:
        raise ConfigError(
            f"{user} cannot replace this policy's actions with random ones, because its output "
            f"also has {', '.join(wrong)} of the replaced actions; collect without random actions"
        )


def _short(value: object) -> str:
    text = repr(value)
    return f"{text[:97]}..." if len(text) > 100 else text


def _by_env(actions: NestedArrays, env_id: IdArray) -> dict[int, Any]:
    return {env: index_rows(actions, row) for row, env in enumerate(env_id.tolist())}
