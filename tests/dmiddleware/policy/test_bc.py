import pytest
import torch
import torch.nn.functional as F

from dmiddleware.errors import NonFiniteLoss, StructureError
from dmiddleware.policy import BCPolicy
from dmiddleware.tree import as_tree


def test_discrete_actions_are_cloned_by_cross_entropy(small, transitions):
    policy = BCPolicy({"model": small})
    batch = transitions(16)
    logit = policy.model(batch["obs"])["logit"]
    answer = policy.learn_mode.forward(batch)
    wanted = F.cross_entropy(logit, batch["action"]).item()
    assert answer["total_loss"] == pytest.approx(wanted, rel=1e-5)
    hits = (logit.argmax(-1) == batch["action"]).float().mean().item()
    assert answer["accuracy"] == pytest.approx(hits)
    assert answer["cur_lr"] == 1e-3


def test_samples_are_weighted(small, transitions):
    batch = transitions(4, weight=torch.tensor([0.0, 0.0, 0.0, 4.0]))
    policy = BCPolicy({"model": small})
    logit = policy.model(batch["obs"])["logit"]
    wanted = F.cross_entropy(logit[3:], batch["action"][3:]).item()
    assert policy.learn_mode.forward(batch)["total_loss"] == pytest.approx(wanted, rel=1e-5)


def test_continuous_actions_are_cloned_between_their_bounds(pendulum_spaces):
    policy = BCPolicy.for_env(pendulum_spaces)
    obs, action = torch.randn(8, 3), 4 * torch.rand(8, 1) - 2
    mu = policy.model(obs)["mu"]
    answer = policy.learn_mode.forward(as_tree({"obs": obs, "action": action}))
    wanted = (mu - action / 2).square().mean().item()
    assert answer["total_loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8])
def test_discrete_actions_may_be_any_integers(small, transitions, dtype):
    batch = transitions(16)
    few = as_tree({**dict(batch.items()), "action": batch["action"].to(dtype)})
    answers = [BCPolicy({"model": small, "seed": 0}).learn_mode.forward(b) for b in (batch, few)]
    assert answers[0] == answers[1]


def test_discrete_actions_of_another_kind_are_rejected(small, transitions):
    learn = BCPolicy({"model": small}).learn_mode.forward
    with pytest.raises(StructureError, match=r"action has shape \(8, 1\).*\(8,\)"):
        learn(transitions(8, action=torch.zeros(8, 1, dtype=torch.int64)))
    with pytest.raises(StructureError, match=r"must be integers, got torch\.float32"):
        learn(transitions(8, action=torch.zeros(8)))
    with pytest.raises(StructureError, match=r"weight has shape \(8, 1\)"):
        learn(transitions(8, weight=torch.ones(8, 1)))


def test_continuous_actions_without_their_dimension_are_rejected(pendulum_spaces):
    learn = BCPolicy.for_env(pendulum_spaces).learn_mode.forward
    obs = torch.randn(8, 3)
    with pytest.raises(StructureError, match=r"action has shape \(8,\).*\(8, 1\)"):
        learn(as_tree({"obs": obs, "action": torch.zeros(8)}))
    with pytest.raises(StructureError, match=r"weight has shape \(8, 1\).*\(8,\)"):
        learn(as_tree({"obs": obs, "action": torch.zeros(8, 1), "weight": torch.ones(8, 1)}))


def tilt(obs):
    return obs[:, :3] @ torch.tensor([1.0, -0.5, 0.3])


@pytest.mark.parametrize(
    ("spaces", "expert"),
    [
        ("cartpole_spaces", lambda obs: (tilt(obs) > 0).long()),
        ("pendulum_spaces", lambda obs: 2 * tilt(obs).tanh().unsqueeze(1)),
    ],
)
def test_an_expert_is_imitated(spaces, expert, request):
    policy = BCPolicy.for_env(request.getfixturevalue(spaces), seed=0)
    size = policy.cfg.model["obs_shape"]
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        obs = torch.randn(64, size, generator=generator)
        policy.learn_mode.forward(as_tree({"obs": obs, "action": expert(obs)}))
    obs = torch.randn(500, size, generator=generator)
    error = (policy.eval_mode.forward(obs)["action"] - expert(obs)).abs()
    assert error.float().mean() < 0.05


def test_it_collects_as_it_evaluates(small):
    policy = BCPolicy({"model": small})
    obs = torch.randn(9, 4)
    assert torch.equal(
        policy.collect_mode.forward(obs)["action"], policy.eval_mode.forward(obs)["action"]
    )


def test_an_actor_critic_serves_as_model(small, transitions):
    BCPolicy({"model": {**small, "type": "actor_critic"}}).learn_mode.forward(transitions(4))


def test_a_loss_that_is_not_finite_is_rejected(small, transitions):
    batch = transitions(4)
    batch["obs"][0] = float("nan")
    with pytest.raises(NonFiniteLoss, match="train_iter 7 to 10"):
        BCPolicy({"model": small}).learn_mode.forward(batch)
