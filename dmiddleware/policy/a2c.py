"""Advantage actor-critic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from dmiddleware.config import Option, count, fraction, switch
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.actor_critic import PolicyGradientOptions, PolicyGradientPolicy
from dmiddleware.policy.base.advantage import AdvantageOptions, AdvantagePolicy
from dmiddleware.policy.base.common_options import LEARNING_RATE
from dmiddleware.policy.base.network_outputs import values_of_rows
from dmiddleware.policy.policy_registry import POLICY_REGISTRY

__all__ = ["A2COptions", "A2CPolicy"]


class A2COptions(PolicyGradientOptions, AdvantageOptions, total=False):
    """The options of :meth:`A2CPolicy.for_env`."""


@POLICY_REGISTRY.register("a2c_command")
@POLICY_REGISTRY.register("a2c")
class A2CPolicy(PolicyGradientPolicy, AdvantagePolicy):
    """Advantage actor-critic (Mnih et al., "Asynchronous Methods for Deep RL", 2016).

    This is the synchronous form: all environments make a few steps, and one update follows the
    policy gradient with the advantages of n-step returns (algorithm S3, with the entropy bonus of
    section 4). RMSprop has the paper's form and can be replaced by Adam.

    Differences from the paper: one synchronous learner replaces the asynchronous ones; losses are
    averaged over the rows, where the paper adds up gradients; the gradient is clipped; and
    ``gae_lambda`` below 1 mixes returns of several lengths (Schulman et al., 2016). With the
    default of 1, an advantage is the return up to the end of the collected rows minus the value, as
    in the paper. :class:`AdvantagePolicy` describes what can be normalised; by default, nothing is.

    One learn forward is one update. Learns from the columns ``obs``, ``action`` (``raw_action``
    where there is one), ``adv`` and ``ret``; the last two come from ``gae_estimator``. All kinds of
    actions are supported; see :class:`ActorPolicy`.
    """

    config: ClassVar[dict[str, Any]] = {
        "gae_lambda": Option(1.0, fraction, "λ of generalised advantage estimation"),
        "learn": {
            "batch_size": Option(
                40, count, "rows per update; set it to the rows of a collected batch"
            ),
            "learning_rate": Option(7e-4, LEARNING_RATE, "the optimiser's learning rate"),
            "adv_norm": Option(False, switch, "whether to normalise advantages in each batch"),
        },
    }
    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action", "adv", "ret")
    optional_columns: ClassVar[tuple[str, ...]] = ("raw_action",)

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        enable_field: Iterable[str] | None = None,
        **options: Unpack[A2COptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, enable_field=enable_field, **options)

    def _update(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        output = self._model(batch["obs"])
        distribution = self._learned_distribution(output, batch)
        log_prob = distribution.log_prob(self._raw_action(batch))
        return self._follow_gradient(
            distribution,
            log_prob,
            self._learned_advantage(batch),
            values_of_rows(output["value"], log_prob.shape),
            self._as_output(batch["ret"]),
        )
