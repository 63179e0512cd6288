"""Deep Q-learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, Unpack

import numpy as np
import torch
from easydict import EasyDict
from torch import nn

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
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.actions import CodecPolicy
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.common_options import (
    COLLECT_OPTIONS,
    TD_COLUMNS,
    TD_OPTIONS,
    TDOptions,
)
from dmiddleware.policy.base.parts import Part, TargetRule, adam
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import (
    epsilon_greedy,
    epsilon_schedule,
    mask_logit,
    q_target,
    td_loss,
    with_nstep_returns,
)
from dmiddleware.schedule import (
    Counters,
    Schedule,
    ScheduleCounter,
    ScheduleType,
    scheduled,
)

__all__ = ["DQNOptions", "DQNPolicy"]


class DQNOptions(TDOptions, total=False):
    """The options of :meth:`DQNPolicy.for_env`."""

    learning_rate: float | Schedule
    adam_eps: float
    double: bool
    loss: Literal["huber", "mse"]
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


@POLICY_REGISTRY.register("dqn_command")
@POLICY_REGISTRY.register("dqn")
class DQNPolicy(CodecPolicy, CommandModePolicy):
    """Deep Q-learning (Mnih et al., "Human-level control through deep RL", Nature 2015).

    With the usual extensions:

    - the double target of van Hasselt et al., "Deep RL with Double Q-learning" (2016):
      ``learn.double``;
    - the dueling network of Wang et al. (2016): ``model.dueling``;
    - n-step targets (Sutton and Barto, 2nd edition, chapter 7) of ``nstep`` steps, computed by the
      buffer, or by ``get_train_sample`` where a serial or parallel collector calls it: a batch's
      column ``discount`` multiplies the bootstrap values, and must consist of powers of
      ``discount_factor`` up to ``nstep``;
    - prioritized replay (Schaul et al., 2016): a batch's column ``weight`` weights its errors, and
      the output has ``priority``, the absolute TD errors (also with ``priority=True``);
    - a target network that is copied every ``target_update_freq`` updates (Mnih,
      ``target_tau=1``), or tracks the online network (Lillicrap et al., "Continuous control with
      deep RL", 2016: ``target_update_freq=1, target_tau=0.005``): each update moves it by the
      fraction ``target_tau`` towards the online network.

    Learns from the columns ``obs``, ``action`` int64, ``reward``, ``next_obs``, ``terminated``.
    Actions that a mask forbids are neither taken nor bootstrapped from; the mask is the key
    ``action_mask`` of observations, or the columns ``action_mask`` and ``next_action_mask``.
    Collecting takes the keyword ``eps``, the probability of a random action, and returns ``action``
    and ``logit``, the action values. The command mode returns the ``eps`` of the schedule
    ``other.eps`` for the environment steps so far.

    Example:
        >>> policy = DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}})
        >>> policy.collect_mode.forward(torch.zeros(8, 4), eps=0.1)["action"].shape
        torch.Size([8])
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
            "loss": Option("huber", one_of("huber", "mse"), "loss function of the TD error"),
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
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        enable_field: Iterable[str] | None = None,
        **options: Unpack[DQNOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, enable_field=enable_field, **options)

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Reject a schedule of ε that is none."""
        super().check_config(cfg)
        epsilon_schedule(cfg.other.eps)

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "q_network", ["dmiddleware.model"]

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
        learn, part = self._cfg.learn, self._parts["q"]
        weight = batch.get("weight")
        target = self._td_target(batch)
        q = self._model(batch["obs"])["logit"]
        action = self._codec.to_raw(batch["action"])
        loss, td_error = td_loss(q, action, target, weight=weight, criterion=learn.loss)
        norm = part.step(loss)
        mean_target = target.mean()
        output = {
            "total_loss": loss.detach(),
            "q_value": mean_target - td_error.mean(),
            "target_q_value": mean_target,
        }
        if learn.grad_clip_norm is not None:
            output["grad_norm"] = norm
        if weight is not None or self._cfg.priority:
            output["priority"] = td_error.abs()
        return output

    def _monitor_vars_learn(self) -> list[str]:
        return ["cur_lr", "total_loss", "q_value", "target_q_value"]

    @torch.no_grad()
    def _td_target(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return ``[B]``: reward plus discounted value of the successor by the target network."""
        next_obs = batch["next_obs"]
        mask = self._mask_of(next_obs, batch.get("next_action_mask"))
        next_q_online = None
        if self._cfg.learn.double:
            with self._evaluating():
                next_q_online = _masked(self._model(next_obs)["logit"], mask)
        return q_target(
            _masked(self._parts["q"].target(next_obs)["logit"], mask),
            batch["reward"],
            batch["terminated"],
            discount=batch.get("discount", self._cfg.discount_factor),
            next_q_online=next_q_online,
        )

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
        q = _masked(self._model(obs)["logit"], self._mask_of(obs, action_mask))
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


def _masked(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return q if mask is None else mask_logit(q, mask)
