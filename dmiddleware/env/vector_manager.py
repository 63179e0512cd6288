"""Envs that are vectorized already: any ``gymnasium.vector.VectorEnv``."""

from __future__ import annotations

import contextlib
import functools
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from dmiddleware.env.batching import (
    NestedArrays,
    copy_arrays,
    index_rows,
    is_tensor,
    make_check,
    map_arrays,
    map_space,
    own_copy,
    replace_rows,
)
from dmiddleware.env.contract import (
    MISFITS,
    check_same_spaces,
    close_quietly,
    contract_break,
    what_instead,
)
from dmiddleware.env.device_step import DeviceStep
from dmiddleware.env.env_access import Access, unknown_attribute
from dmiddleware.env.env_claims import EnvClaims
from dmiddleware.env.env_state import get_state, set_state
from dmiddleware.env.failure_budget import FailureBudget
from dmiddleware.env.manager import BaseEnvManager
from dmiddleware.env.pictures import Picture, pictures_of
from dmiddleware.env.timestep import BatchedTimestep, BoolArray, IdArray, StepInfo
from dmiddleware.errors import (
    ConfigError,
    DMiddlewareError,
    EnvCallError,
    EnvCrashed,
    EnvProtocolError,
    StructureError,
)
from dmiddleware.process.open_files import explained
from dmiddleware.settings import takes_options

__all__ = ["VectorEnvManager", "VectorEnvFn"]

VectorEnvFn: TypeAlias = Callable[[], gym.vector.VectorEnv[Any, Any, Any]]
"""Makes the vector env; called again after a failure."""

_FLOAT32: Final = np.dtype(np.float32)
_BOOL: Final = np.dtype(np.bool_)
_FINAL_OBS = ("final_obs", "_final_obs")
_FINAL_KEYS = ("final_obs", "_final_obs", "final_info", "_final_info")


