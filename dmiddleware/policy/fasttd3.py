"""FastTD3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from dmiddleware.policy.component import Component, TargetRule, adamw
from dmiddleware.policy.d4pg import D4PGPolicy, D4PGSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import NonNegative
from dmiddleware.tree import Nested, Value

__all__ = ["FastTD3Policy", "FastTD3Settings"]


class FastTD3Settings(D4PGSettings):
    """The settings of FastTD3."""

    batch_size = 32_768
    n_step = 1
    learning_rate_critic: LearningRate = 3e-4
    """AdamW's learning rate for the critics."""
    learning_rate_actor: LearningRate = 3e-4
    """AdamW's learning rate for the actor."""
    weight_decay: NonNegative = 0.1
    """AdamW's weight decay."""
    target_tau = 0.1
    actor_update_freq = 2
    target_noise = 0.001
    obs_norm = True
    noise: Literal["gaussian"] = "gaussian"
    """Noise on collected actions: independent in each step."""
    noise_theta: Literal[1] = 1
    """All of the noise is lost in a step."""
    noise_sigma = 0.4
    noise_sigma_min: NonNegative = 0.001
    """Smallest standard deviation of the noise. Each env has its own, drawn in each episode from
    here to noise_sigma."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.noise_sigma_min <= self.noise_sigma,
            "noise_sigma_min",
            f"at most noise_sigma={self.noise_sigma:g}",
        )


@POLICY_REGISTRY.register("fasttd3")
class FastTD3Policy(D4PGPolicy):
    """FastTD3 (Seo et al., "FastTD3: Simple, Fast, and Capable RL for Humanoid Control", 2025).

    :class:`TD3Policy` for hundreds or thousands of envs in parallel, with what the paper adds
    (section 2):

    - large batches;
    - critics with distributions over returns, as in :class:`D4PGPolicy`. The target is, in each
      row, the distribution of the critic with the smaller mean: clipped double Q-learning. The
      actor follows the smaller mean, too;
    - mixed noise: each env draws the standard deviation of its noise in each episode, from
      ``noise_sigma_min`` to ``noise_sigma``, so that some explore widely and others hardly;
    - wide networks whose layers halve, AdamW with weight decay, and normalized observations.

    The component that steps the envs holds the standard deviations as the policy's ``state``, so
    collected rows have the column ``state``, 0 where an episode begins.

    ``v_min`` and ``v_max`` depend on the env; see :class:`C51Policy` for what is checked and
    logged. Differences from the paper: actions of targets come from a target actor, as in TD3, and
    learning rates are constant unless they are schedules.

    Learns from the columns of :class:`DDPGPolicy`.
    """

    cfg: FastTD3Settings
    model_defaults: ClassVar[Mapping[str, Any]] = {
        "n_critics": 2,
        "n_atoms": 101,
        "actor_hidden_sizes": [512, 256, 128],
        "critic_hidden_sizes": [1024, 512, 256],
    }

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg, decay = self.cfg, self.cfg.weight_decay
        follow = TargetRule(cfg.actor_update_freq, cfg.target_tau)
        actor = adamw(cfg.learning_rate_actor, weight_decay=decay)
        critic = adamw(cfg.learning_rate_critic, weight_decay=decay)
        return {
            "actor": Component(self.submodule("actor"), actor, target=follow, acts=True),
            "critic": Component(self.submodule("critic"), critic, target=follow),
        }

    def initial_state(self, n: int) -> torch.Tensor:
        """Return zeros ``[n, 1]``: envs draw the size of their noise in the first step."""
        return torch.zeros(n, 1)

    def act_collect(  # type: ignore[override]  # takes no other keywords
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        state: torch.Tensor | None = None,
        action_mask: Nested | None = None,
    ) -> dict[str, Any]:
        """Act with the noise of each env, drawn without a state; see :meth:`Policy.act_collect`."""
        cfg = self.cfg
        raw = self.acting_distribution(self.actor_output(obs), obs, None).mode()
        assert isinstance(raw, torch.Tensor)
        state = self.initial_state(len(raw)) if state is None else state
        state = state.to(raw.device)
        options: dict[str, Any] = {"generator": self.generator, "device": raw.device}
        drawn = torch.rand(state.shape, **options) * (cfg.noise_sigma - cfg.noise_sigma_min)
        sigma = torch.where(state > 0.0, state, drawn + cfg.noise_sigma_min)
        noise = sigma * torch.randn(raw.shape, **options)
        return {"action": self.codec.to_env(raw + noise), "state": sigma}
