"""P-DQN: choices with numbers."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.errors import SpaceError
from dmiddleware.model import HybridQNetwork
from dmiddleware.policy import PDQNPolicy
from dmiddleware.tree import Batch, as_tree
from tests.dmiddleware.policy.every_policy import Toy, batch_for, made

SMALL = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [16]}
MOVES = gym.spaces.Dict(
    {
        "kind": gym.spaces.Discrete(3, start=1),
        "force": gym.spaces.Box(0.0, 10.0, (2,), np.float32),
        "turn": gym.spaces.Box(-2.0, 2.0, (1,), np.float32),
    }
)


def network(policy: PDQNPolicy) -> HybridQNetwork:
    assert isinstance(policy.model, HybridQNetwork)
    return policy.model


def policy_for(space: gym.Space[Any] = MOVES, **options: Any) -> PDQNPolicy:
    return PDQNPolicy.for_env(Toy(space), seed=0, model=SMALL, **options)


def some_rows(n: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(2, n, 3, generator=generator)
    action = {
        "kind": torch.randint(1, 4, (n,), generator=generator),
        "force": 10.0 * torch.rand(n, 2, generator=generator),
        "turn": 4.0 * torch.rand(n, 1, generator=generator) - 2.0,
    }
    return as_tree(
        {
            **{"obs": obs[0], "next_obs": obs[1], "action": action, "reward": obs[0, :, 0]},
            "terminated": torch.arange(n) % 4 == 0,
        }
    )


def test_the_losses_are_those_of_equations_5_2_and_5_3() -> None:
    policy, rows = policy_for(), some_rows()
    model, action = network(policy), rows["action"]
    numbers = torch.cat([action["force"] / 5 - 1, action["turn"] / 2], -1)
    with torch.no_grad():
        next_numbers = model.actor(rows["next_obs"])["mu"]
        next_value = model.critic(rows["next_obs"], next_numbers).amax(-1)
        target = rows["reward"] + 0.99 * next_value * ~rows["terminated"]
        q = model.critic(rows["obs"], numbers)
        taken = q[torch.arange(len(q)), action["kind"] - 1]
        wanted = (target - taken).square().mean()
        chosen = model.actor(rows["obs"])["mu"]
    output = policy.learn_mode.forward(rows)
    assert output["critic_loss"] == pytest.approx(wanted.item(), rel=1e-4)
    with torch.no_grad():  # the critic has made its step
        wanted = -model.critic(rows["obs"], chosen).sum(-1).mean()
    assert output["actor_loss"] == pytest.approx(wanted.item(), rel=1e-4)


def test_it_takes_the_best_choice_with_its_numbers() -> None:
    policy, obs = policy_for(), torch.randn(6, 3)
    with torch.no_grad():
        numbers = network(policy).actor(obs)["mu"]
        best = network(policy).critic(obs, numbers).argmax(-1)
    action = policy.eval_mode.forward(obs)["action"]
    assert torch.equal(action["kind"], best + 1)
    torch.testing.assert_close(action["force"], 5.0 * (numbers[:, :2] + 1.0))
    torch.testing.assert_close(action["turn"], 2.0 * numbers[:, 2:])


def test_choices_and_numbers_explore_each_in_its_way() -> None:
    policy, obs = policy_for(noise_sigma=0.5), torch.zeros(2000, 3)
    greedy = policy.eval_mode.forward(obs)["action"]
    action = policy.collect_mode.forward(obs, eps=0.3)["action"]
    share = (action["kind"] != greedy["kind"]).float().mean().item()
    assert share == pytest.approx(0.2, abs=0.05)  # a third of the random choices is the best one
    assert action["kind"].unique().tolist() == [1, 2, 3]
    noise = (action["turn"] - greedy["turn"]) / 2
    assert noise.std().item() == pytest.approx(0.5, abs=0.1)
    assert 0.0 <= action["force"].min() <= action["force"].max() <= 10.0
    plain = policy.collect_mode.forward(obs)["action"]
    assert torch.equal(plain["kind"], greedy["kind"])


def test_masked_choices_are_neither_taken_nor_bootstrapped_from() -> None:
    policy, rows = policy_for(), some_rows()
    mask = torch.tensor([False, True, False]).expand(32, 3)
    for eps in (0.0, 1.0):
        output = policy.collect_mode.forward(rows["obs"], eps=eps, action_mask=mask)
        assert output["action"]["kind"].unique().tolist() == [2]
    with torch.no_grad():
        next_numbers = network(policy).actor(rows["next_obs"])["mu"]
        value = network(policy).critic(rows["next_obs"], next_numbers)[:, 1]
        target = rows["reward"] + 0.99 * value * ~rows["terminated"]
    rows["next_action_mask"] = mask
    output = policy.learn_mode.forward(rows)
    assert output["target_q_value"] == pytest.approx(target.mean().item(), abs=1e-5)


def test_a_tuple_of_a_choice_and_a_box_works_too() -> None:
    policy = made(PDQNPolicy)
    assert np.isfinite(policy.learn_mode.forward(batch_for(policy))["total_loss"])
    assert list(policy.eval_mode.forward(torch.zeros(2, 3))["action"]) == ["0", "1"]


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
        gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(2)}),
    ],
)
def test_other_actions_are_refused(space: gym.Space[Any]) -> None:
    with pytest.raises(SpaceError, match="one Discrete space and at least one Box"):
        policy_for(space)


@pytest.mark.learning
def test_it_learns_which_choice_and_how_much() -> None:
    """The best choice is by the sign of the observation, and its number is the observation."""
    space = gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-1.0, 1.0, (1,), np.float32)])
    policy = policy_for(space, learning_rate_critic=3e-3, learning_rate_actor=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        obs = torch.rand(64, 3, generator=generator) * 1.6 - 0.8
        choice = torch.randint(2, (64,), generator=generator)
        number = torch.rand(64, 1, generator=generator) * 2 - 1
        right = (choice == (obs[:, 0] > 0)).float()
        reward = right - 2.0 * (number[:, 0] - obs[:, 1]).square()
        rows = {"obs": obs, "next_obs": obs, "action": {"0": choice, "1": number}}
        rows |= {"reward": reward, "terminated": torch.ones(64, dtype=torch.bool)}
        policy.learn_mode.forward(as_tree(rows))
    action = policy.eval_mode.forward(obs)["action"]
    assert (action["0"] == (obs[:, 0] > 0)).float().mean() > 0.9
    assert (action["1"][:, 0] - obs[:, 1]).abs().mean() < 0.15
