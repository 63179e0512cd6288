"""Advantage actor-critic."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.classic import as_collect_mode
from dmiddleware.classic.monitored import monitored_of
from dmiddleware.data import as_tree
from dmiddleware.errors import ConfigError
from dmiddleware.policy import A2CPolicy
from dmiddleware.rl import Schedule
from dmiddleware.rl.optim import FusedAdam, RMSprop

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}
BOX = {"obs_shape": 3, "action_shape": 2, "action_space": "continuous"}


def made(model: dict[str, Any] = SMALL, **cfg: Any) -> A2CPolicy:
    return A2CPolicy({"model": model, "seed": 0, **cfg})


def collected(policy: A2CPolicy, n: int = 32, seed: int = 0) -> Any:
    """What the policy would collect, with advantages drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, policy.cfg.model["obs_shape"], generator=generator)
    adv = torch.randn(n, generator=generator)
    output = policy.collect_mode.forward(obs)
    return as_tree({**output, "obs": obs, "adv": adv, "ret": adv + output["value"]})


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_the_loss_is_that_of_the_paper(kind: str) -> None:
    learn = {"entropy_weight": 0.03, "value_weight": 0.7}
    policy = made(SMALL if kind == "discrete" else BOX, **learn)
    batch = collected(policy)
    policy.learn_mode.forward(batch)
    output = policy.model(batch["obs"])
    if kind == "discrete":
        distribution: Any = torch.distributions.Categorical(logits=output["logit"])
        log_prob, entropy = distribution.log_prob(batch["action"]), distribution.entropy()
    else:
        distribution = torch.distributions.Normal(output["mu"], output["sigma"])
        log_prob = distribution.log_prob(batch["raw_action"]).sum(-1)
        entropy = distribution.entropy().sum(-1)
    policy_loss = -(log_prob * batch["adv"]).mean()
    value_loss = 0.5 * (output["value"] - batch["ret"]).square().mean()
    wanted = policy_loss + 0.7 * value_loss - 0.03 * entropy.mean()
    got = policy.learn_mode.forward(batch)
    assert got["total_loss"] == pytest.approx(wanted.item(), rel=1e-4)
    assert got["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
    assert got["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert got["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert set(monitored_of(type(policy))) <= set(got)


def test_normalized_advantages_do_not_depend_on_the_size_of_the_rewards() -> None:
    losses = []
    for scale in (1.0, 1000.0):
        policy = made(adv_norm=True)
        batch = collected(policy)
        batch["adv"] = batch["adv"] * scale + scale
        losses.append(policy.learn_mode.forward(batch)["policy_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    policy = made()
    plain = policy.learn_mode.forward(collected(policy))["policy_loss"]
    assert abs(losses[0] - plain) > 1e-3


def test_normalized_observations_and_returns_enter_the_losses() -> None:
    policy = made(obs_norm=True, value_norm=True)
    policy.observe_returns(torch.tensor([90.0, 110.0]))
    batch = collected(policy)
    batch["ret"] = 100.0 + 50.0 * batch["adv"]
    obs = batch["obs"]
    scaled = (obs - obs.mean(0)) / obs.std(0, correction=0)
    with torch.no_grad():
        value = policy.model(scaled)["value"]
    torch.testing.assert_close(batch["value"], 100.0 + 10.0 * value, rtol=1e-4, atol=1e-3)
    wanted = 0.5 * (value - 5.0 * batch["adv"]).square().mean()
    assert policy.learn_mode.forward(batch)["value_loss"] == pytest.approx(wanted.item(), rel=1e-3)


def test_scaled_rewards_have_returns_of_deviation_1() -> None:
    policy = made(reward_norm=True, discount=0.9)
    rows = {
        "reward": 1000.0 * torch.randn(200, 8, generator=torch.Generator().manual_seed(0)),
        "done": torch.zeros(200, 8, dtype=torch.bool),
        "episode_id": torch.arange(8).expand(200, 8),
    }
    scaled = policy.scale_rewards(as_tree(rows))
    kept, returns = torch.zeros(8), []
    for reward in scaled:
        kept = 0.9 * kept + reward
        returns.append(kept)
    assert torch.stack(returns).std().item() == pytest.approx(1.0, abs=0.05)
    saved = policy.learn_mode.state_dict()
    restored = made(reward_norm=True, discount=0.9, seed=1)
    restored.learn_mode.load_state_dict(saved)
    assert torch.equal(restored.scale_rewards(as_tree(rows)), policy.scale_rewards(as_tree(rows)))


def test_the_first_step_is_that_of_the_papers_rmsprop() -> None:
    policy = made(learning_rate=0.01, optimizer_eps=0.1, rmsprop_decay=0.9)
    model = policy.model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    policy.learn_mode.forward(collected(policy))
    for old, parameter in zip(before, model.parameters(), strict=True):
        gradient = parameter.grad
        wanted = old - 0.01 * gradient / (0.1 * gradient.square() + 0.1).sqrt()
        torch.testing.assert_close(parameter.detach(), wanted)


@pytest.mark.parametrize(("name", "kind"), [("rmsprop", RMSprop), ("adam", FusedAdam)])
def test_the_optimizer_is_chosen_by_an_option(name: str, kind: type) -> None:
    part = made(optimizer=name).components["actor_critic"]
    assert type(part.optimizer) is kind


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_means_of_adam_decay_as_the_option_says(name: str) -> None:
    part = made(optimizer=name, adam_betas=(0.3, 0.99)).components["actor_critic"]
    assert part.optimizer is not None
    assert part.optimizer.param_groups[0]["betas"] == (0.3, 0.99)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9)])
def test_betas_that_adam_cannot_have_are_refused(betas: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="adam_betas"):
        made(adam_betas=betas)


def test_the_learning_rate_of_rmsprop_follows_its_schedule() -> None:
    falling = Schedule.linear(1.0e-2, 0.0, decay=2, by="update")
    policy = made(learning_rate=falling)
    batch = collected(policy)
    assert [policy.learn_mode.forward(batch)["cur_lr"] for _ in range(2)] == [0.01, 0.005]
    before = policy.learn_mode.state_dict()["model"]
    assert policy.learn_mode.forward(batch)["cur_lr"] == 0.0
    after = policy.learn_mode.state_dict()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_an_interrupted_run_continues_bit_for_bit(optimizer: str) -> None:
    learn = {"optimizer": optimizer, "adam_betas": (0.0, 0.99)}
    whole, first, second = made(**learn), made(**learn), made(**learn, seed=1)
    batches = [collected(made(), seed=seed) for seed in range(6)]
    outputs = [whole.learn_mode.forward(batch) for batch in batches]
    for batch in batches[:3]:
        first.learn_mode.forward(batch)
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch) for batch in batches[3:]] == outputs[3:]


