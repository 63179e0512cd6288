"""What every env manager offers, and the bookkeeping that they share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeGuard

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from dmiddleware.env.batching import (
    NestedArrays,
    has_items,
    make_collate,
    make_split,
    make_write,
    map_arrays,
    replace_rows,
)
from dmiddleware.env.env_state import (
    MissingObjectError,
    decode_infos,
    encode_infos,
    get_space_state,
    set_space_state,
)
from dmiddleware.env.timestep import BatchedTimestep, BoolArray, IdArray, StepInfo
from dmiddleware.errors import CheckpointMismatch, ConfigError, EnvStateError, StructureError
from dmiddleware.seeding import derive_seed

__all__ = ["BaseEnvManager", "EpisodeTotals", "check_env_fns", "check_env_manager", "is_int"]

logger = logging.getLogger(__name__)


class BaseEnvManager(ABC):
    """Steps several envs of one kind at once.

    A manager is made closed. :meth:`launch`, or entering it with ``with``, makes the envs and
    resets them; :meth:`close`, or leaving, closes them, and the manager may be launched again.
    After each :meth:`step` the envs whose episode ended have been reset already: ``ready_obs``
    holds what to act on next, for the envs ``ready_obs_id``.

    Args:
        env_num: the number of envs, ``E``.
        seed: as in :meth:`seed`; None leaves the envs unseeded.

    Raises:
        ConfigError: if ``env_num`` is not a positive integer.
    """

    _ready_obs: NestedArrays
    _ready_infos: StepInfo | Sequence[Mapping[str, Any]]
    _totals: EpisodeTotals

    def __init__(self, env_num: int, *, seed: int | Sequence[int] | None = None) -> None:
        if not is_int(env_num) or env_num < 1:
            raise ConfigError(f"env_num must be a positive integer, got {env_num!r}")
        self._env_num = int(env_num)
        self._open = False
        self._revision = 0
        self._all_ids: IdArray = np.arange(self._env_num)
        self._observation_space: spaces.Space[Any] | None = None
        self._action_space: spaces.Space[Any] | None = None
        self._seeds: list[int] | None = None
        self._pending_seeds: dict[int, int] = {}
        self._dropped_steps = 0
        self._clear_episodes()
        if seed is not None:
            self.seed(seed)

    # Life

    @property
    def env_num(self) -> int:
        """The number of envs, ``E``."""
        return self._env_num

    @property
    def closed(self) -> bool:
        """Whether there are no envs: before :meth:`launch` and after :meth:`close`."""
        return not self._open

    @property
    def revision(self) -> int:
        """A number that grows whenever the envs are launched, reset, stepped or restored.

        Whoever acts in the envs compares it with the value after its own last call, to notice that
        somebody else has acted in them since.
        """
        return self._revision

    @property
    def episode_lengths(self) -> list[int]:
        """The steps that each env's current episode has had so far, one number per env."""
        return [self._totals.length_of(env_id) for env_id in range(self._env_num)]

    @abstractmethod
    def launch(self) -> None:
        """Make the envs and reset them; ``ready_obs`` is there afterwards.

        Raises:
            EnvStateError: if they are launched already.
            EnvCrashed: if an env cannot be made or reset; nothing is retried here, because an env
                that fails before it ever worked is a mistake of the program.
            EnvTimeout: if an env does not get ready in time.
            EnvProtocolError: if an env does not follow Gymnasium's interface, or the envs differ in
                their spaces.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the envs and free all they hold; a second call does nothing."""

    def __enter__(self) -> Self:
        if self.closed:
            self.launch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Spaces and seeds

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The observation space of a single env.

        Before launch, one env is made in this process to ask it, and closed at once.
        """
        if self._observation_space is None:
            self._set_spaces(*self._probe_spaces())
        assert self._observation_space is not None
        return self._observation_space

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The action space of a single env; as :attr:`observation_space`."""
        if self._action_space is None:
            self._set_spaces(*self._probe_spaces())
        assert self._action_space is not None
        return self._action_space

    def seed(self, seed: int | Sequence[int]) -> None:
        """Seed the envs and the action spaces; takes effect when an env is next reset.

        An env is seeded once, at its first reset after this call (that of :meth:`launch`, if it
        comes before), and continues its own random sequence from episode to episode.

        Args:
            seed: an integer, from which the seed of env ``i`` is ``derive_seed(seed, i)`` (a run
                has several managers: give each the seed of its own role and node); or the seed of
                each env itself, ``E`` integers.

        Raises:
            ConfigError: if a list of another length is given.
        """
        if is_int(seed):
            seeds = [derive_seed(int(seed), index) for index in range(self._env_num)]
        elif isinstance(seed, Sequence | np.ndarray) and all(map(is_int, seed)):
            seeds = [int(one) for one in seed]
        else:
            raise ConfigError(f"seed must be an integer, or one integer per env, got {seed!r}")
        if len(seeds) != self._env_num:
            raise ConfigError(
                f"{len(seeds)} seeds were given for {self._env_num} envs; give one per env, or a "
                "single integer"
            )
        self._seeds = seeds
        self._seed_envs(seeds)
        if self._action_space is not None:
            self._seed_action_spaces()

    def sample_actions(self) -> NestedArrays:
        """Draw one random action for every ready env, from the seeded action space.

        Returns:
            Arrays ``[E, …]``, nested as the action space is, in the form that :meth:`step` takes.
        """
        assert self.action_space is not None
        return _plain(self._batched_action_space.sample())

    # Stepping

    @property
    def ready_obs(self) -> NestedArrays:
        """``[E, …]``, nested as the observation space is: what to act on next, one row per env."""
        if not self._open:
            self._require_open("ready_obs")
        return self._ready_obs

    @property
    def ready_obs_id(self) -> IdArray:
        """``[E] int64``: the envs that the rows of ``ready_obs`` belong to."""
        if not self._open:
            self._require_open("ready_obs_id")
        return self._all_ids

    @property
    def ready_info(self) -> StepInfo:
        """The infos that came with ``ready_obs``: of the last step or the reset (action masks)."""
        self._require_open("ready_info")
        infos = self._ready_infos
        return infos if isinstance(infos, StepInfo) else StepInfo(infos)

    @abstractmethod
    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Begin a new episode in some envs; what they had begun is given up.

        Args:
            env_ids: the envs; None: all.
        """

    @abstractmethod
    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Step the envs, and reset those whose episode ended.

        Args:
            actions: ``[E, …]``, nested as the action space is, one row per env in the order of
                ``ready_obs_id``; or a dictionary from env ids to single actions, which steps those
                envs alone.

        Returns:
            One row for each env that made a transition.

        Raises:
            EnvStateError: before launch and after close.
            StructureError: if the actions do not fit the action space or the envs; nothing was
                stepped then.
            EnvCrashed: if an env used up its retries; the manager is closed.
            EnvTimeout: likewise, when the env did not answer.
            KeyboardInterrupt: likewise, since no one can tell which envs have stepped.
        """

    @abstractmethod
    def render(self, env_ids: Iterable[int] | None = None) -> list[npt.NDArray[np.uint8]]:
        """Return a picture of each env, ``[H, W, 3] uint8``.

        Args:
            env_ids: the envs; None: all.

        Raises:
            EnvStateError: if the envs were not made with ``render_mode="rgb_array"``.
        """

    @property
    @abstractmethod
    def restarts(self) -> int:
        """How often an env failed and was restarted since launch."""

    @property
    def dropped_steps(self) -> int:
        """How many env steps since launch belonged to episodes that a failure cut off."""
        return self._dropped_steps

    @property
    def in_lockstep(self) -> bool:
        """Whether all envs are always stepped together: :meth:`step` then wants all actions."""
        return False

    # State

    @property
    def resumable(self) -> bool:
        """Whether :meth:`state_dict` holds the state of every env, so that episodes can go on."""
        self._require_open("resumable")
        return all(state is not None for state in self._env_states())

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on as if nothing had happened, as plain data.

        Envs whose state cannot be saved (see :mod:`dmiddleware.env.env_state`) are left out; their
        episodes begin anew when the state is loaded.
        """
        self._require_open("state_dict")
        return {
            "env_num": self._env_num,
            "envs": self._env_states(),
            "ready_obs": map_arrays(np.copy, self._ready_obs),
            "ready_infos": encode_infos(self.ready_info.rows()),
            "totals": self._totals.state_dict(),
            "seeds": self._seeds,
            "samplers": [
                get_space_state(space) for space in (self.action_space, self._batched_action_space)
            ],
            "dropped_steps": self._dropped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on from a state; the manager is launched already, with envs made as they were then.

        Returns:
            Whether the episodes go on. If an env's state was not saved, or cannot be restored (see
            :mod:`dmiddleware.env.env_state`), all envs begin new episodes instead, with other seeds
            than they had at the start (a warning is logged).

        Raises:
            CheckpointMismatch: if the state is that of other envs, or of another number.
        """
        self._require_open("load_state_dict")
        if state["env_num"] != self._env_num:
            raise CheckpointMismatch(
                f"the state is that of {state['env_num']} envs, this manager has {self._env_num}"
            )
        self._seeds = None if state["seeds"] is None else list(state["seeds"])
        for space, sampler in zip(
            (self.action_space, self._batched_action_space), state["samplers"], strict=True
        ):
            set_space_state(space, sampler)
        self._dropped_steps = state["dropped_steps"]
        if any(one is None for one in state["envs"]):
            logger.warning("the envs' states could not be saved; their episodes begin anew")
            self._begin_anew(int(state["totals"]["n_steps"]))
            return False
        try:
            self._set_env_states(state["envs"])
        except MissingObjectError as error:
            logger.warning("%s, so no env can go on; their episodes begin anew", error)
            self._begin_anew(int(state["totals"]["n_steps"]))
            return False
        self._pending_seeds = {}
        self._revision += 1
        self._totals.load_state_dict(state["totals"])
        self._ready_obs = map_arrays(np.array, state["ready_obs"])
        self._ready_infos = decode_infos(state["ready_infos"])
        return True

    def _begin_anew(self, n_steps: int) -> None:
        if self._seeds is not None:
            self._seed_envs([derive_seed(seed, "resume", n_steps) for seed in self._seeds])
        self.reset()

    def _seed_envs(self, seeds: list[int]) -> None:
        """Let the next reset of each env take its seed."""
        self._pending_seeds = dict(enumerate(seeds))

    # For subclasses

    @abstractmethod
    def _env_states(self) -> list[dict[str, Any] | None]:
        """Return the states of the envs, None for one that cannot be saved."""

    @abstractmethod
    def _set_env_states(self, states: Sequence[Any]) -> None:
        """Bring the envs into states that :meth:`_env_states` gave.

        Raises:
            MissingObjectError: if an env lacks an object that its state has.
            CheckpointMismatch: if the states are those of other envs.
        """

    @abstractmethod
    def _probe_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Return the observation and the action space of a single env, before launch."""

    def _require_open(self, doing: str) -> None:
        if not self._open:
            raise EnvStateError(
                f"{type(self).__name__}.{doing} needs launched envs; call launch() first, or use "
                "the manager in a with block"
            )

    def _require_closed(self) -> None:
        if self._open:
            raise EnvStateError(
                f"{type(self).__name__} is launched already; close() it before launching it again"
            )

    def _set_spaces(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self._collate = make_collate(observation)
        self._write = make_write(observation)
        self._split = make_split(action)
        self._collate_actions = make_collate(action)
        self._observation_space, self._action_space = observation, action
        self._batched_action_space = batch_space(action, self._env_num)
        if self._seeds is not None:
            self._seed_action_spaces()

    def _seed_action_spaces(self) -> None:
        assert self._seeds is not None
        assert self._action_space is not None
        seed = derive_seed(self._seeds[0], "action_space")
        self._action_space.seed(seed)
        self._batched_action_space.seed(seed)

    def _begin(self) -> None:
        """Start a life: nothing failed, no episode has begun, every env is yet to be seeded."""
        self._revision += 1
        self._dropped_steps = 0
        self._pending_seeds = dict(enumerate(self._seeds or ()))
        self._clear_episodes()

    def _clear_episodes(self) -> None:
        self._ready_obs = None
        self._ready_infos = ()
        self._totals = EpisodeTotals(self._env_num)

    def _checked_ids(self, env_ids: Iterable[int] | None) -> list[int]:
        if env_ids is None:
            return list(range(self._env_num))
        ids = [int(env_id) for env_id in env_ids]
        for env_id in ids:
            if not 0 <= env_id < self._env_num:
                raise StructureError(
                    f"there is no env {env_id}; the ids are 0 to {self._env_num - 1}"
                )
        if len(set(ids)) != len(ids):
            raise StructureError(f"an env is named twice in {ids}")
        return ids

    def _assign(self, actions: Any) -> tuple[list[int] | None, list[Any]]:
        """Return which envs to step (None: all) and each one's action."""
        if type(actions) is not np.ndarray and self._is_per_env(actions):
            ids = self._checked_ids(actions)
            if not ids:
                raise StructureError("step was given actions for no env")
            return ids, self._split(self._batch_of(list(actions.values())))
        rows = self._split(actions)
        if len(rows) != self._env_num:
            raise StructureError(
                f"step was given {len(rows)} actions for {self._env_num} ready envs; give one row "
                "per env of ready_obs_id, or a dictionary from env ids to actions"
            )
        return None, rows

    def _batch_of(self, actions: list[Any]) -> NestedArrays:
        try:
            return self._collate_actions(actions)
        except (TypeError, ValueError, KeyError) as error:
            raise StructureError(
                f"the actions do not fit the action space {self._action_space}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _is_per_env(self, actions: Any) -> bool:
        """Tell a dictionary from env ids to actions from a batch of nested actions."""
        if not isinstance(actions, Mapping):
            return False
        space = self._action_space
        if isinstance(space, spaces.Tuple):
            return not has_items(actions, len(space.spaces))
        return not (isinstance(space, spaces.Dict) and set(actions) == set(space.spaces))

    def _install_reset(
        self, ids: Sequence[int], obs: NestedArrays, infos: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take over the first observations of new episodes in some envs."""
        self._revision += 1
        self._totals.clear(ids)
        if len(ids) == self._env_num:
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

    def _finish(
        self,
        ids: list[int] | None,
        obs: NestedArrays,
        next_obs: NestedArrays,
        reward: npt.NDArray[np.float64],
        done: BoolArray,
        terminated: BoolArray,
        truncated: BoolArray,
        info: StepInfo,
        failed: list[int] | None,
    ) -> BatchedTimestep:
        """Take over what to act on next, and hand out the step.

        ``ids`` are the envs of the rows, ``failed`` the rows whose env was restarted.
        """
        self._revision += 1
        abnormal = np.zeros(len(reward), np.bool_)
        if failed is not None:
            abnormal[failed] = True
            self._totals.clear(failed if ids is None else [ids[row] for row in failed])
        self._ready_obs = obs if ids is None else replace_rows(self._ready_obs, ids, obs)
        return BatchedTimestep(
            self._all_ids if ids is None else self._id_array(ids),
            obs,
            next_obs,
            reward.astype(np.float32),
            done,
            terminated,
            truncated,
            abnormal,
            info,
            ids is None and failed is None,
        )

    def _id_array(self, ids: list[int] | None) -> IdArray:
        return self._all_ids if ids is None else np.array(ids, dtype=np.int64)


def check_env_fns(env_fns: object) -> list[Callable[[], gym.Env[Any, Any]]]:
    """Return the factories as a list, or refuse them.

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


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_env_manager(value: object, *, user: str) -> None:
    """Refuse a value that is not an env manager.

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


def _plain(sample: Any) -> NestedArrays:
    """Turn a sample (Dict spaces give dicts, Tuple spaces tuples) into plain nested arrays."""
    if isinstance(sample, Mapping):
        return {key: _plain(item) for key, item in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_plain(item) for item in sample)
    return np.asarray(sample)


class EpisodeTotals:
    """Sums up rewards and counts steps, per env, from the beginning of its episode.

    Rewards are summed in float64, so that long episodes of small rewards stay exact.

    Args:
        env_num: the number of envs.
    """

    def __init__(self, env_num: int) -> None:
        self._returns = np.zeros(env_num, dtype=np.float64)
        # Lengths come from one count of steps for all envs, and where in it each episode began.
        self._n_steps = 0
        self._begun = [0] * env_num

    def add(self, ids: Sequence[int] | None, reward: npt.NDArray[np.float64]) -> None:
        """Count one step of some envs (None: of all), which gave these rewards."""
        self._n_steps += 1
        if ids is None:
            self._returns += reward
            return
        self._returns[ids] += reward
        for env_id in set(range(len(self._begun))).difference(ids):
            self._begun[env_id] += 1

    def length_of(self, env_id: int) -> int:
        """How many steps an env's episode has had."""
        return self._n_steps - self._begun[env_id]

    def end(self, env_id: int) -> dict[str, np.float32 | int]:
        """Return the totals of an env's episode, as its last info has them, and clear them."""
        totals: dict[str, np.float32 | int] = {
            "eval_episode_return": np.float32(self._returns[env_id]),
            "eval_episode_length": self._n_steps - self._begun[env_id],
        }
        self._returns[env_id] = 0.0
        self._begun[env_id] = self._n_steps
        return totals

    def clear(self, ids: Iterable[int]) -> None:
        """Let new episodes begin in some envs."""
        for env_id in ids:
            self._returns[env_id] = 0.0
            self._begun[env_id] = self._n_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and counts."""
        return {
            "returns": self._returns.copy(),
            "n_steps": self._n_steps,
            "begun": list(self._begun),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from a state."""
        self._returns = np.array(state["returns"], dtype=np.float64)
        self._n_steps = int(state["n_steps"])
        self._begun = list(state["begun"])
