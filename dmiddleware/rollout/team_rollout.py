"""Collecting in a game: all teams act in lockstep, and those that learn keep their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dmiddleware.errors import ConfigError, EnvTimeout
from dmiddleware.policy import CollectMode, as_collect_mode
from dmiddleware.rollout.acting_policy import ActingPolicy
from dmiddleware.rollout.collector import RolloutCollector
from dmiddleware.rollout.game import Game, Seat
from dmiddleware.rollout.seats import Player, envs_for, make_seat
from dmiddleware.settings import takes_options
from dmiddleware.tree import Batch

__all__ = ["TeamRollout"]

_NO_KWARGS: Final[Mapping[str, Any]] = {}
_PATIENCE: Final = 1000
"""Steps of the games in which each team that learns must make a transition."""


class TeamRollout:
    """Collects transitions of several teams of a :class:`~dmiddleware.rollout.Game` at once.

    Each policy learns; the others are :class:`~dmiddleware.rollout.Frozen` policies, functions,
    pools and ``"random"``, which play and have no rows.

    Attributes:
        game: the game.
        modes: the collect mode of each policy that learns, by team.
        workers: what collects for each of these teams, with its counters and returns.

    Args:
        game: the game, which nothing else steps.
        players: the player of each team; see :func:`~dmiddleware.rollout.against`.

    Raises:
        ConfigError: if a team lacks a player or is unknown, or nobody learns.
        SpaceError: if a policy does not fit its team.
    """

    @takes_options
    def __init__(self, game: Game, players: Mapping[str, Player]) -> None:
        if not isinstance(game, Game):
            raise ConfigError(
                f"TeamRollout takes a Game, got {game!r:.100}; make one with make_game("
                'make_env, teams={"red": ["red_*"], …}, env_num=8)'
            )
        self.game = game
        self.modes: dict[str, CollectMode] = {}
        self.workers: dict[str, RolloutCollector] = {}
        seats: dict[str, Seat] = {}
        self._kwargs: dict[str, Mapping[str, Any]] = {}
        for team, player in players.items():
            if not learns(player):
                seats[team] = make_seat(game, team, player)
                continue
            mode = as_collect_mode(player, user="TeamRollout")  # type: ignore[arg-type]
            self.modes[team] = mode
            self.workers[team] = RolloutCollector(mode, envs_for(game, team, mode))
        self._lanes = {
            team for team, mode in self.modes.items() if mode.spec.minibatch_unit == "lanes"
        }
        if not self.workers:
            raise ConfigError("no team learns; give at least one of them a policy")
        self._leader = next(iter(self.workers))
        learners = {
            team: _LearningSeat(self, team) for team in self.workers if team != self._leader
        }
        game.seat(self._leader, {**seats, **learners})

    def start(self) -> None:
        """Launch the games if they are closed."""
        for worker in self.workers.values():
            worker.start()

    def step(self, team: str) -> None:
        """Let a team that learns act, and keep its rows."""
        self.workers[team].step(self._kwargs.get(team, _NO_KWARGS))

    def collect(
        self,
        n_sample: int,
        *,
        train_iter: Mapping[str, int] | None = None,
        policy_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Batch]:
        """Play until each team that learns has some transitions.

        Args:
            n_sample: the least number of transitions of each team.
            train_iter: each policy's iteration, written to its rows as ``collect_iter``.
            policy_kwargs: passed to each policy's forward.

        Returns:
            By team, the transitions that are complete: ``[T, E', …]`` if all agents of the team
            have acted in each step, as :meth:`RolloutCollector.collect` returns them; else
            ``[R, …]``, env by env. For a policy that learns from lanes, always ``[T, E', …]``: rows
            that do not fit wait for the next call. The rest of their episodes follows there, too.

        Raises:
            ValueError: if ``n_sample`` is not positive.
            EnvTimeout: if a team makes no transition that it needs in 1,000 steps of the games.
        """
        if n_sample <= 0:
            raise ValueError(f"n_sample must be positive, got {n_sample}")
        if self.game.closed:
            self.start()
        self._kwargs = dict(policy_kwargs or {})
        for team, worker in self.workers.items():
            worker.begin_call((train_iter or {}).get(team, 0))
        missing = {team: self._missing(team, n_sample) for team in self.workers}
        n_idle = dict.fromkeys(self.workers, 0)
        while any(missing.values()):
            self.step(self._leader)
            for team in self.workers:
                before, missing[team] = missing[team], self._missing(team, n_sample)
                n_idle[team] = n_idle[team] + 1 if missing[team] == before else 0
                if n_idle[team] >= _PATIENCE and missing[team]:
                    raise EnvTimeout(
                        f"an agent of team {team!r} has completed no transition in {_PATIENCE} "
                        "steps of the games; if it does not take part, let a function play for it"
                    )
        return {
            team: worker.take_lanes(n_sample) if team in self._lanes else worker.take()
            for team, worker in self.workers.items()
        }

    def _missing(self, team: str, n_sample: int) -> int:
        """Return how many rows a team still needs."""
        worker = self.workers[team]
        if team in self._lanes:
            return worker.missing_in_lanes(n_sample)
        return max(n_sample - worker.waiting_steps, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the games, unfinished episodes, counters and generators."""
        return {team: worker.state_dict() for team, worker in self.workers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; the leading team's first, with the games."""
        for team, worker in self.workers.items():
            worker.load_state_dict(state[team])


class _LearningSeat:
    """A team that learns and does not lead."""

    def __init__(self, rollout: TeamRollout, team: str) -> None:
        self._rollout, self._team = rollout, team

    def move(self) -> None:
        """Let it act."""
        self._rollout.step(self._team)

    def restart(self) -> None:
        """Do nothing: a collector notices that its envs have been reset."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state of the rollout has it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""


def learns(player: object) -> bool:
    """Return whether a player is a policy, or its collect mode, that learns."""
    if isinstance(player, ActingPolicy):
        return False
    return isinstance(player, CollectMode) or hasattr(player, "collect_mode")
