"""Proximal policy optimisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.config import (
    Option,
    above,
    at_least,
    check_value,
    count,
    fraction,
    optional,
    positive,
    switch,
)
from dmiddleware.data.batch import Batch, Nested, Value
from dmiddleware.errors import ConfigError
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.actions import ActorOptions
from dmiddleware.policy.base.actor_critic import ActorCriticPolicy
from dmiddleware.policy.base.common_options import COLLECT_OPTIONS
from dmiddleware.policy.base.data_parallel import sum_over_ranks
from dmiddleware.policy.base.obs_normaliser import ObsNormaliser
from dmiddleware.policy.base.parts import Part, adam
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import (
    RewardNormaliser,
    RunningMeanStd,
    ppo_policy_loss,
    ppo_value_loss,
    with_advantages,
)
from dmiddleware.schedule import Schedule, scheduled

__all__ = ["PPOOptions", "PPOPolicy"]


class PPOOptions(ActorOptions, total=False):
    """The options of :meth:`PPOPolicy.for_env`."""

    discount_factor: float
    gae_lambda: float
    obs_norm: bool
    reward_norm: bool
    value_norm: bool
    norm_clip: float
    target_kl: float | None
    batch_size: int
    epoch_per_collect: int
    learning_rate: float | Schedule
    adam_eps: float
    clip_ratio: float | Schedule
    dual_clip: float | None
    value_clip: float | None
    value_weight: float
    entropy_weight: float | Schedule
    recompute_advantage: bool
    adv_norm: bool
    grad_clip_norm: float | None
    n_sample: int | None
    n_episode: int | None


@POLICY_REGISTRY.register("ppo_command")
@POLICY_REGISTRY.register("ppo")
class PPOPolicy(ActorCriticPolicy):
    """Proximal policy optimisation (Schulman et al., "PPO Algorithms", 2017), with clipping.

    The details follow Huang et al., "The 37 Implementation Details of PPO" (2022): orthogonal
    initialisation (the model's), Adam with ε = 1e-5, advantages normalised in each minibatch, a
    clipped value loss, an entropy bonus, a clipped gradient, and, as options, a learning rate that
    falls linearly, normalised observations and scaled rewards.

    One learn forward is one minibatch. Learns from the columns ``obs``, ``action`` (``raw_action``
    where there is one), ``log_prob``, ``value``, ``adv`` and ``ret``; advantages and returns come
    from ``gae_estimator``, which computes the values of successors with the attribute ``value_fn``,
    or from ``get_train_sample``, which serial and parallel collectors call.

    - Discrete, MultiDiscrete, MultiBinary, Box, Dict and Tuple action spaces are supported; see
      :class:`ActorPolicy`.
    - Collecting returns ``action``, ``log_prob``, ``value`` and what the actor returned, ``logit``,
      ``mu`` and ``sigma``. If the action has continuous parts, it also returns ``raw_action``, the
      draw whose log-density is ``log_prob``; ``action`` is within the environment's bounds.
    - Actions that a mask forbids are neither taken nor learned from; the mask is the key
      ``action_mask`` of observations or the column ``action_mask``.
    - ``obs_norm``: collecting updates the statistics; evaluating does not. Observations are stored
      unnormalised and normalised in every forward. The statistics do not change between collecting
      a batch and learning from it.
    - ``reward_norm``: rewards are divided by the running standard deviation of the discounted
      return. ``gae_estimator`` asks for it in the learner's process (:meth:`scale_rewards`), so all
      collectors share the statistics and the learner's checkpoint holds them.
    - ``value_norm``: the critic predicts returns normalised by their running mean and standard
      deviation (van Hasselt et al., "Learning Values Across Many Orders of Magnitude", 2016,
      without the correction of the last layer; Yu et al., "The Surprising Effectiveness of PPO in
      Cooperative Multi-Agent Games", 2022, section 5.1). The column ``value`` and ``value_fn`` are
      in units of the return, ``value_clip`` in units of the deviation. The statistics take the
      returns of each collected batch once, before it is learned from (:meth:`observe_returns`).
    - ``target_kl``: an output with ``kl_stop=True`` means that the policy has moved further than
      this from the policy that collected (Spinning Up; estimator ``approx_kl``). That minibatch
      made no step, and the learner should skip the remaining epochs.
    """

    config: ClassVar[dict[str, Any]] = {
        "on_policy": True,
        "discount_factor": Option(0.99, fraction, "γ, the discount of future rewards"),
        "gae_lambda": Option(0.95, fraction, "λ of generalised advantage estimation"),
        "obs_norm": Option(
            False, switch, "whether to normalise observations by running statistics"
        ),
        "reward_norm": Option(
            False, switch, "whether to divide rewards by the running standard deviation of returns"
        ),
        "value_norm": Option(
            False, switch, "whether the critic learns returns normalised by running statistics"
        ),
        "norm_clip": Option(
            10.0, positive, "largest absolute value of normalised observations and rewards"
        ),
        "target_kl": Option(
            None,
            optional(positive),
            "KL divergence at which learning stops early; None never stops",
        ),
        "learn": {
            "batch_size": Option(64, count, "rows per minibatch"),
            "epoch_per_collect": Option(10, count, "passes over each collected batch"),
            "learning_rate": Option(
                3e-4, scheduled(positive, reach=at_least(0)), "Adam's learning rate"
            ),
            "adam_eps": Option(1e-5, positive, "Adam's ε"),
            "clip_ratio": Option(0.2, scheduled(positive), "ε of the clipped objective"),
            "dual_clip": Option(
                None, optional(above(1)), "factor of dual clipping; None disables it"
            ),
            "value_clip": Option(
                None, optional(positive), "range of the clipped value loss; None does not clip"
            ),
            "value_weight": Option(0.5, at_least(0), "weight of the value loss"),
            "entropy_weight": Option(0.0, scheduled(at_least(0)), "weight of the entropy bonus"),
            "recompute_advantage": Option(
                False, switch, "whether every epoch starts with new values and advantages"
            ),
            "adv_norm": Option(True, switch, "whether to normalise advantages in each minibatch"),
            "grad_clip_norm": Option(
                0.5, optional(positive), "largest norm of the gradient; None does not clip"
            ),
        },
        "collect": COLLECT_OPTIONS,
    }
    learn_columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "log_prob",
        "value",
        "adv",
        "ret",
    )
    optional_columns: ClassVar[tuple[str, ...]] = ("raw_action", "collect_iter")

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        enable_field: Iterable[str] | None = None,
        **options: Unpack[PPOOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, enable_field=enable_field, **options)

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Reject invalid combinations."""
        super().check_config(cfg)
        check_value(
            not (cfg.multi_gpu and (cfg.obs_norm or cfg.reward_norm or cfg.value_norm)),
            "multi_gpu",
            cfg.multi_gpu,
            "False with obs_norm, reward_norm or value_norm, since the ranks would have different "
            "statistics",
        )

    def _init_common(self) -> None:
        super()._init_common()
        self._target_kl = self._cfg.target_kl
        self._obs_normaliser = self._make_obs_normaliser() if self._cfg.obs_norm else None
        self._reward_normaliser: RewardNormaliser | None = None
        if self._cfg.reward_norm:
            self._reward_normaliser = RewardNormaliser(
                discount=self._cfg.discount_factor, clip=self._cfg.norm_clip
            )

        self._return_stats: RunningMeanStd | None = None
        if self._cfg.value_norm:
            self._return_stats = RunningMeanStd(device=self._device)

    def _make_obs_normaliser(self) -> ObsNormaliser:
        obs_shape = getattr(self._model, "obs_shape", self._cfg.model.get("obs_shape"))
        if obs_shape is None:
            raise ConfigError(
                "obs_norm is True, but the shape of observations is unknown: the model "
                f"{type(self._model).__name__} has no attribute obs_shape; set model.obs_shape"
            )
        return ObsNormaliser(obs_shape, clip=self._cfg.norm_clip, device=self._device)

    @property
    def gae_lambda(self) -> float:
        """λ of generalised advantage estimation."""
        return float(self._cfg.gae_lambda)

    def observe(self, obs: Nested) -> None:
        """Add observations that another process acted on to the statistics of ``obs_norm``.

        Args:
            obs: ``[…, *obs_shape]``, a batch of one version of the policy.
        """
        if self._obs_normaliser is not None:
            self._obs_normaliser.update(self._as_obs(obs))

    def observe_returns(self, ret: torch.Tensor) -> None:
        """Add the returns ``[…]`` of a collected batch to the statistics of ``value_norm``."""
        if self._return_stats is not None:
            self._return_stats.update(ret.to(self._device))

    def _as_return(self, value: torch.Tensor) -> torch.Tensor:
        """Return the critic's output in units of the return."""
        return value if self._return_stats is None else self._return_stats.denormalise(value)

    def _as_output(self, ret: torch.Tensor) -> torch.Tensor:
        """Return returns in units of the critic's output."""
        if self._return_stats is None:
            return ret
        return self._return_stats.normalise(ret, clip=None)

    def _normalised(self, obs: Value) -> Value:
        return obs if self._obs_normaliser is None else self._obs_normaliser(obs)

    def _make_parts(self) -> dict[str, Part]:
        learn = self._cfg.learn
        optimizer = adam(self._schedules["learn.learning_rate"], eps=learn.adam_eps)
        clip = learn.grad_clip_norm
        parts = {
            **super()._make_parts(),
            "actor_critic": Part(self._model, optimizer, grad_clip_norm=clip, acts=True),
        }
        if self._obs_normaliser is not None:
            parts["obs_normaliser"] = Part(self._obs_normaliser, acts=True)
        if self._return_stats is not None:
            parts["return_stats"] = Part(self._return_stats, acts=True)
        if self._reward_normaliser is not None:
            parts["reward_normaliser"] = Part(self._reward_normaliser)
        return parts

    def _learning_output(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the outputs for a minibatch, with its leading dimensions."""
        output: dict[str, torch.Tensor] = self._model(self._normalised(batch["obs"]))
        return output

    def _forward_collect_batch(
        self, obs: Value, env_id: np.ndarray, **kwargs: Any
    ) -> dict[str, Any]:
        if self._obs_normaliser is not None:
            self._obs_normaliser.update(obs)
        return super()._forward_collect_batch(obs, env_id, **kwargs)

    def scale_rewards(self, batch: Batch) -> torch.Tensor:
        """Update ``reward_norm`` with the rewards of a collected batch, and return them scaled.

        Called once per collected batch, in the learner's process, before advantages are estimated;
        without ``reward_norm`` the rewards are returned unchanged.

        Args:
            batch: ``[T, E, …]``, or one lane ``[T, …]``, with the columns ``reward``, ``done`` and
                ``episode_id``.

        Returns:
            The rewards, float32, in the shape of ``reward``.
        """
        reward = batch["reward"]
        if self._reward_normaliser is None:
            return reward
        lanes = (len(reward), -1)
        columns = (reward, batch["done"], batch["episode_id"])
        self._reward_normaliser.update(*(column.reshape(lanes) for column in columns))
        return self._reward_normaliser.normalise(reward)

    def _get_trajectory_batch(self, batch: Batch) -> Batch:
        estimated = with_advantages(
            batch,
            reward=self.scale_rewards(batch),
            value_fn=self._value_fn,
            discount=self._cfg.discount_factor,
            gae_lambda=self._cfg.gae_lambda,
        )
        self.observe_returns(estimated["ret"])
        return estimated

    def _forward_learn(self, batch: Batch, **kwargs: Any) -> Any:
        """Learn from one minibatch; :class:`OnPolicyLearner` repeats this for several epochs."""
        if self._obs_normaliser is not None:
            self._obs_normaliser.hold()
        return super()._forward_learn(batch, **kwargs)

    def _update(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        learn = self._cfg.learn
        output = self._learning_output(batch)
        distribution = self._learned_distribution(output, batch)
        log_prob = distribution.log_prob(self._raw_action(batch))
        weight = self._row_weight(batch)
        adv = self._standardised(batch["adv"], weight) if learn.adv_norm else batch["adv"]
        policy = ppo_policy_loss(
            log_prob,
            batch["log_prob"],
            adv,
            clip_ratio=self._values["learn.clip_ratio"],
            dual_clip=learn.dual_clip,
            weight=weight,
        )
        value_loss = ppo_value_loss(
            output["value"],
            self._as_output(batch["ret"]),
            old_value=self._as_output(batch["value"]),
            clip_range=learn.value_clip,
            weight=weight,
        )
        entropy = distribution.entropy()
        entropy = (entropy if weight is None else entropy * weight).mean()
        entropy_weight = self._values["learn.entropy_weight"]
        loss = policy.loss + learn.value_weight * value_loss - entropy_weight * entropy
        stop = self._has_moved_too_far(policy.approx_kl, log_prob.numel())
        norm = self._parts["actor_critic"].step(loss, skip=stop)
        answer = {
            "total_loss": loss.detach(),
            "policy_loss": policy.loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": policy.approx_kl,
            "clip_fraction": policy.clip_fraction,
            "kl_stop": False if stop is None else stop,
        }
        if learn.grad_clip_norm is not None:
            answer["grad_norm"] = norm
        return answer

    def _monitor_vars_learn(self) -> list[str]:
        return [
            "cur_lr",
            "total_loss",
            "policy_loss",
            "value_loss",
            "entropy",
            "approx_kl",
            "clip_fraction",
        ]

    def _has_moved_too_far(self, kl: torch.Tensor, n_rows: int) -> torch.Tensor | None:
        """Return whether the policy is further than ``target_kl`` from the one that collected."""
        if self._target_kl is None:
            return None
        if self._reducer is not None:
            # All ranks stop together; otherwise some would wait for the others' gradients.
            total, count = sum_over_ranks([kl.item() * n_rows, n_rows])
            kl = kl.new_tensor(total / count)
        near: torch.Tensor = kl <= self._target_kl
        return near.logical_not()

    def _row_weight(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the weight of each row in the losses, of mean 1; None: all weigh the same."""
        return None
