"""CrossQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.sac import SACPolicy, SACSettings
from dmiddleware.settings import Count
from dmiddleware.tree import Columns, Value, map_leaves

__all__ = ["CrossQPolicy", "CrossQSettings"]


class CrossQSettings(SACSettings):
    """The settings of CrossQ."""

    learning_rate_q = 1e-3
    learning_rate_policy = 1e-3
    learning_rate_alpha = 1e-3
    target_tau: Literal[1] = 1
    """Targets come from the critics themselves."""
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Decay of Adam's mean of the gradient, for the critics and the actor."""
    actor_update_freq: Count = 3
    """Updates of the critics per update of the actor and the temperature."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not self.multi_gpu,
            "multi_gpu",
            "False, since the ranks would have different statistics of their batches",
        )


@POLICY_REGISTRY.register("crossq")
class CrossQPolicy(SACPolicy):
    """CrossQ (Bhatt et al., "CrossQ: Batch Normalization in Deep RL", ICLR 2024).

    :class:`SACPolicy` without target networks (section 3). Batch renormalization takes their place:
    the critics see the actions of the batch, and the policy's next actions, in one forward, so that
    the statistics are those of both (figure 1, and section 3.2). Critics are wide, Adam's first
    decay is 0.5, and the actor and the temperature learn in every third update (section 3.3, and
    the appendix). The actor is renormalized too.

    Next actions, and the values that the actor maximizes, are those of the running statistics, as
    in the authors' code. Other differences from the paper: see :class:`SACPolicy`.

    Learns from the columns of :class:`SACPolicy`. The running statistics are buffers of the model:
    they are in checkpoints, and in what collectors receive. A custom model has its own
    normalization, or none.
    """

    cfg: CrossQSettings
    model_defaults: ClassVar[Mapping[str, Any]] = {
        "norm": "batch_renorm",
        "critic_hidden_sizes": [2048, 2048],
    }

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg, betas = self.cfg, (self.cfg.adam_beta1, 0.999)
        actor, critic = self.submodule("actor"), self.submodule("critic")
        return {
            **super().make_components(),
            "actor": Component(actor, adam(cfg.learning_rate_policy, betas=betas), acts=True),
            "critic": Component(critic, adam(cfg.learning_rate_q, betas=betas)),
        }

    def draw(self, batch: Columns) -> dict[str, Any]:
        """Return the random numbers of an update, and whether it moves the actor."""
        moves_actor = (self.train_iter + 1) % self.cfg.actor_update_freq == 0
        return {**super().draw(batch), "moves_actor": moves_actor}

    def update(  # type: ignore[override]  # takes what draw returns in addition
        self, batch: Columns, *, noise: Tensor, next_noise: Tensor, moves_actor: bool
    ) -> dict[str, Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        alpha = self.temperature.module.log_alpha.detach().exp()
        self.set_training(False)
        with torch.no_grad():
            next_action, next_log_prob = self.draw_action(batch["next_obs"], next_noise)
        self.set_training(True)
        critic_loss, td_error, logged = self.critic_loss_of(
            batch, next_action, bonus=-alpha * next_log_prob
        )
        self.critic.step(critic_loss)
        output = {"total_loss": critic_loss, "critic_loss": critic_loss, **logged}
        if moves_actor:
            output |= self.move_actor(batch, noise)
        if "weight" in batch or self.cfg.priority:
            output["priority"] = td_error
        return {name: value.detach() for name, value in output.items()}

    def critic_outputs(self, batch: Columns, next_action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the batch, and those that follow, of one forward."""
        obs = map_leaves(lambda *pair: torch.cat(pair), batch["obs"], batch["next_obs"])
        action = torch.cat([self.codec.to_raw(batch["action"]), next_action])
        values, n_rows = self.critics(self.critic.module, obs, action), len(next_action)
        return values[:, :n_rows], values[:, n_rows:].detach()

    def value_of(self, obs: Value, action: Tensor) -> Tensor:
        """Return the values of actions ``[B, A]`` by the running statistics."""
        is_training = self.model.training
        self.set_training(False)
        value = super().value_of(obs, action)
        self.set_training(is_training)
        return value
