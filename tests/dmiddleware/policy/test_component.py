"""Policies that declare their parts."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dmiddleware.errors import CheckpointMismatch, NonFiniteLoss
from dmiddleware.policy import (
    A2CPolicy,
    Component,
    DQNPolicy,
    Policy,
    PolicySettings,
    PPOPolicy,
    TargetRule,
    adam,
)
from dmiddleware.policy.update import UpdateOutput
from dmiddleware.schedule import Schedule
from dmiddleware.settings import Positive
from dmiddleware.torch_private import plain_torch
from dmiddleware.tree import as_tree
from tests.dmiddleware.policy.equal_states import same
from tests.variants import mostly_slow


class Networks(nn.Module):
    """An actor and a critic that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Linear(5, 1)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))


class ActorAndCriticSettings(PolicySettings):
    learning_rate: Positive = 0.05


class ActorAndCritic(Policy):
    """A deterministic actor that follows a critic, with a tuned factor outside of the model."""

    cfg: ActorAndCriticSettings

    def make_components(self) -> dict[str, Component]:
        rate = self.cfg.learning_rate
        return {
            "actor": Component(self.model.actor, adam(rate), grad_clip_norm=1.0, acts=True),
            "critic": Component(self.model.critic, adam(rate), target=TargetRule(1, 0.25)),
            "temperature": Component(Temperature(), adam(rate)),
        }

    def draw(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"noise": torch.randn(len(batch["obs"]), 2, generator=self.learn_generator)}

    def update(self, batch: Any, *, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ("actor", "critic", "temperature")
        actor, critic, temperature = (self.components[name] for name in names)
        with torch.no_grad():
            action = actor.module(batch["next_obs"]) + 0.1 * noise
            value = critic.target(torch.cat([batch["next_obs"], action], -1)).squeeze(-1)
            target = batch["reward"] + 0.9 * value
        taken = critic.module(torch.cat([batch["obs"], batch["action"]], -1)).squeeze(-1)
        critic_loss = (taken - target).square().mean()
        critic.step(critic_loss)
        chosen = torch.cat([batch["obs"], actor.module(batch["obs"])], -1)
        actor_loss = -critic.module(chosen).mean() * temperature.module.log.detach().exp()
        norm = actor.step(actor_loss)
        temperature.step(temperature.module.log * critic_loss.detach())
        return {"critic_loss": critic_loss, "actor_loss": actor_loss, "grad_norm": norm}

    def act_collect(self, obs: Any, env_id: Any, **kwargs: Any) -> dict[str, Any]:
        return {"action": self.components["actor"].module(obs)}

    act_eval = act_collect


def made(**cfg: Any) -> ActorAndCritic:
    torch.manual_seed(0)
    return ActorAndCritic({"seed": 0, **cfg}, Networks())


def batch(n: int = 16, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, n, 3, generator=generator)
    action = torch.randn(n, 2, generator=generator)
    return as_tree({"obs": obs, "next_obs": next_obs, "action": action, "reward": obs.sum(-1)})


def test_collectors_receive_only_what_acting_needs() -> None:
    policy = made()
    state = policy.collect_mode.state_dict()
    assert sorted(state["model"]) == ["actor.bias", "actor.weight"]
    assert set(state["acting"]) == {"action_codec"}
    policy.learn_mode.forward(batch())
    other = made()
    other.collect_mode.load_state_dict(policy.collect_mode.state_dict())
    obs = torch.randn(4, 3)
    actions = [p.collect_mode.forward(obs)["action"] for p in (policy, other)]
    assert torch.equal(*actions)
    other.eval_mode.load_state_dict(policy.learn_mode.state_dict())


@pytest.mark.usefixtures("either_torch")
def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first = made(), made()
    for seed in range(6):
        whole.learn_mode.forward(batch(seed=seed))
    for seed in range(3):
        first.learn_mode.forward(batch(seed=seed))
    second = ActorAndCritic({"seed": 1}, Networks())
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    for seed in range(3, 6):
        second.learn_mode.forward(batch(seed=seed))
    assert same(second.learn_mode.state_dict(), whole.learn_mode.state_dict())


def test_each_part_is_trained_on_its_own_loss_alone() -> None:
    policy = made(learning_rate=0.05)
    parts = policy.components
    before = copy.deepcopy(policy.model)
    target = copy.deepcopy(parts["critic"].target)
    policy.learn_mode.forward(batch())
    for name in ("actor", "critic"):
        for now, then in zip(
            getattr(policy.model, name).parameters(),
            getattr(before, name).parameters(),
            strict=True,
        ):
            # Adam's first step is the learning rate, in the direction of the gradient.
            assert (now - then).abs().max().item() == pytest.approx(0.05, rel=1e-3)
    moved = target.weight.lerp(parts["critic"].module.weight, 0.25)
    assert torch.allclose(parts["critic"].target.weight, moved)
    assert parts["temperature"].module.log.item() == pytest.approx(-0.05)


def test_a_norm_is_clipped_and_reported() -> None:
    policy = made()
    big = batch()
    output = policy.learn_mode.forward(big)
    assert output["grad_norm"] > 0
    weight = nn.Parameter(torch.ones(3))
    module = nn.ParameterList([weight])
    part = Component(module, adam(0.1), grad_clip_norm=0.5)
    part.prepare(not_finite=torch.zeros(()))
    assert part.step(3 * weight.sum()).item() == pytest.approx(3 * math.sqrt(3))
    assert weight.grad is not None
    assert weight.grad.norm().item() == pytest.approx(0.5)


def states_around_a_bad_reward(policy: Any, reward: float, match: str) -> tuple[Any, Any]:
    """Return the states after a good update, and after one that fails as ``match`` says."""
    policy.learn_mode.forward(batch())
    before = policy.learn_mode.state_dict()
    bad = batch()
    bad["reward"][0] = reward
    with pytest.raises(NonFiniteLoss, match=match):
        policy.learn_mode.forward(bad)
    return before, policy.learn_mode.state_dict()


def test_a_batch_that_is_not_finite_changes_nothing_and_names_the_loss() -> None:
    before, after = states_around_a_bad_reward(made(), float("inf"), "critic_loss is inf")
    assert same(after["optimizer"]["critic"], before["optimizer"]["critic"])
    assert torch.equal(after["model"]["critic.weight"], before["model"]["critic.weight"])
    assert after["train_iter"] == 1


def test_parts_that_step_after_a_loss_that_is_not_finite_change_nothing() -> None:
    policy, match = made(), "components that step later in this update were skipped"
    before, after = states_around_a_bad_reward(policy, float("nan"), match)
    for name in ("model", "optimizer", "target", "learning"):
        assert same(after[name], before[name]), name
    policy.learn_mode.forward(batch())
    moved = policy.learn_mode.state_dict()
    for name in ("model", "target", "learning"):
        assert not same(moved[name], before[name]), name


def test_all_parts_wait_until_a_loss_that_is_not_finite_has_been_reported() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    first, second = (Component(nn.ParameterList([weight]), adam(0.1)) for weight in weights)
    not_finite = torch.zeros(())
    for part in (first, second):
        part.prepare(not_finite=not_finite)
    first.step(weights[0].sum() * math.nan)
    for _ in range(2):
        first.step(weights[0].sum())
        second.step(weights[1].sum())
    assert [weight.item() for weight in weights] == [1.0, 1.0]
    not_finite.zero_()
    second.step(weights[1].sum())
    assert weights[1].item() == pytest.approx(0.9)


class Root(Policy):
    """Finite losses at 0, where the slope of the root is infinite."""

    def make_components(self) -> dict[str, Component]:
        return {"root": Component(self.model, adam(0.1), acts=True)}

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        loss = self.model.weight.sum().sqrt()
        self.components["root"].step(loss)
        return {"total_loss": loss.detach()}


def test_an_error_names_the_weights_that_an_earlier_gradient_broke() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    policy = Root(model=model, modes=["learn"])
    assert policy.learn_mode.forward(batch())["total_loss"] == 0.0
    with pytest.raises(NonFiniteLoss, match=r"weights of root are NaN.*grad_clip_norm"):
        policy.learn_mode.forward(batch())


def test_a_part_that_is_missing_in_a_checkpoint_is_named() -> None:
    policy = made()
    state = policy.learn_mode.state_dict()
    del state["learning"]["temperature"]
    with pytest.raises(CheckpointMismatch, match="no component temperature"):
        policy.learn_mode.load_state_dict(state)


def test_the_learning_rate_of_a_part_follows_its_schedule() -> None:
    weight = nn.Parameter(torch.ones(1))
    part = Component(
        nn.ParameterList([weight]), adam(Schedule.linear(0.1, 0.0, decay=10, by="update"))
    )
    part.prepare(not_finite=torch.zeros(()))
    assert part.schedule is not None
    part.learning_rate = part.schedule(5)
    assert part.learning_rate == pytest.approx(0.05)
    part.step(weight.sum())
    assert weight.item() == pytest.approx(0.95)


def test_a_loaded_state_does_not_change_the_settings_of_the_optimizer() -> None:
    old = dqn(learning_rate=1e-2, adam_eps=1e-8)
    old.learn_mode.forward(transitions(0))
    learn = {"learning_rate": 0.5, "adam_eps": 0.1}
    new, other = dqn(**learn), dqn(**learn)
    new.learn_mode.load_state_dict(old.learn_mode.state_dict())
    part = new.components["q"]
    assert part.learning_rate == 0.5
    assert part.optimizer.param_groups[0]["eps"] == 0.1
    # As if the state had been saved with these settings.
    state = old.learn_mode.state_dict()
    state["optimizer"]["q"]["param_groups"][0].update(lr=0.5, eps=0.1)
    other.learn_mode.load_state_dict(state)
    for policy in (new, other):
        assert policy.learn_mode.forward(transitions(1))["cur_lr"] == 0.5
    weights = [policy.learn_mode.state_dict()["model"] for policy in (new, other)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-5, rtol=1e-5)


def test_outputs_on_a_gpu_are_read_once_and_only_when_they_are_asked_for() -> None:
    looks = []
    output = UpdateOutput(
        {"loss": torch.tensor(2.0), "priority": torch.ones(3), "cur_lr": 0.1},
        lambda: looks.append(1),
    )
    assert output["cur_lr"] == 0.1
    assert output["priority"].shape == (3,)
    assert list(output) == ["loss", "priority", "cur_lr"]
    assert "loss" in output
    assert output.pop("priority").shape == (3,)
    assert output.pop("priority", None) is None
    assert not looks
    assert (output["loss"], output["loss"]) == (2.0, 2.0)
    assert dict(output) == {"loss": 2.0, "cur_lr": 0.1}
    assert looks == [1]


SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}


