"""Acting in environments, in columns: collecting steps and episodes, and evaluating."""

from dmiddleware.rollout.acting_policy import ActingPolicy
from dmiddleware.rollout.collector import RolloutCollector
from dmiddleware.rollout.evaluation import VectorEvalMonitor, evaluate_episodes
from dmiddleware.rollout.game import Game, GameSettings, TeamEnvs, make_game
from dmiddleware.rollout.opponents import OpponentPool
from dmiddleware.rollout.seats import Frozen, Player, against
from dmiddleware.rollout.team_rollout import TeamRollout
from dmiddleware.rollout.video import record_video, write_video

__all__ = [
    "ActingPolicy",
    "RolloutCollector",
    "evaluate_episodes",
    "VectorEvalMonitor",
    "OpponentPool",
    "make_game",
    "Game",
    "GameSettings",
    "TeamEnvs",
    "TeamRollout",
    "Frozen",
    "Player",
    "against",
    "record_video",
    "write_video",
]
