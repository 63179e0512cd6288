import gymnasium as gym
import pytest

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    CQLPolicy,
    DecisionTransformerPolicy,
    DQNPolicy,
    DQNSettings,
    IMPALAPolicy,
    IQLPolicy,
    PPOPolicy,
    R2D2Policy,
    RecurrentPPOPolicy,
    SACPolicy,
    TD3BCPolicy,
    TD3Policy,
)
from dmiddleware.schedule import Schedule
from dmiddleware.settings import describe
from tests.dmiddleware.policy.every_policy import EVERY

IMPOSSIBLE = [
    (DQNPolicy, "discount", 1.5),
    (DQNPolicy, "discount", -0.1),
    (DQNPolicy, "seed", -1),
    (DQNPolicy, "batch_size", 0),
    (DQNPolicy, "batch_size", None),
    (DQNPolicy, "learning_rate", 0.0),
    (DQNPolicy, "learning_rate", float("nan")),
    (DQNPolicy, "adam_eps", -1e-8),
    (DQNPolicy, "loss", "hinge"),
    (DQNPolicy, "target_update_freq", 0),
    (DQNPolicy, "target_tau", 0.0),
    (DQNPolicy, "target_tau", 1.1),
    (DQNPolicy, "grad_clip_norm", 0.0),
    (DQNPolicy, "eps", {"type": "square"}),
    (DQNPolicy, "eps", {"by": "episode"}),
    (DQNPolicy, "learning_rate", {"start": 1e-3}),
    (DQNPolicy, "eps", {"start": 1.2}),
    (DQNPolicy, "eps", {"decay": 0}),
    (PPOPolicy, "discount", 2.0),
    (PPOPolicy, "target_kl", 0.0),
    (PPOPolicy, "norm_clip", 0.0),
    (PPOPolicy, "action_bounding", "squash"),
    (PPOPolicy, "batch_size", 0),
    (PPOPolicy, "epoch_per_collect", 0),
    (PPOPolicy, "learning_rate", -1.0),
    (PPOPolicy, "adam_eps", 0.0),
    (PPOPolicy, "clip_ratio", 0.0),
    (PPOPolicy, "clip_ratio", {"start": 0.2, "end": 0.0}),
    (PPOPolicy, "dual_clip", 1.0),
    (PPOPolicy, "value_clip", 0.0),
    (PPOPolicy, "value_weight", -0.5),
    (PPOPolicy, "entropy_weight", float("inf")),
    (PPOPolicy, "grad_clip_norm", -1.0),
    (RecurrentPPOPolicy, "recompute_advantage", True),
    (R2D2Policy, "burn_in", -1),
    (R2D2Policy, "priority_eta", 1.5),
    (TD3BCPolicy, "bc_alpha", 0.0),
    (CQLPolicy, "n_actions", 0),
    (CQLPolicy, "lagrange_gap", float("inf")),
    (IQLPolicy, "expectile", 1.0),
    (IQLPolicy, "inverse_temperature", -1.0),
    (IQLPolicy, "action_bounding", "tanh"),
    (SACPolicy, "action_bounding", "rescale"),
    (TD3Policy, "action_bounding", "clip"),
    (DecisionTransformerPolicy, "return_scale", 0.0),
    (DecisionTransformerPolicy, "action_bounding", "clip"),
    (A2CPolicy, "rmsprop_decay", 1.5),
    (A2CPolicy, "gae_lambda", -0.1),
    (IMPALAPolicy, "rho_clip", 0.0),
    (IMPALAPolicy, "trace_decay", 2.0),
    (BCPolicy, "action_bounding", "none"),
    (BCPolicy, "batch_size", 0),
    (BCPolicy, "learning_rate", 0.0),
    (BCPolicy, "adam_eps", 0.0),
    (BCPolicy, "label_smoothing", 1.5),
    (BCPolicy, "grad_clip_norm", 0.0),
]


@pytest.mark.parametrize(("policy", "name", "value"), IMPOSSIBLE)
def test_an_invalid_value_is_rejected_with_its_name(policy, name, value):
    with pytest.raises(ConfigError, match=name):
        policy({name: value})


@pytest.mark.parametrize("policy", EVERY)
def test_the_defaults_are_possible(policy):
    policy.settings_class()()


@pytest.mark.parametrize("policy", EVERY)
def test_the_schedule_of_every_learning_rate_may_fall_to_zero(policy):
    settings = policy.settings_class()
    names = [one.name for one in describe(settings) if "learning_rate" in one.name]
    assert names
    for name in names:
        settings(**{name: {"start": 1e-3, "end": 0.0}})
        with pytest.raises(ConfigError, match=rf"{name}: .* ≥ 0, got -1\.0"):
            settings(**{name: {"start": 1e-3, "end": -1.0}})
        with pytest.raises(ConfigError, match=f"{name} must be a positive number"):
            settings(**{name: 0.0})


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown setting batchsize; did you mean batch_size"):
        DQNPolicy({"batchsize": 3})


def test_a_wrong_type_is_rejected():
    with pytest.raises(ConfigError, match=r"double must be True or False, got 1"):
        DQNPolicy({"double": 1})


def test_a_section_of_a_nested_config_is_rejected_with_what_to_do():
    with pytest.raises(ConfigError, match=r"unknown setting learn; .*names without sections"):
        DQNPolicy({"learn": {"batch_size": 3}})


@pytest.mark.parametrize("other", [PPOPolicy.settings_class()(), 3])
def test_settings_of_another_algorithm_are_rejected(other):
    with pytest.raises(ConfigError, match=r"DQNPolicy takes DQNSettings\(\.\.\.\)"):
        DQNPolicy(other)


def test_for_env_changes_the_settings_that_it_is_given():
    cfg = DQNSettings(learning_rate=0.01, n_step=3)
    policy = DQNPolicy.for_env(gym.make("CartPole-v1"), cfg, n_step=2)
    assert (policy.cfg.learning_rate, policy.cfg.n_step, cfg.n_step) == (0.01, 2, 3)


def test_an_unknown_model_option_is_rejected(small):
    with pytest.raises(ConfigError, match="duelling"):
        DQNPolicy({"model": {**small, "duelling": True}})


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
        eps=Schedule.linear(0.5, 0.05, decay=10_000),
    )
    assert policy.cfg.learning_rate == 0.01
    assert policy.cfg.target_update_freq == 7
    assert policy.cfg.eps.start == 0.5
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
    [
        ("learning_rat", "did you mean learning_rate"),
        ("update_per_collect", "known are|here it is"),
    ],
)
def test_an_unknown_keyword_of_for_env_is_rejected(keyword, hint):
    with pytest.raises(ConfigError, match=rf"unknown setting {keyword}; {hint}"):
        DQNPolicy.for_env(gym.make("CartPole-v1"), **{keyword: 1})


def test_for_env_rejects_an_env_without_spaces():
    with pytest.raises(SpaceError, match="env manager or a Gymnasium env"):
        DQNPolicy.for_env("CartPole-v1")


@pytest.mark.parametrize("value", ["1e-4", "0.1"])
def test_a_number_that_yaml_read_as_text_is_rejected_with_the_way_to_write_it(value):
    with pytest.raises(ConfigError, match=r"learning_rate must be .* write 1\.0e-4"):
        DQNPolicy({"learning_rate": value})
