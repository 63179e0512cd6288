"""How often an env may fail before the run stops."""

from __future__ import annotations

import logging

from dmiddleware.errors import ConfigError, EnvCrashed, EnvError, EnvTimeout

__all__ = ["FailureBudget"]

logger = logging.getLogger(__name__)


class FailureBudget:
    """Counts each env's failures in a row.

    An env may fail ``max_retry`` times in a row; an episode that it ends by itself sets its count
    back to zero. So an env that crashes now and then is restarted for ever, and one that no longer
    gets through an episode stops the run.

    Args:
        env_num: the number of envs.
        max_retry: restarts in a row that one env is allowed; 0 makes its first failure final.
        kind: what an env is called in messages.

    Raises:
        ConfigError: if ``max_retry`` is negative.
    """

    def __init__(self, env_num: int, *, max_retry: int, kind: str = "env") -> None:
        is_int = isinstance(max_retry, int) and not isinstance(max_retry, bool)
        if not is_int or max_retry < 0:
            raise ConfigError(f"max_retry must be an integer of at least 0, got {max_retry!r}")
        self._kind = kind
        self._max_retry = max_retry
        self._in_a_row = [0] * env_num
        self._restarts = [0] * env_num

    @property
    def restarts(self) -> int:
        """How often envs were restarted, summed over all envs."""
        return sum(self._restarts)

    def restarts_of(self, env_id: int) -> int:
        """How often one env was restarted."""
        return self._restarts[env_id]

    def record_failure(self, env_id: int, doing: str, error: EnvError, details: str) -> None:
        """Count a failure, and log it as one that leads to a restart.

        Args:
            env_id: the env that failed.
            doing: what it was asked to do ("step", "reset", "start").
            error: what happened, in one line.
            details: the original traceback.

        Raises:
            EnvCrashed: if the env has used up its retries.
            EnvTimeout: likewise, if its last failure was that it did not answer.
        """
        self._in_a_row[env_id] += 1
        failures = self._in_a_row[env_id]
        if failures > self._max_retry:
            kind = EnvTimeout if isinstance(error, EnvTimeout) else EnvCrashed
            raise kind(
                f"{self._kind} {env_id} failed {failures} time(s) in a row, max_retry is "
                f"{self._max_retry}; the last time, in {doing}, it {error}.\n{details}"
            )
        self._restarts[env_id] += 1
        logger.warning(
            "%s %d failed in %s: it %s; it is restarted (failure %d in a row, %d allowed).\n%s",
            self._kind,
            env_id,
            doing,
            error,
            failures,
            self._max_retry,
            details,
        )

    def record_episode(self, env_id: int) -> None:
        """Note that an env ended an episode by itself: its failures in a row begin anew."""
        self._in_a_row[env_id] = 0
