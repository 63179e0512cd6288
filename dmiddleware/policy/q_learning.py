"""What algorithms with a Q-network have in common, such as DQN, C51 and IQN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import torch
from annotated_types import Gt, Le
from torch import nn

from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import named_outputs, with_rows
from dmiddleware.policy.td import TDPolicy, TDSettings
from dmiddleware.rl import epsilon_greedy, mask_logit, taken_rows
from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import Count, Fraction, Positive
from dmiddleware.tree import Columns, Nested, Value

__all__ = ["Epsilon", "Forward", "Inputs", "QLearningPolicy", "QLearningSettings"]

Forward: TypeAlias = Literal["online", "target", "choice", "act"]
"""A forward of a network: in an update, of the online network for the loss, of the target network,
and of the online network to choose the target's action; or to act."""

Inputs: TypeAlias = dict[str, torch.Tensor]
"""Keyword arguments of a network's forward, in addition to observations."""

_NOTHING: Final[Inputs] = {}

Epsilon: TypeAlias = Annotated[float | Schedule, Scheduled(Fraction, in_updates=False)]
"""The probability of a random action while collecting, or its schedule."""
Tau: TypeAlias = Annotated[float, Gt(0), Le(1)]
"""The fraction of the way that a target update moves."""


class QLearningSettings(TDSettings):
    """What the variants of Q-learning have."""

    learning_rate: LearningRate = 1e-3
    """Adam's learning rate."""
    adam_eps: Positive = 1e-8
    """Adam's ε."""
    double: bool = True
    """Double Q-learning: the online network chooses the target's action."""
    target_update_freq: Count = 500
    """Updates between target updates."""
    target_tau: Tau = 1.0
    """Fraction of the way that a target update moves; 1 copies the weights."""
    grad_clip_norm: Positive | None = None
    """Largest norm of the gradient; None does not clip."""
    eps: Epsilon = Schedule.linear(1.0, 0.05, decay=10_000)
    """ε of the actions that explore while collecting."""


