"""What algorithms with a Q-network have in common; DQN, C51 and QR-DQN build on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

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
from dmiddleware.data.batch import Batch, Nested, Value
from dmiddleware.errors import ConfigError
from dmiddleware.model.layers import call
from dmiddleware.policy.base.actions import CodecPolicy
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.common_options import (
    COLLECT_OPTIONS,
    TD_COLUMNS,
    TD_OPTIONS,
    TDOptions,
)
from dmiddleware.policy.base.parts import Part, TargetRule, adam
from dmiddleware.policy.base.policy import to_be_written
from dmiddleware.rl import (
    epsilon_greedy,
    epsilon_schedule,
    mask_logit,
    taken_rows,
    with_nstep_returns,
)
from dmiddleware.schedule import (
    Counters,
    Schedule,
    ScheduleCounter,
    ScheduleType,
    scheduled,
)

__all__ = ["QLearningOptions", "QLearningPolicy", "masked"]


class QLearningOptions(TDOptions, total=False):
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


class QLearningPolicy(CodecPolicy, CommandModePolicy):
    """Q-learning with a target network, for discrete actions; a subclass writes ``_loss``.

    See :class:`DQNPolicy` for the columns, the keyword ``eps`` and the options.
    """

    explores: ClassVar[bool] = False
    action_kinds: ClassVar[tuple[str, ...]] = ("discrete",)

    config: ClassVar[dict[str, Any]] = {
        **TD_OPTIONS,
        "random_collect_size": Option(
            0,
            at_least(0, whole=True),
            "env steps with random actions before learning",
            keyword=None,
        ),
        "learn": {
            "batch_size": Option(64, count, "rows per update"),
            "update_per_collect": Option(1, count, "updates after each collection", keyword=None),
            "learning_rate": Option(
                1e-3, scheduled(positive, reach=at_least(0)), "Adam's learning rate"
            ),
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
    learn_columns: ClassVar[tuple[str, ...]] = TD_COLUMNS

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Reject a schedule of ε that is none."""
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

    def _init_learn(self) -> None:
        self._discount_checked = False

    def _init_command(self) -> None:
        self._eps = epsilon_schedule(self._cfg.other.eps)

    def _forward_learn(self, batch: Batch, **kwargs: Any) -> Any:
        if not self._discount_checked and "discount" in batch:
            self._check_discount(batch["discount"])
        return super()._forward_learn(batch, **kwargs)

    def _update(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        loss, errors, logged = self._loss(batch, self._codec.to_raw(batch["action"]))
        norm = self._parts["q"].step(loss)
        output = {"total_loss": loss.detach(), **logged}
        if self._cfg.learn.grad_clip_norm is not None:
            output["grad_norm"] = norm
        if "weight" in batch or self._cfg.priority:
            output["priority"] = errors
        return output

    @to_be_written
    def _loss(
        self, batch: Mapping[str, Any], action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, the priorities ``[B]``, and what else to log.

        Args:
            batch: the columns.
            action: ``[B]`` int64, from 0.
        """
        raise NotImplementedError

    def _monitor_vars_learn(self) -> list[str]:
        return ["cur_lr", "total_loss", "q_value", "target_q_value"]

    @torch.no_grad()
    def _next_output(self, batch: Mapping[str, Any], name: str) -> torch.Tensor:
        """Return ``[B, N]``: an output of the target network for the best next action."""
        next_obs = batch["next_obs"]
        mask = self._mask_of(next_obs, batch.get("next_action_mask"))
        output = self._parts["q"].target(next_obs)
        judge = output["logit"]
        if self._cfg.learn.double:
            with self._evaluating():
                judge = self._model(next_obs)["logit"]
        best = masked(judge, mask).argmax(-1)
        return taken_rows(output[name], best)

    def _check_discount(self, column: torch.Tensor) -> None:
        """Reject a column ``discount`` with values that are not powers of this policy's γ.

        Only the first batch is checked, since reading the column back from a GPU takes time.
        """
        gamma, nstep = self._cfg.discount_factor, int(self._cfg.nstep)
        known = torch.tensor([0.0, *(gamma**k for k in range(nstep + 1))])
        found = torch.unique(column.detach().cpu())
        wrong = found[(found.unsqueeze(1) - known).abs().amin(1) > 1e-5].tolist()
        if wrong:
            raise ConfigError(
                f"the batch's column discount contains {wrong[0]:.6g}, which is not a power of "
                f"this policy's discount_factor {gamma} up to nstep={nstep}; set both in the "
                "policy, and build the buffer with the policy's values"
            )
        self._discount_checked = True

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
        logit = call(self._model, obs)["logit"]
        mask = self._mask_of(obs, action_mask)
        if self._on_gpu:
            logit, mask = logit.cpu(), None if mask is None else mask.cpu()
        action = epsilon_greedy(logit, eps, generator=self._generator, mask=mask)
        return {"action": self._codec.to_env(action), "logit": logit}

    def _forward_eval_batch(
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        q = masked(self._model(obs)["logit"], self._mask_of(obs, action_mask))
        return {"action": self._codec.to_env(q.argmax(-1))}

    def _get_trajectory_batch(self, batch: Batch) -> Batch:
        n, discount = int(self._cfg.nstep), self._cfg.discount_factor
        return batch if n == 1 else with_nstep_returns(batch, n=n, discount=discount)

    def _get_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        if "envstep" not in command_info:
            raise ConfigError(
                "get_setting_collect needs the key envstep, the env steps collected so far; "
                f"command_info has {', '.join(map(str, command_info)) or 'no keys'}"
            )
        counters = Counters(command_info["envstep"], command_info.get("train_iter"))
        return {"eps": self._eps.at(counters)}


def masked(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return values ``[…, A]`` of which those that a mask forbids are the lowest."""
    return q if mask is None else mask_logit(q, mask)
