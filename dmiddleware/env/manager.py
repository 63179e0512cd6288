"""The interface of all env managers, and the bookkeeping that they share."""

from __future__ import annotations

import logging
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from dmiddleware.env.batching import (
    NestedArrays,
    ValueCheck,
    axes_in_memory,
    describe_unusable,
    has_items,
    index_rows,
    is_finite,
    is_tensor,
    make_check,
    make_collate,
    make_split,
    make_value_check,
    make_write,
    map_arrays,
    own_copy,
    replace_rows,
    with_axes_in_memory,
)
from dmiddleware.env.env_group import EnvGroup
from dmiddleware.env.env_state import (
    decode_infos,
    encode_infos,
    get_space_state,
    set_space_state,
)
from dmiddleware.env.pictures import Frame, Picture
from dmiddleware.env.team import reward_shape_of
from dmiddleware.env.timestep import (
    BatchedTimestep,
    BoolArray,
    IdArray,
    StepInfo,
)
from dmiddleware.errors import (
    CheckpointMismatch,
    ConfigError,
    EnvProtocolError,
    EnvStateError,
    StructureError,
)
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Settings

__all__ = [
    "BaseEnvManager",
    "EpisodeTotals",
    "check_env_fns",
    "check_env_manager",
]

logger = logging.getLogger(__name__)

_FLOAT32: Final = np.dtype(np.float32)
_MAX_UNCOUNTED = 256
"""Ends of episodes that wait to be counted."""


