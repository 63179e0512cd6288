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
from dmiddleware.data.batch import Nested, Value
from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.common_options import COLLECT_OPTIONS, LEARNING_RATE, TDOptions
from dmiddleware.policy.base.network_outputs import with_rows
from dmiddleware.policy.base.obs_norm import ObsNormOptions, ObsNormPolicy
from dmiddleware.policy.base.parts import Part, TargetRule, adam
from dmiddleware.policy.base.policy import to_be_written
from dmiddleware.policy.base.td_policy import TDPolicy
from dmiddleware.rl import epsilon_greedy, epsilon_schedule, mask_logit, taken_rows
from dmiddleware.schedule import (
    Counters,
    Schedule,
    ScheduleCounter,
    ScheduleType,
)
from dmiddleware.torch_private import call

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


class QLearningPolicy(TDPolicy, ObsNormPolicy, CommandModePolicy):
    """Q-learning with a target network, for discrete actions; a subclass writes ``_loss``.

    See :class:`DQNPolicy` for the columns, the keyword ``eps`` and the options. A network may take
    random inputs: see ``_draw_inputs``.
    """

    explores: ClassVar[bool] = False
    action_kinds: ClassVar[tuple[str, ...]] = ("discrete",)
    learned: ClassVar[str] = "logit"
    """The output of the network that the algorithm learns, ``[B, A]`` or ``[B, A, N]``."""

    config: ClassVar[dict[str, Any]] = {
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

    def _make_parts(self) -> dict[str, Part]:
        learn = self._cfg.learn
        return {
            **super()._make_parts(),
            "q": Part(
                self._model,
                adam(self._schedules["learn.learning_rate"], eps=learn.adam_eps),
                target=TargetRule(learn.target_update_freq, learn.target_tau),
                grad_clip_norm=learn.grad_clip_norm,
                acts=True,
            ),
        }

    def _init_common(self) -> None:
        super()._init_common()
        self._n_noise: int = getattr(getattr(self, "_model", None), "n_noise", 0)

    def _init_command(self) -> None:
        self._eps = epsilon_schedule(self._cfg.other.eps)

    def _get_explores(self) -> bool:
        return self._n_noise > 0

    def _draw(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        forwards: list[Forward] = ["online", "target"]
        if self._cfg.learn.double:
            forwards.append("choice")
        n_rows, generator = len(batch["reward"]), self._learn_generator
        drawn = {forward: self._draw_inputs(forward, n_rows, generator) for forward in forwards}
        return {forward: inputs for forward, inputs in drawn.items() if inputs}

    def _draw_inputs(self, forward: Forward, n_rows: int, generator: torch.Generator) -> Inputs:
        """Return the random inputs of a network's forward, drawn on the CPU.

        A noisy network takes ``noise``: one draw for an update, and one per environment to act
        (Fortunato et al., "Noisy Networks for Exploration", 2018, section 3.1).
        """
        if self._n_noise == 0:
            return _NOTHING
        shape = (n_rows, self._n_noise) if forward == "act" else (self._n_noise,)
        return {"noise": torch.randn(shape, generator=generator).to(self._device)}

    def _update(
        self,
        batch: Mapping[str, Any],
        *,
        online: Inputs = _NOTHING,
        target: Inputs = _NOTHING,
        choice: Inputs = _NOTHING,
    ) -> dict[str, torch.Tensor]:
        following = self._following(batch, target, choice)
        action = self._codec.to_raw(batch["action"])
        output = self._model(batch["obs"], **online)
        self._values_of(output, action.shape)
        loss, errors, logged = self._loss(batch, action, output, following)
        norm = self._parts["q"].step(loss)
        outcome = {"total_loss": loss.detach(), **logged}
        if self._cfg.learn.grad_clip_norm is not None:
            outcome["grad_norm"] = norm
        if "weight" in batch or self._cfg.priority:
            outcome["priority"] = errors
        return outcome

    @torch.no_grad()
    def _following(self, batch: Mapping[str, Any], target: Inputs, choice: Inputs) -> torch.Tensor:
        """Return ``[B, …]``: what the target network says about the best next action.

        The best is the one with the highest value among the allowed ones: by the target network
        itself, or by the online network (van Hasselt et al., "Deep RL with Double Q-learning",
        2016, equation 4).
        """
        next_obs = batch["next_obs"]
        if self._cfg.learn.double:
            with self._evaluating():
                judge = self._model(next_obs, **choice)["logit"]
            output = self._parts["q"].target(next_obs, **target)
        else:
            output = self._parts["q"].target(next_obs, **target)
            judge = output["logit"]
        best = _best(judge, self._mask_of(next_obs, batch.get("next_action_mask")))
        return self._of_actions(output, best)

    def _values_of(self, output: Any, rows: Sequence[int | str]) -> torch.Tensor:
        """Return the action values of a network's output, ``[…, A]``, for rows ``[…]``."""
        if (type(output) is not dict and not isinstance(output, Mapping)) or "logit" not in output:
            raise PolicyOutputError(
                f"the model returned {output!r:.100}; it must return a dictionary with the key "
                '"logit", the values of all actions'
            )
        return with_rows(output["logit"], (*rows, "n_actions"), what="logit")

    def _of_actions(self, output: dict[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
        """Return ``[B, …]``: the part of the output that is learned that belongs to actions."""
        return taken_rows(output[self.learned], action)

    @to_be_written
    def _loss(
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

    def _monitor_vars_learn(self) -> list[str]:
        return ["cur_lr", "total_loss", "q_value", "target_q_value"]

    def _forward_collect_batch(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        eps: float = 0.0,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # Exploration draws on the CPU, so a run draws the same numbers with and without a GPU.
        inputs = self._draw_inputs("act", len(env_id), self._generator)
        logit = self._values_of(call(self._model, obs, **inputs), (len(env_id),))
        mask = self._mask_of(obs, action_mask)
        if self._on_gpu:
            logit, mask = logit.cpu(), None if mask is None else mask.cpu()
        action = epsilon_greedy(logit, eps, generator=self._generator, mask=mask)
        return {"action": self._codec.to_env(action), "logit": logit}

    def _forward_eval_batch(
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        logit = self._values_of(self._model(obs), (len(env_id),))
        best = _best(logit, self._mask_of(obs, action_mask))
        return {"action": self._codec.to_env(best)}

    def _get_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        if "envstep" not in command_info:
            raise ConfigError(
                "get_setting_collect needs the key envstep, the env steps collected so far; "
                f"command_info has {', '.join(map(str, command_info)) or 'no keys'}"
            )
        counters = Counters(command_info["envstep"], command_info.get("train_iter"))
        return {"eps": self._eps.at(counters)}


def _best(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return ``[…]``, the actions of the highest values ``[…, A]`` that a mask allows."""
    return mask_logit(q, mask).argmax(-1)
