"""What policies written for DI-engine rely on: samples, names, attributes."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware.data import index_rows
from dmiddleware.policy import BatchedPolicy, CommandModePolicy, DQNPolicy, Policy
from dmiddleware.policy.base.modes import EvalMode

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}


class Learning(Policy):
    """Remembers what it learns from."""

    def _forward_learn(self, batch):
        self.seen = batch
        return {"total_loss": 0.0}


class PerEnv(Learning):
    def _forward_learn(self, batch):
        return super()._forward_learn(batch)

    def _forward_collect(self, data):
        return {env_id: {"action": 0} for env_id in data}


class PerEnvOnBatches(PerEnv):
    learn_from = "batch"


class WithTransitions(Policy):
    def _forward_learn(self, batch):
        return {"total_loss": float(len(batch))}

    def _process_transition(self, obs, policy_output, timestep):
        return {"obs": obs, "next_obs": timestep.obs}


def policy_of(cls, **cfg):
    return cls(cfg, model=nn.Linear(4, 2), enable_field=["learn"])


@pytest.mark.parametrize(
    ("cls", "learn_from"),
    [
        (Learning, "batch"),
        (PerEnv, "samples"),
        (WithTransitions, "samples"),
        (PerEnvOnBatches, "batch"),
        (DQNPolicy, "batch"),
    ],
)
def test_a_class_that_acts_per_env_learns_from_samples(cls, learn_from):
    assert cls.learn_from == learn_from


def test_a_subclass_that_does_not_write_learning_keeps_what_its_parent_learns_from():
    class Stored(DQNPolicy):
        def _get_train_batch(self, batch):
            return batch

    class Deeper(PerEnv):
        def _forward_eval(self, data):
            return {env_id: {"action": 1} for env_id in data}

    assert (Stored.learn_from, Deeper.learn_from) == ("batch", "samples")


def test_a_list_of_samples_arrives_untouched():
    policy = policy_of(PerEnv)
    samples = [{"obs": np.zeros(3), "name": "a"}, {"obs": np.zeros(5), "name": None}]
    policy.learn_mode.forward(samples)
    assert policy.seen is samples


def test_a_batch_is_split_into_samples():
    policy = policy_of(PerEnv)
    batch = policy_of(Learning)._batch([{"reward": 1.0}, {"reward": 2.0}])
    policy.learn_mode.forward(batch)
    assert [float(sample["reward"]) for sample in policy.seen] == [1.0, 2.0]


def test_columns_of_text_stay_lists_in_a_batch():
    policy = policy_of(Learning)
    samples = [{"reward": float(n), "replay_unique_id": f"b_{n}", "extra": None} for n in range(4)]
    policy.learn_mode.forward(samples)
    assert policy.seen["replay_unique_id"] == ["b_0", "b_1", "b_2", "b_3"]
    assert policy.seen["extra"] == [None] * 4
    rows = index_rows(policy.seen, torch.tensor([2, 0]))
    assert rows["replay_unique_id"] == ["b_2", "b_0"]
    assert rows["reward"].tolist() == [2.0, 0.0]


def test_an_importance_weight_has_its_classic_name_too():
    policy = policy_of(Learning)
    policy.learn_mode.forward([{"reward": 1.0, "IS": 0.5}, {"reward": 1.0, "IS": 0.25}])
    assert policy.seen["weight"].tolist() == [0.5, 0.25]
    policy.learn_mode.forward([{"reward": 1.0, "IS": 0.5, "weight": 0.75}])
    assert policy.seen["weight"].tolist() == [0.75]


def test_dqn_weights_its_errors_by_the_classic_name():
    def loss(**weight):
        policy = DQNPolicy({"seed": 0, "model": SMALL})
        sample = {
            "obs": torch.ones(4), "next_obs": torch.ones(4), "action": torch.tensor(0),
            "reward": 1.0, "done": True, "terminated": True,
        }  # fmt: skip
        return policy.learn_mode.forward([{**sample, **weight}])["total_loss"]

    assert loss(IS=0.5) == pytest.approx(0.5 * loss())


def test_the_attributes_exist_before_the_parts_are_built():
    class Attributes(Policy):
        def _init_learn(self):
            self.seen = {
                "cuda": self._cuda, "rank": self._rank, "on_policy": self._on_policy,
                "bp_update_sync": self._bp_update_sync, "enable_field": self._enable_field,
                "device": self._device,
            }  # fmt: skip

        def _forward_learn(self, batch):
            return {}

    assert policy_of(Attributes).seen == {
        "cuda": False, "rank": 0, "on_policy": False, "bp_update_sync": True,
        "enable_field": ["learn"], "device": "cpu",
    }  # fmt: skip


def test_overrides_under_the_classic_names_are_called():
    class Own(BatchedPolicy):
        eval_function = type("OwnEval", (EvalMode,), {})

        def _create_model(self, cfg, model=None):
            return nn.Linear(1, 1)

        def _get_attribute(self, name):
            return "mine" if name == "answer" else super()._get_attribute(name)

        def _set_attribute(self, name, value):
            super()._set_attribute(name, value + 1)

        def _forward_eval_batch(self, obs, env_id):
            return {"action": obs[:, 0]}

    policy = Own({}, enable_field=["eval"])
    assert policy._model.in_features == 1
    assert policy.eval_mode.get_attribute("answer") == "mine"
    policy.set_attribute("number", 1)
    assert policy.get_attribute("number") == 2
    assert type(policy.eval_mode) is Own.eval_function


def test_a_total_field_adds_a_part():
    class Teaching(Policy):
        total_field = {"learn", "collect", "eval", "teach"}

        def _init_teach(self):
            self.taught = True

    policy = Teaching({}, enable_field=["teach"])
    assert policy.taught
    assert (
        set(Teaching.fields) == set(Teaching.total_field) == {"learn", "collect", "eval", "teach"}
    )


def test_a_policy_that_only_commands_has_no_model():
    class Commanding(CommandModePolicy):
        def default_model(self):
            raise AssertionError("no model is needed")

        def _get_setting_collect(self, command_info):
            return {"eps": 0.5}

    policy = Commanding({}, enable_field=["command"])
    assert policy._device == "cpu"
    assert not hasattr(policy, "_model")
    assert policy.command_mode.get_setting_collect({"envstep": 1}) == {"eps": 0.5}
    assert "None" in repr(policy)


def test_the_command_mode_has_its_classic_class_attribute():
    assert CommandModePolicy.command_function._fields == (
        "get_setting_learn",
        "get_setting_collect",
        "get_setting_eval",
    )
    foreign = namedtuple("foreign", CommandModePolicy.command_function._fields)

    class Commanding(CommandModePolicy):
        command_function = foreign

    assert isinstance(Commanding({}, enable_field=["command"]).command_mode, foreign)
