"""Curricula: envs that change with the progress of the run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dmiddleware.data import check_saveable
from dmiddleware.distributed import gather_from_ranks
from dmiddleware.env import BaseEnvManager, check_env_manager
from dmiddleware.errors import ConfigError, MiddlewareError
from dmiddleware.metric_names import as_metric_name
from dmiddleware.pipeline import ChainView, RunningTask, Task
from dmiddleware.settings import Positive, Settings, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.exchange.events import curriculum_event
from middleware.exchange.rank import Ranks
from middleware.exchange.waiting import Waiting
from middleware.roles import Role

__all__ = ["Curriculum", "CurriculumRule", "CurriculumSettings"]

CurriculumRule: TypeAlias = Callable[[OnlineRLContext, dict[str, Any]], Mapping[str, Any] | None]
"""Returns the values that change, from the context and the present values; None: none."""


class CurriculumSettings(Settings):
    """The options of :class:`Curriculum`."""

    start: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The values before the first change."""
    sets: Literal["attributes", "reset_options"] = "attributes"
    """Whether the values are attributes of the envs, which change at once, or the options of their
    resets, which change with the next episode of each env."""
    name: str = "curriculum"
    """The group of its metrics. Each curriculum of a chain needs another one."""
    timeout_s: Positive = 120.0
    """How long a node waits for the first values while no learner can send them."""


class Curriculum(BaseMiddleware[OnlineRLContext], TakesSettings[CurriculumSettings]):
    """Change attributes of the envs, or the options of their resets, with the progress of the run.

    At the end of each step, a rule gets the context and a copy of the present values, and returns
    those that change. What it changes in the copy counts only if it returns it::

        def harder(ctx, now):
            if ctx.eval_value is not None and ctx.eval_value > 400:
                return {"length": now["length"] * 1.2}

        task.use(Curriculum(harder, envs, start={"length": 0.25}))

    All envs get the same values, each a copy of its own. They hold until the rule changes them:
    also in envs that are restarted, and in a run that is resumed. Numbers are logged. The position
    in the chain does not matter.

    In a run of several processes, the learner decides. Its rule sees the counters of the whole run
    and the evaluations that arrive. The other processes set the newest values before each of their
    steps, and wait for the first ones before their first step. Values must be of kinds that can be
    sent and saved: numbers, strings, arrays, tensors, and lists, tuples and dictionaries of these.

    Args:
        rule: decides. If it has a state of its own, the state is not saved; keep it in the values.
        env_managers: the envs that collect, or a list of several managers: evaluations are made in
            envs that change only if theirs is one of them.
        settings: the options, each by keyword; see :class:`CurriculumSettings`.

    Reads:
        ctx.env_step, ctx.train_iter, and whatever else the rule reads.

    Writes:
        nothing.

    Raises:
        ConfigError: if an argument has the wrong type, an option is not valid, or the envs cannot
            be changed; in a step, if the rule returns something else than a dictionary by name or
            None, or a value that cannot be saved.
        EnvCallError: if the envs do not have an attribute.
        WaitTimeout: if the first values do not arrive in time.
    """

    roles = (Role.LEARNER, Role.COLLECTOR, Role.EVALUATOR)
    reads = ("env_step", "train_iter")

    settings: CurriculumSettings

    @takes_options(CurriculumSettings)
    def __init__(
        self,
        rule: CurriculumRule,
        env_managers: BaseEnvManager | Sequence[BaseEnvManager],
        settings: CurriculumSettings,
    ) -> None:
        if not callable(rule):
            raise ConfigError(
                "Curriculum takes a function of the context and the present values, got "
                f"{rule!r:.100}"
            )
        several = [*env_managers] if isinstance(env_managers, Sequence) else [env_managers]
        for manager in several:
            check_env_manager(manager, user="Curriculum")
        self.settings = settings
        self.metric_prefix = settings.name
        self.components = {"rule": getattr(rule, "__qualname__", type(rule).__qualname__)}
        self._rule = rule
        self._values = CurriculumValues(several, settings)
        # A snapshot is restored before the set-up, in which a learner sends the values.
        self.snapshot_parts = {"values": self._values}
        self._follower: CurriculumFollower | None = None

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject envs that nothing steps, and two curricula of one name."""
        name = self.settings.name
        others = [part for part in chain.middleware if isinstance(part, Curriculum)]
        if sum(part.settings.name == name for part in others) > 1:
            yield f"the chain has another curriculum with the name {name!r}; give it name=..."
        stepped = [owned for part in chain.whole.declarations for owned in part.owns]
        if any(isinstance(owned, BaseEnvManager) for owned in stepped):
            for manager in self._values.env_managers:
                if not any(manager is owned for owned in stepped):
                    yield (
                        f"it changes the envs of a {type(manager).__name__} that nothing in the "
                        "chain steps; give it the env manager of the collector"
                    )

    def setup(self, task: Task[Any]) -> None:
        """Send the values, or subscribe to them."""
        if task.router is None:
            return
        # One of several ranks decides.
        if task.has_role(Role.LEARNER) and Ranks().leads:
            self._send(task)
        else:
            self._follower = CurriculumFollower(task, self.settings)

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Take the newest values on the way forward, or decide on the way back."""
        if self._follower is not None:
            self._values.change(self._follower.newest())
            return
        yield
        if self._values.change(self._decided(ctx)) and ctx.task.router is not None:
            self._send(ctx.task)
        for name, value in self._values.now.items():
            if isinstance(value, int | float) or getattr(value, "shape", None) == ():
                with contextlib.suppress(MiddlewareError):  # not a number
                    ctx.log(as_metric_name(f"{self.settings.name}/{name}"), value)

    def _send(self, task: RunningTask) -> None:
        # Nodes that connect later get the newest of these at once.
        event = curriculum_event(self.settings.name)
        task.emit(event, dict(self._values.now), only_remote=True)

    def _decided(self, ctx: OnlineRLContext) -> Mapping[str, Any]:
        """Return the values that the rule changes."""
        ranks = Ranks()
        decided = self._rule(ctx, copy.deepcopy(self._values.now)) if ranks.leads else None
        if not isinstance(decided, Mapping | None):
            raise ConfigError(
                "the rule of a Curriculum returns a dictionary of the values that change, or None; "
                f"it returned {decided!r:.100}"
            )
        if ranks.size > 1 and ctx.task.router is None:
            # Only rank 0 has the evaluations.
            decided = gather_from_ranks(decided)[0]
        return decided or {}


