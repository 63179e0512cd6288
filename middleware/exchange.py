"""Exchange: what the processes of a run tell each other, so that one chain spans them all.

In a run of one process these middleware do nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from dmiddleware.errors import WaitTimeout
from dmiddleware.pipeline import Event, Role, SkipRest, Task, this_node
from dmiddleware.policy import Policy
from middleware.checks import check_positive

__all__ = ["ContextExchanger", "ModelExchanger", "PeriodicalModelExchanger", "Barrier"]

COLLECTED: Final = Event("exchange.collected", timeout_s=120.0)
CONSUMED: Final = Event("exchange.consumed", timeout_s=120.0)
EVALUATED: Final = Event("exchange.evaluated", timeout_s=120.0)
LEARNED: Final = Event("exchange.learned", delivery="latest")
MODEL: Final = Event("exchange.model", delivery="latest")
REACHED: Final = Event("exchange.barrier", timeout_s=120.0)

_LOOK_S: Final = 0.2
"""How often a wait looks whether the task was stopped meanwhile, by a signal say."""


class _Exchange:
    """What all exchanges share: a task, a mailbox, and a way to wait for mail."""

    roles: tuple[str, ...] = ()

    def __init__(self, *, timeout_s: float) -> None:
        check_positive(timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._task: Task[Any] | None = None

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to what the other processes tell."""
        self._task = task if task.router is not None else None
        if self._task is not None:
            self._subscribe(task)

    def _subscribe(self, task: Task[Any]) -> None:
        raise NotImplementedError

    def _handler(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a handler that runs ``function`` with the mailbox locked, and wakes who waits."""

        def handle(*args: Any, **kwargs: Any) -> None:
            with self._changed:
                function(*args, **kwargs)
                self._changed.notify_all()

        return handle

    def _wait(self, predicate: Callable[[], bool], awaited: Callable[[], str]) -> float:
        """Wait, with the mailbox locked, until something holds or the task is stopped.

        Returns:
            The seconds that it took.

        Raises:
            SkipRest: if the task is stopped.
            WaitTimeout: at the deadline; ``awaited()`` says what is waited for.
        """
        task = self._task
        assert task is not None
        clock, began = task.clock, task.clock.now()
        while not predicate():
            if task.finish:
                raise SkipRest
            waited = clock.now() - began
            if waited >= self._timeout_s:
                raise WaitTimeout(f"{awaited()} did not come within {self._timeout_s:g} s")
            clock.wait_for(self._changed, predicate, min(_LOOK_S, self._timeout_s - waited))
        return clock.now() - began


class ContextExchanger(_Exchange):
    """Carry what was collected to the learner, evaluations too, and the learner's counters back.

    Its place is the first in the chain. Each step of the learner takes one batch of one collector,
    so that the learner makes exactly as many updates per environment step as in one process.
    Nothing is thrown away: collectors that are ahead wait, and so does a learner without data, both
    up to ``timeout_s``. An evaluator waits until the learner has learned on.

    Args:
        max_ahead: how many batches a collector may have sent that the learner has not taken.
        timeout_s: how long to wait for the others.

    Reads:
        ctx.trajectories, ctx.episodes, ctx.env_step, ctx.env_episode: on the way back, as a
            collector.
        ctx.eval_value, ctx.eval_output: on the way back, as an evaluator.

    Writes:
        ctx.trajectories, ctx.trajectory_end_idx, ctx.episodes: as a learner that does not collect.
        ctx.eval_value, ctx.eval_output, ctx.last_eval_iter, ctx.last_eval_value: as a learner that
            does not evaluate, when an evaluation has come.
        ctx.env_step, ctx.env_episode, ctx.train_iter: as everyone counts them together.

    Raises:
        ValueError: if a number is not positive.
        WaitTimeout: if what is waited for does not come; it is named.
    """

    reads = ("env_step", "env_episode", "train_iter")

    def __init__(self, *, max_ahead: int = 2, timeout_s: float = 120.0) -> None:
        super().__init__(timeout_s=timeout_s)
        check_positive(max_ahead=max_ahead)
        self.writes: tuple[str, ...] = ("env_step", "env_episode", "train_iter")
        if this_node() is not None:
            self.writes += (
                "trajectories",
                "trajectory_end_idx",
                "episodes",
                "eval_value",
                "eval_output",
                "last_eval_iter",
                "last_eval_value",
            )
        self._max_ahead = max_ahead
        self._collected: deque[dict[str, Any]] = deque()
        self._evaluated: deque[dict[str, Any]] = deque()
        self._learned: dict[str, int] = {}
        self._sent = 0
        self._consumed = 0
        self._last_iter = -1

    def __call__(self, ctx: Any) -> Iterator[None]:
        """Exchange: what came from others on the way forward, what goes to them on the way back."""
        task = self._task
        if task is None:
            return
        learns, collects, evaluates = (
            task.has_role(role) for role in (Role.LEARNER, Role.COLLECTOR, Role.EVALUATOR)
        )
        if learns:
            blocked_s = self._begin_learner(ctx, collects=collects)
        else:
            blocked_s = self._begin_follower(ctx, collects=collects)
        ctx.log("exchange/blocked_s", blocked_s)
        env_step, env_episode = ctx.env_step, ctx.env_episode
        yield
        if learns:
            self._tell_followers(ctx, task)
            return
        if collects:
            self._send_collected(ctx, task, ctx.env_step - env_step, ctx.env_episode - env_episode)
        if evaluates and ctx.eval_value is not None:
            self._send_evaluated(ctx, task)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what is under way is the router's to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing."""

    def _subscribe(self, task: Task[Any]) -> None:
        if task.has_role(Role.LEARNER):
            task.on(COLLECTED, self._handler(self._collected.append))
            task.on(EVALUATED, self._handler(self._evaluated.append))
        else:
            task.on(LEARNED, self._handler(self._learned.update))
            task.on(CONSUMED, self._handler(self._on_consumed))

    def _on_consumed(self, node_id: int, count: int) -> None:
        task = self._task
        if task is not None and task.router is not None and task.router.node_id == node_id:
            self._consumed = max(self._consumed, count)

    # The learner ------------------------------------------------------------------------------

    def _begin_learner(self, ctx: Any, *, collects: bool) -> float:
        with self._changed:
            self._take_evaluated(ctx)
            if collects:
                return 0.0
            blocked_s = self._wait(lambda: bool(self._collected), lambda: "collected data")
            mail = self._collected.popleft()
        for name in ("trajectories", "trajectory_end_idx", "episodes"):
            setattr(ctx, name, mail[name])
        ctx.env_step += mail["env_step"]
        ctx.env_episode += mail["env_episode"]
        for name, value in mail["logged"].items():
            ctx.log(name, value)
        ctx.task.emit(CONSUMED, mail["node_id"], mail["number"], only_remote=True)
        return blocked_s

    def _take_evaluated(self, ctx: Any) -> None:
        if self._evaluated:
            mail = self._evaluated.popleft()
            ctx.eval_value = ctx.last_eval_value = mail["eval_value"]
            ctx.eval_output = mail["eval_output"]
            ctx.last_eval_iter = mail["last_eval_iter"]

    def _tell_followers(self, ctx: Any, task: Task[Any]) -> None:
        counters = {name: getattr(ctx, name) for name in ("train_iter", "env_step", "env_episode")}
        task.emit(LEARNED, counters, only_remote=True)

    # The others -------------------------------------------------------------------------------

    def _begin_follower(self, ctx: Any, *, collects: bool) -> float:
        with self._changed:
            if collects:
                blocked_s = self._wait(self._has_room, self._awaited)
            else:
                blocked_s = self._wait(self._has_learned_on, lambda: "a newer policy")
            learned = dict(self._learned)
        self._last_iter = learned.get("train_iter", self._last_iter)
        # This process's own counters miss what others collected; the learner's miss what is under
        # way: the larger is nearer.
        ctx.env_step = max(ctx.env_step, learned.get("env_step", 0))
        ctx.env_episode = max(ctx.env_episode, learned.get("env_episode", 0))
        if not collects:
            ctx.train_iter = max(ctx.train_iter, learned.get("train_iter", 0))
        return blocked_s

    def _has_room(self) -> bool:
        return self._sent - self._consumed < self._max_ahead

    def _has_learned_on(self) -> bool:
        return self._learned.get("train_iter", -1) > self._last_iter

    def _awaited(self) -> str:
        return (
            f"room at the learner (which has taken {self._consumed} of the {self._sent} batches "
            "that this collector sent)"
        )

    def _send_collected(self, ctx: Any, task: Task[Any], env_step: int, env_episode: int) -> None:
        if ctx.trajectories is None and ctx.episodes is None:
            return
        assert task.router is not None
        self._sent += 1
        mail = {
            "node_id": task.router.node_id,
            "number": self._sent,
            "trajectories": ctx.trajectories,
            "trajectory_end_idx": ctx.trajectory_end_idx,
            "episodes": ctx.episodes,
            "env_step": env_step,
            "env_episode": env_episode,
            "logged": dict(ctx.logged),
        }
        task.emit(COLLECTED, mail, only_remote=True)

    def _send_evaluated(self, ctx: Any, task: Task[Any]) -> None:
        mail = {
            "eval_value": ctx.eval_value,
            "eval_output": ctx.eval_output,
            "last_eval_iter": ctx.last_eval_iter,
        }
        task.emit(EVALUATED, mail, only_remote=True)


class ModelExchanger(_Exchange):
    """Carry the learner's weights to those who act with them.

    Its place is behind the :class:`ContextExchanger`. The learner publishes a consistent copy after
    each step in which it learned, and one before the first, with the number of updates as its
    version; the others take the newest before each of their steps, and stamp its version on what
    they collect (``collect_iter``). Before its first step a follower waits for the first weights.

    Args:
        policy: whose weights.
        every_train_iter: publish only after so many further updates.
        max_policy_lag: how many updates the weights of a follower may be behind the learner when it
            begins a step; if they are, it waits for newer ones. None: any number.
        timeout_s: how long a follower waits for weights.

    Reads:
        ctx.train_iter: the version.

    Writes:
        ctx.train_iter: as a follower, the version that the policy has now.

    Raises:
        ValueError: if a number is not positive.
        WaitTimeout: if the weights that are waited for do not come.
    """

    reads = ("train_iter",)
    writes = ("train_iter",)

    def __init__(
        self,
        policy: Policy,
        *,
        every_train_iter: int = 1,
        max_policy_lag: int | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        check_positive(every_train_iter=every_train_iter, max_policy_lag=max_policy_lag)
        if max_policy_lag is not None and max_policy_lag < every_train_iter:
            raise ValueError(
                f"max_policy_lag must be at least every_train_iter ({every_train_iter}), or "
                f"followers would wait for weights that are not published; got {max_policy_lag}"
            )
        self._policy = policy
        self._every = every_train_iter
        self._published = -1
        self._max_lag = max_policy_lag
        self._learned_iter = 0
        self._newest: tuple[int, dict[str, Any]] | None = None
        self._loaded = -1

    def __call__(self, ctx: Any) -> Iterator[None]:
        """Exchange."""
        task = self._task
        if task is None:
            return
        if not task.has_role(Role.LEARNER):
            self._take(ctx)
            return
        yield
        if ctx.train_iter - self._published >= self._every:
            self._publish(ctx, task)

    def _subscribe(self, task: Task[Any]) -> None:
        if task.has_role(Role.LEARNER):
            self._publish(task.ctx, task)
            return
        task.on(MODEL, self._handler(self._on_model))
        task.on(LEARNED, self._handler(self._on_learned))

    def _on_learned(self, counters: dict[str, int]) -> None:
        self._learned_iter = max(self._learned_iter, counters["train_iter"])

    def _is_new_enough(self) -> bool:
        if self._newest is None:
            return False
        return self._max_lag is None or self._learned_iter - self._newest[0] <= self._max_lag

    def _on_model(self, version: int, state: dict[str, Any]) -> None:
        if self._newest is None or version >= self._newest[0]:
            self._newest = version, state

    def _publish(self, ctx: Any, task: Task[Any]) -> None:
        # The state is encoded, and so copied, within emit: no update can tear it.
        self._published = ctx.train_iter
        state = self._policy.eval_mode.state_dict()
        task.emit(MODEL, ctx.train_iter, state, only_remote=True)

    def _take(self, ctx: Any) -> None:
        with self._changed:
            blocked_s = self._wait(self._is_new_enough, lambda: "new enough weights of the learner")
            assert self._newest is not None
            version, state = self._newest
        if version != self._loaded:
            self._policy.eval_mode.load_state_dict(state)
            self._loaded = version
        ctx.train_iter = version
        ctx.log("exchange/blocked_for_weights_s", blocked_s)


def PeriodicalModelExchanger(  # noqa: N802 (an established name)
    policy: Policy, *, period: int, timeout_s: float = 120.0
) -> ModelExchanger:
    """Return a :class:`ModelExchanger` that publishes every ``period`` updates."""
    return ModelExchanger(policy, every_train_iter=period, timeout_s=timeout_s)


class Barrier(_Exchange):
    """Let no process go on before all that are here have come to this place in this step.

    Args:
        name: tells several barriers of a chain apart.
        timeout_s: how long to wait.

    Raises:
        WaitTimeout: if nodes are missing at the deadline; they are named.
    """

    reads = ()
    writes = ()

    def __init__(self, name: str = "barrier", *, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self._name = name
        self._round = 0
        self._reached: dict[int, int] = {}

    def __call__(self, ctx: Any) -> None:
        """Wait for the others."""
        task = self._task
        if task is None:
            return
        router = task.router
        assert router is not None
        self._round += 1
        task.emit(REACHED, self._name, router.node_id, self._round, only_remote=True)
        with self._changed:
            self._wait(
                lambda: not self._missing(),
                lambda: f"node(s) {', '.join(map(str, self._missing()))} at barrier {self._name!r}",
            )

    def _subscribe(self, task: Task[Any]) -> None:
        task.on(REACHED, self._handler(self._on_reached))
        task.on("node.left", self._handler(lambda node_id, reason: None))

    def _on_reached(self, name: str, node_id: int, number: int) -> None:
        if name == self._name:
            self._reached[node_id] = max(number, self._reached.get(node_id, 0))

    def _missing(self) -> list[int]:
        assert self._task is not None and self._task.router is not None
        here = self._task.router.peer_ids()
        return sorted(n for n in here if self._reached.get(n, 0) < self._round)