class BaseEnvManager(EnvGroup):
    """Steps several envs of one kind at once.

    A new manager is closed. :meth:`launch`, or entering a ``with`` block, makes the envs and resets
    them; :meth:`close`, or leaving the block, closes them, and the manager can be launched again.
    After each :meth:`step`, the envs whose episode ended have already been reset: ``ready_obs``
    holds the observations to act on next, for the envs ``ready_obs_id``.

    Attributes:
        env_num: the number of envs, ``E``.
        failures: counts how often envs failed, and were restarted, since launch.
        dropped_steps: the env steps since launch that belonged to episodes that a failure cut off.
        in_lockstep: whether the envs can only be stepped all together.
        revision: a number that grows whenever the envs are launched, reset, stepped or restored. A
            collector compares it with the value after its own last step, to notice that something
            else has used the envs in between.

    Args:
        env_num: the number of envs, ``E``.
        seed: as in :meth:`seed`; None leaves the envs unseeded.
        max_retry: how often one env may be restarted in a row.

    Raises:
        ConfigError: if ``env_num`` is not a positive integer, ``seed`` not integers, or
            ``max_retry`` not an integer of at least 0.
    """

    in_lockstep = False

    settings: Settings | None = None
    """The options with which ``make_env_manager`` made it; None: it was made in another way."""

    _ready_obs: NestedArrays
    # Columns, or a row for each env.
    _ready_infos: StepInfo | Mapping[str, Any] | Sequence[Mapping[str, Any]]
    _totals: EpisodeTotals
    _is_usable: ValueCheck

    def __init__(
        self, env_num: int, *, seed: int | Sequence[int] | None = None, max_retry: int = 0
    ) -> None:
        super().__init__(env_num, max_retry=max_retry)
        self._all_ids: IdArray = np.arange(self.env_num)
        self._all_valid: BoolArray = np.ones(self.env_num, np.bool_)
        self._none_abnormal: BoolArray = np.zeros(self.env_num, np.bool_)
        self._observation_space: spaces.Space[Any] | None = None
        self._action_space: spaces.Space[Any] | None = None
        self._warned: set[str] = set()
        self._filmed: frozenset[int] = frozenset()
        self._last_pictures: dict[int, Picture] = {}
        self._reward_shape: tuple[int, ...] = ()
        self._clear_episodes()
        if seed is not None:
            self.seed(seed)

    # Life

    @property
    def episode_lengths(self) -> list[int]:
        """The steps that each env's current episode has had so far, one number per env."""
        return [self._totals.length_of(env_id) for env_id in range(self.env_num)]

    @property
    def episode_counts(self) -> list[int]:
        """The episodes that each env has finished since launch, one number per env."""
        return self._totals.n_ended

    @abstractmethod
    def launch(self) -> None:
        """Make the envs and reset them; ``ready_obs`` is available afterwards.

        Raises:
            EnvStateError: if they are launched already.
            EnvCrashed: if an env cannot be made or reset. Nothing is retried here, because an env
                that fails from the start is a mistake in the program.
            EnvTimeout: if an env is not ready in time.
            EnvProtocolError: if an env does not follow Gymnasium's interface, or the spaces of the
                envs differ.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the envs and release their resources; a second call does nothing."""

    # Spaces

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The observation space of a single env.

        Before launch, an env is made in this process to read it, and closed again.
        """
        if self._observation_space is None:
            self._set_spaces(*self._probe_spaces())
        assert self._observation_space is not None
        return self._observation_space

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The action space of a single env, found like :attr:`observation_space`."""
        if self._action_space is None:
            self._set_spaces(*self._probe_spaces())
        assert self._action_space is not None
        return self._action_space

    def seed(self, seed: int | Sequence[int], dynamic_seed: bool = True) -> None:
        """Seed the envs and the action spaces; see :meth:`EnvGroup.seed`."""
        super().seed(seed, dynamic_seed)
        if self._action_space is not None:
            self._seed_action_spaces()

    def sample_actions(self) -> NestedArrays:
        """Draw one random action for every ready env, from the seeded action space.

        Returns:
            Arrays ``[E, …]``, nested like the action space, as :meth:`step` takes them.
        """
        assert self.action_space is not None
        return _plain(self._batched_action_space.sample())

    # Stepping

    @property
    def ready_obs(self) -> NestedArrays:
        """The observations to act on next: ``[E, …]``, nested like the observation space."""
        if not self._open:
            self._require_open("ready_obs")
        return self._ready_obs

    @property
    def ready_obs_id(self) -> IdArray:
        """The env of each row of ``ready_obs``, ``[E] int64``."""
        if not self._open:
            self._require_open("ready_obs_id")
        return self._all_ids

    @property
    def ready_info(self) -> StepInfo:
        """The infos that came with ``ready_obs`` (such as action masks)."""
        self._require_open("ready_info")
        infos = self._ready_infos
        if isinstance(infos, StepInfo):
            return infos
        if isinstance(infos, Mapping):
            return StepInfo.from_columns(infos, self.env_num)
        return StepInfo(infos)

    @abstractmethod
    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some envs, and give up their current ones.

        Args:
            env_ids: the envs; None means all.
        """

    @abstractmethod
    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, and reset those whose episode ended.

        Args:
            actions: ``[E, …]``, nested like the action space, one row per env in the order of
                ``ready_obs_id``; or a dictionary from env ids to single actions, which steps only
                those envs.

        Returns:
            One row for each env that was stepped. Rows that are not ``valid`` are not transitions.

        Raises:
            EnvStateError: before launch and after close.
            StructureError: if the actions do not fit the envs or the action space. If it is their
                number, structure, shape or dtype, no env has stepped. Values outside the space are
                looked for only after an env has raised, because the check takes time in every step;
                the manager is closed then, because other envs may have stepped.
            EnvCrashed: if an env used up its retries; the manager is closed.
            EnvTimeout: if an env that did not answer used up its retries; the manager is closed.
            KeyboardInterrupt: the manager is closed, because some envs may have stepped.
        """

    def render(self, env_ids: Iterable[int] | None = None) -> list[Frame]:
        """Return an image of each env, ``[H, W, 3] uint8``.

        Args:
            env_ids: the envs; None means all.

        Raises:
            EnvStateError: if an env returns no image, for example because it was not made with
                ``render_mode="rgb_array"``.
        """
        self._require_open("render")
        return [_shown(picture) for picture in self._pictures(self._checked_ids(env_ids))]

    def keep_last_frames(self, env_ids: Iterable[int]) -> None:
        """Choose the envs of which :meth:`last_frame` has the ends of episodes from now on.

        Args:
            env_ids: the envs; none: no further images are made.
        """
        self._filmed = frozenset(self._checked_ids(env_ids))

    def last_frame(self, env_id: int) -> Frame | None:
        """Return the image of the last state of an episode, which :meth:`render` shows no more.

        Args:
            env_id: an env whose episode ended in the last step.

        Returns:
            None if :meth:`keep_last_frames` did not choose the env, or if it is one of a vector env
            that resets its envs itself in the step in which their episodes end.

        Raises:
            EnvStateError: if the env returned no image.
        """
        picture = self._last_pictures.pop(env_id, None)
        return None if picture is None else _shown(picture)

    def _pictures(self, env_ids: list[int]) -> list[Picture]:
        """Return an image of each of some envs, or why there is none."""
        missing = EnvStateError(f"render() is not possible with a {type(self).__name__}")
        return [missing for _ in env_ids]

    def _keep_last_pictures(self, ended: Iterable[int]) -> None:
        """Make images of those chosen envs whose episode has ended, before they are reset."""
        env_ids = sorted(self._filmed.intersection(ended))
        if env_ids:
            pictures = zip(env_ids, self._pictures(env_ids), strict=True)
            self._last_pictures |= {env_id: own_copy(picture) for env_id, picture in pictures}

    def warn_once(self, about: str, message: str, *args: object) -> None:
        """Log a warning about what the envs return, unless there was one about the same.

        Args:
            about: what the warning is about, such as the key of an info.
            message: the warning, with a placeholder for each argument, as in :mod:`logging`.
            *args: the arguments.
        """
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(message, *args)

    # State

    @property
    def resumable(self) -> bool:
        """Whether :meth:`state_dict` includes every env, so that episodes can be continued."""
        self._require_open("resumable")
        return all(state is not None for state in self._env_states())

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue the episodes exactly, as plain data.

        Envs whose state cannot be saved (see :mod:`dmiddleware.env.env_state`) are left out.
        """
        self._require_open("state_dict")
        ready_obs = map_arrays(_host_copy, self._ready_obs)
        return {
            "env_num": self.env_num,
            "envs": self._env_states(),
            "ready_obs": ready_obs,
            # A policy may round in another way if the array lies in memory in another order.
            "axes_of_ready_obs": map_arrays(axes_in_memory, ready_obs),
            "ready_infos": encode_infos(self.ready_info.rows()),
            "totals": self._totals.state_dict(),
            "samplers": [
                get_space_state(space) for space in (self.action_space, self._batched_action_space)
            ],
            **self._group_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state. The manager must be launched, with envs made as they were then.

        Returns:
            Whether the episodes continue. If the state of an env was not saved or cannot be
            restored (see :mod:`dmiddleware.env.env_state`), all envs start new episodes instead,
            with other seeds than at the start and after any resume before, and a warning is logged.

        Raises:
            CheckpointMismatch: if the state belongs to other envs, or to another number of envs.
        """
        self._require_open("load_state_dict")
        if state["env_num"] != self.env_num:
            raise CheckpointMismatch(
                f"the state belongs to {state['env_num']} envs, but this manager has {self.env_num}"
            )
        for space, sampler in zip(
            (self.action_space, self._batched_action_space), state["samplers"], strict=True
        ):
            set_space_state(space, sampler)
        self._load_group_state(state)
        if not self._continue_episodes(state["envs"]):
            return False
        self._totals.load_state_dict(state["totals"])
        ready_obs = state["ready_obs"]
        if "axes_of_ready_obs" in state:  # not in older states
            ready_obs = map_arrays(with_axes_in_memory, ready_obs, state["axes_of_ready_obs"])
        self._ready_obs = map_arrays(self._restored, ready_obs)
        self._ready_infos = decode_infos(state["ready_infos"])
        return True

    def _restored(self, array: npt.NDArray[Any]) -> Any:
        """Return saved observations in the form in which :attr:`ready_obs` has them."""
        return np.array(array)

    # For subclasses

    @abstractmethod
    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Return the observation and the action space of a single env, before launch."""

    def _set_spaces(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self._collate = make_collate(observation)
        self._write = make_write(observation)
        self._split = make_split(action)
        self._collate_actions = make_collate(action)
        self._check_actions = make_check(action)
        self._is_usable = make_value_check(observation)
        self._plain_action = action.dtype, (self.env_num, *(action.shape or ()))
        self._observation_space, self._action_space = observation, action
        if self._reward_shape != (shape := reward_shape_of(observation)):
            self._reward_shape = shape
            self._totals = EpisodeTotals(self.env_num, shape)
        self._batched_action_space = batch_space(action, self.env_num)
        if self._seeds is not None:
            self._seed_action_spaces()

    def _replace_action_space(self, action: spaces.Space[Any]) -> None:
        """Draw from the space of an env that replaces the first one, as a resumed run does."""
        set_space_state(action, get_space_state(self.action_space))
        self._action_space = action

    def _seed_action_spaces(self) -> None:
        assert self._seeds is not None
        assert self._action_space is not None
        seed = derive_seed(self._seeds[0], "action_space")
        self._action_space.seed(seed)
        self._batched_action_space.seed(seed)

    def _begin(self) -> None:
        """Reset counters and episodes, and seed every env at its next reset."""
        super()._begin()
        self._filmed, self._last_pictures = frozenset(), {}
        self._clear_episodes()

    def _clear_episodes(self) -> None:
        self._ready_obs = None
        self._ready_infos = ()
        self._totals = EpisodeTotals(self.env_num, self._reward_shape)

    def _checked_ids(self, env_ids: Iterable[int] | None) -> list[int]:
        if env_ids is None:
            return list(range(self.env_num))
        ids = [int(env_id) for env_id in env_ids]
        for env_id in ids:
            if not 0 <= env_id < self.env_num:
                raise StructureError(
                    f"unknown env id {env_id}; the ids are 0 to {self.env_num - 1}"
                )
        if len(set(ids)) != len(ids):
            raise StructureError(f"an env id occurs twice in {ids}")
        return ids

    def _assign(self, actions: Any) -> tuple[list[int] | None, NestedArrays]:
        """Return the envs to step (None means all), and their actions as the action space says."""
        if type(actions) is np.ndarray and (actions.dtype, actions.shape) == self._plain_action:
            return None, actions  # the most common case skips the checks that it cannot fail
        if self._is_per_env(actions):
            ids = self._checked_ids(actions)
            if not ids:
                raise StructureError(
                    "step was given an empty dictionary; give an action for at least one env"
                )
            try:
                return ids, self._check_actions(self._collate_actions(list(actions.values())))
            except (TypeError, ValueError, KeyError) as error:
                raise StructureError(
                    f"the actions do not fit the action space {self._action_space}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        batch = self._check_actions(actions)
        map_arrays(self._check_n_rows, batch)
        return None, batch

    def _check_n_rows(self, array: npt.NDArray[Any]) -> None:
        if len(array) != self.env_num:
            raise StructureError(
                f"step was given {len(array)} actions for {self.env_num} ready envs; give one row "
                "per env of ready_obs_id, or a dictionary from env ids to actions"
            )

    def _is_per_env(self, actions: Any) -> bool:
        """Return whether this maps env ids to actions; otherwise it is a batch of actions."""
        if not isinstance(actions, Mapping):
            return False
        space = self._action_space
        if isinstance(space, spaces.Tuple):
            return not has_items(actions, len(space.spaces))
        return not (isinstance(space, spaces.Dict) and set(actions) == set(space.spaces))

    def _install_reset(
        self, ids: Sequence[int], obs: NestedArrays, infos: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store the first observations of new episodes in some envs."""
        if not self._is_usable(obs):
            raise self._unusable(obs, ids)
        self.revision += 1
        self._totals.clear(ids)
        if len(ids) == self.env_num:
            order = np.argsort(ids)
            self._ready_obs = map_arrays(lambda array: array[order], obs)
            self._ready_infos = [infos[index] for index in order]
            return
        self._ready_obs = replace_rows(self._ready_obs, ids, obs)
        self._replace_infos(ids, infos)

    def _replace_infos(self, ids: Iterable[int], infos: Iterable[Mapping[str, Any]]) -> None:
        updated = self._ready_rows()
        for env_id, info in zip(ids, infos, strict=True):
            updated[env_id] = info
        self._ready_infos = updated

    def _ready_rows(self) -> list[Mapping[str, Any]]:
        infos = self._ready_infos
        return [*infos] if type(infos) in (list, tuple) else [*self.ready_info.rows()]

    def _count_step(
        self,
        ids: Sequence[int] | None,
        next_obs: NestedArrays,
        reward: npt.NDArray[np.floating[Any]],
    ) -> None:
        """Add a step to the totals of its episodes, if its values can be used.

        Args:
            ids: the envs of the rows; None means all.
            next_obs: the true successors.
            reward: ``[E']``, or ``[E', A]`` for several agents.

        Raises:
            EnvProtocolError: for an observation or a reward that is not finite, or a choice outside
                of its space, naming the env, the step and the value.
        """
        if not self._is_usable(next_obs):
            raise self._unusable(next_obs, ids, after_step=True)
        if not is_finite(reward):
            rows = np.isfinite(reward).reshape(len(reward), -1).all(axis=1)
            row = int(np.argmin(rows))
            env_id = row if ids is None else ids[row]
            raise EnvProtocolError(
                f"env {env_id} returned the reward {reward[row].tolist()} in step "
                f"{self._totals.length_of(env_id) + 1} of its episode; nothing can be learned from "
                "a reward that is not finite. Correct the env"
            )
        self._totals.add(ids, reward)

    def _unusable(
        self, obs: NestedArrays, ids: Sequence[int] | None, *, after_step: bool = False
    ) -> EnvProtocolError:
        """Return the error for observations of which some cannot be used."""
        env_ids = range(self.env_num) if ids is None else ids
        rows = (index_rows(obs, row) for row in range(len(env_ids)))
        described = (describe_unusable(self.observation_space, row) for row in rows)
        env_id, unusable = next(pair for pair in zip(env_ids, described, strict=True) if pair[1])
        step = self._totals.length_of(env_id) + 1
        when = f"in step {step}" if after_step else "at the start"
        return EnvProtocolError(
            f"env {env_id} returned an observation with the value {unusable}, {when} of its "
            "episode; networks cannot use it. Correct the env, or wrap it in "
            "gymnasium.wrappers.TransformObservation"
        )

    def _finish(
        self,
        ids: list[int] | None,
        obs: NestedArrays,
        next_obs: NestedArrays,
        reward: npt.NDArray[np.floating[Any]],
        done: BoolArray,
        terminated: BoolArray,
        truncated: BoolArray,
        infos: StepInfo | Sequence[Mapping[str, Any]],
        failed: list[int] | None,
        returns: Sequence[Any] = (),
    ) -> BatchedTimestep:
        """Store the observations to act on next, and build the timestep.

        ``ids`` are the envs of the rows, ``failed`` the rows whose env was restarted.
        """
        if obs is not next_obs and not self._is_usable(obs):  # the first ones of new episodes
            raise self._unusable(obs, ids)
        self.revision += 1
        abnormal, valid = self._none_abnormal, self._all_valid
        if len(reward) != self.env_num:
            abnormal, valid = abnormal[: len(reward)], valid[: len(reward)]
        if failed is not None:
            abnormal = abnormal.copy()
            abnormal[failed] = True
            valid = ~abnormal
            self._totals.clear(failed if ids is None else [ids[row] for row in failed])
        self._ready_obs = obs if ids is None else replace_rows(self._ready_obs, ids, obs)
        return BatchedTimestep(
            self._all_ids if ids is None else self._id_array(ids),
            obs,
            next_obs,
            reward if reward.dtype == _FLOAT32 else reward.astype(np.float32),
            done,
            terminated,
            truncated,
            abnormal,
            valid,
            infos,
            ids is None and failed is None,
            returns,
        )

    def _id_array(self, ids: list[int] | None) -> IdArray:
        return self._all_ids if ids is None else np.array(ids, dtype=np.int64)


