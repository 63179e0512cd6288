"""Collecting where the envs are: all steps of a call on one device, and one read at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import torch

from dmiddleware.env import BaseEnvManager, VectorEnvManager
from dmiddleware.env.batching import describe_unusable, make_value_check
from dmiddleware.env.batching import index_rows as index_env
from dmiddleware.env.device_step import DeviceStep
from dmiddleware.env.timestep import IdArray
from dmiddleware.errors import ConfigError, EnvProtocolError
from dmiddleware.model import action_mask_of
from dmiddleware.policy import CollectMode, EvalMode
from dmiddleware.policy.acting import info_names, previous_action_codec
from dmiddleware.rl.returns import take_rows
from dmiddleware.rollout.act_inputs import check_masks, sample_allowed, usable_mask
from dmiddleware.rollout.acting_memory import ActingMemory
from dmiddleware.rollout.episode_info import SUCCESS_KEYS
from dmiddleware.rollout.stepper import check_output, check_replaceable
from dmiddleware.tree import (
    Batch,
    Value,
    as_tree,
    from_numpy,
    index_rows,
    leaves,
    map_leaves,
    stack,
    to_device,
    to_dict,
)

__all__ = ["DeviceRollout", "Gathered"]

_MASK: Final = "action_mask"
_NEXT_MASK: Final = "next_action_mask"
_SUCCESS: Final = "success"
_RETURN: Final = "return"
_RETURN_KEYS: Final = ("eval_episode_return",)


@dataclass(slots=True)
class Gathered:
    """What a call collected, and what the host knows of it.

    Attributes:
        batch: the rows, ``[T, E, …]``, on the device.
        returns: undiscounted returns of the episodes that ended, in the order of their last rows.
        lengths: their numbers of steps.
        successes: 1.0 or 0.0 for each of them that said so.
        ends: the rows that end an episode, as indices into ``[T * E]``, int64.
        n_dropped: transitions that were lost with a vector env that failed.
        next_id: the id of the next episode that begins.
    """

    batch: Batch
    returns: list[float]
    lengths: list[int]
    successes: list[float]
    ends: IdArray
    n_dropped: int
    next_id: int


@dataclass(slots=True)
class _Rows:
    """The rows of steps that were made and not yet returned: columns and marks ``[k, E, …]``."""

    columns: list[dict[str, Any]] = field(default_factory=list)
    valid: list[torch.Tensor] = field(default_factory=list)
    has_final_obs: list[bool] = field(default_factory=list)


class DeviceRollout:
    """Lets a policy act in envs that return tensors, on the device of both.

    Nothing that a step returns is read before the end of a call. Then one transfer tells the host
    which episodes ended, what they returned, and whether a value was not finite. A vector env that
    spends steps on resets (``NEXT_STEP``) is read once more for each time that some env lacks rows.

    Args:
        mode: the policy's collect mode.
        manager: the envs; launched.

    Raises:
        ConfigError: if the infos of the envs lack a key that the policy declares.
    """

    def __init__(self, mode: CollectMode, manager: VectorEnvManager) -> None:
        self._mode, self._manager = mode, manager
        mode.step_together()
        self._device: torch.device = manager.device
        self._env_num = manager.env_num
        self._all_ids: IdArray = np.arange(manager.env_num)
        names = mode.spec.act_inputs
        self._infos = info_names(names)
        self._memory = ActingMemory(
            names,
            mode.spec.initial_state,
            previous_action_codec(names, manager.action_space),
            manager.env_num,
            device=self._device,
        )
        self._has_masks = _MASK in names and self._masks() is not None
        self._rows = _Rows()
        self._all_valid = torch.ones(self._env_num, dtype=torch.bool, device=self._device)
        self._is_checked = False
        self._lacks_final_obs: list[int] = []
        self._begin_all(torch.zeros(self._env_num, dtype=torch.int64, device=self._device))

    @classmethod
    def of(cls, mode: CollectMode | EvalMode, manager: BaseEnvManager) -> Self | None:
        """Return one for envs and a policy of one device; None: they are not, or act otherwise."""
        if not isinstance(mode, CollectMode) or mode.transitions is not None:
            return None
        if not isinstance(manager, VectorEnvManager) or manager.device is None:
            return None
        if not _same_device(manager.device, torch.device(mode.spec.device)):
            return None
        return cls(mode, manager)

    @property
    def n_waiting(self) -> int:
        """Rows that were made and that no call has returned yet."""
        return sum(int(valid.sum()) for valid in self._rows.valid)

    def _begin_all(self, first_ids: torch.Tensor) -> None:
        self._episode_id = first_ids
        self._return = torch.zeros(self._env_num, dtype=torch.float64, device=self._device)
        self._length = torch.zeros(self._env_num, dtype=torch.int64, device=self._device)

    def restart(self, first_id: int) -> int:
        """Forget everything about the episodes, because the envs have started new ones.

        Args:
            first_id: the id of the next episode of env 0; the others follow.

        Returns:
            The number of rows that were waiting, and are lost.
        """
        n_lost, self._rows = self.n_waiting, _Rows()
        self._begin_all(torch.arange(first_id, first_id + self._env_num, device=self._device))
        self._memory.restart_all()
        return n_lost

    def collect(
        self,
        n_steps: int,
        *,
        first_new_id: int,
        train_iter: int,
        policy_kwargs: Mapping[str, Any],
        random: bool,
    ) -> Gathered:
        """Collect ``n_steps`` transitions of every env.

        Args:
            n_steps: ``T``.
            first_new_id: the id of the first episode that begins; at most ``T * E`` follow.
            train_iter: written to the rows as ``collect_iter``.
            policy_kwargs: passed to the policy's forward.
            random: replace the actions by draws from the manager's seeded action space.

        Raises:
            EnvProtocolError: for an observation or a reward that is not finite, naming the env, the
                step and the value; and for an end without a final observation.
        """
        n_dropped = 0
        while (n_missing := self._n_missing(n_steps)) > 0:
            for _ in range(n_missing):
                try:
                    goes_on = self._step(policy_kwargs, random=random)
                except RuntimeError:
                    self._check_made()
                    raise
                if not goes_on:
                    n_dropped += self.restart(first_new_id)
                    first_new_id += self._env_num
                    break
        rows = self._take(n_steps)
        rows["collect_iter"] = torch.full_like(rows["done"], train_iter, dtype=torch.int64)
        return self._read(rows, first_new_id, n_dropped)

    def _n_missing(self, n_steps: int) -> int:
        """Return how many more steps to make until every env has its rows, as far as known."""
        valid = self._rows.valid
        if self._always_valid or len(valid) < n_steps:
            return n_steps - len(valid)
        return n_steps - int(torch.stack(valid).sum(0).min())

    @property
    def _always_valid(self) -> bool:
        return not self._manager.resets_later

    def _step(self, policy_kwargs: Mapping[str, Any], *, random: bool) -> bool:
        """Make one step of all envs; return False if they failed and were restarted."""
        manager, memory = self._manager, self._memory
        obs = from_numpy(manager.ready_obs)
        inputs = self._inputs()
        output = dict(self._mode.forward(obs, env_id=self._all_ids, **policy_kwargs, **inputs))
        is_checked, self._is_checked = self._is_checked, True
        if not is_checked:
            check_output(output, self._env_num)
        state = memory.next_state(output, self._env_num)
        if random:
            check_replaceable(output, user="RolloutCollector")
            output["action"] = self._random_action(output["action"])
        action = output["action"]
        step = manager.step_on_device(map_leaves(torch.clone, action))
        if step is None:
            return False
        if not is_checked and not self._has_masks:
            check_masks(self._mode, manager)  # they must not appear only now
        done = step.done
        if memory.columns:
            memory.record_on_device(action, state, reward=step.reward, acted=step.valid, ended=done)
        columns = {
            "obs": obs,
            "reward": step.reward,
            "next_obs": from_numpy(step.next_obs),
            "done": done,
            "terminated": step.terminated,
            "truncated": step.truncated,
            **inputs,
            **output,
        }
        if self._has_masks:
            columns[_NEXT_MASK] = self._next_masks(step, done)
        columns[_SUCCESS] = _success_of(step)
        columns[_RETURN] = _reported(step, _RETURN_KEYS)
        self._rows.columns.append(columns)
        self._rows.valid.append(self._all_valid if step.valid is None else step.valid)
        self._rows.has_final_obs.append(step.has_final_obs)
        return True

    # What the policy sees

    def _inputs(self) -> dict[str, Value]:
        inputs = dict(self._memory.columns)
        if self._infos:
            inputs["info"] = as_tree({name: self._info(name) for name in self._infos})
        if self._has_masks:
            mask = self._masks()
            assert mask is not None
            inputs[_MASK] = mask
        return inputs

    def _info(self, name: str) -> torch.Tensor:
        info = self._manager.ready_info
        column = self._info_column(name)
        if column is None:
            raise ConfigError(
                f"the policy asks for info.{name}, but the infos of the envs have "
                f"{', '.join(map(str, info)) or 'no keys'}; wrap the vector env "
                f"so that reset() and step() return {name!r} in their infos"
            )
        return column

    def _info_column(self, name: str) -> torch.Tensor | None:
        """Return a copy of a column of the infos to act on, ``[E, …]``; None: there is none.

        Envs that did not return it have zeros.
        """
        column = self._manager.ready_info.column(name)
        if column is None:
            return None
        values, is_returned = column
        if isinstance(values, np.ndarray) and values.dtype == object:  # after a reset
            like = torch.as_tensor(values[np.argmax(is_returned)], device=self._device)
            rows = [torch.zeros_like(like) if value is None else value for value in values]
            return torch.stack([torch.as_tensor(row, device=self._device) for row in rows])
        return torch.as_tensor(values, device=self._device).clone()

    def _masks(self) -> torch.Tensor | None:
        mask = action_mask_of(self._manager.ready_obs)
        if mask is None:
            column = self._info_column(_MASK)
            if column is None:
                return None
            mask = column != 0
        return usable_mask(mask)

    def _next_masks(self, step: DeviceStep, done: torch.Tensor) -> torch.Tensor:
        """Return the masks of the successors; all is allowed where nothing tells the last one."""
        mask = action_mask_of(step.next_obs)
        if mask is not None:
            return usable_mask(mask)
        mask = self._masks()
        assert mask is not None
        last = None if step.last_infos is None else step.last_infos.get(_MASK)
        if not isinstance(last, torch.Tensor) or last.shape != mask.shape:
            return mask | done.unsqueeze(-1)
        return usable_mask(last != 0).where(done.unsqueeze(-1), mask)

    def _random_action(self, replaced: Value) -> Value:
        """Draw actions on the host; so masks are read there."""
        mask, space = self._masks(), self._manager.action_space
        sampled = self._manager.sample_actions()
        drawn = from_numpy(sampled if mask is None else sample_allowed(space, mask.cpu()))
        moved: Value = to_device(drawn, self._device)
        if isinstance(moved, torch.Tensor) and isinstance(replaced, torch.Tensor):
            moved = moved.to(replaced.dtype)
        return moved

    # The rows of a call

    def _take(self, n_steps: int) -> dict[str, Any]:
        """Take ``n_steps`` rows of every env from those that were made: columns ``[T, E, …]``."""
        rows, self._rows = self._rows, _Rows()
        self._lacks_final_obs = [at for at, has in enumerate(rows.has_final_obs) if not has]
        reports = {
            name: [columns.pop(name) for columns in rows.columns] for name in (_SUCCESS, _RETURN)
        }
        stacked = {
            name: stack([columns[name] for columns in rows.columns]) for name in rows.columns[0]
        }
        missing = torch.full_like(stacked["done"][0], torch.nan, dtype=stacked["reward"].dtype)
        for name, steps in reports.items():
            if any(column is not None for column in steps):
                stacked[name] = torch.stack(
                    [missing if column is None else column for column in steps]
                )
        if self._always_valid:
            return stacked
        valid = torch.stack(rows.valid)
        order = valid.logical_not().byte().argsort(dim=0, stable=True)
        rectangle = {name: _rows_at(column, order[:n_steps]) for name, column in stacked.items()}
        rest = {name: _rows_at(column, order[n_steps:]) for name, column in stacked.items()}
        for at, still_valid in enumerate(take_rows(valid, order[n_steps:])):
            columns = {name: index_rows(column, at) for name, column in rest.items()}
            self._rows.columns.append({_SUCCESS: None, _RETURN: None, **columns})
            self._rows.valid.append(still_valid)
            self._rows.has_final_obs.append(True)
        return rectangle

    def _read(self, rows: dict[str, Any], first_new_id: int, n_dropped: int) -> Gathered:
        """Find out which episodes ended, in one transfer, and give each row the id of its own."""
        done, success, reported = rows["done"], rows.pop(_SUCCESS, None), rows.pop(_RETURN, None)
        shape = done.shape
        reward = rows["reward"].double()
        if reward.dim() > done.dim():  # of several agents
            reward = reward.mean(-1)
        episode_return, length = self._sums_so_far(reward, done)
        shown = episode_return.float()
        if reported is not None:
            shown = reported.where(~reported.isnan(), shown)
        new_id = first_new_id - 1 + done.flatten().cumsum(0).reshape(shape)
        ids = [self._episode_id]
        for is_end, following in zip(done, new_id, strict=True):
            ids.append(torch.where(is_end, following, ids[-1]))
        self._episode_id = ids.pop()
        rows["episode_id"] = torch.stack(ids)
        sums = [leaf.sum(dtype=torch.float32) for _, leaf in _floats_of(rows)]
        parts = [shown, length.float().masked_fill_(~done, 0)]
        parts += [] if success is None else [success]
        flat = torch.cat([torch.stack(parts).flatten(), torch.stack(sums)])
        self._length = length[-1].long().masked_fill_(done[-1], 0)
        self._return = episode_return[-1].masked_fill(done[-1], 0.0)

        on_host = flat.cpu().numpy()
        if not np.isfinite(on_host[-len(sums) :]).all():
            self._check_finite(rows, length)
        columns = on_host[: -len(sums)].reshape(len(parts), -1)
        ends = np.flatnonzero(columns[1])
        if self._lacks_final_obs and np.isin(ends // shape[1], self._lacks_final_obs).any():
            raise EnvProtocolError(
                "the vector env's autoreset_mode is SAME_STEP, but its info has no 'final_obs' at "
                "the end of an episode"
            )
        if len(ends):
            self._manager.failures.in_a_row[0] = 0
        successes = columns[2][ends] if len(parts) > 2 else columns[0][:0]
        return Gathered(
            as_tree(rows),
            returns=columns[0][ends].tolist(),
            lengths=columns[1][ends].astype(np.int64).tolist(),
            successes=successes[~np.isnan(successes)].tolist(),
            ends=ends,
            n_dropped=n_dropped,
            next_id=first_new_id + len(ends),
        )

    def _sums_so_far(
        self, reward: torch.Tensor, done: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the return and the length of each row's episode up to it, ``[T, E]``."""
        sums = torch.stack((reward, torch.ones_like(reward)), dim=1)
        sums[0, 0] += self._return
        sums[0, 1] += self._length
        steps, goes_on = sums.unbind(0), done.logical_not().to(sums.dtype)
        for before, after, factor in zip(steps, steps[1:], goes_on, strict=False):
            after.addcmul_(before, factor)
        return sums[:, 0], sums[:, 1]

    def _check_made(self) -> None:
        """Look for a value on which a policy cannot act: in the rows so far, and what follows."""
        if self._rows.valid:
            self._read(self._take(len(self._rows.valid)), 0, 0)
        if self._manager.closed:  # it was the vector env that failed
            return
        obs, space = self._manager.ready_obs, self._manager.observation_space
        if make_value_check(space)(obs):
            return
        for env_id in range(self._env_num):
            if unusable := describe_unusable(space, index_env(obs, env_id)):
                raise EnvProtocolError(
                    f"env {env_id} returned an observation with the value {unusable}; networks "
                    "cannot use it. Correct the env, or wrap the vector env"
                )

    def _check_finite(self, rows: dict[str, Any], length: torch.Tensor) -> None:
        """Name the first value that is not finite; large ones only have sums that are not."""
        for name in ("next_obs", "reward", "obs"):
            for path, leaf in leaves(rows[name], name):
                if not leaf.is_floating_point():
                    continue
                bad = (~leaf.isfinite()).nonzero()
                if not len(bad):
                    continue
                step, env_id, *_ = place = bad[0].tolist()
                where = f" at {place[2:]} of {path}" if place[2:] else ""
                raise EnvProtocolError(
                    f"env {env_id} returned the {'reward' if name == 'reward' else 'observation'} "
                    f"{leaf[tuple(place)].item()}{where}, in step {int(length[step, env_id])} of "
                    "its episode; nothing can be learned from a value that is not finite. Correct "
                    "the env"
                )

    # States

    def state_dict(self) -> dict[str, Any]:
        """Return the present episodes, what the policy remembers, and the waiting rows."""
        rows = self._rows
        return {
            "episode_id": self._episode_id.tolist(),
            "returns": self._return.tolist(),
            "lengths": self._length.tolist(),
            "memory": self._memory.state_dict(),
            "columns": [
                {name: to_dict(column) for name, column in columns.items() if column is not None}
                for columns in rows.columns
            ],
            "valid": [valid.cpu() for valid in rows.valid],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if it belongs to a policy with other inputs.
        """
        on_device = self._device
        self._episode_id = torch.tensor(state["episode_id"], device=on_device)
        self._return = torch.tensor(state["returns"], dtype=torch.float64, device=on_device)
        self._length = torch.tensor(state["lengths"], device=on_device)
        self._memory.load_state_dict(state["memory"])
        self._rows = _Rows()
        for columns, valid in zip(state["columns"], state["valid"], strict=True):
            moved = {name: to_device(from_numpy(c), on_device) for name, c in columns.items()}
            self._rows.columns.append({_SUCCESS: None, _RETURN: None, **moved})
            self._rows.valid.append(torch.as_tensor(valid, device=on_device))
            self._rows.has_final_obs.append(True)


def _same_device(first: torch.device, second: torch.device) -> bool:
    return first.type == second.type and (first.index or 0) == (second.index or 0)


def _rows_at(column: Value, index: torch.Tensor) -> Value:
    picked: Value = map_leaves(lambda leaf: take_rows(leaf, index), column)
    return picked


def _reported(step: DeviceStep, keys: Sequence[str]) -> torch.Tensor | None:
    """Return ``[E]``, the first of some keys in the last infos of episodes; None: there is none."""
    for infos in (step.last_infos or {}, step.infos):
        for key in keys:
            value = infos.get(key)
            if isinstance(value, torch.Tensor) and value.shape == step.done.shape:
                return value.detach().to(step.reward)
    return None


def _success_of(step: DeviceStep) -> torch.Tensor | None:
    """Return ``[E]``: the success that each last info reports, or NaN; None: there is none."""
    share = _reported(step, SUCCESS_KEYS)
    return None if share is None else share.where((share >= 0) & (share <= 1), torch.nan)


def _floats_of(rows: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the leaves of floats that an env returned."""
    return [
        (path, leaf)
        for name in ("obs", "next_obs", "reward")
        for path, leaf in leaves(rows[name], name)
        if leaf.is_floating_point()
    ]
