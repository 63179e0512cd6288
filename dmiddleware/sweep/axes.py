"""The settings that a sweep varies, read from texts such as ``learning_rate=1e-4,3e-4``."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import unknown_name

__all__ = ["Axis", "Choices", "Span", "Values", "folder_name", "grid", "option_words", "read_axes"]

Values: TypeAlias = Mapping[str, str]
"""The values of a run: texts by the dotted names of options."""

_INTEGERS: Final = re.compile(r"(-?\d+):(-?\d+)")
_SPAN: Final = re.compile(r"(log:)?([^:]+):([^:]+)")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.+-]+")
_LONGEST_NAME: Final = 120
_OPEN, _CLOSE = "([{", ")]}"
_FLAGS: Final = {"true": "", "false": "no-"}


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """Values to try, one after the other.

    Attributes:
        texts: the values, as a command line has them.
        low: the lowest one, if they are the integers of a range; None: they are a list.
    """

    texts: tuple[str, ...]
    low: int | None = None


class Span(msgspec.Struct, frozen=True, tag="span"):
    """Numbers between two limits, from which a sampler draws.

    Attributes:
        low: the lower limit.
        high: the upper one.
        scale: whether their logarithms are drawn instead.
    """

    low: float
    high: float
    scale: Literal["linear", "log"]


class Axis(msgspec.Struct, frozen=True):
    """An option that a sweep varies.

    Attributes:
        option: its dotted name.
        values: what it takes.
        is_flag: whether the command line has the two flags ``--x`` and ``--no-x`` for it.
    """

    option: str
    values: Choices | Span
    is_flag: bool = False

    def examples(self) -> tuple[str, ...]:
        """Return the values; of a span, its limits."""
        if isinstance(self.values, Choices):
            return self.values.texts
        return str(self.values.low), str(self.values.high)


def read_axes(texts: Iterable[str], options: Mapping[str, bool]) -> list[Axis]:
    """Read texts such as ``policy.learning_rate=1e-4,3e-4`` and ``seed=0:5``.

    The last part of a name is enough if no other option has it.

    Args:
        texts: what ``--set`` was given.
        options: the dotted names of the program's options, and whether each is a flag.

    Raises:
        ConfigError: for a name that does not exist or means several options, or is given twice, and
            for values that have no meaning.
    """
    axes: dict[str, Axis] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            raise ConfigError(f"--set {text}: write NAME=VALUES, such as learning_rate=1e-4,3e-4")
        option = _resolved(name, options)
        if option in axes:
            raise ConfigError(f"--set {text}: {option} is set twice; give all values in one --set")
        axes[option] = Axis(option, _read_values(text, values), options[option])
    return list(axes.values())


def _resolved(name: str, options: Iterable[str]) -> str:
    """Return the full name of an option."""
    options_of_program = list(options)
    wanted_name = name.strip().lstrip("-").replace("-", "_")
    if wanted_name in options_of_program:
        return wanted_name
    matches = [option for option in options_of_program if option.endswith(f".{wanted_name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"--set {name}: name one of {', '.join(matches)}")
    near = (
        options_of_program
        if "." in wanted_name
        else {*options_of_program, *(option.rpartition(".")[2] for option in options_of_program)}
    )
    raise ConfigError(f"--set {name}: unknown option; {unknown_name(wanted_name, near)}")


def _read_values(text: str, values: str) -> Choices | Span:
    if match := _INTEGERS.fullmatch(values):
        low, end = int(match[1]), int(match[2])
        if low >= end:
            raise ConfigError(f"--set {text}: the range is empty, because its end does not count")
        return Choices(tuple(map(str, range(low, end))), low)
    if (match := _SPAN.fullmatch(values)) and (span := _span(match[2], match[3], match[1])):
        if not span.low < span.high or (span.scale == "log" and span.low <= 0):
            raise ConfigError(f"--set {text}: write LOW:HIGH, or log:LOW:HIGH with 0 < LOW")
        return span
    parts = [part.strip() for part in _split(values)]
    if "" in parts or len(set(parts)) < len(parts):
        raise ConfigError(f"--set {text}: a value is empty, or is given twice")
    return Choices(tuple(parts))


def _span(low: str, high: str, log: str | None) -> Span | None:
    try:
        return Span(float(low), float(high), "log" if log else "linear")
    except ValueError:
        return None


def _split(text: str) -> Iterator[str]:
    """Split at commas, except for those in brackets, as in ``linear(1e-3, 0, 1e5)``."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def grid(axes: Sequence[Axis]) -> list[Values]:
    """Return all combinations; the last option changes fastest.

    Raises:
        ConfigError: if an option has a span, which has no list of values.
    """
    lists = []
    for axis in axes:
        if isinstance(axis.values, Span):
            raise ConfigError(
                f"--set {axis.option}: a range of numbers needs --sampler optuna; a grid takes a "
                "list, such as 1e-4,3e-4, or integers, such as 0:5"
            )
        lists.append([(axis.option, text) for text in axis.values.texts])
    return [dict(chosen) for chosen in itertools.product(*lists)]


def option_words(axes: Iterable[Axis], values: Values) -> list[str]:
    """Return values as the arguments of the program.

    Raises:
        ConfigError: for a flag that is neither true nor false.
    """
    words: list[str] = []
    for axis in axes:
        *groups, name = axis.option.replace("_", "-").split(".")
        value = values[axis.option]
        if not axis.is_flag:
            words += [f"--{axis.option.replace('_', '-')}", value]
        elif value.lower() in _FLAGS:
            words.append(f"--{'.'.join([*groups, _FLAGS[value.lower()] + name])}")
        else:
            raise ConfigError(f"--set {axis.option}: must be true or false, got {value!r}")
    return words


def folder_name(values: Values) -> str:
    """Return a name for the folder of a run, such as ``learning_rate-1e-4_seed-0``."""
    lasts = [option.rpartition(".")[2] for option in values]
    parts = []
    for (option, value), last in zip(values.items(), lasts, strict=True):
        name = last if lasts.count(last) == 1 else option
        parts.append(f"{name}-{_UNSAFE.sub('-', value).strip('-') or 'empty'}")
    text = "_".join(parts)
    if len(text) <= _LONGEST_NAME:
        return text
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]
    return f"{text[:_LONGEST_NAME]}-{digest}"
