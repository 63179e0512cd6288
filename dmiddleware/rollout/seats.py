"""What acts for the teams of a game that do not learn."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.data.buffer_state import generator_from_text, generator_to_text
from dmiddleware.env import EnvSettings
from dmiddleware.env.batching import (
    NestedArrays,
    allocate,
    index_rows,
    make_collate,
    map_arrays,
    replace_rows,
)
from dmiddleware.env.env_state import get_space_state, set_space_state
from dmiddleware.env.timestep import IdArray
from dmiddleware.errors import ConfigError, PolicyOutputError, SpaceError
from dmiddleware.policy import CollectMode, EvalMode, HasModes, as_eval_mode
from dmiddleware.rollout.act_inputs import masks_in, sample_allowed
from dmiddleware.rollout.acting_policy import ActingPolicy
from dmiddleware.rollout.game import Game, Seat, TeamEnvs
from dmiddleware.rollout.opponents import OpponentPool
from dmiddleware.rollout.stepper import Stepper
from dmiddleware.seeding import derive_seed
from dmiddleware.tree import Value, assign_rows, map_leaves
from dmiddleware.tree import index_rows as index_tree

__all__ = ["Frozen", "Player", "against", "envs_for", "make_seat"]


@dataclass(frozen=True)
class Frozen:
    """A policy that plays for a team greedily and does not learn there.

    Attributes:
        policy: a policy, its eval mode, or what :func:`~dmiddleware.runs.load_policy` returned.
    """

    policy: HasModes | EvalMode | ActingPolicy


Rule: TypeAlias = Callable[[Any, Any], Any]
"""Takes an agent's observation and its action mask (None: there is none), returns its action."""

Player: TypeAlias = (
    HasModes | CollectMode | EvalMode | ActingPolicy | Frozen | OpponentPool | Rule
    | Literal["random"]
)  # fmt: skip
"""What plays for a team: see :func:`against`."""


def against(game: Game, team: str, others: Mapping[str, Player]) -> TeamEnvs:
    """Return the envs of a team that plays against given others.

    They are for an evaluator, and for a collector if this team alone learns::

        eval_envs = against(make_game(make_env, teams=TEAMS, env_num=8), "red", {"blue": "random"})
        task.use(InteractionEvaluator(red, eval_envs, n_episode=40, every_env_step=5000))

    For policies such as MAPPO, take their attribute ``joint``.

    Args:
        game: the games, which no other team may step.
        team: the team.
        others: the player of each other team: a policy acts greedily, as it is at the time; a
            function takes the observation and the action mask (or None) of one agent and returns
            its action; of a pool of past versions, one plays in each game; ``"random"`` takes any
            action that is allowed.

    Raises:
        ConfigError: if a team lacks a player or is unknown.
        SpaceError: if a policy does not fit its team.
    """
    game.seat(team, {name: make_seat(game, name, player) for name, player in others.items()})
    return game[team]


def envs_for(game: Game, team: str, mode: CollectMode | EvalMode) -> TeamEnvs:
    """Return the envs of a team for a policy: joint ones if it acts for several agents.

    Raises:
        SpaceError: if the policy does not fit its team.
    """
    envs = game[team]
    if getattr(mode.spec.kind, "several_agents", False):
        envs = envs.joint
    try:
        mode.spec.check_spaces(envs.observation_space, envs.action_space)
    except SpaceError as error:
        raise SpaceError(f"the policy of team {team!r} does not fit it: {error}") from error
    return envs


def make_seat(game: Game, team: str, player: Player) -> Seat:
    """Return what acts for a team.

    Args:
        game: the game.
        team: the team.
        player: see :func:`against`.

    Raises:
        ConfigError: if it cannot play.
        SpaceError: if a policy does not fit its team.
    """
    if isinstance(player, Frozen):
        player = player.policy
    if isinstance(player, ActingPolicy):
        player = player.policy
    if isinstance(player, OpponentPool):
        return _PoolSeat(game, team, player)
    if isinstance(player, CollectMode | EvalMode):
        return _PolicySeat(player, envs_for(game, team, player))
    if hasattr(player, "eval_mode"):
        policy: Any = player
        mode = as_eval_mode(policy, user="against")
        return _PolicySeat(mode, envs_for(game, team, mode))
    if player == "random":
        return _RandomSeat(game, team)
    if callable(player):
        return _RuleSeat(game, team, player)
    raise ConfigError(
        f"team {team!r} cannot be played by {player!r:.100}; give it a policy, a function of an "
        'observation and an action mask, an OpponentPool, or "random"'
    )


class _PolicySeat(Stepper):
    """A policy."""

    def __init__(self, mode: CollectMode | EvalMode, envs: TeamEnvs) -> None:
        super().__init__(mode, envs, user="a game")

    def move(self) -> None:
        self.step({})
        # Nobody reads them.
        self.episode_returns, self.episode_lengths, self.episode_successes = [], [], []

    def restart(self) -> None:
        if len(self.episode_id):
            self._mode.reset()
            self._begin_all()


def _seed_of(game: Game, team: str) -> int | None:
    """Return a seed for what plays for a team; None: the games have none."""
    settings = game.env_manager.settings
    seed = settings.seed if isinstance(settings, EnvSettings) else None
    first = seed if isinstance(seed, int) or seed is None else next(iter(seed), None)
    return None if first is None else derive_seed(int(first), "seat", team)


