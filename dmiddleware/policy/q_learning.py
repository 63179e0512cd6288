"""What algorithms with a Q-network have in common: DQN, C51, QR-DQN, IQN and Rainbow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import torch
from easydict import EasyDict

from dmiddleware.config import (
    Option,
    Range,
    anything,
    at_least,
    count,
    fraction,
    one_of,
    optional,
    positive,
    switch,
)
from dmiddleware.errors import PolicyOutputError
from dmiddleware.policy.actions import mask_of
from dmiddleware.policy.component import Component, TargetRule, adam
from dmiddleware.policy.network_outputs import with_rows
from dmiddleware.policy.obs_norm import OBS_NORM_OPTIONS, ObsNormOptions
from dmiddleware.policy.options import COLLECT_OPTIONS, LEARNING_RATE, TDOptions
from dmiddleware.policy.td import TDPolicy
from dmiddleware.rl import epsilon_greedy, epsilon_schedule, mask_logit, taken_rows
from dmiddleware.schedule import (
    Schedule,
    ScheduleCounter,
    ScheduleType,
)
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested, Value

__all__ = ["Forward", "Inputs", "QLearningOptions", "QLearningPolicy"]

Forward: TypeAlias = Literal["online", "target", "choice", "act"]
"""A forward of a network: in an update, of the online network for the loss, of the target network,
and of the online network to choose the target's action; or to act."""

Inputs: TypeAlias = dict[str, torch.Tensor]
"""Keyword arguments of a network's forward, in addition to observations."""

_NOTHING: Final[Inputs] = {}


class QLearningOptions(ObsNormOptions, TDOptions, total=False):
    """The options that all algorithms with a Q-network have in ``for_env``."""

    learning_rate: float | Schedule
    adam_eps: float
    double: bool
    target_update_freq: int
    target_tau: float
    grad_clip_norm: float | None
    eps_type: ScheduleType | Literal["exp"]
    eps_start: float
    eps_end: float
    eps_decay: float
    eps_by: ScheduleCounter
    eps_points: Sequence[tuple[float, float]] | None


def _is_tau(value: object) -> bool:
    return fraction.fits(value) and value != 0


