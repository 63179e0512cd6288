"""Values that nothing can be learned from are the error of one env, named once."""

import functools
import logging

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from strange_envs import BOX, LIMIT, Bad

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import (
    AsyncEnvManager,
    BattleEnv,
    SyncEnvManager,
    VectorEnvManager,
    make_env_manager,
)
from dmiddleware.env.batching import is_finite
from dmiddleware.errors import EnvProtocolError
from dmiddleware.policy import A2CPolicy, DQNPolicy, PPOPolicy, SACPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes


def sync(env_fn):
    return SyncEnvManager([Bad, env_fn], seed=0)


def in_process(env_fn):
    return AsyncEnvManager([env_fn, env_fn], seed=0, envs_per_process=2)


def vector(mode, env_fn):
    fn = functools.partial(gym.vector.SyncVectorEnv, [env_fn, env_fn], autoreset_mode=mode)
    return VectorEnvManager(fn, 2, seed=0)


MANAGERS = [
    lambda env_fn: SyncEnvManager([env_fn] * 2, seed=0),
    functools.partial(vector, AutoresetMode.NEXT_STEP),
    functools.partial(vector, AutoresetMode.SAME_STEP),
    functools.partial(vector, AutoresetMode.DISABLED),
]


def play(manager, n_steps=3 * LIMIT):
    with manager:
        for _ in range(n_steps):
            manager.step(manager.sample_actions())


def set_to(value, *path):
    """Return a function that puts a value into one number of an observation."""

    def change(obs):
        part = obs
        for key in path:
            part = part[key]
        part[-1] = value
        return obs

    return change


NESTED = spaces.Dict(
    image=spaces.Box(0, 255, (2, 2), np.uint8),
    pose=spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float64))),
)


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("at", "when"), [(3, "in step 3"), (LIMIT, "in step 4"), (0, "start|step")]
)
def test_an_observation_is_finite(make, value, at, when, caplog):
    manager = make(functools.partial(Bad, obs=set_to(value), at=at))
    with pytest.raises(EnvProtocolError, match=rf"env 0 .*{value} at \[2\], .*({when})"):
        play(manager)
    assert manager.closed
    assert manager.restarts == 0
    assert "restarting" not in caplog.text


@pytest.mark.parametrize("make", MANAGERS)
def test_a_part_of_an_observation_is_named(make):
    manager = make(functools.partial(Bad, NESTED, set_to(np.nan, "pose", 1)))
    with pytest.raises(EnvProtocolError, match=r"nan at \[1\] of its part \['pose'\]\[1\]"):
        play(manager)


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_is_finite(make, value):
    manager = make(functools.partial(Bad, reward=value))
    with pytest.raises(EnvProtocolError, match=f"env 0 returned the reward {value} in step 3"):
        play(manager)
    assert manager.restarts == 0


@pytest.mark.process
@pytest.mark.parametrize(
    "bad",
    [
        {"obs": set_to(np.nan), "at": LIMIT},
        {"obs": set_to(np.inf), "at": 0},
        {"reward": np.nan},
        {"space": spaces.Discrete(3), "obs": lambda obs: 3},
    ],
)
def test_the_values_from_another_process_are_checked(bad):
    manager = in_process(functools.partial(Bad, **bad))
    with pytest.raises(EnvProtocolError, match=r"env 0 .*(nan|inf|3).* of its episode"):
        play(manager)
    assert manager.restarts == 0


def test_only_the_env_at_fault_is_named():
    with pytest.raises(EnvProtocolError, match="env 1 "):
        play(sync(functools.partial(Bad, reward=np.nan)))
    with pytest.raises(EnvProtocolError, match="env 1 "):
        play(sync(functools.partial(Bad, obs=set_to(np.nan))))


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3), -1),
        (spaces.Discrete(3, start=5), 0),
        (spaces.Discrete(3, start=-1), 2),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 3])),
        (spaces.MultiDiscrete([2, 3], start=[1, 1]), np.array([0, 1])),
        (spaces.MultiDiscrete([[2], [3]]), np.array([[2], [0]])),
    ],
)
def test_a_choice_is_in_its_space(make, space, value):
    manager = make(functools.partial(Bad, space, lambda obs: value))
    with pytest.raises(EnvProtocolError, match=r"env 0 .*which is not in .*Discrete"):
        play(manager)


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([2, 3], start=[4, -7]),
        spaces.MultiBinary(3),
        NESTED,
        spaces.Box(-1, 1, (), np.float64),
        spaces.Box(0, 1, (0,), np.float32),
    ],
)
def test_values_in_their_space_are_accepted(make, space):
    play(make(functools.partial(Bad, space)))


def test_large_values_are_finite():
    for dtype in (np.float16, np.float32, np.float64):
        most = np.finfo(dtype).max
        space = spaces.Box(0, most, (3,), dtype)
        play(SyncEnvManager([functools.partial(Bad, space, set_to(most))]))


@given(arrays(st.sampled_from([np.float32, np.float64]), (3, 2)), st.booleans())
def test_finite_is_what_numpy_says(array, transposed):
    array = array.T if transposed else array
    assert is_finite(array) == np.isfinite(array).all()
    assert is_finite(torch.from_numpy(array)) == np.isfinite(array).all()


