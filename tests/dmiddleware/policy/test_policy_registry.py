import sys

import pytest

import dmiddleware.policy
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.policy import (
    POLICY_REGISTRY,
    BCPolicy,
    DQNPolicy,
    PPOPolicy,
    create_policy,
    get_policy_cls,
)


def test_the_public_names_are_these():
    assert sorted(dmiddleware.policy.__all__) == [
        "A2CPolicy",
        "A2CSettings",
        "ActionCodec",
        "ActorCriticPolicy",
        "ActorCriticSettings",
        "ActorGroup",
        "ActorSettings",
        "AdvantagePolicy",
        "AdvantageSettings",
        "AnyMode",
        "BCPolicy",
        "BCQPolicy",
        "BCQSettings",
        "BCSettings",
        "C51Policy",
        "C51Settings",
        "CQLPolicy",
        "CQLSettings",
        "CollectMode",
        "Component",
        "CrossQPolicy",
        "CrossQSettings",
        "D4PGPolicy",
        "D4PGSettings",
        "DDPGPolicy",
        "DDPGSettings",
        "DQNPolicy",
        "DQNSettings",
        "DQfDPolicy",
        "DQfDSettings",
        "DatasetNormSettings",
        "DecisionTransformerPolicy",
        "DecisionTransformerSettings",
        "DiscountedSettings",
        "DiscreteCQLPolicy",
        "DiscreteCQLSettings",
        "DiscreteSACPolicy",
        "DiscreteSACSettings",
        "EDACPolicy",
        "EDACSettings",
        "EvalMode",
        "FQFPolicy",
        "FQFSettings",
        "FastTD3Policy",
        "FastTD3Settings",
        "HasModes",
        "IMPALAPolicy",
        "IMPALASettings",
        "IPPOPolicy",
        "IQLPolicy",
        "IQLSettings",
        "IQNPolicy",
        "IQNSettings",
        "LearnMode",
        "MAPPOPolicy",
        "MAPPOSettings",
        "MDQNPolicy",
        "MDQNSettings",
        "Memory",
        "ObsGroupSettings",
        "ObsGroups",
        "ObsNorm",
        "ObsNormSettings",
        "OffPolicyPPGPolicy",
        "OffPolicyPPGSettings",
        "OffPolicyPPOPolicy",
        "OffPolicyPPOSettings",
        "PDQNPolicy",
        "PDQNSettings",
        "PGPolicy",
        "PGSettings",
        "POLICY_REGISTRY",
        "PPGPolicy",
        "PPGSettings",
        "PPOPolicy",
        "PPOSettings",
        "PQNPolicy",
        "PQNSettings",
        "Policy",
        "PolicyGradientSettings",
        "PolicySettings",
        "PolicySpec",
        "QLearningPolicy",
        "QLearningSettings",
        "QMIXPolicy",
        "QMIXSettings",
        "QRDQNPolicy",
        "QRDQNSettings",
        "R2D2Policy",
        "R2D2Settings",
        "RainbowPolicy",
        "RainbowSettings",
        "RecurrentIPPOPolicy",
        "RecurrentMAPPOPolicy",
        "RecurrentMAPPOSettings",
        "RecurrentPPOPolicy",
        "RecurrentPPOSettings",
        "RecurrentQMIXPolicy",
        "RecurrentQMIXSettings",
        "RecurrentSACPolicy",
        "RecurrentSACSettings",
        "RecurrentTD3Policy",
        "RecurrentTD3Settings",
        "SACPolicy",
        "SACSettings",
        "SQLPolicy",
        "SQLSettings",
        "TD3BCPolicy",
        "TD3BCSettings",
        "TD3Policy",
        "TD3Settings",
        "TDPolicy",
        "TDSettings",
        "TQCPolicy",
        "TQCSettings",
        "TargetRule",
        "UpdateOutput",
        "VDNPolicy",
        "VDNSettings",
        "WQMIXPolicy",
        "WQMIXSettings",
        "adam",
        "adamw",
        "as_collect_mode",
        "as_eval_mode",
        "as_learn_mode",
        "create_policy",
        "get_policy_cls",
        "is_update",
        "late_stops",
        "mask_of",
        "may_be_update",
        "priorities_of_rows",
        "rmsprop",
        "spec_of",
        "torch_optimizer",
        "update_outputs",
    ]
    assert all(hasattr(dmiddleware.policy, name) for name in dmiddleware.policy.__all__)


def test_stock_policies_have_names():
    found = {name: POLICY_REGISTRY.get(name) for name in ("dqn", "ppo", "bc")}
    assert found == {"dqn": DQNPolicy, "ppo": PPOPolicy, "bc": BCPolicy}


def test_a_policy_is_built_by_name(small):
    policy = create_policy({"type": "dqn", "model": small}, modes=["collect"])
    assert isinstance(policy, DQNPolicy)
    assert policy.cfg.model == small


def test_modules_are_imported_first(tmp_path, monkeypatch):
    (tmp_path / "policy_of_mine.py").write_text(
        "from dmiddleware.policy import POLICY_REGISTRY, DQNPolicy\n"
        "@POLICY_REGISTRY.register('of_mine')\n"
        "class MyPolicy(DQNPolicy): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cls = get_policy_cls({"type": "of_mine", "import_names": ["policy_of_mine"]})
    assert cls is sys.modules["policy_of_mine"].MyPolicy


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(RegistryError, match="did you mean dqn"):
        create_policy({"type": "dqnn"})


def test_a_config_without_a_name_is_rejected():
    with pytest.raises(ConfigError, match="no key type"):
        create_policy({})