def transitions(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, 16, 4, generator=generator)
    return as_tree(
        {
            "obs": obs,
            "next_obs": next_obs,
            "action": torch.randint(0, 2, (16,), generator=generator),
            "reward": torch.randn(16, generator=generator),
            "terminated": torch.rand(16, generator=generator) < 0.2,
            "log_prob": -torch.rand(16, generator=generator),
            "value": torch.randn(16, generator=generator),
            "adv": torch.randn(16, generator=generator),
            "ret": torch.randn(16, generator=generator),
        }
    )


def dqn(**cfg: Any) -> DQNPolicy:
    learn = {
        "target_update_freq": 2,
        "grad_clip_norm": 1.0,
        "learning_rate": Schedule.linear(1e-2, 1e-3, decay=8, by="update"),
    }
    return DQNPolicy({"model": SMALL, "seed": 0, **learn, **cfg})


def ppo(**cfg: Any) -> PPOPolicy:
    learn = {"clip_ratio": Schedule.linear(0.2, 0.1, decay=8, by="update")}
    return PPOPolicy({"model": SMALL, "seed": 0, **learn, "target_kl": 5.0, **cfg})


def a2c() -> A2CPolicy:
    return A2CPolicy({"model": SMALL, "seed": 0})  # its optimizer is RMSprop


