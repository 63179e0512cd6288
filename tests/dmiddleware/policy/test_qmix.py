"""VDN and QMIX."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.classic.monitored import monitored_of
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import PolicyOutputError, SpaceError
from dmiddleware.policy import DQNPolicy, PPOPolicy, QMIXPolicy, VDNPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.tree import as_tree
from tests.dmiddleware.team_envs import CountingTeam

MODEL = {"obs_shape": {"agents": 4, "state": 5}, "action_shape": 3, "n_agent": 2}
BOTH = pytest.mark.parametrize("cls", [VDNPolicy, QMIXPolicy])


def made(cls: type[VDNPolicy], **cfg: Any) -> VDNPolicy:
    return cls({"model": MODEL, "seed": 0, **cfg})


def batch(n: int = 16, seed: int = 0, masked: bool = False) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def obs() -> dict[str, torch.Tensor]:
        seen = {
            "agents": torch.randn(n, 2, 4, generator=generator),
            "agent_mask": (torch.rand(n, 2, generator=generator) < 0.8).to(torch.int8),
            "state": torch.randn(n, 5, generator=generator),
        }
        if masked:
            seen["action_mask"] = torch.tensor([1, 0, 1]).expand(n, 2, 3).to(torch.int8)
        return seen

    return as_tree(
        {
            "obs": obs(),
            "next_obs": obs(),
            "action": torch.randint(2, (n, 2), generator=generator) * 2,
            "reward": torch.randn(n, 2, generator=generator),
            "terminated": torch.arange(n) % 4 == 0,
        }
    )


@BOTH
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_loss_is_that_of_the_paper(cls: type[VDNPolicy], double: bool, masked: bool) -> None:
    policy, data = made(cls, double=double), batch(masked=masked)
    policy.learn_mode.forward(batch(seed=1))  # so that the target network differs
    part = policy.components["q"]
    errors = []
    with torch.no_grad():
        for row in range(16):
            one = {name: data[name][row] for name in ("action", "reward", "terminated")}
            obs, after = (
                {key: data[name][key][row] for key in data[name]} for name in ("obs", "next_obs")
            )
            q = part.module(obs)["logit"]
            taken = torch.stack([q[agent, one["action"][agent]] for agent in range(2)])
            value = part.module.mix(taken, obs)
            judge, target = (m(after)["logit"] for m in (part.module, part.target))
            if not double:
                judge = target
            if masked:
                judge[:, 1] = -torch.inf
            best = torch.stack([target[agent, judge[agent].argmax()] for agent in range(2)])
            bootstrap = 0.0 if one["terminated"] else part.target.mix(best, after)
            errors.append(value - one["reward"].mean() - 0.99 * bootstrap)
    output = policy.learn_mode.forward(data)
    wanted = torch.stack(errors).square().mean().item()
    assert output["total_loss"] == pytest.approx(wanted, rel=1e-4)
    assert set(monitored_of(type(policy))) <= set(output)


@BOTH
def test_weights_and_n_step_discounts_enter_the_loss(cls: type[VDNPolicy]) -> None:
    policy, data = made(cls), batch()
    data["weight"], data["discount"] = torch.ones(16), torch.full((16,), 0.99)
    output, plain = policy.learn_mode.forward(data), made(cls).learn_mode.forward(batch())
    assert output["total_loss"] == pytest.approx(plain["total_loss"])
    assert output["priority"].shape == (16,)
    data["weight"] = torch.zeros(16)
    assert policy.learn_mode.forward(data)["total_loss"] == 0.0


@BOTH
def test_an_interrupted_run_continues_bit_for_bit(cls: type[VDNPolicy]) -> None:
    whole, first = made(cls), made(cls)
    second = cls({"model": MODEL, "seed": 1})
    outputs = [whole.learn_mode.forward(batch(seed=seed)) for seed in range(4)]
    for seed in range(2):
        first.learn_mode.forward(batch(seed=seed))
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch(seed=seed)) for seed in (2, 3)] == outputs[2:]


@BOTH
def test_collectors_get_the_agents_network_and_no_mixing_network(cls: type[VDNPolicy]) -> None:
    learner, collector = made(cls), made(cls, seed=1)
    for seed in range(3):
        learner.learn_mode.forward(batch(seed=seed))
    state = learner.collect_mode.state_dict()
    assert {name.split(".")[0] for name in state["model"]} == {"agent"}
    collector.collect_mode.load_state_dict(state)
    obs = batch(seed=9)["obs"]
    answers = [one.collect_mode.forward(obs)["logit"] for one in (learner, collector)]
    assert torch.equal(*answers)


@BOTH
def test_it_collects_learns_and_evaluates_in_an_env_of_several_agents(cls: type[VDNPolicy]) -> None:
    envs = make_env_manager(lambda: CountingTeam(leaves={1: 2}), env_num=4, seed=0)
    policy = cls.for_env(envs, seed=0, n_step=2)
    buffer = TensorBuffer(100, n_step=2, discount=0.99, seed=0)
    with envs:
        rows = RolloutCollector(policy, envs).collect(32, policy_kwargs={"eps": 1.0})
        assert rows["action"].shape == (8, 4, 3)
        assert len(rows["action"].unique()) == 3
        assert rows["reward"].shape == (8, 4, 3)
        assert rows["obs"]["agents"].shape == (8, 4, 3, 2)
        buffer.push(rows)
        drawn = buffer.sample(16)
        assert drawn["reward"].shape == (16, 3)
        assert np.isfinite(policy.learn_mode.forward(drawn)["total_loss"])
        monitor = evaluate_episodes(policy, envs, 4)
    assert monitor.get_episode_return() == pytest.approx([(15 + 6 + 45) / 3] * 4)
    assert monitor.mean_info()["eval_episode_return_1"] == 6


@BOTH
def test_a_team_may_have_one_agent(cls: type[VDNPolicy]) -> None:
    buffer = TensorBuffer(100, seed=0)
    with make_env_manager(lambda: CountingTeam(n_agent=1), env_num=2, seed=0) as envs:
        policy = cls.for_env(envs, seed=0)
        buffer.push(RolloutCollector(policy, envs).collect(16))
    drawn = buffer.sample(8)
    assert drawn["reward"].shape == (8, 1)
    assert np.isfinite(policy.learn_mode.forward(drawn)["total_loss"])


def test_actions_respect_the_masks_of_all_agents() -> None:
    envs = make_env_manager(lambda: CountingTeam(masked=True), env_num=2, seed=0)
    policy = QMIXPolicy.for_env(envs, seed=0)
    with envs:
        collector = RolloutCollector(policy, envs)
        for kwargs in ({"eps": 1.0}, {"eps": 0.0}):
            rows = collector.collect(20, policy_kwargs=kwargs)
            assert (rows["action"] == torch.arange(3)).all()
        assert (collector.collect(20, random=True)["action"] == torch.arange(3)).all()


@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy])
def test_policies_for_a_single_agent_refuse_several(cls: Any) -> None:
    with pytest.raises(SpaceError, match=r"has 3; use MAPPO"):
        cls.for_env(CountingTeam())


def test_policies_for_several_agents_refuse_a_single_one() -> None:
    with pytest.raises(SpaceError, match="use DQN or PPO"):
        QMIXPolicy.for_env(gym.make("CartPole-v1"))
    policy = made(VDNPolicy)
    with make_env_manager("CartPole-v1", env_num=1) as envs, pytest.raises(SpaceError):
        RolloutCollector(policy, envs).collect(1)


def test_continuous_actions_are_refused() -> None:
    class Continuous(CountingTeam):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gym.spaces.Box(-1, 1, (3, 2))

    with pytest.raises(SpaceError, match="supports discrete actions"):
        QMIXPolicy.for_env(Continuous())


def test_a_model_of_ones_own_is_tried_with_an_observation() -> None:
    class Values(torch.nn.Module):
        def __init__(self, n_actions: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, n_actions)

        def forward(self, obs: Any) -> dict[str, torch.Tensor]:
            return {"logit": self.layer(obs["agents"])}

    assert VDNPolicy.for_env(CountingTeam(), model=Values(3))
    with pytest.raises(PolicyOutputError, match='must return a dictionary with the key "logit"'):
        VDNPolicy.for_env(CountingTeam(), model=torch.nn.Linear(2, 3))
