"""Batch-constrained deep Q-learning."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from torch import nn

from dmiddleware.model import ActionVAE
from dmiddleware.policy.action_codec import ActorSettings
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.cql import repeated_rows
from dmiddleware.policy.network_outputs import critic_values
from dmiddleware.policy.obs_norm import DatasetNormSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.td import TDPolicy, TDSettings
from dmiddleware.rl import ensemble_td_loss
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Count, Fraction, NonNegative
from dmiddleware.tree import Columns, Value

__all__ = ["BCQPolicy", "BCQSettings"]

_LATENT_LIMIT: Final = 0.5
"""Largest size of the latent numbers that actions are drawn from; the authors' own."""


class BCQSettings(DatasetNormSettings, ActorSettings, TDSettings):
    """The settings of BCQ."""

    batch_size = 100
    obs_norm = False
    action_bounding: Literal["rescale"] = "rescale"
    """Actions are bounded already, and are mapped to the bounds."""
    learning_rate_vae: LearningRate = 1e-3
    """Adam's learning rate for the autoencoder."""
    learning_rate_critic: LearningRate = 1e-3
    """Adam's learning rate for the critics."""
    learning_rate_actor: LearningRate = 1e-3
    """Adam's learning rate for the perturbation."""
    max_perturbation: NonNegative = 0.05
    """Φ, how far an action may be from one of the data; 1 is half of the Box."""
    min_weight: Fraction = 0.75
    """λ, the weight of the smaller critic in targets; the larger one has the rest."""
    n_actions: Count = 10
    """Actions that the best one is chosen from."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target networks move per update."""


