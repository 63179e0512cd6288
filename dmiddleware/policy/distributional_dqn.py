"""DQN that learns distributions of returns: C51 and QR-DQN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch

from dmiddleware.errors import PolicyOutputError
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import QLearningPolicy, QLearningSettings
from dmiddleware.policy.return_support import ReturnSupport
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
        if not self.on_gpu or self.train_iter % CHECK_EVERY == 0:
            self._returns.warn_of_clipping(output["clipped_share"])
        return output

    @cached_property
    def _returns(self) -> ReturnSupport:
        options = None if self._has_own_model or "type" in self.cfg.model else self.cfg.model
        return ReturnSupport(
            self.support, options, discount=self.cfg.discount, owner=type(self).__name__
        )

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
        self._returns.check(returns, rest, rewards)


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
