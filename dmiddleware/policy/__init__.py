"""Policies: how to act, what to store, how to learn."""

from dmiddleware.policy.actor import ActorPolicy
from dmiddleware.policy.base import Policy
from dmiddleware.policy.bc import BCPolicy
from dmiddleware.policy.command import CommandModePolicy
from dmiddleware.policy.dqn import DQNPolicy
from dmiddleware.policy.modes import CollectMode, CommandMode, EvalMode, LearnMode
from dmiddleware.policy.parallel import data_parallel
from dmiddleware.policy.ppo import PPOPolicy
from dmiddleware.policy.registry import POLICY_REGISTRY, create_policy, get_policy_cls
from dmiddleware.policy.styles import collate

__all__ = [
    "Policy",
    "CommandModePolicy",
    "LearnMode",
    "CollectMode",
    "EvalMode",
    "CommandMode",
    "POLICY_REGISTRY",
    "create_policy",
    "get_policy_cls",
    "DQNPolicy",
    "PPOPolicy",
    "BCPolicy",
    "ActorPolicy",
    "collate",
    "data_parallel",
]
