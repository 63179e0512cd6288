"""A policy as a function: it acts as it does in an evaluation, without an env manager."""

from __future__ import annotations

import copy
import functools
import re

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, RunFolderError, StructureError
from dmiddleware.policy import (
    DecisionTransformerPolicy,
    DQNPolicy,
    PPOPolicy,
    QMIXPolicy,
    R2D2Policy,
    RecurrentPPOPolicy,
    RecurrentQMIXPolicy,
    SACPolicy,
)
from dmiddleware.policy.policy_description import DESCRIPTION, describe_policy, policy_from
from dmiddleware.rollout import ActingPolicy, evaluate_episodes
from dmiddleware.runs import load_policy
from tests.dmiddleware.policy.drawn_envs import Drawn
from tests.dmiddleware.team_envs import CountingTeam

SMALL = {"encoder_hidden_sizes": [8]}


class Taped(gym.Wrapper):
    """Writes down each episode: its observations, actions and rewards, in turn."""

    def __init__(self, env, episodes):
        super().__init__(env)
        self.episodes = episodes

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.episodes.append([copy.deepcopy(obs)])
        return obs, info

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.episodes[-1] += [copy.deepcopy(action), reward, copy.deepcopy(obs)]
        return obs, reward, *rest


class Shapes(gym.Env):
    """Observations and actions of nested spaces, with a mask; three steps long."""

    observation_space = gym.spaces.Dict(
        {
            "where": gym.spaces.Discrete(4),
            "image": gym.spaces.Box(0, 255, (1, 2), np.uint8),
            "action_mask": gym.spaces.MultiBinary(5),
        }
    )
    action_space = gym.spaces.Tuple((gym.spaces.Discrete(3, start=2), gym.spaces.MultiBinary(2)))

    def _obs(self):
        return {
            "where": self.t,
            "image": np.array([[self.t, 7]], np.uint8),
            "action_mask": np.array([0, 1, 0, 0, 1], np.int8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert isinstance(action, tuple)
        assert action[0] == 3, "masked"
        assert action[1][0] == 0, "masked"
        self.t += 1
        return self._obs(), 1.0, self.t == 3, False, {}


def cartpole():
    return gym.make("CartPole-v1")


def pendulum():
    return gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 20)


POLICIES = {
    "dqn": (cartpole, lambda env: DQNPolicy.for_env(env, model=SMALL, seed=1)),
    "norm": (cartpole, lambda env: PPOPolicy.for_env(env, obs_norm=True, seed=1)),
    "sac": (pendulum, lambda env: SACPolicy.for_env(env, seed=1)),
    "r2d2": (cartpole, lambda env: R2D2Policy.for_env(env, seed=1)),
    "recurrent_ppo": (cartpole, lambda env: RecurrentPPOPolicy.for_env(env, seed=1)),
    "recurrent_box": (pendulum, lambda env: RecurrentPPOPolicy.for_env(env, seed=1)),
    "nested": (Shapes, lambda env: PPOPolicy.for_env(env, seed=1)),
    "several recurrent agents": (
        lambda: CountingTeam(masked=True),
        lambda env: RecurrentQMIXPolicy.for_env(env, seed=1),
    ),
    "several agents": (
        lambda: CountingTeam(masked=True),
        lambda env: QMIXPolicy.for_env(env, seed=1),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_it_acts_as_an_evaluation_does(name):
    make, build = POLICIES[name]
    episodes = []
    with make_env_manager(lambda: Taped(make(), episodes), env_num=1, mode="sync", seed=5) as envs:
        policy = build(envs)
        evaluate_episodes(policy, envs, 2)
    act = ActingPolicy(policy)
    played = [one for one in episodes if len(one) > 1]
    for episode in played:
        assert len(episode) > 9
        reward = None
        for at in range(0, len(episode) - 1, 3):
            np.testing.assert_equal(act(episode[at], prev_reward=reward), episode[at + 1])
            reward = episode[at + 2]
        act.reset()
    assert len(played) == 2


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_gives_the_actions_of_its_rows(name):
    make, build = POLICIES[name]
    policy, env = build(make()), make()
    rows = [env.reset(seed=seed)[0] for seed in range(3)]
    batch = gym.vector.utils.concatenate(
        env.observation_space,
        rows,
        gym.vector.utils.create_empty_array(env.observation_space, n=3),
    )
    actions = ActingPolicy(policy)(batch)
    parts = actions if isinstance(actions, tuple) else (actions,)
    alone = [ActingPolicy(policy)(row) for row in rows]
    alone = [one if isinstance(one, tuple) else (one,) for one in alone]
    for at, part in enumerate(parts):
        np.testing.assert_allclose(part, np.stack([one[at] for one in alone]), rtol=1e-4)
    assert all(env.action_space.contains(ActingPolicy(policy)(row)) for row in rows)


def test_rows_start_again_one_by_one():
    policy = RecurrentPPOPolicy.for_env(pendulum(), seed=1)
    rows = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    act = ActingPolicy(policy)
    for batch in rows[:3]:
        act(batch, prev_reward=[1.0, 2.0])
    act.reset([1])
    acted = act(rows[3], prev_reward=[3.0, 4.0])
    fresh = ActingPolicy(policy)(rows[3])
    np.testing.assert_allclose(acted[1], fresh[1], rtol=1e-4)
    assert abs(acted[0] - fresh[0]) > 1e-4


def test_a_decision_transformer_asks_for_the_last_reward():
    policy = DecisionTransformerPolicy.for_env(cartpole(), seed=1, model={"embed_size": 8})
    act = ActingPolicy(policy)
    obs = np.zeros(4, np.float32)
    act(obs)
    with pytest.raises(ConfigError, match="prev_reward"):
        act(obs)
    assert act(obs, prev_reward=1.0) in (0, 1)
    act.reset()
    act(obs)


def test_a_stochastic_policy_draws_if_asked():
    policy = PPOPolicy.for_env(cartpole(), seed=1)
    act, obs = ActingPolicy(policy), np.zeros((200, 4), np.float32)
    assert len(set(act(obs).tolist())) == 1
    assert len(set(act(obs, deterministic=False).tolist())) == 2
    with pytest.raises(ConfigError, match="deterministic"):
        ActingPolicy(DQNPolicy.for_env(cartpole(), model=SMALL))(obs, deterministic=False)


def test_a_mask_can_be_given():
    act = ActingPolicy(DQNPolicy.for_env(cartpole(), model=SMALL, seed=1))
    obs = np.zeros(4, np.float32)
    assert [int(act(obs, action_mask=mask)) for mask in ([1, 0], [0, 1])] == [0, 1]
    assert act(np.stack([obs, obs]), action_mask=[[1, 0], [0, 1]]).tolist() == [0, 1]


def test_slips_are_refused():
    policy = RecurrentPPOPolicy.for_env(cartpole(), seed=1)
    act = ActingPolicy(policy)
    with pytest.raises(StructureError, match=r"1 dimension.*\(1, 1, 4\)"):
        act(np.zeros((1, 1, 4), np.float32))
    act(np.zeros(4, np.float32))
    with pytest.raises(StructureError, match="reset"):
        act(np.zeros((2, 4), np.float32))
    act.reset()
    act(np.zeros((2, 4), np.float32), prev_reward=0.0)


VECTOR = gym.spaces.Box(-1, 1, (4,), np.float32)
GRID = gym.spaces.Box(-1, 1, (2, 3), np.float32)
IMAGE = gym.spaces.Box(0, 255, (3, 36, 36), np.uint8)
CHOICE = gym.spaces.Discrete(3)
CHOICES = gym.spaces.MultiDiscrete([3, 2])
PARTS = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": CHOICE})
PAIR = gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2,)), CHOICE))
ZEROS = np.zeros(2)


