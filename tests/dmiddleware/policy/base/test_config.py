import re

import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.policy import BCPolicy, DQNPolicy, PPOPolicy

IMPOSSIBLE = [
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
    (DQNPolicy, "other.eps.type", "cosine"),
    (DQNPolicy, "other.eps", {"start": 1.2}),
    (DQNPolicy, "other.eps", {"decay": 0}),
    (PPOPolicy, "discount_factor", 2.0),
    (PPOPolicy, "target_kl", 0.0),
    (PPOPolicy, "norm_clip", 0.0),
    (PPOPolicy, "action_bounding", "squash"),
    (PPOPolicy, "learn.batch_size", 0),
    (PPOPolicy, "learn.epoch_per_collect", 0),
    (PPOPolicy, "learn.lr_anneal_updates", 0),
    (PPOPolicy, "learn.learning_rate", -1.0),
    (PPOPolicy, "learn.adam_eps", 0.0),
    (PPOPolicy, "learn.clip_ratio", 0.0),
    (PPOPolicy, "learn.dual_clip", 1.0),
    (PPOPolicy, "learn.value_clip", 0.0),
    (PPOPolicy, "learn.value_weight", -0.5),
    (PPOPolicy, "learn.entropy_weight", float("inf")),
    (PPOPolicy, "learn.grad_clip_norm", -1.0),
    (PPOPolicy, "collect.n_sample", 0),
    (PPOPolicy, "collect.n_episode", 0),
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
def test_an_impossible_value_is_refused_with_its_path(policy, path, value):
    with pytest.raises(ConfigError, match=re.escape(path)):
        policy(nested(path, value))


@pytest.mark.parametrize("policy", [DQNPolicy, PPOPolicy, BCPolicy])
def test_the_defaults_are_possible(policy):
    policy.merged_config({})


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"learn\.batchsize; did you mean learn\.batch_size"):
        DQNPolicy({"learn": {"batchsize": 3}})


def test_a_wrong_type_is_refused():
    with pytest.raises(ConfigError, match=r"learn\.double must be of type bool"):
        DQNPolicy({"learn": {"double": 1}})


def test_an_unknown_model_option_is_refused(small):
    with pytest.raises(ConfigError, match="duelling"):
        DQNPolicy({"model": {**small, "duelling": True}})
