"""Policies in environments with every kind of action space."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.classic import as_eval_mode
from dmiddleware.data import as_tree, flatten_lead, leaves
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.policy import BCPolicy, DQNPolicy, PPOPolicy
from dmiddleware.rollout import RolloutCollector
from tests.dmiddleware.policy.drawn_envs import Taking

SPACES = {
    "discrete": spaces.Discrete(3),
    "discrete with start": spaces.Discrete(3, start=2),
    "multi discrete": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "multi discrete of rank 2": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multi binary": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-2.0, 2.0, (3,), np.float32),
    "box of rank 0": spaces.Box(0.0, 2.0, (), np.float32),
    "box of rank 2": spaces.Box(0.0, 2.0, (2, 3), np.float64),
    "dict": spaces.Dict(
        {
            "move": spaces.Discrete(4, start=-1),
            "aim": spaces.Box(-1.0, 1.0, (2, 1), np.float32),
            "tools": spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([3, 2]))),
        }
    ),
    "tuple": spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2))),
}


def envs_of(space, **options):
    return make_env_manager(lambda: Taking(space), env_num=3, seed=0, max_retry=0, **options)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_ppo_acts_in_every_space_and_learns_from_what_it_drew(space):
    with envs_of(space) as envs:
        policy = PPOPolicy.for_env(envs, seed=0)
        batch = flatten_lead(RolloutCollector(policy, envs).collect(60))
    assert ("raw_action" in batch) is any("Box" in text for text in [str(space)])
    adv = torch.randn(60)
    output = policy.learn_mode.forward(as_tree({**dict(batch.items()), "adv": adv, "ret": adv}))
    assert output["approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert all(np.isfinite(value) for value in output.values())


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_discrete_actions_need_no_raw_ones_to_learn_from(space):
    with envs_of(space) as envs:
        policy = PPOPolicy.for_env(envs, seed=0)
        batch = dict(flatten_lead(RolloutCollector(policy, envs).collect(60)).items())
    batch.pop("raw_action", None)
    adv = torch.randn(60)
    output = policy.learn_mode.forward(as_tree({**batch, "adv": adv, "ret": adv}))
    if policy.codec.is_lossless:
        assert output["approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert np.isfinite(output["total_loss"])


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_evaluating_takes_the_mode_or_draws(space):
    with envs_of(space) as envs:
        policy = PPOPolicy.for_env(envs, seed=0)
    obs = torch.randn(1, 4).expand(64, 4)

    def distinct(**kwargs):
        action = policy.eval_mode.forward(obs, **kwargs)["action"]
        rows = [leaf.reshape(64, -1).double() for _, leaf in leaves(action)]
        return len(torch.cat(rows, 1).unique(dim=0))

    before = policy.generator.get_state()
    assert distinct() == distinct(deterministic=True) == 1
    assert torch.equal(policy.generator.get_state(), before)
    assert distinct(deterministic=False) > 1
    policy.eval_mode.seed(3)
    one = policy.eval_mode.forward(obs, deterministic=False)["action"]
    policy.eval_mode.seed(3)
    other = policy.eval_mode.forward(obs, deterministic=False)["action"]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(one), leaves(other), strict=True))


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_bc_clones_actions_of_every_space(space):
    with envs_of(space) as envs:
        policy = BCPolicy.for_env(envs, seed=0, learning_rate=1e-2)
    batched = gym.vector.utils.batch_space(space, 8)
    batched.seed(0)
    obs = torch.eye(8)[:, :4] + torch.eye(8)[:, 4:]
    obs[4:] *= -1
    expert = as_tree({"obs": obs, "action": batched.sample()})
    first = policy.learn_mode.forward(expert)["total_loss"]
    for _ in range(120):
        output = policy.learn_mode.forward(expert)
    assert output["total_loss"] < 0.2 * first
    if "Box" not in str(space):
        assert output["accuracy"] == 1.0
    action = policy.eval_mode.forward(obs)["action"]
    for (_, own), (_, wanted) in zip(leaves(action), leaves(expert["action"]), strict=True):
        assert (own.double() - wanted.double()).abs().max() < 0.2
        assert own.shape == wanted.shape


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_restored_policy_acts_as_the_saved_one_before_it_sees_an_env(space):
    with envs_of(space) as envs:
        trained = PPOPolicy.for_env(envs, seed=0)
    fresh = PPOPolicy({"model": dict(trained.cfg.model), "seed": 1})
    fresh.eval_mode.load_state_dict(trained.learn_mode.state_dict())
    obs = torch.randn(20, 4)
    actions = [policy.eval_mode.forward(obs)["action"] for policy in (trained, fresh)]
    for (_, one), (_, other) in zip(*map(leaves, actions), strict=True):
        assert torch.equal(one, other)


def test_a_state_of_the_model_alone_leaves_the_details_of_actions_as_they_are():
    with envs_of(SPACES["discrete with start"]) as envs:
        policy = DQNPolicy.for_env(envs, seed=0)
    policy.eval_mode.load_state_dict({"model": policy.eval_mode.state_dict()["model"]})
    assert policy.eval_mode.forward(torch.zeros(1, 4))["action"].item() >= 2


def test_per_env_workers_get_the_same_actions():
    with envs_of(SPACES["dict"]) as envs:
        policy = PPOPolicy.for_env(envs, seed=0)
    obs = torch.randn(3, 4)
    batched = policy.eval_mode.forward(obs)["action"]
    per_env = as_eval_mode(policy, user="the test").forward(dict(enumerate(obs)))
    for env_id in range(3):
        for (_, one), (_, row) in zip(
            leaves(per_env[env_id]["action"]), leaves(batched), strict=True
        ):
            assert torch.equal(one, row[env_id])


def test_actions_of_several_parts_reach_envs_in_other_processes():
    with envs_of(SPACES["dict"], mode="async", envs_per_process=3) as envs:
        policy = PPOPolicy.for_env(envs, seed=0)
        batch = RolloutCollector(policy, envs).collect(30)
    assert batch["action"]["tools"]["0"].shape == (10, 3, 2)


def test_a_squashed_gaussian_explores_within_the_bounds():
    with envs_of(SPACES["box"]) as envs:
        policy = PPOPolicy.for_env(envs, seed=0, action_bounding="tanh")
        batch = flatten_lead(RolloutCollector(policy, envs).collect(600))
    assert (batch["raw_action"].abs() < 1.0).all()
    torch.testing.assert_close(batch["action"], 2 * batch["raw_action"])
    adv = torch.randn(600)
    output = policy.learn_mode.forward(as_tree({**dict(batch.items()), "adv": adv, "ret": adv}))
    assert output["approx_kl"] == pytest.approx(0.0, abs=1e-3)
    assert np.isfinite(output["entropy"])


class OwnModel(torch.nn.Module):
    """A custom model that does not say what its outputs mean."""

    def __init__(self, n_logits, n_means):
        super().__init__()
        self.logits = torch.nn.Linear(4, n_logits)
        self.means = torch.nn.Linear(4, n_means)

    def forward(self, obs):
        mu = self.means(obs)
        return {
            "logit": self.logits(obs),
            "mu": mu,
            "sigma": torch.ones_like(mu),
            "value": mu.sum(-1),
        }


def test_a_custom_model_acts_in_a_space_of_several_parts():
    with envs_of(SPACES["dict"]) as envs:
        policy = PPOPolicy.for_env(envs, model=OwnModel(4 + 2 + 5, 2), seed=0)
        RolloutCollector(policy, envs).collect(30)
        with pytest.raises(SpaceError, match=r"output logit .* 5 numbers .* needs 11"):
            PPOPolicy.for_env(envs, model=OwnModel(5, 2), seed=0)


def test_dqn_acts_and_learns_where_actions_start_at_another_number():
    space = SPACES["discrete with start"]
    with envs_of(space) as envs:
        policy = DQNPolicy.for_env(envs, seed=0)
        batch = flatten_lead(RolloutCollector(policy, envs).collect(90, policy_kwargs={"eps": 0.5}))
    assert set(batch["action"].tolist()) == {2, 3, 4}
    greedy = policy.eval_mode.forward(batch["obs"])["action"]
    assert torch.equal(greedy, policy.collect_mode.forward(batch["obs"])["logit"].argmax(-1) + 2)
    q = policy.model(batch["obs"])["logit"].detach()
    output = policy.learn_mode.forward(batch)
    taken = q.gather(1, batch["action"].unsqueeze(1) - 2)
    assert output["q_value"] == pytest.approx(taken.mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["multi discrete", "box", "dict"])
def test_dqn_rejects_other_actions(name):
    with envs_of(SPACES[name]) as envs, pytest.raises(SpaceError, match=r"Discrete|discrete"):
        DQNPolicy.for_env(envs)
    with envs_of(SPACES[name]) as envs, pytest.raises(SpaceError, match="supports discrete"):
        DQNPolicy.for_env(envs, model=torch.nn.Linear(4, 3))


def test_bounds_of_something_that_is_not_a_box_are_rejected():
    with (
        envs_of(SPACES["discrete"]) as envs,
        pytest.raises(ConfigError, match="bounds of a Box of actions"),
    ):
        PPOPolicy.for_env(envs, action_low=[0.0], action_high=[1.0])
