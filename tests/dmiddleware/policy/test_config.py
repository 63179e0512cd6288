import re
from typing import get_type_hints

import gymnasium as gym
import pytest

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    C51Policy,
    CQLPolicy,
    DDPGPolicy,
    DecisionTransformerPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    IMPALAPolicy,
    IPPOPolicy,
    IQLPolicy,
    IQNPolicy,
    MAPPOPolicy,
    PPOPolicy,
    QMIXPolicy,
    QRDQNPolicy,
    R2D2Policy,
    RainbowPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
    TD3BCPolicy,
    TD3Policy,
    TQCPolicy,
    VDNPolicy,
)
from dmiddleware.policy.a2c import A2COptions
from dmiddleware.policy.bc import BCOptions
from dmiddleware.policy.cql import CQLOptions
from dmiddleware.policy.ddpg import DDPGOptions
from dmiddleware.policy.decision_transformer import DecisionTransformerOptions
from dmiddleware.policy.discrete_sac import DiscreteSACOptions
from dmiddleware.policy.dqn import DQNOptions
from dmiddleware.policy.impala import IMPALAOptions
from dmiddleware.policy.iql import IQLOptions
from dmiddleware.policy.iqn import IQNOptions
from dmiddleware.policy.ppo import PPOOptions
from dmiddleware.policy.q_learning import QLearningOptions
from dmiddleware.policy.r2d2 import R2D2Options
from dmiddleware.policy.sac import SACOptions
from dmiddleware.policy.td3_bc import TD3BCOptions
from dmiddleware.policy.tqc import TQCOptions
from tests.dmiddleware.policy.every_policy import EVERY

IMPOSSIBLE = [
    (DQNPolicy, "on_policy", True),
    (PPOPolicy, "on_policy", False),
    (DQNPolicy, "discount_factor", 1.5),
    (DQNPolicy, "discount_factor", -0.1),
    (DQNPolicy, "seed", -1),
    (DQNPolicy, "learn.batch_size", 0),
    (DQNPolicy, "learn.batch_size", None),
    (DQNPolicy, "learn.learning_rate", 0.0),
    (DQNPolicy, "learn.learning_rate", float("nan")),
    (DQNPolicy, "learn.adam_eps", -1e-8),
    (DQNPolicy, "learn.loss", "hinge"),
    (DQNPolicy, "learn.target_update_freq", 0),
    (DQNPolicy, "learn.target_tau", 0.0),
    (DQNPolicy, "learn.target_tau", 1.1),
    (DQNPolicy, "learn.grad_clip_norm", 0.0),
    (DQNPolicy, "collect.n_sample", 0),
    (DQNPolicy, "collect.n_episode", 2.5),
    (DQNPolicy, "other.eps.type", "square"),
    (DQNPolicy, "other.eps.by", "episode"),
    (DQNPolicy, "learn.learning_rate", {"start": 1e-3}),
    (DQNPolicy, "other.eps", {"start": 1.2}),
    (DQNPolicy, "other.eps", {"decay": 0}),
    (PPOPolicy, "discount_factor", 2.0),
    (PPOPolicy, "target_kl", 0.0),
    (PPOPolicy, "norm_clip", 0.0),
    (PPOPolicy, "action_bounding", "squash"),
    (PPOPolicy, "learn.batch_size", 0),
    (PPOPolicy, "learn.epoch_per_collect", 0),
    (PPOPolicy, "learn.learning_rate", -1.0),
    (PPOPolicy, "learn.adam_eps", 0.0),
    (PPOPolicy, "learn.clip_ratio", 0.0),
    (PPOPolicy, "learn.clip_ratio", {"start": 0.2, "end": 0.0}),
    (PPOPolicy, "learn.dual_clip", 1.0),
    (PPOPolicy, "learn.value_clip", 0.0),
    (PPOPolicy, "learn.value_weight", -0.5),
    (PPOPolicy, "learn.entropy_weight", float("inf")),
    (PPOPolicy, "learn.grad_clip_norm", -1.0),
    (PPOPolicy, "collect.n_sample", 0),
    (RecurrentPPOPolicy, "learn.recompute_advantage", True),
    (R2D2Policy, "burn_in", -1),
    (R2D2Policy, "learn.priority_eta", 1.5),
    (PPOPolicy, "collect.n_episode", 0),
    (TD3BCPolicy, "learn.bc_alpha", 0.0),
    (CQLPolicy, "learn.n_actions", 0),
    (CQLPolicy, "learn.lagrange_gap", float("inf")),
    (IQLPolicy, "learn.expectile", 1.0),
    (IQLPolicy, "learn.inverse_temperature", -1.0),
    (IQLPolicy, "action_bounding", "tanh"),
    (SACPolicy, "action_bounding", "rescale"),
    (TD3Policy, "action_bounding", "clip"),
    (DecisionTransformerPolicy, "return_scale", 0.0),
    (DecisionTransformerPolicy, "action_bounding", "clip"),
    (A2CPolicy, "learn.rmsprop_decay", 1.5),
    (A2CPolicy, "gae_lambda", -0.1),
    (IMPALAPolicy, "learn.rho_clip", 0.0),
    (IMPALAPolicy, "learn.trace_decay", 2.0),
    (BCPolicy, "action_bounding", "none"),
    (BCPolicy, "learn.batch_size", 0),
    (BCPolicy, "learn.learning_rate", 0.0),
    (BCPolicy, "learn.adam_eps", 0.0),
    (BCPolicy, "learn.label_smoothing", 1.5),
    (BCPolicy, "learn.grad_clip_norm", 0.0),
    (BCPolicy, "collect.n_sample", 0),
    (BCPolicy, "collect.n_episode", 0),
]


