"""Samplers: draw the rows of a TensorBuffer's next batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from dmiddleware.data.sum_tree import SumTree
from dmiddleware.errors import NotEnoughData
from dmiddleware.files.schema import Ints
from dmiddleware.schedule import Counters, Schedule, Scheduled
from dmiddleware.settings import (
    Fraction,
    NonNegative,
    Positive,
    Settings,
    TakesSettings,
    checked,
    takes_options,
)

__all__ = [
    "Eligible",
    "Ints",
    "PrioritySampler",
    "PrioritySamplerSettings",
    "Sampler",
    "UniformSampler",
    "UniformSamplerSettings",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Weights: TypeAlias = npt.NDArray[np.float32]

_ROUNDS = 16
_BITS_OF_INFINITY = np.float64(np.inf).view(np.uint64)


@dataclass(slots=True)
class Eligible:
    """The rows that can be drawn, by index (the number of rows pushed before a row).

    Attributes:
        first: index of the oldest of them.
        count: their number.
        total: number of rows ever pushed; the newest has index ``total - 1``.
        size: capacity of the buffer; row ``i`` is in slot ``i % size``.
        is_all: whether these are all rows that the buffer holds.
        index: the rows one by one (int64 ``[count]``, ascending); None if they are
            ``first … first + count - 1``.
        accept: a further condition: returns for indices of any shape which of them can be drawn
            (bool, same shape). ``count`` includes the others.
    """

    first: int
    count: int
    total: int
    size: int
    is_all: bool = True
    index: Ints | None = None
    accept: Callable[[Ints], npt.NDArray[np.bool_]] | None = None

    def every_index(self) -> Ints:
        """Return the index of each of the rows, ``accept`` aside, int64 ``[count]``."""
        if self.index is not None:
            return self.index
        return np.arange(self.first, self.first + self.count)

    def index_of(self, slots: Ints) -> Ints:
        """Return the indices of the rows in these slots, int64 ``[n]``."""
        if self.total <= self.size:
            return slots
        newest_slot_0 = self.total - self.total % self.size
        return slots + np.where(
            slots < self.total % self.size, newest_slot_0, newest_slot_0 - self.size
        )

    def only_accepted(self) -> Eligible:
        """Return the rows that ``accept`` allows; evaluates it for every row.

        Raises:
            NotEnoughData: if none is left.
        """
        if self.accept is None:
            return self
        index = self.every_index()
        index = index[self.accept(index)]
        if not len(index):
            raise NotEnoughData(
                f"none of the {self.count} rows starts a complete sequence yet. Rows do as their "
                "episodes grow, unless these, or the parts of them that are pushed, are shorter: "
                "then use a shorter burn_in or unroll_len, or unroll_pad=True"
            )
        return replace(self, count=len(index), is_all=False, index=index, accept=None)


@runtime_checkable
class Sampler(Protocol):
    """Draws rows; the buffer notifies it of changes.

    Attributes:
        adds: keys that the buffer adds to a sample because of this sampler.
    """

    adds: tuple[str, ...]

    def attach(self, size: int) -> None:
        """Prepare for a buffer of ``size`` rows; called once per buffer."""

    def draw(
        self, n: int, rows: Eligible, generator: np.random.Generator
    ) -> tuple[Ints, Weights | None]:
        """Draw ``n`` of the rows: their index, and their importance weights if there are any."""

    def pushed(self, first: int, n: int) -> None:
        """Handle that rows ``first … first + n - 1`` were written, in place of old ones."""

    def exclude(self, index: Ints) -> None:
        """Never draw these rows, all of which are held; no sequence starts there."""

    def cleared(self) -> None:
        """Handle that all rows were removed."""

    def update_priority(self, index: Ints, priority: Floats) -> None:
        """Set the priorities of rows that are held."""

    def state_dict(self, index: Ints) -> dict[str, Any]:
        """Return everything that later draws depend on, for the rows of ``index``."""

    def load_state_dict(self, state: Mapping[str, Any], index: Ints) -> None:
        """Restore what :meth:`state_dict` returned for the rows of ``index``."""


class UniformSamplerSettings(Settings):
    """The options of :class:`UniformSampler`."""

    replace: bool = True
    """Whether a row may appear twice in a batch. Draws without replacement are slower."""


class UniformSampler(TakesSettings[UniformSamplerSettings]):
    """Draws every row with the same probability.

    Args:
        settings: the options, each by keyword; see :class:`UniformSamplerSettings`.

    Raises:
        ConfigError: if an option is not valid.
    """

    adds: tuple[str, ...] = ()

    @takes_options(UniformSamplerSettings)
    def __init__(self, settings: UniformSamplerSettings) -> None:
        self.settings = settings
        self.replace = settings.replace

    def attach(self, size: int) -> None:
        """Do nothing: it has no state, so several buffers may share one."""

    def draw(
        self, n: int, rows: Eligible, generator: np.random.Generator
    ) -> tuple[Ints, Weights | None]:
        """Draw ``n`` rows.

        Returns:
            Their index, int64 ``[n]``, and None instead of weights.

        Raises:
            NotEnoughData: if, without replacement, there are fewer than ``n``.
        """
        if rows.accept is not None:
            return _draw_accepted(self.draw, n, rows, generator, retry=self.replace), None
        index: Ints
        if self.replace:
            # Twice as fast as generator.integers; probabilities are exact to 2**-53.
            index = (generator.random(n) * rows.count).astype(np.int64)
        elif n <= rows.count:
            index = generator.choice(rows.count, n, replace=False)
        else:
            raise NotEnoughData(
                f"asked for {n} different rows, but only {rows.count} can be drawn; sample fewer, "
                "push more, or use UniformSampler(replace=True)"
            )
        if rows.index is not None:
            return rows.index.take(index), None
        if rows.first:
            index += rows.first
        return index, None

    def pushed(self, first: int, n: int) -> None:
        """Do nothing."""

    def exclude(self, index: Ints) -> None:
        """Do nothing: the other rows are passed to each draw."""

    def cleared(self) -> None:
        """Do nothing."""

    def update_priority(self, index: Ints, priority: Floats) -> None:
        """Raise an error: uniform draws do not use priorities.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this buffer draws uniformly, without priorities; build it with "
            "sampler=PrioritySampler() to use them"
        )

    def state_dict(self, index: Ints) -> dict[str, Any]:
        """Return an empty state: draws depend on the buffer's generator alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], index: Ints) -> None:
        """Do nothing."""


class PrioritySamplerSettings(Settings):
    """The options of :class:`PrioritySampler`."""

    alpha: NonNegative = 0.6
    """How strongly priorities count; 0 draws uniformly."""
    beta: Annotated[float | Schedule, Scheduled(Fraction)] = 0.4
    """How much of the bias the weights correct; 1 corrects all of it. Usually a schedule that rises
    to 1: ``Schedule.linear(0.4, 1.0, decay=100_000, by="update")``. By ``"update"`` it depends on
    the draws so far, by ``"env_step"`` on the rows pushed, by ``"progress"`` on the attribute."""
    eps: Positive = 1e-6
    """Added to every priority, so every row can be drawn."""


class PrioritySampler(TakesSettings[PrioritySamplerSettings]):
    """Draws rows in proportion to their priorities (proportional prioritized replay).

    Row ``i`` is drawn with probability ``p_i**alpha / sum(p**alpha)``, where ``p_i`` is the
    priority from :meth:`update_priority` plus ``eps``. New rows have the highest priority so far
    (at least 1), so they are soon drawn. Draws are stratified: the total mass is split into ``n``
    equal parts, and one row is drawn from each.

    The weights correct the bias: ``(count * P(i))**-beta``, divided by the largest weight of the
    batch, so they only scale updates down. (Dividing by the largest weight of the whole buffer, as
    some implementations do, lets a single row of low priority shrink every update.)

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016, sections 3.3 and 3.4.

    Args:
        settings: the options, each by keyword; see :class:`PrioritySamplerSettings`.

    Attributes:
        highest: the highest priority so far, at least 1, which new rows get.
        lacks_priorities: whether no priority was ever set, so that draws are uniform.
        progress: the part of the run that is done, from 0 to 1, for a ``beta`` by progress;
            middleware that draw set it. None: not known.
        n_pushed: rows pushed, for a ``beta`` by ``"env_step"``.
        n_draws: batches drawn, for one by ``"update"``.

    Raises:
        ConfigError: if an option is not valid.
    """

    adds: tuple[str, ...] = ("weight",)

    @takes_options(PrioritySamplerSettings)
    def __init__(self, settings: PrioritySamplerSettings) -> None:
        self.settings = settings
        self.alpha, self.eps = settings.alpha, settings.eps
        self._beta = Schedule.of(settings.beta)
        self.progress: float | None = None
        # The count from which the schedule runs; not 0 after beta was set.
        self._beta_origin: float = 0
        self.highest = 1.0
        self.lacks_priorities = True
        self.n_draws = 0
        self.n_pushed = 0
        self._numbers = np.empty(0)
        self._attached: SumTree | None = None

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The settings that may be schedules, by name."""
        return {"beta": self._beta}

    @property
    def beta(self) -> float:
        """The exponent of the weights at the next draw.

        Setting it restarts its schedule from the new value; a piecewise one ends.
        """
        if self._beta.is_constant:
            return self._beta.start
        return self._beta(self._beta_count() - self._beta_origin)

    @beta.setter
    def beta(self, beta: float) -> None:
        self._set_first_beta(checked("beta", beta, Fraction))
        self._beta_origin = self._beta_count()

    def _set_first_beta(self, beta: float) -> None:
        if self._beta.type in ("constant", "piecewise"):
            self._beta = Schedule.constant(beta)
        else:
            self._beta = dataclasses.replace(self._beta, start=beta)

    def _beta_count(self) -> float:
        counters = Counters(env_step=self.n_pushed, update=self.n_draws, progress=self.progress)
        return self._beta.count(counters)

    def attach(self, size: int) -> None:
        """Prepare for a buffer of ``size`` rows.

        Raises:
            ValueError: if it belongs to another buffer.
        """
        if self._attached is not None:
            raise ValueError("this PrioritySampler belongs to another buffer; create one for each")
        self._attached = SumTree(size)

    def draw(
        self, n: int, rows: Eligible, generator: np.random.Generator
    ) -> tuple[Ints, Weights | None]:
        """Draw ``n`` rows.

        Takes time in proportion to ``n`` if all rows are eligible, otherwise to their number.

        Returns:
            Their index, int64 ``[n]``, and weights, float32 ``[n]``, in (0, 1].
        """
        if rows.is_all and rows.accept is None:
            slots, mass, lowest = self._tree.find(self._strata(n, generator), parts=n)
            index = rows.index_of(slots)
        else:
            index = _draw_accepted(self._draw, n, rows, generator, retry=True)
            mass = self._tree.values.take(index % rows.size)
            lowest = mass.min()
        mass /= lowest
        mass **= -self.beta
        self.n_draws += 1
        return index, mass.astype(np.float32)

    def pushed(self, first: int, n: int) -> None:
        """Give new rows the highest priority so far."""
        tree = self._tree
        mass = self._mass(self.highest)
        self.n_pushed = first + n
        start = first % tree.size
        until_end = min(n, tree.size - start)
        tree.fill(start, start + until_end, mass)
        if until_end < n:
            tree.fill(0, n - until_end, mass)

    def exclude(self, index: Ints) -> None:
        """Never draw these rows again."""
        self._tree.set(index % self._tree.size, 0.0)

    def cleared(self) -> None:
        """Forget all rows; the highest priority stays."""
        self._tree.fill(0, self._tree.size, 0.0)

    def update_priority(self, index: Ints, priority: Floats) -> None:
        """Set priorities; if an index appears twice, its last one counts.

        Args:
            index: int64 ``[n]``, rows that are held.
            priority: float64 ``[n]``, not negative, finite; usually absolute TD errors.

        Raises:
            ValueError: if a priority is negative, infinite or NaN; nothing has changed.
        """
        if not len(priority):
            return
        # Read as integers, the bits of non-negative doubles are ordered like the doubles, and those
        # of negative numbers, infinity and NaN are greater: one maximum is enough.
        highest = np.maximum.reduce(priority.view(np.uint64))
        if highest >= _BITS_OF_INFINITY:
            odd = priority[~((priority >= 0.0) & (priority < np.inf))]
            if len(odd):
                raise ValueError(
                    f"priorities must be finite and not negative, but {len(odd)} of "
                    f"{len(priority)} are not; the first is {odd[0]}. Pass absolute TD errors, "
                    "and look for NaN in the loss"
                )
            priority = np.abs(priority)  # it has a negative zero
            highest = np.maximum.reduce(priority.view(np.uint64))
        self.highest = max(self.highest, float(highest.view(np.float64)))
        slots = index if self.n_pushed <= self._tree.size else index % self._tree.size
        self._tree.set(slots, self._mass(priority))
        self.lacks_priorities = False

    def state_dict(self, index: Ints) -> dict[str, Any]:
        """Return the rows' masses, the highest priority and the number of draws."""
        return {
            "mass": self._tree.values.take(index % self._tree.size),
            "highest": self.highest,
            "n_draws": self.n_draws,
            "first_beta": self._beta.start,
            "beta_origin": self._beta_origin,
            "total": self.n_pushed,
        }

    def load_state_dict(self, state: Mapping[str, Any], index: Ints) -> None:
        """Restore what :meth:`state_dict` returned for the rows of ``index``."""
        self.cleared()
        self.lacks_priorities = False
        self._tree.set(index % self._tree.size, state["mass"])
        self.highest = state["highest"]
        self.n_draws = state["n_draws"]
        if state["first_beta"] != self._beta.start:
            self._set_first_beta(state["first_beta"])
        self._beta_origin = state["beta_origin"]
        self.n_pushed = state["total"]

    @property
    def _tree(self) -> SumTree:
        if self._attached is None:
            raise ValueError("this PrioritySampler has no buffer yet; pass it to a TensorBuffer")
        return self._attached

    def _mass(self, priority: Any) -> Any:
        return (priority + self.eps) ** self.alpha

    def _draw(self, n: int, rows: Eligible, generator: np.random.Generator) -> tuple[Ints, None]:
        """Draw rows whether or not they are accepted."""
        if rows.is_all:
            return rows.index_of(self._tree.find(self._strata(n, generator), parts=n)[0]), None
        index = rows.every_index()
        ends = self._tree.values.take(index % rows.size).cumsum()
        position = ends.searchsorted(self._strata(n, generator) * (ends[-1] / n), side="right")
        return index.take(np.minimum(position, len(index) - 1)), None

    def _strata(self, n: int, generator: np.random.Generator) -> Floats:
        """Draw a point of each of [0, 1), [1, 2), … [n - 1, n): float64 ``[n]``."""
        if len(self._numbers) != n:
            self._numbers = np.arange(n, dtype=np.float64)
        points = generator.random(n)
        points += self._numbers
        return points


def _draw_accepted(
    draw: Callable[[int, Eligible, np.random.Generator], tuple[Ints, Any]],
    n: int,
    rows: Eligible,
    generator: np.random.Generator,
    *,
    retry: bool,
) -> Ints:
    """Draw rows until all are accepted; as a last resort, look at every row."""
    if not retry or rows.accept is None:
        return draw(n, rows.only_accepted(), generator)[0]
    rest = replace(rows, accept=None)
    index, _ = draw(n, rest, generator)
    for attempt in range(_ROUNDS + 1):
        refused = np.flatnonzero(~rows.accept(index))
        if not len(refused):
            break
        if attempt == _ROUNDS:
            rest = rows.only_accepted()
        index[refused], _ = draw(len(refused), rest, generator)
    return index
