"""Parts with any optimizer of torch, and one of one's own."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmiddleware.data import as_tree, load_checkpoint, save_checkpoint
from dmiddleware.errors import ConfigError, NonFiniteLoss
from dmiddleware.policy import (
    A2CPolicy,
    Component,
    IMPALAPolicy,
    Policy,
    PolicySettings,
    TargetRule,
    adamw,
    torch_optimizer,
)
from dmiddleware.rl.optim import FusedAdamW
from dmiddleware.schedule import LearningRate
from tests.dmiddleware.policy.equal_states import same
from tests.dmiddleware.policy.every_policy import batch_for, made
from tests.variants import mostly_slow


class SignDescent(torch.optim.Optimizer):
    """An optimizer of one's own with a state: steps by the sign of a mean of gradients."""

    def __init__(self, parameters: Any, lr: float, decay: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["decay"])
                parameter.sub_(group["lr"] * mean.sign())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "plain SGD": torch.optim.SGD,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "own": SignDescent,
}
RATE = 0.01


class Networks(nn.Module):
    """A network that is learned in two parts; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)
        self.second.unused = nn.Parameter(torch.ones(2))


class TwoPartsSettings(PolicySettings):
    rate: LearningRate = RATE
    """The learning rate of both parts."""
    optimizer: str = "AdamW"
    """One of OPTIMIZERS."""


class TwoParts(Policy):
    """Regression; the second part learns from what the first part has learned."""

    cfg: TwoPartsSettings

    def make_components(self) -> dict[str, Component]:
        make = torch_optimizer(OPTIMIZERS[self.cfg.optimizer], self.schedules["rate"])
        first = Component(self.model.first, make, grad_clip_norm=0.5, acts=True)
        return {
            "first": first,
            "second": Component(self.model.second, make, target=TargetRule(1, 0.1), acts=True),
        }

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        model = self.model
        loss = (model.second(model.first(batch["obs"])) - batch["wanted"]).square().mean()
        norm = self.components["first"].step(loss)
        second = (model.second(model.first(batch["obs"])) - batch["wanted"]).square().mean()
        self.components["second"].step(second)
        return {"total_loss": loss.detach(), "second": second.detach(), "grad_norm": norm}


def policy_with(optimizer: str, **cfg: Any) -> TwoParts:
    torch.manual_seed(0)
    return TwoParts({"seed": 0, "optimizer": optimizer, **cfg}, Networks(), ["learn"])


def rows(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(8, 3, generator=generator)
    return as_tree({"obs": obs, "wanted": obs.sum(-1, keepdim=True)})


def by_hand(optimizer: str, n_updates: int) -> Networks:
    """Make the same updates with torch alone."""
    torch.manual_seed(0)
    model = Networks()
    parts = (model.first, model.second)
    steps = [OPTIMIZERS[optimizer](part.parameters(), lr=RATE) for part in parts]
    for seed in range(n_updates):
        batch = rows(seed)
        for part, step in zip(parts, steps, strict=True):
            loss = (model.second(model.first(batch["obs"])) - batch["wanted"]).square().mean()
            model.zero_grad()
            loss.backward()
            if part is model.first:
                nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            step.step()
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_part_steps_as_its_optimizer_does(optimizer: str) -> None:
    policy, model = policy_with(optimizer), by_hand(optimizer, 5)
    for seed in range(5):
        policy.learn_mode.forward(rows(seed))
    for name, value in policy.learn_mode.state_dict()["model"].items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    policy = policy_with(optimizer)
    for bad in (math.nan, math.inf):
        before = policy.learn_mode.state_dict()
        batch = rows(9)
        batch["wanted"][0] = bad
        with pytest.raises(NonFiniteLoss):
            policy.learn_mode.forward(batch)
        assert same(policy.learn_mode.state_dict(), before)
        policy.learn_mode.forward(rows(0))
        assert not same(policy.learn_mode.state_dict()["model"], before["model"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_continues_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    rate = {"type": "linear", "start": 0.01, "end": 0.001, "decay": 6, "by": "update"}
    whole, first, second = (policy_with(optimizer, rate=rate) for _ in range(3))
    rates = [whole.learn_mode.forward(rows(seed))["cur_lr"] for seed in range(6)]
    assert rates == pytest.approx([0.01 - 0.0015 * n for n in range(6)])
    for seed in range(3):
        first.learn_mode.forward(rows(seed))
    save_checkpoint(tmp_path / "state", first.learn_mode.state_dict())
    second.learn_mode.load_state_dict(load_checkpoint(tmp_path / "state"))
    copies = [second, copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    for policy in copies:
        for seed in range(3, 6):
            policy.learn_mode.forward(rows(seed))
        assert same(policy.learn_mode.state_dict(), whole.learn_mode.state_dict())


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("optimizer", "backend"),
    mostly_slow([("own", "eager"), ("own", "inductor"), ("AdamW", "inductor")], keep=1),
)
def test_a_compiled_update_makes_the_steps_of_any_optimizer(
    optimizer: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    rate = {"type": "linear", "start": 0.01, "end": 0.001, "decay": 6, "by": "update"}
    eager, compiled = (policy_with(optimizer, rate=rate, compile=flag) for flag in (False, True))
    for seed in range(4):
        outputs = [policy.learn_mode.forward(rows(seed)) for policy in (eager, compiled)]
        assert outputs[0] == pytest.approx(outputs[1], abs=1e-5)
    before = compiled.learn_mode.state_dict()
    bad = rows(9)
    bad["wanted"][0] = math.nan
    with pytest.raises(NonFiniteLoss):
        compiled.learn_mode.forward(bad)
    after = compiled.learn_mode.state_dict()
    for state in (before, after):  # the rate had followed its schedule
        for part in state["optimizer"].values():
            del part["param_groups"]
    assert same(after, before)
    for policy in (eager, compiled, copy.deepcopy(compiled)):
        policy.learn_mode.forward(rows(5))
    models = [policy.learn_mode.state_dict()["model"] for policy in (eager, compiled)]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, atol=1e-5, rtol=1e-5)


def test_a_part_takes_an_optimizer_that_exists_already() -> None:
    module = nn.Linear(2, 1)
    groups = [{"params": [module.bias], "weight_decay": 0.0}, {"params": [module.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    part = Component(module, optimizer)
    part.prepare(not_finite=torch.zeros(()))
    before = copy.deepcopy(module)
    part.step(0.0 * module.weight.sum() + 0.0 * module.bias.sum())
    assert part.optimizer is optimizer
    assert torch.equal(module.bias, before.bias)
    torch.testing.assert_close(module.weight, 0.95 * before.weight)


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (lambda module: torch_optimizer(torch.optim.LBFGS, 0.1), "LBFGS needs a closure"),
        (lambda module: torch.optim.LBFGS(module.parameters()), "LBFGS needs a closure"),
        (lambda module: torch.optim.SGD([module.weight], lr=0.1), "has 1 parameters.*not the 2"),
        (lambda module: torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), "not the 2 of"),
        (lambda module: torch.optim.SGD, r"torch_optimizer\(torch.optim.SGD, learning_rate\)"),
        (lambda module: 1e-3, "must be an optimizer of torch"),
    ],
)
def test_what_cannot_train_a_part_is_refused(optimizer: Any, match: str) -> None:
    module = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=match):
        Component(module, optimizer(module)).prepare(not_finite=torch.zeros(()))


@pytest.mark.parametrize("cls", [A2CPolicy, IMPALAPolicy])
def test_adamw_is_offered_where_a_config_names_the_optimizer(cls: Any) -> None:
    policy = made(cls, optimizer="adamw", weight_decay=0.5)
    policy.learn_mode.forward(batch_for(policy))
    (part,) = (one for one in policy.components.values() if one.optimizer)
    assert type(part.optimizer) is FusedAdamW
    assert part.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_adamw_takes_weights_away() -> None:
    module = nn.Linear(2, 1, bias=False)
    part = Component(module, adamw(0.1, weight_decay=0.5))
    part.prepare(not_finite=torch.zeros(()))
    before = module.weight.detach().clone()
    part.step(0.0 * module.weight.sum())
    torch.testing.assert_close(module.weight, 0.95 * before)
