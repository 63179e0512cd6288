"""Soft actor-critic."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.classic import as_collect_mode, as_learn_mode
from dmiddleware.errors import SpaceError
from dmiddleware.model import ActorQ, EnsembleLinear
from dmiddleware.policy import SACPolicy

from .one_step_task import SMALL, distance_after, random_rows


def made(**cfg: Any) -> SACPolicy:
    return SACPolicy({"model": SMALL, "seed": 0, **cfg})


def q_by_hand(critic: Any, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return ``[2, B]``, computed by one critic after the other."""
    x = torch.cat([obs, action], -1)
    first, _, last = critic.layers
    return torch.stack(
        [
            ((x @ first.weight[n] + first.bias[n]).relu() @ last.weight[n] + last.bias[n])[:, 0]
            for n in range(2)
        ]
    )


def draw_by_hand(actor: Any, obs: torch.Tensor, noise: torch.Tensor) -> Any:
    output = actor(obs)
    base = torch.distributions.Normal(output["mu"], output["sigma"])
    raw = output["mu"] + output["sigma"] * noise
    # The density of a function of a random number: appendix C of the paper.
    log_prob = (base.log_prob(raw) - (1 - raw.tanh().square()).log()).sum(-1)
    return raw.tanh(), log_prob


def test_the_losses_are_those_of_the_paper() -> None:
    policy, data = made(alpha=0.5), random_rows()
    parts = policy.components
    generator = torch.Generator()
    generator.set_state(policy.learn_generator.get_state())
    noise, next_noise = torch.randn(2, 8, 2, generator=generator)
    with torch.no_grad():
        action, log_prob = draw_by_hand(parts["actor"].module, data["next_obs"], next_noise)
        value = q_by_hand(parts["critic"].target, data["next_obs"], action).amin(0) - 0.5 * log_prob
        target = data["reward"] + 0.99 * (~data["terminated"]) * value
        errors = q_by_hand(parts["critic"].module, data["obs"], data["action"]) - target
        critic_loss = 0.5 * errors.square().mean(-1).sum()
        action, log_prob = draw_by_hand(parts["actor"].module, data["obs"], noise)
    output = policy.learn_mode.forward(data)
    assert output["critic_loss"] == pytest.approx(critic_loss.item(), rel=1e-4)
    assert output["entropy"] == pytest.approx(-log_prob.mean().item(), rel=1e-4)
    # The actor follows the critics after their step.
    critic_then = q_by_hand(parts["critic"].module, data["obs"], action).amin(0)
    wanted = (0.5 * log_prob - critic_then).mean().item()
    assert output["policy_loss"] == pytest.approx(wanted, rel=1e-4)
    # The entropy is above its target of -2, so the temperature falls, by Adam's first step.
    assert output["entropy"] > -2
    log_alpha = parts["temperature"].module.log_alpha.item()
    assert log_alpha == pytest.approx(math.log(0.5) - 3e-4, rel=1e-5)


def test_the_target_critics_follow_slowly() -> None:
    policy = made(target_tau=0.25)
    critic = policy.components["critic"]
    before = {name: value.clone() for name, value in critic.target.state_dict().items()}
    policy.learn_mode.forward(random_rows())
    for name, value in critic.target.state_dict().items():
        moved = before[name].lerp(critic.module.state_dict()[name], 0.25)
        torch.testing.assert_close(value, moved)


def test_a_fixed_temperature_stays() -> None:
    policy = made(auto_alpha=False, alpha=0.2)
    outputs = [policy.learn_mode.forward(random_rows())["alpha"] for _ in range(3)]
    assert outputs == pytest.approx([0.2] * 3)


def test_collectors_receive_the_actor_alone() -> None:
    env = gym.make("Pendulum-v1")
    policy = SACPolicy.for_env(env)
    acting, learning = (
        sum(tensor.numel() for tensor in state()["model"].values())
        for state in (policy.collect_mode.state_dict, policy.learn_mode.state_dict)
    )
    assert (acting, learning) == (67_330, 201_988)


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first, second = made(), made(), SACPolicy({"model": SMALL, "seed": 1})
    outputs = [whole.learn_mode.forward(random_rows(seed=seed)) for seed in range(6)]
    for seed in range(3):
        first.learn_mode.forward(random_rows(seed=seed))
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    resumed = [second.learn_mode.forward(random_rows(seed=seed)) for seed in range(3, 6)]
    assert resumed == outputs[3:]
    obs = torch.randn(5, 3)
    actions = [policy.collect_mode.forward(obs)["action"] for policy in (whole, second)]
    assert torch.equal(*actions)


