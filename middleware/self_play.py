"""Self-play: past versions of the policy become its opponents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dmiddleware.pipeline import ChainView, Task
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.rollout import OpponentPool
from dmiddleware.settings import Count, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.checks import check_instance
from middleware.support.interval import Interval, IntervalSettings
from middleware.support.part_name import PartSettings

__all__ = ["SelfPlay", "SelfPlaySettings"]


class SelfPlaySettings(IntervalSettings, PartSettings):
    """The options of :class:`SelfPlay`."""

    every_train_iter: Count | None = None
    """Updates from one version to the next; None if `every_env_step` is given."""
    every_env_step: Count | None = None
    """Env steps from one version to the next; None if `every_train_iter` is given."""

    def __post_init__(self) -> None:
        """Refuse settings without an interval."""
        super().__post_init__()
        self.require_interval()


class SelfPlay(BaseMiddleware[OnlineRLContext], TakesSettings[SelfPlaySettings]):
    """Add the policy to a pool of opponents, at an interval of updates or env steps.

    The envs draw their opponents from the pool: ``OpponentEnv(game, pool)``, or the pool plays for
    a team of a game: ``TeamCollector(game, {"red": policy, "blue": pool}, …)``. The pool, which
    gets its first version at once, is saved in snapshots, and games continue against the same
    opponents. Each collector of several has a pool of its own.

    Of games of teams, it logs the Elo rating of the policy, the policy's win rate against each
    version of the pool, and the version's rating.

    Args:
        policy: the policy that learns, or its collect mode.
        pool: the opponents.
        settings: the options, each by keyword; see :class:`SelfPlaySettings`.

    Reads:
        ctx.train_iter, ctx.env_step: updates and env steps so far.

    Raises:
        ConfigError: if ``policy`` or ``pool`` has the wrong type, or an option is not valid.

    Example:
        >>> from dmiddleware.env import make_env_manager
        >>> from dmiddleware.policy import DQNPolicy
        >>> def make_policy():
        ...     return DQNPolicy.for_env(make_env_manager("CartPole-v1", env_num=1))
        >>> pool = OpponentPool(make_policy, size=4)
        >>> _ = SelfPlay(make_policy(), pool, every_train_iter=1000)
        >>> len(pool)
        1
    """

    roles = (Role.COLLECTOR,)
    reads = ("train_iter",)

    settings: SelfPlaySettings

    @takes_options(SelfPlaySettings)
    def __init__(
        self, policy: HasModes | CollectMode, pool: OpponentPool, settings: SelfPlaySettings
    ) -> None:
        self._mode = as_collect_mode(policy, user="SelfPlay")
        hint = "OpponentPool(make_policy, size=8)"
        check_instance(pool, OpponentPool, user="SelfPlay", hint=hint)
        self._pool = pool
        self._interval = Interval(settings)
        self._n_logged = 0
        self.settings = settings
        if len(pool) == 0:
            pool.add(self._mode)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse an interval in a counter that the chain does not have."""
        yield from self._interval.preflight(chain)

    def setup(self, task: Task[Any]) -> None:
        """Count from here."""
        self._interval.start(task.ctx)

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Add the policy, if the interval has passed, and log how it fares."""
        if self._pool.n_recorded != self._n_logged:
            self._n_logged = self._pool.n_recorded
            ctx.log("self_play/elo", self._pool.elo)
            for number, (win_rate, elo) in self._pool.ratings.items():
                ctx.log(f"self_play/version{number}_win_rate", win_rate)
                ctx.log(f"self_play/version{number}_elo", elo)
        if self._interval.is_due(ctx):
            self._pool.add(self._mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the opponents, and the state of the interval."""
        return {"pool": self._pool.state_dict(), "interval": self._interval.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._pool.load_state_dict(state["pool"])
        self._interval.load_state_dict(state["interval"])