class _Seat:
    """Acts for those agents of a team whose turn it is."""

    def __init__(self, game: Game, team: str) -> None:
        self._envs = game[team]
        self._actions = map_arrays(
            np.zeros_like, allocate(self._envs.action_space, self._envs.env_num)
        )

    def move(self) -> None:
        """Let them act."""
        envs = self._envs
        acts = np.flatnonzero(envs.acts)
        if len(acts):
            mask = masks_in(envs.ready_obs, envs.ready_info)
            allowed = None if mask is None else mask[torch.from_numpy(acts)]
            actions = self._act(acts, index_rows(envs.ready_obs, acts), allowed)
            self._actions = replace_rows(self._actions, acts, actions)
        envs.step(self._actions)

    @abstractmethod
    def _act(self, env_ids: IdArray, obs: Any, mask: torch.Tensor | None) -> NestedArrays:
        """Return the actions of some envs, from their observations and masks."""

    def restart(self) -> None:
        """Forget the present games."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue the present games."""
        return {"envs": self._envs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._envs.load_state_dict(state["envs"])


class _RuleSeat(_Seat):
    """A function of an observation and a mask."""

    def __init__(self, game: Game, team: str, rule: Rule) -> None:
        super().__init__(game, team)
        self._rule, self._title = rule, f"the function that plays for team {team!r}"
        try:
            inspect.signature(rule).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"{self._title} must take the observation and the action mask of an agent: {error}"
            ) from None
        except ValueError:
            pass  # written in C, without a signature
        self._collate = make_collate(self._envs.action_space)

    def _act(self, env_ids: IdArray, obs: Any, mask: torch.Tensor | None) -> NestedArrays:
        allowed = [None] * len(env_ids) if mask is None else mask.numpy()
        rows = (index_rows(obs, row) for row in range(len(env_ids)))
        try:
            chosen = [self._rule(row, m) for row, m in zip(rows, allowed, strict=True)]
        except Exception as error:
            error.add_note(f"raised by {self._title}")
            raise
        space = self._envs.action_space
        try:
            actions = self._collate(chosen)
        except (TypeError, ValueError) as error:
            raise PolicyOutputError(
                f"{self._title} returned an action that {space} does not have: {error}"
            ) from error
        if isinstance(space, gym.spaces.Discrete):
            for action in chosen:
                if not space.contains(action):
                    raise PolicyOutputError(
                        f"{self._title} returned the action {action!r}, which {space} does not have"
                    )
        return actions


class _RandomSeat(_Seat):
    """Any action that is allowed."""

    def __init__(self, game: Game, team: str) -> None:
        super().__init__(game, team)
        self._space = copy.deepcopy(self._envs.action_space)
        self._space.seed(_seed_of(game, team))
        self._collate = make_collate(self._space)

    def _act(self, env_ids: IdArray, obs: Any, mask: torch.Tensor | None) -> NestedArrays:
        if mask is not None:
            return sample_allowed(self._space, mask)
        return self._collate([self._space.sample() for _ in env_ids])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "space": get_space_state(self._space)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        set_space_state(self._space, state["space"])


class _PoolSeat(_PolicySeat):
    """Past versions of a policy, one drawn for each game."""

    def __init__(self, game: Game, team: str, pool: OpponentPool) -> None:
        mode = pool.new_mode()
        envs = envs_for(game, team, mode)
        super().__init__(replace(mode, forward=self._act), envs)
        self._game, self._team, self._pool = game, team, pool
        self._rng = np.random.default_rng(_seed_of(game, team))
        self._drawn: dict[int, int] = {}
        self._n_rows = envs.env_num // game.env_num  # of a game
        pool.follow(self)

    @property
    def opponents(self) -> frozenset[int]:
        """The versions in the present games, which the pool keeps."""
        return frozenset(self._drawn.values())

    def move(self) -> None:
        for game in range(self._game.env_num):
            if game not in self._drawn:
                self._drawn[game] = self._pool.draw(self._rng)
        super().move()
        for game, returns in self._game.results.items():
            mine = returns[self._team]
            best = max(value for team, value in returns.items() if team != self._team)
            self._pool.record(self._drawn[game], _result(best - mine))
        for game in self._game.begun:
            del self._drawn[game]

    def _act(self, obs: Value, *, env_id: IdArray, **inputs: Value) -> dict[str, Any]:
        """Let the versions act that play in these envs; see :class:`CollectMode`."""
        numbers = np.array([self._drawn[env // self._n_rows] for env in env_id.tolist()])
        columns: dict[str, Any] = {}
        for number in sorted(set(numbers.tolist())):
            rows = torch.from_numpy(np.flatnonzero(numbers == number))
            chosen = {name: index_tree(column, rows) for name, column in inputs.items()}
            output = self._pool.act_rows(number, index_tree(obs, rows), chosen, self._rng)
            for name, column in output.items():
                if name not in columns:
                    columns[name] = map_leaves(partial(_zeros, n=len(numbers)), column)
                assign_rows(columns[name], rows, column)
        return columns

    def restart(self) -> None:
        super().restart()
        self._drawn.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue the present games."""
        drawn = [self._drawn.get(game, -1) for game in range(self._game.env_num)]
        return {**super().state_dict(), "drawn": drawn, "rng": generator_to_text(self._rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore what :meth:`state_dict` returned."""
        self._drawn = {game: n for game, n in enumerate(state["drawn"]) if n >= 0}
        self._rng = generator_from_text(state["rng"])
        return super().load_state_dict(state)


def _zeros(leaf: torch.Tensor, *, n: int) -> torch.Tensor:
    """Return ``n`` rows of zeros like those of a tensor."""
    return leaf.new_zeros((n, *leaf.shape[1:]))


def _result(lead: float) -> Literal["wins", "draws", "losses"]:
    return "draws" if lead == 0 else "wins" if lead > 0 else "losses"
