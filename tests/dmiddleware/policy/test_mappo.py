"""IPPO and MAPPO."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import IPPOPolicy, MAPPOPolicy, QMIXPolicy, VDNPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.tree import as_tree, map_leaves
from middleware.advantage import AdvantageEstimator
from tests.dmiddleware.team_envs import CountingTeam

BOTH = pytest.mark.parametrize("cls", [IPPOPolicy, MAPPOPolicy])


def collected(policy: IPPOPolicy, n_step: int = 6, **options: Any) -> Any:
    """Collect ``[T, 2, …]`` in two envs of three agents."""
    with make_env_manager(lambda: CountingTeam(**options), env_num=2, seed=0) as envs:
        return RolloutCollector(policy, envs).collect(2 * n_step)


def to_learn(rows: Any) -> Any:
    """Return rows ``[B, …]`` with random advantages and returns."""
    adv = torch.randn(rows["value"].shape, generator=torch.Generator().manual_seed(0))
    rows = as_tree({**dict(rows.items()), "adv": adv, "ret": adv + rows["value"]})
    return map_leaves(lambda leaf: leaf.flatten(0, 1), rows)


@BOTH
def test_rows_hold_all_agents(cls: type[IPPOPolicy]) -> None:
    policy = cls.for_env(CountingTeam(), seed=0)
    rows = collected(policy)
    for name in ("action", "log_prob", "value", "reward"):
        assert rows[name].shape == (6, 2, 3), name
    assert rows["logit"].shape == (6, 2, 3, 3)
    wanted = rows["logit"].log_softmax(-1).gather(-1, rows["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(rows["log_prob"], wanted)


@BOTH
def test_the_loss_is_that_of_ppo_over_all_agents_that_take_part(cls: type[IPPOPolicy]) -> None:
    policy = cls.for_env(
        CountingTeam(), seed=0, entropy_weight=0.03, clip_ratio=0.1, learning_rate=0.02
    )
    data = to_learn(collected(policy, leaves={1: 2}))
    policy.learn_mode.forward(data)  # so that ratios differ from 1
    here = data["obs"]["agent_mask"] != 0
    assert 0 < here.sum() < here.numel()
    output = policy.model(data["obs"])
    distribution = torch.distributions.Categorical(logits=output["logit"][here])
    ratio = (distribution.log_prob(data["action"][here]) - data["log_prob"][here]).exp()
    adv = data["adv"][here]
    adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
    policy_loss = -torch.minimum(ratio * adv, ratio.clamp(0.9, 1.1) * adv).mean()
    value_loss = 0.5 * (output["value"] - data["ret"])[here].square().mean()
    entropy = distribution.entropy().mean()
    got = policy.learn_mode.forward(data)
    assert got["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
    assert got["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert got["entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    assert got["approx_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-3)
    clipped = ((ratio - 1).abs() > 0.1).float().mean().item()
    assert got["clip_fraction"] == pytest.approx(clipped, abs=1e-6)


def test_agents_that_do_not_take_part_change_nothing() -> None:
    policies = [IPPOPolicy.for_env(CountingTeam(), seed=0) for _ in range(2)]
    rows = to_learn(collected(policies[0], leaves={2: 0}))
    other = as_tree({name: column.clone() for name, column in rows.items()})
    for name in ("adv", "ret", "log_prob"):
        other[name][:, 2] += 1.0
    first, second = (
        policy.learn_mode.forward(data)
        for policy, data in zip(policies, (rows, other), strict=True)
    )
    for name, value in first.items():
        assert second[name] == pytest.approx(value, abs=1e-6), name
    states = [policy.learn_mode.state_dict()["model"] for policy in policies]
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name])


@pytest.mark.parametrize("cls", [IPPOPolicy, MAPPOPolicy, VDNPolicy, QMIXPolicy])
def test_agents_that_do_not_take_part_are_not_in_the_statistics_of_observations(
    cls: type[IPPOPolicy | VDNPolicy],
) -> None:
    policy = cls.for_env(CountingTeam(), seed=0, obs_norm=True)
    obs = collected(policy, leaves={1: 2})["obs"]
    here = obs["agent_mask"] != 0
    assert 0 < here.sum() < here.numel()
    learner = cls.for_env(CountingTeam(), seed=0, obs_norm=True)
    learner.observe(obs)
    for one in (policy, learner):
        stats = one.obs_norm.state_dict()["running"]
        assert stats["obs.agents"]["count"] == here.sum()
        assert stats["obs.state"]["count"] == here[..., 0].numel()
        mean = obs["agents"][here].double().mean(0)
        torch.testing.assert_close(stats["obs.agents"]["mean"], mean)


def test_agents_that_do_not_take_part_are_not_in_the_statistics_of_returns() -> None:
    policy = IPPOPolicy.for_env(CountingTeam(), seed=0, value_norm=True)
    rows = collected(policy, leaves={1: 2})
    estimated = AdvantageEstimator(policy.learn_mode, user="test")(rows)
    here = rows["obs"]["agent_mask"] != 0
    stats = policy.return_stats
    assert stats.count == here.sum()
    torch.testing.assert_close(stats.mean, estimated["ret"][here].double().mean())


@BOTH
def test_continuous_actions_of_each_agent_stay_in_their_box(cls: type[IPPOPolicy]) -> None:
    class Continuous(CountingTeam):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gym.spaces.Box(
                np.tile(np.array([0.0, -2.0], np.float32), (3, 1)),
                np.tile(np.array([1.0, 2.0], np.float32), (3, 1)),
            )

    policy = cls.for_env(Continuous(), seed=0, model={"log_std_init": 1.0})
    with make_env_manager(Continuous, env_num=4, seed=0) as envs:
        rows = RolloutCollector(policy, envs).collect(200)
        assert evaluate_episodes(policy, envs, 4).get_episode_return() == [30.0] * 4
    assert rows["action"].shape == (50, 4, 3, 2)
    assert rows["log_prob"].shape == (50, 4, 3)
    lows, highs = rows["action"].flatten(0, 2).amin(0), rows["action"].flatten(0, 2).amax(0)
    assert (lows.tolist(), highs.tolist()) == ([0.0, -2.0], [1.0, 2.0])


@BOTH
def test_masks_of_each_agent_are_respected(cls: type[IPPOPolicy]) -> None:
    policy = cls.for_env(CountingTeam(masked=True), seed=0)
    rows = collected(policy, masked=True)
    assert (rows["action"] == torch.arange(3)).all()
    assert torch.equal(rows["log_prob"], torch.zeros(6, 2, 3))


def test_learning_sees_normalized_observations_as_acting_does() -> None:
    policy = MAPPOPolicy.for_env(CountingTeam(), seed=0, obs_norm=True, value_norm=True)
    policy.learn_mode.forward(to_learn(collected(policy)))
    rows = collected(policy)
    seen = policy.obs_norm(rows["obs"])
    assert seen["state"].abs().max() < 4 <= rows["obs"]["state"].max()
    assert torch.equal(seen["agent_mask"], rows["obs"]["agent_mask"])
    data = to_learn(rows)
    policy.observe_returns(data["ret"])
    output = policy.learn_mode.forward(data)
    assert output["approx_kl"] == pytest.approx(0, abs=1e-6)


def test_reward_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="use value_norm"):
        IPPOPolicy.for_env(CountingTeam(), reward_norm=True)
