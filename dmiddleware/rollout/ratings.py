"""How good players are: Elo ratings, and which opponents to play more often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dmiddleware.errors import ConfigError

__all__ = ["elo_change", "pfsp", "uniform"]

_SCORE: Final = {"wins": 1.0, "draws": 0.5, "losses": 0.0}


def elo_change(home: float, away: float, results: Sequence[str], *, k: float = 16.0) -> float:
    """Return how much the first player's rating changes after some games.

    Source: Elo, "The Rating of Chessplayers, Past and Present", 1978.

    Args:
        home: the first player's rating.
        away: the opponent's rating, which changes by the opposite amount.
        results: the first player's ``"wins"``, ``"draws"`` and ``"losses"``, one for each game.
        k: the most that one game changes.
    """
    before = home
    for result in results:
        expected = 1.0 / (1.0 + math.pow(10.0, (away - home) / 400.0))
        change = k * (_SCORE[result] - expected)
        home, away = home + change, away - change
    return home - before


def pfsp(win_rates: NDArray[np.float64], weighting: str) -> NDArray[np.float64]:
    """Return the chance of each opponent by prioritized fictitious self-play.

    Source: Vinyals et al., "Grandmaster level in StarCraft II using multi-agent reinforcement
    learning", 2019, methods.

    Args:
        win_rates: ``[N]``, against each opponent.
        weighting: ``squared``, ``(1 - rate)²``, or ``variance``, ``rate · (1 - rate)``.

    Raises:
        ConfigError: for another weighting, or without an opponent.
    """
    weights = {"squared": (1 - win_rates) ** 2, "variance": win_rates * (1 - win_rates)}
    if weighting not in weights or not len(win_rates):
        raise ConfigError(
            "pfsp needs win rates and the weighting squared or variance, got "
            f"{len(win_rates)} win rates and {weighting!r}"
        )
    total = weights[weighting].sum()
    if total < 1e-8 or win_rates.sum() < 1e-8:
        return uniform(win_rates)
    chances: NDArray[np.float64] = weights[weighting] / total
    return chances


def uniform(win_rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the same chance for each opponent."""
    return np.full_like(win_rates, 1.0 / len(win_rates))
