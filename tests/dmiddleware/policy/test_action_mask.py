"""Policies in environments whose observations say which actions are allowed."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware import classic
from dmiddleware.data import as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.errors import PolicyOutputError
from dmiddleware.model import action_mask_of, masked_logit, obs_shape_of
from dmiddleware.policy import BCPolicy, DQNPolicy, Policy, PPOPolicy
from dmiddleware.rollout import RolloutCollector

N_ACTIONS = 5


class Masked(gym.Env):
    """Allows one or two actions in each step, and raises where another one is taken."""

    observation_space = gym.spaces.Dict(
        {
            "observation": gym.spaces.Box(0.0, 1.0, (3,), np.float32),
            "action_mask": gym.spaces.Box(0, 1, (N_ACTIONS,), np.int8),
        }
    )
    action_space = gym.spaces.Discrete(N_ACTIONS)

    def _obs(self):
        self.mask = np.zeros(N_ACTIONS, np.int8)
        self.mask[[self.t % N_ACTIONS, (2 * self.t + 1) % N_ACTIONS]] = 1
        return {"observation": self.np_random.random(3, np.float32), "action_mask": self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        if not self.mask[action]:
            raise AssertionError(f"forbidden: {action} of {self.mask}")
        self.t += 1
        ends = self.t == 7
        obs = self._obs()
        if ends:
            obs["action_mask"] = np.zeros(N_ACTIONS, np.int8)
        return obs, float(action), ends, False, {}


def masked_envs():
    return make_env_manager(Masked, env_num=3, seed=0, max_retry=0)


@pytest.mark.parametrize("kind", [DQNPolicy, PPOPolicy, BCPolicy])
def test_a_masked_environment_never_sees_a_forbidden_action(kind):
    policy = kind.for_env(masked_envs(), seed=0)
    kwargs = {"eps": 0.5} if kind is DQNPolicy else {}
    with masked_envs() as envs:
        batch = RolloutCollector(policy, envs).collect(90, policy_kwargs=kwargs)
        obs = as_tree(envs.ready_obs)
        assert action_mask_of(obs).gather(1, policy.eval_mode.forward(obs)["action"][:, None]).all()
    assert action_mask_of(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).all()


def test_random_actions_respect_the_mask():
    with masked_envs() as envs:
        collector = RolloutCollector(DQNPolicy.for_env(envs), envs)
        batch = collector.collect(60, random=True)
    assert set(batch["action"].flatten().tolist()) == set(range(N_ACTIONS))


def masked_batch(next_mask):
    n = len(next_mask)
    return as_tree(
        {
            "obs": {"observation": torch.ones(n, 3), "action_mask": torch.ones(n, 5)},
            "next_obs": {"observation": torch.ones(n, 3), "action_mask": torch.tensor(next_mask)},
            "action": torch.zeros(n, dtype=torch.int64),
            "reward": torch.zeros(n),
            "terminated": torch.zeros(n, dtype=torch.bool),
        }
    )


@pytest.mark.parametrize("double", [True, False])
def test_dqn_bootstraps_only_from_allowed_actions(double):
    policy = DQNPolicy.for_env(masked_envs(), discount=1.0, double=double, seed=0)
    q = policy.model({"observation": torch.ones(3)})["logit"].detach()
    worst, best = int(q.argmin()), float(q.max())
    only_worst = [int(action == worst) for action in range(N_ACTIONS)]
    learn = policy.learn_mode.forward
    assert learn(masked_batch([only_worst]))["target_q_value"] == pytest.approx(float(q[worst]))
    free = DQNPolicy.for_env(masked_envs(), discount=1.0, double=double, seed=0)
    output = free.learn_mode.forward(masked_batch([[0] * N_ACTIONS]))
    assert output["target_q_value"] == pytest.approx(best)


def test_gradients_stay_finite_with_masks():
    policy = PPOPolicy.for_env(masked_envs(), seed=0)
    with masked_envs() as envs:
        batch = RolloutCollector(policy, envs).collect(30)
    flat = {key: batch[key].flatten(0, 1) for key in ("action", "log_prob", "value", "reward")}
    obs = {key: batch["obs"][key].flatten(0, 1) for key in ("observation", "action_mask")}
    ones = torch.randn(len(flat["action"]))
    output = policy.learn_mode.forward(as_tree({**flat, "obs": obs, "adv": ones, "ret": ones}))
    assert output["approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert all(np.isfinite(value) for value in output.values())


def test_the_mask_is_not_part_of_what_the_network_sees():
    assert obs_shape_of(Masked.observation_space) == {"observation": 3}


def test_rows_without_an_allowed_action_are_not_masked():
    obs = {"action_mask": np.array([[1, 0], [0, 0]], np.int8)}
    logit = masked_logit(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), obs)
    assert logit[0].argmax() == 0
    assert logit[1].tolist() == [3.0, 4.0]
    assert torch.isfinite(logit).all()
    assert masked_logit(logit, torch.zeros(2, 3)) is logit


class Stubborn(Policy):
    """Always takes action 3."""

    def act_eval(self, obs, env_id, **kwargs):
        return {"action": torch.full((len(env_id),), 3)}


class StubbornPerEnv(classic.Policy):
    """The same, written per env."""

    def _forward_eval(self, data, **kwargs):
        return {env_id: {"action": torch.tensor(3)} for env_id in data}


@pytest.mark.parametrize("kind", [Stubborn, StubbornPerEnv])
def test_a_forbidden_action_of_a_custom_policy_is_an_error(kind):
    policy = kind({}, torch.nn.Identity(), ["eval"])
    mode = classic.as_eval_mode(policy, user="the test")
    allowed, forbidden = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1, 0, 0, 0, 1])
    batch = as_tree({"action_mask": torch.stack([allowed, forbidden])})
    with pytest.raises(PolicyOutputError, match=r"action 3.*allows only \[0, 4\]"):
        mode.forward(batch)
    with pytest.raises(PolicyOutputError, match=r"allows only \[0, 4\]"):
        mode.forward({0: as_tree({"action_mask": forbidden})})
    assert int(mode.forward({0: as_tree({"action_mask": allowed})})[0]["action"]) == 3


class MaskedLinear(torch.nn.Module):
    """A custom model that masks its own logits."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, N_ACTIONS)

    def forward(self, obs):
        return {"logit": masked_logit(self.linear(obs["observation"]), obs)}


def test_a_custom_model_plays_in_a_masked_environment():
    policy = DQNPolicy.for_env(masked_envs(), model=MaskedLinear())
    with masked_envs() as envs:
        batch = RolloutCollector(policy, envs).collect(30, policy_kwargs={"eps": 0.3})
    assert action_mask_of(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).all()


def test_acting_where_no_action_is_allowed_is_an_error():
    policy = DQNPolicy.for_env(masked_envs())
    obs = as_tree({"observation": torch.ones(1, 3), "action_mask": torch.zeros(1, 5)})
    with pytest.raises(ValueError, match="allows no action"):
        policy.collect_mode.forward(obs)
    with pytest.raises(PolicyOutputError, match="do not ask for an action"):
        policy.eval_mode.forward(obs)
