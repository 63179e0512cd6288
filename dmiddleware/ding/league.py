"""The face of ``ding.league``: players, ratings and leagues to derive from."""

from dmiddleware.worker import player_league
from dmiddleware.worker.player_league import *  # noqa: F403 (all of them)

__all__ = player_league.__all__
