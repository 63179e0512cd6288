"""Policies: how to act, and how to learn."""

from dmiddleware.policy.a2c import A2CPolicy, A2CSettings
from dmiddleware.policy.action_codec import ActionCodec, ActorSettings, mask_of
from dmiddleware.policy.actor_critic import (
    ActorCriticPolicy,
    ActorCriticSettings,
    PolicyGradientSettings,
)
from dmiddleware.policy.advantage import AdvantagePolicy, AdvantageSettings
from dmiddleware.policy.bc import BCPolicy, BCSettings
from dmiddleware.policy.bcq import BCQPolicy, BCQSettings
from dmiddleware.policy.component import (
    Component,
    TargetRule,
    adam,
    adamw,
    rmsprop,
    torch_optimizer,
)
from dmiddleware.policy.cql import CQLPolicy, CQLSettings
from dmiddleware.policy.crossq import CrossQPolicy, CrossQSettings
from dmiddleware.policy.d4pg import D4PGPolicy, D4PGSettings
from dmiddleware.policy.ddpg import DDPGPolicy, DDPGSettings, TD3Policy, TD3Settings
from dmiddleware.policy.decision_transformer import (
    DecisionTransformerPolicy,
    DecisionTransformerSettings,
)
from dmiddleware.policy.discrete_cql import DiscreteCQLPolicy, DiscreteCQLSettings
from dmiddleware.policy.discrete_sac import DiscreteSACPolicy, DiscreteSACSettings
from dmiddleware.policy.distributional_dqn import C51Policy, C51Settings, QRDQNPolicy, QRDQNSettings
from dmiddleware.policy.dqfd import DQfDPolicy, DQfDSettings
from dmiddleware.policy.dqn import DQNPolicy, DQNSettings
from dmiddleware.policy.edac import EDACPolicy, EDACSettings
from dmiddleware.policy.fasttd3 import FastTD3Policy, FastTD3Settings
from dmiddleware.policy.fqf import FQFPolicy, FQFSettings
from dmiddleware.policy.impala import IMPALAPolicy, IMPALASettings
from dmiddleware.policy.iql import IQLPolicy, IQLSettings
from dmiddleware.policy.iqn import IQNPolicy, IQNSettings
from dmiddleware.policy.mappo import (
    IPPOPolicy,
    MAPPOPolicy,
    MAPPOSettings,
    RecurrentIPPOPolicy,
    RecurrentMAPPOPolicy,
    RecurrentMAPPOSettings,
)
from dmiddleware.policy.mdqn import MDQNPolicy, MDQNSettings
from dmiddleware.policy.modes import (
    AnyMode,
    CollectMode,
    EvalMode,
    HasModes,
    LearnMode,
    PolicySpec,
    as_collect_mode,
    as_eval_mode,
    as_learn_mode,
    spec_of,
)
from dmiddleware.policy.obs_groups import ActorGroup, ObsGroups, ObsGroupSettings
from dmiddleware.policy.obs_norm import DatasetNormSettings, ObsNorm, ObsNormSettings
from dmiddleware.policy.off_policy_ppg import OffPolicyPPGPolicy, OffPolicyPPGSettings
from dmiddleware.policy.off_policy_ppo import OffPolicyPPOPolicy, OffPolicyPPOSettings
from dmiddleware.policy.pdqn import PDQNPolicy, PDQNSettings
from dmiddleware.policy.pg import PGPolicy, PGSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY, create_policy, get_policy_cls
from dmiddleware.policy.policy_settings import DiscountedSettings, PolicySettings
from dmiddleware.policy.ppg import PPGPolicy, PPGSettings
from dmiddleware.policy.ppo import PPOPolicy, PPOSettings
from dmiddleware.policy.pqn import PQNPolicy, PQNSettings
from dmiddleware.policy.q_learning import QLearningPolicy, QLearningSettings
from dmiddleware.policy.qmix import QMIXPolicy, QMIXSettings, VDNPolicy, VDNSettings
from dmiddleware.policy.r2d2 import R2D2Policy, R2D2Settings
from dmiddleware.policy.rainbow import RainbowPolicy, RainbowSettings
from dmiddleware.policy.recurrent import Memory
from dmiddleware.policy.recurrent_actor_q import (
    RecurrentSACPolicy,
    RecurrentSACSettings,
    RecurrentTD3Policy,
    RecurrentTD3Settings,
)
from dmiddleware.policy.recurrent_ppo import RecurrentPPOPolicy, RecurrentPPOSettings
from dmiddleware.policy.recurrent_qmix import RecurrentQMIXPolicy, RecurrentQMIXSettings
from dmiddleware.policy.sac import SACPolicy, SACSettings
from dmiddleware.policy.sql import SQLPolicy, SQLSettings
from dmiddleware.policy.td import TDPolicy, TDSettings
from dmiddleware.policy.td3_bc import TD3BCPolicy, TD3BCSettings
from dmiddleware.policy.tqc import TQCPolicy, TQCSettings
from dmiddleware.policy.update import (
    UpdateOutput,
    is_update,
    late_stops,
    may_be_update,
    priorities_of_rows,
    update_outputs,
)
from dmiddleware.policy.wqmix import WQMIXPolicy, WQMIXSettings

