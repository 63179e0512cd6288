"""Elo and TrueSkill ratings of two players."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dmiddleware.errors import ConfigError

__all__ = ["EloCalculator", "LeagueMetricEnv", "PlayerRating", "get_elo", "get_elo_array"]

_NORMAL: Final = NormalDist()
_SIGMA: Final = 25.0 / 3.0
_BETA: Final = _SIGMA / 2.0
_TAU: Final = _SIGMA / 100.0
_DRAW_MARGIN: Final = _NORMAL.inv_cdf(0.55) * math.sqrt(2.0) * _BETA
"""TrueSkill's defaults; a tenth of all games end in a draw."""


class EloCalculator:
    """Elo ratings, rounded to integers; 1 is a win of the first player, 0 a draw, -1 a defeat.

    Source: Elo, "The Rating of Chessplayers, Past and Present", 1978.
    """

    @staticmethod
    def get_new_rating(
        rating_a: float, rating_b: float, result: int, k_factor: int = 32, beta: int = 200
    ) -> tuple[int, int]:
        """Return the ratings of two players after a game."""
        expected = 1.0 / (1.0 + math.pow(10.0, (rating_b - rating_a) / (2.0 * beta)))
        change = k_factor * ((result + 1) / 2 - expected)
        return round(rating_a + change), round(rating_b - change)

    @staticmethod
    def get_new_rating_array(
        rating: NDArray[np.number],
        result: NDArray[np.number],
        game_count: NDArray[np.number],
        k_factor: int = 32,
        beta: int = 200,
    ) -> NDArray[np.int64]:
        """Return the ratings of N players after some games.

        Args:
            rating: ``[N]``.
            result: ``[N, N]``, the results of each pair.
            game_count: ``[N, N]``, how many games each pair has played.
            k_factor: the most that one game changes.
            beta: half the difference of ratings at which ten of eleven games are won.
        """
        behind = rating[None, :] - rating[:, None]
        expected = game_count / (1.0 + np.power(10.0, behind / (2.0 * beta)))
        change = ((result + 1.0) / 2.0 - expected) * (game_count > 0)
        ratings: NDArray[np.int64] = np.round(rating + k_factor * change.sum(axis=1)).astype(int)
        return ratings


get_elo = EloCalculator.get_new_rating
get_elo_array = EloCalculator.get_new_rating_array


@dataclasses.dataclass(frozen=True)
class PlayerRating:
    """A player's rating.

    Attributes:
        mu: the mean of the skill.
        sigma: its standard deviation.
        elo: the Elo rating.
    """

    mu: float = 25.0
    sigma: float = _SIGMA
    elo: int = 1200

    @property
    def exposure(self) -> float:
        """A skill that the player very probably has; it orders a table of ranks."""
        return self.mu - 3.0 * self.sigma


@dataclasses.dataclass(frozen=True)
class LeagueMetricEnv:
    """Rates games of two players by TrueSkill and Elo.

    As in DI-engine, ratings change by TrueSkill's own defaults, whatever ``beta``, ``tau`` and
    ``draw_probability`` say; ``mu``, ``sigma`` and ``elo_init`` are those of a new player.

    Source: Herbrich, Minka and Graepel, "TrueSkill: A Bayesian skill rating system", 2006.
    """

    mu: float = 25.0
    sigma: float = _SIGMA
    beta: float = _BETA
    tau: float = _TAU
    draw_probability: float = 0.1
    backend: str | None = None
    elo_init: int = dataclasses.field(default=1200, kw_only=True)

    def create_rating(
        self, mu: float | None = None, sigma: float | None = None, elo_init: int | None = None
    ) -> PlayerRating:
        """Return a new player's rating."""
        return PlayerRating(
            self.mu if mu is None else mu,
            self.sigma if sigma is None else sigma,
            self.elo_init if elo_init is None else elo_init,
        )

    def rate_1vs1(
        self,
        team1: PlayerRating,
        team2: PlayerRating,
        result: Sequence[str] | None = None,
        drawn: bool = False,
    ) -> tuple[PlayerRating, PlayerRating]:
        """Return both ratings after games; without ``result``, after a win of the first or a draw.

        Raises:
            ConfigError: for another result than ``wins``, ``draws`` and ``losses``.
        """
        for end in ["draws" if drawn else "wins"] if result is None else result:
            team1, team2 = _rated(team1, team2, end)
        return team1, team2

    def rate_1vsC(  # noqa: N802 (DI-engine's name)
        self, team1: PlayerRating, team2: PlayerRating, result: Sequence[str]
    ) -> PlayerRating:
        """Return the first rating after games against a player whose rating stays.

        Raises:
            ConfigError: for another result than ``wins``, ``draws`` and ``losses``.
        """
        for end in result:
            team1, _ = _rated(team1, team2, end)
        return team1


def _rated(home: PlayerRating, away: PlayerRating, end: str) -> tuple[PlayerRating, PlayerRating]:
    """Return both ratings after a game."""
    if end == "losses":
        winner, loser = _rated(away, home, "wins")
        return loser, winner
    if end not in ("wins", "draws"):
        raise ConfigError(f"the result of a game is wins, draws or losses, got {end!r}")
    variances = [rating.sigma**2 + _TAU**2 for rating in (home, away)]
    scale = math.sqrt(2 * _BETA**2 + sum(variances))
    shift, shrink = _corrections((home.mu - away.mu) / scale, _DRAW_MARGIN / scale, end)
    elos = get_elo(home.elo, away.elo, 1 if end == "wins" else 0)
    home, away = (
        PlayerRating(
            rating.mu + sign * variance / scale * shift,
            math.sqrt(variance * max(1.0 - variance / scale**2 * shrink, 1e-8)),
            elo,
        )
        for rating, variance, sign, elo in zip((home, away), variances, (1, -1), elos, strict=True)
    )
    return home, away


def _corrections(ahead: float, margin: float, end: str) -> tuple[float, float]:
    """Return the functions v and w of the paper, for a difference and a margin of draws."""
    if end == "wins":
        x = ahead - margin
        chance = _NORMAL.cdf(x)
        shift = _NORMAL.pdf(x) / chance if chance > 1e-300 else -x
        return shift, shift * (shift + x)
    low, high = -margin - ahead, margin - ahead
    chance = _NORMAL.cdf(high) - _NORMAL.cdf(low)
    if chance < 1e-300:
        return -ahead, 1.0
    shift = (_NORMAL.pdf(low) - _NORMAL.pdf(high)) / chance
    return shift, shift**2 + (high * _NORMAL.pdf(high) - low * _NORMAL.pdf(low)) / chance