def nested(path, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize(("policy", "path", "value"), IMPOSSIBLE)
def test_an_invalid_value_is_rejected_with_its_path(policy, path, value):
    with pytest.raises(ConfigError, match=re.escape(path)):
        policy(nested(path, value))


@pytest.mark.parametrize("policy", EVERY)
def test_the_defaults_are_possible(policy):
    policy.merged_config({})


@pytest.mark.parametrize("policy", EVERY)
def test_the_schedule_of_every_learning_rate_may_fall_to_zero(policy):
    paths = [path for path in policy.options() if "learning_rate" in path]
    assert paths
    for path in paths:
        policy.merged_config(nested(path, {"start": 1e-3, "end": 0.0}))
        with pytest.raises(ConfigError, match=rf"{re.escape(path)}: .* ≥ 0, got -1\.0"):
            policy.merged_config(nested(path, {"start": 1e-3, "end": -1.0}))
        with pytest.raises(ConfigError, match=f"{re.escape(path)} must be a positive number"):
            policy.merged_config(nested(path, 0.0))


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"learn\.batchsize; did you mean learn\.batch_size"):
        DQNPolicy({"learn": {"batchsize": 3}})


def test_a_wrong_type_is_rejected():
    with pytest.raises(ConfigError, match=r"learn\.double must be True or False, got 1"):
        DQNPolicy({"learn": {"double": 1}})


def test_an_unknown_model_option_is_rejected(small):
    with pytest.raises(ConfigError, match="duelling"):
        DQNPolicy({"model": {**small, "duelling": True}})


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (DQNPolicy, DQNOptions),
        (PPOPolicy, PPOOptions),
        (RecurrentPPOPolicy, PPOOptions),
        (R2D2Policy, R2D2Options),
        (A2CPolicy, A2COptions),
        (IMPALAPolicy, IMPALAOptions),
        (BCPolicy, BCOptions),
        (C51Policy, QLearningOptions),
        (QRDQNPolicy, QLearningOptions),
        (IQNPolicy, IQNOptions),
        (RainbowPolicy, QLearningOptions),
        (DiscreteSACPolicy, DiscreteSACOptions),
        (SACPolicy, SACOptions),
        (VDNPolicy, QLearningOptions),
        (QMIXPolicy, QLearningOptions),
        (IPPOPolicy, PPOOptions),
        (MAPPOPolicy, PPOOptions),
        (DDPGPolicy, DDPGOptions),
        (TD3Policy, DDPGOptions),
        (TQCPolicy, TQCOptions),
        (TD3BCPolicy, TD3BCOptions),
        (CQLPolicy, CQLOptions),
        (IQLPolicy, IQLOptions),
        (DecisionTransformerPolicy, DecisionTransformerOptions),
    ],
)
def test_for_env_has_a_typed_keyword_for_every_option(policy, options):
    keywords = {
        option.keyword or path.rpartition(".")[2]
        for path, option in policy.options().items()
        if option.keyword is not None
    }
    assert keywords == set(get_type_hints(options))


@pytest.mark.parametrize(
    "make",
    [
        lambda: gym.make("CartPole-v1"),
        lambda: gym.make_vec("CartPole-v1", num_envs=2),
        lambda: make_env_manager("CartPole-v1", env_num=2),
    ],
)
def test_for_env_takes_flat_options_and_the_shapes_of_the_env(make):
    env = make()
    policy = DQNPolicy.for_env(
        env,
        model={"encoder_hidden_sizes": [16]},
        learning_rate=0.01,
        target_update_freq=7,
        eps_start=0.5,
    )
    assert policy.cfg.learn.learning_rate == 0.01
    assert policy.cfg.learn.target_update_freq == 7
    assert policy.cfg.other.eps.start == 0.5
    assert policy.cfg.model == {
        "obs_shape": 4,
        "action_shape": 2,
        "encoder_hidden_sizes": [16],
    }
    env.close()


def test_for_env_takes_a_module(linear):
    model = linear()
    env = gym.make("CartPole-v1")
    assert DQNPolicy.for_env(env, model=model).model is model


@pytest.mark.parametrize("policy", [PPOPolicy, BCPolicy])
def test_for_env_adopts_the_bounds_of_continuous_actions(policy):
    made = policy.for_env(gym.make("Pendulum-v1"), learning_rate=0.01)
    (part,) = made.collect_mode.state_dict()["acting"]["action_codec"]["parts"].values()
    assert part["high"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [("learning_rat", "did you mean learning_rate"), ("update_per_collect", "known here are")],
)
def test_an_unknown_keyword_of_for_env_is_rejected(keyword, hint):
    with pytest.raises(ConfigError, match=rf"unknown keyword {keyword}; {hint}"):
        DQNPolicy.for_env(gym.make("CartPole-v1"), **{keyword: 1})


def test_for_env_rejects_an_env_without_spaces():
    with pytest.raises(SpaceError, match="env manager or a Gymnasium env"):
        DQNPolicy.for_env("CartPole-v1")


@pytest.mark.parametrize("value", ["1e-4", "0.1"])
def test_a_number_that_yaml_read_as_text_is_rejected_with_the_way_to_write_it(value):
    with pytest.raises(ConfigError, match=r"learn\.learning_rate must be .* write 1\.0e-4"):
        DQNPolicy({"learn": {"learning_rate": value}})


def test_a_key_in_the_wrong_section_is_named_with_its_path():
    with pytest.raises(ConfigError, match=r"unknown key batch_size; did you mean learn\.batch_s"):
        DQNPolicy({"batch_size": 3})
