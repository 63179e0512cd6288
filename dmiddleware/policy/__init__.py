"""Policies: how to act, what to store, how to learn."""

from dmiddleware.policy.a2c import A2CPolicy
from dmiddleware.policy.base.action_codec import ActionCodec
from dmiddleware.policy.base.actions import ActorPolicy, CodecPolicy
from dmiddleware.policy.base.actor_critic import ActorCriticPolicy, PolicyGradientPolicy
from dmiddleware.policy.base.advantage import AdvantagePolicy
from dmiddleware.policy.base.agent_store import next_run_stamp
from dmiddleware.policy.base.agents import AgentsPolicy
from dmiddleware.policy.base.as_modes import (
    as_collect_mode,
    as_command_mode,
    as_eval_mode,
    as_learn_mode,
)
from dmiddleware.policy.base.batched_policy import BatchedPolicy
from dmiddleware.policy.base.collate import collate
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.data_parallel import (
    data_parallel,
    gather_from_ranks,
    rank_and_world_size,
    sum_over_ranks,
)
from dmiddleware.policy.base.modes import CollectMode, CommandMode, EvalMode, HasModes, LearnMode
from dmiddleware.policy.base.obs_norm import ObsNormPolicy
from dmiddleware.policy.base.parts import Part, TargetRule, adam, adamw, rmsprop, torch_optimizer
from dmiddleware.policy.base.parts_policy import PartsPolicy, UpdateOutput
from dmiddleware.policy.base.policy import Policy
from dmiddleware.policy.base.recurrent import RecurrentPolicy
from dmiddleware.policy.base.td_policy import TDPolicy
from dmiddleware.policy.base.updates import is_update, priorities_of_rows, update_outputs
from dmiddleware.policy.bc import BCPolicy
from dmiddleware.policy.cql import CQLPolicy
from dmiddleware.policy.ddpg import DDPGPolicy, TD3Policy
from dmiddleware.policy.decision_transformer import DecisionTransformerPolicy
from dmiddleware.policy.discrete_sac import DiscreteSACPolicy
from dmiddleware.policy.distributional_dqn import C51Policy, QRDQNPolicy
from dmiddleware.policy.dqn import DQNPolicy
from dmiddleware.policy.impala import IMPALAPolicy
from dmiddleware.policy.iql import IQLPolicy
from dmiddleware.policy.iqn import IQNPolicy
from dmiddleware.policy.mappo import IPPOPolicy, MAPPOPolicy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY, create_policy, get_policy_cls
from dmiddleware.policy.ppo import PPOPolicy
from dmiddleware.policy.qmix import QMIXPolicy, VDNPolicy
from dmiddleware.policy.r2d2 import R2D2Policy
from dmiddleware.policy.rainbow import RainbowPolicy
from dmiddleware.policy.recurrent_ppo import RecurrentPPOPolicy
from dmiddleware.policy.sac import SACPolicy
from dmiddleware.policy.td3_bc import TD3BCPolicy
from dmiddleware.policy.tqc import TQCPolicy

__all__ = [
    "Policy",
    "BatchedPolicy",
    "PartsPolicy",
    "Part",
    "TargetRule",
    "adam",
    "adamw",
    "rmsprop",
    "torch_optimizer",
    "UpdateOutput",
    "TDPolicy",
    "CommandModePolicy",
    "LearnMode",
    "CollectMode",
    "EvalMode",
    "CommandMode",
    "HasModes",
    "as_learn_mode",
    "as_collect_mode",
    "as_eval_mode",
    "as_command_mode",
    "update_outputs",
    "is_update",
    "priorities_of_rows",
    "POLICY_REGISTRY",
    "create_policy",
    "get_policy_cls",
    "DQNPolicy",
    "C51Policy",
    "QRDQNPolicy",
    "IQNPolicy",
    "RainbowPolicy",
    "R2D2Policy",
    "PPOPolicy",
    "RecurrentPPOPolicy",
    "A2CPolicy",
    "IMPALAPolicy",
    "SACPolicy",
    "DiscreteSACPolicy",
    "DDPGPolicy",
    "TD3Policy",
    "TQCPolicy",
    "BCPolicy",
    "TD3BCPolicy",
    "CQLPolicy",
    "IQLPolicy",
    "DecisionTransformerPolicy",
    "VDNPolicy",
    "QMIXPolicy",
    "IPPOPolicy",
    "MAPPOPolicy",
    "ActorPolicy",
    "ActorCriticPolicy",
    "AdvantagePolicy",
    "PolicyGradientPolicy",
    "AgentsPolicy",
    "CodecPolicy",
    "ObsNormPolicy",
    "RecurrentPolicy",
    "ActionCodec",
    "collate",
    "data_parallel",
    "rank_and_world_size",
    "sum_over_ranks",
    "gather_from_ranks",
    "next_run_stamp",
]
