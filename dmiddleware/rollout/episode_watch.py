"""A watch over episodes that do not end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from dmiddleware.errors import EnvTimeout

__all__ = ["EpisodeWatch"]

logger = logging.getLogger(__name__)

_FIRST_WARNING: Final = 5_000
_LIMIT: Final = 1_000_000
_CHECK_EVERY: Final = 500


class HasEpisodeLengths(Protocol):
    """What plays episodes, such as an env manager."""

    @property
    def episode_lengths(self) -> Sequence[int]:
        """The steps that each current episode has had so far."""
        ...


class EpisodeWatch:
    """Warns of an episode that does not end, and gives it up at last.

    In an env without a time limit, or with a policy that stands still, an evaluation would wait
    forever without a word. The first warning comes after 5,000 steps of an episode, further ones
    each time that its length has doubled, and after 1,000,000 steps an error.

    Args:
        env_manager: the envs or games that are played.
        user: the caller's name, for messages.
    """

    def __init__(self, env_manager: HasEpisodeLengths, *, user: str) -> None:
        self._manager = env_manager
        self._user = user
        self._n_steps = 0
        self._warn_at = _FIRST_WARNING

    def check(self, playing: Sequence[int]) -> None:
        """Look at the episodes of some envs; call it after every step.

        Args:
            playing: the envs whose episodes are waited for.

        Raises:
            EnvTimeout: if an episode has had 1,000,000 steps.
        """
        self._n_steps += 1
        if self._n_steps % _CHECK_EVERY or not len(playing):
            return
        lengths = self._manager.episode_lengths
        env_id = max(playing, key=lengths.__getitem__)
        length = lengths[env_id]
        if length < self._warn_at:
            return
        problem = (
            f"{self._user} waits for the end of an episode: env {env_id} of the "
            f"{type(self._manager).__name__} has had {length:,} steps in it"
        )
        remedy = "wrap the env in gymnasium.wrappers.TimeLimit, or make_env_manager(..., wrappers="
        remedy += "[partial(TimeLimit, max_episode_steps=1000)]), if it may never end"
        if length >= _LIMIT:
            raise EnvTimeout(f"{problem}, and {_LIMIT:,} is the limit; {remedy}")
        logger.warning("%s so far; %s. The limit is %s steps", problem, remedy, f"{_LIMIT:,}")
        self._warn_at = min(2 * length, _LIMIT)
