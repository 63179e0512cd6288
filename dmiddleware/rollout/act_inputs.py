"""What a policy sees when it acts in envs, in addition to observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from dmiddleware.env import BaseEnvManager, BatchedTimestep, StepInfo
from dmiddleware.env.batching import NestedArrays, make_collate
from dmiddleware.env.timestep import IdArray
from dmiddleware.errors import ConfigError, EnvProtocolError
from dmiddleware.model import action_mask_of
from dmiddleware.model.action_mask import as_mask, sorted_names
from dmiddleware.policy import CollectMode, EvalMode
from dmiddleware.policy.acting import info_names, previous_action_codec
from dmiddleware.rollout.acting_memory import ActingMemory
from dmiddleware.rollout.game import TeamEnvs
from dmiddleware.tree import (
    Batch,
    Value,
    as_tree,
    assign_rows,
    clone,
    from_numpy,
    index_rows,
    leaf_of,
    map_leaves,
    to_dict,
)

__all__ = ["ActInputs", "check_masks", "masks_in", "on_host", "sample_allowed", "usable_mask"]

_MASK = "action_mask"
_NEXT_MASK = "next_action_mask"


class ActInputs:
    """The inputs that a policy declares in ``act_inputs``, and its recurrent state, env by env.

    Attributes:
        has_masks: whether the policy asks for action masks and the envs have them.

    Args:
        mode: the policy's collect or eval mode.
        manager: the envs; launched.

    Raises:
        ConfigError: if the infos of the envs lack a declared key.
        EnvProtocolError: if masks or declared infos are not arrays of one shape.
        PolicyOutputError: if the policy's ``initial_state`` returns something invalid.
    """

    def __init__(self, mode: CollectMode | EvalMode, manager: BaseEnvManager) -> None:
        self._mode = mode
        self._manager = manager
        self._names: tuple[str, ...] = mode.spec.act_inputs
        self._infos = info_names(self._names)
        # A row of each info, for steps in which no env returns it.
        self._like = {name: _like(manager.ready_info, name) for name in self._infos}
        # The inputs that the envs do not return.
        self._memory = ActingMemory(
            self._names,
            mode.spec.initial_state,
            previous_action_codec(self._names, manager.action_space),
            manager.env_num,
        )
        masks = masks_in(manager.ready_obs, manager.ready_info) if _MASK in self._names else None
        self.has_masks = masks is not None
        self._mask_shape = () if masks is None else tuple(masks.shape[1:])
        # The masks of all envs for the next step, where they are known already.
        self._mask: torch.Tensor | None = None
        # From act to record.
        self._inputs: dict[str, Value] = {}
        self._next_state: Value | None = None

    @classmethod
    def of(cls, mode: CollectMode | EvalMode, manager: BaseEnvManager) -> ActInputs | None:
        """Return the inputs for a policy in these envs, or None if it asks for none."""
        if isinstance(manager, TeamEnvs):
            return TeamInputs(mode, manager)
        inputs = cls(mode, manager)
        asks = inputs._memory.columns or inputs._infos or inputs.has_masks
        return inputs if asks else None

    def act(self, obs: Value, env_id: IdArray, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Let the policy act with its inputs.

        Args:
            obs: the observations ``[R, …]``.
            env_id: their envs, ``[R]``.
            kwargs: further keyword arguments of the policy's forward.

        Returns:
            What the policy returned, without the next state.

        Raises:
            PolicyOutputError: in the first step, if that state does not look like the initial one.
        """
        self._inputs = inputs = self._inputs_of(obs, env_id)
        output = self._forward(obs, env_id, {**kwargs, **inputs})
        self._next_state = self._memory.next_state(output, len(env_id))
        return output

    def _forward(self, obs: Value, env_id: IdArray, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return on_host(self._mode.forward(obs, env_id=env_id, **inputs))

    def with_actions(self, output: dict[str, Any], action: Value) -> dict[str, Any]:
        """Return what the policy returned, with other actions."""
        return {**output, "action": action}

    def _inputs_of(self, obs: Value, env_id: IdArray) -> dict[str, Value]:
        inputs = dict(self._memory.columns)
        if self._infos:
            ready = self._manager.ready_info
            inputs["info"] = as_tree({name: self._numbers(ready, name)[0] for name in self._infos})
        if self.has_masks:
            mask = self._mask
            if mask is None:
                mask = self._masks(self._manager.ready_obs, self._manager.ready_info)
            inputs[_MASK] = mask
        if len(env_id) == self._manager.env_num:
            return inputs
        index = torch.from_numpy(env_id)
        return {name: index_rows(column, index) for name, column in inputs.items()}

    def record(
        self, env_id: IdArray, action: Value, timestep: BatchedTimestep
    ) -> Mapping[str, Value]:
        """Keep what the next step needs; call it before :meth:`restart`.

        Args:
            env_id: the envs that acted, ``[R]``.
            action: what they took, ``[R, …]``.
            timestep: what the envs returned; envs without a valid row in it keep what they
                had.

        Returns:
            What the policy saw, and ``next_action_mask``, row by row as in the timestep.
        """
        inputs, state = self._inputs, self._next_state
        reward: torch.Tensor = torch.from_numpy(timestep.reward)
        envs: Any = slice(None)
        is_full = timestep.is_full
        if not is_full:
            position = np.full(self._manager.env_num, -1)
            position[env_id] = np.arange(len(env_id))
            rows = torch.from_numpy(position[timestep.env_id])
            inputs = {name: index_rows(column, rows) for name, column in inputs.items()}
            # An env that spent the step on its reset keeps what it had.
            valid = torch.from_numpy(timestep.valid)
            envs, rows, reward = (
                torch.from_numpy(timestep.env_id)[valid],
                rows[valid],
                reward[valid],
            )
            action = index_rows(action, rows)
            state = None if state is None else index_rows(state, rows)
        self._memory.record(action, state, reward=reward, rows=envs)
        if not self.has_masks:
            return inputs
        mask = self._masks(timestep.next_obs, timestep.info)
        # Where an episode ended, the observations to act on are not the successors.
        self._mask = mask.clone() if is_full and not timestep.done.any() else None
        return {**inputs, _NEXT_MASK: mask}

    def _masks(self, obs: Any, info: StepInfo) -> torch.Tensor:
        mask = masks_in(obs, info)
        if mask is None:
            mask = torch.ones((info.n_rows, *self._mask_shape), dtype=torch.bool)
        return mask

    def _numbers(self, info: StepInfo, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of a column of the infos, and which envs returned it."""
        like, column = self._like[name], info.column(name)
        if column is None:
            values = np.zeros((info.n_rows, *like.shape), like.dtype)
            return torch.from_numpy(values), torch.zeros(info.n_rows, dtype=torch.bool)
        values, returned = column
        if _is_array(values) and values.shape[1:] == like.shape:
            _check_finite(name, values)
            return torch.from_numpy(values.astype(like.dtype)), torch.from_numpy(returned)
        raise _not_numbers(name, values)

    def restart(self, env_ids: Sequence[int]) -> None:
        """Forget everything about the envs that start an episode."""
        self._mask = None
        self._memory.restart(env_ids)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept between steps, as plain data."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if it belongs to a policy with other inputs.
        """
        self._memory.load_state_dict(state)
        self._mask = None


class TeamInputs(ActInputs):
    """The inputs of a policy that acts for a team: only those act whose turn it is.

    The policy's output for an env stands until the env has its row, which in a turn-based game is
    some steps later: the row has the action that was taken, and what belongs to it.

    Args:
        mode: the policy's collect or eval mode.
        manager: the team's envs; launched.
    """

    def __init__(self, mode: CollectMode | EvalMode, manager: TeamEnvs) -> None:
        super().__init__(mode, manager)
        self._team = manager
        self._standing: dict[str, Value] = {}

    def _forward(self, obs: Value, env_id: IdArray, inputs: Mapping[str, Any]) -> dict[str, Any]:
        acts = self._team.acts
        if acts.all() or not self._standing:
            self._standing = super()._forward(obs, env_id, inputs)
        elif acts.any():
            rows = torch.from_numpy(np.flatnonzero(acts))
            columns = {*self._inputs}
            chosen = {
                name: index_rows(value, rows) if name in columns else value
                for name, value in inputs.items()
            }
            output = super()._forward(index_rows(obs, rows), env_id[acts], chosen)
            self._standing = {
                name: _with_rows(column, rows, output[name])
                for name, column in self._standing.items()
            }
        return {**self._standing}

    def with_actions(self, output: dict[str, Any], action: Value) -> dict[str, Any]:
        """Return what the policy returned, with other actions of those whose turn it is."""
        rows = torch.from_numpy(np.flatnonzero(self._team.acts))
        actions = _with_rows(self._standing["action"], rows, index_rows(action, rows))
        self._standing = {**self._standing, "action": actions}
        return {**output, "action": actions}

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept between steps, as plain data."""
        standing = {name: to_dict(clone(column)) for name, column in self._standing.items()}
        return {"memory": super().state_dict(), "standing": standing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state["memory"])
        self._standing = {name: from_numpy(clone(c)) for name, c in state["standing"].items()}


def _with_rows(column: Value, rows: torch.Tensor, values: Value) -> Value:
    """Return a copy of a column with other values in some rows."""
    copy = clone(column)
    assign_rows(copy, rows, values)
    return copy


def on_host(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a policy returned, on the CPU: for observations on a device it stays there."""
    moved = {}
    for name, column in output.items():
        is_here = not isinstance(column, torch.Tensor | Batch) or leaf_of(column).is_cpu
        moved[name] = column if is_here else map_leaves(torch.Tensor.cpu, column)
    return moved


def masks_in(obs: Any, info: StepInfo) -> torch.Tensor | None:
    """Return the masks in observations, or else in infos; None if there are none.

    Rows that allow nothing, as at the end of a game, and envs that give no mask allow everything.

    Args:
        obs: observations ``[E, …]``.
        info: the infos that came with them.

    Returns:
        ``[E, A]`` bool, or ``[E, A, n]`` for several agents; the caller owns it.

    Raises:
        EnvProtocolError: if the masks in infos are not arrays of one shape.
    """
    mask = action_mask_of(obs)
    if mask is None:
        column = info.column(_MASK)
        if column is None:
            return None
        values, _ = column
        if _is_array(values) and values.ndim == 2:
            _check_finite(_MASK, values)
            mask = torch.from_numpy(values != 0)
        else:
            mask = _joined_masks(info)
    return usable_mask(mask)


def usable_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return masks ``[…, A]`` bool in which rows that allow nothing allow everything."""
    return mask | ~mask.any(-1, keepdim=True)


def _joined_masks(info: StepInfo) -> torch.Tensor:
    """Return masks that are nested like the action, one after the other."""
    rows = [row.get(_MASK) for row in info.rows()]
    try:
        masks = [None if row is None else as_mask(row) for row in rows]
        free = torch.zeros_like(next(mask for mask in masks if mask is not None))
        if free.dim() == 1:
            return torch.stack([free if mask is None else mask for mask in masks])
    except (TypeError, ValueError, RuntimeError):
        pass
    raise _not_numbers(_MASK, rows)


def sample_allowed(space: gym.Space[Any], mask: torch.Tensor) -> NestedArrays:
    """Draw one allowed action for each row of masks.

    Args:
        space: the action space of one env, from whose generator to draw.
        mask: ``[R, A]`` bool; ``[R, A, n]`` for several agents.

    Returns:
        Arrays ``[R, …]``, nested like the space.
    """
    rows = mask.flatten(1).numpy().astype(np.int8)
    return make_collate(space)([space.sample(_mask_for(space, row.copy())[0]) for row in rows])


def _mask_for(space: gym.Space[Any], mask: npt.NDArray[np.int8]) -> tuple[Any, Any]:
    """Return the mask that ``space.sample`` takes, and the rest of a joined mask."""
    parts: dict[str, Any] = {}
    match space:
        case gym.spaces.Discrete():
            return mask[: space.n], mask[space.n :]
        case gym.spaces.MultiBinary():
            # Gymnasium draws a bit where the mask is 2.
            n = int(np.prod(space.shape))
            return 2 * mask[:n].reshape(space.shape), mask[n:]
        case gym.spaces.MultiDiscrete():
            ends = np.cumsum(space.nvec)
            return tuple(np.split(mask[: ends[-1]], ends[:-1])), mask[ends[-1] :]
        case gym.spaces.Dict() | gym.spaces.Tuple():
            is_dict = isinstance(space, gym.spaces.Dict)
            inner: Any = space.spaces if is_dict else dict(enumerate(space.spaces))
            for name in sorted_names(inner):
                parts[name], mask = _mask_for(inner[name], mask)
            return (parts if is_dict else tuple(parts.values())), mask
    return None, mask


def check_masks(mode: CollectMode | EvalMode, manager: BaseEnvManager) -> None:
    """Reject envs that gave no masks at reset, but give them now.

    Args:
        mode: the policy's mode.
        manager: the envs, after a step.

    Raises:
        EnvProtocolError: if the policy asks for masks.
    """
    if _MASK in mode.spec.act_inputs and manager.ready_info.column(_MASK) is not None:
        raise EnvProtocolError(
            "the envs return action_mask in the infos of step(), but did not return it in those of "
            "reset(); return it in both, since the first action needs it too"
        )


def _like(info: StepInfo, name: str) -> npt.NDArray[Any]:
    column = info.column(name)
    if column is None:
        raise ConfigError(
            f"the policy asks for info.{name}, but the infos with which the envs start have "
            f"{', '.join(map(str, info)) or 'no keys'}; wrap the env so that reset() and step() "
            f"return {name!r} in their infos"
        )
    values, returned = column
    if not _is_array(values):
        raise _not_numbers(name, values)
    first: npt.NDArray[Any] = values[np.flatnonzero(returned)[0]]
    return first


def _is_array(values: Any) -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(values, np.ndarray) and values.dtype.kind in "biuf"


def _check_finite(name: str, values: npt.NDArray[Any]) -> None:
    if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
        return
    row = int(np.argwhere(~np.isfinite(values))[0, 0])
    raise EnvProtocolError(
        f"the info of an env (row {row}) has {name!r} = {values[row].tolist()}, but the policy "
        "acts on it, so it must be finite. Correct the env"
    )


def _not_numbers(name: str, values: object) -> EnvProtocolError:
    return EnvProtocolError(
        f"the policy asks for {name!r} of the envs' infos, but its values are not numbers or "
        f"arrays of one shape: {values!r:.100}"
    )