@functools.cache
def loaded(space_text):
    """Return a policy for an observation space, as it is loaded from a checkpoint."""
    spaces = {str(one): one for one in (VECTOR, GRID, IMAGE, CHOICE, CHOICES, PARTS, PAIR)}
    env = Drawn(spaces[space_text], gym.spaces.Discrete(2))
    policy = DQNPolicy.for_env(env, seed=0)
    described = {DESCRIPTION: describe_policy(policy.eval_mode.spec)}
    return ActingPolicy(policy_from({**policy.eval_mode.state_dict(), **described}))


@pytest.mark.parametrize(
    ("space", "obs", "words"),
    [
        (VECTOR, np.zeros(5), "(1, 5)"),
        (VECTOR, np.zeros((2, 3)), "(2, 3)"),
        (VECTOR, np.zeros((2, 2, 4)), "1 dimension"),
        (VECTOR, [], "(1, 0)"),
        (VECTOR, None, "1 dimension"),
        (VECTOR, "text", "1 dimension"),
        (VECTOR, [[0.0] * 4, [0.0] * 3], "inhomogeneous"),
        (VECTOR, np.array(["a"] * 4), "dtype <U1"),
        (VECTOR, np.zeros(4, complex), "dtype complex128"),
        (VECTOR, np.array([None] * 4), "dtype object"),
        (VECTOR, (np.zeros(4), {}), "1 dimension"),
        (VECTOR, {"a": np.zeros(4)}, "1 dimension"),
        (VECTOR, np.array([0, 0, np.nan, 0]), "the value nan at [2]"),
        (VECTOR, np.array([[0, 0, 0, 0], [0, 0, 0, -np.inf]]), "the value -inf at [3]"),
        (VECTOR, torch.full((4,), torch.nan), "the value nan at [0]"),
        (GRID, np.zeros((3, 2)), "(1, 3, 2)"),
        (IMAGE, np.zeros((36, 36, 3), np.uint8), "(1, 36, 36, 3)"),
        (IMAGE, np.zeros((3, 36, 36), np.float32), "float32, but the space has uint8"),
        (IMAGE, np.full((3, 36, 36), 300), "300"),
        (IMAGE, np.full((2, 3, 36, 36), -1), "-1"),
        (CHOICE, 3, "the value 3, which is not in Discrete(3)"),
        (CHOICE, -1, "the value -1"),
        (CHOICE, 1.5, "integers"),
        (CHOICE, np.array([0, 7]), "the value 7"),
        (CHOICES, np.array([1, 2]), "[1, 2], which is not in"),
        (CHOICES, np.array([1]), "(1, 1)"),
        (PARTS, {"a": ZEROS}, "['a']"),
        (PARTS, {"b": 1}, "at a"),
        (PARTS, {}, "at a"),
        (PARTS, {"a": ZEROS, "b": 1, "c": 3}, "['a', 'b', 'c']"),
        (PARTS, {"a": np.zeros(3), "b": 1}, "(1, 3)"),
        (PARTS, {"a": ZEROS, "b": 5}, "Discrete(3) of its part ['b']"),
        (PARTS, {"a": np.array([0, np.nan]), "b": 1}, "nan at [1] of its part ['a']"),
        (PARTS, {"a": np.zeros((2, 2)), "b": 1}, "Discrete(3)"),
        (PARTS, {"a": np.zeros((2, 2)), "b": np.zeros(3, int)}, "[2, 3] rows"),
        (PARTS, ZEROS, "at a"),
        (PARTS, [{"a": ZEROS, "b": 1}] * 2, "at a"),
        (PAIR, (ZEROS,), "1 parts, but the space has 2"),
        (PAIR, (ZEROS, 1, 2), "3 parts, but the space has 2"),
        (PAIR, (np.zeros((2, 2)), 1), "Discrete(3)"),
    ],
)
def test_an_observation_that_does_not_fit_is_named(space, obs, words):
    with pytest.raises(StructureError, match=re.escape(words)) as caught:
        loaded(str(space))(obs)
    assert "DQNPolicy" in str(caught.value)


