"""An episode that never ends is reported wherever its end is waited for."""

import functools
import logging

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from dmiddleware import Task
from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import BattleEnv, make_env_manager
from dmiddleware.errors import EnvTimeout
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.rollout.episode_watch import EpisodeWatch
from dmiddleware.worker import BattleInteractionSerialEvaluator, InteractionSerialEvaluator
from middleware import interaction_evaluator
from tests.variants import mostly_slow


class Endless(gym.Env):
    """Never ends; it raises an error that is not retried after some steps."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self, most=5_001):
        self.most = most

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return 0, {}

    def step(self, action):
        self.n += 1
        if self.n == self.most:
            raise KeyboardInterrupt
        return self.n % 2, 0.0, False, False, {}


class EndlessGame(BattleEnv):
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)
    n = 0

    def reset(self, seed=None):
        return [0, 0]

    def step(self, actions):
        self.n += 1
        if self.n == 5_001:
            raise KeyboardInterrupt
        return [0, 0], [0.0, 0.0], False, False, [{}, {}]


def endless():
    manager = make_env_manager(Endless, env_num=1, seed=0)
    model = {"encoder_hidden_sizes": [2]}
    return DQNPolicy.for_env(manager, seed=0, model=model), manager


def by_function():
    evaluate_episodes(*endless(), 1)


def by_middleware():
    policy, manager = endless()
    with Task(seed=0) as task:
        task.use(interaction_evaluator(policy, manager, n_episode=1))
        task.run(max_step=1)


def by_classic_evaluator(tmp_path):
    policy, manager = endless()
    cfg = {"n_episode": 1}
    InteractionSerialEvaluator(cfg, manager, policy, exp_name=str(tmp_path)).eval()


def by_battle_evaluator(tmp_path):
    policy, _ = endless()
    manager = BattleEnvManager([EndlessGame])
    cfg = {"n_episode": 1}
    BattleInteractionSerialEvaluator(cfg, manager, [policy, policy], exp_name=str(tmp_path)).eval()


def by_collecting():
    RolloutCollector(*endless()).collect_episodes(1)


@pytest.mark.parametrize(
    "wait",
    mostly_slow(
        [by_function, by_middleware, by_classic_evaluator, by_battle_evaluator, by_collecting],
        keep=[1, 4],
    ),
)
def test_a_warning_names_env_and_steps_and_remedy(wait, caplog, tmp_path):
    run = functools.partial(wait, tmp_path) if wait.__code__.co_argcount else wait
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        run()
    warned = [one.getMessage() for one in caplog.records if "TimeLimit" in one.getMessage()]
    assert len(warned) == 1
    assert "env 0" in warned[0]
    assert "5,000 steps" in warned[0]
    assert "1,000,000" in warned[0]


def test_episodes_that_end_are_not_reported(caplog):
    wrappers = [functools.partial(gym.wrappers.TimeLimit, max_episode_steps=1_500)]
    env_fn = functools.partial(Endless, most=10_000)
    with make_env_manager(env_fn, env_num=1, wrappers=wrappers) as manager:
        policy = DQNPolicy.for_env(manager, seed=0, model={"encoder_hidden_sizes": [2]})
        monitor = evaluate_episodes(policy, manager, 4)
    assert monitor.get_current_episode() == 4
    assert "TimeLimit" not in caplog.text


class Lengths:
    """A manager whose envs have made some steps in their episodes."""

    def __init__(self, lengths):
        self.episode_lengths = lengths


def test_warnings_become_rarer_and_end_with_an_error(caplog):
    manager = Lengths([0, 0])
    watch = EpisodeWatch(manager, user="the test")
    warned = []
    with caplog.at_level(logging.WARNING), pytest.raises(EnvTimeout, match=r"env 1 .*TimeLimit"):
        for step in range(1, 10**7):
            manager.episode_lengths = [2 * step, step]
            watch.check([1])
            if len(caplog.records) > len(warned):
                warned.append(step)
    assert warned == [5_000 * 2**n for n in range(8)]
    assert step == 1_000_000


def test_paused_envs_are_not_waited_for():
    watch = EpisodeWatch(Lengths([10**6, 1]), user="the test")
    for _ in range(1_000):
        watch.check([1])
        watch.check([])
    with pytest.raises(EnvTimeout):
        for _ in range(1_000):
            watch.check(np.array([0]).tolist())
