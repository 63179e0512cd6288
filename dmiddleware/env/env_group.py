"""What all managers keep of their envs: seeds, failures, and what a program has set in them."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeGuard

import numpy as np

from dmiddleware.env.env_access import Access, EnvOverrides, options_per_env
from dmiddleware.env.env_state import MissingObjectError
from dmiddleware.env.failure_budget import FailureBudget, other_seeds
from dmiddleware.errors import ConfigError, EnvStateError
from dmiddleware.process.closing import Closing
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Count, checked

__all__ = ["EnvGroup", "env_seeds", "is_int"]

logger = logging.getLogger(__name__)


class EnvGroup(Closing, ABC):
    """Several envs of one kind, or games of several players.

    A new group is closed. :meth:`launch`, or entering a ``with`` block, makes the envs and resets
    them; :meth:`close`, or leaving the block, closes them, and the group can be launched again.

    Attributes:
        env_num: the number of envs, ``E``.
        failures: counts how often envs failed, and were restarted, since launch.
        dropped_steps: the env steps since launch that belonged to episodes that a failure cut off.
        revision: a number that grows whenever the envs are launched, reset, stepped or restored. A
            collector compares it with the value after its own last step, to notice that something
            else has used the envs in between.

    Args:
        env_num: the number of envs, ``E``.
        seed: as in :meth:`seed`; None leaves the envs unseeded.
        max_retry: how often one env may be restarted in a row.

    Raises:
        ConfigError: if ``env_num`` is not a positive integer, ``seed`` not integers, or
            ``max_retry`` not an integer of at least 0.
    """

    _kind: ClassVar[str] = "env"
    """The word for an env in messages."""

    def __init__(
        self, env_num: int, *, seed: int | Sequence[int] | None = None, max_retry: int = 0
    ) -> None:
        self.env_num: int = checked("env_num", env_num, Count)
        self._open = False
        self.revision = 0
        self.dropped_steps = 0
        self.failures = FailureBudget(self.env_num, max_retry=max_retry, kind=self._kind)
        self._n_start_overs = 0
        self._seeds: list[int] | None = None
        self._fixes_seeds = False
        self._pending_seeds: dict[int, int] = {}
        self._overrides = EnvOverrides(self.env_num)
        if seed is not None:
            self.seed(seed)

    # Life

    @property
    def closed(self) -> bool:
        """Whether the envs are closed: before :meth:`launch` and after :meth:`close`."""
        return not self._open

    @property
    def restarts(self) -> int:
        """How often an env failed and was restarted since launch."""
        return self.failures.restarts

    @abstractmethod
    def launch(self) -> None:
        """Make the envs and reset them."""

    @abstractmethod
    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new episodes in some envs (None means all), and give up their current ones."""

    def __enter__(self) -> Self:
        if self.closed:
            self.launch()
        return self

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the envs if the block raises, also on Ctrl-C: some may be in another state."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _require_open(self, doing: str) -> None:
        if not self._open:
            raise EnvStateError(
                f"{type(self).__name__}.{doing} needs launched {self._kind}s; call launch() first, "
                "or use the manager in a with block"
            )

    def _require_closed(self) -> None:
        if self._open:
            raise EnvStateError(
                f"{type(self).__name__} is launched already; close() it before launching it again"
            )

    # Seeds

    def seed(self, seed: int | Sequence[int], dynamic_seed: bool = True) -> None:
        """Seed the envs and the action spaces.

        Each env is seeded once, at its next reset (which may be that of :meth:`launch`), and
        continues its random sequence from episode to episode, unless ``dynamic_seed`` is False.

        Args:
            seed: an integer, from which the seed of env ``i`` is derived as ``derive_seed(seed,
                i)`` (with several managers in a run, give each a different one, for example
                ``task.seed_for(...)``); or ``E`` integers, one seed per env.
            dynamic_seed: False seeds each env with its seed again at every reset, so that all its
                episodes start alike.

        Raises:
            ConfigError: if this is neither an integer nor ``E`` integers, or the envs reset
                themselves and ``dynamic_seed`` is False.
        """
        seeds = env_seeds(seed, self.env_num)
        self._seeds, self._fixes_seeds = seeds, not dynamic_seed
        self._seed_envs(seeds)

    def _seed_envs(self, seeds: list[int]) -> None:
        """Seed each env at its next reset."""
        self._pending_seeds = dict(enumerate(seeds))

    def _reseed(self, env_ids: Iterable[int], count: int) -> None:
        """Give envs that failed other seeds; with those they had, they would fail again.

        Args:
            env_ids: the envs.
            count: the restarts so far, so that each one has its own seeds.
        """
        self._pending_seeds |= other_seeds(self._seeds, env_ids, "restart", count)

    def _next_seed(self, env_id: int) -> int | None:
        """Return the seed of an env's next reset; None leaves it unseeded."""
        fixed = self._seeds[env_id] if self._fixes_seeds and self._seeds is not None else None
        return self._pending_seeds.pop(env_id, fixed)

    # Access to the envs

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every env with the same arguments.

        As in Gymnasium's vector envs, the method may belong to a wrapper or to the env inside, and
        the value of an attribute that cannot be called is returned. The call is not repeated when
        an env is restarted later or the run is resumed.

        Args:
            name: the method.
            *args: passed to it.
            **kwargs: passed to it.

        Returns:
            One result per env, in the order of their ids.

        Raises:
            ConfigError: for ``reset``, ``step`` and ``close``, which are the manager's; if the
                arguments cannot be sent to the processes of the envs; or if the envs cannot be
                called (:class:`~dmiddleware.env.EnvPoolManager`).
            EnvCallError: if an env has no such method, or raises. No env is restarted; the others
                may have been called.
            EnvStateError: before launch and after close, and while another thread steps the envs:
                call from the thread that steps them, not from an event handler.
            EnvCrashed: if the process of an env has died and used up its retries. With retries
                left it is restarted, and its envs begin new episodes and are called again.
        """
        return self._access_open([Access("call", name, args, kwargs)] * self.env_num)

    def get_attr(self, name: str) -> list[Any]:
        """Return an attribute of every env, or of a wrapper around it; see :meth:`call`.

        Returns:
            One value per env, in the order of their ids. Those of envs in this process are not
            copied.
        """
        return self._access_open([Access("get_attr", name)] * self.env_num)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env, or of the wrapper that has it.

        It takes effect at once, within the current episodes, and holds for the life of the manager:
        envs that are restarted, launched again or resumed get it before their first reset. Before
        launch it is only kept. Values are not copied in this process.

        Args:
            name: an attribute that the envs have once they are made.
            values: a list or tuple has one value per env; any other value is for all.

        Raises:
            ConfigError: if a list or tuple has another number of values; else as :meth:`call`.
            EnvCallError: as :meth:`call`; the other envs may have the value then.
        """
        accesses = Access.setting(name, values, self.env_num)
        if self._open:
            self._access(accesses)
        self._overrides.attributes[name] = [access.args[0] for access in accesses]

    @property
    def reset_options(self) -> list[dict[str, Any] | None]:
        """The ``options`` of each env's resets, in the order of their ids; None: none."""
        return list(self._overrides.reset_options)

    def set_reset_options(
        self, options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    ) -> None:
        """Set the ``options`` that ``env.reset`` gets from now on, also in automatic resets.

        They take effect when the next episodes begin, and hold for the life of the manager, as
        those of :meth:`set_attr` do.

        Args:
            options: one dictionary for all envs, or a list with one, or None, per env. None: resets
                have no options.

        Raises:
            ConfigError: if these are not dictionaries, cannot be sent to the processes of the envs,
                or do not reach the resets of this kind of envs.
            EnvStateError: while another thread steps the envs.
        """
        self._use_reset_options(options_per_env(options, self.env_num))

    def _access_open(self, accesses: list[Access]) -> list[Any]:
        accesses[0].check()
        self._require_open(accesses[0].kind)
        return self._access(accesses)

    def _set_attrs_again(self) -> None:
        """Set what a program has set before, in all envs."""
        for accesses in self._overrides.accesses():
            self._access(accesses)

    @abstractmethod
    def _access(self, accesses: list[Access]) -> list[Any]:
        """Do the same with every env, and return one result per env.

        Args:
            accesses: one per env; they differ only in the value to set.

        Raises:
            EnvCallError: if an env cannot do it.
        """

    def _use_reset_options(self, options: list[dict[str, Any] | None]) -> None:
        """Give the resets of each env its options; managers refuse what they cannot do."""
        self._overrides.reset_options = options

    # State

    def _begin(self) -> None:
        """Reset the counters, and seed every env at its next reset."""
        self.revision += 1
        self.failures.clear()
        self._n_start_overs = 0
        self.dropped_steps = 0
        self._pending_seeds = dict(enumerate(self._seeds or ()))

    def _group_state(self) -> dict[str, Any]:
        """Return what is kept here, as plain data."""
        return {
            "seeds": self._seeds,
            "fixes_seeds": self._fixes_seeds,
            "dropped_steps": self.dropped_steps,
            "failures": self.failures.state_dict(),
            "n_start_overs": self._n_start_overs,
            "overrides": self._overrides.state_dict(),
        }

    def _load_group_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`_group_state` returned, and set it in the envs."""
        self._seeds = None if state["seeds"] is None else list(state["seeds"])
        self._fixes_seeds = state["fixes_seeds"]
        self.dropped_steps = state["dropped_steps"]
        # Older states lack some entries.
        if "failures" in state:
            self.failures.load_state_dict(state["failures"])
        self._n_start_overs = state.get("n_start_overs", 0)
        if "overrides" in state:
            self._overrides.load_state_dict(state["overrides"])
            # Before the states of the envs, in which they may have changed further.
            self._use_reset_options(self._overrides.reset_options)
            self._set_attrs_again()

    def _continue_episodes(self, states: Sequence[Any]) -> bool:
        """Restore the states of the envs; without one of them, start new episodes in all.

        Returns:
            Whether the episodes continue.
        """
        if any(state is None for state in states):
            logger.warning("the state of the envs could not be saved; they start new episodes")
            self._start_over()
            return False
        try:
            self._set_env_states(states)
        except MissingObjectError as error:
            logger.warning("%s, so the envs cannot continue; they start new episodes", error)
            self._start_over()
            return False
        self._pending_seeds = {}
        self.revision += 1
        return True

    def _start_over(self) -> None:
        # Saved with the state, so that no resume repeats the episodes of another one.
        self._n_start_overs += 1
        ids = range(self.env_num)
        if seeds := other_seeds(self._seeds, ids, "resume", self._n_start_overs):
            self._seed_envs(list(seeds.values()))
        self.reset()

    @abstractmethod
    def _env_states(self) -> list[dict[str, Any] | None]:
        """Return the states of the envs; None for an env that cannot be saved."""

    @abstractmethod
    def _set_env_states(self, states: Sequence[Any]) -> None:
        """Restore states that :meth:`_env_states` returned.

        Raises:
            MissingObjectError: if an env lacks an object that its state has.
            CheckpointMismatch: if the states belong to other envs.
        """


def env_seeds(seed: int | Sequence[int], env_num: int) -> list[int]:
    """Return the seed of each env: derived from one integer, or the given ones.

    Raises:
        ConfigError: if this is neither an integer nor ``env_num`` integers.
    """
    if is_int(seed):
        return [derive_seed(int(seed), index) for index in range(env_num)]
    if not isinstance(seed, Sequence | np.ndarray) or not all(map(is_int, seed)):
        raise ConfigError(f"seed must be an integer, or one integer per env, got {seed!r}")
    if len(seed) != env_num:
        raise ConfigError(
            f"{len(seed)} seeds were given for {env_num} envs; give one per env, or a single "
            "integer"
        )
    return [int(number) for number in seed]


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
