"""Schedules: settings that change over a run."""

from __future__ import annotations

import ast
import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias

from dmiddleware.errors import ConfigError
from dmiddleware.registry import nearest
from dmiddleware.settings import NonNegative, Positive, checked, values_in_words

if typing.TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = [
    "Counters",
    "LearningRate",
    "Schedule",
    "ScheduleCounter",
    "ScheduleType",
    "Scheduled",
    "scheduled_in_updates",
]

ScheduleType: TypeAlias = Literal["constant", "linear", "exponential", "cosine", "piecewise"]
"""The shape of a schedule."""

ScheduleCounter: TypeAlias = Literal["env_step", "update", "progress"]
"""What a schedule depends on."""

_TYPES: Final = typing.get_args(ScheduleType)
_COUNTERS: Final = typing.get_args(ScheduleCounter)


class Counters(NamedTuple):
    """How far a run is; None for what is not known.

    Attributes:
        env_step: environment steps, summed over all collectors.
        update: updates of the policy.
        progress: the part of the run that is done, from 0 to 1.
    """

    env_step: float | None = None
    update: float | None = None
    progress: float | None = None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The value of a setting as a function of a counter.

    A schedule has no state: the counter that it reads is in the checkpoint. Wherever a config
    accepts a schedule, it also accepts a number, which is constant, and a dictionary with the
    attributes below, such as ``{"type": "linear", "start": 3.0e-4, "end": 0.0, "decay": 10_000,
    "by": "update"}``.

    Attributes:
        type: the shape; each has a constructor of its name.
        start: the first value.
        end: the last value.
        decay: the length of the way from ``start`` to ``end``, in units of the counter; positive.
            Of an exponential schedule, the length after which ``1 / e`` of the way is left.
        by: the counter: ``"env_step"``, ``"update"`` or ``"progress"`` (from 0 to 1).
        points: of a piecewise schedule, pairs of a count and the value there.

    Raises:
        ConfigError: if a value is not finite, ``decay`` is not positive, a name is unknown, or the
            points are not in order.

    Example:
        >>> learning_rate = Schedule.linear(1.0, 0.0, decay=10_000, by="update")
        >>> learning_rate(2_500)
        0.75
        >>> Schedule.piecewise([(0, 1.0), (100, 0.5), (1_000, 0.1)])(100)
        0.5
    """

    type: ScheduleType
    start: float
    end: float
    decay: float = 1.0
    by: ScheduleCounter = "env_step"
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _check_name("type", self.type, _TYPES)
        _check_name("by", self.by, _COUNTERS)
        for name in ("start", "end", "decay"):
            _check_finite(f"a schedule's {name}", getattr(self, name))
        if self.decay <= 0:
            raise ConfigError(f"a schedule's decay must be positive, got {self.decay}")
        object.__setattr__(self, "points", _checked_points(self.points))
        if (self.type == "piecewise") != bool(self.points):
            raise ConfigError(
                f"a schedule of type {self.type!r} has the points {list(self.points)}; only a "
                "piecewise schedule has points, at least one"
            )

    @classmethod
    def constant(cls, value: float) -> Self:
        """Return a schedule that never changes."""
        return cls("constant", value, value)

    @classmethod
    def linear(
        cls, start: float, end: float, *, decay: float = 1.0, by: ScheduleCounter = "env_step"
    ) -> Self:
        """Go from ``start`` to ``end`` in a straight line, then stay."""
        return cls("linear", start, end, decay, by)

    @classmethod
    def exponential(
        cls, start: float, end: float, *, decay: float = 1.0, by: ScheduleCounter = "env_step"
    ) -> Self:
        """Approach ``end`` from ``start``: ``end + (start - end) * exp(-count / decay)``."""
        return cls("exponential", start, end, decay, by)

    @classmethod
    def cosine(
        cls, start: float, end: float, *, decay: float = 1.0, by: ScheduleCounter = "env_step"
    ) -> Self:
        """Go from ``start`` to ``end`` along half a period of a cosine, then stay.

        Source: Loshchilov and Hutter, "SGDR", 2017, equation 5, without restarts.
        """
        return cls("cosine", start, end, decay, by)

    @classmethod
    def piecewise(
        cls, points: Iterable[tuple[float, float]], *, by: ScheduleCounter = "env_step"
    ) -> Self:
        """Connect points by straight lines; stay at the first and the last value outside of them.

        Two points with the same count make a step: from that count on, the second value holds.

        Args:
            points: pairs of a count and the value there, in order of the counts.
            by: the counter.
        """
        pairs = _checked_points(points)
        if not pairs:
            raise ConfigError("a piecewise schedule needs at least one point (count, value)")
        return cls("piecewise", pairs[0][1], pairs[-1][1], by=by, points=pairs)

    @classmethod
    def of(cls, setting: float | Mapping[str, Any] | Schedule) -> Schedule:
        """Return the schedule that a setting of a config describes.

        Args:
            setting: a number, a dictionary of the attributes, or a schedule.

        Raises:
            ConfigError: if it describes none; the message says why.
        """
        if isinstance(setting, Schedule):
            return setting
        if not isinstance(setting, Mapping):
            return cls.constant(setting)
        options = {key: value for key, value in setting.items() if value is not None}
        names = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in names:
                near = nearest(key, names, n=1) or names
                raise ConfigError(
                    f"a schedule has no key {key!r}; did you mean: {', '.join(near)}?"
                )
        kind = options.pop("type", "linear")
        if kind == "exp":  # DI-engine's name
            kind = "exponential"
        if kind == "piecewise":
            return cls.piecewise(options.get("points", ()), by=options.get("by", "env_step"))
        if kind == "constant":
            options["end"] = options.get("start")
        if not {"start", "end"} <= set(options):
            raise ConfigError(
                f"a schedule of type {kind!r} needs start and end, got {dict(options)}"
            )
        return cls(type=kind, **options)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a schedule from text, such as ``linear(1e-3, 0, 1000)``.

        The arguments are the attributes ``start``, ``end``, ``decay`` and ``by`` in this order, or
        by name; those of a piecewise schedule are ``points`` and ``by``.

        Raises:
            ConfigError: if the text has another form, or a value is not allowed.

        Example:
            >>> Schedule.parse("linear(1.0, 0.0, 10_000, by=update)")(2_500)
            0.75
        """
        try:
            match ast.parse(text.strip(), mode="eval").body:
                case ast.Call(ast.Name(kind), given, named) if kind in _TYPES:
                    pass
                case _:
                    raise SyntaxError
            keys = ("points", "by") if kind == "piecewise" else ("start", "end", "decay", "by")
            values = dict(zip(keys[: len(given)], map(_literal, given), strict=True))
            named_values = {str(keyword.arg): _literal(keyword.value) for keyword in named}
        except (SyntaxError, ValueError):
            raise ConfigError(
                f"a schedule must be like linear(1e-3, 0, 1000), and one of {', '.join(_TYPES)}; "
                f"got {text!r}"
            ) from None
        return cls.of({"type": kind, **values, **named_values})

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        if self.type == "constant":
            return f"constant({self.start})"
        if self.type == "piecewise":
            return f"piecewise({list(self.points)}, by={self.by})"
        return f"{self.type}({self.start}, {self.end}, {self.decay}, by={self.by})"

    def __call__(self, count: float) -> float:
        """Return the value at a count; a negative one counts as 0."""
        if self.type == "constant":
            return self.start
        if self.type == "piecewise":
            return _interpolated(self.points, count)
        way = max(count, 0.0) / self.decay
        if self.type == "exponential":
            return self.end + (self.start - self.end) * math.exp(-way)
        if way >= 1.0:  # where the formulas would miss ``end`` by a rounding error
            return self.end
        if self.type == "cosine":
            way = 0.5 * (1.0 - math.cos(math.pi * way))
        return self.start + way * (self.end - self.start)

    def at(self, counters: Counters) -> float:
        """Return the value at the counter that this schedule reads.

        Raises:
            ConfigError: if that counter is not known.
        """
        return self.start if self.is_constant else self(self.count(counters))

    def count(self, counters: Counters) -> float:
        """Return the counter that this schedule reads.

        Raises:
            ConfigError: if it is not known.
        """
        count: float | None = getattr(counters, self.by)
        if count is None:
            raise ConfigError(
                f"a schedule by {self.by} needs that counter, which is not known here; learn "
                "in a Task that has TerminationChecker, or set the counters with "
                "policy.set_counters(Counters(...))"
            )
        return count

    @property
    def is_constant(self) -> bool:
        """Whether it reads no counter."""
        return self.type == "constant"

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value."""
        values = [self.start, self.end, *(value for _, value in self.points)]
        return min(values), max(values)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """An annotation of ``float | Schedule``: numbers in a range, or a schedule of them.

    A dictionary with the attributes of a :class:`Schedule` is converted to one.

    Args:
        values: the type of the numbers, such as :data:`~dmiddleware.settings.Positive`.
        reach: the type of the values of a schedule, if it differs: a learning rate is positive,
            but may fall to 0.
        in_updates: whether updates read it; False: only collecting does.
    """

    values: Any
    reach: Any = None
    in_updates: bool = True

    @property
    def words(self) -> str:
        """Which values it takes, in words."""
        return f"{values_in_words(self.values)}, or a schedule"

    def __get_pydantic_core_schema__(self, hint: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_wrap_validator_function

        each = self.values if self.reach is None else self.reach

        def validate(setting: Any, validate_number: Callable[[Any], Any]) -> Any:
            if not isinstance(setting, Schedule | Mapping):
                return validate_number(setting)
            schedule = Schedule.of(setting)
            # The limit of an exponential schedule counts too: rounding may reach it.
            for value in schedule.bounds:
                checked("each value of its schedule", value, each)
            return schedule

        return no_info_wrap_validator_function(validate, handler.generate_schema(self.values))


LearningRate: TypeAlias = Annotated[float | Schedule, Scheduled(Positive, reach=NonNegative)]
"""A positive number, or a schedule, which may fall to 0."""


def scheduled_in_updates(hint: Any) -> bool:
    """Return whether a type hint is that of a setting that may be a schedule and updates read."""
    marks = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Scheduled)]
    return bool(marks) and marks[-1].in_updates


def _literal(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _interpolated(points: tuple[tuple[float, float], ...], count: float) -> float:
    before = points[0]
    for point in points:
        if count < point[0]:
            if before is point:
                return point[1]
            way = (count - before[0]) / (point[0] - before[0])
            return before[1] + way * (point[1] - before[1])
        before = point
    return before[1]


def _checked_points(points: Iterable[Any]) -> tuple[tuple[float, float], ...]:
    """Return the points as tuples of floats.

    Raises:
        ConfigError: if they are not pairs of finite numbers in order of the first.
    """
    pairs: list[tuple[float, float]] = []
    for point in points:
        if isinstance(point, str) or len(tuple(point)) != 2:
            raise ConfigError(f"a point of a schedule must be a pair (count, value), got {point!r}")
        count, value = point
        _check_finite("the count of a point", count)
        _check_finite("the value of a point", value)
        if pairs and count < pairs[-1][0]:
            raise ConfigError(
                f"the points of a schedule must be in order of their counts, but {count} comes "
                f"after {pairs[-1][0]}"
            )
        pairs.append((float(count), float(value)))
    return tuple(pairs)


def _check_name(what: str, name: object, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"a schedule's {what} must be one of {', '.join(known)}, got {name!r}")


def _check_finite(what: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise ConfigError(f"{what} must be a finite number, got {value!r}")