@pytest.mark.parametrize(
    ("space", "obs", "n"),
    [
        (VECTOR, [0.0, 0, 0, 0], None),
        (VECTOR, np.zeros(4, np.float16), None),
        (VECTOR, torch.zeros(4, requires_grad=True), None),
        (VECTOR, [[0, 0, 0, 0]] * 3, 3),
        (VECTOR, np.full(4, 9.0), None),
        (IMAGE, np.full((3, 36, 36), 255), None),
        (CHOICE, True, None),
        (CHOICE, [1, 2], 2),
        (PARTS, {"a": [0, 0], "b": 1}, None),
        (PARTS, {"a": np.zeros((3, 2)), "b": [0, 1, 2]}, 3),
        (PAIR, [ZEROS, 1], None),
        (PAIR, (np.zeros((2, 2)), np.array([1, 2])), 2),
    ],
)
def test_an_observation_in_another_form_is_taken(space, obs, n):
    action = loaded(str(space))(obs)
    assert action.shape == (() if n is None else (n,))


def test_a_mask_and_a_state_that_acting_does_not_need_may_be_absent():
    policy = PPOPolicy.for_env(Shapes(), seed=1)
    obs, _ = Shapes().reset()
    action = ActingPolicy(policy)({name: obs[name] for name in ("where", "image")})
    assert policy.spaces[1].contains(action)


