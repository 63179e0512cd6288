"""Leagues of players that choose their opponents themselves."""

from __future__ import annotations

import copy
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from easydict import EasyDict

from dmiddleware.errors import ConfigError
from dmiddleware.registry import Registry, import_modules
from dmiddleware.worker.player_league.players import (
    ActivePlayer,
    HistoricalPlayer,
    Player,
    create_player,
)
from dmiddleware.worker.player_league.ratings import LeagueMetricEnv
from dmiddleware.worker.player_league.shared_payoff import create_payoff

__all__ = ["LEAGUE_REGISTRY", "BaseLeague", "OneVsOneLeague", "create_league"]

LEAGUE_REGISTRY: Final = Registry[Any]("league")

_COMMON: dict[str, Any] = {
    "player_category": ["default"],
    "use_pretrain": False,
    "use_pretrain_init_historical": False,
    "pretrain_checkpoint_path": {"default": "default_cate_pretrain.pth"},
    "payoff": {"type": "battle", "decay": 0.99, "min_win_rate_games": 8},
    "metric": {
        "mu": 0, "sigma": 25 / 3, "beta": 25 / 3 / 2, "tau": 0.0, "draw_probability": 0.02,
    },
}  # fmt: skip


def _merged(defaults: Mapping[str, Any], cfg: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **cfg}
    for key in defaults.keys() & cfg.keys():
        if isinstance(defaults[key], Mapping) and isinstance(cfg[key], Mapping):
            merged[key] = _merged(defaults[key], cfg[key])
    return merged


