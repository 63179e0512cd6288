"""States that DI-engine saved, or that have a model and its optimizer only."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from dmiddleware.classic import (
    Policy,
    as_collect_mode,
    as_eval_mode,
    as_learn_mode,
    create_policy,
)
from dmiddleware.data import convert_checkpoint
from dmiddleware.errors import CheckpointMismatch
from dmiddleware.policy import DQNPolicy, PPOPolicy, SACPolicy
from dmiddleware.worker import BaseLearner


def learner_of(policy):
    return as_learn_mode(policy, user="test")


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out)


class Encoder(nn.Module):
    """Has the names of DI-engine's encoder of vectors."""

    def __init__(self, n_in, sizes):
        super().__init__()
        self.init = linear(n_in, sizes[0])
        pairs = itertools.pairwise(sizes)
        self.main = nn.Sequential(*(one for a, b in pairs for one in (linear(a, b), nn.ReLU())))

    def forward(self, obs):
        return self.main(torch.relu(self.init(obs)))


class DuelingHead(nn.Module):
    def __init__(self, width, n_out):
        super().__init__()
        self.A, self.V = (
            nn.Sequential(
                nn.Sequential(linear(width, width), nn.ReLU()), nn.Sequential(linear(width, n))
            )
            for n in (n_out, 1)
        )  # fmt: skip


class DiscreteHead(nn.Module):
    def __init__(self, width, n_out):
        super().__init__()
        self.Q = nn.Sequential(
            nn.Sequential(linear(width, width), nn.ReLU()), nn.Sequential(linear(width, n_out))
        )


class RegressionHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.main = nn.Sequential(linear(width, width), nn.ReLU())
        self.last = linear(width, 1)


class TheirDQN(nn.Module):
    def __init__(self, sizes, *, dueling):
        super().__init__()
        self.encoder = Encoder(4, sizes)
        self.head = (DuelingHead if dueling else DiscreteHead)(sizes[-1], 2)

    def forward(self, obs):
        features = self.encoder(obs)
        if isinstance(self.head, DiscreteHead):
            return self.head.Q(features)
        advantage = self.head.A(features)
        return advantage - advantage.mean(-1, keepdim=True) + self.head.V(features)


class TheirVAC(nn.Module):
    def __init__(self, sizes, *, shared):
        super().__init__()
        if shared:
            self.encoder = Encoder(4, sizes)
            encoders = self.encoder, self.encoder
        else:
            self.actor_encoder, self.critic_encoder = Encoder(4, sizes), Encoder(4, sizes)
            encoders = self.actor_encoder, self.critic_encoder
        self.critic_head = RegressionHead(sizes[-1])
        self.actor_head = DiscreteHead(sizes[-1], 2)
        self.actor = nn.ModuleList([encoders[0], self.actor_head])
        self.critic = nn.ModuleList([encoders[1], self.critic_head])

    def forward(self, obs):
        value = self.critic_head.last(self.critic_head.main(self.critic[0](obs)))
        return self.actor_head.Q(self.actor[0](obs)), value.squeeze(-1)


def trained(network, loss_of):
    """Return an optimizer that has made a step."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loss_of(network(torch.randn(8, 4))).backward()
    optimizer.step()
    return optimizer


def loaded(policy, state, tmp_path):
    """Save a state as DI-engine does, convert it, and load it with a learner's hook."""
    torch.save(state, tmp_path / "ckpt_best.pth.tar")
    convert_checkpoint(tmp_path / "ckpt_best.pth.tar", tmp_path / "converted.safetensors")
    cfg = {"hook": {"load_ckpt_before_run": str(tmp_path / "converted.safetensors")}}
    with BaseLearner(cfg, policy, exp_name=str(tmp_path)) as learner:
        learner.call_hook("before_run")
        return learner.train_iter, learner.collector_envstep


@pytest.mark.parametrize("dueling", [True, False])
def test_dqn_loads_a_checkpoint_of_di_engine(dueling, tmp_path, transitions, caplog):
    theirs, target = (TheirDQN([16, 8], dueling=dueling) for _ in range(2))
    optimizer = trained(theirs, lambda q: q.square().mean())
    model = {
        "obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [16, 8], "dueling": dueling,
    }  # fmt: skip
    policy = create_policy({"type": "dqn", "model": model})
    state = {
        "model": theirs.state_dict(), "target_model": target.state_dict(),
        "optimizer": optimizer.state_dict(), "last_iter": 7, "last_step": 90,
    }  # fmt: skip
    assert loaded(policy, state, tmp_path) == (7, 90)
    obs = torch.randn(5, 4)
    torch.testing.assert_close(policy.collect_mode.forward(obs)["logit"], theirs(obs))
    found = policy.learn_mode.state_dict()
    bias = found["target"]["q"]["head.0.bias"]
    assert torch.equal(bias, (target.head.A if dueling else target.head.Q)[0][0].bias)
    assert found["optimizer"]["q"]["state"]["0"]["step"] == 1
    assert "random generators" in caplog.text
    assert policy.learn_mode.forward(transitions())["total_loss"] > 0


