"""Envs that EnvPool steps in its own threads."""

from __future__ import annotations

import contextlib
import importlib
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from dmiddleware.env.batching import NestedArrays, replace_rows
from dmiddleware.env.contract import close_quietly
from dmiddleware.env.env_access import Access
from dmiddleware.env.manager import BaseEnvManager
from dmiddleware.env.pictures import Picture, as_picture
from dmiddleware.env.timestep import BatchedTimestep, IdArray, StepInfo
from dmiddleware.errors import (
    ConfigError,
    EnvCrashed,
    EnvProtocolError,
    RegistryError,
    StructureError,
)
from dmiddleware.foreign_names import checks_options
from dmiddleware.registry import nearest

__all__ = ["EnvPoolManager"]

_OWN_KWARGS: Final = ("num_envs", "batch_size", "seed", "env_seed", "env_type")
# EnvPool's row numbers, which ``env_id`` of the timestep has already.
_ROW_KEYS: Final = ("env_id", "players")


class EnvPoolManager(BaseEnvManager):
    """Steps envs of EnvPool (Weng et al., NeurIPS 2022), which run in C++ threads.

    EnvPool has Atari, MuJoCo, Box2D, dm_control, classic control and others, under ids of its own
    ("Pong-v5", "HalfCheetah-v4", "CheetahRun-v1"). An env whose episode ended is reset right away,
    so every step has one transition of every env. (EnvPool alone spends the env's next step on the
    reset and returns it as a transition with reward 0.)

    Each env has its own seed, which EnvPool takes only when the envs are made: after
    :meth:`seed`, the next :meth:`reset` of all envs makes them again. The state of the envs cannot
    be saved.

    The envs run in C++ and cannot be reached: :meth:`call`, :meth:`get_attr`, :meth:`set_attr` and
    :meth:`set_reset_options` raise ConfigError.

    EnvPool cannot restart an env that fails. It reports an episode that reaches a terminal state in
    its very last allowed step as truncated.

    Args:
        env_id: the id in EnvPool.
        env_num: the number of envs, ``E``.
        seed: an integer or one seed per env, see :meth:`seed`; seeds are taken modulo 2³¹. None
            draws a random one.
        env_kwargs: options of ``envpool.make``, for example ``{"num_threads": 2}`` or
            ``{"episodic_life": True, "reward_clip": True}``.

    Raises:
        ConfigError: if EnvPool is not installed, or an option is unknown or set by the manager.
        RegistryError: if EnvPool has no env with this id; the message lists the nearest ones.
    """

    @checks_options
    def __init__(
        self,
        env_id: str,
        env_num: int,
        *,
        seed: int | Sequence[int] | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_num, seed=seed)
        self._envpool = _import_envpool()
        self._id, self._kwargs = env_id, dict(env_kwargs or {})
        self._pool: Any = None
        env_ids = self._envpool.list_all_envs()
        if env_id not in env_ids:
            near = nearest(env_id, env_ids)
            hint = f"; nearest known: {', '.join(near)}" if near else ""
            raise RegistryError(f"EnvPool has no env {env_id!r}{hint}")
        for name in _OWN_KWARGS:
            if name in self._kwargs:
                raise ConfigError(
                    f"env_kwargs has {name!r}, which the manager sets itself; use the arguments "
                    "of make_env_manager"
                )
        # Before launch, for its spaces, and to find errors in the options.
        try:
            with _quiet_spaces():
                spec = self._envpool.make_spec(env_id, num_envs=self.env_num, **self._kwargs)
                self._found = (
                    _with_true_bounds(spec.gymnasium_observation_space),
                    spec.gymnasium_action_space,
                )
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"EnvPool refuses the options of {env_id}: {error}") from error

    def launch(self) -> None:
        """Make the envs and reset them, see :meth:`BaseEnvManager.launch`."""
        self._require_closed()
        self._begin()
        self._set_spaces(*self._found)
        with self._failing_for_good():
            self._make()
            self._reset_all()
        self._open = True

    def close(self) -> None:
        """Close the envs and end EnvPool's threads; a second call does nothing."""
        self._open = False
        pool, self._pool = self._pool, None
        if pool is not None:
            close_quietly(pool)

    def seed(self, seed: int | Sequence[int], dynamic_seed: bool = True) -> None:
        """Seed the envs; see :meth:`BaseEnvManager.seed` and the class."""
        if not dynamic_seed:
            raise ConfigError(
                "dynamic_seed=False is not possible with EnvPool, which seeds its envs once, when "
                "they are made; leave backend out to step Gymnasium's envs"
            )
        super().seed(seed)

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Refuse; see the class."""
        raise self._unreachable("call")

    def get_attr(self, name: str) -> list[Any]:
        """Refuse; see the class."""
        raise self._unreachable("get_attr")

    def set_attr(self, name: str, values: Any) -> None:
        """Refuse; see the class."""
        raise self._unreachable("set_attr")

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some envs, see :meth:`BaseEnvManager.reset`."""
        self._require_open("reset")
        ids = self._checked_ids(env_ids)
        with self._failing_for_good():
            if len(ids) == self.env_num:
                if self._pending_seeds:
                    self._make()
                self._reset_all()
            elif ids:
                obs, infos = self._pool.reset(np.array(ids, np.int32))
                self.revision += 1
                self._totals.clear(ids)
                self._ready_obs = replace_rows(self._ready_obs, ids, obs)
                self._ready_infos = self._merged(self.ready_info, ids, _without_rows(infos))

    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, and reset those whose episode ended, see :meth:`BaseEnvManager.step`."""
        if not self._open:
            self._require_open("step")
        ids, batch = self._assign(actions)
        self._check_range(batch)
        env_id = self._id_array(ids)
        with self._failing_for_good():
            next_obs, reward, terminated, truncated, infos = self._pool.step(
                batch, None if ids is None else env_id
            )
            done = terminated | truncated
            self._count_step(ids, next_obs, reward)
            columns = _without_rows(infos)
            obs = next_obs
            ready_infos = StepInfo.from_columns(columns, len(done))
            if ids is not None:
                ready_infos = self._merged(self.ready_info, ids, columns)
            rows, totals = done.nonzero()[0], None
            if len(rows):
                ended = env_id[rows]
                if self._filmed:
                    self._keep_last_pictures(ended.tolist())
                totals = rows, self._totals.end_some(ended)
                first_obs, first_infos = self._pool.reset(ended.astype(np.int32))
                obs = replace_rows(next_obs, rows, first_obs)
                ready_infos = self._merged(ready_infos, ended, _without_rows(first_infos))
            self._ready_infos = ready_infos
            info = StepInfo.from_columns(columns, len(done), partial=totals)
            returns = info.values_at("eval_episode_return", rows.tolist()) if len(rows) else ()
            return self._finish(
                ids, obs, next_obs, reward, done, terminated, truncated, info, None, returns
            )

    def _pictures(self, env_ids: list[int]) -> list[Picture]:
        mode = self._pool.render_mode
        is_shown = mode == "rgb_array"
        frames = (
            self._pool.render(np.array(env_ids, np.int32)) if is_shown else [None] * len(env_ids)
        )
        return [as_picture(frame, mode) for frame in frames]

    def _check_range(self, batch: NestedArrays) -> None:
        """Reject actions outside a Discrete space, which EnvPool does not check."""
        space = self._action_space
        if isinstance(space, spaces.Discrete) and len(batch):
            low, high = batch.min(), batch.max()
            if low < space.start or high >= space.start + space.n:
                raise StructureError(
                    f"the actions are between {low} and {high}, but the action space is {space}"
                )

    def _make(self) -> None:
        """Make the envs with their pending seeds, in place of the present ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            close_quietly(pool)
        seeds = [
            self._pending_seeds.pop(env_id, secrets.randbits(31)) % 2**31
            for env_id in range(self.env_num)
        ]
        with _quiet_spaces():
            self._pool = self._envpool.make(
                self._id,
                env_type="gymnasium",
                num_envs=self.env_num,
                seed=seeds,
                **self._kwargs,
            )
            # The pool makes its spaces at first use.
            _ = self._pool.observation_space, self._pool.action_space

    def _reset_all(self) -> None:
        obs, infos = self._pool.reset()
        if not self._is_usable(obs):
            raise self._unusable(obs, None)
        self.revision += 1
        self._totals.clear(range(self.env_num))
        self._ready_obs = obs
        self._ready_infos = StepInfo.from_columns(_without_rows(infos), self.env_num)

    def _merged(
        self, info: StepInfo, env_ids: Sequence[int] | IdArray, columns: Mapping[str, Any]
    ) -> StepInfo:
        """Return an info of all envs in which the rows of some are those of ``columns``."""
        merged = {key: replace_rows(info[key], env_ids, new) for key, new in columns.items()}
        return StepInfo.from_columns(merged, self.env_num)

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        with self._closing_on_error():
            try:
                yield
            except EnvProtocolError:
                raise
            except Exception as error:
                raise EnvCrashed(
                    f"EnvPool's {self._id} raised {type(error).__name__}: {error}"
                ) from error

    def _unreachable(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} is not possible with EnvPool, whose envs run in C++ and take options only "
            "when they are made; give them as env_kwargs, or leave backend out to step Gymnasium's "
            "envs"
        )

    def _access(self, accesses: list[Access]) -> list[Any]:
        raise self._unreachable(accesses[0].kind)

    def _use_reset_options(self, options: list[dict[str, Any] | None]) -> None:
        if any(env_options is not None for env_options in options):
            raise self._unreachable("set_reset_options")

    def _env_states(self) -> list[dict[str, Any] | None]:
        return [None]

    def _set_env_states(self, states: Sequence[Any]) -> None:
        raise NotImplementedError  # never saved, see _env_states

    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return self._found


def _import_envpool() -> Any:
    try:
        return importlib.import_module("envpool")
    except ImportError as error:
        raise ConfigError(
            "backend='envpool' needs EnvPool; run: pip install 'dmiddleware[envpool]'"
        ) from error


@contextlib.contextmanager
def _quiet_spaces() -> Iterator[None]:
    """Ignore Gymnasium's warnings about EnvPool's float64 bounds of float32 spaces."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Box (low|high)'s precision lowered")
        yield


def _with_true_bounds(space: Any) -> spaces.Space[Any]:
    """Return the space with infinite bounds where EnvPool has the smallest and largest numbers.

    EnvPool takes the smallest positive number for the lowest one.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _with_true_bounds(sub) for key, sub in space.spaces.items()})
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        limits = np.finfo(space.dtype)
        if (space.low == limits.tiny).any():
            low = np.where(space.low == limits.tiny, -np.inf, space.low)
            high = np.where(space.high == limits.max, np.inf, space.high)
            dtype = space.dtype.type
            space = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
    bounded: spaces.Space[Any] = space
    return bounded


def _without_rows(infos: Mapping[str, Any]) -> dict[str, Any]:
    return {key: column for key, column in infos.items() if key not in _ROW_KEYS}
