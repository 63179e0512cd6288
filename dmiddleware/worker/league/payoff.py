"""Win rates and ratings of the players of a league."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from dmiddleware.classic.config import Configurable, Option, at_least, fraction, one_of
from dmiddleware.rollout.ratings import elo_change

__all__ = ["BattlePayoff", "elo_change"]

RESULTS: Final = ("wins", "draws", "losses")
_MIRRORED: Final = {"wins": "losses", "draws": "draws", "losses": "wins"}


class BattlePayoff(Configurable):
    """Counts wins, draws and losses of each pair of players; older games count less.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "type": Option("battle", one_of("battle"), "kind of pay-off"),
        "decay": Option(0.99, fraction, "factor on all earlier games of a pair, with each game"),
        "min_win_rate_games": Option(
            8, at_least(0), "(decayed) games below which the win rate is 0.5"
        ),
    }

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        self._cfg = self.merged_config(cfg)
        self._records: dict[str, dict[str, dict[str, float]]] = {}

    def add(self, home: str, away: str, result: str) -> None:
        """Count a game; a player's games against itself count nothing.

        Args:
            home: a player's id.
            away: the opponent's id.
            result: ``"wins"``, ``"draws"`` or ``"losses"`` of the first player.
        """
        if home == away:
            return
        for one, other, end in ((home, away, result), (away, home, _MIRRORED[result])):
            record = self._records.setdefault(one, {}).setdefault(
                other, dict.fromkeys((*RESULTS, "games"), 0.0)
            )
            for key in record:
                record[key] *= self._cfg.decay
            record[end] += 1.0
            record["games"] += 1.0

    def record(self, home: str, away: str) -> dict[str, float]:
        """Return the decayed counts ``wins``, ``draws``, ``losses`` and ``games`` of a pair."""
        none = dict.fromkeys((*RESULTS, "games"), 0.0)
        return dict(self._records.get(home, {}).get(away, none))

    def win_rate(self, home: str, away: str) -> float:
        """Return the first player's share of wins, in ``[0, 1]``; draws count half."""
        record = self.record(home, away)
        if not record["games"] or record["games"] < self._cfg.min_win_rate_games:
            return 0.5
        return (record["wins"] + record["draws"] / 2) / record["games"]

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, as plain values."""
        return {
            home: {away: dict(record) for away, record in row.items()}
            for home, row in self._records.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._records = {
            home: {away: dict(record) for away, record in row.items()}
            for home, row in state.items()
        }
