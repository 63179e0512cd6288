"""Settings: each is declared once, with its type, range, default and meaning.

A class of settings is a frozen dataclass. A field's annotation says which values it takes, and the
sentence below it what it means. The checks, the tables of the reference, the command line and
``config.yaml`` all come from these declarations::

    class DQNSettings(TDSettings):
        learning_rate: LearningRate = 1e-3
        "Adam's learning rate."
        target_update_freq: Count = 500
        "Updates between target updates."

pydantic makes the checks; it is imported when the first settings are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import numbers
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import MISSING
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    dataclass_transform,
    overload,
)

from annotated_types import Ge, Gt, Le, Lt

from dmiddleware.callable_names import described, name_of, without_addresses
from dmiddleware.docstrings import sentences_below, with_arguments
from dmiddleware.errors import ConfigError, DMiddlewareError
from dmiddleware.foreign_names import declare, unknown_name, unknown_option
from dmiddleware.registry import nearest

if typing.TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails

__all__ = [
    "AS_TUPLE",
    "BY_PROGRAM",
    "Convert",
    "Count",
    "Counts",
    "Fraction",
    "NonNegative",
    "Number",
    "Numbers",
    "Options",
    "Positive",
    "SettingInfo",
    "Settings",
    "TakesSettings",
    "Whole",
    "checked",
    "describe",
    "from_plain",
    "hints_of",
    "made_from",
    "members_of",
    "plain_values",
    "settings_table",
    "shown",
    "cleared_by",
    "takes_options",
    "values_from_plain",
    "values_in_words",
]

S = TypeVar("S", bound="Settings")
S_contra = TypeVar("S_contra", bound="Settings", contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A1 = TypeVar("A1")
A2 = TypeVar("A2")
A3 = TypeVar("A3")
A4 = TypeVar("A4")


@dataclasses.dataclass(frozen=True)
class Convert:
    """An annotation that converts the value that is given, before it is checked.

    Args:
        function: returns the converted value, or the same value if it cannot convert it.
    """

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, hint: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(self.function, handler(hint))


class _ByProgram:
    """The annotation :data:`BY_PROGRAM`."""


BY_PROGRAM: Final = _ByProgram()
"""An annotation of a setting that a program computes from others, such as the seed of a buffer.

