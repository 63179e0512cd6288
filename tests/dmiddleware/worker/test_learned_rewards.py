"""Rewards that a reward model learns while serial_run trains."""

import copy

import pytest
import torch

from dmiddleware.classic.reward_models import REWARD_MODEL_REGISTRY, BaseRewardModel
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.worker import BaseLearner, serial_run

MAIN = {
    "exp_name": "trial",
    "env": {"collector_env_num": 2, "evaluator_env_num": 1, "n_evaluator_episode": 1},
    "policy": {
        "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [8]},
        "learn": {"update_per_collect": 2, "batch_size": 8},
        "collect": {"n_sample": 16},
        "eval": {"evaluator": {"eval_freq": 1000}},
    },
}
REWARD = 50.0


@REWARD_MODEL_REGISTRY.register("constant")
class ConstantReward(BaseRewardModel):
    """Rewards every transition alike, and keeps what it is asked to do."""

    models: list = []

    def __init__(self, config, device, tb_logger):
        self.calls = []
        self.models.append(self)

    def collect_data(self, data):
        self.calls.append(("collect", len(data)))

    def train(self, data=None):
        self.calls.append(("train", None))

    def clear_data(self):
        self.calls.append(("clear", None))

    def estimate(self, data):
        rewarded = self.reward_deepcopy(data)
        for transition in rewarded:
            transition["reward"] = torch.full_like(transition["reward"], REWARD)
        return rewarded


@pytest.fixture
def constant():
    """Return the list of models that are made."""
    ConstantReward.models.clear()
    return ConstantReward.models


@pytest.fixture
def learned(monkeypatch):
    """Return the lists of samples that a learner has learned from."""
    batches, train = [], BaseLearner.train

    def watched(learner, data, *args, **kwargs):
        batches.append(data)
        return train(learner, data, *args, **kwargs)

    monkeypatch.setattr(BaseLearner, "train", watched)
    return batches


def configs(policy, reward_model="constant", **options):
    main = copy.deepcopy(MAIN)
    main["reward_model"] = options
    create = {
        "env": {"type": "CartPole-v1"},
        "policy": {"type": policy},
        "reward_model": {"type": reward_model},
    }
    return main, create


def test_dqn_learns_from_the_rewards_of_the_model(constant, learned):
    serial_run(*configs("dqn"), 0, 2, show_progress=False)
    assert {float(row["reward"]) for batch in learned for row in batch} == {REWARD}


def test_ppo_computes_its_returns_from_the_rewards_of_the_model(constant, learned):
    main, create = configs("ppo")
    del main["policy"]["learn"]["update_per_collect"]
    serial_run(main, create, 0, 1, show_progress=False)
    assert max(float(row["ret"]) for row in learned[0]) > REWARD / 2


def test_the_model_learns_from_each_collection_and_forgets_as_often_as_the_config_says(
    constant, learned
):
    serial_run(*configs("dqn", clear_buffer_per_iters=2), 0, 6, show_progress=False)
    once = [("collect", 16), ("train", None)]
    assert constant[0].calls == [*once, ("clear", None), *once, *once, ("clear", None)]


@pytest.mark.parametrize("name", ["rnd", "icm"])
def test_the_models_of_the_core_change_the_rewards_of_cart_pole(name, learned):
    options = {"obs_shape": 4, "intrinsic_reward_weight": 1.0, "update_per_collect": 1}
    if name == "icm":
        options["action_shape"] = 2
    serial_run(*configs("dqn", name, **options), 0, 2, show_progress=False)
    rewards = {float(row["reward"]) for batch in learned for row in batch}
    assert len(rewards) > 2 and all(1 <= reward <= 2 for reward in rewards)


def test_a_direct_run_learns_from_what_was_collected_and_nothing_else(constant, learned):
    serial_run(*configs("dqn"), 0, 4, is_direct=True, show_progress=False)
    first, again, second, _ = ([row["obs"].tolist() for row in batch] for batch in learned)
    assert len(first) == len(second) == 16 and first == again
    assert not any(row in first for row in second)


def test_options_without_a_type_are_refused():
    main, create = configs("dqn", obs_shape=4)
    del create["reward_model"]
    with pytest.raises(ConfigError, match="reward_model has options but no type"):
        serial_run(main, create)


def test_a_model_that_is_not_here_is_refused_by_its_name():
    with pytest.raises(RegistryError, match="drex"):
        serial_run(*configs("dqn", "drex"))


@pytest.mark.parametrize("name", ["clear_buffer_per_iters", "target_new_data_count"])
def test_counts_below_one_are_refused(constant, name):
    with pytest.raises(ConfigError, match=f"reward_model.{name} must be .* got 0"):
        serial_run(*configs("dqn", **{name: 0}), show_progress=False)


def test_the_model_learns_only_after_so_many_new_rows(constant, learned):
    serial_run(*configs("dqn", target_new_data_count=40), 0, 2, show_progress=False)
    assert constant[0].calls == [("collect", 48), ("train", None), ("clear", None)]
    assert len(learned) == 2


def test_the_class_of_a_model_says_what_a_config_leaves_out(constant, monkeypatch):
    defaults = {"clear_buffer_per_iters": 2, "target_new_data_count": 20}
    monkeypatch.setattr(ConstantReward, "config", defaults)
    serial_run(*configs("dqn"), 0, 4, show_progress=False)
    once = [("collect", 32), ("train", None)]
    assert constant[0].calls == [*once, ("clear", None), *once]
