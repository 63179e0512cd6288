"""DDPG and TD3."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, PolicyError
from dmiddleware.policy import DDPGPolicy, SACPolicy, TD3Policy, TQCPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from tests.dmiddleware.counting_env import CountingEnv

from .one_step_task import SMALL, distance_after, random_rows

DETERMINISTIC = {**SMALL, "deterministic": True}


def td3(**learn: Any) -> TD3Policy:
    return TD3Policy({"model": {**DETERMINISTIC, "n_critics": 2}, "seed": 0, **learn})


@pytest.mark.parametrize("sigma", [0.2, 5.0])
def test_the_targets_of_td3_are_smoothed_and_the_smaller_of_two(sigma: float) -> None:
    policy, data = td3(target_noise=sigma, target_noise_clip=0.3), random_rows()
    actor, critic = (policy.components[name] for name in ("actor", "critic"))
    with torch.no_grad():
        # Actions near the bounds, which noise must not leave.
        actor.target.head.bias += 2.0
    generator = torch.Generator()
    generator.set_state(policy.learn_generator.get_state())
    noise = (sigma * torch.randn(8, 2, generator=generator)).clamp(-0.3, 0.3)
    with torch.no_grad():
        action = (actor.target(data["next_obs"])["mu"].tanh() + noise).clamp(-1, 1)
        first, second = critic.target(data["next_obs"], action)
        target = data["reward"] + 0.99 * ~data["terminated"] * torch.minimum(first, second)
        errors = critic.module(data["obs"], data["action"]) - target
        wanted = errors.square().mean(-1).sum().item()
    assert policy.learn_mode.forward(data)["critic_loss"] == pytest.approx(wanted, rel=1e-5)


def test_td3_updates_actor_and_targets_every_second_time() -> None:
    policy = td3(target_tau=0.5)
    parts = policy.components

    def states() -> list[torch.Tensor]:
        return [
            parts["actor"].module.head.weight.detach().clone(),
            parts["actor"].target.head.weight.clone(),
            parts["critic"].target.layers[0].weight.clone(),
        ]

    before = states()
    for seed in range(1, 5):
        output = policy.learn_mode.forward(random_rows(seed=seed))
        after = states()
        moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
        assert moved == [seed % 2 == 0] * 3
        assert ("actor_loss" in output) is (seed % 2 == 0)
        before = after


def test_the_actor_follows_the_first_critic() -> None:
    policy, data = td3(actor_update_freq=1), random_rows()
    actor, critic = (policy.components[name] for name in ("actor", "critic"))
    chosen = actor.module(data["obs"])["mu"].tanh().detach()
    loss = policy.learn_mode.forward(data)["actor_loss"]
    with torch.no_grad():
        wanted = -critic.module(data["obs"], chosen)[0].mean().item()
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_ddpg_has_one_critic_and_plain_targets() -> None:
    policy, data = (
        DDPGPolicy({"model": {**DETERMINISTIC, "n_critics": 1}, "seed": 0}),
        random_rows(),
    )
    actor, critic = (policy.components[name] for name in ("actor", "critic"))
    with torch.no_grad():
        value = critic.target(data["next_obs"], actor.target(data["next_obs"])["mu"].tanh())[0]
        target = data["reward"] + 0.99 * ~data["terminated"] * value
        wanted = (critic.module(data["obs"], data["action"])[0] - target).square().mean().item()
    output = policy.learn_mode.forward(data)
    assert output["critic_loss"] == pytest.approx(wanted, rel=1e-5)
    assert "actor_loss" in output


def test_for_env_keeps_the_shape_of_the_algorithm() -> None:
    env = gym.make("Pendulum-v1")
    for make, n_critics in ((DDPGPolicy, 1), (TD3Policy, 2)):
        policy = make.for_env(env, model={"actor_hidden_sizes": [8]})
        model = policy.model
        assert (model.critic.n_critics, model.actor.is_deterministic) == (n_critics, True)


def test_collecting_adds_noise_within_the_bounds_and_evaluating_does_not() -> None:
    policy = TD3Policy.for_env(gym.make("Pendulum-v1"), seed=0, noise_sigma=0.5)
    obs = torch.zeros(2000, 3)
    greedy = policy.eval_mode.forward(obs)["action"]
    assert greedy.unique().numel() == 1
    noise = (policy.collect_mode.forward(obs)["action"] - greedy) / 2.0
    assert noise.std().item() == pytest.approx(0.5, rel=0.1)
    bold = TD3Policy.for_env(gym.make("Pendulum-v1"), seed=0, noise_sigma=9.0)
    assert bold.collect_mode.forward(obs)["action"].abs().max().item() == 2.0


class Steered(CountingEnv):
    """An env with a Box of two actions, and episodes of 3, 5, 3, 5, … steps."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index, (3, 5))
        self.action_space = gym.spaces.Box(-2.0, 2.0, (2,))

    def step(self, action: Any) -> Any:
        return super().step(0)


def steered(n: int = 2) -> Any:
    return make_env_manager(Steered, env_num=n, seed=0)


def ou(seed: int = 0, **options: Any) -> DDPGPolicy:
    """Return a policy whose greedy action is 0, far from the bounds."""
    sizes = {"actor_hidden_sizes": [8], "critic_hidden_sizes": [8]}
    policy = DDPGPolicy.for_env(steered(1), seed=seed, noise="ou", model=sizes, **options)
    for parameter in policy.model.actor.head.parameters():
        torch.nn.init.zeros_(parameter)
    return policy