Command lines do not offer it, so that nobody sets what the program then overwrites."""


def _as_real(value: Any) -> Any:
    # numpy's numbers too; an integer that no float can hold is refused by the check that follows.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _as_whole(value: Any) -> Any:
    # 1e9 and 1_000_000_000 mean the same to the author of a config.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | float):
        return value
    return int(value) if value == value // 1 else value


def _as_tuple(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


AS_TUPLE: Final = Convert(_as_tuple)
"""Lets a tuple be given as a list or an array."""
_Real: Final = Convert(_as_real)
_Int: Final = Convert(_as_whole)

Number: TypeAlias = Annotated[float, _Real]
"""A finite number."""
Positive: TypeAlias = Annotated[float, Gt(0), _Real]
"""A positive finite number."""
NonNegative: TypeAlias = Annotated[float, Ge(0), _Real]
"""A finite number of at least 0."""
Fraction: TypeAlias = Annotated[float, Ge(0), Le(1), _Real]
"""A number from 0 to 1."""
Whole: TypeAlias = Annotated[int, Ge(0), _Int]
"""An integer of at least 0; 1e6 is taken for 1000000."""
Count: TypeAlias = Annotated[int, Ge(1), _Int]
"""An integer of at least 1; 1e6 is taken for 1000000."""
Counts: TypeAlias = Annotated[tuple[Count, ...], AS_TUPLE]
"""Integers of at least 1 in a tuple, list or array; kept as a tuple."""
Numbers: TypeAlias = Annotated[tuple[Number, ...], AS_TUPLE]
"""Numbers in a tuple, list or array; kept as a tuple."""
Options: TypeAlias = Annotated[Mapping[str, Any], Convert(deepcopy)]
"""Options of something that checks them itself, such as a network, by name."""


class _Signature:
    """The signature of a class of settings: its fields, with their types but without ranges."""

    def __get__(self, instance: Settings | None, cls: type[Settings]) -> inspect.Signature:
        hints = typing.get_type_hints(cls)
        parameters = [
            inspect.Parameter(
                name,
                _kind(cls, name),
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=hints[name],
            )
            for name, default in (_defaults(cls) if dataclasses.is_dataclass(cls) else {}).items()
        ]
        return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _kind(cls: type[Settings], name: str) -> Any:
    by_name = cls.__dataclass_fields__[name].kw_only
    return inspect.Parameter.KEYWORD_ONLY if by_name else inspect.Parameter.POSITIONAL_OR_KEYWORD


class _Documented(str):
    """The docstring of a class that takes settings: what is written, and what its settings mean.

    The whole is composed when somebody asks for it, because that reads the source of the settings.
    """

    settings: type[Settings] | None = None
    """The class of the settings; None: the class that is documented."""

    def __get__(self, instance: object, cls: type) -> str:
        return _documented(str(self), self.settings or cls)


def _documented(written: str, settings: type[Settings]) -> str:
    return with_arguments(written, {info.name: info.explanation for info in describe(settings)})


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class Settings:
    """The base class of settings; a subclass declares fields, and is a frozen dataclass.

    Text is not taken for a number, nor True for 1; an integer is fine where a number is wanted. A
    subclass gives an inherited field another default by a plain assignment, ``batch_size = 32``; a
    type checker then takes the type of the value, so repeat the annotation of a union. Settings are
    given by keyword; one that is declared with ``dataclasses.field(kw_only=False)`` also by
    position.
    ``__post_init__`` refuses combinations, by a :class:`ConfigError`; call ``super()`` in it.

    Raises:
        ConfigError: for an unknown name, with the nearest known one, a wrong type or a value out
            of range, and for a setting that is missing.

    Example:
        >>> class Adam(Settings):
        ...     learning_rate: Positive = 1e-3
        >>> Adam(learning_rate=1).learning_rate
        1.0
        >>> Adam(learning_rate=-1)
        Traceback (most recent call last):
        dmiddleware.errors.ConfigError: Adam: learning_rate must be a positive number, got -1
    """

    __pydantic_config__: ClassVar[Any] = {
        "strict": True,
        "extra": "forbid",
        "allow_inf_nan": False,
        "validate_default": True,
        "arbitrary_types_allowed": True,
    }
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __signature__: ClassVar[Any] = _Signature()

    raises: ClassVar[type[DMiddlewareError]] = ConfigError
    """The error for a wrong name or value."""
    exclusive: ClassVar[tuple[str, ...]] = ()
    """Settings of which at most one is not None; giving one takes back the default of another."""
    _declares: ClassVar[frozenset[str]] = frozenset()
    _types: ClassVar[dict[str, Any]]
    _validates: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass takes inherited fields from the base that comes first, even those that it
        # only inherits itself; here, the class counts that declares them, as for any attribute.
        bases = [base for base in cls.__mro__[:0:-1] if issubclass(base, Settings)]
        nearest = {name: base for base in bases for name in _declared_by(base)}
        hints = cls.__annotations__ = inspect.get_annotations(cls)
        declares = hints.keys() | (vars(cls).keys() & nearest.keys())
        for name in nearest.keys() - hints.keys():
            hints[name] = _hints(nearest[name])[name]
            if name not in declares:
                setattr(cls, name, copy(nearest[name].__dataclass_fields__[name]))
        dataclasses.dataclass(frozen=True, kw_only=True, init=False)(cls)
        cls._declares = frozenset(declares & _fields(cls).keys())
        cls.__doc__ = _Documented(vars(cls)["__doc__"])

    def __init__(self, /, *args: Any, **given: Any) -> None:
        _fill(self, _named(type(self), args) | given, type(self).__name__, str)

    def __post_init__(self) -> None:
        """Refuse impossible combinations, with :meth:`require`."""
        chosen = [name for name in self.exclusive if getattr(self, name) is not None]
        for name in chosen[1:]:
            self.require(False, name, f"None with {chosen[0]}={getattr(self, chosen[0])}")

    def require(self, holds: bool, name: str, wanted: str) -> None:
        """Refuse the value of a setting unless it goes with the others.

        Args:
            holds: whether it does.
            name: the name of the setting.
            wanted: what it must be, for the message.

        Raises:
            ConfigError: with the path, the value and what is wanted.
        """
        if not holds:
            raise _Refused(name, wanted, getattr(self, name))


def _named(cls: type[Settings], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the settings that are given by position, by name."""
    names = [name for name, field in _fields(cls).items() if not field.kw_only]
    if len(args) > len(names):
        raise TypeError(
            f"{cls.__name__} takes at most {len(names)} settings by position, got {len(args)}; "
            "give the others by name"
        )
    return dict(zip(names, args, strict=False))