@pytest.mark.parametrize("reward", [np.nan, [1.0, 2.0, 3.0], np.inf])
def test_a_previous_reward_is_a_number_for_each_row(reward):
    act = ActingPolicy(RecurrentPPOPolicy.for_env(cartpole(), seed=1))
    act(np.zeros((2, 4)))
    with pytest.raises(StructureError, match="prev_reward must be a finite number"):
        act(np.zeros((2, 4)), prev_reward=reward)


@pytest.mark.parametrize(
    ("n", "mask", "words"),
    [
        (None, [1], "1 entries, but the action has 2"),
        (None, [1, 0, 1], "3 entries, but the action has 2"),
        (None, 1, "must be [A]"),
        (None, "text", "must be [A]"),
        (None, ["a", "b"], "dtype <U1"),
        (None, [[1, 0]], "must be [A]"),
        (2, [1, 0], "must be [2, A]"),
        (2, [[1, 0]] * 3, "must be [2, A]"),
        (2, [[1, 0, 1]] * 2, "3 entries"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(n, mask, words):
    obs = np.zeros(4) if n is None else np.zeros((n, 4))
    with pytest.raises(StructureError, match=re.escape(words)):
        loaded(str(VECTOR))(obs, action_mask=mask)


def test_a_mask_may_be_nested_like_the_action():
    env = Drawn(VECTOR, gym.spaces.Dict({"a": CHOICE, "b": gym.spaces.Discrete(2)}))
    act = ActingPolicy(PPOPolicy.for_env(env, seed=0))
    action = act(np.zeros(4), action_mask={"a": [0, 0, 1], "b": [1, 0]})
    assert action == {"a": 2, "b": 0}
    with pytest.raises(StructureError, match="4 entries, but the action has 5"):
        act(np.zeros(4), action_mask={"a": [0, 1], "b": [1, 0]})


def test_whether_actions_are_drawn_is_true_or_false():
    act = ActingPolicy(PPOPolicy.for_env(cartpole(), seed=1))
    with pytest.raises(ConfigError, match="deterministic must be True or False, got 'no'"):
        act(np.zeros(4), deterministic="no")


@pytest.mark.parametrize("path", [None, 3, b"runs/x", ["runs/x"]])
def test_the_path_of_a_policy_is_a_text(path):
    with pytest.raises(RunFolderError, match="is a text, got"):
        load_policy(path)
    with pytest.raises(ConfigError, match="load_policy: unknown keyword devise"):
        load_policy("runs/x", devise="cpu")
