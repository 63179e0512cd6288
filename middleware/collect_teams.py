"""Collecting in games: several policies act in the same environments, each for its team."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.rollout import Game, TeamRollout
from dmiddleware.rollout.seats import Player
from dmiddleware.settings import Count, Settings, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.collect import FailureLog, count_collected
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.part_name import PartSettings

__all__ = ["TeamCollector", "TeamCollectorSettings"]


class TeamCollectorSettings(Settings):
    """The options of :class:`TeamCollector`."""

    n_sample: Count
    """Transitions of each team that learns in each step of the task, at least."""


class TeamCollector(BaseMiddleware[OnlineRLContext], TakesSettings[TeamCollectorSettings]):
    """Collect transitions of several teams that play a game.

    Each team that learns is a named part of the chain: its learner, buffer and the like have the
    option ``name`` with the name of the team. All teams act in lockstep, each with its newest
    weights. Unfinished episodes continue in the next step of the task.

    Args:
        game: the game. It is launched when the task starts and closed when it ends, unless it was
            launched before.
        players: the player of each team. A policy learns; a
            :class:`~dmiddleware.rollout.Frozen` policy, a loaded one, a function of an observation
            and an action mask, an :class:`~dmiddleware.rollout.OpponentPool`, and ``"random"`` do
            not.
        settings: the options, each by keyword; see :class:`TeamCollectorSettings`.

    Reads:
        In the part of each team that learns:
        ctx.env_step, ctx.env_episode: incremented.
        ctx.train_iter: stored with the rows, as ``collect_iter``.
        ctx.collect_kwargs: keyword arguments of the policy's forward, such as ``eps``.

    Writes:
        In the same parts:
        ctx.trajectories: the transitions, as the policy's ``Policy.train_batch`` returns them: a
            batch ``[T, E, …]``, or ``[R, …]`` if not all agents of the team acted in each step and
            the policy does not learn from lanes.
        ctx.trajectory_end_idx: as :class:`StepCollector` does.
        ctx.env_step, ctx.env_episode: with the transitions and episodes collected.

    Raises:
        ConfigError: if the game lacks a player, a team's name cannot be that of a part, or an
            option is not valid.
        SpaceError: if a policy does not fit its team.
    """

    roles = (Role.COLLECTOR,)

    settings: TeamCollectorSettings

    @takes_options(TeamCollectorSettings)
    def __init__(
        self, game: Game, players: Mapping[str, Player], settings: TeamCollectorSettings
    ) -> None:
        self.settings = settings
        self._rollout = TeamRollout(game, players)
        self._game = game
        teams = self._rollout.workers
        for team in teams:
            try:
                PartSettings(name=team)
            except ConfigError as error:
                raise ConfigError(
                    f"the team {team!r} learns, so it is a part of the chain: {error}"
                ) from error
        read = ("env_step", "env_episode", "train_iter", "collect_kwargs")
        written = ("trajectories", "trajectory_end_idx", "env_step", "env_episode")
        self.reads = tuple(f"{team}/{field}" for team in teams for field in read)
        self.writes = tuple(f"{team}/{field}" for team in teams for field in written)
        self.owns = (game.env_manager,)
        self.components = {"env_num": game.env_num}
        self._failures = FailureLog(game.env_manager)
        self._launched_here = False

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a chain in which some teams learn, and others collect rows for nobody."""
        parts = {team: chain.of(team) for team in self._rollout.workers}
        idle = [team for team, part in parts.items() if not part.writes("train_iter")]
        idle = [team for team in idle if not parts[team].writes("train_output")]
        if len(idle) == len(parts) or not all(d.anything for d in chain.whole.declarations):
            return
        for team in idle:
            yield (
                f"the policy of team {team!r} collects data, but nothing learns from it; add a "
                f"learner with name={team!r}, or give the team Frozen(policy)"
            )

    def setup(self, task: Task[Any]) -> None:
        """Launch the game; in a run of several processes, each explores with a seed of its own."""
        self._launched_here = self._game.closed
        self._failures.begin()
        self._rollout.start()
        if (task.router is not None or task.rank > 0) and task.ctx.total_step == 0:
            # The policies of all processes were built from one seed.
            for team, mode in self._rollout.modes.items():
                mode.seed(task.seed_for("policy", "act", team))

    def close(self) -> None:
        """Close the game, if this middleware launched it."""
        if self._launched_here:
            self._launched_here = False
            self._game.close()

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Collect."""
        workers = self._rollout.workers
        parts = {team: ctx.part(team) for team in workers}
        before = {team: (worker.env_step, worker.env_episode) for team, worker in workers.items()}
        collected = self._rollout.collect(
            self.settings.n_sample,
            train_iter={team: part.train_iter for team, part in parts.items()},
            policy_kwargs={team: part.collect_kwargs for team, part in parts.items()},
        )
        for team, part in parts.items():
            part.trajectories = rows = self._rollout.modes[team].train_batch(collected[team])
            part.trajectory_end_idx = torch.from_numpy(np.flatnonzero(rows["done"].numpy()))
            count_collected(part, workers[team], *before[team])
            part.sum_up()
        if self._game.env_manager.failures.restarts != self._failures.restarts:
            self._failures.log(ctx)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the games, unfinished episodes, counters and generators."""
        return self._rollout.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._rollout.load_state_dict(state)
        self._failures.begin()
