"""The context: the data that the middleware of one step share."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    NamedTuple,
    Self,
    SupportsFloat,
    TypeVar,
    overload,
)

from dmiddleware.errors import ContextError, MiddlewareError
from dmiddleware.metric_names import check_metric_name, is_metric_name
from dmiddleware.pipeline.running_task import RunningTask
from dmiddleware.registry import nearest

__all__ = [
    "Context",
    "Vocabulary",
    "FieldKind",
    "is_part_name",
    "kept",
    "renewed",
    "produced",
]

T = TypeVar("T")
C = TypeVar("C", bound="Context")

_KIND = "dmiddleware.kind"
_SUMMED = "dmiddleware.summed"
_PART_NAME: Final = re.compile(r"\w[\w.-]{0,63}")
_NO_PARTS: Final[Mapping[str, Any]] = MappingProxyType({})
_summing = threading.Lock()


class FieldKind(StrEnum):
    """What happens to a field of a context when the next step starts."""

    KEPT = "kept"
    RENEWED = "renewed"
    PRODUCED = "produced"


@overload
def kept(default: T, *, summed: bool = False) -> T: ...
@overload
def kept(*, default_factory: Callable[[], T]) -> T: ...
def kept(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    summed: bool = False,
) -> Any:
    """Declare a field of a context that keeps its value for the whole run.

    Args:
        default: the value in the first step; must be immutable.
        default_factory: returns the value in the first step, for mutable values.
        summed: whether it counts something, so that the context of a chain with named parts has the
            sum over them; see :meth:`Context.part`.

    Example:
        >>> @dataclass
        ... class CuriousContext(Context):
        ...     visits: dict[int, int] = kept(default_factory=dict)
    """
    metadata = {_KIND: FieldKind.KEPT, _SUMMED: summed}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@overload
def renewed(default: T) -> T: ...
@overload
def renewed(*, default_factory: Callable[[], T]) -> T: ...
def renewed(
    default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING
) -> Any:
    """Declare a field of a context that is reset to a meaningful default in every step.

    A middleware may read such a field even if no other middleware writes it.

    Args:
        default: the value at the start of every step; must be immutable.
        default_factory: returns that value for every step, for mutable values.
    """
    return field(
        default=default, default_factory=default_factory, metadata={_KIND: FieldKind.RENEWED}
    )


def produced() -> Any:
    """Declare a field of a context that is None in every step until a middleware writes it.

    The check before the first step refuses a chain that reads the field before writing it.
    """
    return field(default=None, metadata={_KIND: FieldKind.PRODUCED})


def is_part_name(name: object) -> bool:
    """Return whether it can be the name of a part of a chain, which metrics and files begin with.

    Such a name has letters, digits, ``_``, ``-`` and ``.``, 64 at most.
    """
    return isinstance(name, str) and _PART_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The words of the programs that a kind of context is for.

    The check before the first step uses them in its messages, and to tell a misspelled role from a
    new one.

    Attributes:
        roles: the names of the roles that these programs use.
        lead_role: the role of the process that checks for all that each part of the chain has a
            process; None: each process checks that.
        writers: by the name of a field, the middleware that usually writes it.
        filler: the middleware that usually fills a store, such as a buffer.
        exchange: the middleware that usually exchanges fields between processes.
        counters: the names under which a launcher shows the counters of a run, by their fields.
        columns: what every row of metrics has; no metric may have such a name.
    """

    roles: tuple[str, ...] = ()
    lead_role: str | None = None
    writers: Mapping[str, str] = field(default_factory=dict)
    filler: str = "a middleware that fills it"
    exchange: str = "a middleware that declares receives=(...)"
    counters: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()