__all__ = [
    "Policy",
    "PolicySettings",
    "DiscountedSettings",
    "TDSettings",
    "QLearningSettings",
    "ActorSettings",
    "ActorCriticSettings",
    "PolicyGradientSettings",
    "AdvantageSettings",
    "ObsNormSettings",
    "ObsGroupSettings",
    "ObsGroups",
    "ActorGroup",
    "DatasetNormSettings",
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
    "mask_of",
    "ObsNorm",
    "Memory",
    "LearnMode",
    "CollectMode",
    "EvalMode",
    "HasModes",
    "PolicySpec",
    "as_learn_mode",
    "spec_of",
    "AnyMode",
    "as_collect_mode",
    "as_eval_mode",
    "update_outputs",
    "is_update",
    "late_stops",
    "may_be_update",
    "priorities_of_rows",
    "POLICY_REGISTRY",
    "create_policy",
    "get_policy_cls",
    "DQNPolicy",
    "DQNSettings",
    "DQfDPolicy",
    "DQfDSettings",
    "MDQNPolicy",
    "MDQNSettings",
    "SQLPolicy",
    "SQLSettings",
    "C51Policy",
    "C51Settings",
    "QRDQNPolicy",
    "QRDQNSettings",
    "IQNPolicy",
    "IQNSettings",
    "FQFPolicy",
    "FQFSettings",
    "RainbowPolicy",
    "RainbowSettings",
    "R2D2Policy",
    "R2D2Settings",
    "PQNPolicy",
    "PQNSettings",
    "PPOPolicy",
    "PPOSettings",
    "OffPolicyPPOPolicy",
    "OffPolicyPPOSettings",
    "RecurrentPPOPolicy",
    "RecurrentPPOSettings",
    "PPGPolicy",
    "PPGSettings",
    "OffPolicyPPGPolicy",
    "OffPolicyPPGSettings",
    "PGPolicy",
    "PGSettings",
    "A2CPolicy",
    "A2CSettings",
    "IMPALAPolicy",
    "IMPALASettings",
    "SACPolicy",
    "SACSettings",
    "DiscreteSACPolicy",
    "DiscreteSACSettings",
    "DDPGPolicy",
    "DDPGSettings",
    "D4PGPolicy",
    "D4PGSettings",
    "TD3Policy",
    "TD3Settings",
    "PDQNPolicy",
    "PDQNSettings",
    "TQCPolicy",
    "TQCSettings",
    "CrossQPolicy",
    "CrossQSettings",
    "RecurrentSACPolicy",
    "RecurrentSACSettings",
    "RecurrentTD3Policy",
    "RecurrentTD3Settings",
    "FastTD3Policy",
    "FastTD3Settings",
    "BCPolicy",
    "BCSettings",
    "TD3BCPolicy",
    "TD3BCSettings",
    "BCQPolicy",
    "BCQSettings",
    "CQLPolicy",
    "CQLSettings",
    "EDACPolicy",
    "EDACSettings",
    "DiscreteCQLPolicy",
    "DiscreteCQLSettings",
    "IQLPolicy",
    "IQLSettings",
    "DecisionTransformerPolicy",
    "DecisionTransformerSettings",
    "VDNPolicy",
    "VDNSettings",
    "QMIXPolicy",
    "QMIXSettings",
    "RecurrentQMIXPolicy",
    "RecurrentQMIXSettings",
    "WQMIXPolicy",
    "WQMIXSettings",
    "IPPOPolicy",
    "MAPPOPolicy",
    "MAPPOSettings",
    "RecurrentIPPOPolicy",
    "RecurrentMAPPOPolicy",
    "RecurrentMAPPOSettings",
]