def check_env_fns(env_fns: object) -> list[Callable[[], gym.Env[Any, Any]]]:
    """Return the factories as a list, or reject them.

    Raises:
        ConfigError: if this is not a sequence of at least one function.
    """
    if not isinstance(env_fns, Sequence) or isinstance(env_fns, str) or not env_fns:
        raise ConfigError(
            f"env_fns must be a list of functions that make one env each, got {env_fns!r:.100}; "
            "make_env_manager takes the id of an env"
        )
    for index, env_fn in enumerate(env_fns):
        if not callable(env_fn):
            raise ConfigError(
                f"env_fns[{index}] must be a function that makes an env, got {env_fn!r:.100}"
            )
    return list(env_fns)


def check_env_manager(value: object, *, user: str) -> None:
    """Reject a value that is not an env manager.

    Args:
        value: what was passed as an env manager.
        user: what it was passed to, named in the message.

    Raises:
        ConfigError: if it is not.
    """
    if not isinstance(value, BaseEnvManager):
        raise ConfigError(
            f"{user} takes an env manager, got {value!r:.100}; make one with "
            'make_env_manager("CartPole-v1", env_num=8)'
        )


def _host_copy(array: Any) -> npt.NDArray[Any]:
    return np.copy(array.cpu().numpy() if is_tensor(array) else array)


