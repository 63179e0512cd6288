"""Configs: options with defaults, ranges and meanings, merged along the class hierarchy.

A class lists its options once, in the attribute ``config``. Its defaults, the checks of given
values and the tables in the reference all come from that list.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final

from annotated_types import Ge, Gt
from easydict import EasyDict

from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import hint_for
from dmiddleware.registry import nearest
from dmiddleware.schedule import Schedule
from dmiddleware.settings import (
    Count,
    Fraction,
    Number,
    Positive,
    Whole,
    checked,
    shown,
    values_in_words,
)

__all__ = [
    "Configurable",
    "NamedValues",
    "READ_ELSEWHERE",
    "Option",
    "Range",
    "above",
    "anything",
    "at_least",
    "check_value",
    "config_of",
    "config_table",
    "count",
    "defaults_of",
    "entries_of",
    "fraction",
    "merge_config",
    "number",
    "one_of",
    "optional",
    "options_of",
    "positive",
    "range_of",
    "scheduled",
    "is_scheduled",
    "mapping",
    "switch",
    "text",
    "update_entries",
    "whole",
]


_logger = logging.getLogger(__name__)

READ_ELSEWHERE: Final = ("type", "import_names", "exp_name", "instance_name", "cfg_type")
"""Keys at the top of a config that registries and workers read."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that an option may have.

    Args:
        words: the values in words, such as "a positive number".
        fits: returns whether a value is one of them; may raise a :class:`ConfigError` that says
            what is wrong with it.
        whole: whether the numbers among them are integers; 1e6 is stored as 1000000.
    """

    words: str
    fits: Callable[[Any], bool]
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Option:
    """One entry of a config.

    Args:
        default: the value if none is given.
        range: the values that are accepted.
        meaning: one sentence for the reference.
    """

    default: Any
    range: Range
    meaning: str


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def range_of(hint: Any) -> Range:
    """Return the range of the values that a setting with this annotation takes.

    Args:
        hint: an annotation of :mod:`dmiddleware.settings`, such as ``Count``. Schedules are
            accepted as they are if the annotation allows schedules.
    """
    words = values_in_words(hint)
    is_scheduled = "schedule" in words

    def fits(value: Any) -> bool:
        if is_scheduled and isinstance(value, Schedule | Mapping):
            return True
        try:
            checked("", value, hint)
        except ConfigError:
            return False
        return True

    return Range(words, fits, whole=words.startswith("an integer"))


mapping = Range("a dictionary", lambda value: isinstance(value, Mapping))
"""A dictionary."""
switch = range_of(bool)
"""True or False."""
number = range_of(Number)
"""A finite number."""
text = range_of(str)
"""A string."""
anything = Range("anything", lambda value: True)
"""Any value."""
fraction = range_of(Fraction)
"""A number from 0 to 1."""
positive = range_of(Positive)
"""A positive finite number."""
whole = range_of(Whole)
"""An integer of at least 0."""
count = range_of(Count)
"""An integer of at least 1."""


def at_least(least: float) -> Range:
    """Return the range of the finite numbers from ``least`` up."""
    return range_of(Annotated[Number, Ge(least)])


def above(bound: float) -> Range:
    """Return the range of the finite numbers above ``bound``."""
    return range_of(Annotated[Number, Gt(bound)])


def one_of(*choices: object) -> Range:
    """Return the range of these values."""
    words = ", ".join(map(repr, choices))
    return Range(f"one of {words}" if len(choices) > 1 else words, lambda value: value in choices)


def optional(values: Range) -> Range:
    """Return the range of ``values`` and None."""

    def fits(value: Any) -> bool:
        return value is None or values.fits(value)

    return Range(f"{values.words} or None", fits, whole=values.whole)


def scheduled(values: Range, *, reach: Range | None = None) -> Range:
    """Return the range of an option that is one of ``values``, or a schedule of them.

    Args:
        values: the numbers that the option may be.
        reach: the values of its schedules, if they differ: a learning rate is positive, but may
            fall to 0.

    Returns:
        The range; its ``fits`` raises a :class:`ConfigError` for a schedule with another value.
    """
    of_schedule = values if reach is None else reach

    def fits(setting: Any) -> bool:
        if not isinstance(setting, Schedule | Mapping):
            return values.fits(setting)
        # The limit of an exponential schedule counts too: rounding may reach it.
        for value in Schedule.of(setting).bounds:
            if not of_schedule.fits(value):
                raise ConfigError(
                    f"each value of its schedule must be {of_schedule.words}, got {value}"
                )
        return True

    return _Scheduled(f"{values.words}, or a schedule", fits)


def is_scheduled(values: Range) -> bool:
    """Return whether a range is one of :func:`scheduled`."""
    return isinstance(values, _Scheduled)


class _Scheduled(Range):
    """The range of an option that may be a schedule."""


class Configurable:
    """A class that is configured by an EasyDict.

    A subclass lists its options in the class attribute ``config``, a nested dictionary of
    :class:`Option`. It can give a base class's option another default by stating the plain value.
    The user's config is merged into the defaults and checked.

    An entry may also be a plain value without a declared range; then a given value must have the
    default's type. A plain default of None accepts a value of any type, and None is accepted unless
    the default is True or False. ``config_open`` names paths whose dictionaries accept keys
    that the class does not know in advance. A class with ``config_strict = False`` keeps all
    unknown keys, with one warning.
    """

    config: ClassVar[dict[str, Any]] = {}
    config_open: ClassVar[tuple[str, ...]] = ()
    config_strict: ClassVar[bool] = True

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return a fresh copy of the defaults, merged from the base classes down.

        Returns:
            The defaults, with ``cfg_type`` set to the class's name and ``Dict``.
        """
        return defaults_of(cls)

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options by path, such as ``learn.batch_size``, in order of declaration."""
        return options_of(cls)

    @classmethod
    def merged_config(cls, cfg: Mapping[str, Any] | None = None) -> EasyDict:
        """Return the defaults with ``cfg`` merged in, checked.

        Args:
            cfg: the values that differ from the defaults.

        Raises:
            ConfigError: for an unknown key (with the nearest known one), a wrong type, or a value
                out of range.
        """
        merged = config_of(cls, cfg, strict=cls.config_strict)
        cls.check_config(merged)
        return merged

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible combinations; subclasses extend it with :func:`check_value`."""


