"""Phasic policy gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from dmiddleware.data.minibatches import (
    MinibatchUnit,
    minibatches,
    n_minibatches,
    select_columns,
)
from dmiddleware.distributed import gather_from_ranks
from dmiddleware.policy.advantage import AdvantagePolicy, AdvantageSettings
from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.network_outputs import named_outputs, values_of_rows
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import ppo_policy_loss, ppo_value_loss
from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import Count, NonNegative, Positive
from dmiddleware.tree import (
    Batch,
    Columns,
    Value,
    as_tree,
    cat,
    clone,
    index_rows,
    to_device,
    to_dict,
    with_columns,
)

__all__ = ["PPGPolicy", "PPGSettings", "PhaseRows"]


class PPGSettings(AdvantageSettings):
    """The settings of PPG."""

    batch_size = 256
    """Rows per minibatch."""
    epoch_per_collect: Literal[1] = 1
    """A collected batch is one policy phase; the next two settings count its epochs."""
    actor_epoch_per_collect: Count = 1
    """E_π, passes of the actor over each collected batch."""
    critic_epoch_per_collect: Count = 1
    """E_V, passes of the critic over each collected batch."""
    aux_freq: Count = 32
    """N_π, updates, each from one collected batch, before an auxiliary phase."""
    aux_train_epoch: Count = 6
    """E_aux, passes of an auxiliary phase over the rows of these updates."""
    aux_bc_weight: NonNegative = 1.0
    """β_clone, weight of the divergence from the policy before the auxiliary phase."""
    learning_rate: LearningRate = 5e-4
    """Adam's learning rate."""
    adam_eps: Positive = 1e-5
    """Adam's ε."""
    clip_ratio: Annotated[float | Schedule, Scheduled(Positive)] = 0.2
    """ε of the clipped objective."""
    value_weight = 1.0