def _plain(sample: Any) -> NestedArrays:
    """Turn a sample of a space into plain nested dicts, tuples and arrays."""
    if isinstance(sample, Mapping):
        return {key: _plain(item) for key, item in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_plain(item) for item in sample)
    return np.asarray(sample)


class EpisodeTotals:
    """The return and length of each env's current episode.

    Rewards are summed in float64, to stay exact over long episodes of small rewards.

    Args:
        env_num: the number of envs.
        reward_shape: the shape of a reward, ``()``, or ``(A,)`` for several agents.
    """

    def __init__(self, env_num: int, reward_shape: tuple[int, ...] = ()) -> None:
        self._returns = np.zeros((env_num, *reward_shape), dtype=np.float64)
        self._reward = np.empty_like(self._returns)
        # One count of steps for all envs, and its value at the start of each episode.
        self._n_steps = 0
        self._begun = np.zeros(env_num, dtype=np.int64)
        self._n_ended = np.zeros(env_num, dtype=np.int64)
        # The envs of episodes that are not counted yet; counting many at once is faster.
        self._uncounted: list[IdArray] = []

    @property
    def n_ended(self) -> list[int]:
        """The number of episodes that each env has finished."""
        self._count_ended()
        return self._n_ended.tolist()

    def add(self, ids: Sequence[int] | None, reward: npt.NDArray[np.floating[Any]]) -> None:
        """Count one step of some envs (None means all) with these rewards."""
        self._n_steps += 1
        if ids is None:
            # Faster than adding float32 to float64, which NumPy does in small pieces.
            self._reward[:] = reward
            self._returns += self._reward
            return
        self._returns[ids] += reward
        self._begun += 1
        self._begun[ids] -= 1

    def skip(self, env_ids: IdArray) -> None:
        """Take back the last step of some envs, whose episodes have not begun."""
        self._begun[env_ids] = self._n_steps

    def length_of(self, env_id: int) -> int:
        """Return the number of steps in an env's current episode."""
        return max(self._n_steps - int(self._begun[env_id]), 0)

    def end(self, env_id: int) -> dict[str, np.float32 | int]:
        """Return the totals of a finished episode, named as in its last info, and clear them.

        The return of several agents is their mean, and ``eval_episode_return_0``, … are their own.
        """
        episode_return = self._returns[env_id]
        totals: dict[str, np.float32 | int] = {
            "eval_episode_return": np.float32(
                episode_return if episode_return.ndim == 0 else episode_return.mean()
            ),
            "eval_episode_length": self._n_steps - int(self._begun[env_id]),
        }
        if episode_return.ndim:
            each = enumerate(episode_return.astype(np.float32))
            totals |= {f"eval_episode_return_{agent}": value for agent, value in each}
        self._n_ended[env_id] += 1
        self._returns[env_id] = 0.0
        self._begun[env_id] = self._n_steps
        return totals

    def end_some(
        self, env_ids: IdArray, *, pause: int = 0
    ) -> dict[str, Callable[[], npt.NDArray[Any]]]:
        """Clear the totals of finished episodes, and return functions that give them.

        Args:
            env_ids: the envs.
            pause: the number of steps until the next episodes begin.

        Returns:
            the names and functions of the returns, ``float32``, and of the lengths, ``int64``, as
            :meth:`end` has them. Most steps of many envs end episodes, and few readers want their
            lengths.
        """
        returns, begun = self._returns[env_ids], self._begun[env_ids]
        self._uncounted.append(env_ids)
        if len(self._uncounted) == _MAX_UNCOUNTED:
            self._count_ended()
        self._returns[env_ids] = 0.0
        self._begun[env_ids] = self._n_steps + pause
        mean = returns if returns.ndim == 1 else returns.mean(axis=1)
        totals: dict[str, Callable[[], npt.NDArray[Any]]] = {
            "eval_episode_return": partial(mean.astype, np.float32),
            "eval_episode_length": partial(operator.sub, self._n_steps, begun),
        }
        if returns.ndim > 1:
            each = enumerate(returns.T)
            totals |= {
                f"eval_episode_return_{agent}": partial(column.astype, np.float32)
                for agent, column in each
            }
        return totals

    def _count_ended(self) -> None:
        if self._uncounted:
            env_ids = np.concatenate(self._uncounted)
            self._n_ended += np.bincount(env_ids, minlength=len(self._n_ended))
            self._uncounted.clear()

    def clear(self, ids: Iterable[int]) -> None:
        """Start new episodes in some envs."""
        for env_id in ids:
            self._returns[env_id] = 0.0
            self._begun[env_id] = self._n_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and counts."""
        return {
            "returns": self._returns.copy(),
            "n_steps": self._n_steps,
            "begun": self._begun.tolist(),
            "n_ended": self.n_ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._returns = np.array(state["returns"], dtype=np.float64)
        self._n_steps = int(state["n_steps"])
        self._begun = np.array(state["begun"], dtype=np.int64)
        self._n_ended = np.array(state["n_ended"], dtype=np.int64)
        self._uncounted.clear()


def _shown(picture: Picture) -> Frame:
    if isinstance(picture, EnvStateError):
        raise picture
    return picture