def entries_of(owner: type) -> dict[str, Any]:
    """Return what a class and its bases declare in their attributes ``config``, merged."""
    merged: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        update_entries(merged, vars(base).get("config", {}))
    return merged


def defaults_of(owner: type) -> EasyDict:
    """Return the defaults of a class's config; see :class:`Configurable`."""
    return EasyDict({**_defaults(entries_of(owner)), "cfg_type": f"{owner.__name__}Dict"})


def options_of(owner: type) -> dict[str, Option]:
    """Return the options of a class by path, in order of declaration."""
    flat = _flat(entries_of(owner))
    return {path: entry for path, entry in flat if isinstance(entry, Option)}


def config_of(owner: type, cfg: Mapping[str, Any] | None, *, strict: bool = True) -> EasyDict:
    """Return a class's defaults with ``cfg`` merged in, checked one by one.

    Raises:
        ConfigError: as :func:`merge_config`.
    """
    open_paths: set[str] = set()
    for base in owner.__mro__:
        open_paths.update(vars(base).get("config_open", ()))
    return merge_config(
        {**entries_of(owner), "cfg_type": f"{owner.__name__}Dict"},
        cfg or {},
        owner=owner.__name__,
        open_paths=open_paths,
        strict=strict,
    )


class NamedValues(EasyDict):  # type: ignore[misc]
    """A dictionary by names that its owner does not choose, such as the parts of a space.

    Where a name is that of a method (``items``), the method stays what it is. Other names can be
    read as attributes, as in an ``EasyDict``.

    Args:
        values: the values, by name.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        dict.__init__(self, values or {})

    __setitem__ = dict.__setitem__
    update = dict.update
    setdefault = dict.setdefault
    pop = dict.pop

    def __setattr__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in self or name.startswith("__"):
            raise AttributeError(f"no value has the name {name!r}")
        return self[name]


def config_table(cls: type) -> str:
    """Return a Markdown table of a class's options: key, default, values and meaning."""
    rows = [
        f"| `{path}` | `{option.default!r}` | {option.range.words} | {option.meaning} |"
        for path, option in options_of(cls).items()
    ]
    return "\n".join(["| key | default | values | meaning |", "| --- | --- | --- | --- |", *rows])


