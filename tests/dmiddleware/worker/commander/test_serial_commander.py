"""The commander of a serial program, with a real policy and real workers."""

import pytest

from dmiddleware.classic import CommandMode, CommandModePolicy, create_policy, get_policy_cls
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import POLICY_REGISTRY, BCPolicy, DQNPolicy, PPOPolicy
from dmiddleware.worker import (
    BaseLearner,
    BaseSerialCommander,
    InteractionSerialEvaluator,
    SampleSerialCollector,
)


@pytest.fixture
def policy():
    return create_policy(
        {
            "type": "dqn",
            "model": {"obs_shape": 4, "action_shape": 2},
            "other": {"eps": {"start": 1.0, "end": 0.0, "decay": 100}},
        }
    )


@pytest.fixture
def workers(policy):
    with (
        BaseLearner(policy=policy) as learner,
        SampleSerialCollector(
            env=make_env_manager("CartPole-v1", env_num=2, seed=0), policy=policy
        ) as collector,
        InteractionSerialEvaluator(
            {"n_episode": 2}, make_env_manager("CartPole-v1", env_num=2, seed=1), policy
        ) as evaluator,
    ):
        yield learner, collector, evaluator


def test_exploration_follows_the_steps_collected(policy, workers):
    learner, collector, evaluator = workers
    commander = BaseSerialCommander({}, learner, collector, evaluator, None, policy)
    assert commander.step() == {"eps": 1.0}
    collector.collect(n_sample=50, policy_kwargs=commander.step())
    assert commander.step()["eps"] == pytest.approx(1 - collector.envstep / 100)


class Watching(CommandModePolicy):
    """Returns all that the commander says."""

    def _get_setting_collect(self, command_info):
        return dict(command_info)


def test_the_policy_is_told_the_whole_progress(workers):
    learner, collector, evaluator = workers
    policy = Watching(enable_field="command")
    commander = BaseSerialCommander(None, learner, collector, evaluator, None)
    commander.policy = policy.command_mode
    info = commander.step()
    assert info.keys() == {*learner.learn_info, "train_iter", "envstep", "eval_value"}
    assert (info["learner_step"], info["envstep"], info["eval_value"]) == (0, 0, None)

    _, result = evaluator.eval()
    learner.train(collector.collect(n_sample=4))
    info = commander.step()
    assert info["eval_value"] == result["return_mean"] == evaluator.last_eval
    assert (info["learner_step"], info["train_iter"]) == (1, 1)
    assert info["envstep"] == collector.envstep >= 4


def test_a_foreign_command_mode_is_accepted(workers):
    from collections import namedtuple

    mode = namedtuple("own_mode", ["get_setting_learn", "get_setting_collect", "get_setting_eval"])
    nothing = mode(dict, lambda info: {"eps": 0.3}, dict)
    learner, collector, _ = workers
    assert BaseSerialCommander({}, learner, collector, None, None, nothing).step() == {"eps": 0.3}


def test_a_policy_without_a_command_mode_is_refused(workers, per_env_policy):
    learner, collector, evaluator = workers
    commander = BaseSerialCommander({}, learner, collector, evaluator, None)
    with pytest.raises(ConfigError, match="command_mode"):
        commander.step()
    with pytest.raises(ConfigError, match="command_mode"):
        commander.policy = learner.policy
    with pytest.raises(ConfigError, match="eps"):
        BaseSerialCommander({"eps": 1}, learner, collector, evaluator, None)


@pytest.mark.parametrize(
    ("name", "cls"),
    [("dqn_command", DQNPolicy), ("ppo_command", PPOPolicy), ("bc_command", BCPolicy)],
)
def test_command_policies_are_second_names_of_the_stock_policies(name, cls):
    assert POLICY_REGISTRY.get(name.removesuffix("_command")) is cls
    assert get_policy_cls({"type": name}).core is cls
    policy = create_policy({"type": name}, enable_field=["command"])
    assert isinstance(policy.command_mode, CommandMode)
    if cls is not DQNPolicy:
        assert policy.command_mode.get_setting_collect({"envstep": 3}) == {}


def test_the_classic_name_of_the_exponential_schedule_is_known():
    settings = [
        create_policy(
            {"type": "dqn_command", "other": {"eps": {"type": kind, "decay": 100}}},
            enable_field=["command"],
        ).command_mode.get_setting_collect({"envstep": 50})
        for kind in ("exp", "exponential", "linear")
    ]
    assert settings[0] == settings[1] != settings[2]


def test_progress_without_env_steps_is_refused(policy):
    with pytest.raises(ConfigError, match="envstep"):
        policy.command_mode.get_setting_collect({"train_iter": 3})


def test_the_last_evaluation_is_resumed_and_forgotten(workers):
    *_, evaluator = workers
    evaluator.eval()
    state, last = evaluator.state_dict(), evaluator.last_eval
    evaluator.reset()
    assert evaluator.last_eval is None
    evaluator.load_state_dict(state)
    assert evaluator.last_eval == last