class _Refused(ConfigError):
    """A value does not go with others: its name, what is wanted, and the value."""


def cleared_by(cls: type[Settings], given: Mapping[str, Any]) -> dict[str, None]:
    """Return the settings whose defaults do not hold beside given ones, each as None.

    Args:
        cls: the class of the settings.
        given: values by name.
    """
    chosen = [name for name in cls.exclusive if given.get(name) is not None]
    return dict.fromkeys(cls.exclusive if chosen else ())


def _declared_by(cls: type) -> frozenset[str]:
    """Return the fields that a class itself declares, or gives another default."""
    declares: frozenset[str] = vars(cls).get("_declares", frozenset())
    return declares


def made_from(
    cls: type[S],
    given: Mapping[str, Any],
    *,
    owner: str = "",
    path_of: Callable[[str], str] = str,
) -> S:
    """Return settings, with other words in messages than those of the constructor.

    Args:
        cls: the class of the settings.
        given: the values by name.
        owner: what messages say has the settings; empty: the class.
        path_of: returns what messages call a setting.

    Raises:
        ConfigError: as :class:`Settings` describes.
    """
    settings = object.__new__(cls)
    _fill(settings, given, owner or cls.__name__, path_of)
    return settings


def _fill(
    settings: Settings, given: Mapping[str, Any], owner: str, path_of: Callable[[str], str]
) -> None:
    """Set the fields of new settings to checked values; :func:`made_from` has the arguments."""
    from pydantic import ValidationError
    from pydantic_core import ArgsKwargs

    cls = type(settings)
    try:
        arguments = ArgsKwargs((), {**cleared_by(cls, given), **given})
        _validator(cls).validate_python(arguments, self_instance=settings)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        cause = problems[0].get("ctx", {}).get("error")
        if isinstance(cause, Exception) and not problems[0]["loc"] and type(cause) is not _Refused:
            raise cause from None  # an error of __post_init__
        problem = _in_words(cls, problems, given, path_of)
        raise cls.raises(f"{owner}: {problem}") from None


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return an argument, checked and converted as a setting of this type is.

    Args:
        name: its name, for the message.
        value: what was passed.
        hint: the type, such as :data:`Count`.

    Raises:
        ConfigError: with the value and what is allowed.

    Example:
        >>> checked("env_num", 0, Count)
        Traceback (most recent call last):
        dmiddleware.errors.ConfigError: env_num must be an integer ≥ 1, got 0
    """
    from pydantic import ValidationError

    try:
        return _adapter(hint).validate_python(value)
    except ValidationError:
        words = values_in_words(hint)
        raise ConfigError(
            f"{name} must be {words}, got {shown(value, is_number=_wants_number(words))}"
        ) from None


class _FromSettings(Protocol[P, S_contra, R_co]):
    """A function of settings, with those that differ by keyword; or of their fields."""

    @overload
    def __call__(self, settings: S_contra, /, **changes: Any) -> R_co: ...

    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class _TakesSettings(Protocol[P, S]):
    """Replaces a function's last parameter, its settings, by their fields."""

    @overload
    def __call__(self, function: Callable[[S], R], /) -> _FromSettings[P, S, R]: ...

    @overload
    def __call__(self, function: Callable[[A1, S], R], /) -> Callable[Concatenate[A1, P], R]: ...

    @overload
    def __call__(
        self, function: Callable[[A1, A2, S], R], /
    ) -> Callable[Concatenate[A1, A2, P], R]: ...

    @overload
    def __call__(
        self, function: Callable[[A1, A2, A3, S], R], /
    ) -> Callable[Concatenate[A1, A2, A3, P], R]: ...


