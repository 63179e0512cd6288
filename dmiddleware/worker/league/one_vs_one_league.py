"""The league of players that one_vs_one trains."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from dmiddleware.classic.config import (
    Configurable,
    Option,
    Range,
    check_value,
    count,
    mapping,
    optional,
    switch,
    text,
    whole,
)
from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import ConfigError
from dmiddleware.worker.league.payoff import RESULTS, BattlePayoff, elo_change
from dmiddleware.worker.league.player import NaiveSpPlayer, Player, PlayerOptions

__all__ = ["OneVsOneLeague"]

_PLAYER_TYPE: Final = "naive_sp_player"
_SUFFIX: Final = ".safetensors"

_log = logging.getLogger(__name__)


class OneVsOneLeague(Configurable):
    """Chooses opponents for players that learn, and keeps snapshots of them as further opponents.

    An active player plays against itself, or against an earlier snapshot: the worse it does against
    one, the more often (prioritized fictitious self-play; Vinyals et al., "Grandmaster level in
    StarCraft II", 2019, with the weighting ``(1 - win rate)²``). It becomes a snapshot after two
    phases of learning, or after one if it beats all earlier ones.

    Args:
        cfg: what differs from ``default_config()``. A policy named ``x`` is the file
            ``<path_policy>/x.safetensors``, as a learner publishes it.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "player_category": Option(
            ["default"],
            Range("a list of names", lambda value: isinstance(value, list) and len(value) > 0),
            "categories; each has the active players",
        ),
        "active_players": {
            _PLAYER_TYPE: Option(1, count, "number of active players in each category"),
        },
        _PLAYER_TYPE: PlayerOptions.config,
        "use_pretrain": Option(False, switch, "whether active players start from a checkpoint"),
        "use_pretrain_init_historical": Option(
            False, switch, "whether the checkpoints are also opponents from the start"
        ),
        "pretrain_checkpoint_path": Option(
            {},
            mapping,
            "checkpoint of each category",
        ),
        "payoff": BattlePayoff.config,
        "path_policy": Option("./policy", text, "folder of the policies"),
        "seed": Option(None, optional(whole), "seed of the choice of opponents"),
    }
    config_open: ClassVar[tuple[str, ...]] = ("pretrain_checkpoint_path",)

    @classmethod
    def check_config(cls, cfg: Any) -> None:
        """Refuse a league in which nobody can be an opponent, or checkpoints are missing."""
        probs = cfg[_PLAYER_TYPE].branch_probs
        check_value(
            probs.pfsp + probs.sp > 0, f"{_PLAYER_TYPE}.branch_probs", dict(probs), "not all 0"
        )
        if cfg.use_pretrain or cfg.use_pretrain_init_historical:
            missing = [
                one for one in cfg.player_category if one not in cfg.pretrain_checkpoint_path
            ]
            check_value(
                not missing,
                "pretrain_checkpoint_path",
                dict(cfg.pretrain_checkpoint_path),
                f"a dictionary with a file for each category, also {', '.join(missing)}",
            )

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        self._cfg = self.merged_config(cfg)
        self._options = self._cfg[_PLAYER_TYPE]
        self._folder = Path(self._cfg.path_policy)
        self._random = random.Random(self._cfg.seed)
        self._payoff = BattlePayoff(
            {key: value for key, value in self._cfg.payoff.items() if key != "cfg_type"}
        )
        self._active: dict[str, NaiveSpPlayer] = {}
        self._historical: dict[str, Player] = {}
        for category in self._cfg.player_category:
            for number in range(int(self._cfg.active_players[_PLAYER_TYPE])):
                player_id = f"{_PLAYER_TYPE}_{category}_{number}"
                self._active[player_id] = NaiveSpPlayer(
                    player_id=player_id, category=category, checkpoint_path=f"{player_id}_ckpt"
                )
            if self._cfg.use_pretrain_init_historical:
                self._add_pretrained(category)

    @property
    def payoff(self) -> BattlePayoff:
        """The win rates."""
        return self._payoff

    @property
    def active_players(self) -> list[NaiveSpPlayer]:
        """The players that learn."""
        return list(self._active.values())

    @property
    def historical_players(self) -> list[Player]:
        """The snapshots, oldest first."""
        return list(self._historical.values())

    def pretrain_checkpoint(self, player_id: str) -> str | None:
        """Return the learner's checkpoint from which a player starts; None: from scratch."""
        if not self._cfg.use_pretrain:
            return None
        path: str = self._cfg.pretrain_checkpoint_path[self._player(player_id).category]
        return path

    def set_checkpoint(self, player_id: str, checkpoint_path: str) -> None:
        """Set the name under which an active player's learner publishes its policy."""
        self._player(player_id).checkpoint_path = checkpoint_path

    def get_job_info(self, player_id: str, eval_flag: bool = False) -> dict[str, Any]:
        """Return who plays.

        Args:
            player_id: an active player.
            eval_flag: whether to play against the opponent that the env has.

        Returns:
            ``player_id``, ``checkpoint_path`` and ``player_active_flag``, lists with one entry for
            each player, ``launch_player``, ``agent_num``, and ``eval_opponent`` when evaluating.

        Raises:
            ConfigError: for an unknown player.
        """
        player = self._player(player_id)
        players: list[Player] = [player]
        if not eval_flag:
            players.append(self._opponent(player))
        job = {
            "agent_num": len(players),
            "launch_player": player_id,
            "player_id": [one.player_id for one in players],
            "checkpoint_path": [one.checkpoint_path for one in players],
            "player_active_flag": [one.player_id in self._active for one in players],
        }
        if eval_flag:
            job["eval_opponent"] = self._options.eval_opponent_difficulty[
                player.eval_opponent_index
            ]
        return job

    def judge_snapshot(self, player_id: str, force: bool = False) -> bool:
        """Keep a copy of a player's policy as an opponent, if it has been trained enough.

        Args:
            player_id: an active player.
            force: do it in any case.

        Returns:
            Whether there is a new snapshot. There is none while the player's policy has not been
            published.

        Raises:
            ConfigError: for an unknown player.
            CheckpointDamaged: if the player's file is not a policy.
            OSError: if the copy cannot be written.
        """
        player = self._player(player_id)
        if not force and not self._is_trained_enough(player):
            return False
        source = self._file(player.checkpoint_path)
        if not source.exists():
            _log.warning("no snapshot of %s: %s does not exist yet", player_id, source)
            return False
        name = f"{player.checkpoint_path}_{player.total_agent_step}"
        save_checkpoint(self._file(name), load_checkpoint(source))
        snapshot = Player(
            player_id=f"{player_id}_{len(self._historical)}_historical",
            category=player.category,
            checkpoint_path=name,
            rating=player.rating,
            parent_id=player_id,
        )
        self._historical[snapshot.player_id] = snapshot
        player.last_enough_step = player.total_agent_step
        return True

    def update_active_player(self, info: Mapping[str, Any]) -> bool:
        """Take a player's progress.

        Args:
            info: ``player_id``, and ``train_iteration`` (learner iterations so far) or
                ``eval_win`` (whether it has won an evaluation).

        Returns:
            Whether it will be evaluated against a harder opponent from now on.

        Raises:
            ConfigError: for an unknown player.
        """
        player = self._player(info["player_id"])
        if "train_iteration" in info:
            player.total_agent_step = int(info["train_iteration"])
            # A learner that starts again counts from 0.
            player.last_enough_step = min(player.last_enough_step, player.total_agent_step)
        if info.get("eval_win") and not self.is_hardest(player.player_id):
            player.eval_opponent_index += 1
            return True
        return False

    def is_hardest(self, player_id: str) -> bool:
        """Return whether a player is evaluated against the hardest opponent."""
        difficulties = self._options.eval_opponent_difficulty
        return self._player(player_id).eval_opponent_index == len(difficulties) - 1

    def finish_job(self, info: Mapping[str, Any]) -> None:
        """Count the games of a job, and update the ratings.

        Args:
            info: ``player_id``, a list of two, and ``result``: for each env, the list of the first
                player's ``"wins"``, ``"draws"`` and ``"losses"``.

        Raises:
            ConfigError: for an unknown result; nothing is counted.
        """
        home, away = info["player_id"]
        results = [result for env in info["result"] for result in env]
        for result in results:
            if result not in RESULTS:
                raise ConfigError(
                    f"the result of a game must be one of {', '.join(RESULTS)}, got {result!r}"
                )
        for result in results:
            self._payoff.add(home, away, result)
        players: dict[str, Player] = {**self._active, **self._historical}
        if home != away and home in players and away in players:
            one, other = players[home], players[away]
            change = elo_change(one.rating, other.rating, results)
            one.rating, other.rating = one.rating + change, other.rating - change

    def player_rank(self) -> dict[str, float]:
        """Return the Elo ratings of all players by id, best first."""
        players = [*self._active.values(), *self._historical.values()]
        ordered = sorted(players, key=lambda player: -player.rating)
        return {player.player_id: player.rating for player in ordered}

    def state_dict(self) -> dict[str, Any]:
        """Return players, pay-off and random generator, as plain values."""
        version, numbers, gauss = self._random.getstate()
        return {
            "active": [dataclasses.asdict(player) for player in self._active.values()],
            "historical": [dataclasses.asdict(player) for player in self._historical.values()],
            "payoff": self._payoff.state_dict(),
            "random": [version, list(numbers), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        active = [NaiveSpPlayer(**player) for player in state["active"]]
        historical = [Player(**player) for player in state["historical"]]
        self._active = {player.player_id: player for player in active}
        self._historical = {player.player_id: player for player in historical}
        self._payoff.load_state_dict(state["payoff"])
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))

    def _player(self, player_id: str) -> NaiveSpPlayer:
        if player_id not in self._active:
            raise ConfigError(
                f"the league has no active player {player_id!r}; it has {', '.join(self._active)}"
            )
        return self._active[player_id]

    def _opponent(self, player: NaiveSpPlayer) -> Player:
        """Draw an opponent: the player itself, or an earlier snapshot."""
        probs = self._options.branch_probs
        snapshots = self.historical_players
        (branch,) = self._random.choices(("pfsp", "sp"), (probs.pfsp, probs.sp))
        if branch == "sp" or not snapshots:
            return player
        losses = [1 - self._payoff.win_rate(player.player_id, one.player_id) for one in snapshots]
        weights = [loss**2 for loss in losses] if any(losses) else None
        return self._random.choices(snapshots, weights)[0]

    def _is_trained_enough(self, player: NaiveSpPlayer) -> bool:
        passed = player.total_agent_step - player.last_enough_step
        if passed < self._options.one_phase_step:
            return False
        if passed >= 2 * self._options.one_phase_step:
            return True
        rates = [
            self._payoff.win_rate(player.player_id, one.player_id)
            for one in self._historical.values()
            if one.parent_id == player.player_id
        ]
        return bool(rates) and min(rates) > self._options.strong_win_rate

    def _add_pretrained(self, category: str) -> None:
        """Publish a learner's checkpoint as the policy of an opponent."""
        player_id = f"{category}_pretrained_historical"
        acting = {
            key: value
            for key, value in load_checkpoint(self._cfg.pretrain_checkpoint_path[category]).items()
            if key in ("model", "acting")
        }
        save_checkpoint(self._file(player_id), {"version": 0, "state": {**acting, "iter": 0}})
        self._historical[player_id] = Player(
            player_id=player_id, category=category, checkpoint_path=player_id
        )

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"
