"""Acting in environments, in columns: collecting steps and episodes, and evaluating."""

from dmiddleware.rollout.acting_policy import ActingPolicy
from dmiddleware.rollout.collector import RolloutCollector
from dmiddleware.rollout.evaluation import VectorEvalMonitor, evaluate_episodes
from dmiddleware.rollout.opponents import OpponentPool
from dmiddleware.rollout.video import record_video, write_video

__all__ = [
    "ActingPolicy",
    "RolloutCollector",
    "evaluate_episodes",
    "VectorEvalMonitor",
    "OpponentPool",
    "record_video",
    "write_video",
]