class Tensors(gym.vector.VectorEnv):
    """A simulator that returns tensors, one of them bad in the third step or at an end."""

    num_envs = 3
    single_observation_space = BOX
    single_action_space = spaces.Discrete(2)

    def __init__(self, mode, bad_at):
        self.metadata, self.bad_at, self.at = {"autoreset_mode": mode}, bad_at, 0

    def reset(self, *, seed=None, options=None):
        obs = torch.zeros(3, 3)
        obs[1, 2] = np.nan if self.at and self.bad_at == 0 else 0.0
        self.at = 0
        return obs, {}

    def step(self, actions):
        self.at += 1
        obs, info = torch.zeros(3, 3), {}
        obs[1, 2] = np.nan if self.at == self.bad_at else 0.0
        ended = torch.full((3,), self.at == LIMIT)
        if ended.all() and self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            info, obs = {"final_obs": obs}, self.reset()[0]
        elif self.at > LIMIT:
            obs = self.reset()[0]
        return obs, torch.zeros(3), ended & False, ended, info


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("at", [0, 3, LIMIT])
def test_tensors_of_a_simulator_are_finite(mode, at):
    manager = VectorEnvManager(functools.partial(Tensors, mode, at), 3)
    with pytest.raises(EnvProtocolError, match=r"env 1 .*nan at \[2\]"):
        play(manager)
    play(VectorEnvManager(functools.partial(Tensors, mode, -1), 3))


def collect(policy, envs):
    RolloutCollector(policy, envs).collect(30)


def collect_at_random(policy, envs):
    random = not policy.collect_mode.spec.on_policy
    RolloutCollector(policy, envs).collect(30, random=random)


def collect_episodes(policy, envs):
    RolloutCollector(policy, envs).collect_episodes(4)


def evaluate(policy, envs):
    evaluate_episodes(policy, envs, 4)


@pytest.mark.parametrize("use", [collect, collect_at_random, collect_episodes, evaluate])
@pytest.mark.parametrize("policy_cls", [PPOPolicy, A2CPolicy, DQNPolicy, SACPolicy])
@pytest.mark.parametrize("bad", [{"obs": set_to(np.nan)}, {"reward": np.nan}])
def test_whoever_steps_the_envs_names_the_one_at_fault(use, policy_cls, bad):
    n_action = 0 if policy_cls is SACPolicy else 3
    fns = [functools.partial(Bad, n_action=n_action, **kwargs) for kwargs in ({}, bad)]
    with SyncEnvManager(fns, seed=0) as envs:
        with pytest.raises(EnvProtocolError, match=r"env 1 .*in step 3"):
            use(policy_cls.for_env(envs, seed=0), envs)
        assert envs.restarts == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, "much", None, np.zeros(2)])
@pytest.mark.parametrize("use", [collect, evaluate])
def test_a_return_that_the_env_reports_is_a_finite_number(value, use):
    info = {"eval_episode_return": value}
    envs = SyncEnvManager([functools.partial(Bad, at=LIMIT, info=info)])
    with envs, pytest.raises(EnvProtocolError, match=r"env 0 .*eval_episode_return"):
        use(DQNPolicy.for_env(envs, seed=0), envs)


def test_a_mask_in_the_info_is_finite():
    class Masked(Bad):
        def reset(self, **kwargs):
            obs, _ = super().reset(**kwargs)
            return obs, {"action_mask": np.ones(3)}

        def step(self, action):
            *result, _ = super().step(action)
            return *result, {"action_mask": np.full(3, np.nan if self.at == 2 else 1.0)}

    with SyncEnvManager([Masked]) as envs, pytest.raises(EnvProtocolError, match="action_mask"):
        collect(DQNPolicy.for_env(envs, seed=0), envs)


class BadGame(BattleEnv):
    observation_space = BOX
    action_space = spaces.Discrete(2)

    def __init__(self, obs=0.0, reward=0.0):
        self.bad_obs, self.bad_reward, self.at = obs, reward, 0

    def reset(self, seed=None):
        return [np.zeros(3, np.float32)] * 2

    def step(self, actions):
        self.at += 1
        obs = np.full(3, self.bad_obs if self.at == 2 else 0.0, np.float32)
        return [np.zeros_like(obs), obs], [0.0, self.bad_reward], False, False, [{}, {}]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"obs": np.nan}, "game 0 .*of player 1"),
        ({"reward": np.nan}, "game 0 .*reward nan in step 1"),
        ({"reward": None}, "game 0 .*reward None"),
        ({"reward": "1"}, "game 0 .*reward '1'"),
    ],
)
def test_the_values_of_games_are_finite(bad, message):
    with BattleEnvManager([functools.partial(BadGame, **bad)]) as manager:
        with pytest.raises(EnvProtocolError, match=message):
            for _ in range(3):
                manager.step({0: [0, 1]})
        assert manager.restarts == 0


def test_the_rewards_of_agents_are_finite():
    pettingzoo = pytest.importorskip("pettingzoo")
    env = pettingzoo.make("parallel", "classic/rps-v2")
    plain = env.step

    def step(actions):
        obs, rewards, *rest = plain(actions)
        return obs, {**rewards, env.possible_agents[1]: np.nan}, *rest

    env.step = step
    manager = make_env_manager(lambda: env, env_num=1)
    with manager, pytest.raises(EnvProtocolError, match=r"env 0 returned the reward \[.*, nan\]"):
        manager.step(np.zeros((1, 2), int))


def test_a_good_env_logs_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        play(SyncEnvManager([Bad, Bad]))
    assert not caplog.records
