"""Serial evaluators: measure how good a policy is."""

from dmiddleware.rollout.evaluation import VectorEvalMonitor
from dmiddleware.worker.evaluator.battle_evaluator import BattleInteractionSerialEvaluator
from dmiddleware.worker.evaluator.interaction_evaluator import InteractionSerialEvaluator
from dmiddleware.worker.evaluator.metric_evaluator import IMetric, MetricSerialEvaluator
from dmiddleware.worker.evaluator.serial_evaluator import (
    SERIAL_EVALUATOR_REGISTRY,
    ISerialEvaluator,
    create_serial_evaluator,
    get_serial_evaluator_cls,
)

__all__ = [
    "VectorEvalMonitor",
    "ISerialEvaluator",
    "InteractionSerialEvaluator",
    "BattleInteractionSerialEvaluator",
    "MetricSerialEvaluator",
    "IMetric",
    "SERIAL_EVALUATOR_REGISTRY",
    "create_serial_evaluator",
    "get_serial_evaluator_cls",
]
