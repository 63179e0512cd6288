"""DQN that learns distributions of returns: C51 and QR-DQN."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch

from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import QLearningPolicy, QLearningSettings
from dmiddleware.policy.update import CHECK_EVERY
from dmiddleware.rl import (
    categorical_target,
    clipped_share,
    quantile_huber_loss,
    taken_rows,
    weighted_mean,
)
from dmiddleware.tree import Batch, Columns, Value

__all__ = ["C51Policy", "C51Settings", "QRDQNPolicy", "QRDQNSettings", "QuantilePolicy"]

_log = logging.getLogger(__name__)
_CLIPPED_SHARE_TO_WARN = 0.05

Losses: TypeAlias = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class C51Settings(QLearningSettings):
    """The settings of C51."""


@POLICY_REGISTRY.register("c51")
class C51Policy(QLearningPolicy):
    """Categorical DQN (Bellemare et al., "A Distributional Perspective on RL", 2017).

    As :class:`DQNPolicy`, with a network that gives each action a distribution over the returns
    ``v_min`` to ``v_max`` (:class:`~dmiddleware.model.CategoricalQNetwork`). The loss is the
    cross-entropy to the projected distribution of the target (algorithm 1); the priority is the
    Kullback-Leibler divergence from it, as in Rainbow (Hessel et al., 2018). ``double``
    chooses the target's action by the online network, which the paper does not.

    ``v_min`` and ``v_max`` depend on the env. Their defaults, -10 and 10, are those of the paper
    for clipped rewards of Atari. A policy that is built without them refuses an env whose first
    rewards show that they do not hold its returns (:meth:`check_returns`).

    Returns outside of the support are clipped, as in the paper. The output has ``clipped_share``,
    the share of the target's probability that was clipped
    (:func:`~dmiddleware.rl.clipped_share`); above 5%, the policy warns once.
    """

    cfg: C51Settings
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "q_value",
        "target_q_value",
        "clipped_share",
        "grad_norm",
        "cur_lr",
    )
    model_type: ClassVar[str] = "categorical_q_network"

    learned_output: ClassVar[str] = "log_prob"
    _has_warned_of_clipping = False

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network without a support of its atoms; see :meth:`Policy.check_outputs`."""
        super().check_outputs(obs, **inputs)
        support = getattr(self.model, "support", None)
        n_atoms = self.model(obs)["log_prob"].shape[-1]
        if not isinstance(support, torch.Tensor) or support.shape != (n_atoms,):
            raise PolicyOutputError(
                f"{type(self).__name__} needs a model with a buffer support [{n_atoms}], the "
                "returns that its atoms stand for; derive it from CategoricalQNetwork"
            )

    @property
    def support(self) -> torch.Tensor:
        """The returns ``[n_atoms]`` that the target network's atoms stand for."""
        support = self.q.target.support
        assert isinstance(support, torch.Tensor)  # as check_outputs found
        return support

    def loss(
        self,
        batch: Columns,
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        next_value: torch.Tensor,
    ) -> Losses:
        """Return the loss; see :meth:`QLearningPolicy.loss`."""
        support, next_value = self.support, next_value.exp()
        reward, terminated = batch["reward"], batch["terminated"]
        discount = batch.get("discount", self.cfg.discount)
        target = categorical_target(
            next_value, reward, terminated, discount=discount, support=support
        )
        losses = -(target * taken_rows(output["log_prob"], action)).sum(-1)
        # What remains of the cross-entropy without the target's entropy, which nothing can change.
        divergence = losses.detach() + torch.xlogy(target, target).sum(-1)
        logged = {
            "q_value": taken_rows(output["logit"].detach(), action).mean(),
            "target_q_value": (target * support).sum(-1).mean(),
            "clipped_share": clipped_share(
                next_value, reward, terminated, discount=discount, support=support
            ),
        }
        return weighted_mean(losses, batch.get("weight")), divergence.clamp_min(0.0), logged

    def learn(self, batch: Batch, **kwargs: Any) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Make one update; see :meth:`Policy.learn`."""
        output = super().learn(batch, **kwargs)
        assert isinstance(output, Mapping)  # of one update
        # A GPU is waited for as rarely as for the check of skipped steps.
        if not self._has_warned_of_clipping and (
            not self.on_gpu or self.train_iter % CHECK_EVERY == 0
        ):
            self._warn_of_clipping(output["clipped_share"])
        return output

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        return replace(super().spec, check_returns=self.check_returns)

    def check_returns(
        self, returns: torch.Tensor, rest: torch.Tensor, rewards: torch.Tensor
    ) -> None:
        """Refuse an env whose returns the default of ``v_min`` or ``v_max`` cannot hold.

        A learner calls it with the first rewards. It does nothing for a limit that was set.

        Args:
            returns: ``[N]`` float, discounted sums of consecutive rewards of an episode.
            rest: ``[N]`` float, the discount of what follows them; 0 where the episode terminated.
            rewards: ``[N]`` float, single rewards.

        Raises:
            ConfigError: with the returns, and a range that holds them.
        """
        if self._has_own_model or "type" in self.cfg.model:
            return
        low, high = float(self.support[0]), float(self.support[-1])
        margin = (high - low) / (2 * (len(self.support) - 1))
        # Even if the rest is in the support, these returns are outside of it.
        is_low = bool((returns + rest * high < low - margin).any())
        is_high = bool((returns + rest * low > high + margin).any())
        options = self.cfg.model
        if not (is_low and "v_min" not in options) and not (is_high and "v_max" not in options):
            return
        lowest = options.get("v_min", self._bound(min(float(rewards.min()), 0.0)))
        highest = options.get("v_max", self._bound(max(float(rewards.max()), 0.0)))
        raise ConfigError(
            f"{type(self).__name__} needs v_min and v_max for this env: its first rewards sum up "
            f"to discounted returns from {float(returns.min()):.3g} to {float(returns.max()):.3g}, "
            f"but the range is {low:g} to {high:g}, and returns outside cannot be learned. Pass "
            "the lowest and the highest discounted return, such as model="
            f"{{'v_min': {lowest}, 'v_max': {highest}}} (ditask train: --policy.model "
            f"v_min={lowest} v_max={highest}), which hold any with such rewards and "
            f"discount={self.cfg.discount:g}"
        )

    def _bound(self, reward: float) -> str:
        """Return the return of the same reward forever, rounded away from 0 to two digits."""
        value = reward / (1.0 - self.cfg.discount) if self.cfg.discount < 1.0 else math.inf * reward
        if value == 0.0 or not math.isfinite(value):
            return "0" if reward == 0.0 else "..."
        unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
        return f"{math.copysign(math.ceil(abs(value) / unit - 1e-9) * unit, value):g}"

    def _warn_of_clipping(self, share: float) -> None:
        """Warn if the support is too narrow for the returns of the last batch."""
        if share <= _CLIPPED_SHARE_TO_WARN:
            return
        self._has_warned_of_clipping = True
        low, high = float(self.support[0]), float(self.support[-1])
        _log.warning(
            "%s clips %.0f%% of the target's probability, because these returns are outside of "
            "[v_min, v_max] = [%g, %g]; it cannot learn them. Pass model={'v_min': ..., 'v_max': "
            "...} with the lowest and the highest discounted return, or scale the rewards",
            type(self).__name__,
            100.0 * share,
            low,
            high,
        )


class QuantilePolicy(QLearningPolicy):
    """Q-learning of quantiles of returns; the priority is the absolute error of their mean."""

    learned_output: ClassVar[str] = "quantiles"

    def loss(
        self,
        batch: Columns,
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        next_value: torch.Tensor,
    ) -> Losses:
        """Return the loss; see :meth:`QLearningPolicy.loss`."""
        target = self.td_target(batch, next_value)
        quantiles = taken_rows(output["quantiles"], action)
        losses = quantile_huber_loss(quantiles, target, tau=output.get("tau"))
        value = self.mean_of(quantiles.detach(), output)
        target_value = self.mean_of(target, output)
        error = (target_value - value).abs()
        logged = {
            "q_value": value.mean(),
            "target_q_value": target_value.mean(),
            "td_error": error.mean(),
        }
        return weighted_mean(losses, batch.get("weight")), error, logged

    def mean_of(self, quantiles: torch.Tensor, output: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return ``[B]``, the means of distributions with quantiles ``[B, N]``.

        Args:
            quantiles: of the online network, or of the target.
            output: of the online network.
        """
        return quantiles.mean(-1)


class QRDQNSettings(QLearningSettings):
    """The settings of QR-DQN."""


@POLICY_REGISTRY.register("qrdqn")
class QRDQNPolicy(QuantilePolicy):
    """QR-DQN (Dabney et al., "Distributional RL with Quantile Regression", 2018).

    As :class:`DQNPolicy`, with a network that gives quantiles of each action's return
    (:class:`~dmiddleware.model.QuantileQNetwork`). The loss is equation 10 for the target's
    quantiles (algorithm 1); the priority is the absolute error of the mean. Difference from the
    paper: ``double``, the default, chooses the target's action by the online network.
    """

    cfg: QRDQNSettings
    model_type: ClassVar[str] = "quantile_q_network"
