"""Networks of one's own, as docs/howto/custom-model.md asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import ConfigError, PolicyError
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    CQLPolicy,
    D4PGPolicy,
    DDPGPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    FastTD3Policy,
    IMPALAPolicy,
    IQLPolicy,
    ObsNormSettings,
    PGPolicy,
    PPGPolicy,
    PPOPolicy,
    SACPolicy,
    TD3BCPolicy,
    TD3Policy,
    TQCPolicy,
)
from tests.dmiddleware.policy.one_round import (
    BOX,
    Drawn,
    action_space_of,
    check_same_actions,
    one_round,
)

(N_OBS,), (N_ACTIONS,), N_CHOICES = BOX.shape, BOX.shape, 3


class Outputs(nn.Module):
    """Named outputs of one layer."""

    def __init__(self, **sizes: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({n: nn.Linear(N_OBS, size or 1) for n, size in sizes.items()})
        self.sizes = sizes

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {name: layer(obs) for name, layer in self.layers.items()}
        found = {n: x if self.sizes[n] else x.squeeze(-1) for n, x in found.items()}
        if "sigma" in found:
            found["sigma"] = found["sigma"].exp()
        return found


class Critics(nn.Module):
    """The values, or quantiles, of a row's action by each critic."""

    def __init__(self, n_critics: int, n_quantiles: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(N_OBS + N_ACTIONS, n_quantiles or 1) for _ in range(n_critics)
        )
        self.squeezes = n_quantiles is None

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([obs, action], -1)
        values = torch.stack([layer(joined) for layer in self.layers])
        return values.squeeze(-1) if self.squeezes else values


class ChoiceCritics(nn.Module):
    """The values of all choices by each critic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(N_OBS, N_CHOICES) for _ in range(2))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(obs) for layer in self.layers])


class Value(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(N_OBS, 1)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.layer(obs).squeeze(-1)


class Of(nn.Module):
    """Submodules, without a forward."""

    def __init__(self, **submodules: nn.Module) -> None:
        super().__init__()
        for name, module in submodules.items():
            self.add_module(name, module)


class Phasic(Of):
    """An actor with features, an auxiliary value of these, and a critic."""

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logit": self.actor(obs)["logit"], "value": self.critic(obs)}


class WithSupport(Of):
    """Submodules, and the returns that the atoms of a critic stand for."""

    def __init__(self, **submodules: nn.Module) -> None:
        super().__init__(**submodules)
        self.register_buffer("support", torch.linspace(-1000.0, 1000.0, 5))


def gaussian() -> nn.Module:
    return Outputs(mu=N_ACTIONS, sigma=N_ACTIONS)


NETWORKS: dict[Any, Callable[[], nn.Module]] = {
    SACPolicy: lambda: Of(actor=gaussian(), critic=Critics(2)),
    CQLPolicy: lambda: Of(actor=gaussian(), critic=Critics(2)),
    TQCPolicy: lambda: Of(actor=gaussian(), critic=Critics(5, 25)),
    TD3Policy: lambda: Of(actor=Outputs(mu=N_ACTIONS), critic=Critics(2)),
    TD3BCPolicy: lambda: Of(actor=Outputs(mu=N_ACTIONS), critic=Critics(2)),
    D4PGPolicy: lambda: WithSupport(actor=Outputs(mu=N_ACTIONS), critic=Critics(1, 5)),
    FastTD3Policy: lambda: WithSupport(actor=Outputs(mu=N_ACTIONS), critic=Critics(2, 5)),
    DDPGPolicy: lambda: Of(actor=Outputs(mu=N_ACTIONS), critic=Critics(1)),
    IQLPolicy: lambda: Of(actor=gaussian(), critic=Critics(2), value=Value()),
    DiscreteSACPolicy: lambda: Of(actor=Outputs(logit=N_CHOICES), critic=ChoiceCritics()),
    PPOPolicy: lambda: Outputs(logit=N_CHOICES, value=None),
    PPGPolicy: lambda: Phasic(
        actor=Outputs(logit=N_CHOICES, features=N_OBS), auxiliary=Value(), critic=Value()
    ),
    A2CPolicy: lambda: Outputs(logit=N_CHOICES, value=None),
    IMPALAPolicy: lambda: Outputs(logit=N_CHOICES, value=None),
    BCPolicy: lambda: Outputs(logit=N_CHOICES),
    PGPolicy: lambda: Outputs(logit=N_CHOICES),
    DQNPolicy: lambda: Outputs(logit=N_CHOICES),
}
OF_SUBMODULES = [cls for cls, make in NETWORKS.items() if isinstance(make(), Of)]
NORMALIZING = [cls for cls in NETWORKS if issubclass(cls.settings_class(), ObsNormSettings)]


@pytest.mark.parametrize("cls", NETWORKS)
def test_a_network_as_the_page_asks_for_it_acts_learns_and_is_saved(
    cls: Any, tmp_path: Path
) -> None:
    network = NETWORKS[cls]()
    before = [parameter.clone() for parameter in network.parameters()]
    policy = one_round(cls, BOX, model=network)
    assert any(
        not torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True)
    )
    save_checkpoint(tmp_path / "policy.ckpt", policy.learn_mode.state_dict())
    env = Drawn(BOX, action_space_of(cls))
    again = cls.for_env(env, model=NETWORKS[cls](), seed=1)
    again.learn_mode.load_state_dict(load_checkpoint(tmp_path / "policy.ckpt"))
    check_same_actions(policy, again, lambda: Drawn(BOX, action_space_of(cls)))


@pytest.mark.parametrize("cls", OF_SUBMODULES)
def test_submodules_serve_without_an_env_too(cls: Any) -> None:
    options = {"obs_norm": False} if cls in NORMALIZING else {}
    policy = cls({"seed": 0, **options}, model=NETWORKS[cls]())
    policy.check_spaces(BOX, action_space_of(cls))
    action = policy.eval_mode.forward(torch.zeros(4, N_OBS))["action"]
    assert action.shape == ((4,) if cls in (DiscreteSACPolicy, PPGPolicy) else (4, N_ACTIONS))


@pytest.mark.parametrize("cls", NORMALIZING)
def test_observations_of_a_network_of_ones_own_are_normalized(cls: Any) -> None:
    one_round(cls, BOX, model=NETWORKS[cls](), obs_norm=True)


@pytest.mark.parametrize("cls", OF_SUBMODULES)
def test_a_missing_submodule_is_named(cls: Any) -> None:
    with pytest.raises(PolicyError, match=r"the submodule critic, but Of has actor"):
        cls.for_env(Drawn(BOX, action_space_of(cls)), model=Of(actor=gaussian()))


def test_tqc_names_critics_without_quantiles() -> None:
    with pytest.raises(ConfigError, match="needs critics with quantiles"):
        one_round(TQCPolicy, BOX, model=Of(actor=gaussian(), critic=Critics(2)))
    with pytest.raises(ConfigError, match="n_dropped_quantiles"):
        one_round(TQCPolicy, BOX, model=Of(actor=gaussian(), critic=Critics(2, 2)))
