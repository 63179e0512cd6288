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
from dmiddleware.env.timestep import IdArray
from dmiddleware.errors import ConfigError, EnvProtocolError, PolicyOutputError
from dmiddleware.policy import CollectMode, EvalMode
from dmiddleware.rollout.acting_memory import ActingMemory, check_masks, masks_in, sample_allowed
from dmiddleware.tree import Batch, Value, from_numpy, index_rows, leaves, to_numpy

__all__ = ["Stepper", "VectorStep", "check_random_actions", "first_episode_id"]

_FLOATS: Final = frozenset((float, np.float32, np.float64))

_SOURCE_BITS: Final = 35
_COUNTER_BITS: Final = 28
_NO_IDS: Final[IdArray] = np.zeros(0, np.int64)
_NO_INPUTS: Final[Mapping[str, Value]] = {}
# Columns that describe the action that the policy drew; a random action makes them wrong.
_OF_DRAWN_ACTION: Final = ("log_prob", "raw_action")


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
        check_env_manager(env_manager, user=user)
        self._mode = mode
        self._manager = env_manager
        self._user = user
        self._next_id = first_episode_id()
        self._episode_id: IdArray | None = None
        self._revision = 0
        self._is_checked = False
        self._memory: ActingMemory | None = None
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
    def episode_id(self) -> IdArray:
        """The id of each env's current episode, ``[E] int64``."""
        if self._episode_id is None:
            self.start()
        assert self._episode_id is not None
        return self._episode_id

    @property
    def has_started(self) -> bool:
        """Whether the envs have had their first episodes."""
        return self._episode_id is not None

    def start(self) -> None:
        """Launch the envs if they are closed, and start to number their episodes.

        Raises:
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        self._open()
        self._start_all()

    def _open(self) -> None:
        """Launch the envs if they are closed, check that the policy fits them, and forget."""
        manager = self._manager
        launches = manager.closed
        if launches:
            manager.launch()
        try:
            self._mode.spec.check_spaces(manager.observation_space, manager.action_space)
            self._memory = ActingMemory.of(self._mode, manager)
        except BaseException:
            if launches:
                manager.close()
            raise

    def give_up_foreign_episodes(self) -> IdArray:
        """Start new episodes if something else has launched, reset or stepped the envs.

        Returns:
            The ids of the episodes that were abandoned.
        """
        if self._episode_id is None or self._revision == self._manager.revision:
            return _NO_IDS
        given_up = self._episode_id
        if any(self._manager.episode_lengths):
            self._manager.reset()
        self._mode.reset()
        self._start_all()
        return given_up

    def restart(self, env_ids: IdArray) -> None:
        """Abandon the current episodes of these envs and start new ones."""
        if len(env_ids) == 0:
            return
        self._manager.reset(env_ids.tolist())
        self._revision = self._manager.revision
        self._start_episodes(env_ids.tolist())

    def reset(
        self,
        *,
        mode: CollectMode | EvalMode | None = None,
        env_manager: BaseEnvManager | None = None,
    ) -> None:
        """Start new episodes in all envs, optionally of another manager or with another policy.

        Raises:
            ConfigError: if ``env_manager`` is not an env manager.
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        if env_manager is not None:
            check_env_manager(env_manager, user=self._user)
            self._manager = env_manager
        if mode is not None:
            self._mode = mode
        if not self._manager.closed:
            self._manager.reset()
        self._mode.reset()
        self._is_checked = False
        self.start()

    def step(
        self,
        policy_kwargs: Mapping[str, Any],
        *,
        random: bool = False,
        only: IdArray | None = None,
    ) -> VectorStep:
        """Let the policy act once in all envs that are ready.

        Args:
            policy_kwargs: passed to the policy's forward.
            random: replace the actions by draws from the manager's seeded action space. The policy
                is still called, and the rows have the same columns as in any other step.
            only: step only these envs (sorted) if the manager can; otherwise step all.

        Raises:
            ConfigError: if ``random`` and the policy is on-policy.
            PolicyOutputError: if the policy does not return one row per env, with ``action``.
        """
        episode_id = self._episode_id
        if episode_id is None:
            episode_id = self.episode_id
        manager, memory = self._manager, self._memory
        env_id, ready_obs = manager.ready_obs_id, manager.ready_obs
        if only is not None and manager.in_lockstep:
            only = None
        if only is not None:
            chosen = np.flatnonzero(np.isin(env_id, only))
            env_id, ready_obs = env_id[chosen], index_rows(ready_obs, chosen)
        is_array = type(ready_obs) is np.ndarray
        obs = torch.from_numpy(ready_obs) if is_array else from_numpy(ready_obs)
        output = self._act(obs, env_id, policy_kwargs)
        if random:
            output = self._with_random_actions(output, env_id)
        action = output["action"]
        actions = action.numpy() if type(action) is torch.Tensor else to_numpy(action)
        timestep = manager.step(actions if only is None else _by_env(actions, env_id))
        self._revision = manager.revision
        if not self._is_checked:
            self._check_masks()
        inputs = _NO_INPUTS if memory is None else memory.record(env_id, action, timestep)
        if timestep.is_full:
            step = VectorStep(timestep, obs, output, episode_id, inputs)
            self.env_step += len(env_id)
        else:
            step = self._align(timestep, env_id, obs, output, inputs, episode_id)
        done = timestep.done.tolist()  # for so few values, much faster than numpy's any()
        if True in done:
            self._end_episodes(step, [row for row, is_end in enumerate(done) if is_end])
        return step

    def _act(self, obs: Value, env_id: IdArray, policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if self._memory is None:
            output = self._mode.forward(obs, env_id=env_id, **policy_kwargs)
        else:
            output = self._memory.act(obs, env_id, policy_kwargs)
        if not self._is_checked:
            _check_output(output, len(env_id))
        return output

    def _check_masks(self) -> None:
        """Check, after the first step, that masks did not only appear then."""
        if self._memory is None or not self._memory.has_masks:
            check_masks(self._mode, self._manager)
        self._is_checked = True

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
            self._start_episodes(step.begun)
        return step

    def _end_episodes(self, step: VectorStep, rows: list[int]) -> None:
        timestep = step.timestep
        returns = timestep.info.values_at("eval_episode_return", rows)
        self.episode_returns += map(_checked_return, returns, timestep.env_id[rows].tolist())
        self.env_episode += len(rows)
        # Even a timestep of all envs may have its rows in another order, after a failure.
        step.ended = rows if timestep.is_full else timestep.env_id[rows].tolist()
        step.begun = [*step.begun, *step.ended]
        self._start_episodes(step.ended)

    def _start_all(self) -> None:
        self._episode_id = np.zeros(self.env_num, np.int64)
        self._number_episodes(range(self.env_num))
        if self._memory is not None:
            self._memory.restart(range(self.env_num))
        self._revision = self._manager.revision

    def _start_episodes(self, env_ids: Sequence[int]) -> None:
        self._number_episodes(env_ids)
        if self._memory is not None:
            self._memory.restart(env_ids)
        self._mode.reset(env_ids)

    def _number_episodes(self, env_ids: Sequence[int]) -> None:
        assert self._episode_id is not None
        # Earlier steps refer to the old array.
        self._episode_id = self._episode_id.copy()
        for env in env_ids:
            self._episode_id[env] = self._take_id()

    def _take_id(self) -> int:
        taken = self._next_id
        self._next_id += 1
        if self._next_id % (1 << _COUNTER_BITS) == 0:
            self._next_id = first_episode_id()
        return taken

    def split_episode(self, episode_id: int) -> int:
        """Give the remaining rows of an episode a new id, and return that id."""
        rest = self._take_id()
        self._episode_id = np.where(self.episode_id == episode_id, rest, self.episode_id)
        return rest

    def _with_random_actions(self, output: dict[str, Any], env_id: IdArray) -> dict[str, Any]:
        check_random_actions(self._mode, user=self._user)
        wrong = [name for name in _OF_DRAWN_ACTION if name in output]
        if wrong:
            raise ConfigError(
                f"{self._user} cannot replace this policy's actions with random ones, because its "
                f"output also has {', '.join(wrong)} of the replaced actions; collect without "
                "random actions"
            )
        drawn = self._manager.sample_actions()
        if len(env_id) < self.env_num:
            drawn = index_rows(drawn, env_id)
        mask = masks_in(self._manager.ready_obs, self._manager.ready_info)
        if mask is not None:
            drawn = sample_allowed(self._manager.action_space, mask[torch.from_numpy(env_id)])
        actions, replaced = from_numpy(drawn), output["action"]
        if isinstance(actions, torch.Tensor) and isinstance(replaced, torch.Tensor):
            actions = actions.to(replaced.dtype)
        return {**output, "action": actions}

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode ids, what the policy remembers, and the envs if launched."""
        return {
            "env_step": self.env_step,
            "env_episode": self.env_episode,
            "next_id": self._next_id,
            "episode_id": None if self._episode_id is None else self._episode_id.tolist(),
            "envs": None if self._manager.closed else self._manager.state_dict(),
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
        self.episode_returns = []
        self._episode_id = None
        if state["envs"] is None or state["episode_id"] is None:
            return False
        self._open()
        if not self._manager.load_state_dict(state["envs"]):
            return False
        self._revision = self._manager.revision
        self._episode_id = np.array(state["episode_id"], np.int64)
        if self._memory is not None:
            self._memory.load_state_dict(state.get("memory") or {})
        return True


def check_random_actions(mode: CollectMode | EvalMode, *, user: str) -> None:
    """Reject random actions for an on-policy policy, which cannot learn from them.

    Args:
        mode: the policy's mode.
        user: the caller's name, for the message.

    Raises:
        ConfigError: if the policy is on-policy.
    """
    if mode.spec.on_policy:
        raise ConfigError(
            f"{user} cannot use random actions with an on-policy policy such as PPO, which learns "
            "from the actions of its own distribution; collect without random actions, they are "
            "for off-policy policies such as DQN"
        )


def _checked_return(value: Any, env_id: int) -> float:
    """Return the return of an episode, which the info of an env may give itself.

    Raises:
        EnvProtocolError: if it is not a finite number.
    """
    if type(value) in _FLOATS and math.isfinite(value):
        return float(value)
    array = np.asarray(value)
    if array.ndim == 0 and array.dtype.kind in "iufb" and math.isfinite(array):
        return float(value)
    raise EnvProtocolError(
        f"env {env_id} ended an episode with info['eval_episode_return'] = {_short(value)}; it "
        "must be a finite number. Correct the env, or leave the key out: the rewards are summed"
    )


def first_episode_id() -> int:
    """Draw an id for an episode, from which to count: no other process draws a close one."""
    return secrets.randbits(_SOURCE_BITS) << _COUNTER_BITS


def _check_output(output: Mapping[str, object], n_envs: int) -> None:
    """Check that a policy returned tensors with one row per env.

    Raises:
        PolicyOutputError: with what was returned.
    """
    wanted = f"a dictionary of tensors [{n_envs}, …], one row per env"
    for name, column in output.items():
        if not isinstance(column, torch.Tensor | Batch):
            raise PolicyOutputError(
                f"the policy's forward returned {name}={_short(column)}; it must return {wanted}"
            )
        for path, leaf in leaves(column, name):
            if leaf.dim() == 0 or leaf.shape[0] != n_envs:
                raise PolicyOutputError(
                    f"the policy's forward returned {path} of shape {tuple(leaf.shape)} for "
                    f"{n_envs} envs; it must return {wanted}"
                )


def _short(value: object) -> str:
    text = repr(value)
    return f"{text[:97]}..." if len(text) > 100 else text


def _by_env(actions: NestedArrays, env_id: IdArray) -> dict[int, Any]:
    return {env: index_rows(actions, row) for row, env in enumerate(env_id.tolist())}
