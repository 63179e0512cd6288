"""The league of players that the one_vs_one commander trains."""

from dmiddleware.worker.league.one_vs_one_league import OneVsOneLeague
from dmiddleware.worker.league.payoff import BattlePayoff, elo_change
from dmiddleware.worker.league.player import NaiveSpPlayer, Player

__all__ = ["OneVsOneLeague", "BattlePayoff", "NaiveSpPlayer", "Player", "elo_change"]