@overload
def takes_options(  # type: ignore[overload-overlap]  # a class of settings is a function, too
    settings: Callable[P, S], /
) -> _TakesSettings[P, S]: ...


@overload
def takes_options(function: Callable[P, R], /) -> Callable[P, R]: ...


def takes_options(subject: Callable[..., Any], /) -> Any:
    """Let a constructor, or a function, refuse unknown keyword arguments in words.

    The message names the argument that was meant, or what has the setting. Without it, Python would
    raise a TypeError that says only that the argument is unexpected.

    With a class of settings, ``@takes_options(CounterSettings)``, the last parameter is
    ``settings``. Callers pass the fields by keyword instead. A class that is :class:`TakesSettings`
    is also built from an object of the settings; a function without other parameters takes the
    object by position, and what differs from it by keyword. Type checkers know all of this; they
    take the parameters before ``settings`` by position.

    Args:
        subject: the constructor or function; or the class of its settings.

    Raises:
        ConfigError: by the constructor, for an unknown keyword, and as of :class:`Settings`, with
            the name of the class that is built.

    Example:
        >>> class CounterSettings(Settings):
        ...     start: Whole = 0
        ...     step: Count
        >>> class Counter(TakesSettings[CounterSettings]):
        ...     @takes_options(CounterSettings)
        ...     def __init__(self, name: str, settings: CounterSettings) -> None:
        ...         self.settings = settings
        >>> Counter("rows", step=2).settings
        CounterSettings(start=0, step=2)
        >>> Counter.of(CounterSettings(step=2), "rows", start=1).settings
        CounterSettings(start=1, step=2)
        >>> Counter("rows", step=0)
        Traceback (most recent call last):
        dmiddleware.errors.ConfigError: Counter: step must be an integer ≥ 1, got 0
    """
    if isinstance(subject, type) and issubclass(subject, Settings):
        return functools.partial(_with_options, cls=subject)
    return _with_options(subject, cls=None)


def _with_options(function: Callable[..., R], *, cls: type[Settings] | None) -> Callable[..., R]:
    """Return a function that takes its parameters, or its settings by their fields."""
    accepted = inspect.signature(function).parameters
    parameters = {name: accepted[name] for name in accepted if not cls or name != "settings"}
    fields = inspect.signature(cls).parameters if cls else {}
    names = [name for name in (*parameters, *fields) if name != "self"]
    is_method = "self" in parameters
    declare(function.__qualname__.removesuffix(".__init__"), names)

    @functools.wraps(function)
    def with_options(*args: Any, **options: Any) -> R:
        owner = type(args[0]).__name__ if is_method else function.__name__
        for name in options.keys() - accepted.keys() - fields.keys():
            raise ConfigError(unknown_option(owner, name, names))
        if cls is None:
            return function(*args, **options)
        values = {name: options.pop(name) for name in fields if name in options}
        args, further = args[: len(parameters)], args[len(parameters) :]
        if further and isinstance(further[0], Settings):
            if is_method:
                raise ConfigError(f"{owner}: write {owner}.of(settings, ...), settings first")
            options["settings"], further = further[0], further[1:]
        values = _named(cls, further) | values
        options["settings"] = _changed(cls, options.get("settings"), values, owner=owner)
        return function(*args, **options)

    if cls is None:
        return with_options
    signature = inspect.signature(function)
    signature = signature.replace(parameters=[*parameters.values(), *fields.values()])
    with_options.__signature__ = signature  # type: ignore[attr-defined]
    if is_method:
        return _Constructor(with_options, cls)  # type: ignore[return-value]
    with_options.__doc__ = _documented(function.__doc__ or "", cls)
    return with_options