@dataclass
class Context:
    """The data that the middleware of one step share; it is renewed for every step.

    Fields that are declared with :func:`kept`, or passed to :meth:`keep`, carry over to all later
    steps; all others are reset to their defaults. Add custom fields in a subclass (decorated with
    ``@dataclass``, so that type checkers know them), or by assignment, which lasts for one step
    unless the field is kept.

    Reading a field that was never set raises a :class:`~dmiddleware.errors.ContextError` (an
    ``AttributeError``) that suggests similar names.

    Attributes:
        total_step: the number of steps before this one.
        logged: metrics of this step by name; written with :meth:`log`.
        task: the task that runs the chain.
        vocabulary: the words of the programs that contexts of this class are for.
    """

    vocabulary: ClassVar[Vocabulary] = Vocabulary()

    total_step: int = kept(0)
    logged: dict[str, float] = field(
        default_factory=dict, repr=False, metadata={_KIND: FieldKind.RENEWED}
    )
    task: RunningTask = field(
        init=False, repr=False, compare=False, metadata={_KIND: FieldKind.KEPT}
    )

    _renewal: ClassVar[_Renewal]

    def __post_init__(self) -> None:
        _check_decorated(type(self))

    def begin_run(self, at_close: Callable[[Callable[[], object]], object]) -> None:
        """Prepare the process for a task, after the set-up of its middleware.

        Args:
            at_close: registers a function to call when the task is closed.
        """

    def keep(self, *names: str) -> None:
        """Carry the fields over to all following steps.

        Args:
            names: the fields; they may be set later.
        """
        self.__dict__["_also_kept"] = self.__dict__.get("_also_kept", frozenset()).union(names)

    def log(self, name: str, value: SupportsFloat) -> None:
        """Log a metric of this step, for loggers that run later in the step.

        Args:
            name: the metric, letters, digits, ``_``, ``-`` and ``.``, with groups separated by
                slashes (``"disk/free_bytes"``).
            value: any scalar, also a tensor or an array of one element; a second value of the
                same metric in a step replaces the first. A tensor without dimensions on another
                device stays there until a logger writes it, so that nothing waits for the device
                now; a logger leaves it out if it is NaN then.

        Raises:
            MiddlewareError: if the name is not valid for a metric, or a counter has this name, or
                the value is not a number.
        """
        if type(name) is not str or not is_metric_name(name, self.vocabulary.columns):
            check_metric_name(name, self.vocabulary.columns)
        if getattr(value, "is_cpu", True) is False and getattr(value, "ndim", 1) == 0:
            waiting: Any = value
            self.logged[name] = waiting
            return
        try:
            # An array of one element has `item`; `float` takes one without dimensions only.
            item = getattr(value, "item", None)
            number: Any = value if item is None else item()
            if isinstance(number, str | bytes | bytearray):
                raise TypeError
            self.logged[name] = float(number)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise MiddlewareError(
                f"ctx.log({name!r}, ...) takes one number, got {value!r:.100}; log its mean, or "
                "each number under a name of its own"
            ) from None

    @property
    def whole(self) -> Self:
        """The context of the whole chain: the one around a part's context, and else this one."""
        outer: Self = self.__dict__.get("_whole", self)
        return outer

    @property
    def parts(self) -> Mapping[str, Self]:
        """The contexts of the named parts so far, by name, in the order of their creation."""
        return MappingProxyType(self.whole.__dict__.get("_parts", _NO_PARTS))

    def part(self, name: str) -> Self:
        """Return the context of a named part of the chain, which is created on first use.

        A middleware with ``name="red"`` works on ``ctx.part("red")`` in place of ``ctx``. That is a
        context of the same class, with its own value of every field, which lasts as long as the
        context of the whole chain and is renewed with it. Metrics that are logged to it are also
        metrics of the whole chain, under ``red/``. The fields that are declared as ``summed`` are
        added up: what they grow by in a part, they grow by in the context of the whole chain.

        Args:
            name: letters, digits, ``_``, ``-`` and ``.``, 64 at most.

        Raises:
            ContextError: if the name cannot be that of a part.
        """
        outer = self.whole
        parts: dict[str, Self] = outer.__dict__.setdefault("_parts", {})
        if name not in parts:
            if not is_part_name(name):
                raise ContextError(
                    f"ctx.part({name!r:.100}): a part's name consists of letters, digits, '_', '-' "
                    "and '.', 64 at most"
                )
            # Two branches of a parallel may ask for the same new part.
            parts.setdefault(name, _new_part(outer, name))
        return parts[name]

    def sum_up(self) -> None:
        """Add what the summed fields of a part have grown by to those of the whole chain.

        It is called after each middleware of the part; one that writes to the contexts of several
        parts calls it itself. In the context of the whole chain, it does nothing.
        """
        values = self.__dict__
        if "_whole" not in values:
            return
        total, before = values["_whole"].__dict__, values["_summed"]
        with _summing:
            for name, value in before.items():
                if values[name] != value:
                    total[name] += values[name] - value
                    before[name] = values[name]

    def renew(self) -> Self:
        """Return the context of the next step."""
        cls = type(self)
        renewal = cls.__dict__.get("_renewal") or _compile(cls)
        old = self.__dict__
        fresh: dict[str, Any] = renewal.constants.copy()
        for name in renewal.kept:
            if name in old:
                fresh[name] = old[name]
        for name, factory in renewal.factories:
            fresh[name] = factory()
        fresh["total_step"] += 1
        if "_also_kept" in old:
            for name in (*old["_also_kept"], "_also_kept"):
                if name in old:
                    fresh[name] = old[name]
        new = object.__new__(cls)
        new.__dict__ = fresh
        if "_parts" in old:
            parts = fresh["_parts"] = {}
            for name, part in old["_parts"].items():
                parts[name] = part.renew()
                _join(parts[name], new, name, summed=part.__dict__["_summed"])
        return new

    @classmethod
    def field_kinds(cls) -> dict[str, FieldKind]:
        """Return the kind of each declared field."""
        return {f.name: _kind_of(f) for f in dataclasses.fields(cls)}

    def is_kept(self, name: str) -> bool:
        """Return whether the field carries over, by declaration or by :meth:`keep`."""
        if name in self.__dict__.get("_also_kept", ()):
            return True
        return self.field_kinds().get(name) is FieldKind.KEPT

    def has_value(self, name: str) -> bool:
        """Return whether the field is set and is not None."""
        return self.__dict__.get(name) is not None

    def counters(self) -> dict[str, int]:
        """Return the counters that a launcher shows, by the names that it shows.

        Those of the named parts follow, each with the name of its part.
        """
        contexts = {"": self, **{f"{name} ": part for name, part in list(self.parts.items())}}
        shown = self.vocabulary.counters.items()
        return {
            f"{prefix}{label}": ctx.__dict__[name]
            for prefix, ctx in contexts.items()
            for name, label in shown
            if name in ctx.__dict__
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the values of all fields that carry over, without copying them."""
        names = [name for name, kind in self.field_kinds().items() if kind is FieldKind.KEPT]
        names += sorted(self.__dict__.get("_also_kept", ()))
        values = self.__dict__
        state = {
            "values": {name: values[name] for name in names if name in values and name != "task"},
            "also_kept": sorted(values.get("_also_kept", ())),
        }
        if "_parts" in values:
            state["parts"] = {name: part.state_dict() for name, part in values["_parts"].items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Fields that this context does not declare are kept too: a task whose first middleware brings
        another context takes them over.
        """
        self.__dict__.update(state["values"])
        names = {field.name for field in dataclasses.fields(self)}
        self.keep(*state["also_kept"], *(state["values"].keys() - names))
        if "_whole" in self.__dict__:
            self.__dict__["_summed"] = _summed_values(self)
        for name, part_state in state.get("parts", {}).items():
            self.part(name).load_state_dict(part_state)

    def __getstate__(self) -> dict[str, Any]:
        # A task has threads and cannot be pickled; the fields can.
        return {name: value for name, value in self.__dict__.items() if name != "task"}

    if not TYPE_CHECKING:  # for a type checker, an undeclared field stays an error

        def __getattr__(self, name: str) -> Any:
            raise _missing(self, name)


class _Renewal(NamedTuple):
    """How contexts of one class are renewed, computed once."""

    constants: dict[str, Any]
    factories: tuple[tuple[str, Callable[[], Any]], ...]
    kept: tuple[str, ...]


def _compile(cls: type[Context]) -> _Renewal:
    _check_decorated(cls)
    constants: dict[str, Any] = {}
    factories: list[tuple[str, Callable[[], Any]]] = []
    names: list[str] = []
    for f in dataclasses.fields(cls):
        if _kind_of(f) is FieldKind.KEPT:
            names.append(f.name)
        elif f.default_factory is not dataclasses.MISSING:
            factories.append((f.name, f.default_factory))
        else:
            constants[f.name] = f.default
    cls._renewal = _Renewal(constants, tuple(factories), tuple(names))
    return cls._renewal


class _PartLog(dict[str, float]):
    """The metrics of a part, which are metrics of the whole chain under its name."""

    def __init__(self, whole: dict[str, float], name: str) -> None:
        super().__init__()
        self._whole = whole
        self._prefix = f"{name}/"

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, value)
        self._whole[self._prefix + name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _new_part(whole: C, name: str) -> C:
    """Return a context of the same class with the values of the first step."""
    cls = type(whole)
    renewal = cls.__dict__.get("_renewal") or _compile(cls)
    fresh: dict[str, Any] = renewal.constants.copy()
    for field_name, factory in renewal.factories:
        fresh[field_name] = factory()
    for f in dataclasses.fields(cls):
        if f.name in renewal.kept:
            if f.default is not dataclasses.MISSING:
                fresh[f.name] = f.default
            elif f.default_factory is not dataclasses.MISSING:
                fresh[f.name] = f.default_factory()
            elif f.name in whole.__dict__:
                fresh[f.name] = whole.__dict__[f.name]
    fresh["total_step"] = whole.total_step
    if "task" in whole.__dict__:
        fresh["task"] = whole.task.part(name)
    part = object.__new__(cls)
    part.__dict__ = fresh
    _join(part, whole, name, summed=_summed_values(part))
    return part


def _join(part: Context, whole: Context, name: str, *, summed: dict[str, Any]) -> None:
    """Let a part's context report its metrics and counters to that of the whole chain."""
    values = part.__dict__
    values["_whole"], values["_summed"] = whole, summed
    values["logged"] = _PartLog(whole.logged, name)


def _summed_values(part: Context) -> dict[str, Any]:
    names = (f.name for f in dataclasses.fields(part) if f.metadata.get(_SUMMED))
    return {name: part.__dict__[name] for name in names}


def _kind_of(f: dataclasses.Field[Any]) -> FieldKind:
    kind = f.metadata.get(_KIND)
    if kind is not None:
        return FieldKind(kind)
    has_default = (
        f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    )
    # Without a default there is nothing to return to.
    return FieldKind.RENEWED if has_default else FieldKind.KEPT


def _check_decorated(cls: type[Context]) -> None:
    for base in cls.__mro__:
        if base is Context:
            return
        attributes = vars(base)
        if attributes.get("__annotations__") and "__dataclass_fields__" not in attributes:
            raise TypeError(
                f"{base.__name__} declares context fields but is not a dataclass; decorate it with "
                "@dataclass"
            )
        if attributes.get("__slots__"):
            raise TypeError(
                f"{base.__name__} has __slots__, which a context cannot renew; decorate it with "
                "@dataclass, without slots=True"
            )


@dataclass(frozen=True, slots=True)
class _NoSuchField:
    """The message about a missing field.

    Similar names are only looked up when the message is shown, since ``hasattr`` and ``getattr``
    with a default may be called in every step.
    """

    owner: str
    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        if self.name == "task":
            return f"this {self.owner} does not belong to a task yet; ctx.task is set by Task(ctx)"
        near = nearest(self.name, dict.fromkeys(name for name in self.known if name[0] != "_"))
        hint = f"did you mean {', '.join(near)}? " if near else ""
        return (
            f"ctx.{self.name} was never set, and {self.owner} does not declare it; {hint}"
            f"To add a custom field, declare it in a subclass of {self.owner} or assign it before "
            "it is read."
        )


def _missing(ctx: Context, name: str) -> ContextError:
    fields = (*ctx.__dict__, *type(ctx).__dataclass_fields__)
    return ContextError(_NoSuchField(type(ctx).__name__, name, fields))
