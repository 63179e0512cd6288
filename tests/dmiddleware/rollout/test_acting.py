"""What collecting and evaluating accept from policies, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from tests.dmiddleware.counting_fixtures import CountingPolicy


@pytest.fixture
def envs():
    with make_env_manager("CartPole-v1", env_num=3, seed=0) as envs:
        yield envs


def make_ppo(**config):
    model = {"obs_shape": 4, "action_shape": 2, "action_space": "discrete"}
    return PPOPolicy({"seed": 0, "model": model, **config})


def make_policy(answer):
    """Make a policy whose forward returns ``answer(number of envs)``."""

    class Answering(CountingPolicy):
        def act_collect(self, obs, env_id, **kwargs):
            return answer(len(env_id))

        act_eval = act_collect

    return Answering({}, nn.Linear(4, 2))


def test_a_policy_and_its_mode_act_alike(envs):
    policy = DQNPolicy({"seed": 0, "model": {"obs_shape": 4, "action_shape": 2}})
    for given in (policy, policy.collect_mode):
        assert RolloutCollector(given, envs).collect(3)["obs"].shape == (1, 3, 4)
    for given in (policy, policy.eval_mode):
        assert len(evaluate_episodes(given, envs, 3).get_episode_return()) == 3


@pytest.mark.parametrize("wrong", [None, "CartPole-v1", lambda: None])
def test_something_else_than_an_env_manager_is_rejected(batched_policy, wrong):
    with pytest.raises(ConfigError, match="RolloutCollector takes an env manager"):
        RolloutCollector(batched_policy, wrong)
    with pytest.raises(ConfigError, match="evaluate_episodes takes an env manager"):
        evaluate_episodes(batched_policy, wrong, 1)


def test_something_else_than_a_policy_is_rejected(envs, batched_policy):
    with pytest.raises(ConfigError, match="RolloutCollector takes a policy"):
        RolloutCollector(batched_policy.eval_mode, envs)
    with pytest.raises(ConfigError, match="evaluate_episodes takes a policy"):
        evaluate_episodes(batched_policy.collect_mode, envs, 3)
    collector = RolloutCollector(batched_policy, envs)
    with pytest.raises(ConfigError, match="env manager"):
        collector.reset(env_manager="CartPole-v1")
    with pytest.raises(ConfigError, match="policy"):
        collector.reset(policy=batched_policy.eval_mode)


def test_random_actions_are_rejected_for_an_on_policy_policy(envs):
    collector = RolloutCollector(make_ppo(), envs)
    with pytest.raises(ConfigError, match="on-policy"):
        collector.check_random_actions()
    with pytest.raises(ConfigError, match="on-policy"):
        collector.collect(3, random=True)
    with pytest.raises(ConfigError, match="on-policy"):
        collector.collect_episodes(3, random=True)


@pytest.mark.parametrize("name", ["log_prob", "raw_action"])
def test_random_actions_are_rejected_where_columns_describe_the_replaced_action(envs, name):
    policy = make_policy(
        lambda n: {"action": torch.zeros(n, dtype=torch.int64), name: torch.zeros(n)}
    )
    collector = RolloutCollector(policy, envs)
    collector.collect(3)
    with pytest.raises(ConfigError, match=name):
        collector.collect(3, random=True)


def test_random_actions_keep_the_values_of_all_actions(envs):
    policy = DQNPolicy({"seed": 0, "model": {"obs_shape": 4, "action_shape": 2}})
    collector = RolloutCollector(policy, envs)
    collector.check_random_actions()
    batch = collector.collect(30, random=True)
    expected = policy.collect_mode.forward(batch["obs"].reshape(-1, 4))["logit"]
    torch.testing.assert_close(batch["logit"].reshape(-1, 2), expected)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda n: None, "returned None"),
        (lambda n: torch.zeros(n), "dictionary of tensors"),
        (lambda n: {}, "action"),
        (lambda n: {"logit": torch.zeros(n, 2)}, "(?s)logit.*action"),
        (lambda n: {"action": [0] * n}, "action="),
        (lambda n: {"action": np.zeros(n, np.int64)}, "action="),
        (lambda n: {"action": torch.tensor(0)}, r"action of shape \(\).*\[3, …\]"),
        (lambda n: {"action": torch.zeros(n + 1).long()}, r"action of shape \(4,\)"),
        (
            lambda n: {"action": torch.zeros(n).long(), "value": torch.zeros(1)},
            r"value of shape \(1,\) for 3 envs",
        ),
    ],
)
def test_an_error_says_what_forward_must_return(envs, answer, message):
    policy = make_policy(answer)
    with pytest.raises(PolicyOutputError, match=message):
        RolloutCollector(policy, envs).collect(3)
    with pytest.raises(PolicyOutputError, match=message):
        evaluate_episodes(policy, envs, 3)


def test_a_wrong_output_in_a_later_step_is_rejected_too(envs):
    answers = iter([{"action": torch.zeros(3, dtype=torch.int64)}, None])
    collector = RolloutCollector(make_policy(lambda n: next(answers)), envs)
    collector.collect(3)
    with pytest.raises(PolicyOutputError, match="returned None"):
        collector.collect(3)


def test_checking_that_a_policy_fits_the_envs_leaves_its_statistics_alone(envs):
    class Model(nn.Module):
        """Has no ``check_spaces``, so it is tried with an observation of zeros."""

        obs_shape = 4

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, obs):
            out = self.linear(obs)
            return {"logit": out[..., :2], "value": out[..., 2]}

    policy = PPOPolicy({"seed": 0, "obs_norm": True}, model=Model())
    before = str(policy.collect_mode.state_dict()["acting"]["obs_norm"])
    RolloutCollector(policy, envs).start()
    assert str(policy.collect_mode.state_dict()["acting"]["obs_norm"]) == before
    RolloutCollector(policy, envs).collect(30)
    assert str(policy.collect_mode.state_dict()["acting"]["obs_norm"]) != before