def test_ornstein_uhlenbeck_noise_continues_within_an_episode_and_starts_at_0() -> None:
    policy = ou(noise_theta=0.25, noise_sigma=0.1)
    with steered() as envs:
        rows = RolloutCollector(policy, envs).collect(200)
    state = rows["state"]
    assert state.shape == (100, 2, 2)
    noise = rows["action"] / 2.0  # in units of half the width of the Box
    starts = torch.ones(100, 2, dtype=torch.bool)
    starts[1:] = rows["done"][:-1]
    assert starts.sum() > 40
    assert (state[starts] == 0).all()
    # Within an episode, the noise of a row is the state of the next one.
    torch.testing.assert_close(noise[:-1][~starts[1:]], state[1:][~starts[1:]])
    drawn = noise - 0.75 * state
    assert drawn.std().item() == pytest.approx(0.1, rel=0.1)
    # The envs have their own noise.
    assert not torch.equal(noise[:, 0], noise[:, 1])


def test_ornstein_uhlenbeck_noise_is_correlated_from_step_to_step() -> None:
    policy = ou(noise_theta=0.15, noise_sigma=0.01)
    state, noise = policy.initial_state(500), []
    for _ in range(40):
        output = policy.collect_mode.forward(torch.zeros(500, 3), state=state)
        state = output["state"]
        noise.append(output["action"].flatten())
    before, after = noise[-2], noise[-1]
    assert torch.corrcoef(torch.stack([before, after]))[0, 1].item() == pytest.approx(0.85, abs=0.1)


def test_a_resumed_run_continues_the_noise_exactly() -> None:
    policy = ou()
    with steered() as envs, steered() as other_envs:
        collector = RolloutCollector(policy, envs)
        collector.collect(10)
        saved, learned = collector.state_dict(), policy.learn_mode.state_dict()
        wanted = collector.collect(30)
        again = ou(seed=1)
        again.learn_mode.load_state_dict(learned)
        resumed = RolloutCollector(again, other_envs)
        resumed.load_state_dict(saved)
        found = resumed.collect(30)
    assert saved["stepper"]["memory"]["state"].abs().max() > 0
    for name in ("obs", "action", "state", "reward"):
        assert torch.equal(found[name], wanted[name]), name


def test_evaluating_with_ornstein_uhlenbeck_noise_is_greedy() -> None:
    policy = ou(noise_sigma=0.5)
    obs = torch.zeros(4, 3)
    with_state = policy.eval_mode.forward(obs, state=torch.ones(4, 2))
    assert torch.equal(with_state["action"], policy.eval_mode.forward(obs)["action"])
    with steered() as envs:
        assert len(evaluate_episodes(policy, envs, 2).get_episode_return()) == 2


def test_ornstein_uhlenbeck_noise_without_its_state_is_an_error() -> None:
    policy = ou()
    obs = torch.zeros(4, 3)
    with pytest.raises(PolicyError, match="initial_state"):
        policy.collect_mode.forward(obs)


def test_gaussian_noise_needs_no_state() -> None:
    assert td3().initial_state(3) is None


def test_other_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"noise must be one of"):
        TD3Policy({"model": DETERMINISTIC, "noise": "pink"})


@pytest.mark.parametrize("policy", [SACPolicy, TQCPolicy, DDPGPolicy, TD3Policy])
def test_a_discount_that_is_not_the_policy_s_is_refused(policy: Any) -> None:
    env = gym.make("Pendulum-v1")
    sizes = {"actor_hidden_sizes": [8], "critic_hidden_sizes": [8]}
    made = policy.for_env(env, seed=0, model=sizes, discount=0.9, n_step=2)
    data = random_rows()
    data["action"] = data["action"][:, :1]
    data["discount"] = torch.tensor([0.0, 0.9, 0.81, 0.81] * 2)
    made.learn_mode.forward(data)
    other = policy.for_env(env, seed=0, model=sizes, discount=0.9, n_step=2)
    data["discount"] = torch.full((8,), 0.98)
    with pytest.raises(ConfigError, match=r"0\.98, which is not a power of .* 0\.9 up to n_step=2"):
        other.learn_mode.forward(data)


def test_weights_of_prioritized_replay_enter_the_loss() -> None:
    policy, data = td3(), random_rows()
    data["weight"] = torch.zeros(8)
    output = policy.learn_mode.forward(data)
    assert output["critic_loss"] == 0.0
    assert output["priority"].shape == (8,)


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first = td3(), td3()
    outputs = [whole.learn_mode.forward(random_rows(seed=seed)) for seed in range(7)]
    for seed in range(3):
        first.learn_mode.forward(random_rows(seed=seed))
    second = TD3Policy({"model": {**DETERMINISTIC, "n_critics": 2}, "seed": 1})
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(random_rows(seed=seed)) for seed in range(3, 7)] == outputs[
        3:
    ]


@pytest.mark.learning
@pytest.mark.parametrize(("make", "n_critics"), [(DDPGPolicy, 1), (TD3Policy, 2)])
def test_it_learns_to_follow_a_target(make: Any, n_critics: int) -> None:
    """One step: the reward is highest where the action equals the first entry of obs."""
    policy = make(
        {
            "model": {**DETERMINISTIC, "action_shape": 1, "n_critics": n_critics},
            "seed": 0,
            "learning_rate_critic": 3e-3,
            "learning_rate_actor": 3e-3,
        }
    )
    assert distance_after(800, policy) < 0.1