class QLearningPolicy(TDPolicy):
    """Q-learning with a target network, for discrete actions; a subclass writes :meth:`loss`.

    See :class:`DQNPolicy` for the columns, the keyword ``eps`` and the options. A network may take
    random inputs: see :meth:`draw_inputs`.
    """

    cfg: QLearningSettings
    q: Component[nn.Module]
    reports = (*TDPolicy.reports, "grad_norm")

    action_kinds: ClassVar[tuple[str, ...]] = ("discrete",)
    learned_output: ClassVar[str] = "logit"
    """The output of the network that the algorithm learns, ``[B, A]`` or ``[B, A, N]``."""

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        return {
            "q": Component(
                self.model,
                adam(cfg.learning_rate, eps=cfg.adam_eps),
                target=TargetRule(cfg.target_update_freq, cfg.target_tau),
                grad_clip_norm=cfg.grad_clip_norm,
                acts=True,
            ),
        }

    def setup(self) -> None:
        """Note whether the network is noisy, so that it explores by itself."""
        self._n_noise: int = getattr(self.model, "n_noise", 0)
        self.explores = self._n_noise > 0

    def draw(self, batch: Columns) -> dict[str, Any]:
        """Return the random numbers of an update."""
        forwards: list[Forward] = ["online", "target"]
        if self.cfg.double:
            forwards.append("choice")
        n_rows, generator = len(batch["reward"]), self.learn_generator
        drawn = {forward: self.draw_inputs(forward, n_rows, generator) for forward in forwards}
        return {forward: inputs for forward, inputs in drawn.items() if inputs}

    def draw_inputs(self, forward: Forward, n_rows: int, generator: torch.Generator) -> Inputs:
        """Return the random inputs of a network's forward, drawn where its batch came from.

        A noisy network takes ``noise``: one draw for an update, and one per environment to act
        (Fortunato et al., "Noisy Networks for Exploration", 2018, section 3.1).
        """
        if self._n_noise == 0:
            return _NOTHING
        shape = (n_rows, self._n_noise) if forward == "act" else (self._n_noise,)
        return {"noise": torch.randn(shape, generator=generator, device=self.draw_device)}

    def update(
        self,
        batch: Columns,
        *,
        online: Inputs = _NOTHING,
        target: Inputs = _NOTHING,
        choice: Inputs = _NOTHING,
    ) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        next_value = self.next_values(batch, target, choice)
        action = self.codec.to_raw(batch["action"])
        output: dict[str, torch.Tensor] = self.model(batch["obs"], **online)
        self.values_of(output, action.shape)
        loss, errors, logged = self.loss(batch, action, output, next_value)
        norm = self.q.step(loss)
        outcome = {"total_loss": loss.detach(), **logged}
        if self.cfg.grad_clip_norm is not None:
            outcome["grad_norm"] = norm
        if "weight" in batch or self.cfg.priority:
            outcome["priority"] = errors
        return outcome

    @torch.no_grad()
    def next_values(self, batch: Columns, target: Inputs, choice: Inputs) -> torch.Tensor:
        """Return ``[B, …]``: what the target network says about the best next action.

        The best is the one with the highest value among the allowed ones: by the target network
        itself, or by the online network (van Hasselt et al., "Deep RL with Double Q-learning",
        2016, equation 4).
        """
        next_obs = batch["next_obs"]
        output: dict[str, torch.Tensor]
        if self.cfg.double:
            self.set_training(False)  # so that the choice updates no batch statistics
            ranking: torch.Tensor = self.model(next_obs, **choice)["logit"]
            self.set_training(True)
            output = self.q.target(next_obs, **target)
        else:
            output = self.q.target(next_obs, **target)
            ranking = output["logit"]
        mask = mask_of(next_obs, batch.get("next_action_mask"))
        if mask is not None:
            ranking = mask_logit(ranking, mask)
        return taken_rows(output[self.learned_output], ranking.argmax(-1))

    def values_of(self, output: Any, rows: Sequence[int | str]) -> torch.Tensor:
        """Return the action values of a network's output, ``[…, A]``, for rows ``[…]``."""
        if type(output) is not dict or "logit" not in output:
            named_outputs(output, "logit")
        logit: torch.Tensor = output["logit"]
        is_numbers = isinstance(logit, torch.Tensor) and logit.is_floating_point()
        if not is_numbers or logit.shape[:-1] != rows:
            logit = with_rows(logit, (*rows, "n_actions"), what="logit")
        n_actions = logit.shape[-1]
        if self.codec.output_sizes.get("logit", n_actions) != n_actions:
            self.codec.check_outputs(output)
        return logit

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network without what the algorithm learns; see :meth:`Policy.check_outputs`."""
        rows = self.rows_of(obs)
        inputs = self.draw_inputs("online", rows[0], torch.Generator())
        output: dict[str, torch.Tensor] = self.model(obs, **inputs)
        logit = self.values_of(output, rows)
        learned: torch.Tensor = named_outputs(output, self.learned_output)[self.learned_output]
        if self.learned_output != "logit":
            with_rows(learned, (*logit.shape, "n"), what=self.learned_output)

    def loss(
        self,
        batch: Columns,
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        next_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, the priorities ``[B]``, and what else to log.

        Args:
            batch: the columns.
            action: ``[B]`` int64, from 0.
            output: of the online network for the observations.
            next_value: ``[B, …]``: what the target network returns for the best next actions,
                without gradient.
        """
        raise NotImplementedError

    def act_collect(  # type: ignore[override]  # takes no other keywords
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        eps: float = 0.0,
        action_mask: Nested | None = None,
    ) -> dict[str, Any]:
        """Take a random action with the probability ``eps``; see :meth:`Policy.act_collect`."""
        inputs = self.draw_inputs("act", len(env_id), self.generator)
        logit = self.values_of(self.acting_model(obs, **inputs), (len(env_id),))
        return self.explored(logit, mask_of(obs, action_mask), eps)

    def explored(
        self, logit: torch.Tensor, mask: torch.Tensor | None, eps: float
    ) -> dict[str, Any]:
        """Return ``action`` and ``logit``: ε-greedy for action values ``[E, A]``.

        Both are where the policy draws, see :attr:`Policy.draw_device`.
        """
        if self.on_gpu:
            logit = logit.to(self.draw_device)
            mask = None if mask is None else mask.to(self.draw_device)
        action = epsilon_greedy(logit, eps, generator=self.generator, mask=mask)
        return {"action": self.codec.to_env(action), "logit": logit}

    def act_eval(  # type: ignore[override]  # takes no other keywords
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None
    ) -> dict[str, Any]:
        """Take the action of the highest value; see :meth:`Policy.act_eval`."""
        logit = self.values_of(self.model(obs), (env_id.shape[0],))
        best = mask_logit(logit, mask_of(obs, action_mask)).argmax(-1)
        return {"action": self.codec.to_env(best)}
