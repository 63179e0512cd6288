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
from dmiddleware.rollout.act_inputs import check_masks, sample_allowed, usable_mask
from dmiddleware.rollout.acting_memory import ActingMemory
from dmiddleware.rollout.episode_info import SUCCESS_KEYS
from dmiddleware.rollout.row_store import SPARE_ROWS
from dmiddleware.rollout.stepper import check_output, check_replaceable
from dmiddleware.tree import (
    Batch,
    Value,
    as_tree,
    cat,
    from_numpy,
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
_SUM: Final = "return_so_far"
_LENGTH: Final = "length_so_far"
_NO_IDS: Final[IdArray] = np.zeros(0, np.int64)
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
class _Steps:
    """The steps of a call: the columns of each, which of its rows are transitions, and more."""

    columns: list[dict[str, Any]] = field(default_factory=list)
    valid: list[torch.Tensor] = field(default_factory=list)
    has_final_obs: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class _Waiting:
    """Rows that no call has returned yet: columns ``[k, E, …]``, and which rows are there."""

    columns: dict[str, Value]
    valid: torch.Tensor


class DeviceRollout:
    """Lets a policy act in envs that return tensors, on the device of both.

    Nothing that a step returns is read before the end of a call. Then one transfer tells the host
    which episodes ended, what they returned, and whether a value was not finite. A vector env that
    spends steps on resets (``NEXT_STEP``) is read once more for each time that some env lacks rows;
    so is one that has failed, of which the rows of finished episodes are kept.

    Envs that get ahead of others have rows that wait for later calls. Once an env has many of them,
    a call puts some into the lane of an env that lacks rows, and the rest of their episode gets
    another id.

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
        self._lanes = torch.arange(manager.env_num, device=self._device)
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
        self._steps = _Steps()
        self._waiting: _Waiting | None = None
        # The rows that envs are expected to have, until those of each are counted; and the lanes
        # that those of other envs fill.
        self._expected = 0
        self._counts = self._filled = self._sources = _NO_IDS
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
        if self._waiting is None and not self._steps.valid:
            return 0
        return int(self._valid().sum())

    def _valid(self) -> torch.Tensor:
        """Return ``[k, E]``, which of the rows that wait, and then of the steps, are there."""
        waiting = [] if self._waiting is None else [self._waiting.valid]
        steps = [valid.unsqueeze(0) for valid in self._steps.valid]
        return torch.cat([self._all_valid.unsqueeze(0)[:0], *waiting, *steps])

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
        n_lost, self._steps = self.n_waiting, _Steps()
        self._wait_with(None)
        self._begin_all(torch.arange(first_id, first_id + self._env_num, device=self._device))
        self._memory.restart_all()
        return n_lost

    def _wait_with(self, waiting: _Waiting | None, expected: int = 0) -> None:
        self._waiting, self._expected = waiting, expected
        self._filled = self._sources = _NO_IDS

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
                    n_lost, first_new_id = self._keep_finished(first_new_id, train_iter)
                    n_dropped += n_lost
                    break
        if self._is_regular:
            n_begun, rows = None, self._take_steps(first_new_id, train_iter)
        else:
            n_begun, rows = self._take_rectangle(n_steps, first_new_id, train_iter)
        return self._read(rows, first_new_id, n_dropped, n_begun)

    @property
    def _is_regular(self) -> bool:
        """Whether each step makes one row of every env, and none waits."""
        return self._waiting is None and not self._manager.resets_later

    def _n_missing(self, n_steps: int) -> int:
        """Return how many more steps to make until every lane has its rows, as far as known."""
        n_made = len(self._steps.valid)
        if self._is_regular or n_made < n_steps - self._expected:
            return n_steps - self._expected - n_made
        self._counts = counts = self._valid().sum(0).cpu().numpy()
        lacking, spare = _spare_lanes(counts, n_steps)
        if len(lacking) > len(spare):
            return n_steps - int(counts.min())
        self._filled, self._sources = lacking, spare[: len(lacking)]
        return 0

    def _keep_finished(self, first_new_id: int, train_iter: int) -> tuple[int, int]:
        """Forget the unfinished episodes, which the vector env lost when it failed.

        Returns:
            The number of rows that are lost, and the id of the next episode that begins.
        """
        n_waiting, first_id = self.n_waiting, first_new_id
        columns, valid = self._take_all(first_new_id, train_iter)
        self._manager.dropped_steps += int(self._length.sum())
        if columns:
            done = columns["done"] & valid
            first_id += int(done.sum())
            valid = valid & (done.flip(0).cumsum(0).flip(0) > 0)
        self.restart(first_id)
        if n_kept := int(valid.sum()):
            # The most, since envs of which none are kept may be filled from others.
            self._wait_with(_Waiting(columns, valid), int(valid.sum(0).max()))
        return n_waiting - n_kept, first_id + self._env_num

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
        step = manager.step_on_device(map_leaves(torch.clone, action), has_ended=self._has_ended)
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
        self._steps.columns.append(columns)
        self._steps.valid.append(self._all_valid if step.valid is None else step.valid)
        self._steps.has_final_obs.append(step.has_final_obs)
        return True

    def _has_ended(self) -> bool:
        """Return whether an episode has ended in this call, since the vector env last failed."""
        return any(bool(columns["done"].any()) for columns in self._steps.columns)

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

    def _take_steps(self, first_new_id: int, train_iter: int) -> dict[str, Any]:
        """Take the rows of the steps of this call: columns ``[T, E, …]``."""
        steps, self._steps = self._steps, _Steps()
        self._lacks_final_obs = [at for at, has in enumerate(steps.has_final_obs) if not has]
        reports = {
            name: [columns.pop(name) for columns in steps.columns] for name in (_SUCCESS, _RETURN)
        }
        stacked = {
            name: stack([columns[name] for columns in steps.columns]) for name in steps.columns[0]
        }
        missing = torch.full_like(stacked["done"][0], torch.nan, dtype=stacked["reward"].dtype)
        for name, values in reports.items():
            if any(column is not None for column in values):
                stacked[name] = torch.stack(
                    [missing if column is None else column for column in values]
                )
        valid = torch.stack(steps.valid) if self._manager.resets_later else None
        self._mark(stacked, valid, first_new_id)
        stacked["collect_iter"] = torch.full_like(stacked["done"], train_iter, dtype=torch.int64)
        return stacked

    def _mark(self, rows: dict[str, Any], valid: torch.Tensor | None, first_new_id: int) -> None:
        """Add the ids of their episodes to rows of steps, and the returns and lengths so far."""
        done, shape = rows["done"], rows["done"].shape
        reward = rows["reward"].double()
        if reward.dim() > done.dim():  # of several agents
            reward = reward.mean(-1)
        counted = torch.ones_like(reward) if valid is None else valid.to(reward.dtype)
        rows[_SUM], rows[_LENGTH] = self._sums_so_far(reward, counted, done)
        new_id = first_new_id - 1 + done.flatten().cumsum(0).reshape(shape)
        ids = [self._episode_id]
        for is_end, following in zip(done, new_id, strict=True):
            ids.append(torch.where(is_end, following, ids[-1]))
        self._episode_id = ids.pop()
        rows["episode_id"] = torch.stack(ids)
        self._length = rows[_LENGTH][-1].long().masked_fill_(done[-1], 0)
        self._return = rows[_SUM][-1].masked_fill(done[-1], 0.0)

    def _take_all(self, first_new_id: int, train_iter: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Take the rows that wait and those of this call, ``[k, E, …]``, and which are valid."""
        valid, parts = self._valid(), list[dict[str, Any]]()
        if self._waiting is not None:
            parts.append(dict(self._waiting.columns))
        if self._steps.valid:
            steps = self._take_steps(first_new_id, train_iter)
            if self._lacks_final_obs and steps["done"][self._lacks_final_obs].any():
                raise _no_final_obs()
            self._lacks_final_obs = []
            parts.append(steps)
        for name in (_SUCCESS, _RETURN):
            if any(name in part for part in parts):
                for part in parts:
                    missing = torch.full_like(part["done"], torch.nan, dtype=part["reward"].dtype)
                    part.setdefault(name, missing)
        columns = {name: cat([part[name] for part in parts]) for name in (parts or [{}])[0]}
        return columns, valid

    def _take_rectangle(
        self, n_steps: int, first_new_id: int, train_iter: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Take the oldest ``n_steps`` rows of every env, or of the env that fills its lane.

        Returns:
            How many episodes have begun in this call, a tensor; and columns ``[T, E, …]``.
        """
        filled, sources = self._filled, self._sources
        n_split = len(filled)
        begun_before = 0 if self._waiting is None else self._waiting.valid.shape[0]
        columns, valid = self._take_all(first_new_id + n_split, train_iter)
        n_begun = (columns["done"] & valid)[begun_before:].sum() + n_split
        order = _oldest_first(valid)
        step, env = order[:n_steps].clone(), self._lanes.expand(n_steps, -1).clone()
        for at, (lane, source) in enumerate(zip(filled, sources, strict=True)):
            self._split(columns["episode_id"], order[n_steps:, source], source, first_new_id + at)
            step[:, lane], env[:, lane] = order[n_steps : 2 * n_steps, source], source
        rectangle = {name: _rows_at(column, step, env) for name, column in columns.items()}
        valid[step, env] = False
        counts = self._counts - n_steps
        counts[filled] += n_steps
        counts[sources] -= n_steps
        self._wait_with(None)
        if most := int(counts.max()):
            order = _oldest_first(valid)[:most]
            lanes = self._lanes.expand(most, -1)
            rest = {name: _rows_at(column, order, lanes) for name, column in columns.items()}
            self._wait_with(_Waiting(rest, valid[order, lanes]), int(counts.min()))
        return n_begun, rectangle

    def _split(self, ids: torch.Tensor, later: torch.Tensor, env_id: int, new_id: int) -> None:
        """Give the first of the later rows of an env, and all of its episode after it, a new id."""
        old = ids[later[0], env_id].clone()
        lane = ids[later, env_id]
        ids[later, env_id] = torch.where(lane == old, new_id, lane)
        current = self._episode_id[env_id]
        self._episode_id = self._episode_id.clone()
        self._episode_id[env_id] = torch.where(current == old, new_id, current)

    def _read(
        self,
        rows: dict[str, Any],
        first_new_id: int,
        n_dropped: int,
        n_begun: torch.Tensor | None = None,
    ) -> Gathered:
        """Find out which episodes ended, in one transfer.

        Args:
            rows: columns ``[T, E, …]``.
            first_new_id: the id of the first episode that began.
            n_dropped: transitions that were lost.
            n_begun: how many episodes began; None: as many as ended.
        """
        success, reported = rows.pop(_SUCCESS, None), rows.pop(_RETURN, None)
        done, length, shown = rows["done"], rows.pop(_LENGTH), rows.pop(_SUM).float()
        shape = done.shape
        if reported is not None:
            shown = reported.where(~reported.isnan(), shown)
        sums = [leaf.sum(dtype=torch.float32) for _, leaf in _floats_of(rows)]
        parts = [shown, length.float().masked_fill_(~done, 0)]
        parts += [] if success is None else [success]
        begun = [] if n_begun is None else [n_begun.float()]
        flat = torch.cat([torch.stack(parts).flatten(), torch.stack([*begun, *sums])])

        on_host = flat.cpu().numpy()
        if not np.isfinite(on_host[-len(sums) :]).all():
            self._check_finite(rows, length)
        columns = on_host[: -len(sums) - len(begun)].reshape(len(parts), -1)
        ends = np.flatnonzero(columns[1])
        if self._lacks_final_obs and np.isin(ends // shape[1], self._lacks_final_obs).any():
            raise _no_final_obs()
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
            next_id=first_new_id + (int(on_host[-len(sums) - 1]) if begun else len(ends)),
        )

    def _sums_so_far(
        self, reward: torch.Tensor, counted: torch.Tensor, done: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the return and the length of each row's episode up to it, ``[T, E]``."""
        sums = torch.stack((reward, counted), dim=1)
        sums[0, 0] += self._return
        sums[0, 1] += self._length
        steps, goes_on = sums.unbind(0), done.logical_not().to(sums.dtype)
        for before, after, factor in zip(steps, steps[1:], goes_on, strict=False):
            after.addcmul_(before, factor)
        return sums[:, 0], sums[:, 1]

    def _check_made(self) -> None:
        """Look for a value on which a policy cannot act: in the rows so far, and what follows."""
        if self._steps.valid:
            self._read(self._take_steps(0, 0), 0, 0)
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
        waiting = self._waiting
        return {
            "episode_id": self._episode_id.tolist(),
            "returns": self._return.tolist(),
            "lengths": self._length.tolist(),
            "memory": self._memory.state_dict(),
            "columns": {
                name: to_dict(column)
                for name, column in (waiting.columns if waiting else {}).items()
            },
            "valid": [] if waiting is None else waiting.valid.cpu(),
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
        self._steps = _Steps()
        self._wait_with(None)
        if len(state["valid"]):
            moved = {
                name: to_device(from_numpy(column), on_device)
                for name, column in state["columns"].items()
            }
            valid = torch.as_tensor(state["valid"], device=on_device)
            self._wait_with(_Waiting(moved, valid), int(valid.sum(0).min()))


def _spare_lanes(counts: IdArray, n_steps: int) -> tuple[IdArray, IdArray]:
    """Return the envs that lack rows of a lane, and those that have the rows of two to spare.

    Args:
        counts: the rows that each env has, ``[E] int64``.
        n_steps: the rows of a lane.
    """
    return np.flatnonzero(counts < n_steps), np.flatnonzero(counts >= 2 * n_steps + SPARE_ROWS)


def _oldest_first(valid: torch.Tensor) -> torch.Tensor:
    """Return, for each env, the places of its rows that are there, and then of the others."""
    return valid.logical_not().byte().argsort(dim=0, stable=True)


def _no_final_obs() -> EnvProtocolError:
    return EnvProtocolError(
        "the vector env's autoreset_mode is SAME_STEP, but its info has no 'final_obs' at the end "
        "of an episode"
    )


def _same_device(first: torch.device, second: torch.device) -> bool:
    return first.type == second.type and (first.index or 0) == (second.index or 0)


def _rows_at(column: Value, step: torch.Tensor, env: torch.Tensor) -> Value:
    picked: Value = map_leaves(lambda leaf: leaf[step, env], column)
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
