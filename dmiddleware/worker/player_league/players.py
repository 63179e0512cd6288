"""Players that choose their opponents themselves.

Source: Vinyals et al., "Grandmaster level in StarCraft II using multi-agent reinforcement
learning", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from dmiddleware.errors import ConfigError
from dmiddleware.registry import Registry, import_modules
from dmiddleware.rollout.ratings import pfsp, uniform
from dmiddleware.worker.player_league.ratings import LeagueMetricEnv, PlayerRating
from dmiddleware.worker.player_league.shared_payoff import BattleSharedPayoff

__all__ = [
    "PLAYER_REGISTRY",
    "ActivePlayer",
    "HistoricalPlayer",
    "LeagueExploiter",
    "MainExploiter",
    "MainPlayer",
    "NaiveSpPlayer",
    "Player",
    "create_player",
    "pfsp",
    "uniform",
]

PLAYER_REGISTRY: Final = Registry[Any]("player")


class Player:
    """A member of a league.

    Args:
        cfg: its options.
        category: its category, such as a race.
        init_payoff: the win rates of the league.
        checkpoint_path: the file of its policy.
        player_id: its name.
        total_agent_step: learner iterations so far.
        rating: its rating.
    """

    def __init__(
        self,
        cfg: Any,
        category: str,
        init_payoff: BattleSharedPayoff,
        checkpoint_path: str,
        player_id: str,
        total_agent_step: int,
        rating: PlayerRating,
    ) -> None:
        self._cfg = cfg
        self._category = category
        self._payoff = init_payoff
        self._checkpoint_path = checkpoint_path
        self._player_id = player_id
        self._total_agent_step = total_agent_step
        self._rating = rating

    category = property(lambda self: self._category)
    payoff = property(lambda self: self._payoff)
    player_id = property(lambda self: self._player_id)

    @property
    def checkpoint_path(self) -> str:
        """The file of its policy."""
        return self._checkpoint_path

    @checkpoint_path.setter
    def checkpoint_path(self, path: str) -> None:
        self._checkpoint_path = path

    @property
    def total_agent_step(self) -> int:
        """Learner iterations so far."""
        return self._total_agent_step

    @total_agent_step.setter
    def total_agent_step(self, step: int) -> None:
        self._total_agent_step = step

    @property
    def rating(self) -> PlayerRating:
        """Its rating."""
        return self._rating

    @rating.setter
    def rating(self, rating: PlayerRating) -> None:
        self._rating = rating


@PLAYER_REGISTRY.register("historical_player")
class HistoricalPlayer(Player):
    """A snapshot of an active player."""

    def __init__(self, *args: Any, parent_id: str) -> None:
        super().__init__(*args)
        self._parent_id = parent_id

    @property
    def parent_id(self) -> str:
        """The active player that it is a snapshot of."""
        return self._parent_id


class _Branch(NamedTuple):
    name: str
    prob: float


class ActivePlayer(Player):
    """A player that learns; a subclass has a method ``_<name>_branch`` for each of its branches."""

    BRANCH = _Branch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)
        self._one_phase_step = int(float(self._cfg.one_phase_step))
        self._last_enough_step = 0
        self._strong_win_rate = self._cfg.strong_win_rate
        self._branch_probs = [_Branch(*row) for row in self._cfg.branch_probs.items()]
        self._eval_opponent_difficulty = ["RULE_BASED"]
        self._eval_opponent_index = 0

    def is_trained_enough(self, select_fn: Callable[[Player], bool] | None = None) -> bool:
        """Return whether to keep a snapshot: after two phases, or one that beats some players.

        Args:
            select_fn: which players must be beaten; by default all snapshots.
        """
        passed = self._total_agent_step - self._last_enough_step
        if passed < self._one_phase_step:
            return False
        if passed < 2 * self._one_phase_step:
            players = self._get_players(select_fn or _is_historical)
            if not players or self._payoff[self, players].min() <= self._strong_win_rate:
                return False
        self._last_enough_step = self._total_agent_step
        return True

    def snapshot(self, metric_env: LeagueMetricEnv) -> HistoricalPlayer:
        """Return a snapshot; the league copies its file."""
        step = int(self._total_agent_step)
        return HistoricalPlayer(
            self._cfg,
            self.category,
            self.payoff,
            f"{self.checkpoint_path.split('.pth')[0]}_{self._total_agent_step}.pth",
            f"{self.player_id}_{step}_historical",
            step,
            metric_env.create_rating(mu=self.rating.mu),
            parent_id=self.player_id,
        )

    def mutate(self, info: Mapping[str, Any]) -> str | None:
        """Return the checkpoint to start again from; None to continue."""
        return None

    def get_job(self, eval_flag: bool = False) -> dict[str, Any]:
        """Return the ``opponent``: a player, or the name of the env's own when evaluating."""
        if eval_flag:
            return {"opponent": self._eval_opponent_difficulty[self._eval_opponent_index]}
        return {"opponent": self._get_collect_opponent()}

    def increment_eval_difficulty(self) -> bool:
        """Choose a harder opponent of the env, and return whether there is one."""
        is_hardest = self._eval_opponent_index == len(self._eval_opponent_difficulty) - 1
        self._eval_opponent_index += not is_hardest
        return not is_hardest

    def _get_collect_opponent(self) -> Player:
        """Return the opponent of a branch, which is drawn by its probability."""
        probs = np.array([branch.prob for branch in self._branch_probs])
        index = np.random.choice(len(probs), p=probs / probs.sum())
        opponent: Player = getattr(self, f"_{self._branch_probs[index].name}_branch")()
        return opponent

    def _get_players(self, select_fn: Callable[[Player], bool]) -> list[Player]:
        """Return the players of the league that a function selects."""
        return [player for player in self._payoff.players if select_fn(player)]

    def _get_opponent(self, players: Sequence[Player], p: Any = None) -> Player:
        """Return one of some players, by their chances."""
        return players[np.random.choice(len(players), p=p)]

    def _prioritized(self, players: Sequence[Player], weighting: str) -> Player:
        return self._get_opponent(players, pfsp(self._payoff[self, players], weighting))

    def _pfsp_branch(self) -> Player:
        return self._prioritized(self._get_players(_is_historical), "squared")

    def _snapshots_of(self, parents: Sequence[Player]) -> list[Player]:
        ids = {parent.player_id for parent in parents}
        return self._get_players(lambda p: isinstance(p, HistoricalPlayer) and p.parent_id in ids)