@POLICY_REGISTRY.register("bcq")
class BCQPolicy(TDPolicy):
    """BCQ (Fujimoto et al., "Off-Policy Deep RL without Exploration", 2019).

    A conditional autoencoder learns which actions the data has for an observation. Acting and
    targets draw ``n_actions`` actions from it, let a perturbation network change them a little, and
    take the one with the highest value (equation 12). So the critics are only asked about actions
    near those of the data. The perturbation follows the gradient of the first critic, and targets
    mix the smaller and the larger of two critics (equation 13 and algorithm 1).

    As in the authors' own code, latent numbers that actions are drawn from are within 0.5, the
    divergence of the autoencoder counts half, both of its losses are means, and the best action is
    by the first critic. Difference from that code: it acts with the best of 100 actions, here of
    ``n_actions``, as in the paper.

    Learns from the columns of :class:`DDPGPolicy`, and needs no environment. Actions are a Box of
    any shape. With ``obs_norm``, call :meth:`observe` with the observations of the data set before
    learning.
    """

    cfg: BCQSettings
    actor: Component[nn.Module]
    critic: Component[nn.Module]
    vae: Component[ActionVAE]
    reports = (*TDPolicy.reports, "critic_loss", "actor_loss", "vae_loss")
    model_type: ClassVar[str] = "bcq"
    action_kinds: ClassVar[tuple[str, ...]] = ("continuous",)

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg, follow = self.cfg, TargetRule(1, self.cfg.target_tau)
        actor, critic, vae = (self.submodule(name) for name in ("actor", "critic", "vae"))
        return {
            "actor": Component(actor, adam(cfg.learning_rate_actor), target=follow, acts=True),
            "critic": Component(critic, adam(cfg.learning_rate_critic), target=follow, acts=True),
            "vae": Component(vae, adam(cfg.learning_rate_vae), acts=True),
        }

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse an autoencoder, a perturbation or critics of other actions."""
        self.codec.check_outputs({"mu": self.chosen(obs, self.eval_generator)})

    def draw(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Return the random numbers of an update."""
        n_rows, n_actions = len(batch["reward"]), self.cfg.n_actions
        drawn = [
            torch.randn(
                n,
                self.vae.module.n_latent,
                generator=self.learn_generator,
                device=self.draw_device,
            )
            for n in (n_rows, n_rows, n_actions * n_rows)
        ]
        noise, latent, next_latent = (numbers.to(self.device) for numbers in drawn)
        return {"noise": noise, "latent": latent, "next_latent": next_latent}

    def update(
        self,
        batch: Columns,
        *,
        noise: torch.Tensor,
        latent: torch.Tensor,
        next_latent: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        obs, action = batch["obs"], self.codec.to_raw(batch["action"])
        vae, critic = self.vae.module, self.critic.module

        mean, std = vae.encode(obs, action)
        rebuilt = vae.decode(obs, mean + std * noise)
        divergence = 0.5 * (mean.square() + std.square() - 1.0 - 2.0 * std.log()).mean()
        vae_loss = (rebuilt - action).square().mean() + 0.5 * divergence
        self.vae.step(vae_loss)

        with torch.no_grad():
            next_obs = repeated_rows(batch["next_obs"], self.cfg.n_actions)
            candidate = self.perturbed(self.actor.target, next_obs, next_latent)
            values = critic_values(self.critic.target(next_obs, candidate), len(candidate))
            share = self.cfg.min_weight
            value = share * values.amin(0) + (1.0 - share) * values.amax(0)
            target = self.td_target(batch, value.view(self.cfg.n_actions, -1).amax(0))
        q = critic_values(critic(obs, action), len(action))
        critic_loss, td_error = ensemble_td_loss(q, target, weight=batch.get("weight"))
        self.critic.step(critic_loss)

        chosen = self.perturbed(self.actor.module, obs, latent)
        actor_loss = -critic_values(critic(obs, chosen), len(chosen))[0].mean()
        self.actor.step(actor_loss)

        output = {
            "total_loss": vae_loss + critic_loss + actor_loss,
            "vae_loss": vae_loss,
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "q_value": q.mean(),
            "target_q_value": target.mean(),
            "td_error": td_error.mean(),
        }
        if "weight" in batch or self.cfg.priority:
            output["priority"] = td_error
        return {name: value.detach() for name, value in output.items()}

    def perturbed(self, actor: nn.Module, obs: Value, latent: torch.Tensor) -> torch.Tensor:
        """Return raw actions ``[B, A]`` that standard normal numbers ``[B, Z]`` make, perturbed."""
        with torch.no_grad():  # the actor's loss is not the autoencoder's
            drawn = self.vae.module.decode(obs, latent.clamp(-_LATENT_LIMIT, _LATENT_LIMIT))
        offset: torch.Tensor = actor(obs, drawn)
        return (drawn + self.cfg.max_perturbation * offset).clamp(-1.0, 1.0)

    def chosen(self, obs: Value, generator: torch.Generator) -> torch.Tensor:
        """Return the best ``[E, A]`` of the actions that are drawn for each observation."""
        n_rows, n_actions = self.rows_of(obs)[0], self.cfg.n_actions
        latent = torch.randn(
            n_actions * n_rows,
            self.vae.module.n_latent,
            generator=generator,
            device=self.draw_device,
        )
        every = repeated_rows(obs, n_actions)
        candidate = self.perturbed(self.actor.module, every, latent.to(self.device))
        value = critic_values(self.critic.module(every, candidate), len(candidate))[0]
        best = value.view(n_actions, n_rows).argmax(0)
        return candidate.view(n_actions, n_rows, -1)[best, torch.arange(n_rows, device=best.device)]

    def act_collect(  # type: ignore[override]  # takes no keywords
        self, obs: Value, env_id: np.ndarray
    ) -> dict[str, Any]:
        """Take the best of the actions that are drawn; see :meth:`Policy.act_collect`."""
        return {"action": self.codec.to_env(self.chosen(obs, self.generator))}

    def act_eval(  # type: ignore[override]  # takes no keywords
        self, obs: Value, env_id: np.ndarray
    ) -> dict[str, Any]:
        """Take the best of the actions that are drawn; see :meth:`Policy.act_eval`."""
        return {"action": self.codec.to_env(self.chosen(obs, self.eval_generator))}
