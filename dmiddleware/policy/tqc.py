"""Truncated quantile critics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Self, Unpack

import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.config import Option, at_least, check_value
from dmiddleware.errors import ConfigError
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.network_outputs import with_rows
from dmiddleware.policy.policy import MODES, Mode
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.sac import SACOptions, SACPolicy
from dmiddleware.rl import quantile_huber_loss, weighted_mean
from dmiddleware.tree import Value

__all__ = ["TQCOptions", "TQCPolicy"]

_NO_QUANTILES: Final = (
    "TQC needs critics with quantiles, but the model's have none; set model.n_quantiles, for "
    "example to 25, or return quantiles [C, …, N]"
)


class TQCOptions(SACOptions, total=False):
    """The options of :meth:`TQCPolicy.for_env`."""

    n_dropped_quantiles: int


@POLICY_REGISTRY.register("tqc")
class TQCPolicy(SACPolicy):
    """Truncated quantile critics (Kuznetsov et al., "Controlling Overestimation Bias", 2020).

    :class:`SACPolicy` whose critics learn quantiles of the return. The target is a mixture of the
    quantiles of all target critics without the largest ones, ``n_dropped_quantiles`` for each
    critic, and each critic learns it by quantile regression (algorithm 1). The actor maximises the
    mean of all quantiles. As in the paper, there are 5 critics with 25 quantiles each, in networks
    with three layers of 512 units. Differences from the paper: see :class:`SACPolicy`.
    """

    config: ClassVar[dict[str, Any]] = {
        "learn": {
            "n_dropped_quantiles": Option(
                2,
                at_least(0, whole=True),
                "quantiles that the target leaves out, the largest ones, for each critic",
            ),
        },
    }

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        modes: Iterable[Mode] = MODES,
        **options: Unpack[TQCOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        # mypy compares with the options of SACPolicy alone.
        return super().for_env(  # type: ignore[misc]
            env, model=model, modes=modes, **options
        )

    def model_defaults(self) -> dict[str, Any]:
        """Return arguments of the default model that differ from its own defaults."""
        return {"n_critics": 5, "n_quantiles": 25, "critic_hidden_sizes": [512, 512, 512]}

    def setup(self) -> None:
        """Refuse a critic without enough quantiles."""
        critic: Any = getattr(self.model, "critic", None)
        if hasattr(critic, "n_quantiles"):  # else, that of the critics' output is checked
            self._check_quantiles(self.cfg, critic.n_quantiles)

    @staticmethod
    def _check_quantiles(cfg: EasyDict, n_quantiles: int | None) -> None:
        if n_quantiles is None:
            raise ConfigError(_NO_QUANTILES)
        dropped = cfg.learn.n_dropped_quantiles
        check_value(
            dropped < n_quantiles,
            "learn.n_dropped_quantiles",
            dropped,
            f"less than the critics' number of quantiles, {n_quantiles}",
        )

    def critic_loss_of(
        self, batch: Mapping[str, Any], next_action: torch.Tensor, *, bonus: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the critics."""
        critic = self.components["critic"]
        with torch.no_grad():
            following = _quantiles(critic.target, batch["next_obs"], next_action)
            self._check_quantiles(self.cfg, following.shape[2])
            n_critics, _, n_quantiles = following.shape
            n_kept = n_critics * (n_quantiles - self.cfg.learn.n_dropped_quantiles)
            pooled = following.transpose(0, 1).flatten(1).sort(-1).values
            target = self.td_target(batch, pooled[:, :n_kept] + bonus[:, None])
        taken = self.codec.to_raw(batch["action"])
        quantiles = _quantiles(critic.module, batch["obs"], taken)
        losses = quantile_huber_loss(quantiles.flatten(0, 1), target.repeat(n_critics, 1))
        losses = losses.view(n_critics, -1).sum(0) / n_quantiles
        td_error = (target.mean(-1) - quantiles.detach().mean(-1)).abs().mean(0)
        loss = weighted_mean(losses, batch.get("weight"))
        return loss, td_error, {"q_value": quantiles.mean()}

    def value_of(self, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return the values of actions ``[B, A]`` that the actor maximizes."""
        return _quantiles(self.components["critic"].module, obs, action).mean((0, 2))


def _quantiles(critic: nn.Module, obs: Value, action: torch.Tensor) -> torch.Tensor:
    """Return ``[n_critics, B, N]``, the quantiles of the values of actions ``[B, A]``."""
    found = critic(obs, action)
    if found.shape[1:] == (len(action),):  # a value for each critic and row
        raise ConfigError(_NO_QUANTILES)
    wanted = ("n_critics", len(action), "n_quantiles")
    return with_rows(found, wanted, what="of the critics")
