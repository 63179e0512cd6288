"""Leagues to derive from: players with branches of opponents, ratings, and shared win rates.

The commander ``one_vs_one`` has a league of its own, :class:`dmiddleware.worker.OneVsOneLeague`,
which saves and continues its state.
"""

from dmiddleware.worker.player_league.base_league import (
    LEAGUE_REGISTRY,
    BaseLeague,
    OneVsOneLeague,
    create_league,
)
from dmiddleware.worker.player_league.players import (
    PLAYER_REGISTRY,
    ActivePlayer,
    HistoricalPlayer,
    LeagueExploiter,
    MainExploiter,
    MainPlayer,
    NaiveSpPlayer,
    Player,
    create_player,
    pfsp,
    uniform,
)
from dmiddleware.worker.player_league.ratings import (
    EloCalculator,
    LeagueMetricEnv,
    PlayerRating,
    get_elo,
    get_elo_array,
)
from dmiddleware.worker.player_league.shared_payoff import (
    BattleRecordDict,
    BattleSharedPayoff,
    create_payoff,
)

__all__ = [
    "BaseLeague",
    "OneVsOneLeague",
    "create_league",
    "LEAGUE_REGISTRY",
    "Player",
    "ActivePlayer",
    "HistoricalPlayer",
    "NaiveSpPlayer",
    "MainPlayer",
    "MainExploiter",
    "LeagueExploiter",
    "create_player",
    "PLAYER_REGISTRY",
    "pfsp",
    "uniform",
    "LeagueMetricEnv",
    "PlayerRating",
    "EloCalculator",
    "get_elo",
    "get_elo_array",
    "BattleSharedPayoff",
    "BattleRecordDict",
    "create_payoff",
]