@pytest.mark.parametrize("make", [dqn, ppo, a2c])
def test_updates_give_the_same_state_without_private_torch(make: Any) -> None:
    private, plain = make(), make()
    for seed in range(5):
        private.learn_mode.forward(transitions(seed))
        with plain_torch():
            plain.learn_mode.forward(transitions(seed))
    assert same(private.learn_mode.state_dict(), plain.learn_mode.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
@pytest.mark.parametrize(("make", "rows"), [(made, batch), (a2c, transitions)])
def test_a_copy_learns_as_its_original_does(copied: Any, make: Any, rows: Any) -> None:
    policy = make()
    policy.learn_mode.forward(rows(seed=0))
    twin = copied(policy)
    before = policy.learn_mode.state_dict()
    twin.learn_mode.forward(rows(seed=1))
    assert same(policy.learn_mode.state_dict(), before)
    policy.learn_mode.forward(rows(seed=1))
    assert same(policy.learn_mode.state_dict(), twin.learn_mode.state_dict())


@pytest.mark.usefixtures("either_torch")
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("make", "backend"),
    mostly_slow([(dqn, "eager"), (dqn, "inductor"), (ppo, "inductor")], keep=1),
)
def test_a_compiled_update_gives_the_same_results_and_checkpoints(
    make: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    eager, compiled = make(), make(compile=True)
    for seed in range(6):
        outputs = [policy.learn_mode.forward(transitions(seed)) for policy in (eager, compiled)]
        assert outputs[0].keys() == outputs[1].keys()
        for key, value in outputs[0].items():
            assert outputs[1][key] == pytest.approx(value, abs=1e-5), key
    states = [policy.learn_mode.state_dict() for policy in (eager, compiled)]
    assert states[0]["model"].keys() == states[1]["model"].keys()
    for name, value in states[0]["model"].items():
        assert torch.allclose(states[1]["model"][name], value, atol=1e-5), name
    # Either kind continues from the other's checkpoint, with the settings of its config.
    for policy, state in ((eager, states[1]), (compiled, states[0])):
        for optimizer in state["optimizer"].values():
            optimizer["param_groups"][0]["lr"] = 7.0
        policy.learn_mode.load_state_dict(state)
        policy.learn_mode.forward(transitions(9))
    models = [policy.learn_mode.state_dict()["model"] for policy in (eager, compiled)]
    for name, value in models[0].items():
        assert torch.allclose(models[1][name], value, atol=1e-5), name


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("make", "backend"),
    mostly_slow([(dqn, "eager"), (ppo, "eager"), (dqn, "inductor"), (ppo, "inductor")], keep=2),
)
def test_an_update_is_one_graph_and_is_compiled_once(
    make: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    policy = make(compile=True)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for seed in range(4):
        policy.learn_mode.forward(transitions(seed))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


class Scaled(Policy):
    """Regression on targets that are scaled by a number that the policy holds."""

    def make_components(self) -> dict[str, Component]:
        self.scale = 1.0
        return {"model": Component(self.model, adam(0.1), acts=True)}

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        loss = (self.model(batch["obs"]) - self.scale * batch["action"]).square().mean()
        self.components["model"].step(loss)
        return {"total_loss": loss.detach()}


def pair(model: nn.Module) -> list[Scaled]:
    """An eager and a compiled policy with the same weights."""
    models = [model, copy.deepcopy(model)]
    flags = (False, True)
    return [
        Scaled({"compile": flag}, one, modes=["learn"])
        for flag, one in zip(flags, models, strict=True)
    ]


def assert_same_losses(policies: list[Scaled], n_rows: int) -> None:
    rows = {"obs": torch.randn(n_rows, 2), "action": torch.randn(n_rows, 1)}
    losses = [policy.learn_mode.forward(as_tree(rows))["total_loss"] for policy in policies]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize("backend", mostly_slow(["eager", "inductor"], keep=1))
def test_compiled_policies_of_one_class_do_not_share_their_code(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.manual_seed(0)
    small, deep = pair(nn.Linear(2, 1)), pair(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    deep_too = pair(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    for _ in range(3):
        for policies in (small, deep, deep_too):
            assert_same_losses(policies, n_rows=4)


@pytest.mark.compiled
def test_a_compiled_update_sees_new_shapes_and_what_the_policy_changes() -> None:
    torch.manual_seed(0)
    policies = pair(nn.Linear(2, 1))
    for n_rows, scale in ((4, 1.0), (6, 1.0), (6, 3.0), (4, 3.0), (9, -1.0)):
        for policy in policies:
            policy.scale = scale
        assert_same_losses(policies, n_rows)
