"""Envs that are stepped one after another in this process."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.env.batching import NestedArrays, allocate, copy_arrays, own_copy
from dmiddleware.env.contract import (
    MISFITS,
    bad_obs,
    check_env,
    check_first,
    check_info,
    check_result,
    check_same_spaces,
    close_quietly,
    contract_break,
)
from dmiddleware.env.env_access import Access
from dmiddleware.env.env_claims import EnvClaims
from dmiddleware.env.env_state import get_state, set_state
from dmiddleware.env.manager import BaseEnvManager, check_env_fns
from dmiddleware.env.pictures import Picture, picture_of
from dmiddleware.env.timestep import BatchedTimestep, BoolArray
from dmiddleware.errors import (
    ConfigError,
    EnvCrashed,
    EnvError,
    EnvProtocolError,
    SpaceError,
    StructureError,
)
from dmiddleware.settings import takes_options

__all__ = ["SyncEnvManager", "EnvFn"]

logger = logging.getLogger(__name__)

_PLAIN_INFO: Final = {dict}

EnvFn: TypeAlias = Callable[[], gym.Env[Any, Any]]
"""Makes one env; called again after a failure of the env."""


class SyncEnvManager(BaseEnvManager):
    """Steps its envs one after another in this process.

    The best choice for envs that take microseconds per step: the overhead over a bare loop of
    ``env.step`` is small. An env that raises is closed, made again and reset, while the others
    continue. An env that hangs blocks the program (see :class:`~dmiddleware.env.AsyncEnvManager`).

    Args:
        env_fns: one factory per env; all envs have the same spaces.
        seed: an integer or one seed per env, see :meth:`seed`.
        max_retry: how often one env may be restarted in a row before
            :class:`~dmiddleware.errors.EnvCrashed` is raised; the count starts again when the env
            finishes an episode.

    Raises:
        ConfigError: if an argument has the wrong type.
    """

    @takes_options
    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        seed: int | Sequence[int] | None = None,
        max_retry: int = 3,
    ) -> None:
        self._env_fns = check_env_fns(env_fns)
        super().__init__(len(self._env_fns), seed=seed, max_retry=max_retry)
        self._envs: list[gym.Env[Any, Any]] = []
        self._steps: list[Callable[[Any], Any]] = []
        self._unchecked: set[int] = set()
        self._claims = EnvClaims()

    @property
    def envs(self) -> tuple[gym.Env[Any, Any], ...]:
        """The envs, as the factories made them; a restart replaces one."""
        return tuple(self._envs)

    def launch(self) -> None:
        """Make the envs and reset them, see :meth:`BaseEnvManager.launch`."""
        self._require_closed()
        self._begin()
        with self._closing_on_error():
            for index, env_fn in enumerate(self._env_fns):
                env = _first(index, "made", env_fn)
                check_env(env, index)
                self._claims.claim(index, env)
                self._envs.append(env)
                self._overrides.apply(index, env)
            check_same_spaces(
                [(env.observation_space, env.action_space) for env in self._envs],
            )
            self._set_spaces(self._envs[0].observation_space, self._envs[0].action_space)
            self._steps = [env.step for env in self._envs]
            self._unchecked = set(range(self.env_num))
            firsts = [
                _first(index, "reset", functools.partial(self._reset_once, index))
                for index in range(self.env_num)
            ]
            self._open = True
            ids = range(self.env_num)
            self._install_reset(ids, *self._batch_resets(ids, firsts))

    def close(self) -> None:
        """Close the envs; a second call does nothing."""
        self._open = False
        self._claims.release()
        envs, self._envs, self._steps = self._envs, [], []
        for env in envs:
            close_quietly(env)

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some envs, see :meth:`BaseEnvManager.reset`."""
        self._require_open("reset")
        ids = self._checked_ids(env_ids)
        with self._closing_on_error():
            firsts = [self._reset(env_id) for env_id in ids]
            self._install_reset(ids, *self._batch_resets(ids, firsts))

    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, and reset those whose episode ended, see :meth:`BaseEnvManager.step`."""
        if not self._open:
            self._require_open("step")
        ids, batch = self._assign(actions)
        rows = self._split(batch)
        steps = self._steps if ids is None else [self._steps[index] for index in ids]
        results: list[Any] = []
        append = results.append
        failed: list[int] | None = None
        failure: Exception | None = None
        try:
            try:
                for step, action in zip(steps, rows, strict=True):
                    append(step(action))
            except Exception as error:  # noqa: BLE001 - an env may raise anything
                failure = error
            if failure is not None:
                # Not in the except clause: every later error would show this one as its context.
                failed = self._finish_after_failure(ids, rows, results, failure)
            return self._assemble(ids, results, failed)
        except BaseException:
            # Also on Ctrl-C: some envs have stepped and others have not.
            self.close()
            raise

    def _pictures(self, env_ids: list[int]) -> list[Picture]:
        return [picture_of(self._envs[env_id]) for env_id in env_ids]

    def _assemble(
        self, ids: list[int] | None, results: list[Any], failed: list[int] | None
    ) -> BatchedTimestep:
        try:
            if self._unchecked:
                self._check_results(ids, results)
            obs_rows, rewards, terminated_rows, truncated_rows, infos = zip(*results, strict=True)
            next_obs = self._collate(obs_rows)
            reward = _as_array(rewards, np.float64, self._reward_shape)
            some_ended = any(terminated_rows) or any(truncated_rows)
            if some_ended:
                terminated = _as_array(terminated_rows, np.bool_)
                truncated = _as_array(truncated_rows, np.bool_)
                done = terminated | truncated
            else:
                terminated = np.zeros(len(results), np.bool_)
                truncated, done = terminated.copy(), terminated.copy()
            if set(map(type, infos)) != _PLAIN_INFO:
                self._check_infos(ids, infos)
        except MISFITS as error:
            self._check_results(ids, results)
            raise EnvProtocolError(
                f"the envs' observations do not fit together: {error}"
            ) from error
        self._count_step(ids, next_obs, reward)
        # Before the resets, in which envs may fill them again.
        last_infos: list[Mapping[str, Any]] = [own_copy(info) if info else {} for info in infos]
        if ids is None:
            self._ready_infos = last_infos
        else:
            self._replace_infos(ids, last_infos)
        obs, returns = next_obs, list[Any]()
        if some_ended:
            obs, last_infos, returns = self._reset_ended(ids, done, next_obs, last_infos)
        return self._finish(
            ids, obs, next_obs, reward, done, terminated, truncated, last_infos, failed, returns
        )

    def _reset_ended(
        self,
        ids: list[int] | None,
        done: BoolArray,
        next_obs: NestedArrays,
        infos: list[Mapping[str, Any]],
    ) -> tuple[NestedArrays, list[Mapping[str, Any]], list[Any]]:
        """Reset the envs whose episode ended.

        Returns:
            The observations to act on next, the infos with the totals of the episodes, and their
            returns.
        """
        obs, last_infos, ready_infos = copy_arrays(next_obs), [*infos], [*self._ready_infos]
        returns: list[Any] = []
        for row in done.nonzero()[0].tolist():
            env_id = row if ids is None else ids[row]
            last_infos[row] = {**self._totals.end(env_id), **infos[row]}
            returns.append(last_infos[row]["eval_episode_return"])
            self.failures.in_a_row[env_id] = 0
            if self._filmed:
                self._keep_last_pictures((env_id,))
            first, ready_infos[env_id] = self._reset(env_id)
            self._write_obs(obs, row, first, env_id)
        self._ready_infos = ready_infos
        return obs, last_infos, returns

    def _finish_after_failure(
        self, ids: list[int] | None, rows: list[Any], results: list[Any], error: Exception
    ) -> list[int]:
        """Restart the env that raised, step the remaining envs, and return the rows that failed."""
        failed = []
        failure: Exception | None = error
        while len(results) < len(rows):
            row = len(results)
            env_id = row if ids is None else ids[row]
            try:
                if failure is None:
                    results.append(self._steps[env_id](rows[row]))
                    continue
            except Exception as another:  # noqa: BLE001 - an env may raise anything
                failure = another
            assert failure is not None
            self._reject_bad_action(env_id, rows[row], failure)
            self.dropped_steps += self._totals.length_of(env_id)
            obs, info = self._restart(env_id, "step", failure)
            reward = np.zeros(self._reward_shape)
            results.append((obs, reward, False, False, {**info, "abnormal": True}))
            failed.append(row)
            failure = None
        return failed

    def _reject_bad_action(self, env_id: int, action: Any, error: Exception) -> None:
        """Report an action outside the action space as such, not as a crash of the env."""
        if not self.action_space.contains(action):
            self.close()
            raise StructureError(
                f"env {env_id} was given the action {action!r}, which is not in its action space "
                f"{self.action_space}, and raised {type(error).__name__}: {error}"
            ) from error

    def _restart(self, env_id: int, doing: str, error: Exception) -> tuple[Any, Any]:
        renew = functools.partial(self._renew, env_id)
        return self.failures.restart(env_id, doing, error, renew)

    def _renew(self, env_id: int) -> tuple[Any, Any]:
        """Replace an env that failed by a new one, and reset it."""
        close_quietly(self._envs[env_id])
        self._reseed([env_id], self.failures.restarts_of(env_id))
        env = self._env_fns[env_id]()
        check_env(env, env_id)
        self._claims.claim(env_id, env)
        self._envs[env_id], self._steps[env_id] = env, env.step
        self._unchecked.add(env_id)
        self._overrides.apply(env_id, env)
        pair = self.observation_space, self.action_space
        check_same_spaces([pair, (env.observation_space, env.action_space)])
        if env_id == 0:
            self._replace_action_space(env.action_space)
        return self._reset_once(env_id)

    def _reset(self, env_id: int) -> tuple[Any, Any]:
        try:
            return self._reset_once(env_id)
        except EnvProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 - an env may raise anything
            failure = error
        return self._restart(env_id, "reset", failure)

    def _reset_once(self, env_id: int) -> tuple[Any, Any]:
        # Most episodes continue the random sequence of their env.
        seed = self._next_seed(env_id) if self._pending_seeds or self._fixes_seeds else None
        env, options = self._envs[env_id], self._overrides.reset_options[env_id]
        if options is not None:
            result = env.reset(seed=seed, options={**options})
        else:
            result = env.reset() if seed is None else env.reset(seed=seed)
        if seed is not None:
            env.action_space.seed(seed)
        # The usual case; an isinstance check with Mapping is much slower.
        if not (type(result) is tuple and len(result) == 2 and type(result[1]) is dict):
            check_first(result, env_id)
        obs, info = result
        return obs, own_copy(info) if info else {}

    def _batch_resets(
        self, ids: Sequence[int], firsts: list[tuple[Any, Any]]
    ) -> tuple[NestedArrays, list[Any]]:
        arrays = allocate(self.observation_space, len(ids))
        for row, (env_id, (obs, _)) in enumerate(zip(ids, firsts, strict=True)):
            self._write_obs(arrays, row, obs, env_id)
        return arrays, [info for _, info in firsts]

    def _write_obs(self, arrays: NestedArrays, row: int, obs: Any, env_id: int) -> None:
        try:
            self._write(arrays, row, obs)
        except MISFITS as error:
            raise bad_obs(env_id, obs, self.observation_space, error) from error

    def _check_infos(self, ids: list[int] | None, infos: Sequence[Any]) -> None:
        for env_id, info in zip(self._id_array(ids).tolist(), infos, strict=True):
            check_info(info, env_id)

    def _check_results(self, ids: list[int] | None, results: list[Any]) -> None:
        """Raise for the first env whose step returned something that cannot be used.

        The first step of every env is checked, and steps in which something does not fit.
        """
        self._unchecked.difference_update(self._id_array(ids).tolist())
        for env_id, result in zip(self._id_array(ids).tolist(), results, strict=True):
            check_result(result, env_id, self._reward_shape)
            self._write_obs(allocate(self.observation_space, 1), 0, result[0], env_id)

    def _access(self, accesses: list[Access]) -> list[Any]:
        pairs = enumerate(zip(self._envs, accesses, strict=True))
        return [access.of(env, env_id) for env_id, (env, access) in pairs]

    def _env_states(self) -> list[dict[str, Any] | None]:
        return [get_state(env) for env in self._envs]

    def _set_env_states(self, states: Sequence[Any]) -> None:
        for env, state in zip(self._envs, states, strict=True):
            set_state(env, state)

    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return probe_spaces(self._env_fns[0])


def probe_spaces(env_fn: EnvFn) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Make an env and close it, to find its observation and action space.

    Raises:
        EnvCrashed: if it cannot be made.
        EnvProtocolError: if it is not a Gymnasium env, or it is in use in another manager.
    """
    env = _first(0, "made", env_fn)
    check_env(env, 0)
    claims = EnvClaims()
    claims.claim(0, env)  # an env in use must not be closed here
    try:
        return env.observation_space, env.action_space
    finally:
        claims.release()
        close_quietly(env)


def _as_array(
    values: Sequence[Any], dtype: type[np.generic], shape: tuple[int, ...] = ()
) -> npt.NDArray[Any]:
    """Return what the envs returned, numbers ``[E', *shape]``, as an array of its own."""
    array = np.array(values)  # with a dtype given, numpy would be slower and accept None
    if array.dtype != dtype:
        if array.dtype.kind not in "iufb":
            raise TypeError
        array = array.astype(dtype)
    if array.shape[1:] != shape:
        raise ValueError
    return array


def _first(index: int, what: str, function: Callable[[], Any]) -> Any:
    """Make or reset an env at launch, where a failure is not retried."""
    try:
        return function()
    except (ConfigError, SpaceError, EnvError):
        raise
    except Exception as error:
        broken = contract_break(f"env {index}", what, error) if what == "reset" else None
        if broken is not None:
            raise broken from error
        raise EnvCrashed(
            f"env {index} could not be {what}: {type(error).__name__}: {error}\n"
            f"{traceback.format_exc()}"
        ) from None  # its traceback is in the message
