"""A manager that steps many games of several players."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np

from dmiddleware.env.batching import is_finite, own_copy
from dmiddleware.env.contract import check_flag, check_info, close_quietly
from dmiddleware.env.env_access import (
    Access,
    GameAttributes,
)
from dmiddleware.env.env_claims import EnvClaims
from dmiddleware.env.env_group import EnvGroup, is_int
from dmiddleware.env.env_state import get_state, set_state
from dmiddleware.env.games import BattleEnv
from dmiddleware.env.manager import check_env_fns
from dmiddleware.errors import (
    CheckpointMismatch,
    ConfigError,
    EnvCrashed,
    EnvProtocolError,
    StructureError,
)

__all__ = ["BattleEnvManager", "BattleTimestep", "GameResult", "game_result"]

GameResult: TypeAlias = Literal["wins", "draws", "losses"]
"""How a game ended for a player."""

_RESULTS: Mapping[object, GameResult] = {
    **{word: "wins" for word in ("wins", "win")},
    **{word: "draws" for word in ("draws", "draw")},
    **{word: "losses" for word in ("losses", "loss")},
}


@dataclass(frozen=True, slots=True)
class BattleTimestep:
    """One step of one game.

    Attributes:
        env_id: the game's index in its manager.
        obs: one observation per player after the step; at the end of an episode the final ones.
            What to act on next is in the manager's ``ready_obs``.
        reward: one reward per player.
        done: whether the episode ended.
        terminated: whether the game is over.
        truncated: whether the episode was cut before that.
        to_move: the players that act next in this episode; none at its end.
        info: one info per player; at the end of an episode with ``eval_episode_return`` and
            ``eval_episode_length``.
        abnormal: whether the game raised in this step and was restarted, so that this is not a
            transition. The infos say so too, with ``abnormal: True``.
    """

    env_id: int
    obs: list[Any]
    reward: list[float]
    done: bool
    terminated: bool
    truncated: bool
    to_move: tuple[int, ...]
    info: list[dict[str, Any]]
    abnormal: bool = False


class BattleEnvManager(EnvGroup):
    """Steps several games of one kind, in this process.

    A new manager is closed; :meth:`launch`, or entering a ``with`` block, makes the games and
    resets them. A game that ends is reset at once. A game that raises is made again, and its
    unfinished episode is lost.

    Observations are passed on as the games give them. Where a game has an action mask that is not
    in its observations yet, an observation becomes ``{"observation": obs, "action_mask": mask}``,
    as in PettingZoo.

    Args:
        env_fns: one function per game that makes it.
        n_player: number of players.
        seed: as in :meth:`seed`; None leaves the games unseeded.
        max_retry: how often a game may be restarted in a row.

    Raises:
        ConfigError: if an argument has the wrong type, or ``n_player`` is below 2.
    """

    _kind = "game"

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        n_player: int = 2,
        *,
        seed: int | Sequence[int] | None = None,
        max_retry: int = 3,
    ) -> None:
        self._env_fns = check_env_fns(env_fns)
        if not is_int(n_player) or n_player < 2:
            raise ConfigError(f"n_player must be an integer of at least 2, got {n_player!r}")
        self._n_player = int(n_player)
        super().__init__(len(self._env_fns), seed=seed, max_retry=max_retry)
        self._envs: list[BattleEnv] = []
        self._claims = EnvClaims()
        self._ready_obs: dict[int, list[Any]] = {}
        self._to_move: dict[int, tuple[int, ...]] = {}
        self._returns = np.zeros((self.env_num, self._n_player))
        self._lengths = [0] * self.env_num
        self._n_ended = [0] * self.env_num

    @property
    def n_player(self) -> int:
        """Number of players of each game."""
        return self._n_player

    @property
    def episode_counts(self) -> list[int]:
        """The episodes that each game has finished since launch, one number per game."""
        return list(self._n_ended)

    @property
    def episode_lengths(self) -> list[int]:
        """The steps that each game's current episode has had so far, one number per game."""
        return list(self._lengths)

    @property
    def ready_obs(self) -> dict[int, list[Any]]:
        """The observations to act on next: a list with one per player, by game."""
        self._require_open("ready_obs")
        return {env_id: list(self._ready_obs[env_id]) for env_id in range(self.env_num)}

    @property
    def to_move(self) -> dict[int, tuple[int, ...]]:
        """The players that act next, by game."""
        self._require_open("to_move")
        return dict(self._to_move)

    @property
    def observation_space(self) -> gym.Space[Any] | None:
        """What one player observes, with the action mask; None if the games do not say."""
        with self._first_env() as env:
            space, actions = _space(env, "observation_space"), _space(env, "action_space")
            if space is None or _has_mask(space) or not isinstance(actions, gym.spaces.Discrete):
                return space
            if env.action_mask(0) is None:
                return space
            mask = gym.spaces.MultiBinary(int(actions.n))
            return gym.spaces.Dict({"observation": space, "action_mask": mask})

    @property
    def action_space(self) -> gym.Space[Any] | None:
        """What one player does; None if the games do not say."""
        with self._first_env() as env:
            return _space(env, "action_space")

    def launch(self) -> None:
        """Make the games and reset them.

        Raises:
            EnvStateError: if they are launched already.
            EnvCrashed: if a game cannot be made or reset.
            EnvProtocolError: if a game does not follow :class:`~dmiddleware.env.BattleEnv`.
        """
        self._require_closed()
        self._begin()
        self._n_ended = [0] * self.env_num
        try:
            for env_id in range(self.env_num):
                env = self._made(env_id)
                self._claims.claim(env_id, env)
                self._envs.append(env)
                self._overrides.apply(env_id, GameAttributes(env))
                self._start(env_id)
        except EnvProtocolError:
            self.close()
            raise
        except Exception as error:
            env_id = max(len(self._envs) - 1, 0)
            self.close()
            raise EnvCrashed(
                f"game {env_id} could not be made or reset: {type(error).__name__}: {error}"
            ) from error
        self._open = True

    def close(self) -> None:
        """Close the games; a second call does nothing."""
        self._open = False
        self._claims.release()
        envs, self._envs = self._envs, []
        for env in envs:
            close_quietly(env)

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some games (None means all), and give up their current ones.

        Raises:
            EnvStateError: before launch and after close.
            StructureError: for an unknown game.
            EnvCrashed: if a game used up its retries; the manager is closed.
        """
        self._require_open("reset")
        ids = range(self.env_num) if env_ids is None else self._checked_ids(env_ids)
        self.revision += 1
        with self._closing_on_error():
            for env_id in ids:
                self._start_or_restart(env_id)

    def step(self, actions: Mapping[int, Sequence[Any]]) -> dict[int, BattleTimestep]:
        """Step some games, and reset those that end.

        Args:
            actions: by game, a list with one action per player, None for those that are not to
                move.

        Returns:
            The timesteps by game.

        Raises:
            EnvStateError: before launch and after close.
            StructureError: if the actions do not fit the players to move; no game has stepped then.
            EnvCrashed: if a game used up its retries; the manager is closed.
            EnvProtocolError: if a game returned something that is not a step; the manager is
                closed.
        """
        self._require_open("step")
        for env_id in self._checked_ids(actions):
            self._check_actions(env_id, actions[env_id])
        self.revision += 1
        with self._closing_on_error():
            return {env_id: self._step(env_id, list(moves)) for env_id, moves in actions.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue the episodes, as plain data.

        Games whose state cannot be saved (see :mod:`dmiddleware.env.env_state`) are left out.
        """
        self._require_open("state_dict")
        return {
            "envs": self._env_states(),
            "ready_obs": [copy.deepcopy(self._ready_obs[env_id]) for env_id in range(self.env_num)],
            "to_move": [list(self._to_move[env_id]) for env_id in range(self.env_num)],
            "returns": self._returns.copy(),
            "lengths": list(self._lengths),
            "n_ended": list(self._n_ended),
            **self._group_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state. The manager must be launched, with games made as they were then.

        Returns:
            Whether the episodes continue; otherwise all games start new ones, with other seeds than
            at the start and after any resume before.

        Raises:
            CheckpointMismatch: if the state belongs to other games, or another number of them.
        """
        self._require_open("load_state_dict")
        if len(state["envs"]) != self.env_num:
            raise CheckpointMismatch(
                f"the state belongs to {len(state['envs'])} games, but this manager has "
                f"{self.env_num}"
            )
        self._n_ended = list(state["n_ended"])
        self._load_group_state(state)
        if not self._continue_episodes(state["envs"]):
            return False
        self._ready_obs = dict(enumerate(copy.deepcopy(state["ready_obs"])))
        self._to_move = dict(enumerate(map(tuple, state["to_move"])))
        self._returns = np.array(state["returns"], np.float64)
        self._lengths = list(state["lengths"])
        return True

    def _env_states(self) -> list[dict[str, Any] | None]:
        return [get_state(env) for env in self._envs]

    def _set_env_states(self, states: Sequence[Any]) -> None:
        for env, state in zip(self._envs, states, strict=True):
            set_state(env, state)

    @contextmanager
    def _first_env(self) -> Iterator[BattleEnv]:
        """Give access to the first game; before launch, to one that is closed again."""
        if self._envs:
            yield self._envs[0]
            return
        env = self._made(0)
        claims = EnvClaims()
        claims.claim(0, env)  # a game in use must not be reset and closed here
        try:
            env.reset(None)
            yield env
        finally:
            claims.release()
            close_quietly(env)

    def _access(self, accesses: list[Access]) -> list[Any]:
        pairs = enumerate(zip(self._envs, accesses, strict=True))
        return [access.of(GameAttributes(env), env_id) for env_id, (env, access) in pairs]

    def _made(self, env_id: int) -> BattleEnv:
        env: Any = self._env_fns[env_id]()
        for name in ("reset", "step", "to_move", "action_mask", "close"):
            if not callable(getattr(env, name, None)):
                raise EnvProtocolError(
                    f"game {env_id} is a {type(env).__name__} without a method {name}(); derive "
                    "its class from dmiddleware.env.BattleEnv, or wrap a PettingZoo env in "
                    "PettingZooAdapter"
                )
        game: BattleEnv = env
        return game

    def _start(self, env_id: int) -> None:
        """Start an episode in a game."""
        seed = self._next_seed(env_id)
        options = self._overrides.reset_options[env_id]
        keywords: Any = {} if options is None else {"options": {**options}}
        obs = self._envs[env_id].reset(seed, **keywords)
        self._returns[env_id] = 0.0
        self._lengths[env_id] = 0
        self._to_move[env_id] = self._movers(env_id)
        self._ready_obs[env_id] = self._seen(env_id, obs)

    def _start_or_restart(self, env_id: int) -> None:
        try:
            self._start(env_id)
        except EnvProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 - a game may raise anything
            self._restart(env_id, "reset", error)

    def _restart(self, env_id: int, doing: str, error: Exception) -> None:
        renew = functools.partial(self._renew, env_id)
        self.failures.restart(env_id, doing, error, renew)

    def _renew(self, env_id: int) -> None:
        """Replace a game that failed by a new one, and reset it."""
        close_quietly(self._envs[env_id])
        self._reseed([env_id], self.failures.restarts_of(env_id))
        env = self._made(env_id)
        self._claims.claim(env_id, env)
        self._envs[env_id] = env
        self._overrides.apply(env_id, GameAttributes(env))
        self._start(env_id)

    def _step(self, env_id: int, actions: list[Any]) -> BattleTimestep:
        try:
            result = self._envs[env_id].step(actions)
        except Exception as error:  # noqa: BLE001 - a game may raise anything
            self.dropped_steps += self._lengths[env_id]
            self._restart(env_id, "step", error)
            return self._abnormal(env_id)
        obs, reward, terminated, truncated, infos = self._checked(env_id, result)
        done = terminated or truncated
        self._returns[env_id] += reward
        self._lengths[env_id] += 1
        self._to_move[env_id] = () if done else self._movers(env_id)
        seen = self._ready_obs[env_id] = self._seen(env_id, obs)
        timestep = BattleTimestep(
            env_id, seen, reward, done, terminated, truncated, self._to_move[env_id], infos
        )
        if done:
            for info, value in zip(infos, self._returns[env_id].tolist(), strict=True):
                info.setdefault("eval_episode_return", value)
                info.setdefault("eval_episode_length", self._lengths[env_id])
            self._n_ended[env_id] += 1
            self.failures.in_a_row[env_id] = 0
            self._start_or_restart(env_id)
        return timestep

    def _abnormal(self, env_id: int) -> BattleTimestep:
        return BattleTimestep(
            env_id,
            list(self._ready_obs[env_id]),
            [0.0] * self._n_player,
            done=False,
            terminated=False,
            truncated=False,
            to_move=self._to_move[env_id],
            info=[{"abnormal": True} for _ in range(self._n_player)],
            abnormal=True,
        )

    def _checked(
        self, env_id: int, result: Any
    ) -> tuple[list[Any], list[float], bool, bool, list[dict[str, Any]]]:
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvProtocolError(
                f"game {env_id} returned {result!r:.100} from step(); it must return "
                "(observations, rewards, terminated, truncated, infos)"
            )
        obs, reward, terminated, truncated, infos = result
        for name, values in (("observations", obs), ("rewards", reward), ("infos", infos)):
            self._check_per_player(env_id, name, values)
        for info in infos:
            check_info(info, env_id)
        check_flag(terminated, "terminated", env_id)
        check_flag(truncated, "truncated", env_id)
        rewards = [self._checked_reward(env_id, number) for number in reward]
        return (
            list(obs),
            rewards,
            bool(terminated),
            bool(truncated),
            [own_copy(info) for info in infos],
        )

    def _checked_reward(self, env_id: int, reward: Any) -> float:
        array = np.asarray(reward)
        if array.ndim == 0 and array.dtype.kind in "iufb" and is_finite(array):
            return float(reward)
        raise EnvProtocolError(
            f"game {env_id} returned the reward {reward!r:.100} in step "
            f"{self._lengths[env_id] + 1} of its episode; it must be one finite number per player"
        )

    def _check_finite(self, env_id: int, obs: Any, player: int) -> None:
        if isinstance(obs, Mapping | tuple):
            for part in obs.values() if isinstance(obs, Mapping) else obs:
                self._check_finite(env_id, part, player)
        elif isinstance(obs, np.ndarray) and obs.dtype.kind == "f" and not is_finite(obs):
            raise EnvProtocolError(
                f"game {env_id} returned the observation {obs!r:.100} of player {player} after "
                f"{self._lengths[env_id]} steps of its episode; networks cannot use values that "
                "are not finite. Correct the game"
            )

    def _check_per_player(self, env_id: int, name: str, value: Any) -> None:
        if not hasattr(value, "__len__") or len(value) != self._n_player:
            raise EnvProtocolError(
                f"game {env_id} returned the {name} {value!r:.100}; it must return a list with one "
                f"item for each of its {self._n_player} players"
            )

    def _movers(self, env_id: int) -> tuple[int, ...]:
        players = tuple(self._envs[env_id].to_move())
        if not players or not set(players) <= set(range(self._n_player)):
            raise EnvProtocolError(
                f"to_move() of game {env_id} returned {players!r}; before the end of an episode at "
                f"least one player moves, numbered 0 to {self._n_player - 1}"
            )
        return players

    def _seen(self, env_id: int, obs: Any) -> list[Any]:
        """Return the observations with action masks."""
        self._check_per_player(env_id, "observations", obs)
        seen = [own_copy(part) for part in obs]  # the game may fill them again
        for player, part in enumerate(seen):
            self._check_finite(env_id, part, player)
            if not (isinstance(part, Mapping) and "action_mask" in part):
                mask = self._envs[env_id].action_mask(player)
                if mask is not None:
                    seen[player] = {"observation": part, "action_mask": np.array(mask, np.int8)}
        return seen

    def _check_actions(self, env_id: int, actions: Sequence[Any]) -> None:
        if len(actions) != self._n_player:
            raise StructureError(
                f"step was given {len(actions)} actions for game {env_id}; give one per player, "
                f"{self._n_player} in all, None for those that are not to move"
            )
        movers = tuple(player for player, action in enumerate(actions) if action is not None)
        if movers != tuple(sorted(self._to_move[env_id])):
            raise StructureError(
                f"step was given actions of the players {movers} for game {env_id}, in which the "
                f"players {self._to_move[env_id]} are to move; see the manager's to_move"
            )

    def _checked_ids(self, env_ids: Iterable[int]) -> list[int]:
        ids = list(env_ids)
        for env_id in ids:
            if not is_int(env_id) or not 0 <= env_id < self.env_num:
                raise StructureError(
                    f"unknown game {env_id!r}; the games are 0 to {self.env_num - 1}"
                )
        return ids


def game_result(info: Mapping[str, Any]) -> GameResult:
    """Return how a game ended for a player, from that player's last info.

    It is ``info["result"]`` (``"wins"``, ``"draws"``, ``"losses"``, or the singular), else the sign
    of ``info["eval_episode_return"]``.

    Raises:
        EnvProtocolError: if ``info["result"]`` is something else.
    """
    if "result" in info:
        if info["result"] not in _RESULTS:
            raise EnvProtocolError(
                f"a game ended with the info result={info['result']!r}; it must be wins, draws or "
                "losses"
            )
        return _RESULTS[info["result"]]
    value = float(info["eval_episode_return"])
    return "wins" if value > 0 else "losses" if value < 0 else "draws"


def _space(env: BattleEnv, name: str) -> gym.Space[Any] | None:
    # A game that does not derive from BattleEnv may have no spaces.
    space: gym.Space[Any] | None = getattr(env, name, None)
    return space


def _has_mask(space: gym.Space[Any]) -> bool:
    return isinstance(space, gym.spaces.Dict) and "action_mask" in space.spaces
