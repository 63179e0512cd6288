"""Learned rewards, in place of the environment's or added to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from dmiddleware.distributed import rank_and_world_size
from dmiddleware.errors import StructureError
from dmiddleware.pipeline import ChainView
from dmiddleware.reward import IntrinsicCritic, RewardModel
from dmiddleware.settings import Number, TakesSettings, takes_options
from dmiddleware.tree import Batch, with_columns
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.checks import check_instance
from middleware.support.part_name import PartSettings
from middleware.support.rows import rows_of

__all__ = [
    "IntrinsicAdvantage",
    "IntrinsicAdvantageSettings",
    "RewardLearner",
    "RewardLearnerSettings",
]


class RewardLearnerSettings(PartSettings):
    """The options of :class:`RewardLearner`."""

    weight: Number = 1.0
    """Factor of the model's rewards."""
    env_weight: Number = 0.0
    """Factor of the environment's rewards; 0 replaces them."""


class RewardLearner(BaseMiddleware[OnlineRLContext], TakesSettings[RewardLearnerSettings]):
    """Train a reward model on collected rows, and write its rewards into them.

    Use it after the collector, before advantages are estimated or rows are pushed into a buffer. In
    a run of several processes, the learner trains and rewards.

    The column ``reward`` becomes ``weight`` times the model's reward plus ``env_weight`` times the
    environment's, whose mean is logged as ``reward/env``. All agents of a team get the model's
    reward, which is also kept as the column ``learned_reward``. Evaluations and the returns of
    episodes have the environment's rewards.

    Args:
        model: the reward model.
        settings: the options, each by keyword; see :class:`RewardLearnerSettings`.

    Reads:
        ctx.trajectories: a batch ``[T, …]`` or ``[T, E, …]``.

    Writes:
        ctx.trajectories: with other rewards, and the column ``learned_reward`` float32.

    Raises:
        ConfigError: if ``model`` is not a reward model, or an option is not valid.
        NonFiniteLoss: from the model.
    """

    roles = (Role.LEARNER,)
    reads = ("trajectories",)
    writes = ("trajectories",)

    settings: RewardLearnerSettings

    @takes_options(RewardLearnerSettings)
    def __init__(self, model: RewardModel, settings: RewardLearnerSettings) -> None:
        self._model = _checked_model(model, user="RewardLearner")
        self.settings = settings
        self.components = {"model": model}
        self.snapshot_parts = {"reward_model": model}

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject several ranks, each of which would learn a reward of its own."""
        return _one_learner()

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Learn and reward."""
        rows = rows_of(ctx.trajectories)
        learned = _learn_and_reward(self._model, rows, ctx)
        env_reward = rows["reward"]
        shared = learned.unsqueeze(-1) if env_reward.dim() > learned.dim() else learned
        reward = self.settings.weight * shared + self.settings.env_weight * env_reward
        ctx.trajectories = with_columns(rows, reward=reward.float(), learned_reward=learned)
        ctx.log("reward/env", env_reward.float().mean().item())


class IntrinsicAdvantageSettings(PartSettings):
    """The options of :class:`IntrinsicAdvantage`."""

    weight: Number = 1.0
    """Factor of the advantages of the learned rewards."""


class IntrinsicAdvantage(
    BaseMiddleware[OnlineRLContext], TakesSettings[IntrinsicAdvantageSettings]
):
    """Train a reward model and its critic, and add their advantages to the environment's.

    Use it after ``GAEEstimator``. Each of the two rewards then has its own critic and its own sum,
    and the sum of the learned rewards does not end with the episode; :class:`RewardLearner` adds up
    the rewards instead.

    Args:
        model: the reward model.
        critic: its critic.
        settings: the options, each by keyword; see :class:`IntrinsicAdvantageSettings`.

    Reads:
        ctx.train_data: a batch ``[T, …]`` or ``[T, E, …]`` with the column ``adv``.

    Writes:
        ctx.train_data: with other advantages, and the columns ``learned_reward``, ``learned_adv``
            and ``learned_return`` float32.

    Raises:
        ConfigError: if ``model`` is not a reward model, ``critic`` is not a critic, or an option is
            not valid.
        StructureError: if there is not one learned reward for each advantage.
        NonFiniteLoss: from the model or the critic.
    """

    roles = (Role.LEARNER,)
    reads = ("train_data",)
    writes = ("train_data",)

    settings: IntrinsicAdvantageSettings

    @takes_options(IntrinsicAdvantageSettings)
    def __init__(
        self, model: RewardModel, critic: IntrinsicCritic, settings: IntrinsicAdvantageSettings
    ) -> None:
        self._model = _checked_model(model, user="IntrinsicAdvantage")
        hint = "build one first, with IntrinsicCritic.for_env(env, policy)"
        self._critic = check_instance(critic, IntrinsicCritic, user="IntrinsicAdvantage", hint=hint)
        self.settings = settings
        self.components = {"model": model, "critic": critic}
        self.snapshot_parts = {"reward_model": model, "intrinsic_critic": critic}

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject several ranks, each of which would learn a reward of its own."""
        return _one_learner()

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Learn, estimate and add."""
        rows = rows_of(ctx.train_data, name="ctx.train_data")
        learned = _learn_and_reward(self._model, rows, ctx)
        rows = self._critic.estimate(with_columns(rows, learned_reward=learned))
        _log_losses(ctx, self._critic.update(rows))
        adv, learned_adv = rows["adv"], rows["learned_adv"]
        if adv.shape != learned_adv.shape:
            raise StructureError(
                f"the advantages are {list(adv.shape)}, but those of the learned rewards "
                f"{list(learned_adv.shape)}; a reward model has one reward for all agents"
            )
        ctx.train_data = with_columns(rows, adv=adv + self.settings.weight * learned_adv)


def _checked_model(model: RewardModel, *, user: str) -> RewardModel:
    hint = "build one first, for example a dmiddleware.reward.GAIL"
    return check_instance(
        model,
        RewardModel,  # type: ignore[type-abstract]  # any subclass
        user=user,
        hint=hint,
    )


def _learn_and_reward(model: RewardModel, rows: Batch, ctx: OnlineRLContext) -> torch.Tensor:
    """Return the model's rewards of the rows, which it also learns from."""
    losses: Mapping[str, float] = {}
    if model.learns_first:
        losses = model.update(rows)
    learned = model.reward(rows)
    if not model.learns_first:
        losses = model.update(rows)
    ctx.log("reward/learned", learned.mean().item())
    _log_losses(ctx, losses)
    return learned


def _log_losses(ctx: OnlineRLContext, losses: Mapping[str, float]) -> None:
    for name, value in losses.items():
        ctx.log(f"reward/{name}", value)


def _one_learner() -> Iterable[str]:
    """Yield a problem if several ranks learn."""
    if rank_and_world_size()[1] > 1:
        yield "several ranks would each learn a reward of their own; use one learner"
