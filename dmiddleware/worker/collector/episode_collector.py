"""A serial collector that returns whole episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from dmiddleware.classic.config import Option, switch
from dmiddleware.errors import ConfigError
from dmiddleware.worker.collector.serial_collector import (
    SERIAL_COLLECTOR_REGISTRY,
    RolloutSerialCollector,
    Transition,
)
from dmiddleware.worker.collector.transitions import split_rows, to_tensor_transitions

__all__ = ["EpisodeSerialCollector"]


_REWARD_SHAPING = "reward_shaping"
"""The name of a policy's method that changes the rewards of an episode."""


@SERIAL_COLLECTOR_REGISTRY.register("episode")
class EpisodeSerialCollector(RolloutSerialCollector):
    """Collects whole episodes, without favoring short ones.

    Args:
        cfg: see :class:`ISerialCollector`; with ``get_train_sample=True`` the policy turns each
            episode into training samples. With ``reward_shaping=True`` the policy's method
            ``reward_shaping(transitions)`` is called with each finished episode first; it changes
            the transitions, or returns others.
        env: an env manager.
        policy: a policy, or its collect mode.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: distinguishes collectors in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "get_train_sample": Option(
            False, switch, "whether to return training samples instead of episodes"
        ),
        "reward_shaping": Option(
            False, switch, "whether to call the policy's reward_shaping with finished episodes"
        ),
    }

    def collect(  # type: ignore[override]
        self,
        n_episode: int | None = None,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Collect episodes: a fixed share from every env.

        Args:
            n_episode: number of episodes; None takes the policy's ``n_episode``.
            train_iter: the policy's iteration, stored in each transition as ``collect_iter``.
            policy_kwargs: passed to the policy's forward.

        Returns:
            Episodes, each a list of transitions; with ``get_train_sample=True`` the samples of all
            episodes in one list.

        Raises:
            ConfigError: if ``n_episode`` is not set or not positive.
            PolicyOutputError: if the policy returns something other than its interface says.
        """
        target = self._target(n_episode, "n_episode", self.policy)
        core = self._core()
        shape = self._reward_shaping()
        began, before = time.perf_counter(), (core.env_step, core.env_episode)
        episodes = [
            shape(
                self._finished(to_tensor_transitions(split_rows(batch), not self._cfg.deepcopy_obs))
            )
            for batch in core.collect_episodes(
                target, train_iter=train_iter, policy_kwargs=policy_kwargs
            )
        ]
        data: list[Any] = episodes
        if self._cfg.get_train_sample:
            samples: list[Transition] = []
            for episode in episodes:
                samples += self.policy.get_train_sample(episode)
            data = samples
        n_samples = len(data) if self._cfg.get_train_sample else sum(map(len, episodes))
        self._count_since(before, began, n_samples, core.episode_returns)
        self._log(train_iter, {})
        return data

    def _reward_shaping(self) -> Callable[[list[Transition]], list[Transition]]:
        """Return what is done with a finished episode.

        Raises:
            ConfigError: if rewards are to be shaped, and the policy does not say how.
        """
        if not self._cfg.reward_shaping:
            return lambda episode: episode
        try:
            shape = self.policy.get_attribute(_REWARD_SHAPING)
        except (AttributeError, KeyError, NotImplementedError):
            raise ConfigError(
                "reward_shaping is True, but the policy has no method reward_shaping(transitions); "
                "write one that changes the rewards of a finished episode, or set it to False"
            ) from None

        def shaped(episode: list[Transition]) -> list[Transition]:
            changed: list[Transition] | None = shape(episode)
            return episode if changed is None else changed

        return shaped
