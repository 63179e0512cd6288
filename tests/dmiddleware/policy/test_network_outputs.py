"""Models of one's own whose outputs have another shape than the stock models'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dmiddleware.errors import PolicyOutputError
from dmiddleware.model import RecurrentActorCritic
from dmiddleware.policy import (
    A2CPolicy,
    C51Policy,
    CQLPolicy,
    DDPGPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    IMPALAPolicy,
    IPPOPolicy,
    IQLPolicy,
    MAPPOPolicy,
    PPOPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
    TD3BCPolicy,
    TD3Policy,
    TQCPolicy,
    VDNPolicy,
)
from tests.dmiddleware.policy.every_policy import batch_for, env_for, made

Change = Callable[[torch.Tensor], Any]


class Changed(nn.Module):
    """A network whose outputs are changed; otherwise it is the network."""

    def __init__(self, inner: nn.Module, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self.inner(*args, **kwargs))

    def compute_critic(self, obs: Any) -> Any:
        return self.change({"value": self.inner.compute_critic(obs)})["value"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class ChangedCritic(nn.Module):
    """A model whose critics' outputs are changed."""

    def __init__(self, model: Any, change: Change) -> None:
        super().__init__()
        self.actor, self.critic = model.actor, Changed(model.critic, change)
        if hasattr(model, "value"):
            self.value = Changed(model.value, change)
        self.obs_shape, self.action_parts = model.obs_shape, model.action_parts

    def forward(self, obs: Any) -> Any:
        return self.actor(obs)


def loss_with(cls: Any, change: Callable[[Any], nn.Module] | None = None) -> float:
    """Return the loss of a policy whose own model was changed."""
    policy = made(cls, **NO_NORM.get(cls, {}))
    if change is not None:
        model = change(policy.model)
        policy = cls.for_env(env_for(cls), model=model, seed=0, **NO_NORM.get(cls, {}))
    loss: float = policy.learn_mode.forward(batch_for(policy))["total_loss"]
    return loss


NO_NORM: dict[Any, dict[str, Any]] = {TD3BCPolicy: {"obs_norm": False}}
TRAILING: Change = lambda output: output.unsqueeze(-1)  # noqa: E731


def of_key(key: str, change: Change) -> Callable[[Any], Any]:
    return lambda output: {**output, key: change(output[key])}


ACTOR_CRITICS = [PPOPolicy, A2CPolicy, IMPALAPolicy, IPPOPolicy, MAPPOPolicy]


@pytest.mark.parametrize("cls", ACTOR_CRITICS)
def test_a_value_may_have_a_last_dimension_of_one(cls: Any) -> None:
    value = of_key("value", TRAILING)
    assert loss_with(cls, lambda model: Changed(model, value)) == loss_with(cls)


@pytest.mark.parametrize(
    "change", [lambda v: v.unsqueeze(0), lambda v: v.mean(), lambda v: torch.stack([v, v], -1)]
)
@pytest.mark.parametrize("cls", ACTOR_CRITICS)
def test_a_value_of_another_shape_is_refused(cls: Any, change: Change) -> None:
    with pytest.raises(PolicyOutputError, match=r"value of the model has shape .*one value for"):
        loss_with(cls, lambda model: Changed(model, of_key("value", change)))


class TrailingValue(RecurrentActorCritic):
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        output = super().forward(*args, **kwargs)
        return {**output, "value": output["value"].unsqueeze(-1)}


def test_so_may_a_value_of_a_recurrent_model() -> None:
    losses = []
    for kind in (RecurrentActorCritic, TrailingValue):
        torch.manual_seed(0)
        model = kind(obs_shape=3, action_shape=3, action_space="discrete")
        policy = RecurrentPPOPolicy.for_env(env_for(PPOPolicy), model=model, seed=0)
        losses.append(policy.learn_mode.forward(batch_for(policy))["total_loss"])
    assert losses[0] == losses[1]


CRITICS = [SACPolicy, DDPGPolicy, TD3Policy, TD3BCPolicy, CQLPolicy, IQLPolicy]


@pytest.mark.parametrize("cls", CRITICS)
def test_values_of_critics_may_have_a_last_dimension_of_one(cls: Any) -> None:
    wanted = loss_with(cls)
    assert loss_with(cls, lambda model: ChangedCritic(model, TRAILING)) == wanted


def test_a_single_critic_needs_no_dimension_for_critics() -> None:
    wanted = loss_with(DDPGPolicy)
    assert loss_with(DDPGPolicy, lambda model: ChangedCritic(model, lambda q: q[0])) == wanted


@pytest.mark.parametrize(
    ("cls", "change"),
    [
        *((cls, lambda q: q.unsqueeze(0)) for cls in CRITICS),
        *((cls, lambda q: tuple(q)) for cls in CRITICS),
        *((cls, lambda q: q.mT) for cls in (SACPolicy, TD3Policy, CQLPolicy)),
        *((cls, lambda q: q[0]) for cls in (TQCPolicy, DiscreteSACPolicy)),
        *((cls, TRAILING) for cls in (TQCPolicy, DiscreteSACPolicy)),
        *((cls, lambda q: q.transpose(0, 1)) for cls in (TQCPolicy, DiscreteSACPolicy)),
    ],
)
def test_values_of_critics_of_another_shape_are_refused(cls: Any, change: Change) -> None:
    with pytest.raises(PolicyOutputError, match=r"output (of the critics|value) of the model has"):
        loss_with(cls, lambda model: ChangedCritic(model, change))


@pytest.mark.parametrize("change", [TRAILING, lambda q: q.unsqueeze(0), lambda q: q.mean(-1)])
@pytest.mark.parametrize("cls", [DQNPolicy, C51Policy, VDNPolicy])
def test_action_values_of_another_shape_are_refused(cls: Any, change: Change) -> None:
    with pytest.raises(PolicyOutputError, match="output logit of the model has shape"):
        loss_with(cls, lambda model: Changed(model, of_key("logit", change)))


@pytest.mark.parametrize("change", [lambda o: o["logit"], lambda o: {"q": o["logit"]}])
@pytest.mark.parametrize("cls", [DQNPolicy, C51Policy, VDNPolicy])
def test_action_values_without_their_name_are_refused(cls: Any, change: Any) -> None:
    with pytest.raises(PolicyOutputError, match='dictionary with the key "logit"'):
        loss_with(cls, lambda model: Changed(model, change))
