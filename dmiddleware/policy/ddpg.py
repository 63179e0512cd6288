"""Deterministic policy gradients: DDPG and TD3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from dmiddleware.errors import PolicyError
from dmiddleware.policy.action_codec import ActorSettings
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import critic_values
from dmiddleware.policy.obs_groups import ObsGroupSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.td import TDPolicy, TDSettings
from dmiddleware.rl import ensemble_td_loss
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Count, Fraction, NonNegative, Positive
from dmiddleware.tree import Columns, Nested, Value

__all__ = ["DDPGPolicy", "DDPGSettings", "TD3Policy", "TD3Settings"]


class DDPGSettings(ObsGroupSettings, ActorSettings, TDSettings):
    """The settings of DDPG."""

    batch_size = 256
    action_bounding: Literal["tanh"] = "tanh"
    """Actions are the tanh of what the actor returns, mapped to the bounds."""
    learning_rate_critic: LearningRate = 1e-3
    """Adam's learning rate for the critics."""
    learning_rate_actor: LearningRate = 1e-3
    """Adam's learning rate for the actor."""
    actor_update_freq: Count = 1
    """Updates of the critics for each of the actor and the target networks."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target networks move."""
    target_noise: NonNegative = 0.0
    """Standard deviation of the noise on the actions of targets."""
    target_noise_clip: Positive = 0.5
    """Largest noise on the actions of targets."""
    noise: Literal["gaussian", "ou"] = "gaussian"
    """Noise on collected actions: independent, or an Ornstein-Uhlenbeck process."""
    noise_sigma: NonNegative = 0.1
    """Standard deviation of the normal draws that make this noise."""
    noise_theta: Fraction = 0.15
    """Fraction of the Ornstein-Uhlenbeck noise that is lost in a step."""


