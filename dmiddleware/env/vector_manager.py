"""Envs that are vectorised already: any ``gymnasium.vector.VectorEnv``."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from dmiddleware.env.batching import (
    NestedArrays,
    copy_arrays,
    make_check,
    map_arrays,
    replace_rows,
    take_rows,
)
from dmiddleware.env.contract import as_frame, check_same_spaces, close_quietly
from dmiddleware.env.env_state import get_state, set_state
from dmiddleware.env.manager import BaseEnvManager
from dmiddleware.env.restart_limit import FailureBudget
from dmiddleware.env.timestep import BatchedTimestep, BoolArray, StepInfo
from dmiddleware.errors import (
    ConfigError,
    DMiddlewareError,
    EnvCrashed,
    EnvProtocolError,
    StructureError,
)
from dmiddleware.seeding import derive_seed

__all__ = ["VectorEnvManager", "VectorEnvFn"]

VectorEnvFn: TypeAlias = Callable[[], gym.vector.VectorEnv[Any, Any, Any]]
"""Makes the vector env; called again after a failure."""

_FINAL_KEYS = ("final_obs", "_final_obs", "final_info", "_final_info")


class VectorEnvManager(BaseEnvManager):
    """Steps a vectorised env, such as a simulator that advances many worlds at once.

    All three of Gymnasium's ways to start the next episode are supported; the vector env declares
    its own in ``metadata["autoreset_mode"]``:

    - ``NEXT_STEP``: the step after the end of an episode resets the env instead. It is not a
      transition, so the env has no row in it, and its action is ignored. Until then, ``ready_obs``
      has the final observation of the env.
    - ``SAME_STEP``: the env is reset in its last step, which returns the final observation and
      info too.
    - ``DISABLED``: the manager resets the env immediately, with a mask.

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

    _ended: BoolArray
    _adrift: BoolArray

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
        self._max_retry = max_retry
        self._failures = FailureBudget(1, max_retry=max_retry)
        self._vector: gym.vector.VectorEnv[Any, Any, Any] | None = None
        self._clear_marks()

    @property
    def in_lockstep(self) -> bool:
        """True: the envs can only be stepped all together."""
        return True

    @property
    def restarts(self) -> int:
        """How often the vector env failed and was restarted since launch."""
        return self._failures.restarts

    def launch(self) -> None:
        """Make the vector env and reset it, see :meth:`BaseEnvManager.launch`."""
        self._require_closed()
        self._begin()
        self._failures = FailureBudget(1, max_retry=self._max_retry, kind="vector env")
        with self._failing_for_good():
            vector = self._make()
            self._set_spaces(vector.single_observation_space, vector.single_action_space)
            self._install_reset(range(self._env_num), *self._reset_all())
        self._open = True

    def close(self) -> None:
        """Close the vector env; a second call does nothing."""
        self._open = False
        vector, self._vector = self._vector, None
        if vector is not None:
            close_quietly(vector)

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some envs, see :meth:`BaseEnvManager.reset`.

        A vector env that cannot reset only some envs (its mode is not ``DISABLED``, and it is not
        Gymnasium's sync or async vector env) lets them finish their episodes instead; until the
        next ones start, those envs have no rows in :meth:`step`.
        """
        self._require_open("reset")
        ids = self._checked_ids(env_ids)
        with self._failing_for_good():
            if len(ids) == self._env_num:
                self._install_reset(range(self._env_num), *self._reset_all())
            elif self._can_mask():
                self._install_reset(ids, *self._reset_some(ids))
            else:
                self._revision += 1
                self._adrift[ids] = True
                self._totals.clear(ids)

    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, see :meth:`BaseEnvManager.step`; a dictionary must have all of them."""
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

    def render(self, env_ids: Iterable[int] | None = None) -> list[npt.NDArray[np.uint8]]:
        """Return an image of each env, see :meth:`BaseEnvManager.render`."""
        self._require_open("render")
        mode = self._env.render_mode
        frames: Any = self._env.render()
        if frames is None or len(frames) != self._env_num:
            frames = [None] * self._env_num
        return [as_frame(frames[env_id], mode) for env_id in self._checked_ids(env_ids)]

    # A step

    def _take_step(self, result: Any) -> BatchedTimestep:
        obs, reward, terminated, truncated, infos = self._checked(result)
        done = terminated | truncated
        next_obs, columns = obs, infos
        left_out = self._adrift.copy()
        if self._mode is AutoresetMode.NEXT_STEP:
            left_out |= self._ended
            self._adrift &= ~self._ended
            self._ended = done & ~self._ended
        elif done.any():
            ended = done.nonzero()[0].tolist()
            if self._mode is AutoresetMode.SAME_STEP:
                next_obs, columns, infos = self._final(obs, infos, ended)
                self._adrift[ended] = False
            else:
                obs, infos = self._reset_ended(obs, infos, ended)
        ids = np.flatnonzero(~left_out).tolist() if left_out.any() else None
        ready_obs = obs
        if ids is not None:
            same = next_obs is obs
            obs = take_rows(obs, ids)
            next_obs = obs if same else take_rows(next_obs, ids)
            reward, done = reward[ids], done[ids]
            terminated, truncated = terminated[ids], truncated[ids]
            columns = _take_columns(columns, ids)
        self._totals.add(ids, reward)
        info = StepInfo.from_columns(self._with_totals(columns, done, ids), len(reward))
        step = self._finish(ids, obs, next_obs, reward, done, terminated, truncated, info, None)
        self._ready_obs = ready_obs
        self._ready_infos = StepInfo.from_columns(infos, self._env_num)
        return step

    def _checked(self, result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], Mapping):
            raise EnvProtocolError(
                "the vector env must return (obs, reward, terminated, truncated, info) from "
                f"step(), but returned {result!r:.120}"
            )
        reward = np.array(result[1], dtype=np.float64)
        terminated, truncated = np.array(result[2], np.bool_), np.array(result[3], np.bool_)
        if not reward.shape == terminated.shape == truncated.shape == (self._env_num,):
            raise EnvProtocolError(
                f"the vector env has {self._env_num} envs, but returned rewards of shape "
                f"{reward.shape} and flags of shape {terminated.shape} and {truncated.shape}"
            )
        return self._own(result[0]), reward, terminated, truncated, dict(result[4])

    def _own(self, obs: Any) -> NestedArrays:
        """Return a copy of the observations, because the env may overwrite them."""
        try:
            arrays = self._check_obs(obs)
            map_arrays(self._check_n_obs, arrays)
        except StructureError as error:
            raise EnvProtocolError(
                f"the vector env returned observations that do not fit its observation space "
                f"{self._observation_space}: {error}"
            ) from error
        return copy_arrays(arrays)

    def _check_n_obs(self, array: npt.NDArray[Any]) -> None:
        if len(array) != self._env_num:
            raise StructureError(f"it has {len(array)} rows for {self._env_num} envs")

    def _final(
        self, obs: NestedArrays, infos: dict[str, Any], ended: list[int]
    ) -> tuple[NestedArrays, dict[str, Any], dict[str, Any]]:
        """Return the successors, the infos of the step, and those of the resets (SAME_STEP)."""
        if "final_obs" not in infos:
            raise EnvProtocolError(
                "the vector env's autoreset_mode is SAME_STEP, but its info has no 'final_obs' at "
                "the end of an episode"
            )
        final = infos["final_obs"]
        if isinstance(final, np.ndarray) and final.dtype == object:
            final_rows = self._collate([final[env_id] for env_id in ended])
        else:
            final_rows = take_rows(self._check_obs(final), ended)
        first_infos = {key: value for key, value in infos.items() if key not in _FINAL_KEYS}
        last_infos = first_infos
        if infos.get("final_info"):
            rows = StepInfo.from_columns(first_infos, self._env_num).rows()
            final_info = StepInfo.from_columns(infos["final_info"], self._env_num)
            for env_id in ended:
                rows[env_id] = final_info.row(env_id)
            last_infos = dict(StepInfo(rows))
        return replace_rows(obs, ended, final_rows), last_infos, first_infos

    def _reset_ended(
        self, obs: NestedArrays, infos: dict[str, Any], ended: list[int]
    ) -> tuple[NestedArrays, dict[str, Any]]:
        """Reset envs by mask; return the next observations and their infos (DISABLED)."""
        first_obs, first_infos = self._reset_some(ended)
        rows = StepInfo.from_columns(infos, self._env_num).rows()
        for env_id, info in zip(ended, first_infos, strict=True):
            rows[env_id] = info
        return replace_rows(obs, ended, first_obs), dict(StepInfo(rows))

    def _with_totals(
        self, columns: dict[str, Any], done: BoolArray, ids: list[int] | None
    ) -> dict[str, Any]:
        if not done.any():
            return columns
        self._failures.record_episode(0)
        own = self._end_episodes(done, self._id_array(ids))
        # Values that the env sets itself take precedence, as in the other managers.
        return {**own, **columns}

    def _recover(self, error: Exception) -> BatchedTimestep:
        """Make the vector env again; all episodes are lost."""
        n_envs = self._env_num
        self._dropped_steps += sum(map(self._totals.length_of, range(n_envs)))
        obs, infos = self._restart(error)
        self._install_reset(range(n_envs), obs, infos)
        done, terminated, truncated = (np.zeros(n_envs, np.bool_) for _ in range(3))
        reward, failed = np.zeros(n_envs), list(range(n_envs))
        info = StepInfo([{**info, "abnormal": True} for info in infos])
        return self._finish(None, obs, obs, reward, done, terminated, truncated, info, failed)

    def _restart(self, error: Exception) -> tuple[NestedArrays, list[Any]]:
        doing = "step"
        while True:
            summary = EnvCrashed(f"raised {type(error).__name__}: {error}")
            details = "".join(traceback.format_exception(error))
            self._failures.record_failure(0, doing, summary, details)
            if self._vector is not None:
                close_quietly(self._vector)
                self._vector = None
            if self._seeds is not None:
                # With the first seeds, the same failure would happen again.
                count = self._failures.restarts
                self._seed_envs([derive_seed(seed, "restart", count) for seed in self._seeds])
            try:
                vector = self._make()
                check_same_spaces(
                    [
                        (self.observation_space, self.action_space),
                        (vector.single_observation_space, vector.single_action_space),
                    ]
                )
                return self._reset_all()
            except EnvProtocolError:
                raise
            except Exception as another:  # noqa: BLE001 - an env may raise anything
                error, doing = another, "restart"

    # Actions

    def _batch(self, actions: NestedArrays | Mapping[int, Any]) -> NestedArrays:
        if type(actions) is not np.ndarray and self._is_per_env(actions):
            ids = self._checked_ids(actions)
            if len(ids) != self._env_num:
                raise StructureError(
                    f"a vector env steps all of its {self._env_num} envs together, but step was "
                    f"given actions only for {sorted(ids)}"
                )
            actions = self._batch_of([actions[env_id] for env_id in range(self._env_num)])
        return self._checked_batch(actions)

    def _reject_bad_actions(self, batch: NestedArrays, error: Exception) -> None:
        """Report actions outside the action space as such, not as a crash of the env."""
        if self._vector is not None and not self._vector.action_space.contains(batch):
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
        # Envs that the next step resets (NEXT_STEP), and envs whose episodes were given up.
        self._ended = np.zeros(self._env_num, np.bool_)
        self._adrift = np.zeros(self._env_num, np.bool_)

    def _make(self) -> gym.vector.VectorEnv[Any, Any, Any]:
        self._vector = self._vector_fn()
        self._mode = _autoreset_mode(self._vector, self._env_num)
        return self._vector

    def _set_spaces(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        super()._set_spaces(observation, action)
        self._check_obs = make_check(observation)

    def seed(self, seed: int | Sequence[int], dynamic_seed: bool = True) -> None:
        """Seed the envs; see :meth:`BaseEnvManager.seed`."""
        if not dynamic_seed and not (self._takes_seeds() and self._mode is AutoresetMode.DISABLED):
            raise ConfigError(
                "dynamic_seed=False is not possible here, because the vector env resets its envs "
                "itself; make it with autoreset_mode=AutoresetMode.DISABLED, or pass env functions"
            )
        super().seed(seed, dynamic_seed)

    def _takes_seeds(self) -> bool:
        return isinstance(self._env.unwrapped, gym.vector.SyncVectorEnv | gym.vector.AsyncVectorEnv)

    def _can_mask(self) -> bool:
        return self._mode is AutoresetMode.DISABLED or self._takes_seeds()

    def _reset_all(self) -> tuple[NestedArrays, list[dict[str, Any]]]:
        seed: Any = None
        if self._pending_seeds or self._fixes_seeds:
            seeds = [self._next_seed(env_id) for env_id in range(self._env_num)]
            seed = seeds if self._takes_seeds() else seeds[0]
        obs, infos = _checked_first(self._env.reset(seed=seed))
        self._clear_marks()
        return self._own(obs), StepInfo.from_columns(infos, self._env_num).rows()

    def _reset_some(self, ids: list[int]) -> tuple[NestedArrays, list[dict[str, Any]]]:
        mask = np.zeros(self._env_num, np.bool_)
        mask[ids] = True
        seeds: Any = None
        if (self._pending_seeds or self._fixes_seeds) and self._takes_seeds():
            seeds = [
                self._next_seed(env_id) if mask[env_id] else None for env_id in range(self._env_num)
            ]
        obs, infos = _checked_first(self._env.reset(seed=seeds, options={"reset_mask": mask}))
        self._ended[ids] = False
        self._adrift[ids] = False
        info = StepInfo.from_columns(infos, self._env_num)
        return take_rows(self._own(obs), ids), [info.row(env_id) for env_id in ids]

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        try:
            yield
        except DMiddlewareError:
            self.close()
            raise
        except Exception as error:  # noqa: BLE001 - an env may raise anything
            self.close()
            raise EnvCrashed(
                f"the vector env raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
            ) from None  # its traceback is in the message
        except BaseException:
            self.close()
            raise

    def _env_states(self) -> list[dict[str, Any] | None]:
        state = get_state(self._env)
        if state is None:
            return [None]
        return [{**state, "ended": self._ended.tolist(), "adrift": self._adrift.tolist()}]

    def _set_env_states(self, states: Sequence[Any]) -> None:
        set_state(self._env, states[0])
        self._ended = np.array(states[0]["ended"], np.bool_)
        self._adrift = np.array(states[0]["adrift"], np.bool_)

    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        with self._failing_for_good():
            vector = self._vector_fn()
        try:
            _autoreset_mode(vector, self._env_num)
            return vector.single_observation_space, vector.single_action_space
        finally:
            close_quietly(vector)


def _autoreset_mode(vector: Any, env_num: int) -> AutoresetMode:
    """Return how a vector env starts new episodes, or reject it if it is not a vector env."""
    if not isinstance(vector, gym.vector.VectorEnv):
        raise EnvProtocolError(
            f"the factory made a {type(vector).__name__}; mode 'vector' needs a "
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


def _checked_first(result: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise EnvProtocolError(
            f"the vector env must return (obs, info) from reset(), but returned {result!r:.120}"
        )
    return result[0], dict(result[1])


def _take_columns(columns: Mapping[str, Any], ids: list[int]) -> dict[str, Any]:
    return {
        key: _take_column(column, ids, is_masked=f"_{key}" in columns)
        for key, column in columns.items()
    }


def _take_column(column: Any, ids: list[int], *, is_masked: bool) -> Any:
    if isinstance(column, Mapping):
        return _take_columns(column, ids)
    if getattr(column, "ndim", 0):
        return column[ids]
    if is_masked:
        return [column[env_id] for env_id in ids]
    return column  # one value for all envs
