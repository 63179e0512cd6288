"""What policies written for DI-engine rely on: samples, names, attributes."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware.classic import (
    CommandModePolicy,
    EvalMode,
    Policy,
    as_learn_mode,
    create_policy,
    get_policy_cls,
)
from dmiddleware.data import as_tree, index_rows
from dmiddleware.errors import ConfigError, PolicyError, StructureError
from dmiddleware.policy import DQNPolicy

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}
DQN = {"type": "dqn", "model": SMALL}


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
    ],
)
def test_a_class_that_acts_per_env_learns_from_samples(cls, learn_from):
    assert cls.learn_from == learn_from


def test_a_subclass_that_does_not_write_learning_keeps_what_its_parent_learns_from():
    class Stored(PerEnvOnBatches):
        def _get_train_sample(self, transitions):
            return transitions

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
    policy.learn_mode.forward(as_tree({"reward": torch.tensor([1.0, 2.0])}))
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
        return as_learn_mode(policy, user="test").forward([{**sample, **weight}])["total_loss"]

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
    class Own(Policy):
        eval_function = type("OwnEval", (EvalMode,), {})

        def _create_model(self, cfg, model=None):
            return nn.Linear(1, 1)

        def _get_attribute(self, name):
            return "mine" if name == "answer" else super()._get_attribute(name)

        def _set_attribute(self, name, value):
            super()._set_attribute(name, value + 1)

        def _forward_eval(self, data):
            return {env_id: {"action": obs[0]} for env_id, obs in data.items()}

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


def test_fields_are_built_only_if_they_are_enabled():
    built = []

    class Watched(PerEnv):
        def _init_learn(self):
            built.append("learn")

        def _init_collect(self):
            built.append("collect")

        def _init_eval(self):
            built.append("eval")

        def _forward_eval(self, data):
            return {}

    Watched({}, nn.Linear(4, 2), enable_field=["collect"])
    assert built == ["collect"]
    built.clear()
    Watched({}, nn.Linear(4, 2))
    assert built == ["learn", "collect", "eval"]


@pytest.mark.parametrize("field", ["learn", "collect", "eval"])
def test_a_policy_without_a_method_names_the_method_to_write(field):
    class Mute(Policy):
        pass

    with pytest.raises(PolicyError, match=rf"write _forward_{field}\(self"):
        Mute({}, model=nn.Linear(4, 2), enable_field=[field])


@pytest.mark.parametrize("field", [["leern"], []])
def test_an_unknown_or_empty_field_is_rejected(field):
    for make in (PerEnv, get_policy_cls({"type": "dqn"})):
        with pytest.raises(ConfigError, match="subset of learn, collect, eval"):
            make({}, enable_field=field)


def test_attributes_are_read_through_getter_then_field_then_property():
    policy = create_policy(
        {"type": "dqn", "model": SMALL, "learn": {"batch_size": 17}, "collect": {"n_sample": 9}}
    )
    assert policy.learn_mode.get_attribute("batch_size") == 17
    assert policy.collect_mode.get_attribute("n_sample") == 9
    assert policy.collect_mode.get_attribute("n_episode") is None
    assert policy.collect_mode.get_attribute("batched") is True
    assert policy.eval_mode.get_attribute("train_iter") == 0
    own = policy_of(Learning)
    own.learn_mode.set_attribute("train_iter", 5)
    assert own.learn_mode.get_attribute("train_iter") == 5


@pytest.mark.parametrize(
    "cfg",
    [
        {"n_sample": 3, "n_episode": 4, "batch_size": 5},
        {"collect": {"n_sample": 3, "n_episode": 4}, "learn": {"batch_size": 5}},
    ],
)
def test_a_policy_without_a_config_takes_the_sizes_that_workers_read(cfg):
    class Plain(Learning):
        pass

    policy = Plain(cfg, nn.Linear(4, 2), ["learn"])
    got = [policy.get_attribute(name) for name in ("n_sample", "n_episode", "batch_size")]
    assert got == [3, 4, 5]


def test_sizes_are_read_from_the_top_of_the_config_too():
    class Flat(Learning):
        config = {"n_sample": 3, "n_episode": 4, "batch_size": 5}

    policy = policy_of(Flat)
    got = [policy.get_attribute(name) for name in ("n_sample", "n_episode", "batch_size")]
    assert got == [3, 4, 5]


@pytest.mark.parametrize("make", [lambda: policy_of(Learning), lambda: create_policy(DQN)])
def test_an_unknown_attribute_names_near_misses(make):
    with pytest.raises(AttributeError, match=r"'batch_sise'.*did you mean: batch_size"):
        make().get_attribute("batch_sise")
    with pytest.raises(NotImplementedError):
        make().learn_mode.get_attribute("batch_sise")
    with pytest.raises(NotImplementedError):
        as_learn_mode(DQNPolicy({"model": SMALL}), user="test").get_attribute("batch_sise")


def test_an_attribute_that_an_own_lookup_does_not_know_is_unknown_in_both_ways():
    class OwnLookup(Learning):
        def _get_attribute(self, name):
            raise NotImplementedError

    policy = policy_of(OwnLookup)
    assert policy.get_attribute("train_iter") == 0
    for error in (AttributeError, NotImplementedError):
        with pytest.raises(error, match="did you mean"):
            policy.learn_mode.get_attribute("train_itre")


def test_the_modes_of_a_stock_policy_have_the_fields_of_di_engine():
    policy = create_policy(DQN)
    assert policy.learn_mode.info() == repr(policy.policy)
    assert policy.learn_mode.monitor_vars() == ["cur_lr", "total_loss", "q_value", "target_q_value"]
    assert [*policy.learn_mode._fields] == [
        "forward", "reset", "info", "monitor_vars", "get_attribute", "set_attribute",
        "state_dict", "load_state_dict",
    ]  # fmt: skip
    assert [*policy.collect_mode._fields] == [
        "forward", "process_transition", "get_train_sample", "reset", "get_attribute",
        "set_attribute", "state_dict", "load_state_dict", "seed",
    ]  # fmt: skip
    assert [*policy.eval_mode._fields] == [
        "forward", "reset", "get_attribute", "set_attribute", "state_dict", "load_state_dict",
        "seed",
    ]  # fmt: skip
    for mode in (policy.learn_mode, policy.collect_mode, policy.eval_mode):
        assert all(callable(getattr(mode, name)) for name in mode._fields)


def test_learning_collates_a_list_of_samples(small, transitions):
    batch = transitions(8)
    rows = [{key: batch[key][i] for key in batch} for i in range(8)]
    one, other = (DQNPolicy({"model": small, "seed": 0}) for _ in range(2))
    assert as_learn_mode(one, user="test").forward(rows) == other.learn_mode.forward(batch)


def test_a_sample_without_a_column_names_it(small, transitions):
    batch = transitions(4)
    rows = [{key: batch[key][i] for key in ("obs", "action", "reward")} for i in range(4)]
    with pytest.raises(StructureError, match="the batch lacks next_obs, terminated"):
        as_learn_mode(DQNPolicy({"model": small}), user="test").forward(rows)


def test_a_policy_per_env_saves_model_and_generators_too(per_env):
    state = per_env.learn_mode.state_dict()
    assert set(state) == {"model", "generator", "eval_generator", "train_iter"}
    per_env.learn_mode.load_state_dict(state)
