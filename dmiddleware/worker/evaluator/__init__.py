"""Evaluators: how good is the policy?"""

from dmiddleware.rollout.monitor import VectorEvalMonitor
from dmiddleware.worker.evaluator.base import (
    SERIAL_EVALUATOR_REGISTRY,
    ISerialEvaluator,
    create_serial_evaluator,
    get_serial_evaluator_cls,
)
from dmiddleware.worker.evaluator.interaction import InteractionSerialEvaluator
from dmiddleware.worker.evaluator.pictures import add_video

__all__ = [
    "add_video",
    "VectorEvalMonitor",
    "ISerialEvaluator",
    "InteractionSerialEvaluator",
    "SERIAL_EVALUATOR_REGISTRY",
    "create_serial_evaluator",
    "get_serial_evaluator_cls",
]
