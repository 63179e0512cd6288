"""Policies: how to act, and how to learn."""

from dmiddleware.policy.a2c import A2CPolicy
from dmiddleware.policy.actions import ACTION_OPTIONS, ActionCodec, mask_of
from dmiddleware.policy.actor_critic import ActorCriticPolicy
from dmiddleware.policy.advantage import AdvantagePolicy
from dmiddleware.policy.bc import BCPolicy
from dmiddleware.policy.component import (
    Component,
    TargetRule,
    adam,
    adamw,
    rmsprop,
    torch_optimizer,
)
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
from dmiddleware.policy.modes import (
    CollectMode,
    EvalMode,
    HasModes,
    LearnMode,
    PolicySpec,
    as_collect_mode,
    as_eval_mode,
    as_learn_mode,
)
from dmiddleware.policy.obs_norm import OBS_NORM_OPTIONS, ObsNorm
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY, create_policy, get_policy_cls
from dmiddleware.policy.ppo import PPOPolicy
from dmiddleware.policy.q_learning import QLearningPolicy
from dmiddleware.policy.qmix import QMIXPolicy, VDNPolicy
from dmiddleware.policy.r2d2 import R2D2Policy
from dmiddleware.policy.rainbow import RainbowPolicy
from dmiddleware.policy.recurrent import Memory
from dmiddleware.policy.recurrent_ppo import RecurrentPPOPolicy
from dmiddleware.policy.sac import SACPolicy
from dmiddleware.policy.td import TDPolicy
from dmiddleware.policy.td3_bc import TD3BCPolicy
from dmiddleware.policy.tqc import TQCPolicy
from dmiddleware.policy.update import (
    UpdateOutput,
    is_update,
    priorities_of_rows,
    update_outputs,
)

__all__ = [
    "Policy",
    "Component",
    "TargetRule",
    "adam",
    "adamw",
    "rmsprop",
    "torch_optimizer",
    "UpdateOutput",
    "TDPolicy",
    "QLearningPolicy",
    "ActorCriticPolicy",
    "AdvantagePolicy",
    "ActionCodec",
    "ACTION_OPTIONS",
    "mask_of",
    "ObsNorm",
    "OBS_NORM_OPTIONS",
    "Memory",
    "LearnMode",
    "CollectMode",
    "EvalMode",
    "HasModes",
    "PolicySpec",
    "as_learn_mode",
    "as_collect_mode",
    "as_eval_mode",
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
]