class CurriculumFollower:
    """The part of a :class:`Curriculum` in a process that does not decide.

    Args:
        task: the task, which has a router.
        settings: the options of the curriculum.
    """

    def __init__(self, task: Task[Any], settings: CurriculumSettings) -> None:
        self._name = settings.name
        self._newest: dict[str, Any] | None = None
        self._waiting = Waiting(task, timeout_s=settings.timeout_s)
        self._waiting.on(curriculum_event(settings.name), self._on_values)

    def newest(self) -> dict[str, Any]:
        """Return the newest values; wait for the first ones."""
        with self._waiting.changed:
            self._waiting.until(
                lambda: self._newest is not None,
                missing=lambda: f"the first values of the curriculum {self._name!r}",
                awaited=lambda: self._waiting.task.participants(Role.LEARNER),
            )
            assert self._newest is not None
            return self._newest

    def _on_values(self, values: dict[str, Any]) -> None:
        self._newest = values


class CurriculumValues:
    """The present values of a curriculum, which its envs have and snapshots save.

    Args:
        env_managers: the envs, which get the first values at once.
        settings: the first values, and what they are.

    Attributes:
        env_managers: the envs.
        now: the present values.
    """

    def __init__(
        self, env_managers: Sequence[BaseEnvManager], settings: CurriculumSettings
    ) -> None:
        self.env_managers = env_managers
        self._sets = settings.sets
        self.now: dict[str, Any] = {}
        self.change(settings.start)

    def change(self, values: Mapping[str, Any]) -> bool:
        """Set copies of values in the envs, as far as they differ from the present ones.

        Returns:
            Whether any of them differs.

        Raises:
            ConfigError: if a name is not a text, or a value cannot be copied and saved.
        """
        changed = {
            name: _copied(name, value)
            for name, value in values.items()
            if name not in self.now or not _is_same(self.now[name], value)
        }
        self.now.update(changed)
        for manager in self.env_managers if changed else ():
            if self._sets == "reset_options":
                manager.set_reset_options(_of_each_env(self.now, manager))
                continue
            for name, value in changed.items():
                # A list is one value here, not one per env.
                manager.set_attr(name, _of_each_env(value, manager))
        return bool(changed)

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {"now": dict(self.now)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.change(state["now"])


def _of_each_env(value: Any, manager: BaseEnvManager) -> list[Any]:
    """Return a copy for each env, which may change it in place."""
    return [copy.deepcopy(value) for _ in range(manager.env_num)]


def _copied(name: object, value: Any) -> Any:
    """Return a copy of a value, which its rule may change in place later.

    Raises:
        ConfigError: if it is not a value of a curriculum, naming it.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"the values of a Curriculum have texts for names, got {name!r:.100}; name an "
            "attribute of the envs, or a reset option"
        )
    try:
        copied = copy.deepcopy(value)
        check_saveable(copied)
    except (TypeError, RuntimeError) as error:  # also for a tensor of a graph, or endless nesting
        raise ConfigError(
            f"the value {name!r} of a Curriculum is {value!r:.100}, which can be neither sent nor "
            f"saved: {error}"
        ) from error
    return copied


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, of the same types and shapes; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        same_keys = one.keys() == other.keys()
        return same_keys and all(_is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, np.ndarray | torch.Tensor | np.generic):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other or (one != one and other != other))
