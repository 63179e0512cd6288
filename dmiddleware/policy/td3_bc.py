"""TD3+BC."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from dmiddleware.config import Option, positive
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.ddpg import DDPGOptions, TD3Policy
from dmiddleware.policy.obs_norm import dataset_norm_options
from dmiddleware.policy.policy import MODES, Mode
from dmiddleware.policy.policy_registry import POLICY_REGISTRY

__all__ = ["TD3BCOptions", "TD3BCPolicy"]


class TD3BCOptions(DDPGOptions, total=False):
    """The options of :meth:`TD3BCPolicy.for_env`."""

    bc_alpha: float


@POLICY_REGISTRY.register("td3_bc")
class TD3BCPolicy(TD3Policy):
    """TD3+BC (Fujimoto and Gu, "A Minimalist Approach to Offline Reinforcement Learning", 2021).

    :class:`TD3Policy` whose actor also stays close to the actions of the data set (equation 3). The
    values that it maximises are divided by their mean size, so that ``bc_alpha`` has the same
    meaning for every reward (equation 5). Observations have mean 0 and standard deviation 1 over
    the data set (equation 4): call :meth:`observe` with them before learning.

    Learns from the columns of :class:`DDPGPolicy`, and needs no environment. Differences from the
    paper: the constant of the normalisation is added to the variance, not to the standard
    deviation.
    """

    norms_dataset: ClassVar[bool] = True
    config: ClassVar[dict[str, Any]] = {
        **dataset_norm_options(on=True),
        "learn": {
            "learning_rate_critic": 3e-4,
            "learning_rate_actor": 3e-4,
            "bc_alpha": Option(
                2.5, positive, "the α of the paper: the weight of the values next to cloning"
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
        **options: Unpack[TD3BCOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        A Minari dataset serves as the environment, because it has the same spaces.
        :doc:`/reference/configuration` lists the options.
        """
        # mypy compares with the options of DDPGPolicy alone.
        return super().for_env(  # type: ignore[misc]
            env, model=model, modes=modes, **options
        )

    def actor_loss_of(
        self, batch: Mapping[str, Any], chosen: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of the actor."""
        scale = self.cfg.learn.bc_alpha / q.detach().abs().mean()
        cloning = (chosen - self.codec.to_raw(batch["action"])).square().mean()
        loss: torch.Tensor = cloning - scale * q.mean()
        return loss
