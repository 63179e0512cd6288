"""The interface of DI-engine's older pipeline, written on the core.

Nothing in the core imports this package.
"""

from dmiddleware.classic.collate import collate
from dmiddleware.classic.deque_replay import DequeReplay
from dmiddleware.classic.modes import (
    CollectMode,
    CommandMode,
    EvalMode,
    LearnMode,
    as_collect_mode,
    as_command_mode,
    as_eval_mode,
    as_learn_mode,
)
from dmiddleware.classic.policy import CommandModePolicy, Policy
from dmiddleware.classic.stock import StockPolicy, create_policy, get_policy_cls

__all__ = [
    "CollectMode",
    "CommandMode",
    "CommandModePolicy",
    "DequeReplay",
    "EvalMode",
    "LearnMode",
    "Policy",
    "StockPolicy",
    "as_collect_mode",
    "as_command_mode",
    "as_eval_mode",
    "as_learn_mode",
    "collate",
    "create_policy",
    "get_policy_cls",
]