def merge_config(
    default: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    owner: str = "config",
    open_paths: Iterable[str] = (),
    strict: bool = True,
) -> EasyDict:
    """Merge ``given`` into ``default`` and check it.

    Args:
        default: known keys, with an :class:`Option` or a plain default value each.
        given: the values that differ. At the top, what registries and workers read is accepted:
            ``type``, ``import_names``, ``exp_name``, ``instance_name`` and ``cfg_type``.
        owner: the name of what is configured, for messages.
        open_paths: dotted paths whose dictionaries accept any key.
        strict: False keeps unknown keys, with one warning.

    Raises:
        ConfigError: for an unknown key, a wrong type or a value out of range, with the key's full
            path; also if ``given`` is not a dictionary.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{owner}: the config must be a dictionary, got {given!r:.100}")
    merge = _Merge(owner, default, frozenset(open_paths), strict)
    merged = EasyDict(merge.into(default, given, ""))
    if merge.unknown:
        _logger.warning("%s keeps unknown keys: %s", owner, "; ".join(merge.unknown))
    return merged


def check_value(condition: bool, path: str, value: object, wanted: str) -> None:
    """Refuse the value at ``path`` unless ``condition`` holds.

    Raises:
        ConfigError: with the path, the value and what is wanted instead.
    """
    if not condition:
        raise ConfigError(f"{path} must be {wanted}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class _Merge:
    owner: str
    root: Mapping[str, Any]
    open_paths: frozenset[str]
    strict: bool
    unknown: list[str] = dataclasses.field(default_factory=list)

    def into(self, known: Mapping[str, Any], given: Mapping[str, Any], path: str) -> dict[str, Any]:
        merged = _defaults(known)
        for key, value in given.items():
            full = f"{path}{key}"
            if key in known:
                merged[key] = self._value(known[key], value, full)
            elif full in self.open_paths or self._leads_to_open(full):
                merged[key] = self._value({}, value, full)
            elif not path and key in READ_ELSEWHERE:
                merged[key] = value
            else:
                open_keys = [one for one in self.open_paths if one.startswith(path)]
                here = {**known, **{one[len(path) :].split(".")[0]: None for one in open_keys}}
                problem = f"unknown key {full}; {self._hint(full, here)}"
                if self.strict:
                    raise ConfigError(f"{self.owner}: {problem}")
                self.unknown.append(problem)
                merged[key] = copy.deepcopy(value)
        return merged

    def _value(self, entry: Any, value: Any, full: str) -> Any:
        default = entry.default if isinstance(entry, Option) else entry
        if full in self.open_paths or isinstance(entry, Mapping):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{self.owner}: {full} must be a dictionary, got {value!r}")
            if full in self.open_paths:
                for key in value if isinstance(entry, Mapping) else ():
                    if isinstance(entry.get(key), Option) and not isinstance(value[key], Mapping):
                        self._value(entry[key], value[key], f"{full}.{key}")
                return _deep_update(_defaults(default), value)
            return self.into(entry, value, f"{full}.")
        if isinstance(entry, Option):
            try:
                fits = entry.range.fits(value)
            except ConfigError as error:
                raise ConfigError(f"{self.owner}: {full}: {error}") from None
            if not fits:
                raise ConfigError(
                    f"{self.owner}: {full} must be {entry.range.words}, got "
                    + shown(value, is_number=_is_number(default))
                )
            is_whole = entry.range.whole
        else:
            _check_type(default, value, full, self.owner)
            is_whole = isinstance(default, int) and not isinstance(default, bool)
        return int(value) if is_whole and isinstance(value, float) else copy.deepcopy(value)

    def _leads_to_open(self, path: str) -> bool:
        return any(one.startswith(f"{path}.") for one in self.open_paths)

    def _hint(self, full: str, known: Mapping[str, Any]) -> str:
        section, _, key = full.rpartition(".")
        elsewhere = [path for path, _ in _flat(self.root) if path.rpartition(".")[2] == key]
        if elsewhere:
            return f"did you mean {elsewhere[0]}?"
        foreign = hint_for(key, (path for path, _ in _flat(self.root)))
        return foreign or _hint(key, map(str, known), f"{section}." if section else "")


def _hint(key: str, known: Iterable[str], prefix: str = "") -> str:
    names = sorted(known)
    near = nearest(key, names, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"known here are: {', '.join(names)}"


def _check_type(default: Any, value: Any, full: str, owner: str) -> None:
    # None disables an option that is a number; a switch is either on or off.
    is_off = value is None and not isinstance(default, bool)
    if default is None or is_off or _type_fits(default, value):
        return
    raise ConfigError(
        f"{owner}: {full} must be of type {type(default).__name__} like its default {default!r}, "
        f"got {shown(value, is_number=_is_number(default))} of type {type(value).__name__}"
    )


def _type_fits(default: Any, value: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, numbers.Integral):
        return _is_number(value) and float(value).is_integer()
    if isinstance(default, numbers.Real):
        return isinstance(value, numbers.Real)
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple)
    if callable(default):
        return callable(value)
    return isinstance(value, type(default))


def _defaults(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _defaults(entry)
        if isinstance(entry, Mapping)
        else copy.deepcopy(entry.default if isinstance(entry, Option) else entry)
        for key, entry in entries.items()
    }


def _flat(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, entry in entries.items():
        if isinstance(entry, Mapping):
            yield from _flat(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def update_entries(target: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Add what a class declares to what its base classes declare, in place."""
    for key, entry in entries.items():
        known = target.get(key)
        if isinstance(known, Mapping) and isinstance(entry, Mapping):
            target[key] = dict(known)
            update_entries(target[key], entry)
        elif isinstance(known, Option) and not isinstance(entry, Option):
            both = isinstance(known.default, Mapping) and isinstance(entry, Mapping)
            value = _deep_update(dict(known.default), entry) if both else entry
            target[key] = dataclasses.replace(known, default=value)
        else:
            target[key] = entry


def _deep_update(target: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in given.items():
        known = target.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            target[key] = _deep_update(dict(known), value)
        else:
            target[key] = copy.deepcopy(value)
    return target