def _is_historical(player: Player) -> bool:
    return isinstance(player, HistoricalPlayer)


def _is_main(player: Player) -> bool:
    return isinstance(player, MainPlayer)


@PLAYER_REGISTRY.register("naive_sp_player")
class NaiveSpPlayer(ActivePlayer):
    """Plays against itself and its snapshots."""

    def _pfsp_branch(self) -> Player:
        return super()._pfsp_branch() if self._get_players(_is_historical) else self

    def _sp_branch(self) -> Player:
        return self


@PLAYER_REGISTRY.register("main_player")
class MainPlayer(ActivePlayer):
    """Plays against everybody, also against exploiters and opponents it may have forgotten."""

    def _sp_branch(self) -> Player:
        opponent = self._get_opponent(self._get_players(_is_main))
        if self._payoff[self, opponent][0] > 1 - self._strong_win_rate:
            return opponent
        return self._prioritized(self._snapshots_of([opponent]) or [opponent], "variance")

    def _verification_branch(self) -> Player:
        exploiters = self._get_players(lambda p: isinstance(p, MainExploiter))
        opponent = self._get_opponent(self._get_players(_is_main))
        for players, bound in (
            (self._snapshots_of(exploiters), 1 - self._strong_win_rate),
            (self._snapshots_of([opponent]), self._strong_win_rate),
        ):
            if players and self._payoff[self, players].min() < bound:
                return self._prioritized(players, "squared")
        return self._sp_branch()


@PLAYER_REGISTRY.register("main_exploiter")
class MainExploiter(ActivePlayer):
    """Plays against main players, or their snapshots while they are too strong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._min_valid_win_rate = self._cfg.min_valid_win_rate

    def is_trained_enough(self, select_fn: Callable[[Player], bool] | None = None) -> bool:
        """Return whether to keep a snapshot; by default the main players must be beaten."""
        return super().is_trained_enough(select_fn or _is_main)

    def mutate(self, info: Mapping[str, Any]) -> str | None:
        """Return the checkpoint to start again from, after each snapshot."""
        path: str = info["reset_checkpoint_path"]
        return path

    def _main_players_branch(self) -> Player:
        opponent = self._get_opponent(self._get_players(_is_main))
        if self._payoff[self, opponent][0] >= self._min_valid_win_rate:
            return opponent
        return self._prioritized(self._snapshots_of([opponent]) or [opponent], "variance")


@PLAYER_REGISTRY.register("league_exploiter")
class LeagueExploiter(ActivePlayer):
    """Plays against all snapshots, and sometimes starts again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mutate_prob = self._cfg.mutate_prob
        if not 0 <= self.mutate_prob <= 1:
            raise ConfigError(f"mutate_prob must be in [0, 1], got {self.mutate_prob!r}")

    def mutate(self, info: Mapping[str, Any]) -> str | None:
        """Return the checkpoint to start again from, or None."""
        return info["reset_checkpoint_path"] if np.random.uniform() < self.mutate_prob else None


def create_player(cfg: Mapping[str, Any], player_type: str, *args: Any, **kwargs: Any) -> Player:
    """Return a new player of a registered type, after importing ``cfg.import_names``.

    Raises:
        RegistryError: if no such type is registered.
    """
    import_modules(cfg.get("import_names", ()))
    player: Player = PLAYER_REGISTRY.get(player_type)(*args, **kwargs)
    return player
