"""Acting in environments, in columns: collecting steps and episodes, and evaluating."""

from dmiddleware.rollout.collector import RolloutCollector
from dmiddleware.rollout.evaluation import evaluate_episodes
from dmiddleware.rollout.monitor import VectorEvalMonitor

__all__ = ["RolloutCollector", "evaluate_episodes", "VectorEvalMonitor"]
