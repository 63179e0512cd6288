"""Learned rewards, in place of the environment's or added to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dmiddleware.data import as_tree
from dmiddleware.errors import StructureError
from dmiddleware.pipeline import ChainView, OnlineRLContext, Role
from dmiddleware.policy import rank_and_world_size
from dmiddleware.reward import IntrinsicCritic, RewardModel
from middleware.support.checks import check_instance

__all__ = ["IntrinsicAdvantage", "RewardLearner"]


class RewardLearner:
    """Train a reward model on collected rows, and write its rewards into them.

    Use it after the collector, before advantages are estimated or rows are pushed into a buffer. In
    a run of several processes, the learner trains and rewards.

    The column ``reward`` becomes ``weight`` times the model's reward plus ``env_weight`` times the
    environment's, whose mean is logged as ``reward/env``. The model's reward is also kept as the
    column ``learned_reward``. Evaluations and the returns of episodes are those of the environment.

    Args:
        model: the reward model.
        weight: factor of the model's rewards.
        env_weight: factor of the environment's rewards; 0 replaces them.

    Reads:
        ctx.trajectories: a batch ``[T, …]`` or ``[T, E, …]``.

    Writes:
        ctx.trajectories: with other rewards, and the column ``learned_reward`` float32.

    Raises:
        ConfigError: if ``model`` is not a reward model.
        NonFiniteLoss: from the model.
    """

    roles = (Role.LEARNER,)
    reads = ("trajectories",)
    writes = ("trajectories",)

    def __init__(self, model: RewardModel, *, weight: float = 1.0, env_weight: float = 0.0) -> None:
        hint = "build one first, for example a dmiddleware.reward.GAIL"
        self._model = check_instance(
            model,
            RewardModel,  # type: ignore[type-abstract]  # any subclass
            user="RewardLearner",
            hint=hint,
        )
        self._weight, self._env_weight = weight, env_weight
        self.snapshot_parts = {"reward_model": model}
        self.settings: dict[str, Any] = {
            "model": type(model).__name__,
            **model.settings,
            "weight": weight,
            "env_weight": env_weight,
        }

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject several ranks, each of which would learn a reward of its own."""
        return _one_learner("reward")

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Learn and reward."""
        rows = ctx.trajectories
        losses: Mapping[str, float] = {}
        if self._model.learns_first:
            losses = self._model.update(rows)
        learned = self._model.reward(rows)
        if not self._model.learns_first:
            losses = self._model.update(rows)
        env_reward = rows["reward"]
        reward = self._weight * learned + self._env_weight * env_reward
        columns = {**dict(rows.items()), "reward": reward.float(), "learned_reward": learned}
        ctx.trajectories = as_tree(columns)
        ctx.log("reward/env", env_reward.float().mean().item())
        ctx.log("reward/learned", learned.mean().item())
        for name, value in losses.items():
            ctx.log(f"reward/{name}", value)


class IntrinsicAdvantage:
    """Train a critic of the learned rewards, and add their advantages to those of the environment.

    Use it after ``gae_estimator``, with a :class:`RewardLearner` of ``weight=0.0`` and
    ``env_weight=1.0`` before that: each of the two rewards then has its own critic and its own sum.

    Args:
        critic: the critic.
        weight: factor of the advantages of the learned rewards.

    Reads:
        ctx.train_data: a batch ``[T, …]`` or ``[T, E, …]`` with the columns ``adv`` and
            ``learned_reward``.

    Writes:
        ctx.train_data: with other advantages, and the columns ``learned_adv`` and
            ``learned_return`` float32.

    Raises:
        ConfigError: if ``critic`` is not a critic.
        StructureError: if there are no learned rewards, or not one for each advantage.
        NonFiniteLoss: from the critic.
    """

    roles = (Role.LEARNER,)
    reads = ("train_data",)
    writes = ("train_data",)

    def __init__(self, critic: IntrinsicCritic, *, weight: float = 1.0) -> None:
        hint = "build one first, with IntrinsicCritic.for_env(env, policy)"
        self._critic = check_instance(critic, IntrinsicCritic, user="IntrinsicAdvantage", hint=hint)
        self._weight = weight
        self.snapshot_parts = {"intrinsic_critic": critic}
        self.settings: dict[str, Any] = {**critic.settings, "weight": weight}

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject several ranks, each of which would learn a critic of its own."""
        return _one_learner("critic")

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Estimate, learn and add."""
        rows = self._critic.estimate(ctx.train_data)
        losses = self._critic.update(rows)
        adv, learned = rows["adv"], rows["learned_adv"]
        if adv.shape != learned.shape:
            raise StructureError(
                f"the advantages are {list(adv.shape)}, but those of the learned rewards "
                f"{list(learned.shape)}; several agents need a reward model of their own each"
            )
        ctx.train_data = as_tree({**dict(rows.items()), "adv": adv + self._weight * learned})
        for name, value in losses.items():
            ctx.log(f"reward/{name}", value)


def _one_learner(what: str) -> Iterable[str]:
    """Yield a problem if several ranks learn, each of which would learn its own."""
    if rank_and_world_size()[1] > 1:
        yield f"several ranks would each learn a {what} of their own; use one learner"