def _changed(
    cls: type[Settings], settings: object, changes: dict[str, Any], *, owner: str
) -> Settings:
    """Return settings with what differs; new settings if there are none."""
    if settings is None:
        return made_from(cls, changes, owner=owner)
    if not isinstance(settings, cls):
        raise ConfigError(f"{owner}: settings must be a {cls.__name__}, got {settings!r}")
    return made_from(cls, vars(settings) | changes, owner=owner) if changes else settings


class TakesSettings(Generic[S]):
    """The base of classes whose constructor :func:`takes_options` of the settings ``S``."""

    @overload
    @classmethod
    def of(cls: Callable[..., R], settings: S, /, **changes: Any) -> R: ...

    @overload
    @classmethod
    def of(
        cls: Callable[Concatenate[A1, ...], R], settings: S, argument: A1, /, **changes: Any
    ) -> R: ...

    @overload
    @classmethod
    def of(
        cls: Callable[Concatenate[A1, A2, ...], R],
        settings: S,
        first: A1,
        second: A2,
        /,
        **changes: Any,
    ) -> R: ...

    @classmethod
    def of(cls, settings: Any, /, *args: Any, **changes: Any) -> Any:
        """Build an object from its settings, as a program has them.

        Args:
            settings: the options.
            *args: the arguments that come before the options in the constructor.
            **changes: options that differ from ``settings``.

        Raises:
            ConfigError: for settings of another class, and as by the constructor.

        Example:
            >>> from dmiddleware.data import TensorBuffer, TensorBufferSettings
            >>> TensorBuffer.of(TensorBufferSettings(60_000), seed=0).size
            60000
        """
        return cls(*args, settings=settings, **changes)  # type: ignore[call-arg]


class _Constructor:
    """An ``__init__`` that takes settings, until its class is made, which then documents them."""

    def __init__(self, function: Callable[..., Any], settings: type[Settings]) -> None:
        self._function = function
        self._settings = settings

    def __set_name__(self, cls: type, name: str) -> None:
        setattr(cls, name, self._function)
        documented = _Documented(cls.__doc__ or "")
        documented.settings = self._settings
        cls.__doc__ = documented


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    kind = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    # A dataclass has a configuration of its own.
    config = None if dataclasses.is_dataclass(kind) else Settings.__pydantic_config__
    return TypeAdapter(hint, config=config)


def _validator(cls: type[Settings]) -> Any:
    if "_validates" not in vars(cls):
        from pydantic import TypeAdapter

        _fields(cls)
        cls._validates = TypeAdapter(cls).validator
    return cls._validates


def _in_words(
    cls: type[Settings],
    errors: list[ErrorDetails],
    given: Mapping[str, Any],
    path_of: Callable[[str], str],
) -> str:
    """Translate the errors of pydantic: path, value, what is allowed, and the nearest name."""
    problems: dict[str, str] = {}
    hints = _hints(cls)
    for invalid in errors:
        name = str(invalid["loc"][0]) if invalid["loc"] else ""
        cause = invalid.get("ctx", {}).get("error")
        if invalid["loc"] and name not in _fields(cls):
            problem = f"unknown setting {name}; {unknown_name(name, map(path_of, _fields(cls)))}"
        elif isinstance(cause, _Refused):
            name, expected, value = cause.args
            problem = f"{path_of(name)} must be {expected}, got {value!r}"
        elif cause is not None:
            problem = f"{path_of(name)}: {cause}"
        elif invalid["type"].startswith("missing") and len(invalid["loc"]) == 1:
            problem = f"{path_of(name)} must be given: {values_in_words(hints[name])}"
        else:
            words = values_in_words(hints[name])
            value = given[name] if name in given else _defaults(cls)[name]
            got = shown(value, is_number=_wants_number(words))
            problem = f"{path_of(name)} must be {words}, got {got}"
            near = nearest(value, _choices(hints[name]), n=1) if isinstance(value, str) else []
            problem += f"; did you mean {near[0]!r}?" if near else ""
        problems.setdefault(name, problem)
    return "; ".join(problems.values())