@pytest.mark.parametrize("shared", [True, False])
def test_ppo_loads_a_checkpoint_of_di_engine(shared, tmp_path, ppo_batch):
    theirs = TheirVAC([16, 8], shared=shared)
    optimizer = trained(theirs, lambda out: out[0].square().mean() + out[1].square().mean())
    model = {
        "obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [16, 8],
        "share_encoder": shared, "actor_head_hidden_size": 8, "critic_head_hidden_size": 8,
        "activation": "relu",
    }  # fmt: skip
    policy = create_policy({"type": "ppo", "model": model})
    loaded(policy, {"model": theirs.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    obs = torch.randn(5, 4)
    output = policy.collect_mode.forward(obs)
    logit, value = theirs(obs)
    torch.testing.assert_close(output["logit"], logit)
    torch.testing.assert_close(output["value"], value)
    policy.learn_mode.forward(ppo_batch(policy))


class TheirPPG(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.actor_critic = TheirVAC(sizes, shared=True)
        self.aux_critic = copy.deepcopy(self.actor_critic.critic)

    def forward(self, obs):
        encoder, head = self.aux_critic
        value = head.last(head.main(encoder(obs))).squeeze(-1)
        return *self.actor_critic(obs), value


def test_ppg_loads_a_checkpoint_of_di_engine(tmp_path, ppo_batch):
    theirs = TheirPPG([16, 8])
    for parameter in theirs.aux_critic.parameters():
        nn.init.normal_(parameter)
    model = {
        "obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [16, 8],
        "actor_head_hidden_size": 8, "critic_head_hidden_size": 8, "activation": "relu",
    }  # fmt: skip
    policy = create_policy({"type": "ppg", "model": model})
    loaded(policy, {"model": theirs.state_dict()}, tmp_path)
    obs = torch.randn(5, 4)
    output = policy.collect_mode.forward(obs)
    logit, auxiliary, value = theirs(obs)
    torch.testing.assert_close(output["logit"], logit)
    torch.testing.assert_close(output["value"], value)
    features = policy.policy.model.actor(obs)["features"]
    torch.testing.assert_close(policy.policy.model.auxiliary(features).squeeze(-1), auxiliary)
    policy.learn_mode.forward(ppo_batch(policy))


@pytest.mark.parametrize("as_mode", [as_collect_mode, as_eval_mode])
def test_actors_load_it_too(as_mode):
    theirs = TheirDQN([8], dueling=False)
    model = {
        "obs_shape": 4,
        "action_shape": 2,
        "encoder_hidden_sizes": [8],
        "head_hidden_sizes": [8],
    }
    policy = DQNPolicy({"model": model})
    as_mode(policy, user="test").load_state_dict({"model": theirs.state_dict()})
    obs = torch.randn(5, 4)
    torch.testing.assert_close(policy.collect_mode.forward(obs)["logit"], theirs(obs))


def test_a_checkpoint_of_another_network_says_which_name_does_not_fit(small):
    theirs = TheirDQN([16, 8], dueling=True)
    policy = DQNPolicy({"model": small})
    before = policy.learn_mode.state_dict()["model"]
    with pytest.raises(CheckpointMismatch, match=r"encoder|head"):
        learner_of(policy).load_state_dict({"model": theirs.state_dict()})
    assert all(
        torch.equal(policy.learn_mode.state_dict()["model"][k], v) for k, v in before.items()
    )
    pendulum = {"obs_shape": 4, "action_shape": 2, "action_space": "continuous"}
    with pytest.raises(CheckpointMismatch, match=r"has no \S+, which this policy"):
        learner_of(SACPolicy({"model": pendulum})).load_state_dict({"model": theirs.state_dict()})


@pytest.mark.parametrize("make", [DQNPolicy, PPOPolicy])
def test_a_model_with_its_optimizer_is_loaded_as_far_as_it_goes(make, small, caplog):
    source, policy = make({"model": small, "seed": 0}), make({"model": small, "seed": 1})
    model = source.learn_mode.state_dict()["model"]
    optimizer = torch.optim.Adam([nn.Parameter(one.clone()) for one in model.values()])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    learner_of(policy).load_state_dict({"model": model, "optimizer": optimizer.state_dict()})
    found = policy.learn_mode.state_dict()
    assert all(torch.equal(found["model"][name], one) for name, one in model.items())
    assert all(
        torch.equal(one, found["target"][part][name])
        for part in found["target"]
        for name, one in model.items()
    )
    (slots,) = found["optimizer"].values()
    assert slots["state"]["0"]["step"] == 1
    assert "updates count from 0" in caplog.text and "optimizer" not in caplog.text
    caplog.clear()
    learner_of(policy).load_state_dict({"model": model})
    assert "optimizer" in caplog.text


def test_a_policy_of_ones_own_loads_it_too(caplog):
    class Own(Policy):
        def _init_learn(self):
            self._optimizer = torch.optim.Adam(self._model.parameters())

        def _forward_learn(self, data):
            return {"total_loss": 0.0}

    first, second = (Own({}, model=linear(2, 1), enable_field=["learn"]) for _ in range(2))
    model, optimizer = first._model, first._optimizer
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    second.learn_mode.load_state_dict(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    assert torch.equal(second._model.weight, model.weight)
    assert second._optimizer.state_dict()["state"][0]["step"] == 1
    assert "only model, optimizer" in caplog.text
