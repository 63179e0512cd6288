"""Recurrent experience replay: Q-learning with a memory, from sequences."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dmiddleware.model import RecurrentNetwork
from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.component import Component
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import QLearningPolicy, QLearningSettings
from dmiddleware.policy.recurrent import Memory, check_sequences, with_successors
from dmiddleware.rl import (
    mask_logit,
    nstep_return,
    rescale_value,
    sequence_priority,
    take_rows,
    taken_rows,
    td_target,
    unscale_value,
    weighted_mean,
)
from dmiddleware.rl.td import check_shape
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Fraction, Whole
from dmiddleware.tree import Batch, Columns, Nested, Value, index_rows

__all__ = ["R2D2Policy", "R2D2Settings"]


class R2D2Settings(QLearningSettings):
    """The settings of R2D2."""

    discount = 0.997
    n_step = 5
    batch_size = 64
    """Sequences per update."""
    learning_rate: LearningRate = 1e-4
    adam_eps = 1e-3
    target_update_freq = 2500
    value_rescaling: bool = True
    """Whether to learn values on the scale of rescale_value."""
    priority_eta: Fraction = 0.9
    """Weight of a sequence's largest error in its priority."""
    burn_in: Whole = 0
    """Rows at the start of a sequence that only update the state."""


@POLICY_REGISTRY.register("r2d2")
class R2D2Policy(QLearningPolicy):
    """R2D2 (Kapturowski et al., "Recurrent Experience Replay in Distributed RL", ICLR 2019).

    Double Q-learning with a dueling recurrent network, a
    :class:`~dmiddleware.model.RecurrentQNetwork`, from prioritized sequences:

    - The state at the start of a sequence is the one that was stored with its first row, and the
      first ``burn_in`` rows only bring it up to date (section 3): the paper's "stored state" with
      "burn-in".
    - The target of a row is an n-step return to which the target network's value of the action that
      the online network prefers is added, on the scale of
      :func:`~dmiddleware.rl.rescale_value` (section 2.3), so rewards are not clipped.
    - The priority of a sequence is a mixture of its largest and its mean error, with the weight
      ``priority_eta`` (section 2.3).

    It learns from sequences ``[T, B, …]`` of one episode each, as a
    :class:`~dmiddleware.data.TensorBuffer` with ``unroll_len`` draws them: with the policy's
    ``burn_in``, and the state only where they start. The policy itself sums the rewards of
    ``n_step`` steps; near the end of a sequence it sums fewer, so no row beyond the sequence is
    needed. As in the paper, the first ``burn_in`` rows of an episode are never learned from, and an
    episode of ``burn_in`` rows or fewer is never drawn.

    Collecting takes the keyword ``eps``, as :class:`DQNPolicy` does; actors with different ε, as in
    the paper, get it from their own programs.

    The defaults of the discount, n, learning rate, Adam's ε, the target network and η are the
    paper's (table 2).
    """

    cfg: R2D2Settings
    q: Component[RecurrentNetwork]
    model_type: ClassVar[str] = "recurrent_q_network"

    act_inputs: tuple[str, ...] = ("is_first", "prev_action", "prev_reward", "action_mask")
    learn_columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "reward",
        "next_obs",
        "terminated",
        "is_first",
        "mask",
        "state",
    )

    def setup(self) -> None:
        """Build the memory."""
        super().setup()
        self.memory = Memory(
            self.model, self.codec, act_inputs=self.act_inputs, user=type(self).__name__
        )
        self.act_inputs = self.memory.act_inputs

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes, ``[n, S]``: zeros."""
        return self.memory.initial_state(n)

    @property
    def n_step(self) -> int:
        """1: the number of rewards that the buffer sums; the policy sums the others."""
        return 1

    @property
    def burn_in(self) -> int:
        """The rows at the start of a sequence that only update the state; the buffer's too."""
        return int(self.cfg.burn_in)

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network without the values of all actions; see :meth:`Policy.check_outputs`."""
        self.values_of(self.memory.run(obs, inputs, inputs["state"]), self.rows_of(obs))

    def act_collect(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        eps: float = 0.0,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Take a random action with the probability ``eps``; see :meth:`Policy.act_collect`."""
        output = self.memory.run(obs, kwargs, kwargs["state"])
        acted = self.explored(output["logit"], mask_of(obs, action_mask), eps)
        return {"action": acted["action"], "state": output["state"]}

    def act_eval(
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Take the action of the highest value; see :meth:`Policy.act_eval`."""
        output = self.memory.run(obs, kwargs, kwargs["state"])
        best = mask_logit(output["logit"], mask_of(obs, action_mask)).argmax(-1)
        return {"action": self.codec.to_env(best), "state": output["state"]}

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse a batch that does not consist of sequences."""
        check_sequences(
            batch,
            burn_in=self.burn_in,
            user=type(self).__name__,
            several_agents=self.several_agents,
        )
        return super().check_batch(batch)

    def n_learned_rows(self, batch: Columns) -> int:
        """Return over how many rows the loss is a mean."""
        # The loss is a mean over padding too, where it is 0.
        return int(batch["mask"][self.burn_in :].numel())

    def update(self, batch: Columns, **drawn: Any) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        cfg, start = self.cfg, self.burn_in
        action = self.codec.to_raw(batch["action"])[start:]
        mask = batch["mask"][start:]
        online, target_network = self._q_values(batch)
        target = self._targets(batch, online.detach(), target_network)
        weight = mask.float()
        if "weight" in batch:
            weight = weight * batch["weight"]
        obs = index_rows(batch["obs"], slice(start, None))
        error = target - self.values_of_actions(self.q.module, online[:-1], action, obs)
        loss, td_error = weighted_mean(error.square(), weight), error.detach()
        norm = self.q.step(loss)
        mean_target = _mean(target, mask)
        output = {
            "total_loss": loss.detach(),
            "q_value": mean_target - _mean(td_error, mask),
            "target_q_value": mean_target,
            "td_error": _mean(td_error.abs(), mask),
        }
        if cfg.grad_clip_norm is not None:
            output["grad_norm"] = norm
        if "weight" in batch or self.cfg.priority:
            output["priority"] = sequence_priority(td_error, mask, eta=cfg.priority_eta)
        return output

    def values_of_actions(
        self, network: nn.Module, q: torch.Tensor, action: torch.Tensor, obs: Nested
    ) -> torch.Tensor:
        """Return the values ``[L, B]`` of the actions of rows.

        Args:
            network: the online or the target network.
            q: ``[L, B, A]``, its values of all actions.
            action: ``[L, B]`` int64.
            obs: ``[L, B, …]``, in which the actions are chosen.

        Raises:
            StructureError: if the actions have another shape.
        """
        check_shape(q.shape[:-1], action=action)
        return taken_rows(q, action)

    def _q_values(self, batch: Columns) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values ``[L + 1, B, A]`` by the online and by the target network.

        These are the values of the observations of the ``L`` rows after the burn-in, and of the
        successor of the last one.
        """
        obs = with_successors(batch["obs"], batch["next_obs"])
        inputs = {
            "is_first": with_successors(batch["is_first"], torch.zeros_like(batch["is_first"])),
            **{
                name: with_successors(batch[name], batch[source])
                for name, source in (("prev_action", "action"), ("prev_reward", "reward"))
                if name in batch
            },
        }
        start, state = self.burn_in, batch["state"]
        with torch.no_grad():
            by_target = self.memory.run(
                obs, inputs, state, network=self.q.target, within_episode=True
            )
            if start:
                warm_up = index_rows(obs, slice(start)), index_rows(inputs, slice(start))
                state = self.memory.run(*warm_up, state, within_episode=True)["state"]
        learned = index_rows(obs, slice(start, None)), index_rows(inputs, slice(start, None))
        online = self.memory.run(*learned, state, within_episode=True)
        return online["logit"], by_target["logit"][start:]

    @torch.no_grad()
    def _targets(
        self, batch: Columns, online: torch.Tensor, target_network: torch.Tensor
    ) -> torch.Tensor:
        """Return the targets ``[L, B]`` of the rows after the burn-in (section 2.3).

        ``h(sum of n rewards + γⁿ h⁻¹(Q⁻(s', a*)))`` with ``a* = argmax Q(s', a)``.
        """
        cfg, start = self.cfg, self.burn_in
        mask = batch["mask"][start:]
        is_last = torch.ones_like(mask)
        is_last[:-1] = ~mask[1:]
        summed = nstep_return(
            batch["reward"][start:],
            batch["terminated"][start:],
            is_last,
            n=int(self.cfg.n_step),
            discount=self.cfg.discount,
        )
        # Row t's successor is the observation t + 1.
        next_q, next_obs = target_network[1:], index_rows(batch["next_obs"], slice(start, None))
        allowed = mask_of(batch["next_obs"], batch.get("next_action_mask"))
        allowed = None if allowed is None else allowed[start:]
        best = mask_logit(online[1:] if cfg.double else next_q, allowed).argmax(-1)
        next_value = self.values_of_actions(self.q.target, next_q, best, next_obs)
        bootstrap = take_rows(next_value, summed.bootstrap_row)
        target = td_target(
            unscale_value(bootstrap) if cfg.value_rescaling else bootstrap,
            summed.reward,
            summed.terminated,
            discount=summed.discount,
        )
        return rescale_value(target) if cfg.value_rescaling else target


def _mean(column: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the rows ``[L, B]`` that are not padding, without gradient."""
    return column.masked_fill(~mask, 0.0).sum() / mask.sum()
