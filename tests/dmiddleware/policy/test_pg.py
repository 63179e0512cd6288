"""Policy gradient."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.classic import as_collect_mode
from dmiddleware.classic.monitored import monitored_of
from dmiddleware.data import as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Task
from dmiddleware.policy import PGPolicy
from middleware import EpisodeCollector, MonteCarloReturnEstimator, OnPolicyLearner

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}
BOX = {"obs_shape": 3, "action_shape": 2, "action_space": "continuous"}


def made(model: dict[str, Any] = SMALL, **cfg: Any) -> PGPolicy:
    return PGPolicy({"model": model, "seed": 0, **cfg})


def collected(policy: PGPolicy, n: int = 32, seed: int = 0) -> Any:
    """What the policy would collect, with returns drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, policy.cfg.model["obs_shape"], generator=generator)
    ret = 3.0 + torch.randn(n, generator=generator)
    return as_tree({**policy.collect_mode.forward(obs), "obs": obs, "ret": ret})


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("ret_norm", [False, True])
def test_the_loss_is_that_of_the_paper(kind: str, ret_norm: bool) -> None:
    policy = made(SMALL if kind == "discrete" else BOX, entropy_weight=0.03, ret_norm=ret_norm)
    batch = collected(policy)
    policy.learn_mode.forward(batch)
    output, ret = policy.model(batch["obs"]), batch["ret"]
    if kind == "discrete":
        distribution: Any = torch.distributions.Categorical(logits=output["logit"])
        log_prob, entropy = distribution.log_prob(batch["action"]), distribution.entropy()
    else:
        distribution = torch.distributions.Normal(output["mu"], output["sigma"])
        log_prob = distribution.log_prob(batch["raw_action"]).sum(-1)
        entropy = distribution.entropy().sum(-1)
    if ret_norm:
        ret = (ret - ret.mean()) / ret.std()
    policy_loss = -(log_prob * ret).mean()
    wanted = policy_loss - 0.03 * entropy.mean()
    got = policy.learn_mode.forward(batch)
    assert got["total_loss"] == pytest.approx(wanted.item(), rel=1e-4, abs=1e-5)
    assert got["policy_loss"] == pytest.approx(policy_loss.item(), rel=1e-4, abs=1e-5)
    assert got["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert set(monitored_of(type(policy))) <= set(got)


def test_the_step_follows_the_clipped_gradient() -> None:
    policy = made(grad_clip_norm=0.1, entropy_weight=0.0)
    batch = collected(policy)
    output = policy.model(batch["obs"])
    log_prob = torch.distributions.Categorical(logits=output["logit"]).log_prob(batch["action"])
    parameters = list(policy.model.parameters())
    gradients = torch.autograd.grad(-(log_prob * batch["ret"]).mean(), parameters)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    got = policy.learn_mode.forward(batch)
    assert norm > 0.1
    assert got["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 0.1 / norm, rtol=1e-3, atol=1e-6)


def test_the_expected_gradient_does_not_depend_on_a_baseline() -> None:
    """Of both actions, each with its probability, the gradient of a constant return is 0."""
    policy = made(entropy_weight=0.0, grad_clip_norm=None)
    obs = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).expand(2, 4)
    probability = policy.model(obs)["logit"].softmax(-1)[0].detach()
    action = torch.arange(2)
    policy.learn_mode.forward(as_tree({"obs": obs, "action": action, "ret": probability * 5.0}))
    for parameter in policy.model.parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), rtol=0, atol=1e-6)


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first, second = made(), made(), made(seed=1)
    batches = [collected(made(), seed=seed) for seed in range(6)]
    outputs = [whole.learn_mode.forward(batch) for batch in batches]
    for batch in batches[:3]:
        first.learn_mode.forward(batch)
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch) for batch in batches[3:]] == outputs[3:]


def test_a_worker_gets_the_returns_of_an_episode() -> None:
    policy = made(discount=0.5)
    rows = {
        "obs": torch.zeros(3, 4),
        "next_obs": torch.zeros(3, 4),
        "action": torch.zeros(3, dtype=torch.int64),
        "reward": torch.tensor([1.0, 2.0, 4.0]),
        "terminated": torch.tensor([False, False, True]),
        "done": torch.tensor([False, False, True]),
    }
    mode = as_collect_mode(policy, user="the test")
    samples = mode.get_train_sample([{name: rows[name][t] for name in rows} for t in range(3)])
    assert [float(sample["ret"]) for sample in samples] == [3.0, 4.0, 4.0]


def test_masked_actions_are_neither_taken_nor_learned_from() -> None:
    policy = made(learning_rate=0.1)
    mask = torch.tensor([[True, False]]).expand(50, 2)
    obs = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    output = policy.collect_mode.forward(obs, action_mask=mask)
    assert not output["action"].any()
    batch = {**output, "obs": obs, "ret": torch.ones(50), "action_mask": mask}
    got = policy.learn_mode.forward(as_tree(batch))
    assert got["entropy"] == pytest.approx(0.0)
    assert got["policy_loss"] == pytest.approx(0.0)


def test_it_collects_whole_episodes_in_a_chain() -> None:
    with Task(seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        policy = PGPolicy.for_env(envs, seed=0, batch_size=1000)
        task.use(EpisodeCollector(policy, envs, n_episode=4))
        task.use(MonteCarloReturnEstimator(policy)).use(OnPolicyLearner(policy))
        task.run(max_step=2)
    assert (task.ctx.env_episode, task.ctx.train_iter) == (8, 2)


@pytest.mark.learning
def test_it_learns_which_action_pays() -> None:
    """One step: the reward is 1 if the action is the sign of the first entry of obs."""
    policy = made(learning_rate=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        obs = torch.randn(64, 4, generator=generator)
        output = policy.collect_mode.forward(obs)
        reward = (output["action"] == (obs[:, 0] > 0)).float()
        policy.learn_mode.forward(as_tree({**output, "obs": obs, "ret": reward}))
    obs = torch.randn(500, 4, generator=generator)
    action = policy.eval_mode.forward(obs)["action"]
    assert (action == (obs[:, 0] > 0)).float().mean().item() > 0.9


def test_the_policy_is_built_for_an_environment() -> None:
    policy = PGPolicy.for_env(gym.make("Pendulum-v1"), discount=0.9)
    assert policy.spec.discount == 0.9
    output = policy.collect_mode.forward(torch.randn(100, 3))
    assert output["action"].abs().max() <= 2.0
    assert output["raw_action"].abs().max() > 1.0
