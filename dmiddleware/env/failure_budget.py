"""The limit on how often an env may fail before the run stops."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from dmiddleware.code_mistakes import is_code_mistake
from dmiddleware.env.contract import contract_break
from dmiddleware.errors import EnvCrashed, EnvError, EnvProtocolError, EnvTimeout
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Whole, checked

__all__ = ["FailureBudget", "other_seeds"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOG_EVERY_S: Final = 60.0


class FailureBudget:
    """Counts each env's failures in a row.

    An env may fail ``max_retry`` times in a row; the count starts again when it finishes an
    episode. An env that crashes occasionally is thus always restarted, and an env that no longer
    finishes any episode stops the run. So does a mistake in its code, such as a missing module,
    that the restarted env repeats.

    The first failure of a kind is logged with its traceback; after it, one line a minute says how
    many there were.

    Args:
        env_num: the number of envs.
        max_retry: how often one env may be restarted in a row; with 0 its first failure is final.
        kind: the word for an env in messages.
        now: the clock, in seconds.

    Attributes:
        in_a_row: the failures of each env since it last finished an episode. The code that steps
            the envs sets it to 0 at the end of an episode.
        restarts: how often envs were restarted, summed over all envs.

    Raises:
        ConfigError: if ``max_retry`` is not an integer of at least 0.
    """

    def __init__(
        self,
        env_num: int,
        *,
        max_retry: int,
        kind: str = "env",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind, self._now = kind, now
        self._logged: set[tuple[type, str]] = set()
        self._logged_at, self._n_unlogged = -_LOG_EVERY_S, 0
        self._max_retry: int = checked("max_retry", max_retry, Whole)
        self.in_a_row = [0] * env_num
        self._last = [""] * env_num
        self._restarts = [0] * env_num
        self.restarts = 0

    def restarts_of(self, env_id: int) -> int:
        """How often one env was restarted."""
        return self._restarts[env_id]

    def record_failure(
        self,
        env_id: int,
        doing: str,
        error: EnvError,
        details: str,
        cause: Exception | None = None,
    ) -> None:
        """Count and log a failure after which the env is restarted.

        Args:
            env_id: the env that failed.
            doing: the operation that failed ("step", "reset", "start").
            error: the failure in one line, in words that follow "it …".
            details: the traceback of the env.
            cause: what the env raised, if it did.

        Raises:
            EnvCrashed: if the env has used up its retries, or repeats a mistake in its code.
            EnvTimeout: if it has used up its retries and its last failure was a timeout.
        """
        self.in_a_row[env_id] += 1
        failures = self.in_a_row[env_id]
        # The restart after the last failure has not cured it.
        is_repeated = failures > 1 and is_code_mistake(cause) and self._last[env_id] == str(error)
        self._last[env_id] = str(error)
        if is_repeated or failures > self._max_retry:
            kind = EnvTimeout if isinstance(error, EnvTimeout) else EnvCrashed
            limit = (
                "a restart does not cure a mistake in its code"
                if is_repeated
                else f"max_retry is {self._max_retry}"
            )
            raise kind(
                f"{self._kind} {env_id} failed {failures} time(s) in a row, and {limit}; "
                f"the last time, in {doing}, it {error}.\n{details}"
            ) from (None if cause is None else cause.with_traceback(None))  # details has it
        self._restarts[env_id] += 1
        self.restarts += 1
        self._log(env_id, doing, error, details)

    def _log(self, env_id: int, doing: str, error: EnvError, details: str) -> None:
        """Log a failure, unless one of its kind was logged in the last minute."""
        of_kind = type(error), str(error).partition(":")[0]
        is_new = of_kind not in self._logged
        if not is_new and self._now() - self._logged_at < _LOG_EVERY_S:
            self._n_unlogged += 1
            return
        logger.warning(
            "%s %d failed in %s: it %s; restarting it (failure %d in a row, %d allowed)%s%s",
            self._kind,
            env_id,
            doing,
            error,
            self.in_a_row[env_id],
            self._max_retry,
            f"; {self.restarts} restarts so far, {self._n_unlogged + 1} of them since the last line"
            if self._n_unlogged
            else "",
            f".\n{details}" if is_new else "",
        )
        self._logged.add(of_kind)
        self._logged_at, self._n_unlogged = self._now(), 0

    def record_exception(self, env_id: int, doing: str, error: Exception) -> None:
        """Count and log an exception that an env has raised; see :meth:`record_failure`."""
        summary = EnvCrashed(f"raised {type(error).__name__}: {error}")
        details = "".join(traceback.format_exception(error))
        self.record_failure(env_id, doing, summary, details, error)

    def restart(self, env_id: int, doing: str, error: Exception, renew: Callable[[], T]) -> T:
        """Restart an env that has raised, as often as its retries allow.

        Args:
            env_id: the env.
            doing: the operation in which it raised.
            error: what it raised.
            renew: replaces the env by a new one and resets it.

        Returns:
            What ``renew`` returned.

        Raises:
            EnvCrashed: if the env has used up its retries, or repeats a mistake in its code.
            EnvProtocolError: if the env does not follow the interface; it would be raised again.
        """
        while True:
            broken = contract_break(f"{self._kind} {env_id}", doing, error)
            if broken is not None:
                raise broken from error
            self.record_exception(env_id, doing, error)
            try:
                return renew()
            except EnvProtocolError:
                raise
            except Exception as another:  # noqa: BLE001 - an env may raise anything
                error, doing = another, "restart"

    def clear(self) -> None:
        """Forget all failures."""
        self.in_a_row = [0] * len(self.in_a_row)
        self._restarts = [0] * len(self._restarts)
        self.restarts = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"in_a_row": list(self.in_a_row), "restarts": list(self._restarts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, unless it counts other units.

        A vector env is one unit, and the same envs one by one are several.
        """
        if len(state["restarts"]) == len(self._restarts):
            self.in_a_row, self._restarts = list(state["in_a_row"]), list(state["restarts"])
            self.restarts = sum(self._restarts)


def other_seeds(
    seeds: Sequence[int] | None,
    env_ids: Iterable[int],
    why: Literal["restart", "resume"],
    count: int,
) -> dict[int, int]:
    """Return seeds of envs that must not repeat the episodes they had; none if they are unseeded.

    Args:
        seeds: the first seed of every env; None: they are unseeded.
        env_ids: the envs that start again.
        why: an env failed, and would fail again; or a run is resumed that could not save them.
        count: how often that has happened, so that each time has seeds of its own.
    """
    if seeds is None:
        return {}
    return {env_id: derive_seed(seeds[env_id], why, count) for env_id in env_ids}
