"""What a policy sees when it acts in addition to observations, kept from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeGuard

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from dmiddleware.env import BaseEnvManager, BatchedTimestep, StepInfo
from dmiddleware.env.batching import NestedArrays, make_collate
from dmiddleware.env.timestep import IdArray
from dmiddleware.errors import CheckpointMismatch, ConfigError, EnvProtocolError, PolicyOutputError
from dmiddleware.model import action_mask_of
from dmiddleware.model.action_mask import as_mask, sorted_names
from dmiddleware.policy import CollectMode, EvalMode
from dmiddleware.policy.acting import STATE, first_inputs, info_names
from dmiddleware.tree import (
    Batch,
    Value,
    as_tree,
    assign_rows,
    clone,
    from_numpy,
    index_rows,
    leaves,
    to_dict,
)

__all__ = ["ActingMemory", "check_masks", "masks_in", "sample_allowed"]

_MASK = "action_mask"
_NEXT_MASK = "next_action_mask"


class ActingMemory:
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
        # By keyword [E, …]: the inputs that are kept here because the envs do not return them.
        self._held = self._first(manager.env_num)
        masks = masks_in(manager.ready_obs, manager.ready_info) if _MASK in self._names else None
        self.has_masks = masks is not None
        self._mask_shape = () if masks is None else tuple(masks.shape[1:])
        # The masks of all envs for the next step, where they are known already.
        self._mask: torch.Tensor | None = None
        self._state_is_checked = STATE not in self._held
        # From act to record.
        self._inputs: dict[str, Value] = {}
        self._next_state: Value | None = None

    @classmethod
    def of(cls, mode: CollectMode | EvalMode, manager: BaseEnvManager) -> Self | None:
        """Return the memory for a policy in these envs, or None if there is nothing to collect."""
        memory = cls(mode, manager)
        return memory if memory._held or memory._infos or memory.has_masks else None

    def _first(self, n: int) -> dict[str, Value]:
        initial_state = self._mode.spec.initial_state
        return first_inputs(self._names, initial_state, self._manager.action_space, n)

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
        output = dict(self._mode.forward(obs, env_id=env_id, **kwargs, **inputs))
        if STATE in self._held:
            state = output.pop(STATE, None)
            self._next_state = from_numpy(state) if isinstance(state, Mapping | tuple) else state
            if not self._state_is_checked:
                self._check_state(len(env_id))
        return output

    def _inputs_of(self, obs: Value, env_id: IdArray) -> dict[str, Value]:
        inputs = dict(self._held)
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
        acted: Any = slice(None)
        is_full = timestep.is_full
        if not is_full:
            position = np.full(self._manager.env_num, -1)
            position[env_id] = np.arange(len(env_id))
            rows = torch.from_numpy(position[timestep.env_id])
            inputs = {name: index_rows(column, rows) for name, column in inputs.items()}
            action = index_rows(action, rows)
            state = None if state is None else index_rows(state, rows)
        seen: dict[str, Any] = {
            "prev_action": action,
            "prev_reward": torch.from_numpy(timestep.reward),
            "is_first": torch.from_numpy(np.zeros_like(timestep.done)),
            STATE: state,
        }
        if not is_full:
            # An env that spent the step on its reset keeps what it had.
            kept = torch.from_numpy(timestep.valid.nonzero()[0])
            acted = torch.from_numpy(timestep.env_id)[kept]
            seen = {name: index_rows(seen[name], kept) for name in self._held}
        # New tensors, because the old ones belong to the rows of this step.
        self._held = {name: clone(column) for name, column in self._held.items()}
        for name, column in self._held.items():
            assign_rows(column, acted, seen[name])
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
        values, given = column
        if _is_array(values) and values.shape[1:] == like.shape:
            _check_finite(name, values)
            return torch.from_numpy(values.astype(like.dtype)), torch.from_numpy(given)
        raise _not_numbers(name, values)

    def restart(self, env_ids: Sequence[int]) -> None:
        """Forget everything about the envs that start an episode."""
        self._mask = None
        if not self._held or len(env_ids) == 0:
            return
        index = torch.tensor(env_ids)
        for name, column in self._first(len(env_ids)).items():
            assign_rows(self._held[name], index, column)

    def _check_state(self, n_rows: int) -> None:
        state = self._next_state
        wanted = {path: tuple(leaf.shape[1:]) for path, leaf in leaves(self._held[STATE])}
        is_state = isinstance(state, torch.Tensor | Batch)
        found = {path: tuple(leaf.shape) for path, leaf in leaves(state)} if is_state else None
        if found != {path: (n_rows, *shape) for path, shape in wanted.items()}:
            raise PolicyOutputError(
                f"the policy's forward returned state={state!r:.100} for {n_rows} envs; a policy "
                "with an initial_state must return the next state under the key 'state', with the "
                f"structure and the shapes of initial_state({n_rows}): {_described(wanted)}"
            )
        self._state_is_checked = True

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept between steps, as plain data."""
        return {name: to_dict(clone(column)) for name, column in self._held.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if it belongs to a policy with other inputs.
        """
        if set(state) != set(self._held):
            raise CheckpointMismatch(
                f"the checkpoint keeps {', '.join(sorted(state)) or 'nothing'} for acting, but "
                f"this policy needs {', '.join(sorted(self._held)) or 'nothing'}; it belongs to a "
                "policy with other act_inputs, or another initial_state"
            )
        self._mask = None
        for name, column in state.items():
            assign_rows(self._held[name], slice(None), from_numpy(column))


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
    values, given = column
    if not _is_array(values):
        raise _not_numbers(name, values)
    first: npt.NDArray[Any] = values[np.flatnonzero(given)[0]]
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


def _described(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(
        f"{path or 'a tensor'} [n{''.join(f', {s}' for s in shape)}]"
        for path, shape in shapes.items()
    )
