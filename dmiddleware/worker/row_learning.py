"""Learning from single rows in a run in the classic shape: from a replay buffer, or directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from easydict import EasyDict

from dmiddleware.classic.modes import spec_attribute
from dmiddleware.classic.reward_models import HerRewardModel
from dmiddleware.errors import ConfigError
from dmiddleware.policy import is_update, update_outputs
from dmiddleware.seeding import derive_seed
from dmiddleware.worker.collector import ISerialCollector
from dmiddleware.worker.learned_rewards import EnvRewards
from dmiddleware.worker.learner import BaseLearner

__all__ = ["DirectLearning", "EpisodeReplay", "Learning", "RowReplay"]

Transition = dict[str, Any]


class Learning(Protocol):
    """Learns from what a collector collects."""

    def begin(self, collector: ISerialCollector[Any, Any]) -> None:
        """Prepare, before the first collection."""

    def from_collected(self, data: list[Any], envstep: int) -> None:
        """Update the policy."""


class RowReplay:
    """Learns from samples of a replay buffer.

    Args:
        cfg: the whole config.
        learner: trains the policy.
        buffer: a classic replay buffer.
        rewards: the rewards that the policy learns from.
    """

    def __init__(
        self, cfg: EasyDict, learner: BaseLearner, buffer: Any, rewards: EnvRewards
    ) -> None:
        self._learner = learner
        self._rewards = rewards
        self._buffer = buffer
        self._batch_size: Any = spec_attribute(learner.policy.spec, "batch_size")
        self._n_updates = int(cfg.policy.learn.get("update_per_collect", 1))
        self._n_random = int(cfg.policy.get("random_collect_size", 0))
        self._is_prioritized = bool(cfg.policy.get("priority", False))

    def begin(self, collector: ISerialCollector[Any, Any]) -> None:
        """Fill the buffer with what random actions collect."""
        if self._n_random > 0:
            self.push(collector.collect(self._n_random, random_collect=True), collector.envstep)

    def from_collected(self, data: list[Any], envstep: int) -> None:
        """Push the data, and update the policy."""
        self.push(data, envstep)
        for _ in range(self._n_updates):
            samples = self.draw()
            if samples is None:  # there is not enough data yet; the buffer logs it
                return
            self._learner.train(self._rewards.of(samples), envstep)
            if self._is_prioritized:
                self.prioritize(self._learner.priority_info)

    def push(self, data: list[Any], envstep: int) -> None:
        """Store what was collected."""
        self._buffer.push(data, cur_collector_envstep=envstep)

    def draw(self) -> list[Transition] | None:
        """Return what an update learns from; None: there is not enough yet."""
        samples: list[Transition] | None = self._buffer.sample(
            self._batch_size, self._learner.train_iter
        )
        return samples

    def prioritize(self, info: Mapping[str, Any]) -> None:
        """Set the priorities of what the last update has learned from."""
        self._buffer.update(info)


class EpisodeReplay(RowReplay):
    """Learns from single steps of a buffer of whole episodes.

    With ``policy.other.her``, an update learns from ``episode_size`` episodes whose goals are those
    that they reached later; see :class:`~dmiddleware.classic.reward_models.HerRewardModel`.

    Args:
        cfg: the whole config.
        learner: trains the policy.
        buffer: a buffer of episodes.
        rewards: the rewards that the policy learns from.

    Raises:
        ConfigError: if goals are to be relabeled for an algorithm with n-step returns; from
            :meth:`push`, if they are to be, but the collector does not return episodes.
    """

    def __init__(
        self, cfg: EasyDict, learner: BaseLearner, buffer: Any, rewards: EnvRewards
    ) -> None:
        super().__init__(cfg, learner, buffer, rewards)
        options = cfg.policy.other.get("her")
        self._hindsight = None if not options else HerRewardModel(options)
        n_step = learner.policy.spec.n_step
        if self._hindsight is not None and n_step != 1:
            raise ConfigError(
                f"other.her gives new goals to single steps, but nstep is {n_step}; set it to 1"
            )

    def push(self, data: list[Any], envstep: int) -> None:
        """Store episodes, or samples as episodes of one step each."""
        episodes = [row if isinstance(row, list) else [row] for row in data]
        if self._hindsight is not None and not all(isinstance(row, list) for row in data):
            raise ConfigError(
                "other.her takes goals from whole episodes, but the collector returns samples; set "
                "collector.type to 'episode', and leave out get_train_sample"
            )
        super().push(episodes, envstep)

    def draw(self) -> list[Transition] | None:
        """Return what an update learns from; None: there is not enough yet."""
        if self._hindsight is None:
            steps = self._buffer.sample_steps(self._batch_size, 1, self._learner.train_iter)
            return None if steps is None else [row for (row,) in steps]
        n_episodes = self._hindsight.episode_size or self._batch_size
        episodes = self._buffer.sample(n_episodes, self._learner.train_iter)
        if episodes is None:
            return None
        return [
            {**row, "reward": row["reward"].reshape(())}
            for episode in episodes
            for relabeled in self._hindsight.estimate(episode)
            for row in relabeled
        ]


class DirectLearning:
    """Learns once from all that was collected.

    An on-policy algorithm written for batches takes one minibatch at a time,
    ``learn.epoch_per_collect`` times over, and an off-policy one all samples,
    ``learn.update_per_collect`` times. A policy that acts per env, or makes its own minibatches,
    takes all in one forward.

    Args:
        cfg: the whole config.
        learner: trains the policy.
        rewards: the rewards that the policy learns from.
        is_whole: whether the policy takes all samples in one forward.
    """

    def __init__(
        self, cfg: EasyDict, learner: BaseLearner, rewards: EnvRewards, *, is_whole: bool
    ) -> None:
        self._learner = learner
        self._rewards = rewards
        self._batch_size: Any = spec_attribute(learner.policy.spec, "batch_size")
        self._n_epochs = int(cfg.policy.learn.get("epoch_per_collect", 1))
        self._n_whole = 0  # updates from all samples; 0: from minibatches
        if is_whole or learner.policy.spec.minibatch_unit == "batch":
            self._n_whole = 1
        elif not learner.policy.spec.on_policy:
            self._n_whole = int(cfg.policy.learn.get("update_per_collect", 1))
        self._generator = torch.Generator().manual_seed(derive_seed(cfg.env.seed, "minibatches"))

    def begin(self, collector: ISerialCollector[Any, Any]) -> None:
        """Do nothing: an on-policy algorithm cannot learn from random actions."""

    def from_collected(self, data: list[Any], envstep: int) -> None:
        """Update the policy."""
        data = self._rewards.of(data)
        if self._n_whole:
            for _ in range(self._n_whole):
                self._learner.train(data, envstep)
            return
        for _ in range(self._n_epochs):
            order = torch.randperm(len(data), generator=self._generator)
            for rows in order.tensor_split(max(1, len(data) // self._batch_size)):
                answer = self._learner.train([data[row] for row in rows.tolist()], envstep)
                if not all(map(is_update, update_outputs(answer))):
                    return