def _choices(hint: Any) -> list[str]:
    """Return the texts that a type hint allows by a ``Literal``."""
    if typing.get_origin(hint) is Literal:
        return [choice for choice in typing.get_args(hint) if isinstance(choice, str)]
    return [choice for part in typing.get_args(hint) for choice in _choices(part)]


def shown(value: Any, *, is_number: bool) -> str:
    """Return a wrong value for a message, with a hint if it is the text of a wanted number.

    Args:
        value: the value.
        is_number: whether a number was wanted.
    """
    if isinstance(value, str) and is_number:
        try:
            float(value)
        except ValueError:
            pass
        else:
            return f"the text {value!r}; YAML reads 1e-4 as text, so write 1.0e-4, without quotes"
    return repr(value)


def _wants_number(words: str) -> bool:
    return "number" in words or "integer" in words


def values_in_words(hint: Any) -> str:
    """Say which values a type hint allows, such as "a number from 0 to 1".

    Args:
        hint: the annotation of a setting. An item of its ``Annotated`` that has an attribute
            ``words`` says it itself.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        for item in arguments[1:]:
            if hasattr(item, "words"):
                return str(item.words)
        limits = [item for item in arguments[1:] if isinstance(item, Gt | Ge | Lt | Le)]
        return _limited(arguments[0], limits) if limits else values_in_words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(values_in_words, arguments))
    if origin is Literal:
        return f"{'one of ' if len(arguments) > 1 else ''}{', '.join(map(repr, arguments))}"
    if origin is tuple and arguments[-1] is ...:
        return f"a list of {_plural(values_in_words(arguments[0]))}"
    return _WORDS.get(origin or hint) or f"a {getattr(hint, '__name__', hint)}"


_WORDS: Final[Mapping[Any, str]] = {
    bool: "True or False",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    Mapping: "a dictionary",
    Path: "a pathlib.Path",
    Any: "anything",
    types.NoneType: "None",
}


def _limited(kind: Any, limits: list[Any]) -> str:
    """Say which numbers keep within limits."""
    number = "an integer" if kind is int else "a number"
    bounds: dict[type, Any] = {}
    for limit in limits:
        for name in ("gt", "ge", "lt", "le"):
            if hasattr(limit, name):
                bounds[type(limit)] = f"{getattr(limit, name):g}"
    low = bounds.get(Ge, bounds.get(Gt))
    high = bounds.get(Le, bounds.get(Lt))
    if Gt in bounds and low == "0" and high is None:
        return number.replace("a number", "a positive number").replace("an i", "a positive i")
    if Ge in bounds and Le in bounds:
        return f"{number} from {low} to {high}"
    words = [f"above {low}" if Gt in bounds else f"≥ {low}"] if low is not None else []
    if high is not None:
        words.append(f"up to {high}" if Le in bounds else f"below {high}")
    return f"{number} {(', ' if Le in bounds else ' and ').join(words)}"


def _plural(words: str) -> str:
    words = words.removeprefix("a finite ").removeprefix("an ").removeprefix("a ")
    plural = re.sub(r"\b(integer|number)\b", r"\1s", words, count=1)
    return f"{words}s" if plural == words else plural


@dataclasses.dataclass(frozen=True)
class SettingInfo:
    """The declaration of a setting.

    Attributes:
        name: its name.
        hint: its type, with the range.
        default: its default; ``dataclasses.MISSING``: it must be given.
        words: which values it takes, in words.
        meaning: the sentence below its declaration; empty: there is none.
        by_program: whether it is declared :data:`BY_PROGRAM`, or is an object, which is left out of
            :func:`plain_values`; command lines do not offer it.
    """

    name: str
    hint: Any
    default: Any
    words: str
    meaning: str
    by_program: bool

    @property
    def explanation(self) -> str:
        """The meaning, and the range of numbers."""
        has_range = "number" in self.words or "integer" in self.words
        if not has_range or self.words in ("a finite number", "an integer"):
            return self.meaning
        return f"{self.meaning} {self.words[:1].upper()}{self.words[1:]}.".strip()


def hints_of(cls: type[Settings]) -> dict[str, Any]:
    """Return the types of the settings of a class, with their ranges, by name."""
    hints = _hints(cls)
    return {name: hints[name] for name in _fields(cls)}


def describe(cls: type[Settings]) -> list[SettingInfo]:
    """Return what a class declares, in order; base classes first.

    This reads the source of the classes, for the sentences below the settings.
    """
    hints, fields = _hints(cls), _fields(cls)
    sentences: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if _declared_by(base):
            sentences |= sentences_below(base)
    return [
        SettingInfo(
            name,
            hints[name],
            default,
            values_in_words(hints[name]),
            sentences.get(name, ""),
            BY_PROGRAM in getattr(hints[name], "__metadata__", ()) or not fields[name].repr,
        )
        for name, default in _defaults(cls).items()
    ]


def settings_table(cls: type[Settings]) -> str:
    """Return a Markdown table of settings: name, default, values and meaning."""
    rows = (
        f"| `{info.name}` | {_default_in_words(info.default)} | {info.words} | {info.meaning} |"
        for info in describe(cls)
    )
    return "\n".join(["| name | default | values | meaning |", "| --- | --- | --- | --- |", *rows])


def _default_in_words(default: Any) -> str:
    if default is MISSING:
        return "must be given"
    return f"`{default}`" if dataclasses.is_dataclass(default) else f"`{default!r}`"


def plain_values(value: Any) -> Any:
    """Return settings, or any config, as YAML and JSON can write it.

    Arrays, tuples and sets become lists, settings and other dataclasses become dictionaries;
    members of an Enum, classes and functions become their names. :func:`from_plain` reads values
    back by their types. Fields that are objects, declared with
    ``dataclasses.field(repr=False)``, are left out. Whatever the values are, this raises nothing:
    an object that has no text is described in angle brackets.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    with contextlib.suppress(Exception):  # of the methods of a user's class
        return _plain(value)
    return described(value)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return plain_values(value.value) if value.name is None else value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.repr
        }
    if isinstance(value, Mapping):
        return {str(plain_values(key)): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_values(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if hasattr(value, "tolist"):  # an array, or a number of numpy
        return plain_values(value.tolist())
    if isinstance(value, functools.partial):
        return name_of(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        return described(value)
    return without_addresses(str(value))


def from_plain(hint: Any, value: Any) -> Any:
    """Return a value as a setting of a type takes it, from what :func:`plain_values` wrote.

    A value that fits already is returned as it is, and so is one that does not fit the type at all,
    for the check of the setting.

    Args:
        hint: the type.
        value: plain data, as YAML and JSON read it.
    """
    kinds = members_of(hint)
    if any(_fits(kind, value) for kind in kinds):
        return value
    for kind in kinds:
        with contextlib.suppress(Exception):  # it does not fit, or the class refuses it
            read = _read(kind, value)
            if _fits(kind, read):
                return read
    return value


def values_from_plain(cls: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for settings, from what :func:`plain_values` made of such settings.

    Args:
        cls: the class of the settings.
        values: plain data by name; names that are not settings are left to the check of the class.
    """
    hints = hints_of(cls)
    return {
        name: from_plain(hints[name], value) if name in hints else value
        for name, value in values.items()
    }


def members_of(hint: Any) -> list[Any]:
    """Return the types of a union, without their annotations."""
    if typing.get_origin(hint) is Annotated:
        return members_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in members_of(part)]
    return [hint]


def _fits(kind: Any, value: Any) -> bool:
    from pydantic import TypeAdapter, ValidationError

    if dataclasses.is_dataclass(kind):
        return isinstance(value, typing.cast(type, kind))
    adapter = TypeAdapter(kind) if typing.is_typeddict(kind) else _adapter(kind)
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return not hasattr(kind, "_fields") or isinstance(value, kind)


def _read(kind: Any, value: Any) -> Any:
    """Return plain data as one type, which is not a union, has it."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Literal:
        return next(choice for choice in arguments if plain_values(choice) == value)
    if isinstance(value, Mapping):
        return _read_fields(origin, arguments, value)
    if isinstance(value, list):
        return _read_items(origin, arguments, value)
    if origin is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if issubclass(origin, enum.Enum):
        return _read_member(origin, value)
    if isinstance(value, str):
        return _read_text(origin, value)
    return value


def _read_fields(origin: Any, arguments: tuple[Any, ...], value: Mapping[Any, Any]) -> Any:
    if (
        issubclass(origin, Settings)
        or dataclasses.is_dataclass(origin)
        or typing.is_typeddict(origin)
    ):
        hints = typing.get_type_hints(origin, include_extras=True)
        return origin(**{name: from_plain(hints[name], item) for name, item in value.items()})
    key, item = arguments
    return {_read_key(key, name): from_plain(item, part) for name, part in value.items()}


def _read_key(hint: Any, text: Any) -> Any:
    """Return a key, which is always text in plain data."""
    key = from_plain(hint, text)
    return key if _fits(hint, key) else _adapter(hint).validate_python(text, strict=False)


def _read_items(origin: Any, arguments: tuple[Any, ...], value: list[Any]) -> Any:
    if hasattr(origin, "_fields"):
        hints = typing.get_type_hints(origin, include_extras=True)
        return origin(*map(from_plain, hints.values(), value))
    if origin is tuple and arguments[-1:] != (...,):
        return tuple(map(from_plain, arguments, value)) if arguments else tuple(value)
    items = [from_plain(arguments[0], item) for item in value] if arguments else value
    return items if inspect.isabstract(origin) else origin(items)


def _read_member(kind: type[enum.Enum], value: Any) -> enum.Enum:
    """Return a member by its name, or several of a flag; one without a name by its value."""
    if isinstance(value, str) and all(name in kind.__members__ for name in value.split("|")):
        return functools.reduce(operator.or_, (kind[name] for name in value.split("|")))
    return kind(value)


def _read_text(kind: Any, text: str) -> Any:
    if kind is bytes:
        return text.encode("latin-1")
    if kind in (bool, int, float):
        return text  # text is not taken for a number
    with contextlib.suppress(Exception):
        return _adapter(kind).validate_python(text, strict=False)
    return kind(text)


def _defaults(cls: type[Settings]) -> dict[str, Any]:
    return {
        name: field.default if field.default_factory is MISSING else field.default_factory()
        for name, field in _fields(cls).items()
    }


def _fields(cls: type[Settings]) -> dict[str, dataclasses.Field[Any]]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for field in fields.values():  # cloudpickle copies MISSING, which is compared by identity
        for name in ("default", "default_factory"):
            if isinstance(getattr(field, name), type(MISSING)):
                setattr(field, name, MISSING)
    return fields


def _hints(cls: type[Settings]) -> dict[str, Any]:
    if "_types" not in vars(cls):
        cls._types = typing.get_type_hints(cls, include_extras=True)
    return cls._types