class VectorEnvManager(BaseEnvManager):
    """Steps a vectorized env, such as a simulator that advances many worlds at once.

    All three of Gymnasium's ways to start the next episode are supported; the vector env declares
    its own in ``metadata["autoreset_mode"]``:

    - ``NEXT_STEP``: the step after the end of an episode resets the env instead. It is not a
      transition: the env's row is not ``valid``, and its action is ignored. Until then,
      ``ready_obs`` has the final observation of the env.
    - ``SAME_STEP``: the env is reset in its last step, which returns the final observation and
      info too.
    - ``DISABLED``: the manager resets the env immediately, with a mask.

    A simulator may return torch tensors. Then ``obs`` and ``next_obs`` are tensors and stay on its
    device, and the env gets its actions as tensors on that device. :meth:`step` copies rewards and
    flags to arrays, all in one transfer, because it counts episodes on the host;
    :meth:`step_on_device` leaves them where they are, and its caller counts.

    :meth:`call`, :meth:`get_attr` and :meth:`set_attr` are those of the vector env, if it has them,
    as Gymnasium's sync and async vector envs do. Otherwise an attribute is that of the vector env
    itself, which its envs share. Reset options are the same for all envs, and need a vector env in
    mode ``DISABLED``: one that resets its envs itself does not pass options on.

    The envs can only be stepped all together (:attr:`in_lockstep`). If the vector env raises, it is
    made again, and the episodes of all envs are lost.

    Args:
        vector_fn: makes the vector env.
        env_num: the number of its envs, ``E``.
        seed: as in :meth:`seed`, with two limits: a vector env that takes a single seed gets that
            of env 0, and one that resets its envs itself takes seeds only in :meth:`reset`.
        max_retry: how often the vector env may be restarted in a row before
            :class:`~dmiddleware.errors.EnvCrashed` is raised; the count starts again when an
            episode ends.

    Raises:
        ConfigError: if an argument has the wrong type.
    """

    in_lockstep = True

    # Indices of the envs that the next step resets (NEXT_STEP), and a mask of the envs whose
    # episodes were given up.
    _ended: IdArray
    _abandoned: BoolArray | None
    # The same as _ended, as a mask on the device, after a step there; None: see _ended.
    _pending: Any

    @takes_options
    def __init__(
        self,
        vector_fn: VectorEnvFn,
        env_num: int,
        *,
        seed: int | Sequence[int] | None = None,
        max_retry: int = 3,
    ) -> None:
        if not callable(vector_fn):
            raise ConfigError(
                f"vector_fn must be a function that makes a gymnasium.vector.VectorEnv, "
                f"got {vector_fn!r}"
            )
        super().__init__(env_num, seed=seed)
        self._vector_fn = vector_fn
        self.failures = FailureBudget(1, max_retry=max_retry, kind="vector env")
        self._vector: gym.vector.VectorEnv[Any, Any, Any] | None = None
        self._claims = EnvClaims()
        # Of the observations; None: they are arrays.
        self._device: Any = None
        # The observations on the device that are known to be finite.
        self._finite_obs: Any = None
        self._clear_marks()

    def launch(self) -> None:
        """Make the vector env and reset it, see :meth:`BaseEnvManager.launch`."""
        self._require_closed()
        self._begin()
        with self._failing_for_good():
            vector = self._make()
            self._set_spaces(vector.single_observation_space, vector.single_action_space)
            self._install_reset(range(self.env_num), *self._reset_all())
        self._open = True

    def close(self) -> None:
        """Close the vector env; a second call does nothing."""
        self._open = False
        self._claims.release()
        vector, self._vector = self._vector, None
        if vector is not None:
            close_quietly(vector)

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some envs, see :meth:`BaseEnvManager.reset`.

        A vector env that cannot reset only some envs (its mode is not ``DISABLED``, and it is not
        Gymnasium's sync or async vector env) lets them finish their episodes instead; until the
        next ones start, the rows of those envs are not ``valid`` in :meth:`step`.
        """
        self._require_open("reset")
        ids = self._checked_ids(env_ids)
        with self._failing_for_good():
            if len(ids) == self.env_num:
                self._install_reset(range(self.env_num), *self._reset_all())
            elif self._can_mask():
                self._install_reset(ids, *self._reset_some(ids))
            else:
                self.revision += 1
                abandoned = (
                    np.zeros(self.env_num, np.bool_) if self._abandoned is None else self._abandoned
                )
                abandoned[ids] = True
                self._abandoned = abandoned
                self._totals.clear(ids)

    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, see :meth:`BaseEnvManager.step`; a dictionary must have all of them."""
        if not self._open:
            self._require_open("step")
        batch = self._batch(actions)
        try:
            try:
                return self._take_step(self._env.step(batch))
            except EnvProtocolError:
                raise
            except Exception as error:  # noqa: BLE001 - an env may raise anything
                failure = error
            # Not in the except clause: every later error would show this one as its context.
            self._reject_bad_actions(batch, failure)
            return self._recover(failure)
        except BaseException:
            self.close()
            raise

    def _pictures(self, env_ids: list[int]) -> list[Picture]:
        return pictures_of(self._env, env_ids)

    # A step on the device of the envs

    @property
    def device(self) -> Any:
        """The device of the observations, a ``torch.device``; None: they are arrays."""
        return self._device

    @property
    def resets_later(self) -> bool:
        """Whether envs spend a step on their reset, so that some rows are not transitions."""
        return self._resets_later

    def step_on_device(
        self, actions: NestedArrays, *, has_ended: Callable[[], bool] = lambda: False
    ) -> DeviceStep | None:
        """Step all envs, and read nothing of what they return.

        Only vector envs whose mode is ``DISABLED`` are waited for: to reset those that ended.

        Args:
            actions: tensors ``[E, …]`` on :attr:`device`, nested like the action space, of which
                they get the dtypes; the env may write to them.
            has_ended: tells, if the vector env fails, whether an episode has ended since the
                caller last set the count of failures in a row to 0.

        Returns:
            The step, of which nothing is checked but types and shapes; None if the vector env
            failed and was made again, so all episodes are lost.

        Raises:
            EnvProtocolError: if the vector env does not return tensors of the right shapes.
            EnvCrashed: if it keeps failing.
        """
        if not self._open:
            self._require_open("step_on_device")
        try:
            try:
                batch = _as_actions(self.action_space, actions)
                step = self._read_nothing_of(self._env.step(batch))
            except EnvProtocolError:
                raise
            except Exception as error:  # noqa: BLE001 - an env may raise anything
                if has_ended():
                    self.failures.in_a_row[0] = 0
                self._recover(error)
                return None
        except BaseException:
            self.close()
            raise
        self.revision += 1
        self._ready_obs, self._ready_infos = step.ready_obs, step.ready_infos
        return step

    def _read_nothing_of(self, result: Any) -> DeviceStep:
        if not _is_step_result(result):
            raise _not_a_step(result)
        obs, infos = self._own(result[0]), result[4]
        reward = self._own_numbers(result[1], self._reward_shape)
        terminated, truncated = (self._own_numbers(flag).bool() for flag in result[2:4])
        next_obs, valid, has_final_obs, last_infos = obs, None, True, infos
        done = terminated | truncated
        ready_infos = {key: value for key, value in infos.items() if key not in _FINAL_KEYS}
        if self._mode is AutoresetMode.NEXT_STEP:
            if self._pending is None:
                self._pending = self._to_device(np.isin(self._all_ids, self._ended))
            valid = ~self._pending
            of_agents = (1,) * len(self._reward_shape)
            reward = reward.masked_fill(self._pending.view(-1, *of_agents), 0.0)
            terminated, truncated = terminated & valid, truncated & valid
            self._pending = done = done & valid
        elif self._mode is AutoresetMode.DISABLED:
            ended = done.nonzero()[:, 0].tolist()
            if ended:
                obs, ready_infos = self._reset_ended(obs, infos, ended)
        else:
            last_infos = infos.get("final_info")
            if has_final_obs := infos.get("final_obs") is not None:
                next_obs = self._successors(obs, infos["final_obs"], done)
        return DeviceStep(
            obs,
            next_obs,
            reward.float(),
            done,
            terminated,
            truncated,
            valid,
            infos,
            last_infos,
            ready_infos,
            has_final_obs,
        )

    def _successors(self, obs: NestedArrays, final_obs: Any, done: Any) -> NestedArrays:
        """Return the final observations where episodes ended, and the others elsewhere."""

        def successor(like: Any, row: Any, last: Any) -> Any:
            self._check_tensor(like, last)
            last = last.detach().to(row.dtype)
            return last.where(done.view(-1, *(1,) * (row.dim() - 1)), row)

        try:
            return map_arrays(successor, self._shapes, obs, final_obs)
        except MISFITS as error:
            raise EnvProtocolError(
                "the vector env returned a final_obs that does not fit its observation space "
                f"{self._observation_space}: {error}"
            ) from error

    def _own_numbers(self, values: Any, shape: tuple[int, ...] = ()) -> Any:
        """Return a copy of rewards or flags, of which those of one env have a shape."""
        expected = (self.env_num, *shape)
        if not is_tensor(values) or tuple(values.shape) != expected:
            raise EnvProtocolError(
                f"the vector env returned {values!r:.120} as rewards or flags; a simulator on a "
                f"device must return tensors of shape {expected}"
            )
        return values.detach().clone()

    # A step

    def _take_step(self, result: Any) -> BatchedTimestep:
        self._note_ended()
        obs, reward, terminated, truncated, infos = self._checked(result)
        left_out, ended = self._ended, None
        if self._abandoned is not None:
            left_out, ended = self._leave_out_abandoned(self._abandoned, terminated | truncated)
        if len(left_out):
            # Some envs leave rewards and flags in rows that are not transitions.
            reward[left_out] = 0.0
            terminated[left_out] = False
            truncated[left_out] = False
        done = terminated | truncated
        rows = done.nonzero()[0]
        if self._mode is not AutoresetMode.SAME_STEP:
            self._keep_last_pictures(rows.tolist())
        next_obs, columns = obs, infos
        if self._resets_later:
            self._ended = rows if ended is None else ended
        elif len(rows) and self._mode is AutoresetMode.SAME_STEP:
            next_obs, columns, infos = self._final(obs, infos, rows.tolist())
        elif len(rows):
            obs, infos = self._reset_ended(obs, infos, rows.tolist())
        self._count_step(None, next_obs, reward)
        if ended is not None:
            self._totals.skip(left_out)
        totals = None
        if len(rows):
            self.failures.in_a_row[0] = 0
            totals = rows, self._totals.end_some(rows, pause=self._resets_later)
        # Values that the env sets itself take precedence, as in the other managers.
        info = StepInfo.from_columns(columns, self.env_num, partial=totals)
        returns = info.values_at("eval_episode_return", rows.tolist()) if len(rows) else ()
        step = self._finish(
            None, obs, next_obs, reward, done, terminated, truncated, info, None, returns
        )
        if len(left_out):
            step.valid = self._all_valid.copy()
            step.valid[left_out] = step.is_full = False
        self._ready_infos = infos
        return step

    def _note_ended(self) -> None:
        """Note on the host which envs the next step resets, after steps on the device."""
        if self._pending is not None:
            self._ended, self._pending = self._pending.cpu().numpy().nonzero()[0], None

    def _leave_out_abandoned(
        self, abandoned: BoolArray, done: BoolArray
    ) -> tuple[IdArray, IdArray]:
        """Return the envs without a transition in this step, and those whose episode ended.

        Args:
            abandoned: the envs whose episodes were given up and have not ended yet.
            done: the envs whose episode ended, according to the vector env.
        """
        is_reset = np.zeros(self.env_num, np.bool_)
        is_reset[self._ended] = True
        ended = done & ~is_reset
        # An episode that was given up is followed by the next one in this step, or after it.
        begun = is_reset if self._resets_later else ended
        remaining = abandoned & ~begun
        self._abandoned = remaining if remaining.any() else None
        return (abandoned | is_reset).nonzero()[0], ended.nonzero()[0]

    def _checked(self, result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        is_plain = type(result) is tuple and len(result) == 5 and type(result[4]) is dict
        if not is_plain and not _is_step_result(result):
            raise _not_a_step(result)
        obs, scalars = self._own(result[0]), result[1:4]
        if self._device is not None:
            # Whether observations are finite is found on their device, in the same transfer.
            *scalars, is_finite = _to_host(*scalars, _finite_rows(obs, self.env_num))
            self._finite_obs = obs if is_finite.all() else None
        reward = _own_array(scalars[0], _FLOAT32, np.float64)
        terminated = _own_array(scalars[1], _BOOL, np.bool_)
        truncated = _own_array(scalars[2], _BOOL, np.bool_)
        is_shape_right = terminated.shape == truncated.shape == (self.env_num,)
        if not is_shape_right or reward.shape != (self.env_num, *self._reward_shape):
            raise EnvProtocolError(
                f"the vector env has {self.env_num} envs, but returned rewards of shape "
                f"{reward.shape} and flags of shape {terminated.shape} and {truncated.shape}; "
                f"return rewards {[self.env_num, *self._reward_shape]} and flags {[self.env_num]}"
            )
        infos = {
            key: value if key in _FINAL_OBS else own_copy(value) for key, value in result[4].items()
        }
        return obs, reward, terminated, truncated, infos

    def _own(self, obs: Any) -> NestedArrays:
        """Return a copy of the observations, because the env may overwrite them."""
        kind = (obs.dtype, obs.shape) if type(obs) is np.ndarray else None
        if kind is not None and kind == self._plain_kind:
            # The most common case skips the checks that it cannot fail. Vector envs often return a
            # transposed state, which is copied fastest as it lies in memory.
            return obs.copy(order="K")
        try:
            if self._device is not None:
                return map_arrays(self._own_tensor, self._shapes, obs)
            arrays = self._as_arrays(obs)
            map_arrays(self._check_n_obs, arrays)
        except MISFITS as error:
            raise EnvProtocolError(
                f"the vector env returned observations that do not fit its observation space "
                f"{self._observation_space}: {error}"
            ) from error
        return copy_arrays(arrays)

    def _own_tensor(self, like: npt.NDArray[Any], tensor: Any) -> Any:
        """Return a copy; numbers for a space of floats get its dtype, as on the host."""
        self._check_tensor(like, tensor)
        dtype = _torch_dtype(like.dtype) if like.dtype.kind == "f" else tensor.dtype
        return tensor.detach().to(dtype, copy=True)

    def _check_tensor(self, like: npt.NDArray[Any], tensor: Any) -> None:
        expected = (self.env_num, *like.shape[1:])
        if not is_tensor(tensor) or tuple(tensor.shape) != expected:
            raise StructureError(f"expected a tensor of shape {expected}, got {tensor!r:.100}")

    def _check_n_obs(self, array: npt.NDArray[Any]) -> None:
        if len(array) != self.env_num:
            raise StructureError(f"it has {len(array)} rows for {self.env_num} envs")

    def _final(
        self, obs: NestedArrays, infos: dict[str, Any], ended: list[int]
    ) -> tuple[NestedArrays, dict[str, Any], dict[str, Any]]:
        """Return the successors, the infos of the step, and those of the resets (SAME_STEP)."""
        if "final_obs" not in infos:
            raise EnvProtocolError(
                "the vector env's autoreset_mode is SAME_STEP, but its info has no 'final_obs' at "
                "the end of an episode"
            )
        next_obs = self._with_final(obs, infos["final_obs"], ended)
        first_infos = {key: value for key, value in infos.items() if key not in _FINAL_KEYS}
        last_infos = first_infos
        if infos.get("final_info"):
            rows = StepInfo.from_columns(first_infos, self.env_num).rows()
            final_info = StepInfo.from_columns(infos["final_info"], self.env_num)
            for env_id in ended:
                rows[env_id] = final_info.row(env_id)
            last_infos = dict(StepInfo(rows))
        return next_obs, last_infos, first_infos

    def _with_final(self, obs: NestedArrays, final: Any, ended: list[int]) -> NestedArrays:
        if self._device is not None:
            return self._successors(obs, final, self._to_device(np.isin(self._all_ids, ended)))
        if isinstance(final, np.ndarray) and final.dtype == object:
            return replace_rows(obs, ended, self._collate([final[env_id] for env_id in ended]))
        return replace_rows(obs, ended, index_rows(self._own(final), ended))

    def _reset_ended(
        self, obs: NestedArrays, infos: dict[str, Any], ended: list[int]
    ) -> tuple[NestedArrays, dict[str, Any]]:
        """Reset envs by mask; return the next observations and their infos (DISABLED)."""
        first_obs, first_infos = self._reset_some(ended)
        rows = StepInfo.from_columns(infos, self.env_num).rows()
        for env_id, info in zip(ended, first_infos, strict=True):
            rows[env_id] = info
        return replace_rows(obs, ended, first_obs), dict(StepInfo(rows))

    def _recover(self, error: Exception) -> BatchedTimestep:
        """Make the vector env again; all episodes are lost."""
        n_envs = self.env_num
        self.dropped_steps += sum(map(self._totals.length_of, range(n_envs)))
        obs, infos = self.failures.restart(0, "step", error, self._renew)
        self._install_reset(range(n_envs), obs, infos)
        done, terminated, truncated = (np.zeros(n_envs, np.bool_) for _ in range(3))
        reward, failed = np.zeros((n_envs, *self._reward_shape)), list(range(n_envs))
        marked = [{**info, "abnormal": True} for info in infos]
        return self._finish(None, obs, obs, reward, done, terminated, truncated, marked, failed)

    def _renew(self) -> tuple[NestedArrays, list[Any]]:
        """Replace the vector env that failed by a new one, and reset it."""
        if self._vector is not None:
            close_quietly(self._vector)
            self._claims.release()
            self._vector = None
        self._reseed(range(self.env_num), self.failures.restarts)
        vector = self._make()
        pair = self.observation_space, self.action_space
        check_same_spaces([pair, (vector.single_observation_space, vector.single_action_space)])
        self._replace_action_space(vector.single_action_space)
        return self._reset_all()

    # Actions

    def _batch(self, actions: NestedArrays | Mapping[int, Any]) -> NestedArrays:
        ids, batch = self._assign(actions)
        if ids is not None:
            if len(ids) != self.env_num:
                raise StructureError(
                    f"a vector env steps all of its {self.env_num} envs together, but step was "
                    f"given actions only for {sorted(ids)}"
                )
            batch = index_rows(batch, np.argsort(ids))
        # A copy, because the env may write to its actions, which are still to be stored.
        return copy_arrays(batch) if self._device is None else self._to_device(batch)

    def _to_device(self, batch: NestedArrays) -> NestedArrays:
        """Return the actions as the vector env takes them."""
        if self._device is None:
            return batch
        import torch  # only where the env has imported it

        return map_arrays(lambda array: torch.tensor(array, device=self._device), batch)

    def _reject_bad_actions(self, batch: NestedArrays, error: Exception) -> None:
        """Report actions outside the action space as such, not as a crash of the env."""
        if self._vector is None or self._device is not None:
            return
        if not self._vector.action_space.contains(batch):
            self.close()
            raise StructureError(
                f"the vector env was given actions that are not in its action space "
                f"{self.action_space}: {batch!r}, and raised {type(error).__name__}: {error}"
            ) from error

    # The vector env

    @property
    def _env(self) -> gym.vector.VectorEnv[Any, Any, Any]:
        assert self._vector is not None
        return self._vector

    def _clear_marks(self) -> None:
        self._ended, self._abandoned, self._pending = self._all_ids[:0], None, None

    def _make(self) -> gym.vector.VectorEnv[Any, Any, Any]:
        vector = self._vector_fn()
        self._mode = _autoreset_mode(vector, self.env_num)
        _claim(self._claims, vector)
        self._vector = vector
        self._resets_later = self._mode is AutoresetMode.NEXT_STEP
        self._set_attrs_again()
        return vector

    def _set_spaces(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        super()._set_spaces(observation, action)
        is_usable = self._is_usable
        self._is_usable = lambda obs: obs is self._finite_obs or is_usable(obs)
        self._as_arrays = make_check(observation, is_strict=True)
        self._shapes = map_space(lambda shape, dtype: np.empty((0, *shape), dtype), observation)
        self._plain_kind = None
        if isinstance(observation, spaces.Box):
            self._plain_kind = observation.dtype, (self.env_num, *observation.shape)

    def seed(self, seed: int | Sequence[int], dynamic_seed: bool = True) -> None:
        """Seed the envs; see :meth:`BaseEnvManager.seed`."""
        if not dynamic_seed:
            with self._some_vector() as vector:
                mode = _autoreset_mode(vector, self.env_num)
                can_fix = _takes_seeds(vector) and mode is AutoresetMode.DISABLED
            if not can_fix:
                raise ConfigError(
                    "dynamic_seed=False is not possible here, because the vector env resets its "
                    "envs itself; make it with autoreset_mode=AutoresetMode.DISABLED, or pass env "
                    "functions"
                )
        super().seed(seed, dynamic_seed)

    def set_reset_options(
        self, options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    ) -> None:
        """Set the options of resets; see :meth:`BaseEnvManager.set_reset_options` and the class."""
        if isinstance(options, list | tuple):
            raise ConfigError(
                "a vector env takes one dictionary of reset options for all of its envs, not one "
                "per env; use mode='sync' or 'async' for that"
            )
        super().set_reset_options(options)

    def _takes_seeds(self) -> bool:
        return _takes_seeds(self._env)

    def _can_mask(self) -> bool:
        return self._mode is AutoresetMode.DISABLED or self._takes_seeds()

    def _reset_all(self) -> tuple[NestedArrays, list[dict[str, Any]]]:
        seed: Any = None
        if self._pending_seeds or self._fixes_seeds:
            seeds = [self._next_seed(env_id) for env_id in range(self.env_num)]
            seed = seeds if self._takes_seeds() else seeds[0]
        options = self._overrides.reset_options[0]
        keywords = {} if options is None else {"options": {**options}}
        obs, infos = _checked_first(self._env.reset(seed=seed, **keywords))
        self._device = _device_of(obs)
        self._clear_marks()
        return self._own(obs), StepInfo.from_columns(infos, self.env_num).rows()

    def _reset_some(self, ids: list[int]) -> tuple[NestedArrays, list[dict[str, Any]]]:
        mask = np.zeros(self.env_num, np.bool_)
        mask[ids] = True
        seeds: Any = None
        if (self._pending_seeds or self._fixes_seeds) and self._takes_seeds():
            seeds = [
                self._next_seed(env_id) if mask[env_id] else None for env_id in range(self.env_num)
            ]
        options = {**(self._overrides.reset_options[0] or {}), "reset_mask": mask}
        obs, infos = _checked_first(self._env.reset(seed=seeds, options=options))
        self._ended = np.setdiff1d(self._ended, ids)
        if self._abandoned is not None:
            self._abandoned[ids] = False
        info = StepInfo.from_columns(infos, self.env_num)
        return index_rows(self._own(obs), ids), [info.row(env_id) for env_id in ids]

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        with self._closing_on_error():
            try:
                yield
            except DMiddlewareError:
                raise
            except Exception as error:
                is_made = self._vector is not None
                broken = contract_break("the vector env", "reset", error) if is_made else None
                if broken is not None:
                    raise broken from error
                raise EnvCrashed(
                    f"the vector env raised {type(error).__name__}: {explained(error)}\n"
                    f"{traceback.format_exc()}"
                ) from None  # its traceback is in the message

    def _access(self, accesses: list[Access]) -> list[Any]:
        access = accesses[0]
        try:
            owner = next((item for item in _layers(self._env) if hasattr(item, access.kind)), None)
            if owner is None:
                return self._access_shared(accesses)
            if self._takes_seeds() and not all(owner.call("has_wrapper_attr", access.name)):
                # To Gymnasium's vector envs, it would be a crash, or a new attribute.
                raise unknown_attribute("the vector env", access.name, self._env)
            if access.kind == "set_attr":
                owner.set_attr(access.name, [item.args[0] for item in accesses])
                return [None] * self.env_num
            results = getattr(owner, access.kind)(access.name, *access.args, **access.kwargs)
        except DMiddlewareError:
            raise
        except Exception as error:
            raise EnvCallError(
                f"the vector env raised {type(error).__name__}: {error}, in {access}"
            ) from error
        if len(results) != self.env_num:
            raise EnvCallError(f"the vector env returned {len(results)} results in {access}")
        return list(results)

    def _access_shared(self, accesses: list[Access]) -> list[Any]:
        """Read or set an attribute of the vector env itself, which has no such methods."""
        access, name = accesses[0], accesses[0].name
        if access.kind == "call":
            raise ConfigError(
                f"{access} needs a vector env with a method call(name, *args, **kwargs) that "
                f"returns one result per env, and {type(self._env.unwrapped).__name__} has none"
            )
        owner = next((item for item in _layers(self._env) if hasattr(item, name)), None)
        if owner is None:
            raise unknown_attribute("the vector env", name, self._env)
        if access.kind == "get_attr":
            return [getattr(owner, name)] * self.env_num
        if any(item.args[0] is not access.args[0] for item in accesses):
            raise ConfigError(
                f"{access} was given one value per env, but the envs of "
                f"{type(self._env.unwrapped).__name__} share the attribute; give one value, such "
                "as an array with a row per env if it has them"
            )
        setattr(owner, name, access.args[0])
        return [None] * self.env_num

    def _use_reset_options(self, options: list[dict[str, Any] | None]) -> None:
        if options[0] is not None:
            with self._some_vector() as vector:
                mode = _autoreset_mode(vector, self.env_num)
            if mode is not AutoresetMode.DISABLED:
                raise ConfigError(
                    f"the reset options would not reach the envs, because the vector env resets "
                    f"them itself ({mode}); make it with autoreset_mode=AutoresetMode.DISABLED, "
                    "set attributes instead, or use mode='sync' or 'async'"
                )
        super()._use_reset_options(options)

    def _env_states(self) -> list[dict[str, Any] | None]:
        state = get_state(self._env)
        if state is None:
            return [None]
        self._note_ended()
        abandoned = [] if self._abandoned is None else self._abandoned.nonzero()[0].tolist()
        return [{**state, "ended": self._ended.tolist(), "abandoned": abandoned}]

    def _restored(self, array: npt.NDArray[Any]) -> Any:
        return self._to_device(super()._restored(array))

    def _set_env_states(self, states: Sequence[Any]) -> None:
        set_state(self._env, states[0])
        self._ended, self._pending = np.array(states[0]["ended"], np.int64), None
        self._abandoned = None
        if states[0]["abandoned"]:
            self._abandoned = np.isin(self._all_ids, states[0]["abandoned"])

    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        with self._some_vector() as vector:
            return vector.single_observation_space, vector.single_action_space

    @contextlib.contextmanager
    def _some_vector(self) -> Iterator[gym.vector.VectorEnv[Any, Any, Any]]:
        """Give access to the vector env; before launch, to one that is closed again."""
        if self._vector is not None:
            yield self._vector
            return
        claims = EnvClaims()
        with self._failing_for_good():
            vector = self._vector_fn()
            _autoreset_mode(vector, self.env_num)
            _claim(claims, vector)  # a vector env in use must not be closed here
        try:
            yield vector
        finally:
            claims.release()
            close_quietly(vector)


def _layers(vector: Any) -> Iterator[Any]:
    """Yield a vector env from its outermost wrapper inwards."""
    yield vector
    while isinstance(vector, gym.vector.VectorWrapper):
        vector = vector.env
        yield vector


def _claim(claims: EnvClaims, vector: gym.vector.VectorEnv[Any, Any, Any]) -> None:
    base = vector.unwrapped
    envs = base.envs if isinstance(base, gym.vector.SyncVectorEnv) else [base]
    for env_id, env in enumerate(envs):
        claims.claim(env_id, env)


def _autoreset_mode(vector: Any, env_num: int) -> AutoresetMode:
    """Return how a vector env starts new episodes, or reject it if it is not a vector env."""
    if not isinstance(vector, gym.vector.VectorEnv):
        instead = what_instead(vector) or f"a {type(vector).__name__}"
        raise EnvProtocolError(
            f"the factory made {instead}; mode 'vector' needs a "
            "gymnasium.vector.VectorEnv, such as gymnasium.make_vec returns"
        )
    if vector.num_envs != env_num:
        raise ConfigError(
            f"the vector env has {vector.num_envs} envs, but env_num is {env_num}; make them equal"
        )
    mode = vector.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        raise EnvProtocolError(
            f"the vector env's metadata['autoreset_mode'] is {mode!r}; it must be a "
            "gymnasium.vector.AutoresetMode"
        ) from None


def _takes_seeds(vector: gym.vector.VectorEnv[Any, Any, Any]) -> bool:
    """Return whether a vector env takes a seed for each of its envs."""
    return isinstance(vector.unwrapped, gym.vector.SyncVectorEnv | gym.vector.AsyncVectorEnv)


def _device_of(obs: Any) -> Any:
    """Return the device of the first tensor; None if the observations are arrays."""
    while isinstance(obs, Mapping | tuple):
        obs = next(iter(obs.values() if isinstance(obs, Mapping) else obs))
    return obs.device if is_tensor(obs) else None


def _as_actions(space: spaces.Space[Any], actions: Any) -> Any:
    """Return tensors of actions nested like their space, and of its dtypes."""
    if isinstance(space, spaces.Dict):
        return {name: _as_actions(sub, actions[name]) for name, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        names = map(str, range(len(space.spaces)))  # those of a treetensor
        return tuple(map(_as_actions, space.spaces, (actions[name] for name in names)))
    return actions.to(_torch_dtype(space.dtype))


@functools.cache
def _torch_dtype(dtype: np.dtype[Any] | None) -> Any:
    import torch  # only where the env has imported it

    return getattr(torch, str(dtype))


def _to_host(*columns: Any) -> list[npt.NDArray[np.float32]]:
    """Return tensors as arrays, in one transfer from their device."""
    import torch  # only where the env has imported it

    tensors = [torch.as_tensor(column) for column in columns]
    joined = torch.cat([tensor.float().flatten() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    parts = np.split(joined, ends)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _finite_rows(obs: NestedArrays, n_rows: int) -> Any:
    """Return ``[E] bool`` on the device: whether the tensors of each env are finite."""
    flags: list[Any] = []
    map_arrays(lambda array: flags.append(array.reshape(n_rows, -1).isfinite().all(1)), obs)
    return functools.reduce(operator.and_, flags)


def _own_array(values: Any, usual: np.dtype[Any], dtype: type[np.generic]) -> Any:
    """Return a copy, because the env may overwrite its arrays; of ``dtype`` if it is unusual."""
    if type(values) is np.ndarray and values.dtype == usual:
        return values.copy()
    array = np.array(values)
    if array.dtype.kind not in "biuf":
        raise EnvProtocolError(
            f"the vector env returned {values!r:.120} as rewards or flags; they must be arrays of "
            "numbers, one per env"
        )
    return array.astype(dtype)


def _not_a_step(result: Any) -> EnvProtocolError:
    return EnvProtocolError(
        "the vector env must return (obs, reward, terminated, truncated, info) from step(), but "
        f"returned {result!r:.120}"
    )


def _is_step_result(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], Mapping)


def _checked_first(result: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise EnvProtocolError(
            f"the vector env must return (obs, info) from reset(), but returned {result!r:.120}"
        )
    return result[0], own_copy(result[1])