def test_advantages_of_workers_are_returns_to_the_end_minus_values() -> None:
    policy = made(discount=0.5)
    rows = {
        "obs": torch.zeros(3, 1, 4),
        "next_obs": torch.zeros(3, 1, 4),
        "action": torch.zeros(3, 1, dtype=torch.int64),
        "reward": torch.tensor([[1.0], [2.0], [4.0]]),
        "terminated": torch.tensor([[False], [False], [True]]),
        "done": torch.tensor([[False], [False], [True]]),
        "value": torch.tensor([[0.5], [0.25], [0.125]]),
    }
    mode = as_collect_mode(policy, user="the test")
    samples = mode.get_train_sample([{name: rows[name][t, 0] for name in rows} for t in range(3)])
    assert [float(sample["ret"]) for sample in samples] == [3.0, 4.0, 4.0]
    assert [float(sample["adv"]) for sample in samples] == [2.5, 3.75, 3.875]


def test_masked_actions_are_neither_taken_nor_learned_from() -> None:
    policy = made(learning_rate=0.1)
    mask = torch.tensor([[True, False]]).expand(50, 2)
    obs = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    output = policy.collect_mode.forward(obs, action_mask=mask)
    assert not output["action"].any()
    batch = {**output, "obs": obs, "adv": torch.ones(50), "ret": torch.ones(50)}
    got = policy.learn_mode.forward(as_tree({**batch, "action_mask": mask}))
    assert got["entropy"] == pytest.approx(0.0)
    assert got["policy_loss"] == pytest.approx(0.0)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer"):
        made(optimizer="sgd")


@pytest.mark.learning
def test_it_learns_which_action_pays() -> None:
    """One step: the reward is 1 if the action is the sign of the first entry of obs."""
    policy = made(learning_rate=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        obs = torch.randn(64, 4, generator=generator)
        output = policy.collect_mode.forward(obs)
        reward = (output["action"] == (obs[:, 0] > 0)).float()
        rows = {**output, "obs": obs, "adv": reward - output["value"], "ret": reward}
        policy.learn_mode.forward(as_tree(rows))
    obs = torch.randn(500, 4, generator=generator)
    action = policy.eval_mode.forward(obs)["action"]
    assert (action == (obs[:, 0] > 0)).float().mean().item() > 0.9


def test_the_policy_is_built_for_an_environment() -> None:
    policy = A2CPolicy.for_env(gym.make("Pendulum-v1"), gae_lambda=0.9, optimizer="adam")
    assert policy.spec.gae_lambda == 0.9
    assert policy.cfg.optimizer == "adam"
    action = policy.collect_mode.forward(torch.randn(100, 3))["action"]
    assert action.abs().max() <= 2.0