class QLearningPolicy(TDPolicy):
    """Q-learning with a target network, for discrete actions; a subclass writes :meth:`loss`.

    See :class:`DQNPolicy` for the columns, the keyword ``eps`` and the options. A network may take
    random inputs: see :meth:`draw_inputs`.
    """

    action_kinds: ClassVar[tuple[str, ...]] = ("discrete",)
    learned: ClassVar[str] = "logit"
    """The output of the network that the algorithm learns, ``[B, A]`` or ``[B, A, N]``."""

    config: ClassVar[dict[str, Any]] = {
        **OBS_NORM_OPTIONS,
        "random_collect_size": Option(
            0,
            at_least(0, whole=True),
            "env steps with random actions before learning",
            keyword=None,
        ),
        "learn": {
            "batch_size": Option(64, count, "rows per update"),
            "update_per_collect": Option(1, count, "updates after each collection", keyword=None),
            "learning_rate": Option(1e-3, LEARNING_RATE, "Adam's learning rate"),
            "adam_eps": Option(1e-8, positive, "Adam's ε"),
            "double": Option(
                True, switch, "double Q-learning: the online network chooses the target's action"
            ),
            "target_update_freq": Option(500, count, "updates between target updates"),
            "target_tau": Option(
                1.0,
                Range("a number above 0, up to 1", _is_tau),
                "fraction of the way that a target update moves; 1 copies the weights",
            ),
            "grad_clip_norm": Option(
                None, optional(positive), "largest norm of the gradient; None does not clip"
            ),
        },
        "collect": COLLECT_OPTIONS,
        "other": {
            "eps": {
                "type": Option(
                    "linear",
                    one_of("linear", "exponential", "exp", "cosine", "constant", "piecewise"),
                    "shape of the schedule of ε; exp is exponential",
                    keyword="eps_type",
                ),
                "start": Option(1.0, fraction, "the first ε", keyword="eps_start"),
                "end": Option(0.05, fraction, "the last ε", keyword="eps_end"),
                "decay": Option(
                    10_000, positive, "env steps over which ε decays", keyword="eps_decay"
                ),
                "by": Option(
                    "env_step",
                    one_of("env_step", "update", "progress"),
                    "what ε depends on, and the unit of decay",
                    keyword="eps_by",
                ),
                "points": Option(
                    None,
                    optional(anything),
                    "of a piecewise schedule: pairs of a count and the ε there",
                    keyword="eps_points",
                ),
            }
        },
    }

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Reject a schedule of ε that is none, and invalid combinations."""
        super().check_config(cfg)
        epsilon_schedule(cfg.other.eps)

    def make_components(self) -> dict[str, Component]:
        """Return the networks, and how each is trained."""
        learn = self.cfg.learn
        return {
            "q": Component(
                self.model,
                adam(self.schedules["learn.learning_rate"], eps=learn.adam_eps),
                target=TargetRule(learn.target_update_freq, learn.target_tau),
                grad_clip_norm=learn.grad_clip_norm,
                acts=True,
            ),
        }

    def setup(self) -> None:
        """Note whether the network is noisy, so that it explores by itself."""
        self._n_noise: int = getattr(self.model, "n_noise", 0)
        self.explores = self._n_noise > 0

    def draw(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the random numbers of an update."""
        forwards: list[Forward] = ["online", "target"]
        if self.cfg.learn.double:
            forwards.append("choice")
        n_rows, generator = len(batch["reward"]), self.learn_generator
        drawn = {forward: self.draw_inputs(forward, n_rows, generator) for forward in forwards}
        return {forward: inputs for forward, inputs in drawn.items() if inputs}

    def draw_inputs(self, forward: Forward, n_rows: int, generator: torch.Generator) -> Inputs:
        """Return the random inputs of a network's forward, drawn on the CPU.

        A noisy network takes ``noise``: one draw for an update, and one per environment to act
        (Fortunato et al., "Noisy Networks for Exploration", 2018, section 3.1).
        """
        if self._n_noise == 0:
            return _NOTHING
        shape = (n_rows, self._n_noise) if forward == "act" else (self._n_noise,)
        return {"noise": torch.randn(shape, generator=generator).to(self.device)}

    def update(
        self,
        batch: Mapping[str, Any],
        *,
        online: Inputs = _NOTHING,
        target: Inputs = _NOTHING,
        choice: Inputs = _NOTHING,
    ) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        following = self.next_values(batch, target, choice)
        action = self.codec.to_raw(batch["action"])
        output = self.model(batch["obs"], **online)
        self.values_of(output, action.shape)
        loss, errors, logged = self.loss(batch, action, output, following)
        norm = self.components["q"].step(loss)
        outcome = {"total_loss": loss.detach(), **logged}
        if self.cfg.learn.grad_clip_norm is not None:
            outcome["grad_norm"] = norm
        if "weight" in batch or self.cfg.priority:
            outcome["priority"] = errors
        return outcome

    @torch.no_grad()
    def next_values(self, batch: Mapping[str, Any], target: Inputs, choice: Inputs) -> torch.Tensor:
        """Return ``[B, …]``: what the target network says about the best next action.

        The best is the one with the highest value among the allowed ones: by the target network
        itself, or by the online network (van Hasselt et al., "Deep RL with Double Q-learning",
        2016, equation 4).
        """
        next_obs = batch["next_obs"]
        if self.cfg.learn.double:
            with self.evaluating():
                judge = self.model(next_obs, **choice)["logit"]
            output = self.components["q"].target(next_obs, **target)
        else:
            output = self.components["q"].target(next_obs, **target)
            judge = output["logit"]
        best = _best(judge, mask_of(next_obs, batch.get("next_action_mask")))
        return self.of_actions(output, best)

    def values_of(self, output: Any, rows: Sequence[int | str]) -> torch.Tensor:
        """Return the action values of a network's output, ``[…, A]``, for rows ``[…]``."""
        if (type(output) is not dict and not isinstance(output, Mapping)) or "logit" not in output:
            raise PolicyOutputError(
                f"the model returned {output!r:.100}; it must return a dictionary with the key "
                '"logit", the values of all actions'
            )
        return with_rows(output["logit"], (*rows, "n_actions"), what="logit")

    def of_actions(self, output: dict[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
        """Return ``[B, …]``: the learned output for the given actions."""
        return taken_rows(output[self.learned], action)

    def loss(
        self,
        batch: Mapping[str, Any],
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        following: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, the priorities ``[B]``, and what else to log.

        Args:
            batch: the columns.
            action: ``[B]`` int64, from 0.
            output: of the online network for the observations.
            following: ``[B, …]``: of the target network's output that is learned, the rows of the
                best next actions; without gradient.
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
        # Exploration draws on the CPU, so a run draws the same numbers with and without a GPU.
        inputs = self.draw_inputs("act", len(env_id), self.generator)
        logit = self.values_of(call(self.model, obs, **inputs), (len(env_id),))
        mask = mask_of(obs, action_mask)
        if self.on_gpu:
            logit, mask = logit.cpu(), None if mask is None else mask.cpu()
        action = epsilon_greedy(logit, eps, generator=self.generator, mask=mask)
        return {"action": self.codec.to_env(action), "logit": logit}

    def act_eval(  # type: ignore[override]  # takes no other keywords
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None
    ) -> dict[str, Any]:
        """Take the action of the highest value; see :meth:`Policy.act_eval`."""
        logit = self.values_of(self.model(obs), (len(env_id),))
        best = _best(logit, mask_of(obs, action_mask))
        return {"action": self.codec.to_env(best)}


def _best(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return ``[…]``, the actions of the highest values ``[…, A]`` that a mask allows."""
    return mask_logit(q, mask).argmax(-1)