class PhaseRows:
    """The rows of the policy phases since the last auxiliary phase."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []

    def __len__(self) -> int:
        """Return the number of policy phases."""
        return len(self._batches)

    def add(self, rows: Batch) -> None:
        """Add the rows ``[N, …]`` of a policy phase."""
        self._batches.append(clone(rows))

    def take(self, device: str) -> Batch:
        """Return all rows on a device, and forget them."""
        rows = to_device(cat(self._batches), device)
        self._batches = []
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of each policy phase."""
        return {str(number): to_dict(rows) for number, rows in enumerate(self._batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._batches = [as_tree(state[str(number)]) for number in range(len(state))]


@POLICY_REGISTRY.register("ppg")
class PPGPolicy(AdvantagePolicy):
    """Phasic policy gradient (Cobbe et al., "Phasic Policy Gradient", 2020, algorithm 1).

    Actor and critic share nothing, so neither objective disturbs the other. In a policy phase, the
    actor learns by PPO's clipped objective and an entropy bonus, and the critic by the squared
    error of the returns. After ``aux_freq`` policy phases, an auxiliary phase teaches the actor's
    features what the critic has learned: a value head on them learns the returns of all these
    phases, while the divergence from the policy before the auxiliary phase is held small (the joint
    objective of section 2.1). The critic learns from all these rows once more.

    Differences from the paper: minibatches have ``batch_size`` rows in both phases, where the
    paper's are half as large in the auxiliary phase; gradients are clipped; Adam has ε = 1e-5, as
    here in PPO; and advantages are normalized in each minibatch. :class:`AdvantagePolicy` describes
    what else can be normalized; the paper normalizes rewards (``reward_norm``).

    One learn forward is one update, a policy phase from a whole collected batch, and the auxiliary
    phase if its turn has come. Learns from the columns ``obs``, ``action`` (``raw_action`` where
    there is one), ``log_prob``, ``adv`` and ``ret``. The observations and returns since the last
    auxiliary phase stay on the policy's device and are part of its learner's state, so a resumed
    run makes the same auxiliary phase. All kinds of actions are supported; see
    :class:`ActionCodec`.
    """

    cfg: PPGSettings
    actor: Component[nn.Module]
    auxiliary: Component[nn.Module]
    critic: Component[nn.Module]
    phase_rows: Component[PhaseRows]
    reports: ClassVar[tuple[str, ...]] = (
        *AdvantagePolicy.reports,
        "approx_kl",
        "clip_fraction",
        "clip_ratio",
        "aux_loss",
        "clone_kl",
    )
    model_type: ClassVar[str] = "phasic_actor_critic"

    minibatch_unit: ClassVar[MinibatchUnit] = "batch"
    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action", "log_prob", "adv", "ret")
    optional_columns: ClassVar[tuple[str, ...] | None] = ("raw_action", "collect_iter")

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, how each is trained, and the rows of the present phases."""
        cfg = self.cfg
        optimizer = adam(cfg.learning_rate, eps=cfg.adam_eps)
        clip = cfg.grad_clip_norm
        names = ("actor", "critic", "auxiliary")
        actor, critic, auxiliary = map(self.submodule, names)
        return {
            **super().make_components(),
            "actor": Component(actor, optimizer, grad_clip_norm=clip, acts=True),
            "auxiliary": Component(auxiliary, optimizer, grad_clip_norm=clip),
            "critic": Component(critic, optimizer, grad_clip_norm=clip, acts=True),
            "phase_rows": Component(PhaseRows()),
        }

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network without a value, or without an auxiliary one."""
        super().check_outputs(obs, **inputs)
        features = named_outputs(self.actor.module(obs), "features")["features"]
        for name, value in (
            ("auxiliary", self.auxiliary.module(features)),
            ("critic", self.critic.module(obs)),
        ):
            values_of_rows(value, self.rows_of(obs), what=f"of {name}")

    def learn(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        """Make a policy phase and, if its turn has come, an auxiliary phase."""
        cfg, rows = self.cfg, self.phase_rows.module
        self.obs_norm.hold()
        valued = self.valued_rows(batch)
        phases = [
            self._phase("actor", batch, cfg.actor_epoch_per_collect),
            self._phase("critic", valued, cfg.critic_epoch_per_collect),
        ]
        rows.add(select_columns(valued, ("obs", "action_mask", "ret")))
        if len(rows) >= cfg.aux_freq:
            together = self._with_old_policy(rows.take(self.device))
            phases.append(self._phase("auxiliary", together, cfg.aux_train_epoch))
        self.train_iter += 1
        total = sum(phase["total_loss"] for phase in phases)
        return {name: value for phase in phases for name, value in phase.items()} | {
            "total_loss": total
        }

    def valued_rows(self, batch: Batch) -> Batch:
        """Return the rows of a batch that values learn from."""
        return batch

    def update(self, batch: Columns, *, phase: str) -> dict[str, torch.Tensor]:
        """Make the step of a minibatch; see :meth:`Policy.update`.

        Args:
            batch: the minibatch.
            phase: ``"actor"``, ``"critic"`` or ``"auxiliary"``.
        """
        if phase == "actor":
            return self._update_actor(batch)
        if phase == "critic":
            return self._update_critic(batch)
        return {**self._update_critic(batch), **self._update_features(batch)}

    def _update_actor(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Follow PPO's objective, L^clip + β_S S[π]."""
        cfg = self.cfg
        distribution = self.learned_distribution(self.actor_output(batch["obs"]), batch)
        policy = ppo_policy_loss(
            distribution.log_prob(self.raw_action(batch)),
            batch["log_prob"],
            self.learned_advantage(batch),
            clip_ratio=self.now(cfg.clip_ratio),
        )
        entropy = distribution.entropy().mean()
        loss = policy.loss - self.now(cfg.entropy_weight) * entropy
        norm = self.actor.step(loss)
        answer = {
            "total_loss": loss.detach(),
            "policy_loss": policy.loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": policy.approx_kl,
            "clip_fraction": policy.clip_fraction,
        }
        if cfg.grad_clip_norm is not None:
            answer["grad_norm"] = norm
        return answer

    def _update_critic(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Descend L^value, half the mean squared error of the returns."""
        ret = self.as_output(batch["ret"])
        loss = ppo_value_loss(values_of_rows(self.critic.module(batch["obs"]), ret.shape), ret)
        self.critic.step(self.cfg.value_weight * loss)
        return {"total_loss": self.cfg.value_weight * loss.detach(), "value_loss": loss.detach()}

    def _update_features(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Descend L^joint = L^aux + β_clone KL[π_old, π]."""
        output: dict[str, torch.Tensor] = self.actor.module(batch["obs"])
        aux_loss = self._auxiliary_loss(output["features"], batch)
        old_output: Any = batch["old_policy"]
        old = self.learned_distribution(old_output, batch)
        clone_kl = old.kl_divergence(self.learned_distribution(output, batch)).mean()
        loss = aux_loss + self.cfg.aux_bc_weight * clone_kl
        self.actor.step(loss)
        self.auxiliary.step(self._auxiliary_loss(output["features"].detach(), batch))
        return {
            "total_loss": loss.detach(),
            "aux_loss": aux_loss.detach(),
            "clone_kl": clone_kl.detach(),
        }

    def _auxiliary_loss(self, features: torch.Tensor, batch: Columns) -> torch.Tensor:
        """Return L^aux, half the mean squared error of the auxiliary values."""
        ret = self.as_output(batch["ret"])
        return ppo_value_loss(values_of_rows(self.auxiliary.module(features), ret.shape), ret)

    def _phase(self, phase: str, rows: Batch, n_epochs: int) -> dict[str, Any]:
        """Make the steps of some epochs over rows ``[N, …]``; return the means of their outputs."""
        n = n_minibatches(rows, self.cfg.batch_size)
        if self.reducer is not None:
            n = min(gather_from_ranks(n))
        outputs = [
            self._step(phase, batch)
            for _ in range(n_epochs)
            for batch in minibatches(rows, n, generator=self.learn_generator)
        ]
        return {
            name: sum(float(output[name]) for output in outputs) / len(outputs)
            for name in outputs[0]
        }

    def _step(self, phase: str, batch: Batch) -> Mapping[str, Any]:
        if self.reducer is not None:
            self.reducer.begin(self.n_learned_rows(batch))
        columns = to_dict(batch)
        if self.obs_norm.is_on:
            columns = self.obs_norm.rows(columns)
        return self._runner.run(
            columns,
            {"phase": phase},
            n_made=self.train_iter,
            counters=self.counters,
            batch=batch,
        )

    @torch.no_grad()
    def _with_old_policy(self, rows: Batch) -> Batch:
        """Return rows with the present policy's outputs for them, in the column ``old_policy``."""
        size, n_rows = self.cfg.batch_size, len(rows["ret"])
        parts = [
            as_tree(self.actor_output(self.obs_norm(index_rows(rows["obs"], slice(at, at + size)))))
            for at in range(0, n_rows, size)
        ]
        return with_columns(rows, old_policy=cat(parts))