def test_n_step_returns_and_weights_enter_the_loss() -> None:
    policy, plain = made(), made()
    data = random_rows()
    data["discount"] = torch.full((8,), 0.99)
    data["weight"] = torch.ones(8)
    output, wanted = policy.learn_mode.forward(data), plain.learn_mode.forward(random_rows())
    assert output["critic_loss"] == pytest.approx(wanted["critic_loss"])
    assert output["priority"].shape == (8,)
    data["weight"] = torch.zeros(8)
    assert policy.learn_mode.forward(data)["critic_loss"] == 0.0


def test_a_trajectory_that_a_collector_hands_over_gets_n_step_returns() -> None:
    policy, data = made(n_step=2), random_rows(4)
    data["done"] = torch.tensor([False, False, False, True])
    data["terminated"] = data["done"].clone()
    transitions = [{name: column[row] for name, column in data.items()} for row in range(4)]
    samples = as_collect_mode(policy, user="the test").get_train_sample(transitions)
    reward = data["reward"]
    assert samples[0]["reward"].item() == pytest.approx((reward[0] + 0.99 * reward[1]).item())
    assert samples[0]["discount"].item() == pytest.approx(0.99**2)
    assert torch.equal(samples[0]["next_obs"], data["next_obs"][1])
    assert "total_loss" in as_learn_mode(policy, user="the test").forward(samples)


def test_the_algorithm_has_less_than_130_lines_of_code() -> None:
    """Lines that are not blank, a comment, a docstring or an import."""
    text = Path("dmiddleware/policy/sac.py").read_text()
    left_out = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = [
        line
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in left_out and line.strip() and not line.strip().startswith("#")
    ]
    assert len(code) < 130


def test_actions_fill_a_box_of_any_shape_and_never_leave_it() -> None:
    low = np.array([[-1.0, 0.0], [2.0, -5.0]], np.float32)
    space = gym.spaces.Box(low, low + 3, (2, 2))

    class Env(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-1, 1, (3,))
        action_space = space

    policy = SACPolicy.for_env(Env(), seed=0, model={"actor_hidden_sizes": [8]})
    drawn = policy.collect_mode.forward(torch.randn(2000, 3))["action"]
    assert drawn.shape == (2000, 2, 2)
    assert all(space.contains(one) for one in drawn.numpy())
    assert (drawn.amax(0) - drawn.amin(0)).min() > 2.5
    greedy = [policy.eval_mode.forward(torch.zeros(1, 3))["action"] for _ in range(2)]
    assert torch.equal(*greedy)


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(SpaceError, match="ActorQ needs a Box of actions"):
        SACPolicy.for_env(gym.make("CartPole-v1"))


def test_a_layer_of_an_ensemble_starts_and_computes_as_each_linear_layer_does() -> None:
    torch.manual_seed(0)
    layer = EnsembleLinear(3, 100, 50)
    assert layer.weight.abs().max().item() == pytest.approx(0.1, rel=0.01)
    x = torch.randn(4, 100)
    whole = layer(x.expand(3, 4, 100))
    for n in range(3):
        torch.testing.assert_close(whole[n], x @ layer.weight[n] + layer.bias[n])


def test_images_reach_the_critics_through_an_encoder() -> None:
    model = ActorQ((3, 48, 48), 1, actor_hidden_sizes=[16], critic_hidden_sizes=[16], n_critics=4)
    obs = torch.randint(0, 255, (2, 3, 48, 48), dtype=torch.uint8)
    assert model.critic(obs, torch.zeros(2, 1)).shape == (4, 2)
    assert model(obs)["mu"].shape == (2, 1)


@pytest.mark.learning
def test_it_learns_to_follow_a_target() -> None:
    """One step: the reward is highest where the action equals the first entry of obs."""
    model = {**SMALL, "action_shape": 1}
    rates = {f"learning_rate_{part}": 3e-3 for part in ("q", "policy", "alpha")}
    policy = SACPolicy({"model": model, "seed": 0, **rates, "target_entropy": -3.0})
    assert distance_after(600, policy) < 0.1
