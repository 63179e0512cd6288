"""Win rates that all players of a league share."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dmiddleware.errors import RegistryError

if TYPE_CHECKING:
    from dmiddleware.worker.player_league.players import Player

__all__ = ["BattleRecordDict", "BattleSharedPayoff", "create_payoff"]

_MIRRORED: Final = {"wins": "losses", "draws": "draws", "losses": "wins"}

_log = logging.getLogger(__name__)


class BattleRecordDict(dict[str, float]):
    """The decayed numbers of wins, draws, losses and games of a pair."""

    data_keys: ClassVar = ["wins", "draws", "losses", "games"]

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(self.data_keys, 0))

    def __mul__(self, decay: float) -> BattleRecordDict:
        record = BattleRecordDict()
        record.update({key: value * decay for key, value in self.items()})
        return record


class BattleSharedPayoff:
    """Counts the games of each pair of players; all players of a league share it.

    Args:
        cfg: ``decay``, and ``min_win_rate_games`` (8), the games below which a win rate is 0.5.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._players: list[Player] = []
        self._data: defaultdict[str, BattleRecordDict] = defaultdict(BattleRecordDict)
        self._decay = cfg["decay"]
        self._min_win_rate_games = cfg.get("min_win_rate_games", 8)

    def __repr__(self) -> str:
        rows = [
            "| Home Player | Away Player | Wins | Draws | Losses | Win Rate |",
            "|" + "---|" * 6,
        ]
        for key, record in sorted(self._data.items()):
            home, away = key.split("-")
            rate = self._win_rate(home, away)
            counts = " | ".join(f"{record[name]:.2f}" for name in BattleRecordDict.data_keys[:3])
            rows.append(f"| {home} | {away} | {counts} | {rate:.2f} |")
        return "\n".join(rows)

    def __getitem__(self, players: tuple[Any, Any]) -> NDArray[np.float64]:
        """Return the win rates of home players against away players, each one or a list.

        Returns:
            ``[H, A]``, or ``[H]`` or ``[A]`` if the other side is one player.
        """
        homes, visitors = ([side] if not isinstance(side, list) else side for side in players)
        rates = np.array(
            [[self._win_rate(h.player_id, a.player_id) for a in visitors] for h in homes]
        )
        return rates.reshape(-1) if 1 in (len(homes), len(visitors)) else rates

    @property
    def players(self) -> list[Player]:
        """All players."""
        return self._players

    def add_player(self, player: Player) -> None:
        """Add a player."""
        self._players.append(player)

    def update(self, job_info: Mapping[str, Any]) -> bool:
        """Count the games of a job.

        Args:
            job_info: ``player_id``, a pair, and ``result``: lists of the first player's ``wins``,
                ``draws`` and ``losses``, for each episode or in one list.

        Returns:
            False, with a line in the log, if a player or a result is unknown.
        """
        home, away = job_info["player_id"]
        result: Sequence[Any] = job_info["result"]
        ends = [end for row in result for end in ([row] if isinstance(row, str) else row)]
        ids = {player.player_id for player in self._players}
        if not {home, away} <= ids or not set(ends) <= set(_MIRRORED):
            _log.error("the games of %s and %s are not counted: %s", home, away, job_info)
            return False
        key, is_reversed = self.get_key(home, away)
        for end in ["draws"] if home == away else ends:
            if home != away:
                self._data[key] = self._data[key] * self._decay
            self._data[key]["games"] += 1
            self._data[key][_MIRRORED[end] if is_reversed else end] += 1
        return True

    def get_key(self, home: str, away: str) -> tuple[str, bool]:
        """Return the key of a pair, and whether it has the second player first."""
        return "-".join(sorted((home, away))), home > away

    def _win_rate(self, home: str, away: str) -> float:
        key, is_reversed = self.get_key(home, away)
        record = self._data[key]
        if not record["games"] or record["games"] < self._min_win_rate_games:
            return 0.5
        wins = record["losses" if is_reversed else "wins"]
        return (wins + record["draws"] / 2) / record["games"]


def create_payoff(cfg: Mapping[str, Any]) -> BattleSharedPayoff:
    """Return the pay-off that ``cfg.type`` names.

    Raises:
        RegistryError: for another type than ``battle``.
    """
    if cfg["type"] != "battle":
        raise RegistryError(f"no pay-off is registered as {cfg['type']!r}; the only one is battle")
    return BattleSharedPayoff(cfg)
