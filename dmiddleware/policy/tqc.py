"""Truncated quantile critics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.policy.network_outputs import with_rows
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.sac import SACPolicy, SACSettings
from dmiddleware.rl import quantile_huber_loss, weighted_mean
from dmiddleware.settings import Whole
from dmiddleware.tree import Columns, Value

__all__ = ["TQCPolicy", "TQCSettings"]

_NO_QUANTILES: Final = (
    "TQC needs critics with quantiles, but the model's have none; set model.n_quantiles, for "
    "example to 25, or return quantiles [C, …, N]"
)


class TQCSettings(SACSettings):
    """The settings of TQC."""

    n_dropped_quantiles: Whole = 2
    """Quantiles that the target leaves out, the largest ones, for each critic."""


@POLICY_REGISTRY.register("tqc")
class TQCPolicy(SACPolicy):
    """Truncated quantile critics (Kuznetsov et al., "Controlling Overestimation Bias", 2020).

    :class:`SACPolicy` whose critics learn quantiles of the return. The target is a mixture of the
    quantiles of all target critics without the largest ones, ``n_dropped_quantiles`` for each
    critic, and each critic learns it by quantile regression (algorithm 1). The actor maximizes the
    mean of all quantiles. As in the paper, there are 5 critics with 25 quantiles each, in networks
    with three layers of 512 units. Differences from the paper: see :class:`SACPolicy`.
    """

    cfg: TQCSettings
    model_defaults: ClassVar[Mapping[str, Any]] = {
        "n_critics": 5,
        "n_quantiles": 25,
        "critic_hidden_sizes": [512, 512, 512],
    }

    def setup(self) -> None:
        """Refuse a critic without enough quantiles."""
        critic: Any = getattr(self.model, "critic", None)
        if hasattr(critic, "n_quantiles"):  # else, that of the critics' output is checked
            self._check_quantiles(critic.n_quantiles)

    def _check_quantiles(self, n_quantiles: int | None) -> None:
        if n_quantiles is None:
            raise ConfigError(_NO_QUANTILES)
        dropped = self.cfg.n_dropped_quantiles
        if dropped >= n_quantiles:
            raise ConfigError(
                f"n_dropped_quantiles must be less than the critics' number of quantiles, "
                f"{n_quantiles}, got {dropped}"
            )

    def critic_loss_of(
        self, batch: Columns, next_action: torch.Tensor, *, bonus: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the critics."""
        with torch.no_grad():
            next_quantiles = _quantiles(self.critic.target, batch["next_obs"], next_action)
            self._check_quantiles(next_quantiles.shape[2])
            n_critics, _, n_quantiles = next_quantiles.shape
            n_kept = n_critics * (n_quantiles - self.cfg.n_dropped_quantiles)
            pooled = next_quantiles.transpose(0, 1).flatten(1).sort(-1).values
            target = self.td_target(batch, pooled[:, :n_kept] + bonus[:, None])
        action = self.codec.to_raw(batch["action"])
        quantiles = _quantiles(self.critic.module, batch["obs"], action)
        losses = quantile_huber_loss(quantiles.flatten(0, 1), target.repeat(n_critics, 1))
        losses = losses.view(n_critics, -1).sum(0) / n_quantiles
        td_error = (target.mean(-1) - quantiles.detach().mean(-1)).abs().mean(0)
        loss = weighted_mean(losses, batch.get("weight"))
        logged = {
            "q_value": quantiles.mean(),
            "target_q_value": target.mean(),
            "td_error": td_error.mean(),
        }
        return loss, td_error, logged

    def value_of(self, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return the values of actions ``[B, A]`` that the actor maximizes."""
        return _quantiles(self.critic.module, obs, action).mean((0, 2))


def _quantiles(critic: nn.Module, obs: Value, action: torch.Tensor) -> torch.Tensor:
    """Return ``[n_critics, B, N]``, the quantiles of the values of actions ``[B, A]``."""
    quantiles: torch.Tensor = critic(obs, action)
    if quantiles.shape[1:] == (len(action),):  # a value for each critic and row
        raise ConfigError(_NO_QUANTILES)
    shape = ("n_critics", len(action), "n_quantiles")
    return with_rows(quantiles, shape, what="of the critics")