class BaseLeague:
    """Manages players; a subclass has ``_get_job_info``, ``_mutate_player``, ``_update_player``.

    Args:
        cfg: what differs from ``default_config()``; ``path_policy`` is a folder.
    """

    config: ClassVar[dict[str, Any]] = {"league_type": "base", "import_names": [], **_COMMON}

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return the defaults of the class."""
        return EasyDict({**copy.deepcopy(cls.config), "cfg_type": f"{cls.__name__}Dict"})

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.cfg = EasyDict(_merged(self.default_config(), cfg))
        self.path_policy: str = self.cfg.path_policy
        Path(self.path_policy).mkdir(parents=True, exist_ok=True)
        self.league_uid = str(uuid.uuid1())
        self.active_players: list[ActivePlayer] = []
        self.historical_players: list[HistoricalPlayer] = []
        self.payoff = create_payoff(self.cfg.payoff)
        self.metric_env = LeagueMetricEnv(**self.cfg.metric)
        self._init_players()
        self.active_players_ids = [player.player_id for player in self.active_players]
        self.active_players_ckpts = [player.checkpoint_path for player in self.active_players]

    def _init_players(self) -> None:
        """Create the active players of each category, and snapshots from pretrained ones."""
        for category in self.cfg.player_category:
            for kind, n_players in self.cfg.active_players.items():
                for number in range(n_players):
                    self._add_active(kind, category, f"{kind}_{category}_{number}")
            if self.cfg.use_pretrain_init_historical:
                self._add_pretrained(category)

    def _add_active(self, kind: str, category: str, name: str) -> None:
        path = str(Path(self.path_policy, f"{name}_ckpt.pth"))
        rating = self.metric_env.create_rating()
        player: Any = create_player(
            self.cfg, kind, self.cfg[kind], category, self.payoff, path, name, 0, rating
        )
        if self.cfg.use_pretrain:
            self.save_checkpoint(self.cfg.pretrain_checkpoint_path[category], path)
        self.active_players.append(player)
        self.payoff.add_player(player)

    def _add_pretrained(self, category: str) -> None:
        kinds = [key for key in self.cfg if "main_player" in key]
        if len(kinds) != 1:
            raise ConfigError(
                f"use_pretrain_init_historical needs one key with main_player, got {kinds}"
            )
        player = HistoricalPlayer(
            self.cfg[kinds[0]], category, self.payoff,
            self.cfg.pretrain_checkpoint_path[category],
            f"{kinds[0]}_{category}_0_pretrain_historical", 0, self.metric_env.create_rating(),
            parent_id=f"{kinds[0]}_{category}_0",
        )  # fmt: skip
        self.historical_players.append(player)
        self.payoff.add_player(player)

    def get_job_info(self, player_id: str | None = None, eval_flag: bool = False) -> dict[str, Any]:
        """Return who plays with an active player, by default the first one."""
        player = self._active(self.active_players_ids[0] if player_id is None else player_id)
        return self._get_job_info(player, eval_flag)

    def judge_snapshot(self, player_id: str, force: bool = False) -> bool:
        """Keep a snapshot of an active player if it has learned enough, and return whether."""
        player = self._active(player_id)
        if not force and not player.is_trained_enough():
            return False
        snapshot = player.snapshot(self.metric_env)
        self.save_checkpoint(player.checkpoint_path, snapshot.checkpoint_path)
        self.historical_players.append(snapshot)
        self.payoff.add_player(snapshot)
        self._mutate_player(player)
        return True

    def update_active_player(self, player_info: Mapping[str, Any]) -> Any:
        """Take the progress of an active player, ``player_info["player_id"]``."""
        return self._update_player(self._active(player_info["player_id"]), player_info)

    def finish_job(self, job_info: Mapping[str, Any]) -> None:
        """Count the games of a job, and rate those of an evaluation."""
        self.payoff.update(job_info)
        if not job_info.get("eval_flag"):
            return
        home, away = (self.get_player_by_id(player_id) for player_id in job_info["player_id"])
        rows = [[row] if isinstance(row, str) else row for row in job_info["result"]]
        home.rating, away.rating = self.metric_env.rate_1vs1(
            home.rating, away.rating, result=[end for row in rows for end in row]
        )

    def get_player_by_id(self, player_id: str) -> Player:
        """Return a player.

        Raises:
            ConfigError: for an unknown player.
        """
        players = {player.player_id: player for player in self.payoff.players}
        if player_id not in players:
            raise ConfigError(f"the league has no player {player_id!r}; it has {list(players)}")
        return players[player_id]

    @staticmethod
    def save_checkpoint(src_checkpoint: str, dst_checkpoint: str) -> None:
        """Copy a checkpoint."""
        shutil.copyfile(src_checkpoint, dst_checkpoint)

    def player_rank(self, string: bool = False) -> str | dict[str, float]:
        """Return the TrueSkill of all players, also as a table."""
        players: list[Player] = [*self.active_players, *self.historical_players]
        rank = {player.player_id: player.rating.exposure for player in players}
        if not string:
            return rank
        rows = [f"| {name} | {value:.2f} |" for name, value in rank.items()]
        return "\n".join(("", "| Player ID | Rank (TrueSkill) |", "|---|---|", *rows))

    def _active(self, player_id: str) -> ActivePlayer:
        player = self.get_player_by_id(player_id)
        if not isinstance(player, ActivePlayer):
            raise ConfigError(f"{player_id!r} does not learn; the players that do are "
                              f"{self.active_players_ids}")  # fmt: skip
        return player

    def _get_job_info(self, player: ActivePlayer, eval_flag: bool = False) -> dict[str, Any]:
        raise NotImplementedError

    def _mutate_player(self, player: ActivePlayer) -> None:
        raise NotImplementedError

    def _update_player(self, player: ActivePlayer, player_info: Mapping[str, Any]) -> Any:
        raise NotImplementedError


@LEAGUE_REGISTRY.register("one_vs_one")
class OneVsOneLeague(BaseLeague):
    """A league of games of two."""

    config: ClassVar[dict[str, Any]] = {
        "league_type": "one_vs_one",
        "import_names": [],
        "active_players": {"naive_sp_player": 1},
        "naive_sp_player": {
            "one_phase_step": 10,
            "branch_probs": {"pfsp": 0.5, "sp": 0.5},
            "strong_win_rate": 0.7,
        },
        **_COMMON,
    }

    def _get_job_info(self, player: ActivePlayer, eval_flag: bool = False) -> dict[str, Any]:
        opponent = player.get_job(eval_flag)["opponent"]
        players: list[Player] = [player] if eval_flag else [player, opponent]
        job = {
            "agent_num": len(players),
            "launch_player": player.player_id,
            "player_id": [member.player_id for member in players],
            "checkpoint_path": [member.checkpoint_path for member in players],
            "player_active_flag": [isinstance(member, ActivePlayer) for member in players],
        }
        return {**job, "eval_opponent": opponent} if eval_flag else job

    def _mutate_player(self, player: ActivePlayer) -> None:
        """Players of this league never start again."""

    def _update_player(self, player: ActivePlayer, player_info: Mapping[str, Any]) -> bool:
        """Return whether the env's opponent is harder from now on."""
        if "train_iteration" in player_info:
            player.total_agent_step = player_info["train_iteration"]
            return False
        return bool(player_info.get("eval_win")) and player.increment_eval_difficulty()


def create_league(cfg: Mapping[str, Any], *args: Any) -> BaseLeague:
    """Return the league that ``cfg.league_type`` names, after importing ``cfg.import_names``.

    Raises:
        RegistryError: if no such league is registered.
    """
    import_modules(cfg.get("import_names", ()))
    league: BaseLeague = LEAGUE_REGISTRY.get(cfg["league_type"])(cfg, *args)
    return league