@POLICY_REGISTRY.register("ddpg")
class DDPGPolicy(TDPolicy):
    """Deep deterministic policy gradients (Lillicrap et al., "Continuous control", 2016).

    A critic learns the value of actions (equations 4 and 5), and a deterministic actor follows its
    gradient (equation 6); both have target networks that track them. Differences from the paper:
    the noise on collected actions is Gaussian, as in TD3, unless ``noise`` is ``"ou"``;
    actions enter the critic's first layer, not its second; target networks move by 0.005 in an
    update, not by 0.001; and there is neither batch normalization nor weight decay.

    ``"ou"`` is the paper's Ornstein-Uhlenbeck process (section 3), which is correlated from step to
    step. Each env has its own; it starts at 0 in every episode. The component that steps the envs
    holds it as the policy's ``state``, so collected rows have the column ``state``, the noise
    before the row, and a resumed run continues it.

    Learns from the columns ``obs``, ``action``, ``reward``, ``next_obs``, ``terminated``, and
    ``discount`` and ``weight`` where there are any, as :class:`DQNPolicy` does. Actions are a Box
    of any shape; noise is in units of half its width.
    """

    cfg: DDPGSettings
    actor: Component[nn.Module]
    critic: Component[nn.Module]
    reports = (*TDPolicy.reports, "critic_loss", "actor_loss")
    model_type: ClassVar[str] = "actor_q"
    model_defaults: ClassVar[Mapping[str, Any]] = {"deterministic": True, "n_critics": 1}

    action_kinds: ClassVar[tuple[str, ...]] = ("continuous",)

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        follow = TargetRule(cfg.actor_update_freq, cfg.target_tau)
        actor, critic = self.submodule("actor"), self.submodule("critic")
        return {
            "actor": Component(actor, adam(cfg.learning_rate_actor), target=follow, acts=True),
            "critic": Component(critic, adam(cfg.learning_rate_critic), target=follow),
        }

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse an actor or critics of other actions; see :meth:`Policy.check_outputs`."""
        output = self.actor_outputs(self.actor.module, obs)
        self.codec.check_outputs(output)
        self.value_of(obs, torch.zeros_like(output["mu"]))

    def draw(self, batch: Columns) -> dict[str, Any]:
        """Return the random numbers of an update, and whether it moves the actor."""
        cfg = self.cfg
        shape = self.codec.to_raw(batch["action"]).shape
        noise = torch.randn(shape, generator=self.learn_generator, device=self.draw_device).to(
            self.device
        )
        limit = cfg.target_noise_clip
        return {
            "noise": (cfg.target_noise * noise).clamp_(-limit, limit),
            "moves_actor": (self.train_iter + 1) % cfg.actor_update_freq == 0,
        }

    def update(
        self, batch: Columns, *, noise: torch.Tensor, moves_actor: bool
    ) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        with torch.no_grad():
            next_action = self.actions_of(self.actor.target, batch["next_obs"])
            next_action = (next_action + noise).clamp(-1.0, 1.0)
        critic_loss, priority, logged = self.critic_loss_of(batch, next_action)
        self.critic.step(critic_loss)
        output = {"total_loss": critic_loss, "critic_loss": critic_loss, **logged}
        if moves_actor:
            chosen = self.actions_of(self.actor.module, batch["obs"])
            actor_loss = self.actor_loss_of(batch, chosen, self.value_of(batch["obs"], chosen))
            self.actor.step(actor_loss)
            output["actor_loss"] = actor_loss
        if "weight" in batch or self.cfg.priority:
            output["priority"] = priority
        return {name: value.detach() for name, value in output.items()}

    def critic_loss_of(
        self, batch: Columns, next_action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the critics' loss, the priorities ``[B]``, and what to log.

        Args:
            batch: the columns.
            next_action: ``[B, A]``, raw actions for the next observations.
        """
        with torch.no_grad():
            next_value = self.critics(self.critic.target, batch["next_obs"], next_action).amin(0)
        q = self.critics(self.critic.module, batch["obs"], self.codec.to_raw(batch["action"]))
        target = self.td_target(batch, next_value)
        loss, td_error = ensemble_td_loss(q, target, weight=batch.get("weight"))
        logged = self.row_means(batch, q_value=q, target_q_value=target, td_error=td_error)
        return loss, td_error, logged

    def value_of(self, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return ``[B]``, the values of raw actions ``[B, A]`` that the actor maximizes."""
        # The first critic judges, as in TD3.
        return self.critics(self.critic.module, obs, action)[0]

    def actions_of(self, actor: nn.Module, obs: Value) -> torch.Tensor:
        """Return the raw actions ``[B, A]`` of an actor or its target, in ``(-1, 1)``."""
        return self.actor_outputs(actor, obs)["mu"].tanh()

    def critics(self, critic: nn.Module, obs: Value, action: torch.Tensor) -> torch.Tensor:
        """Return ``[n_critics, B]``, the values of actions ``[B, A]`` by critics or targets."""
        return critic_values(critic(obs, action), len(action))

    def actor_loss_of(self, batch: Columns, chosen: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the actor's loss.

        Args:
            batch: the columns.
            chosen: ``[B, A]`` the actor's raw actions.
            q: ``[B]`` their values.
        """
        return -self.row_mean(q, batch)

    def initial_state(self, n: int) -> torch.Tensor | None:
        """Return zeros ``[n, A]``, where Ornstein-Uhlenbeck noise starts; None: it is Gaussian."""
        return torch.zeros(n, self.codec.n_outputs) if self.cfg.noise == "ou" else None

    def act_collect(  # type: ignore[override]  # takes no other keywords
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        state: torch.Tensor | None = None,
        action_mask: Nested | None = None,
    ) -> dict[str, Any]:
        """Act with noise; see :meth:`Policy.act_collect`."""
        raw, noise = self.raw_and_noise(self.actor_output(obs), obs)
        # The codec clips what leaves the Box.
        if self.cfg.noise == "gaussian":
            return {"action": self.codec.to_env(raw + noise)}
        if state is None:
            raise PolicyError(
                "noise='ou' continues the noise of the step before; pass state=, at first "
                "policy.initial_state(n_envs), and then what forward returned as state"
            )
        # One step of the process with mean 0 (Uhlenbeck and Ornstein, 1930).
        noise += (1.0 - self.cfg.noise_theta) * state.to(noise.device)
        return {"action": self.codec.to_env(raw + noise), "state": noise}

    def raw_and_noise(
        self, output: dict[str, torch.Tensor], obs: Value
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the raw actions ``[E, A]`` of the actor's output, and Gaussian noise for them."""
        raw = self.acting_distribution(output, obs, None).mode()
        assert isinstance(raw, torch.Tensor)
        drawn = torch.randn(raw.shape, generator=self.generator, device=raw.device)
        return raw, self.cfg.noise_sigma * drawn

    def act_eval(
        self, obs: Value, env_id: np.ndarray, *, state: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Act without noise; see :meth:`Policy.act_eval`."""
        output = super().act_eval(obs, env_id, **kwargs)
        return output if state is None else {**output, "state": state}


class TD3Settings(DDPGSettings):
    """The settings of TD3."""

    actor_update_freq = 2
    target_noise = 0.2


@POLICY_REGISTRY.register("td3")
class TD3Policy(DDPGPolicy):
    """Twin delayed DDPG (Fujimoto et al., "Addressing Function Approximation Error", 2018).

    :class:`DDPGPolicy` with the paper's three changes: the target is the smaller of two critics'
    (algorithm 1), the actor and the target networks are updated every second time, and targets are
    smoothed by clipped noise on their actions (section 5.3).
    """

    cfg: TD3Settings
    model_defaults: ClassVar[Mapping[str, Any]] = {"deterministic": True, "n_critics": 2}
